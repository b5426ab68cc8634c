"""Published numbers of running services that state their load: so many streams, prompts and answers of known lengths.

Two formats are read: deployment rows (TTFT and TPOT of one service per row, the columns of ai-dynamo/aiconfigurator's
silicon samples) and the service rows among published ones (`rows.py`). What cannot be simulated is counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from diptych.cost.fitting.recipes import (
    USUAL,
    Run,
    Scheduling,
    graph_tokens_of,
    has_triton_experts,
    layout_of,
    memory_of,
    scheduling_of,
    shown_tokens_of,
)
from diptych.cost.fitting.rows import Line, ServiceRow, lines_of
from diptych.cost.layout import PLAIN, Layout
from diptych.cost.memory import USUAL_RULE, MemoryRule
from diptych.cost.setup import table_name
from diptych.cost.tables import device_spec, model_spec
from diptych.ground.errors import ConfigError
from diptych.ground.formats import QUANTS

NEEDED = (
    "backend", "backend_version", "model_path", "system", "precision", "mode", "isl", "osl", "tp_size", "pp_size",
    "attention_dp_size", "moe_tp_size", "moe_ep_size", "silicon_ttft_ms", "silicon_tpot_ms", "measured", "concurrency",
)  # fmt: skip
STACKS = {"trtllm": "tensorrt-llm", "vllm": "vllm", "sglang": "sglang"}
_DEVICES = {
    "h100_sxm": "h100-80gb-sxm",
    "h200_sxm": "h200-141gb-sxm",
    "b200_sxm": "b200-180gb",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
}
# what hub names are called in the table of models, where cutting off their endings does not tell
_MODELS = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-r1-nvfp4": "deepseek-v3",
    "deepseek-v3.1-nvfp4": "deepseek-v3",
    "qwen3-32b-nvfp4": "qwen3-32b",
    "kimi-k2.5": "kimi-k2",
    "minimax-m2.5": "minimax-m2",
}
INFERENCE_X_SPREAD = 0.8  # the other rows are of one length
CONTRADICTION = 1.1  # of TPOT; runs that were repeated on one device and version differ by 0.6 % (median), 8 % (p90)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """A closed loop: `streams` clients, prompts and answers between `spread` of a length and that length."""

    streams: int
    input_tokens: int
    output_tokens: int
    spread: float = 1.0
    scheduling: Scheduling = USUAL


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredService:
    """One service under one load, and what was seen: means over requests in seconds, output tokens per second; or None.

    graph_tokens: prompts in steps of at most so many tokens are replayed from graphs, as decode is.
    shown_tokens: clients see the first so many tokens of an answer at one time.
    has_triton_experts: layers with experts are launched as vLLM's, whatever the software.
    """

    stack: str
    version: str
    device: str
    model: str
    quant: str
    tp: int
    load: ServiceLoad
    layout: Layout = PLAIN
    ttft_s: float | None = None
    tpot_s: float | None = None
    output_tokens_per_s: float | None = None
    kv: str = "bf16"
    memory: MemoryRule = USUAL_RULE
    source: str = ""
    graph_tokens: int = 0
    shown_tokens: int = 1
    has_triton_experts: bool = False

    @property
    def label(self) -> str:
        """Short text that names the row."""
        load = self.load
        lengths = f"{load.input_tokens}/{load.output_tokens} x {load.streams}"
        words = f" ({self.layout.words})" if self.layout != PLAIN else ""
        return f"{self.model} {self.quant} on {self.tp * self.layout.parts} x {self.device}{words}, {lengths}"


def is_deployments(text: str) -> bool:
    """Whether a CSV has deployment rows."""
    return "silicon_ttft_ms" in text.partition("\n")[0]


def read_deployments(text: str) -> tuple[list[MeasuredService], Counter[str]]:
    """The services of a CSV, and how many rows were left out for what reason. ConfigError when columns are missing."""
    found: list[MeasuredService] = []
    left_out: Counter[str] = Counter()
    for entry in lines_of(text, NEEDED):
        try:
            found.append(_service(entry))
        except _LeftOut as why:
            left_out[str(why)] += 1
    once = list(dict.fromkeys(found))
    left_out["the same row once more"] = len(found) - len(once)
    kept = _agreeing(once)
    left_out["another row of the same setup and load differs by more than a tenth"] = len(once) - len(kept)
    return kept, +left_out


def _agreeing(rows: Iterable[MeasuredService]) -> list[MeasuredService]:
    """Without those whose TPOT is contradicted: something that nobody states was different (drafts, most likely)."""
    groups: dict[MeasuredService, list[MeasuredService]] = {}
    for row in rows:
        groups.setdefault(replace(row, ttft_s=None, tpot_s=None), []).append(row)
    kept = []
    for group in groups.values():
        times = [row.tpot_s for row in group if row.tpot_s is not None]
        if not times or max(times) <= CONTRADICTION * min(times):
            kept += group
    return kept


class _LeftOut(Exception):
    """Why a row is not used."""


def _service(entry: Line) -> MeasuredService:
    if entry["mode"] != "agg":
        raise _LeftOut("pools of prefill and decode")
    if entry["pp_size"] not in ("", "1"):
        raise _LeftOut("pipeline parallel")
    streams, input_tokens, output_tokens = (entry.whole(name) for name in ("concurrency", "isl", "osl"))
    if not streams or not input_tokens or not output_tokens:
        raise _LeftOut("no load stated")
    try:
        device = device_spec(_DEVICES.get(entry["system"], entry["system"])).name
        model = _model(entry["model_path"])
    except ConfigError:
        raise _LeftOut(f"{entry['model_path']}: a model or a device that the tables do not have") from None
    tp, layout = _split(entry)
    quant, stack = _quant(entry["precision"], model), STACKS.get(entry["backend"], entry["backend"])
    run = Run(
        stack=stack,
        version=entry["backend_version"],
        device=device,
        model=model,
        weights=quant,
        devices=tp * layout.dp,
        layout=layout,
        streams=streams,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        measured=entry["measured"],
        is_complete=bool(entry["attention_dp_size"]),
    )
    if run.drafted:
        raise _LeftOut("drafts of tokens (multi-token prediction), of which nobody states how many held")
    layout = layout_of(run)
    load = ServiceLoad(
        streams=run.streams,
        input_tokens=run.input_tokens,
        output_tokens=run.output_tokens,
        spread=INFERENCE_X_SPREAD if run.is_inference_x else 1.0,
        scheduling=scheduling_of(run),
    )
    return MeasuredService(
        stack=stack,
        version=entry["backend_version"],
        device=device,
        model=model,
        quant=quant,
        tp=run.devices // layout.dp,
        layout=layout,
        load=load,
        ttft_s=entry.positive("silicon_ttft_ms") / 1e3,
        tpot_s=entry.positive("silicon_tpot_ms") / 1e3,
        kv=run.kv,
        memory=memory_of(run),
        graph_tokens=graph_tokens_of(run),
        shown_tokens=shown_tokens_of(run),
        has_triton_experts=has_triton_experts(run),
        source="ai-dynamo/aiconfigurator silicon samples",
    )


def _split(entry: Line) -> tuple[int, Layout]:
    """Tensor parallel and the rest. Rows of N devices, expert parallel, are written with one degree as N x N:

    experts N x N beside a tensor or attention-data parallel of N x N (TensorRT-LLM, SGLang). vLLM's have N for both of these
    and experts N x N, and are tensor parallel: 15 of them repeat rows, number for number, that say so. What of vLLM's is
    attention-data parallel its recipe says (`layout_of`). A row that is silent about attention-data parallel has as much of it
    as its experts have devices beyond tensor parallel.
    """
    tp, dp, wide, ep = (entry.whole(f"{name}_size") or 1 for name in ("tp", "attention_dp", "moe_tp", "moe_ep"))
    if wide == ep > 1 and ep * ep in (tp, dp) and entry["attention_dp_size"]:
        return (ep, Layout(ep=ep)) if dp == 1 else (1, Layout(dp=ep, ep=ep))
    if tp > 1 and dp > 1 and ep == tp * dp:
        return tp, Layout(ep=tp)
    if not entry["attention_dp_size"] and wide * ep > tp and wide * ep % tp == 0:
        dp = wide * ep // tp
    return tp, Layout(dp=dp, ep=ep)


def _model(path: str) -> str:
    short = path.lower().rpartition("/")[2]
    return model_spec(_MODELS.get(short, table_name(path))).name  # whatever lies under such a path here


def _quant(precision: str, model: str) -> str:
    name = precision or "bf16"
    if name == "fp4" and model.startswith("gpt-oss"):
        return "mxfp4"
    if name not in QUANTS:
        raise _LeftOut(f"weights in {name}")
    return name


def of_published(rows: Iterable[ServiceRow]) -> list[MeasuredService]:
    """The service rows among published ones, one measure each."""
    return [
        MeasuredService(
            stack=row.stack,
            version="",
            device=row.device,
            model=row.model,
            quant=row.quant,
            tp=row.tp,
            load=ServiceLoad(streams=row.batch, input_tokens=row.input_tokens, output_tokens=row.output_tokens),
            ttft_s=row.measured if row.measure == "ttft" else None,
            tpot_s=row.measured if row.measure == "tpot" else None,
            output_tokens_per_s=row.measured if row.measure == "throughput" else None,
            kv="bf16" if row.quant in ("bf16", "int4") else "fp8",
            source=row.source,
        )
        for row in rows
    ]
