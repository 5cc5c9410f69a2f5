// Staged collectives: a rank's message lies in its own memory and peers pull it after a flag. Nothing is assumed of
// the atomicity or order of stores to a peer: flags go by atomic exchange behind a system fence by every thread that
// stored, and the block's barrier.
#include "payload.h"
#include "numbers.h"

enum Phase { PHASE_MESSAGE, PHASE_SUM };

// Flags alternate by epoch as staging does: a peer that is one call ahead must not overwrite one not yet seen.
DEVICE u64 stage_flag(const Args& a, const Turn& t, u32 phase, u32 sender) {
  u32 index = (t.epoch & 1u) * (HALMA_MAX_BLOCKS / 2u) + blockIdx.x;
  return a.site[SITE_STAGE_FLAGS] + phase * a.site[SITE_STAGE_FLAGS_PHASE] + sender * a.site[SITE_FLAGS_BOX] + 4ull * index;
}

DEVICE u64 staging_of(const Args& a, const Turn& t) { return a.lane + (t.epoch & 1u) * a.box; }
DEVICE u64 sums_of(const Args& a, const Turn& t) {
  return a.site[SITE_STAGE_SUM] + (t.epoch & 1u) * a.site[SITE_STAGE_SUM_STRIDE];
}
DEVICE u32 others(const Args& a) { return ((1u << SIZE) - 1u) & ~(1u << rank_of(a)); }

DEVICE void tell(const Args& a, const Turn& t, u32 phase) {
  HALMA_ORDER_BEFORE_EXCHANGE();  // by every thread that stored: one lane's fence does not speak for the others
  block_barrier();
  u32 p = threadIdx.x;
  if (p < SIZE && p != rank_of(a))
    HALMA_ORDER_FLAG_EXCHANGE(peer_at(a, p) + stage_flag(a, t, phase, rank_of(a)), t.epoch);
}

DEVICE bool hear(const Args& a, const Turn& t, u32 phase, u32 senders) {
  u32 p = threadIdx.x;
  bool failed = false;
  if (p < SIZE && (senders >> p & 1u) != 0u) failed = !wait_flag(a, t, a.own + stage_flag(a, t, phase, p), p);
  return !block_any(failed);
}

DEVICE Quad pull(const Args& a, u32 p, u64 from, u32 i) {
  return quad_of(HALMA_ORDER_STAGE_LOAD(a.peer[p] + from + 16ull * i));
}

struct Part {
  u32 begin, end;
};
// This block's part of `units` of 16 bytes, none of them at or past `have`.
DEVICE Part part_of(const Turn& t, u32 units, u32 have) {
  u32 blocks = gridDim.x - 1u, length = (units + blocks - 1u) / blocks;
  u32 begin = blockIdx.x * length, end = begin + length;
  if (end > units) end = units;
  return Part{begin < have ? begin : have, end < have ? end : have};
}

DEVICE void stage(const Args& a, const Turn& t, u32 first, Part part) {
  u8* to = a.own + staging_of(a, t);
  if (t.spare) return;
#pragma unroll 1
  for (u32 i = first + part.begin + threadIdx.x; i < first + part.end; i += t.threads)
    HALMA_ORDER_STAGE_STORE(to + 16ull * i, pair_of(load_unit(a.source, i, a.nbytes)));
}

template <int D> DEVICE Quad sum_pulled(const Args& a, const Turn& t, u32 i) {
  Quad data[SIZE], mine = load_unit(a.source, i, a.nbytes);
#pragma unroll
  for (u32 p = 0; p < SIZE; ++p) data[p] = p == rank_of(a) ? mine : pull(a, p, staging_of(a, t), i);
  return sum_units<D, SIZE>(data);
}

template <int D> DEVICE void staged_reduce(const Args& a) {
  Turn t = enter(a, true);
  bool alive = begin_apart(a, t);
  if (blockIdx.x == t.header) return;
  u32 units = units_of(a.nbytes, 16u);
  Part part = part_of(t, units, units);
  if (alive) {
    stage(a, t, 0u, part);
    tell(a, t, PHASE_MESSAGE);
    alive = hear(a, t, PHASE_MESSAGE, others(a));
  }
#pragma unroll 1
  for (u32 i = part.begin + threadIdx.x; alive && !t.spare && i < part.end; i += t.threads)
    store_unit(a.out, i, a.nbytes, sum_pulled<D>(a, t, i), true);
  if (!alive && !t.spare) poison(t, a.out, a.nbytes, true);
  if (time_to_scrub(t)) scrub(a, t, 0u, 0u);
}

// The same part of every shard is staged, so that block b of a peer needs block b's flag alone.
template <int D> DEVICE void staged_two_shot(const Args& a) {
  Turn t = enter(a, true);
  bool alive = begin_apart(a, t);
  if (blockIdx.x == t.header) return;
  u32 units = units_of(a.nbytes, 16u), shard = (units + SIZE - 1u) / SIZE, rank = rank_of(a), own = rank * shard;
  if (alive) {
    for (u32 p = 0; p < SIZE; ++p)
      if (p != rank) stage(a, t, p * shard, part_of(t, shard, units > p * shard ? units - p * shard : 0u));
    tell(a, t, PHASE_MESSAGE);
    alive = hear(a, t, PHASE_MESSAGE, others(a));
  }
  if (alive) {
    Part part = part_of(t, shard, units > own ? units - own : 0u);
#pragma unroll 1
    for (u32 i = part.begin + threadIdx.x; !t.spare && i < part.end; i += t.threads) {
      Quad sum = sum_pulled<D>(a, t, own + i);
      HALMA_ORDER_STAGE_STORE(a.own + sums_of(a, t) + 16ull * i, pair_of(sum));
      store_unit(a.out, own + i, a.nbytes, sum, true);
    }
    tell(a, t, PHASE_SUM);
    alive = hear(a, t, PHASE_SUM, others(a));
  }
#pragma unroll
  for (u32 p = 0; p < SIZE; ++p) {
    Part part = part_of(t, shard, units > p * shard ? units - p * shard : 0u);
#pragma unroll 1
    for (u32 i = part.begin + threadIdx.x; p != rank && alive && !t.spare && i < part.end; i += t.threads)
      store_unit(a.out, p * shard + i, a.nbytes, pull(a, p, sums_of(a, t), i), true);
  }
  if (!alive && !t.spare) poison(t, a.out, a.nbytes, true);
  if (time_to_scrub(t)) scrub(a, t, 0u, 0u);
}

// From rank p the bytes go to out + p * spacing, as they are.
DEVICE void staged_move(const Args& a, u32 senders, u64 spacing) {
  Turn t = enter(a, true);
  bool alive = begin_apart(a, t);
  if (blockIdx.x == t.header) return;
  u32 units = units_of(a.nbytes, 16u), rank = rank_of(a), awaited = senders & others(a);
  bool aligned = (spacing & 15u) == 0u;
  Part part = part_of(t, units, units);
  u8* kept = a.out + rank * spacing;
  if (alive && (senders >> rank & 1u) != 0u) {
    stage(a, t, 0u, part);
    tell(a, t, PHASE_MESSAGE);
#pragma unroll 1
    for (u32 i = part.begin + threadIdx.x; kept != a.source && !t.spare && i < part.end; i += t.threads)
      store_unit(kept, i, a.nbytes, load_unit(a.source, i, a.nbytes), aligned);
  }
  if (alive) alive = hear(a, t, PHASE_MESSAGE, awaited);
#pragma unroll
  for (u32 p = 0; p < SIZE; ++p) {
    if ((senders >> p & 1u) == 0u) continue;
    if (!alive && !t.spare) poison(t, a.out + p * spacing, a.nbytes, aligned);
#pragma unroll 1
    for (u32 i = part.begin + threadIdx.x; p != rank && alive && !t.spare && i < part.end; i += t.threads)
      store_unit(a.out + p * spacing, i, a.nbytes, pull(a, p, staging_of(a, t), i), aligned);
  }
  if (time_to_scrub(t)) scrub(a, t, 0u, 0u);
}

KERNEL all_reduce_staged_bfloat16(PARAMS) { staged_reduce<BF16>(PACKED); }
KERNEL all_reduce_staged_float16(PARAMS) { staged_reduce<F16>(PACKED); }
KERNEL all_reduce_staged_float32(PARAMS) { staged_reduce<F32>(PACKED); }
KERNEL all_reduce_staged_two_shot_bfloat16(PARAMS) { staged_two_shot<BF16>(PACKED); }
KERNEL all_reduce_staged_two_shot_float16(PARAMS) { staged_two_shot<F16>(PACKED); }
KERNEL all_reduce_staged_two_shot_float32(PARAMS) { staged_two_shot<F32>(PACKED); }
KERNEL all_gather_staged(PARAMS) {
  Args a = PACKED;
  staged_move(a, (1u << SIZE) - 1u, a.nbytes);
}
KERNEL broadcast_staged(PARAMS) {
  Args a = PACKED;
  staged_move(a, 1u << root_of(a), 0u);
}
KERNEL barrier_staged(PARAMS) {
  Args a = PACKED;
  Turn t = enter(a);
  if (t.spare) spare_before(a, t);
  block_barrier();
  if (t.spare) spare_after(a, t);
  if (time_to_scrub(t)) scrub(a, t, 0u, 0u);
}
