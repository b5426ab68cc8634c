"""A rank other than 0 of a model that several processes compute: `python -m diptych.compute.rank`.

Started by `compute.ops.ranks`. It loads its part of the model when rank 0 says so and then runs steps as rank 0 posts
them; between two steps it sleeps. It ends when rank 0 lets it go, or is gone, or when another rank is; what fails here is
written where rank 0 reads it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diptych.compute.loading.calibration import received
from diptych.compute.ops.cpu.kernels import _cpu
from diptych.compute.ops.cpu.model import CpuModel
from diptych.compute.ops.cpu.ranks import Member, about
from diptych.compute.ops.cpus import Placement, allowed_cpus, choose_cpus
from diptych.compute.ops.linked import Carrier
from diptych.compute.ops.ranks import TeamBroken, Verb, answer, placement_of, unpack
from diptych.compute.ops.shares import Rank
from diptych.compute.runner import open_blueprint, random_blueprint
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import EngineError, WorkerLost

PARENT_S = 0.2  # how often it looks whether rank 0 is there
ERROR_BYTES = 1000  # of what failed, to be kept whole by a team (csrc/threads/team.h)
LEAVE_S = 2.0  # for a step or a load to notice that rank 0 is gone


def load_part(rank: Rank, head: dict[str, Any], payload: bytes, path: str | None = None) -> Member:
    """The rank's part of the model that the head names. payload: what was measured of it (`loading.calibration`). path: where
    it lies on this machine, if elsewhere.
    """
    config = ComputeConfig(**head["config"])
    if rank.placement is not None:
        torch.set_num_threads(rank.placement.threads)  # while it loads, as many ranks do at once
        if rank.placement.cpus:
            os.sched_setaffinity(0, rank.placement.cpus)  # kernels' threads are pinned, but for the only one of a rank
    if head["path"] is None:
        blueprint = random_blueprint(head["hf_config"], config, head["seed"])
    else:
        opened = open_blueprint(Path(path or head["path"]), config, max_context_tokens=head["max_context_tokens"])
        blueprint, config = opened.blueprint, opened.config
    blueprint.source.measured = received(head["measured"], payload)
    return Member(rank, CpuModel(blueprint, config, rank=rank))


def run(
    team: Any,
    *,
    say_error: Callable[[str], object] | None = None,
    path: str | None = None,
    placement: Placement | None = None,
) -> None:
    """Answer rank 0 until it lets go. Whatever fails is told and ends the team. path, placement: of this machine, where ranks
    are on several; say_error: how rank 0 is told there.
    """
    member: Member | None = None
    try:
        while True:
            kind, n = team.next() if member is None else member.serve()
            if Verb(kind) is Verb.END:
                return
            head, payload = unpack(bytes(team.message(n)[:n]))
            if Verb(kind) is Verb.LOAD:
                own = placement or placement_of(head["placements"][team.rank])
                rank = Rank(number=team.rank, size=team.size, team=team, placement=own)
                member = load_part(rank, head, payload, path)
                answer(team, about(member.model))
            else:
                assert member is not None, "a verb came before a model"
                member.do(Verb(kind), head, payload)
            team.meet()
    except TeamBroken:
        return
    except BaseException as error:
        text = f"{error.message}\nhint: {error.hint or ''}" if isinstance(error, EngineError) else str(error)
        said = f"{type(error).__name__}|{text}".encode(errors="replace")[:ERROR_BYTES]
        (say_error or team.say_error)(said.decode(errors="ignore"))
        team.break_up()
        raise


def run_linked(path: str, config: ComputeConfig, number: int) -> None:
    """Rank `number` of those that meet rank 0 at config.tp_address, until that lets go. `path`: the model on this machine.

    Raises ConfigError, LoadError or UnsupportedModel for what is wrong here, WorkerLost where rank 0 is gone.
    """
    assert config.tp_address is not None
    cpus = allowed_cpus()
    placement = choose_cpus(config.threads, config.numa, cpus)
    carrier = Carrier(config.tp_address, number, config.tp)
    team = _cpu.Team(os.memfd_create("diptych"), number, config.tp, placement.threads > len(cpus), carrier)
    lost: list[str] = []

    def leave(other: int, why: str) -> None:
        lost.append(why)
        team.break_up()
        if not ended.wait(LEAVE_S):  # it is loading, or waits on a connection that nobody closed
            os._exit(1)

    ended = threading.Event()
    carrier.watch(leave)
    try:
        run(team, say_error=carrier.say_error, path=path, placement=placement)
        if team.is_broken:
            raise WorkerLost(f"rank 0 is gone: {carrier.error or ''.join(lost)}", hint="start it and this rank again")
    finally:
        carrier.is_ending.set()
        ended.set()


def _leave_with(parent: int) -> None:
    """Ends this process, whatever it is doing, when its parent is another than it was: rank 0 is gone."""
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(PARENT_S)
    os._exit(1)


def main(arguments: list[str]) -> None:
    """Arguments: the shared file's descriptor, rank, number of ranks, whether CPUs are fewer than threads, rank 0's process."""
    fd, number, size, is_crowded, parent = map(int, arguments)
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)  # rank 0 answers its requests first, and lets go
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    run(_cpu.Team(fd, number, size, bool(is_crowded)))
    os._exit(0)  # nothing is to be written or told, and gigabytes need not be freed one by one


if __name__ == "__main__":
    main(sys.argv[1:])
