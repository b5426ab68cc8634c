"""Layouts beyond tensor parallel: what must hold of any formula for them."""

from __future__ import annotations

import pytest

from diptych.cost.adapters import Loras
from diptych.cost.layout import Layout
from diptych.cost.memory import capacity_of
from diptych.cost.planner import phase_plan
from diptych.cost.setup import setup_of
from diptych.ground.errors import ConfigError
from diptych.ground.shape import StepShape

DECODE = StepShape.decode(batch=64, context_tokens=2048)
PREFILL = StepShape.prefill(batch=16, new_tokens=2048)


def setup(model="deepseek-v3", *, tp=1, device="h200-141gb-sxm", weights="fp8", **layout):
    return setup_of(model, device, weights=weights, tp=tp, layout=Layout(**layout))


def seconds(one, work=DECODE):
    return one.model_of_time().predict_s(work)


def test_attention_data_parallel_keeps_each_latent_once():
    """Tensor parallel copies MLA's latents to all eight devices; eight groups hold eight times as many sequences."""
    split, groups = setup(tp=8), setup(dp=8, ep=8)
    assert split.n_devices == groups.n_devices == 8
    tokens = [capacity_of(one, context_tokens=4096, batch=1).kv_tokens for one in (split, groups)]
    weights = [capacity_of(one, context_tokens=4096, batch=1).weight_bytes for one in (split, groups)]
    assert weights[0] < weights[1] < 1.5 * weights[0], "attention whole on each device, experts shared"
    assert tokens[1] > 4 * tokens[0]
    long = StepShape.decode(batch=64, context_tokens=60_000)
    assert seconds(groups, long) < seconds(split, long), "and each reads the latents of its own sequences alone"


def test_a_pipeline_answers_more_and_none_sooner():
    """One sequence gains nothing from more stages, many do; the weights of a device are a stage's."""
    one, two = setup("llama-3.1-70b", tp=4, weights="bf16"), setup("llama-3.1-70b", tp=4, weights="bf16", pp=2)
    single = StepShape.decode(batch=1, context_tokens=2048)
    assert seconds(two, single) > seconds(one, single)
    assert 0.45 < seconds(two, PREFILL) / seconds(one, PREFILL) < 0.65
    alone = StepShape.prefill(batch=1, new_tokens=2048)
    assert seconds(two, alone) > seconds(one, alone)
    assert seconds(setup(dp=8, ep=8), alone) > seconds(setup(tp=8), alone), (
        "one group reads a prompt, all cards split it"
    )
    halves = [capacity_of(each, context_tokens=4096, batch=1) for each in (one, two)]
    assert halves[1].weight_bytes == pytest.approx(halves[0].weight_bytes / 2)
    assert halves[1].kv_tokens > 2 * halves[0].kv_tokens


@pytest.mark.parametrize("batch", [1, 2, 16, 64])
def test_nothing_is_predicted_below_the_roofline_of_its_layout(batch):
    """A part of a pipeline's rows reads fewer experts than all of them: the bound had those of all."""
    for pp in (1, 2, 4):
        plan = phase_plan(
            setup("mixtral-8x7b", weights="bf16", pp=pp), StepShape.decode(batch=batch, context_tokens=600)
        )
        assert plan.bound_s < plan.predicted_s, pp


def test_the_busiest_experts_decide():
    """Few tokens fall unevenly on the groups, many evenly; never worse than all on one."""
    whole, model = Layout(ep=8), setup(tp=8).model
    assert Layout().crowding(model, 64) == 1.0
    assert 8.0 >= whole.crowding(model, 1) > whole.crowding(model, 64) > whole.crowding(model, 4096) > 1.0
    assert whole.crowding(model, 1e9) == pytest.approx(1.0, abs=1e-3)
    assert seconds(setup(tp=8, ep=8), PREFILL) >= seconds(setup(tp=8), PREFILL)


def test_the_group_with_most_experts_to_read_decides():
    """Of 30 experts that four streams ask for on eight devices one has to read six, not four, and all its own at most."""
    whole, model = Layout(ep=8), setup(tp=8).model
    assert Layout().most_experts(model, 30.0) == 30.0
    factors = [whole.most_experts(model, read) / read for read in (1.0, 8.0, 30.0, 128.0, 256.0)]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] < 8.0
    assert factors[2] == pytest.approx(1.69, abs=0.01)
    assert factors[-1] == 1.0
    few, many = (StepShape.decode(batch=batch, context_tokens=1024) for batch in (4, 1024))
    ratios = [seconds(setup(tp=8, ep=8), step) / seconds(setup(tp=8), step) for step in (few, many)]
    assert ratios[0] > 1.1 > 1.05 > ratios[1]


def test_what_no_row_was_fitted_to_is_less_sure():
    """The interval widens, and the gap says why."""
    for layout in ({"ep": 8}, {"dp": 2, "ep": 4}, {"pp": 2}):
        tp = 8 if layout.get("dp", 1) == 1 else 4
        plain, other = (one.model_of_time() for one in (setup(tp=tp), setup(tp=tp, **layout)))
        widths = [cost.high_s / cost.low_s for cost in (plain.predict(DECODE), other.predict(DECODE))]
        assert widths[1] > widths[0]
        assert "layout" in {gap.axis for gap in other.gaps(DECODE)}
        assert other.predict(DECODE).total_s == pytest.approx(other.predict_s(DECODE))


@pytest.mark.parametrize(
    ("model", "tp", "layout", "words"),
    [
        ("llama-3.1-8b", 1, {"ep": 2}, "no experts to be parallel"),
        ("llama-3.1-8b", 1, {"dp": 2}, "attention-data parallel 2 of it is as many copies"),
        ("deepseek-v3", 8, {"ep": 3}, "expert parallel is 3; it must divide the 8 devices"),
        ("deepseek-v3", 8, {"pp": 99}, "has 61 layers; they cannot stand on 99 stages"),
        ("deepseek-v3", 8, {"pp": 0}, "pipeline parallel degree is 0"),
        ("deepseek-v3", 8, {"dp": 4}, "at most 8"),
    ],
)
def test_impossible_layouts_are_refused(model, tp, layout, words):
    """What, the number, the limit."""
    with pytest.raises(ConfigError, match=words):
        setup(model, tp=tp, **layout)


def test_devices_without_a_link_have_no_stages():
    """`--pp 2` on a laptop took a link of one byte a second: 1.8 years to the first token."""
    with pytest.raises(ConfigError, match="m2-max-38 has no link to a second device; pipeline parallel 2"):
        setup("llama-3.1-8b", device="m2-max-38", weights="bf16", pp=2)
    with pytest.raises(ConfigError, match="tensor times attention-data parallel is 16; at most 8"):
        setup(tp=2, dp=8, ep=8)
    assert setup("llama-3.1-8b", device="h100-80gb-sxm", weights="bf16", tp=8, pp=4).n_devices == 32


def test_a_sequence_that_fits_no_stage_alone_fits_all_of_them():
    """Each stage holds its layers of it: 43 GB of keys and values on eight devices with 20 GB to spare each."""
    stages = setup("llama-3.1-70b", device="l40s", weights="bf16", pp=8)
    found = capacity_of(stages, context_tokens=131_072, batch=1)
    assert found.free_kv_bytes < 131_072 * 327_680 < 8 * found.free_kv_bytes
    assert found.max_batch == 8 * found.free_kv_bytes // (131_072 * 327_680)
    assert found.is_fitting
    seven, eight = (capacity_of(setup(dp=2, ep=2, tp=4), context_tokens=4096, batch=batch) for batch in (7, 8))
    assert seven.max_context_tokens == eight.max_context_tokens < 163_840, (
        "one of two groups has four of seven sequences"
    )


def test_a_stage_holds_the_adapters_of_its_layers():
    """All adapters were counted on every stage."""
    one, two = (
        setup_of("llama-3.1-70b", "h100-80gb-sxm", tp=4, layout=Layout(pp=pp), loras=Loras(count=8, rank=64))
        for pp in (1, 2)
    )
    assert two.adapter_bytes == pytest.approx(one.adapter_bytes / 2)


def test_what_was_priced_before_changes_no_price():
    """Eight rows of eight sequences keep eight groups at work, eight of two sequences only two: one was remembered as both."""
    fresh, used = setup(dp=8, ep=8).model_of_time(), setup(dp=8, ep=8).model_of_time()
    drafted = StepShape.decode(batch=2, context_tokens=512).with_drafts([3])
    assert drafted.n_tokens == 8
    used.predict_s(StepShape.decode(batch=8, context_tokens=512))
    assert used.predict_s(drafted) == fresh.predict_s(drafted) == pytest.approx(fresh.predict(drafted).total_s)
