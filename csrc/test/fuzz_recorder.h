// A random model of fuzz_models.h as a program.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <utility>
#include <vector>

#include "fuzz_models.h"

namespace diptych {

// A file in memory: what is given back of its pages comes again. It ends with a page, and behind that is nothing.
class MappedFile {
 public:
  MappedFile(const uint8_t* data, int64_t bytes) {
    const int64_t page = sysconf(_SC_PAGESIZE), ahead = (page - bytes % page) % page, whole = ahead + bytes;
    const int file = memfd_create("weight", 0);
    if (file < 0 || pwrite(file, data, static_cast<size_t>(bytes), ahead) != bytes) std::abort();
    bytes_ = static_cast<size_t>(whole + page);
    pages_ = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages_ == MAP_FAILED || mmap(pages_, static_cast<size_t>(whole), PROT_READ, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) std::abort();
    data_ = static_cast<const uint8_t*>(pages_) + ahead;
    close(file);
  }
  ~MappedFile() { munmap(pages_, bytes_); }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }

 private:
  size_t bytes_;
  void* pages_;
  const uint8_t* data_;
};

inline int rows_buffer(Program& program, const Model& m, int64_t width, int64_t rows_per_token = 1) {
  Buffer buffer;
  buffer.kind = BufferKind::rows, buffer.width = width, buffer.rows_kind = rows_kind(LinearShape{m.weights, 0, 0, m.group, false, false, {}, m.is_wide}), buffer.rows_per_token = rows_per_token;
  return program.add_buffer(buffer);
}

inline int plain_buffer(Program& program, BufferKind kind, int64_t width, int64_t rows_per_token = 1) {
  Buffer buffer;
  buffer.kind = kind, buffer.width = width, buffer.rows_per_token = rows_per_token;
  return program.add_buffer(buffer);
}

// Records the forward of a random model, as ops/cpu_recorder.py does for a real one.
class Recorder {
 public:
  // files: where packed weights are written, and used by the program; null: it packs its own.
  Recorder(Program& program, std::deque<MappedFile>* files, World& world, const Model& m, const std::vector<float>& table)
      : p_(program), files_(files), w_(world), m_(m) {
    x_ = plain_buffer(p_, BufferKind::f32, m.hidden);
    const int head = linear(m.vocab, m.hidden);
    if ((m.weights == Format::bf16 || is_grouped(m.weights)) && w_.pick(0, 1))
      p_.record(Category::embed, TiedEmbedOp{head, x_, 1.0f, 0, m.vocab, positions(table)});
    else
      p_.record(Category::embed, EmbedOp{p_.add_table({reinterpret_cast<const uint8_t*>(table.data()), Source::f32, m.vocab, m.hidden}), x_, 1.0f, positions(table)});
    shape_ = {m.n_heads, m.n_kv_heads, m.head_dim, m.v_head_dim, 0.3f, m.window, 3.0f, m.has_softcap};
    shape_.most = m.most, shape_.pool = m.pool, shape_.reach = w_.pick(0, 40), shape_.is_chunked = m.is_chunked, shape_.n_places = m.n_places;
    if (m.block != 0) shape_.block = m.block, shape_.by_means = m.by_means, choice_ = plain_buffer(p_, BufferKind::f32, m.by_means ? m.most / m.block + 1 : m.n_kv_heads * (m.most / m.block));
    else if (m.most != INT64_MAX) choice_ = plain_buffer(p_, BufferKind::f32, m.most);
    const bool is_latent = m.rank != 0, expands = is_latent || m.has_entries, is_direct = has_bf16_rows(m.weights) && !expands;
    const int64_t q_width = m.n_heads * m.head_dim, a_width = m.n_heads * m.v_head_dim;
    const int64_t heads_width = is_latent ? m.n_heads * value_dim_ : m.has_entries ? m.groups * value_dim_ : a_width;
    const int rows = rows_buffer(p_, m, m.hidden), router_rows = rows_buffer(p_, m, m.hidden);
    q_ = plain_buffer(p_, BufferKind::bf16, q_width), heads_ = plain_buffer(p_, BufferKind::f32, a_width);
    if (is_latent) begin_latent(); else if (m.has_entries) begin_entries(); else qkv_ = plain_buffer(p_, BufferKind::f32, q_width + m.n_kv_heads * (m.head_dim + m.v_head_dim));
    const int heads_rows = rows_buffer(p_, m, heads_width);
    const int hidden = plain_buffer(p_, BufferKind::f32, m.ffn), hidden_rows = rows_buffer(p_, m, m.ffn);
    const int y = plain_buffer(p_, BufferKind::f32, m.hidden), gate = plain_buffer(p_, BufferKind::f32, 1);
    const int64_t rotary = expands ? m.rotary / 2 : std::min<int64_t>(m.head_dim / 2, 20);
    rope_ = p_.add_rope(std::vector<double>(rotary, 0.01), 1.0);
    for (int layer = 0; layer < m.layers; ++layer) {
      p_.record(Category::norm, NormOp{x_, norm(m.hidden), 1e-5f, rows, some(m.hidden), w_.pick(0, 1) == 1});
      if (is_latent) latent(rows, layer); else if (m.has_entries) keep_entries(rows, layer); else rotate(rows, layer);
      if (m.block != 0 && m.chooses(layer)) choose_blocks(rows, static_cast<int>(m.layers) + layer);
      const int choice = m.has_entries && !m.chooses(layer) ? -1 : choice_;
      const bool is_bent = choice_ == -1 && !m.has_entries;
      int of_queries = -1, of_keys = -1, places = -1;
      if (m.n_places != 0) {
        for (int* said : {&of_queries, &of_keys}) {
          *said = plain_buffer(p_, BufferKind::f32, m.n_heads * m.n_places);
          p_.record(Category::qkv, LinearOp{linear(m.n_heads * m.n_places, m.hidden), rows, *said, Store::f32, Activation::silu});
        }
        std::vector<float> each(2 * shape_.reach + 1);
        for (float& place : each) place = static_cast<float>(w_.pick(0, m.n_places - 1));
        places = p_.add_vector(each);
      }
      p_.record(Category::attention, AttentionOp{q_, is_direct ? heads_rows : heads_, m.shares_kv ? 0 : layer, shape_of_attention(layer), some(m.n_heads), 0, choice,
                                                 is_bent ? some(m.n_heads) : -1, is_bent ? some(m.n_heads * (2 * shape_.reach + 32)) : -1, of_queries, of_keys, places});
      if (is_latent) p_.record(Category::o, heads_op(values_of_heads_, heads_, m.head_dim, m.rank, expanded_, value_dim_, Store::f32));
      if (m.has_entries) {
        p_.record(Category::rope, TurnBackOp{heads_, rope_, m.n_heads});
        p_.record(Category::o, heads_op(values_of_heads_, heads_, m.n_heads / m.groups * m.head_dim, m.n_heads / m.groups * m.head_dim, expanded_, value_dim_, Store::f32));
      }
      if (!is_direct && !expands && w_.pick(0, 1)) {  // a gate of each head, or of each of their channels
        const int64_t n_gates = w_.pick(0, 1) ? m.n_heads : heads_width;
        const int gates = plain_buffer(p_, BufferKind::f32, n_gates);
        p_.record(Category::qkv, LinearOp{linear(n_gates, m.hidden), rows, gates, Store::f32, Activation::silu});
        p_.record(Category::qkv, GateHeadsOp{gates, heads_, w_.pick(0, 1) == 1});
      }
      if (!is_direct) p_.record(Category::norm, PrepareOp{expands ? expanded_ : heads_, heads_rows});
      if (m.has_states) move_states(rows, layer);
      if (w_.pick(0, 3) == 0) {  // a gate of the token's own
        p_.record(Category::o, LinearOp{linear(1, m.hidden), rows, gate, Store::f32, Activation::silu});
        p_.record(Category::o, LinearOp{linear(m.hidden, heads_width), heads_rows, y, Store::f32, Activation::silu});
        p_.record(Category::norm, AddOp{y, x_, gate});
      } else {
        p_.record(Category::o, LinearOp{linear(m.hidden, heads_width), heads_rows, x_, Store::add_f32, Activation::silu});
      }
      p_.record(Category::norm, NormOp{x_, norm(m.hidden), 1e-5f, rows, some(m.hidden), w_.pick(0, 1) == 1});
      if (m.n_experts) {
        p_.record(Category::norm, NormOp{x_, norm(m.hidden), 1e-5f, router_rows, some(m.hidden), w_.pick(0, 1) == 1});
        experts(rows, router_rows, y);
        p_.record(Category::norm, AddNormOp{y, norm(m.hidden), 1e-5f, x_});
        p_.record(Category::norm, AddOp{y, x_});
        continue;
      }
      const bool is_sparse = w_.pick(0, 3) == 0, is_curved = w_.pick(0, 3) == 0, is_apart = w_.pick(0, 3) == 0, writes_rows = is_sparse || is_curved || (has_bf16_rows(m.weights) && !is_apart);
      if (is_sparse) {  // of a row of gate and up
        const int wide = plain_buffer(p_, BufferKind::f32, 2 * m.ffn);
        p_.record(Category::gate_up, LinearOp{linear(2 * m.ffn, m.hidden), rows, wide, Store::f32, m.activation});
        if (w_.pick(0, 1)) p_.record(Category::gate_up, SparseGateOp{wide, hidden_rows, 0.5f, m.activation});
        else p_.record(Category::gate_up, BentGateOp{wide, hidden_rows, {1.0f, 7.0f, 2.0f, 0.5f}});
      } else if (is_curved) {  // up alone, or behind its gate
        const int64_t width = w_.pick(0, 1) ? m.ffn : 2 * m.ffn;
        const int up = plain_buffer(p_, BufferKind::f32, width);
        p_.record(Category::gate_up, LinearOp{linear(width, m.hidden), rows, up, Store::f32, m.activation});
        p_.record(Category::gate_up, CurveOp{up, hidden_rows, static_cast<Curve>(w_.pick(0, 7)), {0.8f, 0.9f, 0.5f, -1e-6f}});
      } else if (is_apart) {  // gate and up as weights of their own
        p_.record(Category::gate_up, LinearOp{linear(m.ffn, m.hidden), rows, hidden, Store::f32, m.activation});
        p_.record(Category::gate_up, LinearOp{linear(m.ffn, m.hidden), rows, hidden, Store::gate_f32, m.activation});
      } else {
        p_.record(Category::gate_up, LinearOp{linear(2 * m.ffn, m.hidden, true), rows, writes_rows ? hidden_rows : hidden,
                                              writes_rows ? Store::bf16 : Store::f32, m.activation});
      }
      if (!writes_rows) p_.record(Category::norm, PrepareOp{hidden, hidden_rows});
      p_.record(Category::down, LinearOp{linear(m.hidden, m.ffn), hidden_rows, x_, Store::add_f32, Activation::silu});
      if (w_.pick(0, 1)) mix(rows, head, table);
    }
    p_.record(Category::head, HeadOp{x_, norm(m.hidden), 1e-5f, rows_buffer(p_, m, m.hidden), head, 1.0f, 9.0f, m.has_softcap, true, some(m.hidden), w_.pick(0, 1) == 1, 0,
                                    m.vocab});
    for (int64_t i = 0; i < m.n_adapters; ++i) add_adapter();
    p_.settle();
  }

 private:
  LearnedPositions positions(const std::vector<float>& table) {  // as long as any prompt
    if (w_.pick(0, 2) != 0) return {};
    return {p_.add_table({reinterpret_cast<const uint8_t*>(table.data()), Source::f32, static_cast<int64_t>(table.size()) / m_.hidden, m_.hidden})};
  }

  void rotate(int rows, int layer) {
    const int64_t q_width = m_.n_heads * m_.head_dim, kv_width = m_.n_kv_heads * m_.head_dim;
    const bool writes_kv = !m_.shares_kv || layer == 0;
    const int64_t width = q_width + (writes_kv ? kv_width + (m_.has_v ? m_.n_kv_heads * m_.v_head_dim : 0) : 0);
    const int qkv = writes_kv && m_.has_v ? qkv_ : plain_buffer(p_, BufferKind::f32, width);
    p_.record(Category::qkv, LinearOp{linear(width, m_.hidden), rows, qkv, Store::f32, Activation::silu});
    RotateOp rotate{};
    rotate.shape.has_v_norm = m_.has_v_norm, rotate.shape.writes_kv = writes_kv;
    rotate.shape.has_v = m_.has_v, rotate.shape.norms_turned = m_.norms_turned;
    rotate.qkv = qkv, rotate.q = q_, rotate.layer = m_.shares_kv ? 0 : layer, rotate.rope = rope_, rotate.has_rope = w_.pick(0, 3) != 0;
    rotate.has_q_norm = rotate.has_k_norm = m_.has_norms;
    rotate.q_norm = norm(m_.has_full_norm ? q_width : m_.head_dim), rotate.k_norm = norm(m_.has_full_norm ? kv_width : m_.head_dim);
    rotate.shape.n_heads = m_.n_heads, rotate.shape.n_kv_heads = m_.n_kv_heads, rotate.shape.head_dim = m_.head_dim, rotate.shape.v_head_dim = m_.v_head_dim;
    rotate.shape.v_scale = w_.pick(0, 1) ? 0.7f : 1.0f;
    rotate.shape.row_heads = m_.n_heads, rotate.shape.row_kv_heads = m_.n_kv_heads;
    rotate.shape.has_full_width_norm = m_.has_full_norm, rotate.shape.norm_eps = 1e-5f;
    p_.record(Category::rope, rotate);
  }

  void move_states(int rows, int layer) {
    const StateShape& s = m_.states;
    const int64_t heads = s.n_value_heads, width = heads * s.value_dim, first = w_.pick(0, 2), column = w_.pick(0, 3), first_key = s.is_selective() ? w_.pick(0, 2) : 0;
    const bool has_heads = s.has_matrix(), is_delta = s.rule == StateRule::delta, is_selective = s.is_selective(), is_by_channel = s.is_by_channel(), has_rates = has_heads && !s.is_steady, has_steps = has_rates && s.rule != StateRule::rg_lru;
    const int64_t n_inputs = is_by_channel ? (first + heads) * s.value_dim : s.inputs(), n_rates = is_selective ? 2 * s.key_dim * (first_key + s.n_key_heads) : s.n_rates() * (first + heads);
    const int inputs = plain_buffer(p_, BufferKind::f32, n_inputs), out = plain_buffer(p_, BufferKind::f32, column + width), rates = has_rates ? plain_buffer(p_, BufferKind::f32, n_rates) : -1;
    p_.record(Category::qkv, LinearOp{linear(n_inputs, m_.hidden), rows, inputs, Store::f32, Activation::silu});
    if (has_rates) p_.record(Category::qkv, LinearOp{linear(n_rates, m_.hidden), rows, rates, Store::f32, Activation::silu});
    const int decays = s.n_decays() != 0 ? plain_buffer(p_, BufferKind::f32, s.n_decays() * (first + heads)) : -1;
    if (decays != -1) p_.record(Category::qkv, LinearOp{linear(s.n_decays() * (first + heads), m_.hidden), rows, decays, Store::f32, Activation::silu});
    p_.record(Category::qkv, LinearOp{linear(column + width, m_.hidden), rows, out, Store::f32, Activation::silu});  // what no head writes
    const int taps = is_by_channel || s.is_steady ? -1 : norm(s.n_taps * s.channels()), decay = is_selective ? norm(s.heads_floats()) : has_heads ? norm(is_by_channel ? width : heads) : -1;
    p_.record(Category::attention, StateOp{inputs, rates, decays, out, taps, is_by_channel || s.is_steady ? -1 : some(s.channels()), decay,
                                           has_steps ? norm(heads * s.n_shifts()) : -1, has_steps && !is_delta ? norm(is_selective ? width : heads) : -1, is_delta ? norm(s.value_dim) : -1, layer, s, first, column, first_key});
    const int given = rows_buffer(p_, m_, column + width);
    p_.record(Category::norm, PrepareOp{out, given});
    p_.record(Category::o, LinearOp{linear(m_.hidden, column + width), given, x_, Store::add_f32, Activation::silu});
  }

  // Streams that begin with x, predict each other and are corrected, and are joined and added to by a connection; what a layer adds of an embedding of its own.
  void mix(int rows, int head, const std::vector<float>& table) {
    const int64_t n = w_.pick(1, 4), hidden = m_.hidden;
    std::vector<int> xs{x_};
    while (static_cast<int64_t>(xs.size()) < n) {
      xs.push_back(plain_buffer(p_, BufferKind::f32, hidden));
      p_.record(Category::norm, BranchOp{x_, xs.back(), 0.5f});
      p_.record(Category::norm, MatchOp{xs.back(), x_, xs.back(), 1e-5f});
    }
    const int y = plain_buffer(p_, BufferKind::f32, hidden), routed = plain_buffer(p_, BufferKind::f32, n);
    p_.record(Category::norm, WeighOp{x_, norm(hidden), y});
    p_.record(Category::norm, WeighOp{x_, norm(hidden), rows});
    p_.record(Category::qkv, LinearOp{linear(n, hidden), rows, routed, Store::f32, Activation::silu});
    p_.record(Category::norm, PredictOp{xs, routed, p_.add_vector(w_.floats(n * n * n, -0.3f, 0.3f)), 0.7f});
    p_.record(Category::norm, CorrectOp{xs, y, routed, p_.add_vector(w_.floats(n * n, -0.3f, 0.3f)), static_cast<int>(w_.pick(0, n - 1)), 0.7f});
    const int64_t m = (2 + n) * n;
    const int c = plain_buffer(p_, BufferKind::f32, m), read = plain_buffer(p_, BufferKind::f32, hidden);
    p_.record(Category::norm, ConnectionsOp{xs, p_.add_vector(w_.floats(m * n * hidden, -0.3f, 0.3f)), p_.add_vector(w_.floats(w_.pick(1, 3), -0.5f, 0.5f)),
                                            p_.add_vector(w_.floats(m, -0.3f, 0.3f)), c, 1e-5f});
    p_.record(Category::norm, GatherOp{xs, c, read, 1e-6f});
    p_.record(Category::norm, SpreadOp{xs, read, c, 0.3f, 1e-6f});
    p_.record(Category::norm, MingleOp{xs, read, c, static_cast<int>(w_.pick(1, 20)), 0.3f, 1e-6f});
    gate(n, table);
    const int added = plain_buffer(p_, BufferKind::f32, hidden);
    p_.record(Category::qkv, LinearOp{linear(hidden, hidden), rows, added, Store::f32, Activation::silu});
    const bool is_packed = is_grouped(m_.weights) && w_.pick(0, 1);
    const int rows_of = is_packed ? -1 : p_.add_table({reinterpret_cast<const uint8_t*>(table.data()), Source::f32, w_.pick(1, m_.vocab), hidden});
    p_.record(Category::embed, LayerInputsOp{added, norm(hidden % 2 == 0 ? hidden / 2 : hidden), rows_of, is_packed ? head : -1, 1e-5f, 0.5f, 0.7f});
    p_.record(Category::norm, CopyColumnsOp{added, y, 0, 0, hidden});
    p_.record(Category::norm, AddOp{y, x_, -1, 0.5f});
  }

  // Streams that lie in one row: their sum, what is added to each, what n-grams say of them.
  void gate(int64_t n, const std::vector<float>& table) {
    const int64_t hidden = m_.hidden, before = w_.pick(1, 3), heads = before * w_.pick(1, 2), width = w_.pick(1, 4);
    const int wide = plain_buffer(p_, BufferKind::f32, n * hidden), other = plain_buffer(p_, BufferKind::f32, n * hidden), mean = plain_buffer(p_, BufferKind::f32, hidden);
    for (int64_t i = 0; i < n; ++i) p_.record(Category::norm, CopyColumnsOp{x_, wide, 0, i * hidden, hidden});
    p_.record(Category::norm, BranchOp{wide, other, 0.5f});
    const int c = plain_buffer(p_, BufferKind::f32, n), ids = plain_buffer(p_, BufferKind::f32, before), found = plain_buffer(p_, BufferKind::f32, heads * width);
    p_.record(Category::norm, FoldOp{wide, mean, std::vector<float>(static_cast<size_t>(n), 0.4f)});
    p_.record(Category::norm, CopyColumnsOp{mean, c, 0, 0, std::min(n, hidden)});
    p_.record(Category::norm, InjectOp{wide, mean, c, 2.0f, 0.25f});
    p_.record(Category::norm, MeetKeysOp{wide, other, mean, other});
    p_.record(Category::embed, IdsOp{ids, static_cast<int32_t>(w_.pick(0, 3))});
    const int64_t rows = w_.pick(2, 4), last = w_.pick(1, rows);
    NgramsOp ngrams{ids, found, {}, rows, 1, {}, {}};
    for (const int64_t held : {rows, rows, last}) ngrams.tables.push_back(p_.add_table({reinterpret_cast<const uint8_t*>(table.data()), Source::f32, held, width}));
    for (int64_t i = 0; i <= before; ++i) ngrams.factors.push_back(2 * w_.pick(0, int64_t{1} << 40) + 1);
    for (int64_t i = 0; i < heads; ++i) {
      const int64_t size = w_.pick(1, 2 * rows);
      ngrams.heads.push_back({size, w_.pick(0, 2 * rows + last - size)});
    }
    p_.record(Category::embed, std::move(ngrams));
    p_.record(Category::norm, FoldOp{other, mean, std::vector<float>(static_cast<size_t>(n), -0.3f)});
    p_.record(Category::norm, AddOp{mean, x_, -1, 0.1f});
  }

  void begin_latent() {
    latents_ = plain_buffer(p_, BufferKind::f32, m_.head_dim);
    queries_ = plain_buffer(p_, BufferKind::f32, m_.n_heads * (key_dim_ + m_.rotary));
    expanded_ = plain_buffer(p_, BufferKind::f32, m_.n_heads * value_dim_);
    for (int64_t head = 0; head < m_.n_heads; ++head) keys_of_heads_.push_back(linear(m_.rank, key_dim_)), values_of_heads_.push_back(linear(value_dim_, m_.rank));
  }

  HeadsOp heads_op(const std::vector<int>& weights, int x, int64_t head_stride, int64_t k, int out, int64_t out_stride, Store store) {
    return {weights, x, head_stride, rows_buffer(p_, m_, k, static_cast<int64_t>(weights.size())), out, out_stride, store};
  }

  void latent(int rows, int layer) {
    p_.record(Category::qkv, LinearOp{linear(m_.head_dim, m_.hidden), rows, latents_, Store::f32, Activation::silu});
    p_.record(Category::rope, CacheLatentsOp{latents_, layer, norm(m_.rank), rope_, m_.rank, 1e-5f});
    p_.record(Category::qkv, LinearOp{linear(m_.n_heads * (key_dim_ + m_.rotary), m_.hidden), rows, queries_, Store::f32, Activation::silu});
    if (w_.pick(0, 1)) p_.record(Category::rope, ScaleQueriesOp{queries_, {}, norm(2 * m_.n_heads)});
    p_.record(Category::qkv, heads_op(keys_of_heads_, queries_, key_dim_ + m_.rotary, key_dim_, q_, m_.head_dim, Store::bf16));
    p_.record(Category::rope, RotateQueriesOp{queries_, q_, rope_, m_.n_heads});
    if (m_.chooses(layer)) choose(rows, layer);
  }

  void begin_entries() {
    queries_ = plain_buffer(p_, BufferKind::f32, m_.n_heads * m_.head_dim), latents_ = plain_buffer(p_, BufferKind::f32, m_.head_dim);
    expanded_ = plain_buffer(p_, BufferKind::f32, m_.groups * value_dim_);
    for (int64_t group = 0; group < m_.groups; ++group) values_of_heads_.push_back(linear(value_dim_, m_.n_heads / m_.groups * m_.head_dim));
  }

  // A row of each token and, where it completes one, of an entry, by whose keys an index may choose.
  void keep_entries(int rows, int layer) {
    const int64_t d = m_.head_dim;
    p_.record(Category::qkv, LinearOp{linear(d, m_.hidden), rows, latents_, Store::f32, Activation::silu});
    p_.record(Category::rope, CacheRowsOp{latents_, layer, norm(d), rope_, 1e-5f});
    p_.record(Category::qkv, LinearOp{linear(m_.n_heads * d, m_.hidden), rows, queries_, Store::f32, Activation::silu});
    p_.record(Category::rope, TurnQueriesOp{queries_, q_, norm(d), rope_, 1e-5f, m_.n_heads});
    if (m_.entries[layer].tokens == 0) return;
    make_entries(rows, layer, d, false);
    if (!m_.chooses(layer)) return;
    const int64_t heads = m_.index_heads, width = m_.index_dim;
    make_entries(rows, layer, width, true);
    const int q = plain_buffer(p_, BufferKind::f32, heads * width), weights = plain_buffer(p_, BufferKind::f32, heads);
    for (const int out : {q, weights}) p_.record(Category::qkv, LinearOp{linear(out == q ? heads * width : heads, m_.hidden), rows, out, Store::f32, Activation::silu});
    AttentionShape shape = shape_of_entries(layer);
    shape.n_heads = heads, shape.head_dim = width, shape.v_head_dim = 0;
    ChooseOp choose{q, plain_buffer(p_, BufferKind::bf16, heads * width), weights, choice_, layer, rope_, shape};
    choose.turns_last = true;
    p_.record(Category::attention, choose);
  }

  void make_entries(int rows, int layer, int64_t width, bool is_index) {
    const Model::Entries& own = m_.entries[layer];
    const int64_t n = own.n_series * width;
    const int series = plain_buffer(p_, BufferKind::f32, 2 * n), made = plain_buffer(p_, BufferKind::f32, width);
    p_.record(Category::qkv, LinearOp{linear(2 * n, m_.hidden), rows, series, Store::f32, Activation::silu});
    p_.record(Category::attention, MoveEntriesOp{series, made, norm(own.tokens * n), n_states_++, own.tokens, own.n_series});
    p_.record(Category::rope, CacheRowsOp{made, layer, norm(width), rope_, 1e-5f, own.tokens, is_index});
  }

  AttentionShape shape_of_attention(int layer) const {
    AttentionShape shape = m_.has_entries ? shape_of_entries(layer) : shape_;
    shape.in_bytes = m_.in_bytes;
    return shape;
  }

  AttentionShape shape_of_entries(int layer) const {
    AttentionShape shape = shape_;
    shape.is_listed = true, shape.entry_tokens = m_.entries[layer].tokens, shape.most = m_.chooses(layer) ? m_.most : INT64_MAX;
    return shape;
  }

  void choose(int rows, int layer) {
    const int64_t heads = m_.index_heads, width = m_.index_dim, d = m_.pool == 1 ? width : width / 2;
    const int key = plain_buffer(p_, BufferKind::f32, width), q = plain_buffer(p_, BufferKind::f32, heads * d), weights = plain_buffer(p_, BufferKind::f32, heads);
    const int64_t sizes[] = {width, heads * d, heads};
    const int outs[] = {key, q, weights};
    for (int i = 0; i < 3; ++i) p_.record(Category::qkv, LinearOp{linear(sizes[i], m_.hidden), rows, outs[i], Store::f32, Activation::silu});
    p_.record(Category::rope, CacheIndexOp{key, layer, norm(d), norm(d), rope_, 1e-6f, width - d});
    if (m_.pool != 1) p_.record(Category::rope, PoolIndexOp{layer, norm(m_.pool * d), m_.pool, width});
    AttentionShape shape{heads, 1, width};
    shape.most = m_.most, shape.pool = m_.pool;
    ChooseOp choose{q, plain_buffer(p_, BufferKind::bf16, heads * width), weights, choice_, layer, rope_, shape};
    choose.width = d;
    p_.record(Category::attention, choose);
  }

  // By their keys, or the means of these, which lie in a layer of the cache of their own.
  void choose_blocks(int rows, int layer) {
    const int64_t heads = m_.index_heads, d = m_.index_dim, first_head = m_.by_means ? 0 : w_.pick(0, 2), width = (first_head + heads) * d;
    const int outs[] = {plain_buffer(p_, BufferKind::f32, d), plain_buffer(p_, BufferKind::f32, width)}, key = outs[0], q = outs[1];
    for (const int out : outs) p_.record(Category::qkv, LinearOp{linear(out == key ? d : width, m_.hidden), rows, out, Store::f32, Activation::silu});
    if (m_.by_means) p_.record(Category::rope, CacheIndexOp{key, layer, -1, -1, rope_, 0.0f});
    p_.record(Category::rope, CacheIndexOp{key, layer, norm(d), -1, rope_, 1e-6f, 0, m_.by_means ? m_.block : 0});
    AttentionShape shape{heads, 1, d};
    shape.most = m_.most, shape.block = m_.block, shape.by_means = m_.by_means, shape.v_head_dim = d;
    ChooseOp op{q, plain_buffer(p_, BufferKind::bf16, heads * d), -1, choice_, layer, rope_, shape};
    op.norm = norm(d), op.norm_eps = 1e-6f, op.first_head = first_head, op.local = m_.by_means ? op.local : w_.pick(1, m_.most / m_.block);
    p_.record(Category::attention, op);
  }

  // Random ranks for one or two parts of some of the layers; some adapters have nothing at all.
  void add_adapter() {
    std::vector<std::vector<float>> values;
    std::vector<std::pair<int, std::vector<AdapterPart>>> sites;
    for (const int weight : dense_) {
      if (w_.pick(0, 2) == 0) continue;
      const LinearShape& shape = p_.linear_at(weight).shape;
      std::vector<AdapterPart> parts;
      for (int64_t begin = w_.pick(0, shape.n / 2); begin < shape.n && parts.size() < 2;) {
        const int64_t end = w_.pick(begin + 1, shape.n), ranks = w_.pick(1, 20);
        values.push_back(w_.floats(ranks * shape.k, -0.2f, 0.2f));
        values.push_back(w_.floats((end - begin) * ranks, -0.2f, 0.2f));
        parts.push_back({begin, end, ranks, values[values.size() - 2].data(), values.back().data()});
        begin = end;
      }
      if (!parts.empty()) sites.emplace_back(weight, parts);
    }
    p_.add_adapter(sites);
  }

  int some(int64_t n) { return w_.pick(0, 1) ? norm(n) : -1; }  // a vector or none
  int norm(int64_t n) { return p_.add_vector(w_.floats(n, 0.5f, 1.5f)); }

  int linear(int64_t n, int64_t k, bool is_gated = false) {
    LinearShape shape{m_.weights, n, k, m_.group, is_gated, w_.pick(0, 1) == 1, {}, m_.is_wide};
    const float bound = 1.7f / std::max(1.0f, __builtin_sqrtf(static_cast<float>(k)));
    if (is_grouped(shape.format)) {
      shape.grid.scale = static_cast<Source>(w_.pick(0, 2));
      const std::vector<Levels> tables = shape.format == Format::group4   ? std::vector{Levels::iq4_nl, Levels::e2m1, Levels::iq3_xxs, Levels::iq3_s, Levels::nf4, Levels::fp4}
                                         : shape.format == Format::group3 ? std::vector{Levels::iq2, Levels::iq1}
                                                                          : std::vector<Levels>{};
      const int64_t zeros = shape.format == Format::group4, kind = w_.pick(0, static_cast<int>(1 + zeros + static_cast<int64_t>(tables.size())));
      shape.grid.offset = kind == 1 ? Offset::minima : kind == 2 && zeros ? Offset::zeros : Offset::none;
      if (kind > 1 + zeros) shape.grid.levels = tables[static_cast<size_t>(kind - 2 - zeros)];
      else if (kind > 0 && shape.format != Format::group8) shape.grid.levels = Levels::plain;
      if (shape.grid.offset != Offset::zeros && w_.pick(0, 1)) shape.grid.nested = m_.group <= kMaxNestedGroup, shape.grid.scale = kind == 1 ? Source::f16 : Source::f32;
      shape.grid.e4m3 = shape.grid.nested && kind != 1 && w_.pick(0, 1);
      if (!shape.grid.nested && w_.pick(0, 1)) shape.grid.e8m0 = shape.grid.offset == Offset::none, shape.grid.halves = kind == 1 && shape.grid.scale != Source::f32;
      const auto seed = static_cast<uint64_t>(w_.pick(0, 1 << 30));
      return keep([&](Program& program) { return program.add_random_linear(shape, seed, bound); });
    }
    if (shape.format == Format::fp8) {
      shape.grid.scale = Source::f32, shape.group = w_.pick(0, 1) ? 0 : kFp8Inputs;
      const auto seed = static_cast<uint64_t>(w_.pick(0, 1 << 30));
      return keep([&](Program& program) { return program.add_random_linear(shape, seed, bound); });
    }
    const std::vector<float> values = w_.floats(n * k, -bound, bound), bias = w_.floats(n, -0.5f, 0.5f);
    return keep([&](Program& program) {
      return program.add_linear(shape, {{values.data(), Source::f32, n, k}}, shape.has_bias ? bias.data() : nullptr);
    });
  }

  template <class Add>
  int keep(Add&& add) {
    if (files_ == nullptr) {
      dense_.push_back(add(p_));
    } else {
      Program packer(p_.kernels(), p_);
      const int weight = add(packer);
      const LinearShape& shape = packer.linear_at(weight).shape;
      files_->emplace_back(packer.blob_at(weight), packed_bytes(shape));
      dense_.push_back(p_.add_mapped_linear(shape, files_->back().data()));
    }
    return dense_.back();
  }

  void experts(int rows, int router_rows, int y) {
    MoeOp op{};
    const int64_t n_scored = m_.n_experts + (op.n_identities = w_.pick(0, 3));
    op.router = linear(n_scored, m_.hidden), op.given = x_;
    op.router_rows = has_bf16_rows(m_.weights) ? router_rows : rows;
    op.scores = plain_buffer(p_, BufferKind::f32, n_scored);
    op.joins_apart = w_.pick(0, 3) == 0, op.wide = op.joins_apart ? plain_buffer(p_, BufferKind::f32, 2 * m_.ffn, m_.top_k) : -1, op.gate = {1.7f, 7.0f, 9.0f, 1.0f}, op.weighs_input = op.joins_apart && op.n_identities == 0 && w_.pick(0, 1);
    op.by = static_cast<Scores>(w_.pick(0, 2)), op.margin = 0.3f, op.choice_bias = some(n_scored), op.scales = some(n_scored), op.routed_scale = 0.5f, op.score_scale = 0.8f, op.behind = op.n_identities == 0 ? some(2 * m_.hidden) : -1, op.behind_eps = 1e-5f;
    if (n_scored % 2 == 0 && m_.top_k <= n_scored / 2) op.n_groups = 2, op.group_best = std::min<int64_t>(2, n_scored / 2);
    for (int64_t e = 0; e < m_.n_experts; ++e) op.gate_up.push_back(linear(2 * m_.ffn, m_.hidden, !op.joins_apart)), op.down.push_back(linear(m_.hidden, m_.ffn));
    op.rows = rows, op.has_hidden = !has_bf16_rows(m_.weights) && !op.joins_apart;
    op.hidden = plain_buffer(p_, BufferKind::f32, m_.ffn, m_.top_k), op.hidden_rows = rows_buffer(p_, m_, m_.ffn, m_.top_k);
    op.expanded = plain_buffer(p_, BufferKind::f32, m_.hidden, m_.top_k), op.out = y;
    op.top_k = m_.top_k, op.renormalises = w_.pick(0, 1), op.activation = m_.activation, op.softcap = w_.pick(0, 1) ? 0.7f : 0.0f;
    p_.record(Category::moe, op);
  }

  Program& p_;
  std::deque<MappedFile>* const files_;
  World& w_;
  const Model& m_;
  std::vector<int> dense_;  // experts and the heads' products among them: what they have is never asked for
  AttentionShape shape_;
  int x_, q_, heads_, rope_, qkv_ = -1;
  // of latent attention, and of rows that heads meet as they are
  const int64_t key_dim_ = w_.pick(1, 40), value_dim_ = w_.pick(1, 40);
  int latents_ = -1, queries_ = -1, expanded_ = -1, choice_ = -1;
  std::vector<int> keys_of_heads_, values_of_heads_;
  int n_states_ = static_cast<int>(m_.has_states ? m_.layers : 0);  // that operations have
};

}  // namespace diptych
