// Weights in groups on matrix tiles. Included by gemm_amx.inl.
//
// A product sums a group of 16 rows and 16 lanes over all its inputs; what ends a group (a conversion, the row's power, the lane's scale, of all
// 256 sums) is the vector units'. Both work at the same time: products run some groups ahead, and their whole sums come through a ring in L1.
// Rows of x stay in tiles for four strips, sums over the groups of a strip in registers for as many groups as x has tiles.
#include <immintrin.h>

constexpr int kGroupStrips = static_cast<int>(kPanelStrips);
constexpr int kHeldX = 4;       // tiles of x
constexpr int kRing = 4;        // groups' whole sums
constexpr int kProductsAhead = 2;
constexpr int64_t kGroupRows = 256;  // of a block: with 4,096 inputs they stay in 2 MiB of L2 from panel to panel, beside a panel's sums

// kTiles: of one group, side by side along its inputs. Wide rows have as many of their low halves.
template <int kTiles, bool kWide>
struct GroupRegisters {
  static constexpr int kHalves = kWide ? 2 : 1, kGroups = kHeldX / (kTiles * kHalves);  // whose x is held
  static constexpr int x(int group, int half, int tile) { return (group * kHalves + half) * kTiles + tile; }
  static constexpr int w(int group, int tile) { return kHeldX + (kTiles == 1 ? group % 2 : tile); }
  static constexpr int sum(int group, int half) { return kHeldX + 2 + (kWide ? half : group % 2); }
};

void begin_groups(const LinearShape& shape) {
  const int64_t inputs = std::min<int64_t>(shape.group, kTileRowBytes);
  TileConfig config;
  for (int tile = 0; tile < kTileRegisters; ++tile) config.row_bytes[tile] = kTileRowBytes, config.rows[tile] = kTileRows;
  for (int tile = 0; tile < kHeldX; ++tile) config.row_bytes[tile] = static_cast<uint16_t>(inputs);
  for (int tile = kHeldX; tile < kHeldX + 2; ++tile) config.rows[tile] = static_cast<uint8_t>(inputs / 4);
  tile_configure(config);
}

// Groups of a block in the order in which they are met: of those whose x is held, strip by strip.
struct GroupOrder {
  explicit GroupOrder(int64_t groups, int held) : groups_(groups), held_(held), count_(std::min<int64_t>(held, groups)) {}
  bool has_group() const { return first_ < groups_; }
  int64_t group() const { return first_ + within_; }
  void advance() {
    ++item_;
    if (++within_ < count_) return;
    within_ = 0;
    if (++strip_ < kGroupStrips) return;
    strip_ = 0, first_ += held_, count_ = std::min<int64_t>(held_, groups_ - first_);
  }

  const int64_t groups_, held_;
  int64_t count_, first_ = 0, within_ = 0, strip_ = 0, item_ = 0;
};

template <int kTiles, bool kWide>
class GroupProducts {
  using R = GroupRegisters<kTiles, kWide>;

 public:
  explicit GroupProducts(const GroupArgs& args) : args_(args), order_(args.groups, R::kGroups), stride_(args.x[1] - args.x[0]) {}

  // Of one group more, if there is one.
  inline void advance() {
    if (!order_.has_group()) return;
    uint8_t* out = slot(order_.item_);
    each<R::kGroups>([&](auto group) {
      if (order_.within_ == group) multiply<decltype(group)::value>(out);
    });
    order_.advance();
  }
  // Of the item: whole sums [16][16], of wide rows those of the low halves behind them.
  uint8_t* slot(int64_t item) { return ring_[item % kRing]; }

 private:
  template <int kGroup>
  inline void multiply(uint8_t* out) {
    const int64_t inputs = args_.shape->group, group = order_.group();
    if (order_.strip_ == 0) {
      const uint8_t* x = args_.x[0] + (args_.first + group) * inputs;
      each<R::kHalves>([&](auto half) {
        each<kTiles>([&](auto tile) { tile_load<R::x(kGroup, half, tile)>(x + half * args_.low + tile * kTileRowBytes, stride_); });
      });
    }
    const uint8_t* w = args_.steps + order_.strip_ * kExpandedBytes + group * (inputs / 4 * kStepBytes);
    each<kTiles>([&](auto tile) { tile_load<R::w(kGroup, tile)>(w + tile * kTileBytes, kTileRowBytes); });
    each<R::kHalves>([&](auto half) {
      constexpr int kHalf = decltype(half)::value, kSum = R::sum(kGroup, kHalf);
      tile_zero<kSum>();
      each<kTiles>([&](auto tile) {
        constexpr int kTile = decltype(tile)::value;
        dot_signed<kSum, R::x(kGroup, kHalf, kTile), R::w(kGroup, kTile)>();
      });
      tile_store<kSum>(out + half * kTileBytes, kTileRowBytes);
    });
  }

  const GroupArgs& args_;
  GroupOrder order_;
  const int64_t stride_;
  alignas(64) uint8_t ring_[kRing][R::kHalves * kTileBytes];
};

// The whole sums of a group of 16 rows join those of the groups before.
template <bool kWide, bool kMinima>
inline void add_sums(const uint8_t* whole, const RowOfGroup* of, __m512 scale, __m512 minimum, __m512 (&sums)[kTileRows]) {
#pragma GCC unroll 16
  for (int row = 0; row < kTileRows; ++row) {
    __m512i sum = _mm512_load_si512(whole + row * kTileRowBytes);
    if constexpr (kWide) sum = _mm512_add_epi32(_mm512_slli_epi32(sum, kLowBits), _mm512_load_si512(whole + kTileBytes + row * kTileRowBytes));
    sums[row] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(of[row].power)), scale, sums[row]);
    if constexpr (kMinima) sums[row] = _mm512_fmadd_ps(_mm512_set1_ps(of[row].sum), minimum, sums[row]);
  }
}

template <int kTiles, bool kWide, bool kMinima>
void run_groups(const GroupArgs& args) {
  GroupProducts<kTiles, kWide> products(args);
  for (int i = 0; i < kProductsAhead; ++i) products.advance();
  constexpr int64_t kHeld = GroupRegisters<kTiles, kWide>::kGroups;
  int64_t item = 0;
  for (int64_t first = 0; first < args.groups; first += kHeld) {
    const int64_t end = std::min(first + kHeld, args.groups);
    for (int strip = 0; strip < kGroupStrips; ++strip) {
      float* const acc = args.acc + strip * kStripLanes;
      const bool is_new = first == 0 && !args.resume;
      __m512 sums[kTileRows];
#pragma GCC unroll 16
      for (int row = 0; row < kTileRows; ++row) sums[row] = is_new ? _mm512_setzero_ps() : _mm512_load_ps(acc + row * kPanelLanes);
      for (int64_t group = first; group < end; ++group) {
        products.advance();
        const int64_t at = strip * kExpandedScales + group * kStripLanes;
        const __m512 minimum = kMinima ? _mm512_load_ps(args.minima + at) : _mm512_setzero_ps();
        add_sums<kWide, kMinima>(products.slot(item++), args.rows + group * kTileRows, _mm512_load_ps(args.scales + at), minimum, sums);
      }
#pragma GCC unroll 16
      for (int row = 0; row < kTileRows; ++row) _mm512_store_ps(acc + row * kPanelLanes, sums[row]);
    }
  }
}

template <bool kWide>
void run_group_tile(const GroupArgs& args) {
  const bool has_minima = args.minima != nullptr, is_long = args.shape->group > kTileRowBytes;
  is_long ? has_minima ? run_groups<2, kWide, true>(args) : run_groups<2, kWide, false>(args)
          : has_minima ? run_groups<1, kWide, true>(args) : run_groups<1, kWide, false>(args);
}

// Tiles are read at one distance, in lines: rows of a block lie so in a copy, wide ones as their high halves and then their low ones.
template <bool kWide>
void copy_halves(const uint8_t* x, int64_t low, int64_t inputs, uint8_t* out) {
  std::memcpy(out, x, static_cast<size_t>(inputs));
  if (kWide) std::memcpy(out + inputs, x + low, static_cast<size_t>(inputs));
}

RowForm row_form_of_groups(const LinearShape& shape, bool is_direct) {
  if (is_direct) return {};
  return shape.wide ? RowForm{copy_halves<true>, 2, kLine} : RowForm{copy_halves<false>, 1, kLine};
}
