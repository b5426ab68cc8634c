"""The states of sequences as integers, of models whose layers keep some: who holds which place, and which prefixes have one.

A state stands for all tokens before it, so a cached prefix is worth something only where its state was left too. Every place is
in exactly one of four states of its own:

    # free    contents worthless
    # held    a running sequence's own, or of one that waits for its state from another engine
    # coming  a step in flight leaves the state behind a block in it
    # kept    the state behind a block of the prefix index; evicted in least-recently-used order

A block's serial names what lies behind it (`blocks.PrefixEntry`): once the block is evicted nobody asks for that serial again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from diptych.ground.errors import BlockLeak


class StatePool:
    """Owns places 0 .. n_places - 1; compute owns their bytes. Sequences that run may hold one each, whoever else has some."""

    def __init__(self, n_places: int, max_running: int) -> None:
        self.n_places = n_places
        self._max_running = max_running
        self._free = list(range(n_places - 1, -1, -1))
        self._kept: OrderedDict[int, int] = OrderedDict()  # serial -> place
        self._pinned: set[int] = set()  # serials that the step in the making reads from
        self._n_held = 0
        self._n_coming = 0

    @property
    def kept(self) -> int:
        """Prefixes with a state."""
        return len(self._kept)

    @property
    def held(self) -> int:
        """Places of running sequences."""
        return self._n_held

    def begin(self, serial: int | None) -> tuple[int, int] | None:
        """(where it reads, its own place) for a sequence that begins to run behind this block, or from nothing (-1).

        No save takes the last place, so None, or a prefix that loses its state to the sequence, is only where all the others
        are read from in this step.
        """
        if serial is None:
            if len(self._free) + len(self._kept) <= len(self._pinned):
                return None
            self._n_held += 1
            return -1, self._place()
        is_pinned = serial in self._pinned
        self._pinned.add(serial)
        reads = self._kept[serial]
        if len(self._free) + len(self._kept) > len(self._pinned):
            self._kept.move_to_end(serial)
            own = self._place()
        elif is_pinned:
            return None
        else:
            self._pinned.discard(serial)
            own = self._kept.pop(serial)
        self._n_held += 1
        return reads, own

    def take_coming(self) -> int | None:
        """A place for a state to be kept, or None where sequences that may yet run would miss it."""
        if len(self._free) + len(self._kept) - len(self._pinned) <= max(0, self._max_running - self._n_held):
            return None
        self._n_coming += 1
        return self._place()

    def drop(self, place: int) -> None:
        """A sequence gives its place back."""
        self._n_held -= 1
        self._free.append(place)

    def swap(self, place: int) -> None:
        """A sequence goes on with a state that has come, and this place of its own is free."""
        self._n_coming -= 1
        self._free.append(place)

    def keep(self, place: int, serial: int | None) -> bool:
        """What was coming is there, behind the block of this serial; None, or one that has a state: it is of no use."""
        self._n_coming -= 1
        if serial is None or serial in self._kept:
            self._free.append(place)
            return False
        self._kept[serial] = place
        return True

    def forget(self, serial: int) -> None:
        """A later state of the same sequence takes its part."""
        if serial in self._kept and serial not in self._pinned:
            self._free.append(self._kept.pop(serial))

    def longest(self, serials: Sequence[int]) -> int:
        """How many of these blocks, from the first on, end with one that has a state; 0: none has."""
        for n in range(len(serials), 0, -1):
            if serials[n - 1] in self._kept:
                return n
        return 0

    def place_of(self, serial: int) -> int | None:
        """Where the state behind a block lies."""
        return self._kept.get(serial)

    def unpin(self) -> None:
        """The step that reads has been planned, run and ended."""
        self._pinned.clear()

    def reset(self) -> None:
        """Forget every prefix's state."""
        for serial in [serial for serial in self._kept if serial not in self._pinned]:
            self._free.append(self._kept.pop(serial))

    def check(self, held: Iterable[int], coming: Iterable[int]) -> None:
        """Raise BlockLeak unless free, held, coming and kept places are all there are, each once."""
        own, come = list(held), list(coming)
        places = [*self._free, *own, *come, *self._kept.values()]
        if sorted(places) != list(range(self.n_places)) or (len(own), len(come)) != (self._n_held, self._n_coming):
            raise BlockLeak(
                f"{len(self._free)} free, {len(own)} held, {len(come)} coming and {len(self._kept)} kept are not "
                f"{self.n_places} places of states"
            )

    def _place(self) -> int:
        if self._free:
            return self._free.pop()
        serial = next(serial for serial in self._kept if serial not in self._pinned)
        return self._kept.pop(serial)
