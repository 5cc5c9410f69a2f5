// Rounding to e4m3 with one power of two for 128 columns, as halma.ops.quant does, bit for bit.
#pragma once
#include "dialect.h"

// The bits of the power of two, from the largest magnitude: 2^ceil(log2(max(most, 1e-4) / 448)).
DEVICE u32 power_for(float most) {
  float ratio = multiply(most > 1e-4f ? most : 1e-4f, 1.0f / 448.0f);
  return (bits_of(ratio) + 0x7fffffu) & 0x7f800000u;
}
// What values are multiplied by; nought where one of them is an infinity, so that its place, and no other, is a NaN.
DEVICE float inverse_of(u32 power) { return power == 0x7f800000u ? 0.0f : float_of(0x7f000000u - power); }
