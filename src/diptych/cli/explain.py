"""`diptych explain --messages chat.json`: where a prompt's tokens and its time to first token come from.

`diptych explain --request ID --what-if chunk=512`: what a request's times would have been (`cli/what_if.py`).
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from diptych.cli import options, what_if, working
from diptych.cli.asked import client_of, fields_of
from diptych.cli.options import engine_config, given, loading_bar
from diptych.cli.written import refuse_unread
from diptych.ground.bounds import counted
from diptych.ground.config import env_text
from diptych.ground.errors import ConfigError
from diptych.ground.request import Segment
from diptych.ground.shape import StepShape
from diptych.insight.explanation import Explanation, Part, explain, volatile_spot
from diptych.insight.segments import cover
from diptych.server.http.door import parse
from diptych.server.http.errors import ApiError
from diptych.server.reader import message_dicts, tool_dicts
from diptych.server.text_bodies import TemplateBody

app = options.command_app()
# what each kind of answer reads: any other option given with it is refused, as it would change nothing
READS = {
    "--messages": {"messages", "tools", "model", "backend", "weights", "as_json"},
    "--messages with --url": {"messages", "tools", "url", "api_key", "as_json"},
    "--request": {"request", "changes", "url", "api_key", "as_json"},
    "--request with --recording": {"request", "changes", "recording", "model", "weights", "as_json"},
}


@app.command(name="explain")
def explain_command(
    context: typer.Context,
    messages: Annotated[
        Path | None, typer.Option(help="a JSON file: a list of messages, or an object with messages (and tools)")
    ] = None,
    tools: Annotated[Path | None, typer.Option(help="a JSON file with a list of tools")] = None,
    request: Annotated[
        str | None, typer.Option(help="the id of one of a server's last requests, or in a recording")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            help="with --request: cached, chunk=512, stall-budget=20ms, pools, device=NAME (may be repeated)",
        ),
    ] = None,
    recording: Annotated[Path | None, typer.Option(help="with --request: a recording of an engine")] = None,
    url: Annotated[
        str | None, typer.Option(help="measure on this server, or ask it for --request; without it times are predicted")
    ] = None,
    api_key: options.ApiKey = None,
    model: options.Model = "bundled",
    backend: options.Backend = "auto",
    weights: options.Weights = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Say what each part of a prompt costs, or what a request's times would have been with one thing changed."""
    if (messages is None) == (request is None):
        raise ConfigError("give --messages FILE to explain a prompt, or --request ID to explain a request")
    server, key = None if url is None else url.rstrip("/").removesuffix("/v1"), api_key or env_text("API_KEY")
    if request is not None:
        if tools is not None:
            raise ConfigError("--tools belongs to --messages; a request has its own")
        if recording is not None and server is not None:
            raise ConfigError("--recording and --url are two places to look; give one")
        _refuse_unread("--request" if recording is None else "--request with --recording", context)
        found = _what_if(request, changes or [], recording, model, weights, server=server, key=key)
        print(json.dumps(found) if as_json else what_if.text_of(found))
        return
    assert messages is not None
    if changes or recording is not None:
        raise ConfigError("--what-if and --recording ask about one request; give --request ID")
    _refuse_unread("--messages" if server is None else "--messages with --url", context)
    body = read_body(messages, tools)
    gap = None
    if server is not None:
        explanation = measured(body, server, key)
    else:
        config = engine_config(backend=backend, weights=weights)
        with loading_bar(f"loading {model}") as progress:
            loaded = working.load(model, config, progress=progress)
        loaded.must_write("a chat")
        explanation, gap = predicted(body, loaded, block_tokens=config.block_tokens), working.profile_gap(loaded.model)
    print(json.dumps(explanation.as_json()) if as_json else text_of(explanation, gap))


def _refuse_unread(kind: str, context: typer.Context) -> None:
    refuse_unread(kind, given(context), READS[kind])


def _what_if(
    request: str,
    changes: list[str],
    recording: Path | None,
    model: str,
    weights: str,
    *,
    server: str | None,
    key: str | None,
) -> dict[str, Any]:
    if recording is None:
        return what_if.asked_of_server(request, changes, url=server or "http://127.0.0.1:8000", key=key)
    return what_if.asked_of_recording(request, changes, recording=recording, model=model, weights=weights)


def read_body(messages: Path, tools: Path | None) -> dict[str, Any]:
    """The chat as a request body. Raises ConfigError for a file that is not one."""
    chat = _read_json(messages)
    body = {"messages": chat} if isinstance(chat, list) else chat
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise ConfigError(f"{messages} holds no messages", hint='it must be [{"role": "user", "content": "..."}, ...]')
    if tools is not None:
        body["tools"] = _read_json(tools)
    body = {key: body[key] for key in ("messages", "tools", "documents", "chat_template_kwargs") if body.get(key)}
    try:
        parse(json.dumps(body).encode(), TemplateBody)
    except ApiError as error:
        raise ConfigError(f"{messages} is no chat that a server would take: {error.message}") from error
    return body


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def measured(body: dict[str, Any], url: str, key: str | None) -> Explanation:
    """Run the prompt once on a server, past its cache, and ask what the cache holds now."""
    with client_of(url, key, hint="start the server, or leave --url out for a prediction") as client:
        template = _post(client, "/apply-template", body, "cached_tokens", "segments", "block_tokens")
        salt = uuid.uuid4().hex  # a cache of its own, so that every part is computed and so measured
        answer = _post(client, "/v1/chat/completions", body | {"max_tokens": 1, "cache_salt": salt}, "timings")
    cached = template["cached_tokens"]
    parts, position = [], 0
    for segment in answer["timings"]["diptych"]["segments"]:
        kept = max(0, min(segment["tokens"], cached - position))
        cost_s = segment["prefill_ms"] / 1e3
        parts.append(Part(name=segment["name"], tokens=segment["tokens"], cost_s=cost_s, cached_tokens=kept))
        position += segment["tokens"]
    spots = _volatile(body, [(one["name"], one["start"], one["tokens"]) for one in template["segments"]])
    return explain(parts, source="measured", block_tokens=template["block_tokens"], volatile=spots)


def _post(client: httpx.Client, path: str, body: dict[str, Any], *names: str) -> dict[str, Any]:
    return fields_of(client.post(path, json=body), path, *names)


def predicted(body: dict[str, Any], loaded: working.LoadedModel, *, block_tokens: int) -> Explanation:
    """Predict from this machine's profile; without one, the least time that its ceilings allow."""
    asked = TemplateBody.model_validate(body)
    rendered = loaded.template.render(
        message_dicts(asked.messages),
        tools=tool_dicts(asked.tools),
        documents=asked.documents,
        kwargs=asked.chat_template_kwargs,
    )
    predictor = working.local_predictor(loaded.model)
    view = working.CostView(loaded.model)
    ceilings = working.machine_ceilings(loaded.model) if predictor is None else None

    def prefill_s(n_tokens: int) -> float:
        if n_tokens == 0:
            return 0.0
        work = StepShape.prefill(batch=1, new_tokens=n_tokens)
        if predictor is not None:
            return predictor.predict(work).total_s
        assert ceilings is not None
        return view.bound_s(work, ceilings)

    segments: list[Segment] = cover(rendered.segments, len(rendered.token_ids))
    n_tokens = len(rendered.token_ids)
    # what a part adds is the difference of two prefills; the fixed cost of a step is shared out by tokens
    fixed_s = prefill_s(1) if predictor is not None else 0.0
    parts = []
    for one in segments:
        added_s = max(0.0, prefill_s(one.end) - (prefill_s(one.start) if one.start else fixed_s))
        share_s = fixed_s * (one.end - one.start) / n_tokens
        parts.append(Part(name=one.name, tokens=one.end - one.start, cost_s=added_s + share_s, cached_tokens=0))
    spots = _volatile(body, [(one.name, one.start, one.end - one.start) for one in segments])
    source = "predicted" if predictor is not None else "bound"
    return explain(parts, source=source, block_tokens=block_tokens, volatile=spots)


def _volatile(body: dict[str, Any], segments: list[tuple[str, int, int]]) -> list[tuple[str, int, int, str]]:
    """Changing text in the system prompt: (part, its start, tokens before the text, what)."""
    first = message_dicts(TemplateBody.model_validate(body).messages)[0]
    if first["role"] != "system":
        return []
    spot = volatile_spot(first["content"])
    if spot is None:
        return []
    for name, start, tokens in segments:
        if name == "system":
            return [(name, start, start + int(tokens * spot[0] / len(first["content"])), spot[1])]
    return []


def text_of(explanation: Explanation, gap: str | None = None) -> str:
    """A table and what follows from it. gap: why there is no prediction."""
    words = {
        "measured": "measured on the server, nothing cached",
        "predicted": "predicted from this machine's profile",
        "bound": f"the least this machine's ceilings allow; no prediction: {gap}",
    }
    n_tokens = sum(part.tokens for part in explanation.parts)
    total_s = explanation.prefill_s or 1e-12
    lines = [
        f"prompt of {counted(n_tokens, 'token')}, prefill {_ms(explanation.prefill_s)} ({words[explanation.source]})",
        f"  {'part':<24}{'tokens':>8}{'share':>8}{'prefill':>12}{'share':>8}{'cached now':>12}",
    ]
    for part in explanation.parts:
        lines.append(
            f"  {part.name:<24}{part.tokens:>8}{part.tokens / n_tokens:>8.0%}{_ms(part.cost_s):>12}"
            f"{part.cost_s / total_s:>8.0%}{part.cached_tokens:>12}"
        )
    lines += [
        f"the prefix cache keeps whole blocks of {counted(explanation.block_tokens, 'token')}:",
        f"  the next turn of this chat reuses {counted(explanation.next_turn_tokens, 'token')}, "
        f"{_ms(explanation.next_turn_saved_s)}",
        f"  another chat with the same beginning reuses {counted(explanation.new_chat_tokens, 'token')}, "
        f"{_ms(explanation.new_chat_saved_s)}",
    ]
    if not explanation.reorderings:
        lines.append("no other order of the parts would save more")
    for one in explanation.reorderings:
        lines.append(f"to save {counted(one.saved_tokens, 'token')}, {_ms(one.saved_s)}: {one.what}")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    if 0.0 < seconds < 1e-4:  # 0.0 ms is no time
        return f"{seconds * 1e6:.2g} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 10.0 else f"{seconds:.1f} s"
