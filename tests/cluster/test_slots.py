"""Memory that two workers of one machine see: no copy between them, nothing stays in use, and what cannot be is copied."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.cluster.local import LocalCluster, data_of, no_fault
from tests.cluster.test_hand_off import GREEDY, prompts, said
from tests.engine.conftest import tiny_config

from diptych.cluster.messages import Parcel, ToWorker
from diptych.cluster.slots import Mapped, Slots
from diptych.engine.llm import LLM
from diptych.engine.load import LoadedModel, load
from diptych.ground.errors import TransferError

pytestmark = pytest.mark.native
HERE = "this machine"


@pytest.fixture(scope="module")
def loaded(tiny_dir: Path) -> LoadedModel:
    return load(str(tiny_dir), tiny_config("cpu"))


def test_what_one_writes_the_other_reads_where_it_lies() -> None:
    """And gives back; a word too late does not free the next use of the same memory."""
    slots, mapped = Slots("a", 2, 5000), Mapped()
    taken = slots.take("b", 0.0, 30.0)
    assert taken is not None
    taken.memory[:3] = (1, 2, 3)
    memory = mapped.memory(taken.seat)
    assert memory[:3].tolist() == [1, 2, 3]
    taken.memory[0] = 9
    assert memory[0] == 9, "it is the same memory"
    with pytest.raises(ValueError, match="read-only"):
        memory[0] = 1
    mapped.give_back(taken.seat)
    assert slots.n_in_use == 0
    again = slots.take("b", 0.0, 30.0)
    assert again is not None
    assert again.seat.slot == taken.seat.slot
    mapped.give_back(taken.seat)
    assert slots.n_in_use == 1


def test_nobody_waits_for_a_slot() -> None:
    """All in use: None. Those of a worker that is gone, or that nobody gave back in time, are used again.

    What a dead worker had was counted as in use until somebody took it.
    """
    slots = Slots("a", 2, 100)
    assert [slots.take(name, 0.0, 30.0) is not None for name in ("b", "c", "b")] == [True, True, False]
    slots.lost("c")
    assert slots.n_in_use == 1
    assert slots.take("d", 1.0, 31.0) is not None
    assert slots.take("d", 1.0, 31.0) is None
    assert slots.take("d", 30.0, 60.0) is not None, "the time of the first is over"
    assert Slots("a", 0, 100).take("b", 0.0, 30.0) is None


def test_another_file_is_not_written_to(tmp_path: Path) -> None:
    """A descriptor's number may mean something else by now: a word of zeros in somebody's file would be the end of it."""
    slots = Slots("a", 1, 100)
    taken = slots.take("b", 0.0, 30.0)
    assert taken is not None
    path = tmp_path / "precious"
    path.write_bytes(b"x" * taken.seat.file_bytes)
    with path.open("r+b") as file:
        seat = replace(taken.seat, descriptor=file.fileno())
        with pytest.raises(TransferError, match="another file"):
            Mapped().memory(seat)
    assert set(path.read_bytes()) == {ord("x")}
    with pytest.raises(TransferError, match="cannot map") as caught:
        Mapped().memory(replace(taken.seat, pid=2**22 + 1))
    assert caught.value.reason == "memory"


def test_the_memory_goes_with_who_had_it() -> None:
    """Neither a descriptor nor a mapping may stay for every worker that was started again."""
    before = len(os.listdir("/proc/self/fd"))
    slots, mapped = Slots("a", 1, 100), Mapped()
    taken = slots.take("b", 0.0, 30.0)
    assert taken is not None
    memory = mapped.memory(taken.seat)
    assert len(os.listdir("/proc/self/fd")) > before
    del slots, memory
    taken = None
    mapped.lost("a")
    assert len(os.listdir("/proc/self/fd")) == before


def test_workers_of_one_machine_send_no_bytes(loaded: LoadedModel) -> None:
    """Parcels name where the bytes lie, every slot comes back, and more parcels than slots take the other way."""
    config = tiny_config("cpu")
    asked = prompts((239,))
    wanted = said(LLM(loaded, config).generate(asked, GREEDY))
    seen: list[bool] = []

    def watch(message: ToWorker) -> list[tuple[int, ToWorker]]:
        if isinstance(message, Parcel):
            seen.append(message.seat is not None)
            assert (message.payload.data_NB.size == 0) == seen[-1]
            assert data_of(message).any()
        return [(0, message)]

    for delay, with_seats in ((0, {True}), (50, {True, False})):
        seen.clear()
        cluster = LocalCluster(
            loaded, config, machine=HERE, lease_s=300.0, late_s=300.0,
            fault=lambda message, delay=delay: [(delay, one) for _, one in watch(message)],
        )  # fmt: skip
        got = cluster.llm.generate(asked, GREEDY)
        assert said(got) == wanted
        assert got[0].usage.transferred_tokens == 224
        assert set(seen) == with_seats
        assert [worker._reader._slots.n_in_use for worker in cluster.workers.values()] == [0, 0]
        cluster.check()


def test_memory_that_cannot_be_mapped_is_done_without(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers may think that they are one machine: one prompt is read again, and the next travels."""
    config = tiny_config("cpu")
    asked = prompts((130, 130))
    wanted = said(LLM(loaded, config).generate(asked, GREEDY))
    cluster = LocalCluster(loaded, config, machine=HERE, fault=no_fault)

    def refuse(self: Mapped, seat: object) -> np.ndarray:
        raise TransferError("cannot map it", reason="memory")

    monkeypatch.setattr(Mapped, "memory", refuse)
    got = [cluster.llm.generate([one], GREEDY)[0] for one in asked]
    assert said(got) == wanted
    assert [one.usage.transferred_tokens for one in got] == [0, 128]
    assert cluster.reasons("recomputes") == {"memory": 1}
    cluster.check()


def test_memory_of_a_worker_that_was_sent_away_goes(loaded: LoadedModel) -> None:
    """A pool that shrinks and grows again kept the mapped memory of everybody who had ever been in it."""
    cluster = LocalCluster(loaded, tiny_config("cpu"), machine=HERE)
    cluster.llm.generate(prompts((130,)), GREEDY)
    mapped = cluster.workers["decode-0"]._mapped
    assert set(mapped._files) == {"prefill-0"}
    cluster.core.drain("prefill-0")
    cluster.core.detach("prefill-0")
    cluster.check()
    assert not mapped._files
