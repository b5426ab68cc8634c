"""Memory that one worker writes and another on its machine reads where it lies: Ray's object store would copy it once more.

    slots = Slots("prefill-0", 4, slot_bytes)             # of the worker that reads prompts
    taken = slots.take("decode-0", now_s, until_s)        # write to taken.memory, send taken.seat
    mapped = Mapped()                                     # of the worker that answers
    memory = mapped.memory(seat); ...; mapped.give_back(seat)

The memory is an anonymous file (`memfd`), mapped by the process and the descriptor that a seat names, so nothing of it stays
whatever dies when, and only the same user can open it. A word for each slot says whose turn it is: 0, the owner may write;
else the number of the use with which it was sent, until the other puts 0. Nobody waits for anybody: where no slot is free,
what is to be sent goes another way. One that nobody gives back is the owner's again after a time; who then still looks
finds other bytes than were announced, and their checksums say so.
"""

from __future__ import annotations

import mmap
import os
import uuid
import weakref
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from diptych.ground.errors import TransferError

HEAD_BYTES = mmap.PAGESIZE  # the words


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where bytes lie for who may map them. use: counts what was written to the slot."""

    owner: str
    pid: int
    descriptor: int
    name: str  # of the file, so that a number that means another file by now is not taken for it
    file_bytes: int
    slot: int
    slot_bytes: int
    use: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A slot that is to be written: memory [slot_bytes] uint8."""

    seat: Seat
    memory: np.ndarray


class Slots:
    """The owner's side. Memory is used only where something is written; the first slots are taken first."""

    def __init__(self, owner: str, n_slots: int, slot_bytes: int) -> None:
        self._owner = owner
        self._slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._holders: list[tuple[str, float]] = [("", 0.0)] * n_slots  # and until when
        self._n_uses = 0
        self._name = f"diptych-{uuid.uuid4().hex}"
        self._descriptor: int | None = None
        if n_slots and hasattr(os, "memfd_create"):  # else there are none
            self._descriptor = os.memfd_create(self._name, os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)
            self._file_bytes = HEAD_BYTES + n_slots * self._slot_bytes
            os.ftruncate(self._descriptor, self._file_bytes)
            self._pages = mmap.mmap(self._descriptor, self._file_bytes)
            self._uses = _words(self._pages, n_slots)

    def take(self, holder: str, now_s: float, until_s: float) -> Taken | None:
        """A slot for what `holder` is to read; None where all are in use."""
        if self._descriptor is None:
            return None
        free = (i for i, (_, end_s) in enumerate(self._holders) if self._uses[i] == 0 or end_s <= now_s)
        slot = next(free, None)
        if slot is None:
            return None
        self._n_uses += 1
        self._holders[slot] = holder, until_s
        self._uses[slot] = self._n_uses
        seat = Seat(
            owner=self._owner,
            pid=os.getpid(),
            descriptor=self._descriptor,
            name=self._name,
            file_bytes=self._file_bytes,
            slot=slot,
            slot_bytes=self._slot_bytes,
            use=self._n_uses,
        )
        return Taken(seat=seat, memory=_memory(self._pages, seat))

    def lost(self, holder: str) -> None:
        """That worker is gone, and gives nothing back."""
        for slot, (name, _) in enumerate(self._holders):
            if name == holder:
                self._holders[slot], self._uses[slot] = ("", 0.0), 0

    @property
    def n_in_use(self) -> int:
        """Slots that were not given back."""
        return 0 if self._descriptor is None else int(np.count_nonzero(self._uses))


class Mapped:
    """The other side: files of other workers, each mapped once."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[str, mmap.mmap]] = {}  # by their owners, with their names

    def memory(self, seat: Seat) -> np.ndarray:
        """[slot_bytes] uint8, to be read. Raises TransferError where it cannot be mapped."""
        memory = _memory(self._pages(seat), seat)
        memory.flags.writeable = False
        return memory

    def give_back(self, seat: Seat) -> None:
        """Let its owner write again, if it is still this use."""
        with suppress(TransferError):  # then it is the owner's again when its time is over
            words = _words(self._pages(seat), seat.slot + 1)
            if words[seat.slot] == seat.use:
                words[seat.slot] = 0

    def lost(self, owner: str) -> None:
        """That worker is gone: its memory goes, too."""
        self._files.pop(owner, None)

    def _pages(self, seat: Seat) -> mmap.mmap:
        name, pages = self._files.get(seat.owner, ("", None))
        if pages is None or name != seat.name:
            pages = _mapped(seat)
            self._files[seat.owner] = seat.name, pages
        return pages


def _mapped(seat: Seat) -> mmap.mmap:
    path = f"/proc/{seat.pid}/fd/{seat.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.readlink(f"/proc/self/fd/{descriptor}")
            if found != f"/memfd:{seat.name} (deleted)":
                raise TransferError(f"{path} is another file by now", reason="memory")
            return mmap.mmap(descriptor, seat.file_bytes)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise TransferError(f"cannot map {path}: {error}", reason="memory") from error


def _words(pages: mmap.mmap, n_slots: int) -> np.ndarray:
    return np.frombuffer(pages, dtype=np.uint64, count=n_slots)


def _memory(pages: mmap.mmap, seat: Seat) -> np.ndarray:
    begin = HEAD_BYTES + seat.slot * seat.slot_bytes
    return np.frombuffer(pages, dtype=np.uint8, count=seat.slot_bytes, offset=begin)
