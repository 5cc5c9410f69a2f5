// Elements of a 4-byte word by dtype, and the one definition of a sum: fp32, in rank order, one rounding at the end.
#pragma once
#include "dialect.h"

enum Dtype { BF16, F16, F32 };

template <int D> struct Numbers;

template <> struct Numbers<BF16> {
  static const u32 A_WORD = 2;
  DEVICE void widen(u32 word, float* to) { to[0] = bf16_to_float(word & 0xffffu), to[1] = float_of(word & 0xffff0000u); }
  DEVICE u32 narrow(const float* from) { return pack_bf16(from[0], from[1]); }
};
template <> struct Numbers<F16> {
  static const u32 A_WORD = 2;
  DEVICE void widen(u32 word, float* to) {
    to[0] = f16_to_float(static_cast<u16>(word)), to[1] = f16_to_float(static_cast<u16>(word >> 16));
  }
  DEVICE u32 narrow(const float* from) { return pack_f16(from[0], from[1]); }
};
template <> struct Numbers<F32> {
  static const u32 A_WORD = 1;
  DEVICE void widen(u32 word, float* to) { to[0] = float_of(word); }
  DEVICE u32 narrow(const float* from) { return bits_of(from[0]); }
};

// words[p] is rank p's; the sum goes in rank order.
template <int D, int RANKS> DEVICE u32 sum_words(const u32* words) {
  const u32 N = Numbers<D>::A_WORD;
  float sum[N], next[N];
  Numbers<D>::widen(words[0], sum);
#pragma unroll
  for (int p = 1; p < RANKS; ++p) {
    Numbers<D>::widen(words[p], next);
#pragma unroll
    for (u32 k = 0; k < N; ++k) sum[k] = add(sum[k], next[k]);
  }
  return Numbers<D>::narrow(sum);
}

// The same of whole units: data[p] is rank p's.
template <int D, int RANKS> DEVICE Quad sum_units(const Quad* data) {
  Quad sum;
#pragma unroll
  for (u32 k = 0; k < 4; ++k) {
    u32 words[RANKS];
#pragma unroll
    for (u32 p = 0; p < RANKS; ++p) words[p] = data[p].word[k];
    sum.word[k] = sum_words<D, RANKS>(words);
  }
  return sum;
}
