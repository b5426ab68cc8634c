"""Answers about one model on one kind of device: both phases, limits, crossovers.

A `Setup` is everything that fixes the answer; `make_plan` computes the whole page that `diptych plan` prints.

>>> from diptych.cost.setup import setup_of
>>> plan = make_plan(setup_of("llama-3.1-8b", "a100-80gb-sxm"), Question(prompt_tokens=2048, batch=1))
>>> round(plan.kv_equals_weights_batch)
53
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from diptych.cost.calibration import ADAPTER_SHARE, Calibration, latent_layers
from diptych.cost.components import cost_of
from diptych.cost.drafts.acceptance import MOST_DEPTH
from diptych.cost.exchange import GLOO_MEETING_S, SHARED_MEETING_S, all_reduced, gathered
from diptych.cost.kv_bytes import kv_bytes_per_token
from diptych.cost.layout import PLAIN
from diptych.cost.memory import Capacity, capacity_of
from diptych.cost.parameters import (
    active_parameter_count,
    attention_flops_per_pair,
    linear_parameter_count,
    parameter_count,
)
from diptych.cost.phase_cost import PhaseCost
from diptych.cost.profile import COMMANDS, has_gpu
from diptych.cost.roofline import balance, compute_dtype, multiplies_in, peak_flops_per_s, roofline
from diptych.cost.routing import touched_experts
from diptych.cost.setup import Setup
from diptych.ground.errors import ConfigError
from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape
from diptych.ground.specs import Bottleneck, HardwareSpec, StepCost
from diptych.models.gpu_kernels import left_to_torch
from diptych.models.spec import ModelSpec

MOST_SEQUENCES = 65_536  # of one step, that are asked about and looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked about: a prompt (with a cached part), an answer length, a batch, a context for decode.

    context_tokens None: the middle of the answer, prompt + output / 2.
    """

    prompt_tokens: int = 2048
    cached_tokens: int = 0
    output_tokens: int = 256
    batch: int = 1
    context_tokens: int | None = None
    stall_budget_s: float = 0.05
    requests_per_s: float = 1.0
    draft_tokens: int = 4
    acceptance: float = 0.7
    draft_cost: float = 0.05

    def __post_init__(self) -> None:
        """Refuse impossible questions."""
        for name in ("prompt_tokens", "output_tokens", "batch", "draft_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name, most in (("draft_tokens", MOST_DEPTH), ("batch", MOST_SEQUENCES)):
            if getattr(self, name) > most:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at most {most}")
        if not 0 <= self.cached_tokens < self.prompt_tokens:
            raise ConfigError(f"cached_tokens is {self.cached_tokens}; it must be from 0 to {self.prompt_tokens - 1}")
        if self.context_tokens is not None and self.context_tokens < 1:
            raise ConfigError(f"context_tokens is {self.context_tokens}; it must be at least 1")
        if not 0.0 <= self.acceptance <= 1.0:
            raise ConfigError(f"acceptance is {self.acceptance}; it must be from 0 to 1")
        for name in ("stall_budget_s", "requests_per_s"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be greater than 0")
        if not 0.0 <= self.draft_cost < 10.0:
            raise ConfigError(f"draft_cost is {self.draft_cost}; it must be from 0 to 10 decode steps")

    @property
    def decode_context_tokens(self) -> int:
        """Context of the decode step that stands for the whole answer."""
        return self.context_tokens or self.prompt_tokens + self.output_tokens // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentLine:
    """One component of a phase at the machine's peak."""

    name: str
    flops: float
    bytes: float
    activation_bytes: float
    intensity: float | None
    bound: Bottleneck
    bound_s: float
    share: float  # of the plain roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """One phase: what it does, what binds it, how long it takes. Times are of one step; figures of one device."""

    phase: Phase
    batch: int
    new_tokens: int
    context_tokens: int
    flops: float
    vector_flops: float
    weight_bytes: float
    kv_bytes: float
    activation_bytes: float
    intensity: float
    balance: float
    bound: Bottleneck
    bound_s: float
    predicted_s: float
    low_s: float
    high_s: float
    tokens_per_s: float
    linear_s: float
    attention_s: float
    launch_s: float
    link_s: float
    adapters_s: float
    distance: tuple[str, ...]  # where the step leaves the rows behind its constants; empty: nowhere
    components: tuple[ComponentLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What buys what: change of a time, in percent, for one percent more of a resource."""

    ttft_by_flops: float
    ttft_by_bandwidth: float
    tpot_by_flops: float
    tpot_by_bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole answer for one setup."""

    setup: Setup
    question: Question
    parameters: int
    active_parameters: int
    kv_bytes_per_token: float
    compute_dtype: str
    prefill: PhasePlan
    decode: PhasePlan
    weights_s: float  # decode: reading weights
    kv_s: float  # decode: reading the cache
    compute_bound_batch: float | None
    kv_equals_weights_batch: float
    quadratic_prompt_tokens: float | None
    capacity: Capacity
    sensitivity: Sensitivity
    notes: tuple[str, ...]


def make_plan(setup: Setup, question: Question) -> Plan:
    """Everything about one setup. Raises ConfigError for an impossible split or context."""
    context = question.decode_context_tokens
    _check_context(setup, question)
    prefill_work, decode_work = prefill_work_of(setup, question), decode_work_of(setup, question)
    prefill = phase_plan(setup, prefill_work)
    decode = phase_plan(setup, decode_work)
    calibrated = setup.model_of_time().predict(decode_work)
    return Plan(
        setup=setup,
        question=question,
        parameters=parameter_count(setup.model),
        active_parameters=active_parameter_count(setup.model),
        kv_bytes_per_token=kv_bytes_per_token(setup.model, setup.kv),
        compute_dtype=compute_dtype(setup.hardware, setup.quant.compute),
        prefill=prefill,
        decode=decode,
        weights_s=calibrated.parts_s["linear"],
        kv_s=calibrated.parts_s["attention"],
        compute_bound_batch=compute_bound_batch(setup),
        kv_equals_weights_batch=kv_equals_weights_batch(setup, context, question.batch),
        quadratic_prompt_tokens=quadratic_prompt_tokens(setup),
        capacity=capacity_of(setup, context_tokens=context, batch=question.batch),
        sensitivity=sensitivity_of(setup, prefill_work, decode_work),
        notes=notes_of(setup),
    )


def prefill_work_of(setup: Setup, question: Question) -> StepShape:
    """The prompts of the question as one step."""
    new_tokens, cached_tokens = question.prompt_tokens - question.cached_tokens, question.cached_tokens
    return setup.asked(StepShape.prefill(batch=question.batch, new_tokens=new_tokens, cached_tokens=cached_tokens))


def decode_work_of(setup: Setup, question: Question) -> StepShape:
    """The step that stands for the answers of the question."""
    return setup.asked(StepShape.decode(batch=question.batch, context_tokens=question.decode_context_tokens))


def _cost(setup: Setup, work: StepShape) -> PhaseCost:
    """Of one device: its share of the rows and their KV, and of the experts."""
    is_ours, layout, moe = setup.calibration.is_local, setup.layout, setup.model.moe
    cost = cost_of(setup.model, work, quant=setup.quant, kv=setup.kv, tp=setup.tp, is_ours=is_ours)
    if layout == PLAIN:
        return cost
    experts = float(layout.dp)
    if moe is not None:  # a part of the rows passes all stages at a time, and reads the experts that it asks for
        rows = work.n_tokens, -(-work.n_tokens // layout.pp)
        of_all, of_part = (touched_experts(moe, n) for n in rows)
        experts *= of_all / of_part
    return cost.shared(rows=layout.parts, experts=experts)


def phase_plan(setup: Setup, work: StepShape) -> PhasePlan:
    """One phase in numbers."""
    cost = _cost(setup, work)
    predictor = setup.model_of_time()
    roof = roof_of(setup)
    bound = roofline(cost, roof, setup.quant, setup.kv)
    predicted = predictor.predict(work)
    shape = work.shapes[0]
    is_decode = shape.is_decode
    return PhasePlan(
        phase=Phase.DECODE if is_decode else Phase.PREFILL,
        batch=work.n_sequences,
        new_tokens=shape.new_tokens,
        context_tokens=shape.start_pos + shape.new_tokens,
        flops=cost.flops,
        vector_flops=cost.total("vector_flops"),
        weight_bytes=cost.weight_bytes,
        kv_bytes=cost.kv_bytes,
        activation_bytes=cost.total("activation_bytes"),
        intensity=cost.intensity,
        balance=balance(roof, setup.quant.compute),
        bound=predicted.bound,
        bound_s=bound.total_s,
        predicted_s=predicted.total_s,
        low_s=predicted.low_s,
        high_s=predicted.high_s,
        tokens_per_s=work.n_tokens / predicted.total_s,
        linear_s=predicted.parts_s["linear"],
        attention_s=predicted.parts_s["attention"],
        launch_s=predicted.parts_s["launch"],
        link_s=predicted.parts_s["link"],
        adapters_s=predicted.parts_s["adapters"],
        distance=tuple(f"{gap.axis}: {gap.text}" for gap in predictor.gaps(work)),
        components=component_lines(cost, bound, balance(roof, setup.quant.compute)),
    )


def roof_of(setup: Setup) -> HardwareSpec:
    """The machine whose roof is this model's: what of the weights lies in the measured cache is read from there."""
    predictor = setup.model_of_time()
    cache, share, memory = predictor.calibration.cache, predictor.cached_share, setup.hardware.memory_bytes_per_s
    if cache is None or share == 0.0:
        return setup.hardware
    rate = 1.0 / (share / max(cache.bytes_per_s, memory) + (1.0 - share) / memory)
    return replace(setup.hardware, memory_bytes_per_s=rate)


def component_lines(cost: PhaseCost, bound: StepCost, ridge: float) -> tuple[ComponentLine, ...]:
    """Every component that does or moves something, with what binds it at the machine's peak, whose ridge is given."""
    lines = []
    for part in cost.components:
        if part.name == "embedding" and not part.flops:
            continue
        is_compute = part.intensity is None or part.intensity > ridge
        lines.append(
            ComponentLine(
                name=part.name,
                flops=part.flops,
                bytes=part.bytes,
                activation_bytes=part.activation_bytes,
                intensity=part.intensity,
                bound=Bottleneck.COMPUTE if is_compute else Bottleneck.MEMORY,
                bound_s=bound.parts_s[part.name],
                share=bound.parts_s[part.name] / bound.total_s,
            )
        )
    return tuple(lines)


def compute_bound_batch(setup: Setup) -> float | None:
    """Rows at which the linear layers of a decode step turn compute bound at the machine's peak.

    Dense models: F w / (2 M). Mixtures: more, because experts are read for few rows each. None: beyond MOST_SEQUENCES.
    """
    unit = _cost(setup, StepShape.decode(batch=1, context_tokens=1))
    parts = [unit.component(name) for name in ("qkv", "o", "mlp", "router", "experts", "shared_experts")]
    row_s = sum(part.flops for part in parts) / peak_flops_per_s(setup.hardware, setup.quant.compute)
    bandwidth = roof_of(setup).memory_bytes_per_s
    dense = sum(part.weight_bytes for part in parts if part.name != "experts")
    moe = setup.model.moe
    if moe is None:
        return dense / bandwidth / row_s
    per_expert = unit.component("experts").weight_bytes / moe.met_experts

    def is_compute_bound(rows: int) -> bool:
        of_part = -(-rows // setup.layout.pp)
        touched = touched_experts(moe, of_part)
        return rows * row_s >= (dense + touched * per_expert) / bandwidth

    rows = range(1, MOST_SEQUENCES + 1)
    found = bisect_left(rows, True, key=is_compute_bound)
    return None if found == len(rows) else float(rows[found])


def kv_equals_weights_batch(setup: Setup, context_tokens: int, batch: int) -> float:
    """Sequences at which a decode step reads as many KV bytes as weight bytes."""
    rows = max(batch, 1) if setup.model.moe is not None else 1
    work = StepShape.decode(batch=rows, context_tokens=context_tokens)
    cost = _cost(setup, work)
    return cost.weight_bytes / (cost.total("kv_read_bytes") / rows)


def quadratic_prompt_tokens(setup: Setup) -> float | None:
    """Prompt length at which causal attention costs as many FLOPs as the linear layers (no windows): P / (L H h).

    None: no layer attends.
    """
    pair_flops = attention_flops_per_pair(setup.model, on_latents=setup.calibration.is_local)
    return 4.0 * linear_parameter_count(setup.model) / pair_flops if pair_flops else None


def sensitivity_of(setup: Setup, prefill: StepShape, decode: StepShape) -> Sensitivity:
    """Elasticities by finite differences of one percent."""

    def change(work: StepShape, faster: Setup) -> float:
        return (faster.model_of_time().predict(work).total_s / setup.model_of_time().predict(work).total_s - 1.0) * 100

    hardware = setup.hardware
    more_flops = replace(
        setup, hardware=replace(hardware, flops_per_s={k: v * 1.01 for k, v in hardware.flops_per_s.items()})
    )
    more_bandwidth = replace(setup, hardware=replace(hardware, memory_bytes_per_s=hardware.memory_bytes_per_s * 1.01))
    return Sensitivity(
        ttft_by_flops=change(prefill, more_flops),
        ttft_by_bandwidth=change(prefill, more_bandwidth),
        tpot_by_flops=change(decode, more_flops),
        tpot_by_bandwidth=change(decode, more_bandwidth),
    )


def notes_of(setup: Setup) -> tuple[str, ...]:
    """What the reader must know before trusting the numbers."""
    notes = [f"times: {setup.calibration.source}"]
    if setup.hardware.name == "local" and setup.hardware.kind == "cpu" and has_gpu():
        notes.append(f"they are of the processor: no GPU was measured here ({COMMANDS['gpu']})")
    used = compute_dtype(setup.hardware, setup.quant.compute)
    if not multiplies_in(setup.hardware, setup.quant.compute):
        notes.append(f"{setup.hardware.name} does not multiply in {setup.quant.compute}; it multiplies in {used}")
    for name, text in (("memory_bytes_per_s", "memory bandwidth"), (f"flops_{used}", f"{used} peak")):
        if setup.hardware.flag_of(name).value == "unverified":
            notes.append(f"the {text} of {setup.hardware.name} is unverified")
    cache = setup.calibration.cache
    share = setup.model_of_time().cached_share
    if cache is not None and share > 0.0:
        of_cache, of_memory = (one.memory_bytes_per_s / 1e9 for one in (roof_of(setup), setup.hardware))
        size = f"the {cache.bytes / 2**20:,.0f} MiB of cache that were measured"
        notes.append(
            f"the weights fit {size}, so the roof is the cache's: {of_cache:.0f} GB/s, not the memory's {of_memory:.0f}"
            if share == 1.0
            else f"{share:.0%} of the weights still lie in {size} when they are read again, so the roof is "
            f"{of_cache:.0f} GB/s, not the memory's {of_memory:.0f}"
        )
    if setup.model.moe is not None:
        skew = setup.model.moe.skew or setup.calibration.decode.expert_skew
        notes.append(
            f"experts: the i-th is taken to be chosen in proportion to i^-{skew:g}, as services showed"
            if skew
            else "experts: uniform routing assumed; skewed routing touches fewer experts per step"
        )
    if setup.loras is not None and not setup.calibration.decode.adapter_ef:
        notes.append(
            f"adapters were not measured: their products are taken to reach {ADAPTER_SHARE:g} of what other matrices do"
        )
    if setup.tp > 1:
        quant = setup.quant
        reduced = all_reduced(setup.model, tp=setup.tp, activation_bytes=quant.activation_bytes)
        whole = gathered(setup.model, tp=setup.tp, weights=quant.name)
        notes.append(
            f"priced with {reduced.meetings} all-reduces a step, {reduced.row_bytes / 1e3:,.0f} kB a token and device; "
            f"gathering, which keeps the bits of one device, would meet {whole.meetings} times for "
            f"{whole.row_bytes / 1e3:,.0f} kB: {whole.time_s(1, meeting_s=SHARED_MEETING_S) * 1e3:.3g} ms of meetings through "
            f"shared memory, {whole.time_s(1, meeting_s=GLOO_MEETING_S) * 1e3:,.0f} ms by gloo between machines"
        )
    return *notes, *gpu_notes(setup.model, setup.hardware, setup.calibration)


def gpu_notes(model: ModelSpec, hardware: HardwareSpec, calibration: Calibration) -> tuple[str, ...]:
    """What of a model no step was timed with on this machine's GPU, though its price is of what was; empty elsewhere."""
    if not calibration.is_local or hardware.kind != "gpu":
        return ()
    missing = left_to_torch(model) if calibration.is_of_our_kernels else None
    if missing is not None:
        return (
            f"torch's kernels compute this model on a GPU, for its {missing}; they were not timed, and the engine predicts "
            "none of its steps there",
        )
    if latent_layers(model) and calibration.on_latents is None:
        return (
            "latent attention was not timed: on an H200 steps of deepseek-v2-lite took from 8% less to 40% more than predicted "
            "(diptych lab calibrate times it)",
        )
    if any(layer.attention.index is not None for layer in model.layers):
        return ("what an index chooses by was not timed: it is priced as attention is",)
    return ()


def _check_context(setup: Setup, question: Question) -> None:
    """The prompt and the whole answer fit, or the context of the one decode step that was asked for."""
    limit, prompt, output = setup.model.max_context_tokens, question.prompt_tokens, question.output_tokens
    for tokens, what in (
        (prompt, f"the prompt is {prompt} tokens"),
        (question.context_tokens or 0, f"the context is {question.context_tokens} tokens"),
        (
            0 if question.context_tokens else prompt + output,
            f"the context is {prompt + output} tokens, {prompt} of the prompt and {output} of the answer",
        ),
    ):
        if tokens > limit:
            raise ConfigError(
                f"{what}; {setup.model.name} accepts at most {limit}", hint="lower --prompt, --output or --context"
            )
