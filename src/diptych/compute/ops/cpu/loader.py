"""A checkpoint's tensors packed into a native program: the cpu backend's `Loader`; it gives out handles (`handles`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from diptych.compute.adapters import Sites
from diptych.compute.loading.weights import Saved, Source
from diptych.compute.ops.contract import (
    Activation,
    AttentionSpec,
    EntryParts,
    ExpertParts,
    IndexParts,
    LinearParts,
    Loader,
    NormParts,
    RelatedParts,
    Role,
    RopeSpec,
    RuleParts,
    WeightTensor,
)
from diptych.compute.ops.cpu.handles import (
    AttentionHandle,
    ExpertsHandle,
    LatentHandle,
    LinearHandle,
    TableHandle,
    VectorHandle,
    attention_shape,
    by_head_handle,
    by_part_handle,
    distance_rows,
    entries_handle,
    index_handle,
    is_table_too,
    native_shape,
    norm_rows,
    related_handle,
    rule_handle,
)
from diptych.compute.ops.cpu.kernels import _cpu, choose_instruction_set, is_available
from diptych.compute.ops.cpu.parts import (
    Rows,
    bias_of,
    directions_for,
    finite_weights,
    name_of,
    native_codes,
    noted_exponents,
    order_of,
    runs_of,
    warn_of_large_channel,
)
from diptych.compute.ops.cpus import allowed_cpus, choose_cpus
from diptych.compute.ops.made import MadeTensor, made_parts
from diptych.compute.ops.shares import OwnHeads, Rank, head_rows
from diptych.ground.config import AS_STORED, ComputeConfig
from diptych.ground.errors import ConfigError
from diptych.ground.formats import STRIP_LANES, KeptFormat, head_format
from diptych.models.mlp import MoeSpec
from diptych.models.spec import QkNorm


class CpuLoader(Loader[TableHandle | LinearHandle, VectorHandle, LinearHandle, AttentionHandle, ExpertsHandle]):
    """Packs a checkpoint's tensors into a native program: weights in config.weights, the head and router as below.

    Where nothing is asked for, weights that the checkpoint holds quantised keep their values (`WeightTensor.kept`).

    The head is kept in bf16 for bf16 weights and in int8 for int8 and int4: every token's probabilities pass through it,
    and LAB.md has the quality that results. The router is always bf16 (it is tiny and picks experts).
    """

    def __init__(self, config: ComputeConfig, source: Source, beside: Any = None, rank: Rank | None = None) -> None:
        available, reason = is_available()
        if not available:
            raise ConfigError(reason, hint="use --backend torch meanwhile")
        if config.weights == "fp32" or config.kv == "fp32":
            raise ConfigError("the cpu backend has no fp32 weights or cache", hint="use --backend torch for fp32")
        self.instruction_set = choose_instruction_set(config.instruction_set)
        self.weights_format = "bf16" if config.weights in AS_STORED else config.weights
        self.kv_format = "bf16" if config.kv == "auto" else config.kv
        self.rank = rank or Rank()
        self.placement = self.rank.placement or choose_cpus(config.threads, config.numa, allowed_cpus())
        placed = (self.placement.threads, self.placement.cpus) if beside is None else (beside,)
        self.program = _cpu.Program(self.instruction_set, *placed)  # beside another its threads: one runs at a time
        if self.rank.team is not None:
            self.program.join(self.rank.team)
        self.source = source
        self._heads: dict[int, tuple[AttentionSpec, OwnHeads | None]] = {}  # by layer
        self.is_balancing = self.weights_format in ("int8", "int4") and source.is_balanceable
        self.is_keeping = config.weights in AS_STORED
        self._asked_wide = {"int8": False, "int15": True}.get(config.activations)  # None: as each format has them
        self.packed: dict[str, int] = {}  # key -> number in the program, of all that was packed
        self.kept: dict[str, KeptFormat] = {}  # key -> format, of those that kept their values
        self.n_values: Counter[str] = Counter()  # format -> weights of the layers that were packed in it
        self.n_expert_values: Counter[str] = Counter()  # those of experts among them
        self.plain: dict[str, WeightTensor] = {}  # used in their own form
        self.exponents: dict[str, torch.Tensor] = {}  # likewise, of what may be balanced: see `balance.exponents_of`
        self.orders: dict[str, torch.Tensor] = {}  # key -> `WeightTensor.order` of those that have one
        self.input_orders: dict[str, np.ndarray] = {}  # the same by name
        self.sites = Sites()
        self._ropes: dict[RopeSpec, int] = {}
        self._unread: list[tuple[int, Saved]] = []  # packed weights whose bytes `finish` reads
        self._largest = (0.0, "")  # how far a norm's largest channel stands out of its middle one, and which norm's

    def finish(self) -> None:
        """Packed weights are read in their file, and checked as they are copied or used there, with all else to be checked.

        That runs aside, so that the source's `meanwhile` has the interpreter even if it never lets go of it.
        """
        read = [*self._unread, *((-1, saved) for saved in self.source.unchecked)]
        packed = [(index, saved.values, saved.in_pass) for index, saved in read]
        with ThreadPoolExecutor(max_workers=1) as aside:
            reading = aside.submit(self.program.read_packed, packed) if packed else None
            if self.source.meanwhile is not None:
                self.source.meanwhile()
        for damaged in () if reading is None else reading.result():
            raise read[damaged][1].damage()
        self.source.unchecked.clear()
        self._unread.clear()
        if self._asked_wide is None:
            warn_of_large_channel(*self._largest, self.n_values)

    def table(self, tensor: WeightTensor, *, head: LinearHandle | None) -> TableHandle | LinearHandle:
        """The embedding [V, D]: the head where that holds the same numbers, else rows of the checkpoint's own pages.

        A head of our own int8 or int4 has lost bits, and so has a bf16 head of a 32-bit or fp16 tensor.
        """
        if head is not None and is_table_too(head, tensor):
            return head
        self.plain |= {one.name: one for one in tensor.stored}
        values = tensor.read().contiguous()
        return TableHandle(index=self.program.add_table(values.detach()), width=tensor.shape[1])

    def rows(self, tensor: WeightTensor) -> TableHandle | LinearHandle:
        """In codes where the file has such, whatever was asked for matrices, else in the checkpoint's own pages.

        Nobody multiplies by it, and in 16 bits it would be the largest part of such a model.
        """
        if tensor.kept is None or tensor.order is not None:
            return self.table(tensor, head=None)
        return self._pack(LinearParts(weights=(tensor,)), "bf16", of_table=tensor.kept)

    def norm(self, parts: NormParts, *, offset: float = 0.0, is_read: bool = True) -> VectorHandle:
        """Weight plus offset, and bias, as fp32."""
        bias = -1 if parts.bias is None else self._vector(parts.bias)
        sizes = self._values(parts.weight, offset).abs()
        middle = float(sizes.median())
        if is_read and middle > 0.0:
            self._largest = max(self._largest, (float(sizes.max()) / middle, parts.weight.name))
        return VectorHandle(index=self._vector(parts.weight, offset), bias=bias, is_centred=parts.is_centred)

    def _values(self, tensor: WeightTensor, offset: float = 0.0) -> torch.Tensor:
        self.plain |= {one.name: one for one in tensor.stored}
        return tensor.read().detach().to(torch.float32).reshape(-1) + offset

    def _vector(self, tensor: WeightTensor, offset: float = 0.0, *, rows: slice = slice(None)) -> int:
        return self._add_vector(self._values(tensor, offset)[rows])

    def _add_vector(self, values: torch.Tensor) -> int:
        return int(self.program.add_vector(values.contiguous()))

    def numbers(self, tensor: WeightTensor) -> tuple[float, ...]:
        """Become a part of the program."""
        return tuple(self._values(tensor).tolist())

    def vector(self, tensor: WeightTensor) -> VectorHandle:
        """Row after row."""
        return VectorHandle(index=self._vector(tensor))

    def linear(self, parts: LinearParts, *, role: Role | None = None) -> LinearHandle:
        """A projection in the weights' format."""
        if role is None or role.layer is None or role.sites[0][0] != "q":
            handle = self._pack_own(parts, self.weights_format, role)
        elif self.rank.size == 1:
            handle = self._joined(parts, role, ((0, parts.n_outputs),))
        else:
            handle = self._heads_projection(parts, role, *self._heads[role.layer])
        self.sites.note(parts, handle)
        return handle

    def gate(self, parts: LinearParts, activation: Activation, *, role: Role | None = None) -> LinearHandle:
        """As any projection: who reads it applies the activation."""
        handle = replace(self._pack_own(parts, self.weights_format, role), activation=activation)
        self.sites.note(parts, handle)
        return handle

    def gated(
        self, parts: LinearParts, activation: Activation, *, role: Role | None = None, is_apart: bool = False
    ) -> LinearHandle:
        """Gate and up interleaved, so that the product's epilogue can join them; beside each other where they are apart."""
        if is_apart and len(self._runs(parts)) == 1:
            handle = replace(self._pack_own(parts, self.weights_format, role), activation=activation)
        else:
            handle = self._gated_own(parts, activation, role)
        self.sites.note(parts, handle)
        return handle

    def attention(
        self,
        spec: AttentionSpec,
        *,
        q_norm: WeightTensor | None,
        k_norm: WeightTensor | None,
        norm_offset: float = 0.0,
        sinks: WeightTensor | None = None,
        distances: WeightTensor | None = None,
        index: IndexParts | None = None,
        related: RelatedParts | None = None,
    ) -> AttentionHandle:
        """The layer's native attention shape; layers with equal rotary specs share one table."""
        own = self.rank.heads(spec.n_heads, spec.n_kv_heads)
        self._heads[spec.layer] = spec, own
        self.plain |= {one.name: one for one in (() if related is None else related.beside)}
        mine = slice(0, 0) if own is None else slice(own.first_head, own.first_head + own.n_heads)
        norms = [
            None if norm is None else self._vector(norm, norm_offset, rows=rows)
            for norm, rows in zip((q_norm, k_norm), norm_rows(spec, own), strict=True)
        ]
        return AttentionHandle(
            spec=spec,
            own=own,
            shape=own and attention_shape(spec, own, self.kv_format),
            rope=self._rope(spec.rope),
            q_norm=norms[0],
            k_norm=norms[1],
            sinks=-1 if sinks is None else self._vector(sinks, rows=mine),
            slopes=self._add_vector(torch.tensor(spec.slopes[mine])) if spec.slopes else -1,
            distances=-1 if distances is None else self._add_vector(distance_rows(self._values(distances), spec, mine)),
            related=None if related is None else related_handle(related, mine, self),
            index=None if index is None else index_handle(spec, index, self, own),
        )

    def latent_attention(
        self,
        spec: AttentionSpec,
        *,
        norm: NormParts | None,
        keys: tuple[LinearParts, ...],
        values: tuple[LinearParts, ...],
        sinks: WeightTensor | None = None,
        scales: WeightTensor | None = None,
        index: IndexParts | None = None,
        entries: EntryParts | None = None,
    ) -> AttentionHandle:
        """Each head's matrices packed by themselves: of a rank, those of its heads. Latents are every rank's, whole."""
        size = spec.n_heads // len(values)  # heads that are projected together
        own = self.rank.heads(spec.n_heads, spec.n_kv_heads, together=size)
        self._heads[spec.layer] = spec, own
        mine = slice(0, 0) if own is None else slice(own.first_head, own.first_head + own.n_heads)
        some = keys[mine], values[mine.start // size : mine.stop // size]
        packed = [tuple(self._pack(parts, self.weights_format) for parts in of_heads) for of_heads in some]
        latent = LatentHandle(
            norm=-1 if norm is None else self._vector(norm.weight),
            keys=packed[0],
            values=packed[1],
            ones=-1 if keys else self._add_vector(torch.ones(spec.head_dim)),
            entries=None if entries is None else entries_handle(entries, spec.entry_places[0], self),
            scales=-1 if scales is None else self._add_vector(self._values(scales).view(2, -1)[:, mine].reshape(-1)),
        )
        return AttentionHandle(
            spec=spec,
            own=own,
            shape=own and attention_shape(spec, own, self.kv_format),
            rope=self._rope(spec.rope),
            sinks=-1 if sinks is None else self._vector(sinks, rows=mine),
            latent=latent,
            index=None if index is None else index_handle(spec, index, self, own),
        )

    def state_rule(self, spec: AttentionSpec, rule: RuleParts) -> AttentionHandle:
        """Of a rank, the numbers of its heads. Ranks share whole key heads, as they share those of keys and values."""
        own = (Rank() if spec.is_whole else self.rank).heads(spec.n_heads, spec.n_kv_heads)
        if not spec.is_whole:
            self._heads[spec.layer] = spec, own
        handle = rule_handle(spec, rule, own, self._values, self._add_vector)
        return AttentionHandle(spec=spec, own=own, rule=handle)

    def _rope(self, rope: RopeSpec | None) -> int | None:
        if rope is not None and rope not in self._ropes:
            self._ropes[rope] = self.program.add_rope(list(rope.inv_freq), rope.attention_factor)
        return None if rope is None else self._ropes[rope]

    def router(self, parts: LinearParts) -> LinearHandle:
        """In bf16 whatever the others are in."""
        return self._pack(parts, "bf16")

    def rates(self, parts: LinearParts) -> LinearHandle:
        """Noted, too."""
        handle = self._pack(parts, "bf16", is_rates=self.weights_format != "bf16")
        self.sites.note(parts, handle)
        return handle

    def by_head(self, parts: tuple[LinearParts, ...], *, layer: int, divides: bool = False) -> LinearHandle:
        """In bf16 likewise, of a rank its own heads', which nobody else reads; what divides is in the weights' format."""
        spec, own = self._heads[layer]
        if not divides:
            return by_head_handle(parts, own, self.router, of_keys=len(parts) == spec.n_kv_heads)
        return by_part_handle(parts, own, spec.head_dim, self.weights_format, self._pack)

    def experts(
        self,
        spec: MoeSpec,
        *,
        router: LinearParts,
        choice_bias: WeightTensor | None,
        scales: WeightTensor | None = None,
        table: WeightTensor | None = None,
        behind: WeightTensor | None = None,
        experts: tuple[ExpertParts, ...],
        role: Role | None = None,
    ) -> ExpertsHandle:
        """Each expert packed on its own; the router in bf16. Ranks have a part of each expert, and the whole router.

        Experts share their rows, so all keep their values or none.
        """
        stored = [(*expert.gate_up.weights, *expert.down.weights) for expert in experts]
        keep = all(self._is_alike(of_experts) for of_experts in zip(*stored, strict=True))
        joined, before = None if spec.joins_apart else spec.activation, self.n_values.copy()
        gate_up = tuple(self._gated_own(expert.gate_up, joined, role, keep=keep) for expert in experts)
        down = tuple(self._pack_own(expert.down, self.weights_format, role, keep=keep) for expert in experts)
        self.n_expert_values += self.n_values - before
        for e, expert in enumerate(experts):
            self.sites.note_expert(e, (expert.gate_up, gate_up[e]), (expert.down, down[e]))
        return ExpertsHandle(
            spec=spec,
            router=self.router(router),
            choice_bias=-1 if choice_bias is None else self._vector(choice_bias),
            scales=-1 if scales is None else self._vector(scales),
            table=-1 if table is None else self._vector(table),  # numbers that fp32 holds
            behind=-1
            if behind is None
            else self._add_vector(torch.cat([self._values(behind), torch.ones(*behind.shape)])),
            gate_up=gate_up,
            down=down,
        )

    def head(self, tensor: WeightTensor, *, bias: WeightTensor | None = None, role: Role | None = None) -> LinearHandle:
        """The output projection, packed."""
        parts = LinearParts(weights=(tensor,), biases=() if bias is None else (bias,))
        handle = self._pack_own(parts, head_format(self.weights_format), role)
        self.sites.note_head(tensor, handle)
        return handle

    def _pack_own(
        self, parts: LinearParts, weights_format: str, role: Role | None, *, keep: bool = True
    ) -> LinearHandle:
        """The rank's outputs of a projection, to be gathered; all of it where nobody said what it is."""
        if self.rank.size == 1 or role is None:
            return self._pack(parts, weights_format, role=role, keep=keep)
        begin, end = self.rank.share(parts.n_outputs)
        handle = self._pack(parts, weights_format, role=role, rows=((begin, end),), keep=keep)
        return replace(handle, n_outputs=parts.n_outputs, column=begin, is_gathered=True)

    def _gated_own(
        self, parts: LinearParts, activation: Activation | None, role: Role | None, *, keep: bool = True
    ) -> LinearHandle:
        """The same of gate and up; as plain outputs where no activation joins them."""
        runs = self._runs(parts) if keep else [parts]
        if activation is None and len(runs) == 2 and role is not None:
            begin, end = self.rank.share(parts.n_outputs)
            handle = self._joined(parts, role, ((begin, end),))
            return replace(handle, n_outputs=parts.n_outputs, column=begin, is_gathered=self.rank.size > 1)
        if activation is None:
            return self._pack_own(parts, self.weights_format, role, keep=keep)
        if len(runs) == 2:
            return self._gated_apart(runs[0], runs[1], activation, role)
        if self.rank.size == 1 or role is None:
            return self._pack(parts, self.weights_format, activation=activation, role=role, keep=keep)
        ffn = parts.n_outputs // 2
        begin, end = self.rank.share(ffn, lanes=2)
        rows = ((begin, end), (ffn + begin, ffn + end))
        handle = self._pack(parts, self.weights_format, activation=activation, role=role, rows=rows, keep=keep)
        return replace(handle, n_outputs=ffn, column=begin, is_gathered=True)

    def _gated_apart(
        self, gate: LinearParts, up: LinearParts, activation: Activation, role: Role | None
    ) -> LinearHandle:
        """Gate and up that no one format holds, each in its own."""
        pieces = []
        for begin, parts in ((0, gate), (gate.n_outputs, up)):
            piece = self._pack_own(parts, self.weights_format, role)
            low, high = (0, parts.n_outputs) if piece.rows is None else piece.rows[0]
            pieces.append(replace(piece, rows=((begin + low, begin + high),), begin=begin))
        return replace(pieces[0], activation=activation, pieces=tuple(pieces))

    def _heads_projection(
        self, parts: LinearParts, role: Role, spec: AttentionSpec, own: OwnHeads | None
    ) -> LinearHandle:
        """q, k and v of the rank's heads, which nobody else reads; of a norm over all heads, gathered.

        Ranks that hold the same KV head write the same numbers to its columns then. Latent attention has q alone.
        """
        widths = [outputs for _, outputs in role.sites]
        of_all, plain = made_parts(parts, self.weights_format)
        is_gathered, kept = spec.qk_norm is QkNorm.FULL, self._kept(of_all)
        nobody = LinearHandle(
            index=None,
            key="",
            format=plain if kept is None else kept.name,
            n_inputs=parts.n_inputs,
            n_outputs=parts.n_outputs if is_gathered else 0,
            role=role,
            is_gathered=is_gathered,
        )
        if own is None:
            for run in self._runs(parts):
                self._count_elsewhere(run)
            return replace(nobody, pieces=(nobody,) * len(widths)) if is_gathered else nobody
        rows = head_rows(widths, own, spec.n_heads, spec.n_kv_heads, has_states=spec.state is not None)
        if not is_gathered:
            return self._joined(parts, role, rows)
        pieces = [
            replace(self._joined(parts, role, (of_site,)), column=of_site[0], is_gathered=True) for of_site in rows
        ]
        return replace(nobody, index=pieces[0].index, pieces=tuple(pieces), order=pieces[0].order)

    def _joined(self, parts: LinearParts, role: Role, rows: Rows) -> LinearHandle:
        """`rows` of stacked tensors, in a piece for each run of them that one format and order holds."""
        pieces: list[LinearHandle] = []
        begin = column = 0
        for run in self._runs(parts):
            end = begin + run.n_outputs
            own = tuple((max(low, begin), min(high, end)) for low, high in rows if max(low, begin) < min(high, end))
            is_whole = own == ((begin, end),)
            if own:
                of_run = None if is_whole else tuple((low - begin, high - begin) for low, high in own)
                piece = self._pack(run, self.weights_format, role=role, rows=of_run)
                is_all = is_whole and run.n_outputs == parts.n_outputs
                pieces.append(replace(piece, rows=None if is_all else own, begin=begin, column=column))
                column += piece.n_outputs
            else:
                self._count_elsewhere(run)
            begin = end
        if len(pieces) == 1:
            return pieces[0]
        return replace(pieces[0], n_outputs=column, rows=rows, pieces=tuple(pieces))

    def _count_elsewhere(self, parts: LinearParts) -> None:
        """What only other ranks have: all say the same of the model's formats, and `has_wide_rows` is one answer."""
        parts, plain = made_parts(parts, self.weights_format)
        kept = self._kept(parts)
        self.n_values[plain if kept is None else kept.name] += parts.n_outputs * parts.n_inputs

    def _runs(self, parts: LinearParts) -> list[LinearParts]:
        """Neighbours that are kept alike, or not at all; one where there is a bias for several tensors together."""
        return runs_of(parts, self._is_alike)

    @property
    def main_format(self) -> str:
        """The format of most weights of the layers."""
        return self.n_values.most_common(1)[0][0] if self.n_values else self.weights_format

    @property
    def has_wide_rows(self) -> bool:
        """Whether most layers meet rows of 15 bits: then a head's rows in bf16 would cost as much as all their codes do."""
        return self.main_format.endswith("-wide")

    def _is_alike(self, parts: Sequence[WeightTensor]) -> bool:
        """Whether one format and order holds the stored values of all parts, or none of them is kept."""
        return not self.is_keeping or len({(part.kept, name_of(part.order)) for part in parts}) == 1

    def _kept(self, parts: LinearParts, *, is_gated: bool = False) -> KeptFormat | None:
        """What holds the stored values of all parts."""
        is_made = isinstance(parts.weights[0], MadeTensor)
        kept = parts.weights[0].kept if is_made or (self.is_keeping and self._is_alike(parts.weights)) else None
        if kept is not None and kept.kind == "fp8":  # it meets rows in bf16, whatever is asked
            is_cut = is_gated and len(parts.weights) == 1 and parts.n_outputs % (2 * STRIP_LANES) != 0
            return None if kept.group and is_cut else kept
        if kept is None or self._asked_wide is None:
            return kept
        if kept.kind == "int8" and self._asked_wide:
            raise ConfigError(
                f"activations is int15, and {parts.weights[0].name} is W8A8, which is met by rows of 8 bits alone",
                hint="activations auto or int8",
            )
        return replace(kept, is_wide=self._asked_wide)

    def _pack(
        self,
        parts: LinearParts,
        weights_format: str,
        *,
        activation: Activation | None = None,
        role: Role | None = None,
        rows: Rows | None = None,
        keep: bool = True,
        of_table: KeptFormat | None = None,
        is_rates: bool = False,
    ) -> LinearHandle:
        """`rows` of the projection, one range after the other; all of it where there is None. of_table: what holds a table.

        is_rates: in bf16, and balanced where the others are.
        """
        parts, weights_format = made_parts(parts, weights_format)
        k = parts.n_inputs
        n = parts.n_outputs if rows is None else sum(end - begin for begin, end in rows)
        kept = of_table or (self._kept(parts, is_gated=activation is not None) if keep else None)
        form = {"is_gated": activation is not None, "has_bias": bool(parts.biases)}
        shape, whole = (native_shape(kept or weights_format, outputs, k, **form) for outputs in (n, parts.n_outputs))
        key = "+".join(part.name for part in (*parts.weights, *parts.biases))
        if kept is not None:
            self.kept[key] = parts.weights[0].kept or kept
            weights_format = kept.name
        if role is not None and role.layer is not None and key not in self.packed:
            self.n_values[weights_format] += parts.n_outputs * k
        self.packed[key], is_packed = self._add(shape, whole, key, parts, rows, weights_format, kept)
        order = self._note_order(key, parts) if kept is not None else ""
        is_balanced = weights_format != "bf16" or is_rates
        if is_balanced:
            self.exponents |= noted_exponents(self.source, key, parts, is_packed=is_packed)
        return LinearHandle(
            index=self.packed[key],
            key=key,
            format=weights_format,
            n_inputs=k,
            n_outputs=n if activation is None else n // 2,
            activation=activation,
            role=role,
            rows=rows,
            order=order,
            is_balanced=is_balanced,
        )

    def _add(
        self,
        shape: Any,
        whole: Any,
        key: str,
        parts: LinearParts,
        rows: Rows | None,
        weights_format: str,
        kept: KeptFormat | None,
    ) -> tuple[int, bool]:
        """The weight's number in the program, and whether it was packed already."""
        saved = self.source.find_packed(key, whole.packed_bytes)
        seed = parts.weights[0].random_seed
        if saved is not None:
            return self._add_saved(shape, whole, rows, saved), True
        if seed is not None and not parts.biases:
            return self._add_random(shape, whole, rows, seed & (2**63 - 1), (3.0 / parts.n_inputs) ** 0.5), False
        return self._add_read(shape, parts, rows or ((0, parts.n_outputs),), weights_format, kept), False

    def _note_order(self, key: str, parts: LinearParts) -> str:
        """The name of the order in which a kept weight has its inputs."""
        order = order_of(parts)
        name = name_of(order)
        if order is not None:
            self.orders[key] = order
            self.input_orders[name] = order.numpy()
        return name

    def _add_read(
        self, shape: Any, parts: LinearParts, rows: Rows, weights_format: str, kept: KeptFormat | None
    ) -> int:
        """Rows of the tensors, packed."""
        bias = bias_of(parts, rows)
        if kept is not None:
            return int(self.program.add_coded_linear(shape, native_codes(parts.weights, rows), bias))
        weights, directions = finite_weights(parts, rows, weights_format), directions_for(parts, weights_format)
        return int(self.program.add_linear(shape, weights, bias, directions))

    def _add_random(self, shape: Any, whole: Any, rows: Rows | None, seed: int, amplitude: float) -> int:
        if rows is None:
            return int(self.program.add_random_linear(shape, seed, amplitude))
        return int(self.program.add_random_part(shape, whole, rows, seed, amplitude))

    def _add_saved(self, shape: Any, whole: Any, rows: Rows | None, saved: Saved) -> int:
        if rows is None:
            is_there = self._is_used_there
            index = self._add_mapped(shape, saved) if is_there else int(self.program.add_packed_linear(shape))
            self._unread.append((index, saved))
            return index
        try:
            return int(self.program.add_packed_part(shape, whole, rows, saved.checked()))
        except ValueError as error:
            raise ConfigError(
                f"the checkpoint is packed, and with tp of {self.rank.size} {error}",
                hint="load the original checkpoint, or ask for another number of ranks",
            ) from error

    @property
    def _is_used_there(self) -> bool:
        """Whether packed weights are used in their file. Its pages may lie on one node: threads of several want a copy."""
        return self.source.is_lasting and len(self.placement.nodes) <= 1

    def _add_mapped(self, shape: Any, saved: Saved) -> int:
        try:
            return int(self.program.add_mapped_linear(shape, saved.values))
        except ValueError as error:  # not where it was written: what the header says of it is damaged
            raise saved.damage() from error
