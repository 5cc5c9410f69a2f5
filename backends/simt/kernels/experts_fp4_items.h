// The products of the routed experts for e2m1 weights: what a launch is told, and its items in their order.
#pragma once
#include "matrix.h"
#include "rounding.h"

#define MOST_EXPERTS 256u
#define MOST_PAIRS 8u               // that blocks lay out themselves: one tile of tokens
#define STEP 128u                   // columns
#define BLOCK (2u * 16u)            // columns of one power

struct Job {
  const u8 *weight, *scale;         // [experts][n][k / 2], [experts][n][k / 32]. With a layer: tables of their addresses
  const u8* x;                      // up: [rows][k] e4m3 with x_scale, else bf16; down: [slots][k] fp32
  const float* x_scale;             // [rows][k / 128] or null
  const int* index;                 // up: slot -> row of x
  const float* factor;              // [slots], up only
  const int *counts, *offsets;      // [experts], [experts + 1]
  u8* out;                          // up: [slots][n / 2] fp32; down: [slots][n]
  const int* layer;                 // which entry of the tables, or null
  u32 k, n, experts, tiles;         // `tiles`: of 8 tokens that shared memory has room for; of thin ones: tokens
  u32 pairs, choices;               // of a few: `counts` are their ids, `factor` their weights; down: out is [tokens][n]
  bool narrow;                      // down: bf16, else fp32
  float limit;
};
#define JOB_PARAMS                                                                                                   \
  u64 weight, u64 scale, u64 x, u64 x_scale, u64 index, u64 factor, u64 counts, u64 offsets, u64 out, u64 layer,       \
      u64 shape, u64 options
#define JOB                                                                                                          \
  Job {                                                                                                              \
    (const u8*)weight, (const u8*)scale, (const u8*)x, (const float*)x_scale, (const int*)index,                       \
        (const float*)factor, (const int*)counts, (const int*)offsets, (u8*)out, (const int*)layer,                    \
        static_cast<u32>(shape), static_cast<u32>(shape >> 32), static_cast<u32>(options) & 0xfffu,                    \
        static_cast<u32>(options) >> 12 & 0xfu, static_cast<u32>(options) >> 17 & 0x7fu,                               \
        static_cast<u32>(options) >> 24 & 0xffu, (options & 0x10000u) != 0u,                                           \
        float_of(static_cast<u32>(options >> 32))                                                                      \
  }

struct Lists {
  u32 starts[MOST_EXPERTS + 1u];    // first item of an expert
  u32 counts[MOST_EXPERTS], offsets[MOST_EXPERTS];
};
// The routing of a few pairs. All slots are one tile of tokens.
struct Run {
  u32 expert, first, tokens;        // `first`: slot
};
struct Few {
  Run runs[8][MOST_PAIRS];          // of a warp's own: the experts that have tokens, in their order
  u32 slot[MOST_PAIRS];             // of a pair; ~0: it has none
  int index[MOST_PAIRS];            // slot -> token
  float factor[MOST_PAIRS];         // slot -> weight
};
struct Item {
  u32 expert, tile, first, tokens;  // `first`: slot
  u32 begin, end;                   // items of the same tokens
};

DEVICE void read_lists(const Job& j, Lists& l) {
  for (u32 e = threadIdx.x; e < MOST_EXPERTS; e += blockDim.x) {
    l.counts[e] = e < j.experts ? static_cast<u32>(j.counts[e]) : 0u;
    l.offsets[e] = e < j.experts ? static_cast<u32>(j.offsets[e]) : 0u;
  }
  block_barrier();
}

// As expert_layout orders them: by expert, then by pair. Every warp does so for itself, so that its first weights are
// under way without a barrier; what is about slots is there for all behind the next one. Gives the runs and the slots.
DEVICE u32 lay_out_few(const Job& j, Few& f, u32& slots) {
  const u32 warp = threadIdx.x / HALMA_WARP, lane = threadIdx.x % HALMA_WARP;
  u32 expert = ~0u;
  if (lane < j.pairs) {
    const u64 id = reinterpret_cast<const u64*>(j.counts)[lane];
    expert = id < j.experts ? static_cast<u32>(id) : ~0u;
  }
  const bool real = expert != ~0u;
  u32 slot = 0u, earlier = 0u, tokens = 0u, rank = 0u;
#pragma unroll
  for (u32 other = 0u; other < MOST_PAIRS; ++other) {
    const u32 theirs = shuffle_from(expert, other);
    tokens += theirs == expert ? 1u : 0u;
    earlier += theirs == expert && other < lane ? 1u : 0u;
    slot += theirs < expert || (theirs == expert && other < lane) ? 1u : 0u;
  }
  const bool first = real && earlier == 0u;
#pragma unroll
  for (u32 other = 0u; other < MOST_PAIRS; ++other) rank += shuffle_from(first ? expert : ~0u, other) < expert ? 1u : 0u;
  if (first) f.runs[warp][rank] = Run{expert, slot, tokens};
  if (warp == 0u && lane < j.pairs) {
    f.slot[lane] = real ? slot : ~0u;
    if (real) f.index[slot] = static_cast<int>(lane / j.choices), f.factor[slot] = j.factor[lane];
  }
  const u32 alike = warp_alike(real ? 1u : 0u).all, firsts = warp_alike(first ? 1u : 0u).all;
  slots = real ? alike : HALMA_WARP - alike;
  warp_barrier();
  return first ? firsts : HALMA_WARP - firsts;
}

DEVICE void number_items(u32 tiles, u32 tokens, Lists& l) {
  if (threadIdx.x < HALMA_WARP) {
    const u32 each = MOST_EXPERTS / HALMA_WARP, lane = threadIdx.x;
    u32 own = 0u, most[MOST_EXPERTS / HALMA_WARP];
    for (u32 i = 0; i < each; ++i) own += most[i] = (l.counts[lane * each + i] + tokens - 1u) / tokens * tiles;
    u32 sum = own;
    for (u32 step = 1u; step < HALMA_WARP; step *= 2u) {
      u32 before = shuffle_from(sum, lane >= step ? lane - step : lane);
      if (lane >= step) sum += before;
    }
    u32 start = sum - own;
    for (u32 i = 0; i < each; ++i) l.starts[lane * each + i] = start, start += most[i];
    if (lane == HALMA_WARP - 1u) l.starts[MOST_EXPERTS] = start;
  }
  block_barrier();
}

DEVICE Item search(const Lists& l, u32 tiles, u32 tokens, u32 n) {
  u32 low = 0u, high = MOST_EXPERTS;
  while (high - low > 1u) {
    u32 middle = (low + high) / 2u;
    if (l.starts[middle] <= n) low = middle;
    else high = middle;
  }
  const u32 pass = (n - l.starts[low]) / tiles, begin = l.starts[low] + pass * tiles, left = l.counts[low] - pass * tokens;
  return Item{low, n - begin, l.offsets[low] + pass * tokens, left < tokens ? left : tokens, begin, begin + tiles};
}

// The addresses that a table has for the layer.
DEVICE void choose_layer(Job& j) {
  if (j.layer == nullptr) return;
  j.weight = reinterpret_cast<const u8* const*>(j.weight)[*j.layer];
  j.scale = reinterpret_cast<const u8* const*>(j.scale)[*j.layer];
}
// Of `all` things in their order: where those of a block begin.
DEVICE u32 begin_of(u32 all, u32 block) {
  const u32 part = all / gridDim.x, rest = all % gridDim.x;
  return block * part + (block < rest ? block : rest);
}

// ----------------------------------------------------------------------------------------------- the results
DEVICE float swiglu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return multiply(divide(gate, add(1.0f, exponential(-gate))), up);
}
DEVICE void store_inner(const Job& j, u32 slot, u32 channel, float gate, float up) {
  reinterpret_cast<float*>(j.out)[static_cast<u64>(slot) * (j.n / 2u) + channel] =
      multiply(swiglu(gate, up, j.limit), j.factor[slot]);
}
DEVICE void store_outer(const Job& j, u32 slot, u32 row, float value) {
  u64 at = static_cast<u64>(slot) * j.n + row;
  if (j.narrow) reinterpret_cast<u16*>(j.out)[at] = static_cast<u16>(pack_bf16(value, 0.0f));
  else reinterpret_cast<float*>(j.out)[at] = value;
}
