// The two products of the routed experts for e2m1 weights (one power of two for 32 columns of a row): weights go
// straight from the memory into registers, tokens lie in shared memory as fp16 in the order of the fragments.
//
// A warp's unit is 16 weight rows x STEPS x 128 columns. Lane 4g + t holds rows g and g + 8 of it and takes 16 bytes of
// each at a step, which is one block of 32 columns: word w are columns 32t + 8w .. + 7. While a unit is multiplied, the
// words of the next one are loaded in the place of those that were used. In fp16 a code is 2^-14 of its value; it is
// multiplied by 2^14 times its block's power relative to the largest of the row in the unit, which the sum gets back.
// That is exact down to 2^-23 of the largest; what is below is rounded to 2^-25 of it.
//
// A block has WARPS = TILES x SLICES warps: tiles of 16 rows at a time, and slices of K whose sums are added up.
//   thin   1 tile, 8 slices, up to 8 tokens: one or some tokens, where there are fewer rows than warps
//   wide   16 tiles, 1 slice, up to 24 tokens: no barrier but where the tokens change
//   up:    h[slot] = swiglu(w1 . x, w3 . x) * factor[slot]; a tile is 8 rows of w1 and the same of w3
//   down:  out[slot] = w2 . h[slot]
// Items (a tile of rows, a pass of an expert's tokens) are numbered in the order expert, pass, tile, and a block has a
// range of them: it seldom changes its tokens, which it rounds to e4m3 itself where they are not.
#include "matrix.h"
#include "rounding.h"

#define MOST_EXPERTS 256u
#define MOST_PAIRS 8u               // that blocks lay out themselves: one tile of tokens
#define ROWS 16u                    // weight rows of a tile
#define STEP 128u                   // columns
#define BLOCK (2u * 16u)            // columns of one power
#define AHEAD 4u                    // items of a block that `down` fetches before `up` has ended
#ifndef HALMA_FP4_BATCH
#define HALMA_FP4_BATCH 3u          // groups of 8 columns that a thread loads before it rounds the first: of down_few
#endif
#ifndef HALMA_FP4_CHAINS
#define HALMA_FP4_CHAINS 2u         // sums of a thin step that are under way side by side: a product takes 33 clocks
#endif
#define PITCH 20u                   // floats of a token in the sums of slices: no conflicts of banks

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
  float parts[MOST_PAIRS][ROWS];    // down: what a slot gives to one tile of columns
};
struct Item {
  u32 expert, tile, first, tokens;  // `first`: slot
  u32 begin, end;                   // items of the same tokens
};

// -------------------------------------------------------------------------------------------------- the items
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

// ------------------------------------------------------------------------------------------------- the tokens
// Where tokens lie: `word` bytes for a word of all lanes, as these read them. Of one tile there are only as many as
// there is room for (`room`), and lanes of others read the last of them.
struct Places {
  u32 word, room;
};
template <u32 MOST> DEVICE Places places_of(const Job& j) {
  return MOST == 1u ? Places{j.tiles * 64u, j.tiles} : Places{j.tiles * 512u, j.tiles * 8u};
}
DEVICE u32 place_of(const Places& p, u32 token, u32 column) {
  return (column / STEP * 4u + column % BLOCK / 8u) * p.word + (token * 4u + column % STEP / BLOCK) * 16u;
}
template <u32 MOST> DEVICE u32 place_of_lane(const Places& p) {
  const u32 lane = threadIdx.x % HALMA_WARP, token = lane / 4u;
  return ((MOST > 1u || token < p.room ? token : p.room - 1u) * 4u + lane % 4u) * 16u;
}

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

// BATCH loads of a thread are under way at a time. Whole warps: k is a multiple of 512.
template <bool DOWN, u32 MOST, u32 BATCH>
DEVICE void stage_tokens(const Job& j, u32 first, u32 tokens, u8* x, float* scales) {
  const u32 eighths = j.k / 8u, all = tokens * eighths, tiles = MOST == 1u ? 1u : j.tiles;
  const Places places = places_of<MOST>(j);
#pragma unroll 1
  for (u32 begin = threadIdx.x; begin < all; begin += BATCH * blockDim.x) {
    Quad raw[BATCH][DOWN ? 2 : 1];
#pragma unroll
    for (u32 b = 0; b < BATCH; ++b) {
      const u32 i = begin + b * blockDim.x, slot = first + i / eighths;
      if (i >= all) continue;
      const u32 row = !DOWN && j.index != nullptr ? static_cast<u32>(j.index[slot]) : slot;
      load_eight<DOWN>(j, static_cast<u64>(row) * j.k + i % eighths * 8u, raw[b]);
    }
#pragma unroll
    for (u32 b = 0; b < BATCH; ++b) {
      const u32 i = begin + b * blockDim.x, token = i / eighths, column = i % eighths * 8u;
      if (i >= all) continue;
      float scale;
      *reinterpret_cast<Quad*>(x + place_of(places, token, column)) = round_eight<DOWN>(j, raw[b], scale);
      if (column % STEP == 0u) scales[(column / STEP * tiles + token / 8u) * 8u + token % 8u] = scale;
    }
  }
}

// ------------------------------------------------------------------------------------------------- the weights
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

// Brings the weights of one of the block's later items into the cache, while `up` is still at work.
DEVICE void fetch_ahead(const Job& j, const Item& it) {
  const u32 lines = j.k / 256u;       // of 128 bytes in a row
  const u64 row = static_cast<u64>(it.expert) * j.n + it.tile * ROWS;
  for (u32 i = threadIdx.x; i < ROWS * lines; i += blockDim.x) prefetch_line(j.weight + row * (j.k / 2u) + 128u * i);
  if (threadIdx.x < lines) prefetch_line(j.scale + row * (j.k / BLOCK) + 128u * threadIdx.x);
}

// A unit's words; the factors of its blocks, of both rows in a word, and the largest powers of the rows.
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

// factor[s]: fp16 of this lane's block of row g, and of row g + 8 in the upper half. `power`: fp32 of the rows.
template <u32 STEPS> DEVICE void powers(const Unit<STEPS>& u, u32* factor, float* power) {
  const u32 t = threadIdx.x % 4u, order = t | (t + 4u) << 8;
  u32 most = 0u;
#pragma unroll
  for (u32 s = 0; s < STEPS; ++s) {
    factor[s] = pick_bytes(u.scale[0][s], u.scale[1][s], order | order << 4) & 0x00ff00ffu;
    most = most_of_halves(most, factor[s]);
  }
  most = most_of_halves(most, shuffle_xor(most, 1u));
  most = most_of_halves(most, shuffle_xor(most, 2u));
#pragma unroll
  for (u32 s = 0; s < STEPS; ++s) {
    // 2^(14 - below): bits (29 - below) << 10; nought where that is no longer a normal number.
    const u32 left = most_of_halves(factor[s] + 0x001d001du, most) - most;
    factor[s] = left << 10;
  }
  power[0] = float_of(most << 23), power[1] = float_of(most << 7 & 0x7f800000u);
}

// Eight codes of a row times the factor: columns 0 4, 2 6 for one product and 1 5, 3 7 for the other.
DEVICE void decode(u32 word, u32 factor, u32 which, u32 (*a)[4]) {
  const u32 even = choose_bits(word << 4, word << 1, 0x80808080u), odd = choose_bits(word, word >> 3, 0x80808080u);
  a[0][which] = multiply_halves(even << 8 & 0x8e008e00u, factor), a[0][2u + which] = multiply_halves(even & 0x8e008e00u, factor);
  a[1][which] = multiply_halves(odd << 8 & 0x8e008e00u, factor), a[1][2u + which] = multiply_halves(odd & 0x8e008e00u, factor);
}

// ------------------------------------------------------------------------------------------------ the products
// One step for NT tiles of tokens: sum[n][0..1] row g at tokens 2t, 2t + 1; [2..3] row g + 8.
template <u32 NT, u32 CHAINS>
DEVICE void multiply_step(const Quad* words, u32 factor, const float* power, const u8* x, const float* scales, u32 pitch,
                          float (*sum)[4]) {
  const u32 lane = threadIdx.x % HALMA_WARP, t = lane % 4u;
  const u32 low = pick_bytes(factor, factor, 0x1010u), high = pick_bytes(factor, factor, 0x3232u);
  float part[NT * CHAINS][4];
#pragma unroll
  for (u32 n = 0; n < NT * CHAINS; ++n) part[n][0] = part[n][1] = part[n][2] = part[n][3] = 0.0f;
#pragma unroll
  for (u32 w = 0; w < 4u; ++w) {
    u32 a[2][4];
    decode(words[0].word[w], low, 0u, a);
    decode(words[1].word[w], high, 1u, a);
#pragma unroll
    for (u32 n = 0; n < NT; ++n) {
      const Quad b = *reinterpret_cast<const Quad*>(x + w * pitch + n * 512u);
      product_f16(part[n * CHAINS], a[0], b.word);
      product_f16(part[n * CHAINS + CHAINS - 1u], a[1], b.word + 2);
    }
  }
#pragma unroll
  for (u32 n = 0; n < NT; ++n) {
    const u64 both = *reinterpret_cast<const u64*>(scales + 8u * n + 2u * t);
    const float one = float_of(static_cast<u32>(both)), two = float_of(static_cast<u32>(both >> 32));
#pragma unroll
    for (u32 i = 0; i < 4u; ++i) {
      const float all = CHAINS == 2u ? add(part[n * CHAINS][i], part[n * CHAINS + CHAINS - 1u][i]) : part[n][i];
      sum[n][i] = multiply_add(all, multiply(i % 2u == 0u ? one : two, power[i / 2u]), sum[n][i]);
    }
  }
}

// The unit at `column`, and the loads of the next one in the place of its words.
template <bool DOWN, u32 STEPS, u32 NT, u32 MOST>
DEVICE void multiply_unit(const Job& j, u32 column, Unit<STEPS>& unit, const Rows& next, bool more, const u8* x,
                          const float* scales, float (*sum)[4]) {
  u32 factor[STEPS];
  float power[2];
  powers(unit, factor, power);
  if (more) load_scales(next, unit);
  const u32 tiles = MOST == 1u ? 1u : j.tiles, pitch = places_of<MOST>(j).word;
  const u8* own = x + place_of_lane<MOST>(places_of<MOST>(j));
#pragma unroll
  for (u32 s = 0; s < STEPS; ++s) {
    const u32 step = column / STEP + s;
    multiply_step<NT, MOST == 1u ? HALMA_FP4_CHAINS : 1u>(
        unit.word[s], factor[s], power, own + 4u * step * pitch, scales + step * tiles * 8u, pitch, sum);
    if (more) load_step(next, s, unit);
  }
}

// ------------------------------------------------------------------------------------------------- the results
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

// `before`: tokens of the tile in shared memory ahead of the item's.
template <bool DOWN, u32 MOST> DEVICE void finish_alone(const Job& j, const Item& it, float (*sum)[4]) {
  const u32 lane = threadIdx.x % HALMA_WARP, g = lane / 4u, t = lane % 4u;
#pragma unroll
  for (u32 n = 0; n < MOST; ++n)
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

template <bool DOWN, u32 SLICES, bool FEW>
DEVICE void finish_slices(const Job& j, const Item& it, u32 before, float* sums, Few& few, float (*sum)[4]) {
  const u32 warp = threadIdx.x / HALMA_WARP, lane = threadIdx.x % HALMA_WARP, g = lane / 4u, t = lane % 4u;
#pragma unroll
  for (u32 i = 0; i < 4u; ++i) sums[(warp * 8u + 2u * t + i % 2u) * PITCH + i / 2u * 8u + g] = sum[0][i];
  block_barrier();
  const u32 rows = DOWN ? ROWS : ROWS / 2u;
  for (u32 i = threadIdx.x; i < it.tokens * rows; i += SLICES * HALMA_WARP) {
    const u32 row = i % rows, token = i / rows;
    const u32 staged = FEW && !DOWN ? static_cast<u32>(few.index[it.first + token]) : before + token;
    const float* from = sums + staged * PITCH + row;
    float one = 0.0f, two = 0.0f;
#pragma unroll
    for (u32 s = 0; s < SLICES; ++s) {
      one = add(one, from[s * 8u * PITCH]);
      if (!DOWN) two = add(two, from[s * 8u * PITCH + 8u]);
    }
    if (DOWN && FEW) few.parts[it.first + token][row] = one;
    else if (DOWN) store_outer(j, it.first + token, it.tile * ROWS + row, one);
    else store_inner(j, it.first + token, it.tile * rows + row, one, two);
  }
}

// A token's choices in their order, once all slots have given to these columns; nought where it has none.
DEVICE void add_up(const Job& j, u32 tile, const Few& few) {
  for (u32 i = threadIdx.x; i < j.pairs / j.choices * ROWS; i += blockDim.x) {
    const u32 token = i / ROWS, column = i % ROWS;
    float sum = 0.0f;
    for (u32 choice = 0u; choice < j.choices; ++choice) {
      const u32 slot = few.slot[token * j.choices + choice];
      if (slot != ~0u) sum = add(sum, few.parts[slot][column]);
    }
    store_outer(j, token, tile * ROWS + column, sum);
  }
}

// ---------------------------------------------------------------------------------------------------- a block
template <bool DOWN, u32 TILES, u32 SLICES, u32 STEPS, u32 MOST, bool FEW>
DEVICE void walk(Job j, u8* memory, Lists& lists, Few& few) {
  constexpr bool SUM = DOWN && FEW;   // all passes over a tile in turn: item n is tile x passes + pass
  const u32 warp = threadIdx.x / HALMA_WARP, slice = warp % SLICES;
  const u32 rounds = (j.k / (STEPS * STEP) + SLICES - 1u) / SLICES, tokens = MOST == 1u ? 8u : 8u * j.tiles;
  const u32 tiles = j.n / ROWS, room = places_of<MOST>(j).room;
  constexpr u32 BATCH = MOST > 1u || (DOWN && !FEW) ? 1u : DOWN || HALMA_FP4_BATCH < 2u ? HALMA_FP4_BATCH : 2u;
  // The routing and the weights are older than the grid before `down`: that one began behind its own wait.
  if (!DOWN) grid_wait(), grid_trigger();
  if (j.layer != nullptr) {
    j.weight = reinterpret_cast<const u8* const*>(j.weight)[*j.layer];
    j.scale = reinterpret_cast<const u8* const*>(j.scale)[*j.layer];
  }
  u32 slots = 0u, passes;
  if constexpr (FEW) {
    passes = lay_out_few(j, few, slots);
    j.index = nullptr, j.factor = few.factor;
  } else {
    read_lists(j, lists);
    number_items(tiles, tokens, lists);
    passes = lists.starts[MOST_EXPERTS];
  }
  const u32 all = SUM ? tiles : FEW ? passes * tiles : passes, each = SUM ? passes : 1u;
  const u32 part = all / gridDim.x, rest = all % gridDim.x, b = blockIdx.x;
  const u32 begin = (b * part + (b < rest ? b : rest)) * each, end = begin + (part + (b < rest ? 1u : 0u)) * each;
  float* scales = reinterpret_cast<float*>(memory + static_cast<u64>(room) * j.k * 2u);
  float* sums = scales + (MOST == 1u ? 1u : j.tiles) * (j.k / STEP) * 8u;
  u32 buffer = 0u;

  Item now{};
  Unit<STEPS> unit;
  const auto find = [&](u32 n, const Item& near) {
    if constexpr (FEW) {
      const Run run = few.runs[warp][SUM ? n % passes : n / tiles];
      return Item{run.expert, SUM ? n / passes : n % tiles, run.first, run.tokens, begin, end};
    }
    Item found = near;
    if (n - near.begin < near.end - near.begin) found.tile = n - near.begin;
    else found = search(lists, tiles, tokens, n);
    return found;
  };
  u32 p = begin + warp / SLICES;
  if (p < end) {
    now = find(p, now);
    if (slice * STEPS * STEP < j.k) {
      const Rows first = rows_of<DOWN>(j, now, slice * STEPS * STEP);
      load_scales(first, unit);
#pragma unroll
      for (u32 s = 0; s < STEPS; ++s) load_step(first, s, unit);
    }
  }
  if (DOWN) {
    if constexpr (SLICES > 1u) {
      const u32 stop = end - begin > AHEAD + 1u ? begin + AHEAD + 1u : end;
      for (u32 n = begin + 1u; n < stop; ++n) fetch_ahead(j, find(n, now));
    }
    grid_wait(), grid_trigger();
  }

  u32 from = begin;
#pragma unroll 1
  while (from < end) {
    Item segment = find(from, now);
    if (FEW) segment.first = 0u, segment.tokens = DOWN ? slots : j.pairs / j.choices;
    const u32 last = segment.end < end ? segment.end : end;
    block_barrier();
    stage_tokens<DOWN, MOST, BATCH>(j, segment.first, segment.tokens, memory, scales);
    block_barrier();
#pragma unroll 1
    while (p < last) {
      float sum[MOST][4];
#pragma unroll
      for (u32 n = 0; n < MOST; ++n) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.0f;
      Item next = now;
      const u32 p_next = p + TILES;
#pragma unroll 1
      for (u32 round = 0u; round < rounds; ++round) {
        const u32 column = (round * SLICES + slice) * STEPS * STEP;
        u32 column_next = column + SLICES * STEPS * STEP;
        bool more = true;
        if (round + 1u == rounds) {
          column_next = slice * STEPS * STEP, more = p_next < end;
          if (more) next = find(p_next, now);
        }
        more = more && column_next < j.k;
        const Rows rows = rows_of<DOWN>(j, next, more ? column_next : 0u);
        if (column < j.k) {
          if constexpr (MOST == 1u) {
            multiply_unit<DOWN, STEPS, 1u, MOST>(j, column, unit, rows, more, memory, scales, sum);
          } else {
            if (now.tokens <= 8u) multiply_unit<DOWN, STEPS, 1u, MOST>(j, column, unit, rows, more, memory, scales, sum);
            else if (now.tokens <= 16u) multiply_unit<DOWN, STEPS, 2u, MOST>(j, column, unit, rows, more, memory, scales, sum);
            else multiply_unit<DOWN, STEPS, 3u, MOST>(j, column, unit, rows, more, memory, scales, sum);
          }
        } else if (more) {
          load_scales(rows, unit);
#pragma unroll
          for (u32 s = 0; s < STEPS; ++s) load_step(rows, s, unit);
        }
      }
      if constexpr (SLICES == 1u) {
        finish_alone<DOWN, MOST>(j, now, sum);
      } else {
        finish_slices<DOWN, SLICES, FEW>(j, now, FEW ? now.first : 0u, sums + buffer * SLICES * 8u * PITCH, few, sum);
        buffer ^= 1u;
        if (SUM && (p + 1u) % passes == 0u) block_barrier(), add_up(j, now.tile, few);
      }
      now = next, p = p_next;
    }
    from = last;
  }
  if (SUM && passes == 0u) block_barrier();
  if (SUM && passes == 0u)
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) add_up(j, tile, few);
}

#define EXPERTS(name, DOWN, TILES, SLICES, STEPS, MOST, FEW, RESIDENT)                                               \
  extern "C" __global__ void __launch_bounds__(TILES* SLICES* HALMA_WARP, RESIDENT) name(JOB_PARAMS) {                 \
    extern __shared__ __align__(128) u8 memory[];                                                                      \
    __shared__ Lists lists;                                                                                            \
    __shared__ Few few;                                                                                                \
    walk<DOWN, TILES, SLICES, STEPS, MOST, FEW>(JOB, memory, lists, few);                                              \
  }
EXPERTS(up_thin, false, 1u, 8u, 4u, 1u, false, 2)
EXPERTS(down_thin, true, 1u, 8u, 2u, 1u, false, 3)
EXPERTS(up_few, false, 1u, 8u, 4u, 1u, true, 2)
EXPERTS(down_few, true, 1u, 8u, 2u, 1u, true, 3)
EXPERTS(up_wide, false, 16u, 1u, 4u, 3u, false, 1)
EXPERTS(down_wide, true, 16u, 1u, 4u, 3u, false, 1)
