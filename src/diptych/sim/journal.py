"""A journal: what a running server did, without a word of what was said, as JSON lines that simulations read.

Written by `server.watch.journal` step by step and request by request; read here as a load (`journal_load`) and as the minutes
around one request (`journal_minutes`). Three kinds of line:

    {"diptych_journal": 1, "config": ..., "blocks": ...}           the engine, first
    {"step": [begin_s, end_s, decoding, context, [[new, start, samples, decodes], ...]]}
    {"request": {...}}                                             when it is over, so in the order of ends

Tokens do not stand in it. A full block of prompt and answer is a number made with a key that is drawn at the start and never
written: two blocks have one number where they, all before them, adapter and salt are equal, which is what a prefix cache
sees; nobody can try texts against it. So is an adapter's. A request's id is a digest, found by who knows the id. Of drafts it
says how many were verified behind how many tokens, and how many held.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

from diptych.control.recording import decode, encode
from diptych.ground.bounds import Bound, shown
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import ConfigError, EngineError
from diptych.ground.phase import Phase
from diptych.ground.request import BOUNDS, AdapterRef, CacheScope, Pool, Request, SamplingParams
from diptych.ground.shape import ChunkShape, StepShape
from diptych.sim.counterfactual import Drafted, Machine, Minutes, Past, Seen, times_of
from diptych.sim.load import MOST_PROMPT_TOKENS, OpenLoad
from diptych.sim.recorded import unreadable
from diptych.workload import WorkloadItem

_KEY = "diptych_journal"
_ID_BYTES, _BLOCK_BYTES = 8, 6
_OWN_BASE = 1 << 56  # of tokens that no other request shares; block numbers are below 1 << 48
_SECONDS = Bound(float, -1e12, 1e12, "seconds")
_SECONDS_IF_ANY = Bound(float, -1e12, 1e12, "seconds", is_optional=True)
_PARAMETERS = Bound(int, 0, 1 << 48, "parameters")
_MOST_OF_STEP = 1 << 53  # of any number of a step
_TOKENS = Bound(int, 1, MOST_PROMPT_TOKENS, "tokens")
AROUND_S = 120.0  # of a journal, before and after a request that is asked about


class BlockNames:
    """Numbers of full blocks, and of adapters. key: drawn anew for every journal."""

    def __init__(self, key: bytes, block_tokens: int) -> None:
        self._key = key
        self._block_tokens = block_tokens

    def of(self, token_ids: Sequence[int], scope: CacheScope) -> list[int]:
        """Of the full blocks of a sequence whose keys and values are shared within this scope."""
        size, found = self._block_tokens, []
        digest = b"" if scope is None else json.dumps(scope).encode()
        for start in range(0, len(token_ids) - size + 1, size):
            tokens = array("q", token_ids[start : start + size]).tobytes()
            digest = blake2b(digest + tokens, key=self._key, digest_size=_BLOCK_BYTES).digest()
            found.append(int.from_bytes(digest, "big"))
        return found

    def of_adapter(self, adapter: AdapterRef | None) -> str | None:
        """What stands for an adapter: equal where its numbers are, and no name."""
        if adapter is None:
            return None
        return blake2b(adapter.revision.encode(), key=self._key, digest_size=_ID_BYTES, person=b"adapter").hexdigest()


def id_digest(request_id: str) -> str:
    """What stands for a request's id."""
    return blake2b(request_id.encode(), digest_size=_ID_BYTES).hexdigest()


def head_line(config: SchedulerConfig, blocks: BlockConfig) -> str:
    """The first line."""
    return json.dumps({_KEY: 1, "config": encode(config), "blocks": encode(blocks)})


def step_line(begin_s: float, end_s: float, shape: StepShape) -> str:
    """One step. Decoding sequences as their number and the sum of their contexts; rows of drafts as prefill's are."""
    plain = [one for one in shape.shapes if one.phase is Phase.DECODE and one.new_tokens == 1]
    others = [one for one in shape.shapes if one.phase is not Phase.DECODE or one.new_tokens != 1]
    context = sum(one.count * one.end_pos for one in plain)
    chunks = [[one.new_tokens, one.start_pos, int(one.samples), int(one.phase is Phase.DECODE)] for one in others]
    return json.dumps({"step": [round(begin_s, 6), round(end_s, 6), sum(one.count for one in plain), context, chunks]})


def request_line(past: Past, names: BlockNames) -> str:
    """One request that is over. Of several choices the first one's blocks are told."""
    request, seen = past.request, past.seen
    tokens = (*request.prompt_token_ids, *(past.outputs[0] if past.outputs else ()))
    return json.dumps(
        {
            "request": {
                "id": id_digest(request.request_id),
                "arrival_s": request.arrival_s,
                "came_s": past.came_s,
                "end_s": past.end_s,
                "prompt_tokens": len(request.prompt_token_ids),
                "cached_tokens": past.cached_tokens,
                "output_tokens": [len(one) for one in past.outputs],
                "max_tokens": request.sampling.max_tokens,
                "priority": request.priority,
                "adapter": names.of_adapter(request.adapter),
                "adapter_parameters": 0 if request.adapter is None else request.adapter.n_parameters,
                "blocks": names.of(tokens, request.cache_scope),
                "seen": asdict(seen),
            }
            | ({"drafts": past.drafts} if any(past.drafts) else {})
            | ({"is_read_whole": True} if _is_read_whole(request) else {})
        }
    )


def _is_read_whole(request: Request) -> bool:
    """Whether nothing of its prompt may be found in the prefix cache: more than keys and values is wanted of each token."""
    pooling = request.pooling
    is_pooled = pooling is not None and (pooling.both_ways or pooling.pool is Pool.MEAN)
    return is_pooled or request.sampling.prompt_logprobs is not None


def is_journal(path: Path) -> bool:
    """Whether this file begins as one does. ConfigError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip().startswith(b'{"' + _KEY.encode() + b'"')
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def journal_load(path: Path, *, limit: int | None = None, speed: float = 1.0) -> OpenLoad:
    """Its requests as a load, the first at 0 s; each writes as many tokens as it did, several choices as several requests.

    ConfigError for a damaged journal, and for one without requests.
    """
    blocks = BlockConfig(n_blocks=1)
    found: list[tuple[float, int, int, tuple[int, ...], AdapterRef | None]] = []
    adapters: dict[str, int] = {}
    for kind, entry in _lines(path):
        if kind == "head":
            blocks = entry["blocks"]
        elif kind == "request":
            numbers = tuple(entry["blocks"][: -(-entry["prompt_tokens"] // blocks.block_tokens)])
            adapter = _adapter(entry, adapters)
            found += [
                (entry["arrival_s"], entry["prompt_tokens"], max(1, n), numbers, adapter)
                for n in entry["output_tokens"]
            ]
    if not found:
        raise ConfigError(f"{path.name} has 0 requests; a trace needs at least 1")
    found.sort(key=lambda one: one[0])
    items = tuple(
        WorkloadItem(
            index=index,
            at_s=arrival_s - found[0][0],
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            prefix_ids=numbers,
            prefix_block_tokens=blocks.block_tokens,
            adapter=adapter,
        )
        for index, (arrival_s, prompt_tokens, output_tokens, numbers, adapter) in enumerate(found[:limit])
    )
    return OpenLoad(items, shares_prefixes=True, speed=speed)


def journal_minutes(path: Path, request_id: str, *, machine: Machine | None = None) -> tuple[Minutes, str]:
    """The minutes around one request, and its name in them. ConfigError where it is not in the journal."""
    names = {id_digest(request_id), id_digest(f"{request_id}-0")}
    target: dict[str, Any] | None = None
    config, blocks = SchedulerConfig(), BlockConfig(n_blocks=1)
    for kind, entry in _lines(path):
        if kind == "head":
            config, blocks = entry["config"], entry["blocks"]
        elif kind == "request" and entry["id"] in names:
            target = entry
    if target is None:
        raise ConfigError(
            f"no request {request_id[:100]!r} in {path.name}", hint="it may have been open when the recording ended"
        )
    begin_s, end_s = target["arrival_s"] - AROUND_S, (target["end_s"] or target["arrival_s"]) + AROUND_S
    pasts: list[Past] = []
    adapters: dict[str, int] = {}
    steps: list[tuple[float, float, StepShape]] = []
    for number, (kind, entry) in enumerate(_lines(path)):
        if kind == "step" and begin_s <= entry[0] <= end_s:
            steps.append((entry[0], entry[1], _shape(entry[2])))
        elif kind == "request" and entry["arrival_s"] <= end_s and (entry["end_s"] or end_s) >= begin_s:
            pasts.append(_past(entry, number, blocks.block_tokens, _adapter(entry, adapters)))
    minutes = Minutes(
        config=config,
        blocks=blocks,
        requests=tuple(sorted(pasts, key=lambda past: past.request.arrival_s)),
        steps=times_of(steps),
        machine=machine,
    )
    return minutes, str(target["id"])


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(head | step | request, content) of each line. A last line that was cut short is left out, as a crash leaves one."""
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                number += 1
                if not line.endswith("\n"):
                    return
                yield _line(json.loads(line))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, LookupError, AttributeError, RecursionError, EngineError) as error:
        raise unreadable(path.name, number, error) from None


def _line(entry: dict[str, Any]) -> tuple[str, Any]:
    """What a line is, and what it says. ValueError, TypeError or KeyError where it is none, EngineError for a number."""
    if _KEY in entry:
        if entry[_KEY] != 1:
            raise ValueError(f"its format is {entry[_KEY]}; this version reads 1")
        head = {"config": decode(entry["config"]), "blocks": decode(entry["blocks"])}
        if not isinstance(head["config"], SchedulerConfig) or not isinstance(head["blocks"], BlockConfig):
            raise ValueError("its config and blocks are those of no engine")
        return "head", head
    ((kind, content),) = entry.items()
    if kind == "step":
        begin_s, end_s, decoding, context, chunks = content
        for name, instant_s in (("its begin", begin_s), ("its end", end_s)):
            _SECONDS.take(name, instant_s, ConfigError)
        if end_s < begin_s:
            raise ValueError(f"its step ends at {end_s} s and begins at {begin_s} s; it must not end sooner")
        counts = [decoding, context, *(n for new, start, _, _ in chunks for n in (new, start))]
        if not all(type(n) is int and 0 <= n <= _MOST_OF_STEP for n in counts) or context < decoding:
            raise ValueError(
                f"its step has {shown(counts)} (decoding sequences, tokens of their contexts, new tokens and first place of "
                "each chunk); each must be a whole number, 0 or more, and a context at least a token for each sequence"
            )
        return kind, (begin_s, end_s, (decoding, context, chunks))
    if kind == "request":
        _check(content)
    return kind, content


def _check(request: dict[str, Any]) -> None:
    """Refuse what no engine has written."""
    for name in ("arrival_s", "came_s", "end_s"):
        if name != "end_s" or request[name] is not None:
            _SECONDS.take(name, request[name], ConfigError)
    _TOKENS.take("prompt_tokens", request["prompt_tokens"], ConfigError)
    drafts = [Drafted(*one) for some in request.get("drafts", ()) for one in some]
    counts = [request["cached_tokens"], *request["output_tokens"], *(n for one in drafts for n in one)]
    if not all(type(n) is int and 0 <= n <= MOST_PROMPT_TOKENS for n in counts):
        raise ValueError(f"it has {shown(counts)} tokens; each must be a whole number from 0 to {MOST_PROMPT_TOKENS}")
    blocks = request["blocks"]
    if type(blocks) is not list or not all(type(one) is int and 0 <= one < 1 << 8 * _BLOCK_BYTES for one in blocks):
        raise ValueError(
            f"its blocks are {shown(blocks)}; they must be a list of whole numbers of {_BLOCK_BYTES} bytes"
        )
    Seen(**request["seen"])
    for name, seconds in request["seen"].items():
        (_SECONDS_IF_ANY if name in ("ttft_s", "tpot_s") else _SECONDS).take(f"seen {name}", seconds, ConfigError)
    _PARAMETERS.take("adapter_parameters", request.get("adapter_parameters", 0), ConfigError)
    for name, text in (("id", request["id"]), ("adapter", request.get("adapter"))):
        if not isinstance(text, str) and (text is not None or name == "id"):
            raise ValueError(f"its {name} is {shown(text)}; it must be a text")
    for name in ("max_tokens", "priority"):
        BOUNDS[name].take(name, request[name], ConfigError)


def _shape(step: Sequence[Any]) -> StepShape:
    decoding, context, chunks = step
    shapes = []
    if decoding:
        mean, left = divmod(context, decoding)
        for end, count in ((mean + 1, left), (mean, decoding - left)):
            if count:
                shapes.append(ChunkShape(Phase.DECODE, 1, max(end - 1, 0), True, count))
    for new, start, samples, is_decode in chunks:
        shapes.append(ChunkShape(Phase.DECODE if is_decode else Phase.PREFILL, new, start, bool(samples)))
    return StepShape(shapes)


def _adapter(entry: dict[str, Any], numbers: dict[str, int]) -> AdapterRef | None:
    """What answered a request. numbers: of those met so far; journals of earlier versions have none, or not their size."""
    name = entry.get("adapter")
    if name is None:
        return None
    number, n_parameters = numbers.setdefault(name, len(numbers)), entry.get("adapter_parameters", 0)
    return AdapterRef(name=name, number=number, revision=name, n_parameters=n_parameters)


def _past(entry: dict[str, Any], number: int, block_tokens: int, adapter: AdapterRef | None) -> Past:
    prompt, outputs = entry["prompt_tokens"], entry["output_tokens"]
    logprobs = 0 if entry.get("is_read_whole") else None
    longest = max((prompt, *(prompt + n for n in outputs)))
    tokens = tuple(_tokens(entry["blocks"], block_tokens, longest, number))
    request = Request(
        request_id=entry["id"],
        prompt_token_ids=tokens[:prompt],
        sampling=SamplingParams(
            max_tokens=entry["max_tokens"], n=max(1, len(outputs)), ignore_eos=True, prompt_logprobs=logprobs
        ),
        arrival_s=entry["arrival_s"],
        priority=entry["priority"],
        adapter=adapter,
    )
    return Past(
        request=request,
        came_s=entry["came_s"],
        outputs=tuple(tokens[prompt : prompt + n] for n in outputs),
        cached_tokens=entry["cached_tokens"],
        end_s=entry["end_s"],
        seen=Seen(**entry["seen"]),
        drafts=tuple(tuple(Drafted(*one) for one in some) for some in entry.get("drafts", ())),
    )


def _tokens(blocks: Iterable[int], block_tokens: int, n: int, number: int) -> list[int]:
    """Ids that are equal where blocks are; what stands behind the last full one is this request's own."""
    found = [block for block in blocks for _ in range(block_tokens)][:n]
    return found + [_OWN_BASE + number] * (n - len(found))
