"""The planner's answers: crossovers, memory, what-ifs, chunks, pools."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.cost.adapters import Loras
from diptych.cost.advice import chunk_for, pools_for, speculation, speculation_advice, what_ifs
from diptych.cost.components import BF16, cost_of
from diptych.cost.drafts.acceptance import chances_at, expected_tokens
from diptych.cost.exchange import gathered
from diptych.cost.kv_bytes import kv_bytes_of_context, kv_bytes_per_token
from diptych.cost.layout import Layout
from diptych.cost.memory import activation_bytes_of, capacity_of
from diptych.cost.parameters import weight_bytes_stored
from diptych.cost.planner import Question, compute_bound_batch, make_plan, quadratic_prompt_tokens
from diptych.cost.setup import find_model, setup_of
from diptych.cost.tables import model_spec
from diptych.ground.errors import ConfigError
from diptych.ground.phase import Phase
from diptych.ground.shape import ChunkShape, StepShape
from diptych.ground.specs import Bottleneck, KVSpec


def test_a_plan_answers_for_both_phases():
    """Prefill waits for arithmetic, decode for memory, and the prediction is slower than the bound."""
    plan = make_plan(setup_of("llama-3.1-8b", "a100-80gb-sxm"), Question())
    assert (plan.prefill.bound, plan.decode.bound) == (Bottleneck.COMPUTE, Bottleneck.MEMORY)
    for report in (plan.prefill, plan.decode):
        assert report.bound_s < report.low_s < report.predicted_s < report.high_s
        assert sum(line.share for line in report.components) == pytest.approx(1.0)
    assert plan.decode.predicted_s == pytest.approx(
        plan.weights_s + plan.kv_s + plan.decode.launch_s + plan.decode.link_s
    )
    assert plan.sensitivity.ttft_by_flops < -0.8 < plan.sensitivity.ttft_by_bandwidth
    assert plan.sensitivity.tpot_by_bandwidth < -0.5


@pytest.mark.parametrize(
    ("device", "batch"),
    [
        ("a100-80gb-sxm", 153), ("h100-80gb-sxm", 295), ("h200-141gb-sxm", 206), ("mi300x", 247), ("tpu-v5e", 240),
        ("tpu-v6e", 560),
    ],
)  # fmt: skip
def test_linear_crossover_equals_the_reference(device, batch):
    """B* = F w / (2 M) for 16-bit weights."""
    assert compute_bound_batch(setup_of("llama-3.1-8b", device)) == pytest.approx(batch, abs=1)


def test_crossover_shrinks_with_the_weights_and_grows_with_experts():
    """int4 weights with 16-bit compute turn compute bound at a third; a mixture needs many more rows."""
    dense = setup_of("llama-3.1-8b", "a100-80gb-sxm")
    small = compute_bound_batch(dense.with_weights("int4"))
    assert small == pytest.approx(153 * 0.625 / 2, rel=0.01)
    mixture = compute_bound_batch(setup_of("qwen3-30b-a3b", "a100-80gb-sxm"))
    assert mixture > 5 * 153


def test_kv_crossover_and_quadratic_prompt_equal_the_reference():
    """Llama-3.1-8B: KV equals weights at batch 56 (T = 2048); attention equals linear work at about 53k tokens."""
    setup = setup_of("llama-3.1-8b", "a100-80gb-sxm")
    plan = make_plan(setup, Question(context_tokens=2048))
    assert round(plan.kv_equals_weights_batch) == 56
    assert quadratic_prompt_tokens(setup) == pytest.approx(53_248)


@pytest.mark.parametrize("context", [256, 4096, 32_768])
def test_a_pool_has_room_for_as_many_tokens_as_fit_sequences_of_that_length(context):
    """Layers with windows were counted as of sequences of 4,096 tokens whatever was asked: twice too many of short ones."""
    setup = setup_of("gemma-3-27b", "h200-141gb-sxm")
    capacity = capacity_of(setup, context_tokens=context, batch=1)
    assert capacity.kv_tokens // context == capacity.max_batch > 3
    plain = setup_of("llama-3.1-8b", "h200-141gb-sxm")
    pools = {capacity_of(plain, context_tokens=tokens, batch=1).kv_tokens for tokens in (100, context)}
    assert len(pools) == 1


def test_capacity_is_tight():
    """The largest batch fits and one more does not; likewise the longest context, in whole blocks."""
    setup = setup_of("llama-2-13b", "a100-40gb-sxm")
    capacity = capacity_of(setup, context_tokens=1000, batch=4)
    each = kv_bytes_of_context(setup.model, setup.kv, 1000)
    assert capacity.max_batch * each <= capacity.free_kv_bytes < (capacity.max_batch + 1) * each
    longest = kv_bytes_of_context(setup.model, setup.kv, capacity.max_context_tokens)
    above = kv_bytes_of_context(setup.model, setup.kv, capacity.max_context_tokens + 1)
    assert 4 * longest <= capacity.free_kv_bytes < 4 * above
    assert each == 1008 * 819_200


@pytest.mark.parametrize(
    ("name", "tp"), [("qwen2.5-7b", 28), ("deepseek-v3", 8), ("qwen3-30b-a3b", 16), ("qwen3-8b", 4)]
)
def test_a_device_holds_the_weights_that_it_reads(name, tp):
    """Those that stand on every device were counted once: K and V of few heads, what makes latents, routers and norms."""
    model, every = model_spec(name), StepShape.decode(batch=65_536, context_tokens=1)  # each expert has rows
    read = cost_of(model, every, quant=BF16, kv=KVSpec(), tp=tp).weight_bytes
    table = 0.0 if model.is_tied else model.vocab_size * model.hidden * 2.0 / tp
    assert weight_bytes_stored(model, BF16, tp=tp) == pytest.approx(read + table, rel=1e-4)


def test_rows_of_a_mixture_are_held_once_for_each_expert():
    """Its buffers were those of one expert: 8,192 tokens of 8 experts each need 0.5 GB on one device, and 0.1 was counted."""
    setup = setup_of("qwen3-30b-a3b", "h100-80gb-sxm")
    logits = 256 * setup.model.vocab_size * 4
    assert activation_bytes_of(setup) - logits == 8192 * (3 * 2048 + 8 * (2048 + 2 * 768)) * 2
    sliced, whole, apart = (
        activation_bytes_of(replace(setup, tp=tp, layout=Layout(**layout)))
        for tp, layout in ((4, {}), (4, {"ep": 4}), (1, {"dp": 4, "ep": 4}))
    )
    assert sliced - logits / 4 == 8192 * (3 * 2048 + 8 * (2048 + 2 * 768 / 4)) * 2
    assert whole - logits / 4 == 8192 * (3 * 2048 + 8 / 4 * (2048 + 2 * 768)) * 2
    assert apart == activation_bytes_of(setup)  # as many tokens in each of four groups


def test_a_model_that_does_not_fit_is_said_so():
    """70B in 16 bit needs 141 GB: one A100 holds no sequence, four do."""
    one = capacity_of(setup_of("llama-3.1-70b", "a100-80gb-sxm"), context_tokens=1024, batch=1)
    four = capacity_of(setup_of("llama-3.1-70b", "a100-80gb-sxm", tp=4), context_tokens=1024, batch=1)
    assert (one.is_fitting, one.max_batch, one.max_context_tokens) == (False, 0, 0)
    assert four.is_fitting


def test_what_ifs_change_what_they_should():
    """Fewer weight bytes speed decode; KV int8 doubles the batch but for its scales; an impossible split says why."""
    question = Question(batch=8)
    found = {
        entry.change.split(" (")[0]: entry for entry in what_ifs(setup_of("qwen2.5-7b", "a100-80gb-sxm"), question)
    }
    asked = found["as asked"]
    assert found["weights int4"].tpot_s < found["weights int8"].tpot_s < asked.tpot_s
    assert found["kv int8"].max_batch == pytest.approx(2 * asked.max_batch / (1 + 4 / 128), abs=1)
    assert found["tensor parallel 4"].tpot_s < found["tensor parallel 2"].tpot_s < asked.tpot_s
    assert "cannot be split evenly over 8" in found["tensor parallel 8"].obstacle
    laptop = {entry.change: entry for entry in what_ifs(setup_of("qwen2.5-7b", "m2-max-38"), question)}
    assert "no link" in laptop["tensor parallel 2"].obstacle


def test_a_cache_met_in_bytes_is_offered_where_it_was_measured():
    """The engine's own format, of which a profile knows how fast long prompts become."""
    for known, offered in (({}, False), ({"int8x8": 0.6}, True)):
        setup = setup_of("qwen2.5-7b", "a100-80gb-sxm")
        prefill = replace(setup.calibration.prefill, attention_ef_of=known)
        found = what_ifs(replace(setup, calibration=replace(setup.calibration, prefill=prefill)), Question(batch=8))
        assert ("kv int8x8" in {entry.change for entry in found}) == offered


def test_speculation_follows_the_geometric_series():
    """Accepted tokens per verify step, and the limits: nothing accepted costs, all accepted pays k + 1."""
    assert expected_tokens(chances_at(0.7, 4)) == pytest.approx(1 + 0.7 + 0.49 + 0.343 + 0.2401)
    assert expected_tokens(chances_at(1.0, 4)) == 5
    setup = setup_of("llama-3.1-70b", "h100-80gb-sxm", tp=4)
    useless = speculation(setup, Question(acceptance=0.0), 1)
    perfect = speculation(setup, Question(acceptance=1.0, draft_cost=0.0), 1)
    assert useless.speedup < 1.0
    assert (useless.depth, useless.best_speedup) == (0.0, 1.0), "the engine would draft none"
    assert 4.0 < perfect.speedup <= 5.0
    assert perfect.depth == 16
    assert perfect.best_speedup > perfect.speedup


def test_verify_step_reads_each_cache_once():
    """k + 1 rows of one sequence share its KV: a verify step at a long context is far from k + 1 decode steps."""
    setup = setup_of("llama-2-7b", "a100-80gb-sxm")
    entry = speculation(setup, Question(prompt_tokens=3000, draft_tokens=7), 1)
    plain_s = setup.model_of_time().predict(StepShape.decode(batch=1, context_tokens=3128)).total_s
    assert entry.verify_s < 1.15 * plain_s


@pytest.mark.parametrize(("acceptance", "draft_cost"), [(0.8, 0.05), (0.5, 0.05), (0.5, 0.2)])
def test_speculation_stops_paying_at_a_batch(acceptance, draft_cost):
    """Where rows cost what they give: one sequence more and the same drafts lose."""
    setup = setup_of("llama-3.1-8b", "l40s")
    question = Question(draft_tokens=4, acceptance=acceptance, draft_cost=draft_cost, context_tokens=256)
    most = speculation_advice(setup, question).most_batch
    assert 8 < most < 4096
    assert speculation(setup, question, most).speedup > 1.0 >= speculation(setup, question, most + 1).speedup
    table = speculation_advice(setup, question).table
    assert [one.batch for one in table] == [1, 4, 16, 64]
    assert all(one.best_speedup >= max(1.0, 0.95 * one.speedup) for one in table if one.batch <= 16)
    assert [one.speedup for one in table] == sorted((one.speedup for one in table), reverse=True)
    assert speculation_advice(setup, replace(question, draft_cost=0.9)).most_batch == 0
    assert speculation_advice(setup, replace(question, context_tokens=16000)).most_batch is None, (
        "bound by reading caches"
    )


@pytest.mark.parametrize("budget_s", [0.03, 0.05, 0.2])
def test_chunk_is_the_largest_inside_the_stall_budget(budget_s):
    """A chunk one token longer would break the budget; this is what the scheduler's search must find too."""
    setup = setup_of("llama-3.1-8b", "a100-80gb-sxm")
    question = Question(batch=16, prompt_tokens=4000, stall_budget_s=budget_s)
    entry = chunk_for(setup, question)
    assert entry.step_s <= budget_s
    wider = chunk_for(setup, replace(question, stall_budget_s=budget_s * 1.05))
    assert wider.chunk_tokens >= entry.chunk_tokens
    if entry.chunk_tokens < 4000:
        assert entry.whole_step_s > budget_s
        assert entry.ttft_s > entry.whole_step_s


def test_an_impossible_stall_budget_gives_no_chunk():
    """When a decode step alone is too slow the answer is 0 and a reason, not 1."""
    entry = chunk_for(setup_of("llama-2-13b", "a100-80gb-sxm"), Question(batch=4, stall_budget_s=0.001))
    assert entry.chunk_tokens == 0
    assert entry.decode_only_s > 0.001


@pytest.mark.parametrize("cached", [0, 1000])
def test_kv_reread_of_chunks_is_what_each_finds_before_it(cached):
    """A series for lengths that chunks divide said 322 MB where four chunks read 474, and left out what was cached."""
    setup = setup_of("llama-3.1-8b", "a100-80gb-sxm")
    entry = chunk_for(setup, Question(batch=1, prompt_tokens=4096, cached_tokens=cached, stall_budget_s=0.08))
    starts = range(cached, 4096, entry.chunk_tokens)
    assert (4096 - cached) % entry.chunk_tokens
    assert entry.kv_reread_bytes == 131_072 * sum(starts[1:])


def test_chunks_read_their_window_again_and_no_more():
    """Every layer was taken to read all that stands before it: of Gemma 3 five in six see 1,024 tokens."""
    setup = setup_of("gemma-3-27b", "h100-80gb-sxm")
    entry = chunk_for(setup, Question(prompt_tokens=32_768, stall_budget_s=0.1))
    all_of_it = kv_bytes_per_token(setup.model, setup.kv) * sum(range(0, 32_768, entry.chunk_tokens))
    assert 0.1 * all_of_it < entry.kv_reread_bytes < 0.5 * all_of_it


def test_a_prompt_of_very_many_chunks_is_summed_by_some(monkeypatch):
    """A million tokens by the sixteen took a minute; what lies between evenly spread chunks is as those are."""
    setup = setup_of("llama-3.1-8b", "a100-80gb-sxm")
    question = Question(prompt_tokens=40_000, stall_budget_s=0.021)
    every = chunk_for(setup, question)
    assert 500 < len(range(0, 40_000, every.chunk_tokens)) < 2048
    monkeypatch.setattr("diptych.cost.advice.MOST_CHUNKS", 64)
    few = chunk_for(setup, question)
    assert few.ttft_s != every.ttft_s
    assert few.ttft_s == pytest.approx(every.ttft_s, rel=0.005)
    assert few.kv_reread_bytes == pytest.approx(every.kv_reread_bytes, rel=0.005)


def test_pools_follow_prefill_tax_and_traffic():
    """Little traffic never splits; heavy prompts at high traffic do; the cache to move is the prompt's KV."""
    setup = setup_of("llama-3.1-70b", "h100-80gb-sxm", tp=4)
    question = Question(prompt_tokens=4096, output_tokens=200, batch=32, requests_per_s=20.0)
    busy = pools_for(setup, question)
    idle = pools_for(setup, replace(question, requests_per_s=0.1))
    assert busy.advice.startswith("two pools")
    assert idle.advice.startswith("one pool")
    assert busy.kv_bytes == 4096 * 327_680
    assert busy.ratio == pytest.approx(busy.prefill_instances / busy.decode_instances)
    assert busy.tax_share == pytest.approx(32 / 200 * busy.prefill_s / (busy.decode_step_s + 32 / 200 * busy.prefill_s))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"batch": 1_000_000}, "batch is 1000000; it must be at most 65536"),
        ({"prompt_tokens": -5}, "prompt_tokens is -5"),
        ({"cached_tokens": 2048}, "cached_tokens is 2048"),
        ({"acceptance": 1.5}, "acceptance is 1.5"),
        ({"stall_budget_s": 0.0}, "stall_budget_s is 0.0"),
        ({"requests_per_s": float("nan")}, "requests_per_s is nan"),
    ],
)
def test_impossible_questions_are_refused(change, words):
    """Each with its name and its number."""
    with pytest.raises(ConfigError, match=words):
        Question(**change)


def test_context_beyond_the_model_is_refused():
    """Llama-2 ends at 4096 tokens; a plan for 8192 would be about another model."""
    with pytest.raises(ConfigError, match="at most 4096"):
        make_plan(setup_of("llama-2-7b", "a100-80gb-sxm"), Question(prompt_tokens=8192))
    with pytest.raises(ConfigError, match="the context is 4156 tokens, 3900 of the prompt and 256 of the answer"):
        make_plan(setup_of("llama-2-7b", "a100-80gb-sxm"), Question(prompt_tokens=3900))  # its middle is at 4,028
    make_plan(setup_of("llama-2-7b", "a100-80gb-sxm"), Question(prompt_tokens=3840))
    make_plan(setup_of("llama-2-7b", "a100-80gb-sxm"), Question(prompt_tokens=2048, context_tokens=4096))


def test_cached_tokens_shorten_the_prefill():
    """A prefix hit leaves only the new tokens to compute, over the whole context."""
    setup = setup_of("llama-3.1-8b", "a100-80gb-sxm")
    whole = make_plan(setup, Question(prompt_tokens=4096)).prefill
    hit = make_plan(setup, Question(prompt_tokens=4096, cached_tokens=3072)).prefill
    assert hit.new_tokens == 1024
    assert hit.flops < whole.flops / 3
    assert hit.predicted_s < whole.predicted_s / 2


def test_the_bundled_model_is_known():
    """`diptych plan` without a model is about the one in the box."""
    assert find_model("bundled").n_layers > 0


@pytest.mark.parametrize(
    ("hub", "table"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("google/gemma-3-12b-it", "gemma-3-12b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3.1-8b"),
    ],
)
def test_hub_names_find_their_row(hub, table):
    """The owner and endings like -Instruct do not change the shape."""
    assert find_model(hub).name == table


def test_speculation_verifies_rows_of_all_adapters():
    """Drafts were priced as if all sequences had the first of four adapters, and the last batch as if they had none."""
    plain, adapted = (
        setup_of("llama-3.1-8b", "l40s", loras=None if count is None else Loras(count=count, rank=256))
        for count in (None, 16)
    )
    question = Question(batch=16, acceptance=0.8, context_tokens=256)
    step = adapted.asked(StepShape((ChunkShape(Phase.DECODE, 5, 255, True, 16),)))
    assert speculation(adapted, question, 16).verify_s == pytest.approx(adapted.model_of_time().predict_s(step))
    assert speculation_advice(adapted, question).most_batch != speculation_advice(plain, question).most_batch


def test_gathering_is_told_of_the_weights_that_are_asked_about():
    """int8 rows are shared in fp32: the note always said what bf16 weights gather."""
    notes = [" ".join(make_plan(setup_of("llama-3.1-8b", "h100-80gb-sxm", weights=name, tp=2), Question()).notes)
             for name in ("bf16", "int8")]  # fmt: skip
    model = find_model("llama-3.1-8b")
    for note, name in zip(notes, ("bf16", "int8"), strict=True):
        assert f"{gathered(model, tp=2, weights=name).row_bytes / 1e3:,.0f} kB" in note
    assert notes[0] != notes[1]
