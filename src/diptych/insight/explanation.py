"""Where a prompt's tokens come from, what each part costs in time to first token, and what the prefix cache can keep.

Pure arithmetic over segments; `diptych explain` gets them from a server or from a checkpoint's own template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diptych.ground.bounds import counted

# text that is different in every request and so ends the part of a prompt that the cache can keep
VOLATILE = (
    ("a time", re.compile(r"\b\d{1,2}:\d{2}(:\d{2})?\b")),
    ("a date", re.compile(r"\b\d{4}-\d{2}-\d{2}(?:\b|T\d)|\b\d{1,2}[./]\d{1,2}[./]\d{4}\b")),
    (
        "a date",
        re.compile(
            r"\b(?:\d{1,2}\.? )?(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?"
            r"|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\.? (?:\d{1,2},? )?\d{4}\b"
        ),
    ),
    ("an id", re.compile(r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a prompt. cost_s: its share of a prefill without any cache; cached_tokens: that the cache holds now."""

    name: str
    tokens: int
    cost_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reordering:
    """A change to the prompt and what it would save on every later request."""

    what: str
    saved_tokens: int
    saved_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All of it. source: measured, predicted, or bound; block_tokens: the cache keeps whole blocks only."""

    source: str
    parts: list[Part]
    prefill_s: float
    block_tokens: int
    next_turn_tokens: int
    next_turn_saved_s: float
    new_chat_tokens: int
    new_chat_saved_s: float
    reorderings: list[Reordering]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def volatile_spot(text: str) -> tuple[int, str] | None:
    """(place in characters, what) of the first text that changes from request to request."""
    found = [(match.start(), what) for what, pattern in VOLATILE if (match := pattern.search(text)) is not None]
    return min(found, default=None)


def explain(
    parts: Sequence[Part], *, source: str, block_tokens: int, volatile: Sequence[tuple[str, int, int, str]] = ()
) -> Explanation:
    """Judge a prompt.

    volatile: (part, its first token, tokens before the changing text, what changes), in order of the prompt.
    """
    total_s = sum(part.cost_s for part in parts)
    n_tokens = sum(part.tokens for part in parts)
    stable_end = volatile[0][2] if volatile else n_tokens
    # the generation prompt comes again after the answer, so the next turn shares all before it
    conversation = n_tokens - (parts[-1].tokens if parts and parts[-1].name == "generation prompt" else 0)
    fixed = 0
    for part in parts:
        if part.name not in ("system", "tools", "documents", "scaffold"):
            break
        fixed += part.tokens
    next_turn = min(conversation, stable_end) // block_tokens * block_tokens
    new_chat = min(fixed, stable_end) // block_tokens * block_tokens
    return Explanation(
        source=source,
        parts=list(parts),
        prefill_s=total_s,
        block_tokens=block_tokens,
        next_turn_tokens=next_turn,
        next_turn_saved_s=_cost_before(parts, next_turn),
        new_chat_tokens=new_chat,
        new_chat_saved_s=_cost_before(parts, new_chat),
        reorderings=_reorderings(parts, volatile, conversation=conversation, fixed=fixed, block_tokens=block_tokens),
    )


def _cost_before(parts: Sequence[Part], end: int) -> float:
    """What the tokens [0, end) cost; evenly inside a part."""
    cost_s, position = 0.0, 0
    for part in parts:
        taken = max(0, min(end - position, part.tokens))
        cost_s += part.cost_s * taken / part.tokens if part.tokens else 0.0
        position += part.tokens
    return cost_s


def _reorderings(
    parts: Sequence[Part],
    volatile: Sequence[tuple[str, int, int, str]],
    *,
    conversation: int,
    fixed: int,
    block_tokens: int,
) -> list[Reordering]:
    found = []
    if volatile:
        name, _, before, what = volatile[0]
        reused, kept = conversation // block_tokens * block_tokens, before // block_tokens * block_tokens
        if reused > kept:
            found.append(
                Reordering(
                    what=f"{name} holds {what} after {counted(before, 'token')}, and nothing behind it can be reused; "
                    "move it into the last message",
                    saved_tokens=reused - kept,
                    saved_s=_cost_before(parts, reused) - _cost_before(parts, kept),
                )
            )
    position = 0
    for part in parts:
        saved = part.tokens // block_tokens * block_tokens
        if part.name in ("tools", "documents") and position >= fixed and saved:
            found.append(
                Reordering(
                    what=f"{part.name} stand behind text that differs between chats; put them first to share them",
                    saved_tokens=saved,
                    saved_s=part.cost_s * saved / part.tokens,
                )
            )
        position += part.tokens
    return found
