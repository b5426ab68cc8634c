"""Published measurements, one per row: what was run, on what, and how long it took.

Columns: system,hardware,model,precision,tp,batch,prompt,gen,phase,value,unit,source. Rows that do not describe one
timed prefill or decode step on named hardware (throughputs, open-loop loads, expert parallel) are counted, not used.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from typing import Any

from diptych.cost.tables import device_spec, model_spec
from diptych.ground.errors import ConfigError
from diptych.ground.formats import QUANT_ALIASES, QUANTS
from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape

REQUIRED = ("system", "hardware", "model", "precision", "tp", "batch", "prompt", "gen", "phase", "value", "unit")

_DEVICES = {
    "A100-80": "a100-80gb-sxm",
    "A100": "a100-80gb-sxm",
    "A100-40": "a100-40gb-sxm",
    "H100": "h100-80gb-sxm",
    "H200": "h200-141gb-sxm",
    "H800": "h800-80gb-sxm",
    "H20": "h20-96gb",
    "B200": "b200-180gb",
    "M1": "m1-8",
    "M2": "m2-10",
    "M3": "m3-10",
    "M4": "m4-10",
    "Ryzen AI Max+ 395": "ryzen-ai-max-395",
    "i9-13900K DDR5-6400": "i9-13900k-ddr5-6400",
}
_STACKS = (
    ("gpt-fast", "gpt-fast"),
    ("TensorRT-LLM 0.", "tensorrt-llm-2024"),
    ("TensorRT-LLM 1", "tensorrt-llm"),
    ("NIM (TRT-LLM)", "tensorrt-llm"),
    ("vLLM 2023", "vllm-2023"),
    ("vLLM 0.1", "vllm"),
    ("llama.cpp Metal", "llama.cpp-metal"),
    ("llama.cpp CUDA", "llama.cpp-cuda"),
    ("llama.cpp Vulkan", "llama.cpp-vulkan"),
    ("llama.cpp CPU", "llama.cpp-cpu"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What was run, and who says so."""

    stack: str
    device: str
    model: str
    quant: str
    tp: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow(_Row):
    """One published step time. `work` is the step: the prompt, or one decode step at the mean context of the run."""

    phase: Phase
    work: StepShape
    measured_s: float

    @property
    def label(self) -> str:
        """Short text that names the row next to its device and phase: model, format, split, sequences x tokens."""
        shape = self.work.shapes[0]
        tokens = shape.new_tokens if self.phase is Phase.PREFILL else shape.start_pos + 1
        return f"{self.model} {self.quant} tp{self.tp} {shape.count} x {tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRow(_Row):
    """A number of a running service at `batch` streams: ttft (one stream only), tpot, or output tokens per second.

    Both phases are in it, so no fit uses it: it is predicted from the shipped constants of both.
    """

    measure: str  # ttft | tpot | throughput
    batch: int
    input_tokens: int
    output_tokens: int
    measured: float  # seconds, or tokens per second for throughput

    @property
    def label(self) -> str:
        """Short text that names the row."""
        lengths = f"{self.input_tokens}/{self.output_tokens} x {self.batch}"
        return f"{self.model} {self.quant} tp{self.tp} {lengths}"


def read_rows(text: str) -> tuple[list[PublishedRow], int]:
    """All usable rows of a CSV, and how many were left out. ConfigError when columns are missing."""
    rows: list[PublishedRow] = []
    left_out = 0
    for entry in _entries(text):
        row = _row(entry)
        if row is None:
            left_out += 1
        else:
            rows.append(row)
    return rows, left_out


def read_service_rows(text: str) -> list[ServiceRow]:
    """The rows of a CSV that tell a whole service's speed at a known number of streams."""
    return [row for row in map(_service_row, _entries(text)) if row is not None]


def _entries(text: str) -> list[dict[str, str]]:
    reader = csv.DictReader(io.StringIO(text))
    missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"the rows file has no column {', '.join(missing)}", hint=f"needed: {', '.join(REQUIRED)}")
    return list(reader)


def _what(entry: dict[str, str]) -> dict[str, Any] | None:
    """The fields of `_Row`; None where one of them is not known here."""
    stack = _stack(entry["system"], entry["hardware"])
    device, model = _device(entry["hardware"], stack), _model(entry["model"])
    quant = _quant(entry["precision"], stack)
    if stack is None or device is None or model is None or quant is None or not entry["tp"].isdigit():
        return None
    source = f"{entry['system']}: {entry.get('source', '')}"
    return {"stack": stack, "device": device, "model": model, "quant": quant, "tp": int(entry["tp"]), "source": source}


def _service_row(entry: dict[str, str]) -> ServiceRow | None:
    measure = {"TTFT": "ttft", "TPOT": "tpot", "throughput": "throughput"}.get(entry["phase"])
    what = _what(entry)
    numbers = [entry[name] for name in ("batch", "prompt", "gen")]
    if measure is None or what is None or not all(number.isdigit() for number in numbers):
        return None
    if measure == "ttft" and entry["batch"] != "1":
        return None
    batch, prompt, generated = (int(number) for number in numbers)
    return ServiceRow(
        **what,
        measure=measure,
        batch=batch,
        input_tokens=prompt,
        output_tokens=generated,
        measured=float(entry["value"]) / (1e3 if entry["unit"] == "ms" else 1.0),
    )


def _row(entry: dict[str, str]) -> PublishedRow | None:
    phase = {"prefill": Phase.PREFILL, "decode": Phase.DECODE, "decode batch": Phase.DECODE}.get(entry["phase"])
    what = _what(entry)
    if phase is None or what is None or not entry["batch"].isdigit():
        return None
    if not (entry["prompt"] or "0").isdigit() or not (entry["gen"] or "0").isdigit():
        return None
    batch, prompt, generated = int(entry["batch"]), int(entry["prompt"] or 0), int(entry["gen"] or 0)
    tokens = batch * (prompt if phase is Phase.PREFILL else 1)
    measured_s = _seconds(float(entry["value"]), entry["unit"], tokens)
    if measured_s is None or tokens == 0:
        return None
    if phase is Phase.PREFILL:
        work = StepShape.prefill(batch=batch, new_tokens=prompt)
    else:
        work = StepShape.decode(batch=batch, context_tokens=max(prompt + generated // 2, 2))
    return PublishedRow(**what, phase=phase, work=work, measured_s=measured_s)


def _seconds(value: float, unit: str, tokens: int) -> float | None:
    if unit == "ms":
        return value / 1e3
    return tokens / value if unit == "tok/s" else None


def _stack(system: str, hardware: str) -> str | None:
    if system == "llama.cpp":
        return "llama.cpp-metal" if re.match(r"M\d", hardware) else "llama.cpp-cuda"
    for prefix, stack in _STACKS:
        if system.startswith(prefix):
            return stack
    return None


def _device(hardware: str, stack: str | None) -> str | None:
    name = _DEVICES.get(hardware)
    if name == "ryzen-ai-max-395" and stack == "llama.cpp-cpu":
        name = "ryzen-ai-max-395-cpu"
    if name is None:
        apple = re.match(r"(M\d) (Pro|Max|Ultra) ?(\d+)$", hardware)
        name = f"{apple[1]}-{apple[2]}-{apple[3]}".lower() if apple else hardware.lower().replace(" ", "-")
        name = re.sub(r"^rtx(\d)", r"rtx-\1", name)
    try:
        return device_spec(name).name
    except ConfigError:
        return None


def _model(name: str) -> str | None:
    try:
        return model_spec(name.lower()).name
    except ConfigError:
        return None


def _quant(precision: str, stack: str | None) -> str | None:
    name = precision.lower()
    if name == "mxfp4" and stack is not None and stack.startswith("llama.cpp"):
        return "mxfp4-gguf"  # GGUF keeps everything but the experts in q8_0
    name = QUANT_ALIASES.get(name, name)
    return name if name in QUANTS else None
