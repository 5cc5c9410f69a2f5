// Rings between attention and FFN ranks: what a rank does at its ends. halma.hal.collectives.ring_contract has the
// protocol. Sequence numbers are in this rank's memory and advance here, so captured and eager submissions are alike.
//
// Row r of a slot is in part r % PARTS, and a part is one block's at either end: its flag covers that block's stores.
#include "channel.h"
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

// ------------------------------------------------------------------------------------------- attention ranks

// Block f: which of the step's rows go to FFN rank f, in their order; then its header. Threads have whole runs of rows.
KERNEL ring_plan(u64 site, u64 layer, u64 ids, u64 rows) {
  Ring r = ring_enter(site);
  __shared__ u32 counts[PLAN_THREADS];
  __shared__ u32 pairs[PLAN_THREADS];
  __shared__ u32 shared_first;
  u32 f = blockIdx.x, me = threadIdx.x, count = static_cast<u32>(rows);
  u32 sequence = ring_after(r, HALMA_ORDER_EPOCH_LOAD(own_word(r, RING_SENT, f))), slot = sequence % r.depth;
  u32 low = bound_of(r, f), high = bound_of(r, f + 1u);
  u32 each = (count + r.ffn - 1u) / r.ffn;
  u32 begin = f * each < count ? f * each : count, end = begin + each < count ? begin + each : count;
  u8* to = memory_of(r, r.attention + f);
  // Room for replies: what was collected before this item.
  if (me < r.depth)
    HALMA_ORDER_RING_CREDIT_STORE(credit(r, to, r.rank, me), HALMA_ORDER_EPOCH_LOAD(own_word(r, RING_TAKEN, me)));
  const u64* chosen = (const u64*)ids;
  u32 per = (count + PLAN_THREADS - 1u) / PLAN_THREADS;
  u32 from = me * per < count ? me * per : count, until = from + per < count ? from + per : count;
  auto local_of = [&](u32 token) {
    u32 found = 0u;
    for (u32 k = 0; k < r.choices; ++k) {
      u64 id = chosen[static_cast<u64>(token) * r.choices + k];
      found += id >= low && id < high ? 1u : 0u;  // -1 is beyond every bound
    }
    return found;
  };
  u32 mine = 0u, mine_pairs = 0u;
  for (u32 token = from; token < until; ++token) {
    u32 found = local_of(token);
    mine += found != 0u || (token >= begin && token < end) ? 1u : 0u;
    mine_pairs += found;
  }
  counts[me] = mine, pairs[me] = mine_pairs;
  if (me == 0u) shared_first = 0u;
  block_barrier();
  for (u32 step = 1u; step < PLAN_THREADS; step *= 2u) {
    u32 more = me >= step ? counts[me - step] : 0u, more_pairs = me >= step ? pairs[me - step] : 0u;
    block_barrier();
    counts[me] += more, pairs[me] += more_pairs;
    block_barrier();
  }
  u32 at = counts[me] - mine;
  for (u32 token = from; token < until; ++token) {
    bool goes = (token >= begin && token < end) || local_of(token) != 0u;
    HALMA_ORDER_EPOCH_STORE(own_word(r, RING_PLACE, (slot * r.ffn + f) * r.max_tokens + token), goes ? at : ~0u);
    if (goes) HALMA_ORDER_EPOCH_STORE(own_word(r, RING_TOKENS, f * r.max_tokens + at), token);
    if (goes && token == begin) shared_first = at;
    at += goes ? 1u : 0u;
  }
  block_barrier();
  if (me != 0u) return;
  HALMA_ORDER_EPOCH_STORE(own_word(r, RING_SENT, f), sequence);
  u32 values[HALMA_RING_HEADER_WORDS] = {static_cast<u32>(layer), counts[PLAN_THREADS - 1u], pairs[PLAN_THREADS - 1u],
                                         begin < end ? shared_first : 0u, end - begin};
  for (u32 word = 0; word < HALMA_RING_HEADER_WORDS; ++word)
    HALMA_ORDER_EPOCH_STORE(own_word(r, RING_HEADER, f * HALMA_RING_SLOT_WORDS + word), values[word]);
  if (faulted(r)) return;
  u8* filled = own_word(r, RING_FILLED, f * r.depth + slot);
  u32 before = HALMA_ORDER_EPOCH_LOAD(filled);
  if (!wait_word(r, static_cast<u32>(layer), sequence, credit(r, r.own, f, slot), before, r.attention + f, WAIT_CREDIT))
    return;
  HALMA_ORDER_EPOCH_STORE(filled, sequence);
  u8* headers = headers_of(r, r.attention + f);
  send_header(headers + (r.rank * r.depth + slot) * HALMA_RING_HEADER_BYTES, sequence, values);
}

// Block f * PARTS + part: its rows of the item for FFN rank f, then their flag.
KERNEL ring_send(u64 site, u64 x, u64 ids, u64 weights) {
  Ring r = ring_enter(site);
  if (faulted(r)) return;
  u32 f = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
  u32 sequence = HALMA_ORDER_EPOCH_LOAD(own_word(r, RING_SENT, f));
  u32 header = f * HALMA_RING_SLOT_WORDS;
  u32 count = HALMA_ORDER_EPOCH_LOAD(own_word(r, RING_HEADER, header + HEADER_ROWS));
  u32 low = bound_of(r, f), high = bound_of(r, f + 1u), units = field(r, RING_ROW_UNITS);
  u8* box = item_slot(r, memory_of(r, r.attention + f), r.rank, sequence % r.depth);
  u8* to_ids = box + r.site[RING_ITEM_IDS];
  u8* to_weights = box + r.site[RING_ITEM_WEIGHTS];
  u8* to_rows = box + r.site[RING_ITEM_ROWS];
  // For a device that takes items by itself: behind the flag of part 0.
  if (part == 0u && threadIdx.x < HALMA_RING_HEADER_WORDS)
    HALMA_ORDER_RING_STORE(box + r.site[RING_ITEM_HEADER] + 4u * threadIdx.x,
                           HALMA_ORDER_EPOCH_LOAD(own_word(r, RING_HEADER, header + threadIdx.x)));
  const u64* chosen = (const u64*)ids;
  const u32* given = (const u32*)weights;
  for (u32 row = part; row < count; row += PARTS) {
    u64 token = HALMA_ORDER_EPOCH_LOAD(own_word(r, RING_TOKENS, f * r.max_tokens + row));
    const Pair* from = (const Pair*)x + token * units;
    for (u32 u = threadIdx.x; u < units; u += THREADS)
      HALMA_ORDER_STAGE_STORE(to_rows + 16ull * (static_cast<u64>(row) * units + u), from[u]);
    for (u32 k = threadIdx.x; k < r.choices; k += THREADS) {
      u64 id = chosen[token * r.choices + k];
      bool local = id >= low && id < high;
      u64 at = 4ull * (static_cast<u64>(row) * r.choices + k);
      HALMA_ORDER_RING_STORE(to_ids + at, local ? static_cast<u32>(id) - low : ~0u);
      HALMA_ORDER_RING_STORE(to_weights + at, local ? given[token * r.choices + k] : 0u);
    }
  }
  publish(box + 4u * part, sequence);
}

// Eight elements of a row, as floats.
template <int D> DEVICE void load_eight(const u8* from, u32 eight, float* to) {
  const u32 N = Numbers<D>::A_WORD, QUADS = 2u / N;
#pragma unroll
  for (u32 q = 0; q < QUADS; ++q) {
    Quad quad = quad_of(HALMA_ORDER_STAGE_LOAD(from + 16ull * (static_cast<u64>(eight) * QUADS + q)));
#pragma unroll
    for (u32 w = 0; w < 4u; ++w) Numbers<D>::widen(quad.word[w], to + (4u * q + w) * N);
  }
}
template <int D> DEVICE void store_eight(u8* to, u32 eight, const float* from) {
  const u32 N = Numbers<D>::A_WORD, QUADS = 2u / N;
#pragma unroll
  for (u32 q = 0; q < QUADS; ++q) {
    Quad quad;
#pragma unroll
    for (u32 w = 0; w < 4u; ++w) quad.word[w] = Numbers<D>::narrow(from + (4u * q + w) * N);
    *reinterpret_cast<Quad*>(to + 16ull * (static_cast<u64>(eight) * QUADS + q)) = quad;
  }
}

// out [rows, 8 * eights]: the sum of the replies, in order of FFN ranks, in fp32, rounded once.
template <int REPLY, int OUT> DEVICE void collect(const Ring& r, u8* out, u32 rows, u32 eights) {
  u32 sequence = ring_after(r, HALMA_ORDER_EPOCH_LOAD(own_word(r, RING_COLLECTED, blockIdx.x)));
  u32 slot = sequence % r.depth;
  bool alive = !faulted(r);
  for (u32 flag = threadIdx.x; alive && flag < r.ffn * PARTS; flag += THREADS) {
    u32 f = flag / PARTS;
    const u8* word = reply_slot(r, r.own, f, slot) + 4u * (flag % PARTS);
    alive = wait_word(r, 0u, sequence, word, sequence, r.attention + f, WAIT_REPLY);
  }
  alive = !block_any(!alive);
  for (u32 token = blockIdx.x; token < rows; token += gridDim.x) {
    u8* row = out + static_cast<u64>(token) * eights * (16u * (2u / Numbers<OUT>::A_WORD));
    for (u32 i = threadIdx.x; i < eights; i += THREADS) {
      float sum[8], part[8];
      bool first = true;
#pragma unroll
      for (u32 k = 0; k < 8u; ++k) sum[k] = alive ? 0.0f : float_of(~0u);
      for (u32 f = 0; f < r.ffn && alive; ++f) {
        u32 place = HALMA_ORDER_EPOCH_LOAD(own_word(r, RING_PLACE, (slot * r.ffn + f) * r.max_tokens + token));
        if (place == ~0u) continue;
        const u8* from = reply_slot(r, r.own, f, slot) + r.site[RING_REPLY_ROWS];
        load_eight<REPLY>(from + 16ull * static_cast<u64>(place) * field(r, RING_REPLY_UNITS), i, part);
#pragma unroll
        for (u32 k = 0; k < 8u; ++k) sum[k] = first ? part[k] : add(sum[k], part[k]);
        first = false;
      }
      store_eight<OUT>(row, i, sum);
    }
  }
  block_barrier();
  // Block b of g moves the cells b, b + g, ...: those that no other block of this grid reads.
  for (u32 cell = blockIdx.x + threadIdx.x * gridDim.x; cell < HALMA_RING_SPLITS; cell += THREADS * gridDim.x)
    HALMA_ORDER_EPOCH_STORE(own_word(r, RING_COLLECTED, cell), sequence);
  if (blockIdx.x == 0u && threadIdx.x == 0u && alive) HALMA_ORDER_EPOCH_STORE(own_word(r, RING_TAKEN, slot), sequence);
}

#define COLLECT(dtypes, REPLY, OUT)                                                   \
  KERNEL ring_collect_##dtypes(u64 site, u64 out, u64 rows, u64 eights) {             \
    Ring r = ring_enter(site);                                                        \
    collect<REPLY, OUT>(r, (u8*)out, static_cast<u32>(rows), static_cast<u32>(eights)); \
  }
COLLECT(bfloat16_bfloat16, BF16, BF16)
COLLECT(float16_float16, F16, F16)
COLLECT(float32_bfloat16, F32, BF16)
COLLECT(float32_float16, F32, F16)
COLLECT(float32_float32, F32, F32)

// ------------------------------------------------------------------------------------------------- FFN ranks

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
