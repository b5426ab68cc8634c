"""The planner's answer as a picture: the roofline with both phases, where their time goes, and decode against batch."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from diptych.cost.planner import Plan, roof_of
from diptych.cost.roofline import peak_flops_per_s
from diptych.ground.shape import StepShape
from diptych.lab.pictures import write_picture
from diptych.lab.style import DECODE, GREY, PARTS, PREFILL, log_axis


def draw(plan: Plan, path: Path) -> None:
    """Write the picture; the ending of the name chooses the format. Raises ConfigError when it cannot be written."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.8))
    try:
        _roofline(axes[0], plan)
        _parts(axes[1], plan)
        _batches(axes[2], plan)
        figure.suptitle(f"{plan.setup.label}, KV {plan.setup.kv.name}")
        figure.tight_layout()
        write_picture(figure, path, dpi=130)
    finally:
        plt.close(figure)


def _roofline(axis: Axes, plan: Plan) -> None:
    hardware, cache = plan.setup.hardware, plan.setup.calibration.cache
    peak = peak_flops_per_s(hardware, plan.setup.quant.compute)
    bandwidth = roof_of(plan.setup).memory_bytes_per_s  # under which the components stand
    roofs = {f"memory, {hardware.memory_bytes_per_s / 1e9:,.4g} GB/s": hardware.memory_bytes_per_s}
    if cache is not None:
        roofs[f"cache, {cache.bytes / 2**20:,.0f} MiB at {cache.bytes_per_s / 1e9:,.4g} GB/s"] = cache.bytes_per_s
    lines = [
        line for report in (plan.prefill, plan.decode) for line in report.components if line.intensity and line.flops
    ]
    reached = [plan.prefill.intensity, plan.decode.intensity, *(line.intensity or 1.0 for line in lines)]
    if bandwidth not in roofs.values():
        roofs[f"two in turns, {bandwidth / 1e9:,.4g} GB/s"] = bandwidth
    least, most = min(reached) / 2.0, max(*reached, *(peak / rate for rate in roofs.values())) * 2.0
    for name, rate in roofs.items():
        is_own = rate == bandwidth
        axis.plot([least, peak / rate, most], [rate * least, peak, peak], color="black" if is_own else GREY, lw=1.2,
                  ls="-" if is_own else "--", label=f"roof of the {name}")  # fmt: skip
    axis.axvline(plan.prefill.balance, color=GREY, ls=":", lw=1)
    words = f"balance {plan.prefill.balance:.0f} FLOP/B"
    axis.text(plan.prefill.balance * 1.15, peak / 12.0, words, color=GREY, fontsize=8, rotation=90, va="center")
    for report, colour in ((plan.prefill, PREFILL), (plan.decode, DECODE)):
        own = [line for line in report.components if line.intensity and line.flops]
        for number, line in enumerate(own):
            at = line.intensity or 1.0
            axis.plot(at, min(peak, bandwidth * at), "o", color=colour, ms=4, alpha=0.45,
                      label="" if number else f"{report.phase.value}: components at the peak")  # fmt: skip
        achieved = report.flops / report.predicted_s
        axis.plot(
            report.intensity, achieved, "*", color=colour, ms=15, ls="none", label=f"{report.phase.value}, predicted"
        )
    axis.set_xlim(least, most)
    log_axis(axis.xaxis)
    log_axis(axis.yaxis)
    axis.set_xlabel("FLOP per byte")
    axis.set_ylabel("FLOP/s")
    axis.set_title("roofline", fontsize=10)
    axis.legend(fontsize=7, loc="lower right")


def _parts(axis: Axes, plan: Plan) -> None:
    reports = (plan.prefill, plan.decode)
    left = [0.0, 0.0]
    for name, colour in {**PARTS, "adapters": GREY}.items():
        shares = [getattr(report, f"{name}_s") / report.predicted_s for report in reports]
        if any(shares):
            axis.barh([0, 1], shares, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    labels = [f"{report.phase.value}\n{report.predicted_s * 1e3:,.4g} ms" for report in reports]
    axis.set_yticks([0, 1], labels)
    for tick, colour in zip(axis.get_yticklabels(), (PREFILL, DECODE), strict=True):
        tick.set_color(colour)
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_xlabel("share of the predicted step")
    axis.set_title("where the time goes", fontsize=10)
    axis.legend(fontsize=8, ncols=5, loc="upper center")
    axis.set_ylim(-0.6, 1.9)


def _batches(axis: Axes, plan: Plan) -> None:
    """Decode against batch, as far as the sequences fit: TPOT on the left, all streams' rate on the right."""
    predictor = plan.setup.model_of_time()
    context, most = plan.decode.context_tokens, plan.capacity.max_batch
    batches = [2**i for i in range(11) if 2**i <= max(most, 1)]
    if 1 < most < 1024 and most != batches[-1]:
        batches.append(most)
    costs = [
        predictor.predict(plan.setup.asked(StepShape.decode(batch=batch, context_tokens=context))) for batch in batches
    ]
    axis.plot(
        batches, [cost.total_s * 1e3 for cost in costs], color=DECODE, marker="o", ms=3, label="ms per output token"
    )
    axis.fill_between(batches, [c.low_s * 1e3 for c in costs], [c.high_s * 1e3 for c in costs], color=DECODE, alpha=0.2,
                      label="80 % interval")  # fmt: skip
    axis.set_xlabel("sequences in the batch")
    axis.set_ylabel("ms per output token", color=DECODE)
    rate = axis.twinx()
    rate.plot(batches, [b / cost.total_s for b, cost in zip(batches, costs, strict=True)], color=DECODE, ls="--")
    axis.plot([], [], color=DECODE, ls="--", label="tokens per second, all streams (right)")
    rate.set_ylabel("tokens per second, all streams", color=DECODE)
    marks = [(plan.kv_equals_weights_batch, "KV = weights", ":"), (float(most), "memory full", "-")]
    for at, words, line in marks:
        if 1.0 < at <= batches[-1]:
            axis.axvline(at, color=GREY, ls=line, lw=1)
            axis.annotate(words, (at, 0.02), xycoords=("data", "axes fraction"), xytext=(-3, 0), rotation=90,
                          textcoords="offset points", color=GREY, fontsize=8, ha="right", va="bottom")  # fmt: skip
    log_axis(axis.yaxis)
    log_axis(rate.yaxis)
    log_axis(axis.xaxis, [batch for batch in batches if batch & (batch - 1) == 0])
    axis.legend(fontsize=8, loc="upper left")
    axis.set_title(f"decode at context {context}", fontsize=10)
