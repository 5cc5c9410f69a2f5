// Combine: arguments, and sums of what this rank has of a token.
#pragma once
#include "exchange.h"

struct Back {
  const int* slot_of;    // [SIZE * most][choices]
  const int* tokens_of;  // [SIZE]
  const u32* sources;    // [tokens]
  u64 back, back_stride;
  u32 tokens, choices, most, units;  // units of 16 bytes of a row on its way back
  bool wide_out;                     // out is fp32
};
#define COMBINE_PARAMS                                                                                               \
  PARAMS, u64 slot_of, u64 tokens_of, u64 sources, u64 back, u64 back_stride, u64 shape, u64 limits, u64 options
#define COMBINE_PACKED                                                                                               \
  Back {                                                                                                             \
    (const int*)slot_of, (const int*)tokens_of, (const u32*)sources, back, back_stride, static_cast<u32>(shape),     \
        static_cast<u32>(shape >> 32), static_cast<u32>(limits), static_cast<u32>(limits >> 32),                     \
        options != 0u                                                                                                \
  }

template <int D> struct Sum {
  static const u32 N = 4u * Numbers<D>::A_WORD;
  float value[N];
};
template <int D> DEVICE void widened(const Quad& unit, float* to) {
#pragma unroll
  for (u32 k = 0; k < 4u; ++k) Numbers<D>::widen(unit.word[k], to + k * Numbers<D>::A_WORD);
}
template <int D> DEVICE Quad narrowed(const float* from) {
  Quad unit;
#pragma unroll
  for (u32 k = 0; k < 4u; ++k) unit.word[k] = Numbers<D>::narrow(from + k * Numbers<D>::A_WORD);
  return unit;
}

// Slots of AT_ONCE choices of a token, -1 behind the last one.
struct Slots {
  int slot[AT_ONCE];
};
DEVICE Slots slots_at(const Back& b, u32 rank, u32 token, u32 from) {
  Slots found;
  const int* slots = b.slot_of + (static_cast<u64>(rank) * b.most + token) * b.choices;
#pragma unroll
  for (u32 c = 0; c < AT_ONCE; ++c) found.slot[c] = from + c < b.choices ? slots[from + c] : -1;
  return found;
}

// What this rank has of unit u of a token of `rank`: 0 + part of the first choice + ..., rounded. False where it has
// nothing. `found`: its first slots. WIDE: parts are fp32, though what travels is not; then two are under way at once.
template <int D, bool WIDE>
DEVICE bool local_sum(const Args& a, const Back& b, u32 rank, u32 token, u32 u, Slots found, Quad& sum) {
  const u32 N = Sum<D>::N, QUADS = WIDE ? N / 4u : 1u, PARTS_AT_ONCE = AT_ONCE / QUADS;
  float total[N];
  bool any = false;
#pragma unroll
  for (u32 k = 0; k < N; ++k) total[k] = 0.0f;
#pragma unroll 1
  for (u32 j = 0;;) {
#pragma unroll
    for (u32 first = 0; first < AT_ONCE; first += PARTS_AT_ONCE) {
      Quad part[PARTS_AT_ONCE][QUADS];
#pragma unroll
      for (u32 c = 0; c < PARTS_AT_ONCE; ++c) {
        int slot = found.slot[first + c];
        const Quad* from = reinterpret_cast<const Quad*>(a.source) + (static_cast<u64>(slot) * b.units + u) * QUADS;
#pragma unroll
        for (u32 k = 0; k < QUADS; ++k)
          if (slot >= 0) part[c][k] = from[k];
      }
#pragma unroll
      for (u32 c = 0; c < PARTS_AT_ONCE; ++c) {
        if (found.slot[first + c] < 0) continue;
        float wide[N];
        any = true;
#pragma unroll
        for (u32 k = 0; k < QUADS; ++k) {
          if (WIDE)
            widened<F32>(part[c][k], wide + 4u * k);
          else
            widened<D>(part[c][k], wide);
        }
#pragma unroll
        for (u32 k = 0; k < N; ++k) total[k] = add(total[k], wide[k]);
      }
    }
    j += AT_ONCE;
    if (j >= b.choices) break;
    found = slots_at(b, rank, token, j);
  }
  sum = narrowed<D>(total);
  return any;
}

template <int D> DEVICE void store_sum(const Args& a, const Back& b, u64 unit, const float* sum) {
  const u32 N = Sum<D>::N;
  if (!b.wide_out) {
    reinterpret_cast<Quad*>(a.out)[unit] = narrowed<D>(sum);
    return;
  }
#pragma unroll
  for (u32 k = 0; k < N / 4u; ++k) reinterpret_cast<Quad*>(a.out)[unit * (N / 4u) + k] = narrowed<F32>(sum + 4u * k);
}
