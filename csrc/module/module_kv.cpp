// Python bindings of the KV cache.
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>

#include "memory/kv_cache.h"
#include "module/module.h"

namespace diptych {
namespace {

KvFormat kv_format_of(const std::string& name) {  // int8x8 is kept as int8 is, and met in bytes (AttentionShape::in_bytes)
  return named<KvFormat>("KV format", name, {{"bf16", KvFormat::bf16}, {"int8", KvFormat::int8}, {"int8x8", KvFormat::int8}, {"fp8", KvFormat::fp8}});
}

void check_blocks(const KvCache& kv, const I32& block_ids, int64_t n_tokens) {
  if (static_cast<int64_t>(block_ids.shape(0)) * kv.shape().block_tokens < n_tokens) throw std::invalid_argument("too few blocks for n_tokens");
  for (size_t i = 0; i < block_ids.shape(0); ++i)
    if (block_ids(i) < 0 || block_ids(i) >= kv.shape().n_blocks) throw std::invalid_argument("a block id is outside the pool");
}

void check_layer(const KvCache& kv, int64_t layer) {
  if (layer < 0 || layer >= kv.shape().n_layers) throw std::invalid_argument("no such layer");
}

void copy_blocks(KvCache& kv, const std::vector<std::array<int64_t, 2>>& pairs) {
  for (const auto& pair : pairs)
    for (int64_t block : pair)
      if (block < 0 || block >= kv.shape().n_blocks) throw std::invalid_argument("a block id is outside the pool");
  const Unlocked unlocked;
  for (const auto& pair : pairs) kv.copy_block(pair[0], pair[1]);
}

void check_raw(const KvCache& kv, const I32& block_ids, size_t rows, size_t bytes) {
  check_blocks(kv, block_ids, 0);
  const int64_t wanted = kv.block_bytes();
  if (rows != block_ids.shape(0) || static_cast<int64_t>(bytes) != wanted) throw std::invalid_argument("raw blocks must be [blocks, bytes of a block]");
}

void export_blocks(const KvCache& kv, I32 block_ids, BytesOut out) {
  check_raw(kv, block_ids, out.shape(0), out.shape(1));
  const Unlocked unlocked;
  for (size_t i = 0; i < block_ids.shape(0); ++i) kv.export_block(block_ids(i), out.data() + i * out.shape(1));
}

void import_blocks(KvCache& kv, I32 block_ids, BytesTable data) {
  check_raw(kv, block_ids, data.shape(0), data.shape(1));
  const Unlocked unlocked;
  for (size_t i = 0; i < block_ids.shape(0); ++i) kv.import_block(block_ids(i), data.data() + i * data.shape(1));
}

// [blocks]: the XXH3-64 of each
std::vector<uint64_t> export_checked(const KvCache& kv, I32 block_ids, BytesOut out) {
  check_raw(kv, block_ids, out.shape(0), out.shape(1));
  const Unlocked unlocked;
  std::vector<uint64_t> sums;
  for (size_t i = 0; i < block_ids.shape(0); ++i) sums.push_back(kv.export_checked(block_ids(i), out.data() + i * out.shape(1)));
  return sums;
}

std::vector<uint64_t> import_checked(KvCache& kv, I32 block_ids, BytesTable data) {
  check_raw(kv, block_ids, data.shape(0), data.shape(1));
  const Unlocked unlocked;
  std::vector<uint64_t> sums;
  for (size_t i = 0; i < block_ids.shape(0); ++i) sums.push_back(kv.import_checked(block_ids(i), data.data() + i * data.shape(1)));
  return sums;
}

// That `k` and `v` [kv heads, tokens, width] are tokens of one layer that the blocks can hold; how many tokens.
template <class Cube>
int64_t checked_tokens(const KvCache& kv, int64_t layer, const I32& block_ids, const Cube& k, const Cube& v) {
  const size_t n_tokens = k.shape(1);
  check_layer(kv, layer);
  const KvShape& shape = kv.shape_of(layer);
  check_blocks(kv, block_ids, static_cast<int64_t>(n_tokens));
  auto is_right = [&](const Cube& cube, int64_t width) {
    return static_cast<int64_t>(cube.shape(0)) == shape.n_kv_heads && cube.shape(1) == n_tokens && static_cast<int64_t>(cube.shape(2)) == width;
  };
  if (!is_right(k, shape.width()) || !is_right(v, shape.value_width()))
    throw std::invalid_argument("keys and values must be [kv heads, tokens, head_dim] and [kv heads, tokens, v_head_dim]");
  return static_cast<int64_t>(n_tokens);
}

void read_kv(const KvCache& kv, int64_t layer, I32 block_ids, F32CubeOut k, F32CubeOut v) {
  const int64_t n_tokens = checked_tokens(kv, layer, block_ids, k, v);
  const Unlocked unlocked;
  kv.read(layer, block_ids.data(), n_tokens, k.data(), v.data());
}

void write_kv(KvCache& kv, int64_t layer, I32 block_ids, F32Cube k, F32Cube v) {
  const int64_t n_tokens = checked_tokens(kv, layer, block_ids, k, v);
  const Unlocked unlocked;
  kv.write(layer, block_ids.data(), n_tokens, k.data(), v.data());
}

float* checked_place(const KvCache& kv, int64_t place, size_t floats) {
  if (place < 0 || place >= kv.n_places()) throw std::invalid_argument("no such place for a state");
  if (static_cast<int64_t>(floats) != kv.place_floats()) throw std::invalid_argument("a state has another size");
  return kv.state(0, place);
}

void read_state(const KvCache& kv, int64_t place, F32VectorOut out) {
  std::memcpy(out.data(), checked_place(kv, place, out.shape(0)), out.shape(0) * 4);
}

void write_state(KvCache& kv, int64_t place, F32Vector state) { std::memcpy(checked_place(kv, place, state.shape(0)), state.data(), state.shape(0) * 4); }

// Of each layer how many, how wide keys and values are (0: keys are values), and where it is said how much of them lies token by token, and how many
// tokens share the row of an entry.
using Heads = std::vector<std::vector<int64_t>>;

std::vector<KvHeads> layers_of(const Heads& heads) {
  std::vector<KvHeads> layers;
  for (const std::vector<int64_t>& one : heads) {
    if (one.size() < 3 || one.size() > 5) throw std::invalid_argument("heads are told by three to five numbers");
    layers.push_back({one[0], one[1], one[2], one.size() > 3 ? one[3] : 0, one.size() > 4 ? one[4] : 0});
  }
  return layers;
}


KvShape kv_shape(int64_t n_blocks, int64_t block_tokens, const std::string& format) {
  KvShape shape;
  shape.n_blocks = n_blocks, shape.block_tokens = block_tokens;
  shape.format = kv_format_of(format);
  return shape;
}

}  // namespace

void bind_kv(nb::module_& m) {
  nb::class_<KvCache>(m, "KvCache")
      .def("__init__", [](KvCache* self, const Heads& heads, int64_t n_blocks, int64_t block_tokens, const std::string& format) {
        new (self) KvCache(kv_shape(n_blocks, block_tokens, format), layers_of(heads));
      }, nb::kw_only(), nb::arg("heads"), nb::arg("n_blocks"), nb::arg("block_tokens"), nb::arg("format"))
      .def("add_states", &KvCache::add_states, nb::arg("floats_by_layer"), nb::arg("n_places"))
      .def_prop_ro("n_places", &KvCache::n_places)
      .def_prop_ro("state_bytes", &KvCache::state_bytes)
      .def_prop_ro("place_floats", &KvCache::place_floats)
      .def("read_state", &read_state, nb::arg("place"), nb::arg("out"))
      .def("write_state", &write_state, nb::arg("place"), nb::arg("state"))
      .def_prop_ro("nbytes", &KvCache::bytes)
      .def_prop_ro("begins", &KvCache::begins)
      .def_rw("number", &KvCache::number)
      .def("interleave", &KvCache::interleave, nb::arg("nodes"))
      .def("back", &KvCache::back, nb::arg("begin"), nb::arg("end"), nb::call_guard<Unlocked>())
      .def_prop_ro("block_bytes", &KvCache::block_bytes)
      .def("copy_blocks", &copy_blocks)
      .def("export_blocks", &export_blocks, nb::arg("block_ids"), nb::arg("out"))
      .def("import_blocks", &import_blocks, nb::arg("block_ids"), nb::arg("data"))
      .def("export_checked", &export_checked, nb::arg("block_ids"), nb::arg("out"))
      .def("import_checked", &import_checked, nb::arg("block_ids"), nb::arg("data"))
      .def("read", &read_kv, nb::arg("layer"), nb::arg("block_ids"), nb::arg("k"), nb::arg("v"))
      .def("write", &write_kv, nb::arg("layer"), nb::arg("block_ids"), nb::arg("k"), nb::arg("v"));
  m.def("kv_bytes_per_block", [](const Heads& heads, int64_t block_tokens, const std::string& format) {
    const KvShape common = kv_shape(1, block_tokens, format);
    int64_t bytes = 0;
    for (const KvHeads& one : layers_of(heads)) bytes += one.of(common).block_bytes();
    return bytes;
  }, nb::kw_only(), nb::arg("heads"), nb::arg("block_tokens"), nb::arg("format"));
}

}  // namespace diptych
