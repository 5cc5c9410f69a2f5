// The two products of the routed experts for e2m1 weights (one power of two for 32 columns of a row); tokens lie in
// shared memory as fp16 in the order of the fragments, and a block rounds them to e4m3 itself where they are not.
//   up:    h[slot] = swiglu(w1 . x, w3 . x) * factor[slot]
//   down:  out[slot] = w2 . h[slot]
//   thin   some tokens: experts_fp4_thin.h; `few`: up to 8 pairs, which blocks lay out and add up themselves
//   wide   experts_fp4_wide.h
// Items (some rows, a pass of an expert's tokens) are numbered in the order expert, pass, rows, and a block has a range of
// them: it seldom changes its tokens.
#include "experts_fp4_thin.h"
#include "experts_fp4_wide.h"

#define EXPERTS(name, WARPS, RESIDENT, WALK)                                                                         \
  extern "C" __global__ void __launch_bounds__(WARPS* HALMA_WARP, RESIDENT) name(JOB_PARAMS) {                         \
    extern __shared__ __align__(128) u8 memory[];                                                                      \
    __shared__ Lists lists;                                                                                            \
    __shared__ Few few;                                                                                                \
    WALK;                                                                                                              \
  }
EXPERTS(up_thin, SLICES, 2, (walk_thin<false, false, 4u>(JOB, memory, lists, few)))
EXPERTS(down_thin, SLICES, 2, (walk_thin<true, false, 2u>(JOB, memory, lists, few)))
EXPERTS(up_few, SLICES, 2, (walk_thin<false, true, 4u>(JOB, memory, lists, few)))
EXPERTS(down_few, SLICES, 2, (walk_thin<true, true, 2u>(JOB, memory, lists, few)))
EXPERTS(up_wide, WIDE_WARPS, 1, (walk_wide<false>(JOB, memory, lists)))
EXPERTS(down_wide, WIDE_WARPS, 1, (walk_wide<true>(JOB, memory, lists)))
