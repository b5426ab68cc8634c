// Latent attention (MLA): the cached row of a token, the rotary part of a head's query, and the key of an index.

namespace diptych {
namespace DIPTYCH_ISA {

// A key of d numbers to its place: token by token, or pair by pair in its group of 16.
DIPTYCH_INLINE void store_key(KvFormat format, const float* x, int64_t d, int64_t offset, bool by_token, uint8_t* keys, float* scales) {
  const int64_t at = by_token ? offset * d : offset / 16 * 16 * d + offset % 16 * 2, step = by_token ? 2 : 32;
  alignas(64) uint16_t rounded[kMostLatentDim];
  if (format == KvFormat::bf16) {
    round_to_bf16(x, d, rounded);
    uint16_t* out = reinterpret_cast<uint16_t*>(keys) + at;
    for (int64_t i = 0; i < d / 2; ++i) std::memcpy(out + i * step, rounded + 2 * i, 4);
  } else {
    int8_t* whole = reinterpret_cast<int8_t*>(rounded);
    scales[offset] = quantise(format, x, d, whole);
    int8_t* out = reinterpret_cast<int8_t*>(keys) + at;
    for (int64_t i = 0; i < d / 2; ++i) std::memcpy(out + i * step, whole + 2 * i, 2);
  }
}

static void cache_latent(const LatentCall& call, int64_t token, float* scratch) {
  const KvShape& shape = call.kv.shape;
  const int64_t rank = call.rank, d = shape.head_dim, half = (d - rank) / 2;
  const float* row = call.rows + token * d;
  const int64_t position = call.positions[token], slot = call.slots[token];
  rms_norm_row(row, call.norm, rank, call.norm_eps, scratch);
  rotate(row + rank, 2 * half, call.cos_table + position * half, call.sin_table + position * half, scratch + rank);
  const KvHead head = call.kv.head(slot / shape.block_tokens, 0);
  store_key(shape.format, scratch, d, slot % shape.block_tokens, shape.by_token, head.keys, head.key_scales);
}

static void cache_index(const IndexKeyCall& call, int64_t token, float* scratch) {
  const KvShape& shape = call.kv.shape;
  const int64_t d = call.kv.is_index ? shape.index_dim : shape.head_dim, half = call.rotary_dim / 2;
  const int64_t position = call.positions[token], slot = call.slots[token];
  const float* row = call.rows + token * d;
  call.bias == nullptr ? rms_norm_row(row, call.norm, d, call.norm_eps, scratch) : layer_norm_row(row, call.norm, call.bias, d, call.norm_eps, scratch);
  rotate(scratch, call.rotary_dim, call.cos_table + position * half, call.sin_table + position * half, scratch);
  const KvHead head = call.kv.head(slot / shape.block_tokens, 0);
  store_key(shape.format, scratch, d, slot % shape.block_tokens, false, head.keys, head.key_scales);
}

static void rotate_query(const float* x, int64_t n, int64_t rotary_dim, const float* cos_row, const float* sin_row, float* scratch,
                         uint16_t* out) {
  if (rotary_dim < n) std::memcpy(scratch + rotary_dim, x + rotary_dim, static_cast<size_t>(n - rotary_dim) * 4);
  rotate(x, rotary_dim, cos_row, sin_row, scratch);
  round_to_bf16(scratch, n, out);
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
