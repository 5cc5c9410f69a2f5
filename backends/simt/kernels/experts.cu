// The two products of the routed experts, for items of few to some dozens of rows an expert: weights are read once, at
// the bandwidth of the memory. Weight rows are the 16-row operand of the fragments' product, tokens its 8 columns.
//
// A block walks over items: (expert, tile of weight rows, up to TOKENS of the expert's slots). Its eight warps are P
// pairs of 16 weight rows times S = 8 / P slices of K; a warp's unit is 32 rows x 128 bytes. Stages of eight units, and
// the tokens' part of the same columns, are copied into shared memory STAGES - 1 ahead, across items: the memory never
// waits for an epilogue. Within a unit a row's 16-byte chunks lie at chunk ^ swizzle(row), so that fragments are read
// without conflicts of banks.
//
//   HALMA_BITS   16: bf16 weights and tokens. 8: e4m3 weights, one power of two for 128 x 128, and e4m3 tokens with one
//                for 128 columns. e2m1 weights have kernels of their own (experts_fp4.cu).
//   up:    h[slot] = swiglu(w1 . x, w3 . x) * factor[slot]; a pair is 16 rows of w1 and the same of w3
//   down:  out[slot] = w2 . h[slot]; a pair is 32 rows
// With e4m3 a product is of fp16 numbers, which hold it exactly; powers of two are applied to fp32 sums over 128 columns.
#include "expert_items.h"

// ----------------------------------------------------------------------------------------------- the products

template <u32 NT, u32 MOST> DEVICE void multiply_unit(const u8* w, const u8* x, const float* xs, u32 at, float (*acc)[MOST][4]) {
  const u32 lane = threadIdx.x % HALMA_WARP, g = lane / 4u, t = lane % 4u;
#if HALMA_BITS == 16
#pragma unroll
  for (u32 s = 0; s < 2u; ++s) {
    Quad low[2], high[2];
#pragma unroll
    for (u32 m = 0; m < 2u; ++m) {
      const u8* row = w + (16u * m + g) * 128u + ((4u * s + t ^ swizzle_weight(g)) << 4);
      low[m] = *reinterpret_cast<const Quad*>(row), high[m] = *reinterpret_cast<const Quad*>(row + 8u * 128u);
    }
#pragma unroll
    for (u32 n = 0; n < NT; ++n) {
      Quad b = *reinterpret_cast<const Quad*>(x + (8u * n + g) * TOKEN + ((4u * s + t ^ swizzle_token(g)) << 4));
#pragma unroll
      for (u32 m = 0; m < 2u; ++m)
#pragma unroll
        for (u32 h = 0; h < 2u; ++h) {
          u32 a[4] = {low[m].word[2u * h], high[m].word[2u * h], low[m].word[2u * h + 1u], high[m].word[2u * h + 1u]};
          product_bf16(acc[m][n], a, b.word + 2u * h);
        }
    }
  }
#else
  const u32 byte = at / 128u % 4u;
  const u32* words = reinterpret_cast<const u32*>(w + UNIT);
  float power[2] = {float_of((words[0] >> 8u * byte & 0xffu) << 23), float_of((words[1] >> 8u * byte & 0xffu) << 23)};
#pragma unroll
  for (u32 block = 0; block < BLOCKS; ++block) {
    float part[2][NT][4];
#pragma unroll
    for (u32 q = 0; q < 4u; ++q) {
      const u32 s = 4u * block + q;
      u32 a[2][2][4];
#pragma unroll
      for (u32 m = 0; m < 2u; ++m)
#pragma unroll
        for (u32 h = 0; h < 2u; ++h) {
          const u8* from = w + (16u * m + 8u * h + g) * 128u + ((2u * s + t / 2u ^ swizzle_weight(g)) << 4) + t % 2u * 8u;
          const u64 both = *reinterpret_cast<const u64*>(from);
          u32 one = static_cast<u32>(both), two = static_cast<u32>(both >> 32);
          a[m][0][h] = widen_e4m3(one), a[m][0][2u + h] = widen_e4m3(one >> 16);
          a[m][1][h] = widen_e4m3(two), a[m][1][2u + h] = widen_e4m3(two >> 16);
        }
#pragma unroll
      for (u32 n = 0; n < NT; ++n) {
        const u8* from = x + (8u * n + g) * TOKEN + ((2u * s + t / 2u ^ swizzle_token(g)) << 4) + t % 2u * 8u;
        const u64 both = *reinterpret_cast<const u64*>(from);
        u32 one = static_cast<u32>(both), two = static_cast<u32>(both >> 32), b[2][2];
        b[0][0] = widen_e4m3(one), b[0][1] = widen_e4m3(one >> 16);
        b[1][0] = widen_e4m3(two), b[1][1] = widen_e4m3(two >> 16);
#pragma unroll
        for (u32 m = 0; m < 2u; ++m) {
          if (q == 0u) part[m][n][0] = part[m][n][1] = part[m][n][2] = part[m][n][3] = 0.0f;
          product_f16(part[m][n], a[m][0], b[0]);
          product_f16(part[m][n], a[m][1], b[1]);
        }
      }
    }
#pragma unroll
    for (u32 n = 0; n < NT; ++n) {
      const u64 both = *reinterpret_cast<const u64*>(xs + block * 8u * MOST + 8u * n + 2u * t);
      float token[2] = {float_of(static_cast<u32>(both)), float_of(static_cast<u32>(both >> 32))};
#pragma unroll
      for (u32 m = 0; m < 2u; ++m)
#pragma unroll
        for (u32 i = 0; i < 4u; ++i) {
          float factor = token[i % 2u];
#if HALMA_BITS == 8
          factor = multiply(factor, power[m]);
#endif
          acc[m][n][i] = multiply_add(part[m][n][i], factor, acc[m][n][i]);
        }
    }
  }
#endif
}

template <bool DOWN, u32 P, u32 NT> DEVICE void multiply_stage(const Job& j, const Item& it, u32 stage, const u8* from, float (*acc)[NT][4]) {
  typedef Shape<DOWN, P, NT> Z;
  const u32 warp = threadIdx.x / HALMA_WARP, slice = warp % Z::S, at = (stage * Z::S + slice) * 128u;
  if (at >= bytes_of_row(j)) return;
  const u8* w = from + warp * (UNIT + SCALES);
  const u8* x = from + Z::TOKENS_AT + slice * Z::TOKENS * TOKEN;
  const float* xs = reinterpret_cast<const float*>(from + Z::X_SCALES_AT) + slice * BLOCKS * Z::TOKENS;
  if constexpr (NT == 1u) {
    multiply_unit<1u, NT>(w, x, xs, at, acc);
  } else {
    if (it.tokens <= 8u) multiply_unit<1u, NT>(w, x, xs, at, acc);
    else if (it.tokens <= 16u) multiply_unit<2u, NT>(w, x, xs, at, acc);
    else if (it.tokens <= 24u) multiply_unit<3u, NT>(w, x, xs, at, acc);
    else multiply_unit<4u, NT>(w, x, xs, at, acc);
  }
}

// ------------------------------------------------------------------------------------------------ the results
DEVICE float swiglu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return multiply(divide(gate, add(1.0f, exponential(-gate))), up);
}
DEVICE void store_inner(const Job& j, u32 slot, u32 channel, float gate, float up) {
  float value = multiply(swiglu(gate, up, j.limit), j.factor[slot]);
  u64 at = static_cast<u64>(slot) * (j.n / 2u) + channel;
#if HALMA_BITS == 16
  reinterpret_cast<u16*>(j.out)[at] = static_cast<u16>(pack_bf16(value, 0.0f));
#else
  reinterpret_cast<float*>(j.out)[at] = value;
#endif
}
DEVICE void store_outer(const Job& j, u32 slot, u32 row, float value) {
  u64 at = static_cast<u64>(slot) * j.n + row;
  if (j.narrow) reinterpret_cast<u16*>(j.out)[at] = static_cast<u16>(pack_bf16(value, 0.0f));
  else reinterpret_cast<float*>(j.out)[at] = value;
}

template <bool DOWN, u32 P, u32 NT, bool FEW>
DEVICE void finish(const Job& j, const Item& it, float* sums, Few& few, float (*acc)[NT][4]) {
  typedef Shape<DOWN, P, NT> Z;
  const u32 warp = threadIdx.x / HALMA_WARP, lane = threadIdx.x % HALMA_WARP, g = lane / 4u, t = lane % 4u;
#pragma unroll
  for (u32 n = 0; n < NT; ++n)
#pragma unroll
    for (u32 i = 0; i < 4u; ++i) {
      u32 token = 8u * n + 2u * t + i % 2u, row = g + i / 2u * 8u, slot = it.first + token;
      float one = acc[0][n][i], two = acc[1][n][i];
      if constexpr (Z::S > 1u) {
        float* to = sums + (warp * Z::TOKENS + token) * Z::PITCH + row;
        to[0] = one, to[16] = two;
      } else if (token < it.tokens) {
        if (DOWN) {
          store_outer(j, slot, weight_row<DOWN, P>(j, it.tile, warp, row), one);
          store_outer(j, slot, weight_row<DOWN, P>(j, it.tile, warp, row + 16u), two);
        } else {
          store_inner(j, slot, weight_row<DOWN, P>(j, it.tile, warp, row), one, two);
        }
      }
      acc[0][n][i] = acc[1][n][i] = 0.0f;
    }
  if constexpr (Z::S > 1u) {
    block_barrier();
    const u32 rows = DOWN ? PAIR : PAIR / 2u;
    for (u32 i = threadIdx.x; i < P * it.tokens * rows; i += WARPS * HALMA_WARP) {
      u32 row = i % rows, token = i / rows % it.tokens, pair = i / rows / it.tokens;
      const float* from = sums + (pair * Z::S * Z::TOKENS + token) * Z::PITCH + row;
      float one = 0.0f, two = 0.0f;
#pragma unroll
      for (u32 s = 0; s < Z::S; ++s) {
        one = add(one, from[s * Z::TOKENS * Z::PITCH]);
        if (!DOWN) two = add(two, from[s * Z::TOKENS * Z::PITCH + 16u]);
      }
      u32 line = weight_row<DOWN, P>(j, it.tile, pair, row);
      if (DOWN && FEW) few.parts[it.first + token][row] = one;
      else if (DOWN) store_outer(j, it.first + token, line, one);
      else store_inner(j, it.first + token, line, one, two);
    }
  }
}

// A token's choices in their order, once all slots have given to these columns; nought where it has none.
DEVICE void add_up(const Job& j, u32 tile, const Few& few) {
  for (u32 i = threadIdx.x; i < j.pairs / j.choices * PAIR; i += WARPS * HALMA_WARP) {
    u32 token = i / PAIR, column = i % PAIR;
    float sum = 0.0f;
    for (u32 choice = 0u; choice < j.choices; ++choice) {
      u32 slot = few.slot[token * j.choices + choice];
      if (slot != ~0u) sum = add(sum, few.parts[slot][column]);
    }
    store_outer(j, token, tile * PAIR + column, sum);
  }
}

// ---------------------------------------------------------------------------------------------------- a block
// The order of a block's items. One that adds up has all passes over a tile in turn: n is tile x passes + pass.
template <class Z, bool SUM> struct Order {
  u32 passes;
  DEVICE_METHOD u32 first() const { return SUM ? blockIdx.x * passes : blockIdx.x; }
  DEVICE_METHOD u32 after(u32 n) const {
    if (!SUM) return n + gridDim.x;
    return (n + 1u) % passes != 0u ? n + 1u : n + 1u + (gridDim.x - 1u) * passes;
  }
  DEVICE_METHOD Item at(const Lists& l, u32 n) const {
    if (!SUM) return item_at<Z>(l, n);
    Item found = item_at<Z>(l, n % passes);
    found.tile = n / passes;
    return found;
  }
  DEVICE_METHOD bool ends_tile(u32 n) const { return (n + 1u) % passes == 0u; }
};

template <bool DOWN, u32 P, u32 NT, bool RAW, bool FEW> DEVICE void walk(Job j, u8* memory, Lists& lists, Few& few) {
  typedef Shape<DOWN, P, NT> Z;
  const u32 stages = (bytes_of_row(j) + Z::S * 128u - 1u) / (Z::S * 128u);
  float* sums = reinterpret_cast<float*>(memory + Z::STAGES * Z::STAGE);
  // The routing and the weights are older than the grid before `down`: that one began behind its own wait.
  if (!DOWN) grid_wait(), grid_trigger();
  if (j.layer != nullptr) {
    j.weight = reinterpret_cast<const u8* const*>(j.weight)[*j.layer];
    j.scale = reinterpret_cast<const u8* const*>(j.scale)[*j.layer];
  }
  if constexpr (FEW) {
    lay_out_few(j, lists, few);
    j.index = DOWN ? nullptr : few.index, j.factor = few.factor;
  } else {
    read_lists(j, lists);
  }
  constexpr bool SUM = DOWN && FEW;
  const u32 tiles = j.n / (P * PAIR);
  number_items<Z>(SUM ? 1u : tiles, lists);
  const Order<Z, SUM> order{lists.starts[MOST_EXPERTS]};
  const u32 total = SUM ? order.passes * tiles : order.passes;
  u32 ahead = order.first(), ahead_stage = 0u, slot = 0u;
  Item next{}, now{};
#pragma unroll 1
  for (u32 phase = 0u; phase < 2u; ++phase) {
    ahead = order.first(), ahead_stage = 0u;
    if (phase == 1u && DOWN) grid_wait(), grid_trigger();
#pragma unroll 1
    for (u32 s = 0u; s < Z::STAGES - 1u; ++s) {
      if (ahead < total) {
        if (ahead_stage == 0u) next = order.at(lists, ahead);
        if (phase == 0u) copy_weights<DOWN, P>(j, next, ahead_stage, memory + s * Z::STAGE);
        else if (!RAW) copy_tokens<DOWN, P, NT>(j, next, ahead_stage, memory + s * Z::STAGE);
        if (++ahead_stage == stages) ahead_stage = 0u, ahead = order.after(ahead);
      }
      if (phase == 1u) copies_commit();
    }
  }
  float acc[2][NT][4];
#pragma unroll
  for (u32 n = 0; n < NT; ++n)
#pragma unroll
    for (u32 i = 0; i < 4u; ++i) acc[0][n][i] = acc[1][n][i] = 0.0f;
  u32 stage = 0u, n = order.first();
  if (n < total) now = order.at(lists, n);
#if BLOCKS
  Raw<DOWN> raw;
  if (RAW && n < total) begin_raw(j, now, 0u, raw), end_raw<DOWN, Z>(j, now, 0u, memory, raw);
#endif
#pragma unroll 1
  while (n < total) {
    copies_await<Z::STAGES - 2u>();
    block_barrier();
    if (ahead < total) {
      u8* to = memory + (slot == 0u ? Z::STAGES - 1u : slot - 1u) * Z::STAGE;
      if (ahead_stage == 0u) next = order.at(lists, ahead);
      copy_weights<DOWN, P>(j, next, ahead_stage, to);
      if (!RAW) copy_tokens<DOWN, P, NT>(j, next, ahead_stage, to);
      if (++ahead_stage == stages) ahead_stage = 0u, ahead = order.after(ahead);
    }
    copies_commit();
    const bool last = stage + 1u == stages;
    const u32 after = slot + 1u == Z::STAGES ? 0u : slot + 1u, n_after = last ? order.after(n) : n;
    Item following = now;
    if (last && n_after < total) following = order.at(lists, n_after);
    const u32 stage_after = last ? 0u : stage + 1u;
#if BLOCKS
    if (RAW && n_after < total) begin_raw(j, following, stage_after, raw);
#endif
    multiply_stage<DOWN, P, NT>(j, now, stage, memory + slot * Z::STAGE, acc);
#if BLOCKS
    if (RAW && n_after < total) end_raw<DOWN, Z>(j, following, stage_after, memory + after * Z::STAGE, raw);
#endif
    if (last) {
      finish<DOWN, P, NT, FEW>(j, now, sums, few, acc);
      if (SUM && order.ends_tile(n)) block_barrier(), add_up(j, now.tile, few);
    }
    now = following, stage = stage_after, n = n_after, slot = after;
  }
  if (SUM && total == 0u)
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) add_up(j, tile, few);
}

#define EXPERTS(name, DOWN, P, NT, RAW, FEW)                                                                         \
  extern "C" __global__ void __launch_bounds__(WARPS* HALMA_WARP, 1) name(JOB_PARAMS) {                                \
    extern __shared__ __align__(128) u8 memory[];                                                                      \
    __shared__ Lists lists;                                                                                            \
    __shared__ Few few;                                                                                                \
    walk<DOWN, P, NT, RAW, FEW>(JOB, memory, lists, few);                                                              \
  }
EXPERTS(up_thin, false, 1u, 1u, false, false)
EXPERTS(up_wide, false, WARPS, 4u, false, false)
EXPERTS(down_wide, true, WARPS, 4u, false, false)
EXPERTS(up_few, false, 1u, 1u, BLOCKS != 0u, true)
EXPERTS(down_few, true, 1u, 1u, BLOCKS != 0u, true)
#if BLOCKS
EXPERTS(up_thin_raw, false, 1u, 1u, true, false)
EXPERTS(down_thin_raw, true, 1u, 1u, true, false)
#else
EXPERTS(down_thin, true, 1u, 1u, false, false)
#endif
