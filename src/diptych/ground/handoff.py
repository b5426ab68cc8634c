"""A request on its way from one engine to another: integers only.

Sampler and grammar state do not travel: they are replayed from the tokens. Noise depends on (seed, position), so where
engines have equal bits the answer goes on with those it would have had.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.ground.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff:
    """Everything another engine needs to go on with a request.

    request: with a seed of its own, where tokens have been drawn. output_token_ids: by choice, those handed out so far; None:
    the choice has ended. computed_tokens: leading tokens that were read before and are accounted for, so that reading them
    again is a recompute. logprobs_tokens: prompt log-probabilities handed out.
    """

    request: Request
    output_token_ids: tuple[tuple[int, ...] | None, ...]
    computed_tokens: int = 0
    logprobs_tokens: int = 0

    @classmethod
    def of(cls, request: Request) -> HandOff:
        """A request that nobody has begun."""
        return cls(request=request, output_token_ids=((),) * request.sampling.n)

    @property
    def shares_prompt(self) -> bool:
        """Whether its choices can still wait for choice 0 to read the prompt: there is one alone, or none has begun."""
        return len(self.output_token_ids) == 1 or all(token_ids == () for token_ids in self.output_token_ids)

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """Prompt and answer so far of the first open choice."""
        so_far = next((token_ids for token_ids in self.output_token_ids if token_ids is not None), ())
        return self.request.prompt_token_ids + so_far
