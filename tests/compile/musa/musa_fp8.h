// Stands in for the vendor's header of that name. [vllm-musa] attention/deepseek_v4_cache_store.mu makes an e4m3 number
// of a float and takes its byte; native fp8 begins with mp_31 ([tilelang] tl_templates/musa/musa_fp8.h).
#pragma once
#if __MUSA_ARCH__ < 310
#error "no fp8 before mp_31"
#endif
struct __mt_fp8_e4m3 {
  explicit __mt_fp8_e4m3(float value);
  unsigned char __x;
};
