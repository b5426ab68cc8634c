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

// What `store_key` has stored in groups.
DIPTYCH_INLINE void load_key(KvFormat format, const uint8_t* keys, const float* scales, int64_t d, int64_t offset, float* x) {
  const int64_t at = offset / 16 * 16 * d + offset % 16 * 2;
  for (int64_t i = 0; i < d; ++i) {
    const int64_t place = at + i / 2 * 32 + i % 2;
    if (format == KvFormat::int8) {
      x[i] = static_cast<float>(static_cast<int8_t>(keys[place])) * scales[offset];
      continue;
    }
    const uint32_t bits = static_cast<uint32_t>(format == KvFormat::bf16 ? reinterpret_cast<const uint16_t*>(keys)[place] : e4m3_to_bf16(keys[place])) << 16;
    std::memcpy(x + i, &bits, 4);
    if (format == KvFormat::fp8) x[i] *= scales[offset];
  }
}

// The mean of the last `pooled` keys of a sequence, which lie in one group, in the last one's place; turned as the first.
DIPTYCH_INLINE void cache_mean(const IndexKeyCall& call, int64_t token, float* scratch) {
  const KvShape& shape = call.kv.shape;
  const int64_t d = shape.head_dim, half = call.rotary_dim / 2, first = call.positions[token] + 1 - call.pooled;
  if (first % call.pooled != 0) return;
  const KvHead head = call.kv.head(call.slots[token] / shape.block_tokens, 0);
  const int64_t offset = call.slots[token] % shape.block_tokens;
  float *mean = scratch, *one = scratch + whole_vectors(d);
  std::memset(mean, 0, static_cast<size_t>(d) * 4);
  const F32 share = set1(1.0f / static_cast<float>(call.pooled));
  for (int64_t j = call.pooled - 1; j >= 0; --j) {
    load_key(shape.format, head.keys, head.key_scales, d, offset - j, one);
    for (int64_t i = 0; i < d; i += 16) {
      const int64_t lanes = d - i < 16 ? d - i : 16;
      store_n(mean + i, fma(load_n(one + i, lanes), share, load_n(mean + i, lanes)), lanes);
    }
  }
  rms_norm_row(mean, call.norm, d, call.norm_eps, one);
  rotate(one, call.rotary_dim, call.cos_table + first * half, call.sin_table + first * half, one);
  store_key(shape.format, one, d, offset, false, head.keys, head.key_scales);
}

static void cache_index(const IndexKeyCall& call, int64_t token, float* scratch) {
  if (call.pooled != 0) return cache_mean(call, token, scratch);
  const KvShape& shape = call.kv.shape;
  const int64_t d = call.kv.is_index ? shape.index_dim : shape.head_dim, half = call.rotary_dim / 2;
  const int64_t position = call.positions[token], slot = call.slots[token];
  const int64_t own = d - call.n_gates;
  const float* row = call.rows + token * d;
  if (call.norm == nullptr) {
    const KvHead head = call.kv.head(slot / shape.block_tokens, 0);
    return store_key(shape.format, row, d, slot % shape.block_tokens, false, head.keys, head.key_scales);
  }
  call.bias == nullptr ? rms_norm_row(row, call.norm, own, call.norm_eps, scratch) : layer_norm_row(row, call.norm, call.bias, own, call.norm_eps, scratch);
  std::memcpy(scratch + own, row + own, static_cast<size_t>(call.n_gates) * 4);
  rotate(scratch, call.rotary_dim, call.cos_table + position * half, call.sin_table + position * half, scratch);
  const KvHead head = call.kv.head(slot / shape.block_tokens, 0);
  store_key(shape.format, scratch, d, slot % shape.block_tokens, false, head.keys, head.key_scales);
}

static void pool_index(const KvLayer& index, const int32_t* slots, int64_t pool, const float* offsets, float* scratch) {
  const KvShape& shape = index.shape;
  const int64_t width = shape.index_dim, d = width / 2;
  const auto head_of = [&](int32_t slot) { return index.head(slot / shape.block_tokens, 0); };
  for (int64_t t = 0; t < pool; ++t)
    load_key(shape.format, head_of(slots[t]).keys, head_of(slots[t]).key_scales, width, slots[t] % shape.block_tokens, scratch + t * width);
  float* together = scratch + pool * width;
  for (int64_t i = 0; i < d; i += 16) {
    const int64_t lanes = d - i < 16 ? d - i : 16;
    const auto gate_of = [&](int64_t t) { return add(load_n(scratch + t * width + d + i, lanes), load_n(offsets + t * d + i, lanes)); };
    F32 most = gate_of(0), weights = zero(), sum = zero();
    for (int64_t t = 1; t < pool; ++t) most = max(most, gate_of(t));
    for (int64_t t = 0; t < pool; ++t) {
      const F32 weight = exp_lanes(sub(gate_of(t), most));
      weights = add(weights, weight), sum = fma(weight, load_n(scratch + t * width + i, lanes), sum);
    }
    store_n(together + i, div(sum, weights), lanes);
  }
  std::memset(together + d, 0, static_cast<size_t>(d) * 4);
  const KvHead last = head_of(slots[pool - 1]);
  store_key(shape.format, together, width, slots[pool - 1] % shape.block_tokens, false, last.keys, last.key_scales);
}

static void rotate_query(const float* x, int64_t n, int64_t rotary_dim, const float* cos_row, const float* sin_row, float* scratch,
                         uint16_t* out) {
  if (rotary_dim < n) std::memcpy(scratch + rotary_dim, x + rotary_dim, static_cast<size_t>(n - rotary_dim) * 4);
  rotate(x, rotary_dim, cos_row, sin_row, scratch);
  round_to_bf16(scratch, n, out);
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
