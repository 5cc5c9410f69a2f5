// Plain payload with a flag a chunk: release and acquire, pushed (CHUNKS).
#pragma once
#include "payload.h"

enum Phase { PHASE_SCATTER, PHASE_GATHER };

struct Span {
  u32 begin, end;  // units of 16 bytes within a shard
  // Cut to what a message of `units` has of the shard that begins at `first`.
  __device__ __forceinline__ Span under(u32 units, u32 first) const {
    u32 have = units > first ? units - first : 0u;
    return Span{begin < have ? begin : have, end < have ? end : have};
  }
};

// A block's pieces of every shard: `count` of them, `length` units each.
struct Pieces {
  u32 shard, length, count;
  __device__ __forceinline__ u32 index(u32 s) const { return blockIdx.x * count + s; }
  __device__ __forceinline__ Span span(u32 s) const {
    u32 begin = index(s) * length, end = begin + length;
    return Span{begin < shard ? begin : shard, end < shard ? end : shard};
  }
};
DEVICE Pieces pieces_of(const Args& a) {
  return Pieces{static_cast<u32>(a.lane), static_cast<u32>(a.lane >> 32), static_cast<u32>(a.box)};
}

DEVICE u64 scatter_box(const Args& a, u32 sender) { return a.site[SITE_SCATTER] + sender * a.site[SITE_SCATTER_BOX]; }
DEVICE u64 gather_box(const Args& a, u32 sender) { return a.site[SITE_GATHER] + sender * a.site[SITE_GATHER_BOX]; }
DEVICE u64 chunk_flag(const Args& a, u32 phase, u32 sender, u32 index) {
  return a.site[SITE_CHUNK_FLAGS] + phase * a.site[SITE_CHUNK_FLAGS_PHASE] + sender * a.site[SITE_FLAGS_BOX] + 4ull * index;
}

// Independent loads in flight a thread: a copy, or a sum of what many ranks sent, lives on them.
#define COPY 4u
#define SUMS (SIZE == 2 ? 2u : 1u)

// This rank's units [first + span) into a box of one peer.
DEVICE void send_piece(const Args& a, const Turn& t, u8* box, u32 first, Span span, u32 units) {
  span = span.under(units, first);
  if (t.spare) return;
#pragma unroll 1
  for (u32 i = span.begin + threadIdx.x; i < span.end; i += COPY * t.threads) {
    Quad unit[COPY];
#pragma unroll
    for (u32 k = 0; k < COPY; ++k)
      if (i + k * t.threads < span.end) unit[k] = load_unit(a.source, first + i + k * t.threads, a.nbytes);
#pragma unroll
    for (u32 k = 0; k < COPY; ++k)
      if (i + k * t.threads < span.end) HALMA_ORDER_CHUNK_STORE(box + 16ull * (i + k * t.threads), pair_of(unit[k]));
  }
}

DEVICE Quad read_unit(const u8* box, u32 i) { return quad_of(HALMA_ORDER_CHUNK_LOAD(box + 16ull * i)); }

// A box that has come, to this rank's `out`.
DEVICE void take_piece(const Turn& t, const u8* box, u8* out, u32 first, Span span, u32 units, u64 nbytes, bool aligned) {
  span = span.under(units, first);
  if (t.spare) return;
#pragma unroll 1
  for (u32 i = span.begin + threadIdx.x; i < span.end; i += COPY * t.threads) {
    Quad unit[COPY];
#pragma unroll
    for (u32 k = 0; k < COPY; ++k)
      if (i + k * t.threads < span.end) unit[k] = read_unit(box, i + k * t.threads);
#pragma unroll
    for (u32 k = 0; k < COPY; ++k)
      if (i + k * t.threads < span.end) store_unit(out, first + i + k * t.threads, nbytes, unit[k], aligned);
  }
}

// The block's stores of a piece, then a flag for each rank in `receivers`: the barrier hands all threads' stores to
// those that release.
DEVICE void publish(const Args& a, const Turn& t, u32 phase, u32 index, u32 receivers) {
  HALMA_ORDER_BEFORE_PUBLISH();
  block_barrier();
  u32 p = threadIdx.x;
  if (p < SIZE && (receivers >> p & 1u) != 0u)
    HALMA_ORDER_FLAG_PUBLISH(peer_at(a, p) + chunk_flag(a, phase, rank_of(a), index), t.epoch);
}

// Waits for a piece of every rank in `senders`, for the whole block; false after a fault.
DEVICE bool await(const Args& a, const Turn& t, u32 phase, u32 index, u32 senders) {
  u32 p = threadIdx.x;
  bool failed = false;
  if (p < SIZE && (senders >> p & 1u) != 0u) failed = !wait_flag(a, t, a.own + chunk_flag(a, phase, p, index), p);
  return !block_any(failed);
}

// Waits until every rank has begun this call, for the whole block: its boxes of the call before are then free.
DEVICE bool everybody_began(const Args& a, const Turn& t) {
  bool failed = threadIdx.x < SIZE && !wait_header(a, t, threadIdx.x, a.site[SITE_HEADERS]);
  return !block_any(failed);
}
