// What an index chooses (DeepSeek Sparse Attention, arXiv:2512.02556): scores of all positions before a token, the highest of them, and the
// tiles of attention that are made of those. Or blocks of positions (MiniMax M3), whose tiles are groups of 16 as they lie (GroupWalk); of
// fewer than 16 (Qwen4-Exp) groups are made of several.
//
// The i-th tile of a token has the positions that stand at [256 i, 256 i + 256) of its own choice, ascending. So what is summed, and in which
// order, follows from the choice alone, and a token that has no more positions than are chosen meets the tiles that it met without an index.

// ---- tiles of a choice ----

// 16 rows of d bf16 numbers as one group of keys and one of values; null: a row that is nobody's, zeros.
#if defined(DIPTYCH_AVX512)
DIPTYCH_INLINE void pack_group(const uint16_t* const* rows, int64_t d, int64_t dv, uint16_t* keys, uint16_t* values) {
  for (int64_t i = 0; i < d; i += 32) {  // a square of 16 tokens and 16 pairs of dimensions
    const int64_t pairs = d - i < 32 ? (d - i) / 2 : 16;
    __m512i x[16], y[16];
    for (int t = 0; t < 16; ++t) x[t] = rows[t] == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi32(first_lanes(pairs), rows[t] + i);
    for (int t = 0; t < 16; t += 2) y[t] = _mm512_unpacklo_epi32(x[t], x[t + 1]), y[t + 1] = _mm512_unpackhi_epi32(x[t], x[t + 1]);
    for (int t = 0; t < 16; t += 4)
      for (int half = 0; half < 2; ++half) {
        x[t + 2 * half] = _mm512_unpacklo_epi64(y[t + half], y[t + 2 + half]);
        x[t + 2 * half + 1] = _mm512_unpackhi_epi64(y[t + half], y[t + 2 + half]);
      }
    for (int pair = 0; pair < 4; ++pair) {  // of each quarter of a row; x[4 k + pair] has it of tokens 4 k to 4 k + 3
      const __m512i low[2] = {_mm512_shuffle_i32x4(x[pair], x[4 + pair], 0x88), _mm512_shuffle_i32x4(x[8 + pair], x[12 + pair], 0x88)};
      const __m512i high[2] = {_mm512_shuffle_i32x4(x[pair], x[4 + pair], 0xdd), _mm512_shuffle_i32x4(x[8 + pair], x[12 + pair], 0xdd)};
      y[pair] = _mm512_shuffle_i32x4(low[0], low[1], 0x88), y[8 + pair] = _mm512_shuffle_i32x4(low[0], low[1], 0xdd);
      y[4 + pair] = _mm512_shuffle_i32x4(high[0], high[1], 0x88), y[12 + pair] = _mm512_shuffle_i32x4(high[0], high[1], 0xdd);
    }
    for (int64_t pair = 0; pair < pairs; ++pair) _mm512_storeu_si512(keys + (i / 2 + pair) * 2 * kGroupTokens, y[pair]);
  }
  for (int64_t p = 0; p < kGroupTokens / 2; ++p)
    for (int64_t i = 0; i < dv; i += 16) {
      __m512i both[2];
      for (int odd = 0; odd < 2; ++odd) {
        const uint16_t* row = rows[2 * p + odd];
        const __mmask16 lanes = row == nullptr ? __mmask16{0} : first_lanes(d - i < 16 ? d - i : 16);
        both[odd] = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, row + i));
      }
      _mm512_storeu_si512(values + p * 2 * dv + 2 * i, _mm512_or_si512(both[0], _mm512_slli_epi32(both[1], 16)));
    }
}
#elif defined(DIPTYCH_AVX2)
DIPTYCH_INLINE void pack_group(const uint16_t* const* rows, int64_t d, int64_t dv, uint16_t* keys, uint16_t* values) {
  const auto words_of = [&](int64_t t, int64_t i) {  // eight of a row's pairs from its i-th number on, zeros behind the last
    if (rows[t] == nullptr) return _mm256_setzero_si256();
    return _mm256_maskload_epi32(reinterpret_cast<const int*>(rows[t] + i), lane_mask((d - i) / 2));
  };
  for (int64_t t = 0; t < kGroupTokens; t += 8)
    for (int64_t i = 0; i < d; i += 16) {  // a square of 8 tokens and 8 pairs of dimensions
      __m256 square[8];
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) square[j] = _mm256_castsi256_ps(words_of(t + j, i));
      turn_square(square);
      for (int64_t j = 0; j < 8 && i + 2 * j < d; ++j)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(keys + (i + 2 * j) * kGroupTokens + 2 * t), _mm256_castps_si256(square[j]));
    }
  for (int64_t p = 0; p < kGroupTokens / 2; ++p)
    for (int64_t i = 0; i < dv; i += 16) {
      const __m256i even = words_of(2 * p, i), odd = words_of(2 * p + 1, i);
      const __m256i low = _mm256_unpacklo_epi16(even, odd), high = _mm256_unpackhi_epi16(even, odd);
      __m256i* at = reinterpret_cast<__m256i*>(values + p * 2 * dv + 2 * i);
      _mm256_storeu_si256(at, _mm256_permute2x128_si256(low, high, 0x20));
      _mm256_storeu_si256(at + 1, _mm256_permute2x128_si256(low, high, 0x31));
    }
}
#else
DIPTYCH_INLINE void pack_group(const uint16_t* const* rows, int64_t d, int64_t dv, uint16_t* keys, uint16_t* values) {
  std::memset(values, 0, static_cast<size_t>(kGroupTokens * dv) * 2);
  for (int64_t t = 0; t < kGroupTokens; ++t) {
    if (rows[t] == nullptr) {
      for (int64_t i = 0; i < d / 2; ++i) std::memset(keys + i * 2 * kGroupTokens + 2 * t, 0, 4);
      continue;
    }
    uint16_t* value = values + t / 2 * 2 * dv + t % 2;
    for (int64_t i = 0; i < d / 2; ++i) std::memcpy(keys + i * 2 * kGroupTokens + 2 * t, rows[t] + 2 * i, 4);
    for (int64_t i = 0; i < d; ++i) value[2 * i] = rows[t][i];
  }
}
#endif

// Keys and values of a tile of one token, or of some that all have no choice to make, in scratch; those of a cache of bytes as `widen_tile`
// has them.
DIPTYCH_INLINE void gather_tile(const SequenceView& view, int64_t token, const Scratch& scratch, Tile& tile) {
  const AttentionCall& call = *view.call;
  const KvShape& kv = call.kv.shape;
  const int64_t d = kv.head_dim, dv = kv.value_dim(), row_bytes = d * kv.element_bytes();
  const bool is_bytes = kv.format != KvFormat::bf16;
  const float unit = kv.format == KvFormat::fp8 ? kE4m3Unit : 1.0f;
  const int64_t own = call.positions[token], near = call.shape.is_listed ? call.shape.near_of(own) : INT64_MAX;
  const int32_t* chosen = call.shape.has_choice(own) ? call.choice + token * call.shape.most : nullptr;
  const auto find = [&](int64_t place) -> std::pair<const uint8_t*, const float*> {
    const bool is_entry = place >= near;
    int64_t position = chosen == nullptr || call.shape.is_listed ? place : chosen[place];
    if (is_entry) position = ((chosen == nullptr ? place - near : chosen[place - near]) + 1) * call.shape.entry_tokens - 1;
    else if (call.shape.is_listed) position += own + 1 - near;
    const int64_t block = position / kv.block_tokens;
    int64_t offset = position - block * kv.block_tokens;
    if (is_entry) offset = kv.entry_row(offset);
    const KvHead head = call.kv.head(view.blocks[block], view.kv_head);
    return {head.keys + offset * row_bytes, head.key_scales + offset};
  };
  alignas(64) uint16_t wide[kGroupTokens * (kMostLatentDim + 32)];
  for (int64_t g = tile.span.first; g < tile.span.end; ++g) {
    const uint16_t* rows[kGroupTokens];
    for (int64_t t = 0; t < kGroupTokens; ++t) {
      const int64_t place = tile.start + g * kGroupTokens + t, next = place + kGroupTokens;
      if ((chosen != nullptr || call.shape.is_listed) && next <= view.last_key) {  // of the group behind this one, whose rows lie anywhere
        const uint8_t* ahead = find(next).first;
        for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(ahead + at, 0, 2);
      }
      rows[t] = nullptr;
      if (is_bytes) scratch.key_scales[g * kGroupTokens + t] = scratch.value_scales[g * kGroupTokens + t] = 0.0f;
      if (place > view.last_key) continue;
      const auto [row, scale] = find(place);
      rows[t] = reinterpret_cast<const uint16_t*>(row);
      if (!is_bytes) continue;
      uint16_t* own = wide + t * (kMostLatentDim + 32);
      widen_bytes(kv.format, reinterpret_cast<const int8_t*>(row), d, own);
      rows[t] = own;
      scratch.key_scales[g * kGroupTokens + t] = scratch.value_scales[g * kGroupTokens + t] = *scale * unit;
    }
    uint16_t *keys = scratch.wide_keys + g * kGroupTokens * d, *values = scratch.wide_values + g * kGroupTokens * dv;
    pack_group(rows, d, dv, keys, values);
    tile.keys[g] = keys, tile.values[g] = values;
  }
  if (!is_bytes) return;
  tile.key_scales = scratch.key_scales, tile.value_scales = scratch.value_scales;
  tile.is_whole = is_whole(call);
  if (tile.is_whole && tile.span.pairs == kTileTokens / 2) tile.most_value_scale = most_scale(tile.value_scales, 0, kTileTokens);
}

// A tile of blocks of fewer positions than a group has: copied beside each other, as they lie in a cache of one block. Behind the last of
// them stands the first chosen, so that all that is multiplied are numbers.
DIPTYCH_INLINE void gather_blocks(const SequenceView& view, const Scratch& scratch, int64_t rows, Tile& tile) {
  const AttentionCall& call = *view.call;
  const KvShape& kv = call.kv.shape;
  const int64_t block = call.shape.block, d = kv.head_dim, dv = kv.value_dim(), bytes = kv.element_bytes();
  AttentionCall gathered = call;
  gathered.kv.data = scratch.gathered, gathered.kv.shape.block_tokens = kTileTokens, gathered.kv.shape.n_kv_heads = 1;
  const KvHead to = gathered.kv.head(0, 0);
  for (int64_t at = 0; at < tile.span.end * kGroupTokens; at += block) {
    const int64_t place = tile.start + at, position = view.chosen[place > view.last_key ? 0 : place / block] * block;
    const int64_t offset = position % kv.block_tokens;
    const KvHead from = call.kv.head(view.blocks[position / kv.block_tokens], view.kv_head);
    const uint8_t* keys = from.keys + (offset / kGroupTokens * kGroupTokens * d + offset % kGroupTokens * 2) * bytes;
    uint8_t* own = to.keys + (at / kGroupTokens * kGroupTokens * d + at % kGroupTokens * 2) * bytes;
    for (int64_t i = 0; i < d / 2; ++i, keys += 2 * kGroupTokens * bytes, own += 2 * kGroupTokens * bytes) std::memcpy(own, keys, static_cast<size_t>(2 * block * bytes));
    std::memcpy(to.values + at * dv * bytes, from.values + offset * dv * bytes, static_cast<size_t>(block * dv * bytes));
    if (kv.format == KvFormat::bf16) continue;
    std::memcpy(to.key_scales + at, from.key_scales + offset, static_cast<size_t>(block) * 4);
    std::memcpy(to.value_scales + at, from.value_scales + offset, static_cast<size_t>(block) * 4);
  }
  const int32_t only = 0;
  const int64_t start = tile.start;
  tile.start = 0;
  find_tile({&gathered, &only, 0, view.last_key - start}, scratch, rows, tile);
  tile.start = start;
}

// ---- scores ----

// A block's score is the largest of its positions', for each head by itself.
DIPTYCH_INLINE void score_blocks(const float* scores, const Span& seen, int64_t groups, float* out) {
  for (int64_t g = 0; g < seen.end; g += groups) {
    const int64_t end = seen.end - g < groups ? seen.end : g + groups;
    F32 most = load(scores + g * 16);
    for (int64_t i = g + 1; i < end; ++i) most = max(most, load(scores + i * 16));
    out[g / groups] = horizontal_max(most);
  }
}

static void index_tile(const IndexCall& call, int64_t sequence, int64_t number, const int32_t* tokens, int64_t n_tokens, float* scores,
                       int64_t stride, uint8_t* memory) {
  const AttentionCall& heads = call.heads;
  const Scratch scratch = carve_scratch(heads.shape, memory);
  const int64_t d = heads.shape.head_dim, n_heads = heads.shape.n_heads, block = heads.shape.block;
  const SequenceView view = {&heads, heads.block_table + sequence * heads.table_width, 0, heads.positions[tokens[n_tokens - 1]]};
  Ahead ahead;
  Tile tile;
  tile.ahead = &ahead, tile.start = number * kTileTokens;
  const auto span_to = [&](int64_t last) -> Span {
    const int64_t left = last + 1 - tile.start;
    return {0, left >= kTileTokens ? kTileGroups : (left + 15) / 16, left >= kTileTokens ? kTileTokens / 2 : (left + 1) / 2};
  };
  tile.span = span_to(view.last_key);
  find_tile(view, scratch, n_heads, tile);
  begin_products();
  for (int64_t i = 0; i < n_tokens; ++i) {
    const int64_t token = tokens[i];
    if (heads.positions[token] < tile.start) continue;
    const Span seen = span_to(heads.positions[token]);
    float* out = scores + i * stride + tile.start / block;
    if (block == 1) std::memset(out, 0, static_cast<size_t>(seen.end * kGroupTokens) * 4);
    take_queries(heads, heads.q + token * n_heads * d, n_heads, 0, scratch);
    arrange_queries(scratch, tile.is_whole, n_heads, kRows, d);
    for (int64_t h = 0; h < n_heads; h += kRows) {
      const int64_t n = n_heads - h < kRows ? n_heads - h : kRows;
      score(scratch, h, n, d, tile, seen);
      for (int64_t r = 0; r < n; ++r) {
        if (block != 1) {  // by what a head's query is multiplied changes no order
          score_blocks(scratch.scores + r * kTileTokens, seen, block / kGroupTokens, out + (h + r) * (stride / n_heads));
          continue;
        }
        const F32 weight = set1((call.weights == nullptr ? 1.0f : call.weights[token * n_heads + h + r]) * (tile.is_whole ? scratch.query_scales[h + r] : 1.0f));
        for (int64_t g = 0; g < seen.end; ++g)
          store(out + g * 16, fma(weight, max(load(scratch.scores + r * kTileTokens + g * 16), zero()), load(out + g * 16)));
      }
    }
  }
  end_products();
}

// ---- the highest ----

static void choose_row(float* scores, int64_t n, int64_t most, int32_t* chosen) {
  int32_t* keys = reinterpret_cast<int32_t*>(scores);  // whole numbers in the order of the scores
  for (int64_t i = 0; i < n; ++i) {
    const float x = scores[i] + 0.0f;  // of two zeros one
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    bits ^= bits >> 31 & INT32_MAX;
    std::memcpy(keys + i, &bits, 4);
  }
  const auto at_least = [&](int32_t least) {
    int32_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += keys[i] >= least;
    return count;
  };
  int32_t least = at_least(0) >= most ? 0 : INT32_MIN;  // becomes the largest number that so many reach, bit by bit
  for (int bit = 30; bit >= 0; --bit)
    if (const int32_t higher = least + (int32_t{1} << bit); at_least(higher) >= most) least = higher;
  int64_t ties = most - (least == INT32_MAX ? 0 : at_least(least + 1));
  for (int64_t i = 0, at = 0; at < most; ++i)
    if (keys[i] > least || (keys[i] == least && ties-- > 0)) chosen[at++] = static_cast<int32_t>(i);
}
