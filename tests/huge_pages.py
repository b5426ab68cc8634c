"""Whether memory of this process, and of those that it starts, may come in pages of 2 MiB.

The system clears such a page whole for a buffer of a tiny model, which is a sixth of the time of tests that build many. Who
reads hundreds of megabytes to measure the memory waits half as long with them.
"""

from __future__ import annotations

import ctypes
import sys

PR_SET_THP_DISABLE = 41


def allow(is_allowed: bool) -> None:
    """From now on; memory that is there stays as it is. Nothing happens where there is no such setting."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, not is_allowed, 0, 0, 0)
