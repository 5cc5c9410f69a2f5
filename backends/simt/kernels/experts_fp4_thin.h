// A block of thin launches: few tokens, where there are fewer rows than warps. Weights go straight from the memory into
// registers; K is shared by eight warps, slice by slice, whose sums are added up.
//
// An item is a tile of 16 weight rows (`up`: 8 of w1 and the same of w3) and the tokens of its expert. A unit is STEPS steps
// of 128 columns. Lane 4g + t holds rows g and g + 8 and takes 16 bytes of each at a
// step, which is one block of 32 columns: word w are columns 32t + 8w .. + 7. While a unit is multiplied, the words of the
// next one are loaded in the place of those that were used.
//
// Of a product's eight columns a token has four, one a block: column c has the token's numbers where lane c % 4 holds
// them and nought elsewhere, so that blocks are summed apart, exactly, and a power of two is applied to a sum.
#pragma once
#include "experts_fp4_codes.h"
#include "experts_fp4_rows.h"
#include "experts_fp4_tokens.h"

#define SLICES 8u
#define PITCH 20u                   // floats of a token in the sums of a slice: no conflicts of banks
#define CODES 16384.0f              // what a sum of codes lacks

// Four groups of 8 columns of the blocks of a step lie together for every token, and 16 bytes of nought behind them.
struct ThinPlaces {
  u32 room, scales;                 // tokens that there is room for
  DEVICE u32 group(u32 room) { return room * 64u + 16u; }
  __device__ __forceinline__ u32 of(u32 token, u32 column) const {
    return (column / STEP * 4u + column % BLOCK / 8u) * group(room) + (token * 4u + column % STEP / BLOCK) * 16u;
  }
};

// The powers of this lane's two blocks at every step: of row g in the lower half, of row g + 8 in the upper.
template <u32 STEPS> DEVICE void own_powers(const Unit<STEPS>& u, u32* powers) {
  const u32 first = threadIdx.x % 2u * 2u, order = first | (first + 1u) << 4 | (first + 4u) << 8 | (first + 5u) << 12;
#pragma unroll
  for (u32 s = 0; s < STEPS; ++s) powers[s] = pick_bytes(u.scale[0][s], u.scale[1][s], order);
}

// A step for two tokens: value[h] gets what it gives to row g + 8h of token t / 2, of this lane's blocks alone.
DEVICE void multiply_blocks(const Quad* words, u32 powers, const u8* x, u32 group, float scale, float* value) {
  float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (u32 w = 0; w < 4u; ++w) {
    const Quad b = *reinterpret_cast<const Quad*>(x + w * group);
    u32 top[4], bottom[4];
    decode(words[0].word[w], top);
    decode(words[1].word[w], bottom);
    const u32 front[4] = {top[0], bottom[0], top[1], bottom[1]}, back[4] = {top[2], bottom[2], top[3], bottom[3]};
    product_f16(part, front, b.word);
    product_f16(part, back, b.word + 2);
  }
  const u32 mask = 0x7f800000u;
  const float one[2] = {float_of(powers << 23 & mask), float_of(powers << 7 & mask)};
  const float two[2] = {float_of(powers << 15 & mask), float_of(powers >> 1 & mask)};
#pragma unroll
  for (u32 h = 0; h < 2u; ++h)
    value[h] = multiply_add(multiply_add(part[2u * h + 1u], two[h], multiply(part[2u * h], one[h])), scale, value[h]);
}

// The unit at `column` for the tokens `begin` .. `end` - 1 in shared memory, and the loads of the next one in the place of
// its words. `sums`: of this warp; `first`: nothing is there yet.
template <u32 STEPS>
DEVICE void multiply_tokens(const ThinPlaces& places, u32 begin, u32 end, u32 column, bool first, Unit<STEPS>& unit,
                            const Rows& next, bool more, const u8* x, const float* scales, float* sums) {
  const u32 lane = threadIdx.x % HALMA_WARP, g = lane / 4u, t = lane % 4u, group = ThinPlaces::group(places.room);
  u32 powers[STEPS];
  own_powers(unit, powers);
  if (more) load_scales(next, unit);
  x += column / STEP * 4u * group, scales += column / STEP * places.scales;
#pragma unroll 1
  for (u32 token = begin; token < end; token += 2u) {
    const u32 read = token + g / 4u, own = token + t / 2u;
    const u8* from = x + (g % 4u == t && read < end ? (read * 4u + t) * 16u : places.room * 64u);
    const bool load = more && token + 2u >= end;
    float value[2] = {0.0f, 0.0f};
#pragma unroll
    for (u32 s = 0; s < STEPS; ++s) {
      multiply_blocks(unit.word[s], powers[s], from + s * 4u * group, group, scales[s * places.scales + own], value);
      if (load) load_step(next, s, unit);
      warp_barrier();
    }
    value[0] = add(value[0], shuffle_xor(value[0], 1u)), value[1] = add(value[1], shuffle_xor(value[1], 1u));
    if (own >= end || t % 2u == 1u) continue;
    float* sum = sums + own * PITCH + g;
    sum[0] = first ? value[0] : add(sum[0], value[0]), sum[8] = first ? value[1] : add(sum[8], value[1]);
  }
}

// Of a token in shared memory and a row of the tile, what `slices` slices have given.
DEVICE float sum_slices(const float* sums, u32 room, u32 slices, u32 place, u32 row) {
  float sum = 0.0f;
  const float* from = sums + place * PITCH + row;
#pragma unroll
  for (u32 s = 0; s < SLICES; ++s)
    if (s < slices) sum = add(sum, from[s * room * PITCH]);
  return multiply(sum, CODES);
}

// Of a sum a token's choices in their order.
template <bool DOWN, bool FEW>
DEVICE void finish_tile(const Job& j, const Item& it, const Few& few, u32 slices, u32 room, const float* sums) {
  const u32 rows = DOWN ? ROWS : ROWS / 2u, tokens = DOWN && FEW ? j.pairs / j.choices : it.tokens;
  for (u32 i = threadIdx.x; i < tokens * rows; i += SLICES * HALMA_WARP) {
    const u32 row = i % rows, token = i / rows, slot = it.first + token;
    if (DOWN && FEW) {
      float sum = 0.0f;
      for (u32 choice = 0u; choice < j.choices; ++choice) {
        const u32 one = few.slot[token * j.choices + choice];
        if (one != ~0u) sum = add(sum, sum_slices(sums, room, slices, one, row));
      }
      store_outer(j, token, it.tile * ROWS + row, sum);
      continue;
    }
    const u32 place = FEW ? static_cast<u32>(few.index[slot]) : token;
    const float one = sum_slices(sums, room, slices, place, row);
    if (DOWN) store_outer(j, slot, it.tile * ROWS + row, one);
    else store_inner(j, slot, it.tile * rows + row, one, sum_slices(sums, room, slices, place, 8u + row));
  }
}

template <bool DOWN, bool FEW, u32 STEPS> DEVICE void walk_thin(Job j, u8* memory, Lists& lists, Few& few) {
  constexpr bool SUM = DOWN && FEW;   // an item is a tile and all experts' tokens in turn
  constexpr u32 WIDTH = STEPS * STEP; // columns of a unit
  const u32 warp = threadIdx.x / HALMA_WARP, tiles = j.n / ROWS;
  const u32 units = j.k / WIDTH, rounds = (units + SLICES - 1u) / SLICES, slices = units < SLICES ? units : SLICES;
  const ThinPlaces places{j.tiles, 8u};
  float* scales = reinterpret_cast<float*>(memory + j.k / STEP * 4u * ThinPlaces::group(places.room));
  float* sums = scales + j.k / STEP * 8u;
  // The routing and the weights are older than the grid before `down`: that one began behind its own wait.
  if (!DOWN) grid_wait(), grid_trigger();
  choose_layer(j);
  u32 slots = 0u, passes = 1u;
  if constexpr (FEW) {
    passes = lay_out_few(j, few, slots);
    j.index = nullptr, j.factor = few.factor;
  } else {
    read_lists(j, lists);
    number_items(tiles, places.room, lists);
  }
  const u32 all = SUM ? passes == 0u ? 0u : tiles : FEW ? passes * tiles : lists.starts[MOST_EXPERTS];
  const u32 begin = begin_of(all, blockIdx.x), end = begin_of(all, blockIdx.x + 1u);
  const u32 staged = DOWN ? slots : FEW ? j.pairs / j.choices : 0u;

  // Item n, whose tokens may be those of `near`; of a sum for the expert `pass`.
  const auto find = [&](u32 n, u32 pass, const Item& near) {
    Item found = near;
    if (SUM || n - near.begin >= near.end - near.begin) {
      if constexpr (FEW) {
        if (!SUM) pass = n / tiles;
        const Run run = few.runs[warp][pass];
        found = Item{run.expert, n, run.first, run.tokens, pass * tiles, (pass + 1u) * tiles};
      } else {
        found = search(lists, tiles, places.room, n);
      }
    }
    found.tile = SUM ? n : n - found.begin;
    return found;
  };
  Item now{}, next{};
  Unit<STEPS> unit;
  if (begin < end) {
    now = find(begin, 0u, now);
    if (warp < units) load_unit(rows_of<DOWN>(j, now, warp * WIDTH), unit);
  }
  for (u32 i = threadIdx.x; i < j.k / STEP * 4u; i += blockDim.x)
    *reinterpret_cast<Quad*>(memory + (i + 1u) * ThinPlaces::group(places.room) - 16u) = Quad{{0u, 0u, 0u, 0u}};
  if (DOWN) grid_wait(), grid_trigger();

  u32 buffer = 0u, until = begin;
#pragma unroll 1
  for (u32 n = begin; n < end; ++n) {
    if (n == until) {
      until = FEW || now.end > end ? end : now.end;
      block_barrier();
      if (FEW) stage_tokens<DOWN, 2u>(j, places, 0u, staged, memory, scales);
      else stage_tokens<DOWN, DOWN ? 1u : 2u>(j, places, now.first, now.tokens, memory, scales);
      block_barrier();
    }
    float* own = sums + (buffer * SLICES + warp) * places.room * PITCH;
    u32 round = 0u, pass = 0u;
#pragma unroll 1
    for (;;) {
      const bool ends = round + 1u == rounds, last = ends && (!SUM || pass + 1u == passes);
      const u32 here = round * SLICES + warp, there = ends ? warp : here + SLICES;
      bool more = there < units;
      next = now;
      if (last) {
        more = more && n + 1u < end;
        if (n + 1u < end) next = find(n + 1u, 0u, now);
      } else if (SUM && ends) {
        next = find(n, pass + 1u, now);
      }
      const Rows rows = rows_of<DOWN>(j, next, more ? there * WIDTH : 0u);
      if (here < units) {
        // In shared memory `up` has a few tokens once each, whosever they are, and `down` all slots.
        const u32 first = SUM ? now.first : 0u, tokens = FEW && !DOWN ? staged : now.tokens;
        multiply_tokens<STEPS>(places, first, first + tokens, here * WIDTH, round == 0u, unit, rows, more, memory, scales, own);
      } else if (more) {
        load_unit(rows, unit);
      }
      if (last) break;
      ++round;
      if (ends) round = 0u, ++pass, now = next;
    }
    block_barrier();
    finish_tile<DOWN, FEW>(j, now, few, slices, places.room, sums + buffer * SLICES * places.room * PITCH);
    now = next, buffer ^= 1u;
  }
  if (!SUM || passes != 0u) return;
  block_barrier();
  for (now.tile = blockIdx.x; now.tile < tiles; now.tile += gridDim.x)
    finish_tile<DOWN, FEW>(j, now, few, 0u, places.room, sums);
}
