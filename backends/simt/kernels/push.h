// One-shot push, both wire formats: what a thread sends, and what it waits for.
#pragma once
#include "payload.h"
#include "numbers.h"

// Units of 16 bytes that a thread keeps in flight while it polls: all peers' words of all of them are loaded before
// one is tested. As many as stay in registers.
#define BATCH (SIZE == 2 ? 3u : 1u)

DEVICE u64 lane_box(const Args& a, u32 epoch, u32 sender) { return a.lane + ((epoch & 1u) * SIZE + sender) * a.box; }

// The ranks but this one, in order; and a value of every rank in order, of which `mine` is this one's.
#define OTHERS (SIZE - 1u)
DEVICE u32 other(u32 rank, u32 q) { return q + (q >= rank ? 1u : 0u); }
template <typename T> DEVICE T in_order(const T* others, const T& mine, u32 rank, u32 p) {
  T before = p < OTHERS ? others[p] : mine, behind = p > 0u ? others[p - 1u] : mine;
  return p == rank ? mine : p < rank ? before : behind;
}

// A unit summed over all ranks, of what came from the others and this rank's own.
template <int D> DEVICE Quad sum_with(const Quad* others, const Quad& mine, u32 rank) {
  Quad data[SIZE];
#pragma unroll
  for (u32 p = 0; p < SIZE; ++p) data[p] = in_order(others, mine, rank, p);
  return sum_units<D, SIZE>(data);
}

// Where this thread's first unit goes in every peer's even buffer, worked out before the wait.
struct Aim {
  u8* to[OTHERS];
  u64 odd;  // to the odd buffer
};
DEVICE Aim aim(const Args& a, u64 offset) {
  Aim aimed;
#pragma unroll
  for (u32 q = 0; q < OTHERS; ++q) {
    aimed.to[q] = peer_at(a, other(rank_of(a), q)) + (a.lane + rank_of(a) * a.box + offset);
    settle_address(aimed.to[q]);
  }
  aimed.odd = SIZE * a.box;
  return aimed;
}
DEVICE u64 turned(const Aim& aimed, const Turn& t) { return (t.epoch & 1u) != 0u ? aimed.odd : 0u; }

// WORDS: 8 bytes of payload travel as two {data, epoch}.
DEVICE Pair words_of(const Turn& t, u64 data) {
  u64 flag = static_cast<u64>(t.epoch) << 32;
  return Pair{flag | static_cast<u32>(data), flag | data >> 32};
}
DEVICE void push_words(const Args& a, const Turn& t, u64 at, u64 data) {
  Pair words = words_of(t, data);
#pragma unroll
  for (u32 p = 0; p < SIZE; ++p)
    if (p != rank_of(a)) HALMA_ORDER_WORD_STORE(a.peer[p] + at, words);
}

DEVICE bool words_here(const Pair& words, u32 epoch) {
  return static_cast<u32>(words.low >> 32) == epoch && static_cast<u32>(words.high >> 32) == epoch;
}

DEVICE u64 words_payload(const Pair& words) { return static_cast<u32>(words.low) | words.high << 32; }

DEVICE u32 flag_seen(const Pair& words, u32 epoch) {
  u32 first = static_cast<u32>(words.low >> 32);
  return first != epoch ? first : static_cast<u32>(words.high >> 32);
}

// SENTINEL: a word of all ones means that nothing has come; the sender maps it to another NaN.
DEVICE Quad without_sentinel(Quad unit) {
#pragma unroll
  for (u32 k = 0; k < 4; ++k)
    if (unit.word[k] == ~0u) unit.word[k] = ~1u;
  return unit;
}

DEVICE void push_sentinel(const Args& a, u64 at, const Quad& unit) {
#pragma unroll
  for (u32 p = 0; p < SIZE; ++p)
    if (p != rank_of(a)) HALMA_ORDER_SENTINEL_STORE(a.peer[p] + at, pair_of(unit));
}

DEVICE bool sentinel_here(const Quad& unit) {
  return unit.word[0] != ~0u && unit.word[1] != ~0u && unit.word[2] != ~0u && unit.word[3] != ~0u;
}

// The payload of units i, i + step, ... (`COUNT` of them, those under `units`) from the ranks sender(0), sender(1), ...
// False after a fault.
#define WANTED(u) ((u) == 0u || i + (u) * step < units)
template <u32 COUNT, u32 SENDERS, typename Sender>
DEVICE bool poll_words(const Args& a, const Turn& t, u32 i, u32 step, u32 units, Sender sender, u64 (*data)[SENDERS]) {
  const u8* from[SENDERS];
#pragma unroll
  for (u32 q = 0; q < SENDERS; ++q) {
    from[q] = a.own + lane_box(a, t.epoch, sender(q)) + 16ull * i;
    settle_address(from[q]);
  }
  Wait wait{0u, 0u};
  Pair words[COUNT][SENDERS];
  for (;;) {
    bool here = true;
#pragma unroll
    for (u32 u = 0; u < COUNT; ++u)
#pragma unroll
      for (u32 q = 0; q < SENDERS; ++q)
        if (WANTED(u)) words[u][q] = HALMA_ORDER_WORD_LOAD(from[q] + 16ull * u * step);
#pragma unroll
    for (u32 u = 0; u < COUNT; ++u)
#pragma unroll
      for (u32 q = 0; q < SENDERS; ++q)
        if (WANTED(u)) here &= words_here(words[u][q], t.epoch);
    if (here) break;
    auto culprit = [&](u32& who, u32& what) {
#pragma unroll
      for (u32 u = 0; u < COUNT; ++u)
#pragma unroll
        for (u32 q = 0; q < SENDERS; ++q)
          if (WANTED(u) && !words_here(words[u][q], t.epoch)) who = sender(q), what = flag_seen(words[u][q], t.epoch);
    };
    if (!again(a, t, wait, algorithm_of(a), culprit)) return false;
  }
#pragma unroll
  for (u32 u = 0; u < COUNT; ++u)
#pragma unroll
    for (u32 q = 0; q < SENDERS; ++q)
      if (WANTED(u)) data[u][q] = words_payload(words[u][q]);
  return true;
}

template <u32 COUNT, u32 SENDERS, typename Sender>
DEVICE bool poll_sentinel(const Args& a, const Turn& t, u32 i, u32 step, u32 units, Sender sender, Quad (*data)[SENDERS]) {
  const u8* from[SENDERS];
#pragma unroll
  for (u32 q = 0; q < SENDERS; ++q) {
    from[q] = a.own + lane_box(a, t.epoch, sender(q)) + 16ull * i;
    settle_address(from[q]);
  }
  Wait wait{0u, 0u};
  for (;;) {
    bool here = true;
#pragma unroll
    for (u32 u = 0; u < COUNT; ++u)
#pragma unroll
      for (u32 q = 0; q < SENDERS; ++q)
        if (WANTED(u)) data[u][q] = quad_of(HALMA_ORDER_SENTINEL_LOAD(from[q] + 16ull * u * step));
#pragma unroll
    for (u32 u = 0; u < COUNT; ++u)
#pragma unroll
      for (u32 q = 0; q < SENDERS; ++q)
        if (WANTED(u)) here &= sentinel_here(data[u][q]);
    if (here) break;
    auto culprit = [&](u32& who, u32& what) {
      what = ~0u;
#pragma unroll
      for (u32 u = 0; u < COUNT; ++u)
#pragma unroll
        for (u32 q = 0; q < SENDERS; ++q)
          if (WANTED(u) && !sentinel_here(data[u][q])) who = sender(q);
    };
    if (!again(a, t, wait, algorithm_of(a) | NO_FLAG, culprit)) return false;
  }
  // Emptied in the call that read it; the sender comes back to this word two calls on, when this kernel has ended.
#pragma unroll
  for (u32 u = 0; u < COUNT; ++u)
#pragma unroll
    for (u32 q = 0; q < SENDERS; ++q)
      if (WANTED(u))
        HALMA_ORDER_SENTINEL_CLEAR(const_cast<u8*>(from[q]) + 16ull * u * step, (Pair{~0ull, ~0ull}));
  return true;
}

DEVICE u32 peers_of(const Args& a) { return ((1u << SIZE) - 1u) & ~(1u << rank_of(a)); }
