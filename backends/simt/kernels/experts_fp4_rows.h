// Weights of the fp4 experts' products, straight from the memory into registers: what a warp has of a tile of 16 rows.
#pragma once
#include "experts_fp4_items.h"

#define ROWS 16u                    // weight rows of a tile

// Addresses of a lane's two rows at a warp's unit.
struct Rows {
  const u8 *weight[2], *scale[2];
};
template <bool DOWN> DEVICE Rows rows_of(const Job& j, const Item& it, u32 column) {
  const u32 lane = threadIdx.x % HALMA_WARP, g = lane / 4u, t = lane % 4u;
  const u32 row = DOWN ? it.tile * ROWS + g : it.tile * (ROWS / 2u) + g, other = DOWN ? 8u : j.n / 2u;
  const u64 line = static_cast<u64>(it.expert) * j.n + row;
  Rows r;
  r.weight[0] = j.weight + line * (j.k / 2u) + column / 2u + 16u * t;
  r.weight[1] = r.weight[0] + static_cast<u64>(other) * (j.k / 2u);
  r.scale[0] = j.scale + line * (j.k / BLOCK) + column / BLOCK;
  r.scale[1] = r.scale[0] + static_cast<u64>(other) * (j.k / BLOCK);
  return r;
}

// A unit's words, and the powers of its blocks.
template <u32 STEPS> struct Unit {
  Quad word[STEPS][2];
  u32 scale[2][STEPS];
};
template <u32 STEPS> DEVICE void load_scales(const Rows& r, Unit<STEPS>& u) {
#pragma unroll
  for (u32 h = 0; h < 2u; ++h) {
    if constexpr (STEPS == 4u) {
      const Quad all = load16_constant(r.scale[h]);
#pragma unroll
      for (u32 s = 0; s < 4u; ++s) u.scale[h][s] = all.word[s];
    } else {
      const u64 both = load8_constant(r.scale[h]);
      u.scale[h][0] = static_cast<u32>(both), u.scale[h][1] = static_cast<u32>(both >> 32);
    }
  }
}
template <u32 STEPS> DEVICE void load_step(const Rows& r, u32 s, Unit<STEPS>& u) {
#pragma unroll
  for (u32 h = 0; h < 2u; ++h) u.word[s][h] = load16_stream(r.weight[h] + s * (STEP / 2u));
}
template <u32 STEPS> DEVICE void load_unit(const Rows& r, Unit<STEPS>& u) {
  load_scales(r, u);
#pragma unroll
  for (u32 s = 0; s < STEPS; ++s) load_step(r, s, u);
}
