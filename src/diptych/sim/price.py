"""What the router counts work in, from the model of cost: whole microseconds."""

from __future__ import annotations

from collections.abc import Callable

from diptych.ground.shape import StepShape

# an answer's share of a step is that of one sequence among so many: beyond, shares shrink slowly
USUAL_BATCH = 32
_NEAR_TOKENS, _FAR_TOKENS = 512, 4096


class PredictedPrice:
    """Prices of one engine. Reading is priced exactly; a written token on a line through two contexts."""

    def __init__(self, predict_s: Callable[[StepShape], float]) -> None:
        self._predict_s = predict_s
        near, far = (
            predict_s(StepShape.decode(batch=USUAL_BATCH, context_tokens=tokens)) / USUAL_BATCH * 1e6
            for tokens in (_NEAR_TOKENS, _FAR_TOKENS)
        )
        self._slope_us = (far - near) / (_FAR_TOKENS - _NEAR_TOKENS)
        self._start_us = near - self._slope_us * _NEAR_TOKENS

    def prefill_us(self, new_tokens: int, cached_tokens: int) -> int:
        """Alone, in one step."""
        return int(
            self._predict_s(StepShape.prefill(batch=1, new_tokens=new_tokens, cached_tokens=cached_tokens)) * 1e6
        )

    def decode_us(self, context_tokens: int, output_tokens: int) -> int:
        """Among USUAL_BATCH sequences of its length."""
        return int(output_tokens * (self._start_us + self._slope_us * context_tokens))
