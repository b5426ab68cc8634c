"""An engine on several processes: the answers of one, and an end that everybody hears of when one of them is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import openai
import psutil
import pytest
import torch
from tests.embedding_files import make_embedder
from tests.engine.test_speculation import unpriced
from tests.lora import ALL, write_adapter
from tests.server_process import ServerProcess
from tests.thread_ranks import free_address, load_over_threads

from diptych.compute import rank
from diptych.compute.ops import linked
from diptych.compute.ops.cpu.kernels import _cpu, instruction_sets
from diptych.compute.ops.linked import Carrier
from diptych.engine.async_llm import AsyncLLM
from diptych.engine.llm import LLM, Completion
from diptych.engine.load import bundled_dir
from diptych.engine.phases import TwoPhase
from diptych.ground.clock import MonotonicClock, sleep_s
from diptych.ground.config import ComputeConfig, engine_config
from diptych.ground.errors import ConfigError, LoadError, WorkerLost
from diptych.ground.request import SamplingParams
from started import Started

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]

CLOCK = MonotonicClock()
PROMPTS = ["Once upon a time there was a little", "Tom and Sue", "Once upon a time there was a big"]
SAMPLING = [
    SamplingParams(max_tokens=24, temperature=0.0, logprobs=3),
    SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=5, n=2, prompt_logprobs=2),
    SamplingParams(max_tokens=24, temperature=0.0),
]


def engine(ranks: int, **settings: object) -> LLM:
    return LLM("bundled", tp=ranks, threads=ranks, backend="cpu", max_context_tokens=512, **settings)


def answers(llm: LLM) -> list[tuple[object, ...]]:
    """All that a client sees, twice, so that the second time meets cached prefixes."""

    def seen(one: Completion) -> tuple[object, ...]:
        return one.choices, one.prompt_logprobs, one.usage

    return [seen(one) for _ in range(2) for one in llm.generate(PROMPTS, SAMPLING)]


def rank_processes() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "diptych.compute.rank" in " ".join(one.cmdline())]


def memfds() -> int:
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("memfd:diptych" in os.readlink(path) for path in links)


def named_memory() -> list[str]:
    """Segments with a name of ours or of torch's; other processes of this machine have theirs."""
    return [name for name in os.listdir("/dev/shm") if "diptych" in name or "torch" in name]


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    deadline_s = CLOCK.now_s() + timeout_s
    while not holds():
        assert CLOCK.now_s() < deadline_s, what
        sleep_s(0.02)


def lose_rank(llm: LLM, lose: Callable[[], object], what: str) -> None:
    """Lose a rank while answers are written: they end with an error that says so, and so does what is asked afterwards."""
    lost: list[bool] = []

    def once(number: int, delta: object) -> None:
        if not lost:
            lost.append(True)
            lose()

    with pytest.raises(WorkerLost, match=what):
        llm.generate(PROMPTS, SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True), on_delta=once)
    assert llm.engine.n_open == 0
    with pytest.raises(WorkerLost):
        llm.generate("again")


def test_two_processes_answer_as_one_and_end_as_one(tmp_path: Path) -> None:
    """Text, log-probabilities, cached tokens, drafts by lookup, and an adapter that comes and goes; then one dies while both
    decode.
    """
    one = engine(1)
    expected = answers(one)
    adapter = write_adapter(tmp_path / "late", bundled_dir(), {**ALL, "q_proj": 3})
    llm = engine(2, speculate="lookup")
    assert llm.loaded.model.weight_bytes == pytest.approx(
        one.loaded.model.weight_bytes, rel=0.02
    )  # held once, all in all
    assert [a[:2] for a in answers(llm)] == [a[:2] for a in expected]
    for each in (one, llm):
        each.load_lora("late", adapter)
    said, plain = [llm.generate(PROMPTS[0], SAMPLING[0], adapter=name)[0].choices for name in ("late", None)]
    assert said == one.generate(PROMPTS[0], SAMPLING[0], adapter="late")[0].choices != plain
    llm.unload_lora("late")
    assert answers(llm)[0][0] == expected[0][0]
    llm.load_lora("late", adapter)  # is there when the rank dies, and no error of its own then
    (rank,) = rank_processes()
    lose_rank(llm, lambda: rank.send_signal(signal.SIGKILL), "rank 1 was ended by signal 9")
    llm.engine.back_memory(lambda: True)  # on a thread of its own, where nobody would catch what it raised
    llm.loaded.model.close()
    wait_until(lambda: not rank_processes() and memfds() == 0, "a process or its memory stayed")
    assert not named_memory()


def test_what_ranks_cannot_do_is_refused() -> None:
    """Never ignored: one says why, and what to do."""
    for settings, what in (
        ({"backend": "torch"}, "the torch backend computes in one process"),
        ({"tp": 0}, "tp"),
    ):
        with pytest.raises(ConfigError, match=what):
            engine_config(**{"tp": 2, **settings})
    with pytest.raises(ConfigError, match="fp32 was asked for"):
        LLM("bundled", tp=2, weights="fp32")
    with pytest.raises(ConfigError, match="threads is 3 and tp is 2"):
        LLM("bundled", tp=2, threads=3)


def test_texts_are_embedded_as_by_one(tmp_path: Path) -> None:
    """States are tapped from the stream that ranks share, every token's for a mean: the same bits."""
    texts = ["Once upon a time there was a fox.", "Bread is made of flour. " * 9]
    path = make_embedder(tmp_path / "mean", pooling="mean", dtype=torch.bfloat16)
    settings = {"max_context_tokens": 256, "max_step_tokens": 17}
    one = LLM(path, backend="cpu", threads=1, weights="int8", calibrate="weights", **settings)
    over = load_over_threads(path, ComputeConfig(backend="cpu", tp=2, threads=2, weights="int8"))
    ranked = LLM(replace(one.loaded, model=over), **settings)
    pairs = zip(one.embed(texts), ranked.embed(texts), strict=True)
    assert [(ours.vector == theirs.vector).all() for ours, theirs in pairs] == [True, True]
    over.close()


@pytest.mark.parametrize("kind", ["draft", "medusa", "eagle", "itself"])
def test_drafters_guess_for_ranks_as_for_one(kind: str) -> None:
    """They run on the first rank and read states that all ranks have: the same guesses, and the answers of no drafter. A
    drafter that is the model itself, in one process, is right every time.
    """
    settings: dict[str, object] = {"max_context_tokens": 256, "max_draft_tokens": 4, "enable_prefix_cache": False}
    settings["speculate"] = "draft" if kind == "itself" else kind
    if kind == "itself":
        settings["draft_model"] = str(bundled_dir())
    one = LLM("bundled", backend="cpu", threads=1, **settings)
    compute = ComputeConfig(backend="cpu", tp=2, threads=2)
    over = load_over_threads(bundled_dir(), compute)
    ranked = LLM(replace(one.loaded, model=over, compute=compute), **settings)
    found = []
    sampling = [replace(one, max_tokens=64) for one in SAMPLING]  # so long that a guess holds on every set
    for llm in (unpriced(ranked), unpriced(one)):
        done = llm.generate(PROMPTS, sampling)
        found.append([(answer.choices, answer.usage) for answer in done])
    assert found[0] == found[1]
    drafted, accepted = (
        sum(getattr(usage, name) for _, usage in found[0]) for name in ("drafted_tokens", "accepted_tokens")
    )
    assert 0 < accepted <= drafted
    assert kind != "itself" or accepted == drafted
    assert ranked.engine.stepper.executor.drafting.failures == 0
    over.close()


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_four_processes_answer_as_one(weights: str, kv: str) -> None:
    """More processes than cores, in all formats."""
    expected = answers(engine(1, weights=weights, kv=kv))
    llm = engine(4, weights=weights, kv=kv)
    assert answers(llm) == expected
    llm.loaded.model.close()
    wait_until(lambda: not rank_processes(), "a process stayed")


@pytest.mark.slow
def test_two_phases_on_ranks() -> None:
    """Prefill and decode by hand, and keys and values as they are read back from the ranks."""
    settings = {"tp": 2, "threads": 2, "max_context_tokens": 512}
    one, two = TwoPhase("bundled", backend="cpu", threads=1, max_context_tokens=512), TwoPhase("bundled", **settings)
    token_ids = [1, 17, 200, 35, 77, 408, 9, 1100, 15, 3, 501]
    states = [phases.prefill(token_ids, chunk_tokens=5) for phases in (one, two)]
    for _ in range(12):
        (a, logits), (b, others) = (phases.decode(state) for phases, state in zip((one, two), states, strict=True))
        assert a == b
        assert torch.equal(logits, others)
    for layer in (0, 3):
        ours, theirs = (phases.keys_values(state, layer) for phases, state in zip((one, two), states, strict=True))
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def rank_zero(state: str, ranks: int, *address: str) -> subprocess.Popen[str]:
    script = str(Path(__file__).with_name("rank_zero.py"))
    return subprocess.Popen([sys.executable, script, state, str(ranks), *address], text=True, **PIPES)


def other_rank(number: int, ranks: int, address: str) -> Started:
    """`diptych rank`, as on a machine of its own."""
    where = ("--tp", str(ranks), "--tp-address", address, "--tp-rank", str(number), "--threads", "1", "--numa", "off")
    return Started("rank", "bundled", *where, **PIPES)


STATES = ("loading", "prefilling", "decoding", "idle")


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("victim", "size"), [(0, 2), (1, 2), (2, 4)])
def test_whoever_is_killed_nobody_stays(state: str, victim: int, size: int) -> None:
    """SIGKILL of any rank in every state: the others end, the engine's process with an error that names who is gone."""
    process = rank_zero(state, size)
    assert process.stdout is not None
    assert process.stdout.readline() == f"{state}\n"
    everybody = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
    ranks = {int(one.cmdline()[5]): one for one in everybody[1:] if "diptych.compute.rank" in one.cmdline()}
    assert sorted(ranks) == list(range(1, size))
    (everybody[0] if victim == 0 else ranks[victim]).send_signal(signal.SIGKILL)
    said = process.communicate(timeout=20)[1]
    wait_until(lambda: not any(one.is_running() for one in everybody), f"left: {everybody}")
    assert not named_memory()
    if victim != 0:
        assert process.returncode == 1
        assert f"rank {victim} was ended by signal 9" in said, said[-2000:]


def test_linked_processes_answer_as_one_and_end_as_one() -> None:
    """Two process groups that share nothing but a port on loopback, and hear of nobody else; then one is killed."""
    address = free_address()
    other = other_rank(1, 2, address)
    llm = LLM("bundled", tp=2, tp_address=address, threads=1, backend="cpu", max_context_tokens=512)
    assert answers(llm) == answers(engine(1))
    listening = [one.laddr.ip for one in psutil.Process(other.pid).net_connections() if one.status == "LISTEN"]
    listening += [one.laddr.ip for one in psutil.Process().net_connections() if one.status == "LISTEN"]
    assert set(listening) <= {"127.0.0.1"}, listening
    lose_rank(llm, lambda: other.send_signal(signal.SIGKILL), "rank 1 is gone")
    llm.loaded.model.close()
    other.communicate(timeout=10)
    assert memfds() == 0


@pytest.mark.parametrize("is_idle", [False, True], ids=["in a step", "idle"])
def test_a_linked_rank_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch, is_idle: bool) -> None:
    """It closes nothing, so no system tells of it: a step waited for it three times as long as it takes to know."""
    monkeypatch.setattr(linked, "LOST_S", 3.0)
    address = free_address()
    other = other_rank(1, 2, address)
    llm = LLM("bundled", tp=2, tp_address=address, threads=1, backend="cpu", max_context_tokens=512)
    lost: list[object] = []
    llm.loaded.model.on_loss(lost.append)
    begin_s = CLOCK.now_s()
    if is_idle:
        other.send_signal(signal.SIGSTOP)
        wait_until(lambda: bool(lost), "nobody was told", 20)
        with pytest.raises(WorkerLost, match="rank 1 is gone"):
            llm.generate("again")
    else:
        lose_rank(llm, lambda: other.send_signal(signal.SIGSTOP), "rank 1 is gone")
    assert lost
    assert CLOCK.now_s() - begin_s < linked.STEP_S / 2, "the pulse says so, not the time that a step may take"
    llm.loaded.model.close()
    other.kill()
    other.communicate(timeout=10)


def test_a_message_that_nobody_reads_ends_with_the_rank() -> None:
    """Rank 0 waited STEP_S for a rank that fell silent behind a step, before it asked for its next message."""
    address = free_address()
    other = threading.Thread(target=lambda: carriers.append(Carrier(address, 1, 2)))
    carriers: list[Carrier] = []
    other.start()
    carrier = Carrier(address, 0, 2)
    other.join()
    posted: list[bool] = []
    post = threading.Thread(target=lambda: posted.append(carrier.post(linked.STEP, b"a step")))
    post.start()
    carrier.give_up()
    post.join(linked.STEP_S / 2)
    carrier.end()
    assert posted == [False]
    assert carrier.error == "a rank was given up"


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_linked_rank_that_is_killed_ends_the_others(state: str, victim: int) -> None:
    """As on one machine: whoever waits is told by the system, and says whom it lost."""
    address = free_address()
    both = [rank_zero(state, 2, address), other_rank(1, 2, address)]
    assert both[0].stdout is not None
    assert both[0].stdout.readline() == f"{state}\n"
    both[victim].send_signal(signal.SIGKILL)
    said = both[1 - victim].communicate(timeout=30)[1]
    assert both[1 - victim].returncode == 1, said[-2000:]
    assert f"rank {victim} is gone" in said, said[-2000:]
    both[victim].communicate(timeout=10)


def test_who_cannot_join_is_told_why() -> None:
    """Addresses, numbers and models that do not fit, each by name; nobody waits for what cannot come."""
    for settings, what in (
        ({"tp": 2, "tp_address": "nowhere"}, "must be HOST:PORT"),
        ({"tp": 2, "tp_address": "127.0.0.1:0"}, "must be HOST:PORT"),
        ({"tp_address": "127.0.0.1:29500"}, "tp is 1"),
    ):
        with pytest.raises(ConfigError, match=what):
            engine_config(**settings)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot listen"):
            LLM("bundled", tp=2, tp_address=address, threads=1)
    address = free_address()
    with pytest.raises(ConfigError, match=r"rank 1 of 2 has not come within 0 s"):
        Carrier(address, 0, 2, join_s=0.2)
    with pytest.raises(ConfigError, match="rank 0 is not at"):
        Carrier(free_address(), 1, 2, join_s=0.2)
    found: list[BaseException] = []

    def join(size: int) -> None:
        try:
            Carrier(address, 1, size, join_s=10)
        except ConfigError as error:
            found.append(error)

    address = free_address()
    threads = [threading.Thread(target=join, args=(3,))]
    threads[0].start()
    with pytest.raises(ConfigError, match="rank 1 has size 3, and rank 0 has 2"):
        Carrier(address, 0, 2, join_s=10)
    threads[0].join()
    assert "rank 1 has size 3" in str(found[0])


def test_a_rank_that_nobody_looks_for_is_told_so() -> None:
    """Rank 2 of 3 waited without end where rank 0 has two: it was asked for its size by nobody."""
    address, found, carriers = free_address(), list[BaseException](), list[Carrier]()

    def join(number: int, size: int) -> None:
        try:
            carriers.append(Carrier(address, number, size, join_s=10))
        except ConfigError as error:
            found.append(error)

    threads = [threading.Thread(target=join, args=one, daemon=True) for one in ((0, 2), (2, 3), (1, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [str(one) for one in found] == ["rank 2 has size 3, and rank 0 has 2"]
    assert sorted(one.number for one in carriers) == [0, 1], "the others are not held up"


@pytest.mark.slow
def test_an_engine_that_waits_hears_that_a_rank_is_gone() -> None:
    """No step is needed to notice: a server with nothing to do must not call itself ready for the next request."""
    engine = AsyncLLM("bundled", tp=2, threads=2, max_context_tokens=512)
    engine.start()
    (rank,) = rank_processes()
    rank.send_signal(signal.SIGKILL)
    wait_until(lambda: not engine.is_ready, "the engine did not notice")
    assert isinstance(engine.failure, WorkerLost)
    engine.stop()
    engine.loaded.model.close()


@pytest.mark.slow
def test_a_server_on_ranks_answers_and_ends_with_them() -> None:
    """A rank killed under a stream: the stream ends with an error, not as if it were whole, and the process with status 1."""
    with ServerProcess("bundled", "--tp", "2", "--threads", "2", "--max-context-tokens", "512") as server:
        client = server.openai()
        said = client.completions.create(model="diptych-10m", prompt=PROMPTS[0], max_tokens=8, temperature=0.0)
        expected = engine(1).generate(PROMPTS[0], SamplingParams(max_tokens=8, temperature=0.0))[0].choices[0].text
        assert said.choices[0].text == expected
        (rank,) = [
            one for one in psutil.Process(server.process.pid).children() if "diptych.compute.rank" in one.cmdline()
        ]
        stream = client.completions.create(
            model="diptych-10m", prompt=PROMPTS[0], max_tokens=450, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        rank.send_signal(signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(stream)
        assert server.process.wait(timeout=20) == 1
        wait_until(lambda: not rank.is_running(), "a rank stayed")


@pytest.mark.parametrize("letters", ["", "a"])
def test_what_a_rank_says_at_its_end_is_cut_between_characters(letters: str) -> None:
    """Half a character at the end of what is kept was an error of its own, in place of the one that it told of."""
    fd = os.memfd_create("diptych")
    team = _cpu.Team(fd, 0, 1, True)

    class Failing:
        say_error, break_up = team.say_error, team.break_up

        def next(self) -> tuple[int, int]:
            raise LoadError(letters + "\u043c" * 2000)

    with pytest.raises(LoadError):
        rank.run(Failing())
    os.close(fd)
    kind, _, text = team.error_of(0).partition("|")
    assert kind == "LoadError"
    assert text.strip("a") == "\u043c" * len(text.strip("a"))
