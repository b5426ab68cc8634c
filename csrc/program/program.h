// A model's forward recorded once and executed whole: a list of typed operations over numbered buffers and packed weights.
//
// run() is one parallel region. Threads walk the list together, meet at a barrier after each phase, and thread 0 adds the
// phase's nanoseconds to its category. Buffers live in one arena that grows to the largest step seen; nothing else is
// allocated while a step runs. A buffer holds `rows_per_token` rows for each token of the step.
//
//   Program program(kernel_set("avx512"), threads);
//   int w = program.add_linear(shape, parts, bias);   int x = program.add_f32(hidden);   ...
//   program.record(NormOp{x, norm, eps, rows});  program.record(LinearOp{...});  ...
//   program.run(step, kv, logits);   or, where only the likeliest tokens are wanted:   program.run_best(step, kv);
//
// Ranks (team.h) each have a program of the same operations over weights of their own outputs. A buffer is private, and each rank
// computes all of it, or shared: one for all of them, where a product writes its rank's columns and anything else its rank's rows.
// So gathering is no operation: behind whatever writes a shared buffer all ranks meet instead of the threads of one. No sum is cut,
// and N ranks have the bits of one. That nobody writes what another may still read is checked when the operations are recorded.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "attention/attention_plan.h"
#include "gemm/gemm.h"
#include "memory/kv_cache.h"
#include "memory/settling.h"
#include "program/adapters.h"
#include "sets/kernel_sets.h"
#include "threads/team.h"
#include "threads/thread_pool.h"

namespace diptych {

enum class Category : int32_t { embed, norm, qkv, rope, attention, o, gate_up, down, moe, head, count };
constexpr int64_t kCategories = static_cast<int64_t>(Category::count);
extern const char* const kCategoryNames[kCategories];

// One step's arrays, owned by the caller. S sequences, T tokens, M table width, R wanted rows of logits.
struct Step {
  const int32_t* token_ids;       // [T]
  const int32_t* query_start;     // [S + 1]
  const int32_t* context_tokens;  // [S] including this step's, which are the last
  const int32_t* block_table;     // [S, M]
  const int32_t* logits_rows;     // [R]
  int64_t n_tokens, n_sequences, table_width, n_logits;
  const float* input = nullptr;          // [T, width] of the program's InputOp, where it has one
  const int32_t* tapped = nullptr;       // [n_tapped] numbers of the taps wanted
  float* taps = nullptr;                 // [n_tapped, T, width], written
  int64_t n_tapped = 0;
  const int32_t* adapters = nullptr;     // [S] each sequence's adapter, -1: none; null: none has any
  const int32_t* state_reads = nullptr;  // [S] the place that a sequence's state is read from, -1: zeros; null where no layer has states
  const int32_t* state_writes = nullptr; // [S] the place that it is left in
  const int32_t* state_saves = nullptr;  // [n_saves, 3] (sequence, rows, place): behind so many of its rows it is left there, too; ascending
  int64_t n_saves = 0;
  const int32_t* both_ways = nullptr;    // [S] 1 where each token of the sequence, which is here whole, attends to all; null: nowhere
  const int32_t* second = nullptr;       // [S] the position from which on its tokens are of the second type; null: all are of the first
};

enum class BufferKind : int32_t { f32, bf16, rows };

struct Buffer {
  BufferKind kind = BufferKind::f32;
  int64_t width = 0;
  int64_t rows_per_token = 1;
  RowsKind rows_kind = RowsKind::bf16;
  std::vector<int32_t> order;  // of the inputs of rows (Rows::order); empty: as they come
  bool shared = false;      // by the ranks
  uint8_t* data = nullptr;  // set by the arena
  Rows rows;                // the view of `data`, kind rows only

  float* f32() const { return reinterpret_cast<float*>(data); }
};

struct Table {  // an embedding table that the caller keeps alive
  const uint8_t* data;
  Source source;
  int64_t rows, width;
};

struct RopeTable {
  std::vector<double> inverse_frequency;  // [rotary_dim / 2]
  double attention_factor = 1.0;
  int64_t n_positions = 0;
  std::vector<float> cosine, sine;        // [n_positions, rotary_dim / 2]
  void grow(int64_t positions);
};

// ---- operations; numbers name buffers (x, y, rows, ...), weights, vectors, tables ----

// Added to a token's row: of a table, if any, from `first` on by position; of another, if any, by the token's type.
struct LearnedPositions { int table = -1; int64_t first = 0; int types = -1; };
struct EmbedOp { int table, x; float scale; LearnedPositions positions; };
struct TiedEmbedOp {                                          // rows of a packed weight, in bf16 or groups: the vocabulary from `first` on
  int head, x;
  float scale;
  int64_t first, vocab;
  LearnedPositions positions;
};
struct NormOp { int x, weight; float eps; int out; int bias = -1; bool is_centred = false; int64_t parts = 1; };  // out: rows or f32; bias -1: none;
                                                              // parts of a row are normed each by itself
struct AddNormOp { int y, weight; float eps; int x; float scale = 1.0f; };  // x += scale * norm(y)
struct AddOp { int y, x; int gate = -1; float scale = 1.0f; };  // x += scale * y, or sigmoid(gate) y where gate [T, 1] is not -1
struct PrepareOp { int x, rows; };                            // x: f32 or bf16
struct LinearOp { int weight, rows, out; Store store; Activation activation; int64_t column; };  // outputs go to columns from there on
struct RotateOp { int qkv, q, layer, rope, q_norm, k_norm; bool has_rope, has_q_norm, has_k_norm; RotateShape shape; };
struct AttentionOp { int q, out, layer; AttentionShape shape; int sinks = -1; int64_t column = 0; int choice = -1; int slopes = -1; int distances = -1;
                     int of_queries = -1, of_keys = -1, places = -1; };
                                                              // sinks, slopes: vectors [H]; distances: [H, 2 reach + 32]; choice: what a ChooseOp has left; or -1;
                                                              // of_queries, of_keys: buffers [T, H n_places]; places: vector [2 reach + 1]
constexpr int64_t kMostGroupBest = 4;
// What a router's products become: a softmax over all experts, a sigmoid of each, or for each choice a softmax over those that are
// left and lie within a margin of the best (sparsemixer, arXiv:2409.12136).
enum class Scores : int32_t { softmax, sigmoid, late_sigmoid, sparsemixer, root_softplus };  // the last: the root of a softplus of each
struct MoeOp {
  int router, router_rows, scores;           // router weight, its input, [T, E] fp32, E as in n_scored
  std::vector<int> gate_up, down;            // one packed weight per expert
  std::vector<int> up;                       // the same, where gate_up is gate alone (or a rank's part of it); else empty
  int rows, up_rows;                         // input of the experts, and in the form that `up` reads
  int hidden, hidden_rows;                   // [T * k, F]; hidden_rows alone when the gate writes it directly
  bool has_hidden;
  int expanded;                              // [T * k, D] fp32
  int out;                                   // [T, D] fp32, written
  int64_t top_k;
  bool renormalises;
  Activation activation;
  Scores by = Scores::softmax;
  float margin = 0.0f;                       // of sparsemixer, times the larger of a product's size and the best product
  float score_scale = 1.0f;                  // of products, before anything else
  float softcap = 0.0f;                      // products become softcap * tanh(product / softcap) first; 0: they stay
  int scales = -1;                           // a vector [E] that the chosen experts' weights are multiplied by, or -1
  int choice_bias = -1;                      // a vector [E] added to the scores for the choice, or -1
  int by_token = -1;                         // a vector [V, k] of the experts that each token id has, or -1: scores choose
  int64_t n_groups = 1, groups_per_token = 1, group_best = 1;  // experts of the best groups only, by the sum of their best
  float routed_scale = 1.0f;
  bool joins_apart = false;                  // gate_up is plain, [T * k, 2F] in `wide`, whose halves are joined by themselves as `gate` says,
  bool is_gated = true;                      // or it is up alone, [T * k, F], which goes through `curve`
  int wide = -1;
  GateForm gate;
  Curve curve = Curve::silu;
  bool weighs_input = false;                 // an expert's input is multiplied by its weight, not its output; of those that join apart
  int64_t hidden_column = 0, column = 0;     // where the outputs of gate_up and down begin
  int64_t n_identities = 0;                  // experts behind the others that give what they read, a row of `given` [T, D] fp32
  int given = -1;
  int behind = -1;                           // a vector [2, D]: what an expert's row is multiplied by before it is normed, and the norm's weight
  float behind_eps = 0.0f;
  int64_t n_scored() const { return static_cast<int64_t>(down.size()) + n_identities; }
};
struct HeadOp {
  int x, norm;
  float eps;
  int rows, weight;
  float scale, softcap;
  bool has_softcap, has_norm;
  int bias = -1;
  bool is_centred = false;
  int64_t first = 0, vocab = 0;              // the weight's first token, and how many there are in all
};
struct HeadsOp {                             // for each head a product of its own: x [T, first + H * head_stride], the first K of each
  std::vector<int> weights;                  // one for each head
  int x;                                     // f32
  int64_t head_stride;
  int rows, out;                             // rows: H for each token, of width K; out: f32 or bf16
  int64_t out_head_stride;
  Store store;
  int64_t column = 0, first = 0;             // where the first head's outputs begin, and what it reads
};
struct CacheLatentsOp { int kv, layer, norm, rope; int64_t rank; float norm_eps; };
struct CacheIndexOp { int x, layer, norm, bias, rope; float norm_eps; int64_t n_gates = 0, pooled = 0; };  // bias -1: an RMSNorm; norm -1: none
struct PoolIndexOp { int layer, offsets; int64_t pool, width; };  // of the pools that the step's tokens complete; width: of a key and its gates
struct CacheRowsOp { int x, layer, norm, rope; float norm_eps; int64_t tokens = 0; bool is_index = false; };  // as RowCall has it
struct TurnQueriesOp { int q, out, norm, rope; float norm_eps; int64_t n_heads; };   // each head of q normed and turned: bf16
struct TurnBackOp { int x, rope; int64_t n_heads; };            // each head of x
struct MoveEntriesOp { int x, out, offsets, layer; int64_t tokens, n_series; };  // layer: of the states
struct ChooseOp {                            // what tokens attend to (attention_index.inl), by heads as `shape` says
  int q, queries, weights;                   // f32 [T, H d], turned to bf16, and f32 [T, H]
  int choice;                                // [T, most] whole numbers in an f32 buffer; nothing where a token sees no more than `most`
  int layer, rope;
  AttentionShape shape;
  // Of blocks there are no weights (-1), queries are normed, q may hold more heads, and a choice is [T, H, most / block]. The last `local`
  // blocks up to a token's own are always chosen. Pooled, a choice is [T, most / block + 1].
  int norm = -1;
  float norm_eps = 0.0f;
  int64_t local = 0, first_head = 0;
  int64_t width = 0;                         // of a head's query in q, which zeros are put behind; 0: as wide as keys
  bool turns_last = false;                   // neighbours at a query's end turn together
};
struct ScaleQueriesOp { int q; QueryScale scale; int by_head = -1; };  // each token's row of q, by its position; by_head: or each head by a vector [2, H], s log(position + 1) + b
struct RotateQueriesOp { int q, out, rope; int64_t n_heads; };   // the end of each head of q, turned, to the end of each head of out
struct StateOp {                             // moves states on (states.inl)
  int qkv, rates, decays, out;               // f32; -1: its rule has none
  int taps, tap_bias, decay, shift, skip, norm;  // vectors; -1: its rule, or the layer, has none
  int layer;                                 // of the states
  StateShape shape;
  int64_t first_head = 0, column = 0;        // of the rates of all heads, and where the heads' outputs begin
  int64_t first_key_head = 0;                // of those of all key heads
};
struct InputOp { int x; };                                    // x: the caller's rows
struct TapOp { int x, number; };                              // x to the caller, where the step asks for this number
struct MeetOp { int out; };                                   // nothing: other ranks write what this one has no part of

struct WeighOp { int x, weight, out; };                       // out: rows or f32
struct SparseGateOp { int x, out; float cutoff; Activation activation; };  // x: gate and up beside each other; out: rows or f32
struct BentGateOp { int x, out; GateForm form; };             // likewise
struct CurveOp { int x, out; Curve curve; std::array<float, kCurveNumbers> numbers{}; };  // out = act(x), or of x twice as wide act(gate) * up: rows or f32
struct BranchOp { int x, out; float scale; };                 // out = scale * x
struct GateHeadsOp { int gates, x; bool is_softplus; };       // each of as many heads of x as there are gates times a sigmoid of its own, or that
struct MatchOp { int y, x, out; float least; };               // out = y, as large as x
struct CopyColumnsOp { int x, out; int64_t first, column, n; };  // n from `first` on, to `column` on
struct PredictOp { std::vector<int> xs; int routed, weight; float scale; };             // as `predict` of ops/contract.py
struct CorrectOp { std::vector<int> xs; int y, routed, weight, active; float scale; };  // likewise
struct ConnectionsOp { std::vector<int> xs; int weight, scale, base, out; float eps; };  // likewise
struct GatherOp { std::vector<int> xs; int c, out; float eps; };                        // likewise
struct SpreadOp { std::vector<int> xs; int y, c; float magnitude, eps; };               // likewise
struct MingleOp { std::vector<int> xs; int y, c, rounds; float magnitude, eps; };        // likewise
struct FoldOp { int x, out; std::vector<float> weights; };    // out = the sum of x's parts, each as wide as out, by these weights
struct InjectOp { int x, y, c; float magnitude, scale; };     // each part of x, as wide as y, += magnitude * sigmoid(scale * c) * y, of its own c
struct MeetKeysOp { int keys, queries, values, out; };        // as `meet_keys` of ops/contract_streams.py
struct IdsOp { int out; int32_t shift; };                     // out: in each column the token's id, less shift
// likewise, as `ngrams`: of each token rows of tables that hold `table_rows` each, all but the last; heads: (rows of the head, its first)
struct NgramsOp {
  int before, out;
  std::vector<int> tables;
  int64_t table_rows;
  int32_t shift;
  std::vector<int64_t> factors;
  std::vector<std::array<int64_t, 2>> heads;
};
struct LayerInputsOp { int x, norm, table, packed; float eps, table_scale, scale; };    // likewise, of the product that lies in x; the
                                                              // table is one, or a packed weight in groups; the other is -1

using OpBody = std::variant<EmbedOp, TiedEmbedOp, NormOp, AddNormOp, AddOp, PrepareOp, LinearOp, RotateOp, AttentionOp, MoeOp, HeadOp,
                            InputOp, TapOp, MeetOp, HeadsOp, CacheLatentsOp, CacheIndexOp, PoolIndexOp, CacheRowsOp, TurnQueriesOp, TurnBackOp, MoveEntriesOp, ChooseOp, ScaleQueriesOp, RotateQueriesOp, WeighOp, SparseGateOp, BentGateOp, CurveOp, BranchOp, GateHeadsOp, MatchOp,
                            CopyColumnsOp, PredictOp, CorrectOp, ConnectionsOp, GatherOp, SpreadOp, MingleOp, FoldOp, InjectOp, MeetKeysOp, IdsOp, NgramsOp, LayerInputsOp, StateOp>;

struct Op {
  Category category;
  OpBody body;
};

// What a rank writes for the others before they meet: columns [begin, end) of a buffer's rows, its share of the rows, or the rows of
// tokens in [begin, end). Ranks meet in one order, so the i-th meeting of one is that of all.
enum class Part : int32_t { columns, rows, tokens };
struct Meeting {
  Part part;
  int buffer;  // -1: the logits
  Range own;
};

// The tokens of a step whose index has to choose, in order, each with its sequence; scores of so many lie there at one time, stride apart.
struct ChoicePlan {
  std::vector<int32_t> tokens, sequences;
  int64_t at_once = 0, stride = 0;  // of blocks a stride has those of each head
};

// Which expert rows belong together this step; written by one thread, read by all.
struct Routing {
  std::vector<int32_t> expert_ids;     // [T, k] ascending within a token
  std::vector<float> expert_weights;   // [T, k]
  std::vector<int32_t> expert_begin;   // [E + 1] into the two lists below
  std::vector<int32_t> source_rows;    // [T * k] token of each expert row
  std::vector<int32_t> expanded_rows;  // [T, k] expert row of each choice
  bool is_adapted = false;             // whether an adapter of the step has experts of this mixture
  void resize(int64_t tokens, int64_t top_k, int64_t n_experts);
};

// Bytes of a mapped file, whose pages go back when they were read, unless a packed weight lies there: of such a weight, or (-1) of
// something else that is used where it is.
struct Saved {
  int linear;
  const uint8_t* data;
  int64_t bytes;
  std::optional<uint64_t> checksum;  // of bytes as `Xxh3Copy` takes them; none: not looked at
};

class Program {
 public:
  Program(const KernelSet& kernels, int threads) : Program(kernels, threads, ThreadPool::allowed_cpus()) {}
  Program(const KernelSet& kernels, int threads, std::vector<int> cpus);  // threads and cpus as ThreadPool
  Program(const KernelSet& kernels, const Program& beside);  // on the threads of another, which runs when this one does not

  // Weights. Packing runs on the pool. From rows, from codes, random, and packed already (its bytes come with `read_packed`).
  int add_linear(const LinearShape& shape, const std::vector<WeightPart>& parts, const float* bias, const Feedback& feedback = {});
  int add_coded_linear(const LinearShape& shape, const std::vector<CodePart>& parts, const float* bias);
  int add_random_linear(const LinearShape& shape, uint64_t seed, float amplitude);
  int add_packed_linear(const LinearShape& shape);
  // Packed already, and used where it lies, in a mapped file. Throws std::invalid_argument where that is no multiple of 64 bytes.
  int add_mapped_linear(const LinearShape& shape, const uint8_t* blob);
  // Has mapped weights copied to the program's own memory, behind what runs, or before it returns; after `read_packed`.
  void settle(bool waits = false);
  bool is_settling() const { return settling_ != nullptr; }
  // Copies packed bytes to their weights, or only reads them where they are used, with their checksums, each on a thread; the
  // numbers in `saved` of those whose checksum is another. Throws std::invalid_argument where sizes are not the weights'.
  std::vector<int> read_packed(const std::vector<Saved>& saved);
  // Rows of a larger weight, which was packed whole, or is random. Throws std::invalid_argument where they cut a strip of it.
  int add_packed_part(const LinearShape& shape, const LinearShape& whole, const std::vector<Range>& rows, const uint8_t* blob);
  int add_random_part(const LinearShape& shape, const LinearShape& whole, const std::vector<Range>& rows, uint64_t seed, float amplitude);
  int add_vector(std::vector<float> values);
  int add_table(const Table& table);
  int add_rope(std::vector<double> inverse_frequency, double attention_factor);
  int add_buffer(const Buffer& buffer);
  // Adapters (adapters.h) come and go between runs. Numbers of dropped ones are given again.
  int add_adapter(const std::vector<std::pair<int, std::vector<AdapterPart>>>& sites);  // by weight
  void drop_adapter(int number);  // throws std::invalid_argument where there is none
  int64_t adapter_bytes(int number) const;
  void record(Category category, OpBody body);

  // Makes the program one rank's, before its buffers are added. The team outlives it.
  void join(Team& team);
  // Ranks but 0: runs steps over the caches (by number) as rank 0 posts them; returns at a message of another kind, which it names
  // with its bytes. Throws TeamBroken.
  std::pair<int32_t, int64_t> serve(const std::vector<KvCache*>& caches);

  // Runs the whole forward; logits [R, vocab] fp32 is written. Throws std::invalid_argument when an index is out of range.
  // Of several ranks, 0 is called and posts the step to the others; TeamBroken when one of them is gone.
  void run(const Step& step, KvCache& kv, float* logits);
  // As run, but the logits are written nowhere: the best of each of the R rows, lowest first among equals.
  std::vector<Best> run_best(const Step& step, KvCache& kv);
  // As run, up to the norm before the head: hidden [R, D] fp32.
  void run_hidden(const Step& step, KvCache& kv, float* hidden);
  // ids[i] = index of the largest of logits[i], lowest first among equals; on the pool.
  void argmax(const float* logits, int64_t rows, int64_t vocab, int64_t* ids);
  // drawn[i] from row rows[i] of logits [R, vocab] at temperatures[i] > 0 and quantiles[i] in [0, 1); on the pool.
  void draw(const float* logits, int64_t vocab, const int32_t* rows, int64_t n, const float* temperatures, const double* quantiles,
            Drawn* drawn);

  // A buffer's first rows as the last run left them, [rows, width] fp32 (f32 and bf16 buffers). For tests.
  void read_buffer(int index, int64_t rows, float* out) const;
  int64_t buffer_width(int index) const { return buffers_.at(index).width; }
  int64_t vector_size(int index) const { return static_cast<int64_t>(vectors_.at(index).size()); }
  const Table& table_at(int index) const { return tables_.at(index); }

  const std::array<int64_t, kCategories>& nanoseconds() const { return nanoseconds_; }  // of the last run
  const KernelSet& kernels() const { return kernels_; }
  int threads() const { return pool_.size(); }
  int64_t n_meetings() const;    // of all ranks, in a step
  // Of ranks that are linked: what this one writes at each of its meetings, and after loading what all do [size][meetings].
  std::vector<Range> written() const;
  void know_written(std::vector<std::vector<Range>> by_rank);
  int64_t weight_bytes() const;  // packed weights and vectors: what a step reads whole
  int64_t table_bytes() const;   // embedding tables beside them, of which a step reads single rows
  int64_t vocab() const { return vocab_; }
  int64_t hidden_width() const { return hidden_width_; }  // D
  int64_t input_width() const { return input_width_; }    // of the InputOp, 0 without one
  int64_t tap_width(int number) const;                    // throws std::invalid_argument where no tap has the number
  const PackedLinear& linear_at(int index) const { return linears_.at(index); }
  const uint8_t* blob_at(int index) const { return linears_.at(index).panels; }  // it begins with its panels

 private:
  struct Run;  // one step in flight, program_run.h
  friend struct Run;

  int64_t gathered_bytes() const;  // packed weights that are tables
  void place_by(const LearnedPositions& positions, int x);
  static int first_weight(const OpBody& body);  // that an operation reads, or -1
  struct Results {  // one of them, or none where that is another rank's affair
    float* logits = nullptr;
    Best* best = nullptr;     // [threads, R]
    float* hidden = nullptr;
  };
  enum class Want : int32_t { logits, best, hidden };
  void post(const Step& step, const KvCache& kv, Want want);
  void execute(const Step& step, KvCache& kv, Want want, const Results& results);
  void compute(const Step& step, KvCache& kv, const Results& results);
  void check_order(const OpBody& body);
  void meet();  // the step's last
  void note_meetings(const OpBody& body);
  template <class See>
  void visit_part(const Meeting& meeting, Range part, int rank, const Step& step, float* logits, See&& see) const;
  bool exchange(size_t meeting, const Step& step, float* logits);
  bool is_rank_0() const { return team_ == nullptr || team_->rank() == 0; }
  void check(const Step& step, const KvCache& kv) const;
  void check_states(const Step& step, const KvCache& kv) const;
  uint8_t* reserve_weights(int64_t bytes);
  void start_settling();
  void take_settled();
  void reserve(int64_t tokens);
  void reserve_routing(const MoeOp& op, int64_t tokens);
  void number_head_rows(int64_t heads, int64_t tokens);
  void place_tokens(const Step& step, int64_t block_tokens);
  void plan_attention(const Step& step);
  void plan_choice(const Step& step);

  const KernelSet& kernels_;  // every model has its own: nothing of the process says how one is computed
  const std::shared_ptr<ThreadPool> shared_pool_;
  ThreadPool& pool_;
  std::vector<PageBuffer> weight_pages_;
  int64_t weights_left_ = 0;  // bytes of the last of them that nothing has taken
  std::vector<PackedLinear> linears_;
  const std::shared_ptr<Balance> balance_ = std::make_shared<Balance>();  // of every weight that is multiplied with no other beside it: in use all the time it stays in cache
  std::vector<int> mapped_;                 // those that are used in a mapped file
  std::unique_ptr<Settling> settling_;      // to where they move; ends before the memory it writes to
  std::vector<std::vector<float>> vectors_;
  std::vector<Table> tables_;
  std::vector<RopeTable> ropes_;
  std::vector<Buffer> buffers_;
  std::vector<Op> ops_;
  std::vector<std::unique_ptr<Adapter>> adapters_;  // null: dropped
  AdaptedRows adapted_;                             // of the step: its tokens
  AdaptedRows adapted_head_, adapted_experts_;      // rows that the head reads; those of the mixture that runs
  std::vector<AttentionShape> attention_shapes_;  // distinct windows, or chunks, and heads
  std::vector<AttentionPlan> attention_plans_;    // one for each of them
  std::vector<int> plan_of_op_;                   // index by op; only read for attention
  int64_t most_chosen_ = INT64_MAX;               // by an index, of all layers that have one
  int64_t chosen_block_ = 1, choosing_heads_ = 1;  // in blocks of so many, of each of so many heads
  int64_t chosen_pool_ = 1;                        // or in pools of so many
  ChoicePlan choice_plan_;
  PageBuffer index_scores_;
  std::vector<int> next_weight_;                  // by op: the weight that the next op with one reads first, or -1
  std::vector<uint8_t> meets_;                    // by op: whether all ranks meet behind it
  std::vector<int> read_since_meeting_;           // shared buffers
  std::vector<Meeting> meetings_;
  std::vector<size_t> first_meeting_;             // by op
  std::vector<std::vector<Range>> written_;       // [size][meetings], of ranks that are linked
  std::vector<uint8_t> slots_of_ranks_;           // what they carry to each other
  Team* team_ = nullptr;
  std::unique_ptr<SharedPages> shared_arena_;
  PageBuffer arena_, scratch_, partials_;
  int64_t arena_tokens_ = 0, scratch_stride_ = 0, vocab_ = 0, hidden_width_ = 0, input_width_ = 0, n_layers_ = 0, n_state_layers_ = 0;
  bool has_latents_ = false;                      // then the cache is one of latents
  int64_t table_rows_ = INT64_MAX;                // of the shortest table that token ids look into
  int64_t table_positions_ = INT64_MAX;           // the same of positions
  int64_t table_types_ = 1;                       // of types: more than one where tokens of a second have a row
  Routing routing_;
  std::vector<int32_t> positions_, slots_;        // [T] of the step: where a token stands, block * P + offset where its KV goes
  std::vector<int32_t> types_;                    // [T] 0 or 1, where the step says where a second text begins
  std::vector<int32_t> row_numbers_;              // 0, 1, 2, ...
  std::vector<int32_t> head_rows_;                // [H, T] t * H + h, of HeadsOps (all of one H)
  std::vector<std::atomic<int32_t>> counters_;    // by op: next attention task
  std::array<int64_t, kCategories> nanoseconds_{};
  struct alignas(64) Waiting { ReadAhead ahead; };
  std::vector<Waiting> waiting_;                  // by thread: what it fetches at barriers
};

}  // namespace diptych
