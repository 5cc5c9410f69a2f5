// A stand-in for a device on the host: the threads of a block are fibers, blocks run one after another. What the MUSA
// spelling of the dialect calls is defined here; that says nothing of a real device's memory order.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __shared__ static

struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim, gridDim;

static ucontext_t scheduler, fibers[1024];
static bool finished[1024];
static char* stacks = 0;
static void (*body)(const unsigned long long*);
static const unsigned long long* arguments;
static const unsigned long STACK = 65536;

static void fiber() {
  unsigned me = threadIdx.x;
  body(arguments);
  finished[me] = true;
  swapcontext(&fibers[me], &scheduler);
}
static inline void __syncthreads() {
  unsigned me = threadIdx.x;
  swapcontext(&fibers[me], &scheduler);
}
static inline void __syncwarp(unsigned) {}
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline unsigned atomicExch(unsigned* to, unsigned value) { return __atomic_exchange_n(to, value, __ATOMIC_SEQ_CST); }
static inline unsigned atomicAdd(unsigned* to, unsigned value) { return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST); }
static inline unsigned atomicCAS(unsigned* to, unsigned expected, unsigned value) {
  __atomic_compare_exchange_n(to, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
static inline long long clock64() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}
template <typename T> static inline T __shfl_xor_sync(unsigned, T, unsigned, unsigned) { abort(); }
static inline unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
static inline float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static inline float __expf(float a) { return __builtin_expf(a); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline unsigned short __half_as_ushort(_Float16 half) { unsigned short bits; memcpy(&bits, &half, 2); return bits; }
static inline _Float16 __ushort_as_half(unsigned short bits) { _Float16 half; memcpy(&half, &bits, 2); return half; }
static inline _Float16 __float2half_rn(float value) { return (_Float16)value; }
static inline float __half2float(_Float16 half) { return (float)half; }

static void run_grid(void (*entry)(const unsigned long long*), unsigned grid, unsigned block, const unsigned long long* args) {
  if (!stacks) stacks = (char*)malloc(1024 * STACK);
  body = entry, arguments = args, gridDim.x = grid, blockDim.x = block;
  for (unsigned b = 0; b < grid; ++b) {
    blockIdx.x = b;
    for (unsigned t = 0; t < block; ++t) {
      finished[t] = false;
      getcontext(&fibers[t]);
      fibers[t].uc_stack.ss_sp = stacks + t * STACK, fibers[t].uc_stack.ss_size = STACK, fibers[t].uc_link = 0;
      makecontext(&fibers[t], fiber, 0);
    }
    for (bool alive = true; alive;) {
      alive = false;
      for (unsigned t = 0; t < block; ++t) {
        if (finished[t]) continue;
        threadIdx.x = t;
        swapcontext(&scheduler, &fibers[t]);
        alive = true;
      }
    }
  }
}
