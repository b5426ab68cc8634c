// What the tiles of AVX2 and AVX-VNNI share: how they read words, and tiles of groups. Included inside the anonymous namespace of their
// files, after gemm_generic.inl.

constexpr int kHalves = 2;  // registers of 8 lanes in a strip

inline __m256i broadcast_word(const uint8_t* x) { return _mm256_set1_epi32(*reinterpret_cast<const int*>(x)); }

inline __m256i load_words(const uint8_t* w, int half) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(w) + half);
}

// Strips that pass once, from memory. Side by side each is a stream to the processor's prefetchers, which bring several faster than one; in
// pages of its own, so that they begin anew with each strip: lines are asked for a little ahead, from where the strips end on those of the
// strips that follow. Asked for further ahead they would come before the prefetchers have begun; past L2 they come no faster.
class StripsAhead {
 public:
  StripsAhead(const uint8_t* strip, int64_t strips, int64_t strip_bytes, const uint8_t* next, bool is_stream)
      : is_stream_(is_stream), is_lone_(strips == 1), strip_bytes_(strip_bytes), last_(strip + strip_bytes - kAheadBytes),
        to_next_(next - strip - strip_bytes) {}
  // From what is taken to what is asked for meanwhile; 0: nothing is. taken: of the first strip.
  DIPTYCH_FORCED int64_t distance(const uint8_t* taken) const {
    if (!is_stream_) return 0;
    return is_lone_ ? kLoneAheadBytes : taken < last_ ? kAheadBytes : kAheadBytes + to_next_;
  }
  // One line of a strip: many at once wait for one another.
  DIPTYCH_FORCED void ask(const uint8_t* taken, int64_t strip) const {
    if (is_stream_) __builtin_prefetch(taken + distance(taken) + strip * strip_bytes_, 0, 3);
  }

 private:
  static constexpr int64_t kAheadBytes = 1024, kLoneAheadBytes = 2048;
  const bool is_stream_, is_lone_;
  const int64_t strip_bytes_;
  const uint8_t* const last_;
  const int64_t to_next_;
};

#include "gemm_groups_avx2.inl"
