"""The bound against other people's published arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.cost.calibrated import CalibratedModel
from diptych.cost.components import BF16, cost_of
from diptych.cost.roofline import balance, compute_dtype, link_rate, roofline
from diptych.cost.stacks import calibration_for
from diptych.cost.tables import device_spec, model_spec, quant_spec
from diptych.ground.errors import ConfigError
from diptych.ground.shape import StepShape
from diptych.ground.specs import Bottleneck, KVSpec

KV = KVSpec()


def bound(model: str, device: str, work: StepShape, *, weights: str = "bf16", tp: int = 1):
    quant = quant_spec(weights)
    return roofline(cost_of(model_spec(model), work, quant=quant, kv=KV, tp=tp), device_spec(device), quant)


@pytest.mark.parametrize(
    ("batch", "step_ms"), [(1, 4.98), (8, 12.13), (16, 20.30), (32, 36.65), (64, 69.33), (240, 249.09)]
)
def test_scaling_book_example(batch, step_ms):
    """Llama-2-13B on 8 x v5e at 8192 tokens; the book rounds to 13e9 parameters, 6.7 GB and 8.2e11 B/s, hence 1 %."""
    step = bound("llama-2-13b", "tpu-v5e", StepShape.decode(batch=batch, context_tokens=8192), tp=8)
    assert (step.total_s - step.link_s) * 1e3 == pytest.approx(step_ms, rel=0.01)


@pytest.mark.parametrize(
    ("device", "model", "weights", "tp", "prompt", "naive_ms"),
    [
        ("a100-80gb-sxm", "llama-2-7b", "bf16", 1, 2048, 88.55),
        ("a100-80gb-sxm", "mistral-7b-v0.1", "bf16", 1, 2048, 95.2),
        ("h100-80gb-sxm", "llama-2-70b", "bf16", 8, 2048, 36.13),
    ],
)
def test_prefill_bounds_equal_the_published_naive_ones(device, model, weights, tp, prompt, naive_ms):
    """The reference's D.2 and D.3 columns, computed independently of this code."""
    step = bound(model, device, StepShape.prefill(batch=1, new_tokens=prompt), weights=weights, tp=tp)
    assert (step.total_s - step.link_s) * 1e3 == pytest.approx(naive_ms, rel=5e-3)
    assert step.bound is Bottleneck.COMPUTE


@pytest.mark.parametrize(
    ("device", "weights", "naive_ms"),
    [("a100-80gb-sxm", "bf16", 6.508), ("a100-80gb-sxm", "int8", 3.267), ("a100-80gb-sxm", "int4", 2.052)],
)
def test_decode_bounds_equal_the_published_naive_ones(device, weights, naive_ms):
    """gpt-fast's Llama-2-7B rows: bytes over bandwidth in three weight formats."""
    step = bound("llama-2-7b", device, StepShape.decode(batch=1, context_tokens=105), weights=weights)
    assert step.total_s * 1e3 == pytest.approx(naive_ms, rel=3e-3)
    assert step.bound is Bottleneck.MEMORY
    assert step.is_bound


def test_a_dtype_a_device_lacks_falls_to_the_next_wider():
    """fp8 weights on an A100 are multiplied in bf16: half the bytes, none of the FLOPs."""
    a100, h100 = device_spec("a100-80gb-sxm"), device_spec("h100-80gb-sxm")
    assert compute_dtype(a100, "fp8") == "bf16"
    assert compute_dtype(h100, "fp8") == "fp8"
    assert compute_dtype(h100, "fp4") == "fp8"
    assert round(balance(a100, "bf16")) == 153
    with pytest.raises(ConfigError, match="no peak rate"):
        compute_dtype(h100, "fp64")


def test_a_head_in_16_bits_is_multiplied_in_16_bits():
    """fp4 leaves the head as it is; it was charged at the rate of fp4, a quarter of its time."""
    b200, fp4, work = device_spec("b200-180gb"), quant_spec("fp4"), StepShape.decode(batch=4096, context_tokens=1)
    model = model_spec("llama-3.1-8b")
    cost = cost_of(model, work, quant=fp4, kv=KV)
    head_s = roofline(cost, b200, fp4).parts_s["head"]
    assert head_s == 2 * 4096 * model.hidden * model.vocab_size / b200.flops_per_s["bf16"]
    calibration = calibration_for(b200)
    as_it_was, is_now = (
        CalibratedModel(model, b200, quant, calibration=calibration).predict_s(work)
        for quant in (replace(fp4, head_compute="fp4"), fp4)
    )
    assert as_it_was + head_s / 2 < is_now


def test_links_are_checked():
    """A laptop chip has no second device; 16 GPUs do not share one NVLink island."""
    with pytest.raises(ConfigError, match="no link"):
        link_rate(device_spec("m2-max-38"), 2)
    with pytest.raises(ConfigError, match="at most 8"):
        link_rate(device_spec("h100-80gb-sxm"), 16)


# DistServe's published step times, OPT-13B on A100, in ms.
def distserve_prefill_ms(tokens: int) -> float:
    return 18.10 + 0.10191 * tokens + 7.12e-6 * tokens**2


def distserve_decode_ms(context: int, batch: int) -> float:
    if batch < 95:
        return 19.93 + 0.000627 * context * batch + 0.0385 * batch
    return 7.17 + 0.00058 * context * batch + 0.1583 * batch


def test_distserve_step_times_respect_the_bound_with_plausible_slopes():
    """Their linear model against our formulas: 80 % of the peak per prompt token, 64 % of bandwidth per KV token."""
    a100 = device_spec("a100-80gb-sxm")
    for tokens in (64, 256, 1024, 2048):
        step = bound("opt-13b", a100.name, StepShape.prefill(batch=1, new_tokens=tokens))
        assert step.total_s * 1e3 < distserve_prefill_ms(tokens)
    for batch in (1, 16, 64, 128):
        step = bound("opt-13b", a100.name, StepShape.decode(batch=batch, context_tokens=512))
        assert step.total_s * 1e3 < distserve_decode_ms(512, batch)
    token = cost_of(model_spec("opt-13b"), StepShape.prefill(batch=1, new_tokens=1000), quant=BF16, kv=KV)
    per_token_ms = token.flops / 1000 / a100.flops_per_s["bf16"] * 1e3
    assert per_token_ms / 0.10191 == pytest.approx(0.80, abs=0.02)
    kv_token_ms = 819_200 / a100.memory_bytes_per_s * 1e3
    assert kv_token_ms / 0.000627 == pytest.approx(0.64, abs=0.01)
