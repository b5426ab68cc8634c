// The epilogue of the linear layers on AVX-512, row by row: of the register tiles behind their sums, of the matrix tiles beside the products
// of the next. Included inside the anonymous namespace of their files.

inline __mmask16 head(int64_t count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

// act(gate): activations are x / (1 + 2^t), t = -log2(e) x (silu, of sigmoid 1 above) or -2 log2(e) u with tanh's argument u (gelu). The cubic of
// weight_exp2_lanes (simd.h) and the estimate of the division are together within 2e-4 relative: products are rounded to bf16
// (2e-3) or int8 next.
DIPTYCH_FORCED __m512 activate(Activation activation, __m512 x) {
  __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f));
  if (activation == Activation::gelu_tanh)
    t = _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(-2.3022082f)),
                      _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f)));
  const __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(0.07706713676452637f), _mm512_set1_ps(0.22764486074447632f));
  p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(0.6951168179512024f));
  p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(1.0f));
  const __m512 above = activation == Activation::sigmoid ? _mm512_set1_ps(1.0f) : x;
  return _mm512_mul_ps(above, _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), _mm512_scalef_ps(p, t))));
}

template <Store kStore>
DIPTYCH_FORCED void put(void* out, __mmask16 mask, Activation activation, float weight, __m512 y) {
  if constexpr (kStore == Store::bf16) {
    _mm256_mask_storeu_epi16(out, mask, round_bf16(y));
  } else {
    if constexpr (kStore == Store::add_f32) y = _mm512_fmadd_ps(_mm512_set1_ps(weight), y, _mm512_maskz_loadu_ps(mask, out));
    if constexpr (kStore == Store::gate_f32) y = _mm512_mul_ps(activate(activation, y), _mm512_maskz_loadu_ps(mask, out));
    _mm512_mask_storeu_ps(out, mask, y);
  }
}

// What the rows of some lanes have in common. kWhole: the sums are whole numbers (int8, int4). kLanes: vectors of lanes.
template <bool kWhole, bool kGated, int kLanes, Store kStore>
class FinishRows {
 public:
  explicit DIPTYCH_FORCED FinishRows(const FinishArgs& args)
      : own_biases_(args.bias_stride != 0 ? args.bias : nullptr), acc_(static_cast<const float*>(args.acc)), row_scales_(args.row_scales),
        row_weights_(args.row_weights), row_sums_(args.row_sums), x_rows_(args.x_rows), out_rows_(args.out_rows), out_(args.out),
        out_stride_(args.out_stride), activation_(args.activation), has_bias_(args.bias != nullptr),
        has_row_scale_(is_grouped(args.w->shape.format)), has_lane_scale_(args.w->scales != nullptr) {
    for (int v = 0; v < kLanes; ++v) {
      scales_[v] = has_lane_scale_ ? _mm512_load_ps(args.w->scales + args.first_lane + v * 16) : _mm512_setzero_ps();
      biases_[v] = has_bias_ ? _mm512_load_ps(args.bias + v * 16) : _mm512_setzero_ps();
    }
    for (int v = 0; v < kStored; ++v) masks_[v] = head(args.outputs - v * 16);
  }

  DIPTYCH_FORCED void finish(int64_t row) {
    __m512 y[kLanes];
    const float* acc = acc_ + row * kPanelLanes;
    const int64_t from = x_rows_ != nullptr ? x_rows_[row] : row;
    const __m512i offset = kWhole ? _mm512_set1_epi32(128 * row_sums_[from]) : _mm512_setzero_si512();
    const __m512 row_scale = kWhole || has_row_scale_ ? _mm512_set1_ps(row_scales_[from]) : _mm512_setzero_ps();
    if (own_biases_ != nullptr)
      for (int v = 0; v < kLanes; ++v) biases_[v] = _mm512_load_ps(own_biases_ + row * kPanelLanes + v * 16);
    for (int v = 0; v < kLanes; ++v) {
      y[v] = _mm512_load_ps(acc + v * 16);
      if constexpr (kWhole)
        y[v] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_castps_si512(y[v]), offset)), _mm512_mul_ps(row_scale, scales_[v]));
      else if (has_row_scale_ || has_lane_scale_) y[v] = _mm512_mul_ps(y[v], has_lane_scale_ ? scales_[v] : row_scale);
    }
    if (has_bias_)
      for (int v = 0; v < kLanes; ++v) y[v] = _mm512_add_ps(y[v], biases_[v]);
    if constexpr (kGated)
      for (int v = 0; v < kStored; ++v) y[v] = _mm512_mul_ps(activate(activation_, y[2 * v]), y[2 * v + 1]);
    uint8_t* out = out_ + (out_rows_ != nullptr ? out_rows_[row] : row) * out_stride_;
    const float weight = kStore == Store::add_f32 && row_weights_ != nullptr ? row_weights_[row] : 1.0f;
    for (int v = 0; v < kStored; ++v) put<kStore>(out + v * 16 * kElement, masks_[v], activation_, weight, y[v]);
  }

  // Brings the lines of a row's outputs into L2, of rows that follow, too, where they lie in order: those of many rows are beyond it.
  DIPTYCH_FORCED void ask(int64_t row) const {
    if constexpr (kStore == Store::f32) {
      if (out_rows_ != nullptr) return;
      const uint8_t* out = out_ + row * out_stride_;
      for (int64_t byte = 0; byte < kStored * 16 * kElement; byte += 64) __builtin_prefetch(out + byte, 0, 2);
    }
  }

 private:
  static constexpr int kStored = kGated ? kLanes / 2 : kLanes;  // vectors of outputs
  static constexpr int64_t kElement = kStore == Store::bf16 ? 2 : 4;
  __m512 scales_[kLanes], biases_[kLanes];
  __mmask16 masks_[kStored];
  const float *const own_biases_, *const acc_, *const row_scales_, *const row_weights_;
  const int32_t *const row_sums_, *const x_rows_, *const out_rows_;
  uint8_t* const out_;
  const int64_t out_stride_;
  const Activation activation_;
  const bool has_bias_, has_row_scale_, has_lane_scale_;
};

template <bool kWhole, bool kGated, int kLanes, Store kStore>
void finish_as(const FinishArgs& args) {
  FinishRows<kWhole, kGated, kLanes, kStore> rows(args);
  for (int64_t row = 0, count = args.rows; row < count; ++row) rows.finish(row);
}

template <bool kWhole, bool kGated, int kLanes>
void finish_store(const FinishArgs& args) {
  switch (args.store) {
    case Store::f32: return finish_as<kWhole, kGated, kLanes, Store::f32>(args);
    case Store::bf16: return finish_as<kWhole, kGated, kLanes, Store::bf16>(args);
    case Store::add_f32: return finish_as<kWhole, kGated, kLanes, Store::add_f32>(args);
    case Store::gate_f32: return finish_as<kWhole, kGated, kLanes, Store::gate_f32>(args);
  }
}

template <bool kWhole>
void finish_gate(const FinishArgs& args) {
  const int64_t vectors = args.lanes / 16;
  if (args.w->shape.gated) return vectors == 2 ? finish_store<kWhole, true, 2>(args) : finish_store<kWhole, true, 4>(args);
  vectors == 1   ? finish_store<kWhole, false, 1>(args)
  : vectors == 2 ? finish_store<kWhole, false, 2>(args)
                 : finish_store<kWhole, false, 4>(args);
}
