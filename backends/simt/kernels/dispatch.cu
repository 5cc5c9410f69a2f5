// Dispatch (exchange.h): one launch, in which some blocks send and await rows and the last ones sort.
#include "exchange_sort.h"

// Until all parts of all rows with an expert here have come; a thread a part.
DEVICE void await_rows(const Args& a, const Turn& t, const Exchange& x, u64 headers) {
  u32 rank = rank_of(a), first = first_of(x, rank);
#pragma unroll 1
  for (u32 q = 0; q < OTHERS; ++q) {
    u32 p = other(rank, q), start = first_awaited(a, t, x, q);
    if (start == NOBODY) continue;
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
      if (here && !await_part(a, t, x, p, token, item % parts)) return;
    }
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
  scrub_exchange(a, t, x, headers, gridDim.x - t.header);
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
