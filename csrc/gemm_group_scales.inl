// What stands in the heads of groups, a piece of a strip's lanes at a time. Included by the tiles of AVX2 and NEON, after how numbers are
// widened.

// Of a group, the lanes of one part, from its head.
struct Scales {
  explicit Scales(const LinearShape& shape)
      : source_(shape.grid.scale), nested_(shape.grid.nested), e4m3_(shape.grid.e4m3), e8m0_(shape.grid.e8m0), halves_(shape.grid.halves),
        scale_bytes_(bytes_of_scale(shape)), offset_bytes_(bytes_of_offset(shape)), scales_(place_of_head(shape, 0).scales), offsets_(place_of_head(shape, 0).offsets) {}
  void enter(const uint8_t* head) {
    head_ = head;
    if (!nested_) return;
    for (int part = 0; part < kStripPieces; ++part) {
      if (source_ == Source::f32) factors_[0][part] = *reinterpret_cast<const Lanes*>(head + part * kLaneCount * 4);
      else factors_[0][part] = widen_halves(head + part * kLaneCount * 2), factors_[1][part] = widen_halves(head + 2 * (kStripLanes + part * kLaneCount));
    }
  }
  Lanes scale(int64_t within, int part) const {
    const uint8_t* at = head_ + scales_ + (within * kStripLanes + part * kLaneCount) * scale_bytes_;
    if (nested_) return factors_[0][part] * (e4m3_ ? widen_e4m3(at) : widen_s8(at));
    if (e8m0_) return (Lanes)(widen_u8(at) << 23);
    return source_ == Source::f32 ? *reinterpret_cast<const Lanes*>(at) : widen(at);
  }
  const uint8_t* offset(int64_t within, int part) const { return head_ + offsets_ + (within * kStripLanes + part * kLaneCount) * offset_bytes_; }
  Lanes minimum(int64_t within, int part) const {
    const uint8_t* at = offset(within, part);
    if (nested_) return factors_[1][part] * widen_s8(at);
    return halves_ ? widen(at) : *reinterpret_cast<const Lanes*>(at);
  }

 private:
  Lanes widen(const uint8_t* at) const { return source_ == Source::f16 ? widen_halves(at) : widen_bf16(at); }
  const Source source_;
  const bool nested_, e4m3_, e8m0_, halves_;
  const int64_t scale_bytes_, offset_bytes_, scales_, offsets_;
  const uint8_t* head_ = nullptr;
  Lanes factors_[2][kStripPieces];
};
