"""The `diptych` command: one file per command in this folder, each imported only when it is called.

So `diptych --help` answers without loading a tensor library, and `diptych plan` without loading torch; what commands compute
with comes by `cli/working.py` where it is first used.
To add a command: write `cli/<name>.py` with a typer app called `app`, and add one line to COMMANDS.
Errors of input, files, disks and closed pipes end here, for every command alike; a traceback is a bug.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from difflib import get_close_matches
from io import TextIOWrapper
from typing import NoReturn

from diptych import __version__
from diptych.ground.errors import EngineError
from diptych.ground.importing import import_whole

# name -> (module, what it does); the order is the order of the help page
COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("diptych.cli.generate", "write the continuation of a prompt and report both phases"),
    "chat": ("diptych.cli.chat", "talk with a model; the history stays in the prefix cache"),
    "embed": ("diptych.cli.embed", "write the vectors of texts: a prefill without a decode"),
    "classify": ("diptych.cli.classify", "write the labels of texts, by a model with a classification head"),
    "serve": ("diptych.cli.serve", "serve a model over HTTP, OpenAI-compatible"),
    "rank": ("diptych.cli.rank", "compute a part of a model that another machine serves with --tp-address"),
    "bench": ("diptych.cli.bench", "measure prefill and decode against the machine's ceilings"),
    "plan": ("diptych.cli.plan", "predict both phases for a model on a device"),
    "inspect": ("diptych.cli.inspect", "say what a model's files hold, and the memory and time it will need"),
    "simulate": ("diptych.cli.simulate", "serve a load on paper: the scheduler, with predicted step times"),
    "lab": ("diptych.cli.lab", "run the experiments on the two phases and write a report"),
    "explain": ("diptych.cli.explain", "say where a prompt's tokens and its time to first token come from"),
    "doctor": ("diptych.cli.doctor", "read a running server's metrics and name what makes it slow"),
    "quantize": ("diptych.cli.quantize", "write an int8 or int4 checkpoint, to be loaded without repeating the work"),
}
BAD_INPUT, INTERRUPTED, READER_LEFT = 2, 130, 141  # the last two as a shell counts SIGINT and SIGPIPE


def usage() -> str:
    """The overview that `diptych --help` prints."""
    rows = "\n".join(f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items())
    return (
        f"diptych {__version__}: an LLM inference engine built around its two phases, prefill and decode\n\n"
        f"usage: diptych COMMAND [OPTIONS]\n\ncommands:\n{rows}\n\n"
        "diptych COMMAND --help tells a command's options; diptych --version prints the version.\n"
        "With no model named, commands use the small bundled one."
    )


def main() -> None:
    """Run the command. Exit 2 on a clear error of input or of files, 130 on Ctrl-C, 141 when our output's reader left."""
    _ready_streams()
    try:
        try:
            _run(sys.argv[1:])
        finally:
            sys.stdout.flush()  # here, where a full disk or a closed pipe can still be answered
    except EngineError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer has met it first
            _leave_quietly()
        raise
    except BrokenPipeError:  # `diptych plan | head`
        _leave_quietly()
    except OSError as error:
        _discard_output()
        where = "" if error.filename is None else f" {os.fspath(error.filename)}"
        verb = "cannot read or write" if where else "cannot write the output"
        _fail(f"{verb}{where}: {error.strerror or error}")


def _ready_streams() -> None:
    """Bytes and letters that the locale does not know are no traceback: such text is refused by name, or written escaped."""
    if sys.stdin is None:  # `diptych ... <&-`
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:  # `diptych ... >&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:  # `diptych ... 2>&-`: print would take standard output for it
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(usage())
        return
    name = arguments[0]
    if name in ("--version", "-V"):
        print(f"diptych {__version__}")
        return
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `diptych {near[0]}`?" if near else "diptych --help lists the commands"
        raise EngineError(f"no command {name!r}", hint=hint)
    app = import_whole(COMMANDS[name][0]).app
    app(args=arguments[1:], prog_name=f"diptych {name}")


def _fail(message: str) -> NoReturn:
    with suppress(OSError):  # where the error cannot be written either, the exit code still tells
        print(f"error: {message}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def _leave_quietly() -> NoReturn:
    _discard_output()
    sys.exit(READER_LEFT)


def _discard_output() -> None:
    # Python flushes once more when it ends, and would complain again
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
