// One boundary between sublayers of a model with four residual streams (mHC), in one call:
//   y = round(sum over ranks);  streams' = round(post * y + comb^T streams)              the way back of one sublayer
//   x = round(pre' . streams');  norm_out = norm of x;  mixes' = fn . streams' / rms     the way into the next
// with pre' = sigmoid(mixes'[0..3] ..) + eps. A block owns groups of COLUMNS columns, a lane two neighbours of each;
// a warp (or, of wider ones, a team of lanes) owns one row where rows are made and three of the 24 mixes where sums are.
// Sums over columns need the other blocks: each publishes its parts as {value, epoch} words in memory of this rank alone,
// and adds up everybody's in the same order, so that all blocks of all ranks have the same bits (C1). The norm of x needs
// no second exchange: |x|^2 = pre'^T G pre', where G is the Gram matrix of the streams, ten more sums beside the 24. Its
// rounding error is that of the terms: relative to |x|^2 about 2^-20 times (sum of |pre'_i streams'_i|)^2 / |x|^2.
// The other 20 mixes are handed on as they are: Sinkhorn runs in the next call, beside its wait for the peers.
//
// One buffer of parts is enough, without a fence: they are written behind start(), which returns when the call before
// has ended on this rank, its reads included, and no other rank sees them. Their flags are the channel's epoch, compared
// by equality, and scrubbed like all others (C2).
#include "streams.h"

// ---------------------------------------------------------------------------------------- sums over the blocks
// Sums lie in the order in which they are wanted: pre's mixes, the Gram matrix, the mixes that are handed on.
DEVICE u8* part_at(const Mixing& m, u32 row, u32 sum, u32 block) {
  return m.parts + 8ull * ((row * HALMA_PART_SUMS + sum) * HALMA_PART_BLOCKS + block);
}
DEVICE u32 place_of_mix(u32 mix) { return mix < STREAMS ? mix : URGENT - STREAMS + mix; }

// Of a warp's five sums four are added up over the lanes at once, then all the fifth ones: where this lane's go.
template <u32 ROWS> struct Places {
  static const u32 SPAN = TEAM / (4u * ROWS), LAST_SPAN = TEAM / ROWS;
  u8 *four, *fifth;
  bool has_four, has_fifth;
};
template <u32 ROWS> DEVICE Places<ROWS> places_of(const Mixing& m, u32 warp, u32 lane) {
  Places<ROWS> p;
  u32 row = lane / p.SPAN % ROWS, k = lane / p.SPAN / ROWS, last_row = lane / p.LAST_SPAN;
  p.four = part_at(m, row, k < 3u ? place_of_mix(3u * warp + k) : STREAMS + warp, blockIdx.x);
  p.fifth = part_at(m, last_row, STREAMS + WARPS + warp, blockIdx.x);
  p.has_four = lane % p.SPAN == 0u && row < m.rows;
  p.has_fifth = lane % p.LAST_SPAN == 0u && last_row < m.rows && STREAMS + WARPS + warp < URGENT;
  settle_address(p.four), settle_address(p.fifth);
  return p;
}
template <u32 ROWS> DEVICE void publish(const Places<ROWS>& p, const Turn& t, float (*sums)[ROWS]) {
  float fours[4u * ROWS];
#pragma unroll
  for (u32 i = 0; i < 4u * ROWS; ++i) fours[i] = sums[i / ROWS][i % ROWS];
  float four = over_lanes<4u * ROWS>(fours), fifth = over_lanes<ROWS>(sums[4]);
  u64 flag = static_cast<u64>(t.epoch) << 32;
  if (p.has_four) HALMA_ORDER_PART_STORE(p.four, flag | bits_of(four));
  if (p.has_fifth) HALMA_ORDER_PART_STORE(p.fifth, flag | bits_of(fifth));
}

// N whole sums at once, of which `at(i)` says where number i's parts begin: over_lanes() says who comes back with
// which. Equal bits in every block. NaN where the wait failed, or was not begun after a fault. A lane that has no block
// looks at the first.
template <u32 N, typename At> DEVICE float gather(const Args& a, const Turn& t, At at, bool& alive) {
  u32 lane = threadIdx.x % TEAM;
  bool first = 2u * lane < gridDim.x, second = 2u * lane + 1u < gridDim.x;
  u32 mine = first ? 16u * lane : 0u;
  Pair words[N];
#pragma unroll
  for (u32 i = 0; i < N; ++i) words[i] = Pair{0u, 0u};
  Wait wait{0u, 0u};
  while (alive) {
    u32 seen = t.epoch;
#pragma unroll
    for (u32 i = 0; i < N; ++i) words[i] = HALMA_ORDER_PART_LOAD(at(i) + mine);
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
      u32 low = static_cast<u32>(words[i].low >> 32), high = static_cast<u32>(words[i].high >> 32);
      if (low != t.epoch) seen = low;
      if (second && high != t.epoch) seen = high;
    }
    if (seen == t.epoch) break;
    auto culprit = [&](u32& who, u32& what) { who = rank_of(a), what = seen; };  // a block of this very rank
    alive = again(a, t, wait, algorithm_of(a), culprit);
  }
  float values[N];
#pragma unroll
  for (u32 i = 0; i < N; ++i) {
    float low = float_of(static_cast<u32>(words[i].low)), high = float_of(static_cast<u32>(words[i].high));
    values[i] = add(first ? low : 0.0f, second ? high : 0.0f);
    if (!alive) values[i] = float_of(~0u);
  }
  return over_lanes<N>(values);
}

// Sums that the rest of the block waits for, two of every row a warp: slot 16 r + w of row r is pre's mix w, or entry
// w - 4 of the Gram matrix.
template <u32 ROWS> DEVICE void gather_urgent(const Args& a, const Turn& t, const Mixing& m, Shared& s, bool& alive) {
  const u32 N = ROWS < 4u ? 2u * ROWS : 8u;
  u32 number = threadIdx.x % TEAM / (TEAM / N), which = threadIdx.x / TEAM * 2u;
  if (which >= URGENT) return;
#pragma unroll 1
  for (u32 from = 0u; from < ROWS; from += N / 2u) {
    if (from >= m.rows) break;
    auto at = [=](u32 i) -> const u8* {
      u32 row = from + i / 2u;
      return part_at(m, ROWS == 1u || row < m.rows ? row : 0u, which + i % 2u, 0u);
    };
    float total = gather<N>(a, t, at, alive);
    if (threadIdx.x % (TEAM / N) == 0u) s.sum[(from + number / 2u) * URGENT_SLOTS + which + number % 2u] = total;
  }
}

// The other mixes, which nobody waits for before the next call of this kind: by spare warps, four of a row at a time,
// beside the four sums of squares that they are divided by. The block that has the headers comes last.
DEVICE void hand_on(const Args& a, const Turn& t, const Mixing& m, float share, bool alive) {
  const u32 SPAN = TEAM / 8u, FOURS = HANDED / 4u;
  u32 lane = threadIdx.x % TEAM;
#pragma unroll 1
  for (u32 item = (blockIdx.x == t.header ? gridDim.x : blockIdx.x) - 1u; item < FOURS * m.rows; item += gridDim.x) {
    u32 row = item / FOURS, four = item % FOURS;
    const u8* squares_at = part_at(m, row, STREAMS, 0u);
    const u8* mixes_at = part_at(m, row, URGENT + 4u * four, 0u);
    settle_address(squares_at), settle_address(mixes_at);
    auto at = [=](u32 i) -> const u8* {
      u32 square = i == 0u ? 0u : i == 1u ? 4u : i == 2u ? 7u : 9u;
      return i < 4u ? squares_at + 8u * HALMA_PART_BLOCKS * square : mixes_at + 8u * HALMA_PART_BLOCKS * (i - 4u);
    };
    float total = gather<8u>(a, t, at, alive);
    bool mix = lane >= 4u * SPAN;
    float squares = mix ? 0.0f : total;
    squares = add(squares, shuffle_xor(squares, SPAN));
    squares = add(squares, shuffle_xor(squares, 2u * SPAN));
    squares = add(squares, shuffle_xor(squares, 4u * SPAN));
    float inverse = reciprocal_root(multiply_add(squares, share / STREAMS, m.rms_eps));
    if (mix && lane % SPAN == 0u) m.mixes[row * HANDED + 4u * four + lane / SPAN - 4u] = multiply(total, inverse);
  }
}

// pre of a row, and the factor of its norm. `share` is 1 / width.
DEVICE float weigh(const Mixing& m, float share, const float* sum, const float* base, float scale, float* pre) {
  const float* g = sum + STREAMS;
  float trace = add(add(g[0], g[4]), add(g[7], g[9]));
  float inverse = reciprocal_root(multiply_add(trace, share / STREAMS, m.rms_eps));
#pragma unroll
  for (u32 i = 0; i < STREAMS; ++i) pre[i] = add(sigmoid(multiply_add(multiply(sum[i], inverse), scale, base[i])), m.hc_eps);
  float square = 0.0f;
#pragma unroll
  for (u32 i = 0; i < STREAMS; ++i) {
    float line = 0.0f;
#pragma unroll
    for (u32 j = i + 1u; j < STREAMS; ++j) line = multiply_add(pre[j], g[i == 0u ? j : i == 1u ? 3u + j : 5u + j], line);
    u32 own = i == 0u ? 0u : i == 1u ? 4u : i == 2u ? 7u : 9u;
    square = multiply_add(pre[i], multiply_add(pre[i], g[own], add(line, line)), square);
  }
  if (square < 0.0f) square = 0.0f;  // of rounding, where the streams all but cancel; a NaN stays
  return reciprocal_root(multiply_add(square, share, m.rms_eps));
}

// -------------------------------------------------------------------------------------------------- the kernel
// What the spare warp does instead. Its loads join those of the epoch.
template <u32 ROWS>
DEVICE void serve_mixing(const Args& a, Turn t, const Mixing& m, const Gates& gates, float share, Shared& s) {
  u32 lane = threadIdx.x - t.threads;
  Raw<ROWS> raw = {};
  start(a, t);
  load_raw<ROWS>(m, lane, raw);
  settle(t);
  spare_before(a, t);
  const bool serves = HALMA_WARP == TEAM || lane < TEAM;  // of a spare warp that is wider
  if (serves) open_way<ROWS>(m, gates, raw, lane, s);
  warp_barrier();
  if (lane < m.rows) close_way(m, m.iterations, s.way[lane] + STREAMS);
  warp_barrier();
  bool alive = !block_any(t.fault != 0u);  // all have read the epoch, and `way` is there
  spare_after(a, t);
  if (serves) hand_on(a, t, m, share, alive);
}

// ONE: a block has one group of columns, and what it needs of it stays in registers. Else up to MOST_GROUPS of them.
template <int D, u32 ROWS, bool ONE> DEVICE void mixed(const Args& a, const Mixing& m) {
  __shared__ Shared s;
  Turn t = stand(a);
  const u32 lane = threadIdx.x % TEAM, warp = threadIdx.x / TEAM, width = m.width;
  const u32 groups = ONE ? 1u : (width + COLUMNS * gridDim.x - 1u) / (COLUMNS * gridDim.x);
  const u32 column = blockIdx.x * COLUMNS + 2u * lane, step = gridDim.x * COLUMNS;
  const u32 unit = (warp * width + blockIdx.x * COLUMNS) / 8u + lane;
  const bool row = !t.spare && warp < m.rows, mover = row && lane < UNITS;
  const bool live = mover && blockIdx.x * COLUMNS + 8u * lane < width;
  const u8* from = a.source + 16ull * unit;
  settle_address(from);
  Aim aimed = aim(a, 16ull * unit);
  // Weights are at rest while calls are queued, so they are fetched before the wait for the grid before.
  Gates gates;
  float f[3][STREAMS][2], weight[2], base[STREAMS], scale = 0.0f;
  const float share = reciprocal(static_cast<float>(width));
  if (t.spare) gates = gates_of(m, lane);
  if (!t.spare && ONE) weights_of(m, warp, column, column < width, f);
  if (row && ONE && column < width) weight_of<D>(m, column, weight);
  if (row) base[0] = m.next_base[0], base[1] = m.next_base[1], base[2] = m.next_base[2], base[3] = m.next_base[3];
  if (row) scale = m.next_scale[0];
  Places<ROWS> places = places_of<ROWS>(m, warp, lane);
  if (t.spare) return serve_mixing<ROWS>(a, t, m, gates, share, s);
  u32 old[STREAMS], now[STREAMS];
  const u32* streams = reinterpret_cast<const u32*>(m.streams + 2ull * (static_cast<u64>(warp) * STREAMS * width + column));
  u32* out = reinterpret_cast<u32*>(a.out + 2ull * (static_cast<u64>(warp) * STREAMS * width + column));
  start(a, t);
  Quad mine = quad_of(load16_now(from, live));
#pragma unroll
  for (u32 j = 0; j < STREAMS; ++j) old[j] = ONE && row && column < width ? streams[j * (width / 2u)] : 0u;
  settle(t);
  bool alive = t.fault == 0u;
  if (live && alive) {
    Pair words = pair_of(without_sentinel(mine));
#pragma unroll
    for (u32 q = 0; q < OTHERS; ++q) HALMA_ORDER_SENTINEL_STORE(aimed.to[q] + turned(aimed, t), words);
  }
#pragma unroll 1
  for (u32 g = 1u; g < groups; ++g) {
    if (!mover || !alive || blockIdx.x * COLUMNS + g * step + 8u * lane >= width) continue;
    Quad more = *reinterpret_cast<const Quad*>(from + 2ull * g * step);
    push_sentinel(a, lane_box(a, t.epoch, rank_of(a)) + 16ull * (unit + g * (step / 8u)), without_sentinel(more));
  }
  if (live) take_unit<D>(a, t, unit, mine, s.y[warp] + 4u * lane, alive);
#pragma unroll 1
  for (u32 g = 1u; g < groups; ++g) {
    if (!mover || blockIdx.x * COLUMNS + g * step + 8u * lane >= width) continue;
    Quad more = *reinterpret_cast<const Quad*>(from + 2ull * g * step);
    take_unit<D>(a, t, unit + g * (step / 8u), more, s.y[warp] + g * TEAM + 4u * lane, alive);
  }
  alive = !block_any(!alive);

  float sums[5][ROWS];
#pragma unroll
  for (u32 k = 0; k < 5u; ++k)
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r) sums[k][r] = 0.0f;
#pragma unroll 1
  for (u32 g = 0; g < groups; ++g) {
    bool there = column + g * step < width;
#pragma unroll
    for (u32 j = 0; j < STREAMS; ++j) {
      if (!ONE) old[j] = row && there ? streams[(g * step + j * width) / 2u] : 0u;
      now[j] = 0u;
    }
    if (row && there) {
      mix_back<D>(s.way[warp], alive ? s.y[warp][g * TEAM + lane] : ~0u, old, now);
#pragma unroll
      for (u32 j = 0; j < STREAMS; ++j) out[(g * step + j * width) / 2u] = now[j];
    }
#pragma unroll
    for (u32 j = 0; j < STREAMS; ++j) s.now[warp][j][lane] = now[j];
    if (!ONE) weights_of(m, warp, column + g * step, there, f);
    barrier_among(t.threads);
    add_group<D, ROWS>(s, warp, lane, f, sums);
    if (!ONE) barrier_among(t.threads);
  }
  publish<ROWS>(places, t, sums);
  gather_urgent<ROWS>(a, t, m, s, alive);
  barrier_among(t.threads);

  if (row) {
    float pre[STREAMS];
    float factor = weigh(m, share, s.sum + warp * URGENT_SLOTS, base, scale, pre);
#pragma unroll 1
    for (u32 g = 0; g < groups; ++g) {
      if (column + g * step >= width) continue;
      if (!ONE) weight_of<D>(m, column + g * step, weight);
#pragma unroll
      for (u32 j = 0; j < STREAMS; ++j)
        if (!ONE) now[j] = out[(g * step + j * width) / 2u];  // this thread's own
      u32 normal = normed<D>(pre, factor, weight, now);
      reinterpret_cast<u32*>(m.norm_out)[(warp * width + column + g * step) / 2u] = normal;
    }
  }
  if (time_to_scrub(t)) scrub(a, t, 0u, 0u, m.rows);
}

// Two grids fit the device together, whatever the ranks (C16): fewer threads than the other kernels, and more registers.
#define MIX_KERNEL extern "C" __global__ void __launch_bounds__(WARPS * TEAM + HALMA_WARP, 2)
#define MIXED(dtype, D)                                                                  \
  MIX_KERNEL streams_1_##dtype(MIX_PARAMS) { mixed<D, 1, true>(PACKED, MIX_PACKED); }       \
  MIX_KERNEL streams_2_##dtype(MIX_PARAMS) { mixed<D, 2, true>(PACKED, MIX_PACKED); }       \
  MIX_KERNEL streams_4_##dtype(MIX_PARAMS) { mixed<D, 4, true>(PACKED, MIX_PACKED); }       \
  MIX_KERNEL streams_8_##dtype(MIX_PARAMS) { mixed<D, 8, true>(PACKED, MIX_PACKED); }       \
  MIX_KERNEL streams_wide_##dtype(MIX_PARAMS) { mixed<D, 8, false>(PACKED, MIX_PACKED); }
MIXED(bfloat16, BF16)
MIXED(float16, F16)
