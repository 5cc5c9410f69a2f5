// The portable dialect: one set of primitives, spelt for CUDA and for MUSA.
//
// Macros that the build gives (halma.backends.simt.sources):
//   HALMA_CUDA or HALMA_MUSA       which spelling
//   HALMA_WARP                     threads that run in lockstep; nothing else may assume a width or a mask
//   HALMA_DEPENDENT_LAUNCH         1: the device has dependent launch; 0: waiting for the grid before is a no-op
//   HALMA_STORE_ATOMICITY          bytes of a store to a peer that are never seen in part; 0: not known
//   HALMA_USES_PUSH                1: the unit uses accesses that must bypass the first-level cache
//   HALMA_CLOCK_KHZ                MUSA only: ticks of clock64() in a millisecond
//   HALMA_FP8_CONVERSIONS          MUSA only, 1: the device's own rounding to e4m3 has been seen to give the bits of ours
// A primitive that a vendor lacks, or whose spelling is not known, is an #error: never an empty body. What may be left
// out, since results do not depend on it, is a hint: settle_address() and prefetch_line().
#pragma once

#if defined(HALMA_CUDA) == defined(HALMA_MUSA)
#error "define one of HALMA_CUDA and HALMA_MUSA"
#endif
#ifndef HALMA_USES_PUSH
#define HALMA_USES_PUSH 0
#endif
#if !defined(HALMA_WARP) || !defined(HALMA_DEPENDENT_LAUNCH) || !defined(HALMA_STORE_ATOMICITY)
#error "HALMA_WARP, HALMA_DEPENDENT_LAUNCH and HALMA_STORE_ATOMICITY come from the device's capabilities"
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(16) Pair { u64 low, high; };
struct alignas(16) Quad { u32 word[4]; };

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "sizes of the dialect's integers");

#define DEVICE static __device__ __forceinline__
// Rare paths are laid out behind the usual ones: a call runs once through code that is seldom in the nearest cache.
#define RARE(condition) (__builtin_expect(static_cast<bool>(condition), false))

DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

struct Alike { u32 before, all; };

// ------------------------------------------------------------------------------------------------ CUDA
#if defined(HALMA_CUDA)

#define ALL_LANES (static_cast<u32>((1ull << HALMA_WARP) - 1))
static_assert(HALMA_WARP <= 8u * sizeof(u32), "a mask of lanes is one word");

#if HALMA_DEPENDENT_LAUNCH
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "dependent launch needs sm_90; build with HALMA_DEPENDENT_LAUNCH=0"
#endif
DEVICE void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void grid_trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void grid_wait() {}     // the device starts a kernel after the one before it has ended
DEVICE void grid_trigger() {}
#endif

// Relaxed at system scope: single-copy atomic per element, never served by the first-level cache.
DEVICE u32 load4_relaxed(const void* from) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
DEVICE void store4_relaxed(void* to, u32 value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
DEVICE u64 load8_relaxed(const void* from) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
DEVICE void store8_relaxed(void* to, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
// Two elements of 8 bytes, each whole; not whole together.
DEVICE Pair load16_relaxed(const void* from) {
  Pair value;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(value.low), "=l"(value.high) : "l"(from) : "memory");
  return value;
}
DEVICE void store16_relaxed(void* to, Pair value) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(value.low), "l"(value.high) : "memory");
}
DEVICE u32 load4_acquire(const void* from) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
DEVICE void store4_release(void* to, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
DEVICE void no_fence() {}  // where a release covers what other threads handed over by a barrier
DEVICE u32 exchange4(void* to, u32 value) {
  u32 old;
  asm volatile("atom.relaxed.sys.global.exch.b32 %0, [%1], %2;" : "=r"(old) : "l"(to), "r"(value) : "memory");
  return old;
}
DEVICE u32 compare_exchange4(void* to, u32 expected, u32 value) {
  u32 old;
  asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(old) : "l"(to), "r"(expected), "r"(value) : "memory");
  return old;
}
DEVICE void block_barrier() { asm volatile("barrier.sync 0;" ::: "memory"); }
// A barrier, and whether `mine` holds for any thread of the block.
DEVICE bool block_any(bool mine) { return __syncthreads_or(mine) != 0; }
// What lanes of a warp wrote to shared memory is there for the others.
DEVICE void warp_barrier() { __syncwarp(ALL_LANES); }
#if HALMA_USES_PUSH
// Barrier 1 in two halves: `threads` threads in all, of which those that only arrive do not wait.
DEVICE void barrier_arrive(u32 threads) { asm volatile("barrier.arrive 1, %0;" ::"r"(threads) : "memory"); }
DEVICE void barrier_await(u32 threads) { asm volatile("barrier.sync 1, %0;" ::"r"(threads) : "memory"); }
// Barrier 2, among the first `threads` threads of the block alone.
DEVICE void barrier_among(u32 threads) { asm volatile("barrier.sync 2, %0;" ::"r"(threads) : "memory"); }
// The address is known from here on: arithmetic that would otherwise be done when time is short.
DEVICE void settle_address(u8*& address) { asm volatile("" : "+l"(address)); }
DEVICE void settle_address(const u8*& address) { asm volatile("" : "+l"(address)); }
// The words of all lanes of a warp or-ed together.
DEVICE u32 warp_or(u32 mine) { return __reduce_or_sync(ALL_LANES, mine); }
DEVICE u32 lowest_bit(u32 word) { return static_cast<u32>(__ffs(static_cast<int>(word))) - 1u; }  // of one that is not 0
// Ordinary loads that are under way from here on, without a branch that would first wait for something else; where
// `wanted` is false nothing is read and the value is 0.
DEVICE u64 load8_now(const void* from, bool wanted) {
  u64 value = 0u;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u64 %0, [%1]; }"
               : "+l"(value) : "l"(from), "r"(static_cast<u32>(wanted)));
  return value;
}
DEVICE Pair load16_now(const void* from, bool wanted) {
  Pair value{0u, 0u};
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.v2.u64 {%0, %1}, [%2]; }"
               : "+l"(value.low), "+l"(value.high) : "l"(from), "r"(static_cast<u32>(wanted)));
  return value;
}
#endif
DEVICE u64 clock_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
// The value of the lane whose number differs in the bits of `mask`, or of lane `from`; every lane of the warp takes part.
DEVICE float shuffle_xor(float value, u32 mask) { return __shfl_xor_sync(ALL_LANES, value, mask, HALMA_WARP); }
DEVICE u32 shuffle_xor(u32 value, u32 mask) {
  return __shfl_xor_sync(ALL_LANES, value, static_cast<int>(mask), HALMA_WARP);
}
DEVICE u32 shuffle_from(u32 value, u32 from) { return __shfl_sync(ALL_LANES, value, static_cast<int>(from), HALMA_WARP); }
// Lanes of the warp whose word is this lane's: this one and those in all, and those before this one.
DEVICE Alike warp_alike(u32 mine) {
  u32 lanes = __match_any_sync(ALL_LANES, mine), lane = threadIdx.x % HALMA_WARP;
  return Alike{static_cast<u32>(__popc(lanes & ((1u << lane) - 1u))), static_cast<u32>(__popc(lanes))};
}
// On shared memory: a sum whose order does not matter; what was there before.
DEVICE u32 add_shared(u32* to, u32 value) { return atomicAdd(to, value); }
DEVICE u32 pack_bf16(float low, float high) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
DEVICE u32 pack_f16(float low, float high) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
DEVICE float f16_to_float(u16 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
DEVICE float reciprocal_root(float value) {
  float root;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(value));
  return root;
}
// To about one unit in the last place; to a few. Subnormal numbers count as zero: four instructions less.
DEVICE float reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
DEVICE float exponential(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(__fmul_rn(value, 1.44269504f)));
  return result;
}
DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define HALMA_NATIVE_FP8 1
DEVICE u32 native_e4m3(float value) {
  u16 both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(0.0f), "f"(value));
  return both & 0xffu;
}
#endif

// ------------------------------------------------------------------------------------------------ MUSA
#else
#include "dialect_musa.h"
#endif

// ------------------------------------------------------------------------------- same for both vendors
DEVICE float bf16_to_float(u32 half) { return float_of(half << 16); }

// e4m3fn (OCP): largest 448, no infinity, 0x7f is NaN; to nearest even, beyond the largest to it.
DEVICE u32 portable_e4m3(float value) {
  u32 bits = bits_of(value), sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;
  if (magnitude >= 0x43e00000u) return sign | 0x7eu;  // 448 and more
  if (magnitude < 0x3c800000u)                        // under 2^-6: steps of 2^-9, by the adder's own rounding
    return sign | (bits_of(add(float_of(magnitude), 16384.0f)) & 0xfu);
  u32 rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  u32 code = (rounded >> 20) - (120u << 3);
  return sign | (code > 0x7eu ? 0x7eu : code);
}
DEVICE u32 to_e4m3(float value) {
#if defined(HALMA_NATIVE_FP8)
  return native_e4m3(value);
#else
  return portable_e4m3(value);
#endif
}
