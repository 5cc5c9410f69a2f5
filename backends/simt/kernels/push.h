// One-shot push, both wire formats: what a thread sends, and what it waits for.
#pragma once
#include "channel.h"

// Units of 16 bytes that a thread keeps in flight while it polls: all peers' words of all of them are loaded before
// one is tested. As many as stay in registers.
#define BATCH (SIZE == 2 ? 2u : 1u)

// The first unit of a thread, under way before anything is known of the epoch or a fault.
DEVICE u64 first_half(const Args& a, u32 i) {
  return 8ull * i + 8u <= a.nbytes ? load8_now(a.source + 8ull * i) : i < units_of(a.nbytes, 8u) ? load_half(a.source, i, a.nbytes) : 0u;
}
DEVICE Quad first_unit(const Args& a, u32 i) {
  return 16ull * i + 16u <= a.nbytes     ? quad_of(load16_now(a.source + 16ull * i))
         : i < units_of(a.nbytes, 16u) ? load_unit(a.source, i, a.nbytes)
                                       : Quad{{0u, 0u, 0u, 0u}};
}

DEVICE u64 lane_box(const Args& a, u32 epoch, u32 sender) { return a.lane + ((epoch & 1u) * SIZE + sender) * a.box; }

// WORDS: 8 bytes of payload travel as two {data, epoch}.
DEVICE void push_words(const Args& a, const Turn& t, u64 at, u64 data) {
  u64 flag = static_cast<u64>(t.epoch) << 32;
  Pair words{flag | (data & 0xffffffffull), flag | data >> 32};
#pragma unroll
  for (u32 p = 0; p < SIZE; ++p)
    if (p != rank_of(a)) HALMA_ORDER_WORD_STORE(a.peer[p] + at, words);
}

DEVICE bool words_here(const Pair& words, u32 epoch) {
  return static_cast<u32>(words.low >> 32) == epoch && static_cast<u32>(words.high >> 32) == epoch;
}

DEVICE u64 words_payload(const Pair& words) { return (words.low & 0xffffffffull) | words.high << 32; }

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

// The payload of units i, i + step, ... (`COUNT` of them, those under `units`) of every rank whose bit is in `senders`;
// other ranks' entries stay as they are. False after a fault.
#define WANTED(u, p) (i + (u) * step < units && (senders >> (p) & 1u) != 0u)
template <u32 COUNT>
DEVICE bool poll_words(const Args& a, const Turn& t, u32 i, u32 step, u32 units, u32 senders, u64 (*data)[SIZE]) {
  Wait wait{0u, 0u};
  Pair words[COUNT][SIZE];
  for (;;) {
    bool here = true;
#pragma unroll
    for (u32 u = 0; u < COUNT; ++u)
#pragma unroll
      for (u32 p = 0; p < SIZE; ++p)
        if (WANTED(u, p))
          words[u][p] = HALMA_ORDER_WORD_LOAD(a.own + lane_box(a, t.epoch, p) + 16ull * (i + u * step));
#pragma unroll
    for (u32 u = 0; u < COUNT; ++u)
#pragma unroll
      for (u32 p = 0; p < SIZE; ++p)
        if (WANTED(u, p)) here = here && words_here(words[u][p], t.epoch);
    if (here) break;
    auto culprit = [&](u32& who, u32& what) {
#pragma unroll
      for (u32 u = 0; u < COUNT; ++u)
#pragma unroll
        for (u32 p = 0; p < SIZE; ++p)
          if (WANTED(u, p) && !words_here(words[u][p], t.epoch))
            who = p, what = flag_seen(words[u][p], t.epoch);
    };
    if (!again(a, t, wait, algorithm_of(a), culprit)) return false;
  }
#pragma unroll
  for (u32 u = 0; u < COUNT; ++u)
#pragma unroll
    for (u32 p = 0; p < SIZE; ++p)
      if (WANTED(u, p)) data[u][p] = words_payload(words[u][p]);
  return true;
}

template <u32 COUNT>
DEVICE bool poll_sentinel(const Args& a, const Turn& t, u32 i, u32 step, u32 units, u32 senders, Quad (*data)[SIZE]) {
  Wait wait{0u, 0u};
  for (;;) {
    bool here = true;
#pragma unroll
    for (u32 u = 0; u < COUNT; ++u)
#pragma unroll
      for (u32 p = 0; p < SIZE; ++p)
        if (WANTED(u, p))
          data[u][p] = quad_of(HALMA_ORDER_SENTINEL_LOAD(a.own + lane_box(a, t.epoch, p) + 16ull * (i + u * step)));
#pragma unroll
    for (u32 u = 0; u < COUNT; ++u)
#pragma unroll
      for (u32 p = 0; p < SIZE; ++p)
        if (WANTED(u, p)) here = here && sentinel_here(data[u][p]);
    if (here) break;
    auto culprit = [&](u32& who, u32& what) {
      what = ~0u;
#pragma unroll
      for (u32 u = 0; u < COUNT; ++u)
#pragma unroll
        for (u32 p = 0; p < SIZE; ++p)
          if (WANTED(u, p) && !sentinel_here(data[u][p])) who = p;
    };
    if (!again(a, t, wait, algorithm_of(a) | NO_FLAG, culprit)) return false;
  }
  // Emptied in the call that read it; the sender comes back to this word two calls on, when this kernel has ended.
#pragma unroll
  for (u32 u = 0; u < COUNT; ++u)
#pragma unroll
    for (u32 p = 0; p < SIZE; ++p)
      if (WANTED(u, p))
        HALMA_ORDER_SENTINEL_CLEAR(a.own + lane_box(a, t.epoch, p) + 16ull * (i + u * step), (Pair{~0ull, ~0ull}));
  return true;
}

DEVICE u32 peers_of(const Args& a) { return ((1u << SIZE) - 1u) & ~(1u << rank_of(a)); }
