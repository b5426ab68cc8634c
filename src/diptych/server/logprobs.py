"""Log-probabilities of tokens as OpenAI's chats and responses show them, and where in a text tokens begin."""

from __future__ import annotations

import codecs
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


class TextOffsets:
    """Where tokens begin in the text that they make, token by token, whether or not it has been handed out.

    A character of several tokens counts once, and a token that no text shows not at all.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at = 0

    def push(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens, in characters."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._at)
            if token_id not in self._tokenizer.hidden_token_ids:
                self._at += len(self._utf8.decode(self._tokenizer.token_bytes(token_id)))
        return offsets
