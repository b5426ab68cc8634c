"""How many sequences run at one time where nobody says: as many as the KV pool and the time of a step allow.

More places give more tokens per second together and fewer per stream, up to where a step's time grows with its rows.
64 places for everything halved the output of 256 clients on a small model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

# what a sequence holds on average, prompt and half of its answer, and what share of a short context at most; those that
# grow beyond are preempted, not lost
USUAL_TOKENS = 512
USUAL_SHARE = 8
# ten tokens a second: slower, and a reader waits for the text
MAX_STEP_S = 0.1
MAX_PLACES = 256  # 4,721 tok/s with 256 clients on the bundled model, 2,593 with 64 places

# of states: the share of a pool's memory that they have at most, and as many for each sequence that runs where prefixes are
# cached: its own, its prompt's, its answer's
STATE_MEMORY_SHARE = 0.5
STATES_EACH = 3
USUAL_RUNNING = 64  # sequences, where nobody says

PredictDecode = Callable[[int, int], float]  # (sequences, tokens of context of each) -> seconds of a step


@dataclass(frozen=True, slots=True)
class Places:
    """The number, and what set it."""

    number: int
    reason: str


def state_places(state_bytes: float, memory_bytes: float, *, running: int | None, is_caching: bool) -> int:
    """Places for states of a model's sequences in a pool of so much memory: as many as are of use, or fit. 0: it has none.

    state_bytes: of one sequence. running: how many run at one time, where somebody says.
    """
    if not state_bytes:
        return 0
    wanted = (STATES_EACH if is_caching else 1) * (running or USUAL_RUNNING)
    return int(min(wanted, memory_bytes * STATE_MEMORY_SHARE / state_bytes))


def beside_states(found: Places, n_places: int, *, is_caching: bool) -> Places:
    """Of these those that have a place for their state, where nobody says; prefixes that are cached keep some, too."""
    if not n_places:
        return found
    most = max(1, n_places * (STATES_EACH - 1) // STATES_EACH) if is_caching else n_places
    return found if found.number <= most else Places(most, f"places for {n_places} states")


def places(pool_tokens: int, context_tokens: int, predict_s: PredictDecode | None) -> Places:
    """Places for a pool of `pool_tokens`; predict_s: None where this machine was never measured.

    A step of all of them may take MAX_STEP_S, or twice the time of one alone: where reading the weights takes longer than
    that, rows cost next to nothing.
    """
    usual_tokens = max(1, min(USUAL_TOKENS, context_tokens // USUAL_SHARE))
    by_memory = max(1, pool_tokens // usual_tokens)
    number, reason = min(by_memory, MAX_PLACES), "kv memory" if by_memory < MAX_PLACES else "the most that was measured"
    if predict_s is None:
        return Places(number, reason)
    limit_s = max(MAX_STEP_S, 2 * predict_s(1, usual_tokens))
    if predict_s(number, usual_tokens) <= limit_s:
        return Places(number, reason)
    fit = bisect_right(range(1, number), limit_s, key=lambda n: predict_s(n, usual_tokens))
    return Places(fit, f"a step of more is predicted to take over {limit_s * 1e3:.0f} ms")
