// A stand-in for a device on the host: a block is a thread of the system, the threads of a block are fibers of it, so
// that blocks and ranks run side by side and may wait for one another. What the MUSA spelling of the dialect calls is
// defined here, for both widths of a warp; that says nothing of a real device's memory order.
#pragma once
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>
#include <thread>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

// ------------------------------------------------------------------------------------------- fibers of a block
static const unsigned MOST_FIBERS = 1024, PASSED = 512;
static const unsigned long STACK = 65536;
struct Meeting { unsigned came, gone, times; };  // lanes or threads that wait, that have ended, and how often all came
struct Lane { unsigned posted, word[PASSED]; };  // what a lane shows others: the last PASSED words
struct Block {
  ucontext_t scheduler, fibers[MOST_FIBERS];
  bool finished[MOST_FIBERS];
  Meeting whole, warps[MOST_FIBERS];
  Lane lanes[MOST_FIBERS];
  void (*body)(const unsigned long long*);
  const unsigned long long* arguments;
};
static thread_local Block* block = 0;

static inline void give_way() {
  unsigned me = threadIdx.x;
  swapcontext(&block->fibers[me], &block->scheduler);
  threadIdx.x = me;
}
static inline void poll() {  // cheap at first: what is awaited is mostly there, or another block's
  static thread_local unsigned polls = 0u;
  if ((++polls & 63u) == 0u) give_way();
}
static inline void meet(Meeting& m, unsigned all) {
  unsigned times = m.times;
  ++m.came;
  while (m.times == times) {
    if (m.came + m.gone >= all) m.came = 0u, ++m.times;
    else give_way();
  }
}
static void fiber() {
  unsigned me = threadIdx.x;
  block->body(block->arguments);
  block->finished[me] = true;
  ++block->whole.gone, ++block->warps[me / HALMA_WARP].gone;
  swapcontext(&block->fibers[me], &block->scheduler);
}
static inline void __syncthreads() { meet(block->whole, blockDim.x); }
static inline void __syncwarp() { meet(block->warps[threadIdx.x / HALMA_WARP], HALMA_WARP); }

// ---------------------------------------------------------------------------------------------------- shuffles
static inline unsigned post(unsigned word) {
  Lane& mine = block->lanes[threadIdx.x];
  mine.word[++mine.posted % PASSED] = word;
  return mine.posted;
}
static inline unsigned seen(unsigned thread, unsigned turn) {
  Lane& theirs = block->lanes[thread];
  while (static_cast<int>(theirs.posted - turn) < 0) give_way();
  if (theirs.posted - turn >= PASSED) fprintf(stderr, "a lane is too far ahead\n"), abort();
  return theirs.word[turn % PASSED];
}
static inline unsigned __shfl_xor_sync(unsigned lanes, unsigned value, int mask, int width) {
  if (lanes != ~0u || width != 32) fprintf(stderr, "not a warp's lanes\n"), abort();
  unsigned turn = post(value);
  return seen(threadIdx.x ^ static_cast<unsigned>(mask), turn);
}
static inline unsigned __shfl_sync(unsigned lanes, unsigned value, int from, int width) {
  if (lanes != ~0u || width != 32) fprintf(stderr, "not a warp's lanes\n"), abort();
  unsigned turn = post(value);
  __syncwarp();
  return seen(threadIdx.x / 32u * 32u + static_cast<unsigned>(from), turn);
}
static inline int __musa_shfl_xor_sync_i32(int value, int mask, int segment) {
  if (segment != 127 || mask < 0 || mask > 127) fprintf(stderr, "not a warp's lanes\n"), abort();
  unsigned turn = post(static_cast<unsigned>(value));
  return static_cast<int>(seen(threadIdx.x ^ static_cast<unsigned>(mask), turn));
}

// ------------------------------------------------------------------------------------------------------ memory
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void flushInv_byp() { poll(); }  // in every poll
template <typename T> static inline T volatile_load(T* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
template <typename T> static inline void volatile_store(T value, T* to) { __atomic_store_n(to, value, __ATOMIC_RELAXED); }
static inline unsigned atomicExch(unsigned* to, unsigned value) { return __atomic_exchange_n(to, value, __ATOMIC_SEQ_CST); }
static inline unsigned atomicAdd(unsigned* to, unsigned value) {
  if (value == 0u) poll();
  return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST);
}
template <typename T> static inline T atomicCAS(T* to, T expected, T value) {
  if (expected == value) poll();
  __atomic_compare_exchange_n(to, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
static inline long long clock64() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

// ----------------------------------------------------------------------------------------------------- numbers
static inline unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
static inline float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
#define __expf expf  // the host's library has a function of that name

// -------------------------------------------------------------------------------------------------- the launch
struct Room {  // of a thread of the system, for one block after another
  Block* block = static_cast<Block*>(calloc(1, sizeof(Block)));
  char* stacks = static_cast<char*>(malloc(MOST_FIBERS * STACK));
  ~Room() { free(block), free(stacks); }
};
static void run_block(void (*entry)(const unsigned long long*), unsigned at, unsigned grid, unsigned threads,
                      const unsigned long long* args) {
  static thread_local Room room;
  block = room.block, block->body = entry, block->arguments = args, block->whole = Meeting{0u, 0u, 0u};
  gridDim.x = grid, blockDim.x = threads, blockIdx.x = at;
  for (unsigned t = 0; t < threads; ++t) {
    ucontext_t& one = block->fibers[t];
    getcontext(&one);
    one.uc_stack.ss_sp = room.stacks + t * STACK, one.uc_stack.ss_size = STACK, one.uc_link = 0;
    makecontext(&one, fiber, 0);
    block->finished[t] = false, block->warps[t] = Meeting{0u, 0u, 0u}, block->lanes[t].posted = 0u;
  }
  for (bool alive = true; alive;) {
    alive = false;
    for (unsigned t = 0; t < threads; ++t) {
      if (block->finished[t]) continue;
      threadIdx.x = t, alive = true;
      swapcontext(&block->scheduler, &block->fibers[t]);
    }
    if (alive && grid > 1u) sched_yield();
  }
}
// `together`: blocks that wait for one another, or for those of other grids.
static void run_grid(void (*entry)(const unsigned long long*), unsigned grid, unsigned threads,
                     const unsigned long long* args, bool together) {
  for (unsigned b = 0; b < grid && !together; ++b) run_block(entry, b, grid, threads, args);
  if (!together) return;
  std::vector<std::thread> blocks;
  for (unsigned b = 0; b < grid; ++b) blocks.emplace_back(run_block, entry, b, grid, threads, args);
  for (std::thread& one : blocks) one.join();
}
// Arguments come as an array of 8-byte words, and every parameter of a kernel is one.
template <typename... A, size_t... I>
static void spread(void (*kernel)(A...), const unsigned long long* words, std::index_sequence<I...>) {
  kernel(words[I]...);
}
template <typename... A> static void spread(void (*kernel)(A...), const unsigned long long* words) {
  spread(kernel, words, std::index_sequence_for<A...>());
}
