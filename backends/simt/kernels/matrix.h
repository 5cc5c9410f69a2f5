// The dialect's primitives for kernels that multiply tiles: copies that run beside arithmetic, and products of
// fragments held by a warp. Fragments are those of a 16 x 8 x 16 product on a warp of 32 lanes: lane 4g + t has
//   a[0], a[1]: rows g, g + 8 at columns 2t, 2t + 1;  a[2], a[3]: the same at 2t + 8, 2t + 9
//   b[0], b[1]: column g at rows 2t, 2t + 1 and 2t + 8, 2t + 9
//   c[0], c[1]: row g at columns 2t, 2t + 1;  c[2], c[3]: row g + 8
#pragma once
#include "dialect.h"

#if HALMA_WARP != 32
#error "the fragments of a product lie on warps of another width"
#endif

#if defined(HALMA_MUSA)
#include "matrix_musa.h"
#else

DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }
// Copies from global into shared memory that are under way from here on; 16 bytes go past the first-level cache.
DEVICE void copy16_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE void copy8_async(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE void copy4_async(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
// Loads of what nobody writes while the grid runs, under way from here on; a stream's are read once. These are no `nc`
// ones, which the compiler moves across barriers, behind arithmetic that they were to be under way beside.
DEVICE Quad load16_stream(const void* from) {
  Quad value;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3]) : "l"(from) : "memory");
  return value;
}
DEVICE Quad load16_constant(const void* from) {
  Quad value;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3]) : "l"(from));
  return value;
}
DEVICE u64 load8_constant(const void* from) {
  u64 value;
  asm volatile("ld.global.nc.u64 %0, [%1];" : "=l"(value) : "l"(from));
  return value;
}
DEVICE void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
// Closes a group of this thread's copies; waits until at most LEFT of its groups are under way.
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <u32 LEFT> DEVICE void copies_await() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// c += a . b in fp32; `first`: c = a . b.
DEVICE void product_f16(float* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void product_bf16(float* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Byte i of the result is byte (order >> 4i & 7) of the eight bytes low, high.
DEVICE u32 pick_bytes(u32 low, u32 high, u32 order) { return __byte_perm(low, high, order); }
// Of both halves: the larger unsigned number; the product of fp16 numbers.
DEVICE u32 most_of_halves(u32 a, u32 b) { return __vmaxu2(a, b); }
DEVICE u32 multiply_halves(u32 a, u32 b) {
  u32 value;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(value) : "r"(a), "r"(b));
  return value;
}
// Bits of `one` where the mask is set, else of `other`: one instruction, where the compiler takes two for constants.
DEVICE u32 choose_bits(u32 one, u32 other, u32 mask) {
  u32 value;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(value) : "r"(one), "r"(other), "r"(mask));
  return value;
}
// Two e4m3 numbers (the low 16 bits of `both`) as two fp16 numbers, exactly.
DEVICE u32 widen_e4m3(u32 both) {
  u32 wide;
#if defined(HALMA_NATIVE_FP8)
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(static_cast<u16>(both)));
#else
  u32 apart = (both & 0xffu) | (both & 0xff00u) << 8;
  u32 tiny = (apart & 0x800080u) << 8 | (apart & 0x7f007fu) << 7;  // 2^-8 of the value
  asm("mul.f16x2 %0, %1, %2;" : "=r"(wide) : "r"(tiny), "r"(0x5c005c00u));
  if ((apart & 0x7fu) == 0x7fu) wide |= 0x7e00u;
  if ((apart & 0x7f0000u) == 0x7f0000u) wide |= 0x7e000000u;
#endif
  return wide;
}
#endif
