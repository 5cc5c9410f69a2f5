// Combine of many rows, four units a thread at once.
#include "combine_many.h"

COMBINE_MANY(combine_4_bfloat16, BF16, false, 4u, HALMA_COMBINE_4_THREADS)
COMBINE_MANY(combine_4_bfloat16_wide, BF16, true, 4u, HALMA_COMBINE_4_THREADS)
COMBINE_MANY(combine_4_float32, F32, false, 4u, HALMA_COMBINE_4_THREADS)
