// Python bindings: diptych.compute.ops._cpu. Every array is checked for dtype, shape and contiguity here, then the GIL is
// released; the kernels below see raw pointers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "gemm/gemm_driver.h"
#include "module/module.h"
#include "program/program.h"

namespace diptych {
namespace {

void require_matrix(const AnyArray& array) {
  if (array.ndim() != 2) throw std::invalid_argument("a weight must have two axes");
  if (array.stride(1) != 1) throw std::invalid_argument("a weight's rows must be contiguous");
}

Format format_of(const std::string& name) {
  return named<Format>("weight format", name, {{"bf16", Format::bf16}, {"int8", Format::int8}, {"int4", Format::int4}, {"fp8", Format::fp8},
                                                 {"group2", Format::group2}, {"group3", Format::group3}, {"group4", Format::group4},
                                                 {"group5", Format::group5}, {"group6", Format::group6}, {"group8", Format::group8}});
}

RowsKind rows_kind_of(const std::string& name) {
  return named<RowsKind>("kind of rows", name, {{"bf16", RowsKind::bf16}, {"int8", RowsKind::int8},
                                                {"group16", RowsKind::group16}, {"group32", RowsKind::group32}, {"group64", RowsKind::group64},
                                                {"group128", RowsKind::group128}, {"wide16", RowsKind::wide16}, {"wide32", RowsKind::wide32},
                                                {"wide64", RowsKind::wide64}, {"wide128", RowsKind::wide128},
                                                {"bf16_pair", RowsKind::bf16_pair}});
}

Store store_of(const std::string& name) {
  return named<Store>("store kind", name, {{"f32", Store::f32}, {"bf16", Store::bf16}, {"add_f32", Store::add_f32}, {"gate_f32", Store::gate_f32}});
}

Activation activation_of(const std::string& name) {
  return named<Activation>("activation", name, {{"silu", Activation::silu}, {"gelu_tanh", Activation::gelu_tanh}, {"sigmoid", Activation::sigmoid}});
}

Scores scores_of(const std::string& name) {
  return named<Scores>("scores", name, {{"softmax", Scores::softmax}, {"sigmoid", Scores::sigmoid}, {"late_sigmoid", Scores::late_sigmoid}, {"sparsemixer", Scores::sparsemixer}, {"root_softplus", Scores::root_softplus}});
}

QueryScale query_scale_of(const std::tuple<float, int64_t, int64_t>& numbers) {
  const auto [slope, tokens, shift] = numbers;
  if (tokens < 1 || shift < 0) throw std::invalid_argument("queries are scaled every so many tokens, at least one");
  return {slope, tokens, shift};
}

Category category_of(const std::string& name) {
  for (int64_t i = 0; i < kCategories; ++i)
    if (name == kCategoryNames[i]) return static_cast<Category>(i);
  throw std::invalid_argument("unknown category " + name);
}

int add_linear(Program& program, const LinearShape& shape, const std::vector<AnyArray>& arrays, std::optional<F32Vector> bias,
               std::optional<F32Matrix> directions) {
  if (is_grouped(shape.format) || shape.format == Format::fp8) throw std::invalid_argument("the shape is of codes, which are given as such");
  std::vector<WeightPart> parts;
  int64_t rows = 0;
  for (const AnyArray& array : arrays) {
    require_matrix(array);
    if (static_cast<int64_t>(array.shape(1)) != shape.k) throw std::invalid_argument("a weight's second axis is not k");
    parts.push_back({array.data(), source_of(array), static_cast<int64_t>(array.shape(0)), array.stride(0)});
    rows += static_cast<int64_t>(array.shape(0));
  }
  if (rows != shape.n) throw std::invalid_argument("the parts' rows do not add up to n");
  if (bias.has_value() != shape.has_bias) throw std::invalid_argument("has_bias and bias disagree");
  if (bias && static_cast<int64_t>(bias->shape(0)) != shape.n) throw std::invalid_argument("the bias is not n long");
  if (directions && (shape.format != Format::int4 || static_cast<int64_t>(directions->shape(1)) != shape.k || static_cast<int64_t>(directions->shape(0)) > kMostDirections))
    throw std::invalid_argument("directions are of int4, at most 64 by k");
  const float* bias_data = bias ? bias->data() : nullptr;
  const Unlocked unlocked;
  const Feedback feedback = directions ? make_feedback(shape, directions->data(), static_cast<int64_t>(directions->shape(0))) : Feedback{};
  return program.add_linear(shape, parts, bias_data, feedback);
}

// By weight (-1: read where it is), bytes and XXH3-64 (none: not looked at).
std::vector<int> read_packed(Program& program, const std::vector<std::tuple<int, Bytes, std::optional<uint64_t>>>& saved) {
  std::vector<Saved> all;
  for (const auto& [linear, bytes, checksum] : saved) all.push_back({linear, bytes.data(), static_cast<int64_t>(bytes.shape(0)), checksum});
  const Unlocked unlocked;
  return program.read_packed(all);
}

using RowRanges = std::vector<std::pair<int64_t, int64_t>>;

std::vector<Range> ranges_of(const RowRanges& rows) {
  std::vector<Range> ranges;
  for (const auto& [begin, end] : rows) ranges.push_back({begin, end});
  return ranges;
}

int add_mapped_linear(Program& program, const LinearShape& shape, Bytes blob) {
  if (static_cast<int64_t>(blob.shape(0)) != packed_bytes(shape)) throw std::invalid_argument("the packed weight has another size");
  return program.add_mapped_linear(shape, blob.data());
}

int add_packed_part(Program& program, const LinearShape& shape, const LinearShape& whole, const RowRanges& rows, Bytes blob) {
  if (static_cast<int64_t>(blob.shape(0)) != packed_bytes(whole)) throw std::invalid_argument("the packed weight has another size");
  const Unlocked unlocked;
  return program.add_packed_part(shape, whole, ranges_of(rows), blob.data());
}

int add_random_part(Program& program, const LinearShape& shape, const LinearShape& whole, const RowRanges& rows, uint64_t seed,
                    float amplitude) {
  const Unlocked unlocked;
  return program.add_random_part(shape, whole, ranges_of(rows), seed, amplitude);
}

int add_table(Program& program, AnyArray array) {
  require_matrix(array);
  // the stride along an axis of one entry says nothing; older torch writes 1 there
  if (array.shape(0) != 1 && array.stride(0) != static_cast<int64_t>(array.shape(1))) throw std::invalid_argument("a table must be contiguous");
  return program.add_table({static_cast<const uint8_t*>(array.data()), source_of(array), static_cast<int64_t>(array.shape(0)),
                            static_cast<int64_t>(array.shape(1))});
}

int add_rows(Program& program, const std::string& format, int64_t width, int64_t rows_per_token, bool is_shared, std::optional<I32> order) {
  Buffer buffer;
  if (order) {
    if (static_cast<int64_t>(order->shape(0)) != width) throw std::invalid_argument("the order of inputs is not the rows' width long");
    buffer.order.assign(order->data(), order->data() + width);
    for (const int32_t input : buffer.order)
      if (input < 0 || input >= width) throw std::invalid_argument("the order of inputs names one that is not there");
  }
  buffer.shared = is_shared;
  buffer.kind = BufferKind::rows;
  buffer.width = width;
  buffer.rows_kind = rows_kind_of(format);
  buffer.rows_per_token = rows_per_token;
  return program.add_buffer(buffer);
}

int add_plain(Program& program, BufferKind kind, int64_t width, int64_t rows_per_token, bool is_shared) {
  Buffer buffer;
  buffer.shared = is_shared;
  buffer.kind = kind;
  buffer.width = width;
  buffer.rows_per_token = rows_per_token;
  return program.add_buffer(buffer);
}

Step step_of(const I32& token_ids, const I32& query_start, const I32& context_tokens, const I32Table& block_table, const I32& logits_rows) {
  const size_t sequences = context_tokens.shape(0);
  if (query_start.shape(0) != sequences + 1 || block_table.shape(0) != sequences)
    throw std::invalid_argument("query_start and block_table disagree with context_tokens");
  return {token_ids.data(), query_start.data(), context_tokens.data(), block_table.data(), logits_rows.data(),
          static_cast<int64_t>(token_ids.shape(0)), static_cast<int64_t>(sequences), static_cast<int64_t>(block_table.shape(1)),
          static_cast<int64_t>(logits_rows.shape(0))};
}

using Input = std::optional<F32Matrix>;
using Tapped = std::optional<std::pair<I32, F32CubeOut>>;  // numbers of taps, and [taps, T, width] to write them to

using OfSequences = std::optional<I32>;  // [S] each sequence's adapter, or -1; whether it attends both ways; where a second type begins

const int32_t* of_sequences(const OfSequences& numbers, const Step& step) {
  if (!numbers) return nullptr;
  if (static_cast<int64_t>(numbers->shape(0)) != step.n_sequences)
    throw std::invalid_argument("adapters, both_ways and second must be as many as sequences");
  return numbers->data();
}

// Of one layer: its number, and of each part the rows [begin, end) that it adds to, A [ranks, k], and B [rows, ranks], scaled.
using AdapterSites = std::vector<std::tuple<int, std::vector<std::tuple<int64_t, int64_t, F32Matrix, F32Matrix>>>>;

int add_adapter(Program& program, const AdapterSites& sites) {
  std::vector<std::pair<int, std::vector<AdapterPart>>> parts;
  for (const auto& [weight, of_layer] : sites) {
    auto& taken = parts.emplace_back(weight, std::vector<AdapterPart>{}).second;
    for (const auto& [begin, end, a, b] : of_layer) {
      if (static_cast<int64_t>(a.shape(1)) != program.linear_at(weight).shape.k || static_cast<int64_t>(b.shape(0)) != end - begin || a.shape(0) != b.shape(1))
        throw std::invalid_argument("an adapter's A must be [ranks, k] and its B [rows, ranks]");
      taken.push_back({begin, end, static_cast<int64_t>(a.shape(0)), a.data(), b.data()});
    }
  }
  const Unlocked unlocked;
  return program.add_adapter(parts);
}

void add_ends(const Program& program, Step& step, const Input& input, Tapped& tapped) {
  if (input) {
    if (static_cast<int64_t>(input->shape(0)) != step.n_tokens || static_cast<int64_t>(input->shape(1)) != program.input_width())
      throw std::invalid_argument("the input must be [tokens, width of the program's input]");
    step.input = input->data();
  }
  if (!tapped) return;
  auto& [numbers, out] = *tapped;
  if (numbers.shape(0) != out.shape(0) || static_cast<int64_t>(out.shape(1)) != step.n_tokens)
    throw std::invalid_argument("taps must be [numbers, tokens, width]");
  for (size_t i = 0; i < numbers.shape(0); ++i)
    if (program.tap_width(numbers(i)) != static_cast<int64_t>(out.shape(2))) throw std::invalid_argument("a tap has another width");
  step.tapped = numbers.data(), step.taps = out.data(), step.n_tapped = static_cast<int64_t>(numbers.shape(0));
}

void run(Program& program, I32 token_ids, I32 query_start, I32 context_tokens, I32Table block_table, I32 logits_rows, KvCache& kv,
         F32Out logits, Input input, Tapped tapped, OfSequences adapters, OfSequences both_ways, OfSequences second, States states) {
  Step step = step_of(token_ids, query_start, context_tokens, block_table, logits_rows);
  step.adapters = of_sequences(adapters, step), step.both_ways = of_sequences(both_ways, step), step.second = of_sequences(second, step);
  add_states(step, states);
  add_ends(program, step, input, tapped);
  if (logits.shape(0) != logits_rows.shape(0) || (logits.shape(0) > 0 && static_cast<int64_t>(logits.shape(1)) != program.vocab()))
    throw std::invalid_argument("logits must be [rows wanted, vocabulary]");
  const Unlocked unlocked;
  program.run(step, kv, logits.data());
}

std::pair<std::vector<int32_t>, std::vector<float>> run_best(Program& program, I32 token_ids, I32 query_start, I32 context_tokens,
                                                             I32Table block_table, I32 logits_rows, KvCache& kv, Input input,
                                                             Tapped tapped, OfSequences adapters, OfSequences both_ways, OfSequences second, States states) {
  Step step = step_of(token_ids, query_start, context_tokens, block_table, logits_rows);
  step.adapters = of_sequences(adapters, step), step.both_ways = of_sequences(both_ways, step), step.second = of_sequences(second, step);
  add_states(step, states);
  add_ends(program, step, input, tapped);
  std::pair<std::vector<int32_t>, std::vector<float>> out;
  const Unlocked unlocked;
  for (const Best& best : program.run_best(step, kv)) {
    out.first.push_back(best.index);
    out.second.push_back(best.value);
  }
  return out;
}

void run_hidden(Program& program, I32 token_ids, I32 query_start, I32 context_tokens, I32Table block_table, I32 logits_rows, KvCache& kv,
                F32Out hidden, OfSequences adapters, OfSequences both_ways, OfSequences second, States states) {
  Step step = step_of(token_ids, query_start, context_tokens, block_table, logits_rows);
  step.adapters = of_sequences(adapters, step), step.both_ways = of_sequences(both_ways, step), step.second = of_sequences(second, step);
  add_states(step, states);
  if (hidden.shape(0) != logits_rows.shape(0) || static_cast<int64_t>(hidden.shape(1)) != program.hidden_width())
    throw std::invalid_argument("hidden must be [rows wanted, model dimension]");
  const Unlocked unlocked;
  program.run_hidden(step, kv, hidden.data());
}

nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> argmax(Program& program, F32Matrix logits) {
  const int64_t rows = static_cast<int64_t>(logits.shape(0)), vocab = static_cast<int64_t>(logits.shape(1));
  int64_t* ids = new int64_t[rows > 0 ? rows : 1];
  nb::capsule owner(ids, [](void* p) noexcept { delete[] static_cast<int64_t*>(p); });
  {
    const Unlocked unlocked;
    program.argmax(logits.data(), rows, vocab, ids);
  }
  return nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(ids, {static_cast<size_t>(rows)}, owner);
}

std::tuple<std::vector<int32_t>, std::vector<float>, std::vector<double>> draw(Program& program, F32Matrix logits, I32 rows,
                                                                               F32Vector temperatures, F64Vector quantiles) {
  const size_t n = rows.shape(0);
  if (temperatures.shape(0) != n || quantiles.shape(0) != n)
    throw std::invalid_argument("rows, temperatures and quantiles must be as many");
  for (size_t i = 0; i < n; ++i) {
    if (rows(i) < 0 || rows(i) >= static_cast<int64_t>(logits.shape(0))) throw std::invalid_argument("a row is outside the logits");
    if (!(temperatures(i) > 0.0f)) throw std::invalid_argument("a temperature must be above 0");
  }
  std::vector<Drawn> drawn(n);
  std::tuple<std::vector<int32_t>, std::vector<float>, std::vector<double>> out;
  const Unlocked unlocked;
  program.draw(logits.data(), static_cast<int64_t>(logits.shape(1)), rows.data(), static_cast<int64_t>(n), temperatures.data(),
               quantiles.data(), drawn.data());
  for (const Drawn& one : drawn) {
    std::get<0>(out).push_back(one.index);
    std::get<1>(out).push_back(one.best);
    std::get<2>(out).push_back(one.total);
  }
  return out;
}

nb::dict nanoseconds(const Program& program) {
  nb::dict out;
  for (int64_t i = 0; i < kCategories; ++i) out[kCategoryNames[i]] = program.nanoseconds()[i];
  return out;
}

// To be read only, which older torches (2.7) could not be told: it refuses such arrays.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> packed_blob(Program& program, int index) {
  const size_t bytes = static_cast<size_t>(packed_bytes(program.linear_at(index).shape));
  return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(const_cast<uint8_t*>(program.blob_at(index)), {bytes}, nb::find(program));
}

AttentionShape attention_shape(int64_t n_heads, int64_t n_kv_heads, int64_t head_dim, float scale, std::optional<int64_t> window,
                               std::optional<float> softcap, bool is_chunked, int64_t v_head_dim, std::optional<int64_t> most,
                               int64_t block, int64_t pool, bool by_means, bool is_listed, int64_t entry_tokens) {
  if (n_kv_heads < 1 || n_heads % n_kv_heads != 0) throw std::invalid_argument("n_heads must be a multiple of n_kv_heads");
  if (head_dim < 2 || head_dim % 2 != 0 || head_dim > kMostLatentDim) throw std::invalid_argument("head_dim must be even and at most 1024");
  if (v_head_dim < 1 || v_head_dim > kMostLatentDim) throw std::invalid_argument("v_head_dim must be at least 1 and at most 1024");
  AttentionShape shape;
  shape.n_heads = n_heads, shape.n_kv_heads = n_kv_heads, shape.head_dim = head_dim, shape.v_head_dim = v_head_dim, shape.scale = scale;
  if (window) shape.window = *window;
  shape.is_chunked = is_chunked;
  if (shape.window < 1 || (is_chunked && !window)) throw std::invalid_argument("a window has at least one token, and chunks are as long as one");
  if (softcap) shape.has_softcap = true, shape.softcap = *softcap;
  if (most) shape.most = *most;
  shape.block = block, shape.pool = pool, shape.by_means = by_means;
  shape.is_listed = is_listed, shape.entry_tokens = entry_tokens;
  if (entry_tokens != 0 && (entry_tokens < 2 || (entry_tokens < kGroupTokens ? kGroupTokens % entry_tokens : entry_tokens % kGroupTokens) != 0))
    throw std::invalid_argument("an entry is of 2, 4 or 8 tokens, or a multiple of 16");
  if (is_listed ? !window || is_chunked || block != 1 || pool != 1 || n_kv_heads != 1 || softcap : entry_tokens != 0)
    throw std::invalid_argument("a list has a window's tokens and entries, for one head of keys");
  if (pool < 1 || pool > kMostPool || (pool != 1 && (!most || block != 1 || *most < 2 * pool - 1 || (*most + 1) % pool != 0)))
    throw std::invalid_argument("pools that are chosen are whole, and what is seen at most is one less than some of them");
  if (shape.most < 1 || (most && ((window && !is_listed) || (block == 1 && n_kv_heads != 1)))) throw std::invalid_argument("at least one position is chosen, for one head of keys without a window");
  const bool are_whole = block >= kGroupTokens && block % kGroupTokens == 0 && kTileTokens % block == 0 && most && *most % block == 0;
  const bool are_parts = block > 1 && kGroupTokens % block == 0 && most && (*most + 1) % block == 0 && *most >= 2 * block - 1;
  if (by_means && !are_parts) throw std::invalid_argument("blocks that are chosen by the means of their keys are parts of a group, and seen with what makes no whole one");
  if (block != 1 && !by_means && !are_whole) throw std::invalid_argument("blocks that are chosen are of whole groups, and tiles of whole blocks");
  return shape;
}

// Of so many numbers of so many heads: see AttentionShape::distances.
int64_t reach_of(int64_t size, int64_t n_heads) {
  const int64_t width = size / n_heads;
  if (size % n_heads != 0 || width < 32 || width % 2 != 0) throw std::invalid_argument("numbers of distances are 2 reach + 32 of each head");
  return (width - 32) / 2;
}

void bind_shapes(nb::module_& m) {
  nb::class_<LinearShape>(m, "LinearShape")
      .def("__init__", [](LinearShape* self, const std::string& format, int64_t n, int64_t k, int64_t group, bool is_gated, bool has_bias,
                          const std::string& scale, const std::string& grid, bool is_wide) {
        if (n < 1 || k < 1 || (is_gated && n % 2 != 0)) throw std::invalid_argument("n and k must be at least 1, and n even where it is gated");
        const bool has_least = is_grouped(format_of(format)), is_fp8 = format_of(format) == Format::fp8;
        if (is_fp8 && ((group != 0 && group != kFp8Inputs) || scale != "f32" || grid != "signed")) throw std::invalid_argument("fp8 has scales in f32, of 128 inputs or (group 0) of rows");
        if (!is_fp8 && group != 32 && group != 64 && group != 128 && !(group == 16 && has_least)) throw std::invalid_argument("group must be 32, 64 or 128, or 16 of weights in groups");
        if ((scale == "s8" || scale == "e4m3") && (!has_least || group > kMaxNestedGroup)) throw std::invalid_argument("nested scales are of weights in groups of at most 64");
        if (scale == "e8m0" && !has_least) throw std::invalid_argument("scales of E8M0 are of weights in groups");
        if (is_wide && !has_least) throw std::invalid_argument("wide rows meet weights in groups alone");
        new (self) LinearShape{format_of(format), n, k, group, is_gated, has_bias, grid_of(format, scale, grid), is_wide};
      }, nb::kw_only(), nb::arg("format"), nb::arg("n"), nb::arg("k"), nb::arg("group") = 64, nb::arg("is_gated") = false, nb::arg("has_bias") = false,
         nb::arg("scale") = "f32", nb::arg("grid") = "signed", nb::arg("is_wide") = false)
      .def_prop_ro("packed_bytes", [](const LinearShape& self) { return packed_bytes(self); });
  nb::class_<AttentionShape>(m, "AttentionShape")
      .def("__init__", [](AttentionShape* self, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim, float scale,
                          std::optional<int64_t> window, std::optional<float> softcap, bool is_chunked, std::optional<int64_t> v_head_dim,
                          std::optional<int64_t> most, int64_t block, int64_t pool, bool by_means, bool is_listed, int64_t entry_tokens,
                          bool in_bytes) {
        new (self) AttentionShape(attention_shape(n_heads, n_kv_heads, head_dim, scale, window, softcap, is_chunked, v_head_dim.value_or(head_dim), most, block, pool, by_means, is_listed, entry_tokens));
        self->in_bytes = in_bytes;
      }, nb::kw_only(), nb::arg("n_heads"), nb::arg("n_kv_heads"), nb::arg("head_dim"), nb::arg("scale"),
         nb::arg("window").none() = nb::none(), nb::arg("softcap").none() = nb::none(), nb::arg("is_chunked") = false,
         nb::arg("v_head_dim").none() = nb::none(), nb::arg("most").none() = nb::none(), nb::arg("block") = 1, nb::arg("pool") = 1, nb::arg("by_means") = false,
         nb::arg("is_listed") = false, nb::arg("entry_tokens") = 0, nb::arg("in_bytes") = false);
}

void bind_operations(nb::class_<Program>& program) {
  program
      .def("embed", [](Program& p, int table, int x, float scale, int positions, int64_t first_position, int types) {
        p.record(Category::embed, EmbedOp{table, x, scale, {positions, first_position, types}});
      }, nb::arg("table"), nb::arg("x"), nb::arg("scale"), nb::arg("positions") = -1, nb::arg("first_position") = 0, nb::arg("types") = -1)
      .def("embed_tied", [](Program& p, int head, int x, float scale, int64_t first, std::optional<int64_t> vocab, int positions, int64_t first_position, int types) {
        p.record(Category::embed, TiedEmbedOp{head, x, scale, first, vocab.value_or(p.linear_at(head).shape.n), {positions, first_position, types}});
      }, nb::arg("head"), nb::arg("x"), nb::arg("scale"), nb::arg("first") = 0, nb::arg("vocab").none() = nb::none(), nb::arg("positions") = -1,
         nb::arg("first_position") = 0, nb::arg("types") = -1)
      .def("norm", [](Program& p, int x, int weight, float eps, int out, int bias, bool is_centred, int64_t parts) {
        if (parts < 1 || p.buffer_width(x) % parts != 0 || (parts > 1 && (bias != -1 || is_centred))) throw std::invalid_argument("equal parts of a row are normed without a bias and a mean");
        p.record(Category::norm, NormOp{x, weight, eps, out, bias, is_centred, parts});
      }, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out"), nb::arg("bias") = -1, nb::arg("is_centred") = false, nb::arg("parts") = 1)
      .def("add_norm", [](Program& p, int y, int weight, float eps, int x, float scale) { p.record(Category::norm, AddNormOp{y, weight, eps, x, scale}); },
           nb::arg("y"), nb::arg("weight"), nb::arg("eps"), nb::arg("x"), nb::arg("scale") = 1.0f)
      .def("add", [](Program& p, int y, int x, int gate, float scale) { p.record(Category::norm, AddOp{y, x, gate, scale}); }, nb::arg("y"), nb::arg("x"),
           nb::arg("gate") = -1, nb::arg("scale") = 1.0f)
      .def("prepare", [](Program& p, int x, int rows) { p.record(Category::norm, PrepareOp{x, rows}); })
      .def("linear", [](Program& p, const std::string& category, int weight, int rows, int out, const std::string& store, const std::string& activation,
                        int64_t column) {
        p.record(category_of(category), LinearOp{weight, rows, out, store_of(store), activation_of(activation), column});
      }, nb::kw_only(), nb::arg("category"), nb::arg("weight"), nb::arg("rows"), nb::arg("out"), nb::arg("store") = "f32", nb::arg("activation") = "silu",
         nb::arg("column") = 0)
      .def("rotate", [](Program& p, int qkv, int q, int layer, const AttentionShape& shape, std::optional<int> rope, std::optional<int> q_norm,
                        std::optional<int> k_norm, bool has_full_width_norm, float norm_eps, std::optional<std::array<int64_t, 4>> row,
                        bool has_head_norms, std::optional<std::tuple<float, int64_t, int64_t>> query_scale, bool has_v_norm, bool writes_kv, bool has_v,
                        bool norms_turned, float v_scale, bool has_norm_biases) {
        RotateOp op{};
        op.shape.has_norm_biases = has_norm_biases;
        if (has_norm_biases && !has_head_norms) throw std::invalid_argument("norms of q and k have biases where each head has a weight of its own");
        const std::array<int64_t, 4> own{shape.n_heads, shape.n_kv_heads, 0, 0}, heads = row.value_or(own);
        op.shape.row_heads = heads[0], op.shape.row_kv_heads = heads[1], op.shape.first_head = heads[2], op.shape.first_kv_head = heads[3];
        op.qkv = qkv, op.q = q, op.layer = layer;
        op.shape.n_heads = shape.n_heads, op.shape.n_kv_heads = shape.n_kv_heads, op.shape.head_dim = shape.head_dim, op.shape.v_head_dim = shape.v_head_dim;
        op.shape.has_full_width_norm = has_full_width_norm, op.shape.has_head_norms = has_head_norms, op.shape.norm_eps = norm_eps;
        op.shape.has_v_norm = has_v_norm, op.shape.writes_kv = writes_kv;
        op.shape.has_v = has_v, op.shape.norms_turned = norms_turned, op.shape.v_scale = v_scale;
        if (query_scale) op.shape.query_scale = query_scale_of(*query_scale);
        if (rope) op.has_rope = true, op.rope = *rope;
        if (q_norm) op.has_q_norm = true, op.q_norm = *q_norm;
        if (k_norm) op.has_k_norm = true, op.k_norm = *k_norm;
        p.record(Category::rope, op);
      }, nb::kw_only(), nb::arg("qkv"), nb::arg("q"), nb::arg("layer"), nb::arg("shape"), nb::arg("rope").none(), nb::arg("q_norm").none(),
         nb::arg("k_norm").none(), nb::arg("has_full_width_norm"), nb::arg("norm_eps"), nb::arg("row").none() = nb::none(),
         nb::arg("has_head_norms") = false, nb::arg("query_scale").none() = nb::none(), nb::arg("has_v_norm") = false, nb::arg("writes_kv") = true, nb::arg("has_v") = true,
         nb::arg("norms_turned") = false, nb::arg("v_scale") = 1.0f, nb::arg("has_norm_biases") = false)
      .def("attention", [](Program& p, int q, int out, int layer, const AttentionShape& shape, int sinks, int64_t column, int choice, int slopes, int distances,
                          int of_queries, int of_keys, int places, int64_t n_places) {
        AttentionOp op{q, out, layer, shape, sinks, column, choice, slopes, distances, of_queries, of_keys, places};
        if (distances != -1) op.shape.reach = reach_of(p.vector_size(distances), shape.n_heads);
        if (places != -1) op.shape.reach = (p.vector_size(places) - 1) / 2, op.shape.n_places = n_places;
        p.record(Category::attention, op);
      }, nb::kw_only(), nb::arg("q"), nb::arg("out"), nb::arg("layer"), nb::arg("shape"), nb::arg("sinks") = -1, nb::arg("column") = 0, nb::arg("choice") = -1,
         nb::arg("slopes") = -1, nb::arg("distances") = -1, nb::arg("of_queries") = -1, nb::arg("of_keys") = -1, nb::arg("places") = -1, nb::arg("n_places") = 0)
      .def("meet", [](Program& p, int out) { p.record(Category::attention, MeetOp{out}); })
      .def("heads", [](Program& p, std::vector<int> weights, int x, int64_t head_stride, int rows, int out, int64_t out_head_stride, const std::string& store,
                       int64_t column, int64_t first) {
        p.record(Category::qkv, HeadsOp{std::move(weights), x, head_stride, rows, out, out_head_stride, store_of(store), column, first});
      }, nb::kw_only(), nb::arg("weights"), nb::arg("x"), nb::arg("head_stride"), nb::arg("rows"), nb::arg("out"), nb::arg("out_head_stride"), nb::arg("store"),
         nb::arg("column") = 0, nb::arg("first") = 0)
      .def("scale_queries", [](Program& p, int q, const std::tuple<float, int64_t, int64_t>& scale) {
        p.record(Category::rope, ScaleQueriesOp{q, query_scale_of(scale)});
      }, nb::kw_only(), nb::arg("q"), nb::arg("scale"))
      .def("scale_heads", [](Program& p, int q, int by_head) {
        const int64_t size = p.vector_size(by_head);
        if (size < 2 || size % 2 != 0 || p.buffer_width(q) % (size / 2) != 0) throw std::invalid_argument("heads have two numbers each that scale them, and are equally wide");
        p.record(Category::rope, ScaleQueriesOp{q, {}, by_head});
      }, nb::kw_only(), nb::arg("q"), nb::arg("by_head"))
      .def("moe", [](Program& p, int router, int router_rows, int scores, std::vector<int> gate_up, std::vector<int> down, int rows,
                     std::optional<int> hidden, int hidden_rows, int expanded, int out, int64_t top_k, bool renormalises, const std::string& activation,
                     const std::pair<std::string, float>& scores_by, int choice_bias, std::array<int64_t, 3> groups, float routed_scale, std::optional<int> wide,
                     std::array<float, 4> gate, bool weighs_input, int64_t hidden_column, int64_t column, std::vector<int> up, int up_rows, int scales, const std::string& curve, float softcap,
                     const std::pair<int64_t, int>& identities, int by_token, float score_scale, const std::pair<int, float>& behind) {
        MoeOp op{};
        op.by_token = by_token, op.score_scale = score_scale, op.behind = behind.first, op.behind_eps = behind.second;
        if (op.behind != -1 && (p.vector_size(op.behind) != 2 * p.buffer_width(out) || identities.first > 0)) throw std::invalid_argument("what is behind experts has two numbers for each of theirs, and all have weights");
        op.n_identities = identities.first, op.given = identities.second;
        op.up = std::move(up), op.up_rows = up_rows;
        op.hidden_column = hidden_column, op.column = column;
        op.router = router, op.router_rows = router_rows, op.scores = scores;
        op.gate_up = std::move(gate_up), op.down = std::move(down), op.rows = rows;
        if (hidden) op.has_hidden = true, op.hidden = *hidden;
        op.hidden_rows = hidden_rows, op.expanded = expanded, op.out = out;
        op.top_k = top_k, op.renormalises = renormalises, op.activation = activation_of(activation);
        op.by = scores_of(scores_by.first), op.margin = scores_by.second, op.choice_bias = choice_bias, op.scales = scales, op.routed_scale = routed_scale;
        op.softcap = softcap, op.n_groups = groups[0], op.groups_per_token = groups[1], op.group_best = groups[2];
        if (wide) op.joins_apart = true, op.wide = *wide, op.gate = form_of(gate);
        if (!curve.empty()) op.is_gated = false, op.curve = curve_of(curve);
        if ((weighs_input && (!wide || !op.is_gated)) || (!op.is_gated && !wide)) throw std::invalid_argument("experts that weigh their input join gate and up apart, and those without a gate have no other way");
        if (op.curve == Curve::xielu || op.curve == Curve::clip) throw std::invalid_argument("experts have no curve " + curve);
        op.weighs_input = weighs_input;
        const int64_t experts = op.n_scored();
        if (op.n_identities < 0 || (op.n_identities > 0 && op.weighs_input)) throw std::invalid_argument("the number of experts without weights is wrong, or they weigh their input");
        if (op.n_groups < 1 || experts % op.n_groups != 0 || op.groups_per_token < 1 || op.groups_per_token > op.n_groups || op.group_best < 1 || op.group_best > kMostGroupBest || op.group_best > experts / op.n_groups ||
            top_k > experts / op.n_groups * op.groups_per_token) throw std::invalid_argument("the groups of experts are wrong");
        if (op.gate_up.size() != op.down.size() || top_k < 1 || top_k > experts) throw std::invalid_argument("top_k or the experts are wrong");
        if (!op.up.empty() && (op.up.size() != op.down.size() || op.has_hidden == op.joins_apart)) throw std::invalid_argument("gate and up apart need as many weights, and a buffer");
        p.record(Category::moe, std::move(op));
      }, nb::kw_only(), nb::arg("router"), nb::arg("router_rows"), nb::arg("scores"), nb::arg("gate_up"), nb::arg("down"), nb::arg("rows"), nb::arg("hidden").none(),
         nb::arg("hidden_rows"), nb::arg("expanded"), nb::arg("out"), nb::arg("top_k"), nb::arg("renormalises"), nb::arg("activation"),
         nb::arg("scores_by") = std::pair<std::string, float>{"softmax", 0.0f}, nb::arg("choice_bias") = -1, nb::arg("groups") = std::array<int64_t, 3>{1, 1, 1}, nb::arg("routed_scale") = 1.0f,
         nb::arg("wide").none() = nb::none(), nb::arg("gate") = std::array<float, 4>{1.0f, INFINITY, INFINITY, 0.0f}, nb::arg("weighs_input") = false, nb::arg("hidden_column") = 0, nb::arg("column") = 0,
         nb::arg("up") = std::vector<int>{}, nb::arg("up_rows") = -1, nb::arg("scales") = -1, nb::arg("curve") = "", nb::arg("softcap") = 0.0f,
         nb::arg("identities") = std::pair<int64_t, int>{0, -1}, nb::arg("by_token") = -1, nb::arg("score_scale") = 1.0f, nb::arg("behind") = std::pair<int, float>{-1, 0.0f})
      .def("input", [](Program& p, int x) { p.record(Category::embed, InputOp{x}); })
      .def("tap", [](Program& p, int x, int number) { p.record(Category::norm, TapOp{x, number}); })
      .def("head", [](Program& p, int x, std::optional<int> norm, float eps, int rows, int weight, float scale, std::optional<float> softcap, int bias,
                      bool is_centred, int64_t first, std::optional<int64_t> vocab) {
        p.record(Category::head, HeadOp{x, norm.value_or(0), eps, rows, weight, scale, softcap.value_or(0.0f), softcap.has_value(), norm.has_value(), bias,
                                        is_centred, first, vocab.value_or(p.linear_at(weight).n_outputs)});
      }, nb::kw_only(), nb::arg("x"), nb::arg("norm").none(), nb::arg("eps"), nb::arg("rows"), nb::arg("weight"), nb::arg("scale") = 1.0f, nb::arg("softcap").none() = nb::none(),
         nb::arg("bias") = -1, nb::arg("is_centred") = false, nb::arg("first") = 0, nb::arg("vocab").none() = nb::none());
}

void bind_program(nb::module_& m) {
  nb::class_<Program> program(m, "Program");
  program
      .def("__init__", [](Program* place, const std::string& kernels, int threads, std::optional<std::vector<int>> cpus) {
        new (place) Program(kernel_set(kernels), threads, cpus ? std::move(*cpus) : ThreadPool::allowed_cpus());
      }, nb::arg("kernels"), nb::arg("threads"), nb::arg("cpus").none() = nb::none())
      .def("__init__", [](Program* place, const std::string& kernels, const Program& beside) {
        new (place) Program(kernel_set(kernels), beside);
      }, nb::arg("kernels"), nb::arg("beside"))
      .def("add_linear", &add_linear, nb::arg("shape"), nb::arg("parts"), nb::arg("bias").none() = nb::none(),
           nb::arg("directions").none() = nb::none())
      .def("add_coded_linear", &add_coded_linear, nb::arg("shape"), nb::arg("parts"), nb::arg("bias").none() = nb::none())
      .def("add_random_linear", &Program::add_random_linear, nb::arg("shape"), nb::arg("seed"), nb::arg("amplitude"), nb::call_guard<Unlocked>())
      .def("add_packed_linear", &Program::add_packed_linear, nb::arg("shape"))
      .def("add_mapped_linear", &add_mapped_linear, nb::keep_alive<1, 3>(), nb::arg("shape"), nb::arg("blob"))
      .def("settle", &Program::settle, nb::arg("waits") = false, nb::call_guard<Unlocked>())
      .def_prop_ro("is_settling", &Program::is_settling)
      .def("read_packed", &read_packed, nb::arg("saved"))
      .def("linear_scratch_bytes", [](const Program& p, const LinearShape& shape, int64_t rows, bool is_routed, int threads) { return linear_scratch_bytes(p.kernels(), shape, rows, is_routed, threads); },
           nb::arg("shape"), nb::arg("rows"), nb::arg("is_routed"), nb::arg("threads"))
      .def("add_packed_part", &add_packed_part, nb::arg("shape"), nb::arg("whole"), nb::arg("rows"), nb::arg("blob"))
      .def("add_random_part", &add_random_part, nb::arg("shape"), nb::arg("whole"), nb::arg("rows"), nb::arg("seed"), nb::arg("amplitude"))
      .def("join", &Program::join, nb::keep_alive<1, 2>(), nb::arg("team"))
      .def("serve", &Program::serve, nb::arg("caches"), nb::call_guard<Unlocked>())
      .def("add_vector", [](Program& p, F32Vector v) { return p.add_vector(std::vector<float>(v.data(), v.data() + v.shape(0))); })
      .def("add_table", &add_table, nb::keep_alive<1, 2>())
      .def("add_rope", &Program::add_rope, nb::arg("inverse_frequency"), nb::arg("attention_factor"))
      .def("add_adapter", &add_adapter, nb::arg("sites"))
      .def("drop_adapter", &Program::drop_adapter, nb::arg("number"))
      .def("adapter_bytes", &Program::adapter_bytes, nb::arg("number"))
      .def("add_f32", [](Program& p, int64_t width, int64_t rows, bool is_shared) { return add_plain(p, BufferKind::f32, width, rows, is_shared); },
           nb::arg("width"), nb::arg("rows_per_token") = 1, nb::arg("is_shared") = false)
      .def("add_bf16", [](Program& p, int64_t width, bool is_shared) { return add_plain(p, BufferKind::bf16, width, 1, is_shared); },
           nb::arg("width"), nb::arg("is_shared") = false)
      .def("add_rows", &add_rows, nb::arg("format"), nb::arg("width"), nb::arg("rows_per_token") = 1, nb::arg("is_shared") = false,
           nb::arg("order").none() = nb::none())
      .def("run", &run, nb::arg("token_ids"), nb::arg("query_start"), nb::arg("context_tokens"), nb::arg("block_table"),
           nb::arg("logits_rows"), nb::arg("kv"), nb::arg("logits"), nb::arg("input").none() = nb::none(), nb::arg("tapped").none() = nb::none(),
           nb::arg("adapters").none() = nb::none(), nb::arg("both_ways").none() = nb::none(), nb::arg("second").none() = nb::none(),
           nb::arg("states").none() = nb::none())
      .def("run_best", &run_best, nb::arg("token_ids"), nb::arg("query_start"), nb::arg("context_tokens"), nb::arg("block_table"),
           nb::arg("logits_rows"), nb::arg("kv"), nb::arg("input").none() = nb::none(), nb::arg("tapped").none() = nb::none(),
           nb::arg("adapters").none() = nb::none(), nb::arg("both_ways").none() = nb::none(), nb::arg("second").none() = nb::none(),
           nb::arg("states").none() = nb::none())
      .def("run_hidden", &run_hidden, nb::arg("token_ids"), nb::arg("query_start"), nb::arg("context_tokens"), nb::arg("block_table"),
           nb::arg("logits_rows"), nb::arg("kv"), nb::arg("hidden"), nb::arg("adapters").none() = nb::none(), nb::arg("both_ways").none() = nb::none(), nb::arg("second").none() = nb::none(),
           nb::arg("states").none() = nb::none())
      .def_prop_ro("hidden_width", &Program::hidden_width)
      .def("tap_width", &Program::tap_width, nb::arg("number"))
      .def("argmax", &argmax)
      .def("draw", &draw, nb::arg("logits"), nb::arg("rows"), nb::arg("temperatures"), nb::arg("quantiles"))
      .def("nanoseconds", &nanoseconds)
      .def("read_buffer", [](const Program& p, int index, F32Out out) {
        if (static_cast<int64_t>(out.shape(1)) != p.buffer_width(index)) throw std::invalid_argument("out must be as wide as the buffer");
        p.read_buffer(index, static_cast<int64_t>(out.shape(0)), out.data());
      })
      .def("packed_blob", &packed_blob)
      .def_prop_ro("weight_bytes", &Program::weight_bytes)
      .def_prop_ro("table_bytes", &Program::table_bytes)
      .def_prop_ro("kernels", [](const Program& p) { return std::string(p.kernels().name); })
      .def_prop_ro("n_meetings", &Program::n_meetings)
      .def_prop_ro("written", [](const Program& p) {
        std::vector<std::pair<int64_t, int64_t>> found;
        for (const Range& one : p.written()) found.push_back({one.begin, one.end});
        return found;
      })
      .def("know_written", [](Program& p, const std::vector<RowRanges>& by_rank) {
        std::vector<std::vector<Range>> ranges;
        for (const RowRanges& one : by_rank) ranges.push_back(ranges_of(one));
        p.know_written(std::move(ranges));
      }, nb::arg("by_rank"))
      .def_prop_ro("threads", &Program::threads);
  bind_operations(program);
  bind_streams(program);
  bind_latents(program);
  bind_states(m, program);
}

}  // namespace
}  // namespace diptych

NB_MODULE(_cpu, m) {
  nb::set_leak_warnings(false);  // daemon threads end with the process, and so does what they hold
  using namespace diptych;
  bind_shapes(m);
  bind_kv(m);
  bind_program(m);
  bind_machine(m);
}
