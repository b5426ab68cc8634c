"""What `diptych serve` makes of options about workers, before anything is started."""

from __future__ import annotations

import sys

import pytest

from diptych.cli.cluster import pools_of
from diptych.ground.errors import ConfigError

REST = {"address": None, "local_prefill_tokens": 64, "takes_other_kernels": False}


def test_one_engine_needs_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """ray is an extra: who does not ask for workers must not need it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    assert pools_of(0, None, None, **REST) is None


def test_workers_without_ray_are_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback of imports would not say which extra to install."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "diptych.cluster.rays", raising=False)
    with pytest.raises(ConfigError, match=r"workers need ray") as refused:
        pools_of(0, None, 2, **REST)
    assert "diptych[cluster]" in str(refused.value)


@pytest.mark.parametrize(
    ("prefill", "decode", "workers", "reason"),
    [(1, None, 2, "one or"), (0, 1, 2, "one or"), (2, None, None, "none decodes"), (1, 0, None, "at least 1")],
)  # fmt: skip
def test_pools_that_answer_nobody_are_refused(
    prefill: int, decode: int | None, workers: int | None, reason: str
) -> None:
    """Two ways to ask for workers, and each alone."""
    with pytest.raises(ConfigError, match=reason):
        pools_of(prefill, decode, workers, **REST)
