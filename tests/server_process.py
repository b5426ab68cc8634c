"""A real server process over TCP, and the checks that every answer must pass. Shared by tests/server and tests/cli."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from openai import DefaultHttpxClient, OpenAI

from diptych.ground.clock import MonotonicClock, sleep_s
from started import Started

CLOCK = MonotonicClock()
START_TIMEOUT_S = 180.0
# nothing here speaks TLS, and a client that could takes 25 ms of processor time to begin: half a core where metrics are watched
PLAIN = False
# which kernels the servers of the tests run on
BACKEND = os.environ.get("DIPTYCH_TEST_BACKEND", "auto")


class ServerProcess:
    """`diptych serve` on a free port. Use `stop` or the context manager. `running`: those not yet ended, of all tests."""

    running: ClassVar[list[ServerProcess]] = []

    def __init__(self, *arguments: str, script: Path | None = None, key: str | None = None) -> None:
        command = ["serve", "--port", "0", "--backend", BACKEND, "--threads", "1", *arguments]
        if key is not None:
            command += ["--api-key", key]
        self.key = key
        self._clients: list[httpx.Client | OpenAI] = []
        self.process = Started(*command, script=script, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.url = self._url()
        ServerProcess.running.append(self)
        self.host, _, port = self.url.removeprefix("http://").rpartition(":")
        self.port = int(port)

    def _url(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.pages = self.process.stdout.readline() if "http://" in line else ""
        if "http://" not in line:
            self.process.kill()
            raise RuntimeError(f"no server: {line}{self.process.communicate(timeout=10)}")
        url = line.strip().rpartition(" ")[2]
        deadline_s = CLOCK.now_s() + START_TIMEOUT_S
        while CLOCK.now_s() < deadline_s:
            try:
                if httpx.get(f"{url}/ready", timeout=5, verify=PLAIN).status_code == 200:
                    return url
            except httpx.HTTPError:
                pass
            sleep_s(0.05)
        raise RuntimeError("the server did not become ready")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def client(self, *, timeout_s: float = 120.0) -> httpx.Client:
        client = httpx.Client(base_url=self.url, headers=self.headers, timeout=timeout_s, verify=PLAIN)
        self._clients.append(client)
        return client

    def openai(self) -> OpenAI:
        http = DefaultHttpxClient(verify=PLAIN)
        client = OpenAI(
            base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, timeout=120.0, http_client=http
        )
        self._clients.append(client)
        return client

    def scrape(self) -> str:
        """The text of `/metrics`."""
        return httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=60, verify=PLAIN).text

    def metric(self, name: str) -> float:
        """The sum of a metric's samples (labels ignored)."""
        return _sum_of(self.scrape(), name)

    def histogram_above(self, name: str, edge: float) -> float:
        """How many values of a histogram lie above one of its edges."""
        counts = dict(re.findall(rf'^{re.escape(name)}_bucket{{le="([^"]+)"}} (\S+)$', self.scrape(), re.MULTILINE))
        return float(counts["+Inf"]) - float(counts[str(edge)])

    def blocks_in_use(self) -> int:
        return _blocks_in_use(self.scrape())

    def wait_idle(self, timeout_s: float = 60.0) -> str:
        """Until nothing runs or waits and no block is held; returns the metrics then. Fails after the time is over."""
        deadline_s = CLOCK.now_s() + timeout_s
        while CLOCK.now_s() < deadline_s:
            text = self.scrape()
            left = _sum_of(text, "diptych_sequences_running") + _sum_of(text, "diptych_sequences_waiting")
            if left == 0 and _blocks_in_use(text) == 0:
                return text
            sleep_s(0.02)
        raise AssertionError(f"not idle: {left} sequences, {_blocks_in_use(text)} blocks in use")

    def check_balance(self) -> None:
        """Of an idle server: every token, request, choice and block that came in has gone out, in either family of names."""
        try:
            if httpx.get(f"{self.url}/ready", timeout=60, verify=PLAIN).status_code != 200:
                return  # a test has told it to end
        except httpx.TransportError:
            return  # it has ended
        text = self.wait_idle()
        told: dict[str, float] = {}
        sources, states, info = {}, {}, {}
        for name, labels, value in _samples(text):
            told[name] = told.get(name, 0.0) + value
            if name == "diptych_prompt_tokens_total":
                sources[labels["source"]] = value
            elif name == "diptych_kv_blocks":
                states[labels["state"]] = value
            elif name == "vllm:cache_config_info":
                info = labels
        read = sum(sources[name] for name in ("computed", "cached", "transferred", "dropped"))
        assert read == told["vllm:prompt_tokens_total"], told
        assert told["diptych_requests_total"] == told["diptych_requests_taken_total"], told
        assert told["diptych_choices_finished_total"] == told["vllm:request_success_total"]
        assert told["diptych_choices_finished_total"] >= told["diptych_requests_total"]
        accepted = told["vllm:spec_decode_num_accepted_tokens_total"]
        assert told.get("vllm:spec_decode_num_accepted_tokens_per_pos_total", 0) == accepted
        assert accepted <= told["vllm:spec_decode_num_draft_tokens_total"]
        assert told["vllm:spec_decode_num_drafts_total"] <= told["vllm:spec_decode_num_draft_tokens_total"]
        assert told["vllm:request_max_num_generation_tokens_count"] == told["diptych_requests_total"]
        for name in ("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens"):
            assert told[f"vllm:{name}_count"] == told["diptych_requests_total"], name
        assert told["vllm:request_prompt_tokens_sum"] == told["vllm:prompt_tokens_total"]
        assert told["vllm:request_generation_tokens_sum"] == told["vllm:generation_tokens_total"]
        assert told["vllm:request_max_num_generation_tokens_sum"] <= told["diptych_output_tokens_total"]
        assert told["diptych_output_tokens_total"] == told["vllm:generation_tokens_total"]
        assert states["in_use"] == 0
        assert sum(states.values()) == float(info["num_gpu_blocks"])
        assert told["diptych_waiting_tokens"] == 0

    def rss_bytes(self) -> int:
        """Resident memory of the process."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def stop(self, timeout_s: float = 60.0) -> tuple[int, str]:
        """SIGTERM, then wait; returns (exit code, standard error)."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, errors

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *problem: object) -> None:
        ServerProcess.running.remove(self)
        for client in self._clients:
            client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each sample but those of buckets, which are most: prometheus-client's own reader takes four
    times as long as the server that wrote them. Values of our labels hold no escapes.
    """
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        parts = re.fullmatch(r"([^{ ]+)(?:\{(.*)\})? (\S+)", line)
        assert parts is not None, line
        if not parts[1].endswith("_bucket"):
            yield parts[1], dict(re.findall(r'(\w+)="([^"]*)"', parts[2] or "")), float(parts[3])


def _sum_of(text: str, name: str) -> float:
    lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _blocks_in_use(text: str) -> int:
    line = next(line for line in text.splitlines() if line.startswith('diptych_kv_blocks{state="in_use"}'))
    return int(float(line.rpartition(" ")[2]))


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """Parsed events of a raw SSE body, `[DONE]` left out."""
    blocks = raw.decode().split("\n\n")
    return [json.loads(block.removeprefix("data: ")) for block in blocks if block.startswith("data: {")]


def check_account(answer: dict[str, Any]) -> None:
    """The sums of the contract, in one answer or in the last event of a stream."""
    usage, timings = answer["usage"], answer["timings"]
    own = timings["diptych"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= cached <= usage["prompt_tokens"]
    assert timings["cache_n"] == cached
    assert timings["predicted_n"] == usage["completion_tokens"]
    assert own["thinking_n"] == usage["completion_tokens_details"]["reasoning_tokens"]
    assert own["thinking_n"] + own["answer_n"] == usage["completion_tokens"]
    details = usage["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert (timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)) == (accepted + rejected, accepted)
    assert 0 <= accepted <= usage["completion_tokens"]
    assert rejected >= 0
    assert own["thinking_ms"] + own["answer_ms"] == pytest.approx(own["decode_ms"], abs=1e-3)
    assert timings["prompt_ms"] == own["prefill_ms"]
    assert timings["predicted_ms"] == own["decode_ms"]
    to_first = own["queue_ms"] + own["prefill_ms"] + own["transfer_ms"]
    assert to_first + own["decode_ms"] == pytest.approx(own["e2e_ms"], abs=1.0)
    assert 0 <= own["stall_ms"] <= own["decode_ms"] + 1e-6
    if own["ttft_ms"] is not None:
        expected = own["predicted"]  # it depends on whether this machine was measured
        assert [expected["prefill_ms"] is None, expected["decode_ms"] is None] == 2 * [expected["reason"] is not None]
        assert timings["prompt_n"] + cached + timings["transfer_n"] == usage["prompt_tokens"]
        assert to_first == pytest.approx(own["ttft_ms"], abs=1.0)
        assert sum(part["prefill_ms"] for part in own["segments"]) == pytest.approx(own["prefill_ms"], abs=1e-3)
    assert sum(part["tokens"] for part in own["segments"]) == usage["prompt_tokens"]
    assert sum(part["cached_tokens"] for part in own["segments"]) == cached
    for part in own["segments"]:
        assert 0 <= part["cached_tokens"] <= part["tokens"]
