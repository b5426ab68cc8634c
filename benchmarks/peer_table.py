"""What the turns of peers.py become: rows, ratios, a table; and the file to which several calls add their turns."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from diptych.lab.bench import Spread

DIPTYCH = "diptych"
MIX = "mix"  # 32 requests at once, prompts of 64 to 512, answers of 64 to 128 tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one turn of one engine measured. decode_tokens_per_s: after every prompt has its first token.

    mix_tokens_per_s: tokens written over the time from the first arrival to the last token; a turn has it or the others.
    """

    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    mix_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Rates of one turn, and the ceilings measured just before and after it, averaged.

    round: the same in turns that are compared.
    """

    engine: str
    round: str
    rates: Rates
    read_bytes_per_s: float
    ops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What turns that compare have in common. Of a mix prompt_tokens and new_tokens are means."""

    shape: str
    threads: int
    weights: str
    prompt_tokens: int
    batch: int
    new_tokens: int
    is_mix: bool = False

    @property
    def phases(self) -> tuple[str, ...]:
        """A batch has only its decode row: its prompts' rate is that of one long prompt."""
        return (MIX,) if self.is_mix else ("prefill", "decode") if self.batch == 1 else ("decode",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine, one phase: spreads over the turns. context_tokens: per sequence, at the middle of the phase.

    ratio: Diptych's rate over this engine's in the same round, the median of the rounds; none for Diptych itself.
    """

    engine: str
    weights: str
    phase: str
    batch: int
    prompt_tokens: int
    context_tokens: int
    tokens_per_s: Spread
    ratio: float | None
    turns: int
    read_bytes_per_s: float
    ops_per_s: float


def rows_of(turns: Sequence[Turn], case: Case) -> list[Row]:
    """Medians per engine and phase."""
    rows = []
    for phase in case.phases:
        rates = {(turn.engine, turn.round): getattr(turn.rates, f"{phase}_tokens_per_s") for turn in turns}
        for engine in dict.fromkeys(turn.engine for turn in turns):
            own = [turn for turn in turns if turn.engine == engine]
            ratios = [rates[DIPTYCH, turn.round] / rates[engine, turn.round] for turn in own]
            rows.append(
                Row(
                    engine=engine,
                    weights=case.weights,
                    phase=phase,
                    batch=case.batch,
                    prompt_tokens=case.prompt_tokens,
                    context_tokens=case.prompt_tokens + (0 if phase == "prefill" else case.new_tokens // 2),
                    tokens_per_s=Spread.of([rates[engine, turn.round] for turn in own]),
                    ratio=None if engine == DIPTYCH else statistics.median(ratios),
                    turns=len(own),
                    read_bytes_per_s=statistics.median(turn.read_bytes_per_s for turn in own),
                    ops_per_s=statistics.median(turn.ops_per_s for turn in own),
                )
            )
    return rows


def table_of(rows: Sequence[Row], *, title: str) -> Table:
    """Each row beside its ratio: Diptych's rate over the peer's."""
    table = Table(title=title)
    columns = ("phase", "weights", "batch", "context", "engine", "tok/s", "min..max", "turns", "ratio", "GB/s", "Gop/s")
    for column in columns:
        table.add_column(column, justify="left" if column in ("phase", "weights", "engine") else "right")
    for row in rows:
        rate = row.tokens_per_s
        table.add_row(
            row.phase, row.weights, str(row.batch), str(row.context_tokens), row.engine, f"{rate.median:.1f}",
            f"{rate.min:.1f}..{rate.max:.1f}", str(row.turns), "" if row.ratio is None else f"{row.ratio:.2f}x",
            f"{row.read_bytes_per_s / 1e9:.1f}", f"{row.ops_per_s / 1e9:.0f}",
        )  # fmt: skip
    return table


Kept = Mapping[Case, Sequence[Turn]]


def rounds_of(turns: Sequence[Turn], engines: Iterable[str]) -> int:
    """The rounds in which each of these engines had its turn."""
    found = [{turn.round for turn in turns if turn.engine == engine} for engine in engines]
    return len(set.intersection(*found)) if found else 0


def keep_turns(path: Path, new: Kept) -> None:
    """Adds turns to the file, a line of JSON each."""
    with path.open("a") as file:
        for case, turns in new.items():
            file.writelines(json.dumps({"case": asdict(case), "turn": asdict(turn)}) + "\n" for turn in turns)


def kept_turns(path: Path) -> dict[Case, list[Turn]]:
    """All that the file holds: each turn is compared with those of its round."""
    found: dict[Case, list[Turn]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        turn = entry["turn"]
        found.setdefault(Case(**entry["case"]), []).append(Turn(**{**turn, "rates": Rates(**turn["rates"])}))
    return found
