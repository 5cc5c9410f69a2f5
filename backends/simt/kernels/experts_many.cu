// The two products of the routed experts with e2m1 weights, for items of dozens to hundreds of rows an expert: the products
// of warp groups set the pace, on bf16 numbers. Both e2m1 with its power of two for 32 columns and e4m3 with its one for
// 128 are bf16 numbers exactly, so that scales are part of the operands and sums need none.
//
// Weight rows are the products' 64 rows and come from registers, where they are decoded while the products of those before
// run; tokens are the N lines in shared memory. A block of three groups takes a tile of 128 weight rows: one group copies
// stages of 128 columns, two multiply 64 rows each by all tokens of the item, up to MOST.
//
//   stage_*:  rows -> bf16 tokens, rounded as e4m3 would be, as the products read them: 64 columns of eight tokens are
//             1,024 bytes (warpgroup.h), columns permuted (`staged_column`), an expert's tokens together
//   up:       h[slot] = swiglu(w1 . x, w3 . x) in fp32; a tile is 64 channels of both
//   down:     out[slot] = w2 . h[slot]
//
//   HALMA_MOST    most tokens of an item: 64, 128 or 256
#include "warpgroup.h"
#include "rounding.h"

#define MOST_EXPERTS 256u
#define DEVICE_METHOD __device__ __forceinline__
#define MOST HALMA_MOST
#define STAGES HALMA_STAGES
#define TILE 128u                   // weight rows
#define DEPTH 128u                  // columns of a stage
#define PANEL (128u * MOST)         // bytes of 64 columns of the tokens
#define WEIGHTS_AT (2u * PANEL)
#define SCALES_AT (WEIGHTS_AT + TILE * DEPTH / 2u)
#define STAGE ((SCALES_AT + TILE * 4u + 1023u) / 1024u * 1024u)
#define EIGHT 1024u                 // bytes of eight tokens' 64 columns
#define UNIT 4294967296.0f          // decoded weights are 2^-32 of their value: their range is 2^-93 .. 2^33
static_assert(STAGE == HALMA_STAGE_BYTES, "what a launch is given (halma.backends.simt.many_sources)");

struct Job {
  const u8 *weight, *scale;         // [experts][n][k / 2] and [experts][n][k / 32]; with a layer: tables of addresses
  const u8* x;                      // staged tokens
  const int *counts, *offsets;      // [experts], [experts + 1]
  u8* out;                          // up: [slots][n / 2] fp32; down: [slots][n]
  const int* layer;                 // which entry of the tables, or null
  u32 k, n, experts;
  bool narrow;                      // down: bf16, else fp32
  float limit;
};
struct Lists {
  u32 starts[MOST_EXPERTS + 1u];    // first item of an expert
  u32 counts[MOST_EXPERTS], offsets[MOST_EXPERTS];
};
struct Item {
  u32 expert, tile, first, tokens;  // `first`: of the expert's tokens, a multiple of 8
};

DEVICE u32 eights(u32 count) { return (count + 7u) / 8u; }
// Where an expert's staged tokens begin, in eights: room for the last, part filled one of every expert before.
DEVICE u32 first_eight(u32 expert, u32 offset) { return offset / 8u + expert; }

// -------------------------------------------------------------------------------------------------- the items
DEVICE void read_lists(const int* counts, const int* offsets, u32 experts, Lists& l) {
  for (u32 e = threadIdx.x; e < MOST_EXPERTS; e += blockDim.x) {
    l.counts[e] = e < experts ? static_cast<u32>(counts[e]) : 0u;
    l.offsets[e] = e < experts ? static_cast<u32>(offsets[e]) : ~0u;
  }
  block_barrier();
}
DEVICE u32 passes_of(u32 count) { return (eights(count) + MOST / 8u - 1u) / (MOST / 8u); }
DEVICE void number_items(u32 tiles, Lists& l) {
  if (threadIdx.x < HALMA_WARP) {
    const u32 each = MOST_EXPERTS / HALMA_WARP, lane = threadIdx.x;
    u32 own = 0u;
    for (u32 i = 0; i < each; ++i) own += passes_of(l.counts[lane * each + i]) * tiles;
    u32 sum = own;
    for (u32 step = 1u; step < HALMA_WARP; step *= 2u) {
      u32 before = shuffle_from(sum, lane >= step ? lane - step : lane);
      if (lane >= step) sum += before;
    }
    u32 start = sum - own;
    for (u32 i = 0; i < each; ++i) {
      l.starts[lane * each + i] = start;
      start += passes_of(l.counts[lane * each + i]) * tiles;
    }
    if (lane == HALMA_WARP - 1u) l.starts[MOST_EXPERTS] = start;
  }
  block_barrier();
}
// The last of `list`'s ascending entries that is not above `value`.
DEVICE u32 entry_of(const u32* list, u32 value) {
  u32 low = 0u, high = MOST_EXPERTS;
  while (high - low > 1u) {
    u32 middle = (low + high) / 2u;
    if (list[middle] <= value) low = middle;
    else high = middle;
  }
  return low;
}
// Passes over one tile are neighbours: its weights are read from the memory once; and so are an expert's tiles.
DEVICE Item item_at(const Lists& l, u32 n) {
  u32 expert = entry_of(l.starts, n), count = l.counts[expert], passes = passes_of(count), local = n - l.starts[expert];
  u32 most = (eights(count) + passes - 1u) / passes * 8u, first = local % passes * most, left = count - first;
  return Item{expert, local / passes, first, left < most ? left : most};
}
// Row r of a tile: for `up`, eights of w1 and of w3 in turn, so that a lane's rows g and g + 8 are one channel.
template <bool DOWN> DEVICE u32 weight_row(u32 n, u32 tile, u32 r) {
  if (DOWN) return tile * TILE + r;
  return tile * (TILE / 2u) + r / 16u * 8u + r % 8u + (r % 16u < 8u ? 0u : n / 2u);
}

// ------------------------------------------------------------------------------------------------- the copies
struct Ring {
  u8* memory;
  u64 *full, *empty;                // [STAGES]
  u32 slot, parity;
  DEVICE_METHOD void next() {
    if (++slot == STAGES) slot = 0u, parity ^= 1u;
  }
};

template <bool DOWN> DEVICE void copy_item(const Job& j, const Lists& l, const Item& it, Ring& ring) {
  const u32 thread = threadIdx.x % GROUP_THREADS, row_bytes = j.k / 2u;
  const u8* weight = j.weight + static_cast<u64>(it.expert) * j.n * row_bytes;
  u32 from[4];
#pragma unroll
  for (u32 i = 0; i < 4u; ++i) {
    u32 row = 32u * i + thread / 4u;
    from[i] = weight_row<DOWN>(j.n, it.tile, row) * row_bytes + thread % 4u * 16u;
  }
  const u8* scale = j.scale + (static_cast<u64>(it.expert) * j.n + weight_row<DOWN>(j.n, it.tile, thread)) * (j.k / 32u);
  const u32 count = eights(l.counts[it.expert]), bytes = eights(it.tokens) * EIGHT;
  const u8* x = j.x + (static_cast<u64>(first_eight(it.expert, l.offsets[it.expert])) * (j.k / 64u) + it.first / 8u) * EIGHT;
#pragma unroll 1
  for (u32 column = 0u; column < j.k; column += DEPTH) {
    phase_await(ring.empty + ring.slot, ring.parity ^ 1u);
    u8* to = ring.memory + ring.slot * STAGE;
    u64* full = ring.full + ring.slot;
    if (thread == 0u) {
      phase_announce(full, 2u * bytes);
      copy_bulk(to, x, bytes, full);
      copy_bulk(to + PANEL, x + count * EIGHT, bytes, full);
    }
#pragma unroll
    for (u32 i = 0; i < 4u; ++i) copy16_async(to + WEIGHTS_AT + (i * GROUP_THREADS + thread) * 16u, weight + from[i]);
    copy4_async(to + SCALES_AT + thread * 4u, scale);
    phase_arrive_after_copies(full);
    weight += DEPTH / 2u, scale += DEPTH / 32u, x += 2u * count * EIGHT;
    ring.next();
  }
}

// ------------------------------------------------------------------------------------------------ the products
// Eight codes of a row as four pairs of bf16 numbers: codes i and i + 4. Sign, exponent and mantissa of a code, put where
// bf16 has its own, are 2^-126 of the value; the factor makes that 2^-32 of it, with the scale.
DEVICE void decode(u32 word, u32 factor, u32* pair) {
  pair[0] = multiply_bf16x2((word << 12 & 0x80008000u) | (word << 6 & 0x01c001c0u), factor);
  pair[1] = multiply_bf16x2((word << 8 & 0x80008000u) | (word << 2 & 0x01c001c0u), factor);
  pair[2] = multiply_bf16x2((word << 4 & 0x80008000u) | (word >> 2 & 0x01c001c0u), factor);
  pair[3] = multiply_bf16x2((word & 0x80008000u) | (word >> 6 & 0x01c001c0u), factor);
}
// Scales beyond the range become infinities, which show.
DEVICE u32 factor_of(u32 scale) {
  u32 exponent = scale + 94u;
  return (exponent < 255u ? exponent : 255u) * 0x00800080u;
}
// A lane has 32 neighbouring columns of a stage's 128; the words of its codes are the products' columns in turn.
// c: a column of the stage; returns where it is among the staged ones.
DEVICE u32 staged_column(u32 c) { return c / 8u % 4u * 32u + c % 4u / 2u * 16u + c % 2u * 8u + c / 32u * 2u + c / 4u % 2u; }

// Half a stage, 64 columns, as four products of N = 16 LOW .. 16 HIGH lines: the smallest that holds the tokens. The choice
// is made here, within one loop for every N: with a loop for each, the assembler keeps registers apart for every one's
// operands and puts a wait behind every product for want of them. For the same reason a batch is closed where it began.
template <u32 LOW, u32 HIGH> DEVICE void multiply_fitting(float* sums, u32 (*a)[4], u64 lines, u32 sixteens) {
  if constexpr (LOW == HIGH) {
#pragma unroll
    for (u32 s = 0; s < 4u; ++s) GroupProduct<16u * LOW>::run(sums, a[s], lines + 2u * s);
    products_commit();
  } else {
    constexpr u32 MIDDLE = (LOW + HIGH) / 2u;
    if (sixteens <= MIDDLE) multiply_fitting<LOW, MIDDLE>(sums, a, lines, sixteens);
    else multiply_fitting<MIDDLE + 1u, HIGH>(sums, a, lines, sixteens);
  }
}
DEVICE void multiply_half(float* sums, u32 (*a)[4], const u32* upper, const u32* lower, u32 upper_factor, u32 lower_factor,
                          u64 lines, u32 sixteens) {
#pragma unroll
  for (u32 w = 0; w < 2u; ++w) {
    u32 high[4], low[4];
    decode(upper[w], upper_factor, high), decode(lower[w], lower_factor, low);
#pragma unroll
    for (u32 h = 0; h < 2u; ++h) {
      a[2u * w + h][0] = high[2u * h], a[2u * w + h][1] = low[2u * h];
      a[2u * w + h][2] = high[2u * h + 1u], a[2u * w + h][3] = low[2u * h + 1u];
    }
  }
  products_fence();
  multiply_fitting<1u, MOST / 16u>(sums, a, lines, sixteens);
}

DEVICE float swiglu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return multiply(multiply(gate, reciprocal(add(1.0f, exponential(-gate)))), up);
}

// A lane's rows g and g + 8 of one token: a channel's w1 and w3, or two columns.
template <bool DOWN> DEVICE void store(const Job& j, u8* to, float high, float low) {
  const float one = multiply(high, UNIT), two = multiply(low, UNIT);
  if (!DOWN) {
    *reinterpret_cast<float*>(to) = swiglu(one, two, j.limit);
  } else if (j.narrow) {
    const u32 both = pack_bf16(one, two);
    reinterpret_cast<u16*>(to)[0] = static_cast<u16>(both), reinterpret_cast<u16*>(to)[8] = static_cast<u16>(both >> 16);
  } else {
    reinterpret_cast<float*>(to)[0] = one, reinterpret_cast<float*>(to)[8] = two;
  }
}

template <bool DOWN> DEVICE void multiply_item(const Job& j, const Lists& l, const Item& it, Ring& ring) {
  const u32 lane = threadIdx.x % HALMA_WARP, g = lane / 4u, t = lane % 4u;
  const u32 row = (threadIdx.x / HALMA_WARP - 4u) * 16u + g;  // of the tile; and row + 8
  const u32 sixteens = (it.tokens + 15u) / 16u;
  float sums[MOST / 2u];
  u32 even[4][4], odd[4][4];
  u32 before = ~0u;
#pragma unroll
  for (u32 i = 0; i < MOST / 2u; ++i) sums[i] = 0.0f;
#pragma unroll 1
  for (u32 column = 0u; column < j.k; column += DEPTH) {
    phase_await(ring.full + ring.slot, ring.parity);
    const u8* from = ring.memory + ring.slot * STAGE;
    const Quad upper = *reinterpret_cast<const Quad*>(from + WEIGHTS_AT + row * 64u + 16u * t);
    const Quad lower = *reinterpret_cast<const Quad*>(from + WEIGHTS_AT + (row + 8u) * 64u + 16u * t);
    const u32 high = factor_of(from[SCALES_AT + 4u * row + t]), low = factor_of(from[SCALES_AT + 4u * (row + 8u) + t]);
    const u64 lines = describe_lines(shared_address(from));
    multiply_half(sums, even, upper.word, lower.word, high, low, lines, sixteens);
    products_await<1>();
    if (before != ~0u && lane == 0u) phase_arrive(ring.empty + before);
    multiply_half(sums, odd, upper.word + 2, lower.word + 2, high, low, lines + PANEL / 16u, sixteens);
    products_await<1>();
    before = ring.slot;
    ring.next();
  }
  products_await<0>();
  if (lane == 0u) phase_arrive(ring.empty + before);

  const u32 width = DOWN ? j.n : j.n / 2u, size = DOWN && j.narrow ? 2u : 4u, line = width * size;
  u8* to = j.out + (static_cast<u64>(l.offsets[it.expert]) + it.first + 2u * t) * line;
  to += weight_row<DOWN>(j.n, it.tile, row) * size;
#pragma unroll
  for (u32 n = 0; n < MOST / 8u; ++n, to += 8u * line) {
    if (8u * n >= it.tokens) break;
#pragma unroll
    for (u32 i = 0; i < 2u; ++i) {
      if (8u * n + 2u * t + i < it.tokens) store<DOWN>(j, to + i * line, sums[4u * n + i], sums[4u * n + 2u + i]);
    }
  }
}

// ---------------------------------------------------------------------------------------------------- a block
template <bool DOWN> DEVICE void walk(Job j, u8* memory, u64* full, u64* empty, Lists& lists) {
  grid_wait();
  grid_trigger();
  if (j.layer != nullptr) {
    j.weight = reinterpret_cast<const u8* const*>(j.weight)[*j.layer];
    j.scale = reinterpret_cast<const u8* const*>(j.scale)[*j.layer];
  }
  if (threadIdx.x == 0u) {
    for (u32 s = 0; s < STAGES; ++s) phase_begin(full + s, GROUP_THREADS + 1u), phase_begin(empty + s, 8u);
    phases_begun();
  }
  read_lists(j.counts, j.offsets, j.experts, lists);
  number_items(j.n / TILE, lists);
  const u32 total = lists.starts[MOST_EXPERTS];
  Ring ring{memory + (1024u - shared_address(memory) % 1024u) % 1024u, full, empty, 0u, 0u};
  if (threadIdx.x < GROUP_THREADS) {
    registers_given_up<40>();
    bulk_may_read();
#pragma unroll 1
    for (u32 n = blockIdx.x; n < total; n += gridDim.x) copy_item<DOWN>(j, lists, item_at(lists, n), ring);
  } else {
    registers_taken<232>();
#pragma unroll 1
    for (u32 n = blockIdx.x; n < total; n += gridDim.x)
      multiply_item<DOWN>(j, lists, item_at(lists, n), ring);
  }
}
#define EXPERTS(name, DOWN)                                                                                          \
  extern "C" __global__ void __launch_bounds__(3u * GROUP_THREADS, 1)                                                  \
      name(u64 weight, u64 scale, u64 x, u64 counts, u64 offsets, u64 out, u64 layer, u64 shape, u64 options) {        \
    extern __shared__ __align__(1024) u8 memory[];                                                                     \
    __shared__ Lists lists;                                                                                            \
    __shared__ __align__(8) u64 full[STAGES], empty[STAGES];                                                           \
    walk<DOWN>(Job{(const u8*)weight, (const u8*)scale, (const u8*)x, (const int*)counts, (const int*)offsets,         \
                   (u8*)out, (const int*)layer, static_cast<u32>(shape), static_cast<u32>(shape >> 32),                \
                   static_cast<u32>(options) & 0xffffu, (options & 0x10000u) != 0u,                                    \
                   float_of(static_cast<u32>(options >> 32))},                                                         \
               memory, full, empty, lists);                                                                            \
  }
EXPERTS(up_many, false)
EXPERTS(down_many, true)

// ------------------------------------------------------------------------------------------------- the tokens
// What rows are: bf16 and fp32 are rounded here, e4m3 comes with its scales.
enum Rows : u32 { BFLOAT16, FLOAT32, E4M3 };
#define AHEAD 8u                    // blocks of 128 columns that a warp loads before it uses them

template <Rows ROWS> DEVICE void values_of(Pair raw, float factor, const float* scale, u32* pairs) {
  float value[4], power;
  if (ROWS == E4M3) {
    const u32 one = widen_e4m3(static_cast<u32>(raw.low) & 0xffffu), two = widen_e4m3(static_cast<u32>(raw.low) >> 16);
    value[0] = f16_to_float(static_cast<u16>(one)), value[1] = f16_to_float(static_cast<u16>(one >> 16));
    value[2] = f16_to_float(static_cast<u16>(two)), value[3] = f16_to_float(static_cast<u16>(two >> 16));
    power = *scale;
  } else {
    float most = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 4u; ++i) {
      if (ROWS == FLOAT32) {
        value[i] = multiply(float_of(static_cast<u32>((i < 2u ? raw.low : raw.high) >> 32u * (i % 2u))), factor);
      } else {
        value[i] = bf16_to_float(static_cast<u32>(raw.low >> 16u * i) & 0xffffu);
      }
      float size = value[i] < 0.0f ? -value[i] : value[i];
      most = size > most ? size : most;
    }
#pragma unroll
    for (u32 mask = HALMA_WARP / 2u; mask != 0u; mask /= 2u) {
      float other = shuffle_xor(most, mask);
      most = other > most ? other : most;
    }
    const u32 bits = power_for(most);
    const float inverse = inverse_of(bits);
    power = float_of(bits);
#pragma unroll
    for (u32 i = 0; i < 4u; i += 2u) {
      const u32 both = to_e4m3(multiply(value[i], inverse)) | to_e4m3(multiply(value[i + 1u], inverse)) << 8;
      const u32 wide = widen_e4m3(both);
      value[i] = f16_to_float(static_cast<u16>(wide)), value[i + 1u] = f16_to_float(static_cast<u16>(wide >> 16));
    }
  }
  pairs[0] = pack_bf16(multiply(value[0], power), multiply(value[1], power));
  pairs[1] = pack_bf16(multiply(value[2], power), multiply(value[3], power));
}

// A warp takes AHEAD blocks of one slot at a time.
template <Rows ROWS>
DEVICE void stage_rows(const u8* x, const float* scales, const int* index, const float* factors, const Lists& l, u32 end,
                       u32 k, u8* out, u16* mine) {
  const u32 lane = threadIdx.x % HALMA_WARP, warps = blockDim.x / HALMA_WARP, blocks = k / 128u;
  const u32 parts = (blocks + AHEAD - 1u) / AHEAD, each = ROWS == FLOAT32 ? 16u : ROWS == BFLOAT16 ? 8u : 4u;
  u32 place[4];
#pragma unroll
  for (u32 i = 0; i < 4u; ++i) place[i] = staged_column(4u * lane + i);
#pragma unroll 1
  for (u32 n = blockIdx.x * warps + threadIdx.x / HALMA_WARP; n < end * parts; n += gridDim.x * warps) {
    const u32 slot = n / parts, first = n % parts * AHEAD, expert = entry_of(l.offsets, slot);
    const u32 local = slot - l.offsets[expert], count = l.counts[expert];
    if (local >= count) continue;
    const u64 row = index != nullptr ? static_cast<u64>(index[slot]) : slot;
    const u8* from = x + (row * k + first * 128u + 4u * lane) / 4u * each;
    Pair raw[AHEAD];
#pragma unroll
    for (u32 b = 0; b < AHEAD; ++b) {
      raw[b] = Pair{0u, 0u};
      if (first + b >= blocks) continue;
      const u8* at = from + b * HALMA_WARP * each;
      if (ROWS == FLOAT32) raw[b] = *reinterpret_cast<const Pair*>(at);
      else if (ROWS == BFLOAT16) raw[b].low = *reinterpret_cast<const u64*>(at);
      else raw[b].low = *reinterpret_cast<const u32*>(at);
    }
    const float factor = ROWS == FLOAT32 ? factors[slot] : 1.0f;
    u8* to = out + (static_cast<u64>(first_eight(expert, l.offsets[expert])) * (k / 64u) + local / 8u) * EIGHT;
    to += local % 8u * 128u + ((lane % 16u / 2u ^ local % 8u) << 4) + lane % 2u * 8u;
#pragma unroll
    for (u32 b = 0; b < AHEAD; ++b) {
      if (first + b >= blocks) continue;
      u32 pairs[2];
      values_of<ROWS>(raw[b], factor, scales + row * blocks + first + b, pairs);
#pragma unroll
      for (u32 i = 0; i < 4u; ++i) mine[place[i]] = static_cast<u16>(pairs[i / 2u] >> 16u * (i % 2u));
      warp_barrier();
      const u64 four = reinterpret_cast<const u64*>(mine)[lane];
      *reinterpret_cast<u64*>(to + static_cast<u64>(2u * (first + b) + lane / 16u) * eights(count) * EIGHT) = four;
      warp_barrier();
    }
  }
}
#define STAGE_ROWS(name, ROWS)                                                                                       \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      name(u64 x, u64 scales, u64 index, u64 factors, u64 counts, u64 offsets, u64 out, u64 shape) {                   \
    __shared__ Lists lists;                                                                                            \
    __shared__ __align__(8) u16 order[256u / HALMA_WARP][128];                                                         \
    grid_wait();                                                                                                       \
    grid_trigger();                                                                                                    \
    const u32 experts = static_cast<u32>(shape >> 32);                                                                 \
    read_lists((const int*)counts, (const int*)offsets, experts, lists);                                               \
    stage_rows<ROWS>((const u8*)x, (const float*)scales, (const int*)index, (const float*)factors, lists,              \
                     reinterpret_cast<const u32*>(offsets)[experts], static_cast<u32>(shape), (u8*)out,                \
                     order[threadIdx.x / HALMA_WARP]);                                                                 \
  }
STAGE_ROWS(stage_bfloat16, BFLOAT16)
STAGE_ROWS(stage_float32, FLOAT32)
STAGE_ROWS(stage_e4m3, E4M3)
