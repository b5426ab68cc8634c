"""`diptych serve` before workers on Ray: real processes, real clients, real SIGKILL."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from diptych.engine.llm import LLM
from diptych.ground.clock import sleep_s
from diptych.ground.config import EngineConfig, quiet_ray
from diptych.ground.errors import CapacityError, ConfigError, LoadError
from diptych.ground.request import SamplingParams
from diptych.ground.version import VERSION
from server_process import CLOCK, ServerProcess, check_account
from span_receiver import SpanReceiver

pytestmark = [pytest.mark.native, pytest.mark.cluster]
WORDS = "Once upon a time there was a little dog who lived in a house near the wood and "
OPTIONS = ("--max-queue-s", "0", "--kv-memory-bytes", "33554432", "--max-context-tokens", "2048")
RECOVERY_S = 45.0


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanReceiver]:
    receiver = SpanReceiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def pools(collector: SpanReceiver) -> Iterator[ServerProcess]:
    traced = ("--otlp-traces-endpoint", collector.endpoint)
    with ServerProcess("--prefill", "1", "--decode", "1", *traced, *OPTIONS) as process:
        yield process
        code, errors = process.stop()
        assert code == 0, errors
        assert "Traceback" not in errors, errors


def worker_pids(server: ServerProcess) -> dict[str, int]:
    """Of the workers that are up."""
    found = re.findall(r'diptych_worker_up{.*pid="(\d+)".*worker="([^"]+)"} 1', server.scrape())
    return {name: int(pid) for pid, name in found}


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = RECOVERY_S) -> float:
    begin_s = CLOCK.now_s()
    while not condition():
        assert CLOCK.now_s() - begin_s < timeout_s, what
        sleep_s(0.02)
    return CLOCK.now_s() - begin_s


def body(prompt: str, **options: object) -> dict[str, object]:
    return {"model": "diptych-10m", "prompt": prompt, "max_tokens": 40, "temperature": 0.0, **options}


class Stream:
    """A stream on a thread of its own: its text so far, and the last event."""

    def __init__(self, server: ServerProcess, prompt: str, **options: object) -> None:
        self.text, self.n_events, self.end, self.error = "", 0, {}, None
        self.broke: httpx.TransportError | None = None  # the connection, before the answer was over
        self._server, self._body = server, body(prompt, stream=True, stream_options={"include_usage": True}, **options)
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        try:
            self._read_all()
        except httpx.TransportError as error:
            self.broke = error

    def _read_all(self) -> None:
        with self._server.client() as http, http.stream("POST", "/v1/completions", json=self._body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.error = event["error"]
                for choice in event.get("choices", ()):
                    self.text += choice["text"]
                    self.n_events += 1
                if event.get("usage"):
                    self.end = event


def test_pools_answer_as_one_engine(pools: ServerProcess, one: LLM) -> None:
    """Which process read a prompt, and over what it came, must not be seen in an answer."""
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "frequency_penalty": 0.4}
    for n_words, options in ((2, {}), (30, {}), (90, sampled), (60, {"n": 2, **sampled}), (90, {"logprobs": 2})):
        prompt = WORDS * (n_words // 18) + WORDS[: n_words % 18 * 4]
        with pools.client() as http:
            answer = http.post("/v1/completions", json=body(prompt, **options)).json()
        sampling = SamplingParams(**{"max_tokens": 40, "temperature": 0.0, **options})
        wanted = one.generate([prompt], sampling)[0]
        assert [choice["text"] for choice in answer["choices"]] == [choice.text for choice in wanted.choices]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == wanted.usage.cached_tokens
        check_account(answer)
    assert pools.metric("diptych_worker_received_tokens_total") > 0
    # what one worker sent to another is none
    assert pools.metric("vllm:prefix_cache_hits_total") == pools.metric("vllm:prompt_tokens_cached_total")
    assert 'diptych_prompt_tokens_total{source="transferred"}' in pools.scrape()
    pools.check_balance()


def test_a_trace_goes_through_every_process(pools: ServerProcess, collector: SpanReceiver) -> None:
    """The client's `traceparent` is the root of what the server and both workers tell; times by phase are those answered."""
    trace_id, client_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    with pools.client() as http:
        headers = {"traceparent": f"00-{trace_id}-{client_id}-01"}
        http.post("/v1/completions", json=body("trace " + WORDS * 20), headers=headers).raise_for_status()
        silent = {"traceparent": f"00-{'b' * 32}-{client_id}-00"}
        http.post("/v1/completions", json=body("trace " + WORDS * 21), headers=silent).raise_for_status()
    workers = {("prefill-0", "read"), ("decode-0", "receive"), ("decode-0", "answer")}
    wait_for(
        lambda: {("server", "llm_request"), *workers} <= {(s.process, s.name) for s in collector.of_trace(trace_id)},
        "every process has told its part",
    )
    spans = collector.of_trace(trace_id)
    whole = next(span for span in spans if span.name == "llm_request")
    assert whole.parent_id == client_id
    assert {span.parent_id for span in spans if span is not whole} == {whole.span_id}
    phases = [span for span in spans if span.process == "server" and span is not whole]
    assert (
        {"queue", "prefill", "decode"} <= {span.name for span in phases} <= {"queue", "prefill", "transfer", "decode"}
    )
    lasted_ns = sum(span.end_ns - span.begin_ns for span in phases)
    assert abs(lasted_ns - (whole.end_ns - whole.begin_ns)) < 10_000, "phases add up to the request"
    read = whole.attributes
    sources = [read[f"diptych.prompt_tokens.{source}"] for source in ("computed", "cached", "transferred")]
    assert sum(sources) == read["gen_ai.usage.prompt_tokens"]
    assert sources[2] > 0
    assert not collector.of_trace("b" * 32), "who asks for no spans gets none"
    assert WORDS[:15] not in str(spans), "no text in a span"


def test_a_stream_survives_the_worker_that_writes_it(pools: ServerProcess, one: LLM) -> None:
    """SIGKILL in the middle of an answer: it goes on where it was, with the bits it would have had."""
    prompt = WORDS * 4
    sampling = {"temperature": 0.9, "seed": 11, "max_tokens": 400, "ignore_eos": True}
    wanted = one.generate([prompt], SamplingParams(**sampling))[0]
    stream = Stream(pools, prompt, **sampling)
    wait_for(lambda: stream.n_events > 20, "the stream has begun")
    os.kill(worker_pids(pools)["decode-0"], signal.SIGKILL)
    stream.thread.join(timeout=RECOVERY_S)
    assert stream.error is None
    assert stream.text == wanted.choices[0].text
    check_account(stream.end)
    assert stream.end["usage"]["completion_tokens"] == 400
    assert pools.metric("diptych_worker_deaths_total") == 1
    pools.check_balance()


def test_a_client_that_leaves_frees_every_worker(pools: ServerProcess) -> None:
    """Blocks that nobody waits for any more must not be held by a worker that does not know."""
    wait_for(lambda: len(worker_pids(pools)) == 2, "both workers are up")
    with (
        pools.client(timeout_s=30) as http,
        http.stream(
            "POST", "/v1/completions", json=body(WORDS * 80, stream=True, max_tokens=500, ignore_eos=True)
        ) as answer,
    ):
        next(answer.iter_lines())
    begin_s = CLOCK.now_s()
    wait_for(lambda: 'state="in_use"' in pools.scrape() and held(pools) == 0, "blocks are back", timeout_s=10)
    assert CLOCK.now_s() - begin_s < 10
    pools.check_balance()


def test_nothing_listens_beyond_this_machine(pools: ServerProcess) -> None:
    """Whoever reaches a port of Ray's runs code here; and it asks nobody before it listens everywhere."""
    family = {one.pid for one in psutil.Process(pools.process.pid).children(recursive=True)} | {pools.process.pid}
    listening = [one.laddr.ip for one in psutil.net_connections() if one.status == "LISTEN" and one.pid in family]
    assert len(listening) > 3
    assert all(ip.removeprefix("::ffff:").startswith("127.") for ip in listening), listening


@pytest.mark.browser
@pytest.mark.slow
def test_the_live_page_shows_the_workers(pools: ServerProcess) -> None:
    """Which worker is full, and which was lost, must be seen without a dashboard."""
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
    if chromium is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(pools.url)
        page.wait_for_selector("#workers-rows tr:nth-child(2)", timeout=20_000)
        rows = page.locator("#workers-rows tr").all_inner_texts()
        assert [row.split()[:2] for row in rows] == [["decode-0", "decode"], ["prefill-0", "prefill"]]
        browser.close()


def held(server: ServerProcess) -> float:
    """Blocks held and requests under way, over all workers."""
    text = server.scrape()
    rows = re.findall(r'^diptych_worker_(?:kv_blocks{.*state="in_use".*}|requests_\w+{.*}) (\S+)$', text, re.MULTILINE)
    return sum(map(float, rows))


@pytest.mark.slow
def test_the_end_of_a_server_is_the_end_of_its_workers() -> None:
    """SIGTERM, and also SIGKILL, of the door: no process stays behind, and no port."""
    with ServerProcess("--workers", "1", *OPTIONS) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        pids = [*worker_pids(server).values(), *(one.pid for one in family if "Agent" not in " ".join(one.cmdline()))]
        assert len(pids) > 2
        server.process.kill()
        wait_for(lambda: not any(map(is_alive, pids)), "all processes have ended", timeout_s=30)
        # Ray's own agents look for their parent now and then
        wait_for(lambda: not any(is_alive(one.pid) for one in family), "agents have ended", timeout_s=180)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_ray_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that stood still for a minute it was a traceback of a hundred lines."""
    quiet_ray(is_local=True)
    rays = importlib.import_module("diptych.cluster.rays")

    def init(**options: object) -> None:
        raise Exception("The current node timed out during startup.")  # so does Ray

    monkeypatch.setattr(rays.ray, "init", init)
    with pytest.raises(LoadError, match=r"Ray did not start on this machine: .*timed out") as caught:
        rays.RayCluster("bundled", EngineConfig(), rays.PoolConfig())
    assert "session_latest" in str(caught.value.hint)


def test_a_cluster_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told as an output that could not be written: Ray's error is an OSError."""
    quiet_ray(is_local=True)
    rays = importlib.import_module("diptych.cluster.rays")

    def init(**options: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(rays.ray, "init", init)
    with pytest.raises(ConfigError, match=r"no Ray cluster at auto: .*Could not find") as caught:
        rays.RayCluster("bundled", EngineConfig(), rays.PoolConfig(address="auto"))
    assert "ray start --head" in str(caught.value.hint)


def test_an_address_where_nobody_listens_is_named_at_once() -> None:
    """Ray tried for minutes, and wrote lines of its own meanwhile."""
    rays = importlib.import_module("diptych.cluster.rays")
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"no Ray cluster at {address}: .*refused"):
            rays.RayCluster("bundled", EngineConfig(), rays.PoolConfig(address=address))


def test_what_a_worker_says_of_its_end_is_told_with_its_numbers() -> None:
    """Of an error with a hint only the hint was told: `worker decode-0 did not start: ActorDiedError: hint: raise ...`."""
    rays = importlib.import_module("diptych.cluster.rays")
    error = CapacityError("kv_memory_bytes is 1000; one block has 98304", hint="raise it\nby far")
    page = f"The actor died in its creation task\n  File rays.py\ndiptych.ground.errors.CapacityError: {error}"
    assert rays._said(RuntimeError(page)) == (
        "RuntimeError: CapacityError: kv_memory_bytes is 1000; one block has 98304",
        "raise it\nby far",
    )
    assert rays._reason(error) == "CapacityError: kv_memory_bytes is 1000; one block has 98304"
    assert rays._said(TimeoutError()) == ("TimeoutError: ", None)


def test_a_worker_of_another_version_is_refused() -> None:
    """It was taken, and what it did not understand was lost: clients waited for ever."""
    rays = importlib.import_module("diptych.cluster.rays")
    rays.check_version("decode-0", VERSION)
    with pytest.raises(LoadError, match=f"worker decode-1 runs Diptych 0.0.9; this server is {re.escape(VERSION)}"):
        rays.check_version("decode-1", "0.0.9")
