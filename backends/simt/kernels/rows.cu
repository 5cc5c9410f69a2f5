// Small products and elementwise work on the rows of a decode step, in the dialect's primitives alone: no shuffle, no
// fragment, no warp width, so that every device of the dialect has them.
//
// gemv: x [M][G * K] bf16 times a weight [G * N][K] of e4m3 in blocks of 128 x 128 with e8m0 scales -> out [M][G * N], in
// place. A block has BN rows of the weight, each read by BK threads, 16 bytes at a time; products and sums in fp32, in an
// order that depends on K and the tile alone, so that a row's bits do not depend on the rows beside it (K7).
// gemv_codes: the same of x that was rounded before, codes and a scale for 128 columns: the products have the same factors.
#include "dialect.h"
#include "rounding.h"

#define KERNEL extern "C" __global__ void __launch_bounds__(128)
#define THREADS 128u
#define BLOCK 128u
#define UNIT 16u  // columns a thread takes at a time
#define MOST_ROWS 8u

struct Units { Quad low, high; };  // 16 bf16

// ------------------------------------------------------------------------------------------------ numbers
// e4m3 has the exponent and mantissa of an fp16 number 2^8 times smaller, subnormal ones included.
DEVICE float from_e4m3(u32 code) {
  u16 half = static_cast<u16>((code & 0x80u) << 8 | (code & 0x7fu) << 7);
  return (code & 0x7fu) == 0x7fu ? float_of(0x7fc00000u) : multiply(f16_to_float(half), 256.0f);
}
// e8m0: the exponent field itself; 0 is 2^-127, 255 a NaN.
DEVICE float from_e8m0(u32 code) {
  return float_of(code == 0u ? 0x00400000u : code == 255u ? 0x7fc00000u : code << 23);
}
DEVICE u32 half_of(const Units& units, u32 column) {
  u32 word = column < 8u ? units.low.word[column / 2u] : units.high.word[column / 2u - 4u];
  return column % 2u ? word >> 16 : word & 0xffffu;
}

// ------------------------------------------------------------------------------------------------ products
struct Product {
  const u8 *weight, *scales;
  const u8* x;
  const float* x_scales;  // of codes: [M][K / 128]
  u8* out;
  u32 n, k, groups, rows;  // n rows of the weight a group
  bool wide;               // out is fp32, else bf16
};

// 16 columns of a row of x: of codes, times their scale, what bf16 would hold exactly.
template <bool CODES> DEVICE void load_x(const Product& p, u64 row, u64 at, u32 column, float* value) {
  if (CODES) {
    Quad codes = *reinterpret_cast<const Quad*>(p.x + at);
    float scale = p.x_scales[row * (p.k / BLOCK) + column / BLOCK];
#pragma unroll
    for (u32 i = 0; i < UNIT; ++i) value[i] = multiply(from_e4m3(codes.word[i / 4u] >> 8u * (i % 4u) & 0xffu), scale);
  } else {
    Units units = *reinterpret_cast<const Units*>(p.x + 2u * at);
#pragma unroll
    for (u32 i = 0; i < UNIT; ++i) value[i] = bf16_to_float(half_of(units, i));
  }
}

template <u32 BN, u32 BK, u32 ROWS, bool CODES> DEVICE void gemv_rows(const Product& p, u32 first, float (*parts)[THREADS]) {
  const u32 thread = threadIdx.x, lane = thread % BK, line = blockIdx.x * BN + thread / BK;
  const u32 group = line / p.n, bands = (p.k + BLOCK - 1u) / BLOCK;
  const u8* scales = p.scales + static_cast<u64>(line / BLOCK) * bands;
  float sum[ROWS];
#pragma unroll
  for (u32 m = 0; m < ROWS; ++m) sum[m] = 0.0f;
  if (line < p.n * p.groups) {
    const u8* weight = p.weight + static_cast<u64>(line) * p.k;
    const u64 stride = static_cast<u64>(p.groups) * p.k;
    const u64 start = first * stride + static_cast<u64>(group) * p.k;
    for (u32 column = lane * UNIT; column < p.k; column += BK * UNIT) {
      Quad codes = *reinterpret_cast<const Quad*>(weight + column);
      float scale = from_e8m0(scales[column / BLOCK]), value[UNIT];
#pragma unroll
      for (u32 i = 0; i < UNIT; ++i) value[i] = multiply(from_e4m3(codes.word[i / 4u] >> 8u * (i % 4u) & 0xffu), scale);
#pragma unroll
      for (u32 m = 0; m < ROWS; ++m) {
        float with[UNIT];
        load_x<CODES>(p, first + m, start + m * stride + column, column, with);
#pragma unroll
        for (u32 i = 0; i < UNIT; ++i) sum[m] = multiply_add(value[i], with[i], sum[m]);
      }
    }
  }
#pragma unroll
  for (u32 m = 0; m < ROWS; ++m) parts[m][thread] = sum[m];
  block_barrier();
  for (u32 i = thread; i < BN * ROWS; i += THREADS) {  // the threads of a row of the weight, in their order
    u32 m = i / BN, row = i % BN, to = blockIdx.x * BN + row;
    float total = parts[m][row * BK];
    for (u32 other = 1u; other < BK; ++other) total = add(total, parts[m][row * BK + other]);
    u64 place = static_cast<u64>(first + m) * p.n * p.groups + to;
    if (to >= p.n * p.groups) continue;
    if (p.wide) reinterpret_cast<float*>(p.out)[place] = total;
    else reinterpret_cast<u16*>(p.out)[place] = static_cast<u16>(pack_bf16(total, 0.0f));
  }
  block_barrier();
}

template <u32 BN, bool CODES> DEVICE void gemv_all(const Product& p) {
  const u32 BK = THREADS / BN;
  __shared__ float parts[MOST_ROWS][THREADS];
  u32 first = 0u;
  if (CODES) {  // decoding x is most of the work, which more rows at a time would not save
    for (; first + 4u <= p.rows; first += 4u) gemv_rows<BN, BK, 4u, true>(p, first, parts);
    for (; first < p.rows; ++first) gemv_rows<BN, BK, 1u, true>(p, first, parts);
    return;
  }
  for (; first + 8u <= p.rows; first += 8u) gemv_rows<BN, BK, 8u, false>(p, first, parts);
  for (; first + 2u <= p.rows; first += 2u) gemv_rows<BN, BK, 2u, false>(p, first, parts);
  if (first < p.rows) gemv_rows<BN, BK, 1u, false>(p, first, parts);
}

// shape: n | k << 32; count: rows | groups << 32; wide: of the result.
#define GEMV(name, BN)                                                                                               \
  KERNEL gemv_##name(u64 weight, u64 scales, u64 x, u64 out, u64 shape, u64 count, u64 wide) {                         \
    grid_wait();                                                                                                       \
    grid_trigger();                                                                                                    \
    gemv_all<BN, false>(Product{(const u8*)weight, (const u8*)scales, (const u8*)x, nullptr, (u8*)out,                 \
                                static_cast<u32>(shape), static_cast<u32>(shape >> 32),                                \
                                static_cast<u32>(count >> 32), static_cast<u32>(count), wide != 0u});                  \
  }                                                                                                                    \
  KERNEL gemv_codes_##name(u64 weight, u64 scales, u64 x, u64 x_scales, u64 out, u64 shape, u64 rows, u64 wide) {      \
    grid_wait();                                                                                                       \
    grid_trigger();                                                                                                    \
    gemv_all<BN, true>(Product{(const u8*)weight, (const u8*)scales, (const u8*)x, (const float*)x_scales, (u8*)out,   \
                               static_cast<u32>(shape), static_cast<u32>(shape >> 32), 1u, static_cast<u32>(rows),     \
                               wide != 0u});                                                                           \
  }
GEMV(4x32, 4u)
GEMV(8x16, 8u)
GEMV(16x8, 16u)
GEMV(32x4, THREADS / 4u)

// ------------------------------------------------------------------------------------------------ rounding
template <bool WIDE> DEVICE void load_unit(const u8* from, float* value) {
  if (WIDE) {
#pragma unroll
    for (u32 q = 0; q < 4u; ++q) {
      Quad four = reinterpret_cast<const Quad*>(from)[q];
#pragma unroll
      for (u32 i = 0; i < 4u; ++i) value[4u * q + i] = float_of(four.word[i]);
    }
  } else {
    Units units = *reinterpret_cast<const Units*>(from);
#pragma unroll
    for (u32 i = 0; i < UNIT; ++i) value[i] = bf16_to_float(half_of(units, i));
  }
}

// The bits of the scale of a group of 128 columns, of which eight threads hold 16 each; `real` where there is a group.
// Every thread of the block comes, and again before the next group: `most` is of all its threads.
DEVICE u32 power_of_group(const float* value, bool real, float* most) {
  const u32 each = BLOCK / UNIT, thread = threadIdx.x;
  float largest = 0.0f;
  if (real) {
#pragma unroll
    for (u32 i = 0; i < UNIT; ++i) {
      float size = value[i] < 0.0f ? -value[i] : value[i];
      largest = size > largest ? size : largest;
    }
  }
  most[thread] = largest;
  block_barrier();
  for (u32 other = thread / each * each; other < (thread / each + 1u) * each; ++other)
    largest = most[other] > largest ? most[other] : largest;
  block_barrier();
  return power_for(largest);
}

// x [count][128] -> bf16: to e4m3 with one power of two for 128 columns, which bf16 holds exactly. Eight threads a group.
template <bool WIDE> DEVICE void round_groups(const u8* x, u8* out, u32 count) {
  __shared__ float most[THREADS];
  const u32 each = BLOCK / UNIT, thread = threadIdx.x;
  for (u32 base = blockIdx.x * (THREADS / each); base < count; base += gridDim.x * (THREADS / each)) {
    u32 group = base + thread / each;
    float value[UNIT];
    u64 at = static_cast<u64>(group) * BLOCK + thread % each * UNIT;
    if (group < count) load_unit<WIDE>(x + at * (WIDE ? 4u : 2u), value);
    u32 power = power_of_group(value, group < count, most);
    if (group < count) {
      float inverse = inverse_of(power), scale = float_of(power);
      u32 word[8];
#pragma unroll
      for (u32 i = 0; i < UNIT; i += 2u)
        word[i / 2u] = pack_bf16(multiply(from_e4m3(to_e4m3(multiply(value[i], inverse))), scale),
                                 multiply(from_e4m3(to_e4m3(multiply(value[i + 1u], inverse))), scale));
      *reinterpret_cast<Units*>(out + 2u * at) =
          Units{{{word[0], word[1], word[2], word[3]}}, {{word[4], word[5], word[6], word[7]}}};
    }
  }
}
#define ROUND(name, WIDE)                                       \
  KERNEL quantise_##name(u64 x, u64 out, u64 count) {            \
    grid_wait();                                                 \
    grid_trigger();                                              \
    round_groups<WIDE>((const u8*)x, (u8*)out, static_cast<u32>(count)); \
  }
ROUND(bfloat16, false)
ROUND(float32, true)

// ------------------------------------------------------------------------------------------------ SwiGLU
// gate and up [rows][2 * inner], gate first: silu(min(gate, limit)) * clamp(up, -limit, limit), one rounding at the end.
// Comparisons keep a NaN: it is neither above nor below.
DEVICE float gated(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return multiply(divide(gate, add(exponential(-gate), 1.0f)), up);
}
DEVICE void swiglu_rows_bfloat16(const u16* x, u16* out, u32 inner, u64 count, float limit) {
  for (u64 i = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += static_cast<u64>(gridDim.x) * THREADS) {
    u64 row = i / inner, column = i % inner, at = row * 2u * inner + column;
    out[i] = static_cast<u16>(pack_bf16(gated(bf16_to_float(x[at]), bf16_to_float(x[at + inner]), limit), 0.0f));
  }
}
KERNEL swiglu_bfloat16(u64 x, u64 out, u64 inner, u64 rows, u64 limit) {
  grid_wait();
  grid_trigger();
  swiglu_rows_bfloat16((const u16*)x, (u16*)out, static_cast<u32>(inner), inner * rows, float_of(static_cast<u32>(limit)));
}

// The same, rounded once to the dtype of x and then to e4m3: codes [rows][inner] and fp32 scales [rows][inner / 128], a row's
// beside one another. Eight threads a group of 128 columns.
template <bool HALF> DEVICE float from_16(u32 bits) { return HALF ? f16_to_float(static_cast<u16>(bits)) : bf16_to_float(bits); }
template <bool HALF> DEVICE float once_16(float value) {
  return from_16<HALF>((HALF ? pack_f16(value, 0.0f) : pack_bf16(value, 0.0f)) & 0xffffu);
}
template <bool HALF> DEVICE void swiglu_groups(const u8* x, u8* codes, float* scales, u32 inner, u32 rows, float limit) {
  __shared__ float most[THREADS];
  const u32 each = BLOCK / UNIT, thread = threadIdx.x, across = inner / BLOCK, count = rows * across;
  for (u32 base = blockIdx.x * (THREADS / each); base < count; base += gridDim.x * (THREADS / each)) {
    u32 group = base + thread / each, row = group / across, column = group % across * BLOCK + thread % each * UNIT;
    float value[UNIT];
    if (group < count) {
      u64 at = static_cast<u64>(row) * 2u * inner + column;
      Units gate = *reinterpret_cast<const Units*>(x + 2u * at), up = *reinterpret_cast<const Units*>(x + 2u * (at + inner));
#pragma unroll
      for (u32 i = 0; i < UNIT; ++i)
        value[i] = once_16<HALF>(gated(from_16<HALF>(half_of(gate, i)), from_16<HALF>(half_of(up, i)), limit));
    }
    u32 power = power_of_group(value, group < count, most);
    if (group < count) {
      float inverse = inverse_of(power);
      u32 word[4] = {0u, 0u, 0u, 0u};
#pragma unroll
      for (u32 i = 0; i < UNIT; ++i) word[i / 4u] |= to_e4m3(multiply(value[i], inverse)) << 8u * (i % 4u);
      *reinterpret_cast<Quad*>(codes + static_cast<u64>(row) * inner + column) = Quad{{word[0], word[1], word[2], word[3]}};
      if (thread % each == 0u) scales[group] = float_of(power);
    }
  }
}
#define SWIGLU_FP8(name, HALF)                                                                                         \
  KERNEL swiglu_fp8_##name(u64 x, u64 codes, u64 scales, u64 inner, u64 rows, u64 limit) {                              \
    grid_wait();                                                                                                       \
    grid_trigger();                                                                                                    \
    swiglu_groups<HALF>((const u8*)x, (u8*)codes, (float*)scales, static_cast<u32>(inner), static_cast<u32>(rows),      \
                        float_of(static_cast<u32>(limit)));                                                            \
  }
SWIGLU_FP8(bfloat16, false)
SWIGLU_FP8(float16, true)

// ------------------------------------------------------------------------------------------------ rotation
// x [rows][heads][width] bf16 in place: the last 2 * pairs channels, as pairs, by angles [rows][pairs][2]. A block has as many
// pairs as threads, of any head: nothing is done one after another.
KERNEL rotate_bfloat16(u64 x, u64 angles, u64 shape, u64 count, u64 inverse) {
  grid_wait();
  grid_trigger();
  const u32 heads = static_cast<u32>(shape), width = static_cast<u32>(shape >> 32);
  const u32 rows = static_cast<u32>(count), pairs = static_cast<u32>(count >> 32);
  const u64 total = static_cast<u64>(rows) * heads * pairs;
  for (u64 i = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x; i < total; i += static_cast<u64>(gridDim.x) * THREADS) {
    u64 head = i / pairs, pair = i % pairs, row = head / heads;
    const float* turn = reinterpret_cast<const float*>(angles) + 2u * (row * pairs + pair);
    u32* at = reinterpret_cast<u32*>(x) + ((head + 1u) * width - 2u * pairs) / 2u + pair;
    float a = bf16_to_float(*at & 0xffffu), b = bf16_to_float(*at >> 16), c = turn[0], s = inverse ? -turn[1] : turn[1];
    *at = pack_bf16(add(multiply(a, c), -multiply(b, s)), add(multiply(a, s), multiply(b, c)));
  }
}
