"""Examples in docstrings of rooms without tensors say what comes out."""

from __future__ import annotations

import doctest
import pkgutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from diptych import control, cost, ground, insight, models, sim

ROOMS = (control, cost, ground, insight, models, sim)
MODULES = [
    "diptych.metrics",
    "diptych.workload",
    *(one.name for room in ROOMS for one in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")),
]


def has_examples(name: str) -> bool:
    """By its text: to look for some in a module that has none takes as long as to run those of another."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return ">>> " in Path(spec.origin).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", filter(has_examples, MODULES))
def test_examples_hold(name: str) -> None:
    """Two of the planner's had not held for long: nobody ran them."""
    failed, _ = doctest.testmod(import_module(name), optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert failed == 0
