"""What adapters add to a step: their parameters, the sums of a shape, and the price of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import make_checkpoint
from diptych.control.loop import EngineCore
from diptych.cost.adapters import Loras
from diptych.cost.calibrated import CalibratedModel
from diptych.cost.components import cost_of
from diptych.cost.memory import capacity_of
from diptych.cost.setup import own_quant, setup_of
from diptych.cost.tables import model_spec
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import ConfigError
from diptych.ground.phase import Phase
from diptych.ground.request import AdapterRef, Request, SamplingParams
from diptych.ground.shape import AdapterShape, ChunkShape, StepShape
from diptych.ground.specs import KVSpec
from diptych.ground.step import ChunkResult, StepResult
from diptych.models.read import load_model_file
from diptych.sim.load import AdaptedLoad, UsersLoad, UsersSpec
from diptych.sim.service import Service, simulate
from diptych.workload import LengthRange

SMALL, LARGE = AdapterShape(0, 1000), AdapterShape(1, 5000)


@pytest.mark.parametrize(
    ("name", "rank", "parameters"), [("qwen2.5-1.5b", 16, 18_464_768), ("llama-3.1-8b", 16, 41_943_040)]
)
def test_an_adapter_has_as_many_parameters_as_peft_says(name: str, rank: int, parameters: int) -> None:
    """`print_trainable_parameters` of peft, all linear layers as targets."""
    assert Loras(count=1, rank=rank).parameters(model_spec(name)) == parameters


@given(st.lists(st.tuples(st.sampled_from([None, SMALL, LARGE]), st.integers(1, 9), st.booleans()), min_size=1))
def test_a_shape_sums_its_adapters_however_it_was_put_together(chunks) -> None:
    made = [
        ChunkShape(Phase.DECODE if decodes else Phase.PREFILL, 1 if decodes else n, 7, True, 2, adapter)
        for adapter, n, decodes in chunks
    ]
    step_by_step = StepShape(())
    for one in made:
        step_by_step = step_by_step.plus(one)
    for shape in (StepShape(made), step_by_step):
        assert shape.adapters == {one.adapter for one in made if one.adapter is not None}
        assert shape.adapted_products == sum(2 * one.new_tokens * one.adapter.parameters for one in made if one.adapter)


def test_decode_keeps_its_adapters_as_it_goes_on_and_with_drafts() -> None:
    """Both make new shapes beside the old one, and a chunk without its adapter is cheaper than it is."""
    shape = StepShape([ChunkShape(Phase.DECODE, 1, 5, True, 3, LARGE), ChunkShape(Phase.DECODE, 1, 9, True)])
    later = shape.later(4)
    assert (later.adapters, later.adapted_products) == (shape.adapters, 3 * 5000)
    assert later.shapes[0] == ChunkShape(Phase.DECODE, 1, 9, True, 3, LARGE)
    assert shape.with_drafts([2, 0]).adapted_products == 3 * 3 * 5000


def test_the_scheduler_says_which_adapter_each_chunk_has() -> None:
    """Its stall budget and the simulator priced a step of four adapters as one of none."""
    core = EngineCore(SchedulerConfig(max_step_tokens=64), BlockConfig(n_blocks=64, block_tokens=4), model_revision="m")
    for number in range(3):
        ref = AdapterRef(name="a", number=number, revision=str(number), n_parameters=100) if number else None
        core.submit(
            Request(
                request_id=str(number),
                prompt_token_ids=(1, 2, 3),
                sampling=SamplingParams(max_tokens=4),
                arrival_s=0.0,
                adapter=ref,
            )
        )
    for rows in (2 * 3, 2):  # the prompts, then one token of each
        plan, _ = core.begin_step(0.0)
        assert plan is not None
        assert plan.shape.adapters == {AdapterShape(1, 100), AdapterShape(2, 100)}
        assert plan.shape.adapted_products == rows * 100
        results = tuple(ChunkResult(seq_id=chunk.seq_id, token_ids=(5,)) for chunk in plan.chunks)
        core.end_step(plan, StepResult(step_id=plan.step_id, results=results, device_s=1.0, host_s=0.0), 1.0)


def test_sequences_are_dealt_over_the_adapters() -> None:
    model = model_spec("qwen2.5-0.5b")
    step = Loras(count=4, rank=8).spread(model, StepShape.decode(batch=10, context_tokens=100))
    assert sorted(one.count for one in step.shapes) == [2, 2, 3, 3]
    assert len(step.adapters) == 4
    assert step.adapted_products == 10 * Loras(count=4, rank=8).parameters(model)
    assert len(Loras(count=4).spread(model, StepShape.decode(batch=2, context_tokens=100)).adapters) == 2


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_all_ways_to_a_price_agree_and_count_an_adapter_once(phase: str) -> None:
    """A step's price is asked for in three ways; and what is read does not depend on how many rows have it."""
    setup = setup_of("qwen2.5-1.5b", "a100-80gb-sxm")
    time: CalibratedModel = setup.model_of_time()
    bare = (
        StepShape.decode(batch=16, context_tokens=256)
        if phase == "decode"
        else StepShape.prefill(batch=2, new_tokens=512)
    )
    one, four = (Loras(count=n).spread(setup.model, bare) for n in (1, 4))
    for shape in (one, four):
        assert time.predict(shape).total_s == pytest.approx(time.predict_s(shape))
    if phase == "decode":
        assert time.predict_run_s(four, 3) == pytest.approx([time.predict_s(four.later(step)) for step in range(3)])
    assert time.predict_s(bare) < time.predict_s(one) < time.predict_s(four)
    cost = cost_of(setup.model, four, quant=setup.quant, kv=KVSpec()).component("adapters")
    assert cost.flops == 2.0 * bare.n_tokens * 18_464_768
    assert cost.weight_bytes == 2.0 * len(four.adapters) * 18_464_768
    ours = cost_of(setup.model, four, quant=own_quant("int8"), kv=KVSpec(), is_ours=True).component("adapters")
    # what the engine held for four of rank 16: 84.2 MB
    assert phase == "prefill" or ours.weight_bytes == pytest.approx(84.2e6, rel=0.005)


@pytest.mark.parametrize("text", ["", "0", "4:", "4:0", "-1", "x", "4:16:2", "5000", "1:9999"])
def test_impossible_adapters_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--lora"):
        Loras.parse(text)
    assert Loras.parse("4:32") == Loras(count=4, rank=32)


def test_an_adapted_load_pays_for_its_adapters_and_users_keep_theirs() -> None:
    """Prefixes of two adapters are apart, so a conversation whose user changed adapters would never be found again."""
    spec = UsersSpec(
        n_users=6, n_requests=24, think_s=0.5, turns=4, message=LengthRange(low=40, high=60),
        output=LengthRange(low=10, high=20)
    )  # fmt: skip
    setup = setup_of("qwen2.5-1.5b", "a100-80gb-sxm")
    bare = simulate(Service.of(setup), UsersLoad(spec))
    loras = Loras(count=3, rank=64)
    adapted = simulate(
        Service.of(replace(setup, loras=loras)), AdaptedLoad(UsersLoad(spec), loras, loras.parameters(setup.model))
    )
    assert adapted.cached_tokens == bare.cached_tokens > 0
    assert bare.tpot_s is not None
    assert adapted.tpot_s is not None
    assert adapted.tpot_s.p50 > 1.03 * bare.tpot_s.p50  # 148 MB beside 3.1 GB are read for each row
    assert adapted.service.label == "1 x (qwen2.5-1.5b bf16 with 3 adapters of rank 64 on a100-80gb-sxm)"


def test_adapters_take_memory_from_the_cache() -> None:
    bare = setup_of("llama-3.1-8b", "l40s")
    many = replace(bare, loras=Loras(count=32, rank=64))
    held = 32 * 64 * 2_621_440 * 2.0
    free = [capacity_of(one, context_tokens=1, batch=1).free_kv_bytes for one in (bare, many)]
    assert free[0] - free[1] == pytest.approx(held)


@pytest.mark.parametrize(
    ("family", "takes_adapters"),
    [("glm5_next", True), ("glm_moe_dsa", True), ("deepseek_v4", True), ("mistral_large4", True), ("qwen4_exp", False)],
)
def test_an_index_takes_adapters_of_its_queries(family: str, takes_adapters: bool, tmp_path: Path) -> None:
    """Nobody asked for the price of adapters beside one that chooses by the means of keys, and it was a traceback."""
    spec = load_model_file(make_checkpoint(family, tmp_path))
    plain = replace(spec, layers=tuple(
        replace(layer, attention=None if layer.attention is None else replace(layer.attention, index=None))
        for layer in spec.layers))  # fmt: skip
    own = [layer.attention.own_index for layer in spec.layers if layer.attention is not None]
    assert any(own)
    more = Loras(count=1, rank=1).parameters(spec) - Loras(count=1, rank=1).parameters(plain)
    assert (more > 0) == takes_adapters
