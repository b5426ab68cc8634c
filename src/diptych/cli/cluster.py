"""`diptych serve --prefill N --decode M`, `--workers N`: the same server before several engines on Ray."""

from __future__ import annotations

import socket
from importlib import import_module
from typing import Any

from diptych.cli import working
from diptych.cluster.pool_config import PoolConfig, PoolPlace
from diptych.ground.config import EngineConfig, quiet_ray
from diptych.ground.errors import ConfigError
from diptych.server.config import ServerConfig


def pools_of(
    prefill: int,
    decode: int | None,
    workers: int | None,
    *,
    prefill_on: str | None = None,
    decode_on: str | None = None,
    address: str | None,
    local_prefill_tokens: int,
    takes_other_kernels: bool,
    otlp_traces_endpoint: str | None = None,
    max_prefill: int | None = None,
    max_decode: int | None = None,
    max_workers: int | None = None,
    target_queue_s: float = 2.0,
    calm_s: float = 60.0,
) -> PoolConfig | None:
    """The pools that were asked for; None: one engine in this process. Raises ConfigError for what contradicts itself."""
    mosts = {"--max-prefill": max_prefill, "--max-decode": max_decode, "--max-workers": max_workers}
    given = [name for name, most in mosts.items() if most is not None]
    if not prefill and decode is None and workers is None and address is None:
        if given:
            raise ConfigError(
                f"{given[0]} bounds a pool that is not there", hint="add --workers 1, or --prefill and --decode"
            )
        if prefill_on or decode_on:
            raise ConfigError(
                f"{'--prefill-on' if prefill_on else '--decode-on'} is said of a pool that is not there",
                hint="add --prefill 1 and --decode 1",
            )
        return None
    if (max_workers is not None) if workers is None else (max_prefill is not None or max_decode is not None):
        raise ConfigError(f"{given[0]} bounds a pool that is not there", hint="--max-workers goes with --workers")
    if workers is not None and (prefill or decode is not None):
        raise ConfigError(
            "workers do both phases; prefill and decode name pools of their own", hint="give one or the other"
        )
    if prefill and decode is None:
        raise ConfigError(f"{prefill} workers prefill and none decodes", hint="add --decode 1 or more")
    number = workers if workers is not None else decode if decode is not None else 1
    _rays(is_local=address is None)  # who asks for workers and has no ray is told before anything loads
    return PoolConfig(
        prefill=prefill,
        decode=number,
        prefill_on=PoolPlace.of(prefill_on),
        decode_on=PoolPlace.of(decode_on),
        address=address,
        local_prefill_tokens=local_prefill_tokens,
        takes_other_kernels=takes_other_kernels,
        otlp_traces_endpoint=otlp_traces_endpoint,
        max_prefill=max_prefill,
        max_decode=max_decode if workers is None else max_workers,
        target_queue_s=target_queue_s,
        calm_s=calm_s,
    )


def serve(model: str, engine: EngineConfig, pools: PoolConfig, config: ServerConfig, listener: socket.socket) -> int:
    """Start the workers, serve, and end what was started; the process's exit code.

    Raises ConfigError for what only an engine in this process can do.
    """
    alone = {
        "--lora": bool(engine.loras),
        "--runtime-lora": config.loads_loras,
        "--record": config.record is not None,
    }
    for option in (name for name, is_given in alone.items() if is_given):
        raise ConfigError(f"{option} is for one engine in this process, not for workers", hint="leave out one of them")
    cluster = _rays(is_local=pools.address is None).RayCluster(model, engine, pools)
    try:
        return working.run_server(cluster.llm, config, listener)
    finally:
        cluster.close()


def _rays(*, is_local: bool) -> Any:
    """ray is an extra, and slow to import: only who asks for workers needs it."""
    quiet_ray(is_local=is_local)
    try:
        return import_module("diptych.cluster.rays")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("workers need ray, which is not installed", hint='pip install "diptych[cluster]"') from error
