"""The garbage collector beside streams: it walks what came since its last full collection, never all that is kept."""

from __future__ import annotations

import subprocess
import sys

ALONE = """
import gc
from diptych.server import run

run.keep_collections_short()
before = gc.get_freeze_count()
kept = [[number] for number in range(1000)]
assert gc.get_freeze_count() == before
gc.collect()
assert gc.get_freeze_count() >= before + len(kept)
"""


def test_what_stood_a_full_collection_is_not_walked_again() -> None:
    """Ten thousand requests kept for what would have been made each collection take 0.1 s, and every stream waited.

    In a process of its own: of a million objects that other tests left, some die meanwhile and are no longer counted.
    """
    subprocess.run([sys.executable, "-c", ALONE], check=True)
