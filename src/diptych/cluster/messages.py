"""What the door tells workers, what they tell it, and what they tell each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from diptych.cluster.slots import Seat
from diptych.compute.kv_store import KVPayload
from diptych.control.loop import EngineCore
from diptych.control.stats import WorkerCounts
from diptych.cost.shared_machine import Speeds
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import EngineError
from diptych.ground.events import Event
from diptych.ground.handoff import HandOff
from diptych.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Serve this request, all of it. reader: the worker that is to read its prompt; None: this one."""

    hand_off: HandOff
    reader: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The request is over, whatever became of it."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """A choice is over: its text ended behind so many tokens."""

    request_id: str
    index: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """That worker is gone: nothing more will come from it."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetPrefixes:
    """Drop every cached prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """From the worker that will answer: compute these tokens and send me blocks [first_block, end_block) as they are ready."""

    request_id: str
    answer_to: str
    token_ids: tuple[int, ...]
    cache_salt: str | None
    priority: int
    first_block: int
    end_block: int
    trace: str | None = None  # see Request
    machine: str | None = None  # of who asks: see Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReading:
    """From the worker that had asked: it is not wanted any more."""

    request_id: str
    answer_to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Computed blocks of a request, from `first_block` on. digests: of the chain of tokens that ends with each block.
    reader: who computed them.

    lineage: of the model that computed them; the header's revision also says with which kernels. seat: where the bytes lie that
    the payload then has not.
    """

    request_id: str
    reader: str
    lineage: str
    first_block: int
    digests: tuple[bytes, ...]
    payload: KVPayload
    seat: Seat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateParcel:
    """The state behind the last block that was asked for, of models that have some. digest: of that block; else as `Parcel`."""

    request_id: str
    reader: str
    lineage: str
    digest: bytes
    payload: KVPayload


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Everything that was to be read has been sent, or cannot be. queue_s: until it began; read_s: from there on;
    predicted_s: what was expected of the steps it was read in.
    """

    request_id: str
    queue_s: float
    read_s: float
    predicted_s: float | None = None
    fault: str | None = None


ToWorker = Submit | Cancel | Finish | Lost | ForgetPrefixes | Read | StopReading | Parcel | StateParcel | Done


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a worker says of its engine when it is ready. All but the name are alike in workers of one cluster."""

    name: str
    model_revision: str
    scheduler: SchedulerConfig
    blocks: BlockConfig
    max_running_sequences: int
    context_limit_tokens: int
    node: str
    pid: int

    @classmethod
    def of(cls, name: str, core: EngineCore, *, node: str = "", pid: int = 0) -> Facts:
        """Of a worker's core."""
        return cls(
            name=name,
            node=node,
            pid=pid,
            model_revision=core.model_revision,
            scheduler=core.config,
            blocks=core.block_config,
            max_running_sequences=core.max_running_sequences,
            context_limit_tokens=core.context_limit_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a server says of a model that is loaded elsewhere; the fields of `compute.model.Model`."""

    spec: ModelSpec
    backend_name: str
    keeps_bits: bool
    weights_format: str
    formats: Mapping[str, int]
    expert_formats: Mapping[str, int]
    head_format: str
    kv_format: str
    revision: str
    weight_bytes: int
    n_parameters: int
    threads: int
    instruction_set: str
    hf_config: Mapping[str, Any]

    def on_loss(self, listener: Callable[[EngineError], object]) -> Callable[[], object]:
        """Nobody calls: ranks are their worker's, whose end is heard of in another way."""
        return lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A worker is ready. incarnation: another one after every start; what is meant for an older one is not for it.

    speeds: of this machine, where a profile predicts them; gap: why none does. probed: this worker's own, where pools follow
    the load and nothing is predicted. cores: of its node, where its model is computed on them.
    """

    version: str
    incarnation: str
    facts: Facts
    card: ModelCard
    load_s: float
    now_s: float
    speeds: Speeds | None
    gap: str | None
    cores: int | None
    probed: Speeds | None = None


class Heard(NamedTuple):
    """The worker took a Cancel: what it says from here on under that name is of another request, which came later."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Events of whole steps, in order, and the numbers behind them. now_s: the worker's clock."""

    events: list[Event | Heard]
    counts: WorkerCounts
    now_s: float
