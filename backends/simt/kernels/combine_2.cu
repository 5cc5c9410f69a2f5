// Combine of many rows, two units a thread at once.
#include "combine_many.h"

COMBINE_MANY(combine_2_bfloat16, BF16, false, 2u, HALMA_COMBINE_2_THREADS)
COMBINE_MANY(combine_2_bfloat16_wide, BF16, true, 2u, HALMA_COMBINE_2_THREADS)
COMBINE_MANY(combine_2_float32, F32, false, 2u, HALMA_COMBINE_2_THREADS)
