// Codes of e2m1 as fp16 numbers. With its sign at bit 15 and its other bits at 11 .. 9 a code is 2^-14 of its value.
#pragma once
#include "matrix.h"

// Eight codes of a word: columns 0 4, 2 6 for one product (a[0], a[1]) and 1 5, 3 7 for the other (a[2], a[3]). Eleven
// instructions, of which multipliers do the four shifts to the left.
DEVICE void decode(u32 word, u32* a) {
  const u32 even = choose_bits(word << 4, word << 1, 0x80808080u), odd = choose_bits(word, word >> 3, 0x80808080u);
  a[0] = even << 8 & 0x8e008e00u, a[1] = even & 0x8e008e00u;
  a[2] = odd << 8 & 0x8e008e00u, a[3] = odd & 0x8e008e00u;
}
