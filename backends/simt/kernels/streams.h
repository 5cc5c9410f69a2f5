// What one block does for a boundary between sublayers (streams.cu): Sinkhorn, its columns of rows, its parts of sums.
#pragma once
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
