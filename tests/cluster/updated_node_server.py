"""`diptych serve` before workers that come back as another version, as on a node that was updated meanwhile.

DIPTYCH_TEST_UPDATED=/tmp/it-is-back python tests/cluster/updated_node_server.py serve --workers 2
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from diptych.cli import main
from diptych.ground.config import quiet_ray

quiet_ray(is_local=True)
import ray  # noqa: E402  # reads its environment when it is imported

from diptych.cluster import rays  # noqa: E402
from diptych.cluster.process import WorkerProcess  # noqa: E402


class UpdatedProcess(WorkerProcess):
    def hello(self) -> rays.Hello:
        said = super().hello()
        if not ray.get_runtime_context().was_current_actor_reconstructed:
            return said
        Path(os.environ["DIPTYCH_TEST_UPDATED"]).touch()
        return replace(said, version="0.0.9")


if __name__ == "__main__":
    rays.WorkerActor = rays.actor_class(UpdatedProcess)
    sys.exit(main())
