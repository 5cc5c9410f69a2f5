// The FFN ranks' ends.
#pragma once
#include "ring.h"

// An item as a rank serves it.
struct Served {
  u32 from, number, before, layer, rows, shared_first, shared;
};

// Block p: part p of an item, once its flag is there, to where every item goes; ids behind its rows become -1.
DEVICE void take(const Ring& r, const Served& item, u64 to_rows, u64 to_ids, u64 to_weights) {
  u32 part = blockIdx.x, units = field(r, RING_ROW_UNITS);
  bool alive = !faulted(r) && item.from != HALMA_RING_NOBODY;
  const u8* box = item_slot(r, r.own, alive ? item.from : 0u, item.number % r.depth);
  if (alive && threadIdx.x == 0u)
    alive = wait_word(r, item.layer, item.number, box + 4u * part, item.number, item.from, WAIT_ITEM);
  alive = !block_any(!alive);
  const u8* ids = box + r.site[RING_ITEM_IDS];
  const u8* weights = box + r.site[RING_ITEM_WEIGHTS];
  const u8* from = box + r.site[RING_ITEM_ROWS];
  u64* place = (u64*)to_ids;
  for (u32 row = part; row < item.rows && alive; row += PARTS) {
    for (u32 u = threadIdx.x; u < units; u += THREADS) {
      u64 at = static_cast<u64>(row) * units + u;
      ((Pair*)to_rows)[at] = HALMA_ORDER_STAGE_LOAD(from + 16ull * at);
    }
    for (u32 k = threadIdx.x; k < r.choices; k += THREADS) {
      u64 at = static_cast<u64>(row) * r.choices + k;
      u32 id = HALMA_ORDER_RING_LOAD(ids + 4ull * at);
      place[at] = id == ~0u ? ~0ull : id;
      ((u32*)to_weights)[at] = HALMA_ORDER_RING_LOAD(weights + 4ull * at);
    }
  }
  u64 first = alive ? static_cast<u64>(item.rows) * r.choices : 0u, last = static_cast<u64>(r.max_tokens) * r.choices;
  for (u64 at = first + part * THREADS + threadIdx.x; at < last; at += PARTS * THREADS) place[at] = ~0ull;
}

DEVICE Pair added(Pair one, Pair two) {
  Quad a = quad_of(one), b = quad_of(two);
#pragma unroll
  for (u32 w = 0; w < 4u; ++w) a.word[w] = bits_of(add(float_of(a.word[w]), float_of(b.word[w])));
  return *reinterpret_cast<Pair*>(&a);
}

// Block p: part p of a reply, once its slot is free; then the item's slot is free too. `beside`: of floats, as `out` is.
DEVICE void reply(const Ring& r, const Served& item, u64 out, u64 beside) {
  u32 part = blockIdx.x, units = field(r, RING_REPLY_UNITS), slot = item.number % r.depth, mine = r.rank - r.attention;
  bool alive = !faulted(r);
  if (alive && threadIdx.x == 0u)
    alive = wait_word(r, item.layer, item.number, credit(r, r.own, item.from, slot), item.before, item.from, WAIT_ROOM);
  if (block_any(!alive)) return;
  u8* to = memory_of(r, item.from);
  u8* box = reply_slot(r, to, mine, slot);
  u8* to_rows = box + r.site[RING_REPLY_ROWS];
  for (u32 row = part; row < item.rows; row += PARTS) {
    u32 shared = row - item.shared_first;
    bool both = beside != 0u && row >= item.shared_first && shared < item.shared;
    for (u32 u = threadIdx.x; u < units; u += THREADS) {
      u64 at = static_cast<u64>(row) * units + u;
      Pair value = ((const Pair*)out)[at];
      if (both) value = added(value, ((const Pair*)beside)[static_cast<u64>(shared) * units + u]);
      HALMA_ORDER_STAGE_STORE(to_rows + 16ull * at, value);
    }
  }
  publish(box + 4u * part, item.number);
  if (part == 0u && threadIdx.x == 0u) HALMA_ORDER_RING_CREDIT_STORE(credit(r, to, mine, slot), item.number);
}

DEVICE Served served(u64 attention, u64 sequence, u64 layer, u64 rows, u64 before) {
  return Served{static_cast<u32>(attention), static_cast<u32>(sequence), static_cast<u32>(before),
                static_cast<u32>(layer), static_cast<u32>(rows), 0u, 0u};
}
KERNEL ring_take(u64 site, u64 attention, u64 sequence, u64 layer, u64 rows, u64 to_rows, u64 to_ids,
                 u64 to_weights) {
  take(ring_enter(site), served(attention, sequence, layer, rows, 0u), to_rows, to_ids, to_weights);
}
KERNEL ring_reply(u64 site, u64 attention, u64 sequence, u64 layer, u64 rows, u64 out, u64 before) {
  reply(ring_enter(site), served(attention, sequence, layer, rows, before), out, 0u);
}

// ------------------------------------------------------------------- FFN ranks whose device takes items by itself
// Which item, of whom and how large is in words of this rank: one capture serves every item.

#define POLLS_FOR_ALL 64u  // looks at every attention rank between two looks at the clock

// The attention rank whose next item is there, from the one on whose turn it is; nobody once `patience` is over.
DEVICE u32 whoever_comes(const Ring& r, u64 patience) {
  u32 turn = HALMA_ORDER_EPOCH_LOAD(own_word(r, RING_TURN, 0u));
  u64 since = clock_ns();
  for (u32 polls = 1u; !faulted(r); ++polls) {
    for (u32 step = 0; step < r.attention; ++step) {
      u32 from = (turn + step) % r.attention;
      u32 number = ring_after(r, HALMA_ORDER_EPOCH_LOAD(own_word(r, RING_SERVED, from)));
      if (HALMA_ORDER_FLAG_WAIT(item_slot(r, r.own, from, number % r.depth)) == number) return from;
    }
    if ((polls & (POLLS_FOR_ALL - 1u)) == 0u && clock_ns() - since >= patience) break;
  }
  return HALMA_RING_NOBODY;
}

// One block. The item's header goes to this rank's words, its layer and shared rows to where the experts read them.
KERNEL ring_next(u64 site, u64 to_layer, u64 to_shared, u64 to_index, u64 span, u64 counted, u64 patience) {
  Ring r = ring_enter(site);
  __shared__ u32 first;
  if (threadIdx.x == 0u) {
    u32 from = whoever_comes(r, patience), number = 0u, before = 0u, header[HEADER_WORDS] = {};
    if (from != HALMA_RING_NOBODY) {
      number = ring_after(r, HALMA_ORDER_EPOCH_LOAD(own_word(r, RING_SERVED, from)));
      u32 slot = number % r.depth;
      const u8* said = item_slot(r, r.own, from, slot) + r.site[RING_ITEM_HEADER];
      for (u32 word = 0; word < HEADER_WORDS; ++word) header[word] = HALMA_ORDER_RING_LOAD(said + 4u * word);
      HALMA_ORDER_EPOCH_STORE(own_word(r, RING_SERVED, from), number);
      HALMA_ORDER_EPOCH_STORE(own_word(r, RING_TURN, 0u), (from + 1u) % r.attention);
      before = HALMA_ORDER_EPOCH_LOAD(own_word(r, RING_REPLIED, from * r.depth + slot));
      HALMA_ORDER_EPOCH_STORE(own_word(r, RING_REPLIED, from * r.depth + slot), number);
      if (header[HEADER_LAYER] >= field(r, RING_LAYERS) || header[HEADER_ROWS] > r.max_tokens ||
          header[HEADER_SHARED] > header[HEADER_ROWS] ||
          header[HEADER_SHARED_FIRST] > header[HEADER_ROWS] - header[HEADER_SHARED]) {
        report(r.control, header[HEADER_LAYER], number, FAULT_MISMATCH, from, r.max_tokens, header[HEADER_ROWS],
               WAIT_ITEM, 0u);
        from = HALMA_RING_NOBODY;
        for (u32 word = 0; word < HEADER_WORDS; ++word) header[word] = 0u;
      }
    }
    u32 head[ITEM_HEADER] = {from, number, before};
    for (u32 word = 0; word < ITEM_HEADER; ++word) HALMA_ORDER_EPOCH_STORE(own_word(r, RING_ITEM, word), head[word]);
    for (u32 word = 0; word < HEADER_WORDS; ++word)
      HALMA_ORDER_EPOCH_STORE(own_word(r, RING_ITEM, ITEM_HEADER + word), header[word]);
    *(u32*)to_layer = header[HEADER_LAYER];
    *(u32*)to_shared = header[HEADER_SHARED];
    first = header[HEADER_SHARED_FIRST];
    // Totals stay here: the host's copy is far away, and is written alone. Looks last.
    u32 came = from != HALMA_RING_NOBODY ? 1u : 0u;
    u32 more[HALMA_RING_TOTALS] = {1u, came, came != 0u && header[HEADER_ROWS] == 0u ? 1u : 0u, header[HEADER_ROWS],
                                   header[HEADER_PAIRS], header[HEADER_SHARED]};
    u64* totals = (u64*)own_word(r, RING_TOTALS, 0u);
    for (u32 total = HALMA_RING_TOTALS; total-- != 0u;) {
      totals[total] += more[total];
      HALMA_ORDER_RING_HEADER_STORE((u8*)counted + 8u * total, totals[total]);
    }
  }
  block_barrier();
  for (u32 row = threadIdx.x; row < span; row += THREADS) ((u32*)to_index)[row] = first + row;
}

DEVICE Served item_here(const Ring& r) {
  auto word = [&](u32 which) { return HALMA_ORDER_EPOCH_LOAD(own_word(r, RING_ITEM, which)); };
  return Served{word(ITEM_FROM), word(ITEM_NUMBER), word(ITEM_BEFORE), word(ITEM_HEADER + HEADER_LAYER),
                word(ITEM_HEADER + HEADER_ROWS), word(ITEM_HEADER + HEADER_SHARED_FIRST),
                word(ITEM_HEADER + HEADER_SHARED)};
}
KERNEL ring_take_next(u64 site, u64 to_rows, u64 to_ids, u64 to_weights) {
  Ring r = ring_enter(site);
  take(r, item_here(r), to_rows, to_ids, to_weights);
}
KERNEL ring_reply_next(u64 site, u64 out, u64 beside) {
  Ring r = ring_enter(site);
  Served item = item_here(r);
  if (item.from != HALMA_RING_NOBODY) reply(r, item, out, beside);
}
