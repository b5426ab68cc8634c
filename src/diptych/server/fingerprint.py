"""`system_fingerprint`: equal fingerprint, seed and request give equal bits, whatever else the server does meanwhile.

It is a digest of all that decides them: the weights, their formats, the kernels and this version (the model's `revision`),
the tokenizer, the chat templates, the libraries that read templates, text and grammars, and the two settings that change an
answer. What phase equality takes out of the game is not in it: batches, chunks, threads, memory, the cache, speculation.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import version

from diptych.engine.async_llm import AsyncLLM

_LIBRARIES = ("jinja2", "llguidance", "tokenizers")
_CHARS = 16  # of the digest, behind "fp_"


def system_fingerprint(engine: AsyncLLM, *, reads_control_tokens: bool) -> str | None:
    """The fingerprint; None where sums depend on how the work was cut, as torch's do, and where workers of several revisions
    answer.
    """
    loaded = engine.loaded
    if not loaded.model.keeps_bits or not loaded.model.revision:
        return None
    digest = hashlib.sha256(loaded.model.revision.encode())
    # an answer that is not told how long to be ends where the context does
    settings = f"context {engine.engine.core.context_limit_tokens} control {reads_control_tokens}"
    libraries = [f"{name} {version(name)}" for name in _LIBRARIES]
    for part in (
        loaded.tokenizer.json_text,
        repr(loaded.tokenizer.eos_token_ids),
        *loaded.template.sources,
        settings,
        *libraries,
    ):
        digest.update(f"{len(part)} ".encode() + part.encode())
    return f"fp_{digest.hexdigest()[:_CHARS]}"


def with_adapter(fingerprint: str | None, revision: str) -> str | None:
    """The fingerprint of answers by an adapter, whose numbers decide their bits too."""
    if fingerprint is None:
        return None
    return f"fp_{hashlib.sha256(f'{fingerprint} {revision}'.encode()).hexdigest()[:_CHARS]}"
