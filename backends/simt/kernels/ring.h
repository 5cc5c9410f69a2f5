// What both ends of the rings between attention and FFN ranks share: the site, its slots, waits and headers.
#pragma once
#include "payload.h"
#include "numbers.h"

#define PARTS HALMA_RING_FLAGS
#define PLAN_THREADS 512u
#define THREADS 256u

// What stays for the rings' life, u64 each, in memory of this rank alone. Behind the fields: the memory of every rank,
// the headers on the board of every rank, both as mapped here, and the bounds of the FFN ranks' experts.
enum RingField {
  RING_RANK,
  RING_ATTENTION,
  RING_FFN,
  RING_DEPTH,
  RING_MAX_TOKENS,
  RING_CHOICES,
  RING_ROW_UNITS,    // of 16 bytes, of a payload row
  RING_REPLY_UNITS,  // of a reply row
  RING_SLOTS,        // offset of the first slot, on every rank
  RING_CREDITS,
  RING_ITEM_BYTES,
  RING_ITEM_IDS,
  RING_ITEM_WEIGHTS,
  RING_ITEM_ROWS,
  RING_REPLY_BYTES,
  RING_REPLY_ROWS,
  RING_SENT,  // offsets of this rank's own words
  RING_COLLECTED,
  RING_FILLED,
  RING_TAKEN,
  RING_HEADER,
  RING_TOKENS,
  RING_PLACE,
  RING_ITEM_HEADER,  // offset in a slot
  RING_LAYERS,
  RING_SERVED,  // offsets of an FFN rank's own words
  RING_REPLIED,
  RING_TURN,
  RING_ITEM,
  RING_TOTALS,
  RING_FIELDS
};
static_assert(RING_FIELDS == HALMA_RING_FIELDS, "the driver writes as many fields");
// A header's values, and where they stand in an FFN rank's words of the item that it serves.
enum HeaderWord { HEADER_LAYER, HEADER_ROWS, HEADER_PAIRS, HEADER_SHARED_FIRST, HEADER_SHARED, HEADER_WORDS };
static_assert(HEADER_WORDS == HALMA_RING_HEADER_WORDS, "both ends have the same words");
enum ItemWord { ITEM_FROM, ITEM_NUMBER, ITEM_BEFORE, ITEM_HEADER };
enum RingWait { WAIT_CREDIT = 1, WAIT_ITEM = 2, WAIT_REPLY = 3, WAIT_ROOM = 4 };

struct Ring {
  const u64* site;
  u8* own;
  u8* control;
  u32 rank, attention, ffn, depth, max_tokens, choices;
};

DEVICE u32 field(const Ring& r, RingField which) { return static_cast<u32>(r.site[which]); }
DEVICE u8* memory_of(const Ring& r, u32 rank) { return (u8*)r.site[RING_FIELDS + rank]; }
DEVICE u8* headers_of(const Ring& r, u32 rank) { return (u8*)r.site[RING_FIELDS + r.attention + r.ffn + rank]; }
DEVICE u32 bound_of(const Ring& r, u32 which) {
  return static_cast<u32>(r.site[RING_FIELDS + 2u * (r.attention + r.ffn) + which]);
}

// Nothing shared is touched before the wait (C17).
DEVICE Ring ring_enter(u64 site) {
  Ring r;
  r.site = (const u64*)site;
  r.rank = field(r, RING_RANK), r.attention = field(r, RING_ATTENTION), r.ffn = field(r, RING_FFN);
  r.depth = field(r, RING_DEPTH), r.max_tokens = field(r, RING_MAX_TOKENS), r.choices = field(r, RING_CHOICES);
  r.own = memory_of(r, r.rank);
  r.control = r.own;
  grid_wait();
  grid_trigger();
  return r;
}

// After the last number comes `depth`: 0 is untouched memory, and slots still follow one another (C2).
DEVICE u32 ring_after(const Ring& r, u32 sequence) { return sequence == HALMA_EPOCH_LAST ? r.depth : sequence + 1u; }
DEVICE bool faulted(const Ring& r) { return HALMA_ORDER_FAULT_LOAD(r.control + HALMA_FAULT) != 0u; }
DEVICE u8* own_word(const Ring& r, RingField which, u32 index) { return r.own + r.site[which] + 4ull * index; }

// At the sender: what the receiver `peer`, counted within its role, gave back of a slot.
DEVICE u8* credit(const Ring& r, u8* sender, u32 peer, u32 slot) {
  return sender + r.site[RING_CREDITS] + 4ull * (peer * r.depth + slot);
}
DEVICE u8* item_slot(const Ring& r, u8* receiver, u32 attention, u32 slot) {
  return receiver + r.site[RING_SLOTS] + static_cast<u64>(attention * r.depth + slot) * r.site[RING_ITEM_BYTES];
}
DEVICE u8* reply_slot(const Ring& r, u8* receiver, u32 ffn, u32 slot) {
  return receiver + r.site[RING_SLOTS] + static_cast<u64>(ffn * r.depth + slot) * r.site[RING_REPLY_BYTES];
}

// Until a word of this rank's memory is `expected`; false after a fault, which is then on record.
DEVICE bool wait_word(const Ring& r, u32 layer, u32 sequence, const u8* word, u32 expected, u32 peer, u32 what) {
  u64 since = 0u;
  for (u32 polls = 1u;; ++polls) {
    u32 seen = HALMA_ORDER_FLAG_WAIT(word);
    if (seen == expected) return true;
    if (!RARE((polls & (POLLS_A_LOOK - 1u)) == 0u)) continue;
    since = look(r.control, layer, sequence, since, peer, expected, seen, what);
    if (since == 0u) return false;
  }
}

// By the whole block: what it stored is there for whoever sees the flag.
DEVICE void publish(u8* flag, u32 sequence) {
#if HALMA_HEADER_FENCED
  HALMA_ORDER_BEFORE_EXCHANGE();
  block_barrier();
  if (threadIdx.x == 0u) HALMA_ORDER_FLAG_EXCHANGE(flag, sequence);
#else
  HALMA_ORDER_BEFORE_PUBLISH();
  block_barrier();
  if (threadIdx.x == 0u) HALMA_ORDER_RING_PUBLISH(flag, sequence);
#endif
}

// An item's header on its receiver's board. Each word is the value with the number above it, so words need no order;
// below 8-byte atomicity the numbers go behind a fence instead.
DEVICE void send_header(u8* to, u32 sequence, const u32* values) {
#if HALMA_HEADER_FENCED
  for (u32 word = 0; word < HALMA_RING_HEADER_WORDS; ++word) HALMA_ORDER_FAULT_STORE(to + 8u * word, values[word]);
  HALMA_ORDER_FAULT_FENCE();
  for (u32 word = 0; word < HALMA_RING_HEADER_WORDS; ++word) HALMA_ORDER_FAULT_STORE(to + 8u * word + 4u, sequence);
#else
  for (u32 word = 0; word < HALMA_RING_HEADER_WORDS; ++word)
    HALMA_ORDER_RING_HEADER_STORE(to + 8u * word, static_cast<u64>(sequence) << 32 | values[word]);
#endif
}
