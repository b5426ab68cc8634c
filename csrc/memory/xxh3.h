// The XXH3-64 of bytes, in the pass that copies them or reads them alone: what the `xxhash` library says of the same bytes.
//
// doc/xxhash_spec.md of github.com/Cyan4973/xxHash, XXH3 of long inputs: eight sums of 64 bits
// over stripes of 64 bytes, mixed after every 16 of them; seed 0, the default secret. Little-endian, as everything here.
#pragma once

#include <cstdint>

namespace diptych {

class Xxh3Copy {
 public:
  static constexpr int64_t kStripeBytes = 64;
  static constexpr int64_t kLeastBytes = 256;  // in whole stripes; shorter inputs have other rules

  static bool takes(int64_t bytes) { return bytes >= kLeastBytes && bytes % kStripeBytes == 0; }
  explicit Xxh3Copy(int64_t bytes);  // of all pieces; throws std::invalid_argument where it does not take so many
  // The next piece, in whole stripes; past the caches, as who reads it has others, and would have to take the lines from ours.
  void copy_past_caches(uint8_t* out, const uint8_t* in, int64_t bytes);
  void read(const uint8_t* in, int64_t bytes);  // copied nowhere
  uint64_t digest() const;  // after the last one

 private:
  void take(uint8_t* out, const uint8_t* in, int64_t bytes, bool is_past);  // out: null or as many bytes
  void scramble();

  const int64_t bytes_, n_stripes_;
  int64_t next_ = 0;  // stripe
  alignas(16) uint64_t sums_[8];
};

}  // namespace diptych
