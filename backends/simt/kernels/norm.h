// The norm of a row, a block a row:
//   out = h = round(reduced + residual);  norm_out = round(h * rsqrt(mean(h^2) + eps) * weight)
// or norm_out in e4m3fn with a power-of-two scale a group of 128 of the rounded norm. Products and sums are written out
// one by one, so that no compiler fuses them in one kernel and not in another.
#pragma once
#include "payload.h"
#include "numbers.h"

struct Norm {
  const u8* residual;
  const u8* weight;
  u8* out;
  u8* scale_out;   // 0: norm_out has the dtype of the rest
  u32 units, rows;  // units of 16 bytes in a row
  float eps;
  bool wide_weight;  // fp32
};
#define NORM_PARAMS PARAMS, u64 residual, u64 weight, u64 norm_out, u64 scale_out, u64 shape, u64 options
#define NORM_PACKED                                                                                             \
  Norm {                                                                                                        \
    (const u8*)residual, (const u8*)weight, (u8*)norm_out, (u8*)scale_out, static_cast<u32>(shape),             \
        static_cast<u32>(shape >> 32), float_of(static_cast<u32>(options)), (options >> 32) != 0u               \
  }

#define GROUP 128u  // elements that share a scale
#define E4M3_LIMIT 448.0f
#define E4M3_FLOOR 1e-4f

template <int D> struct Elements {
  static const u32 N = 4u * Numbers<D>::A_WORD;  // of a unit
};

template <int D> DEVICE void widen_unit(const Quad& unit, float* to) {
#pragma unroll
  for (u32 k = 0; k < 4; ++k) Numbers<D>::widen(unit.word[k], to + k * Numbers<D>::A_WORD);
}
template <int D> DEVICE Quad narrow_unit(const float* from) {
  Quad unit;
#pragma unroll
  for (u32 k = 0; k < 4; ++k) unit.word[k] = Numbers<D>::narrow(from + k * Numbers<D>::A_WORD);
  return unit;
}

// The sum over a row, in an order that depends on the number of threads alone. ROW_BARRIER is among the threads of rows.
DEVICE float row_sum(const Turn& t, float mine, u32 turn) {
  const u32 MOST = 512 / HALMA_WARP;
  __shared__ float parts[2][MOST];
#pragma unroll
  for (u32 mask = HALMA_WARP / 2; mask > 0; mask /= 2) mine = add(mine, shuffle_xor(mine, mask));
  if (threadIdx.x % HALMA_WARP == 0u) parts[turn & 1u][threadIdx.x / HALMA_WARP] = mine;
  ROW_BARRIER(t);
  float total = 0.0f;
#pragma unroll
  for (u32 w = 0; w < MOST; ++w) {
    float part = parts[turn & 1u][w];  // all loads at once; those of warps that are not there do not count
    total = add(total, w < t.threads / HALMA_WARP ? part : 0.0f);
  }
  return total;
}

template <int D> DEVICE void load_weight(const Norm& n, u32 j, float* to) {
  const u32 N = Elements<D>::N;
  if (n.wide_weight && D != F32) {
    const Quad* from = reinterpret_cast<const Quad*>(n.weight) + j * (N / 4u);
#pragma unroll
    for (u32 k = 0; k < N / 4u; ++k) widen_unit<F32>(from[k], to + 4u * k);
  } else {
    widen_unit<D>(reinterpret_cast<const Quad*>(n.weight)[j], to);
  }
}

// A group lies on neighbouring lanes: GROUP / N of them. Magnitudes are compared as bits, so that a NaN stays.
template <int D> DEVICE void store_fp8(const Norm& n, u32 row, u32 j, bool live, const Quad& unit) {
  const u32 N = Elements<D>::N;
  float y[N];
  widen_unit<D>(unit, y);
  u32 largest = 0u;
#pragma unroll
  for (u32 k = 0; k < N; ++k) {
    u32 magnitude = bits_of(y[k]) & 0x7fffffffu;
    if (live && magnitude > largest) largest = magnitude;
  }
#pragma unroll
  for (u32 mask = GROUP / N / 2u; mask > 0; mask /= 2u) {
    u32 other = bits_of(shuffle_xor(float_of(largest), mask));
    if (other > largest) largest = other;
  }
  if (!live) return;
  float scale = float_of(largest);
  if (largest <= 0x7f800000u) {
    scale = multiply(scale < E4M3_FLOOR ? E4M3_FLOOR : scale, 1.0f / E4M3_LIMIT);
    scale = float_of((bits_of(scale) + 0x7fffffu) & 0x7f800000u);  // up to a power of two
  }
  u32 words[N / 4u];
#pragma unroll
  for (u32 k = 0; k < N / 4u; ++k) {
    words[k] = 0u;
#pragma unroll
    for (u32 b = 0; b < 4u; ++b) words[k] |= to_e4m3(divide(y[4u * k + b], scale)) << (8u * b);
  }
  u32* to = reinterpret_cast<u32*>(n.out + (static_cast<u64>(row) * n.units + j) * N);
#pragma unroll
  for (u32 k = 0; k < N / 4u; ++k) to[k] = words[k];
  if (j % (GROUP / N) == 0u)
    reinterpret_cast<float*>(n.scale_out)[(static_cast<u64>(row) * n.units + j) / (GROUP / N)] = scale;
}

// One row. `arrive(i, mine, alive)` gives the reduced unit i of the message, of which this rank's part is `mine`.
// ONE: a row has at most one unit a thread, which stays in registers; else each thread reads back what it wrote to
// `out`. Every thread of rows comes here, for the barrier.
template <int D, bool ONE, typename Arrive>
DEVICE void norm_row(const Args& a, const Turn& t, const Norm& n, u32 row, u32 turn, bool& alive, Arrive arrive) {
  const u32 N = Elements<D>::N;
  const Quad* source = reinterpret_cast<const Quad*>(a.source) + static_cast<u64>(row) * n.units;
  const Quad* residual = reinterpret_cast<const Quad*>(n.residual) + static_cast<u64>(row) * n.units;
  Quad* out = reinterpret_cast<Quad*>(a.out) + static_cast<u64>(row) * n.units;
  Quad* norm_out = reinterpret_cast<Quad*>(n.out) + static_cast<u64>(row) * n.units;
  float share = divide(1.0f, static_cast<float>(n.units * N));
  u32 rounds = ONE ? 1u : (n.units + t.threads - 1u) / t.threads;
  Quad h = POISON;
  float squares = 0.0f, weight[N];
  if (ONE && threadIdx.x < n.units) load_weight<D>(n, threadIdx.x, weight);
#pragma unroll 1
  for (u32 k = 0; k < rounds; ++k) {
    u32 j = k * t.threads + threadIdx.x;
    if (j >= n.units) continue;
    float sum[N], add_to[N];
    Quad own = source[j];
    widen_unit<D>(residual[j], add_to);  // both in flight while the peers' words are
    widen_unit<D>(arrive(row * n.units + j, own, alive), sum);
#pragma unroll
    for (u32 e = 0; e < N; ++e) sum[e] = add(sum[e], add_to[e]);
    h = alive ? narrow_unit<D>(sum) : POISON;
    out[j] = h;
    widen_unit<D>(h, sum);
#pragma unroll
    for (u32 e = 0; e < N; ++e) squares = multiply_add(sum[e], sum[e], squares);
  }
  float scale = reciprocal_root(add(multiply(row_sum(t, squares, turn), share), n.eps));
#pragma unroll 1
  for (u32 k = 0; k < rounds; ++k) {
    u32 j = k * t.threads + threadIdx.x;
    bool live = j < n.units;
    Quad unit = POISON;
    if (live) {
      float y[N];
      if (!ONE) h = out[j], load_weight<D>(n, j, weight);
      widen_unit<D>(h, y);
#pragma unroll
      for (u32 e = 0; e < N; ++e) y[e] = multiply(multiply(y[e], scale), weight[e]);
      unit = narrow_unit<D>(y);
    }
    if (n.scale_out != 0) {
      store_fp8<D>(n, row, j, live, unit);
    } else if (live) {
      norm_out[j] = unit;
    }
  }
}
