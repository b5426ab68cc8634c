"""The house of ARCHITECTURE.md, held: who may import whom, which words are unsafe, which paths exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "diptych"

# room -> rooms of the project it may import (itself always). Floors of ARCHITECTURE.md.
MAY_IMPORT = {
    "ground": set(),
    "models": {"ground"},
    "control": {"ground"},
    "cost": {"ground", "models"},
    "metrics": {"ground"},
    "workload": {"ground"},
    "stepper": {"ground"},
    "insight": {"ground"},
    "compute": {"ground", "models"},
    "engine": {"ground", "models", "control", "cost", "metrics", "stepper", "compute"},
    "sim": {"ground", "models", "control", "cost", "metrics", "workload", "stepper"},
    "server": {"ground", "models", "metrics", "cost", "workload", "engine", "compute", "control", "insight", "sim"},
    "cluster": {"ground", "models", "metrics", "cost", "stepper", "control", "compute", "engine"},
    "lab": {"ground", "models", "metrics", "cost", "workload", "stepper", "engine", "sim", "compute", "control"},
    "cli": {
        "ground",
        "models",
        "metrics",
        "cost",
        "workload",
        "engine",
        "compute",
        "control",
        "insight",
        "server",
        "lab",
        "sim",
        "cluster",
    },
}
MOST_FILES = 40  # of a folder
# only these modules may import time or read the environment
TIME_OWNERS = {"ground/clock.py"}
ENVIRONMENT_OWNERS = {"ground/config.py"}


def modules() -> list[Path]:
    return sorted(path for path in SRC.rglob("*.py") if path.parent != SRC or path.stem in MAY_IMPORT)


@dataclass(frozen=True)
class Facts:
    """What the tests below ask of a file, wherever it stands in it. function_lines: (name, lines) of each function."""

    imports: tuple[ast.Import | ast.ImportFrom, ...]
    reads_environment: bool
    function_lines: tuple[tuple[str, int], ...]

    @property
    def names(self) -> list[str]:
        """Every absolute module name imported."""
        names = []
        for node in self.imports:
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            else:
                assert node.level == 0, "relative imports hide the floor"
                names += [node.module or ""]
        return names


def statements_of(node: ast.AST) -> Iterator[ast.stmt]:
    """All below a node, in any depth; expressions, of which there are ten times as many, are not entered."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for one in getattr(node, name, ()):
            if isinstance(one, ast.stmt):
                yield one
            yield from statements_of(one)


@cache
def facts_of(path: Path) -> Facts:
    text = path.read_text()
    imports, functions, tree = [], [], ast.parse(text)
    for node in statements_of(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]  # options with their help make a long head, which is no long function
            functions.append((node.name, (node.end_lineno or first.lineno) - first.lineno + 1))
    words = ("environ", "getenv")
    reads_environment = any(word in text for word in words) and any(
        isinstance(node, ast.Attribute) and node.attr in words for node in ast.walk(tree)
    )
    return Facts(tuple(imports), reads_environment, tuple(functions))


def room_of(path: Path) -> str:
    return path.relative_to(SRC).with_suffix("").parts[0]


def imports_beyond(path: Path) -> Iterator[str]:
    """What a module imports that its room may not."""
    room = room_of(path)
    allowed, name_here = MAY_IMPORT[room] | {room}, str(path.relative_to(SRC))
    for name in facts_of(path).names:
        parts = name.split(".")
        if parts[0] == "diptych" and len(parts) > 1 and (SRC / parts[1]).exists() | (SRC / f"{parts[1]}.py").exists():
            if parts[1] not in allowed:
                yield f"{name_here} ({room}) imports {name}"
        elif parts[0] == "time" and name_here not in TIME_OWNERS:
            yield f"{name_here} imports time; use ground.clock"
        elif parts[0] == "ray" and name_here != "cluster/rays.py":  # an extra: everything else runs without it
            yield f"{name_here} imports ray"
        elif parts[0] in ("pickle", "dill", "shelve", "marshal"):
            yield f"{name_here} imports {name}"


def test_rooms_import_only_lower_floors() -> None:
    """A higher floor imported from below would make a circle nobody can take apart later."""
    found = modules()
    assert {room_of(path) for path in found} == MAY_IMPORT.keys()
    assert not (wrong := [one for path in found for one in imports_beyond(path)]), wrong


def test_environment_is_read_in_config_only() -> None:
    """A setting read in the middle of a room cannot be found, documented or tested."""
    readers = {str(path.relative_to(SRC)) for path in modules() if facts_of(path).reads_environment}
    assert readers == ENVIRONMENT_OWNERS, "use ground.config"


def test_light_rooms_import_without_torch() -> None:
    """`diptych --help` and `diptych plan` must not wait for a tensor library."""
    code = (
        "import sys, diptych, diptych.cli, diptych.cost.planner, diptych.control.loop, diptych.metrics, diptych.workload\n"
        "import diptych.sim.service, diptych.cli.simulate\n"
        "assert {'LLM', 'AsyncLLM', 'TwoPhase', 'SamplingParams'} <= set(dir(diptych)), dir(diptych)\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_commands_tell_what_they_take_without_torch() -> None:
    """Help and errors of arguments took two seconds, most of them a tensor library's import; only the lab needs one to tell."""
    code = (
        "import sys\n"
        "from importlib import import_module\n"
        "from diptych.cli import COMMANDS\n"
        "for name, (module, _) in COMMANDS.items():\n"
        "    if name != 'lab':\n"
        "        import_module(module)\n"
        "        heavy = {'torch', 'matplotlib', 'transformers'} & set(sys.modules)\n"
        "        assert not heavy, (name, heavy)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_no_folder_has_more_files_than_a_newcomer_looks_through() -> None:
    """What lies among sixty others is not found: rooms have rooms of their own, by what a change is about."""
    folders = {
        path.parent
        for suffix in (".py", ".cpp", ".h", ".inl")
        for tree in ("src", "csrc")
        for path in (ROOT / tree).rglob(f"*{suffix}")
    }
    sizes = {str(folder.relative_to(ROOT)): len(list(folder.iterdir())) for folder in folders}
    assert sorted(name for name, size in sizes.items() if size > MOST_FILES) == []


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "docs/glossary.md"])
def test_paths_named_in_the_pages_exist(page: str) -> None:
    """A map that names rooms that are gone leads a newcomer astray."""
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`((?:src|csrc|tests|training|docs)/[\w./-]+)`", text))
    assert named or page == "README.md", f"{page} names no path at all"
    missing = sorted(path for path in named if not (ROOT / path).exists())
    assert not missing, f"{page} names paths that do not exist: {missing}"


def test_every_command_has_its_module() -> None:
    """A command in the help page that cannot be imported is a broken promise."""
    from diptych.cli import COMMANDS

    for name, (module, _) in COMMANDS.items():
        assert (SRC.parent / (module.replace(".", "/") + ".py")).exists(), name


MOST_FILE_LINES = 600
MOST_FUNCTION_LINES = 70
CODE = sorted(
    path for folder in ("src", "tests", "training", "benchmarks") for path in (ROOT / folder).rglob("*.py")
) + sorted(path for pattern in ("*.cpp", "*.h", "*.inl") for path in (ROOT / "csrc").rglob(pattern))


def test_files_are_short() -> None:
    """A file longer than one can hold in mind hides a second noun that wants its own room."""
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in CODE}
    too_long = {name: lines for name, lines in lengths.items() if lines > MOST_FILE_LINES}
    assert not too_long, too_long


def test_functions_are_short() -> None:
    """A function longer than a page does more than its name says."""
    too_long = {}
    for path in CODE:
        if path.suffix != ".py":
            continue
        for name, lines in facts_of(path).function_lines:
            if lines > MOST_FUNCTION_LINES:
                too_long[f"{path.relative_to(ROOT)}:{name}"] = lines
    assert not too_long, too_long


def test_what_prefetches_is_inlined_by_force() -> None:
    """GCC takes a function that only prefetches for free of effects and drops its calls; nothing but speed would show it."""
    head = re.compile(r" *(?:[\w:<>*&]+ )+\w+\(.*\) (?:const )?{(?:  //.*)?$")
    droppable = []
    for path in (path for path in CODE if path.suffix != ".py"):
        function = ""
        for line in path.read_text().splitlines():
            function = line.strip() if head.match(line) else function
            is_member = function.startswith("void ") and ") const {" in function
            if "_prefetch(" in line and (is_member or re.match(r"(?:static )?inline ", function)):
                droppable.append(f"{path.name}: {function}")
    assert not droppable, droppable


def test_modules_import_in_no_circle() -> None:
    """Two files that import each other are one file in two places: neither can be read, tested or moved alone."""
    imports: dict[str, set[str]] = {}
    for path in SRC.rglob("*.py"):
        parts = ("diptych", *path.relative_to(SRC).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        named = {n for n in facts_of(path).names if n.startswith("diptych")}
        for node in facts_of(path).imports:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("diptych"):
                named |= {f"{node.module}.{alias.name}" for alias in node.names}
        imports[name] = named - {name}
    imports = {name: named & imports.keys() for name, named in imports.items()}
    # leaves go first: what is left imports, and is imported by, what is left
    while leaves := {name for name, named in imports.items() if not named}:
        imports = {name: named - leaves for name, named in imports.items() if name not in leaves}
    while roots := imports.keys() - set().union(*imports.values(), set()):
        imports = {name: named for name, named in imports.items() if name not in roots}
    assert not imports, {name: sorted(named) for name, named in imports.items()}


def test_curl_on_the_pages_says_what_it_sends() -> None:
    """The page on adapters sent JSON as a form, which the server refuses (415)."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in (line for line in text.splitlines() if "curl " in line and " -d " in line):
            assert "-H 'Content-Type: application/json'" in line, f"{page.name}: {line.strip()[:80]}"
