// Pieces of payload: units of 16 and 8 bytes, with tails and messages that do not begin on their boundary.
#pragma once
#include "channel.h"

DEVICE u32 units_of(u64 nbytes, u32 unit) { return static_cast<u32>((nbytes + unit - 1u) / unit); }

// The last unit of a message, or one that lies across: rare, and out of line so that it costs the others nothing.
static __device__ __noinline__ Pair load_bytes(const u8* from, u32 count) {
  u64 half[2] = {0u, 0u};
  for (u32 k = 0; k < count; ++k) half[k >> 3] |= static_cast<u64>(from[k]) << (8u * (k & 7u));
  return Pair{half[0], half[1]};
}
static __device__ __noinline__ void store_bytes(u8* to, u64 low, u64 high, u32 count) {
  for (u32 k = 0; k < count; ++k) to[k] = static_cast<u8>((k < 8u ? low : high) >> (8u * (k & 7u)));
}

DEVICE Quad quad_of(Pair pair) {
  return Quad{{static_cast<u32>(pair.low), static_cast<u32>(pair.low >> 32), static_cast<u32>(pair.high),
               static_cast<u32>(pair.high >> 32)}};
}
DEVICE Pair pair_of(const Quad& quad) {
  return Pair{quad.word[0] | static_cast<u64>(quad.word[1]) << 32, quad.word[2] | static_cast<u64>(quad.word[3]) << 32};
}

DEVICE u32 bytes_left(u64 at, u64 nbytes, u32 most) {
  u64 left = at < nbytes ? nbytes - at : 0u;
  return left < most ? static_cast<u32>(left) : most;
}

// Bytes [16 i, 16 i + 16) of a message; missing bytes of the last unit are zero.
DEVICE Quad load_unit(const u8* from, u32 i, u64 nbytes) {
  u64 at = 16ull * i;
  if (!RARE(at + 16u > nbytes)) return *reinterpret_cast<const Quad*>(from + at);
  return quad_of(load_bytes(from + at, bytes_left(at, nbytes, 16u)));
}
DEVICE void store_unit(u8* to, u32 i, u64 nbytes, const Quad& unit, bool aligned) {
  u64 at = 16ull * i;
  if (!RARE(!aligned || at + 16u > nbytes)) {
    *reinterpret_cast<Quad*>(to + at) = unit;
  } else {
    store_bytes(to + at, pair_of(unit).low, pair_of(unit).high, bytes_left(at, nbytes, 16u));
  }
}
// The same in units of 8 bytes.
DEVICE u64 load_half(const u8* from, u32 i, u64 nbytes) {
  u64 at = 8ull * i;
  if (!RARE(at + 8u > nbytes)) return *reinterpret_cast<const u64*>(from + at);
  return load_bytes(from + at, bytes_left(at, nbytes, 8u)).low;
}
DEVICE void store_half(u8* to, u32 i, u64 nbytes, u64 half, bool aligned) {
  u64 at = 8ull * i;
  if (!RARE(!aligned || at + 8u > nbytes)) {
    *reinterpret_cast<u64*>(to + at) = half;
  } else {
    store_bytes(to + at, half, 0u, bytes_left(at, nbytes, 8u));
  }
}

// After a fault every output is NaN in every type: all ones.
#define POISON Quad{{~0u, ~0u, ~0u, ~0u}}
static __device__ __noinline__ void poison_from(u8* out, u64 nbytes, u32 first, u32 stride, bool aligned) {
  u32 units = units_of(nbytes, 16u);
  for (u32 i = first; i < units; i += stride) store_unit(out, i, nbytes, POISON, aligned);
}
DEVICE void poison(const Turn& t, u8* out, u64 nbytes, bool aligned) {
  poison_from(out, nbytes, t.first, t.stride, aligned);
}
#if HALMA_USES_PUSH
// A call that finds a fault already there.
DEVICE void give_up(const Args& a, const Turn& t) {
  epoch_read();
  poison(t, a.out, a.nbytes, true);
}
#endif
