// Python bindings of the operations on latents, and on the index that chooses which of them are attended to.
#include "module/module.h"
#include "program/program.h"

namespace diptych {

void bind_latents(nb::class_<Program>& program) {
  program
      .def("cache_latents", [](Program& p, int kv, int layer, int norm, float norm_eps, int rope, int64_t rank) {
        p.record(Category::rope, CacheLatentsOp{kv, layer, norm, rope, rank, norm_eps});
      }, nb::kw_only(), nb::arg("kv"), nb::arg("layer"), nb::arg("norm"), nb::arg("norm_eps"), nb::arg("rope"), nb::arg("rank"))
      .def("rotate_queries", [](Program& p, int q, int out, int rope, int64_t n_heads) {
        p.record(Category::rope, RotateQueriesOp{q, out, rope, n_heads});
      }, nb::kw_only(), nb::arg("q"), nb::arg("out"), nb::arg("rope"), nb::arg("n_heads"))
      .def("cache_index", [](Program& p, int x, int layer, int norm, int bias, float norm_eps, int rope, int64_t n_gates, int64_t pooled) {
        if (n_gates < 0 || n_gates >= p.buffer_width(x)) throw std::invalid_argument("a key stands before its gates");
        const bool is_right = pooled == 0 ? norm != -1 || (bias == -1 && n_gates == 0)
                                          : pooled > 1 && kGroupTokens % pooled == 0 && n_gates == 0 && norm != -1 && bias == -1 && p.vector_size(norm) == p.buffer_width(x);
        if (!is_right) throw std::invalid_argument("keys are pooled that lie in one group, and normed without a bias; what has no norm has no bias");
        CacheIndexOp op{x, layer, norm, bias, rope, norm_eps};
        op.n_gates = n_gates, op.pooled = pooled;
        p.record(Category::rope, op);
      }, nb::kw_only(), nb::arg("x"), nb::arg("layer"), nb::arg("norm") = -1, nb::arg("bias") = -1, nb::arg("norm_eps") = 0.0f, nb::arg("rope"), nb::arg("n_gates") = 0,
         nb::arg("pooled") = 0)
      .def("pool_index", [](Program& p, int layer, int offsets, int64_t pool, int64_t width) {
        const bool fits = pool > 1 && pool <= kMostPool && width > 0 && width % 2 == 0 && width <= kMostLatentDim && p.vector_size(offsets) == pool * (width / 2);
        if (!fits) throw std::invalid_argument("a pool is of 2 to 64 keys, which have offsets and as many gates as they are wide");
        p.record(Category::rope, PoolIndexOp{layer, offsets, pool, width});
      }, nb::kw_only(), nb::arg("layer"), nb::arg("offsets"), nb::arg("pool"), nb::arg("width"))
      .def("cache_rows", [](Program& p, int x, int layer, int norm, float norm_eps, int rope, int64_t tokens, bool is_index) {
        const bool fits = p.vector_size(norm) == p.buffer_width(x) && p.buffer_width(x) <= kMostLatentDim && p.buffer_width(x) % 2 == 0;
        if (!fits || tokens < 0 || tokens == 1 || (is_index && tokens == 0)) throw std::invalid_argument("rows are as wide as their norm, and entries of two tokens at least");
        p.record(Category::rope, CacheRowsOp{x, layer, norm, rope, norm_eps, tokens, is_index});
      }, nb::kw_only(), nb::arg("x"), nb::arg("layer"), nb::arg("norm"), nb::arg("norm_eps"), nb::arg("rope"), nb::arg("tokens") = 0, nb::arg("is_index") = false)
      .def("turn_queries", [](Program& p, int q, int out, int norm, float norm_eps, int rope, int64_t n_heads) {
        const int64_t width = p.buffer_width(q);
        if (n_heads < 1 || width % n_heads != 0 || p.buffer_width(out) != width || p.vector_size(norm) != width / n_heads) throw std::invalid_argument("heads are as wide as their norm");
        p.record(Category::rope, TurnQueriesOp{q, out, norm, rope, norm_eps, n_heads});
      }, nb::kw_only(), nb::arg("q"), nb::arg("out"), nb::arg("norm"), nb::arg("norm_eps"), nb::arg("rope"), nb::arg("n_heads"))
      .def("turn_back", [](Program& p, int x, int rope, int64_t n_heads) {
        if (n_heads < 1 || p.buffer_width(x) % n_heads != 0) throw std::invalid_argument("heads are equally wide");
        p.record(Category::rope, TurnBackOp{x, rope, n_heads});
      }, nb::kw_only(), nb::arg("x"), nb::arg("rope"), nb::arg("n_heads"))
      .def("move_entries", [](Program& p, int x, int out, int offsets, int layer, int64_t tokens, int64_t n_series) {
        const int64_t width = n_series * p.buffer_width(out);
        const bool fits = n_series >= 1 && n_series <= 2 && tokens > 1 && layer >= 0 && p.buffer_width(x) == 2 * width && p.vector_size(offsets) == tokens * width;
        if (!fits) throw std::invalid_argument("entries are of one series or two, of which each token has values, gates and offsets");
        p.record(Category::attention, MoveEntriesOp{x, out, offsets, layer, tokens, n_series});
      }, nb::kw_only(), nb::arg("x"), nb::arg("out"), nb::arg("offsets"), nb::arg("layer"), nb::arg("tokens"), nb::arg("n_series"))
      .def("choose", [](Program& p, int q, int queries, int weights, int choice, int layer, int rope, const AttentionShape& shape, int64_t width) {
        const int64_t own = width == 0 ? shape.head_dim : width;
        if (own < 1 || own > shape.head_dim || p.buffer_width(queries) != shape.n_heads * shape.head_dim) throw std::invalid_argument("an index has queries that are wider than its keys");
        const bool fits = p.buffer_width(q) == shape.n_heads * own && p.buffer_width(weights) == shape.n_heads && p.buffer_width(choice) == shape.most;
        if (!fits || shape.block != 1) throw std::invalid_argument("an index has queries, weights and a choice of other sizes");
        ChooseOp op{q, queries, weights, choice, layer, rope, shape};
        op.width = width, op.turns_last = shape.is_listed;
        p.record(Category::attention, op);
      }, nb::kw_only(), nb::arg("q"), nb::arg("queries"), nb::arg("weights"), nb::arg("choice"), nb::arg("layer"), nb::arg("rope"), nb::arg("shape"),
         nb::arg("width") = 0)
      .def("choose_blocks", [](Program& p, int q, int queries, int choice, int layer, int rope, const AttentionShape& shape, int norm, float norm_eps,
                               int64_t local, int64_t first_head) {
        const int64_t n = shape.n_heads, d = shape.head_dim, most = shape.most / shape.block;
        const bool fits = first_head >= 0 && p.buffer_width(q) % d == 0 && p.buffer_width(q) / d >= first_head + n && p.buffer_width(queries) == n * d &&
                          p.buffer_width(choice) == n * most && p.vector_size(norm) == d;
        if (!fits) throw std::invalid_argument("an index has queries and a choice of other sizes");
        if (shape.block == 1 || shape.by_means || local < 1 || local > most) throw std::invalid_argument("of the blocks that are chosen a token's own is one");
        ChooseOp op{q, queries, -1, choice, layer, rope, shape};
        op.norm = norm, op.norm_eps = norm_eps, op.local = local, op.first_head = first_head;
        p.record(Category::attention, op);
      }, nb::kw_only(), nb::arg("q"), nb::arg("queries"), nb::arg("choice"), nb::arg("layer"), nb::arg("rope"), nb::arg("shape"), nb::arg("norm"),
         nb::arg("norm_eps"), nb::arg("local"), nb::arg("first_head") = 0)
      .def("choose_pooled", [](Program& p, int q, int queries, int choice, int layer, int rope, const AttentionShape& shape, int norm, float norm_eps) {
        const int64_t n = shape.n_heads, d = shape.head_dim;
        const bool fits = p.buffer_width(q) == n * d && p.buffer_width(queries) == n * d && shape.by_means && p.buffer_width(choice) == shape.most / shape.block + 1 && p.vector_size(norm) == d;
        if (!fits) throw std::invalid_argument("an index has queries and a choice of other sizes");
        ChooseOp op{q, queries, -1, choice, layer, rope, shape};
        op.norm = norm, op.norm_eps = norm_eps;
        p.record(Category::attention, op);
      }, nb::kw_only(), nb::arg("q"), nb::arg("queries"), nb::arg("choice"), nb::arg("layer"), nb::arg("rope"), nb::arg("shape"), nb::arg("norm"), nb::arg("norm_eps"));
}

}  // namespace diptych
