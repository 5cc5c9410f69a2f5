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
#define HALMA_USES_PUSH 1
#include "push.h"

#define STREAMS 4u
#define HANDED 20u  // mixes that are handed on: post 4, comb 16
#define URGENT 14u  // sums that this call's own output waits for: pre's mixes and the Gram matrix
#define URGENT_SLOTS 16u
#define MATRIX (STREAMS * STREAMS)
#define WARPS 8u    // teams that move data; the spare warp is not among them
#define TEAM (HALMA_PART_BLOCKS / 2u)  // lanes that do a row, each with two columns and the parts of two blocks
#define COLUMNS (2u * TEAM)
#define UNITS (COLUMNS / 8u)  // of 16 bytes, in a row of a group
#define MOST_GROUPS HALMA_MIX_GROUPS
static_assert(HALMA_WARP % TEAM == 0u && WARPS * TEAM % HALMA_WARP == 0u, "teams are whole warps or parts of them");
static_assert(HALMA_PART_ROWS == WARPS, "a team a row");
static_assert(HALMA_PART_SUMS == URGENT + HANDED, "24 mixes and 10 entries of the Gram matrix");
static_assert(TEAM >= WARPS * STREAMS && TEAM % MATRIX == 0u, "one lane a post, whole matrices a team");

struct Mixing {
  const u8* streams;        // [rows][4][width]
  float* mixes;             // [rows][20], of these streams; replaced by those of the new ones
  const float* base;        // [24], and
  const float* scale;       // [3]: of the mixes above
  const float* fn;          // [24][4][width], of the next sublayer
  const float* next_base;
  const float* next_scale;
  const u8* weight;         // [width]
  u8* norm_out;             // [rows][width]
  u8* parts;                // u64 [HALMA_PART_ROWS][HALMA_PART_SUMS][HALMA_PART_BLOCKS]: {value, epoch}
  u32 width, rows, iterations;
  float rms_eps, hc_eps;
  bool wide_weight;         // fp32
};
#define MIX_PARAMS                                                                                                   \
  PARAMS, u64 streams, u64 mixes, u64 base, u64 scale, u64 fn, u64 next_base, u64 next_scale, u64 weight,           \
      u64 norm_out, u64 parts, u64 shape, u64 epsilons, u64 options
#define MIX_PACKED                                                                                                   \
  Mixing {                                                                                                           \
    (const u8*)streams, (float*)mixes, (const float*)base, (const float*)scale, (const float*)fn,                    \
        (const float*)next_base, (const float*)next_scale, (const u8*)weight, (u8*)norm_out, (u8*)parts,             \
        static_cast<u32>(shape), static_cast<u32>(shape >> 32), static_cast<u32>(options),                           \
        float_of(static_cast<u32>(epsilons)), float_of(static_cast<u32>(epsilons >> 32)), (options >> 32) != 0u      \
  }

struct Shared {
  u32 y[WARPS][MOST_GROUPS * TEAM];  // the sum over ranks, two elements a word
  u32 now[WARPS][STREAMS][TEAM];     // the new streams of one group
  float way[WARPS][STREAMS + STREAMS * STREAMS];  // post, then comb
  float sum[WARPS * URGENT_SLOTS];
};

DEVICE float sigmoid(float value) { return reciprocal(add(1.0f, exponential(-value))); }

// ------------------------------------------------------------------------------------------- post and comb
// What a lane of the spare warp knows before the wait: of one entry of comb, and of one of post.
struct Gates {
  float comb, post, comb_scale, post_scale;
};
DEVICE Gates gates_of(const Mixing& m, u32 lane) {
  return Gates{m.base[2u * STREAMS + lane % MATRIX], m.base[STREAMS + lane % STREAMS], m.scale[2], m.scale[1]};
}

// The mixes that a lane turns into those entries: comb of a row or two a warp at a time, post of all rows at once.
// Loads are left under way.
template <u32 ROWS> struct Raw {
  static const u32 EACH = TEAM / MATRIX, TIMES = (ROWS + EACH - 1u) / EACH;
  float comb[TIMES], post;
};
template <u32 ROWS> DEVICE void load_raw(const Mixing& m, u32 lane, Raw<ROWS>& raw) {
  const u32 last = m.rows - 1u, own = lane / STREAMS;
#pragma unroll
  for (u32 k = 0; k < Raw<ROWS>::TIMES; ++k) {
    u32 row = k * Raw<ROWS>::EACH + lane / MATRIX;
    raw.comb[k] = m.mixes[(row < last ? row : last) * HANDED + STREAMS + lane % MATRIX];
  }
  raw.post = m.mixes[(own < last ? own : last) * HANDED + lane % STREAMS];
}

// post, and the matrix S that Sinkhorn begins with: softmax of a line, on neighbouring lanes, plus eps.
template <u32 ROWS> DEVICE void open_way(const Mixing& m, const Gates& g, const Raw<ROWS>& raw, u32 lane, Shared& s) {
#pragma unroll
  for (u32 k = 0; k < Raw<ROWS>::TIMES; ++k) {
    u32 row = k * Raw<ROWS>::EACH + lane / MATRIX;
    float value = multiply_add(raw.comb[k], g.comb_scale, g.comb), most = value;
#pragma unroll
    for (u32 mask = 1u; mask < STREAMS; mask *= 2u) {
      float next = shuffle_xor(most, mask);
      most = next > most ? next : most;
    }
    float share = exponential(add(value, -most)), sum = share;
#pragma unroll
    for (u32 mask = 1u; mask < STREAMS; mask *= 2u) sum = add(sum, shuffle_xor(sum, mask));
    if (row < ROWS) s.way[row][STREAMS + lane % MATRIX] = multiply_add(share, reciprocal(sum), m.hc_eps);
  }
  s.way[lane / STREAMS % WARPS][lane % STREAMS] = 2.0f * sigmoid(multiply_add(raw.post, g.post_scale, g.post));
}

// As in halma.ops.hyper_connection the matrix stays diag(a) S diag(b), and a half round renews a or b alone:
// 1 / b = S^T a + eps / b. A division a half round would be most of its length, so vectors are kept up to a factor:
// `over` is scale / a (or b), and what stands for 1 / over is the product of the other three, which differs from it by
// a factor that all four share. `unit`, a power of two, brings that back to the size of 1. Only eps / b needs the
// factors: they are carried beside, and their reciprocal has a half round's time. Entries of S lie between eps and 1,
// so those of a vector are within 1 / eps of each other, and fp32 holds the products for eps down to 1e-8.
struct Side {
  float over[STREAMS], inverse;  // 1 / scale
};
struct Vector {
  float entry[STREAMS], unit;
};
DEVICE float to_one(float value) { return float_of(0x7f000000u - (bits_of(value) & 0x7f800000u)); }

template <bool DOWN>
DEVICE void half_round(const float (*s)[STREAMS], const Side& from, Side& to, float eps, Vector& v) {
  float low = multiply(from.over[0], from.over[1]), high = multiply(from.over[2], from.over[3]);
  v.entry[0] = multiply(from.over[1], high), v.entry[1] = multiply(from.over[0], high);
  v.entry[2] = multiply(from.over[3], low), v.entry[3] = multiply(from.over[2], low);
  v.unit = to_one(v.entry[0]);
  float whole = multiply(low, high), kept = multiply(whole, multiply(multiply(from.inverse, to.inverse), eps));
  to.inverse = reciprocal(multiply(multiply(whole, v.unit), from.inverse));
#pragma unroll
  for (u32 k = 0; k < STREAMS; ++k) {
    float sum = multiply(DOWN ? s[0][k] : s[k][0], v.entry[0]);
#pragma unroll
    for (u32 j = 1; j < STREAMS; ++j) sum = multiply_add(DOWN ? s[j][k] : s[k][j], v.entry[j], sum);
    to.over[k] = multiply(multiply_add(kept, to.over[k], sum), v.unit);
  }
}

// One row, by one thread: comb in place of S.
DEVICE void close_way(const Mixing& m, u32 rounds, float* way) {
  float s[STREAMS][STREAMS];
  Side rows, columns;
  Vector a, b;
#pragma unroll
  for (u32 j = 0; j < STREAMS; ++j) {
#pragma unroll
    for (u32 k = 0; k < STREAMS; ++k) s[j][k] = way[STREAMS * j + k];
    rows.over[j] = columns.over[j] = 1.0f;
  }
  rows.inverse = columns.inverse = 1.0f;
  u32 left = rounds;
#pragma unroll 1
  for (;;) {
    half_round<true>(s, rows, columns, m.hc_eps, a);
    if (--left == 0u) break;
    half_round<false>(s, columns, rows, m.hc_eps, b);
  }
#pragma unroll
  for (u32 k = 0; k < STREAMS; ++k) {
    float last = multiply(a.unit, reciprocal(columns.over[k]));  // the scales of a and of 1 / b cancel
#pragma unroll
    for (u32 j = 0; j < STREAMS; ++j) way[STREAMS * j + k] = multiply(multiply(s[j][k], a.entry[j]), last);
  }
}

// ------------------------------------------------------------------------------------ the sum over ranks
// Unit i of the message, awaited, added up and laid down for its row.
template <int D> DEVICE void take_unit(const Args& a, const Turn& t, u32 i, const Quad& mine, u32* to, bool& alive) {
  u32 rank = rank_of(a);
  Quad others[1][OTHERS];
  alive = alive && poll_sentinel<1, OTHERS>(a, t, i, 0u, ~0u, [=](u32 q) { return other(rank, q); }, others);
  Quad sum = alive ? sum_with<D>(others[0], mine, rank) : POISON;
#pragma unroll
  for (u32 k = 0; k < 4u; ++k) to[k] = sum.word[k];
}

// ---------------------------------------------------------------------------------------- two columns of a row
// The new streams at this lane's columns, one word a stream.
template <int D> DEVICE void mix_back(const float* way, u32 y, const u32* old, u32* now) {
  float sum[2], was[STREAMS][2];
  Numbers<D>::widen(y, sum);
#pragma unroll
  for (u32 j = 0; j < STREAMS; ++j) Numbers<D>::widen(old[j], was[j]);
#pragma unroll
  for (u32 k = 0; k < STREAMS; ++k) {
    float value[2];
#pragma unroll
    for (u32 c = 0; c < 2u; ++c) {
      value[c] = multiply(way[k], sum[c]);
#pragma unroll
      for (u32 j = 0; j < STREAMS; ++j) value[c] = multiply_add(way[STREAMS * (j + 1u) + k], was[j][c], value[c]);
    }
    now[k] = Numbers<D>::narrow(value);
  }
}

template <int D> DEVICE u32 normed(const float* pre, float scale, const float* weight, const u32* now) {
  float x[2] = {0.0f, 0.0f};
#pragma unroll
  for (u32 i = 0; i < STREAMS; ++i) {
    float value[2];
    Numbers<D>::widen(now[i], value);
#pragma unroll
    for (u32 c = 0; c < 2u; ++c) x[c] = multiply_add(pre[i], value[c], x[c]);
  }
  Numbers<D>::widen(Numbers<D>::narrow(x), x);  // x is rounded before its norm, as the carrier holds it
#pragma unroll
  for (u32 c = 0; c < 2u; ++c) x[c] = multiply(multiply(x[c], scale), weight[c]);
  return Numbers<D>::narrow(x);
}

template <int D> DEVICE void weight_of(const Mixing& m, u32 column, float* to) {
  if (m.wide_weight) {
    to[0] = reinterpret_cast<const float*>(m.weight)[column], to[1] = reinterpret_cast<const float*>(m.weight)[column + 1u];
  } else {
    Numbers<D>::widen(reinterpret_cast<const u32*>(m.weight)[column / 2u], to);
  }
}

// fn's values at two columns: f[k][i] are those of this warp's mix k and stream i.
DEVICE void weights_of(const Mixing& m, u32 warp, u32 column, bool there, float (*f)[STREAMS][2]) {
#pragma unroll
  for (u32 k = 0; k < 3u; ++k)
#pragma unroll
    for (u32 i = 0; i < STREAMS; ++i) {
      u64 at = (static_cast<u64>(3u * warp + k) * STREAMS + i) * m.width + column;
      u64 both = there ? *reinterpret_cast<const u64*>(m.fn + at) : 0u;
      f[k][i][0] = float_of(static_cast<u32>(both)), f[k][i][1] = float_of(static_cast<u32>(both >> 32));
    }
}

// Entries of the Gram matrix in the order 00 01 02 03 11 12 13 22 23 33: two bits each.
DEVICE u32 gram_row(u32 entry) { return 0xe9500u >> 2u * entry & 3u; }
DEVICE u32 gram_column(u32 entry) { return 0xfb9e4u >> 2u * entry & 3u; }

// What a group adds to this warp's five sums of each row: three mixes, then one or two entries of the Gram matrix.
template <int D, u32 ROWS>
DEVICE void add_group(const Shared& s, u32 warp, u32 lane, const float (*f)[STREAMS][2], float (*sums)[ROWS]) {
#pragma unroll
  for (u32 r = 0; r < ROWS; ++r)
#pragma unroll
    for (u32 i = 0; i < STREAMS; ++i) {
      float value[2];
      Numbers<D>::widen(s.now[r][i][lane], value);
#pragma unroll
      for (u32 k = 0; k < 3u; ++k)
#pragma unroll
        for (u32 c = 0; c < 2u; ++c) sums[k][r] = multiply_add(f[k][i][c], value[c], sums[k][r]);
    }
#pragma unroll
  for (u32 k = 3u; k < 5u; ++k) {
    u32 entry = warp + (k - 3u) * WARPS;
    if (entry >= URGENT - STREAMS) continue;
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r) {
      float one[2], two[2];
      Numbers<D>::widen(s.now[r][gram_row(entry)][lane], one);
      Numbers<D>::widen(s.now[r][gram_column(entry)][lane], two);
#pragma unroll
      for (u32 c = 0; c < 2u; ++c) sums[k][r] = multiply_add(one[c], two[c], sums[k][r]);
    }
  }
}

// N sums over the lanes at once: a lane comes back with number lane / (warp / N). Each is added up in the same order
// as if it were alone, since at every step the addends are those of two lanes that differ in one bit.
template <u32 N, u32 MASK = TEAM / 2u> DEVICE float over_lanes(float* values) {
  if constexpr (MASK == 0u) {
    return values[0];
  } else if constexpr (N == 1u) {
    values[0] = add(values[0], shuffle_xor(values[0], MASK));
    return over_lanes<1u, MASK / 2u>(values);
  } else {
    bool upper = (threadIdx.x & MASK) != 0u;
#pragma unroll
    for (u32 i = 0; i < N / 2u; ++i) {
      float sent = upper ? values[i] : values[i + N / 2u], kept = upper ? values[i + N / 2u] : values[i];
      values[i] = add(kept, shuffle_xor(sent, MASK));
    }
    return over_lanes<N / 2u, MASK / 2u>(values);
  }
}

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
