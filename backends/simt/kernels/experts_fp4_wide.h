// A block of wide launches: more tokens an expert. Weights go straight from the memory into registers, and no barrier is
// passed but where the tokens change.
//
// An item is a tile of 16 weight rows (`up`: 8 of w1 and the same of w3) and up to 24 tokens; every warp has its own. A
// unit of it is 512 columns: lane 4g + t holds rows g and g + 8 and takes 16 bytes of each at a step of 128, which is one
// block of 32 columns: word w are columns 32t + 8w .. + 7. While a unit is multiplied, the words of the next one are
// loaded in the place of those that were used. A code, 2^-14 of its value in fp16, is multiplied by 2^14 times its
// block's power relative to the largest of the row in the unit, which the sum gets back: exact down to 2^-23 of the
// largest; what is below is rounded to 2^-25 of it.
#pragma once
#include "experts_fp4_codes.h"
#include "experts_fp4_rows.h"
#include "experts_fp4_tokens.h"

#define WIDE_WARPS 16u
#define WIDE_STEPS 4u                    // of a unit

// Where tokens lie: 512 bytes for a word of all lanes and a tile, as these read them.
struct WidePlaces {
  u32 tiles, scales;
  __device__ __forceinline__ u32 of(u32 token, u32 column) const {
    return (column / STEP * 4u + column % BLOCK / 8u) * tiles * 512u + (token * 4u + column % STEP / BLOCK) * 16u;
  }
};

// factor[s]: fp16 of this lane's block of row g, and of row g + 8 in the upper half. `power`: fp32 of the rows.
DEVICE void powers(const Unit<WIDE_STEPS>& u, u32* factor, float* power) {
  const u32 t = threadIdx.x % 4u, order = t | (t + 4u) << 8;
  u32 most = 0u;
#pragma unroll
  for (u32 s = 0; s < WIDE_STEPS; ++s) {
    factor[s] = pick_bytes(u.scale[0][s], u.scale[1][s], order | order << 4) & 0x00ff00ffu;
    most = most_of_halves(most, factor[s]);
  }
  most = most_of_halves(most, shuffle_xor(most, 1u));
  most = most_of_halves(most, shuffle_xor(most, 2u));
#pragma unroll
  for (u32 s = 0; s < WIDE_STEPS; ++s) {
    // 2^(14 - below): bits (29 - below) << 10; nought where that is no longer a normal number.
    const u32 left = most_of_halves(factor[s] + 0x001d001du, most) - most;
    factor[s] = left << 10;
  }
  power[0] = float_of(most << 23), power[1] = float_of(most << 7 & 0x7f800000u);
}

// One step for NT tiles of tokens: sum[n][0..1] row g at tokens 2t, 2t + 1; [2..3] row g + 8.
template <u32 NT>
DEVICE void multiply_tiles(const Quad* words, u32 factor, const float* power, const u8* x, const float* scales, u32 pitch,
                           float (*sum)[4]) {
  const u32 t = threadIdx.x % 4u;
  const u32 low = pick_bytes(factor, factor, 0x1010u), high = pick_bytes(factor, factor, 0x3232u);
  float part[NT][4];
#pragma unroll
  for (u32 n = 0; n < NT; ++n) part[n][0] = part[n][1] = part[n][2] = part[n][3] = 0.0f;
#pragma unroll
  for (u32 w = 0; w < 4u; ++w) {
    u32 top[4], bottom[4];
    decode(words[0].word[w], top);
    decode(words[1].word[w], bottom);
#pragma unroll
    for (u32 i = 0; i < 4u; ++i) top[i] = multiply_halves(top[i], low), bottom[i] = multiply_halves(bottom[i], high);
    const u32 even[4] = {top[0], bottom[0], top[1], bottom[1]}, odd[4] = {top[2], bottom[2], top[3], bottom[3]};
#pragma unroll
    for (u32 n = 0; n < NT; ++n) {
      const Quad b = *reinterpret_cast<const Quad*>(x + w * pitch + n * 512u);
      product_f16(part[n], even, b.word);
      product_f16(part[n], odd, b.word + 2);
    }
  }
#pragma unroll
  for (u32 n = 0; n < NT; ++n) {
    const u64 both = *reinterpret_cast<const u64*>(scales + 8u * n + 2u * t);
    const float one = float_of(static_cast<u32>(both)), two = float_of(static_cast<u32>(both >> 32));
#pragma unroll
    for (u32 i = 0; i < 4u; ++i)
      sum[n][i] = multiply_add(part[n][i], multiply(i % 2u == 0u ? one : two, power[i / 2u]), sum[n][i]);
  }
}

template <bool DOWN, u32 NT> DEVICE void finish_tiles(const Job& j, const Item& it, float (*sum)[4]) {
  const u32 lane = threadIdx.x % HALMA_WARP, g = lane / 4u, t = lane % 4u;
#pragma unroll
  for (u32 n = 0; n < NT; ++n)
#pragma unroll
    for (u32 i = 0; i < 2u; ++i) {
      const u32 token = 8u * n + 2u * t + i, slot = it.first + token;
      if (token >= it.tokens) continue;
      if (DOWN) {
        store_outer(j, slot, it.tile * ROWS + g, sum[n][i]);
        store_outer(j, slot, it.tile * ROWS + 8u + g, sum[n][2u + i]);
      } else {
        store_inner(j, slot, it.tile * (ROWS / 2u) + g, sum[n][i], sum[n][2u + i]);
      }
    }
}

// All units of an item, whose first one is in registers; leaves there the first one of `next`, if there are `more`.
template <bool DOWN, u32 NT>
DEVICE void multiply_item(const Job& j, const Item& it, const Item& next, bool more, Unit<WIDE_STEPS>& unit, const u8* x,
                          const float* scales) {
  const u32 pitch = j.tiles * 512u;
  float sum[NT][4];
#pragma unroll
  for (u32 n = 0; n < NT; ++n) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.0f;
  x += threadIdx.x % HALMA_WARP * 16u;
#pragma unroll 1
  for (u32 column = 0u; column < j.k; column += WIDE_STEPS * STEP) {
    const bool last = column + WIDE_STEPS * STEP == j.k, load = !last || more;
    const Rows rows = rows_of<DOWN>(j, last && more ? next : it, last ? 0u : column + WIDE_STEPS * STEP);
    u32 factor[WIDE_STEPS];
    float power[2];
    powers(unit, factor, power);
    if (load) load_scales(rows, unit);
#pragma unroll
    for (u32 s = 0; s < WIDE_STEPS; ++s) {
      multiply_tiles<NT>(unit.word[s], factor[s], power, x, scales, pitch, sum);
      x += 4u * pitch, scales += j.tiles * 8u;
      if (load) load_step(rows, s, unit);
      warp_barrier();
    }
  }
  finish_tiles<DOWN, NT>(j, it, sum);
}

template <bool DOWN> DEVICE void walk_wide(Job j, u8* memory, Lists& lists) {
  const u32 tokens = 8u * j.tiles, tiles = j.n / ROWS;
  const WidePlaces places{j.tiles, tokens};
  // The routing and the weights are older than the grid before `down`: that one began behind its own wait.
  if (!DOWN) grid_wait(), grid_trigger();
  choose_layer(j);
  read_lists(j, lists);
  number_items(tiles, tokens, lists);
  const u32 all = lists.starts[MOST_EXPERTS], begin = begin_of(all, blockIdx.x), end = begin_of(all, blockIdx.x + 1u);
  float* scales = reinterpret_cast<float*>(memory + static_cast<u64>(tokens) * j.k * 2u);
  const auto find = [&](u32 n, const Item& near) {
    Item found = near;
    if (n - near.begin < near.end - near.begin) found.tile = n - near.begin;
    else found = search(lists, tiles, tokens, n);
    return found;
  };
  Item now{};
  Unit<WIDE_STEPS> unit;
  u32 p = begin + threadIdx.x / HALMA_WARP;
  if (p < end) now = find(p, now), load_unit(rows_of<DOWN>(j, now, 0u), unit);
  if (DOWN) grid_wait(), grid_trigger();

  u32 from = begin;
#pragma unroll 1
  while (from < end) {
    const Item segment = find(from, now);
    const u32 last = segment.end < end ? segment.end : end;
    block_barrier();
    stage_tokens<DOWN, 1u>(j, places, segment.first, segment.tokens, memory, scales);
    block_barrier();
#pragma unroll 1
    while (p < last) {
      const bool more = p + WIDE_WARPS < end;
      const Item next = more ? find(p + WIDE_WARPS, now) : now;
      if (now.tokens <= 8u) multiply_item<DOWN, 1u>(j, now, next, more, unit, memory, scales);
      else if (now.tokens <= 16u) multiply_item<DOWN, 2u>(j, now, next, more, unit, memory, scales);
      else multiply_item<DOWN, 3u>(j, now, next, more, unit, memory, scales);
      now = next, p += WIDE_WARPS;
    }
    from = last;
  }
}
