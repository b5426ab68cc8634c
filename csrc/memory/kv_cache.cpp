#include "memory/kv_cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "memory/xxh3.h"
#include "sets/e4m3.h"

namespace diptych {
namespace {

constexpr uint64_t kOfNothing = 0x2D06800538D394C2u;  // the XXH3-64 of no bytes

float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  if ((bits & 0x7f800000u) == 0) return static_cast<uint16_t>((bits >> 16) & 0x8000u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

int64_t key_index(int64_t d, int64_t offset, int64_t i) { return offset / 16 * 16 * d + i / 2 * 32 + offset % 16 * 2 + i % 2; }
int64_t key_index(const KvShape& shape, int64_t offset, int64_t i) {
  return shape.by_token ? offset * shape.head_dim + i : key_index(shape.head_dim, offset, i);
}
int64_t value_index(int64_t dv, int64_t offset, int64_t i) { return offset / 2 * dv * 2 + i * 2 + offset % 2; }

float scale_of(KvFormat format, const float* x, int64_t n) {
  float most = 0.0f;
  for (int64_t i = 0; i < n; ++i) most = std::fmax(most, std::fabs(x[i]));
  return format == KvFormat::fp8 ? e4m3_scale(most) : most / 127.0f;
}

int8_t to_byte(KvFormat format, float x, float scale) {
  if (!(scale > 0.0f)) return 0;
  return format == KvFormat::fp8 ? static_cast<int8_t>(to_e4m3(x / scale)) : static_cast<int8_t>(std::nearbyintf(x / scale));
}

float of_byte(KvFormat format, int8_t x, float scale) {
  return (format == KvFormat::fp8 ? from_bf16(e4m3_to_bf16(static_cast<uint8_t>(x))) : static_cast<float>(x)) * scale;
}

// An entry's row, of which each of the tokens that share it has a part.
void write_entry(const KvShape& shape, const KvHead& head, int64_t offset, const float* x) {
  const int64_t row = shape.entry_row(offset), d = shape.head_dim;
  const float scale = shape.format == KvFormat::bf16 ? 1.0f : scale_of(shape.format, x, d);
  if (shape.format != KvFormat::bf16) head.key_scales[row] = scale;
  for (int64_t i = 0; i < d; ++i) {
    if (shape.format == KvFormat::bf16) reinterpret_cast<uint16_t*>(head.keys)[row * d + i] = to_bf16(x[i]);
    else reinterpret_cast<int8_t*>(head.keys)[row * d + i] = to_byte(shape.format, x[i], scale);
  }
}

// A token's part of it.
void read_entry(const KvShape& shape, const KvHead& head, int64_t offset, float* x) {
  const int64_t row = shape.entry_row(offset), n = shape.entry_share(), first = row * shape.head_dim + offset % shape.shared_by * n;
  for (int64_t i = 0; i < n; ++i)
    x[i] = shape.format == KvFormat::bf16 ? from_bf16(reinterpret_cast<const uint16_t*>(head.keys)[first + i])
                                          : of_byte(shape.format, reinterpret_cast<const int8_t*>(head.keys)[first + i], head.key_scales[row]);
}

void write_index(const KvShape& shape, const KvHead& head, int64_t offset, const float* x) {
  const int64_t d = shape.index_dim;
  const float scale = shape.format == KvFormat::bf16 ? 1.0f : scale_of(shape.format, x, d);
  if (shape.format != KvFormat::bf16) head.value_scales[offset] = scale;
  for (int64_t i = 0; i < d; ++i) {
    const int64_t at = key_index(d, offset, i);
    if (shape.format == KvFormat::bf16) reinterpret_cast<uint16_t*>(head.values)[at] = to_bf16(x[i]);
    else reinterpret_cast<int8_t*>(head.values)[at] = to_byte(shape.format, x[i], scale);
  }
}

void read_index(const KvShape& shape, const KvHead& head, int64_t offset, float* x) {
  for (int64_t i = 0; i < shape.index_dim; ++i) {
    const int64_t at = key_index(shape.index_dim, offset, i);
    x[i] = shape.format == KvFormat::bf16 ? from_bf16(reinterpret_cast<const uint16_t*>(head.values)[at])
                                          : of_byte(shape.format, reinterpret_cast<const int8_t*>(head.values)[at], head.value_scales[offset]);
  }
}

void write_token(const KvShape& shape, const KvHead& head, int64_t offset, const float* k, const float* v) {
  if (shape.index_dim != 0) write_index(shape, head, offset, k + shape.head_dim + shape.entry_share());
  const int64_t d = shape.head_dim, n = shape.v_head_dim, dv = shape.has_values ? shape.value_dim() : 0;
  if (shape.format == KvFormat::bf16) {
    uint16_t* keys = reinterpret_cast<uint16_t*>(head.keys);
    uint16_t* values = reinterpret_cast<uint16_t*>(head.values);
    for (int64_t i = 0; i < d; ++i) keys[key_index(shape, offset, i)] = to_bf16(k[i]);
    for (int64_t i = 0; i < dv; ++i) {
      values[value_index(dv, offset, i)] = i < n ? to_bf16(v[i]) : uint16_t{0};
      if (offset % 2 == 0) values[value_index(dv, offset + 1, i)] = 0;
    }
    return;
  }
  int8_t* keys = reinterpret_cast<int8_t*>(head.keys);
  int8_t* values = reinterpret_cast<int8_t*>(head.values);
  head.key_scales[offset] = scale_of(shape.format, k, d);
  if (dv != 0) head.value_scales[offset] = scale_of(shape.format, v, n);
  if (dv != 0 && offset % 2 == 0) head.value_scales[offset + 1] = 0.0f;
  for (int64_t i = 0; i < d; ++i) keys[key_index(shape, offset, i)] = to_byte(shape.format, k[i], head.key_scales[offset]);
  for (int64_t i = 0; i < dv; ++i) {
    values[value_index(dv, offset, i)] = i < n ? to_byte(shape.format, v[i], head.value_scales[offset]) : int8_t{0};
    if (offset % 2 == 0) values[value_index(dv, offset + 1, i)] = 0;
  }
}

void read_token(const KvShape& shape, const KvHead& head, int64_t offset, float* k, float* v) {
  if (shape.index_dim != 0) {
    const int64_t at = shape.head_dim + shape.entry_share();
    read_index(shape, head, offset, k + at);
    std::memcpy(v + at, k + at, static_cast<size_t>(shape.index_dim) * 4);
  }
  const int64_t d = shape.head_dim, dv = shape.value_dim();
  auto read = [&](const uint8_t* from, int64_t at, const float* scales) {
    if (shape.format == KvFormat::bf16) return from_bf16(reinterpret_cast<const uint16_t*>(from)[at]);
    return of_byte(shape.format, reinterpret_cast<const int8_t*>(from)[at], scales[offset]);
  };
  for (int64_t i = 0; i < d; ++i) k[i] = read(head.keys, key_index(shape, offset, i), head.key_scales);
  for (int64_t i = 0; i < shape.v_head_dim; ++i) v[i] = shape.has_values ? read(head.values, value_index(dv, offset, i), head.value_scales) : k[i];
}

}  // namespace

KvCache::KvCache(const KvShape& shape)
    : KvCache(shape, std::vector<KvHeads>(std::max<int64_t>(shape.n_layers, 0), {shape.n_kv_heads, shape.head_dim, shape.has_values ? shape.v_head_dim : 0})) {}

KvCache::KvCache(const KvShape& common, const std::vector<KvHeads>& layers) {
  if (common.block_tokens < 16 || common.block_tokens % 16 != 0)
    throw std::invalid_argument("block_tokens is " + std::to_string(common.block_tokens) + "; it must be a multiple of 16");
  if (common.n_blocks < 1) throw std::invalid_argument("a KV cache needs at least one block");
  begins_.push_back(0), common_ = common;
  for (const KvHeads& heads : layers) {
    const bool has_values = heads.v_dim != 0;
    const int64_t attended = heads.attended;
    const int64_t most = has_values ? 512 : kMostLatentDim;
    const int64_t keys = attended != 0 ? attended + (heads.shared_by == 0 ? 0 : attended / heads.shared_by) : heads.dim;  // and the index's behind them
    if (heads.dim < 2 || heads.dim % 2 != 0 || (attended != 0 ? attended : keys) > most || heads.dim - keys > most)
      throw std::invalid_argument("head_dim is " + std::to_string(heads.dim) + "; it must be even and at most " + std::to_string(most));
    if (heads.v_dim < 0 || heads.v_dim > most) throw std::invalid_argument("v_head_dim is " + std::to_string(heads.v_dim) + "; it must be at most " + std::to_string(most));
    if (!has_values && heads.n > 1) throw std::invalid_argument("a cache of latents, or of an index, has one head");
    if (heads.n < 0) throw std::invalid_argument("a KV cache has no fewer heads than none");  // a rank may have none of them
    if (attended < 0 || attended % 2 != 0 || attended > heads.dim || (attended != 0 && has_values))
      throw std::invalid_argument("attended is " + std::to_string(attended) + "; of latents it must be even and at most their head_dim");
    if (heads.shared_by != 0 && (attended == 0 || heads.shared_by < 2 || kGroupTokens % heads.shared_by != 0 || attended % heads.shared_by != 0))
      throw std::invalid_argument("entries lie among latents, one for 2, 4, 8 or 16 tokens, which have equal parts of it");
    KvShape shape = heads.of(common);
    if (shape.index_dim < 0) throw std::invalid_argument("a layer is too narrow for its entries");
    shape.n_layers = static_cast<int64_t>(layers.size());
    begins_.push_back(begins_.back() + shape.layer_bytes());
    shapes_.push_back(shape);
  }
  buffer_ = PageBuffer(bytes());
}

void KvCache::add_states(const std::vector<int64_t>& floats_by_layer, int64_t n_places) {
  if (floats_by_layer.empty() || n_places < 1) throw std::invalid_argument("states need at least one layer and one place");
  state_floats_ = floats_by_layer, n_places_ = n_places, place_floats_ = 0;
  state_begins_.clear();
  for (const int64_t floats : floats_by_layer) state_begins_.push_back(place_floats_), place_floats_ += (floats + 15) / 16 * 16;
  state_buffer_ = PageBuffer(state_bytes());
}

int64_t KvCache::block_bytes() const {
  int64_t bytes = 0;
  for (const KvShape& shape : shapes_) bytes += shape.block_bytes();
  return bytes;
}

void KvCache::copy_block(int64_t source, int64_t target) {
  if (source == target) return;
  for (size_t index = 0; index < shapes_.size(); ++index) {
    const int64_t bytes = shapes_[index].block_bytes();
    uint8_t* base = layer(index).data;
    std::memcpy(base + target * bytes, base + source * bytes, static_cast<size_t>(bytes));
  }
}

void KvCache::export_block(int64_t block, uint8_t* out) const {
  for (size_t index = 0; index < shapes_.size(); ++index) {
    const int64_t bytes = shapes_[index].block_bytes();
    std::memcpy(out, layer(index).data + block * bytes, static_cast<size_t>(bytes));
    out += bytes;
  }
}

void KvCache::import_block(int64_t block, const uint8_t* data) {
  for (size_t index = 0; index < shapes_.size(); ++index) {
    const int64_t bytes = shapes_[index].block_bytes();
    std::memcpy(layer(index).data + block * bytes, data, static_cast<size_t>(bytes));
    data += bytes;
  }
}

uint64_t KvCache::export_checked(int64_t block, uint8_t* out) const {
  if (shapes_.empty()) return kOfNothing;
  Xxh3Copy pass(block_bytes());
  for (size_t index = 0; index < shapes_.size(); ++index) {
    const int64_t bytes = shapes_[index].block_bytes();
    pass.copy_past_caches(out, layer(index).data + block * bytes, bytes);
    out += bytes;
  }
  return pass.digest();
}

uint64_t KvCache::import_checked(int64_t block, const uint8_t* data) {
  if (shapes_.empty()) return kOfNothing;
  Xxh3Copy pass(block_bytes());
  for (size_t index = 0; index < shapes_.size(); ++index) {
    const int64_t bytes = shapes_[index].block_bytes();
    pass.copy_past_caches(layer(index).data + block * bytes, data, bytes);
    data += bytes;
  }
  return pass.digest();
}

void KvCache::read(int64_t index, const int32_t* block_ids, int64_t n_tokens, float* k, float* v) const {
  const KvLayer view = layer(index);
  const int64_t shared = view.shape.shared_by;
  const int64_t d = view.shape.width(), dv = view.shape.value_width(), block_tokens = view.shape.block_tokens;
  for (int64_t kv_head = 0; kv_head < view.shape.n_kv_heads; ++kv_head)
    for (int64_t token = 0; token < n_tokens; ++token) {
      const int64_t at = kv_head * n_tokens + token;
      const KvHead head = view.head(block_ids[token / block_tokens], kv_head);
      read_token(view.shape, head, token % block_tokens, k + at * d, v + at * dv);
      if (shared == 0) continue;
      float* part = k + at * d + view.shape.head_dim;  // zeros where the last token that shares it is not there yet
      if (token / shared * shared + shared > n_tokens) std::memset(part, 0, static_cast<size_t>(view.shape.entry_share()) * 4);
      else read_entry(view.shape, head, token % block_tokens, part);
      std::memcpy(v + at * dv + view.shape.v_head_dim, part, static_cast<size_t>(view.shape.entry_share()) * 4);
    }
}

void KvCache::write(int64_t index, const int32_t* block_ids, int64_t n_tokens, const float* k, const float* v) {
  const KvLayer view = layer(index);
  const int64_t shared = view.shape.shared_by;
  std::vector<float> entry(static_cast<size_t>(shared == 0 ? 0 : view.shape.head_dim));
  const int64_t d = view.shape.width(), dv = view.shape.value_width(), block_tokens = view.shape.block_tokens;
  for (int64_t kv_head = 0; kv_head < view.shape.n_kv_heads; ++kv_head)
    for (int64_t token = 0; token < n_tokens; ++token) {
      const int64_t at = kv_head * n_tokens + token;
      const KvHead head = view.head(block_ids[token / block_tokens], kv_head);
      write_token(view.shape, head, token % block_tokens, k + at * d, v + at * dv);
      if (shared == 0 || (token + 1) % shared != 0) continue;
      const int64_t n = view.shape.entry_share();
      for (int64_t i = 0; i < shared; ++i) std::memcpy(entry.data() + i * n, k + (at + 1 - shared + i) * d + view.shape.head_dim, static_cast<size_t>(n) * 4);
      write_entry(view.shape, head, token % block_tokens, entry.data());
    }
}

}  // namespace diptych
