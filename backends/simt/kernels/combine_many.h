// Combine of many rows (exchange.h): a warp a piece of a row, UNITS units of 16 bytes a thread at once.
//
// With a thread a unit (combine.cu) about two loads of parts are under way, and a unit waits five times for memory.
// Here a warp reads a token's slots once for a whole piece, skips the choices that are not here, and has ABREAST parts
// of UNITS units under way together; what came back is looked for while this rank's own part is on its way from memory.
// Sums are those of combine.cu, bit for bit.
#pragma once
#include "exchange_sums.h"

// The slot of the choice that this lane looks at, and of all choices whether they have one, as bits.
DEVICE int lane_slot(const Back& b, u32 rank, u32 token) {
  u32 lane = threadIdx.x % HALMA_WARP;
  return lane < b.choices ? b.slot_of[(static_cast<u64>(rank) * b.most + token) * b.choices + lane] : -1;
}
DEVICE u32 chosen(int slot) { return warp_or(slot >= 0 ? 1u << threadIdx.x % HALMA_WARP : 0u); }

// What this rank has of units u, u + HALMA_WARP, ... of a token of `rank`, whose choices with a slot are `mask`.
template <int D, bool WIDE, u32 UNITS>
DEVICE void local_sums(const Args& a, const Back& b, u32 rank, u32 token, u32 u, u32 mask, Quad* sum) {
  const u32 N = Sum<D>::N, QUADS = WIDE ? N / 4u : 1u, ABREAST = (WIDE ? 4u : 8u) / UNITS;
  const int* slots = b.slot_of + (static_cast<u64>(rank) * b.most + token) * b.choices;
  const Quad* parts = reinterpret_cast<const Quad*>(a.source) + static_cast<u64>(u) * QUADS;
  float total[UNITS][N];
#pragma unroll
  for (u32 c = 0; c < UNITS; ++c)
#pragma unroll
    for (u32 k = 0; k < N; ++k) total[c][k] = 0.0f;
#pragma unroll 1
  while (mask != 0u) {
    const Quad* from[ABREAST];
    bool here[ABREAST];
    int slot[ABREAST];
    Quad part[ABREAST][UNITS][QUADS];
#pragma unroll
    for (u32 g = 0; g < ABREAST; ++g) {
      here[g] = mask != 0u;
      slot[g] = slots[here[g] ? lowest_bit(mask) : 0u];  // without a branch: all are under way together
      mask &= mask - 1u;
    }
#pragma unroll
    for (u32 g = 0; g < ABREAST; ++g) from[g] = parts + static_cast<u64>(slot[g]) * b.units * QUADS;
#pragma unroll
    for (u32 g = 0; g < ABREAST; ++g)
#pragma unroll
      for (u32 c = 0; c < UNITS; ++c)
#pragma unroll
        for (u32 k = 0; k < QUADS; ++k)
          if (here[g]) part[g][c][k] = from[g][c * HALMA_WARP * QUADS + k];
#pragma unroll
    for (u32 g = 0; g < ABREAST; ++g) {
      if (!here[g]) continue;
#pragma unroll
      for (u32 c = 0; c < UNITS; ++c) {
        float wide[N];
#pragma unroll
        for (u32 k = 0; k < QUADS; ++k) {
          if (WIDE)
            widened<F32>(part[g][c][k], wide + 4u * k);
          else
            widened<D>(part[g][c][k], wide);
        }
#pragma unroll
        for (u32 k = 0; k < N; ++k) total[c][k] = add(total[c][k], wide[k]);
      }
    }
  }
#pragma unroll
  for (u32 c = 0; c < UNITS; ++c) sum[c] = narrowed<D>(total[c]);
}

template <int D, bool WIDE, u32 UNITS> DEVICE void combine_pieces(const Args& a, const Back& b) {
  Turn t = stand(a);
  start(a, t);
  if (t.spare) return serve(a, t);
  const u32 N = Sum<D>::N, LENGTH = UNITS * HALMA_WARP;
  u32 rank = rank_of(a), all = b.tokens;
#pragma unroll
  for (u32 q = 0; q < OTHERS; ++q) {
    u32 tokens = static_cast<u32>(b.tokens_of[other(rank, q)]);
    all = tokens > all ? tokens : all;
  }
  settle(t);
  epoch_read();
  // Of this thread alone: a warp joins what it joins (warp_or) to the end, whichever of its lanes met a fault.
  bool alive = t.fault == 0u;
  // Rows are whole pieces (the driver sees to it). A warp has the same piece of every token that it serves.
  u32 pieces = b.units / LENGTH, warp = t.first / HALMA_WARP, step = t.stride / HALMA_WARP / pieces;
  u32 next = warp / pieces, u = warp % pieces * LENGTH + threadIdx.x % HALMA_WARP;
  if (next >= step) return;  // warps that are left over
  auto push = [&](u32 token, int ahead) {
#pragma unroll 1
    for (u32 q = 0; q < OTHERS; ++q) {
      u32 p = other(rank, q);
      if (t.fault != 0u || token >= static_cast<u32>(b.tokens_of[p])) continue;
      u32 mask = chosen(q == 0u ? ahead : lane_slot(b, p, token));
      if (mask == 0u) continue;
      Quad sum[UNITS];
      local_sums<D, WIDE, UNITS>(a, b, p, token, u, mask, sum);
      u8* to = peer_at(a, p) + b.back + rank * b.back_stride + 16ull * (static_cast<u64>(token) * b.units + u);
#pragma unroll
      for (u32 c = 0; c < UNITS; ++c)
        if (alive) HALMA_ORDER_SENTINEL_STORE(to + 16u * c * HALMA_WARP, pair_of(without_sentinel(sum[c])));
    }
  };
  auto take = [&](u32 token, int own, u32 sent) {
    u64 at = static_cast<u64>(token) * b.units + u;
    u8* back = a.own + b.back + 16ull * at;
    Quad mine[UNITS], data[UNITS];
    auto look_at = [&](u32 p) {
#pragma unroll
      for (u32 c = 0; c < UNITS; ++c)
        data[c] = quad_of(HALMA_ORDER_SENTINEL_LOAD(back + p * b.back_stride + 16u * c * HALMA_WARP));
    };
    u32 others = sent & ~(1u << rank), early = others != 0u && alive ? lowest_bit(others) : rank;
    if (early != rank) look_at(early);
    local_sums<D, WIDE, UNITS>(a, b, rank, token, u, chosen(own), mine);
    float sum[UNITS][N], next[N];
#pragma unroll
    for (u32 c = 0; c < UNITS; ++c)
#pragma unroll
      for (u32 k = 0; k < N; ++k) sum[c][k] = 0.0f;
#pragma unroll 1
    for (u32 p = 0; p < SIZE && alive; ++p) {
      if ((sent >> p & 1u) == 0u) continue;
      if (p != rank) {
        if (p != early) look_at(p);
        Wait wait{0u, 0u};
        for (;;) {
          bool here = true;
#pragma unroll
          for (u32 c = 0; c < UNITS; ++c) here &= sentinel_here(data[c]);
          if (here) break;
          auto culprit = [&](u32& who, u32& what) { who = p, what = ~0u; };
          if (!again(a, t, wait, STAGE_BACK | NO_FLAG, culprit)) {
            alive = false;
            break;
          }
          look_at(p);
        }
        if (!alive) break;
        // Emptied by its reader; the sender comes back behind this rank's next dispatch.
#pragma unroll
        for (u32 c = 0; c < UNITS; ++c)
          HALMA_ORDER_SENTINEL_CLEAR(back + p * b.back_stride + 16u * c * HALMA_WARP, (Pair{~0ull, ~0ull}));
      }
#pragma unroll
      for (u32 c = 0; c < UNITS; ++c) {
        Quad unit;  // by words: a choice between the arrays would put both into memory
#pragma unroll
        for (u32 k = 0; k < 4u; ++k) unit.word[k] = p == rank ? mine[c].word[k] : data[c].word[k];
        widened<D>(unit, next);
#pragma unroll
        for (u32 k = 0; k < N; ++k) sum[c][k] = add(sum[c][k], next[k]);
      }
    }
#pragma unroll
    for (u32 c = 0; c < UNITS; ++c) {
#pragma unroll
      for (u32 k = 0; k < N; ++k)
        if (!alive) sum[c][k] = float_of(~0u);
      store_sum<D>(a, b, at + c * HALMA_WARP, sum[c]);
    }
  };
  // One token ahead of what is awaited, so that the link stays busy. Slots and sources of both are asked for together.
  u32 token = b.most;
#pragma unroll 1
  for (; next < all || token < b.tokens; token = next, next += step) {
    int ahead = lane_slot(b, other(rank, 0u), next < b.most ? next : 0u);
    int own = lane_slot(b, rank, token < b.tokens ? token : 0u);
    u32 sent = token < b.tokens ? b.sources[token] : 0u;
    if (next < all) push(next, ahead);
    if (token < b.tokens) take(token, own, sent);
  }
}

// Two grids that spin fit a multiprocessor (C16); with fewer threads than KERNEL's, each has registers for UNITS.
#define COMBINE_MANY(name, D, WIDE, UNITS, THREADS)                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS + HALMA_WARP, SIZE <= 4 ? 2 : 1) name(COMBINE_PARAMS) { \
    Args a = PACKED;                                                                                          \
    Back b = COMBINE_PACKED;                                                                                  \
    combine_pieces<D, WIDE, UNITS>(a, b);                                                                     \
  }
