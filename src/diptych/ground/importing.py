"""What a start makes, modules and vocabularies, without the garbage collector's passes in between.

What an import makes, stays: each pass walks all of it and frees nothing.
With torch that is some 0.1 s of processor time in a start of 2 s.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


@contextmanager
def uncollected() -> Iterator[None]:
    """No pass of the collector meanwhile; it is afterwards as it was."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def import_whole(name: str) -> ModuleType:
    """The module `name`, as `importlib.import_module` gives it."""
    with uncollected():
        return import_module(name)


def on_first_use(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` (PEP 562) of `module`: names of other modules, which are imported when the first of theirs is asked.
    homes: by module the names, spaces between them. AttributeError for any other name.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_whole(home_of[name]), name)

    return get
