"""A model of the cpu backend whose outputs are divided among ranks, and its KV cache, divided by heads.

To the engine it is one model: a step goes to all ranks in rank 0's native call, logits come up whole, and blocks leave and
enter the cache in the bytes that one rank would have written, so `revision` and layout are those of one rank, too.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from diptych.compute.adapters import Adapter
from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import KVHeader, KVPayload, KVStore
from diptych.compute.loading.calibration import sent
from diptych.compute.model import Blueprint, Want
from diptych.compute.ops.contract import Taps
from diptych.compute.ops.cpu.kernels import _cpu, refuse_block, state_floats
from diptych.compute.ops.cpu.kv import CpuKVStore, layout_of
from diptych.compute.ops.cpu.model import KEPT_LOGITS_ROWS, CpuModel
from diptych.compute.ops.cpus import Placement
from diptych.compute.ops.ranks import Ranks, TeamBroken, Verb, answer, gathered, outputs_view, raised
from diptych.compute.ops.shares import Rank, together
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError, EngineError, UnsupportedModel, WorkerLost
from diptych.ground.spare_time import start_in_spare_time
from diptych.models.spec import ModelSpec

ERROR_BYTES = 300  # of an answer; where JSON takes six for a character it fits in ANSWER_BYTES still


Heads = list[tuple[int, int]]  # of each layer of a cache: the first of all heads, and how many


def heads_of(spec: ModelSpec, rank: Rank) -> Heads:
    """A rank's KV heads of each layer of the cache. UnsupportedModel where layers that share one would have different ones."""
    found: dict[int, set[tuple[int, int]]] = {}
    for number, layer in enumerate(spec.layers):
        if layer.attention.state is not None or layer.attention.is_absent:
            continue
        n_kv, together = layer.attention.cache.n_heads, layer.attention.heads_together
        own = rank.heads(layer.attention.n_heads, n_kv, together=together)
        found.setdefault(spec.kv_place(number), set()).add(
            (0, 0) if own is None else (own.first_kv_head, own.n_kv_heads)
        )
    if any(len(heads) > 1 for heads in found.values()):
        raise UnsupportedModel(
            "layers that share keys have different numbers of heads, which ranks cannot divide alike"
        )
    # each rank that attends has the keys of an index
    indices = (rank.heads(one.n_heads, one.n_kv_heads) for one in (spec.layers[i].attention for i in spec.index_layers))
    return [*(found[place].pop() for place in sorted(found)), *((0, int(own is not None)) for own in indices)]


def cache_of(cache: dict[str, Any], heads: Heads) -> dict[str, Any]:
    """The sizes of a cache of these heads alone."""
    return {**cache, "heads": [(n, *widths) for (_, n), (_, *widths) in zip(heads, cache["heads"], strict=True)]}


def columns_of(cache: dict[str, Any], heads: Heads, block_tokens: int) -> list[slice]:
    """Where in the bytes of a block of all heads these lie, layer after layer."""
    found, begin = [], 0
    for (first, n), (n_heads, *widths) in zip(heads, cache["heads"], strict=True):
        one = int(_cpu.kv_bytes_per_block(block_tokens=block_tokens, **{**cache, "heads": [(1, *widths)]}))
        found.append(slice(begin + first * one, begin + (first + n) * one))
        begin += n_heads * one
    return found


class Part:
    """One rank's part of a KV cache: some heads of each layer."""

    def __init__(self, store: CpuKVStore, cache: dict[str, Any], heads: Heads) -> None:
        """cache: the sizes of all ranks' together."""
        self.store = store
        self._heads = heads
        self._widths = [d for _, d, *_ in cache["heads"]]
        self._columns = columns_of(cache, heads, store.block_tokens)

    def copy(self, pairs: np.ndarray) -> None:
        """Copy block to block, pairs [N, 2]."""
        self.store.native.copy_blocks(pairs.tolist())

    def export(self, block_ids: np.ndarray) -> np.ndarray:
        """Its heads' bytes of blocks, [N, its bytes of a block]."""
        own = np.empty((len(block_ids), self.store.header.block_bytes), dtype=np.uint8)
        self.store.native.export_blocks(block_ids, own)
        return own

    def import_from(self, block_ids: np.ndarray, data: np.ndarray) -> None:
        """Its heads' bytes from those of all."""
        own = [data[:, :0], *(data[:, one] for one in self._columns)]  # nothing where no layer keeps anything
        self.store.native.import_blocks(block_ids, np.concatenate(own, axis=1))

    def read(self, layer: int, block_ids: np.ndarray, n_tokens: int) -> np.ndarray:
        """Its heads' keys and values side by side, [k, T, d + dv]."""
        return np.concatenate(self.store.read(layer, block_ids, n_tokens), axis=-1)

    def write_from(self, layer: int, block_ids: np.ndarray, both: np.ndarray) -> None:
        """Its heads' keys and values from those of all."""
        first, n = self._heads[layer]
        keys, values = np.split(both[first : first + n], [self._widths[layer]], axis=-1)
        self.store.native.write(layer, block_ids, np.ascontiguousarray(keys), np.ascontiguousarray(values))


class RankedKVStore:
    """The cache of all ranks behind the KVStore interface; rank 0 has this, and a part of the bytes."""

    def __init__(
        self,
        ranks: Ranks,
        part: Part,
        cache: dict[str, Any],
        heads: Sequence[Heads],
        *,
        number: int,
        header: KVHeader,
        nbytes: int,
    ) -> None:
        """cache: the sizes of all together. heads: of every rank."""
        self._ranks = ranks
        self._shapes = list(cache["heads"])
        self._heads = heads
        self._columns = [columns_of(cache, one, part.store.block_tokens) for one in heads]
        self._part = part
        self._number = number
        self.header = header
        self.nbytes = nbytes
        self.native = part.store.native
        self.n_blocks = part.store.n_blocks
        self.block_tokens = part.store.block_tokens
        self.n_places = part.store.n_places

    def read_state(self, place: int) -> torch.Tensor:
        """Not done: each rank has its heads' part."""
        raise ConfigError("states of sequences are not read over several ranks", hint="use tp 1")

    def write_state(self, place: int, state: torch.Tensor) -> None:
        """Not done, as reading is not."""
        raise ConfigError("states of sequences are not written over several ranks", hint="use tp 1")

    def back_memory(self, wants_stop: Callable[[], bool]) -> None:
        """On every rank; on the others they have a thread of their own for it."""
        try:
            self._tell(Verb.BACK_KV, {})
        except WorkerLost:
            return  # whoever waits for a step hears of it
        self._part.store.back_memory(wants_stop)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block source to block target in every layer, in the order of the pairs."""
        ids = np.asarray(pairs, dtype=np.int32).reshape(-1, 2)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.n_blocks):
            raise ValueError("a block id is outside the pool")
        self._tell(Verb.COPY, {}, ids, own=lambda: self._part.copy(ids))

    def export_blocks(self, block_ids: Sequence[int], out: np.ndarray | None = None) -> KVPayload:
        """The bytes of these blocks in every layer; a copy, in memory of its own."""
        ids = self._ids(block_ids)
        data = np.empty((len(ids), self.header.block_bytes), dtype=np.uint8)
        widths = [[one.stop - one.start for one in columns] for columns in self._columns]
        shapes = [(len(ids), sum(of_rank)) for of_rank in widths]
        parts = self._gather(Verb.EXPORT, {}, ids, shapes, lambda: self._part.export(ids))
        for part, columns, of_rank in zip(parts, self._columns, widths, strict=True):
            # behind the last column nothing is left
            for one, values in zip(columns, np.split(part, np.cumsum(of_rank, dtype=int), axis=1), strict=False):
                data[:, one] = values
        return KVPayload.of(self.header, data)

    def import_blocks(self, block_ids: Sequence[int], payload: KVPayload) -> None:
        """Take in blocks that an equal store exported. TransferError, and nothing is written, unless all of them are right."""
        payload.check(self.header, len(block_ids))
        ids = self._ids(block_ids)
        data = payload.data_NB
        self._tell(Verb.IMPORT, {}, ids, data, own=lambda: self._part.import_from(ids, data))

    def read(self, layer: int, block_ids: Sequence[int], n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of the first n_tokens of a sequence that lies in block_ids, [K, T, d] and [K, T, dv] fp32; copies."""
        ids = self._ids(block_ids)
        n_heads, d, dv, *_ = self._shapes[layer]
        width = d + (dv or d)
        both = np.empty((n_heads, n_tokens, width), dtype=np.float32)
        own = [heads[layer] for heads in self._heads]
        shapes = [(n, n_tokens, width) for _, n in own]
        head = {"layer": layer, "n_tokens": n_tokens}
        parts = self._gather(Verb.READ, head, ids, shapes, lambda: self._part.read(layer, ids, n_tokens), np.float32)
        for part, (first, n) in zip(parts, own, strict=True):
            both[first : first + n] = part
        return torch.from_numpy(both[..., :d]), torch.from_numpy(both[..., d:])

    def write(self, layer: int, block_ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys [K, T, d] and values [K, T, dv] as the first T tokens of block_ids."""
        ids = self._ids(block_ids)
        both = torch.cat([keys.to(torch.float32), values.to(torch.float32)], dim=-1).numpy()
        self._tell(Verb.WRITE, {"layer": layer}, ids, both, own=lambda: self._part.write_from(layer, ids, both))

    def _gather(
        self,
        verb: Verb,
        head: dict[str, Any],
        ids: np.ndarray,
        shapes: Sequence[tuple[int, ...]],
        own: Callable[[], np.ndarray],
        dtype: type = np.uint8,
    ) -> list[np.ndarray]:
        """What every rank gives, which has these shapes; copies."""
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape in shapes]
        parts: list[np.ndarray] = []

        def take() -> None:
            slots = gathered(self._ranks.team, own(), max(sizes))
            for slot, shape, size in zip(slots, shapes, sizes, strict=True):
                parts.append(slot[:size].view(dtype).reshape(shape).copy())

        self._tell(verb, {**head, "slot_bytes": max(sizes)}, ids, own=take)
        return parts

    def _ids(self, block_ids: Sequence[int]) -> np.ndarray:
        """As int32, checked here: what another rank refuses ends the team."""
        ids = np.asarray(block_ids, dtype=np.int32)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.n_blocks):
            raise ValueError("a block id is outside the pool")
        return ids

    def _tell(
        self,
        verb: Verb,
        head: dict[str, Any],
        ids: np.ndarray | None = None,
        data: np.ndarray | None = None,
        *,
        own: Callable[[], object] = lambda: None,
    ) -> None:
        payload = b"" if ids is None else ids.tobytes()
        if data is not None:
            head, payload = {**head, "shape": data.shape}, payload + data.tobytes()
        with self._ranks.lock:
            self._ranks.tell(
                verb, {"kv": self._number, "n_ids": 0 if ids is None else len(ids), **head}, payload, own=own
            )
            if data is not None:
                self._ranks.team.give_back_message()


class RankedModel(CpuModel):
    """Rank 0's program, and the others behind it. `load` has them load: it is told before this one packs its own part."""

    def __init__(self, blueprint: Blueprint, config: ComputeConfig, ranks: Ranks, load: dict[str, Any]) -> None:
        self.ranks = ranks
        self._n_caches = 0
        self._dropped: list[int] = []  # numbers of caches that nobody holds any more

        self._adapter_bytes: dict[int, int] = {}

        def own() -> dict[str, Any]:
            super(RankedModel, self).__init__(blueprint, config, rank=ranks.rank(0))
            return about(self)

        measured, payload = sent(blueprint.source.measured)
        loaded = ranks.ask(Verb.LOAD, {**load, "measured": measured}, payload, own=own)
        others = {number for number, one in enumerate(loaded) if one["revision"] != self.revision}
        if others:
            raise ConfigError(
                f"ranks {sorted(others)} have loaded another model than rank 0, or compute it otherwise",
                hint="every machine has the same checkpoint and the same version",
            )
        if ranks.team.is_linked:
            ranks.tell(Verb.KNOW_WRITTEN, {}, own=lambda: know_written(ranks.team, self))
        self.weight_bytes = sum(one["weight_bytes"] for one in loaded)
        self.threads = sum(one["threads"] for one in loaded)
        self.placement = together(ranks.placements)
        self._is_large = False

    def kv_bytes_per_block(self, block_tokens: int) -> int:
        """Bytes of one block in all layers on all ranks: a head that several of them hold counts as often."""
        caches = (cache_of(self._cache, heads) for heads in self._heads())
        return sum(int(_cpu.kv_bytes_per_block(block_tokens=block_tokens, **cache)) for cache in caches)

    @property
    def state_bytes(self) -> int:
        """On all ranks."""
        return sum(4 * sum(state_floats(self.spec, self.ranks.rank(one))) for one in range(self.ranks.size))

    def _heads(self) -> list[Heads]:
        """Of every rank."""
        return [heads_of(self.spec, self.ranks.rank(number)) for number in range(self.ranks.size)]

    def make_kv(self, n_blocks: int, block_tokens: int, n_places: int = 1) -> KVStore:
        """See Model; a part of it on each rank."""
        refuse_block(block_tokens)  # here, as it would end the others
        number, rank = self._n_caches, self.ranks.rank(0)
        dropped, self._dropped[:] = list(self._dropped), []
        made: list[CpuKVStore] = []

        def own() -> None:
            made.append(make_part_store(self, rank, n_blocks, block_tokens, number, n_places))

        head = {
            "number": number, "n_blocks": n_blocks, "block_tokens": block_tokens, "n_places": n_places, "dropped": dropped
        }  # fmt: skip
        self.ranks.tell(Verb.MAKE_KV, head, own=own)
        self._n_caches += 1
        (store,) = made
        header = KVHeader(
            revision=self.revision,
            layout=layout_of(self._cache),
            dtype=self.kv_format,
            n_layers=len(self.spec.caches),
            block_tokens=block_tokens,
            block_bytes=int(_cpu.kv_bytes_per_block(block_tokens=block_tokens, **self._cache)),
        )
        part = part_of(self, rank, store)
        nbytes = n_blocks * self.kv_bytes_per_block(block_tokens) + n_places * self.state_bytes
        ranked = RankedKVStore(
            self.ranks, part, self._cache, self._heads(), number=number, header=header, nbytes=nbytes
        )
        weakref.finalize(ranked, self._dropped.append, number)
        return ranked

    def forward(
        self,
        batch: ForwardBatch,
        kv: KVStore,
        want: Want = Want.LOGITS,
        *,
        given: torch.Tensor | None = None,
        taps: Taps | None = None,
    ) -> Any:
        """As `Model.forward`, on all ranks."""
        with self.ranks.lock:
            if self._is_large:  # the last logits were hundreds of megabytes, and their time is over
                self.ranks.team.give_back_outputs()
                self._is_large = False
            try:
                with _held(self.ranks.placements[0]):
                    return super().forward(batch, kv, want, given=given, taps=taps)
            except TeamBroken as error:
                raise self.ranks.failure() from error

    def _logits(self, n_rows: int) -> torch.Tensor:
        """Where the ranks write them: nothing is copied."""
        self._is_large = n_rows > KEPT_LOGITS_ROWS
        if n_rows == 0:
            return torch.empty((0, self.spec.vocab_size), dtype=torch.float32)
        return torch.from_numpy(outputs_view(self.ranks.team, (n_rows, self.spec.vocab_size), np.float32))

    def add_adapter(self, adapter: Adapter) -> int:
        """On every rank or on none: where one of them cannot take it, the others give it back, and its error is raised."""
        self._sites.fit(adapter)  # what nobody could take is refused before anybody is asked
        head, payload = adapter.told()
        with self.ranks.lock:
            said = self.ranks.ask(
                Verb.ADD_ADAPTER, head, payload, own=lambda: added(super(RankedModel, self).add_adapter, self, adapter)
            )
            self.ranks.team.give_back_message()
            failed = [(number, one) for number, one in enumerate(said) if "error" in one]
            if failed:
                self._drop([one.get("number") for one in said])
                raise raised(f"adapter {adapter.path} was refused by rank {failed[0][0]}", failed[0][1])
        (number,) = {int(one["number"]) for one in said}
        self._adapter_bytes[number] = sum(one["bytes"] for one in said)
        return number

    def drop_adapter(self, number: int) -> None:
        """On every rank; it is gone with them where they are gone."""
        self.program.adapter_bytes(number)  # raises where there is none
        with contextlib.suppress(WorkerLost):
            self._drop([number] * self.ranks.size)
        self._adapter_bytes.pop(number, None)

    def _drop(self, numbers: list[int | None]) -> None:
        own = numbers[0]
        drop = super().drop_adapter
        self.ranks.tell(Verb.DROP_ADAPTER, {"numbers": numbers}, own=lambda: None if own is None else drop(own))

    def adapter_bytes(self, number: int) -> int:
        """On all ranks."""
        return self._adapter_bytes[number]

    def on_loss(self, tell: Callable[[EngineError], object]) -> Callable[[], object]:
        """See Model."""
        ranks = self.ranks

        def listener() -> None:
            tell(ranks.failure())

        ranks.watch.listeners.append(listener)
        return lambda: ranks.watch.listeners.remove(listener) if listener in ranks.watch.listeners else None

    def close(self) -> None:
        """Drop the programs of all ranks, and the ranks."""
        super().close()
        self.ranks.end()


@contextlib.contextmanager
def _held(placement: Placement) -> Iterator[None]:
    """While a step runs, rank 0's only thread stays on its CPU, off those of other ranks; a pool of several does so itself."""
    if placement.threads > 1 or not placement.cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, placement.cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def about(model: CpuModel) -> dict[str, Any]:
    """What rank 0 wants to know of each rank after loading."""
    weight_bytes, threads = int(model.program.weight_bytes), int(model.program.threads)
    return {"weight_bytes": weight_bytes, "threads": threads, "revision": model.revision}


def know_written(team: Any, model: CpuModel) -> None:
    """Linked ranks learn what each of them writes at each of its meetings."""
    own = np.array(model.program.written, dtype=np.int64)
    slots = gathered(team, own, own.nbytes)
    model.program.know_written([slot.view(np.int64).reshape(-1, 2).tolist() for slot in slots])


def added(add: Callable[[Adapter], int], model: CpuModel, adapter: Adapter) -> dict[str, Any]:
    """A rank's answer to an adapter: its number there and its bytes, or what was wrong. It is no rank's end."""
    try:
        number = add(adapter)
        return {"number": number, "bytes": int(model.program.adapter_bytes(number))}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error).encode()[:ERROR_BYTES].decode(errors="ignore")}


def make_part_store(
    model: CpuModel, rank: Rank, n_blocks: int, block_tokens: int, number: int, n_places: int
) -> CpuKVStore:
    """A rank's part of a cache, which is known under `number` to all of them."""
    cache = cache_of(model._cache, heads_of(model.spec, rank))
    nodes = rank.placement.nodes if rank.placement is not None else ()
    store = CpuKVStore(
        cache, n_blocks=n_blocks, block_tokens=block_tokens, nodes=nodes, revision=model.revision,
        state_floats=state_floats(model.spec, rank), n_places=n_places,
    )  # fmt: skip
    store.native.number = number
    return store


def part_of(model: CpuModel, rank: Rank, store: CpuKVStore) -> Part:
    """A rank's store with the place of its heads among all."""
    return Part(store, model._cache, heads_of(model.spec, rank))


class Member:
    """What a rank other than 0 holds of a model, and how it answers rank 0's verbs."""

    def __init__(self, rank: Rank, model: CpuModel) -> None:
        self.rank = rank
        self.model = model
        self._parts: list[Part] = []  # by number; a dropped one is its successor

    def serve(self) -> tuple[int, int]:
        """Run steps until rank 0 asks for something else: (verb, bytes of its message)."""
        kind, n = self.model.program.serve([part.store.native for part in self._parts])
        return int(kind), int(n)

    def do(self, verb: Verb, head: dict[str, Any], payload: bytes) -> None:
        """One verb over an adapter, or over the cache that it names."""
        if verb is Verb.KNOW_WRITTEN:
            return know_written(self.rank.team, self.model)
        if verb is Verb.ADD_ADAPTER:
            answer(self.rank.team, added(self.model.add_adapter, self.model, Adapter.heard(head, payload)))
            return None
        if verb is Verb.DROP_ADAPTER:
            own = head["numbers"][self.rank.number]
            return None if own is None else self.model.drop_adapter(own)
        if verb is Verb.MAKE_KV:
            sizes = (head["n_blocks"], head["block_tokens"], head["number"], head["n_places"])
            store = make_part_store(self.model, self.rank, *sizes)
            made = part_of(self.model, self.rank, store)
            self._parts.append(made)
            for number in head["dropped"]:
                self._parts[number] = made
            return
        part = self._parts[head["kv"]]
        ids = np.frombuffer(payload, dtype=np.int32, count=head["n_ids"] * (2 if verb is Verb.COPY else 1))
        if verb is Verb.BACK_KV:
            start_in_spare_time(lambda: part.store.back_memory(lambda: False), name="diptych-memory", daemon=True)
        elif verb is Verb.COPY:
            part.copy(ids.reshape(-1, 2))
        elif verb is Verb.EXPORT:
            gathered(self.rank.team, part.export(ids), head["slot_bytes"])
        elif verb is Verb.READ:
            gathered(self.rank.team, part.read(head["layer"], ids, head["n_tokens"]), head["slot_bytes"])
        else:
            kind = np.uint8 if verb is Verb.IMPORT else np.float32
            data = np.frombuffer(payload, dtype=kind, offset=ids.nbytes).reshape(head["shape"])
            if verb is Verb.IMPORT:
                part.import_from(ids, data)
            else:
                part.write_from(head["layer"], ids, data)
