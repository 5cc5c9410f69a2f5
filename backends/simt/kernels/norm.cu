// All-reduce, residual and RMSNorm in one call by one-shot push.
#define HALMA_USES_PUSH 1
#include "push.h"
#define ROW_BARRIER(t) barrier_among((t).threads)  // the spare warp is not there
#include "norm.h"

enum Arrival { IN_WORDS, WITH_SENTINEL };

// The reduced unit i of the message, of which this rank's own part is `mine`.
template <int D, int ARRIVAL> DEVICE Quad arrived(const Args& a, const Turn& t, u32 i, const Quad& mine, bool& alive) {
  u32 rank = rank_of(a);
  auto sender = [=](u32 q) { return other(rank, q); };
  Quad others[1][OTHERS], data[SIZE];
  if (ARRIVAL == IN_WORDS) {
    u64 halves[2][OTHERS];
    if (SIZE <= 4) {
      alive = alive && poll_words<2, OTHERS>(a, t, 2u * i, 1u, ~0u, sender, halves);
    } else {  // one half after the other: registers
      alive = alive && poll_words<1, OTHERS>(a, t, 2u * i, 0u, ~0u, sender, halves);
      alive = alive && poll_words<1, OTHERS>(a, t, 2u * i + 1u, 0u, ~0u, sender, halves + 1);
    }
#pragma unroll
    for (u32 q = 0; q < OTHERS; ++q) others[0][q] = quad_of(Pair{halves[0][q], halves[1][q]});
  } else {
    alive = alive && poll_sentinel<1, OTHERS>(a, t, i, 0u, ~0u, sender, others);
  }
#pragma unroll
  for (u32 p = 0; p < SIZE; ++p) data[p] = in_order(others[0], mine, rank, p);
  return alive ? sum_units<D, SIZE>(data) : POISON;
}

template <int D, bool ONE, int ARRIVAL> DEVICE void fused(const Args& a, const Norm& n) {
  Turn t = stand(a);
  u32 first = blockIdx.x * n.units + threadIdx.x;  // the grid has no more blocks than there are rows, but for none
  bool mine = threadIdx.x < n.units && blockIdx.x < n.rows;
  const u8* from = a.source + 16ull * first;
  settle_address(from);
  start(a, t);
  Quad unit = quad_of(load16_now(from, mine && !t.spare));
  if (t.spare) return serve(a, t);
  settle(t);
  u64 to = lane_box(a, t.epoch, rank_of(a));
  bool alive = t.fault == 0u;
#pragma unroll 1
  for (u32 row = blockIdx.x; alive && row < n.rows; row += gridDim.x)
#pragma unroll 1
    for (u32 j = threadIdx.x; j < n.units; j += t.threads) {
      u32 i = row * n.units + j;
      if (i != first) unit = reinterpret_cast<const Quad*>(a.source)[i];
      if (ARRIVAL == IN_WORDS) {
        push_words(a, t, to + 16ull * (2u * i), pair_of(unit).low);
        push_words(a, t, to + 16ull * (2u * i + 1u), pair_of(unit).high);
      } else {
        push_sentinel(a, to + 16ull * i, without_sentinel(unit));
      }
    }
  epoch_read();
  auto arrive = [&](u32 i, const Quad& own, bool& living) { return arrived<D, ARRIVAL>(a, t, i, own, living); };
  u32 turn = 0;
#pragma unroll 1
  for (u32 row = blockIdx.x; row < n.rows; row += gridDim.x, ++turn) norm_row<D, ONE>(a, t, n, row, turn, alive, arrive);
  if (time_to_scrub(t)) scrub(a, t, ARRIVAL == IN_WORDS ? 2u * n.rows * n.units : 0u, peers_of(a));
}

#define FUSED(dtype, D)                                                                                     \
  KERNEL norm_words_##dtype(NORM_PARAMS) { fused<D, true, IN_WORDS>(PACKED, NORM_PACKED); }                    \
  KERNEL norm_words_wide_##dtype(NORM_PARAMS) { fused<D, false, IN_WORDS>(PACKED, NORM_PACKED); }               \
  KERNEL norm_sentinel_##dtype(NORM_PARAMS) { fused<D, true, WITH_SENTINEL>(PACKED, NORM_PACKED); }            \
  KERNEL norm_sentinel_wide_##dtype(NORM_PARAMS) { fused<D, false, WITH_SENTINEL>(PACKED, NORM_PACKED); }
FUSED(bfloat16, BF16)
FUSED(float16, F16)
FUSED(float32, F32)
