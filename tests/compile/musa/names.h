// What the MUSA spelling of the kernels may use, and nothing else: a host compiler that reads this before a source
// finds every other name undeclared. It shows that names and types are right, not what they do on a device.
//
// Behind each name is public code of or for Moore Threads GPUs that uses it:
//   [torch_musa]   github.com/MooreThreads/torch_musa v2.7.1, torch_musa/csrc/...
//   [vllm-musa]    github.com/MooreThreads/vllm-musa, csrc/musa/... and vllm_musa/jit_kernel/csrc/...
//   [mate]         github.com/MooreThreads/mate v0.2.2
//   [tilelang]     github.com/MooreThreads/tilelang_musa, src/...
//   [tutorial]     github.com/MooreThreads/tutorial_on_musa, musa_quick_start/...
#pragma once

#if __MUSA_ARCH__ != 220 && __MUSA_ARCH__ != 310  // [torch_musa] extension/common/utils.muh, [vllm-musa] gemv.mu
#error "architectures are mp_22 and mp_31"
#endif
#define asm NO_ASSEMBLY
#define __asm__ NO_ASSEMBLY
#define __asm NO_ASSEMBLY

// ------------------------------------------------------------------------------------ the language's own words
#define __device__                                      // [tutorial] 4_reduce_demo
#define __global__
#define __shared__                                      // a local name will do: nothing is run
#define __forceinline__ inline __attribute__((always_inline))  // [torch_musa] aten/musa/MUSADeviceUtils.muh
#define __noinline__ __attribute__((noinline))                 // clang's, as are __align__ and #pragma unroll
#define __align__(bytes) __attribute__((aligned(bytes)))       // [vllm-musa] distributed/custom_all_reduce.mu
#define __launch_bounds__(...)                                 // [vllm-musa] distributed/custom_all_reduce.mu
struct Index3 { unsigned x, y, z; };
extern const Index3 threadIdx, blockIdx, blockDim, gridDim;    // [tutorial] 4_reduce_demo

// ------------------------------------------------------------------------------------------ blocks and warps
void __syncthreads();                          // [tutorial] 4_reduce_demo
void __syncwarp();                             // [mate] attention/fmha/mp31_fmha_fwd_tme_warpspecialized.hpp
#if __MUSA_ARCH__ == 220
int __musa_shfl_xor_sync_i32(int value, int lane_mask, int segment);  // [torch_musa] extension/common/utils.muh
#else
// On mp_31 alone: [torch_musa] extension/common/utils.muh
unsigned __shfl_xor_sync(unsigned mask, unsigned value, int lane_mask, int width);
unsigned __shfl_sync(unsigned mask, unsigned value, int lane, int width);  // [mate] csrc/moe_fused_gate.mu
#endif

// ------------------------------------------------------------------------------------------------------ memory
void __threadfence_system();                   // [vllm-musa] distributed/custom_all_reduce.mu
void __threadfence_block();                    // [mate] csrc/moe_fused_gate.mu
unsigned atomicAdd(unsigned* to, unsigned value);                    // [vllm-musa] distributed/custom_all_reduce.mu
unsigned atomicExch(unsigned* to, unsigned value);                   // [vllm-musa] distributed/custom_all_reduce.mu
unsigned atomicCAS(unsigned* to, unsigned expected, unsigned value);  // [torch_musa] aten/musa/MUSAAtomic.muh
unsigned long long atomicCAS(unsigned long long* to, unsigned long long expected, unsigned long long value);  // same
#if __MUSA_ARCH__ == 310
// [vllm-musa] distributed/custom_all_reduce.mu, which is built for mp_31 alone
void flushInv_byp();
unsigned volatile_load(unsigned* from);
unsigned long long volatile_load(unsigned long long* from);
void volatile_store(unsigned value, unsigned* to);
void volatile_store(unsigned long long value, unsigned long long* to);
#endif
long long clock64();                           // [torch_musa] core/Sleep.mu

// ----------------------------------------------------------------------------------------------------- numbers
unsigned __float_as_uint(float value);         // [vllm-musa] attention/deepseek_v4_sparse_indexer_topk.mu
float __uint_as_float(unsigned bits);          // the same
float fmaf(float a, float b, float c);         // [torch_musa] extension/FusedAdam.mu
float sqrtf(float value);                      // [torch_musa] extension/FusedAdam.mu
float __expf(float value);                     // [torch_musa] aten/musa/MUSAMath.muh
