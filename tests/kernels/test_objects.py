"""Code for instructions that a processor may lack is reached through its kernel set alone, seen in the objects themselves."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from built_kernels import BENCH, MACHINE, compiler, objects

from worlds import EVERY_KERNEL_SET

pytestmark = pytest.mark.native

SETS = {"x86_64": {"avx2", "avx512", "avx512_fma"}, "aarch64": {"neon", "neon_dot", "neon_mmla"}}  # always built

INITIALISERS = re.compile(r"^\s*\d+ (\.init_array|\.ctors)", re.MULTILINE)
# of which the linker takes one copy for all objects, whichever it meets first
SHARED_SYMBOL = re.compile(
    r"^[0-9a-f]{16} (?:u.|.w).{5} (?!\*UND\*)\S+\t[0-9a-f]{16} +(?:\.hidden )?(.+)$", re.MULTILINE
)


def listings(files: list[Path]) -> Iterator[tuple[str, str]]:
    """The name of each object and what objdump lists of it, its sections and then its symbols."""
    asked = subprocess.run([compiler(), "-print-prog-name=objdump"], check=True, capture_output=True, text=True)
    command = [asked.stdout.strip(), "-C", "-h", "-t", *map(str, files)]
    in_english = os.environ | {"LC_ALL": "C"}
    listed = subprocess.run(command, env=in_english, check=True, capture_output=True, text=True).stdout
    _, *parts = re.split(r"^(\S+?)(?:\.cpp)?\.o:\s+file format .*$", listed, flags=re.MULTILINE)
    yield from zip((Path(name).name for name in parts[::2]), parts[1::2], strict=True)


def own_code(files: list[Path]) -> Iterator[tuple[str, str, str]]:
    """Of each object that belongs to one kernel set alone: its name, the set's, and the listing."""
    for name, listing in listings(files):
        _, _, of = name.partition("_")
        if of in EVERY_KERNEL_SET and of != "scalar":
            yield name, of, listing


def wrongs(files: list[Path]) -> list[str]:
    """What would run without being chosen."""
    found = []
    for name, of, listing in own_code(files):
        found += [f"{name} runs code when it is loaded: {one}" for one in INITIALISERS.findall(listing)]
        shared = (symbol for symbol in SHARED_SYMBOL.findall(listing) if f"diptych::{of}::" not in symbol)
        found += [f"{name} has a copy for everybody of {symbol}" for symbol in shared]
    return found


def test_no_object_of_a_kernel_set_runs_code_of_its_own_accord() -> None:
    compiler()
    files = objects()
    assert {of for _, of, _ in own_code(files)} >= SETS.get(MACHINE, set())
    assert wrongs(files) == []


RUNS, SHARES = "gemm_avx2 runs code when it is loaded: ", "gemm_avx2 has a copy for everybody of "


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("extern const int given; extern const int copied = given;", RUNS),
        ("struct A { A(); } a;", RUNS),
        ("int n; [[gnu::constructor]] void f() { ++n; }", RUNS),
        (
            "int n; template <int i> [[gnu::noinline]] int f() { return n += i; } int g() { return f<1>(); }",
            SHARES + "int f<1>()",
        ),
        (
            "int n; [[gnu::noinline]] inline int f() { return ++n; } int g() { return f(); }",
            SHARES + "f()",
        ),
        ("inline int shared = 1; int g() { return shared; }", SHARES + "shared"),
        ("namespace diptych::avx2 { inline int shared = 1; } int g() { return diptych::avx2::shared; }", None),
        ("[[gnu::weak]] int f(); int g() { return f(); }", None),
        ("static const int table[2] = {1, 2}; int g(int i) { return table[i]; }", None),
    ],
)
def test_such_code_is_found(text: str, wrong: str | None, tmp_path: Path) -> None:
    source, built = tmp_path / "gemm_avx2.cpp", tmp_path / "gemm_avx2.o"
    source.write_text(text)
    subprocess.run([compiler(), "-std=c++17", "-O2", "-c", str(source), "-o", str(built)], check=True)
    found = wrongs([built])
    assert found == [] if wrong is None else len(found) == 1 and found[0].startswith(wrong)


@pytest.mark.parametrize(
    "program", ["gemm_bench", "attention_bench", "amx_check", "amx_bench", "libdiptych_kernels.so"]
)
def test_an_archive_of_kernels_stands_behind_what_needs_them(program: str, tmp_path: Path) -> None:
    """A linker takes of an archive what those before it lack, so benches whose objects came behind it had no kernels."""
    compiler()
    archive = tmp_path / "kernels.a"
    archive.touch()
    command = ["make", "-n", "-C", str(BENCH), f"KERNELS={archive}", f"OUT={tmp_path}", str(tmp_path / program)]
    steps = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    (link,) = (step.split() for step in steps if str(archive) in step)
    assert not [one for one in link[link.index(str(archive)) :] if one.endswith((".o", ".cpp"))]
