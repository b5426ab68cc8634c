// Query/key norm, rotary position, and the write of one token's key and value into the paged cache.

namespace diptych {
namespace DIPTYCH_ISA {

// Pairs (i, i + r/2) of the first r dimensions turn by the position's angle; the rest is left alone. out may be x.
DIPTYCH_INLINE void rotate(const float* x, int64_t rotary_dim, const float* cos_row, const float* sin_row, float* out) {
  int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; i += 16) {
    int64_t lanes = half - i < 16 ? half - i : 16;
    F32 c = load_n(cos_row + i, lanes), s = load_n(sin_row + i, lanes);
    F32 low = load_n(x + i, lanes), high = load_n(x + half + i, lanes);
    store_n(out + i, sub(mul(low, c), mul(high, s)), lanes);
    store_n(out + half + i, add(mul(high, c), mul(low, s)), lanes);
  }
}

// One head from the projection to out [d]: norm (weight null: none), rotation.
// row_factor is the full-width norm's 1/rms, used when the shape has one.
DIPTYCH_INLINE void finish_head(const RotateShape& shape, const float* x, const float* weight, float row_factor,
                                const float* cos_row, const float* sin_row, float* out) {
  const int64_t d = shape.head_dim;
  const bool is_plain = weight == nullptr || shape.norms_turned;
  if (is_plain) {
    if (shape.rotary_dim < d) std::memcpy(out + shape.rotary_dim, x + shape.rotary_dim, static_cast<size_t>(d - shape.rotary_dim) * 4);
  } else if (shape.has_full_width_norm) {
    scale_by_weight(x, weight, d, row_factor, out);
  } else if (shape.has_head_norms) {
    layer_norm_row(x, weight, shape.has_norm_biases ? weight + d : nullptr, d, shape.norm_eps, out);
  } else {
    rms_norm_row(x, weight, d, shape.norm_eps, out);
  }
  if (shape.rotary_dim) rotate(is_plain ? x : out, shape.rotary_dim, cos_row, sin_row, out);
  if (weight != nullptr && shape.norms_turned) rms_norm_row(out, weight, d, shape.norm_eps, out);
}

DIPTYCH_INLINE float full_width_factor(const float* x, int64_t n, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / static_cast<float>(n) + eps);
}

DIPTYCH_INLINE void round_to_bf16(const float* x, int64_t n, uint16_t* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store_bf16(out + i, load(x + i));
  if (i < n) store_bf16_n(out + i, load_n(x + i, n - i), n - i);
}

// Of magnitudes; NaN where one is no finite number, so that what is attended to is none, either.
DIPTYCH_INLINE float largest(const float* x, int64_t n) {
  F32 most = zero(), none = zero();
  for (int64_t i = 0; i < n; i += 16) {
    F32 v = load_n(x + i, n - i < 16 ? n - i : 16);
    most = max(most, max(v, sub(zero(), v)));
    none = fma(v, zero(), none);
  }
  return horizontal_max(most) + horizontal_sum(none);
}

// x [n] as bytes: E4M3 (e4m3.h), or symmetric int8 with scale max|x| / 127; returns the scale.
DIPTYCH_INLINE float quantise(KvFormat format, const float* x, int64_t n, int8_t* out) {
  float most = largest(x, n);
  if (format == KvFormat::fp8) {
    const float scale = e4m3_scale(most);
    if (scale == 0.0f) std::memset(out, 0, static_cast<size_t>(n));
    for (int64_t i = 0; scale != 0.0f && i < n; ++i) out[i] = static_cast<int8_t>(to_e4m3(x[i] / scale));
    return scale;
  }
  float inverse = steps_per_unit(most, 127.0f);
  for (int64_t i = 0; i < n; i += 16) {
    int64_t lanes = n - i < 16 ? n - i : 16;
    int8_t whole[16];
    store_i8(lanes < 16 ? whole : out + i, mul(load_n(x + i, lanes), set1(inverse)));
    if (lanes < 16) std::memcpy(out + i, whole, static_cast<size_t>(lanes));
  }
  return most / 127.0f;
}

// bf16 keys and values of one token. key [d], value [dv] (zero behind its width). clears_next: the odd neighbour is empty.
DIPTYCH_INLINE void write_bf16(const KvHead& head, const KvShape& shape, int64_t offset, const float* key,
                               const float* value, bool clears_next, uint16_t* rounded) {
  const int64_t d = shape.head_dim, dv = shape.value_dim();
  round_to_bf16(key, d, rounded);
  uint16_t* k = reinterpret_cast<uint16_t*>(head.keys) + offset / 16 * 16 * d + offset % 16 * 2;
  for (int64_t i = 0; i < d / 2; ++i) std::memcpy(k + i * 32, rounded + 2 * i, 4);
  uint16_t* v = reinterpret_cast<uint16_t*>(head.values) + offset / 2 * dv * 2;
  for (int64_t i = 0; i < dv; i += 16) {
    if (clears_next) std::memset(v + 2 * i, 0, 64);
    store_parity(v + 2 * i, load(value + i), offset % 2);
  }
}

DIPTYCH_INLINE void write_bytes(const KvHead& head, const KvShape& shape, int64_t offset, const float* key,
                               const float* value, bool clears_next, int8_t* rounded) {
  const int64_t d = shape.head_dim, dv = shape.value_dim();
  head.key_scales[offset] = quantise(shape.format, key, d, rounded);
  int8_t* k = reinterpret_cast<int8_t*>(head.keys) + offset / 16 * 16 * d + offset % 16 * 2;
  for (int64_t i = 0; i < d / 2; ++i) std::memcpy(k + i * 32, rounded + 2 * i, 2);
  head.value_scales[offset] = quantise(shape.format, value, dv, rounded);
  int8_t* v = reinterpret_cast<int8_t*>(head.values) + offset / 2 * dv * 2 + offset % 2;
  for (int64_t i = 0; i < dv; ++i) v[2 * i] = rounded[i];
  if (!clears_next) return;
  head.value_scales[offset + 1] = 0.0f;
  for (int64_t i = 0; i < dv; ++i) v[2 * i + 1] = 0;
}

static void rotate_token(const RotateCall& call, int64_t token, int64_t kv_head, float* scratch) {
  const RotateShape& shape = call.shape;
  const int64_t d = shape.head_dim, group = shape.n_heads / shape.n_kv_heads;
  const int64_t v_dim = shape.v_head_dim, q_width = shape.row_heads * d;
  const int64_t kv_width = shape.writes_kv ? shape.row_kv_heads * (d + (shape.has_v ? v_dim : 0)) : 0;
  const float* row = call.qkv + token * (q_width + kv_width);
  const float* k_row = row + q_width;
  const float* v_row = shape.has_v ? k_row + shape.row_kv_heads * d : k_row;
  const int64_t position = call.positions[token], half = shape.rotary_dim / 2;
  const float* cos_row = call.shape.cos_table + position * half;
  const float* sin_row = call.shape.sin_table + position * half;
  const bool is_full = shape.has_full_width_norm;
  const int64_t weight_stride = is_full || shape.has_head_norms ? d << shape.has_norm_biases : 0;
  const float query_scale = shape.query_scale.at(position);
  float q_factor = 0.0f, k_factor = 0.0f;
  if (is_full && shape.q_norm) q_factor = full_width_factor(row, q_width, shape.norm_eps);
  if (is_full && shape.k_norm) k_factor = full_width_factor(k_row, shape.row_kv_heads * d, shape.norm_eps);

  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const int64_t of_row = shape.first_head + head;
    const float* weight = shape.q_norm ? shape.q_norm + of_row * weight_stride : nullptr;
    finish_head(shape, row + of_row * d, weight, q_factor, cos_row, sin_row, scratch);
    if (query_scale != 1.0f)
      for (int64_t i = 0; i < d; ++i) scratch[i] *= query_scale;
    round_to_bf16(scratch, d, call.q_out + (token * shape.n_heads + head) * d);
  }
  if (!shape.writes_kv) return;
  const int64_t kv_of_row = shape.first_kv_head + kv_head;
  const float* weight = shape.k_norm ? shape.k_norm + kv_of_row * weight_stride : nullptr;
  float* key = scratch;
  float* padded = scratch + d + 16 - d % 16;
  finish_head(shape, k_row + kv_of_row * d, weight, k_factor, cos_row, sin_row, key);
  const float* value = v_row + kv_of_row * v_dim;
  if (shape.has_v_norm || shape.v_scale != 1.0f || v_dim != call.kv.shape.value_dim()) {
    std::memset(padded, 0, static_cast<size_t>(call.kv.shape.value_dim()) * 4);
    if (shape.has_v_norm)
      add_row(value, v_dim, full_width_factor(value, v_dim, shape.norm_eps), padded);
    else
      std::memcpy(padded, value, static_cast<size_t>(v_dim) * 4);
    if (shape.v_scale != 1.0f)
      for (int64_t i = 0; i < v_dim; ++i) padded[i] *= shape.v_scale;
    value = padded;
  }

  const int64_t slot = call.slots[token], offset = slot % call.kv.shape.block_tokens;
  const bool next_follows = token + 1 < call.n_tokens && call.slots[token + 1] == slot + 1;
  const bool clears_next = offset % 2 == 0 && !next_follows;
  KvHead target = call.kv.head(slot / call.kv.shape.block_tokens, kv_head);
  alignas(64) uint16_t rounded[512];
  if (call.kv.shape.format == KvFormat::bf16) {
    write_bf16(target, call.kv.shape, offset, key, value, clears_next, rounded);
  } else {
    write_bytes(target, call.kv.shape, offset, key, value, clears_next, reinterpret_cast<int8_t*>(rounded));
  }
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
