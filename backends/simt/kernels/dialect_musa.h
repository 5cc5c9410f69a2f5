// The dialect's primitives in MUSA spelling; dialect.h alone includes this. No vendor's document says how these names
// behave on a device, so each is one that public code for Moore Threads GPUs uses (tests/compile/musa/names.h has the
// sources), and where only atomics are known to reach memory, atomics it is. There is no inline assembly.
#pragma once

#if defined(__FAST_MATH__)
#error "MUSA: sums, NaN and infinities are written out one by one; build without -ffast-math"
#endif
#if HALMA_DEPENDENT_LAUNCH
#error "MUSA: no known spelling of the grid-dependency wait and trigger"
#endif
#if HALMA_USES_PUSH && HALMA_STORE_ATOMICITY < 4
#error "MUSA: a push needs stores that a peer never sees in part, which nobody has probed for this device (C19)"
#endif
// mp_22 runs 128 threads in lockstep, mp_31 runs 32; a program built for the other is wrong without a sign of it.
#define WIDE_WARP (HALMA_WARP > 32)
#if defined(__MUSA_ARCH__) && (__MUSA_ARCH__ < 220 || (__MUSA_ARCH__ < 310) != WIDE_WARP)
#error "MUSA: HALMA_WARP is not the warp of the architecture that is compiled for (wide before mp_31)"
#endif
#if !defined(HALMA_FP8_CONVERSIONS)
#define HALMA_FP8_CONVERSIONS 0
#endif
#if HALMA_FP8_CONVERSIONS && WIDE_WARP
#error "MUSA: no conversion to fp8 before mp_31"
#endif

// ---------------------------------------------------------------------------------------------- memory
DEVICE void grid_wait() {}     // the device starts a kernel after the one before it has ended
DEVICE void grid_trigger() {}
DEVICE void fence_system() { __threadfence_system(); }

// Relaxed: an access of its own. Nothing says that it passes the first-level cache: what may be there from before goes
// by _fresh(), and what a peer awaits by _sent().
#if WIDE_WARP
template <typename T> DEVICE T look(const void* from) { return *static_cast<const volatile T*>(from); }
template <typename T> DEVICE void put(void* to, T value) { *static_cast<volatile T*>(to) = value; }
#else
template <typename T> DEVICE T look(const void* from) { return volatile_load(static_cast<T*>(const_cast<void*>(from))); }
template <typename T> DEVICE void put(void* to, T value) { volatile_store(value, static_cast<T*>(to)); }
#endif
DEVICE u32 load4_relaxed(const void* from) { return look<u32>(from); }
DEVICE u64 load8_relaxed(const void* from) { return look<u64>(from); }
DEVICE void store4_relaxed(void* to, u32 value) { put(to, value); }
DEVICE void store8_relaxed(void* to, u64 value) { put(to, value); }
DEVICE Pair load16_relaxed(const void* from) {
  return Pair{look<u64>(from), look<u64>(static_cast<const u64*>(from) + 1)};
}
DEVICE void store16_relaxed(void* to, Pair value) {
  put(to, value.low);
  put(static_cast<u64*>(to) + 1, value.high);
}

DEVICE u32 exchange4(void* to, u32 value) { return atomicExch(static_cast<u32*>(to), value); }
DEVICE u32 compare_exchange4(void* to, u32 expected, u32 value) {
  return atomicCAS(static_cast<u32*>(to), expected, value);
}
// A read that no cache can serve: an atomic at the memory itself.
DEVICE u32 load4_acquire(const void* from) {
  u32 value = atomicAdd(static_cast<u32*>(const_cast<void*>(from)), 0u);
  __threadfence_system();
  return value;
}
DEVICE void store4_release(void* to, u32 value) {
  __threadfence_system();
  atomicExch(static_cast<u32*>(to), value);
}

#if WIDE_WARP
// Nobody is known to pass the cache otherwise here: a comparison that changes nothing; and a fence behind the store.
DEVICE u64 load8_fresh(const void* from) { return atomicCAS(static_cast<u64*>(const_cast<void*>(from)), 0ull, 0ull); }
DEVICE Pair load16_fresh(const void* from) {
  return Pair{load8_fresh(from), load8_fresh(static_cast<const u64*>(from) + 1)};
}
DEVICE void store8_sent(void* to, u64 value) {
  store8_relaxed(to, value);
  __threadfence_system();
}
DEVICE void store16_sent(void* to, Pair value) {
  store16_relaxed(to, value);
  __threadfence_system();
}
#else
DEVICE u64 load8_fresh(const void* from) {
  flushInv_byp();
  return load8_relaxed(from);
}
DEVICE Pair load16_fresh(const void* from) {
  flushInv_byp();
  return load16_relaxed(from);
}
DEVICE void store8_sent(void* to, u64 value) { store8_relaxed(to, value); }
DEVICE void store16_sent(void* to, Pair value) { store16_relaxed(to, value); }
#endif
#if HALMA_USES_PUSH
// Ordinary loads, where `wanted`, else 0.
DEVICE u64 load8_now(const void* from, bool wanted) { return wanted ? *static_cast<const u64*>(from) : 0u; }
DEVICE Pair load16_now(const void* from, bool wanted) {
  return wanted ? *static_cast<const Pair*>(from) : Pair{0u, 0u};
}
DEVICE void settle_address(u8*&) {}  // a hint
DEVICE void settle_address(const u8*&) {}
#endif

// ------------------------------------------------------------------------------------- warps and blocks
// The value of the lane whose number differs in the bits of `mask`; every lane that is read takes part.
#if WIDE_WARP
DEVICE u32 shuffle_xor(u32 value, u32 mask) {
  const int SEGMENT = static_cast<int>((~(HALMA_WARP - 1u) & 0x7fu) << 7 | (HALMA_WARP - 1u));
  return static_cast<u32>(__musa_shfl_xor_sync_i32(static_cast<int>(value), static_cast<int>(mask), SEGMENT));
}
#else
#define ALL_LANES (static_cast<u32>((1ull << HALMA_WARP) - 1))
DEVICE u32 shuffle_xor(u32 value, u32 mask) {
  return __shfl_xor_sync(ALL_LANES, value, static_cast<int>(mask), static_cast<int>(HALMA_WARP));
}
#endif
DEVICE float shuffle_xor(float value, u32 mask) { return float_of(shuffle_xor(bits_of(value), mask)); }
#if WIDE_WARP
// No public code asks for a lane by its number on so wide a warp: every lane's value comes by, the wanted one is kept.
DEVICE u32 shuffle_from(u32 value, u32 from) {
  u32 lane = threadIdx.x % HALMA_WARP, found = value;
#pragma unroll 4
  for (u32 mask = 1u; mask < HALMA_WARP; ++mask) {
    u32 theirs = shuffle_xor(value, mask);
    if ((lane ^ mask) == from) found = theirs;
  }
  return found;
}
#else
DEVICE u32 shuffle_from(u32 value, u32 from) {
  return __shfl_sync(ALL_LANES, value, static_cast<int>(from), static_cast<int>(HALMA_WARP));
}
#endif
DEVICE Alike warp_alike(u32 mine) {
  u32 lane = threadIdx.x % HALMA_WARP;
  Alike found{0u, 1u};
#pragma unroll 4
  for (u32 mask = 1u; mask < HALMA_WARP; ++mask) {
    u32 same = shuffle_xor(mine, mask) == mine ? 1u : 0u;
    found.all += same;
    if ((lane ^ mask) < lane) found.before += same;
  }
  return found;
}
DEVICE void warp_barrier() { __syncwarp(); }
DEVICE void block_barrier() { __syncthreads(); }
DEVICE bool block_any(bool mine) {
  __shared__ u32 any;
  if (threadIdx.x == 0) any = 0u;
  __syncthreads();
  if (mine) any = 1u;
  __syncthreads();
  bool found = any != 0u;
  __syncthreads();
  return found;
}
DEVICE u32 add_shared(u32* to, u32 value) { return atomicAdd(to, value); }

#if HALMA_USES_PUSH
DEVICE u32 warp_or(u32 mine) {
#pragma unroll
  for (u32 mask = HALMA_WARP / 2u; mask != 0u; mask /= 2u) mine |= shuffle_xor(mine, mask);
  return mine;
}
// Of a word that is not 0, one with few bits: no name for it is public.
DEVICE u32 lowest_bit(u32 word) {
  u32 at = 0u;
  while ((word >> at & 1u) == 0u) ++at;
  return at;
}
// Barriers 1 and 2 of dialect.h as counts in shared memory, by the first lane of each warp: warps go on by themselves,
// lanes need not. Every thread of the block begins them once, before any other barrier.
#define HALMA_SOFT_BARRIERS 1
struct Counts { u32 arrived, among; };
DEVICE Counts* barrier_counts() {
  __shared__ Counts counts;
  return &counts;
}
DEVICE void barriers_begin() {
  if (threadIdx.x == 0u) *barrier_counts() = Counts{0u, 0u};
  __syncthreads();
}
DEVICE void await_count(u32* count, u32 goal) {
  while (static_cast<int>(atomicAdd(count, 0u) - goal) < 0) {
  }
}
DEVICE void barrier_arrive(u32) {
  __syncwarp();
  if (threadIdx.x % HALMA_WARP != 0u) return;
  __threadfence_block();
  atomicAdd(&barrier_counts()->arrived, 1u);
}
// By the one warp that waits: once in a kernel.
DEVICE void barrier_await(u32 threads) {
  if (threadIdx.x % HALMA_WARP == 0u) await_count(&barrier_counts()->arrived, threads / HALMA_WARP - 1u);
  __threadfence_block();
  __syncwarp();
}
DEVICE void barrier_among(u32 threads) {
  __syncwarp();
  if (threadIdx.x % HALMA_WARP == 0u) {
    u32 warps = threads / HALMA_WARP;
    __threadfence_block();
    u32 before = atomicAdd(&barrier_counts()->among, 1u);
    await_count(&barrier_counts()->among, (before / warps + 1u) * warps);
  }
  __threadfence_block();
  __syncwarp();
}
#endif

#if defined(HALMA_CLOCK_KHZ)
DEVICE u64 clock_ns() { return static_cast<u64>(clock64()) * 1000000ull / HALMA_CLOCK_KHZ; }
#endif

// ---------------------------------------------------------------------------------------------- numbers
// The compiler is clang: products and sums that are written apart stay apart.
#if defined(__clang__)
#define UNFUSED _Pragma("clang fp contract(off)")
#else
#define UNFUSED
#endif
DEVICE float multiply(float a, float b) {
  UNFUSED
  return a * b;
}
DEVICE float add(float a, float b) {
  UNFUSED
  return a + b;
}
DEVICE float divide(float a, float b) { return a / b; }
DEVICE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float reciprocal_root(float value) { return 1.0f / sqrtf(value); }
DEVICE float reciprocal(float value) { return 1.0f / value; }
DEVICE float exponential(float value) { return __expf(value); }  // to a few units in the last place

// bf16 and fp16 by their bits: to nearest even, NaN is 0x7fff, on every architecture and with no header of the vendor's.
DEVICE u32 round_bf16(float value) {
  u32 bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
DEVICE u32 pack_bf16(float low, float high) { return round_bf16(low) | (round_bf16(high) << 16); }
DEVICE u32 round_f16(float value) {
  u32 bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65,520 and more
  if (magnitude < 0x38800000u)                          // under 2^-14: steps of 2^-24, by the adder's own rounding
    return sign | (bits_of(add(float_of(magnitude), 0.5f)) & 0x7ffu);
  return sign | (((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10));
}
DEVICE u32 pack_f16(float low, float high) { return round_f16(low) | (round_f16(high) << 16); }
DEVICE float f16_to_float(u16 half) {
  u32 sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 0x1fu, fraction = half & 0x3ffu;
  if (exponent == 0u) return float_of(sign | bits_of(static_cast<float>(fraction) * 5.9604644775390625e-8f));  // 2^-24
  if (exponent == 0x1fu) return float_of(sign | 0x7f800000u | fraction << 13);
  return float_of(sign | (((exponent + 112u) << 23) | fraction << 13));
}

#if HALMA_FP8_CONVERSIONS
#include <musa_fp8.h>
#define HALMA_NATIVE_FP8 1
// What is beyond the largest, and NaN, by bits: nothing says what the constructor does with them.
DEVICE u32 native_e4m3(float value) {
  u32 bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;
  if (magnitude >= 0x43e00000u) return ((bits >> 24) & 0x80u) | 0x7eu;
  return __mt_fp8_e4m3(value).__x;
}
#endif
