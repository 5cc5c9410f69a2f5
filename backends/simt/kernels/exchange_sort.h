// Dispatch: the last blocks sort the choices of all ranks by expert.
#pragma once
#include "exchange_send.h"

#define SPAN 16u
struct Sorting {
  u32 seen[MOST_WARPS][MOST_LOCAL];  // slots of an expert that a warp's choices take; then where its next one goes
  u32 count[MOST_LOCAL];             // of all warps of all sorters, at last rounded up to the alignment
  u32 real[MOST_LOCAL];              // before rounding
  u32 earlier[MOST_LOCAL];           // of sorters before this one
  u32 span[MOST_LOCAL / SPAN];       // of SPAN experts together, rounded
  u32 begin[SIZE + 1];               // of each sender's choices in the list of all
  u32 total, end, failed;
};

// The words of choices at `from`, `from + 16`, ... (`count` of them, at most AT_ONCE); false after a fault.
DEVICE bool poll_choices(const Args& a, const Turn& t, const u8* const* from, const bool* wanted, u32 sender, Pair* word) {
  Wait wait{0u, 0u};
  for (;;) {
    bool here = true;
#pragma unroll
    for (u32 c = 0; c < AT_ONCE; ++c)
      if (wanted[c]) word[c] = HALMA_ORDER_WORD_LOAD(from[c]);
#pragma unroll
    for (u32 c = 0; c < AT_ONCE; ++c)
      if (wanted[c]) here &= words_here(word[c], t.epoch);
    if (here) return true;
    auto culprit = [&](u32& who, u32& what) {
      who = sender;
#pragma unroll
      for (u32 c = 0; c < AT_ONCE; ++c)
        if (wanted[c] && !words_here(word[c], t.epoch)) what = flag_seen(word[c], t.epoch);
    };
    if (!again(a, t, wait, STAGE_CHOICES, culprit)) return false;
  }
}

// Choices base + lane, base + lane + HALMA_WARP, ... of the list of all: the local expert and the weight's bits. Those
// at `last` and behind have none.
DEVICE bool read_choices(const Args& a, const Turn& t, const Exchange& x, const Sorting& s, u32 base, u32 last, u32 first,
                         u32* expert, u32* weight) {
  u32 lane = threadIdx.x % HALMA_WARP, rank = rank_of(a), sender = 0u;
  const u8* from[AT_ONCE];
  bool wanted[AT_ONCE];
  Pair word[AT_ONCE];
#pragma unroll
  for (u32 c = 0; c < AT_ONCE; ++c) {
    u32 at = base + lane + c * HALMA_WARP, p = 0u;
    wanted[c] = false, from[c] = nullptr, word[c] = Pair{NOBODY, 0u};
    if (at >= last) continue;
#pragma unroll
    for (u32 r = 1; r < SIZE; ++r) p += at >= s.begin[r] ? 1u : 0u;
    u32 i = at - s.begin[p];
    if (p == rank) {
      word[c] = Pair{as_word(x, x.ids[i]), bits_of(x.weights[i])};
    } else {
      wanted[c] = true, sender = p, from[c] = a.own + x.words + p * x.words_stride + 16ull * i;
    }
  }
  bool alive = poll_choices(a, t, from, wanted, sender, word);
#pragma unroll
  for (u32 c = 0; c < AT_ONCE; ++c) {
    expert[c] = alive ? local_of(x, first, static_cast<u32>(word[c].low)) : NOBODY;
    weight[c] = static_cast<u32>(word[c].high);
  }
  return alive;
}

DEVICE void fill(int* to, u32 count, u32 first, u32 stride) {
  Quad none{{~0u, ~0u, ~0u, ~0u}};
  for (u32 i = first; i < count / 4u; i += stride) reinterpret_cast<Quad*>(to)[i] = none;
  for (u32 i = count / 4u * 4u + first; i < count; i += stride) to[i] = -1;
}

// After a fault nobody has a slot.
DEVICE void no_slots(const Turn& t, const Exchange& x) {
  fill(x.index, x.slots, threadIdx.x, t.threads);
  for (u32 e = threadIdx.x; e <= x.local; e += t.threads) {
    x.offsets[e] = 0;
    if (e < x.local) x.counts[e] = 0;
  }
  if (threadIdx.x < SIZE) x.tokens_of[threadIdx.x] = 0;
  if (threadIdx.x == 0u) x.total[0] = 0;
}

DEVICE void tell(const Args& a, const Turn& t, const Exchange& x, u32 expert, u32 sorter, u32 tally) {
  u64 word = static_cast<u64>(t.epoch) << 32 | tally;
  HALMA_ORDER_PART_STORE(a.own + x.tallies + 8ull * (SORTERS * expert + sorter), word);
}

// After a fault, which the other sorters need not have met: they hear of it, so that either all place or none.
DEVICE void give_up_sorting(const Args& a, const Turn& t, const Exchange& x) {
  u32 sorter = blockIdx.x - t.header, sorters = gridDim.x - t.header;
  for (u32 e = threadIdx.x; sorters > 1u && e < x.local; e += t.threads) tell(a, t, x, e, sorter, NOBODY);
  no_slots(t, x);
}

// Of the other sorters: what comes before this one's share, and what there is in all. False where one has given up. A
// sorter that is late awaits a peer itself, within the bound, and names it; hence this wait ends after twice that time.
DEVICE bool gather_tallies(const Args& a, const Turn& t, const Exchange& x, Sorting& s, u32 sorter, u32 sorters) {
  u32 half = sorters / 2u;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < x.local * half; i += t.threads) {
    u32 e = i / half, first = 2u * (i % half), polls = 0u;
    const u8* from = a.own + x.tallies + 8ull * (SORTERS * e + first);
    u64 since = 0u;
    Pair word;
    for (;;) {
      word = HALMA_ORDER_PART_LOAD(from);
      if (words_here(word, t.epoch)) break;
      if (!RARE((++polls & (POLLS_A_LOOK - 1u)) == 0u)) continue;
      u64 now = clock_ns();
      if (since == 0u) since = now;
      if (now - since < 2u * HALMA_ORDER_BOUND_LOAD(a.control + HALMA_BOUND)) continue;
      report(a.control, digest_of(a), t.epoch, FAULT_TIMEOUT, rank_of(a), t.epoch, flag_seen(word, t.epoch),
             STAGE_CHOICES, now - since);
      return false;
    }
    u32 low = first == sorter ? 0u : static_cast<u32>(word.low);
    u32 high = first + 1u == sorter ? 0u : static_cast<u32>(word.high);
    if (low == NOBODY || high == NOBODY) return false;
    u32 before = (first < sorter ? low : 0u) + (first + 1u < sorter ? high : 0u);
    if (low + high != 0u) add_shared(&s.count[e], low + high);
    if (before != 0u) add_shared(&s.earlier[e], before);
  }
  return true;
}

// The choices that this thread looks at, of its warp's run in the list of all.
struct Run {
  u32 from, last, first;  // of the list; the first expert here
  bool once;              // all of them at once: they stay in registers
};

// Slots by expert, in the order (sender, token, choice): each place is behind what earlier choices have of an expert.
DEVICE void place_choices(const Args& a, const Turn& t, const Exchange& x, Sorting& s, const Run& run, u32* expert,
                          u32* weight) {
  u32 lane = threadIdx.x % HALMA_WARP, warp = threadIdx.x / HALMA_WARP;
#pragma unroll 1
  for (u32 base = run.from; base < run.last; base += AT_ONCE * HALMA_WARP) {
    if (!run.once) read_choices(a, t, x, s, base, run.last, run.first, expert, weight);
#pragma unroll
    for (u32 c = 0; c < AT_ONCE; ++c) {
      u32 at = base + c * HALMA_WARP + lane, mine = expert[c], slot = 0u;
      bool here = mine < x.local;
      Alike alike = warp_alike(mine);
      if (here) slot = s.seen[warp][mine] + alike.before;
      warp_barrier();
      if (here && alike.before == 0u) s.seen[warp][mine] = slot + alike.all;
      warp_barrier();
      if (at >= run.last) continue;
      u32 p = 0u;
#pragma unroll
      for (u32 r = 1; r < SIZE; ++r) p += at >= s.begin[r] ? 1u : 0u;
      u32 i = at - s.begin[p];
      x.slot_of[static_cast<u64>(p) * x.most * x.choices + i] = here ? static_cast<int>(slot) : -1;
      if (!here) continue;
      x.index[slot] = static_cast<int>(p * x.most + i / x.choices);
      x.slot_weights[slot] = float_of(weight[c]);
    }
  }
}

// Where every expert begins, here and in each warp's share. A single sorter has emptied the index; of several each
// empties some experts' gaps alone, which nobody else writes.
DEVICE void scan_counts(const Turn& t, const Exchange& x, Sorting& s, u32 sorter, u32 sorters) {
  u32 warps = t.threads / HALMA_WARP;
  for (u32 e = threadIdx.x; e < x.local; e += t.threads) {
    u32 count = s.real[e] = s.count[e];
    if (sorter == 0u) x.counts[e] = static_cast<int>(count);
    s.count[e] = (count + x.alignment - 1u) / x.alignment * x.alignment;
    if (count != 0u) add_shared(&s.total, count), add_shared(&s.span[e / SPAN], s.count[e]);
  }
  barrier_among(t.threads);
  for (u32 e = threadIdx.x; e <= x.local; e += t.threads) {
    u32 start = 0u;
#pragma unroll 4
    for (u32 other = 0; other < e / SPAN; ++other) start += s.span[other];
#pragma unroll 4
    for (u32 other = e / SPAN * SPAN; other < e; ++other) start += s.count[other];
    if (sorter == 0u) x.offsets[e] = static_cast<int>(start);
    if (e == x.local) {
      s.end = start;
      if (sorter == 0u) x.total[0] = static_cast<int>(s.total);
      continue;
    }
    u32 mine = start + s.earlier[e];
    for (u32 w = 0; w < warps; ++w) s.seen[w][e] += mine;
    if (sorters == 1u || e % sorters != sorter || x.alignment == 1u) continue;
    for (u32 gap = s.real[e]; gap < s.count[e]; ++gap) x.index[start + gap] = -1;
  }
  barrier_among(t.threads);
  if (sorters == 1u) return;
  for (u32 i = s.end + sorter * t.threads + threadIdx.x; i < x.slots; i += sorters * t.threads) x.index[i] = -1;
}

// Each sorter has a run of the list of all choices, and each of its warps a part of that. They count, tell one another
// (a word an expert and sorter), and place.
DEVICE void sort_choices(const Args& a, const Turn& t, const Exchange& x, Sorting& s, u64 headers) {
  u32 warp = threadIdx.x / HALMA_WARP, warps = t.threads / HALMA_WARP;
  u32 rank = rank_of(a), sorter = blockIdx.x - t.header, sorters = gridDim.x - t.header;
  if (sorters == 1u) fill(x.index, x.slots, threadIdx.x, t.threads);
  for (u32 e = threadIdx.x; e < x.local; e += t.threads)
    for (u32 w = 0; w < warps; ++w) s.seen[w][e] = 0u;
  for (u32 i = threadIdx.x; i < MOST_LOCAL / SPAN; i += t.threads) s.span[i] = 0u;
  if (threadIdx.x == 0u) s.failed = s.total = s.begin[0] = 0u;
  barrier_among(t.threads);
  if (threadIdx.x < SIZE) {
    u32 p = threadIdx.x, tokens = p == rank ? x.tokens : count_of(a, t, headers, p, x.most);
    if (tokens == NOBODY) s.failed = 1u, tokens = 0u;
    if (sorter == 0u) x.tokens_of[p] = static_cast<int>(tokens);
    s.begin[p + 1u] = tokens * x.choices;
  }
  barrier_among(t.threads);
  if (threadIdx.x == 0u)
    for (u32 p = 0; p < SIZE; ++p) s.begin[p + 1u] += s.begin[p];
  barrier_among(t.threads);
  u32 all = s.begin[SIZE], threads = sorters * t.threads, each = (all + threads - 1u) / threads * HALMA_WARP;
  u32 from = (sorter * warps + warp) * each;
  if (from > all) from = all;
  Run run{from, from + each < all ? from + each : all, first_of(x, rank), each <= AT_ONCE * HALMA_WARP};
  u32 expert[AT_ONCE], weight[AT_ONCE];
#pragma unroll 1
  for (u32 base = run.from; base < run.last; base += AT_ONCE * HALMA_WARP) {
    if (!read_choices(a, t, x, s, base, run.last, run.first, expert, weight)) s.failed = 1u;
#pragma unroll
    for (u32 c = 0; c < AT_ONCE; ++c)
      if (expert[c] < x.local) add_shared(&s.seen[warp][expert[c]], 1u);
  }
  barrier_among(t.threads);
  if (s.failed != 0u) return give_up_sorting(a, t, x);
  for (u32 e = threadIdx.x; e < x.local; e += t.threads) {
    u32 before = 0u, seen[MOST_WARPS];
#pragma unroll
    for (u32 w = 0; w < MOST_WARPS; ++w) seen[w] = w < warps ? s.seen[w][e] : 0u;
#pragma unroll
    for (u32 w = 0; w < MOST_WARPS; ++w) {
      if (w < warps) s.seen[w][e] = before;
      before += seen[w];
    }
    s.count[e] = before, s.earlier[e] = 0u;
    if (sorters > 1u) tell(a, t, x, e, sorter, before);
  }
  if (sorters > 1u) {
    barrier_among(t.threads);
    if (!gather_tallies(a, t, x, s, sorter, sorters)) s.failed = 1u;
    barrier_among(t.threads);
    if (s.failed != 0u) return no_slots(t, x);
  }
  scan_counts(t, x, s, sorter, sorters);
  place_choices(a, t, x, s, run, expert, weight);
}
