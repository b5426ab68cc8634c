// What NEON has for tiles of weights in groups (gemm_groups_parts.inl). Included inside the anonymous namespace of gemm_neon.inl.

constexpr int kLeastRowsOfOne = 3, kMostRowsOfOne = 4;
using Operand = int8x16_t;
constexpr int32_t kSignedBase = 0;

#include "gemm/gemm_group_forms.inl"

inline uint16x4_t load_bytes(const uint8_t* at) {  // four, as 16 bits each
  uint32_t bytes;
  std::memcpy(&bytes, at, 4);
  return vget_low_u16(vmovl_u8(vcreate_u8(bytes)));
}
inline Lanes from_halves(uint16x4_t halves) { return (Lanes)vcvt_f32_f16(vreinterpret_f16_u16(halves)); }
inline Lanes widen_halves(const uint8_t* at) { return from_halves(vld1_u16(reinterpret_cast<const uint16_t*>(at))); }
inline Lanes widen_bf16(const uint8_t* at) { return (Lanes)vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(at)), 16); }
inline Lanes widen_s8(const uint8_t* at) {
  const int16x4_t whole = vshr_n_s16(vshl_n_s16(vreinterpret_s16_u16(load_bytes(at)), 8), 8);
  return (Lanes)vcvtq_f32_s32(vmovl_s16(whole));
}
inline Whole widen_u8(const uint8_t* at) { return (Whole)vmovl_u16(load_bytes(at)); }
// E4M3 without signs: its fields are f16's, whose exponents begin 8 lower.
inline Lanes widen_e4m3(const uint8_t* at) { return from_halves(vshl_n_u16(load_bytes(at), 7)) * 256.0f; }
inline Operand load_table(const LinearShape& shape) { return vld1q_s8(table_of(shape)); }

// Step `word` of the four of 16 inputs, of a piece of the lanes: codes, or levels where they are signed.
template <CodeForm kForm>
DIPTYCH_FORCED Operand operand_of(const uint8_t* unit, const uint8_t* tops, int word, int part, const Operand& table) {
  const auto step = [&](int i) __attribute__((always_inline)) { return vld1q_u8(unit + i * kStepBytes + part * kQuadBytes); };
  const auto right = [](uint8x16_t bytes, int by) __attribute__((always_inline)) { return vshlq_u8(bytes, vdupq_n_s8(static_cast<int8_t>(-by))); };
  if constexpr (kForm == CodeForm::bytes) return vreinterpretq_s8_u8(veorq_u8(step(word), vdupq_n_u8(128)));
  constexpr bool kIsPairs = kForm == CodeForm::twos || kForm == CodeForm::threes || kForm == CodeForm::threes_table;
  const uint8x16_t packed = step(kIsPairs ? 0 : word / 2);
  uint8x16_t codes = vandq_u8(right(packed, kIsPairs ? 2 * word : word % 2 * 4), vdupq_n_u8(kIsPairs ? 3 : 15));
  if constexpr (kForm == CodeForm::sixes) codes = vorrq_u8(codes, vandq_u8(right(step(2), 2 * word - 4), vdupq_n_u8(48)));
  if constexpr (has_tops(kForm)) {  // bit 8 i + j of these 16 is byte 8 i + j's
    const uint8x8_t low = vdup_n_u8(tops[word * 8 + part * 2]), high = vdup_n_u8(tops[word * 8 + part * 2 + 1]);
    const uint8x8_t own = vcreate_u8(0x8040201008040201ull);
    const uint8x16_t is_set = vtstq_u8(vcombine_u8(low, high), vcombine_u8(own, own));
    codes = vorrq_u8(codes, vandq_u8(is_set, vdupq_n_u8(kIsPairs ? 4 : 16)));
  }
  return is_table(kForm) ? vqtbl1q_s8(table, codes) : vreinterpretq_s8_u8(codes);
}

// The dot products of 16 inputs of a row, joined to whole sums. Two products fit 16 bits: 2 * 128 * 127.
DIPTYCH_FORCED Whole add_16(Whole sum, const Operand (&operands)[4], const uint8_t* x) {
  int32x4_t whole = (int32x4_t)sum;
#if defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t row = vld1q_s8(reinterpret_cast<const int8_t*>(x));
  whole = vdotq_laneq_s32(whole, operands[0], row, 0), whole = vdotq_laneq_s32(whole, operands[1], row, 1);
  whole = vdotq_laneq_s32(whole, operands[2], row, 2), whole = vdotq_laneq_s32(whole, operands[3], row, 3);
#else
#pragma GCC unroll 4
  for (int word = 0; word < 4; ++word) {
    const int8x16_t own = vreinterpretq_s8_s32(vdupq_n_s32(word_at(x + word * 4)));
    const int16x8_t low = vmull_s8(vget_low_s8(operands[word]), vget_low_s8(own)), high = vmull_high_s8(operands[word], own);
    whole = vpadalq_s16(whole, vpaddq_s16(low, high));
  }
#endif
  return (Whole)whole;
}

#include "gemm/gemm_groups_parts.inl"
