"""`diptych serve` before workers that come back as another version, as on a node that was updated meanwhile.

python tests/cluster/updated_node_server.py serve --workers 2
"""

from __future__ import annotations

import sys
from dataclasses import replace

from diptych.cli import main
from diptych.ground.config import quiet_ray

quiet_ray(is_local=True)
import ray  # noqa: E402  # reads its environment when it is imported

from diptych.cluster import rays  # noqa: E402


class UpdatedProcess(rays._Actor):
    def hello(self) -> rays.Hello:
        said = super().hello()
        is_back = ray.get_runtime_context().was_current_actor_reconstructed
        return replace(said, version="0.0.9") if is_back else said


if __name__ == "__main__":
    rays.WorkerActor = rays.actor_class(UpdatedProcess)
    sys.exit(main())
