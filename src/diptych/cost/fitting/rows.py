"""Published measurements, one per row: what was run, on what, and how long it took.

Columns: system,hardware,model,precision,tp,batch,prompt,gen,phase,value,unit,source. Rows that do not describe one
timed prefill or decode step on named hardware (throughputs, open-loop loads, expert parallel), or are over devices that
cannot share the model, are counted, not used.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.cost.components import check_tp
from diptych.cost.roofline import compute_dtype, link_rate
from diptych.cost.tables import device_spec, model_spec, quant_spec
from diptych.ground.bounds import shown
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
    for entry in lines_of(text, REQUIRED):
        row = _row(entry)
        if row is None:
            left_out += 1
        else:
            rows.append(row)
    return rows, left_out


def read_service_rows(text: str) -> list[ServiceRow]:
    """The rows of a CSV that tell a whole service's speed at a known number of streams."""
    return [row for row in map(_service_row, lines_of(text, REQUIRED)) if row is not None]


def text_of(path: Path) -> str:
    """A file of rows. ConfigError where it cannot be read."""
    try:
        return path.read_text("utf-8-sig")  # spreadsheets begin with a byte order mark
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: it is no UTF-8 text ({error})") from None


class Line(dict[str, str]):
    """One line of a CSV by its columns. number: in the file, for complaints."""

    number: int

    def whole(self, name: str) -> int | None:
        """A whole number of at most ten digits; None for any other text."""
        text = self[name]
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None

    def positive(self, name: str) -> float:
        """A number above 0. ConfigError for any other text."""
        try:
            value = float(self[name])
        except ValueError:
            value = math.nan
        if not 0.0 < value < math.inf:
            raise ConfigError(
                f"line {self.number} of the rows: {name} is {shown(self[name])}; it must be a number greater than 0"
            )
        return value


def lines_of(text: str, needed: Sequence[str]) -> Iterator[Line]:
    """The lines of a CSV. ConfigError where columns are missing, in the head or in a line."""
    reader = csv.DictReader(io.StringIO(text))
    try:
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        if missing:
            raise ConfigError(f"the rows file has no column {', '.join(missing)}", hint=f"needed: {', '.join(needed)}")
        for entry in reader:
            short = [name for name in needed if entry[name] is None]
            if short:
                raise ConfigError(f"line {reader.line_num} of the rows ends before {short[0]}")
            line = Line(entry)
            line.number = reader.line_num
            yield line
    except csv.Error as error:
        raise ConfigError(f"line {reader.line_num + 1} of the rows is no CSV: {error}") from None


def _what(entry: Line) -> dict[str, Any] | None:
    """The fields of `_Row`; None where one of them is not known here."""
    stack = _stack(entry["system"], entry["hardware"])
    device, model = _device(entry["hardware"], stack), _model(entry["model"])
    quant = _quant(entry["precision"], stack)
    tp = entry.whole("tp")
    if stack is None or device is None or model is None or quant is None or not tp:
        return None
    if not _is_possible(model, device, quant, tp):
        return None
    source = f"{entry['system']}: {entry.get('source', '')}"
    return {"stack": stack, "device": device, "model": model, "quant": quant, "tp": tp, "source": source}


def _service_row(entry: Line) -> ServiceRow | None:
    measure = {"TTFT": "ttft", "TPOT": "tpot", "throughput": "throughput"}.get(entry["phase"])
    what = _what(entry)
    batch, prompt, generated = (entry.whole(name) for name in ("batch", "prompt", "gen"))
    if measure is None or what is None or not batch or not prompt or not generated:
        return None
    if measure == "ttft" and batch != 1:
        return None
    return ServiceRow(
        **what,
        measure=measure,
        batch=batch,
        input_tokens=prompt,
        output_tokens=generated,
        measured=entry.positive("value") / (1e3 if entry["unit"] == "ms" else 1.0),
    )


def _row(entry: Line) -> PublishedRow | None:
    phase = {"prefill": Phase.PREFILL, "decode": Phase.DECODE, "decode batch": Phase.DECODE}.get(entry["phase"])
    what = _what(entry)
    batch, (prompt, generated) = (
        entry.whole("batch"),
        (entry.whole(name) if entry[name] else 0 for name in ("prompt", "gen")),
    )
    if phase is None or what is None or batch is None or prompt is None or generated is None:
        return None
    tokens = batch * (prompt if phase is Phase.PREFILL else 1)
    if tokens == 0 or entry["unit"] not in ("ms", "tok/s"):
        return None
    value = entry.positive("value")
    measured_s = value / 1e3 if entry["unit"] == "ms" else tokens / value
    if phase is Phase.PREFILL:
        work = StepShape.prefill(batch=batch, new_tokens=prompt)
    else:
        work = StepShape.decode(batch=batch, context_tokens=max(prompt + generated // 2, 2))
    return PublishedRow(**what, phase=phase, work=work, measured_s=measured_s)


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


def _is_possible(model: str, device: str, quant: str, tp: int) -> bool:
    """Whether so many such devices can share a copy, and multiply it."""
    try:
        check_tp(model_spec(model), tp)
        link_rate(device_spec(device), tp)
        compute_dtype(device_spec(device), quant_spec(quant).compute)
    except ConfigError:
        return False
    return True


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
