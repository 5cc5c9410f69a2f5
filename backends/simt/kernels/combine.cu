// Combine (exchange.h): a thread a unit.
#include "exchange_sums.h"

template <int D, bool WIDE> DEVICE void combine(const Args& a, const Back& b) {
  Turn t = stand(a);
  start(a, t);
  if (t.spare) return serve(a, t);
  const u32 N = Sum<D>::N;
  u32 rank = rank_of(a), all = b.tokens, tokens[OTHERS];
#pragma unroll
  for (u32 q = 0; q < OTHERS; ++q) tokens[q] = static_cast<u32>(b.tokens_of[other(rank, q)]);
  // Beside the epoch and the counts; the memory is there whether or not the token is.
  u32 first = t.first / b.units;
  Slots ahead = slots_at(b, other(rank, 0u), first < b.most ? first : 0u, 0u);
  settle(t);
  epoch_read();
  bool alive = t.fault == 0u;
#pragma unroll
  for (u32 q = 0; q < OTHERS; ++q) {
    if (!alive) tokens[q] = 0u;
    all = tokens[q] > all ? tokens[q] : all;
  }
  u32 units = all * b.units;
  auto push = [&](u32 i) {
    u32 token = i / b.units, u = i % b.units;
#pragma unroll
    for (u32 q = 0; q < OTHERS; ++q) {
      Quad sum;
      u32 p = other(rank, q);
      if (token >= tokens[q]) continue;
      if (q != 0u || i != t.first) ahead = slots_at(b, p, token, 0u);
      if (!local_sum<D, WIDE>(a, b, p, token, u, ahead, sum)) continue;
      u64 at = b.back + rank * b.back_stride + 16ull * (static_cast<u64>(token) * b.units + u);
      HALMA_ORDER_SENTINEL_STORE(peer_at(a, p) + at, pair_of(without_sentinel(sum)));
    }
  };
  auto take = [&](u32 i) {
    u32 token = i / b.units, u = i % b.units;
    if (token >= b.tokens) return;
    float sum[N], next[N];
    Quad mine, data[OTHERS];
    const u8* from = a.own + b.back + 16ull * i;
    Slots own = slots_at(b, rank, token, 0u);  // beside the sources
    u32 sent = alive ? b.sources[token] : 0u;
    if ((sent >> rank & 1u) != 0u) local_sum<D, WIDE>(a, b, rank, token, u, own, mine);
    Wait wait{0u, 0u};
    for (;;) {
      bool here = true;
#pragma unroll
      for (u32 q = 0; q < OTHERS; ++q)
        if ((sent >> other(rank, q) & 1u) != 0u)
          data[q] = quad_of(HALMA_ORDER_SENTINEL_LOAD(from + other(rank, q) * b.back_stride));
#pragma unroll
      for (u32 q = 0; q < OTHERS; ++q)
        if ((sent >> other(rank, q) & 1u) != 0u) here &= sentinel_here(data[q]);
      if (here) break;
      auto culprit = [&](u32& who, u32& what) {
        what = ~0u;
#pragma unroll
        for (u32 q = 0; q < OTHERS; ++q)
          if ((sent >> other(rank, q) & 1u) != 0u && !sentinel_here(data[q])) who = other(rank, q);
      };
      if (!again(a, t, wait, STAGE_BACK | NO_FLAG, culprit)) {
        alive = false;
        break;
      }
    }
#pragma unroll
    for (u32 k = 0; k < N; ++k) sum[k] = alive ? 0.0f : float_of(~0u);
#pragma unroll
    for (u32 p = 0; p < SIZE; ++p) {
      if (!alive || (sent >> p & 1u) == 0u) continue;
      widened<D>(in_order(data, mine, rank, p), next);
#pragma unroll
      for (u32 k = 0; k < N; ++k) sum[k] = add(sum[k], next[k]);
    }
    // Emptied by its reader; the sender comes back behind this rank's next dispatch.
#pragma unroll
    for (u32 q = 0; q < OTHERS; ++q)
      if (alive && (sent >> other(rank, q) & 1u) != 0u)
        HALMA_ORDER_SENTINEL_CLEAR(const_cast<u8*>(from) + other(rank, q) * b.back_stride, (Pair{~0ull, ~0ull}));
    store_sum<D>(a, b, i, sum);
  };
  if (t.first < units && alive) push(t.first);
#pragma unroll 1
  for (u32 i = t.first; i < units; i += t.stride) {
    if (i + t.stride < units && alive) push(i + t.stride);  // one ahead of what is awaited: the link stays busy
    take(i);
  }
}

KERNEL combine_bfloat16(COMBINE_PARAMS) {
  Args a = PACKED;
  Back b = COMBINE_PACKED;
  combine<BF16, false>(a, b);
}
KERNEL combine_bfloat16_wide(COMBINE_PARAMS) {
  Args a = PACKED;
  Back b = COMBINE_PACKED;
  combine<BF16, true>(a, b);
}
KERNEL combine_float32(COMBINE_PARAMS) {
  Args a = PACKED;
  Back b = COMBINE_PACKED;
  combine<F32, false>(a, b);
}
