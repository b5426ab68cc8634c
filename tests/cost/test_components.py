"""Exact FLOPs and bytes: the formulas against published arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.cost.attended import Attended, Chosen, Listed, Scored, pairs, read_tokens
from diptych.cost.calibrated import _units_of
from diptych.cost.components import BF16, cost_of, ring_bytes
from diptych.cost.kv_bytes import kv_bytes_of_context, kv_bytes_per_token
from diptych.cost.parameters import attention_flops_per_pair, kv_bytes_stored, linear_parameter_count, parameter_count
from diptych.cost.routing import expected_experts
from diptych.cost.tables import model_spec, quant_spec
from diptych.ground.errors import ConfigError, UnsupportedModel
from diptych.ground.phase import Phase
from diptych.ground.shape import ChunkShape, StepShape
from diptych.ground.specs import KVSpec
from diptych.ground.step import Chunk, StepPlan
from diptych.models.config import HfConfig
from diptych.models.read import read_model

KV = KVSpec()


def prefill(name: str, tokens: int = 2048):
    return cost_of(model_spec(name), StepShape.prefill(batch=1, new_tokens=tokens), quant=BF16, kv=KV)


def decode(name: str, context: int = 2048, batch: int = 1):
    return cost_of(model_spec(name), StepShape.decode(batch=batch, context_tokens=context), quant=BF16, kv=KV)


def attention_flops(cost) -> float:
    return cost.component("scores").flops + cost.component("values").flops


@pytest.mark.parametrize(
    ("name", "linear_gflop", "head_gflop", "prefill_tflop", "attention_tflop"),
    [
        ("llama-3.1-8b", 13.959, 1.051, 29.688, 1.100),
        ("qwen3-30b-a3b", 5.461, 0.622, 12.835, 1.650),
        ("deepseek-v3", 71.396, 1.853, 156.7, 10.5),
    ],
)
def test_prefill_flops_equal_the_reference(name, linear_gflop, head_gflop, prefill_tflop, attention_tflop):
    """The reference's section F.1 to all digits it prints; every planner answer rests on these."""
    cost = prefill(name)
    linear = (cost.flops - attention_flops(cost) - cost.component("head").flops) / 2048
    assert linear / 1e9 == pytest.approx(linear_gflop, abs=5e-4)
    assert cost.component("head").flops / 1e9 == pytest.approx(head_gflop, abs=5e-4)
    assert cost.flops / 1e12 == pytest.approx(prefill_tflop, rel=4e-5 if prefill_tflop < 100 else 5e-4)
    assert attention_flops(cost) / 1e12 == pytest.approx(attention_tflop, rel=5e-3)


def test_decode_step_equals_the_reference():
    """Llama-3.1-8B at context 2048: 16.083 GFLOP, 15.278 GB, 1.053 FLOP per byte."""
    cost = decode("llama-3.1-8b")
    assert cost.flops / 1e9 == pytest.approx(16.083, abs=5e-4)
    assert cost.bytes / 1e9 == pytest.approx(15.278, abs=6e-4)
    assert cost.intensity == pytest.approx(1.053, abs=5e-4)


def test_decode_step_of_a_mixture_reads_only_its_experts():
    """Qwen3-30B-A3B: 7.694 GFLOP, 6.285 GB, 1.224 FLOP per byte; charging all experts would say 61 GB."""
    cost = decode("qwen3-30b-a3b")
    assert cost.flops / 1e9 == pytest.approx(7.694, abs=5e-4)
    assert cost.bytes / 1e9 == pytest.approx(6.285, abs=1e-3)
    assert cost.intensity == pytest.approx(1.224, abs=5e-4)


def test_absorbed_latent_attention_is_near_the_ridge():
    """DeepSeek-V3 decode attention does 242 FLOP per KV byte: 2 H 1088 / (576 c)."""
    cost = decode("deepseek-v3", 8192)
    read = cost.component("scores").kv_read_bytes + cost.component("values").kv_read_bytes
    assert attention_flops(cost) / read == pytest.approx(2 * 128 * 1088 / (576 * 2), rel=1e-9)


@pytest.mark.parametrize(
    ("experts", "per_token", "tokens", "distinct"),
    [
        (128, 8, 1, 8), (128, 8, 8, 51.6), (128, 8, 32, 111.8), (128, 8, 64, 125.9),
        (256, 8, 1, 8), (256, 8, 8, 57.4), (256, 8, 32, 163), (256, 8, 64, 222),
        (8, 2, 1, 2), (8, 2, 8, 7.2), (8, 2, 64, 8),
    ],
)  # fmt: skip
def test_distinct_experts_equal_the_reference(experts, per_token, tokens, distinct):
    """D(N) = E (1 - (1 - k/E)^N); the common min(E, N k) is up to 58 % too high."""
    assert expected_experts(experts, per_token, tokens) == pytest.approx(distinct, rel=6e-3)


@given(skew=st.floats(0.05, 3.0), tokens=st.integers(1, 300))
def test_skewed_routing_touches_fewer_experts_but_at_least_k(skew, tokens):
    """A popular expert is shared by more tokens, so fewer are read; one token always reads k."""
    even = expected_experts(64, 6, tokens)
    skewed = expected_experts(64, 6, tokens, skew=skew)
    assert 6 - 1e-6 <= skewed <= even + 1e-9


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("llama-2-7b", 524_288), ("llama-3.1-70b", 327_680), ("qwen2.5-0.5b", 12_288), ("deepseek-v3", 70_272),
        ("gemma-3-27b", 507_904), ("gpt-oss-120b", 73_728), ("glm-4.5", 376_832), ("deepseek-v2-lite", 31_104),
    ],
)  # fmt: skip
def test_kv_bytes_per_token_equal_the_model_table(name, kv_bytes):
    """16-bit KV of one token over all layers, per the reference's table C."""
    assert kv_bytes_per_token(model_spec(name), KV) == kv_bytes


def test_kv_heads_are_replicated_beyond_their_number_and_latents_always():
    """TP 16 of 8 KV heads keeps one head per device; MLA keeps the whole latent on every device."""
    llama, deepseek = model_spec("llama-3.1-405b"), model_spec("deepseek-v3")
    assert kv_bytes_per_token(llama, KV, tp=8) == kv_bytes_per_token(llama, KV) / 8
    assert kv_bytes_per_token(llama, KV, tp=16) == kv_bytes_per_token(llama, KV, tp=8)
    assert kv_bytes_per_token(deepseek, KV, tp=8) == kv_bytes_per_token(deepseek, KV)


def test_hand_off_of_a_70b_prompt_is_1_34_gigabytes():
    """Llama-3.1-70B, 4096 tokens: 1.34 GB, 27 ms over 400 Gb/s."""
    size = kv_bytes_stored(model_spec("llama-3.1-70b"), KV, 4096)
    assert size / 1e9 == pytest.approx(1.342, abs=1e-3)
    assert size / 50e9 * 1e3 == pytest.approx(26.8, abs=0.1)


def test_windowed_layers_hold_and_read_their_window_only():
    """gpt-oss: half the layers see 128 tokens; charging full attention would double the KV traffic."""
    model = model_spec("gpt-oss-20b")
    held = kv_bytes_of_context(model, KV, 4096)
    assert held == 12 * (4096 + 128) * 2 * 8 * 64 * 2
    read = decode("gpt-oss-20b", 4096)
    assert read.total("kv_read_bytes") == held


@given(start=st.integers(0, 60), new=st.integers(1, 60), window=st.one_of(st.none(), st.integers(1, 80)))
def test_pairs_equal_counting_them(start, new, window):
    """Closed forms for causal and windowed pairs against a loop over queries, for any chunk of a prompt."""
    shape = ChunkShape(phase=Phase.PREFILL, new_tokens=new, start_pos=start, samples=True)
    counted = sum(min(position + 1, window or position + 1) for position in range(start, start + new))
    assert shape.pairs(window) == counted
    seen = {key for q in range(start, start + new) for key in range(max(0, q + 1 - (window or q + 1)), q + 1)}
    assert shape.kv_read_tokens(window) == len(seen)


@given(parts=st.lists(st.integers(1, 40), min_size=1, max_size=5), name=st.sampled_from(["gemma-2-2b", "qwen3-0.6b"]))
def test_chunking_a_prompt_leaves_its_flops_unchanged(parts, name):
    """Chunked prefill costs no FLOPs (only weight passes and KV reads); a wrong pair count would show here."""
    model = model_spec(name)
    whole = cost_of(model, StepShape.prefill(batch=1, new_tokens=sum(parts), samples=False), quant=BF16, kv=KV)
    start, flops = 0, 0.0
    for part in parts:
        shape = ChunkShape(phase=Phase.PREFILL, new_tokens=part, start_pos=start, samples=False)
        flops += cost_of(model, StepShape(shapes=(shape,)), quant=BF16, kv=KV).flops
        start += part
    assert flops == pytest.approx(whole.flops, rel=1e-12)


def chunk(seq_id: int, start: int, tokens: int, *, samples: bool = True) -> Chunk:
    phase = Phase.DECODE if tokens == 1 else Phase.PREFILL
    return Chunk(
        seq_id=seq_id, phase=phase, start_pos=start, token_ids=(1,) * tokens, first_new_block=0,
        new_block_ids=(), samples=samples,
    )  # fmt: skip


def test_a_mixed_step_reads_the_weights_once():
    """One GEMM over all rows: adding the phases' weight bytes over-predicts mixed steps 1.5 to 3 times."""
    model = model_spec("llama-3.1-8b")
    mixed = StepPlan(step_id=0, chunks=(chunk(1, 99, 1), chunk(2, 0, 512))).shape
    cost = cost_of(model, mixed, quant=BF16, kv=KV)
    assert cost.weight_bytes == decode("llama-3.1-8b").weight_bytes


def test_head_runs_only_on_rows_that_sample():
    """A chunk in the middle of a prompt needs no logits: neither the head's FLOPs nor its weights."""
    plan = StepPlan(step_id=0, chunks=(chunk(1, 0, 256, samples=False),))
    head = cost_of(model_spec("llama-3.1-8b"), plan.shape, quant=BF16, kv=KV).component("head")
    assert head.flops == 0
    assert head.bytes == 0


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "qwen3-235b-a22b"])
@pytest.mark.parametrize("tp", [2, 4])
def test_shards_add_up_to_the_whole(name, tp):
    """Matrix FLOPs and KV of t devices equal one device's; only norms and the router are repeated."""
    model = model_spec(name)
    work = StepShape.decode(batch=4, context_tokens=512)
    one = cost_of(model, work, quant=BF16, kv=KV)
    shard = cost_of(model, work, quant=BF16, kv=KV, tp=tp)
    repeated = one.component("router").flops
    assert (shard.flops - repeated) * tp == pytest.approx(one.flops - repeated, rel=1e-12)
    assert shard.kv_bytes * tp == pytest.approx(one.kv_bytes)
    assert one.total("link_bytes") == 0
    body = shard.total("link_bytes") - shard.component("head").link_bytes
    assert body == pytest.approx(ring_bytes(2 * model.n_layers * 4 * model.hidden * 2, tp))


def test_words_are_projected_and_shared_layers_held_once() -> None:
    """albert-base-v2 as published: 11.7M parameters with the head of its pooler, but the arithmetic of all twelve layers."""
    config = {
        "architectures": ["AlbertForMaskedLM"], "model_type": "albert", "embedding_size": 128, "hidden_size": 768,
        "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 30_000,
    }  # fmt: skip
    model = read_model(HfConfig(config))
    assert parameter_count(model) == 11_683_584 - 768 * 769
    assert linear_parameter_count(model) == 12 * 12 * 768**2 + 128 * 768
    cost = cost_of(model, StepShape.prefill(batch=1, new_tokens=100), quant=BF16, kv=KV)
    assert cost.component("embedding").flops == 2 * 100 * 128 * 768
    assert cost.component("mlp").flops == pytest.approx(12 * 2 * 100 * 2 * 768 * 3072)


def test_what_queries_and_keys_say_of_distances_is_priced() -> None:
    """deberta-v3-base as published: each token's queries and keys meet 512 rows of every head in every layer."""
    config = {
        "architectures": ["DebertaV2Model"], "model_type": "deberta-v2", "hidden_size": 768, "intermediate_size": 3072,
        "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 128_100, "pos_att_type": ["p2c", "c2p"],
        "relative_attention": True, "position_biased_input": False, "position_buckets": 256, "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    }  # fmt: skip
    model = read_model(HfConfig(config))
    assert parameter_count(model) == 183_831_552
    met = 12 * 2 * 512 * 768
    assert linear_parameter_count(model) == 12 * 12 * 768**2 + met
    cost = cost_of(model, StepShape.prefill(batch=1, new_tokens=100), quant=BF16, kv=KV)
    assert cost.component("qkv").flops == pytest.approx(2 * 100 * (12 * 3 * 768**2 + met))
    assert cost.component("qkv").weight_bytes == pytest.approx(2 * (12 * 3 * 768 * 769 + met))


@pytest.mark.parametrize(("tp", "share"), [(2, 1 / 2), (4, 3 / 4), (8, 7 / 8)])
def test_logits_are_gathered_from_all_devices(tp, share):
    """Each lacks what the others have, in 16 bits; they were charged as an all-reduce of one device's part."""
    model = model_spec("llama-3.1-8b")
    cost = cost_of(model, StepShape.decode(batch=4, context_tokens=512), quant=BF16, kv=KV, tp=tp)
    assert cost.component("head").link_bytes == share * 4 * model.vocab_size * 2


def test_an_uneven_split_is_refused_with_the_number():
    """Qwen2.5-0.5B has 14 heads: TP 4 is not possible and must be said, not rounded."""
    with pytest.raises(ConfigError, match=r"14 query heads.*4 devices"):
        cost_of(model_spec("qwen2.5-0.5b"), StepShape.decode(batch=1, context_tokens=8), quant=BF16, kv=KV, tp=4)


def test_layers_of_different_heads_cost_what_each_costs():
    """Every layer was priced with the first one's heads. Half of one model's layers and half of another's: the mean."""
    one = model_spec("gemma-3-4b")  # windowed layers and full ones
    heads = replace(one.layers[0].attention, n_heads=16, n_kv_heads=2, head_dim=128)
    narrow = replace(one.layers[0], attention=heads, mlp=replace(one.mlp, ffn=5120))
    other = replace(one, layers=tuple(replace(narrow, attention=replace(heads, window=w)) for w in one.windows))
    mixed = replace(one, layers=one.layers[: one.n_layers // 2] + other.layers[one.n_layers // 2 :])
    rest = replace(one, layers=other.layers[: one.n_layers // 2] + one.layers[one.n_layers // 2 :])
    work = StepPlan(step_id=0, chunks=(chunk(1, 3000, 1), chunk(2, 40, 512))).shape

    def figures(model):
        cost = cost_of(model, work, quant=BF16, kv=KV)
        return [
            *(getattr(part, field) for part in cost.components for field in ("flops", "vector_flops", "bytes")),
            parameter_count(model), linear_parameter_count(model), attention_flops_per_pair(model),
            kv_bytes_per_token(model, KV), kv_bytes_of_context(model, KV, 3000), kv_bytes_stored(model, KV, 3000),
            *(row[i] for row in sorted(_units_of(model, BF16, KV, 1).windows, key=str) for i in (1, 2, 3)),
        ]  # fmt: skip

    sums = [sum(pair) for pair in zip(figures(one), figures(other), strict=True)]
    assert sums == pytest.approx([sum(pair) for pair in zip(figures(mixed), figures(rest), strict=True)], rel=1e-12)
    assert figures(mixed) != figures(one)


def test_a_second_kind_of_mixture_is_refused():
    """The predictor knows one number of experts; another in later layers would be priced as the first."""
    model = model_spec("mixtral-8x7b")
    odd = replace(model.layers[0], mlp=replace(model.moe, n_experts=16))
    with pytest.raises(UnsupportedModel, match="2 kinds of mixtures of experts"):
        replace(model, layers=(*model.layers[:-1], odd))


def test_quantised_weights_shrink_weight_bytes_only():
    """int4 in groups of 32 is 0.625 bytes per parameter; KV traffic does not change."""
    model, work = model_spec("llama-2-7b"), StepShape.decode(batch=1, context_tokens=105)
    plain = cost_of(model, work, quant=BF16, kv=KV)
    small = cost_of(model, work, quant=quant_spec("int4"), kv=KV)
    assert small.weight_bytes / plain.weight_bytes == pytest.approx(0.625 / 2, rel=1e-3)
    assert small.kv_bytes == plain.kv_bytes


def published(name: str):
    """A model by the config that it was published with."""
    file = Path(__file__).parents[1] / "data" / "published" / "models.jsonl"
    entries = (json.loads(line) for line in file.read_text().splitlines())
    return read_model(HfConfig(next(entry["config"] for entry in entries if entry["model"] == name)))


def test_an_index_reads_all_its_keys_and_attention_what_was_chosen():
    """DeepSeek V3.2: of 32k tokens 2,048; a context of 2,048 has nothing to choose. GLM-5.2: 21 of 78 layers choose."""
    deepseek, glm = published("deepseek-ai/DeepSeek-V3.2"), published("zai-org/GLM-5.2")
    row, key, chosen, context = 576 * 2, 128 * 2, 2048, 32_768
    assert kv_bytes_per_token(deepseek, KV) == 61 * (row + key)
    assert kv_bytes_per_token(glm, KV) == 78 * row + 21 * key
    for model, layers, owners, heads, index_heads in ((deepseek, 61, 61, 128, 64), (glm, 78, 21, 64, 32)):
        cost = cost_of(model, StepShape.decode(batch=1, context_tokens=context), quant=BF16, kv=KV)
        index, scores = cost.component("index"), cost.component("scores")
        assert (index.flops, index.kv_read_bytes) == (owners * 2 * index_heads * 128 * context, owners * context * key)
        assert (scores.flops, scores.kv_read_bytes) == (layers * 2 * heads * 576 * chosen, layers * chosen * row)
        short = cost_of(model, StepShape.decode(batch=1, context_tokens=chosen), quant=BF16, kv=KV)
        assert (short.component("index").flops, short.component("index").kv_read_bytes) == (0, 0)
        assert short.component("scores") == scores
    # a prompt in two pieces looks at as many pairs as in one
    scored = [
        cost_of(deepseek, StepShape((chunk,)), quant=BF16, kv=KV).component("index").flops
        for chunk in (
            ChunkShape(Phase.PREFILL, 5000, 0, True),
            *(ChunkShape(Phase.PREFILL, 2500, at, True) for at in (0, 2500)),
        )
    ]
    assert scored[0] == scored[1] + scored[2] == 61 * 2 * 64 * 128 * sum(range(chosen + 1, 5001))


def test_what_an_index_chooses_is_counted_position_by_position():
    """The same by the components of a step and by its predicted time, which had each chunk reach as a window does, and an index
    look at keys where there was nothing to choose.
    """
    most, chunks = (
        12,
        (
            ChunkShape(Phase.PREFILL, 10, 5, True),
            ChunkShape(Phase.DECODE, 1, 3, True),
            ChunkShape(Phase.DECODE, 1, 40, True),
        ),
    )
    for chunk in chunks:
        seen = [1 + position for position in range(chunk.start_pos, chunk.end_pos)]
        assert pairs(Chosen(most), chunk) == sum(min(n, most) for n in seen)
        assert pairs(Scored(most), chunk) == sum(n for n in seen if n > most)
        assert read_tokens(Scored(most), chunk) == (chunk.end_pos if chunk.end_pos > most else 0)
        assert read_tokens(Chosen(most), chunk) == min(chunk.end_pos, most * chunk.new_tokens)
        # of blocks the last is a token's own, which ends with it
        ends = [n if n <= most else most - 4 + (n - 1) % 4 + 1 for n in seen]
        assert pairs(Chosen(most, 4), chunk) == sum(ends)
        assert read_tokens(Chosen(most, 4), chunk) == min(chunk.end_pos, sum(ends))
    for reach in (Chosen(most), Chosen(most, 4), Scored(most)):
        prompt, *decodes = chunks
        known = (
            read_tokens(reach, prompt),
            pairs(reach, prompt),
            *(sum(of(reach, one) for one in decodes) for of in (read_tokens, pairs)),
        )
        assert Attended(reach).of(StepShape(chunks)) == known


@pytest.mark.parametrize(("window", "tokens", "most"), [(7, 0, None), (3, 4, None), (5, 4, 2), (40, 8, 3), (1, 2, 1)])
def test_a_window_and_entries_are_seen_token_by_token(window: int, tokens: int, most: int | None) -> None:
    """DeepSeek V4: an entry counts once it is whole; what is read at least once is at most what is seen, all together."""
    reach = Listed(window, tokens, most)
    chunks = [ChunkShape(Phase.PREFILL, n, at, True) for n, at in ((10, 5), (30, 0), (3, 37), (1, 90))]
    for chunk in chunks:
        whole = [(position + 1) // tokens if tokens else 0 for position in range(chunk.start_pos, chunk.end_pos)]
        near = [min(position + 1, window) for position in range(chunk.start_pos, chunk.end_pos)]
        chosen = [one if most is None else min(one, most) for one in whole]
        assert pairs(reach, chunk) == sum(near) + sum(chosen)
        first = max(chunk.start_pos + 1 - window, 0)
        assert read_tokens(reach, chunk) == min(pairs(reach, chunk), chunk.end_pos - first + whole[-1])
    decodes = [ChunkShape(Phase.DECODE, 1, at, True) for at in (3, 40)]
    known = (sum(of(reach, one) for one in decodes) for of in (read_tokens, pairs))
    assert Attended(reach).of(StepShape(decodes)) == (0, 0, *known)


def test_blocks_by_their_means_are_seen_with_what_makes_no_whole_one() -> None:
    """Qwen4-Exp: whole blocks of the budget, and behind them up to three positions; token by token."""
    budget, block = 12, 4
    reach = Chosen(budget + block - 1, block, shift=1)
    seen = 0
    for end in range(1, 60):
        whole, rest = divmod(end, block)
        seen += min(whole * block, budget) + rest
        assert reach.seen_before(end) == seen, end
