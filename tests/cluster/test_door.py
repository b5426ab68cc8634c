"""The door is killed under load: no client takes half an answer for a whole one, nothing stays, and the next door serves."""

from __future__ import annotations

import random

import httpx
import psutil
import pytest
from tests.cluster.states import N_ROUNDS, SAMPLED, STATES, is_in
from tests.cluster.test_serve import OPTIONS, RECOVERY_S, WORDS, Stream, body, wait_for

from diptych.engine.llm import LLM
from diptych.ground.request import SamplingParams
from server_process import ServerProcess

pytestmark = [pytest.mark.native, pytest.mark.cluster, pytest.mark.slow]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("round_number", range((N_ROUNDS + 1) // 2))
def test_the_end_of_the_door_is_seen_by_every_client(one: LLM, state: str, round_number: int) -> None:
    """A stream that ends without an end would be a truncated answer; here each breaks, or was whole before."""
    rng = random.Random(f"door {state} {round_number}")
    with ServerProcess("--prefill", "1", "--decode", "1", *OPTIONS) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        asked = [
            (f"{rng.random()} " + WORDS * rng.choice((1, 6, 20, 40)), {"seed": rng.randrange(2**32), **SAMPLED})
            for _ in range(8)
        ]
        before = server.scrape()
        streams = [Stream(server, prompt, max_tokens=300, **options) for prompt, options in asked]
        victim = "decode-0" if state == "decoding" else "prefill-0"
        wait_for(
            lambda: is_in(server, victim, state, streams, before) or not any(s.thread.is_alive() for s in streams),
            state,
        )
        server.process.kill()
        for stream in streams:
            stream.thread.join(timeout=30)
            assert not stream.thread.is_alive(), "a client hangs"
        wanted = one.generate([prompt for prompt, _ in asked], [SamplingParams(max_tokens=300, **o) for _, o in asked])
        for stream, completion in zip(streams, wanted, strict=True):
            text = completion.choices[0].text
            if stream.broke is None:
                assert (stream.text, bool(stream.end)) == (text, True), "an answer that ends is whole"
            else:
                assert isinstance(stream.broke, httpx.TransportError), stream.broke
                assert text.startswith(stream.text), "and what came of the others was right"
        engines = [
            one.pid for one in family if "Agent" not in _command(one)
        ]  # those look for their parent now and then
        wait_for(lambda: not any(map(is_alive, engines)), "all processes have ended", RECOVERY_S)
    with ServerProcess("--workers", "1", *OPTIONS) as server, server.client() as http:
        answer = http.post("/v1/completions", json=body(asked[0][0])).json()
        expected = one.generate([asked[0][0]], SamplingParams(max_tokens=40, temperature=0.0))[0]
        assert answer["choices"][0]["text"] == expected.choices[0].text


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
