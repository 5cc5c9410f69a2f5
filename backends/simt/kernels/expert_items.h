// Items of experts.cu: their numbering, and the copies of their weights and tokens into shared memory.
#pragma once
#include "matrix.h"
#include "rounding.h"

#define MOST_EXPERTS 256u
#define DEVICE_METHOD __device__ __forceinline__
#define MOST_PAIRS 64u              // that blocks lay out themselves
#define WARPS 8u
#define PAIR (2u * 16u)             // weight rows of a warp
#define UNIT 4096u                  // 32 rows x 128 bytes
#if HALMA_BITS == 8
#define SCALES 16u
#define WIDTH 128u
#define TOKEN 128u
#define BLOCKS 1u
#elif HALMA_BITS == 16
#define SCALES 0u
#define WIDTH 64u
#define TOKEN 128u
#define BLOCKS 0u
#else
#error "HALMA_BITS is 8 or 16"
#endif

struct Job {
  const u8 *weight, *scale;         // [experts][n][k], packed; see HALMA_BITS. With a layer: tables of their addresses
  const u8* x;                      // [rows][k]
  const float* x_scale;             // [rows][k / 128]
  const int* index;                 // slot -> row of x; null: row = slot
  const float* factor;              // [slots], up only
  const int *counts, *offsets;      // [experts], [experts + 1]
  u8* out;                          // up: [slots][n / 2], fp32 (bf16 for bf16 weights); down: [slots][n]
  const int* layer;                 // which entry of the tables, or null
  u32 k, n, experts;
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
        static_cast<u32>(shape), static_cast<u32>(shape >> 32), static_cast<u32>(options) & 0xffffu,                   \
        static_cast<u32>(options) >> 17 & 0x7fu, static_cast<u32>(options) >> 24 & 0xffu,                              \
        (options & 0x10000u) != 0u, float_of(static_cast<u32>(options >> 32))                                          \
  }

// What a block knows of the routing.
struct Lists {
  u32 starts[MOST_EXPERTS + 1u];    // first item of an expert
  u32 counts[MOST_EXPERTS], offsets[MOST_EXPERTS];
};
// The routing of a few pairs, laid out by every block for itself.
struct Few {
  u32 expert[MOST_PAIRS];           // of a pair
  u32 slot[MOST_PAIRS];             // of a pair; ~0: it has none
  int index[MOST_PAIRS];            // slot -> token
  float factor[MOST_PAIRS];         // slot -> weight
  float parts[MOST_PAIRS][PAIR];    // down: what a slot gives to one tile of columns
};
struct Item {
  u32 expert, tile, first, tokens;  // `first`: slot
};

template <bool DOWN, u32 P, u32 NT> struct Shape {
  static constexpr u32 S = WARPS / P, TOKENS = 8u * NT, STAGES = P == WARPS ? HALMA_WIDE_STAGES : HALMA_THIN_STAGES;
  static constexpr u32 TOKENS_AT = WARPS * (UNIT + SCALES);
  static constexpr u32 X_SCALES_AT = TOKENS_AT + S * TOKENS * TOKEN;
  static constexpr u32 STAGE = (X_SCALES_AT + S * BLOCKS * TOKENS * 4u + 127u) / 128u * 128u;
  static constexpr u32 PITCH = 36u;     // floats of a token in the sums of slices: no conflicts of banks
  static constexpr u32 SUMS = S == 1u ? 0u : WARPS * TOKENS * PITCH * 4u;
};

// What a launch is given (halma.backends.simt.expert_sources).
static_assert(Shape<false, 1u, 1u>::STAGE == HALMA_THIN_BYTES && Shape<false, 1u, 1u>::SUMS == HALMA_SUM_BYTES, "thin");
static_assert(Shape<false, WARPS, 4u>::STAGE == HALMA_WIDE_BYTES && Shape<false, WARPS, 4u>::SUMS == 0u, "wide");

DEVICE u32 bytes_of_row(const Job& j) { return j.k / 8u * HALMA_BITS; }
DEVICE u32 swizzle_weight(u32 row) {
#if HALMA_BITS == 8
  return (row & 3u) << 1;
#else
  return (row & 1u) << 2;
#endif
}
DEVICE u32 swizzle_token(u32 row) {
#if HALMA_BITS == 16
  return (row & 1u) << 2;
#else
  return (row & 3u) << 1;
#endif
}

// -------------------------------------------------------------------------------------------------- the items
DEVICE void read_lists(const Job& j, Lists& l) {
  for (u32 e = threadIdx.x; e < MOST_EXPERTS; e += blockDim.x) {
    l.counts[e] = e < j.experts ? static_cast<u32>(j.counts[e]) : 0u;
    l.offsets[e] = e < j.experts ? static_cast<u32>(j.offsets[e]) : 0u;
  }
  block_barrier();
}

// As expert_layout orders them: by expert, then by pair.
DEVICE void lay_out_few(const Job& j, Lists& l, Few& f) {
  const u32 pair = threadIdx.x;
  u32 expert = ~0u;
  float weight = 0.0f;
  if (pair < j.pairs) {
    u64 id = reinterpret_cast<const u64*>(j.counts)[pair];
    expert = id < j.experts ? static_cast<u32>(id) : ~0u;
    weight = j.factor[pair];
    f.expert[pair] = expert;
  }
  for (u32 e = threadIdx.x; e < MOST_EXPERTS; e += blockDim.x) l.counts[e] = 0u;
  block_barrier();
  if (pair < j.pairs) {
    u32 slot = 0u, earlier = 0u;
    for (u32 other = 0u; other < j.pairs; ++other) {
      u32 theirs = f.expert[other];
      slot += theirs < expert || (theirs == expert && other < pair) ? 1u : 0u;
      earlier += theirs == expert && other < pair ? 1u : 0u;
    }
    if (expert != ~0u) {
      add_shared(&l.counts[expert], 1u);
      if (earlier == 0u) l.offsets[expert] = slot;
      f.index[slot] = static_cast<int>(pair / j.choices);
      f.factor[slot] = weight;
    }
    f.slot[pair] = expert != ~0u ? slot : ~0u;
  }
  block_barrier();
}

template <class SHAPE> DEVICE void number_items(u32 tiles, Lists& l) {
  if (threadIdx.x < HALMA_WARP) {
    const u32 each = MOST_EXPERTS / HALMA_WARP, lane = threadIdx.x;
    u32 own = 0u;
    for (u32 i = 0; i < each; ++i) own += (l.counts[lane * each + i] + SHAPE::TOKENS - 1u) / SHAPE::TOKENS * tiles;
    u32 sum = own;
    for (u32 step = 1u; step < HALMA_WARP; step *= 2u) {
      u32 before = shuffle_from(sum, lane >= step ? lane - step : lane);
      if (lane >= step) sum += before;
    }
    u32 start = sum - own;
    for (u32 i = 0; i < each; ++i) {
      l.starts[lane * each + i] = start;
      start += (l.counts[lane * each + i] + SHAPE::TOKENS - 1u) / SHAPE::TOKENS * tiles;
    }
    if (lane == HALMA_WARP - 1u) l.starts[MOST_EXPERTS] = start;
  }
  block_barrier();
}

// Passes over one tile are neighbours, so that its weights are read from the memory once.
template <class SHAPE> DEVICE Item item_at(const Lists& l, u32 n) {
  u32 low = 0u, high = MOST_EXPERTS;
  while (high - low > 1u) {
    u32 middle = (low + high) / 2u;
    if (l.starts[middle] <= n) low = middle;
    else high = middle;
  }
  u32 count = l.counts[low], passes = (count + SHAPE::TOKENS - 1u) / SHAPE::TOKENS, local = n - l.starts[low];
  u32 begin = local % passes * SHAPE::TOKENS, left = count - begin;
  return Item{low, local / passes, l.offsets[low] + begin, left < SHAPE::TOKENS ? left : SHAPE::TOKENS};
}

// ------------------------------------------------------------------------------------------------- the copies
template <bool DOWN, u32 P> DEVICE u32 weight_row(const Job& j, u32 tile, u32 pair, u32 row) {
  if (DOWN) return (tile * P + pair) * PAIR + row;
  u32 channel = (tile * P + pair) * (PAIR / 2u) + row % (PAIR / 2u);
  return row < PAIR / 2u ? channel : j.n / 2u + channel;
}

template <bool DOWN, u32 P> DEVICE void copy_weights(const Job& j, const Item& it, u32 stage, u8* to) {
  const u32 S = WARPS / P, warp = threadIdx.x / HALMA_WARP, lane = threadIdx.x % HALMA_WARP, pair = warp / S;
  const u32 at = (stage * S + warp % S) * 128u, row_bytes = bytes_of_row(j);
  if (at >= row_bytes) return;
  u8* unit = to + warp * (UNIT + SCALES);
  const u8* from = j.weight + static_cast<u64>(it.expert) * j.n * row_bytes + at + 16u * (lane % 8u);
#pragma unroll
  for (u32 i = 0; i < 8u; ++i) {
    u32 row = 4u * i + lane / 8u;
    copy16_async(unit + row * 128u + ((lane % 8u ^ swizzle_weight(row)) << 4),
                 from + static_cast<u64>(weight_row<DOWN, P>(j, it.tile, pair, row)) * row_bytes);
  }
#if HALMA_BITS == 8
  if (lane < 2u) {
    u64 line = static_cast<u64>(it.expert) * (j.n / 128u) + weight_row<DOWN, P>(j, it.tile, pair, 16u * lane) / 128u;
    copy4_async(unit + UNIT + 4u * lane, j.scale + line * (j.k / 128u) + at / 512u * 4u);
  }
#endif
}

template <bool DOWN, u32 P, u32 NT> DEVICE void copy_tokens(const Job& j, const Item& it, u32 stage, u8* to) {
  typedef Shape<DOWN, P, NT> Z;
  const u32 warp = threadIdx.x / HALMA_WARP, lane = threadIdx.x % HALMA_WARP, slice = warp % Z::S;
  const u32 helper = warp / Z::S * HALMA_WARP + lane, column = (stage * Z::S + slice) * WIDTH;
  if (column >= j.k) return;
  const u32 chunks = TOKEN / 16u, token_bytes = HALMA_BITS == 16 ? 2u * j.k : j.k;
  u8* unit = to + Z::TOKENS_AT + slice * Z::TOKENS * TOKEN;
  for (u32 i = helper; i < it.tokens * chunks; i += P * HALMA_WARP) {
    u32 token = i / chunks, chunk = i % chunks, slot = it.first + token;
    u32 row = j.index != nullptr ? static_cast<u32>(j.index[slot]) : slot;
    copy16_async(unit + token * TOKEN + ((chunk ^ swizzle_token(token)) << 4),
                 j.x + static_cast<u64>(row) * token_bytes + column / WIDTH * TOKEN + 16u * chunk);
  }
#if BLOCKS
  float* scales = reinterpret_cast<float*>(to + Z::X_SCALES_AT) + slice * BLOCKS * Z::TOKENS;
  for (u32 i = helper; i < it.tokens * BLOCKS; i += P * HALMA_WARP) {
    u32 token = i / BLOCKS, slot = it.first + token;
    u32 row = j.index != nullptr ? static_cast<u32>(j.index[slot]) : slot;
    copy4_async(scales + i % BLOCKS * Z::TOKENS + token,
                j.x_scale + static_cast<u64>(row) * (j.k / 128u) + column / 128u + i % BLOCKS);
  }
#endif
}

#if BLOCKS
// ------------------------------------------------------------------------------------- tokens that are not rounded
// Where items have few tokens, their rounding to e4m3 costs less beside the products than in a launch of its own: a warp
// rounds the columns of its own unit, bf16 for `up` and fp32 for `down`, one stage ahead. Two tokens wait in registers
// while the stage before is multiplied.
#define RAW_TOKENS 2u
#define EACH (WIDTH / HALMA_WARP)   // columns of a lane
template <bool DOWN> struct Raw {
  static constexpr u32 WORDS = EACH * (DOWN ? 4u : 2u) / 4u;
  u32 word[RAW_TOKENS][WORDS];
};

template <bool DOWN> DEVICE void load_raw(const Job& j, u32 slot, u32 column, u32* to) {
  u32 row = j.index != nullptr ? static_cast<u32>(j.index[slot]) : slot;
  const u8* from = j.x + (static_cast<u64>(row) * j.k + column) * (DOWN ? 4u : 2u);
#pragma unroll
  for (u32 i = 0; i < Raw<DOWN>::WORDS; i += 2u) {
    u64 two = reinterpret_cast<const u64*>(from)[i / 2u];
    to[i] = static_cast<u32>(two), to[i + 1u] = static_cast<u32>(two >> 32);
  }
}

template <bool DOWN, u32 TOKENS> DEVICE void store_raw(const u32* word, u32 token, u8* unit, float* scales) {
  const u32 lane = threadIdx.x % HALMA_WARP, span = HALMA_WARP / BLOCKS;
  float value[EACH], most = 0.0f;
#pragma unroll
  for (u32 i = 0; i < EACH; ++i) {
    value[i] = DOWN ? float_of(word[i]) : bf16_to_float(word[i / 2u] >> 16u * (i % 2u) & 0xffffu);
    float size = value[i] < 0.0f ? -value[i] : value[i];
    most = size > most ? size : most;
  }
#pragma unroll
  for (u32 mask = span / 2u; mask != 0u; mask /= 2u) {
    float other = shuffle_xor(most, mask);
    most = other > most ? other : most;
  }
  u32 power = power_for(most);
  float inverse = inverse_of(power);
  u32 packed[EACH / 4u];
#pragma unroll
  for (u32 i = 0; i < EACH; i += 4u) {
    u32 four = 0u;
#pragma unroll
    for (u32 c = 0; c < 4u; ++c) four |= to_e4m3(multiply(value[i + c], inverse)) << 8u * c;
    packed[i / 4u] = four;
  }
  u8* to = unit + token * TOKEN + ((lane * EACH / 16u ^ swizzle_token(token)) << 4) + lane * EACH % 16u;
#pragma unroll
  for (u32 i = 0; i < EACH / 4u; ++i) reinterpret_cast<u32*>(to)[i] = packed[i];
  if (lane % span == 0u) scales[lane / span * TOKENS + token] = float_of(power);
}

// What a warp has to do for one stage: nothing where its unit lies behind the last column.
template <bool DOWN> DEVICE void begin_raw(const Job& j, const Item& it, u32 stage, Raw<DOWN>& raw) {
  const u32 column = (stage * WARPS + threadIdx.x / HALMA_WARP) * WIDTH;
  if (column >= j.k) return;
#pragma unroll
  for (u32 i = 0; i < RAW_TOKENS; ++i)
    if (i < it.tokens) load_raw<DOWN>(j, it.first + i, column + threadIdx.x % HALMA_WARP * EACH, raw.word[i]);
}
template <bool DOWN, class Z> DEVICE void end_raw(const Job& j, const Item& it, u32 stage, u8* to, Raw<DOWN>& raw) {
  const u32 warp = threadIdx.x / HALMA_WARP, column = (stage * WARPS + warp) * WIDTH;
  if (column >= j.k) return;
  u8* unit = to + Z::TOKENS_AT + warp * Z::TOKENS * TOKEN;
  float* scales = reinterpret_cast<float*>(to + Z::X_SCALES_AT) + warp * BLOCKS * Z::TOKENS;
#pragma unroll
  for (u32 i = 0; i < RAW_TOKENS; ++i)
    if (i < it.tokens) store_raw<DOWN, Z::TOKENS>(raw.word[i], i, unit, scales);
#pragma unroll 1
  for (u32 i = RAW_TOKENS; i < it.tokens; ++i) {
    load_raw<DOWN>(j, it.first + i, column + threadIdx.x % HALMA_WARP * EACH, raw.word[0]);
    store_raw<DOWN, Z::TOKENS>(raw.word[0], i, unit, scales);
  }
}
#endif
