"""`diptych serve` before workers of which one cannot start again at once, as on a node whose disk is away for a moment.

DIPTYCH_TEST_FAILED=/tmp/it-failed python tests/cluster/failing_node_server.py serve --workers 2
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from diptych.cli import main
from diptych.ground.config import quiet_ray
from diptych.ground.errors import LoadError

quiet_ray(is_local=True)
import ray  # noqa: E402  # reads its environment when it is imported

from diptych.cluster import rays  # noqa: E402
from diptych.cluster.process import WorkerProcess  # noqa: E402


class FailingProcess(WorkerProcess):
    def __init__(self, *arguments: Any) -> None:
        has_failed = Path(os.environ["DIPTYCH_TEST_FAILED"])
        if ray.get_runtime_context().was_current_actor_reconstructed and not has_failed.exists():
            has_failed.touch()
            raise LoadError("the disk is away", hint="look again later")
        super().__init__(*arguments)


if __name__ == "__main__":
    rays.WorkerActor = rays.actor_class(FailingProcess)
    sys.exit(main())
