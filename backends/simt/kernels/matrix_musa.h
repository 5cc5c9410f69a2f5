// The primitives of matrix.h in MUSA spelling; matrix.h alone includes this. Matrix units of Moore Threads GPUs have
// other fragments, and nothing public says how copies run beside arithmetic: a product is made of ordinary ones here,
// on numbers that lanes pass each other, and a copy is done when it returns. Right, and slower than it need be.
#pragma once

template <typename T> DEVICE void copy(void* to, const void* from) { *static_cast<T*>(to) = *static_cast<const T*>(from); }
DEVICE void copy16_async(void* to, const void* from) { copy<Quad>(to, from); }
DEVICE void copy8_async(void* to, const void* from) { copy<u64>(to, from); }
DEVICE void copy4_async(void* to, const void* from) { copy<u32>(to, from); }
DEVICE void copies_commit() {}  // no copy is under way
template <u32 LEFT> DEVICE void copies_await() {}
DEVICE Quad load16_stream(const void* from) { return *static_cast<const Quad*>(from); }
DEVICE Quad load16_constant(const void* from) { return *static_cast<const Quad*>(from); }
DEVICE u64 load8_constant(const void* from) { return *static_cast<const u64*>(from); }
DEVICE void prefetch_line(const void*) {}  // a hint

DEVICE u32 half_of(u32 both, u32 which) { return both >> 16u * which & 0xffffu; }
struct Fp16 { DEVICE float widen(u32 half) { return f16_to_float(static_cast<u16>(half)); } };
struct Bf16 { DEVICE float widen(u32 half) { return bf16_to_float(half); } };
// Lane 4g + t adds up rows g, g + 8 at columns 2t, 2t + 1; those rows lie on lanes 4g .. 4g + 3, the columns on 8t .. 8t + 7.
template <class F> DEVICE void product(float* c, const u32* a, const u32* b) {
  const u32 lane = threadIdx.x % HALMA_WARP, row = lane / 4u * 4u, column = lane % 4u * 8u;
#pragma unroll
  for (u32 k = 0; k < 8u; ++k) {
    const u32 half = k / 4u, s = k % 4u;
    const u32 top = shuffle_from(a[2u * half], row + s), bottom = shuffle_from(a[2u * half + 1u], row + s);
    const u32 left = shuffle_from(b[half], column + s), right = shuffle_from(b[half], column + 4u + s);
#pragma unroll
    for (u32 e = 0; e < 2u; ++e) {
      const float up = F::widen(half_of(top, e)), down = F::widen(half_of(bottom, e));
      const float one = F::widen(half_of(left, e)), two = F::widen(half_of(right, e));
      c[0] = multiply_add(up, one, c[0]), c[1] = multiply_add(up, two, c[1]);
      c[2] = multiply_add(down, one, c[2]), c[3] = multiply_add(down, two, c[3]);
    }
  }
}
DEVICE void product_f16(float* c, const u32* a, const u32* b) { product<Fp16>(c, a, b); }
DEVICE void product_bf16(float* c, const u32* a, const u32* b) { product<Bf16>(c, a, b); }

DEVICE u32 pick_bytes(u32 low, u32 high, u32 order) {
  const u64 both = static_cast<u64>(high) << 32 | low;
  u32 value = 0u;
#pragma unroll
  for (u32 i = 0; i < 4u; ++i) value |= static_cast<u32>(both >> 8u * (order >> 4u * i & 7u) & 0xffu) << 8u * i;
  return value;
}
DEVICE u32 most_of_halves(u32 a, u32 b) {
  const u32 low = half_of(a, 0u) > half_of(b, 0u) ? half_of(a, 0u) : half_of(b, 0u);
  return low | (half_of(a, 1u) > half_of(b, 1u) ? half_of(a, 1u) : half_of(b, 1u)) << 16;
}
DEVICE u32 multiply_halves(u32 a, u32 b) {
  return pack_f16(multiply(Fp16::widen(half_of(a, 0u)), Fp16::widen(half_of(b, 0u))),
                  multiply(Fp16::widen(half_of(a, 1u)), Fp16::widen(half_of(b, 1u))));
}
DEVICE u32 choose_bits(u32 one, u32 other, u32 mask) { return (one & mask) | (other & ~mask); }

// e4m3 from 2^-6 on has the bits of fp16 but for the exponent's bias; below, steps of 2^-9.
DEVICE u32 widened_e4m3(u32 code) {
  const u32 sign = (code & 0x80u) << 8, magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return sign | 0x7e00u;
  return sign | (magnitude >= 8u ? (magnitude << 7) + 0x2000u : round_f16(static_cast<float>(magnitude) * 0.001953125f));
}
DEVICE u32 widen_e4m3(u32 both) { return widened_e4m3(both & 0xffu) | widened_e4m3(both >> 8 & 0xffu) << 16; }
