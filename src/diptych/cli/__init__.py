"""The `diptych` command: one file per command in this folder, each imported only when it is called.

So `diptych --help` answers without loading a tensor library, and `diptych plan` without loading torch.
To add a command: write `cli/<name>.py` with a typer app called `app`, and add one line to COMMANDS.
"""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module

from diptych import __version__
from diptych.ground.errors import EngineError

# name -> (module, what it does); the order is the order of the help page
COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("diptych.cli.generate", "write the continuation of a prompt and report both phases"),
    "chat": ("diptych.cli.chat", "talk with a model; the history stays in the prefix cache"),
    "serve": ("diptych.cli.serve", "serve a model over HTTP, OpenAI-compatible"),
    "bench": ("diptych.cli.bench", "measure prefill and decode against the machine's ceilings"),
    "plan": ("diptych.cli.plan", "predict both phases for a model on a device"),
    "lab": ("diptych.cli.lab", "run the experiments on the two phases and write a report"),
    "explain": ("diptych.cli.explain", "say where a prompt's tokens and its time to first token come from"),
    "doctor": ("diptych.cli.doctor", "read a running server's metrics and name what makes it slow"),
    "quantize": ("diptych.cli.quantize", "write an int8 or int4 checkpoint, to be loaded without repeating the work"),
}


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
    """Find the command, import its module, run its app. Exit 2 on a clear error of input, 130 on Ctrl-C."""
    arguments = sys.argv[1:]
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
        print(f"error: no command {name!r}\nhint: {hint}", file=sys.stderr)
        sys.exit(2)
    try:
        app = import_module(COMMANDS[name][0]).app
        app(args=arguments[1:], prog_name=f"diptych {name}")
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output left (`diptych generate ... | head`)
        sys.stderr.close()
        sys.exit(141)
