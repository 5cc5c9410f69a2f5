// Dispatch (exchange.h): one launch, in which some blocks send and await rows and the last ones sort.
#include "exchange_sort.h"

// Until all parts of all rows with an expert here have come; a thread a part.
DEVICE void await_rows(const Args& a, const Turn& t, const Exchange& x, u64 headers) {
  u32 rank = rank_of(a), first = first_of(x, rank);
#pragma unroll 1
  for (u32 q = 0; q < OTHERS; ++q) {
    u32 p = other(rank, q), start = t.first + q * (t.stride / OTHERS);  // peers are awaited side by side
    if (start >= t.stride) start -= t.stride;
    // Whoever cannot have a part to wait for does not look: all threads at one word would be slow.
    u32 bound = static_cast<u32>(a.lane), split = bound * x.most_parts;
    if (start >= (split < 2u * x.warps ? split : bound > 2u * x.warps ? bound : 2u * x.warps)) continue;
    u32 tokens = count_of(a, t, headers, p, x.most);
    if (tokens == NOBODY) return;
    u32 parts = parts_of(x, tokens);
#pragma unroll 1
    for (u32 item = start; item < tokens * parts; item += t.stride) {
      u32 token = item / parts;
      const u8* words = a.own + x.words + p * x.words_stride + 16ull * token * x.choices;
      bool here = false;
#pragma unroll 1
      for (u32 j = 0; j < x.choices; j += AT_ONCE) {
        const u8* from[AT_ONCE];
        bool wanted[AT_ONCE];
        Pair word[AT_ONCE];
#pragma unroll
        for (u32 c = 0; c < AT_ONCE; ++c) from[c] = words + 16ull * (j + c), wanted[c] = j + c < x.choices;
        if (!poll_choices(a, t, from, wanted, p, word)) return;
#pragma unroll
        for (u32 c = 0; c < AT_ONCE; ++c)
          here |= wanted[c] && local_of(x, first, static_cast<u32>(word[c].low)) < x.local;
      }
      if (!here) continue;
      const u8* flag = a.own + x.flags + p * x.flags_stride + 4ull * (token * PARTS + item % parts);
      Wait wait{0u, 0u};
      for (;;) {
        u32 seen = HALMA_ORDER_FLAG_WAIT(flag);
        if (seen == t.epoch) break;
        auto culprit = [&](u32& who, u32& what) { who = p, what = seen; };
        if (!again(a, t, wait, STAGE_ROWS, culprit)) return;
      }
    }
  }
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

template <bool FP8> DEVICE void dispatch(const Args& a, const Exchange& x, Sorting& s) {
  Turn t = stand(a, static_cast<u32>(a.box));
  u64 headers = a.site[SITE_HEADERS];
  u32 parts = parts_of(x, x.tokens), item = t.first / HALMA_WARP;
  start(a, t);
  if (t.spare) {
    settle(t);
    if (blockIdx.x == t.header && t.fault == 0u) send_count(a, t, threadIdx.x - t.threads, x.tokens);
    barrier_await(blockDim.x);
    spare_after(a, t);
    return;
  }
  Part part{0u, 0u, 0u, 0u, -1};
  Quad piece[PIECE];
  if (blockIdx.x < t.header && item < x.tokens * parts) {  // under way beside the epoch
    part = part_at(x, item, parts);
    load_piece<FP8>(a, x, part.token, part.begin + threadIdx.x % HALMA_WARP, part.end, piece);
  }
  settle(t);
  epoch_read();
  if (blockIdx.x >= t.header) {
    if (t.fault != 0u) return give_up_sorting(a, t, x);
    sort_choices(a, t, x, s, headers);
    return;
  }
  if (t.fault != 0u) return;
  send_choices(a, t, x);
  send_rows<FP8>(a, t, x, part, piece);
  await_rows(a, t, x, headers);
  if (!time_to_scrub(t)) return;
  u32 sorters = gridDim.x - t.header;
  for (u32 i = t.first; i < x.local * SORTERS; i += t.stride)
    if (sorters == 1u || i % SORTERS >= sorters) HALMA_ORDER_PART_STORE(a.own + x.tallies + 8ull * i, 0ull);
  for (u32 q = 0; q < OTHERS; ++q) {
    u32 p = other(rank_of(a), q), tokens = count_of(a, t, headers, p, x.most);
    if (tokens == NOBODY) return;
    scrub_lanes(a.own, x.words, x.words_stride, x.flags, x.flags_stride, t.epoch, p, tokens * x.choices,
                x.most * x.choices, x.most * PARTS, t.first, t.stride);
  }
}

KERNEL dispatch_plain(DISPATCH_PARAMS) {
  __shared__ Sorting s;
  Args a = PACKED;
  Exchange x = DISPATCH_PACKED;
  dispatch<false>(a, x, s);
}
KERNEL dispatch_fp8(DISPATCH_PARAMS) {
  __shared__ Sorting s;
  Args a = PACKED;
  Exchange x = DISPATCH_PACKED;
  dispatch<true>(a, x, s);
}
