"""`diptych serve [MODEL]`: an OpenAI-compatible server whose every answer says where its time went."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.cli import cluster, options, working
from diptych.cli.options import engine_config, given, loading_bar
from diptych.cli.written import refuse_unread
from diptych.cluster.pool_config import PoolConfig
from diptych.ground.config import BOUNDS as CONFIG
from diptych.ground.config import SchedulerConfig, env_text
from diptych.ground.errors import ConfigError
from diptych.server.config import MOST_OPEN_REQUESTS, ServerConfig, open_requests_limit

app = options.command_app()
LOG_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


@app.command()
@options.takes(settings=options.ENGINE, loras=options.LORAS)
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="'bundled', a checkpoint folder, a GGUF file, or a hub name")
    ] = "bundled",
    named_model: Annotated[str | None, typer.Option("--model", "-m", help="MODEL, as other commands take it")] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0 takes a free one")] = 8000,
    api_key: Annotated[str | None, typer.Option(help="key that clients must send (default: DIPTYCH_API_KEY)")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="listen beyond this machine without a key")] = False,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="answer to this name in Host too (may be repeated; *: to any)")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="let pages of this site use the server: https://app.example.com (may be repeated; *: any)"),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="answer to this name (may be repeated; the first stands in answers)")
    ] = None,
    any_model_name: Annotated[
        bool, typer.Option("--any-model-name", help="answer whatever model a request names")
    ] = False,
    max_queue_s: Annotated[
        float | None,
        typer.Option(
            help="in overload, refuse (503) what would wait longer for its first step; 0: never (default: from the load)"
        ),
    ] = None,
    max_waiting_tokens: Annotated[
        int | None,
        typer.Option(help=f"{CONFIG['max_waiting_tokens'].what} (default: {SchedulerConfig().max_waiting_tokens})"),
    ] = None,
    max_open_requests: Annotated[
        int | None,
        typer.Option(
            help=f"requests open at one time (default: {MOST_OPEN_REQUESTS}, or as many as files may be open)"
        ),
    ] = None,
    max_body_bytes: Annotated[
        int | None, typer.Option(help="most bytes of a request's body (default: 4 MiB and 32 bytes per context token)")
    ] = None,
    response_store: Annotated[
        Path | None, typer.Option(help="keep responses in this file, beyond a restart (default: in memory)")
    ] = None,
    max_stored_bytes: Annotated[int, typer.Option(help="forget responses used longest ago beyond this")] = 256 * 2**20,
    response_ttl_s: Annotated[float, typer.Option(help="forget responses unused for this long")] = 30 * 86400.0,
    drain_timeout_s: Annotated[float, typer.Option(help="after SIGTERM, let open requests run this long")] = 30.0,
    prefill: Annotated[int, typer.Option(help="workers that read prompts for those that decode (needs ray)")] = 0,
    decode: Annotated[
        int | None, typer.Option(help="workers that decode, each an engine of its own (needs ray)")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="engines that do both, behind one router (needs ray)")] = None,
    prefill_on: Annotated[
        str | None, typer.Option(help="what those that read run on: threads=N,device=NAME,node=RESOURCE (of Ray)")
    ] = None,
    decode_on: Annotated[str | None, typer.Option(help="the same of those that decode")] = None,
    max_prefill: Annotated[int | None, typer.Option(help="have up to so many that read, as the load needs")] = None,
    max_decode: Annotated[int | None, typer.Option(help="have up to so many that decode, as the load needs")] = None,
    max_workers: Annotated[int | None, typer.Option(help="have up to so many workers, as the load needs")] = None,
    target_queue_s: Annotated[
        float, typer.Option(help="grow where workers have more predicted seconds of work than this, each")
    ] = 2.0,
    calm_s: Annotated[float, typer.Option(help="shrink when fewer workers were enough for so long")] = 60.0,
    ray_address: Annotated[
        str | None, typer.Option(help="place workers on this Ray cluster (auto finds one); default: this machine")
    ] = None,
    local_prefill_tokens: Annotated[
        int, typer.Option(help="prompts with no more uncached tokens are read by the worker that answers")
    ] = 64,
    take_kv_of_other_kernels: Annotated[
        bool,
        typer.Option(
            "--take-kv-of-other-kernels", help="workers of other instruction sets: equal within tolerance only"
        ),
    ] = False,
    metrics_compat: Annotated[str, typer.Option(help="vllm: also export the names of vLLM dashboards; none")] = "vllm",
    *,
    stall_budget_ms: options.StallBudget = None,
    max_running_sequences: options.MaxRunning = None,
    lookup_memory_tokens: Annotated[int, typer.Option(help=CONFIG["lookup_memory_tokens"].what)] = 0,
    max_step_tokens: options.MaxStepTokens = 2048,
    prefix_cache: Annotated[
        bool, typer.Option(help="keep the KV of prompts for later ones with the same start")
    ] = True,
    task: options.Task = "auto",
    settings: dict[str, Any],
    loras: dict[str, Any],
    runtime_lora: Annotated[
        bool, typer.Option("--runtime-lora", help="let clients load and unload adapters (from any folder here)")
    ] = False,
    reads_control_tokens: Annotated[
        bool, typer.Option("--read-control-tokens", help="let text of messages that spells control tokens become them")
    ] = False,
    keep_minutes: Annotated[
        float, typer.Option(help="remember so many minutes of requests for `explain --what-if`; 0: none")
    ] = 2.0,
    record: Annotated[
        Path | None,
        typer.Option(
            help="write times and lengths of requests and steps, no text, to this file, or the next by number"
        ),
    ] = None,
    max_record_bytes: Annotated[int, typer.Option(help="end the recording beyond this")] = 2**30,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(help="send OpenTelemetry spans of requests there, by OTLP over HTTP")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error")] = "info",
) -> None:
    """Serve MODEL until SIGTERM or Ctrl-C, then let open requests finish."""
    if log_level.lower() not in LOG_LEVELS:
        raise ConfigError(f"--log-level is {log_level!r}; it must be one of {', '.join(LOG_LEVELS)}")
    logging.basicConfig(level=LOG_LEVELS[log_level.lower()], format="%(asctime)s %(levelname)s %(name)s %(message)s")
    model = _one_of(context, model, named_model)
    pools = cluster.pools_of(
        prefill,
        decode,
        workers,
        prefill_on=prefill_on,
        decode_on=decode_on,
        address=ray_address,
        local_prefill_tokens=local_prefill_tokens,
        takes_other_kernels=take_kv_of_other_kernels,
        otlp_traces_endpoint=otlp_traces_endpoint,
        max_prefill=max_prefill,
        max_decode=max_decode,
        max_workers=max_workers,
        target_queue_s=target_queue_s,
        calm_s=calm_s,
    )
    _refuse_unread(
        given(context), pools, is_recording=record is not None, has_loras=bool(loras["lora"]) or runtime_lora
    )
    config = ServerConfig(
        host=host,
        port=port,
        api_key=env_text("API_KEY") if api_key is None else api_key,
        is_insecure=insecure,
        allowed_hosts=tuple(allowed_host or ()),
        allow_origins=tuple(origin.lower() for origin in allow_origin or ()),
        served_model_names=tuple(served_model_name or ()),
        takes_any_model_name=any_model_name,
        loads_loras=runtime_lora,
        max_queue_s=math.inf if max_queue_s == 0 else max_queue_s,
        max_open_requests=open_requests_limit(max_open_requests),
        max_body_bytes=max_body_bytes,
        response_store=response_store,
        max_stored_bytes=max_stored_bytes,
        response_ttl_s=response_ttl_s,
        drain_timeout_s=drain_timeout_s,
        metrics_compat=metrics_compat,
        reads_control_tokens=reads_control_tokens,
        kept_minutes=keep_minutes if pools is None else 0.0,  # what would have been is asked of one engine
        record=record,
        max_record_bytes=max_record_bytes,
        otlp_traces_endpoint=otlp_traces_endpoint,
    )
    engine = engine_config(
        stall_budget_ms=stall_budget_ms, max_running_sequences=max_running_sequences, max_step_tokens=max_step_tokens,
        lookup_memory_tokens=lookup_memory_tokens, task=task, **settings, **loras,
    )  # fmt: skip
    scheduler = replace(engine.scheduler, enable_prefix_cache=prefix_cache)
    if max_waiting_tokens is not None:
        scheduler = replace(scheduler, max_waiting_tokens=max_waiting_tokens)
    listener = working.bind(config)
    if pools is not None:
        raise typer.Exit(cluster.serve(model, replace(engine, scheduler=scheduler), pools, config, listener))
    with loading_bar(f"loading {model}") as progress:
        llm = working.AsyncLLM.from_pretrained(model, replace(engine, scheduler=scheduler), progress=progress)
    ceilings = working.machine_ceilings(llm.loaded.model)
    raise typer.Exit(working.run_server(llm, config, listener, ceilings=ceilings))


def _refuse_unread(written: dict[str, str], pools: PoolConfig | None, *, is_recording: bool, has_loras: bool) -> None:
    """Raise ConfigError for options of what is not there."""
    grows = pools is not None and (pools.max_prefill, pools.max_decode) != (None, None)
    for is_read, kind, names in (
        (pools is not None, "one engine in this process", {"take_kv_of_other_kernels"}),
        (
            pools is not None and (pools.prefill or pools.max_prefill),
            "a server without --prefill",
            {"local_prefill_tokens"},
        ),
        (grows, "a server whose workers stay as many as they are", {"target_queue_s", "calm_s"}),
        (pools is None, "a server before workers", {"keep_minutes"}),
        (is_recording, "a server without --record", {"max_record_bytes"}),
        (has_loras, "a server without --lora and --runtime-lora", {"max_loras", "max_lora_rank"}),
    ):
        if not is_read:
            refuse_unread(kind, written, written.keys() - names)


def _one_of(context: typer.Context, model: str, named: str | None) -> str:
    if named is None or named == model or "model" not in options.given(context):
        return named or model
    raise ConfigError(f"MODEL is {model!r} and --model is {named!r}", hint="name one of them")
