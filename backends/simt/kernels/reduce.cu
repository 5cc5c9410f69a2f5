// All-reduce by push: one-shot in words or with a sentinel, two-shot in chunks.
#define HALMA_USES_PUSH 1
#include "chunks.h"
#include "push.h"

// Of what came from the others and this rank's own.
template <int D> DEVICE u64 sum_half(const u64* others, u64 mine, u32 rank) {
  u32 low[SIZE], high[SIZE];
#pragma unroll
  for (u32 p = 0; p < SIZE; ++p) {
    u64 half = in_order(others, mine, rank, p);
    low[p] = static_cast<u32>(half), high[p] = static_cast<u32>(half >> 32);
  }
  return sum_words<D, SIZE>(low) | static_cast<u64>(sum_words<D, SIZE>(high)) << 32;
}

// Any number of units; the last may be short.
template <int D> DEVICE void many_words(const Args& a, Turn t, u32 units) {
  u32 rank = rank_of(a);
  u64 to = lane_box(a, t.epoch, rank);
#pragma unroll 1
  for (u32 i = t.first; i < units; i += t.stride) push_words(a, t, to + 16ull * i, load_half(a.source, i, a.nbytes));
  epoch_read();
  bool alive = true;
#pragma unroll 1
  for (u32 i = t.first; i < units; i += t.stride) {
    u64 data[1][OTHERS], mine = load_half(a.source, i, a.nbytes);
    alive = alive && poll_words<1, OTHERS>(a, t, i, 0u, units, [=](u32 q) { return other(rank, q); }, data);
    store_half(a.out, i, a.nbytes, alive ? sum_half<D>(data[0], mine, rank) : ~0ull, true);
  }
}

// At most one unit a thread, each whole: the shortest way, for the smallest messages.
template <int D> DEVICE void one_word(const Args& a) {
  Turn t = stand(a);
  u32 units = units_of(a.nbytes, 8u), rank = rank_of(a);
  bool live = t.first < units && !t.spare;
  const u8* from = a.source + 8ull * t.first;
  settle_address(from);
  Aim aimed = aim(a, 16ull * t.first);
  start(a, t);
  u64 mine = load8_now(from, live);
  if (t.spare) return serve(a, t);
  settle(t);
  if (RARE(t.fault != 0u)) return give_up(a, t);
  Pair words = words_of(t, mine);
#pragma unroll
  for (u32 q = 0; q < OTHERS; ++q)
    if (live) HALMA_ORDER_WORD_STORE(aimed.to[q] + turned(aimed, t), words);
  epoch_read();
  if (live) {
    u64 data[1][OTHERS];
    bool alive = poll_words<1, OTHERS>(a, t, t.first, 0u, units, [=](u32 q) { return other(rank, q); }, data);
    *reinterpret_cast<u64*>(a.out + 8ull * t.first) = alive ? sum_half<D>(data[0], mine, rank) : ~0ull;
  }
  if (time_to_scrub(t)) scrub(a, t, units, peers_of(a));
}

template <int D> DEVICE void one_shot_words(const Args& a) {
  Turn t = stand(a);
  start(a, t);
  if (t.spare) return serve(a, t);
  settle(t);
  u32 units = units_of(a.nbytes, 8u);
  if (RARE(t.fault != 0u)) return give_up(a, t);
  many_words<D>(a, t, units);
  if (time_to_scrub(t)) scrub(a, t, units, peers_of(a));
}

// At most BATCH units a thread: all of them go out, then all are awaited. The own ones are read twice, since registers
// are short.
template <int D> DEVICE void few_with_sentinel(const Args& a, const Turn& t, u32 units) {
  u32 rank = rank_of(a), i = t.first;
  u64 to = lane_box(a, t.epoch, rank);
  Quad mine[BATCH], data[BATCH][OTHERS];
#pragma unroll
  for (u32 u = 0; u < BATCH; ++u)
    if (i + u * t.stride < units) mine[u] = load_unit(a.source, i + u * t.stride, a.nbytes);
#pragma unroll
  for (u32 u = 0; u < BATCH; ++u)
    if (i + u * t.stride < units) push_sentinel(a, to + 16ull * (i + u * t.stride), without_sentinel(mine[u]));
  epoch_read();
  if (i >= units) return;
#pragma unroll
  for (u32 u = 0; u < BATCH; ++u)
    if (i + u * t.stride < units) mine[u] = load_unit(a.source, i + u * t.stride, a.nbytes);
  bool alive = poll_sentinel<BATCH, OTHERS>(a, t, i, t.stride, units, [=](u32 q) { return other(rank, q); }, data);
#pragma unroll
  for (u32 u = 0; u < BATCH; ++u)
    if (i + u * t.stride < units)
      store_unit(a.out, i + u * t.stride, a.nbytes, alive ? sum_with<D>(data[u], mine[u], rank) : POISON, true);
}

// Any number of units, each thread one ahead of what it awaits: the link is busy while arrivals are added up. All out
// before all in took 16.0 us at 4 MB and 61 at 16 MB between two H200s, this takes 15.5 and 54.9.
template <int D> DEVICE void many_with_sentinel(const Args& a, const Turn& t, u32 units) {
  u32 rank = rank_of(a);
  u64 to = lane_box(a, t.epoch, rank);
  Quad mine;
  if (t.first < units) {
    mine = load_unit(a.source, t.first, a.nbytes);
    push_sentinel(a, to + 16ull * t.first, without_sentinel(mine));
  }
  epoch_read();
  bool alive = true;
#pragma unroll 1
  for (u32 i = t.first; i < units; i += t.stride) {
    Quad next, data[1][OTHERS];
    if (i + t.stride < units) {
      next = load_unit(a.source, i + t.stride, a.nbytes);
      push_sentinel(a, to + 16ull * (i + t.stride), without_sentinel(next));
    }
    alive = alive && poll_sentinel<1, OTHERS>(a, t, i, 0u, units, [=](u32 q) { return other(rank, q); }, data);
    store_unit(a.out, i, a.nbytes, alive ? sum_with<D>(data[0], mine, rank) : POISON, true);
    mine = next;
  }
}

template <int D> DEVICE void one_with_sentinel(const Args& a) {
  Turn t = stand(a);
  u32 units = units_of(a.nbytes, 16u), rank = rank_of(a);
  bool live = t.first < units && !t.spare;
  const u8* from = a.source + 16ull * t.first;
  settle_address(from);
  Aim aimed = aim(a, 16ull * t.first);
  start(a, t);
  Quad mine = quad_of(load16_now(from, live));
  if (t.spare) return serve(a, t);
  settle(t);
  if (RARE(t.fault != 0u)) return give_up(a, t);
  Pair words = pair_of(without_sentinel(mine));
#pragma unroll
  for (u32 q = 0; q < OTHERS; ++q)
    if (live) HALMA_ORDER_SENTINEL_STORE(aimed.to[q] + turned(aimed, t), words);
  epoch_read();
  if (live) {
    Quad data[1][OTHERS];
    bool alive = poll_sentinel<1, OTHERS>(a, t, t.first, 0u, units, [=](u32 q) { return other(rank, q); }, data);
    *reinterpret_cast<Quad*>(a.out + 16ull * t.first) = alive ? sum_with<D>(data[0], mine, rank) : POISON;
  }
  if (time_to_scrub(t)) scrub(a, t, 0u, 0u);
}

template <int D> DEVICE void one_shot_sentinel(const Args& a) {
  Turn t = stand(a);
  start(a, t);
  if (t.spare) return serve(a, t);
  settle(t);
  if (RARE(t.fault != 0u)) return give_up(a, t);
  u32 units = units_of(a.nbytes, 16u);
  if (units <= BATCH * t.stride)
    few_with_sentinel<D>(a, t, units);
  else
    many_with_sentinel<D>(a, t, units);
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
    for (u32 i = span.begin + threadIdx.x; alive && !t.spare && i < span.end; i += SUMS * t.threads) {
      Quad others[SUMS][OTHERS], mine[SUMS];
#pragma unroll
      for (u32 u = 0; u < SUMS; ++u) {
        u32 at = i + u * t.threads;
        if (at >= span.end) continue;
        mine[u] = load_unit(a.source, own + at, a.nbytes);
#pragma unroll
        for (u32 q = 0; q < OTHERS; ++q) others[u][q] = read_unit(a.own + scatter_box(a, other(rank, q)), at);
      }
#pragma unroll
      for (u32 u = 0; u < SUMS; ++u) {
        u32 at = i + u * t.threads;
        if (at >= span.end) continue;
        Quad sum = sum_with<D>(others[u], mine[u], rank);
#pragma unroll
        for (u32 p = 0; p < SIZE; ++p)
          if (p != rank) HALMA_ORDER_CHUNK_STORE(a.peer[p] + gather_box(a, rank) + 16ull * at, pair_of(sum));
        store_unit(a.out, own + at, a.nbytes, sum, true);
      }
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

#define REDUCE(dtype, D)                                                               \
  KERNEL all_reduce_words_##dtype(PARAMS) { one_shot_words<D>(PACKED); }                \
  KERNEL all_reduce_words_one_##dtype(PARAMS) { one_word<D>(PACKED); }                  \
  KERNEL all_reduce_sentinel_##dtype(PARAMS) { one_shot_sentinel<D>(PACKED); }          \
  KERNEL all_reduce_sentinel_one_##dtype(PARAMS) { one_with_sentinel<D>(PACKED); }      \
  KERNEL all_reduce_chunks_##dtype(PARAMS) { two_shot_chunks<D>(PACKED); }
REDUCE(bfloat16, BF16)
REDUCE(float16, F16)
REDUCE(float32, F32)
