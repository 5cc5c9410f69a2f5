// Dispatch: arguments, who owns an expert, count words, and what a rank sends.
#pragma once
#include "exchange.h"

struct Exchange {
  const long long* ids;  // [tokens][choices]
  const float* weights;
  int* index;            // [slots]
  float* slot_weights;
  int* counts;           // [local]
  int* offsets;          // [local + 1]
  int* total;
  int* slot_of;          // [SIZE * most][choices]
  int* tokens_of;        // [SIZE]
  u32* sources;          // [tokens]: ranks with an expert of the token
  u64 words, words_stride;  // offsets in every arena, and from a sender's part to the next one's
  u64 rows, scales;
  u64 flags, flags_stride;
  u64 tallies;           // [local][SORTERS] words {slots of an expert in a sorter's share, epoch}, of this rank alone
  u32 tokens, choices, most, slots, experts, local, units, alignment, most_parts, warps;
};
#define DISPATCH_PARAMS                                                                                              \
  PARAMS, u64 ids, u64 weights, u64 index, u64 slot_weights, u64 counts, u64 offsets, u64 total, u64 slot_of,        \
      u64 tokens_of, u64 sources, u64 words, u64 words_stride, u64 rows, u64 scales, u64 flags, u64 flags_stride,    \
      u64 tallies, u64 shape, u64 limits, u64 owned, u64 row, u64 cuts
#define DISPATCH_PACKED                                                                                              \
  Exchange {                                                                                                         \
    (const long long*)ids, (const float*)weights, (int*)index, (float*)slot_weights, (int*)counts, (int*)offsets,    \
        (int*)total, (int*)slot_of, (int*)tokens_of, (u32*)sources, words, words_stride, rows, scales, flags,        \
        flags_stride, tallies, static_cast<u32>(shape), static_cast<u32>(shape >> 32), static_cast<u32>(limits),     \
        static_cast<u32>(limits >> 32), static_cast<u32>(owned), static_cast<u32>(owned >> 32),                      \
        static_cast<u32>(row), static_cast<u32>(row >> 32), static_cast<u32>(cuts), static_cast<u32>(cuts >> 32)     \
  }

DEVICE u32 first_of(const Exchange& x, u32 rank) {
  u32 rest = x.experts % SIZE;
  return rank * (x.experts / SIZE) + (rank < rest ? rank : rest);
}
DEVICE u32 owner_of(const Exchange& x, u32 expert) {
  u32 owner = 0u;
#pragma unroll
  for (u32 p = 1; p < SIZE; ++p) owner += expert >= first_of(x, p) ? 1u : 0u;
  return owner;
}
DEVICE u32 as_word(const Exchange& x, long long id) {
  return static_cast<u64>(id) < x.experts ? static_cast<u32>(id) : NOBODY;
}
// An expert's number here, or one that is not below `local`.
DEVICE u32 local_of(const Exchange& x, u32 first, u32 expert) { return expert == NOBODY ? NOBODY : expert - first; }

// The same on the sender and on the receiver (halma.hal.collectives.exchange_tuning.parts_of).
DEVICE u32 parts_of(const Exchange& x, u32 tokens) {
  u32 parts = 1u;
  while (parts < x.most_parts && tokens * parts < x.warps) parts *= 2u;
  return parts;
}

// ------------------------------------------------------------------------------------------------ headers
// {digest, epoch, tokens, epoch}: a count word from every rank to every rank, zero included.
DEVICE void send_count(const Args& a, const Turn& t, u32 lane, u32 tokens) {
  if (lane >= SIZE || lane == rank_of(a)) return;
  u64 flag = static_cast<u64>(t.epoch) << 32;
  u8* to = peer_at(a, lane) + header_offset(t.headers, t.epoch, rank_of(a));
  HALMA_ORDER_HEADER_STORE(to, (Pair{flag | digest_of(a), flag | tokens}));
}
// How many tokens rank p sends; NOBODY after a fault. `most`: more than that were never declared.
DEVICE u32 count_of(const Args& a, const Turn& t, u64 headers, u32 p, u32 most) {
  const u8* from = a.own + header_offset(headers, t.epoch, p) + 8u;
  Wait wait{0u, 0u};
  for (;;) {
    u64 word = HALMA_ORDER_HEADER_LOAD(from);
    u32 flag = static_cast<u32>(word >> 32);
    if (flag == t.epoch) {
      u32 tokens = static_cast<u32>(word);
      if (!RARE(tokens > most)) return tokens;
      report(a.control, digest_of(a), t.epoch, FAULT_MISMATCH, p, most, tokens, 0u, 0u);
      return NOBODY;
    }
    auto culprit = [&](u32& who, u32& what) { who = p, what = flag; };
    if (!again(a, t, wait, 0u, culprit)) return NOBODY;
  }
}

// ---------------------------------------------------------------------------------------------- sending
DEVICE void send_choices(const Args& a, const Turn& t, const Exchange& x) {
  u64 mine = x.words + rank_of(a) * x.words_stride, flag = static_cast<u64>(t.epoch) << 32;
  // From the last thread on: the first ones have rows to send.
#pragma unroll 1
  for (u32 i = t.stride - 1u - t.first; i < x.tokens * x.choices; i += t.stride) {
    Pair word{flag | as_word(x, x.ids[i]), flag | bits_of(x.weights[i])};
#pragma unroll
    for (u32 p = 0; p < SIZE; ++p)
      if (p != rank_of(a)) HALMA_ORDER_WORD_STORE(a.peer[p] + mine + 16ull * i, word);
  }
}

// 16 values of a group of 128 that lies on eight neighbouring lanes, as e4m3 with the group's power-of-two scale.
// Magnitudes are compared as bits, so that a NaN stays.
DEVICE Quad quantised(const Quad* in, float& scale) {
  float y[16];
#pragma unroll
  for (u32 k = 0; k < 4u; ++k) {
    Numbers<BF16>::widen(in[0].word[k], y + 2u * k);
    Numbers<BF16>::widen(in[1].word[k], y + 8u + 2u * k);
  }
  u32 largest = 0u;
#pragma unroll
  for (u32 k = 0; k < 16u; ++k) {
    u32 magnitude = bits_of(y[k]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
#pragma unroll
  for (u32 mask = 4u; mask > 0u; mask /= 2u) {
    u32 other = bits_of(shuffle_xor(float_of(largest), mask));
    largest = other > largest ? other : largest;
  }
  scale = float_of(largest);
  if (largest <= 0x7f800000u) {
    scale = multiply(scale < E4M3_FLOOR ? E4M3_FLOOR : scale, 1.0f / E4M3_LIMIT);
    scale = float_of((bits_of(scale) + 0x7fffffu) & 0x7f800000u);  // up to a power of two
  }
  float inverse = divide(1.0f, scale);  // exact, so a product is the quotient
  Quad out;
#pragma unroll
  for (u32 k = 0; k < 4u; ++k) {
    out.word[k] = 0u;
#pragma unroll
    for (u32 b = 0; b < 4u; ++b) out.word[k] |= to_e4m3(multiply(y[4u * k + b], inverse)) << (8u * b);
  }
  return out;
}

// A lane's share of a part of a row that is under way at once: PIECE quads of memory, which are as many units of 16
// bytes on the way, or half as many where they are rounded to fp8.
#define PIECE 4u
template <bool FP8> struct Step { static const u32 UNITS = FP8 ? PIECE / 2u : PIECE; };

template <bool FP8>
DEVICE void load_piece(const Args& a, const Exchange& x, u32 token, u32 i, u32 end, Quad* piece) {
  const u32 QUADS = PIECE / Step<FP8>::UNITS;
  const Quad* from = reinterpret_cast<const Quad*>(a.source) + static_cast<u64>(QUADS) * x.units * token;
#pragma unroll
  for (u32 c = 0; c < Step<FP8>::UNITS; ++c) {
    u32 unit = i + c * HALMA_WARP;
#pragma unroll
    for (u32 k = 0; k < QUADS; ++k) {
      // All lanes join a group's maximum; those behind the end have groups of their own.
      if (FP8) piece[c * QUADS + k] = Quad{{0u, 0u, 0u, 0u}};
      if (unit < end) piece[c * QUADS + k] = from[static_cast<u64>(QUADS) * unit + k];
    }
  }
}

template <bool FP8>
DEVICE void push_piece(const Args& a, const Exchange& x, u32 token, u32 i, u32 end, u32 to, const Quad* piece) {
  const u32 LANES = GROUP / 16u;
  u64 row = static_cast<u64>(rank_of(a)) * x.most + token;
  u64 at = x.rows + 16ull * x.units * row, scales = x.scales + 4ull * (x.units / LANES) * row;
#pragma unroll
  for (u32 c = 0; c < Step<FP8>::UNITS; ++c) {
    u32 unit = i + c * HALMA_WARP;
    float scale = 0.0f;
    Pair out = FP8 ? pair_of(quantised(piece + (FP8 ? 2u * c : 0u), scale)) : pair_of(piece[c]);
    if (unit >= end) continue;
#pragma unroll
    for (u32 p = 0; p < SIZE; ++p) {
      if ((to >> p & 1u) == 0u) continue;
      HALMA_ORDER_CHUNK_STORE(a.peer[p] + at + 16ull * unit, out);
      if (FP8 && unit % LANES == 0u)
        HALMA_ORDER_SCALE_STORE(a.peer[p] + scales + 4ull * (unit / LANES), bits_of(scale));
    }
  }
}

// A part of a row: whose it is, and the choice that this lane looks at; of a kept layout the ranks that it goes to.
struct Part {
  u32 token, number, begin, end;
  long long id;
};
template <bool KEPT = false> DEVICE Part part_at(const Exchange& x, u32 item, u32 parts) {
  u32 lane = threadIdx.x % HALMA_WARP, token = item / parts, number = item % parts, length = x.units / parts;
  long long id = -1;
  if (KEPT)
    id = x.sources[token];
  else if (lane < x.choices)
    id = x.ids[static_cast<u64>(token) * x.choices + lane];
  return Part{token, number, number * length, (number + 1u) * length, id};
}

// The rows of this warp, a part at a time, each followed by its flag. The first one is under way already.
template <bool FP8, bool KEPT = false>
DEVICE void send_rows(const Args& a, const Turn& t, const Exchange& x, Part part, Quad* piece) {
  u32 lane = threadIdx.x % HALMA_WARP, warps = t.stride / HALMA_WARP, rank = rank_of(a);
  u32 parts = parts_of(x, x.tokens), item = t.first / HALMA_WARP;
#pragma unroll 1
  while (item < x.tokens * parts) {
    u32 to = static_cast<u32>(part.id);
    if (!KEPT) {
      u32 expert = as_word(x, part.id);
      to = warp_or(expert == NOBODY ? 0u : 1u << owner_of(x, expert));
    }
#pragma unroll 1
    for (u32 i = part.begin + lane;;) {
      push_piece<FP8>(a, x, part.token, i, part.end, to, piece);
      i += Step<FP8>::UNITS * HALMA_WARP;
      if (i - lane >= part.end) break;
      load_piece<FP8>(a, x, part.token, i, part.end, piece);
    }
    if (!KEPT && lane == 0u && part.number == 0u) x.sources[part.token] = to;
    HALMA_ORDER_BEFORE_PUBLISH();
    warp_barrier();
    if (lane < SIZE && lane != rank && (to >> lane & 1u) != 0u) {
      u64 flag = x.flags + rank * x.flags_stride + 4ull * (part.token * PARTS + part.number);
      HALMA_ORDER_FLAG_PUBLISH(peer_at(a, lane) + flag, t.epoch);
    }
    item += warps;
    if (item >= x.tokens * parts) break;
    part = part_at<KEPT>(x, item, parts);
    load_piece<FP8>(a, x, part.token, part.begin + lane, part.end, piece);
  }
}

// ---------------------------------------------------------------------------------------------- awaiting
// Until a part of a row of `p` has come; false after a fault.
DEVICE bool await_part(const Args& a, const Turn& t, const Exchange& x, u32 p, u32 token, u32 number) {
  const u8* flag = a.own + x.flags + p * x.flags_stride + 4ull * (token * PARTS + number);
  Wait wait{0u, 0u};
  for (;;) {
    u32 seen = HALMA_ORDER_FLAG_WAIT(flag);
    if (seen == t.epoch) return true;
    auto culprit = [&](u32& who, u32& what) { who = p, what = seen; };
    if (!again(a, t, wait, STAGE_ROWS, culprit)) return false;
  }
}
// The first item that this thread awaits of the q-th peer: peers are awaited side by side. Whoever cannot have a part to
// wait for does not look, and gets one that is behind all: all threads at one word would be slow.
DEVICE u32 first_awaited(const Args& a, const Turn& t, const Exchange& x, u32 q) {
  u32 start = t.first + q * (t.stride / OTHERS), bound = static_cast<u32>(a.lane), split = bound * x.most_parts;
  if (start >= t.stride) start -= t.stride;
  return start >= (split < 2u * x.warps ? split : bound > 2u * x.warps ? bound : 2u * x.warps) ? NOBODY : start;
}

// Flags that this call does not use become 0 long before epochs wrap (C2): words behind a sender's choices, into which
// nobody stores before this rank's next header, and old flags of rows.
static __device__ __noinline__ void scrub_lanes(u8* own, u64 words, u64 words_stride, u64 flags, u64 flags_stride,
                                                u32 epoch, u32 sender, u32 used, u32 all_words, u32 all_flags, u32 first,
                                                u32 stride) {
  for (u32 i = used + first; i < all_words; i += stride)
    HALMA_ORDER_SCRUB_STORE(own + words + sender * words_stride + 16ull * i, (Pair{0u, 0u}));
  for (u32 i = first; i < all_flags; i += stride) {
    u8* flag = own + flags + sender * flags_stride + 4ull * i;
    u32 seen = HALMA_ORDER_FAULT_LOAD(flag);
    if (seen != 0u && seen != epoch && !later(seen, epoch)) HALMA_ORDER_SCRUB_CLAIM(flag, seen, 0u);
  }
}
// Of a call with so many sorters; of none, in which no choices come.
DEVICE void scrub_exchange(const Args& a, const Turn& t, const Exchange& x, u64 headers, u32 sorters) {
  for (u32 i = t.first; i < x.local * SORTERS; i += t.stride)
    if (sorters <= 1u || i % SORTERS >= sorters) HALMA_ORDER_PART_STORE(a.own + x.tallies + 8ull * i, 0ull);
  for (u32 q = 0; q < OTHERS; ++q) {
    u32 p = other(rank_of(a), q), tokens = count_of(a, t, headers, p, x.most);
    if (tokens == NOBODY) return;
    scrub_lanes(a.own, x.words, x.words_stride, x.flags, x.flags_stride, t.epoch, p,
                sorters == 0u ? 0u : tokens * x.choices, x.most * x.choices, x.most * PARTS, t.first, t.stride);
  }
}
