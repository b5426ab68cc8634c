"""The calibrated model: one formula for a plan and for a phase, exact limits, fits that recover what made the data."""

from __future__ import annotations

import random
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.cost.calibrated import CalibratedModel, pnorm
from diptych.cost.calibration import Calibration, Constants
from diptych.cost.components import cost_of
from diptych.cost.fitting.fit import NO_RESIDUAL, Free, StackForm, fit, predicted_s, residual_of
from diptych.cost.fitting.rows import PublishedRow
from diptych.cost.roofline import roofline
from diptych.cost.stacks import calibration_for
from diptych.cost.tables import device_spec, model_spec, quant_spec
from diptych.ground.phase import Phase
from diptych.ground.shape import ChunkShape, StepShape
from diptych.ground.specs import KVSpec
from diptych.ground.step import Chunk, StepPlan

PERFECT = Constants(
    eb=MappingProxyType({"other": 1.0}), ef=MappingProxyType({"other": 1.0}), expert_ef=MappingProxyType({"bf16": 1.0}),
    p=200.0, kv_eb=1.0, attention_ef=1.0,
)  # fmt: skip


def calibration(constants: Constants) -> Calibration:
    return Calibration(
        name="test", prefill=constants, decode=constants, prefill_residual=NO_RESIDUAL,
        decode_residual=NO_RESIDUAL, source="test",
    )  # fmt: skip


def predictor(model: str, device: str = "a100-80gb-sxm", *, constants: Constants = PERFECT, weights="bf16", tp=1):
    return CalibratedModel(
        model_spec(model), device_spec(device), quant_spec(weights), calibration=calibration(constants), tp=tp
    )


def random_plan(rng: random.Random, n_chunks: int) -> StepPlan:
    chunks = []
    for seq_id in range(n_chunks):
        tokens = 1 if rng.random() < 0.7 else rng.randint(2, 600)
        start = rng.randint(0, 5000)
        chunks.append(
            Chunk(
                seq_id=seq_id, phase=Phase.DECODE if tokens == 1 else Phase.PREFILL, start_pos=start,
                token_ids=(7,) * tokens, first_new_block=0, new_block_ids=(), samples=rng.random() < 0.8,
            )
        )  # fmt: skip
    return StepPlan(step_id=0, chunks=tuple(chunks))


@pytest.mark.parametrize("model", ["llama-3.1-8b", "mixtral-8x7b", "gemma-3-4b", "deepseek-v2-lite", "gpt-oss-20b"])
@pytest.mark.parametrize("tp", [1, 4])
def test_plan_and_workload_give_the_same_time(model, tp):
    """The scheduler's quick path and the planner's full path must be one model, not two."""
    rng = random.Random(3)
    constants = Constants(step_s=1e-4, layer_s=2e-5, sequence_s=3e-6, allreduce_s=5e-6, p=2.5, launch_p=1.5)
    model_of_time = predictor(model, constants=constants, tp=tp)
    for n_chunks in (1, 2, 7, 40):
        plan = random_plan(rng, n_chunks)
        full = model_of_time.predict(plan.shape).total_s
        assert model_of_time.predict_s(plan.shape) == pytest.approx(full, rel=1e-9)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-4b", "deepseek-v2-lite"])
def test_a_shape_that_was_put_together_costs_what_it_holds(model):
    """The quick path remembers the base of a bisection; a stale base would be a wrong price."""
    rng = random.Random(4)
    model_of_time = predictor(model, constants=Constants(step_s=1e-4, p=2.5))
    for _ in range(5):
        shape = random_plan(rng, rng.randint(1, 9)).shape
        for _ in range(6):
            probes = [shape.plus(chunk) for chunk in random_plan(rng, 4).shape.shapes]
            for probe in probes:
                assert model_of_time.predict_s(probe) == pytest.approx(model_of_time.predict(probe).total_s, rel=1e-9)
            shape = rng.choice(probes)


@pytest.mark.parametrize(
    "work", [StepShape.prefill(batch=1, new_tokens=4096), StepShape.decode(batch=4, context_tokens=900)]
)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "gemma-2-9b"])
def test_perfect_constants_give_the_roofline(model, work):
    """With every fraction 1 and no launches the model must fall back to the bound (norms' few bytes apart)."""
    predicted = predictor(model).predict(work).total_s
    bound = roofline(
        cost_of(model_spec(model), work, quant=quant_spec("bf16"), kv=KVSpec()),
        device_spec("a100-80gb-sxm"),
        quant_spec("bf16"),
    ).total_s
    # components are grouped before the maximum is taken, so the model may only be lower, and hardly
    assert predicted == pytest.approx(bound, rel=0.03)
    assert predicted <= bound * 1.001


@given(a=st.floats(0, 10), b=st.floats(0, 10), p=st.floats(1, 60))
def test_pnorm_lies_between_maximum_and_sum(a, b, p):
    """The p-norm joins compute and memory: never less than either, never more than both."""
    joined = pnorm(a, b, p)
    assert max(a, b) * (1 - 1e-12) <= joined <= (a + b) * (1 + 1e-12)


@pytest.mark.parametrize(("model", "device"), [("llama-3.1-8b", "h100-80gb-sxm"), ("gpt-oss-20b", "h100-80gb-sxm")])
def test_a_run_of_decode_steps_costs_what_its_steps_cost(model, device):
    """To the bit, with and without windows: the simulator takes runs for its steps."""
    hardware = device_spec(device)
    predicted = CalibratedModel(model_spec(model), hardware, quant_spec("bf16"), calibration=calibration_for(hardware))
    shape = StepShape([ChunkShape(Phase.DECODE, 1, start, True) for start in (5, 700, 121, 9000)])
    assert predicted.predict_run_s(shape, 40) == [predicted.predict_s(shape.later(step)) for step in range(40)]


def test_mixed_step_is_cheaper_than_its_two_halves():
    """One GEMM over all rows: decode rows ride along on the prompt's weight pass (aiconfigurator #1150)."""
    model_of_time = predictor("llama-3.1-8b", constants=Constants(layer_s=5e-5))
    prompt = StepShape.prefill(batch=1, new_tokens=256)
    decode = StepShape.decode(batch=8, context_tokens=1000)
    both = model_of_time.predict(prompt.plus(decode)).total_s
    apart = model_of_time.predict(prompt).total_s + model_of_time.predict(decode).total_s
    assert both < 0.75 * apart


def test_decode_slope_over_context_is_kv_bytes_over_bandwidth():
    """The lab reads the achieved KV bandwidth off this line."""
    model_of_time = predictor("llama-3.1-8b", constants=replace(PERFECT, kv_eb=0.5))
    times = [model_of_time.predict(StepShape.decode(batch=2, context_tokens=t)).total_s for t in (1000, 2000, 3000)]
    slope = (times[1] - times[0]) / 1000
    assert slope == pytest.approx(2 * 131_072 / (0.5 * 2.039e12), rel=1e-6)
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=1e-9)


def test_parts_add_up_to_the_total_and_the_interval_holds_it():
    """Where the time goes must account for all of it, also where launches hide behind the device."""
    device = device_spec("h100-80gb-sxm")
    for stack in ("gpt-fast", "vllm-2023", "tensorrt-llm"):
        model_of_time = CalibratedModel(
            model_spec("llama-2-70b"),
            device,
            quant_spec("bf16"),
            calibration=calibration_for(device, stack=stack),
            tp=4,
        )
        for work in (StepShape.prefill(batch=1, new_tokens=700), StepShape.decode(batch=8, context_tokens=700)):
            step = model_of_time.predict(work)
            assert sum(step.parts_s.values()) == pytest.approx(step.total_s)
            assert step.low_s < step.total_s < step.high_s


def row(model: str, work: StepShape, measured_s: float, *, tp: int = 1, quant: str = "bf16") -> PublishedRow:
    phase = Phase.DECODE if work.shapes[0].is_decode else Phase.PREFILL
    return PublishedRow(
        stack="made", device="a100-80gb-sxm", model=model, quant=quant, tp=tp, phase=phase, work=work,
        measured_s=measured_s, source="made up",
    )  # fmt: skip


def test_fit_recovers_the_constants_that_made_the_data():
    """Rows generated from known constants must give them back, with one wild row not bending them much."""
    truth = Constants(
        layer_s=60e-6, allreduce_s=9e-6, p=3.0, eb=MappingProxyType({"other": 0.8, "bf16": 0.7, "int8": 0.55})
    )
    blank = [
        row(model, StepShape.decode(batch=1, context_tokens=300), 1.0, tp=tp, quant=quant)
        for model in ("llama-2-7b", "llama-3.1-8b", "llama-2-70b", "qwen3-0.6b")
        for tp in (1, 2, 4)
        for quant in ("bf16", "int8")
    ]
    rows = [replace(entry, measured_s=predicted_s(entry, truth)) for entry in blank]
    rows.append(replace(rows[0], measured_s=rows[0].measured_s * 3.0))
    form = StackForm(
        stack="made",
        phase=Phase.DECODE,
        fixed=Constants(p=3.0),
        free=(
            Free(path="layer_s", start=20e-6),
            Free(path="allreduce_s", start=3e-6),
            Free(path="eb.bf16", start=0.9, limits=(0.02, 1.0)),
            Free(path="eb.int8", start=0.9, limits=(0.02, 1.0)),
        ),
    )
    found = fit(form, rows)
    assert found.layer_s == pytest.approx(60e-6, rel=0.1)
    assert found.eb["bf16"] == pytest.approx(0.7, rel=0.05)
    assert found.eb["int8"] == pytest.approx(0.55, rel=0.05)
    assert found.allreduce_s == pytest.approx(9e-6, rel=0.2)


def test_fit_reproduces_distserve_lines():
    """Oracle: step times generated from DistServe's published constants are fitted within a tenth."""
    prefill = [(n, 18.10 + 0.10191 * n + 7.12e-6 * n * n) for n in (64, 256, 512, 1024, 2048)]
    rows = [row("opt-13b", StepShape.prefill(batch=1, new_tokens=n), ms / 1e3) for n, ms in prefill]
    form = StackForm(
        stack="made",
        phase=Phase.PREFILL,
        fixed=Constants(eb=MappingProxyType({"other": 0.8}), p=4.0),
        free=(
            Free(path="layer_s", start=100e-6),
            Free(path="ef.bf16", start=0.7, limits=(0.02, 1.0)),
            Free(path="attention_ef", start=0.3, limits=(0.02, 1.0)),
        ),
    )
    constants = fit(form, rows)
    for entry in rows:
        assert predicted_s(entry, constants) == pytest.approx(entry.measured_s, rel=0.10)


def test_residuals_are_quantiles_of_measured_over_predicted():
    """The interval must contain the rows it came from, on the right side."""
    residual = residual_of([0.9, 1.0, 1.0, 1.0, 1.3])
    assert residual.low == pytest.approx(-0.1)  # five rows are too few to leave any out
    assert residual.high == pytest.approx(0.3)
    assert residual.rows == 5
    many = residual_of([1.0 + i / 100.0 for i in range(-50, 51)])
    assert (many.low, many.high) == pytest.approx((-0.408, 0.408))


def test_an_unknown_device_borrows_constants_with_a_wider_interval():
    """Predictions outside the measured rows must look less certain than inside."""
    work = StepShape.decode(batch=1, context_tokens=100)

    def spread(device: str, weights: str = "bf16", batch: int = 1, model: str = "llama-2-7b", tp: int = 1) -> float:
        hardware = device_spec(device)
        found = calibration_for(hardware)
        assert ("fitted on this device" if device == "a100-80gb-sxm" else "carried over") in found.source
        one = CalibratedModel(model_spec(model), hardware, quant_spec(weights), calibration=found, tp=tp)
        cost = one.predict(StepShape.decode(batch=batch, context_tokens=100) if batch > 1 else work)
        return cost.high_s / cost.low_s

    near = spread("a100-80gb-sxm")
    assert spread("a30") > 1.1 * near
    assert spread("a100-80gb-sxm", weights="fp8") > 1.02 * near  # gpt-fast has no such rows
    assert near < spread("a100-80gb-sxm", batch=2) < spread("a100-80gb-sxm", batch=64)
    assert spread("mi300x", weights="fp8", batch=64) > spread("mi300x", batch=64) > spread("mi300x") > near


def test_fp8_weights_on_a_device_without_fp8_are_unpacked():
    """An A100 reads fp8 weights no faster than int8 ones, since both must be converted."""
    device = device_spec("a100-80gb-sxm")
    found = calibration_for(device)
    work = StepShape.decode(batch=1, context_tokens=100)
    times = [
        CalibratedModel(model_spec("llama-2-7b"), device, quant_spec(name), calibration=found).predict(work).total_s
        for name in ("fp8", "int8")
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-9)


def test_values_of_4_bits_are_unpacked_where_no_device_multiplies_them():
    """B200 reads fp4 as it multiplies it, H200 unpacks it like int4; constants that know int4 only price both by that."""
    step = StepShape.decode(batch=1, context_tokens=1)

    def slower(device: str, **shares: float) -> float:
        constants = replace(PERFECT, eb=MappingProxyType({"other": 1.0, **shares}))
        whole, some = (
            predictor("llama-3.1-8b", device, constants=each, weights="fp4").predict(step).total_s
            for each in (PERFECT, constants)
        )
        return some / whole

    assert slower("b200-180gb", fp4=1.0, int4=0.25) == pytest.approx(1.0)
    assert slower("b200-180gb", fp4=0.25, int4=1.0) == slower("h200-141gb-sxm", fp4=1.0, int4=0.25) > 3.0
    assert slower("b200-180gb", int4=0.25) == slower("h200-141gb-sxm", int4=0.25)


def test_experts_of_mxfp4_meet_rows_of_8_bits_where_devices_multiply_fp4():
    """Prompts took the time of 16-bit rows on every device, twice what the experts' products need on B200."""
    prompt = StepShape.prefill(batch=1, new_tokens=8192)

    def products_s(device: str, experts: str) -> float:
        shares = MappingProxyType({"bf16": 1.0, "fp8": 1.0} | {experts: 1e-3})
        perfect = replace(PERFECT, expert_ef=MappingProxyType({"bf16": 1.0, "fp8": 1.0}))
        slow = replace(perfect, expert_ef=shares)
        return (
            predictor("gpt-oss-120b", device, constants=slow, weights="mxfp4").predict(prompt).total_s
            / predictor("gpt-oss-120b", device, constants=perfect, weights="mxfp4").predict(prompt).total_s
        )

    assert products_s("b200-180gb", "bf16") == products_s("h200-141gb-sxm", "fp8") == 1.0
    assert min(products_s("b200-180gb", "fp8"), products_s("h200-141gb-sxm", "bf16")) > 100.0


def test_first_token_of_a_one_token_prompt_counts_as_prefill():
    """A prompt of one token starts at position 0: it has no cache and is not a decode step."""
    assert StepShape.prefill(batch=1, new_tokens=1).phase is Phase.PREFILL


def test_latent_attention_is_ours_in_prefill_where_the_engine_was_measured():
    """The engine takes queries to the latents in both phases; priced as expanded, a long prompt of DeepSeek cost a third
    of its attention. Software behind published rows expands them.
    """
    model, device, quant = model_spec("deepseek-v2-lite"), device_spec("a100-80gb-sxm"), quant_spec("bf16")
    step = StepShape.prefill(batch=1, new_tokens=1000, cached_tokens=15_000)
    published, local = (
        CalibratedModel(model, device, quant, calibration=replace(calibration(PERFECT), is_local=is_local))
        for is_local in (False, True)
    )
    pairs = sum(range(15_001, 16_001))
    flops = 2.0 * 27 * 16 * pairs * (512 + 64 + 512)
    assert local.predict(step).parts_s["attention"] == pytest.approx(flops / 312e12, rel=1e-3)
    assert published.predict(step).parts_s["attention"] == pytest.approx(flops / 3.4 / 312e12, rel=1e-3)
    expanded = 2.0 * 27 * 16 * 512 * (128 + 128) * 15_000 / 312e12  # of the cached latents
    assert published.predict(step).parts_s["linear"] - local.predict(step).parts_s["linear"] == pytest.approx(
        expanded, rel=0.02
    )
    assert local.predict_s(step) == pytest.approx(local.predict(step).total_s)
    bounds = {
        form: roofline(cost_of(model, step, quant=quant, kv=KVSpec(), is_ours=form), device, quant) for form in (0, 1)
    }
    for form, priced in ((1, local), (0, published)):  # the roofline took the expanded form for both
        attention_s = bounds[form].parts_s["scores"] + bounds[form].parts_s["values"]
        assert attention_s == pytest.approx(priced.predict(step).parts_s["attention"], rel=1e-3)


def test_rows_pass_between_products_at_a_share_of_the_memory_where_no_rate_was_measured():
    """Published software has no measured rate, and its devices have memories of their own."""
    step = StepShape.prefill(batch=1, new_tokens=2048)
    shares = replace(PERFECT, activation_eb=0.5)
    for device in ("a100-80gb-sxm", "h200-141gb-sxm"):
        bandwidth = device_spec(device).memory_bytes_per_s
        in_bytes = replace(PERFECT, activation_bytes_per_s=0.5 * bandwidth)
        without, share, rate = (
            predictor("llama-3.1-8b", device, constants=constants).predict_s(step)
            for constants in (PERFECT, shares, in_bytes)
        )
        assert share == rate > without


def test_uneven_routing_reads_fewer_experts_at_some_sixteen_streams_and_as_many_at_few_and_at_very_many():
    """Where the model says how uneven it is, that holds."""
    uneven = replace(PERFECT, expert_skew=0.7)
    model, device, quant = model_spec("qwen3-30b-a3b"), device_spec("h100-80gb-sxm"), quant_spec("bf16")

    def step_s(constants: Constants, batch: int, spec=model) -> float:
        shape = StepShape.decode(batch=batch, context_tokens=64)
        priced = CalibratedModel(spec, device, quant, calibration=calibration(constants))
        assert priced.predict_s(shape) == pytest.approx(priced.predict(shape).total_s)
        return priced.predict_s(shape)

    ratios = [step_s(uneven, batch) / step_s(PERFECT, batch) for batch in (1, 24, 4096)]
    assert ratios[0] == pytest.approx(1.0)
    assert ratios[1] < 0.85
    assert ratios[2] == pytest.approx(1.0, abs=0.01)
    layers = tuple(replace(layer, mlp=replace(layer.mlp, skew=0.3)) for layer in model.layers)
    stated = replace(model, layers=layers)
    assert step_s(uneven, 24, stated) == step_s(PERFECT, 24, stated)


def test_all_reduces_of_one_shot_send_every_part_to_everyone():
    """tp - 1 parts where a ring sends 2 (tp - 1) / tp of one: four times as much among eight, the same between two."""
    model, quant, device = model_spec("llama-3.1-70b"), quant_spec("bf16"), device_spec("h100-80gb-sxm")
    shape = StepShape.decode(batch=64, context_tokens=128)

    def link_s(tp: int, one_shot: float | None) -> float:
        constants = Constants(one_shot=one_shot)
        priced = CalibratedModel(model, device, quant, calibration=calibration(constants), tp=tp)
        found = priced.predict(shape)
        assert priced.predict_s(shape) == pytest.approx(found.total_s)
        return found.link_s

    ring, once = link_s(8, None), link_s(8, 1.0)
    assert link_s(8, 0.0) == ring
    assert 3.5 < once / ring < 4.0  # the logits are gathered either way
    assert link_s(2, 1.0) == link_s(2, None)
    assert link_s(1, 1.0) == 0.0


def test_launches_are_those_of_each_kind_of_layer():
    """DeepSeek's 61 layers have latent attention and 58 of them experts; gpt-oss's 36 have experts, and Llama's neither."""
    constants = Constants(step_s=1.0, layer_s=1e-3, moe_layer_s=1e-5, latent_layer_s=1e-7)
    for name, layers, experts, latent in (
        ("deepseek-v3", 61, 58, 61),
        ("gpt-oss-120b", 36, 36, 0),
        ("llama-3.1-8b", 32, 0, 0),
    ):
        assert constants.launch_s(model_spec(name)) == pytest.approx(
            1.0 + layers * 1e-3 + experts * 1e-5 + latent * 1e-7
        )
    plain = replace(constants, latent_layer_s=None)
    assert plain.launch_s(model_spec("deepseek-v3")) == pytest.approx(1.0 + 61e-3 + 58e-5)
    model, device, quant = model_spec("deepseek-v3"), device_spec("h200-141gb-sxm"), quant_spec("fp8")
    prices = [
        CalibratedModel(model, device, quant, calibration=calibration(each), tp=8).predict_s(
            StepShape.decode(batch=4, context_tokens=64)
        )
        for each in (constants, plain)
    ]
    assert prices[0] - prices[1] == pytest.approx(61e-7)


def test_services_have_constants_of_their_own():
    """Simulations of services were priced by constants that single steps had shown, though published services say otherwise."""
    device = device_spec("b200-180gb")
    for stack in ("tensorrt-llm", "vllm"):
        steps, services = (calibration_for(device, stack=stack, of_services=asked) for asked in (False, True))
        assert services.source.count("of services") == 2
        assert "of services" not in steps.source
        assert services.prefill.moe_layer_s > steps.prefill.moe_layer_s
        assert services.decode_residual.rows > 500
        assert steps.request_s == 0.0 < services.request_s < 0.1
    only = calibration_for(device, stack="sglang")
    assert only.source.count("of services") == 2, "no single steps of it are published"
    older = device_spec("a100-80gb-sxm")
    assert calibration_for(older, of_services=True) == calibration_for(older), (
        "nor services of the usual software there"
    )
