"""Experiments on variants of the model: shared KV heads, weight formats."""

from __future__ import annotations

from contextlib import ExitStack

from diptych.cost.parameters import parameter_count
from diptych.ground.shape import StepShape
from diptych.lab.experiment import Check, Experiment, Outcome, Point, Stage, cannot, conclude, point, quantity
from diptych.lab.probe import StepProbe
from diptych.lab.rounds import Sampler
from diptych.models.spec import ModelSpec

PREFILL_ROWS = 512
FFN_STEP = 64  # widths of the MLP stay multiples of this


def _head_sharing(stage: Stage) -> Outcome:
    """Three models of equal size that differ in KV heads: what sharing saves in the projections goes to the MLP."""
    heads = stage.model.spec.n_heads
    context = min(4096, stage.longest_tokens)
    rows = min(PREFILL_ROWS, context)
    group = next((k for k in (heads // 4, heads // 3, heads // 2) if k > 1 and heads % k == 0), 1)
    works = (
        StepShape.decode(batch=1, context_tokens=16),
        StepShape.decode(batch=1, context_tokens=context),
        StepShape.prefill(batch=1, new_tokens=rows),
    )
    variants = {"MHA": heads, "GQA": group, "MQA": 1}
    samplers: list[Sampler] = []
    predicted: list[float | None] = []
    sizes: list[int] = []
    with ExitStack() as models:
        for name, kv_heads in variants.items():
            stage.progress(f"{name}: {kv_heads} KV heads")
            model = stage.other(changes={"num_key_value_heads": kv_heads, **_balanced_ffn(stage.model.spec, kv_heads)})
            models.callback(model.close)
            if model.spec.n_kv_heads != kv_heads:
                return cannot(
                    f"this family has {model.spec.n_kv_heads} KV heads, whatever is asked: nothing to compare"
                )
            sizes.append(parameter_count(model.spec))
            probe = StepProbe(model, max_tokens=context + 32)
            samplers += [probe.sampler(work) for work in works]
            predicted += [stage.predicted_s(work, model) for work in works]
        rounds = stage.measure(samplers)
    points: list[Point] = []
    for i, kv_heads in enumerate(variants.values()):
        points.append(point(f"decode at {context:,}", kv_heads, rounds.point(3 * i + 1), predicted[3 * i + 1]))
        points.append(point(f"prefill of {rows}", kv_heads, rounds.point(3 * i + 2), predicted[3 * i + 2]))
    grown = rounds.each(lambda t: t[1::3] - t[0::3])
    prefills = [rounds.point(3 * i + 2).value for i in range(3)]
    return conclude(
        points,
        [
            Check(
                what=f"ms that {context:,} tokens of context add to a token: MHA less GQA",
                estimate=rounds.of(lambda t: 1e3 * ((t[1] - t[0]) - (t[4] - t[3]))),
                limit=0.0,
                pattern="{:.3f}",
            ),
            Check(
                what="the same, MHA less MQA",
                estimate=rounds.of(lambda t: 1e3 * ((t[1] - t[0]) - (t[7] - t[6]))),
                limit=0.0,
                pattern="{:.3f}",
            ),
        ],
        rounds,
        finding=(
            f"{context:,} tokens of context add {1e3 * grown[0].value:.2f} ms per token with {heads} KV heads, "
            f"{1e3 * grown[1].value:.2f} ms with {group}, {1e3 * grown[2].value:.2f} ms with one; prefill of {rows} tokens "
            f"takes {1e3 * prefills[0]:.1f}, {1e3 * prefills[1]:.1f} and {1e3 * prefills[2]:.1f} ms"
        ),
        notes=[
            f"random weights; {', '.join(f'{size / 1e6:.2f}' for size in sizes)} M parameters: the MLP is widened by what "
            "the shared heads save",
        ],
    )


def _balanced_ffn(spec: ModelSpec, kv_heads: int) -> dict[str, int]:
    """The MLP width with which the model keeps its size at another number of KV heads; nothing for mixtures."""
    if spec.mlp is None or spec.moe is not None:
        return {}
    saved = 2 * spec.hidden * spec.head_dim * (spec.n_kv_heads - kv_heads)
    matrices = 3 if spec.mlp.is_gated else 2
    width = spec.mlp.ffn + saved / (matrices * spec.hidden)
    return {"intermediate_size": max(FFN_STEP, FFN_STEP * round(width / FFN_STEP))}


def _weight_formats(stage: Stage) -> Outcome:
    formats = ("bf16", "int8", "int4") if stage.model.backend_name == "cpu" else ("fp32", "bf16")
    context = min(256, stage.longest_tokens)
    works = (StepShape.decode(batch=1, context_tokens=context), StepShape.prefill(batch=1, new_tokens=context))
    samplers: list[Sampler] = []
    predicted: list[float | None] = []
    bytes_of: list[int] = []
    with ExitStack() as models:
        for name in formats:
            stage.progress(f"packing {name}")
            model = stage.other(weights=name)
            models.callback(model.close)
            bytes_of.append(model.weight_bytes)
            probe = StepProbe(model, max_tokens=context + 32)
            samplers += [probe.sampler(work) for work in works]
            predicted += [stage.predicted_s(work, model) for work in works]
        rounds = stage.measure(samplers)
    points: list[Point] = []
    for i in range(len(formats)):
        for j, (phase, work) in enumerate(zip(("decode", "prefill"), works, strict=True)):
            column, predicted_s = 2 * i + j, predicted[2 * i + j]
            rate = rounds.rate(column, work.n_tokens)
            unit = f"{phase}, tokens per second"
            points.append(
                quantity(phase, i, rate, unit, predicted=None if predicted_s is None else work.n_tokens / predicted_s)
            )
    gains = rounds.each(lambda t: t[:2] / t[-2:])
    shrink = bytes_of[0] / bytes_of[-1]
    notes = ["random weights; with int8 and int4 the head is int8" + stage.cached_weights]
    if stage.model.backend_name == "cpu":
        notes.append(
            "int8 and int4 multiply in integers, which this processor does faster than bf16: what prefill gains is from that"
        )
    steps = [
        f"{name}: decode {points[2 * i].measured:,.0f}, prefill {points[2 * i + 1].measured:,.0f} tok/s"
        for i, name in enumerate(formats)
    ]
    return conclude(
        points,
        [
            Check(what=f"decode's gain from {formats[0]} to {formats[-1]}", estimate=gains[0], limit=1.2),
            Check(
                what=f"decode's gain over half of the factor by which the weights shrink, {shrink:.1f}",
                estimate=gains[0].times(2.0 / shrink),
                limit=1.0,
            ),
        ],
        rounds,
        finding=(
            f"{'; '.join(steps)}: from {formats[0]} to {formats[-1]} the weights shrink {shrink:.1f}x, "
            f"decode gains {gains[0].value:.1f}x and prefill {gains[1].value:.1f}x"
        ),
        notes=notes,
        x_names=formats,
    )


HEAD_SHARING = Experiment(
    name="head-sharing",
    title="MHA, GQA and MQA at equal size",
    claim="sharing KV heads makes long contexts cheaper to decode; prefill, bound by arithmetic, hardly notices",
    x_label="KV heads",
    y_label="one step",
    run=_head_sharing,
    is_log_y=True,
)
WEIGHT_FORMATS = Experiment(
    name="weight-formats",
    title="Weight formats in each phase",
    claim="decode speeds up as its weights shrink, by more than half of that factor; prefill as its arithmetic gets cheaper",
    x_label="",
    y_label="",
    run=_weight_formats,
)
