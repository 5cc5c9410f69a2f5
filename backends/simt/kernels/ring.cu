// Rings between attention and FFN ranks: what a rank does at its ends. halma.hal.collectives.ring_contract has the
// protocol. Sequence numbers are in this rank's memory and advance here, so captured and eager submissions are alike.
//
// Row r of a slot is in part r % PARTS, and a part is one block's at either end: its flag covers that block's stores.
#include "ring.h"
#include "ring_serve.h"

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
