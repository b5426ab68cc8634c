"""A plugin for runs that take hours (tests/arm64.sh): what passed is written down and not run again; a sample stands for all.

`pytest -p resume` with `PASSED_FILE=path` in the environment. Tests that fail are never written down, skipped ones are.
`DIPTYCH_ARM64_SAMPLE=0.05` runs a twentieth of each function's cases, at least one, `DIPTYCH_ARM64_SEED=1` others.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from pathlib import Path

import pytest


def _journal() -> Path:
    return Path(os.environ["PASSED_FILE"])


def sample_of(items: list[pytest.Item], fraction: float, seed: str) -> list[pytest.Item]:
    """Of each test function's cases this part, at least one, in their order. Which ones follows from seed and name alone."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    chosen: set[str] = set()
    for cases in functions.values():
        drawn = sorted(cases, key=lambda item: hashlib.sha256(f"{seed} {item.nodeid}".encode()).digest())
        chosen.update(item.nodeid for item in drawn[: max(1, round(fraction * len(cases)))])
    return [item for item in items if item.nodeid in chosen]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not in the sample and what has passed."""
    journal = _journal()
    passed = set(journal.read_text().splitlines()) if journal.exists() else set()
    fraction = float(os.environ.get("DIPTYCH_ARM64_SAMPLE") or 1.0)
    if not 0.0 < fraction <= 1.0:
        raise pytest.UsageError(f"DIPTYCH_ARM64_SAMPLE is {fraction}; it must be above 0 and at most 1")
    left = [
        item
        for item in sample_of(items, fraction, os.environ.get("DIPTYCH_ARM64_SEED", "0"))
        if item.nodeid not in passed
    ]
    kept = set(left)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = left


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line as soon as a test is over, as nobody says when a run is cut short."""
    if (report.when == "call" and report.passed) or (report.skipped and not hasattr(report, "wasxfail")):
        with _journal().open("a") as lines:
            lines.write(f"{report.nodeid}\n")
