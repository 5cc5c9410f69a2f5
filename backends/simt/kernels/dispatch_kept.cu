// Dispatch by a kept layout (exchange.h): rows alone travel, to where the layout says, and nothing is sorted.
#include "exchange_send.h"

// Until all parts of all rows with a slot here have come; a thread a part. Every rank must send as many tokens as the
// layout has of it.
DEVICE void await_kept(const Args& a, const Turn& t, const Exchange& x, u64 headers) {
  u32 rank = rank_of(a);
#pragma unroll 1
  for (u32 q = 0; q < OTHERS; ++q) {
    u32 p = other(rank, q), start = first_awaited(a, t, x, q);
    if (start == NOBODY && t.first != 0u) continue;
    u32 tokens = count_of(a, t, headers, p, x.most), kept = static_cast<u32>(x.tokens_of[p]);
    if (tokens == NOBODY) return;
    if (RARE(tokens != kept)) {
      report(a.control, digest_of(a), t.epoch, FAULT_MISMATCH, p, kept, tokens, 0u, 0u);
      return;
    }
    if (start == NOBODY) continue;
    u32 parts = parts_of(x, tokens);
#pragma unroll 1
    for (u32 item = start; item < tokens * parts; item += t.stride) {
      u32 token = item / parts;
      const int* slots = x.slot_of + (static_cast<u64>(p) * x.most + token) * x.choices;
      bool here = false;
#pragma unroll 1
      for (u32 j = 0; j < x.choices; ++j) here |= slots[j] >= 0;
      if (here && !await_part(a, t, x, p, token, item % parts)) return;
    }
  }
}

template <bool FP8> DEVICE void dispatch_kept(const Args& a, const Exchange& x) {
  Turn t = stand(a);
  u64 headers = a.site[SITE_HEADERS];
  u32 parts = parts_of(x, x.tokens), item = t.first / HALMA_WARP;
  start(a, t);
  settle(t);
  if (t.spare) {
    if (blockIdx.x == t.header && t.fault == 0u) send_count(a, t, threadIdx.x - t.threads, x.tokens);
    barrier_await(blockDim.x);
    spare_after(a, t);
    return;
  }
  epoch_read();
  if (t.fault != 0u) return;
  Part part{0u, 0u, 0u, 0u, 0};
  Quad piece[PIECE];
  if (item < x.tokens * parts) {
    part = part_at<true>(x, item, parts);
    load_piece<FP8>(a, x, part.token, part.begin + threadIdx.x % HALMA_WARP, part.end, piece);
  }
  send_rows<FP8, true>(a, t, x, part, piece);
  await_kept(a, t, x, headers);
  if (time_to_scrub(t)) scrub_exchange(a, t, x, headers, 0u);
}

KERNEL dispatch_kept_plain(DISPATCH_PARAMS) {
  Args a = PACKED;
  Exchange x = DISPATCH_PACKED;
  dispatch_kept<false>(a, x);
}
KERNEL dispatch_kept_fp8(DISPATCH_PARAMS) {
  Args a = PACKED;
  Exchange x = DISPATCH_PACKED;
  dispatch_kept<true>(a, x);
}
