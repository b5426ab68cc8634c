// Linear layers y = x W^T + b for bf16, int8 and int4 weights, the same code for one row (decode) and thousands (prefill).
//
// Weights that somebody else quantised (AWQ, GPTQ, GGUF ...) keep their values: group2 to group8, of so many bits with a scale of its
// own for each group of inputs, met by rows of int8 with a scale and, for each group, a power of two below it.
//
// The promise: output (row, lane) depends on that row of x and that lane of W alone. Not one bit changes with the number
// of rows, the other rows, the thread count or the way the work is cut, because every output lane adds its products
// over K in one fixed order (bf16: fp32 in ascending pairs; groups: int32 within a group, fp32 over ascending groups) or exactly
// (int8 and int4: int32). Holds within one kernel set.
//
// Life of a layer, all functions called inside a ThreadPool region by every thread unless noted:
//   LinearShape shape{Format::int8, n, k};                       // once, at load
//   blob = allocate 64-byte aligned packed_bytes(shape)          //   (PageBuffer gives huge pages)
//   pack_linear(set, shape, parts, n_parts, bias, blob, thread, threads)
//   PackedLinear w = view_packed(shape, blob);                   // a view; the blob can also come from a mapped file
//   Rows x = view_rows(rows_kind(format), m, k, memory);         // once per step and distinct input
//   prepare_rows(set, x, f32 input, stride, begin, end);              // each thread a part of the rows
//   pool.barrier(thread)
//   linear(set, w, x, {}, m, epilogue, thread, threads);              // no barrier inside; the caller puts one after
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

// Header functions that kernels call are forced inline: an out-of-line copy compiled with wide flags must not exist. So are functions that do
// nothing but prefetch: GCC 12 takes one for free of effects and drops its calls.
#define DIPTYCH_FORCED inline __attribute__((always_inline))

namespace diptych {

struct KernelSet;  // kernel_sets.h

constexpr int64_t kPanelLanes = 64;  // output lanes of one packed panel

enum class Format : int32_t { bf16 = 0, int8 = 1, int4 = 2, fp8 = 3, group4 = 4, group8 = 5, group6 = 6, group2 = 7, group3 = 8, group5 = 9 };
enum class Source : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

// Of magnitudes; NaN where one is.
DIPTYCH_FORCED float higher_magnitude(float a, float b) { return a > b || a != a ? a : b; }

// How many steps of a grid one unit is, where the largest magnitude of its numbers takes `top` steps. Numbers so small that the
// inverse would not be finite (2^-100: products of a closed gate, say) are zero on every grid.
DIPTYCH_FORCED float steps_per_unit(float highest, float top) { return highest > 0x1p-100f ? top / highest : 0.0f; }

inline bool is_grouped(Format format) { return format >= Format::group4; }
inline bool has_bf16_rows(Format format) { return format == Format::bf16 || format == Format::fp8; }

// What a group's codes stand for: weight = scale * (level - zero) or scale * level + minimum. Scales are kept in the type of the file that
// they come from. Nested ones, as of GGUF's blocks of 256, are whole numbers of 8 bits, and so are their minima, times a factor of each that
// kNestedInputs share; or, as NVFP4's, E4M3 of 8 bits without a sign. Powers of two, as MXFP4's, are E8M0: half of what it says, 2^(e - 128),
// since levels of e2m1 are twice its values.
enum class Offset : int32_t { none = 0, zeros = 1, minima = 2 };  // zeros: u8, group4 with plain levels only; minima: fp32, or as Grid says
// Of a code: itself less half of their number; itself; tables, iq2 and iq1 for group3 and the others for group4, e2m1's of twice its values,
// nf4's and fp4's of so many times bitsandbytes' fractions as whole numbers hold them best.
enum class Levels : int32_t { centred = 0, plain = 1, iq4_nl = 2, e2m1 = 3, iq2 = 4, iq3_xxs = 5, iq3_s = 6, iq1 = 7, nf4 = 8, fp4 = 9 };
constexpr int64_t kFp8Inputs = 128;  // of fp8 that share a scale
constexpr int64_t kNestedInputs = 256, kMaxNestedGroup = 64;  // a line of s8 scales is of four groups or more
struct Grid {
  Source scale = Source::f16;
  Offset offset = Offset::none;
  Levels levels = Levels::centred;
  bool nested = false;  // then `scale` is of the factors: f16 of scales and of minima, or f32 where there are no minima
  bool e4m3 = false;    // nested and without minima: the scales' type
  bool e8m0 = false;    // not nested, without zeros and minima: the scales' type, in place of `scale`
  bool halves = false;  // not nested: minima in the scales' type, which has 16 bits
};

struct LinearShape {
  Format format = Format::bf16;
  int64_t n = 0;         // output lanes of W as the checkpoint counts them (gated: gate and up together)
  int64_t k = 0;         // inputs
  int64_t group = 64;    // int4, groups: inputs that share a grid: 32, 64 or 128, in groups 16 too; fp8: 128, or 0 where all inputs of a lane
                         // share their scale; ignored otherwise
  bool gated = false;    // W = gate rows then up rows, n even; the epilogue gives act(gate) * up, n / 2 outputs
  bool has_bias = false;
  Grid grid = {};        // in groups
  bool wide = false;     // in groups: met by rows of 15 bits, where rows of 8 bits cost more than the weights' own rounding did
};

// Rows [begin, begin + rows) of W from one tensor, concatenated along n in the order given (q, k, v / gate, up).
struct WeightPart {
  const void* data;  // [rows, stride], only the first k of each row are read; any alignment of 2 (16 bit) or 4 bytes
  Source source;
  int64_t rows;
  int64_t stride;  // elements from row to row, at least k
};

// Half-open part of [0, items) that is thread's, in multiples of `unit` except for the end.
struct Range {
  int64_t begin, end;
};
inline Range share(int64_t items, int thread, int threads, int64_t unit = 1) {
  const int64_t units = (items + unit - 1) / unit;
  const int64_t begin = units * thread / threads * unit, end = units * (thread + 1) / threads * unit;
  return {begin < items ? begin : items, end < items ? end : items};
}

// Bytes of the packed form (panels, scales, bias in one blob), a multiple of 64.
int64_t packed_bytes(const LinearShape& shape);

// Of int4: which way what meets the weight lies, in n directions of a text. What rounding a group's inputs takes from an output there, the
// groups after it give back as well as they can. Nothing where n is 0.
constexpr int64_t kMostDirections = 64;
struct Feedback {
  int64_t n = 0;
  std::vector<float> take;  // [k, padded][n] what an input takes of what is left when its group is rounded
  std::vector<float> give;  // [k, padded][n] what an input's own error adds
};
Feedback make_feedback(const LinearShape& shape, const float* directions, int64_t n);  // [n][k]

// Packs W into blob. Threads divide the panels; each byte of the blob is written by exactly one thread.
//   parts: sum of rows == shape.n      bias [n] fp32 in checkpoint order, read if shape.has_bias
void pack_linear(const KernelSet& set, const LinearShape& shape, const WeightPart* parts, int64_t n_parts, const float* bias,
                 void* blob, int thread, int threads, const Feedback& feedback = {});

// As WeightPart, of weights that are quantised already: in groups, int8 (codes of 128 + q, one scale a row, no offset) and fp8 (codes as they
// are, scales in fp32, 0 or from 2^-100 to 2^100, of a row or, all 16 lanes of a strip alike, of kFp8Inputs of it; no offset).
struct CodePart {
  const uint8_t* codes;  // [rows, k], one to a byte
  const void* scales;    // [rows, groups] in shape.grid.scale, or E8M0; nested: s8 or E4M3
  const void* offsets;   // [rows, groups] u8, fp32 or 16 bits as shape.grid says, or null; nested: s8
  int64_t rows;
  const void* factors = nullptr;  // nested: [rows, blocks of kNestedInputs] pairs of f16, of scales and of offsets, or f32
};
// Throws std::invalid_argument where parts are not as above.
void check_codes(const LinearShape& shape, const CodePart* parts, int64_t n_parts);
void pack_codes(const KernelSet& set, const LinearShape& shape, const CodePart* parts, int64_t n_parts, const float* bias, void* blob,
                int thread, int threads);

// As pack_linear with random weights, uniform in +-amplitude, a pure function of (seed, lane, input). For benchmarks.
// whole: another weight, of which `rows`, one range after the other, are this one.
void pack_random(const KernelSet& set, const LinearShape& shape, uint64_t seed, float amplitude, void* blob, int thread, int threads,
                 const LinearShape* whole = nullptr, const std::vector<Range>* rows = nullptr);

// The packed form of such rows from the packed form of the whole. Strips of 16 lanes are copied, so that none may be cut: check_part
// throws std::invalid_argument.
void check_part(const LinearShape& shape, const LinearShape& whole, const std::vector<Range>& rows);
void copy_packed_part(const LinearShape& shape, const LinearShape& whole, const std::vector<Range>& rows, const uint8_t* from, void* blob,
                      int thread, int threads);

// How the threads of one call share its work. Each walks a part of its own from the front, one stream of weights; who has finished
// takes from the back of another's (cores of one machine rarely run at one speed). Zero between calls.
struct Balance {
  static constexpr int kParts = 8;  // more threads than that share parts
  struct alignas(64) Part {
    std::atomic<uint64_t> taken{0};  // from the front in the low half, from the back in the high half
  };
  Part parts[kParts];
  std::atomic<int32_t> finished{0};
};

// A view, copied freely; copies share `balance`, so one region at a time may use them (view the blob again for another).
struct PackedLinear {
  LinearShape shape;
  int64_t n_outputs = 0;    // n, or n / 2 when gated
  int64_t n_panels = 0;     // panels of 64 lanes, the last one padded with zeros
  int64_t k_padded = 0;     // k rounded up to 32 (with groups: to the group)
  int64_t panel_bytes = 0;  // of one panel, a multiple of 64; panels follow one another
  const uint8_t* panels = nullptr;
  const float* scales = nullptr;  // [n_panels * 64], int8, int4 and fp8
  const float* bias = nullptr;    // [n_panels * 64] or null
  std::shared_ptr<Balance> balance;
};

// The view of a packed blob; blob is 64-byte aligned and outlives the view.
PackedLinear view_packed(const LinearShape& shape, const void* blob);

// Back to fp32, row by row in checkpoint order: what the packed form stands for. out [n, k]. Single thread; for tests,
// quality figures.
void unpack_rows(const PackedLinear& w, int64_t first_row, int64_t n_rows, float* out, int64_t out_stride);

// One row of plain (not gated) bf16 weights as it was packed: an embedding whose only copy is the head that it is tied to.
// out [k_padded].
void read_bf16_row(const PackedLinear& w, int64_t row, uint16_t* out);

// Likewise of weights in groups, as fp32.
void read_group_row(const PackedLinear& w, int64_t row, float* out);

// ---- activations -------------------------------------------------------------------------------------------------

// What the rows of x become for a weight format: int8 and int4 share one kind. group: int8 with a power of two for each group beside
// the scale. wide: two int8 for each input likewise, x ~ scale * power * (128 high + low). bf16_pair: two rows of bf16, x ~ one + the next, for
// weights in bf16; their two products with a lane are added.
enum class RowsKind : int32_t {
  bf16 = 0, int8 = 1, group16 = 2, group32 = 3, group64 = 4, group128 = 5, wide16 = 6, wide32 = 7, wide64 = 8, wide128 = 9, bf16_pair = 10
};

inline bool is_bf16(RowsKind kind) { return kind == RowsKind::bf16 || kind == RowsKind::bf16_pair; }
inline bool is_wide(RowsKind kind) { return kind >= RowsKind::wide16 && kind <= RowsKind::wide128; }
inline int64_t rows_of_one(RowsKind kind) { return kind == RowsKind::bf16_pair ? 2 : 1; }  // rows in memory for each of x
inline int64_t group_of(RowsKind kind) {  // 0: the whole row
  if (kind < RowsKind::group16 || is_bf16(kind)) return 0;
  return int64_t{16} << (static_cast<int>(kind) - static_cast<int>(is_wide(kind) ? RowsKind::wide16 : RowsKind::group16));
}
inline RowsKind rows_kind(const LinearShape& shape) {
  if (!is_grouped(shape.format)) return has_bf16_rows(shape.format) ? RowsKind::bf16 : RowsKind::int8;
  RowsKind kind = shape.wide ? RowsKind::wide16 : RowsKind::group16;
  while (group_of(kind) < shape.group) kind = static_cast<RowsKind>(static_cast<int>(kind) + 1);
  return kind;
}
inline RowsKind rows_kind(Format format, int64_t group = 64) { return rows_kind(LinearShape{format, 0, 0, group, false, false, {}, false}); }

struct Rows {
  RowsKind kind = RowsKind::bf16;
  int64_t m = 0, k = 0;         // of x
  int64_t k_padded = 0;         // k rounded up to 128; [k, k_padded) is zero
  int64_t stride_bytes = 0;     // from row to row
  uint8_t* data = nullptr;      // [m (pairs: 2 m), stride_bytes]: bf16 or s8; wide: the high halves [k_padded], then the low ones
  const int32_t* order = nullptr;  // [k]: input i is x[order[i]]; null: as they come
  int64_t groups = 1;           // with a power of their own, k_padded / group; 1: the whole row
  float* scales = nullptr;      // [m]             x ~ scale * q, |q| at most 127, scale = max|x| / 127; wide: 127 * 128
  float* powers = nullptr;      // [m, groups]     of groups: x ~ scale * power * q; null without
  int32_t* sums = nullptr;      // [m, groups]     sum of q
};

int64_t rows_bytes(RowsKind kind, int64_t m, int64_t k);  // a multiple of 64

// memory: rows_bytes(...) bytes, 64-byte aligned; zeros where an epilogue will write the rows (in bf16: it leaves [k, k_padded) alone).
Rows view_rows(RowsKind kind, int64_t m, int64_t k, void* memory);

// Row `row` from x [k] fp32 (a fused norm calls this with its result while that is still in L1). bf16 rounds to nearest even.
void prepare_row(const KernelSet& set, const Rows& rows, int64_t row, const float* x);

// Rows [begin, end) from x [m, x_stride], fp32 or bf16.
void prepare_rows(const KernelSet& set, const Rows& rows, const float* x, int64_t x_stride, int64_t begin, int64_t end);
void prepare_rows(const KernelSet& set, const Rows& rows, const uint16_t* x, int64_t x_stride, int64_t begin, int64_t end);

// ---- the product -------------------------------------------------------------------------------------------------

enum class Store : int32_t {
  f32 = 0,      // out[row] = y
  bf16 = 1,     // out[row] = bf16(y); out may be the data of Rows in bf16 (out_stride = stride_bytes / 2)
  add_f32 = 2,  // out[row] += weight * y, fp32: residual stream, or the gated sum of experts
  gate_f32 = 3, // out[row] = act(y) * out[row], fp32: gate and up packed apart, y the gate and up where it lies
};

enum class Activation : int32_t { silu = 0, gelu_tanh = 1, sigmoid = 2 };  // the last of gate_f32 only

// Sees (and may change) the outputs tile by tile, while they lie in cache, in any order.
class OutputReader {
 public:
  // Outputs [first, first + count) of rows [row, row + rows) of the call: [rows, stride] fp32.
  virtual void read(int64_t row, int64_t rows, int64_t first, int64_t count, float* outputs, int64_t stride) = 0;

 protected:
  ~OutputReader() = default;
};

// Biases that rows of a call have of their own (what an adapter adds), asked for tile by tile.
class RowBiases {
 public:
  // Of rows [row, row + rows) of the call, at most kMaxTileRows, at lanes [first, first + lanes) of the packed form: out [rows][64],
  // 64-byte aligned, with the weight's own bias; -0 where a row has none, which changes no sum. False: no row has any of its own.
  virtual bool write(int64_t row, int64_t rows, int64_t first, int64_t lanes, float* out) const = 0;
  // Those lanes are written soon: whatever is read for them may be brought into cache.
  virtual void fetch(int64_t first, int64_t lanes) const = 0;

 protected:
  ~RowBiases() = default;
};

struct Epilogue {
  Store store = Store::f32;
  Activation activation = Activation::silu;  // read for gated weights and gate_f32 only
  void* out = nullptr;                 // null (f32, with a reader): outputs are kept nowhere else
  int64_t out_stride = 0;              // elements from row to row
  const int32_t* out_rows = nullptr;   // row i goes to out row out_rows[i]; null: row i. No row twice in one call.
  const float* row_weights = nullptr;  // add_f32: weight of row i; null: 1
  const RowBiases* biases = nullptr;   // of rows of the call, or none
  OutputReader* reader = nullptr;      // f32 and add_f32, without out_rows: the calling thread's own, or none
};

// y[i] = x[x_rows ? x_rows[i] : i] W^T (+ bias), i in [0, m), stored by the epilogue. Any m >= 0. One expert of a MoE is
// a call with x_rows = the tokens routed to it. Each output element is written by exactly one thread.
void linear(const KernelSet& set, const PackedLinear& w, const Rows& x, const int32_t* x_rows, int64_t m,
            const Epilogue& epilogue, int thread, int threads);

// The weights that thread reads first in a call on few rows: something to bring into its cache while it waits for the others.
struct ReadAhead {
  const uint8_t* next = nullptr;
  const uint8_t* end = nullptr;
  bool line() {  // false: nothing left
    if (next == end) return false;
    __builtin_prefetch(next, 0, 2);
    next += 64;
    return true;
  }
};
ReadAhead first_weights(const PackedLinear& w, int thread, int threads);

// ---- memory ------------------------------------------------------------------------------------------------------

// Anonymous pages, zeroed, 2 MiB aligned and huge where the system allows; for weights, KV and activations.
class PageBuffer {
 public:
  PageBuffer() = default;
  explicit PageBuffer(int64_t bytes);  // throws std::bad_alloc
  ~PageBuffer();
  PageBuffer(PageBuffer&& other) noexcept;
  PageBuffer& operator=(PageBuffer&& other) noexcept;
  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Has the system back bytes [begin, end) with memory now, contents untouched, instead of page by page at the first writes. May run
  // beside any use of the buffer; begin is a multiple of 2 MiB. Nothing happens where the system cannot (Linux before 5.14).
  void back(int64_t begin, int64_t end) const;
  // Pages not yet backed come from these NUMA nodes in turn. False where the system cannot, and nothing changes then.
  bool interleave(const std::vector<int>& nodes) const;
  // Bytes [begin, end) belong to nobody: under AddressSanitizer whoever touches them is told. What lies behind bytes() is so anyway.
  void forbid(int64_t begin, int64_t end) const;

 private:
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
  void* mapping_ = nullptr;
  int64_t mapped_bytes_ = 0;
};

}  // namespace diptych
