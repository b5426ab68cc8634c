// Entries: what some tokens of a sequence are together (DeepSeek V4), and rows that all heads meet as they are.

namespace diptych {
namespace DIPTYCH_ISA {

// Neighbours among the last 2 * half of x [d] turn together, by `sign` times the position's angle.
DIPTYCH_INLINE void turn_end(float* x, int64_t d, int64_t half, const float* cos_row, const float* sin_row, float sign) {
  float* end = x + d - 2 * half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = end[2 * i], b = end[2 * i + 1], c = cos_row[i], s = sign * sin_row[i];
    end[2 * i] = a * c - b * s, end[2 * i + 1] = b * c + a * s;
  }
}

static void cache_row(const RowCall& call, int64_t token, float* scratch) {
  const KvShape& shape = call.kv.shape;
  const bool is_index = call.kv.is_index;
  const int64_t d = is_index ? shape.index_dim : shape.head_dim, end = call.positions[token] + 1, slot = call.slots[token];
  int64_t first = end - 1, place = slot % shape.block_tokens;
  bool is_whole = true;
  if (call.tokens != 0) {
    if (!is_index && end % shape.shared_by != 0) return;
    first = end - call.tokens, is_whole = first % call.tokens == 0;
    if (!is_index) place = shape.entry_row(place);
  }
  if (is_whole) {
    rms_norm_row(call.rows + token * d, call.norm, d, call.norm_eps, scratch);
    turn_end(scratch, d, call.half, call.cos_table + first * call.half, call.sin_table + first * call.half, 1.0f);
  } else {
    std::memset(scratch, 0, static_cast<size_t>(d) * 4);
  }
  const KvHead head = call.kv.head(slot / shape.block_tokens, 0);
  store_key(shape.format, scratch, d, place, !is_index, head.keys, head.key_scales);
}

static void turn_query(const float* x, int64_t d, const float* norm, float norm_eps, int64_t half, const float* cos_row, const float* sin_row, float* scratch,
                       uint16_t* out) {
  if (norm == nullptr) std::memcpy(scratch, x, static_cast<size_t>(d) * 4);
  else rms_norm_row(x, norm, d, norm_eps, scratch);
  turn_end(scratch, d, half, cos_row, sin_row, 1.0f);
  round_to_bf16(scratch, d, out);
}

static void turn_back(float* x, int64_t d, int64_t half, const float* cos_row, const float* sin_row) { turn_end(x, d, half, cos_row, sin_row, -1.0f); }

// 16 numbers of a series: the largest gate, the sum of weights and what they weigh, both as that gate has them.
struct EntrySums {
  F32 most, weights, sum;
};

DIPTYCH_INLINE EntrySums no_sums() { return {set1(-1e30f), zero(), zero()}; }

DIPTYCH_INLINE void take_token(EntrySums& sums, F32 gate, F32 value) {
  const F32 most = max(sums.most, gate), kept = exp_lanes(sub(sums.most, most)), weight = exp_lanes(sub(gate, most));
  sums.weights = fma(sums.weights, kept, weight);
  sums.sum = fma(weight, value, mul(sums.sum, kept));
  sums.most = most;
}

static void move_entries(const EntriesCall& call, const EntriesTask& task) {
  const int64_t width = call.width(), n = call.n_series, lanes = call.d - task.lane < 16 ? call.d - task.lane : 16;
  EntrySums sums[2] = {no_sums(), no_sums()};  // the last is of the entry that comes next
  for (int64_t i = 0; task.read != nullptr && i < n; ++i) {
    const float* from = task.read + i * call.d + task.lane;
    sums[i] = {load_n(from, lanes), load_n(from + width, lanes), load_n(from + 2 * width, lanes)};
  }
  const auto leave = [&](float* place) {
    for (int64_t i = 0; i < n; ++i) {
      float* to = place + i * call.d + task.lane;
      store_n(to, sums[i].most, lanes), store_n(to + width, sums[i].weights, lanes), store_n(to + 2 * width, sums[i].sum, lanes);
    }
  };
  const StateSave* save = task.saves;
  for (int64_t row = 0; row < task.n_rows; ++row) {
    const int64_t token = task.first_row + row, at = call.positions[token] % call.tokens;
    if (at == 0) {
      if (call.positions[token] == 0) sums[0] = sums[1] = no_sums();
      if (n == 2) sums[1] = sums[0];
      sums[0] = no_sums();
    }
    const float* values = call.rows + token * 2 * width + task.lane;
    for (int64_t i = 0; i < n; ++i) {
      const F32 gate = add(load_n(values + width + i * call.d, lanes), load_n(call.offsets + at * width + i * call.d + task.lane, lanes));
      take_token(sums[i], gate, load_n(values + i * call.d, lanes));
    }
    if (at == call.tokens - 1) store_n(call.out + token * call.d + task.lane, div(sums[n - 1].sum, sums[n - 1].weights), lanes);
    for (; save != task.saves_end && save->rows == row + 1; ++save) leave(save->place);
  }
  leave(task.write);
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
