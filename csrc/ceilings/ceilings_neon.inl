// Ceilings of one ARM set, by the best products that its flags know. Included by ceilings_<set>.cpp.
#include "sets/kernel_sets.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstring>

namespace diptych {
namespace {

constexpr int kSums = 16;

double fp32_burst(int64_t rounds) {
  float32x4_t sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = vdupq_n_f32(static_cast<float>(i));  // equal sums would become one
  float32x4_t a = vdupq_n_f32(static_cast<float>(rounds)), b = vdupq_n_f32(0.5f);
  for (int64_t round = 0; round < rounds; ++round) {
    for (int i = 0; i < kSums; ++i) sums[i] = vfmaq_f32(sums[i], a, b);
    __asm__ volatile("" : "+w"(a), "+w"(b));
  }
  for (int i = 1; i < kSums; ++i) sums[0] = vaddq_f32(sums[0], sums[i]);
  volatile float sink = vgetq_lane_f32(sums[0], 0);
  (void)sink;
  return kSums * 8.0 * static_cast<double>(rounds);
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
double bf16_burst(int64_t rounds) {
  float32x4_t sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = vdupq_n_f32(static_cast<float>(i));
  bfloat16x8_t a = vreinterpretq_bf16_u16(vdupq_n_u16(0x3f9d)), b = vreinterpretq_bf16_u16(vdupq_n_u16(0x3e4b));
  for (int64_t round = 0; round < rounds; ++round) {
    for (int i = 0; i < kSums; ++i) sums[i] = vbfmmlaq_f32(sums[i], a, b);
    __asm__ volatile("" : "+w"(a), "+w"(b));
  }
  for (int i = 1; i < kSums; ++i) sums[0] = vaddq_f32(sums[0], sums[i]);
  volatile float sink = vgetq_lane_f32(sums[0], 0);
  (void)sink;
  return kSums * 32.0 * static_cast<double>(rounds);
}
#else
constexpr double (*bf16_burst)(int64_t) = fp32_burst;
#endif

double int8_burst(int64_t rounds) {
  int32x4_t sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = vdupq_n_s32(i);
  int8x16_t a = vdupq_n_s8(static_cast<int8_t>(rounds)), b = vdupq_n_s8(-93);
#if defined(__ARM_FEATURE_MATMUL_INT8)
  constexpr double kOps = 64.0;
#elif defined(__ARM_FEATURE_DOTPROD)
  constexpr double kOps = 32.0;
#else
  constexpr double kOps = 16.0;  // of the product and the sum that widens it
#endif
  for (int64_t round = 0; round < rounds; ++round) {
    for (int i = 0; i < kSums; ++i) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
      sums[i] = vmmlaq_s32(sums[i], a, b);
#elif defined(__ARM_FEATURE_DOTPROD)
      sums[i] = vdotq_s32(sums[i], a, b);
#else
      sums[i] = vpadalq_s16(sums[i], vmull_s8(vget_low_s8(a), vget_low_s8(b)));
      __asm__ volatile("" : "+w"(a));  // a new product each time
#endif
    }
    __asm__ volatile("" : "+w"(a), "+w"(b));
  }
  for (int i = 1; i < kSums; ++i) sums[0] = vaddq_s32(sums[0], sums[i]);
  volatile int32_t sink = vgetq_lane_s32(sums[0], 0);
  (void)sink;
  return kSums * kOps * static_cast<double>(rounds);
}

void read_all(const uint8_t* data, int64_t bytes, Reading how) {
  uint8x16_t sums[8];
  for (uint8x16_t& sum : sums) sum = vdupq_n_u8(0);
  for (int64_t at = 0; at + 128 <= bytes; at += 128) {
    const uint8_t* from = data + at;
    if (how == Reading::ahead) __builtin_prefetch(from + kReadAheadBytes), __builtin_prefetch(from + kReadAheadBytes + 64);
    if (how == Reading::past) __builtin_prefetch(from, 0, 0), __builtin_prefetch(from + 64, 0, 0);
    for (int i = 0; i < 8; ++i) sums[i] = vorrq_u8(sums[i], vld1q_u8(from + 16 * i));
  }
  for (int i = 1; i < 8; ++i) sums[0] = vorrq_u8(sums[0], sums[i]);
  volatile uint8_t sink = vgetq_lane_u8(sums[0], 0);
  (void)sink;
}

}  // namespace

namespace DIPTYCH_ISA {
extern const CeilingLoops kCeilings = {fp32_burst, bf16_burst, int8_burst, nullptr, read_all};
}

}  // namespace diptych
#endif
