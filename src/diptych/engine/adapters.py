"""The adapters that one engine serves, by name: loaded and unloaded while it runs, within bounds, and never under a request.

adapters = Adapters(model, max_loras=8, max_rank=64)
adapters.add("poet", adapters.read("poet", "path/of/poet"))   # between two steps
ref = adapters.find("poet")                    # what a request carries; on any thread
adapters.remove("poet", on_gone)               # nobody finds it any more; its memory goes with the last request
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diptych.compute.adapters import Adapter, read_adapter
from diptych.compute.loading.hub import resolve_model_dir
from diptych.compute.model import Model
from diptych.engine.memory import memory_of
from diptych.ground.bounds import shown, text
from diptych.ground.errors import CapacityError, ConfigError, RequestError
from diptych.ground.request import AdapterRef

logger = logging.getLogger("diptych.engine")

AN_ADAPTER = (
    "an adapter is a folder with adapter_config.json and adapter_model.safetensors, or a name on the Hugging Face hub"
)
MAX_NAME_CHARS = 256
_BYTES = 2  # of an element of A or B, where memory is asked for


@dataclass(slots=True, kw_only=True)
class Loaded:
    """An adapter in the model's memory, and how many open requests it answers."""

    ref: AdapterRef
    path: Path
    rank: int
    n_bytes: int
    n_requests: int = 0
    n_kept: int = 0  # bodies among them whose requests still come
    on_gone: Callable[[], object] | None = None  # set: it goes with its last request

    @property
    def is_leaving(self) -> bool:
        """Whether no new request may have it."""
        return self.on_gone is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCounts:
    """Adapters served and the most that may be, memory of all, and names of those with requests that run or wait."""

    loaded: int
    most: int
    n_bytes: int
    running: tuple[str, ...]
    waiting: tuple[str, ...]


class Adapters:
    """Owned by the engine's thread: `add`, `remove`, `hold` and `keep` between steps; `find` and `read` anywhere."""

    def __init__(self, model: Model, *, max_loras: int, max_rank: int) -> None:
        self._model = model
        self.max_loras = max_loras
        self.max_rank = max_rank
        self._by_name: dict[str, Loaded] = {}
        self._by_number: dict[int, Loaded] = {}  # those that are leaving, too

    @property
    def served(self) -> tuple[Loaded, ...]:
        """Those that can be asked for, in the order they came."""
        return tuple(self._by_name.values())

    @property
    def n_bytes(self) -> int:
        """Memory of all, leaving ones included."""
        return sum(one.n_bytes for one in list(self._by_number.values()))

    def named(self, name: str) -> AdapterRef | None:
        """What a request for that adapter carries; None where none of that name is served."""
        found = self._by_name.get(name)
        return None if found is None else found.ref

    def find(self, name: str) -> AdapterRef:
        """The same; RequestError where it is not served."""
        found = self.named(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(self._by_name) or "none"
            raise RequestError(f"no adapter {shown(name)} is loaded; loaded are: {known}", param="adapter")
        return found

    def read(self, name: str, path: str | Path, *, takes_hub_names: bool = False) -> Adapter:
        """An adapter from its folder, or its name on the hub. ConfigError, LoadError or CapacityError where it is refused."""
        text("lora_name", name, ConfigError, least=1, most=MAX_NAME_CHARS)
        if "," in name or not name.isprintable():  # it stands in lines of the log, and between commas in a metric
            raise ConfigError(f"lora_name is {shown(name)}; commas and control characters may not be in it")
        folder = resolve_model_dir(path, wanted=AN_ADAPTER) if takes_hub_names else Path(path).expanduser()
        return read_adapter(folder, max_rank=self.max_rank)

    def add(self, name: str, adapter: Adapter, *, replaces: bool = False) -> None:
        """Serve it under this name from now on. replaces: in place of the one that has the name, if there is one.

        Raises ConfigError for a name that is taken, CapacityError where there is no room, LoadError where it does not fit.
        """
        before = self._by_name.get(name)
        if before is not None and not replaces:
            raise ConfigError(
                f"an adapter {name!r} is already loaded, from {before.path}",
                hint="unload it first, choose another name, or load in place",
            )
        makes_room = before is not None and before.n_requests == 0
        if len(self._by_number) - makes_room >= self.max_loras:
            raise CapacityError(
                f"{len(self._by_number)} adapters are loaded ({self._told()}); at most {self.max_loras} may be",
                hint="unload one, wait for requests of one that is leaving, or raise max_loras (--max-loras)",
            )
        needed, free = _BYTES * adapter.n_parameters, memory_of(self._model.device).available_bytes
        if needed > free:
            raise CapacityError(f"adapter {name!r} needs {needed} bytes; {free} bytes of memory are free")
        number = self._model.add_adapter(adapter)
        loaded = Loaded(
            # a number is given again, a revision only to the same numbers
            ref=AdapterRef(name=name, number=number, revision=adapter.revision, n_parameters=adapter.n_parameters),
            path=adapter.path,
            rank=adapter.rank,
            n_bytes=self._model.adapter_bytes(number),
        )
        if before is not None:
            self.remove(name)
        self._by_name[name] = self._by_number[number] = loaded
        logger.info(
            "adapter loaded name=%s path=%s rank=%d modules=%d bytes=%d", name, adapter.path, adapter.rank,
            len(adapter.modules), loaded.n_bytes,
        )  # fmt: skip

    def _told(self) -> str:
        return ", ".join(
            f"{one.ref.name}, leaving" if one.is_leaving else one.ref.name for one in self._by_number.values()
        )

    def remove(self, name: str, on_gone: Callable[[], object] = lambda: None) -> None:
        """Serve it no more. on_gone is called once its last request is over and its memory is free: now, if it has none."""
        self.find(name)
        leaving = self._by_name.pop(name)
        leaving.on_gone = on_gone
        self._free(leaving)

    def hold(self, ref: AdapterRef) -> None:
        """A request begins with it. RequestError where it was unloaded meanwhile."""
        found = self._by_number.get(ref.number)
        if found is None or found.ref is not ref or (found.is_leaving and not found.n_kept):
            raise RequestError(f"the adapter {ref.name!r} has been unloaded", param="adapter")
        found.n_requests += 1

    def let_go(self, ref: AdapterRef) -> None:
        """One of its requests is over."""
        found = self._by_number[ref.number]
        found.n_requests -= 1
        self._free(found)

    def keep(self, ref: AdapterRef) -> None:
        """A body begins whose requests come one by one: to them it is there, unloaded meanwhile or not. Raises as `hold`."""
        self.hold(ref)
        self._by_number[ref.number].n_kept += 1

    def keep_no_more(self, ref: AdapterRef) -> None:
        """All requests of that body have come, or no more will."""
        self._by_number[ref.number].n_kept -= 1
        self.let_go(ref)

    def _free(self, loaded: Loaded) -> None:
        if loaded.on_gone is None or loaded.n_requests > 0:
            return
        del self._by_number[loaded.ref.number]
        self._model.drop_adapter(loaded.ref.number)
        logger.info("adapter unloaded name=%s bytes=%d", loaded.ref.name, loaded.n_bytes)
        loaded.on_gone()
