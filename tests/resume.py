"""A plugin for runs that take hours (tests/arm64.sh): what has passed is written down, and is not run again.

`pytest -p resume` with `PASSED_FILE=path` in the environment. Tests that fail are never written down, skipped ones are.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def _journal() -> Path:
    return Path(os.environ["PASSED_FILE"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has passed."""
    journal = _journal()
    passed = set(journal.read_text().splitlines()) if journal.exists() else set()
    done = [item for item in items if item.nodeid in passed]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in passed]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line as soon as a test is over, as nobody says when a run is cut short."""
    if (report.when == "call" and report.passed) or (report.skipped and not hasattr(report, "wasxfail")):
        with _journal().open("a") as lines:
            lines.write(f"{report.nodeid}\n")
