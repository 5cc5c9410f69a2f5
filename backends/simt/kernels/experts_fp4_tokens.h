// Tokens of the fp4 experts' products: from the memory, rounded to e4m3 where they are not, to fp16 in shared memory.
#pragma once
#include "experts_fp4_items.h"

// Eight columns of a token as they are in the memory; then four words of fp16, and the power of their block.
template <bool DOWN> DEVICE void load_eight(const Job& j, u64 at, Quad* raw) {
  if (DOWN) {
    const Quad* from = reinterpret_cast<const Quad*>(j.x + 4u * at);
    raw[0] = from[0], raw[1] = from[1];
  } else if (j.x_scale != nullptr) {
    const u64 both = *reinterpret_cast<const u64*>(j.x + at);
    raw[0].word[0] = static_cast<u32>(both), raw[0].word[1] = static_cast<u32>(both >> 32);
    raw[0].word[2] = bits_of(j.x_scale[at / STEP]);
  } else {
    raw[0] = *reinterpret_cast<const Quad*>(j.x + 2u * at);
  }
}
template <bool DOWN> DEVICE Quad round_eight(const Job& j, const Quad* raw, float& scale) {
  u32 front, back;                  // codes 0 4 1 5, 2 6 3 7
  if (!DOWN && j.x_scale != nullptr) {
    front = pick_bytes(raw[0].word[0], raw[0].word[1], 0x5140u);
    back = pick_bytes(raw[0].word[0], raw[0].word[1], 0x7362u);
    scale = float_of(raw[0].word[2]);
  } else {
    float value[8], most = 0.0f;
#pragma unroll
    for (u32 c = 0; c < 8u; ++c) {
      value[c] = DOWN ? float_of(raw[c / 4u].word[c % 4u])
                      : bf16_to_float(raw[0].word[c / 2u] >> 16u * (c % 2u) & 0xffffu);
      const float size = value[c] < 0.0f ? -value[c] : value[c];
      most = size > most ? size : most;
    }
#pragma unroll
    for (u32 mask = 8u; mask != 0u; mask /= 2u) {
      const float other = shuffle_xor(most, mask);
      most = other > most ? other : most;
    }
    const u32 power = power_for(most);
    const float inverse = inverse_of(power);
    u32 code[8];
#pragma unroll
    for (u32 c = 0; c < 8u; ++c) code[c] = to_e4m3(multiply(value[c], inverse));
    front = code[0] | code[4] << 8 | code[1] << 16 | code[5] << 24;
    back = code[2] | code[6] << 8 | code[3] << 16 | code[7] << 24;
    scale = float_of(power);
  }
  return Quad{{widen_e4m3(front), widen_e4m3(back), widen_e4m3(front >> 16), widen_e4m3(back >> 16)}};
}

// `places`: where eight columns of a token lie (`of`), and floats of shared memory between scales of one token.
// BATCH loads of a thread are under way at a time. Whole warps: k is a multiple of 512.
template <bool DOWN, u32 BATCH, class Places>
DEVICE void stage_tokens(const Job& j, const Places& places, u32 first, u32 tokens, u8* x, float* scales) {
  const u32 eighths = j.k / 8u;
  u32 token = 0u, eighth = threadIdx.x;
  const auto settle = [&] {
    while (eighth >= eighths) eighth -= eighths, ++token;
  };
  settle();
#pragma unroll 1
  while (token < tokens) {
    Quad raw[BATCH][DOWN ? 2 : 1];
    u32 tokens_of[BATCH], columns[BATCH];
#pragma unroll
    for (u32 b = 0; b < BATCH; ++b) {
      tokens_of[b] = token, columns[b] = eighth * 8u;
      if (token < tokens) {
        const u32 slot = first + token;
        const u32 row = !DOWN && j.index != nullptr ? static_cast<u32>(j.index[slot]) : slot;
        load_eight<DOWN>(j, static_cast<u64>(row) * j.k + columns[b], raw[b]);
      }
      eighth += blockDim.x;
      settle();
    }
#pragma unroll
    for (u32 b = 0; b < BATCH; ++b) {
      if (tokens_of[b] >= tokens) continue;
      float scale;
      *reinterpret_cast<Quad*>(x + places.of(tokens_of[b], columns[b])) = round_eight<DOWN>(j, raw[b], scale);
      if (columns[b] % STEP == 0u) scales[columns[b] / STEP * places.scales + tokens_of[b]] = scale;
    }
  }
}
