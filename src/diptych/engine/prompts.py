"""What callers give as prompts, made plain: one or several, each text, token ids or a rendered conversation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from diptych.engine.text.template import RenderedPrompt
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.bounds import entries, ids, shown, whole
from diptych.ground.errors import RequestError
from diptych.ground.request import Segment

Prompt = str | Sequence[int] | RenderedPrompt


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, always as a list. Raises RequestError for anything else."""
    if isinstance(prompts, str | RenderedPrompt):
        return [prompts]
    _refuse_others(prompts)
    given = entries("prompt", prompts, RequestError)
    if given and whole(given[0]) is not None:
        return [given]  # type: ignore[list-item]
    return list(given)  # type: ignore[arg-type]


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer, *, vocab_size: int) -> tuple[tuple[int, ...], tuple[Segment, ...]]:
    """Token ids of one prompt and the segments it names. Raises RequestError for an empty prompt or unknown ids."""
    segments: tuple[Segment, ...] = ()
    given: Iterable[int]
    if isinstance(prompt, RenderedPrompt):
        given, segments = prompt.token_ids, prompt.segments
    elif isinstance(prompt, str):
        given = tokenizer.encode(prompt)
    else:
        _refuse_others(prompt)
        given = prompt
    try:
        token_ids = ids("prompt", given, RequestError, n_ids=vocab_size)
    except RequestError as error:
        if not isinstance(prompt, str | RenderedPrompt):
            raise
        hint = f"the tokenizer has {tokenizer.vocab_size} tokens: it may be another model's"
        raise RequestError(error.message, hint=hint, param=error.param) from error
    if not token_ids:
        raise RequestError("prompt has 0 tokens; at least 1 is needed", param="prompt")
    return token_ids, segments


def _refuse_others(prompt: object) -> None:
    is_listed = isinstance(prompt, Iterable) and not isinstance(prompt, bytes | bytearray | Mapping)
    has_messages = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if is_listed and not has_messages:
        return
    wants_chat = has_messages or isinstance(prompt, Mapping)
    raise RequestError(
        f"prompt is {shown(prompt)}; it must be text, token ids or a rendered conversation",
        hint="render makes a prompt from messages" if wants_chat else None,
        param="prompt",
    )
