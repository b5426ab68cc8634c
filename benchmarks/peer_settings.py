"""Which of an engine's settings is the fastest, tried once and kept in a file beside the checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

NEAR = 1.03  # times the fastest: one setting this near in both phases is taken for both


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one setting did once: tokens per second of each phase, and the seconds of both together."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The settings that were fastest in prefill, in decode, and in both together."""

    prefill: str
    decode: str
    total: str


def fastest_of(trials: dict[str, Trial]) -> Fastest:
    """A phase keeps the setting that is the fastest altogether where another one gives it next to nothing."""
    total = min(trials, key=lambda way: trials[way].total_s)

    def of(phase: str) -> str:
        rates = {way: getattr(trial, f"{phase}_tokens_per_s") for way, trial in trials.items()}
        best = max(rates, key=lambda way: rates[way])
        return total if rates[total] * NEAR >= rates[best] else best

    return Fastest(prefill=of("prefill"), decode=of("decode"), total=total)


class KeptTrials:
    """A file of trials by what was tried: the engine and its version, format, threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: dict[str, dict[str, dict[str, float]]] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, key: str) -> dict[str, Trial]:
        """By setting; empty where nothing was tried."""
        return {way: Trial(**trial) for way, trial in self._kept.get(key, {}).items()}

    def keep(self, key: str, trials: dict[str, Trial]) -> None:
        """At once: a run may be cut short."""
        self._kept[key] = {way: asdict(trial) for way, trial in trials.items()}
        self._path.write_text(json.dumps(self._kept, indent=1))
