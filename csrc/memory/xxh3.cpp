#include "memory/xxh3.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace diptych {
namespace {

constexpr uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu, kPrime64_3 = 0x165667B19E3779F9u;
constexpr uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63u, kPrime64_5 = 0x27D4EB2F165667C5u, kPrimeMx1 = 0x165667919E3779F9u;

constexpr int64_t kSecretBytes = 192;
constexpr int64_t kBlockStripes = (kSecretBytes - Xxh3Copy::kStripeBytes) / 8;  // each begins 8 bytes further in the secret
alignas(16) constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb,
    0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc,
    0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

uint64_t word(const uint8_t* bytes) {
  uint64_t out;
  std::memcpy(&out, bytes, 8);
  return out;
}

// sums [8] over n stripes, which are copied unless out is null; the secret of each begins 8 bytes behind the last one's. Sums are of whole numbers, so
// they are equal on every processor: sum i takes half by half of (word i ^ secret), and word i of its neighbour.
using AddStripes = void (*)(uint64_t* sums, uint8_t* out, const uint8_t* in, const uint8_t* secret, int64_t n);

void add_stripes(uint64_t* sums, uint8_t* out, const uint8_t* in, const uint8_t* secret, int64_t n) {
#if defined(__ARM_NEON)
  uint64x2_t acc[4];
  for (int j = 0; j < 4; ++j) acc[j] = vld1q_u64(sums + 2 * j);
  const bool is_copied = out != nullptr;
  for (; n > 0; --n, in += 64, out += is_copied ? 64 : 0, secret += 8)
    for (int j = 0; j < 4; ++j) {
      const uint8x16_t bytes = vld1q_u8(in + 16 * j);
      if (is_copied) vst1q_u8(out + 16 * j, bytes);
      const uint64x2_t data = vreinterpretq_u64_u8(bytes), keyed = vreinterpretq_u64_u8(veorq_u8(bytes, vld1q_u8(secret + 16 * j)));
      acc[j] = vmlal_u32(vaddq_u64(acc[j], vextq_u64(data, data, 1)), vmovn_u64(keyed), vshrn_n_u64(keyed, 32));
    }
  for (int j = 0; j < 4; ++j) vst1q_u64(sums + 2 * j, acc[j]);
#else
  const bool is_copied = out != nullptr;
  for (; n > 0; --n, in += 64, out += is_copied ? 64 : 0, secret += 8) {
    if (is_copied) std::memcpy(out, in, 64);
    for (int i = 0; i < 8; ++i) {
      const uint64_t data = word(in + 8 * i), keyed = data ^ word(secret + 8 * i);
      sums[i ^ 1] += data;
      sums[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
    }
  }
#endif
}

#if defined(__x86_64__)
enum class To { nowhere, caches, memory };

// To::memory is past the caches, as memcpy writes what is large: a store that first reads its line costs a third of the traffic.
// Marked by itself, and not a unit with flags of its own: nothing in it is shared with anybody.
template <To kTo>
__attribute__((target("avx2"))) void add_stripes_avx2(uint64_t* sums, uint8_t* out, const uint8_t* in, const uint8_t* secret, int64_t n) {
  auto* const kept = reinterpret_cast<__m256i*>(sums);
  __m256i acc[2] = {_mm256_loadu_si256(kept), _mm256_loadu_si256(kept + 1)};
  for (; n > 0; --n, in += 64, out += kTo == To::nowhere ? 0 : 64, secret += 8) {
    _mm_prefetch(reinterpret_cast<const char*>(in) + 1024, _MM_HINT_T0);  // 1024: of 0 to 2048 the best, by a tenth
    for (int j = 0; j < 2; ++j) {
      const __m256i data = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in) + j);
      if (kTo == To::memory) _mm256_stream_si256(reinterpret_cast<__m256i*>(out) + j, data);
      if (kTo == To::caches) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + j, data);
      const __m256i keyed = _mm256_xor_si256(data, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret) + j));
      const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
      acc[j] = _mm256_add_epi64(acc[j], _mm256_add_epi64(product, _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2))));
    }
  }
  _mm256_storeu_si256(kept, acc[0]), _mm256_storeu_si256(kept + 1, acc[1]);
}

const bool kHasAvx2 = __builtin_cpu_supports("avx2");
AddStripes adding(const uint8_t* out, bool is_past) {
  if (!kHasAvx2) return add_stripes;
  return out == nullptr ? add_stripes_avx2<To::nowhere> : is_past ? add_stripes_avx2<To::memory> : add_stripes_avx2<To::caches>;
}
void end_past() { _mm_sfence(); }
#else
AddStripes adding(const uint8_t*, bool) { return add_stripes; }
void end_past() {}
#endif

uint64_t folded_product(uint64_t a, uint64_t b) {  // both halves of the 128 bits, xored
  const uint64_t a0 = a & 0xFFFFFFFFu, a1 = a >> 32, b0 = b & 0xFFFFFFFFu, b1 = b >> 32;
  const uint64_t low = a0 * b0, middle = a1 * b0 + (low >> 32), cross = a0 * b1 + (middle & 0xFFFFFFFFu);
  return (a1 * b1 + (middle >> 32) + (cross >> 32)) ^ (cross << 32 | (low & 0xFFFFFFFFu));
}

}  // namespace

Xxh3Copy::Xxh3Copy(int64_t bytes)
    : bytes_(bytes),
      n_stripes_(bytes / kStripeBytes),
      sums_{kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1} {
  if (!takes(bytes))
    throw std::invalid_argument("a checksum is of 256 bytes at least, in whole stripes of 64; these are " + std::to_string(bytes));
}

void Xxh3Copy::read(const uint8_t* in, int64_t bytes) { take(nullptr, in, bytes, /*is_past=*/false); }

void Xxh3Copy::copy_past_caches(uint8_t* out, const uint8_t* in, int64_t bytes) {
  take(out, in, bytes, /*is_past=*/reinterpret_cast<uintptr_t>(out) % 32 == 0);
  end_past();
}

void Xxh3Copy::take(uint8_t* out, const uint8_t* in, int64_t bytes, bool is_past) {
  const AddStripes add = adding(out, is_past);
  for (int64_t left = bytes / kStripeBytes; left > 0;) {
    if (next_ == n_stripes_ - 1) return ++next_, add(sums_, out, in, kSecret + kSecretBytes - kStripeBytes - 7, 1);
    const int64_t at = next_ % kBlockStripes;
    const int64_t n = std::min({left, kBlockStripes - at, n_stripes_ - 1 - next_});
    add(sums_, out, in, kSecret + 8 * at, n);
    if (at + n == kBlockStripes) scramble();
    next_ += n, left -= n, in += n * kStripeBytes;
    if (out != nullptr) out += n * kStripeBytes;
  }
}

void Xxh3Copy::scramble() {
  for (int i = 0; i < 8; ++i) {
    const uint64_t key = word(kSecret + kSecretBytes - kStripeBytes + 8 * i);
    sums_[i] = (sums_[i] ^ sums_[i] >> 47 ^ key) * kPrime32_1;
  }
}

uint64_t Xxh3Copy::digest() const {
  uint64_t out = static_cast<uint64_t>(bytes_) * kPrime64_1;
  for (int i = 0; i < 8; i += 2) out += folded_product(sums_[i] ^ word(kSecret + 11 + 8 * i), sums_[i + 1] ^ word(kSecret + 19 + 8 * i));
  out = (out ^ out >> 37) * kPrimeMx1;
  return out ^ out >> 32;
}

}  // namespace diptych
