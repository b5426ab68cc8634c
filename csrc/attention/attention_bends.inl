// What one row's products with keys become before a softmax: `scale` makes them scores, which are bent. Out of the way of the models that
// bend none: a row of theirs asks once.

DIPTYCH_INLINE bool bends_scores(const AttentionShape& shape) {
  return shape.has_softcap || shape.slopes != nullptr || shape.distances != nullptr || shape.n_places != 0;
}

DIPTYCH_INLINE void cap_scores(float* scores, const Span& seen, float softcap, float scale) {
  for (int64_t g = seen.first; g < seen.end; ++g) {
    const F32 x = mul(load(scores + g * 16), set1(scale / softcap));
    store(scores + g * 16, mul(tanh_lanes(x), set1(softcap)));
  }
}

// Scores lose so much for each position from the key to the query, which is `ahead` positions behind the tile's first key.
DIPTYCH_INLINE void slope_scores(float* scores, const Span& seen, float slope, int64_t ahead, float scale) {
  alignas(64) static constexpr float kSteps[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t g = seen.first; g < seen.end; ++g) {
    const F32 nearer = add(load(kSteps), set1(static_cast<float>(g * 16 - ahead)));
    store(scores + g * 16, fma(nearer, set1(slope), mul(load(scores + g * 16), set1(scale))));
  }
}

// Scores gain what a table says of the distance from the query to the key: numbers [2 reach + 32] of the distances from -reach - 16 on, of which
// those beyond the reach are its ends. So the 16 keys of a group have theirs side by side wherever they lie, at one place past either end.
DIPTYCH_INLINE void raise_scores(float* scores, const Span& seen, const float* numbers, int64_t reach, int64_t ahead, float scale) {
  for (int64_t g = seen.first; g < seen.end; ++g) {
    const int64_t distance = g * 16 - ahead;  // of the group's first key
    const int64_t near = distance < -reach - 16 ? -reach - 16 : distance > reach ? reach : distance;
    store(scores + g * 16, fma(load(scores + g * 16), set1(scale), load(numbers + near + reach + 16)));
  }
}

// Scores gain what the query and the key each say of the distance between them (DeBERTa). The query is the step's token `token`, `ahead`
// positions behind the tile's first key; its sequence is in the step whole, token behind token, `end` of them from the tile's first on.
static __attribute__((noinline)) void relate_scores(const AttentionCall& call, float* scores, const Span& seen, int64_t token, int64_t head,
                                                    int64_t ahead, int64_t end, float scale) {
  const AttentionShape& shape = call.shape;
  const int64_t stride = shape.n_heads * shape.n_places, reach = shape.reach;
  const float* of_query = call.of_queries + token * stride + head * shape.n_places;
  const float* of_keys = call.of_keys + (token - ahead) * stride + head * shape.n_places;
  for (int64_t g = seen.first; g < seen.end; ++g) {
    alignas(64) float gained[16] = {};
    for (int64_t key = g * 16; key < g * 16 + 16 && key < end; ++key) {
      const int64_t distance = ahead - key, near = distance < -reach ? -reach : distance > reach ? reach : distance;
      const int64_t place = static_cast<int64_t>(shape.places[near + reach]);
      gained[key - g * 16] = of_query[place] + of_keys[key * stride + place];
    }
    store(scores + g * 16, fma(load(scores + g * 16), set1(scale), load(gained)));
  }
}

static __attribute__((noinline)) void bend_scores(const AttentionShape& shape, float* scores, const Span& seen, int64_t head, int64_t ahead, float scale) {
  if (shape.has_softcap) cap_scores(scores, seen, shape.softcap, scale), scale = 1.0f;
  if (shape.slopes != nullptr) slope_scores(scores, seen, shape.slopes[head], ahead, scale), scale = 1.0f;
  if (shape.distances != nullptr) raise_scores(scores, seen, shape.distances + head * (2 * shape.reach + 32), shape.reach, ahead, scale);
}
