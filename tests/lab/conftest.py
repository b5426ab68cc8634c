"""The lab measures what this machine's memory gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import huge_pages


@pytest.fixture(autouse=True, scope="module")
def large_buffers() -> Iterator[None]:
    """As users have them."""
    huge_pages.allow(True)
    yield
    huge_pages.allow(False)
