"""Log-probabilities of tokens as OpenAI's chats and responses show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.step import TokenLogprobs


def finite(logprob: float) -> float:
    """JSON knows no infinity; an impossible token gets the number that other servers send."""
    return max(logprob, -9999.0)


def logprobs_json(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """One entry for each token, with its alternatives. A token's text may be half a character; it shows as U+FFFD then."""

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}

    return [
        token(entry.token_id, entry.logprob) | {"top_logprobs": [token(token_id, at) for token_id, at in entry.top]}
        for entry in entries
    ]
