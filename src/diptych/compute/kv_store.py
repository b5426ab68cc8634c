"""Where keys and values live, and the states of sequences. Control owns block ids and places of states; a KVStore owns their
bytes, in a layout of its own.

Blocks travel as raw bytes (`export_blocks`, `import_blocks`), which only an equal store of an equal revision takes in.

Legend: N pool blocks, P tokens per block, K kv heads, T tokens, d head dim, dv that of values (d, where keys are values); of
states H value heads, v value dim, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch
import xxhash

from diptych.ground.errors import CapacityError, TransferError
from diptych.models.states import StateSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class KVHeader:
    """What the bytes of a store's blocks mean. Equal headers: a block's bytes in one are the same block in the other.

    revision: of the model that wrote them (`Model.revision`). layout: the order of the bytes in a block of one layer, with its
    heads and their widths. dtype: of the numbers.
    """

    revision: str
    layout: str
    dtype: str
    n_layers: int
    block_tokens: int
    block_bytes: int  # over all layers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVPayload:
    """Whole blocks on their way: data_NB [N, block_bytes] uint8, and the XXH3-64 of each block."""

    header: KVHeader
    checksums: tuple[int, ...]
    data_NB: np.ndarray

    @classmethod
    def of(cls, header: KVHeader, data_NB: np.ndarray) -> KVPayload:
        """With the checksums of its blocks."""
        return cls(header=header, checksums=tuple(map(_checksum, data_NB)), data_NB=data_NB)

    def check(self, header: KVHeader, n_blocks: int) -> None:
        """Raise TransferError unless these are `n_blocks` whole blocks of a store with that header, with no bit changed."""
        self.check_form(header, n_blocks)
        self.check_sums(list(map(_checksum, self.data_NB)))

    def check_form(self, header: KVHeader, n_blocks: int) -> None:
        """Raise TransferError unless these are `n_blocks` whole blocks of a store with that header."""
        for name in (field.name for field in fields(header)):
            theirs, ours = getattr(self.header, name), getattr(header, name)
            if theirs != ours:
                raise TransferError(f"the blocks have {name} {theirs}; this store has {ours}", reason=name)
        wanted = (n_blocks, header.block_bytes)
        if self.data_NB.shape != wanted or self.data_NB.dtype != np.uint8 or len(self.checksums) != n_blocks:
            raise TransferError(
                f"{len(self.checksums)} checksums came with {self.data_NB.dtype} data of shape {list(self.data_NB.shape)}; "
                f"uint8 of shape {list(wanted)} was expected",
                reason="shape",
            )

    def check_sums(self, found: Sequence[int]) -> None:
        """Raise TransferError unless the blocks that came have these checksums."""
        for i, (ours, theirs) in enumerate(zip(found, self.checksums, strict=True)):
            if ours != theirs:
                raise TransferError(
                    f"block {i} of {len(found)} does not have its checksum: its bytes changed on the way",
                    reason="checksum",
                )


def said_once(of_layers: Sequence[str]) -> str:
    """What all layers have, or each behind the other where they differ; nothing where no layer keeps anything."""
    return of_layers[0] if len(set(of_layers)) == 1 else " | ".join(of_layers)


def _checksum(block_B: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(block_B).data)


class KVStore(Protocol):
    """The paged cache of one model. Blocks 0 .. n_blocks - 1; a block holds block_tokens tokens in every layer.

    Beside them there are n_places for states of sequences, of models that have states: `StatePlaces` says who uses which.
    """

    @property
    def n_blocks(self) -> int:
        """N."""
        ...

    @property
    def block_tokens(self) -> int:
        """P."""
        ...

    @property
    def n_places(self) -> int:
        """For states; 0 where the model has none."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...

    def back_memory(self, wants_stop: Callable[[], bool]) -> None:
        """Have the system provide the pool's memory now instead of at first writes; may take seconds, beside steps."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block source to block target in every layer, in the order of the pairs."""
        ...

    @property
    def header(self) -> KVHeader:
        """What the bytes of this store's blocks mean."""
        ...

    def export_blocks(self, block_ids: Sequence[int], out: np.ndarray | None = None) -> KVPayload:
        """The bytes of these blocks in every layer; a copy, which may be written to `out` [>= N, block_bytes] uint8."""
        ...

    def import_blocks(self, block_ids: Sequence[int], payload: KVPayload) -> None:
        """Take in blocks that an equal store exported. TransferError unless all of them are right.

        Where layout, revision or number are wrong nothing is written. Checksums may be of the very pass that writes: where one
        is wrong, what these blocks hold is nothing, and only the caller knows of them; no other block has changed.
        """
        ...

    def read(self, layer: int, block_ids: Sequence[int], n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of the first n_tokens of a sequence that lies in block_ids, [K, T, d] and [K, T, dv]; copies."""
        ...

    def write(self, layer: int, block_ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys [K, T, d] and values [K, T, dv] as the first T tokens of block_ids."""
        ...

    def read_state(self, place: int) -> torch.Tensor:
        """What lies in a place, fp32 in an order of the store's own; a copy."""
        ...

    def write_state(self, place: int, state: torch.Tensor) -> None:
        """Put there what `read_state` of an equal store gave."""
        ...


@dataclass(frozen=True, slots=True)
class TorchStates:
    """One layer's, of every place: matrices [places, H, d, v], and what its taps still see [places, n_taps - 1, C], fp32."""

    matrices: torch.Tensor
    tails: torch.Tensor

    @classmethod
    def empty(cls, n_places: int, form: StateSpec, device: torch.device) -> TorchStates:
        """Zeros."""
        matrices = (n_places, form.n_value_heads, form.n_rows, form.value_dim)
        tails = (n_places, form.n_seen, form.n_channels)
        return cls(*(torch.zeros(shape, dtype=torch.float32, device=device) for shape in (matrices, tails)))

    def read(self, places: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of matrices and tails; zeros for place -1."""
        index = torch.tensor(places, device=self.matrices.device)
        is_new, index = index < 0, index.clamp(min=0)
        matrices, tails = self.matrices[index], self.tails[index]
        matrices[is_new], tails[is_new] = 0.0, 0.0
        return matrices, tails

    def write(self, places: list[int], matrices: torch.Tensor, tails: torch.Tensor) -> None:
        """One of each for every place."""
        index = torch.tensor(places, device=self.matrices.device)
        self.matrices[index], self.tails[index] = matrices, tails


class TorchKVStore:
    """Two tensors per layer, [N, P, K, d] and [N, P, K, dv], on the model's device; one where keys serve as values. Zeroed, so
    that masked slots hold no NaN. heads: K, d and dv (0: none) of each layer; forms: of layers with states, in n_places.
    """

    def __init__(
        self,
        *,
        heads: Sequence[tuple[int, int, int]],
        n_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        revision: str = "",
        forms: Sequence[StateSpec] = (),
        n_places: int = 1,
    ) -> None:
        shapes = [[(n, width) for width in (d, dv) if width] for n, d, dv in heads]
        said = [f"{n}, {d}" if dv in (0, d) else f"{n}, {d} and {dv}" for n, d, dv in heads]
        self.header = KVHeader(
            revision=revision,
            layout=f"torch [{len(shapes[0]) if shapes else 0}, {block_tokens}, {said_once(said)}]",
            dtype=str(dtype).removeprefix("torch."),
            n_layers=len(heads),
            block_tokens=block_tokens,
            block_bytes=block_tokens * sum(n * (d + dv) for n, d, dv in heads) * dtype.itemsize,
        )
        self.n_blocks = n_blocks
        self.block_tokens = block_tokens
        self.n_places = n_places if forms else 0
        state_bytes = self.n_places * sum(form.state_elements for form in forms) * torch.float32.itemsize
        beside = f" and {self.n_places} states {state_bytes}" if forms else ""
        try:
            self.layers = [
                tuple(torch.zeros((n_blocks, block_tokens, *one), dtype=dtype, device=device) for one in of_layer)
                for of_layer in shapes
            ]
            self.states = [TorchStates.empty(n_places, form, device) for form in forms]
        except (RuntimeError, torch.OutOfMemoryError) as error:
            raise CapacityError(
                f"the KV cache of {n_blocks} blocks needs {n_blocks * self.header.block_bytes} bytes{beside}, "
                f"which {device} does not have",
                hint="ask for a smaller max_context_tokens or kv_memory_bytes",
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        states = sum(one.matrices.nbytes + one.tails.nbytes for one in self.states)
        return sum(plane.nbytes for plane in self._planes) + states

    @property
    def _planes(self) -> list[torch.Tensor]:
        """Keys and values, layer after layer, as the bytes of a block have them."""
        return [plane for layer in self.layers for plane in layer]

    def back_memory(self, wants_stop: Callable[[], bool]) -> None:
        """Nothing to do: torch owns the memory."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block source to block target in every layer, in the order of the pairs."""
        for plane in self._planes:
            for source, target in pairs:
                plane[target].copy_(plane[source])

    def export_blocks(self, block_ids: Sequence[int], out: np.ndarray | None = None) -> KVPayload:
        """The bytes of these blocks in every layer; a copy, in memory of its own."""
        planes = self._planes
        if not planes:  # blocks number tokens alone
            return KVPayload.of(self.header, np.empty((len(block_ids), 0), dtype=np.uint8))
        ids = torch.as_tensor(block_ids, dtype=torch.long, device=planes[0].device)
        blocks = torch.cat([plane[ids].flatten(1) for plane in planes], dim=1)  # [n, numbers]
        return KVPayload.of(self.header, blocks.contiguous().cpu().view(torch.uint8).numpy())

    def import_blocks(self, block_ids: Sequence[int], payload: KVPayload) -> None:
        """Take in blocks that an equal store exported. TransferError, and nothing is written, unless all of them are right."""
        payload.check(self.header, len(block_ids))
        planes = self._planes
        if not planes:
            return
        ids = torch.as_tensor(block_ids, dtype=torch.long, device=planes[0].device)
        data = torch.from_numpy(payload.data_NB.copy()).view(planes[0].dtype)
        sizes = [plane[0].numel() for plane in planes]
        for plane, blocks in zip(planes, data.reshape(len(block_ids), -1).split(sizes, dim=1), strict=True):
            plane[ids] = blocks.reshape(-1, *plane.shape[1:]).to(ids.device)

    def read(self, layer: int, block_ids: Sequence[int], n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of the first n_tokens of a sequence that lies in block_ids, [K, T, d] and [K, T, dv]; copies."""
        planes = self.layers[layer]
        ids = torch.as_tensor(block_ids, dtype=torch.long, device=planes[0].device)
        tokens = [plane[ids].flatten(0, 1)[:n_tokens].transpose(0, 1).contiguous() for plane in planes]
        return tokens[0], tokens[-1]

    def write(self, layer: int, block_ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys [K, T, d] and values [K, T, dv] as the first T tokens of block_ids."""
        planes = self.layers[layer]
        device = planes[0].device
        positions = torch.arange(keys.shape[1], device=device)
        blocks = torch.as_tensor(block_ids, dtype=torch.long, device=device)[positions // self.block_tokens]
        for plane, own in zip(planes, (keys, values), strict=False):
            plane[blocks, positions % self.block_tokens] = own.transpose(0, 1).to(device=device, dtype=plane.dtype)

    def read_state(self, place: int) -> torch.Tensor:
        """Matrices and tails, layer after layer."""
        return torch.cat([part[place].flatten() for one in self.states for part in (one.matrices, one.tails)])

    def write_state(self, place: int, state: torch.Tensor) -> None:
        """Into matrices and tails."""
        parts = [part for one in self.states for part in (one.matrices, one.tails)]
        for part, own in zip(parts, state.split([part[0].numel() for part in parts]), strict=True):
            part[place] = own.to(part.device).view_as(part[place])
