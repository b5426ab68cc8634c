"""How long one piece of work holds the interpreter, and with it every stream, by CPU time: a busy machine does not blur it.

python benchmarks/interpreter_held.py [--repeats 5]

Each job that the server gives to a thread, or runs on its event loop, runs here on a thread while another looks every 0.2 ms
how much processor time the first has burned. What it burned between two looks it did without letting anybody in. A look that
the machine itself delays counts too, so the least of several runs is told.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from diptych.compute.sampling.structured import GrammarCompiler
from diptych.engine.load import bundled_dir
from diptych.engine.text.template import ChatTemplate
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.request import StructuredSpec
from diptych.server.http.answers import json_bytes
from diptych.server.http.door import BodyLimits, Workers, parse_within
from diptych.server.http.errors import ApiError
from diptych.server.reader import Reader, message_dicts
from diptych.server.schema import ChatBody, CompletionBody

MB = 2**20
LOOK_S = 0.0002


def held_s(work: Callable[[], object]) -> float:
    """The longest processor time that `work` burned on its thread while this one could not run."""
    clock: list[int] = []
    begin, done = threading.Event(), threading.Event()

    def run() -> None:
        clock.append(time.pthread_getcpuclockid(threading.get_ident()))
        begin.wait()
        try:
            work()
        except ApiError:
            pass
        finally:
            done.set()
            over.wait()  # its clock ends with it

    over = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    while not clock:
        time.sleep(LOOK_S)
    longest, before = 0.0, time.clock_gettime(clock[0])
    begin.set()
    while not done.is_set():
        time.sleep(LOOK_S)
        now = time.clock_gettime(clock[0])
        longest, before = max(longest, now - before), now
    longest = max(longest, time.clock_gettime(clock[0]) - before)
    over.set()
    thread.join()
    return longest


def jobs() -> dict[str, Callable[[], object]]:
    """The server's longest pieces of work, by name."""
    limits = BodyLimits.of_context(65536, 32 * MB)
    tokenizer = Tokenizer.from_dir(bundled_dir())
    template = ChatTemplate.from_dir(bundled_dir(), tokenizer)
    reader = Reader(tokenizer, template, Workers(), reads_control_tokens=False)
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    bodies = {
        "28 MB, one text": b'{"prompt":"' + b"a word" * (28 * MB // 6) + b'"}',
        "28 MB, one text of escapes": b'{"prompt":"' + b"\\n" * (14 * MB) + b'"}',
        "28 MB, not ASCII": '{{"prompt":"{}"}}'.format("é" * (14 * MB)).encode(),
        "28 MB, 14 million entries": b'{"prompt":[' + b"3," * (14 * MB) + b"3]}",
        "28 MB, 64 texts": json.dumps({"prompt": ["a word" * (28 * MB // 6 // 64)] * 64}).encode(),
        "262,144 token ids": json.dumps({"prompt": [[5] * 4096] * 64}).encode(),
    }
    properties = {f"p{i}": {"type": "string", "description": "a word " * 20} for i in range(20)}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object", "properties": properties}}}
        for i in range(30)
    ]
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": "hello world " * 3} for i in range(4001)]
    chat = json.dumps({"messages": turns, "tools": tools}).encode()
    body = ChatBody.model_validate_json(chat)
    entry = {"token": " word", "logprob": -0.5, "bytes": [32] * 5}
    content = [{**entry, "top_logprobs": [entry] * 20} for _ in range(400)]
    answer = {"choices": [{"index": i, "logprobs": {"content": content}} for i in range(64)]}
    n_schemas = [0]

    def schema() -> None:
        for _ in range(20):
            n_schemas[0] += 1
            source = json.dumps({"type": "object", "properties": {f"{n_schemas[0]}-{i}": {} for i in range(40)}})
            grammars.compile(StructuredSpec(kind="json_schema", source=source))

    made: dict[str, Callable[[], Any]] = {
        f"parse {name}": partial(parse_within, bytearray(raw), CompletionBody, limits) for name, raw in bodies.items()
    }
    many = bytearray(json.dumps({"messages": [{"role": "user", "content": "a"}] * 16384}).encode())
    deep = bytearray(json.dumps({"prompt": "a", "metadata": {f"k{i}": [] for i in range(32000)}}).encode())
    made["parse 16,384 messages"] = lambda: parse_within(many, ChatBody, limits)
    made["parse 32,000 keys and lists"] = lambda: parse_within(deep, CompletionBody, limits)
    sixteen = ChatBody.model_validate_json(many)
    made["messages of 16,384 for a template"] = lambda: message_dicts(sixteen.messages)
    made["parse 4,001 messages"] = lambda: parse_within(bytearray(chat), ChatBody, limits)
    made["render 4,001 messages with tools"] = lambda: asyncio.run(reader.render(body, limit_tokens=65536))
    made["tokenise 60,000 words"] = lambda: tokenizer.encode("word " * 60_000)
    made["text of 65,536 ids"] = lambda: tokenizer.decode([5, 77, 300, 1024] * 16384)
    made["encode 64 x 400 x 20 log-probabilities"] = lambda: json_bytes(answer)
    made["compile 20 schemas"] = schema
    return made


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="jobs with this in their name")
    given = parser.parse_args()
    repeats, only = given.repeats, given.only
    made = jobs()
    gc.collect()
    gc.freeze()  # as the server does: a full collection would walk all that is loaded
    for name, work in made.items():
        if only not in name:
            continue
        spans = sorted(held_s(work) for _ in range(repeats))
        print(f"{name:<42} {spans[0] * 1e3:8.1f} ms at least held, {spans[-1] * 1e3:.1f} at most", flush=True)


if __name__ == "__main__":
    main()
