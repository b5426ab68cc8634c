// Latent attention (MLA): the cached row of a token, and the rotary part of a head's query.

namespace diptych {
namespace DIPTYCH_ISA {

static void cache_latent(const LatentCall& call, int64_t token, float* scratch) {
  const KvShape& shape = call.kv.shape;
  const int64_t rank = call.rank, d = shape.head_dim, half = (d - rank) / 2;
  const float* row = call.rows + token * d;
  const int64_t position = call.positions[token], slot = call.slots[token], offset = slot % shape.block_tokens;
  rms_norm_row(row, call.norm, rank, call.norm_eps, scratch);
  std::memcpy(scratch + rank, row + rank, static_cast<size_t>(2 * half) * 4);
  rotate(scratch + rank, 2 * half, call.cos_table + position * half, call.sin_table + position * half);
  const KvHead head = call.kv.head(slot / shape.block_tokens, 0);
  const int64_t at = offset / 16 * 16 * d + offset % 16 * 2;
  alignas(64) uint16_t rounded[kMostLatentDim];
  if (shape.format == KvFormat::bf16) {
    round_to_bf16(scratch, d, rounded);
    uint16_t* keys = reinterpret_cast<uint16_t*>(head.keys) + at;
    for (int64_t i = 0; i < d / 2; ++i) std::memcpy(keys + i * 32, rounded + 2 * i, 4);
  } else {
    int8_t* whole = reinterpret_cast<int8_t*>(rounded);
    head.key_scales[offset] = quantise(shape.format, scratch, d, whole);
    int8_t* keys = reinterpret_cast<int8_t*>(head.keys) + at;
    for (int64_t i = 0; i < d / 2; ++i) std::memcpy(keys + i * 32, whole + 2 * i, 2);
  }
}

static void rotate_query(const float* x, int64_t rotary_dim, const float* cos_row, const float* sin_row, float* scratch, uint16_t* out) {
  std::memcpy(scratch, x, static_cast<size_t>(rotary_dim) * 4);
  rotate(scratch, rotary_dim, cos_row, sin_row);
  round_to_bf16(scratch, rotary_dim, out);
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
