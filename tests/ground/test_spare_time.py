"""What nobody waits for takes no time from what somebody waits for."""

from __future__ import annotations

import os
import sys

import pytest

from diptych.ground.spare_time import start_in_spare_time


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_only_the_thread_itself_gives_way() -> None:
    """The KV pool's memory was provided at the kernels' cost: they meet many times in a layer, and all waited for the one that
    shared its core.
    """
    seen: list[int] = []
    before = os.getpriority(os.PRIO_PROCESS, 0)
    start_in_spare_time(lambda: seen.append(os.getpriority(os.PRIO_PROCESS, 0)), name="spare").join()
    assert seen == [19]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
