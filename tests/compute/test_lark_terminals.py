"""Terminals that name others: what the compiler writes out without a limit is counted before."""

from __future__ import annotations

import pytest

from diptych.compute.sampling.lark_terminals import MOST_WRITTEN, check_terminals
from diptych.compute.sampling.structured import _grammar_text
from diptych.ground.errors import GrammarError
from diptych.ground.request import StructuredSpec

SPELLED = "_T-{a}.2 : (_T-{b} /[\n/) _T-{b} // T1"
QUOTED = 'T{a}: "T{b} T{b}" | /T{b}T{b}/ # T{b} T{b}'


def doubled(line: str, depth: int) -> str:
    return "\n".join(line.format(a=i, b=i + 1) for i in range(depth))


@pytest.mark.parametrize(
    "source",
    [
        f'start: T0\n{doubled("T{a}: T{b} T{b}", 40)}\nT40: "b"',
        f'start: _T-0\n{doubled(SPELLED, 40)}\n_T-40: "b"',
        f'T40: "b"\n{doubled("T{a}[lazy]: /[[]/ | T{b} T{b}", 40)}\nstart: T0',
        f'root ::= a0\n{doubled("a{a} ::= a{b} a{b}", 40)}\na40 ::= "b"',
    ],
    ids=["terminals", "spelled otherwise", "upwards", "gbnf"],
)
def test_terminals_that_double_are_refused_before_they_are_compiled(source: str) -> None:
    """33 of them, 400 bytes, would take the memory of any machine, and 22 with texts between took half a minute."""
    with pytest.raises(GrammarError, match=str(MOST_WRITTEN)):
        _grammar_text(StructuredSpec(kind="grammar", source=source))()


@pytest.mark.parametrize(
    "source",
    [
        f'start: T0\n{doubled("T{a}: T{b} T{b}", 12)}\nT12: "b"',
        f'start: t0\n{doubled("t{a}: t{b} t{b}", 40)}\nt40: "b"',
        f'start: T0\n{doubled("T{a}: T{b}", 2000)}\nT2000: "b"',
        f"start: T0\n{doubled(QUOTED, 40)}",
        "start: A\nA: B\nB: A A",
        "start: A B\nA: C\n",
        "",
    ],
    ids=["twelve", "rules", "a chain", "texts", "a circle", "unknown", "nothing"],
)
def test_others_are_left_to_the_compiler(source: str) -> None:
    """What is small, what is not written out, and what is wrong otherwise."""
    check_terminals(source)


@pytest.mark.parametrize(
    "part", [" ", "\n", "\t:", '"\\', "/\\", "a ", "A\n", "[\n", "a[\n", "_", "#", "a:\n", "T: T T\n", "\n!"]
)
def test_terminals_are_read_once(part: str) -> None:
    """What is read again from each place on takes this text a quarter of an hour, where a test has five minutes."""
    check_terminals(f"start: A{part * ((1 << 20) // len(part))}")
