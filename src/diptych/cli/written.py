"""Which options a person wrote, for commands whose kinds of answers read different ones: the others are refused."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from diptych.ground.errors import ConfigError, EngineError


@contextmanager
def errors_told() -> Iterator[None]:
    """What is asked wrongly is said on standard error and ends the command with 2; SIGTERM ends all it started, too."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
        sys.stdout.flush()
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, _: FrameType | None) -> NoReturn:
    # the usual way ends this process alone: those that simulate beside it went on, and then told of a broken pipe
    sys.exit(128 + number)


def written(parser: argparse.ArgumentParser, args: Sequence[str] | None) -> dict[str, str]:
    """Options that were written, by what they set: {"tp": "--tp"}. The parser is of no further use."""
    spelled = {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return {name: spelled[name] for name in vars(parser.parse_args(args)) if name in spelled}


def refuse_unread(kind: str, given: Mapping[str, str], reads: Collection[str]) -> None:
    """Raise ConfigError for an option that would change nothing."""
    unread = [option for name, option in given.items() if name not in reads]
    if unread:
        raise ConfigError(f"{kind} does not read {', '.join(unread)}", hint="leave it out; --help lists the options")
