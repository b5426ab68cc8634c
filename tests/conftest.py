"""What holds in every test of the suite: no draft is lost or counted twice, whatever the test is about."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib.util
import itertools
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import huge_pages
from diptych.control.loop import EngineCore
from diptych.ground.events import DraftEvent, Event, TokenEvent
from diptych.ground.phase import Phase
from diptych.ground.step import StepPlan, StepResult
from diptych.metrics import RequestRecord

# Before torch is loaded, here and in what tests start: tests run beside each other, and on tensors of a few kilobytes threads
# of torch wait for each other longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else each process, and those that tests start, would compile all that it imports: pip leaves that to who needs it.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What checkpoints.py has made, for all processes of this run; the folder goes with the first of them.
if "DIPTYCH_TEST_CHECKPOINTS" not in os.environ:
    os.environ["DIPTYCH_TEST_CHECKPOINTS"] = tempfile.mkdtemp(prefix="diptych-checkpoints-")
    atexit.register(shutil.rmtree, os.environ["DIPTYCH_TEST_CHECKPOINTS"], ignore_errors=True)
huge_pages.allow(False)
# What modules and tests are made of is no garbage: nobody looks for it there, time and again. At the end it may go, when pytest
# has looked twice at all the rest: extension modules report what is left of them.
gc.disable()
atexit.register(gc.unfreeze)
# Where there is no GPU Triton interprets our kernels for one, as it is told before anything imports it.
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"


# Tests of these folders have a core of each process's own where there are no more cores than processes that share the tests: a
# thread of the kernels whose core another process has is waited for by turns of the system's clock. What threads do to each
# other is tested in the other folders.
ON_ONE_CORE = ("cli", "cluster", "lab", "server", "sim")
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # not on macOS
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
HAS_CROWDED_CORES = bool(WORKER) and 0 < len(CORES) <= int(os.environ["PYTEST_XDIST_WORKER_COUNT"])

# Where nothing is compiled yet, one process begins to collect the tests and compiles what they import, then the others, from
# its files: together each of them would compile all of it.
if not WORKER and not Path(importlib.util.cache_from_source(importlib.util.find_spec("torch").origin)).exists():
    os.environ["DIPTYCH_TEST_COMPILES"] = "1"
_turn = contextlib.ExitStack()  # until it has collected so many
COLLECTED_ALONE = 20  # files, which import most of all that is: two thirds of its time, and the others stay behind it
_collected: list[str] = []
if WORKER and "DIPTYCH_TEST_COMPILES" in os.environ:
    _file = _turn.enter_context((Path(os.environ["DIPTYCH_TEST_CHECKPOINTS"]) / "collecting").open("w"))
    try:
        fcntl.flock(_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(_file, fcntl.LOCK_SH)

# of few tests that take half a minute: begun among the last they would leave the other processes without work
BEGUN_FIRST = ("test_openapi.py",)


def pytest_configure(config: pytest.Config) -> None:
    """Processes are given files in the order below, not in xdist's own."""
    config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of many tests come first where processes share them, so that at the end none is left with a long one."""
    if WORKER:
        n_tests = Counter(item.path for item in items)
        items.sort(key=lambda item: (item.path.name not in BEGUN_FIRST, -n_tests[item.path]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures of any scope; what a test starts inherits it."""
    # a model with threads, or training, sets them for the whole process and all tests behind its own
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if HAS_CROWDED_CORES:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        own = CORES[int(WORKER.removeprefix("gw")) % len(CORES)]
        os.sched_setaffinity(0, {own} if folder in ON_ONE_CORE else CORES)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """The others may follow."""
    _collected.extend([report.nodeid] if report.nodeid.endswith(".py") else [])
    if len(_collected) == COLLECTED_ALONE:
        _turn.close()


def pytest_collection_finish() -> None:
    """What is collected stands until the end: no collection of garbage walks it again."""
    _turn.close()
    gc.enable()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Nor what a file has imported, once its garbage is gone: a collection for each engine that is closed would."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


_numbers = itertools.count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pytest's, without a link to the last one of a name, which is made anew for longer than the folder."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    return tmp_path_factory.mktemp(f"{name}{next(_numbers)}", numbered=False)


_end_step, _usage = EngineCore.end_step, RequestRecord.usage


def _checked_end_step(core: EngineCore, plan: StepPlan, result: StepResult, now_s: float) -> list[Event]:
    """Each chunk with drafts that was committed says so once; what it hands out are those that held and one token more."""
    open_chunks = {}
    for chunk in plan.chunks:
        seq = core._in_flight[chunk.seq_id]
        if chunk.phase is Phase.DECODE and len(chunk.token_ids) > 1:
            open_chunks[seq.request.request_id, seq.index] = chunk
    events = _end_step(core, plan, result, now_s)
    tokens: dict[tuple[str, int], int] = {}
    for event in events:
        if type(event) is TokenEvent:
            tokens[event.request_id, event.index] = tokens.get((event.request_id, event.index), 0) + 1
    drafts = [event for event in events if type(event) is DraftEvent]
    for event in drafts:
        key = event.request_id, event.index
        assert event.drafted_tokens == len(open_chunks.pop(key).draft_token_ids), "proposed = what was verified"
        assert 0 <= event.accepted_tokens <= event.drafted_tokens, "accepted + rejected = proposed"
        # a stop may come with a draft, behind which no token of its own is handed out
        assert tokens[key] - event.accepted_tokens in (0, 1), "accepted drafts are tokens of the answer"
    assert not open_chunks.keys() & tokens.keys(), "drafts were verified and nobody counted them"
    return events


def _checked_usage(record: RequestRecord, **options: int):
    usage = _usage(record, **options)
    rejected = sum(one.drafted_tokens - one.accepted_tokens for one in record.drafts)
    assert usage.drafted_tokens == usage.accepted_tokens + rejected
    assert usage.accepted_tokens <= usage.output_tokens
    return usage


@pytest.fixture(autouse=True, scope="session")
def drafts_balance() -> Iterator[None]:
    """In this process; servers in processes of their own are held by `ServerProcess.check_balance`."""
    EngineCore.end_step, RequestRecord.usage = _checked_end_step, _checked_usage  # type: ignore[method-assign]
    yield
    EngineCore.end_step, RequestRecord.usage = _end_step, _usage  # type: ignore[method-assign]
