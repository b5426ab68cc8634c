"""Experiments on the model: the roofline of its parts, shared KV heads, weight formats."""

from __future__ import annotations

from diptych.cost.workload import Workload
from diptych.lab.experiment import Experiment, Outcome, Point, Stage, Verdict, point
from diptych.lab.probe import Measured, StepProbe

PREFILL_ROWS = 512


def _roofline(stage: Stage) -> Outcome:
    """Every phase as a point under the roof: operations per byte against operations per second."""
    context = min(512, stage.longest_tokens)
    works = [(f"decode, batch {b}", Workload.decode(batch=b, context_tokens=min(context, 256))) for b in (1, 4, 16, 64)]
    works += [(f"prefill, {n} tokens", Workload.prefill(batch=1, new_tokens=n)) for n in (16, 128, context)]
    probe = stage.probe(64 * (256 + 32))
    ridge = stage.ceilings.flops_per_s / stage.ceilings.read_bytes_per_s
    points, times, lines = [], [], []
    for name, work in works:
        stage.progress(name)
        measured = probe.time(work, repeats=2 * stage.repeats)
        cost = stage.view.cost(work)
        roof = min(stage.ceilings.flops_per_s, cost.intensity * stage.ceilings.read_bytes_per_s)
        times.append(measured)
        series = name.split(",")[0]
        points.append(
            Point(
                series=series,
                x=cost.intensity,
                measured=cost.flops / measured.median_s / 1e9,
                low=cost.flops / measured.high_s / 1e9,
                high=cost.flops / measured.low_s / 1e9,
                predicted=roof / 1e9,
            )
        )
        lines.append(f"{name}: {cost.intensity:.1f} FLOP/B, {cost.flops / measured.median_s / roof:.0%} of the roof")
    below = [p for p in points if p.series == "decode" and p.x < ridge]
    notes = [f"the ridge of this machine is at {ridge:.1f} FLOP per byte ({stage.ceilings.compute_dtype})", *lines]
    notes += _component_notes(stage)
    return Outcome(
        points=tuple(points),
        verdict=Verdict.HOLDS if below and points[-1].x > ridge else Verdict.FAILS,
        finding=(
            f"decode at batch 1 does {points[0].x:.1f} operations per byte, far under the ridge of {ridge:.0f}: "
            f"memory sets its pace; prefill of {context} tokens does {points[-1].x:.0f}, above it: arithmetic does"
        ),
        notes=tuple(notes),
    ).withheld_if_noisy(times)


def _component_notes(stage: Stage) -> list[str]:
    notes = []
    for name, work in (
        ("decode", Workload.decode(batch=1, context_tokens=min(512, stage.longest_tokens))),
        ("prefill", Workload.prefill(batch=1, new_tokens=min(PREFILL_ROWS, stage.longest_tokens))),
    ):
        cost = stage.view.cost(work)
        parts = [f"{c.name} {c.intensity:.1f}" for c in cost.components if c.flops and c.intensity is not None]
        notes.append(f"FLOP per byte by component, {name}: {', '.join(parts)}")
    return notes


def _head_sharing(stage: Stage) -> Outcome:
    """The same model with as many KV heads as query heads, with a quarter of them, and with one."""
    heads = int(stage.model.hf_config["num_attention_heads"])
    context = min(4096, stage.longest_tokens)
    group = next((k for k in (heads // 4, heads // 3, heads // 2) if k > 1 and heads % k == 0), 1)
    points, times, per_token = [], [], []
    for name, kv_heads in (("MHA", heads), ("GQA", group), ("MQA", 1)):
        stage.progress(f"{name}: {kv_heads} KV heads")
        model = stage.other(changes={"num_key_value_heads": kv_heads})
        probe = StepProbe(model, max_tokens=context + 32)
        short = probe.time(Workload.decode(batch=1, context_tokens=16), repeats=4 * stage.repeats)
        long = probe.time(Workload.decode(batch=1, context_tokens=context), repeats=4 * stage.repeats)
        prefill = probe.time(Workload.prefill(batch=1, new_tokens=min(PREFILL_ROWS, context)), repeats=stage.repeats)
        times += [short, long, prefill]
        points += [point(f"decode at {context:,}", kv_heads, long), point("prefill", kv_heads, prefill)]
        per_token.append(long.median_s - short.median_s)
        model.close()
    gain = per_token[0] / max(per_token[-1], 1e-9)
    return Outcome(
        points=tuple(points),
        verdict=Verdict.HOLDS if per_token[0] > per_token[-1] else Verdict.FAILS,
        finding=(
            f"{context:,} tokens of context add {1e3 * per_token[0]:.2f} ms per token with {heads} KV heads, "
            f"{1e3 * per_token[1]:.2f} ms with {group}, {1e3 * per_token[2]:.2f} ms with one ({gain:.1f}x less); "
            "prefill, bound by arithmetic, hardly notices"
        ),
        notes=("random weights; all else equal, so the projections shrink a little with the KV heads",),
    ).withheld_if_noisy(times)


def _weight_formats(stage: Stage) -> Outcome:
    formats = ("bf16", "int8", "int4") if stage.model.backend_name == "cpu" else ("fp32", "bf16")
    context = min(256, stage.longest_tokens)
    points: list[Point] = []
    times: list[Measured] = []
    results: dict[str, tuple[float, float]] = {}
    for number, name in enumerate(formats):
        stage.progress(name)
        model = stage.other(weights=name)
        probe = StepProbe(model, max_tokens=PREFILL_ROWS + 32)
        decode = probe.time(Workload.decode(batch=1, context_tokens=context), repeats=4 * stage.repeats)
        prefill = probe.time(Workload.prefill(batch=1, new_tokens=context), repeats=stage.repeats)
        times += [decode, prefill]
        points += [point("decode", number, decode), point("prefill", number, prefill)]
        results[name] = (1 / decode.median_s, context / prefill.median_s)
        model.close()
    first, last = results[formats[0]], results[formats[-1]]
    text = "; ".join(f"{name}: decode {d:,.0f}, prefill {p:,.0f} tok/s" for name, (d, p) in results.items())
    return Outcome(
        points=tuple(points),
        verdict=Verdict.HOLDS if last[0] / first[0] > 1.1 else Verdict.FAILS,
        finding=(
            f"{text}: from {formats[0]} to {formats[-1]} decode gains {last[0] / first[0]:.1f}x "
            f"and prefill {last[1] / first[1]:.1f}x"
        ),
        notes=(f"x is the format: {', '.join(f'{i} {name}' for i, name in enumerate(formats))}; random weights",),
    ).withheld_if_noisy(times)


ROOFLINE = Experiment(
    name="roofline",
    title="Both phases under one roof",
    claim="the same weights are memory-bound in decode and arithmetic-bound in prefill",
    x_label="operations per byte",
    y_label="achieved, Gop/s (predicted: the roof)",
    run=_roofline,
    is_log_x=True,
    is_log_y=True,
)
HEAD_SHARING = Experiment(
    name="head-sharing",
    title="MHA, GQA and MQA at equal size",
    claim="sharing KV heads makes long contexts cheaper to decode and leaves prefill alone",
    x_label="KV heads",
    y_label="ms",
    run=_head_sharing,
)
WEIGHT_FORMATS = Experiment(
    name="weight-formats",
    title="Weight formats in each phase",
    claim="fewer bytes per weight speed up decode in proportion, prefill only as far as its arithmetic gets cheaper",
    x_label="format",
    y_label="one step, ms",
    run=_weight_formats,
    is_log_y=True,
)
