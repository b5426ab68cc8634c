#include "program/program.h"
#include "program/program_names.h"
#include "program/program_uses.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "memory/pages.h"
#include "memory/xxh3.h"

namespace diptych {

const char* const kCategoryNames[kCategories] = {"embed", "norm", "qkv",     "rope", "attention",
                                                 "o",     "gate_up", "down", "moe",  "head"};

void RopeTable::grow(int64_t positions) {
  if (positions <= n_positions) return;
  const int64_t half = static_cast<int64_t>(inverse_frequency.size());
  const int64_t wanted = std::max<int64_t>(positions, 2 * n_positions);
  cosine.resize(wanted * half);
  sine.resize(wanted * half);
  for (int64_t p = n_positions; p < wanted; ++p)
    for (int64_t i = 0; i < half; ++i) {
      // the angle is rounded to fp32 first, as everywhere the models were trained
      const double angle = static_cast<float>(p) * static_cast<float>(inverse_frequency[i]);
      cosine[p * half + i] = static_cast<float>(std::cos(angle) * attention_factor);
      sine[p * half + i] = static_cast<float>(std::sin(angle) * attention_factor);
    }
  n_positions = wanted;
}

void Routing::resize(int64_t tokens, int64_t top_k, int64_t n_experts) {
  expert_ids.resize(tokens * top_k);
  expert_weights.resize(tokens * top_k);
  expert_begin.resize(n_experts + 1);
  source_rows.resize(tokens * top_k);
  expanded_rows.resize(tokens * top_k);
}

Program::Program(const KernelSet& kernels, int threads, std::vector<int> cpus)
    : kernels_(kernels), shared_pool_(std::make_shared<ThreadPool>(threads, std::move(cpus))), pool_(*shared_pool_),
      waiting_(pool_.size()) {}

Program::Program(const KernelSet& kernels, const Program& beside)
    : kernels_(kernels), shared_pool_(beside.shared_pool_), pool_(*shared_pool_), waiting_(pool_.size()) {}

// ---- weights ----

// Weights share large mappings: one of their own each, rounded up to huge pages, would cost a tenth of a small model. Behind each lies a line
// that nobody touches, which a sanitizer sees to.
uint8_t* Program::reserve_weights(int64_t bytes) {
  constexpr int64_t kChunk = 64 << 20, kApart = 64;
  if (weights_left_ < bytes + kApart) {
    weight_pages_.emplace_back(std::max(bytes + kApart, kChunk));
    weights_left_ = weight_pages_.back().bytes();
  }
  const PageBuffer& pages = weight_pages_.back();
  const int64_t begin = pages.bytes() - weights_left_, end = begin + bytes;
  pages.forbid(end, end + kApart);
  weights_left_ -= bytes + kApart;
  return pages.data() + begin;
}

namespace {

// The checksum of bytes of a mapped file, copied unless out is null or data. Their pages go back behind it, but of what stays in
// use there.
uint64_t read_saved(uint8_t* out, const uint8_t* data, int64_t bytes) {
  constexpr int64_t kPiece = 2 << 20;
  Xxh3Copy pass(bytes);
  for (int64_t at = 0; at < bytes; at += kPiece) {
    const int64_t n = std::min(kPiece, bytes - at);
    if (out == data) {
      ask_for_pages(data + at, n);
      pass.read(data + at, n);
      continue;
    }
    const MappedPages pages(data + at, n);
    out == nullptr ? pass.read(data + at, n) : pass.copy_past_caches(out + at, data + at, n);
  }
  return pass.digest();
}

}  // namespace

int Program::add_linear(const LinearShape& shape, const std::vector<WeightPart>& parts, const float* bias, const Feedback& feedback) {
  uint8_t* blob = reserve_weights(packed_bytes(shape));
  pool_.run([&](int thread, int threads) {
    pack_linear(kernels_, shape, parts.data(), static_cast<int64_t>(parts.size()), bias, blob, thread, threads, feedback);
  });
  linears_.push_back(view_packed(shape, blob));
  return static_cast<int>(linears_.size()) - 1;
}

int Program::add_coded_linear(const LinearShape& shape, const std::vector<CodePart>& parts, const float* bias) {
  check_codes(shape, parts.data(), static_cast<int64_t>(parts.size()));
  uint8_t* blob = reserve_weights(packed_bytes(shape));
  pool_.run([&](int thread, int threads) {
    pack_codes(kernels_, shape, parts.data(), static_cast<int64_t>(parts.size()), bias, blob, thread, threads);
  });
  linears_.push_back(view_packed(shape, blob));
  return static_cast<int>(linears_.size()) - 1;
}

int Program::add_random_linear(const LinearShape& shape, uint64_t seed, float amplitude) {
  uint8_t* blob = reserve_weights(packed_bytes(shape));
  pool_.run([&](int thread, int threads) { pack_random(kernels_, shape, seed, amplitude, blob, thread, threads); });
  linears_.push_back(view_packed(shape, blob));
  return static_cast<int>(linears_.size()) - 1;
}

int Program::add_packed_linear(const LinearShape& shape) {
  linears_.push_back(view_packed(shape, reserve_weights(packed_bytes(shape))));
  return static_cast<int>(linears_.size()) - 1;
}

int Program::add_mapped_linear(const LinearShape& shape, const uint8_t* blob) {
  if (reinterpret_cast<uintptr_t>(blob) % 64 != 0) throw std::invalid_argument("a packed weight begins between multiples of 64 bytes");
  linears_.push_back(view_packed(shape, blob));
  mapped_.push_back(static_cast<int>(linears_.size()) - 1);
  return mapped_.back();
}

void Program::settle(bool waits) {
  if (!mapped_.empty()) start_settling();
  if (!waits || settling_ == nullptr) return;
  settling_->wait();
  take_settled();
}

void Program::start_settling() {
  std::vector<Settling::Weight> weights;
  for (int i : mapped_) {
    const int64_t bytes = packed_bytes(linears_[i].shape);
    weights.push_back({i, blob_at(i), reserve_weights(bytes), bytes});
  }
  mapped_.clear();
  settling_ = std::make_unique<Settling>(std::move(weights));
}

void Program::take_settled() {
  if (settling_ == nullptr) return;
  const bool was_last = settling_->take([&](const Settling::Weight& weight) {
    PackedLinear& linear = linears_[weight.linear];
    auto balance = std::move(linear.balance);
    linear = view_packed(linear.shape, weight.to);
    linear.balance = std::move(balance);
  });
  if (was_last) settling_ = nullptr;
}

std::vector<int> Program::read_packed(const std::vector<Saved>& saved) {
  for (const Saved& one : saved)
    if ((one.checksum && !Xxh3Copy::takes(one.bytes)) || (one.linear >= 0 && one.bytes != packed_bytes(linears_.at(one.linear).shape)))
      throw std::invalid_argument("a packed weight has another size");
  std::vector<int> order(saved.size());  // the largest first, as a checksum is one thread's
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return saved[a].bytes > saved[b].bytes; });
  std::vector<uint8_t> is_other(saved.size(), 0);
  std::atomic<size_t> next{0};
  pool_.run([&](int, int) {
    for (size_t i; (i = next.fetch_add(1)) < order.size();) {
      const Saved& one = saved[order[i]];
      uint8_t* const out = one.linear < 0 ? nullptr : const_cast<uint8_t*>(blob_at(one.linear));
      if (one.checksum)
        is_other[order[i]] = read_saved(out, one.data, one.bytes) != *one.checksum;
      else if (out != nullptr && out != one.data)
        std::memcpy(out, one.data, static_cast<size_t>(one.bytes));
    }
  });
  std::vector<int> others;
  for (size_t i = 0; i < saved.size(); ++i)
    if (is_other[i]) others.push_back(static_cast<int>(i));
  return others;
}

int Program::add_packed_part(const LinearShape& shape, const LinearShape& whole, const std::vector<Range>& rows, const uint8_t* bytes) {
  check_part(shape, whole, rows);
  uint8_t* blob = reserve_weights(packed_bytes(shape));
  pool_.run([&](int thread, int threads) { copy_packed_part(shape, whole, rows, bytes, blob, thread, threads); });
  linears_.push_back(view_packed(shape, blob));
  return static_cast<int>(linears_.size()) - 1;
}

int Program::add_random_part(const LinearShape& shape, const LinearShape& whole, const std::vector<Range>& rows, uint64_t seed,
                             float amplitude) {
  uint8_t* blob = reserve_weights(packed_bytes(shape));
  pool_.run([&](int thread, int threads) { pack_random(kernels_, shape, seed, amplitude, blob, thread, threads, &whole, &rows); });
  linears_.push_back(view_packed(shape, blob));
  return static_cast<int>(linears_.size()) - 1;
}

int Program::add_vector(std::vector<float> values) {
  vectors_.push_back(std::move(values));
  return static_cast<int>(vectors_.size()) - 1;
}

int Program::add_table(const Table& table) {
  tables_.push_back(table);
  return static_cast<int>(tables_.size()) - 1;
}

int Program::add_rope(std::vector<double> inverse_frequency, double attention_factor) {
  RopeTable rope;
  rope.inverse_frequency = std::move(inverse_frequency);
  rope.attention_factor = attention_factor;
  ropes_.push_back(std::move(rope));
  return static_cast<int>(ropes_.size()) - 1;
}

int Program::add_buffer(const Buffer& buffer) {
  if (arena_tokens_ != 0) throw std::invalid_argument("buffers are added before the first run");
  if (buffer.shared && team_ == nullptr) throw std::invalid_argument("a program of one rank has no shared buffers");
  buffers_.push_back(buffer);
  return static_cast<int>(buffers_.size()) - 1;
}

int Program::add_adapter(const std::vector<std::pair<int, std::vector<AdapterPart>>>& sites) {
  std::vector<AdapterParts> parts;
  for (const auto& [weight, of_layer] : sites) parts.push_back({weight, linears_.at(weight), of_layer});
  auto adapter = pack_adapter(kernels_, parts);
  auto place = std::find(adapters_.begin(), adapters_.end(), nullptr);
  if (place == adapters_.end()) place = adapters_.insert(place, nullptr);
  *place = std::move(adapter);
  return static_cast<int>(place - adapters_.begin());
}

void Program::drop_adapter(int number) {
  adapter_bytes(number);
  adapters_[number] = nullptr;
}

int64_t Program::adapter_bytes(int number) const {
  if (number < 0 || number >= static_cast<int>(adapters_.size()) || adapters_[number] == nullptr)
    throw std::invalid_argument("there is no adapter " + std::to_string(number));
  return adapters_[number]->bytes();
}

int64_t Program::weight_bytes() const {
  int64_t total = 0;
  for (const PackedLinear& linear : linears_) total += packed_bytes(linear.shape);
  for (const auto& vector : vectors_) total += static_cast<int64_t>(vector.size()) * 4;
  return total - gathered_bytes();
}

int64_t Program::gathered_bytes() const {
  int64_t total = 0;
  for (const Op& op : ops_)
    if (const auto* inputs = std::get_if<LayerInputsOp>(&op.body); inputs != nullptr && inputs->packed != -1)
      total += packed_bytes(linears_[inputs->packed].shape);
  return total;
}

int64_t Program::table_bytes() const {
  int64_t total = gathered_bytes();
  for (const Table& table : tables_) total += table.rows * table.width * (table.source == Source::f32 ? 4 : 2);
  return total;
}

// ---- recording ----

namespace {

// Rows of two for each of x are written a whole row at a time and read by products over all rows: a list would name halves of pairs, and
// an output stored as rows would fill one half.
struct Pairs {
  const std::vector<Buffer>& all;
  void refuse(std::initializer_list<int> numbers, const char* where) const {
    for (const int number : numbers)
      if (all[number].kind == BufferKind::rows && all[number].rows_kind == RowsKind::bf16_pair)
        throw std::invalid_argument("buffer " + std::to_string(number) + " holds rows of bf16_pair, which cannot be " + where);
  }

  void operator()(const LinearOp& op) const { refuse({op.out}, "an operation's output"); }
  void operator()(const AttentionOp& op) const { refuse({op.out}, "an operation's output"); }
  void operator()(const MoeOp& op) const {
    refuse({op.rows, op.hidden_rows}, "read by a list of rows");
    if (!op.up.empty()) refuse({op.up_rows}, "read by a list of rows");
  }
  void operator()(const HeadsOp& op) const { refuse({op.rows}, "read by a list of rows"), refuse({op.out}, "an operation's output"); }
  template <typename Op>
  void operator()(const Op&) const {}
};

}  // namespace

// All ranks meet behind what writes a shared buffer, so nobody reads it too early. Nobody writes it too early either if they have met
// since it was last read; the end of a step is a meeting, so the next one begins with nothing read.
void Program::check_order(const OpBody& body) {
  Uses uses;
  std::visit(uses, body);
  bool meets = false;
  for (const int written : uses.writes) {
    if (!buffers_[written].shared) continue;
    meets = true;
    if (std::find(read_since_meeting_.begin(), read_since_meeting_.end(), written) != read_since_meeting_.end())
      throw std::invalid_argument("an operation writes shared buffer " + std::to_string(written) + ", which another rank may still read");
  }
  for (const int read : uses.reads)
    if (buffers_[read].shared) read_since_meeting_.push_back(read);
  if (meets) read_since_meeting_.clear();
  meets_.push_back(meets && team_ != nullptr);
}

int64_t Program::n_meetings() const {
  if (team_ == nullptr) return 0;
  int64_t n = 1;  // the last
  for (size_t i = 0; i < ops_.size(); ++i) n += meets_[i] + (std::holds_alternative<MoeOp>(ops_[i].body) ? 2 : 0);
  return n;
}

void Program::join(Team& team) {
  if (!buffers_.empty() || !ops_.empty()) throw std::invalid_argument("a program joins its team before anything is recorded");
  team_ = &team;
}

void Program::record(Category category, OpBody body) {
  std::visit(Names{{buffers_.size(), linears_.size(), vectors_.size(), tables_.size(), ropes_.size()}}, body);
  std::visit(Pairs{buffers_}, body);
  check_order(body);
  note_meetings(body);
  auto multiplies_alone = [&](int weight) { linears_[weight].balance = balance_; };  // threads meet before and after it
  if (const auto* op = std::get_if<LinearOp>(&body)) multiplies_alone(op->weight);
  if (const auto* op = std::get_if<HeadOp>(&body)) multiplies_alone(op->weight);
  if (const auto* op = std::get_if<MoeOp>(&body)) multiplies_alone(op->router);
  int plan = 0;
  if (const auto* op = std::get_if<AttentionOp>(&body)) {
    for (const int gained : {op->of_queries, op->of_keys})
      if (op->places != -1 && buffers_.at(gained).width != op->shape.n_heads * op->shape.n_places) throw std::invalid_argument("scores gain a number for each head and place");
    auto same = [&](const AttentionShape& other) {  // what a plan is made of
      const AttentionShape& one = op->shape;
      return other.window == one.window && other.is_chunked == one.is_chunked && other.n_heads == one.n_heads && other.n_kv_heads == one.n_kv_heads &&
             other.head_dim == one.head_dim && other.v_head_dim == one.v_head_dim && other.most == one.most &&
            other.block == one.block && other.pool == one.pool && other.by_means == one.by_means && other.is_listed == one.is_listed && other.entry_tokens == one.entry_tokens;
    };
    auto found = std::find_if(attention_shapes_.begin(), attention_shapes_.end(), same);
    plan = static_cast<int>(found - attention_shapes_.begin());
    if (found == attention_shapes_.end()) attention_shapes_.push_back(op->shape);
    attention_plans_.resize(attention_shapes_.size());
    n_layers_ = std::max<int64_t>(n_layers_, op->layer + 1);
  }
  if (std::holds_alternative<CacheLatentsOp>(body) || std::holds_alternative<CacheRowsOp>(body)) has_latents_ = true;
  if (const auto* op = std::get_if<ChooseOp>(&body)) {
    const int64_t block = op->shape.by_means ? 1 : op->shape.block;  // of scores: of pooled keys one for each position
    const int64_t most = op->shape.is_listed ? (op->shape.most + 1) * op->shape.entry_tokens - 1 : op->shape.most;  // the first position with a choice
    if (most_chosen_ != INT64_MAX && (most_chosen_ != most || chosen_block_ != block || chosen_pool_ != op->shape.pool)) throw std::invalid_argument("all indices of a program choose equally many");
    most_chosen_ = most, chosen_block_ = block, chosen_pool_ = op->shape.pool;
    choosing_heads_ = std::max(choosing_heads_, chosen_block_ == 1 ? 1 : op->shape.n_heads);
    n_layers_ = std::max<int64_t>(n_layers_, op->layer + 1);  // an index of blocks has a layer of the cache
  }
  if (const auto* op = std::get_if<MoveEntriesOp>(&body)) n_state_layers_ = std::max<int64_t>(n_state_layers_, op->layer + 1);
  if (const auto* op = std::get_if<MoeOp>(&body); op != nullptr && op->by_token != -1) table_rows_ = std::min(table_rows_, vector_size(op->by_token) / op->top_k);
  if (const auto* op = std::get_if<StateOp>(&body)) n_state_layers_ = std::max<int64_t>(n_state_layers_, op->layer + 1);
  if (const auto* op = std::get_if<EmbedOp>(&body)) table_rows_ = std::min(table_rows_, tables_.at(op->table).rows), place_by(op->positions, op->x);
  if (const auto* op = std::get_if<TiedEmbedOp>(&body)) {
    const LinearShape& shape = linears_.at(op->head).shape;
    const bool has_rows = shape.format == Format::bf16 || is_grouped(shape.format);
    if (!has_rows || shape.gated) throw std::invalid_argument("a tied embedding needs a head in bf16 or in groups");
    if (shape.k != buffers_.at(op->x).width) throw std::invalid_argument("a tied embedding is not as wide as its buffer");
    table_rows_ = std::min(table_rows_, op->vocab), place_by(op->positions, op->x);
  }
  if (const auto* op = std::get_if<HeadOp>(&body); op != nullptr && op->vocab < 1) throw std::invalid_argument("a head without a vocabulary");
  if (const auto* op = std::get_if<HeadOp>(&body)) vocab_ = op->vocab, hidden_width_ = buffers_[op->x].width;
  if (const auto* op = std::get_if<InputOp>(&body)) input_width_ = buffers_[op->x].width;
  if (const int weight = first_weight(body); weight >= 0)
    for (size_t i = ops_.size(); i-- > 0;) {
      next_weight_[i] = weight;
      if (first_weight(ops_[i].body) >= 0) break;
    }
  ops_.push_back({category, std::move(body)});
  plan_of_op_.push_back(plan);
  next_weight_.push_back(-1);
}

void Program::place_by(const LearnedPositions& positions, int x) {
  for (const int number : {positions.table, positions.types})
    if (number != -1 && tables_.at(number).width != buffers_.at(x).width)
      throw std::invalid_argument("a table of positions or types is not as wide as a row");
  if (positions.types != -1) table_types_ = tables_[positions.types].rows;
  if (positions.table == -1) return;
  const Table& table = tables_[positions.table];
  if (positions.first < 0 || positions.first >= table.rows) throw std::invalid_argument("the first position is not in its table");
  table_positions_ = std::min(table_positions_, table.rows - positions.first);
}

int64_t Program::tap_width(int number) const {
  for (const Op& op : ops_)
    if (const auto* tap = std::get_if<TapOp>(&op.body); tap != nullptr && tap->number == number) return buffers_[tap->x].width;
  throw std::invalid_argument("the program has no tap " + std::to_string(number));
}

int Program::first_weight(const OpBody& body) {
  if (const auto* op = std::get_if<LinearOp>(&body)) return op->weight;
  if (const auto* op = std::get_if<MoeOp>(&body)) return op->router;
  if (const auto* op = std::get_if<HeadOp>(&body)) return op->weight;
  return -1;
}

// ---- memory ----

namespace {

int64_t buffer_bytes(const Buffer& buffer, int64_t tokens) {
  const int64_t rows = tokens * buffer.rows_per_token;
  int64_t bytes = 0;
  switch (buffer.kind) {
    case BufferKind::f32: bytes = rows * buffer.width * 4; break;
    case BufferKind::bf16: bytes = rows * buffer.width * 2; break;
    case BufferKind::rows: bytes = rows_bytes(buffer.rows_kind, rows, buffer.width); break;
  }
  return (bytes + 127) / 64 * 64;  // one line of slack for whole-vector reads at the end of a row
}

}  // namespace

// Rows views are laid out for the capacity, so a row's place does not move with the step's size.
void Program::reserve(int64_t tokens) {
  if (tokens > arena_tokens_) {
    const int64_t wanted = std::max<int64_t>(tokens, std::min<int64_t>(2 * arena_tokens_, 4096));
    int64_t total = 0, shared = 0;
    for (const Buffer& buffer : buffers_) (buffer.shared ? shared : total) += buffer_bytes(buffer, wanted);
    arena_ = PageBuffer();
    arena_ = PageBuffer(total);
    if (team_ != nullptr) shared_arena_ = team_->arena(shared, std::move(shared_arena_));
    uint8_t* at = arena_.data();
    uint8_t* shared_at = shared_arena_ != nullptr ? shared_arena_->data() : nullptr;
    for (Buffer& buffer : buffers_) {
      uint8_t*& place = buffer.shared ? shared_at : at;
      buffer.data = place;
      if (buffer.kind == BufferKind::rows)
        buffer.rows = view_rows(buffer.rows_kind, wanted * buffer.rows_per_token, buffer.width, place);
      if (!buffer.order.empty()) buffer.rows.order = buffer.order.data();
      place += buffer_bytes(buffer, wanted);
    }
    arena_tokens_ = wanted;
  }
  if (scratch_stride_ == 0) {
    int64_t bytes = 4096;
    for (const Op& op : ops_) {
      if (const auto* attention = std::get_if<AttentionOp>(&op.body))
        bytes = std::max(bytes, kernels_.attention->scratch_bytes(attention->shape));
      if (const auto* embed = std::get_if<TiedEmbedOp>(&op.body)) bytes = std::max(bytes, linears_[embed->head].k_padded * 4 + 64);
      if (const auto* embed = std::get_if<EmbedOp>(&op.body)) bytes = std::max(bytes, buffers_[embed->x].width * 4 + 64);
      if (const auto* norm = std::get_if<AddNormOp>(&op.body)) bytes = std::max(bytes, buffers_[norm->x].width * 4 + 64);
      if (const auto* norm = std::get_if<NormOp>(&op.body)) bytes = std::max(bytes, buffers_[norm->x].width * 4 + 64);
      if (const auto* prepare = std::get_if<PrepareOp>(&op.body)) bytes = std::max(bytes, buffers_[prepare->x].width * 4 + 64);
      if (const auto* keys = std::get_if<CacheIndexOp>(&op.body)) bytes = std::max(bytes, 2 * (buffers_[keys->x].width * 4 + 64));
      if (const auto* pools = std::get_if<PoolIndexOp>(&op.body)) bytes = std::max(bytes, pools->width * (pools->pool + 1) * 4 + 64);
      if (const auto* choose = std::get_if<ChooseOp>(&op.body)) bytes = std::max(bytes, kernels_.attention->scratch_bytes(choose->shape));
      if (const auto* rows = std::get_if<CacheRowsOp>(&op.body)) bytes = std::max(bytes, buffers_[rows->x].width * 4 + 64);
      if (const auto* turn = std::get_if<TurnQueriesOp>(&op.body)) bytes = std::max(bytes, buffers_[turn->q].width / turn->n_heads * 4 + 64);
      if (const auto* latents = std::get_if<CacheLatentsOp>(&op.body)) bytes = std::max(bytes, buffers_[latents->kv].width * 4 + 64);
      if (const auto* moves = std::get_if<StateOp>(&op.body)) bytes = std::max(bytes, kernels_.step->state_scratch_floats(moves->shape) * 4);
      if (const auto* weigh = std::get_if<WeighOp>(&op.body)) bytes = std::max(bytes, buffers_[weigh->x].width * 4 + 64);
      if (const auto* gate = std::get_if<SparseGateOp>(&op.body)) bytes = std::max(bytes, buffers_[gate->x].width * 2 + 64);
      if (const auto* gate = std::get_if<BentGateOp>(&op.body)) bytes = std::max(bytes, buffers_[gate->x].width * 2 + 64);
      if (const auto* gated = std::get_if<GateHeadsOp>(&op.body)) bytes = std::max(bytes, buffers_[gated->gates].width * 4 + 64);
      if (const auto* curve = std::get_if<CurveOp>(&op.body)) bytes = std::max(bytes, buffers_[curve->x].width * 4 + 64);
      if (const auto* correct = std::get_if<CorrectOp>(&op.body)) bytes = std::max(bytes, buffers_[correct->y].width * 4 + 64);
      if (const auto* inputs = std::get_if<LayerInputsOp>(&op.body)) bytes = std::max(bytes, (inputs->packed == -1 ? vector_size(inputs->norm) : linears_[inputs->packed].k_padded) * 4 + 64);
      if (const auto* moe = std::get_if<MoeOp>(&op.body)) {
        bytes = std::max(bytes, moe->n_scored() * 4 + moe->n_groups * 4 + 128);
        if (moe->behind != -1) bytes = std::max(bytes, buffers_[moe->out].width * 4 + 64);
        if (moe->joins_apart) bytes = std::max(bytes, buffers_[moe->wide].width * (moe->is_gated ? 2 : 4) + 64);
      }
      if (const auto* head = std::get_if<HeadOp>(&op.body)) bytes = std::max(bytes, buffers_[head->x].width * 4 + 64);
    }
    constexpr int64_t kPage = 4096;
    scratch_stride_ = (bytes + kPage - 1) / kPage * kPage + kPage;  // a page between the threads that no kernel touches
    scratch_ = PageBuffer(scratch_stride_ * pool_.size());
    for (int thread = 0; thread < pool_.size(); ++thread)
      scratch_.forbid(thread * scratch_stride_ + bytes, (thread + 1) * scratch_stride_);
  }
}

void Program::read_buffer(int index, int64_t rows, float* out) const {
  const Buffer& buffer = buffers_.at(index);
  if (buffer.kind == BufferKind::rows || rows > arena_tokens_ * buffer.rows_per_token)
    throw std::invalid_argument("only written rows of f32 and bf16 buffers can be read");
  const int64_t n = rows * buffer.width;
  if (buffer.kind == BufferKind::f32) {
    std::memcpy(out, buffer.data, static_cast<size_t>(n) * 4);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(buffer.data)[i]) << 16;
    std::memcpy(out + i, &bits, 4);
  }
}

void Program::place_tokens(const Step& step, int64_t block_tokens) {
  positions_.resize(step.n_tokens);
  slots_.resize(step.n_tokens);
  if (step.second != nullptr) types_.resize(step.n_tokens);
  for (int64_t s = 0; s < step.n_sequences; ++s) {
    const int32_t* blocks = step.block_table + s * step.table_width;
    int64_t position = step.context_tokens[s] - (step.query_start[s + 1] - step.query_start[s]);
    for (int64_t t = step.query_start[s]; t < step.query_start[s + 1]; ++t, ++position) {
      positions_[t] = static_cast<int32_t>(position);
      if (step.second != nullptr) types_[t] = position >= step.second[s];
      slots_[t] = static_cast<int32_t>(blocks[position / block_tokens] * block_tokens + position % block_tokens);
    }
  }
}

void Program::plan_attention(const Step& step) {
  const AttentionBatch batch{step.query_start, positions_.data(), step.n_sequences, step.both_ways, step.context_tokens};
  int64_t floats = 0;
  for (size_t i = 0; i < attention_shapes_.size(); ++i) {
    plan_attention_tasks(attention_shapes_[i], batch, pool_.size(), attention_plans_[i]);
    floats = std::max(floats, attention_plans_[i].partial_floats);
  }
  if (floats * 4 > partials_.bytes()) partials_ = PageBuffer(floats * 5);
}

// ---- checks ----

namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

void check_sequence(const Step& step, const KvShape& shape, int64_t s) {
  const int64_t begin = step.query_start[s], end = step.query_start[s + 1];
  require(begin < end && end <= step.n_tokens, "query_start does not rise to the number of tokens");
  const int64_t context = step.context_tokens[s];
  require(context >= end - begin, "context_tokens is smaller than the sequence's new tokens");
  require(context <= step.table_width * shape.block_tokens, "block_table is too narrow for context_tokens");
  const int32_t* blocks = step.block_table + s * step.table_width;
  for (int64_t i = 0; i * shape.block_tokens < context; ++i)
    require(blocks[i] >= 0 && blocks[i] < shape.n_blocks, "block_table names a block outside the pool");
}

}  // namespace

void Program::check(const Step& step, const KvCache& kv) const {
  require(!ops_.empty() && step.n_tokens > 0 && step.n_sequences > 0, "nothing to run");
  require(step.query_start[0] == 0 && step.query_start[step.n_sequences] == step.n_tokens, "query_start does not cover the tokens");
  const int64_t kv_layers = kv.shape().n_layers;  // other ranks may have no heads in the last of them
  require(n_layers_ == 0 || kv_layers == n_layers_ || (!is_rank_0() && kv_layers > n_layers_), "the KV cache has another number of layers");
  require(input_width_ == 0 || step.input != nullptr, "the program takes an input, and the step has none");
  bool come_whole = true;
  for (int64_t s = 0; s < step.n_sequences; ++s) come_whole = come_whole && step.context_tokens[s] == step.query_start[s + 1] - step.query_start[s];
  for (const Op& op : ops_)
    if (const auto* attention = std::get_if<AttentionOp>(&op.body)) {
      require(attention->places == -1 || come_whole, "where scores are made of contents and distances, sequences must come whole");
      const KvShape& shape = kv.shape_of(attention->layer);
      const AttentionShape& wanted = attention->shape;
      require(has_latents_ != shape.has_values && wanted.head_dim == shape.head_dim && wanted.v_head_dim == shape.v_head_dim && wanted.n_kv_heads == shape.n_kv_heads,
              "the KV cache has another shape of heads");
      require(!wanted.in_bytes || shape.format == KvFormat::int8, "the KV cache has no bytes that are met in bytes");
      require((wanted.is_listed || (attention->choice != -1 && wanted.block == 1)) == shape.by_token, "the KV cache has tokens in another order");
      const int64_t shared = wanted.entry_tokens < kGroupTokens ? wanted.entry_tokens : kGroupTokens;
      require(shape.shared_by == shared, "the KV cache has other entries");
    } else if (const auto* rows = std::get_if<CacheRowsOp>(&op.body)) {
      require(rows->layer < n_layers_, "the KV cache has another number of layers");
      const KvShape& shape = kv.shape_of(rows->layer);
      require(shape.by_token && (rows->is_index ? shape.index_dim : shape.head_dim) == buffers_[rows->x].width, "the KV cache has rows of another width");
      require(rows->tokens == 0 || shape.shared_by == std::min<int64_t>(rows->tokens, kGroupTokens), "the KV cache has other entries");
    } else if (const auto* choose = std::get_if<ChooseOp>(&op.body)) {
      const KvShape& shape = kv.shape_of(choose->layer);
      const bool is_apart = !shape.by_token;  // in a layer of the cache of its own, as keys of blocks are
      require((is_apart || choose->shape.block == 1) && (is_apart ? shape.head_dim : shape.index_dim) == choose->shape.head_dim && !shape.has_values && shape.n_kv_heads == 1,
              "the KV cache has another index");
    } else if (const auto* pools = std::get_if<PoolIndexOp>(&op.body)) {
      require(kv.shape_of(pools->layer).index_dim == pools->width, "the KV cache has another index");
    }
  require(most_chosen_ == INT64_MAX || step.both_ways == nullptr, "where an index chooses, nothing attends both ways");
  for (int64_t s = 0; s < step.n_sequences; ++s) check_sequence(step, kv.shape(), s);
  for (int64_t s = 0; s < step.n_sequences; ++s)
    require(step.context_tokens[s] <= table_positions_, "a sequence is longer than the table of positions");
  for (int64_t s = 0; step.adapters != nullptr && s < step.n_sequences; ++s)
    if (step.adapters[s] != -1) adapter_bytes(step.adapters[s]);
  if (n_state_layers_ > 0) check_states(step, kv);
  for (int64_t s = 0; step.both_ways != nullptr && s < step.n_sequences; ++s)
    require(step.both_ways[s] == 0 || step.context_tokens[s] == step.query_start[s + 1] - step.query_start[s],
            "a sequence that attends both ways must come whole");
  require(step.second == nullptr || table_types_ > 1, "the program knows no second type of tokens");
  for (int64_t t = 0; t < step.n_tokens; ++t)
    require(step.token_ids[t] >= 0 && step.token_ids[t] < table_rows_, "a token id is outside the vocabulary");
  for (int64_t r = 0; r < step.n_logits; ++r)
    require(step.logits_rows[r] >= 0 && step.logits_rows[r] < step.n_tokens, "logits_rows names a token outside the step");
  require(step.n_logits <= step.n_tokens, "logits_rows has more rows than tokens");
}

}  // namespace diptych
