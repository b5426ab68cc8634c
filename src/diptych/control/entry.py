"""What a request has to be to come in, and the sequences it becomes."""

from __future__ import annotations

import hashlib

from diptych.control.policy import rank_of
from diptych.control.sequence import Sequence
from diptych.ground.config import SchedulerConfig
from diptych.ground.errors import PromptTooLong, RequestError
from diptych.ground.handoff import HandOff
from diptych.ground.request import Request


def check_prompt(
    request: Request, *, max_context_tokens: int, n_blocks: int, block_tokens: int, max_step_tokens: int
) -> None:
    """Raise RequestError for an empty prompt, PromptTooLong where it and one token of an answer exceed context or pool.

    Where no answer is wanted, the prompt may fill both; one that is read whole must fit into a step.
    """
    prompt_tokens, pool_tokens = len(request.prompt_token_ids), n_blocks * block_tokens
    if prompt_tokens == 0:
        raise RequestError("prompt has 0 tokens; at least 1 is needed", param="prompt")
    left, why = (0, "") if request.only_reads else (1, ", one being left for the answer")
    if prompt_tokens + left > max_context_tokens:
        raise PromptTooLong(
            f"prompt has {prompt_tokens} tokens; a context of {max_context_tokens} takes at most "
            f"{max_context_tokens - left}{why}",
            hint="shorten the prompt, or raise max_context_tokens where the model has positions for more",
            param="prompt",
        )
    if request.pooling is not None and request.pooling.both_ways and prompt_tokens > max_step_tokens:
        raise PromptTooLong(
            f"prompt has {prompt_tokens} tokens; one that attends both ways is read in one step, of at most {max_step_tokens}",
            hint="shorten it, or raise max_step_tokens (--max-step-tokens)",
            param="prompt",
        )
    if prompt_tokens + left > pool_tokens:
        raise PromptTooLong(
            f"prompt has {prompt_tokens} tokens; the KV pool of {n_blocks} blocks of "
            f"{block_tokens} takes at most {pool_tokens - left}{why}",
            hint="shorten the prompt or give the KV pool more memory",
            param="prompt",
        )


def seed_of(request: Request, index: int, *, engine_seed: int, seq_id: int) -> int:
    """The noise seed of one choice, in [0, 2**64): the request's own for choice 0, else derived from it."""
    own = request.sampling.seed
    if own is not None and index == 0:
        return own % 2**64
    source = f"engine {engine_seed} {seq_id}" if own is None else f"choice {own} {index}"
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "little")


def open_sequences(
    hand_off: HandOff, *, config: SchedulerConfig, first_seq_id: int, engine_seed: int, context_tokens: int
) -> list[Sequence]:
    """One for every choice that is open. As long as none has begun, the others wait for choice 0 to read the prompt."""
    request = hand_off.request
    rank = rank_of(arrival_s=request.arrival_s, priority=request.priority, aging_s=config.aging_s)
    room = context_tokens - len(request.prompt_token_ids)
    sequences: list[Sequence] = []
    for index, token_ids in enumerate(hand_off.output_token_ids):
        if token_ids is None:
            continue
        seq_id = first_seq_id + len(sequences)
        seq = Sequence(
            seq_id=seq_id,
            index=index,
            request=request,
            rank=rank,
            seed=seed_of(request, index, engine_seed=engine_seed, seq_id=seq_id),
            max_output_tokens=min(request.sampling.max_tokens, room),
        )
        seq.token_ids += token_ids
        seq.peak_computed_tokens = hand_off.computed_tokens
        seq.logprobs_tokens = hand_off.logprobs_tokens
        seq.is_unborn = hand_off.shares_prompt and bool(sequences)
        seq.has_forked = not hand_off.shares_prompt
        sequences.append(seq)
    return sequences
