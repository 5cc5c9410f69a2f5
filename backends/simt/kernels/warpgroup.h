// The dialect's primitives for kernels whose warps have different parts: phases of barriers in shared memory, bulk copies
// that complete on them, and the products of a group of four warps, whose sums stay in its registers while it goes on.
//
// A group's product is 64 x N x 16. Its left operand is in registers: warp w has rows 16 w .. 16 w + 15 as the fragments
// of matrix.h say. The right one is in shared memory: N lines of 128 bytes (64 columns of K), eight lines from an address
// that is a multiple of 1,024, 16-byte chunk c of line l at c ^ l % 8; PTX calls this K-major with 128-byte swizzle.
// Sums: d[4 n + i] is c[i] of matrix.h for the right operand's lines 8 n .. 8 n + 7.
#pragma once
#if defined(HALMA_MUSA)
#error "MUSA: no known spelling of the products of warp groups and of copies that complete on a barrier"
#endif
#include "matrix.h"
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "products of warp groups are instructions of sm_90a alone"
#endif

#define GROUP_THREADS (4u * HALMA_WARP)

// ------------------------------------------------------------------------------------------------------- phases
// A barrier's phase ends once `count` have arrived and all the bytes that were announced are there.
DEVICE void phase_begin(u64* barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// Barriers that were begun are known to the unit that copies; a block barrier follows for the other threads.
DEVICE void phases_begun() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void phase_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and announces bytes that bulk copies will bring.
DEVICE void phase_announce(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Arrives once all copies that this thread has started with copy*_async are there.
DEVICE void phase_arrive_after_copies(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Until the phase of this parity has ended; that before the first has parity 1.
DEVICE void phase_await(u64* barrier, u32 parity) {
  u32 ended, address = shared_address(barrier);
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(ended) : "r"(address), "r"(parity) : "memory");
  } while (ended == 0u);
}

// ------------------------------------------------------------------------------------------------------- copies
// Multiples of 16 bytes between 16-byte addresses, by one thread; they count in the barrier's phase.
DEVICE void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
// What ordinary stores wrote to global memory, and this thread may read, bulk copies may read too.
DEVICE void bulk_may_read() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ----------------------------------------------------------------------------------------------------- products
// Registers of a thread from here on; every warp of a group takes part.
template <u32 COUNT> DEVICE void registers_given_up() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <u32 COUNT> DEVICE void registers_taken() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
// Before a product that reads registers written since the last one; closes a batch; until at most LEFT are under way:
// only then may the registers of the others be written or read.
DEVICE void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <u32 LEFT> DEVICE void products_await() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
// Of lines in shared memory at this address: start, leading offset (unused), 1,024 bytes between eights of lines, 128-byte
// swizzle. 16 columns on, the address is 32 bytes on: the description's low word 2 on.
DEVICE u64 describe_lines(u32 address) {
  return 0x4000004000010000ull | static_cast<u64>((address & 0x3ffffu) >> 4);
}
// d += a . b; one for every N in use (halma.backends.simt.many_sources).
template <u32 N> struct GroupProduct;
#include "group_products.h"

// Two bf16 numbers times two.
DEVICE u32 multiply_bf16x2(u32 a, u32 b) {
  u32 result;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
