"""How large the terminals of a Lark grammar are when each name in them is written out, as llguidance does it.

It counts that against no limit of its own: a few hundred bytes of terminals that name the next one twice took half a minute
and gigabytes of memory. Standard library only.
"""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter

from diptych.ground.errors import GrammarError

MOST_WRITTEN = 1 << 21  # characters; llguidance takes 0.1 us and some bytes for each
# As llguidance reads them. Nothing is read twice, whatever is sent: what is not closed is a text here, and an error there.
_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*+"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\])*+/?')
_DEFINITION = re.compile(
    r"^[ \t\r\f\v]*+[?!]?([A-Za-z_?][\w?-]*+)[ \t]*+(?:\.-?\d++)?[ \t]*+(?:\[[^\]\n]*+\])?[ \t]*+:", re.MULTILINE
)
_NAME = re.compile(r"(?<![\w-])_?[A-Z][A-Z0-9_-]*+(?![\w-])")


def check_terminals(lark: str) -> None:
    """Raise GrammarError for a terminal of more than MOST_WRITTEN characters, names in it written out."""
    bare = _TEXT.sub(lambda found: "~" * len(found[0]), lark)  # names in texts name nothing
    found = list(_DEFINITION.finditer(bare))
    bodies: dict[str, str] = {}  # of one name together, as grammars within may have the same
    for i, one in enumerate(found):
        if _NAME.fullmatch(one[1]):
            end = found[i + 1].start() if i + 1 < len(found) else len(bare)
            bodies[one[1]] = bodies.get(one[1], "") + bare[one.end() : end]
    inner = {name: [one for one in _NAME.findall(body) if one in bodies] for name, body in bodies.items()}
    sizes: dict[str, int] = {}
    try:
        order = list(TopologicalSorter(inner).static_order())
    except CycleError:  # the compiler refuses a terminal within itself
        return
    for name in order:
        sizes[name] = len(bodies[name]) + sum(sizes[one] for one in inner[name])
        if sizes[name] > MOST_WRITTEN:
            raise GrammarError(
                f"grammar has the terminal {name[:40]}, of more than {MOST_WRITTEN} characters with all names written out",
                hint="write rules (in lower case) in place of terminals that name others",
                param="grammar",
            )
