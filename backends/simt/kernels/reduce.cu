// All-reduce by push: one-shot in words or with a sentinel, two-shot in chunks.
#define HALMA_USES_PUSH 1
#include "chunks.h"
#include "numbers.h"
#include "push.h"

template <int D> DEVICE u64 sum_half(const u64* data) {
  u32 low[SIZE], high[SIZE];
#pragma unroll
  for (u32 p = 0; p < SIZE; ++p) low[p] = static_cast<u32>(data[p]), high[p] = static_cast<u32>(data[p] >> 32);
  return sum_words<D, SIZE>(low) | static_cast<u64>(sum_words<D, SIZE>(high)) << 32;
}

template <int D> DEVICE Quad sum_unit(const Quad* data) {
  Quad sum;
#pragma unroll
  for (u32 k = 0; k < 4; ++k) {
    u32 words[SIZE];
#pragma unroll
    for (u32 p = 0; p < SIZE; ++p) words[p] = data[p].word[k];
    sum.word[k] = sum_words<D, SIZE>(words);
  }
  return sum;
}

template <int D> DEVICE void one_shot_words(const Args& a) {
  Turn t = begin(a);
  if (t.spare) return serve(a, t);
  u64 mine = first_half(a, t.first);
  u32 units = units_of(a.nbytes, 8u), rank = rank_of(a);
  settle(t);
  u64 to = lane_box(a, t.epoch, rank);
  if (t.fault != 0u) return give_up(a, t);
#pragma unroll 1
  for (u32 i = t.first; i < units; i += t.stride)
    push_words(a, t, to + 16ull * i, i == t.first ? mine : load_half(a.source, i, a.nbytes));
  epoch_read();
  bool alive = true;
#pragma unroll 1
  for (u32 i = t.first; i < units; i += t.stride) {
    u64 data[1][SIZE];
    if (i != t.first) mine = load_half(a.source, i, a.nbytes);
    alive = alive && poll_words<1>(a, t, i, 0u, units, peers_of(a), data);
#pragma unroll
    for (u32 p = 0; p < SIZE; ++p)
      if (p == rank) data[0][p] = mine;
    store_half(a.out, i, a.nbytes, alive ? sum_half<D>(data[0]) : ~0ull, true);
  }
  if (time_to_scrub(t)) scrub(a, t, units, peers_of(a));
}

template <int D> DEVICE void one_shot_sentinel(const Args& a) {
  Turn t = begin(a);
  if (t.spare) return serve(a, t);
  Quad mine[BATCH];
  mine[0] = first_unit(a, t.first);
  u32 units = units_of(a.nbytes, 16u), rank = rank_of(a);
  settle(t);
  u64 to = lane_box(a, t.epoch, rank);
  if (t.fault != 0u) return give_up(a, t);
#pragma unroll 1
  for (u32 i = t.first; i < units; i += BATCH * t.stride) {
#pragma unroll
    for (u32 u = 0; u < BATCH; ++u)
      if (i + u * t.stride < units && (u > 0 || i != t.first)) mine[u] = load_unit(a.source, i + u * t.stride, a.nbytes);
#pragma unroll
    for (u32 u = 0; u < BATCH; ++u)
      if (i + u * t.stride < units) push_sentinel(a, to + 16ull * (i + u * t.stride), without_sentinel(mine[u]));
  }
  epoch_read();
  bool alive = true;
#pragma unroll 1
  for (u32 i = t.first; i < units; i += BATCH * t.stride) {
    Quad data[BATCH][SIZE];
#pragma unroll
    for (u32 u = 0; u < BATCH; ++u)
      if (i + u * t.stride < units) mine[u] = load_unit(a.source, i + u * t.stride, a.nbytes);
    alive = alive && poll_sentinel<BATCH>(a, t, i, t.stride, units, peers_of(a), data);
#pragma unroll
    for (u32 u = 0; u < BATCH; ++u) {
#pragma unroll
      for (u32 p = 0; p < SIZE; ++p)
        if (p == rank) data[u][p] = mine[u];
      if (i + u * t.stride < units)
        store_unit(a.out, i + u * t.stride, a.nbytes, alive ? sum_unit<D>(data[u]) : POISON, true);
    }
  }
  if (time_to_scrub(t)) scrub(a, t, 0u, 0u);
}

// Each rank sums the shard it owns and sends the rounded sum to every peer. One buffer a phase is enough: a peer sends
// into a phase's buffer again only after it has had this rank's part of the call in between.
template <int D> DEVICE void two_shot_chunks(const Args& a) {
  Turn t = enter(a, true);
  Pieces pieces = pieces_of(a);
  u32 units = units_of(a.nbytes, 16u), rank = rank_of(a), own = rank * pieces.shard;
  bool alive = begin_apart(a, t);
  if (blockIdx.x == t.header) return;
#pragma unroll 1
  for (u32 s = 0; s < pieces.count && alive; ++s) {
#pragma unroll
    for (u32 p = 0; p < SIZE; ++p)
      if (p != rank) send_piece(a, t, a.peer[p] + scatter_box(a, rank), p * pieces.shard, pieces.span(s), units);
    publish(a, t, PHASE_SCATTER, pieces.index(s), peers_of(a));
  }
#pragma unroll 1
  for (u32 s = 0; s < pieces.count && alive; ++s) {
    alive = await(a, t, PHASE_SCATTER, pieces.index(s), peers_of(a));
    Span span = pieces.span(s).under(units, own);
#pragma unroll 1
    for (u32 i = span.begin + threadIdx.x; alive && !t.spare && i < span.end; i += t.threads) {
      Quad data[SIZE], mine = load_unit(a.source, own + i, a.nbytes);
#pragma unroll
      for (u32 p = 0; p < SIZE; ++p) data[p] = p == rank ? mine : read_unit(a.own + scatter_box(a, p), i);
      Quad sum = sum_unit<D>(data);
#pragma unroll
      for (u32 p = 0; p < SIZE; ++p)
        if (p != rank) HALMA_ORDER_CHUNK_STORE(a.peer[p] + gather_box(a, rank) + 16ull * i, pair_of(sum));
      store_unit(a.out, own + i, a.nbytes, sum, true);
    }
    if (alive) publish(a, t, PHASE_GATHER, pieces.index(s), peers_of(a));
  }
#pragma unroll 1
  for (u32 s = 0; s < pieces.count && alive; ++s) {
    alive = await(a, t, PHASE_GATHER, pieces.index(s), peers_of(a));
#pragma unroll
    for (u32 p = 0; p < SIZE; ++p)
      if (p != rank && alive)
        take_piece(t, a.own + gather_box(a, p), a.out, p * pieces.shard, pieces.span(s), units, a.nbytes, true);
  }
  if (!alive && !t.spare) poison(t, a.out, a.nbytes, true);
  if (time_to_scrub(t)) scrub(a, t, 0u, 0u);
}

KERNEL all_reduce_words_bfloat16(PARAMS) { one_shot_words<BF16>(PACKED); }
KERNEL all_reduce_words_float16(PARAMS) { one_shot_words<F16>(PACKED); }
KERNEL all_reduce_words_float32(PARAMS) { one_shot_words<F32>(PACKED); }
KERNEL all_reduce_sentinel_bfloat16(PARAMS) { one_shot_sentinel<BF16>(PACKED); }
KERNEL all_reduce_sentinel_float16(PARAMS) { one_shot_sentinel<F16>(PACKED); }
KERNEL all_reduce_sentinel_float32(PARAMS) { one_shot_sentinel<F32>(PACKED); }
KERNEL all_reduce_chunks_bfloat16(PARAMS) { two_shot_chunks<BF16>(PACKED); }
KERNEL all_reduce_chunks_float16(PARAMS) { two_shot_chunks<F16>(PACKED); }
KERNEL all_reduce_chunks_float32(PARAMS) { two_shot_chunks<F32>(PACKED); }
