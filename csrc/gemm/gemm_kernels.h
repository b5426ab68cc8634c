// Inside of the linear layers: what a kernel set provides (Tiles for each format, LinearKernels) and the layout all of them share.
//
// A panel of 64 lanes is 4 strips of 16, one after the other. A strip holds K in ascending steps of 64 bytes, one 32-bit
// word per lane and step, so that a tile of any width (64, 32 or 16 lanes) reads contiguous memory:
//   bf16  word = inputs k, k+1                               step = 2 inputs
//   int8  word = 4 inputs, u8 = q + 128, q in [-127, 127]    step = 4 inputs
//   int4  word = 8 inputs q in [0, 15]: byte j holds input k+j in its low and k+4+j in its high nibble; step = 8 inputs.
//         int4 is int8 written shorter: the u8 of int8 is unit * q + zero, whole numbers, one unit and zero per lane and group.
//         Groups come in pairs: a line of heads (16 lanes of {u8 unit, u8 zero} for each of the two), then their steps.
//   fp8   bf16 written shorter: what it is expanded to is bf16(scale of the strip and 128 inputs * code). A strip begins with those scales,
//         fp32, up to whole lines; then steps of 4 inputs, of each 4 lanes inputs k, k+1 of all, then k+2, k+3, so that interleaved bytes
//         are two steps of bf16. Codes are zero where their scale is. The epilogue has a scale of each lane besides.
//   group4, group8  words as int4's and int8's (of codes). Four groups follow their heads: a line or more of scales [4][16] in the file's
//         type, then zeros [4][16] u8 or minima [4][16], fp32 or in the scales' type; the last four may be fewer, their heads are not. A power
//         of two is a byte, the exponent of a float. Nested: as many groups as have 256 inputs, heads of a line of factors, f16 [2][16] or
//         f32 [16], scales [groups][16] s8 or E4M3, minima likewise.
//   group6  as group4, and of each two such words (16 inputs) a third: bits 2 i and 2 i + 1 of its bytes are the codes' fifth and sixth,
//         of nibble i of the four.
//   group2  word = 16 inputs: bits 2 i and 2 i + 1 of byte j are input k + 4 i + j.
//   group3, group5  as group2 and group4, with the highest bits at the end of the heads, [groups][inputs / 4] words of 64 bits: bit
//         4 lane + j is input 4 i + j.
// Gated weights interleave 16 gate lanes with the 16 up lanes of the same features.
#pragma once

#include <cstring>
#include <iterator>

#include "gemm/gemm.h"
#include "sets/e4m3.h"

namespace diptych {

constexpr int64_t kStripLanes = 16;
constexpr int64_t kPanelStrips = kPanelLanes / kStripLanes;
constexpr int64_t kStepBytes = kStripLanes * 4;       // of one strip
constexpr int64_t kHeadBytes = kStripLanes * 2;       // unit and zero of one int4 group of a strip
constexpr int64_t kMaxGroup = 128;                    // the largest group of any format
constexpr int64_t kPastBytes = 6 << 10;               // how far ahead streams ask past L2, where they do
constexpr int kMaxTileRows = 24;                      // the highest register tile of any set

// One register tile: rows x (16 * strips) lanes over one block of K. acc [rows][64] (row stride 64, whatever the strips) is fp32
// (bf16) or int32 (int8, int4), 64-byte aligned; with resume it holds the partial sums of the earlier blocks of K, otherwise
// it is only written. Tiles of fp8, and of int4 that is not spread, take the whole K.
struct TileArgs {
  const uint8_t* strip;                   // first step of the block in the tile's first strip
  int64_t strip_bytes;                    // from strip to strip
  const uint8_t* x[kMaxTileRows];         // rows of x at the block's first input; unused when the shape is interleaved
  const uint8_t* words;                   // interleaved shapes: [words of the block][rows] of x
  // int4 shapes that ask for them: [rows][sums_stride] sums of x, from the block's first group on, 128 * 127 at most. In pairs, as the
  // groups' heads are: the last has 0 for a group that is not there.
  const int16_t* group_sums;
  int64_t sums_stride;
  int64_t units;                          // steps (bf16, int8) or groups (int4; fp8: of kFp8Inputs) in the block
  int64_t group;                          // int4
  void* acc;
  bool resume;
  // Reading ahead, as a set finds best. A tile that takes W from memory in one pass (a stream) runs some KiB before itself in each
  // strip and turns to next_strip where its own ends; tiles that share W in cache bring in [next, next + next_bytes) between them.
  bool is_stream;
  bool is_past;  // of a stream: each line past L2, kPastBytes ahead
  const uint8_t* next_strip;  // first strip of the following tile
  const uint8_t* next;
  int64_t next_bytes;
};
using TileKernel = void (*)(const TileArgs& args);

// group_sums of two groups from an even one on, as 16 bits each.
DIPTYCH_FORCED int32_t sums_of_pair(const TileArgs& args, int64_t row, int64_t group) {
  int32_t both;
  std::memcpy(&both, args.group_sums + row * args.sums_stride + group, sizeof(both));
  return both;
}

// How a tile reads x: row by row as it lies in Rows, as words interleaved row after row, or wider and interleaved
// likewise, two to a word: bf16 as fp32, four int8 as pairs of 16 bits.
enum class XForm { rows, words, widened };

// One tile shape a set offers for a format. rows * strips accumulators.
struct TileShape {
  int64_t rows, strips;
  XForm form;
  TileKernel run;
  bool spread = false;  // int4 comes as LinearKernels::spread_int4 lays it, pairs of groups after pairs
  bool interleaved() const { return form != XForm::rows; }
  bool has_sums(Format format) const { return format == Format::int4 && (spread || !interleaved()); }
};
constexpr int kMaxShapes = 24;

struct FinishArgs;

// One matrix tile shape (AMX): 16 * row_tiles rows x 16 * strips lanes over one block of K. x comes row by row as it lies in Rows, rows
// at one distance; sums as acc above.
struct MatrixArgs {
  const uint8_t* w;      // first step of the block in the shape's first strip; a step as in the packed strip (int4: as int8)
  int64_t strip_bytes;   // from strip to strip
  int64_t steps;         // in the block: a multiple of 8
  const uint8_t* x;      // first row at the block's first input; zero from the last step to the next multiple of 64 bytes
  int64_t x_stride;      // bytes
  int64_t rows;          // as given to `begin`, at most the shape's
  void* sums;
  bool resume;
  // Of each strip next_bytes are brought into L2 while the tile runs, maybe none: first_bytes of them from next_w + i next_strip_bytes on, the
  // rest from then_w + i next_strip_bytes on.
  const uint8_t *next_w, *then_w;
  int64_t next_strip_bytes, next_bytes, first_bytes;
  const FinishArgs* finish;  // of the tile before, done between the steps of the products, which leave the vector units idle; or null
};
struct MatrixShape {
  int64_t rows, strips;
  void (*begin)(int64_t rows);  // configures the calling thread's tiles, for fewer rows than the shape's too
  void (*run)(const MatrixArgs& args);
  void (*end)();                // gives the tiles back: threads that hold none are switched faster
};

// How the work is cut for matrix tiles, which are fed by the caches alone: a core multiplies two tiles in the time that it takes to
// bring one from L2.
struct MatrixBlocking {
  int64_t rows;         // of one block of x: W comes from memory once for each block; half of them where K takes several blocks
  int64_t w_bytes;      // of a shape's strips that rows pass over at one time; all of K where that is less
  int64_t x_bytes;      // of a block of x that stay in L2 from panel to panel; where there are more, several panels share each block of K
  int64_t sums_bytes;   // the sums of those panels, in L2
  int64_t passing_bytes;  // in place of w_bytes where one tile of rows meets what was expanded
  int64_t stream_ahead; // bytes that W is brought into L2 before it is used, where it passes once for one tile of rows
};

struct MatrixTiles {
  int64_t least_rows;     // fewer take the register tiles
  MatrixShape narrow[4];  // ascending rows, the most strips first: W passes once, each strip as a stream
  MatrixShape wide;       // whole pairs of strips; a call has at least its rows
  MatrixBlocking blocking;
  bool is_narrow(int64_t m) const { return m <= std::end(narrow)[-1].rows; }
};

// ---- groups ----

constexpr int kDirectRows = 8;       // the most rows of a tile that meets the codes as they are packed
constexpr int64_t kBlockInputs = 512;  // of the strips that are expanded at one time; whole heads of every group size
constexpr int64_t kMostExpanded = kBlockInputs / 16;  // groups of those
constexpr int64_t kExpandedBytes = kBlockInputs / 4 * kStepBytes;        // from strip to strip
constexpr int64_t kExpandedScales = kMostExpanded * kStripLanes;         // likewise of their scales, and of their minima

// Levels of a code where they are in a table.
constexpr int8_t kTables[8][16] = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},  // kvalues_iq4nl of llama.cpp
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},                    // twice E2M1 of the OCP microscaling formats
    {8, 25, 43, 0, -8, -25, -43, 0},                                              // magnitudes of ggml's lattices, the sign in the highest bit
    {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62},
    {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15},
    {-7, 1, 9, 0, -9, -1, 7, 0},                                                  // eight times -1, 0, 1 and an eighth more or less
    {-112, -78, -59, -44, -32, -21, -10, 0, 9, 18, 28, 38, 49, 63, 81, 112},      // 112 times NF4's fractions of bitsandbytes
    {0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30},        // 120 times FP4's, whose least is a 192nd
};
DIPTYCH_FORCED bool is_table(const LinearShape& shape) { return shape.grid.levels > Levels::plain; }
DIPTYCH_FORCED const int8_t* table_of(const LinearShape& shape) { return kTables[is_table(shape) ? static_cast<int>(shape.grid.levels) - 2 : 0]; }

// A tile over whole groups: acc [rows][64] fp32, 64-byte aligned. For each group in ascending order, of each row and lane:
//   sum = whole sum of level * q;   acc = fma(float(sum) * power, scale, acc);   acc = fma(power * float(sum of q), minimum, acc)
// the last with minima only. Every tile of every set computes exactly that; the row's scale is left to the epilogue. q of wide rows is
// 128 high + low, of 15 bits: their sums fit 32 bits, those of other rows 22 and a sign.
constexpr int kLowBits = 7;
constexpr float kMostWide = 127 * 128;   // the highest q of wide rows; low halves reach from -64 to 63

// A power of two from its exponent's field in a float, as heads have it; 0 of zero.
DIPTYCH_FORCED float power_of_field(uint8_t field) {
  const int32_t bits = field << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A nested scale or minimum without its factor.
DIPTYCH_FORCED float nested_value(const LinearShape& shape, uint8_t stored) {
  if (!shape.grid.e4m3) return static_cast<float>(static_cast<int8_t>(stored));
  const int32_t exponent = stored >> 3 & 15, mantissa = stored & 7;
  const int32_t bits = exponent == 0 ? 0 : (exponent + 120) << 23 | mantissa << 20;
  float value;
  std::memcpy(&value, &bits, 4);
  return exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f : value;
}

// A power moves exponents and rounds nothing, so a tile may multiply it into the sum or into the weights' scale. Both stay normal numbers:
// packed scales below kLeastScale are zero, as the values of rows are, and no group lies further below its row than kMostHalvings.
constexpr int kMostHalvings = 24;
constexpr float kLeastScale = 0x1p-100f;
// Of the scale that E8M0 stands for (gemm.h) the field; zero below kLeastScale.
DIPTYCH_FORCED uint8_t field_of_e8m0(uint8_t stored) { return stored < 128 - 100 ? 0 : static_cast<uint8_t>(stored - 1); }

// The largest magnitudes of a row and of one of its groups -> 2^-n, the least with which the row's grid reaches over the group.
DIPTYCH_FORCED float power_of_group(float row, float group) {
  int32_t of_row, of_group;
  std::memcpy(&of_row, &row, 4), std::memcpy(&of_group, &group, 4);
  const int32_t halvings = (of_row - of_group) >> 23, held = halvings < 0 ? 0 : halvings > kMostHalvings ? kMostHalvings : halvings;
  const int32_t bits = (127 - held) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return power;
}

// What a tile wants of a row and group, made once for all strips that the row meets.
struct RowOfGroup {
  int32_t start;   // of a whole sum: what the levels' offset adds too much, and what else the set's tile begins with
  float power;
  float offset;    // what the tile's float of a whole sum has too much
  float sum;       // power times the sum of q: of a minimum; over zeros the bits of the sum
};
// shape: of the weights. is_direct: for a direct tile, which meets codes as they are.
using ReadyRows = void (*)(const LinearShape& shape, bool is_direct, const float* const* x_powers, const int32_t* const* x_sums, int64_t rows,
                           int64_t groups, RowOfGroup* out);

// How a direct tile asks for the lines that it will take: into L2 and then again into L1; once, into L2; once, past L2, 6 KiB ahead or as it is
// taken; or of strips side by side once, a little ahead.
enum class Asking { twice, once, past, here, beside };

struct GroupArgs {
  const LinearShape* shape;
  const uint8_t* const* x;         // of each row at its first input
  int64_t low;                     // wide: from a row's high halves to its low ones, bytes
  int64_t groups;
  float* acc;
  const RowOfGroup* rows;          // [groups][rows of the tile]
  // direct tiles: packed strips, whole, side by side, as many as the set takes at most; acc of each kStripLanes after that before it
  const uint8_t* strip;
  int64_t strips, strip_bytes;
  const uint8_t* next_strip;       // that likely follow
  Asking asking;
  // others: groups [first, first + groups) of expanded strips [kExpandedBytes], u8 = level + 128 in steps of int8 (or as the set's `expand`
  // makes them: s8 = level), and their scales [kExpandedScales], [groups][16], and minima likewise or null
  int64_t first;
  bool resume;                     // acc holds the sums of earlier groups
  const uint8_t* const* next_x;    // of the tile that follows: its rows can be brought into L1
  const uint8_t* steps;
  const float* scales;
  const float* minima;
  const int32_t* zeros;            // in place of minima, of a set whose levels have them not yet; or null
};
using GroupKernel = void (*)(const GroupArgs& args);

// Groups [first, first + count) of a strip as GroupArgs reads them; minima is not written where there are none.
using ExpandGroups = void (*)(const LinearShape& shape, const uint8_t* strip, int64_t first, int64_t count, uint8_t* steps, float* scales,
                              float* minima);
// A row of activations as Rows describes it: powers, sums [count rounded up to kMaxGroup / group]. out: q, or of wide rows the high
// halves, with the low ones in `low`.
using QuantizeGroups = void (*)(const void* x, Source source, int64_t count, int64_t group, int8_t* out, int8_t* low, float* scale,
                                float* powers, int32_t* sums);

// Over expanded strips: computes all its rows.
struct ExpandedTile {
  int64_t rows, strips;
  GroupKernel run;
  void (*begin)(const LinearShape& shape) = nullptr;  // where the calling thread holds what `run` computes with until `end`
  void (*end)() = nullptr;
};

// How a tile makes operands of codes.
enum class CodeForm { twos, threes, threes_table, fours, fours_table, fives, sixes, bytes };
constexpr int kCodeForms = 8;
DIPTYCH_FORCED CodeForm form_of(const LinearShape& shape) {
  switch (shape.format) {
    case Format::group2: return CodeForm::twos;
    case Format::group3: return is_table(shape) ? CodeForm::threes_table : CodeForm::threes;
    case Format::group5: return CodeForm::fives;
    case Format::group6: return CodeForm::sixes;
    case Format::group8: return CodeForm::bytes;
    default: return is_table(shape) ? CodeForm::fours_table : CodeForm::fours;
  }
}

// One strip, by form and rows - 1; null: none.
struct DirectTiles {
  GroupKernel of[kCodeForms][kDirectRows];
};

// How a set's tiles read rows of x, where not as they lie: made of int8 [inputs] (wide: and the low halves behind `low` bytes).
struct RowForm {
  void (*make)(const uint8_t* x, int64_t low, int64_t inputs, uint8_t* out);  // null: as they lie
  int64_t bytes;  // of an input
  int64_t gap;    // bytes between two rows, which then lie at one distance
};

struct GroupTiles {
  DirectTiles direct[2];  // of wide rows the second
  ExpandedTile expanded, expanded_wide;  // without: all rows meet the codes as they are packed
  ReadyRows ready;
  ExpandGroups expand;
  QuantizeGroups quantize;
  ExpandedTile expanded_long = {};  // for groups of kMaxGroup, where another tile is best for them
  RowForm (*row_form)(const LinearShape& shape, bool is_direct) = nullptr;  // null: rows as they lie
  int64_t most_direct[2] = {64, 40};  // rows, and wide ones, that meet packed codes, before expanding them is cheaper
  int64_t direct_strips = 1;          // that a direct tile takes at one time
  int64_t beside_rows = 0;            // up to so many take a panel's strips side by side, where that is the processor's way of asking
  int64_t block_rows = 264;           // that pass over expanded groups: their fp32 sums of a panel and some groups of x lie in L2
};

// What matrix tiles put in the place of another set's; they want signed levels.
struct MatrixGroups {
  ExpandedTile expanded, expanded_wide;
  RowForm (*row_form)(const LinearShape& shape, bool is_direct);
  int64_t most_direct[2], block_rows;
};

// rows [count] of n_words words each -> out [n_words][tile_rows], zero where row >= count.
using InterleaveRows = void (*)(const uint8_t* const* rows, int64_t count, int64_t n_words, int64_t tile_rows, uint8_t* out);

// The last act of a tile: scales, bias, activation, store. acc may be the output: a row is read before it is written.
struct FinishArgs {
  const PackedLinear* w;
  const float* bias;                      // of these lanes, 64-byte aligned, or null
  int64_t bias_stride;                    // from row to row: 0 where all have the weight's
  int64_t first_lane;
  int64_t lanes;                          // 16 (not gated), 32 or 64
  int64_t rows;
  int64_t outputs;                        // of these lanes: as many (gated: half), fewer at the end
  const void* acc;                        // as TileArgs, at the first lane
  const float* row_scales;                // of x; unused with bf16
  const int32_t* row_sums;                // of x; int8 and int4
  const int32_t* x_rows;                  // row i has the scale and the sum at x_rows[i]; null: at i
  uint8_t* out;                           // these outputs of row 0, fp32 or bf16
  int64_t out_stride;                     // bytes
  const int32_t* out_rows;                // row i's are out_rows[i] strides behind `out`; null: i
  const float* row_weights;               // add_f32; null: 1
  Store store;
  Activation activation;
};
using FinishKernel = void (*)(const FinishArgs& args);

// Packing works on the 16 lanes of one strip. words [16][n_words], lane stride `stride` words -> out [n_words][16].
using TransposeWords = void (*)(const uint32_t* words, int64_t stride, int64_t n_words, uint8_t* out);
using LoadInputs = void (*)(const void* row, Source source, int64_t begin, int64_t count, float* out);
using RoundInputs = void (*)(const float* x, int64_t count, uint16_t* out);  // to bf16, nearest even
using AbsMax = float (*)(const float* x, int64_t count);
using QuantizeInt8 = void (*)(const float* x, int64_t count, float inverse_scale, int8_t* out);
// A row of activations, fp32 or bf16, as Rows describes it: out [count rounded up to kMaxGroup], zero behind count.
using QuantizeRow = void (*)(const void* x, Source source, int64_t count, int8_t* out, float* scale, int32_t* sum);
// Feedback of the inputs of one group, or none (n is 0).
struct GroupFeedback {
  int64_t n;
  const float *take, *give;  // [group][n]
  float* left;               // [n][16], 64-byte aligned: what former groups of the strip left, and then this one, too
};
// One int4 group of a strip: x [group][16] -> head (16 {unit, zero}) and words [group / 8][16]. inverse [16]: of the lanes' int8
// scales; x is multiplied by it in place, and takes of what is left. x, inverse and words are 64-byte aligned.
using QuantizeGroup = void (*)(float* x, const float* inverse, int64_t group, uint8_t* head, uint32_t* words, const GroupFeedback& feedback);
// Groups [first, first + count) of a strip of int4 -> the steps [count * group / 4] of the same weights as int8.
using ExpandInt4 = void (*)(const uint8_t* strip, int64_t group, int64_t first, int64_t count, uint8_t* out);
// Likewise of fp8: groups of kFp8Inputs, `groups` in the whole strip -> the steps of bf16.
using ExpandFp8 = void (*)(const uint8_t* strip, int64_t groups, int64_t first, int64_t count, uint8_t* out);
// Groups of int4 from an even `first` on, as a set's tiles take them that pass over them often: bytes_of_spread(group) for each pair, 64-byte aligned.
using SpreadInt4 = void (*)(const uint8_t* strip, int64_t group, int64_t first, int64_t count, uint8_t* out);
constexpr int64_t bytes_of_spread(int64_t group) { return 3 * kStepBytes + 2 * group * kStripLanes; }
// sums [groups] of x [groups * group]; group is 32, 64 or 128.
using SumGroups = void (*)(const int8_t* x, int64_t group, int64_t groups, int16_t* sums);

// One weight format's. Every shape gives the same bits. Where int4 and fp8 have no wide shape, more rows than their narrow ones take meet them
// expanded to int8 and bf16.
struct Tiles {
  TileShape narrow[kMaxShapes];  // ascending rows, ended by rows == 0, of as many rows the first taken: W passes once, as one stream or one of each strip
  TileShape wide;                // for many rows: the best reuse of W from cache
};

// What the linear layers need beside their tiles.
struct LinearKernels {
  InterleaveRows interleave_rows;  // null where no tile reads interleaved rows
  InterleaveRows widen_rows;       // as interleave_rows, each bf16 as fp32: out [2 n_words][tile_rows]; null: no widened shape
  InterleaveRows widen_bytes;      // likewise of int8, the even and then the odd ones of four as pairs of 16 bits
  FinishKernel finish;
  TransposeWords transpose_words;
  LoadInputs load_inputs;
  RoundInputs round_inputs;
  AbsMax abs_max;
  QuantizeInt8 quantize_int8;
  QuantizeRow quantize_row;
  SumGroups sum_groups;
  QuantizeGroup quantize_group;
  ExpandInt4 expand_int4;
  ExpandFp8 expand_fp8;
  SpreadInt4 spread_int4 = nullptr;  // null: no spread shape
};

DIPTYCH_FORCED bool has_whole_sums(Format format) { return format == Format::int8 || format == Format::int4; }
// Whether the epilogue scales sums by lane.
DIPTYCH_FORCED bool has_lane_scales(Format format) { return has_whole_sums(format) || format == Format::fp8; }
// What many rows meet in its place, expanded.
DIPTYCH_FORCED Format expanded_form(Format format) { return format == Format::int4 ? Format::int8 : format == Format::fp8 ? Format::bf16 : format; }

DIPTYCH_FORCED int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Row of W (checkpoint order) <-> lane of the packed form.
DIPTYCH_FORCED int64_t packed_lanes(const LinearShape& shape) {
  const int64_t lanes = shape.gated ? round_up(shape.n / 2, 16) * 2 : shape.n;
  return round_up(lanes, kPanelLanes);
}
DIPTYCH_FORCED int64_t row_of_lane(const LinearShape& shape, int64_t lane) {  // -1: padding
  if (!shape.gated) return lane < shape.n ? lane : -1;
  const int64_t feature = lane / 32 * 16 + lane % 16, features = shape.n / 2;
  if (feature >= features) return -1;
  return lane % 32 < 16 ? feature : features + feature;
}
DIPTYCH_FORCED int64_t lane_of_row(const LinearShape& shape, int64_t row) {
  if (!shape.gated) return row;
  const int64_t features = shape.n / 2, feature = row % features;
  return feature / 16 * 32 + feature % 16 + (row < features ? 0 : 16);
}

DIPTYCH_FORCED int64_t bits_of(Format format) {
  switch (format) {
    case Format::bf16: return 16;
    case Format::int8: case Format::fp8: case Format::group8: return 8;
    case Format::group6: return 6;
    case Format::group5: return 5;
    case Format::group3: return 3;
    case Format::group2: return 2;
    default: return 4;
  }
}
// What a code has more than its level.
DIPTYCH_FORCED int32_t middle_of(const LinearShape& shape) { return shape.grid.levels == Levels::centred ? 1 << (bits_of(shape.format) - 1) : 0; }
DIPTYCH_FORCED bool has_tops(Format format) { return format == Format::group3 || format == Format::group5; }  // bits that lie in the heads
DIPTYCH_FORCED int64_t bits_in_steps(Format format) { return bits_of(format) - has_tops(format); }
DIPTYCH_FORCED int64_t inputs_per_step(Format format) { return 32 / bits_in_steps(format); }  // but of group6, whose three steps hold 16
// Of a strip's steps that hold so many inputs.
DIPTYCH_FORCED int64_t bytes_of_steps(Format format, int64_t inputs) { return inputs * kStripLanes * bits_in_steps(format) / 8; }
DIPTYCH_FORCED int64_t padded_inputs(const LinearShape& shape) {
  if (shape.format == Format::fp8) return round_up(shape.k, kFp8Inputs);
  return round_up(shape.k, shape.format == Format::int4 || is_grouped(shape.format) ? shape.group : 32);
}
DIPTYCH_FORCED int64_t bytes_of_scale(const LinearShape& shape) { return shape.grid.nested || shape.grid.e8m0 ? 1 : shape.grid.scale == Source::f32 ? 4 : 2; }
DIPTYCH_FORCED int64_t bytes_of_offset(const LinearShape& shape) {
  return shape.grid.offset == Offset::none ? 0 : shape.grid.offset == Offset::zeros || shape.grid.nested ? 1 : shape.grid.halves ? 2 : 4;
}

// Where the parts of a group lie in its strip. A head begins with the factors of what is nested.
struct GroupPlace {
  int64_t factors, scales, offsets, tops, steps;
};
DIPTYCH_FORCED int64_t groups_of_head(const LinearShape& shape) { return shape.grid.nested ? kNestedInputs >> __builtin_ctzll(shape.group) : 4; }  // a power of two
DIPTYCH_FORCED int64_t bytes_of_factors(const LinearShape& shape) { return shape.grid.nested ? kStripLanes * 4 : 0; }
DIPTYCH_FORCED int64_t bytes_of_tops(const LinearShape& shape) { return has_tops(shape.format) ? shape.group / 4 * 8 : 0; }  // of a group
DIPTYCH_FORCED int64_t bytes_of_group_head(const LinearShape& shape) {
  return bytes_of_factors(shape) + groups_of_head(shape) * (kStripLanes * (bytes_of_scale(shape) + bytes_of_offset(shape)) + bytes_of_tops(shape));
}
DIPTYCH_FORCED int64_t bytes_of_group_steps(const LinearShape& shape) { return bytes_of_steps(shape.format, shape.group); }
// Of a head and its first group, then of a group within it.
DIPTYCH_FORCED GroupPlace place_of_head(const LinearShape& shape, int64_t begin) {
  const int64_t groups = groups_of_head(shape), scales = begin + bytes_of_factors(shape), offsets = scales + groups * kStripLanes * bytes_of_scale(shape);
  return {begin, scales, offsets, offsets + groups * kStripLanes * bytes_of_offset(shape), begin + bytes_of_group_head(shape)};
}
// By shifts: divisions would take a good part of what expanding a group takes.
DIPTYCH_FORCED GroupPlace place_of_group(const LinearShape& shape, int64_t group) {
  const int64_t groups = groups_of_head(shape), steps = bytes_of_group_steps(shape), within = group & (groups - 1);
  GroupPlace place = place_of_head(shape, (group >> __builtin_ctzll(groups)) * (bytes_of_group_head(shape) + groups * steps));
  place.scales += within * kStripLanes * bytes_of_scale(shape), place.offsets += within * kStripLanes * bytes_of_offset(shape);
  place.tops += within * bytes_of_tops(shape), place.steps += within * steps;
  return place;
}

// Of a strip of fp8.
DIPTYCH_FORCED int64_t bytes_of_fp8_scales(int64_t groups) { return round_up(groups * 4, kStepBytes); }
DIPTYCH_FORCED float fp8_scale(const uint8_t* strip, int64_t group) {
  float scale;
  std::memcpy(&scale, strip + group * 4, 4);
  return scale;
}

DIPTYCH_FORCED int64_t bytes_of_strip(const LinearShape& shape) {
  const int64_t k = padded_inputs(shape);
  const int64_t steps = bytes_of_steps(shape.format, k);
  if (is_grouped(shape.format)) return steps + (k / shape.group + groups_of_head(shape) - 1) / groups_of_head(shape) * bytes_of_group_head(shape);
  if (shape.format == Format::fp8) return steps + bytes_of_fp8_scales(k / kFp8Inputs);
  return shape.format == Format::int4 ? steps + (k / shape.group + 1) / 2 * 2 * kHeadBytes : steps;
}
// Where the head and the first step of one int4 group lie in its strip.
DIPTYCH_FORCED int64_t head_of_group(int64_t group_inputs, int64_t group) {
  return group / 2 * 2 * (group_inputs / 8 * kStepBytes + kHeadBytes) + group % 2 * kHeadBytes;
}
DIPTYCH_FORCED int64_t steps_of_group(int64_t group_inputs, int64_t group) {
  return group * (group_inputs / 8 * kStepBytes) + (group / 2 + 1) * 2 * kHeadBytes;
}
DIPTYCH_FORCED int64_t bytes_of_panel(const LinearShape& shape) { return kPanelStrips * bytes_of_strip(shape); }

}  // namespace diptych
