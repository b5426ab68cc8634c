"""Threads whose work nobody waits for, beside threads for which streams wait."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

LEAST = 19  # of nice


def start_in_spare_time(work: Callable[[], object], *, name: str, daemon: bool = False) -> threading.Thread:
    """Run `work` on a thread that gets hardly any processor time but what no other thread wants; a usual one outside Linux.

    The kernels' threads meet many times in a layer, so one that shares its core holds up all of them.
    """

    def run() -> None:
        if sys.platform == "linux":  # elsewhere this is not one thread's
            with suppress(OSError):
                # not SCHED_IDLE: on a full machine it would not even leave what others wait for, as the interpreter's lock
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST)
        work()

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread
