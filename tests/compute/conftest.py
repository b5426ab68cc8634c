"""Kernels for a GPU that are interpreted, a millionth as fast, meet half of a grid in one type and half in the other."""

from __future__ import annotations

from collections import defaultdict

import pytest
from kinds import INTERPRETED, KINDS

TYPES = [name for name in (f"triton {dtype}" for dtype in INTERPRETED) if name in KINDS]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests marked in_turns, by how many bits a place has: none meets every second value of a parameter alone."""
    places: defaultdict[object, dict[str, int]] = defaultdict(dict)
    others = set()
    for item in items:
        if item.get_closest_marker("in_turns") is None:
            continue
        name = next((name for name in TYPES if KINDS[name] is item.callspec.params["kind"]), None)  # type: ignore[attr-defined]
        if name is not None:
            of_test = places[item.function]  # type: ignore[attr-defined]
            place = of_test.setdefault(item.callspec.id.replace(name, ""), len(of_test))  # type: ignore[attr-defined]
            if TYPES.index(name) != place.bit_count() % len(TYPES):
                others.add(item)
    if others:
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=list(others))
