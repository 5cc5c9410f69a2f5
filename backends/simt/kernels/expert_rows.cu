// The small kernels round the products of the routed experts: which rows go to which expert, rounding to e4m3 with one
// power of two for 128 columns (as halma.ops.quant does, bit for bit), and the sum over a token's choices.
#include "rounding.h"

#define MOST_EXPERTS 256u
#define MOST_WARPS (1024u / HALMA_WARP)
#define BLOCK 128u
#define TEAM (BLOCK / 4u)  // lanes that round a block; a warp has one or several

// ---------------------------------------------------------------------------------------------------- rounding
// TEAM lanes round 128 neighbours, four a lane.
DEVICE void round_block(const float* value, u32 lane, u8* to, float* scale) {
  float most = 0.0f;
#pragma unroll
  for (u32 i = 0; i < 4u; ++i) {
    float size = value[i] < 0.0f ? -value[i] : value[i];
    most = size > most ? size : most;
  }
#pragma unroll
  for (u32 mask = TEAM / 2u; mask != 0u; mask /= 2u) {
    float other = shuffle_xor(most, mask);
    most = other > most ? other : most;
  }
  u32 power = power_for(most);
  float inverse = inverse_of(power);
  u32 word = 0u;
#pragma unroll
  for (u32 i = 0; i < 4u; ++i) word |= to_e4m3(multiply(value[i], inverse)) << 8u * i;
  *reinterpret_cast<u32*>(to) = word;
  if (lane == 0u) *scale = float_of(power);
}
template <bool WIDE> DEVICE void load_four(const u8* from, float* value) {
  if (WIDE) {
    Quad q = *reinterpret_cast<const Quad*>(from);
#pragma unroll
    for (u32 i = 0; i < 4u; ++i) value[i] = float_of(q.word[i]);
  } else {
    u64 q = *reinterpret_cast<const u64*>(from);
#pragma unroll
    for (u32 i = 0; i < 4u; ++i) value[i] = bf16_to_float(static_cast<u32>(q >> 16u * i) & 0xffffu);
  }
}

// rows x k -> e4m3 [rows][k] and fp32 [rows][k / 128]; with `index` row r comes from row index[r], none where < 0.
template <bool WIDE>
DEVICE void round_rows(const u8* x, const int* index, u32 rows, u32 k, u8* out, float* scales, u32 block, u32 blocks) {
  const u32 lane = threadIdx.x % TEAM, each = k / BLOCK, teams = blockDim.x / TEAM;
  for (u32 n = block * teams + threadIdx.x / TEAM; n < rows * each; n += blocks * teams) {
    u32 row = n / each, part = n % each;
    int from = index != nullptr ? index[row] : static_cast<int>(row);
    if (from < 0) continue;
    float value[4];
    load_four<WIDE>(x + (static_cast<u64>(static_cast<u32>(from)) * k + part * BLOCK + 4u * lane) * (WIDE ? 4u : 2u), value);
    round_block(value, lane, out + static_cast<u64>(row) * k + part * BLOCK + 4u * lane, scales + n);
  }
}

// The first offsets[experts] slots, gaps included: what lies there is rounded too and read by nobody.
#define ROUND(name, WIDE)                                                                                            \
  extern "C" __global__ void __launch_bounds__(256) name(u64 x, u64 index, u64 end, u64 k, u64 out, u64 scales) {      \
    grid_wait();                                                                                                       \
    grid_trigger();                                                                                                    \
    round_rows<WIDE>((const u8*)x, (const int*)index, *reinterpret_cast<const u32*>(end), static_cast<u32>(k),         \
                     (u8*)out, (float*)scales, blockIdx.x, gridDim.x);                                                 \
  }
ROUND(round_float32, true)
ROUND(round_bfloat16, false)

// ------------------------------------------------------------------------------------------------------ layout
struct Layout {
  const u64* ids;                   // [pairs]
  const float* weights;
  int* index;                       // [capacity]
  float* slot_weights;
  int *counts, *offsets, *slots;
  u32 pairs, choices, first, experts, alignment, capacity;
};
struct Tables {
  u32 seen[MOST_WARPS][MOST_EXPERTS];  // pairs of a warp's part, then those of the warps before
  u32 counts[MOST_EXPERTS], offsets[MOST_EXPERTS];
};

DEVICE u32 expert_of(const Layout& l, u32 pair) {
  u64 id = l.ids[pair] - l.first;   // what is below, negative included, wraps to a large number
  return id < l.experts ? static_cast<u32>(id) : ~0u;
}

// Stable: a warp takes a run of neighbouring pairs, 32 at a time in their order.
DEVICE void lay_out(const Layout& l, Tables& s) {
  const u32 warps = blockDim.x / HALMA_WARP, warp = threadIdx.x / HALMA_WARP, lane = threadIdx.x % HALMA_WARP;
  const u32 groups = (l.pairs + HALMA_WARP - 1u) / HALMA_WARP, each = (groups + warps - 1u) / warps;
  const u32 begin = warp * each, end = begin + each < groups ? begin + each : groups;
  for (u32 i = threadIdx.x; i < warps * MOST_EXPERTS; i += blockDim.x) s.seen[i / MOST_EXPERTS][i % MOST_EXPERTS] = 0u;
  for (u32 i = threadIdx.x; i < l.capacity; i += blockDim.x) l.index[i] = -1;
  block_barrier();
  for (u32 group = begin; group < end; ++group) {
    u32 pair = group * HALMA_WARP + lane, expert = pair < l.pairs ? expert_of(l, pair) : ~0u;
    if (expert != ~0u) add_shared(&s.seen[warp][expert], 1u);
  }
  block_barrier();
  for (u32 e = threadIdx.x; e < MOST_EXPERTS; e += blockDim.x) {
    u32 before = 0u;
    for (u32 w = 0u; w < warps; ++w) {
      u32 own = s.seen[w][e];
      s.seen[w][e] = before, before += own;
    }
    s.counts[e] = before;
    if (e < l.experts) l.counts[e] = static_cast<int>(before);
  }
  block_barrier();
  if (warp == 0u) {
    const u32 part = MOST_EXPERTS / HALMA_WARP;
    u32 own = 0u;
    for (u32 i = 0; i < part; ++i) own += (s.counts[lane * part + i] + l.alignment - 1u) / l.alignment * l.alignment;
    u32 sum = own;
    for (u32 step = 1u; step < HALMA_WARP; step *= 2u) {
      u32 before = shuffle_from(sum, lane >= step ? lane - step : lane);
      if (lane >= step) sum += before;
    }
    u32 offset = sum - own;
    for (u32 i = 0; i < part; ++i) {
      u32 e = lane * part + i;
      s.offsets[e] = offset;
      if (e < l.experts) l.offsets[e] = static_cast<int>(offset);
      offset += (s.counts[e] + l.alignment - 1u) / l.alignment * l.alignment;
    }
    if (lane == HALMA_WARP - 1u) l.offsets[l.experts] = static_cast<int>(offset);  // experts behind the last have none
  }
  block_barrier();
  for (u32 group = begin; group < end; ++group) {
    u32 pair = group * HALMA_WARP + lane, expert = pair < l.pairs ? expert_of(l, pair) : ~0u;
    Alike alike = warp_alike(expert);
    u32 slot = ~0u;
    if (expert != ~0u) {
      slot = s.offsets[expert] + s.seen[warp][expert] + alike.before;
      l.index[slot] = static_cast<int>(pair / l.choices);
      l.slot_weights[slot] = l.weights[pair];
    }
    if (pair < l.pairs) l.slots[pair] = static_cast<int>(slot);
    warp_barrier();
    if (expert != ~0u && alike.before == 0u) s.seen[warp][expert] += alike.all;
    warp_barrier();
  }
}

// Block 0 lays out; the others, if any, round the tokens themselves: [rows][k] bf16.
extern "C" __global__ void __launch_bounds__(1024)
    expert_layout(u64 ids, u64 weights, u64 index, u64 slot_weights, u64 counts, u64 offsets, u64 slots, u64 shape,
                  u64 range, u64 room, u64 x, u64 out, u64 scales, u64 tokens) {
  __shared__ Tables tables;
  grid_wait();
  grid_trigger();
  if (blockIdx.x == 0u) {
    lay_out(Layout{(const u64*)ids, (const float*)weights, (int*)index, (float*)slot_weights, (int*)counts,
                   (int*)offsets, (int*)slots, static_cast<u32>(shape), static_cast<u32>(shape >> 32),
                   static_cast<u32>(range), static_cast<u32>(range >> 32), static_cast<u32>(room),
                   static_cast<u32>(room >> 32)}, tables);
  } else {
    round_rows<false>((const u8*)x, nullptr, static_cast<u32>(tokens), static_cast<u32>(tokens >> 32), (u8*)out,
                      (float*)scales, blockIdx.x - 1u, gridDim.x - 1u);
  }
}

// ---------------------------------------------------------------------------------------------------- the sum
// out[token] = the sum over its choices, in their order, of parts[slot]; four columns a thread, width / 4 of them a token.
extern "C" __global__ void __launch_bounds__(256)
    expert_sum(u64 parts, u64 slots, u64 out, u64 choices, u64 shape) {
  grid_wait();
  grid_trigger();
  const u32 quads = static_cast<u32>(shape) / 4u, tokens = static_cast<u32>(shape >> 32), k = static_cast<u32>(choices);
  for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < static_cast<u64>(tokens) * quads;
       i += static_cast<u64>(gridDim.x) * blockDim.x) {
    u32 token = static_cast<u32>(i / quads), quad = static_cast<u32>(i % quads);
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 choice = 0u; choice < k; ++choice) {
      int slot = reinterpret_cast<const int*>(slots)[token * k + choice];
      if (slot < 0) continue;
      Quad part = reinterpret_cast<const Quad*>(parts)[static_cast<u64>(static_cast<u32>(slot)) * quads + quad];
#pragma unroll
      for (u32 c = 0; c < 4u; ++c) sum[c] = add(sum[c], float_of(part.word[c]));
    }
    reinterpret_cast<Quad*>(out)[i] = Quad{{bits_of(sum[0]), bits_of(sum[1]), bits_of(sum[2]), bits_of(sum[3])}};
  }
}
