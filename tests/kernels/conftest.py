"""What the tests of single kernels share."""

from __future__ import annotations

import pytest

from worlds import KERNEL_SETS


@pytest.fixture(params=KERNEL_SETS)
def isa(request: pytest.FixtureRequest) -> str:
    """Each kernel set that this processor runs."""
    return request.param
