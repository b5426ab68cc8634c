"""The end of a server with requests open: every client gets a whole answer or an error, never half of one."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable

import httpx
import pytest

from server_process import ServerProcess

BODY = {"prompt": "A story:", "max_tokens": 3900, "ignore_eos": True, "temperature": 0}


def leave(process: ServerProcess, act: Callable[[], None]) -> tuple[bytes, httpx.Response, httpx.Response]:
    """(the stream's bytes, the two unstreamed answers) of requests that are open while `act` ends the server."""
    parts: list[bytes] = []
    begun = threading.Event()
    answers: dict[str, httpx.Response] = {}

    def read() -> None:
        with process.client().stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
            for part in stream.iter_raw():
                parts.append(part)
                begun.set()

    def ask(name: str, path: str, body: dict[str, object]) -> None:
        answers[name] = process.client().post(path, json=body)

    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3900, "ignore_eos": True}
    threads = [
        threading.Thread(target=read),
        threading.Thread(target=ask, args=("text", "/v1/completions", {**BODY, "prompt": ["a", "b"]})),
        threading.Thread(target=ask, args=("chat", "/v1/chat/completions", chat)),
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    while process.metric("diptych_sequences_running") < 4:
        pass
    act()
    for thread in threads:
        thread.join(60)
    return b"".join(parts), answers["text"], answers["chat"]


@pytest.mark.parametrize("signals", [1, 2])
def test_an_answer_cut_off_at_the_end_is_an_error(signals: int) -> None:
    """After the drain time it was a 200 with finish_reason "abort"; at the second SIGTERM streams just stopped."""
    timeout = "0.5" if signals == 1 else "60"
    with ServerProcess("--drain-timeout-s", timeout, "--kv-memory-bytes", "67108864") as process:

        def act() -> None:
            process.process.send_signal(signal.SIGTERM)
            while signals == 2 and httpx.get(f"{process.url}/ready").status_code == 200:
                pass
            if signals == 2:
                process.process.send_signal(signal.SIGTERM)

        raw, text, chat = leave(process, act)
        last = raw.rstrip().split(b"\n\n")[-1]
        assert last.startswith(b"event: error\ndata: "), raw[-300:]
        assert json.loads(last.partition(b"data: ")[2])["error"]["code"] == "shutting_down"
        assert b"[DONE]" not in raw
        for answer in (text, chat):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
            assert "retry-after" in answer.headers
        code, errors = process.stop()
        assert code == 0, errors
        assert "Traceback" not in errors, errors
