// A channel's part of every call: arguments, epoch, header words, bounded waits, fault record, flight recorder,
// scrubbing. The memory order of each access is named by a macro HALMA_ORDER_... from the one table in
// halma.backends.simt.memory_order; docs/collectives.md describes the protocol.
#pragma once
#include "dialect.h"

#if defined(HALMA_MUSA) && !defined(HALMA_CLOCK_KHZ)
#error "MUSA: HALMA_CLOCK_KHZ, the rate of clock64(), comes from the device's properties: waits are bounded by it"
#endif

#define SIZE HALMA_SIZE  // ranks, known when this is compiled
static_assert(SIZE >= 2 && SIZE <= 8, "ranks of a channel");
static_assert(HALMA_WARP >= 16, "lanes 0..7 of the spare warp serve the peers, 8 and 9 the flight recorder");

// Addresses and offsets that stay for the channel's life, u64 each, in memory of this rank alone.
enum SiteField {
  SITE_HEADERS,
  SITE_WORDS,
  SITE_WORDS_BOX,
  SITE_CHUNK_FLAGS,
  SITE_CHUNK_FLAGS_PHASE,
  SITE_STAGE_FLAGS,
  SITE_STAGE_FLAGS_PHASE,
  SITE_FLAGS_BOX,
  SITE_SCATTER,
  SITE_SCATTER_BOX,
  SITE_GATHER,
  SITE_GATHER_BOX,
  SITE_STAGING,
  SITE_STAGING_STRIDE,
  SITE_STAGE_SUM,
  SITE_STAGE_SUM_STRIDE,
  SITE_RECORDER,
  SITE_RECORDER_ENTRIES,
  SITE_PARTS,
  SITE_FIELDS
};
static_assert(SITE_FIELDS == HALMA_SITE_FIELDS, "the driver writes as many fields");

struct Args {
  u8* peer[SIZE];    // every rank's arena as mapped here
  u8* own;           // peer[rank]
  const u64* site;   // SiteField
  u8* control;       // this rank's control block
  u64 tag;           // digest | kind << 32 | algorithm << 40 | root << 48 | rank << 56; root 255: none
  u64 nbytes;        // payload of one rank
  const u8* source;  // 16-byte aligned, like out
  u8* out;
  u64 lane;          // one-shot push: offset of its lane; chunks: units of a shard | of a piece << 32;
                     // staged: offset of this rank's staging in every arena
  u64 box;           // one-shot push: bytes of a box; chunks: pieces a block; staged: from its even half to the odd;
                     // dispatch: blocks that sort
};

#if SIZE == 2
#define PEERS u64 p0, u64 p1
#define PEER_LIST {(u8*)p0, (u8*)p1}
#elif SIZE == 4
#define PEERS u64 p0, u64 p1, u64 p2, u64 p3
#define PEER_LIST {(u8*)p0, (u8*)p1, (u8*)p2, (u8*)p3}
#elif SIZE == 6
#define PEERS u64 p0, u64 p1, u64 p2, u64 p3, u64 p4, u64 p5
#define PEER_LIST {(u8*)p0, (u8*)p1, (u8*)p2, (u8*)p3, (u8*)p4, (u8*)p5}
#elif SIZE == 8
#define PEERS u64 p0, u64 p1, u64 p2, u64 p3, u64 p4, u64 p5, u64 p6, u64 p7
#define PEER_LIST {(u8*)p0, (u8*)p1, (u8*)p2, (u8*)p3, (u8*)p4, (u8*)p5, (u8*)p6, (u8*)p7}
#else
#error "world sizes are 2, 4, 6 and 8"
#endif
#define PARAMS PEERS, u64 own, u64 site, u64 control, u64 tag, u64 nbytes, u64 source, u64 out, u64 lane, u64 box
#define PACKED \
  Args { PEER_LIST, (u8*)own, (const u64*)site, (u8*)control, tag, nbytes, (const u8*)source, (u8*)out, lane, box }
// Blocks of 512 threads and a spare warp that fit a multiprocessor; halma.backends.simt.geometry sizes grids by it, so
// that two spinning calls fit the device (C16). More ranks need more registers.
#define KERNEL extern "C" __global__ void __launch_bounds__(512 + HALMA_WARP, SIZE <= 4 ? 2 : 1)

DEVICE u32 digest_of(const Args& a) { return static_cast<u32>(a.tag); }
DEVICE u32 root_of(const Args& a) { return static_cast<u32>(a.tag >> 48) & 255u; }
DEVICE u32 rank_of(const Args& a) { return static_cast<u32>(a.tag >> 56); }

// What a thread knows of its call. The last warp of each block is spare: it serves the protocol beside the data.
struct Turn {
  u32 epoch;
  u32 fault;    // set before the call: push nothing, wait for nothing, write NaN
  u32 threads;  // that move data, in a block
  u32 first, stride;  // of this thread's units in the whole grid
  u32 header;         // the block whose spare warp exchanges the header words
  u64 headers, recorder, entries;  // of the spare warp of that block: SiteField
  bool spare;
};

DEVICE u32 after(u32 epoch) { return epoch == HALMA_EPOCH_LAST ? HALMA_EPOCH_AFTER_LAST : epoch + 1u; }
DEVICE bool later(u32 seen, u32 expected) { return seen != 0u && static_cast<int>(seen - expected) > 0; }

// Where a thread stands. `apart`: so many blocks, the last ones, move no data; the first of them does the header, for
// kernels whose barriers every warp of a block must join.
DEVICE Turn stand(const Args& a, u32 apart = 0u) {
#if HALMA_SOFT_BARRIERS
  barriers_begin();
#endif
  Turn t;
  u32 blocks = gridDim.x - apart;
  t.threads = blockDim.x - HALMA_WARP;
  t.spare = threadIdx.x >= t.threads;
  t.first = blockIdx.x * t.threads + threadIdx.x;
  t.stride = blocks * t.threads;
  t.header = apart != 0u ? blocks : 0u;
  t.headers = t.recorder = t.entries = 0u;
  if (t.spare && blockIdx.x == t.header) {  // never changes, so it may be read before the wait
    t.headers = a.site[SITE_HEADERS], t.recorder = a.site[SITE_RECORDER], t.entries = a.site[SITE_RECORDER_ENTRIES];
  }
  return t;
}
// Nothing shared is touched before the wait (C17). The input too is read only after it: it is usually written by the
// kernel just before, which a dependent launch may overtake. The loads of epoch and fault are left under way: settle()
// waits for them, so that others may join them before it.
DEVICE void start(const Args& a, Turn& t) {
  const u8* cell = a.control + HALMA_EPOCH_CELLS + 4u * blockIdx.x;
  const u8* fault = a.control + HALMA_FAULT;
#if HALMA_USES_PUSH
  settle_address(cell), settle_address(fault);
#endif
  grid_wait();
  grid_trigger();
  t.epoch = HALMA_ORDER_EPOCH_LOAD(cell);
  t.fault = HALMA_ORDER_FAULT_LOAD(fault);
}
DEVICE void settle(Turn& t) { t.epoch = after(t.epoch); }
DEVICE Turn enter(const Args& a, u32 apart = 0u) {
  Turn t = stand(a, apart);
  start(a, t);
  settle(t);
  return t;
}

// ------------------------------------------------------------------------------------- faults and waits
enum Fault { FAULT_TIMEOUT = 1, FAULT_MISMATCH = 2, FAULT_OVERRUN = 3 };

// The rare paths are out of line and take plain values: a struct by reference would live in local memory from the start.

// The first fault of the channel wins, and is sticky (C7). Its record goes to pinned host memory, the fault word last, so
// that the host finds it by looking, also while the device hangs.
static __device__ __noinline__ void report(u8* control, u32 digest, u32 epoch, u32 fault, u32 peer, u32 expected,
                                           u32 seen, u32 algorithm, u64 waited) {
  if (HALMA_ORDER_FAULT_CLAIM(control + HALMA_FAULT, 0u, fault) != 0u) return;
  HALMA_ORDER_FAULT_STORE(control + HALMA_FAULT_PEER, peer);
  HALMA_ORDER_FAULT_STORE(control + HALMA_FAULT_CALL, epoch);
  HALMA_ORDER_FAULT_STORE(control + HALMA_FAULT_DIGEST, digest);
  HALMA_ORDER_FAULT_STORE(control + HALMA_FAULT_EXPECTED, expected);
  HALMA_ORDER_FAULT_STORE(control + HALMA_FAULT_SEEN, seen);
  HALMA_ORDER_FAULT_STORE(control + HALMA_FAULT_ALGORITHM, algorithm);
  HALMA_ORDER_FAULT_STORE(control + HALMA_FAULT_WAITED, static_cast<u32>(waited));
  HALMA_ORDER_FAULT_STORE(control + HALMA_FAULT_WAITED + 4u, static_cast<u32>(waited >> 32));
  // A copy, so that no argument is kept in a register longer: those that callers spill would cost every call.
  u8* record = (u8*)HALMA_ORDER_FAULT_PLACE_LOAD(control + HALMA_FAULT_PLACE);
#pragma unroll 1
  for (u32 at = HALMA_FAULT_PEER - HALMA_FAULT; at < HALMA_FAULT_PLACE - HALMA_FAULT; at += 4u)
    HALMA_ORDER_FAULT_STORE(record + at, HALMA_ORDER_FAULT_LOAD(control + HALMA_FAULT + at));
  HALMA_ORDER_FAULT_FENCE();
  HALMA_ORDER_FAULT_STORE(record, HALMA_ORDER_FAULT_LOAD(control + HALMA_FAULT));
}

// The clock is looked at once in 1,024 polls (about half a millisecond): a poll must stay cheap.
#define POLLS_A_LOOK 1024u
#define NO_FLAG 0x100u  // with the algorithm's number: what is seen is data, not an epoch
struct Wait {
  u32 polls;
  u64 since;  // device time of the first look; 0 before it
};

// When the wait began, or 0 to end it.
static __device__ __noinline__ u64 look(u8* control, u32 digest, u32 epoch, u64 since, u32 peer, u32 expected, u32 seen,
                                        u32 algorithm) {
  if (HALMA_ORDER_FAULT_LOAD(control + HALMA_FAULT) != 0u) return 0u;  // of another block
  u64 now = clock_ns();
  if (since == 0u) since = now;
  if ((algorithm & NO_FLAG) == 0u && later(seen, expected)) {
    report(control, digest, epoch, FAULT_OVERRUN, peer, expected, seen, algorithm & 255u, now - since);
    return 0u;
  }
  if (now - since < HALMA_ORDER_BOUND_LOAD(control + HALMA_BOUND)) return since;
  report(control, digest, epoch, FAULT_TIMEOUT, peer, expected, seen, algorithm & 255u, now - since);
  return 0u;
}

// Whether to poll once more. `culprit(peer, seen)` says what is missing.
template <typename Culprit>
DEVICE bool again(const Args& a, const Turn& t, Wait& wait, u32 algorithm, Culprit culprit) {
#if HALMA_MEASURE_WITHOUT_BOUNDS
  return true;
#else
  if (!RARE((++wait.polls & (POLLS_A_LOOK - 1u)) == 0u)) return true;
  u32 peer = 0u, seen = 0u;
  culprit(peer, seen);
  wait.since = look(a.control, digest_of(a), t.epoch, wait.since, peer, t.epoch, seen, algorithm);
  return wait.since != 0u;
#endif
}

DEVICE u32 algorithm_of(const Args& a) { return static_cast<u32>(a.tag >> 40) & 255u; }

// Wait for a flag word of `peer`; false after a fault.
DEVICE bool wait_flag(const Args& a, const Turn& t, const u8* flag, u32 peer) {
  Wait wait{0u, 0u};
  for (;;) {
    u32 seen = HALMA_ORDER_FLAG_WAIT(flag);
    if (seen == t.epoch) return true;
    auto culprit = [&](u32& who, u32& what) { who = peer, what = seen; };
    if (!again(a, t, wait, algorithm_of(a), culprit)) return false;
  }
}

// ---------------------------------------------------------------------------------------------- headers
DEVICE u8* peer_at(const Args& a, u32 lane) {
  u8* base = a.peer[0];
#pragma unroll
  for (u32 p = 1; p < SIZE; ++p)
    if (lane == p) base = a.peer[p];
  return base;
}

DEVICE u64 header_offset(u64 headers, u32 epoch, u32 sender) {
  return headers + ((epoch & 1u) * SIZE + sender) * HALMA_HEADER_BYTES;
}

// Lane p of one warp tells rank p what this rank is about to do (C15).
DEVICE void send_header(const Args& a, const Turn& t, u32 lane, u64 headers) {
  if (lane >= SIZE || lane == rank_of(a)) return;
  u8* to = peer_at(a, lane) + header_offset(headers, t.epoch, rank_of(a));
#if HALMA_HEADER_FENCED
  HALMA_ORDER_FAULT_STORE(to, digest_of(a));
  HALMA_ORDER_BEFORE_EXCHANGE();
  HALMA_ORDER_FLAG_EXCHANGE(to + 4, t.epoch);
#else
  u64 flag = static_cast<u64>(t.epoch) << 32;
  HALMA_ORDER_HEADER_STORE(to, (Pair{flag | digest_of(a), flag}));
#endif
}

// Lane p waits until rank p has told; false after a fault, which a header with another digest is at once.
DEVICE bool wait_header(const Args& a, const Turn& t, u32 lane, u64 headers) {
  if (lane >= SIZE || lane == rank_of(a)) return true;
  const u8* from = a.own + header_offset(headers, t.epoch, lane);
  u32 digest, flag;
  Wait wait{0u, 0u};
  for (;;) {
#if HALMA_HEADER_FENCED
    flag = HALMA_ORDER_FLAG_WAIT(from + 4);
    digest = flag == t.epoch ? HALMA_ORDER_FAULT_LOAD(from) : 0u;
#else
    u64 word = HALMA_ORDER_HEADER_LOAD(from);
    digest = static_cast<u32>(word), flag = static_cast<u32>(word >> 32);
#endif
    if (flag == t.epoch) break;
    auto culprit = [&](u32& who, u32& what) { who = lane, what = flag; };
    if (!again(a, t, wait, 0u, culprit)) return false;
  }
  if (digest == digest_of(a)) return true;
  report(a.control, digest_of(a), t.epoch, FAULT_MISMATCH, lane, digest_of(a), digest, 0u, 0u);
  return false;
}

// ----------------------------------------------------------------------------- recorder, epochs, scrubbing
// Lanes 8 and 9 write the 32 bytes of an entry in one store instruction to one sector of pinned memory.
DEVICE void record(const Args& a, const Turn& t, u32 lane, u64 recorder, u64 entries) {
  if (recorder == 0u || (lane & ~1u) != 8u) return;
  u64 now = clock_ns();
  u8* entry = (u8*)recorder + (t.epoch % static_cast<u32>(entries)) * HALMA_FLIGHT_BYTES + (lane & 1u) * 16u;
  u64 kind = (a.tag >> 32) & 255u;
  Pair half = lane == 8u ? Pair{t.epoch | a.tag << 32, now} : Pair{static_cast<u32>(a.nbytes) | kind << 32, algorithm_of(a)};
  HALMA_ORDER_RECORD_STORE(entry, half);
}

// Every call with one of two epochs in 2^20 zeroes the flags of its buffer that it does not use itself, so that none
// is old enough to be met again after the wrap (C2). Nobody writes into a words buffer before this rank's call ends;
// a chunk or stage flag may be written by a peer that is one call ahead, so it is only taken back if still old. Of the
// parts (streams.cu) a call uses those of its rows and blocks.
static __device__ __noinline__ void scrub_old(u8* own, const u64* site, u32 epoch, u32 first, u32 stride, u32 used_units,
                                              u32 senders, u32 used_rows) {
  u64 parts = site[SITE_PARTS];
  if (parts != 0u) {
#pragma unroll 1
    for (u32 i = first; i < HALMA_PART_ROWS * HALMA_PART_SUMS * HALMA_PART_BLOCKS; i += stride) {
      bool used = i / (HALMA_PART_SUMS * HALMA_PART_BLOCKS) < used_rows && i % HALMA_PART_BLOCKS < gridDim.x;
      if (!used) HALMA_ORDER_PART_STORE(own + parts + 8ull * i, 0ull);
    }
  }
  u64 words = site[SITE_WORDS], box = site[SITE_WORDS_BOX];
  if (box != 0u) {
    u32 units = static_cast<u32>(box >> 4);
    for (u32 p = 0; p < SIZE; ++p) {
      u8* to = own + words + ((epoch & 1u) * SIZE + p) * box;
      u32 from = (senders >> p & 1u) != 0u ? used_units : 0u;
#pragma unroll 1
      for (u32 i = from + first; i < units; i += stride)
        HALMA_ORDER_SCRUB_STORE(to + 16ull * i, (Pair{0u, 0u}));
    }
  }
  for (u32 which = 0; which < 2u; ++which) {
    u64 flags = site[which ? SITE_STAGE_FLAGS : SITE_CHUNK_FLAGS];
    u64 phase = site[which ? SITE_STAGE_FLAGS_PHASE : SITE_CHUNK_FLAGS_PHASE];
    if (flags == 0u) continue;
#pragma unroll 1
    for (u32 i = first; i < 2u * SIZE * HALMA_MAX_BLOCKS; i += stride) {
      u32 row = i / HALMA_MAX_BLOCKS;
      u64 box = site[SITE_FLAGS_BOX];
      u8* flag = own + flags + (row / SIZE) * phase + (row % SIZE) * box + 4u * (i % HALMA_MAX_BLOCKS);
      u32 seen = HALMA_ORDER_FAULT_LOAD(flag);
      if (seen != 0u && seen != epoch && !later(seen, epoch)) HALMA_ORDER_SCRUB_CLAIM(flag, seen, 0u);
    }
  }
}
DEVICE void scrub(const Args& a, const Turn& t, u32 used_units, u32 senders, u32 used_rows = 0u) {
  scrub_old(a.own, a.site, t.epoch, t.first, t.stride, used_units, senders, used_rows);
}

// What the spare warp does at once: the header word goes out beside the first data.
DEVICE void spare_before(const Args& a, const Turn& t) {
#if !HALMA_MEASURE_WITHOUT_HEADER
  if (blockIdx.x == t.header && t.fault == 0u) send_header(a, t, threadIdx.x - t.threads, t.headers);
#endif
}

// What it does when every thread of the block has read the epoch: block b of g moves the cells b, b + g, ... of all
// those that no other block of this grid reads. Then the entry of the flight recorder, and the wait for the headers.
DEVICE void spare_after(const Args& a, const Turn& t) {
  u32 lane = threadIdx.x - t.threads;
  for (u32 cell = blockIdx.x + lane * gridDim.x; cell < HALMA_MAX_BLOCKS; cell += HALMA_WARP * gridDim.x)
    HALMA_ORDER_EPOCH_STORE(a.control + HALMA_EPOCH_CELLS + 4u * cell, t.epoch);
  if (blockIdx.x != t.header) return;
#if !HALMA_MEASURE_WITHOUT_RECORDER
  record(a, t, lane, t.recorder, t.entries);
#endif
#if !HALMA_MEASURE_WITHOUT_HEADER
  if (t.fault == 0u) wait_header(a, t, lane, t.headers);
#endif
}

#if HALMA_USES_PUSH
// The whole of the spare warp's part, and what the others do instead once they have read the epoch: nobody waits for
// the spare warp.
DEVICE void serve(const Args& a, Turn t) {
  settle(t);
  spare_before(a, t);
  barrier_await(blockDim.x);
  spare_after(a, t);
}
DEVICE void epoch_read() { barrier_arrive(blockDim.x); }
#endif

// A barrier with what the spare warp does on either side of it, for kernels with the header apart; whether the block
// goes on is the same for all its threads, as barriers need.
DEVICE bool begin_apart(const Args& a, const Turn& t) {
  if (t.spare) spare_before(a, t);
  bool alive = !block_any(t.fault != 0u);
  if (t.spare) spare_after(a, t);
  return alive;
}

DEVICE bool time_to_scrub(const Turn& t) { return RARE((t.epoch & 0xffffeu) == 0u); }
