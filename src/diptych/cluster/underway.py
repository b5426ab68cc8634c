"""Prompts that another worker reads, as the one that answers knows them (`cluster.reader` is the other side)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from diptych.cluster.messages import Done, Submit
from diptych.control.loop import EngineCore
from diptych.control.stats import CoreStats
from diptych.ground.handoff import HandOff


@dataclass(slots=True)
class Coming:
    """A request whose blocks are held while another worker reads its prompt."""

    submit: Submit
    first_block: int
    end_block: int
    begin_s: float
    lease_s: float  # when it ends
    digests: list[bytes]
    arrived: set[int] = field(default_factory=set)
    needs_state: bool = False  # else there is none, or it is here
    refused: str | None = None
    done: Done | None = None

    @property
    def n_blocks(self) -> int:
        """Leading blocks that are here."""
        end = self.first_block
        while end in self.arrived:
            end += 1
        return end

    @property
    def is_complete(self) -> bool:
        """Whether everything that was asked for is here."""
        return self.n_blocks == self.end_block and not self.needs_state


def stats_with(core: EngineCore, unplaced: Sequence[HandOff]) -> CoreStats:
    """The core's numbers; those that wait for it to hold blocks wait as those in its line do, and weigh as much."""
    stats, n_sequences, n_tokens = core.stats(), 0, 0
    for one in unplaced:
        prompt_tokens, n_open = len(one.request.prompt_token_ids), sum(t is not None for t in one.output_token_ids)
        most = min(one.request.sampling.max_tokens, core.context_limit_tokens - prompt_tokens)
        n_sequences, n_tokens = n_sequences + n_open, n_tokens + prompt_tokens + n_open * most
    return (
        replace(stats, waiting=stats.waiting + n_sequences, waiting_tokens=stats.waiting_tokens + n_tokens)
        if unplaced
        else stats
    )
