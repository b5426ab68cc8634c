"""How large a KV pool gets: what fits into memory, and the refusal, with the largest context that would, where it does not."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from diptych.compute.runner import Model, memory_of_block
from diptych.cost.kv_bytes import STATE_BYTES
from diptych.cost.places import STATE_MEMORY_SHARE, state_places
from diptych.engine.drafters import OpenDrafter
from diptych.engine.memory import Memory, memory_of
from diptych.ground.bounds import counted
from diptych.ground.config import EngineConfig
from diptych.ground.errors import CapacityError, ConfigError
from diptych.models.spec import ModelSpec

logger = logging.getLogger("diptych.engine")

# share of the memory that is free after loading which the KV pool may take when nobody says otherwise
KV_MEMORY_SHARE = 0.5
# sequences of the whole context that a pool has room for, where nobody says how many run and memory allows
POOL_CONTEXTS = 64


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Of a KV pool: the longest sequence, its blocks, and places for states, of models that have some."""

    context_tokens: int
    n_blocks: int
    n_places: int


def size_pool(model: Model, config: EngineConfig, drafters: Sequence[OpenDrafter] = ()) -> PoolSize:
    """The KV pool; each drafter's store has as many blocks, out of the same memory.

    Raises ConfigError when the asked context is longer than the model's, CapacityError when it does not fit in memory or
    when more memory is given than there is; the message names the largest context that fits.
    """
    block_bytes = model.kv_bytes_per_block(config.block_tokens) + sum(one.block_bytes for one in drafters)
    scratch_bytes = sum(one.scratch_bytes for one in drafters)
    memory = memory_of(model.device)
    size = _pool(model.spec.max_context_tokens, block_bytes, model.state_bytes, memory, config, scratch_bytes)
    asked = config.max_context_tokens or model.spec.max_context_tokens
    if size.context_tokens < asked:
        given = size.n_blocks * block_bytes
        logger.warning("context lowered from=%d to=%d reason=kv_memory bytes=%d", asked, size.context_tokens, given)
    return size


def check_pool(spec: ModelSpec, config: EngineConfig) -> None:
    """Refuse before the weights are read what `size_pool` would refuse after, when less memory is free."""
    device, block_bytes = memory_of_block(spec, config.compute, config.block_tokens)
    _pool(spec.max_context_tokens, block_bytes, spec.state_elements * STATE_BYTES, memory_of(device), config)


def _pool(
    model_context: int,
    block_bytes: int,
    state_bytes: int,
    memory: Memory,
    config: EngineConfig,
    scratch_bytes: int = 0,
) -> PoolSize:
    asked, block_tokens = config.max_context_tokens, config.block_tokens
    if asked is not None and asked > model_context:
        raise ConfigError(
            f"max_context_tokens is {asked}; {model_context} is the most this model has positions for",
            hint=f"ask for at most {model_context}",
        )
    context = asked or model_context
    memory_bytes = config.kv_memory_bytes
    if memory_bytes is None:
        memory_bytes = int(memory.available_bytes * KV_MEMORY_SHARE)
    elif memory_bytes > memory.available_bytes:
        largest = memory.available_bytes // block_bytes * block_tokens if block_bytes else 0
        raise CapacityError(
            f"kv_memory_bytes is {memory_bytes}; of the {memory.total_bytes} bytes of memory here {memory.available_bytes} "
            "are free" + (f", which hold at most {largest} tokens" if block_bytes else ""),
            hint=f"leave kv_memory_bytes out to use {KV_MEMORY_SHARE:.0%} of what is free"
            + (f", and ask for a context of at most {min(largest, model_context)}" if largest else ""),
        )
    n_places = _places(state_bytes, memory_bytes, config)
    needed_blocks = blocks_for(context, block_tokens)
    if not block_bytes:  # no layer attends: blocks number tokens, and take no memory
        return PoolSize(context, needed_blocks * (config.scheduler.max_running_sequences or POOL_CONTEXTS), n_places)
    fitting_blocks = max(0, memory_bytes - scratch_bytes - n_places * state_bytes) // block_bytes
    if needed_blocks > fitting_blocks:
        largest = fitting_blocks * block_tokens
        if asked is not None or config.kv_memory_bytes is not None or largest < 2:
            smaller = f"ask for max_context_tokens of at most {largest}, or " if largest >= 2 else ""
            raise CapacityError(
                f"a context of {context} tokens needs {needed_blocks * block_bytes} bytes of KV cache"
                + _beside(n_places * state_bytes, scratch_bytes)
                + f"; {memory_bytes} bytes are allowed, which hold at most {largest} tokens ({fitting_blocks} blocks)",
                hint=f"{smaller}raise kv_memory_bytes (a block of {block_tokens} tokens has {block_bytes} bytes)",
            )
        context, needed_blocks = largest, fitting_blocks
    wanted_blocks = needed_blocks * (config.scheduler.max_running_sequences or POOL_CONTEXTS)
    return PoolSize(context, max(needed_blocks, min(wanted_blocks, fitting_blocks)), n_places)


def _beside(states_bytes: int, scratch_bytes: int) -> str:
    """What of a pool's memory is for no block, as a message ends with it."""
    parts = ((states_bytes, "states of sequences"), (scratch_bytes, "the rows of drafters"))
    said = " and ".join(f"{n} for {what}" for n, what in parts if n)
    return f", beside {said}" if said else ""


def _places(state_bytes: int, memory_bytes: int, config: EngineConfig) -> int:
    scheduler = config.scheduler
    running = scheduler.max_running_sequences
    found = state_places(state_bytes, memory_bytes, running=running, is_caching=scheduler.enable_prefix_cache)
    least = running or 1
    if state_bytes and found < least:
        raise CapacityError(
            f"{least} sequences need {least * state_bytes} bytes for their states; {memory_bytes} bytes are allowed for those "
            f"and the KV cache, {STATE_MEMORY_SHARE:.0%} of them for states",
            hint="raise kv_memory_bytes"
            + ("" if running is None else f", or ask for at most {counted(found, 'sequence')}"),
        )
    return found


def blocks_for(n_tokens: int, block_tokens: int) -> int:
    """As many as hold so many tokens."""
    return -(-n_tokens // block_tokens)
