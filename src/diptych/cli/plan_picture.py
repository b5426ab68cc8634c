"""The planner's answer as a picture: the roofline with both phases, where their time goes, and decode against batch."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from diptych.cost.planner import Plan
from diptych.cost.roofline import peak_flops_per_s
from diptych.cost.workload import Workload
from diptych.ground.errors import ConfigError

PREFILL, DECODE, GREY = "#c1440e", "#1f5a8a", "#8a8a8a"


def draw(plan: Plan, path: Path) -> None:
    """Write the picture; the ending of the name chooses the format. Raises ConfigError when it cannot be written."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.8))
    try:
        _roofline(axes[0], plan)
        _parts(axes[1], plan)
        _batches(axes[2], plan)
        figure.suptitle(f"{plan.setup.label}, KV {plan.setup.kv.name}")
        figure.tight_layout()
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from None
    finally:
        plt.close(figure)


def _roofline(axis: Axes, plan: Plan) -> None:
    hardware = plan.setup.hardware
    peak = peak_flops_per_s(hardware, plan.setup.quant.compute)
    bandwidth = hardware.memory_bytes_per_s
    intensities = [10 ** (i / 20) for i in range(-20, 100)]
    axis.loglog(intensities, [min(peak, bandwidth * x) for x in intensities], color="black", lw=1.2)
    axis.axvline(plan.prefill.balance, color=GREY, ls=":", lw=1)
    axis.text(
        plan.prefill.balance * 1.2,
        bandwidth * 1.5,
        f"balance\n{plan.prefill.balance:.0f} FLOP/B",
        color=GREY,
        fontsize=8,
    )
    for report, colour in ((plan.prefill, PREFILL), (plan.decode, DECODE)):
        for line in report.components:
            if line.intensity and line.flops:
                rate = min(peak, bandwidth * line.intensity)
                axis.plot(line.intensity, rate, "o", color=colour, ms=4, alpha=0.45)
        achieved = report.flops / report.predicted_s
        axis.plot(report.intensity, achieved, "*", color=colour, ms=15, label=f"{report.phase.value}, predicted")
    axis.set_xlabel("FLOP per byte")
    axis.set_ylabel("FLOP/s")
    axis.set_title("roofline; dots: components at the peak", fontsize=10)
    axis.legend(fontsize=8, loc="lower right")


def _parts(axis: Axes, plan: Plan) -> None:
    names = ("linear_s", "attention_s", "launch_s", "link_s")
    colours = ("#4c78a8", "#e45756", "#9c9c9c", "#54a24b")
    reports = (plan.prefill, plan.decode)
    left = [0.0, 0.0]
    for name, colour in zip(names, colours, strict=True):
        shares = [getattr(report, name) / report.predicted_s for report in reports]
        axis.barh([0, 1], shares, left=left, color=colour, label=name.removesuffix("_s"))
        left = [a + b for a, b in zip(left, shares, strict=True)]
    labels = [f"{report.phase.value}\n{report.predicted_s * 1e3:,.4g} ms" for report in reports]
    axis.set_yticks([0, 1], labels)
    axis.set_xlim(0, 1)
    axis.set_xlabel("share of the predicted step")
    axis.set_title("where the time goes", fontsize=10)
    axis.legend(fontsize=8, ncols=4, loc="upper center")
    axis.set_ylim(-0.6, 1.9)


def _batches(axis: Axes, plan: Plan) -> None:
    predictor = plan.setup.model_of_time()
    context = plan.decode.context_tokens
    batches = [2**i for i in range(11)]
    costs = [predictor.predict(Workload.decode(batch=batch, context_tokens=context)) for batch in batches]
    axis.plot(batches, [cost.total_s * 1e3 for cost in costs], color=DECODE, marker="o", ms=3, label="TPOT")
    axis.fill_between(batches, [c.low_s * 1e3 for c in costs], [c.high_s * 1e3 for c in costs], color=DECODE, alpha=0.2)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("sequences in the batch")
    axis.set_ylabel("ms per output token", color=DECODE)
    rate = axis.twinx()
    rate.plot(batches, [batch / cost.total_s for batch, cost in zip(batches, costs, strict=True)], color=PREFILL)
    rate.set_yscale("log")
    rate.set_ylabel("tokens per second, all streams", color=PREFILL)
    if plan.kv_equals_weights_batch < batches[-1]:
        axis.axvline(plan.kv_equals_weights_batch, color=GREY, ls=":", lw=1)
        axis.text(plan.kv_equals_weights_batch * 1.05, axis.get_ylim()[0] * 1.1, "KV = weights", color=GREY, fontsize=8)
    if plan.capacity.max_batch and plan.capacity.max_batch < batches[-1]:
        axis.axvline(plan.capacity.max_batch, color="black", ls="--", lw=1)
        axis.text(plan.capacity.max_batch * 1.05, axis.get_ylim()[1] * 0.6, "memory full", fontsize=8)
    axis.set_title(f"decode at context {context}", fontsize=10)
