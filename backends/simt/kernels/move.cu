// All-gather, broadcast and barrier by push: in words, or in chunks for more. Bytes travel as they are.
#define HALMA_USES_PUSH 1
#include "chunks.h"
#include "push.h"

// `senders`: ranks whose payload moves. From rank p it goes to out + p * spacing.
template <u32 SENDERS> DEVICE void move_words(const Args& a, u32 senders, u64 spacing) {
  Turn t = stand(a);
  u32 units = units_of(a.nbytes, 8u), rank = rank_of(a);
  bool sends = (senders >> rank & 1u) != 0u, aligned = (spacing & 7u) == 0u;
  start(a, t);
  if (t.spare) return serve(a, t);
  u64 mine = sends && t.first < units ? load_half(a.source, t.first, a.nbytes) : 0u;
  settle(t);
  u64 to = lane_box(a, t.epoch, rank);
  u8* kept = a.out + rank * spacing;
  bool alive = t.fault == 0u;
#pragma unroll 1
  for (u32 i = t.first; sends && alive && i < units; i += t.stride) {
    if (i != t.first) mine = load_half(a.source, i, a.nbytes);
    push_words(a, t, to + 16ull * i, mine);
    if (kept != a.source) store_half(kept, i, a.nbytes, mine, aligned);
  }
  epoch_read();
  u32 awaited = senders & peers_of(a), root = root_of(a);
  auto sender = [=](u32 q) { return root < SIZE ? root : other(rank, q); };
#pragma unroll 1
  for (u32 i = t.first; i < units; i += t.stride) {
    u64 data[1][SENDERS];
    if (awaited != 0u) alive = alive && poll_words<1, SENDERS>(a, t, i, 0u, units, sender, data);
#pragma unroll
    for (u32 q = 0; q < SENDERS; ++q)
      if (awaited != 0u) store_half(a.out + sender(q) * spacing, i, a.nbytes, alive ? data[0][q] : ~0ull, aligned);
    if (!alive && sends) store_half(kept, i, a.nbytes, ~0ull, aligned);
  }
  if (time_to_scrub(t)) scrub(a, t, units, awaited);
}

// The same with a sentinel, for floats only: all ones arrives as another NaN, here too, so that all ranks have the same.
template <u32 SENDERS> DEVICE void move_sentinel(const Args& a, u32 senders, u64 spacing) {
  Turn t = stand(a);
  start(a, t);
  if (t.spare) return serve(a, t);
  settle(t);
  u32 units = units_of(a.nbytes, 16u), rank = rank_of(a);
  bool sends = (senders >> rank & 1u) != 0u, aligned = (spacing & 15u) == 0u;
  u64 to = lane_box(a, t.epoch, rank);
  bool alive = t.fault == 0u;
#pragma unroll 1
  for (u32 i = t.first; sends && alive && i < units; i += t.stride) {
    Quad mine = without_sentinel(load_unit(a.source, i, a.nbytes));
    push_sentinel(a, to + 16ull * i, mine);
    store_unit(a.out + rank * spacing, i, a.nbytes, mine, aligned);
  }
  epoch_read();
  u32 awaited = senders & peers_of(a), root = root_of(a);
  auto sender = [=](u32 q) { return root < SIZE ? root : other(rank, q); };
#pragma unroll 1
  for (u32 i = t.first; i < units; i += t.stride) {
    Quad data[1][SENDERS];
    if (awaited != 0u) alive = alive && poll_sentinel<1, SENDERS>(a, t, i, 0u, units, sender, data);
#pragma unroll
    for (u32 q = 0; q < SENDERS; ++q)
      if (awaited != 0u) store_unit(a.out + sender(q) * spacing, i, a.nbytes, alive ? data[0][q] : POISON, aligned);
    if (!alive && sends) store_unit(a.out + rank * spacing, i, a.nbytes, POISON, aligned);
  }
  if (time_to_scrub(t)) scrub(a, t, 0u, 0u);
}

// The boxes have one buffer: nobody sends before every rank has begun the call, and so has read those of the last.
DEVICE void move_chunks(const Args& a, u32 senders, u64 spacing) {
  Turn t = enter(a, true);
  Pieces pieces = pieces_of(a);
  u32 units = units_of(a.nbytes, 16u), rank = rank_of(a);
  bool sends = (senders >> rank & 1u) != 0u, aligned = (spacing & 15u) == 0u;
  u8* kept = a.out + rank * spacing;
  bool alive = begin_apart(a, t);
  if (blockIdx.x == t.header) return;
  alive = alive && everybody_began(a, t);
#pragma unroll 1
  for (u32 s = 0; s < pieces.count && alive && sends; ++s) {
    Span span = pieces.span(s);
#pragma unroll
    for (u32 p = 0; p < SIZE; ++p)
      if (p != rank) send_piece(a, t, a.peer[p] + gather_box(a, rank), 0u, span, units);
    publish(a, t, PHASE_GATHER, pieces.index(s), peers_of(a));
#pragma unroll 1
    for (u32 i = span.begin + threadIdx.x; kept != a.source && !t.spare && i < span.end; i += t.threads)
      store_unit(kept, i, a.nbytes, load_unit(a.source, i, a.nbytes), aligned);
  }
  u32 awaited = senders & peers_of(a);
#pragma unroll 1
  for (u32 s = 0; s < pieces.count && alive; ++s) {
    alive = await(a, t, PHASE_GATHER, pieces.index(s), awaited);
#pragma unroll
    for (u32 p = 0; p < SIZE; ++p)
      if ((awaited >> p & 1u) != 0u && alive)
        take_piece(t, a.own + gather_box(a, p), a.out + p * spacing, 0u, pieces.span(s), units, a.nbytes, aligned);
  }
  if (!alive && !t.spare) {
#pragma unroll
    for (u32 p = 0; p < SIZE; ++p)
      if ((senders >> p & 1u) != 0u) poison(t, a.out + p * spacing, a.nbytes, aligned);
  }
  if (time_to_scrub(t)) scrub(a, t, 0u, 0u);
}

#define EVERYBODY ((1u << SIZE) - 1u)

KERNEL all_gather_words(PARAMS) {
  Args a = PACKED;
  move_words<OTHERS>(a, EVERYBODY, a.nbytes);
}
KERNEL all_gather_sentinel(PARAMS) {
  Args a = PACKED;
  move_sentinel<OTHERS>(a, EVERYBODY, a.nbytes);
}
KERNEL all_gather_chunks(PARAMS) {
  Args a = PACKED;
  move_chunks(a, EVERYBODY, a.nbytes);
}
KERNEL broadcast_words(PARAMS) {
  Args a = PACKED;
  move_words<1>(a, 1u << root_of(a), 0u);
}
KERNEL broadcast_sentinel(PARAMS) {
  Args a = PACKED;
  move_sentinel<1>(a, 1u << root_of(a), 0u);
}
KERNEL broadcast_chunks(PARAMS) {
  Args a = PACKED;
  move_chunks(a, 1u << root_of(a), 0u);
}

// The header words are all there is to a barrier.
KERNEL barrier_words(PARAMS) {
  Args a = PACKED;
  Turn t = stand(a);
  start(a, t);
  if (t.spare) return serve(a, t);
  settle(t);
  epoch_read();
  if (time_to_scrub(t)) scrub(a, t, 0u, 0u);
}
