"""What `LLM` and `AsyncLLM` hold, and how they give it back: a loaded model, and the engine over it."""

from __future__ import annotations

import gc

from diptych.engine.engine import Engine
from diptych.engine.load import LoadedModel
from diptych.ground.errors import CapacityError


class EngineHolder:
    """owns_model: the model was loaded for this engine, so its weights go with it."""

    def __init__(self, loaded: LoadedModel, engine: Engine, *, owns_model: bool) -> None:
        self._loaded = loaded
        self._engine: Engine | None = engine
        self._owns_model = owns_model

    @property
    def is_closed(self) -> bool:
        """Whether all was given back."""
        return self._engine is None

    @property
    def engine(self) -> Engine:
        """Raises CapacityError once all was given back."""
        if self._engine is None:
            raise CapacityError("this engine is closed", hint="make another one")
        return self._engine

    def close(self) -> None:
        """Give KV memory back, and of an own model threads, weights and rank processes; a second time does nothing."""
        if self._engine is None:
            return
        self._engine = None
        if self._owns_model:
            self._loaded.model.close()
        gc.collect()  # an engine's parts know each other, so its memory would wait for the next collection
