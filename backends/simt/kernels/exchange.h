// Dispatch and combine among ranks with experts of their own, in two calls that alternate (docs/exchange.md).
//
// Dispatch: token t of rank r goes to row r * max_tokens + t of the landing area of each rank that has one of its
// experts, in pieces with a flag behind each; its choices go ahead to everybody as {data, flag} words, and how many
// tokens there are is in the header word. The last blocks sort the choices by expert while rows arrive.
// Combine: a rank adds up a token's slots in the order of the choices and sends the rounded sum back with a sentinel;
// the source adds ranks in rank order. One buffer a direction is enough, because the calls alternate: whoever sends
// into a lane again has ended the call in between, which every rank began after it had read the lane.
#pragma once
#define HALMA_USES_PUSH 1
#include "push.h"

enum Stage { STAGE_CHOICES = 16, STAGE_ROWS = 17, STAGE_BACK = 18 };
#define PARTS HALMA_EXCHANGE_PARTS
#define MOST_LOCAL HALMA_EXCHANGE_LOCAL
#define SORTERS HALMA_EXCHANGE_SORTERS
#define MOST_WARPS (512u / HALMA_WARP)
#define NOBODY (~0u)  // an expert that is none
#define GROUP 128u    // columns that share a scale
#define E4M3_LIMIT 448.0f
#define E4M3_FLOOR 1e-4f
#define AT_ONCE 4u  // choices that a thread has under way while it sorts
