"""The engine's tiny model is the cluster's too."""

from tests.engine.conftest import tiny_dir

__all__ = ["tiny_dir"]
