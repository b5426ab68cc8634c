"""Every error a user, a file or a peer can cause, as one small tree.

A message says what, the number and the limit; `hint` says what to do. Lower case, no full stop.

>>> raise PromptTooLong("prompt has 5210 tokens; this engine accepts at most 4096", hint="shorten the prompt")
Traceback (most recent call last):
diptych.ground.errors.PromptTooLong: prompt has 5210 tokens; this engine accepts at most 4096
hint: shorten the prompt
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class EngineError(Exception):
    """The root. `param` names the request field at fault, where there is one."""

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")
        self.message = message
        self.hint = hint
        self.param = param


class ConfigError(EngineError):
    """A setting, an option or an environment variable has an impossible value."""


class LoadError(EngineError):
    """A checkpoint is missing, damaged, or contradicts its own config."""


class UnsupportedModel(LoadError):
    """The architecture is not one this engine implements."""


@contextmanager
def told_of(place: object) -> Iterator[None]:
    """A LoadError from inside names `place`, a folder or a file: who reads a tensor may know nothing but its name."""
    try:
        yield
    except LoadError as error:
        if str(place) in error.message:
            raise
        raise type(error)(f"{place}: {error.message}", hint=error.hint) from error


class RequestError(EngineError):
    """A request is wrong in itself; the engine goes on (HTTP 400)."""


class PromptTooLong(RequestError):
    """The prompt does not fit the context or the KV pool."""


class BadSampling(RequestError):
    """A sampling option has an impossible value."""


class TemplateError(RequestError):
    """A chat template failed, looped, or reached for something it may not have."""


class GrammarError(RequestError):
    """A schema, regex or grammar cannot be compiled within its bounds."""


class CapacityError(EngineError):
    """The engine cannot take this now: queue full, draining, or the KV pool does not fit in memory (HTTP 503)."""


class ExecutorError(EngineError):
    """The step failed below control; open requests are answered with this."""


class WorkerLost(ExecutorError):
    """A process that computes a part of the model is gone; the engine has ended, and open requests are answered with this."""


class TransferError(EngineError):
    """Blocks of KV that came from elsewhere are not what they should be; none of them was taken in. reason: in a word."""

    def __init__(self, message: str, *, reason: str = "other", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class SequenceError(EngineError):
    """One sequence cannot go on; only its own request is answered with this (HTTP 500)."""


class InternalError(EngineError):
    """A bug of ours."""


class IllegalMove(InternalError):
    """A status change that `MOVES` does not allow."""


class BlockLeak(InternalError):
    """Blocks held, cached and free do not add up to the pool."""
