// The norm behind an all-reduce of another kind; the same bits as the fused ones.
#include "channel.h"
#define ROW_BARRIER(t) block_barrier()
#include "norm.h"

// `source` is reduced already, or NaN after a fault; the channel is not touched.
template <int D, bool ONE> DEVICE void norm_alone(const Args& a, const Norm& n) {
  grid_wait();  // also a kernel that shares nothing waits: completion is not transitive (C17)
  grid_trigger();
  Turn t;
  t.threads = blockDim.x;
  t.spare = false;
  bool alive = true;
  auto arrive = [](u32, const Quad& mine, bool&) { return mine; };
  u32 turn = 0;
  for (u32 row = blockIdx.x; row < n.rows; row += gridDim.x, ++turn) norm_row<D, ONE>(a, t, n, row, turn, alive, arrive);
}

#define ALONE(dtype, D)                                                                  \
  KERNEL norm_alone_##dtype(NORM_PARAMS) { norm_alone<D, true>(PACKED, NORM_PACKED); }      \
  KERNEL norm_alone_wide_##dtype(NORM_PARAMS) { norm_alone<D, false>(PACKED, NORM_PACKED); }
ALONE(bfloat16, BF16)
ALONE(float16, F16)
ALONE(float32, F32)
