"""A checkpoint's tensors packed into a native program: the cpu backend's `Loader`.

It says which of them are a handle together (`handles`), and what of it is a rank's; `packing` does the packing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from diptych.compute.loading.weights import Source
from diptych.compute.ops.contract import (
    Activation,
    AttentionSpec,
    EntryParts,
    IndexParts,
    LinearParts,
    Loader,
    MixtureParts,
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
    norm_rows,
    related_handle,
    rule_handle,
)
from diptych.compute.ops.cpu.kernels import _cpu, choose_instruction_set, is_available
from diptych.compute.ops.cpu.packing import Packer
from diptych.compute.ops.cpu.parts import Rows, warn_of_large_channel
from diptych.compute.ops.cpus import allowed_cpus, choose_cpus
from diptych.compute.ops.made import made_parts
from diptych.compute.ops.shares import OwnHeads, Rank, head_rows
from diptych.compute.sites import Sites
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError
from diptych.ground.formats import head_format
from diptych.models.mlp import MoeSpec
from diptych.models.spec import QkNorm


class CpuLoader(Loader[TableHandle | LinearHandle, VectorHandle, LinearHandle, AttentionHandle, ExpertsHandle]):
    """Packs a checkpoint's tensors into a native program: weights in config.weights (`Packer`), the head and router as below.

    The head is kept in bf16 for bf16 weights and in int8 for int8 and int4: every token's probabilities pass through it,
    and LAB.md has the quality that results. The router is always bf16 (it is tiny and picks experts).
    """

    packs_by: type[Packer] = Packer

    def __init__(self, config: ComputeConfig, source: Source, beside: Any = None, rank: Rank | None = None) -> None:
        available, reason = is_available()
        if not available:
            raise ConfigError(reason, hint="use --backend torch meanwhile")
        if config.weights == "fp32" or config.kv == "fp32":
            raise ConfigError("the cpu backend has no fp32 weights or cache", hint="use --backend torch for fp32")
        self.instruction_set = choose_instruction_set(config.instruction_set)
        self.kv_format = "bf16" if config.kv == "auto" else config.kv
        self.rank = rank or Rank()
        self.placement = self.rank.placement or choose_cpus(config.threads, config.numa, allowed_cpus())
        placed = (self.placement.threads, self.placement.cpus) if beside is None else (beside,)
        self.program = _cpu.Program(self.instruction_set, *placed)  # beside another its threads: one runs at a time
        if self.rank.team is not None:
            self.program.join(self.rank.team)
        self.source = source
        self.packer = self.packs_by(self.program, source, config, threads_on=self.placement, n_ranks=self.rank.size)
        self.weights_format = self.packer.weights_format
        self._heads: dict[int, tuple[AttentionSpec, OwnHeads | None]] = {}  # by layer
        self.is_balancing = self.weights_format in ("int8", "int4") and source.is_balanceable
        self.n_expert_values: Counter[str] = Counter()  # of `Packer.n_values` those of experts
        self.plain: dict[str, WeightTensor] = {}  # used in their own form
        self.sites = Sites()
        self._ropes: dict[RopeSpec, int] = {}
        self._largest = (0.0, "")  # how far a norm's largest channel stands out of its middle one, and which norm's

    def finish(self) -> None:
        """What was packed before is read, and what rows of 8 bits may not bear is told."""
        self.packer.finish()
        if self.packer.asked_wide is None:
            warn_of_large_channel(*self._largest, self.packer.n_values)

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
        return self.packer.pack(LinearParts(weights=(tensor,)), "bf16", of_table=tensor.kept)

    def norm(self, parts: NormParts, *, offset: float = 0.0, is_read: bool = True) -> VectorHandle:
        """Weight plus offset, and bias, as fp32."""
        bias = -1 if parts.bias is None else self._vector(parts.bias)
        values = self._values(parts.weight, offset)
        if is_read and (middle := float(values.abs().median())) > 0.0:
            self._largest = max(self._largest, (float(values.abs().max()) / middle, parts.weight.name))
        return VectorHandle(index=self._add_vector(values), bias=bias, is_centred=parts.is_centred)

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
        if is_apart and len(self.packer.runs(parts)) == 1:
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
        packed = [tuple(self.packer.pack(parts, self.weights_format) for parts in of_heads) for of_heads in some]
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
        return self.packer.pack(parts, "bf16")

    def rates(self, parts: LinearParts) -> LinearHandle:
        """Noted, too."""
        handle = self.packer.pack(parts, "bf16", is_rates=self.weights_format != "bf16")
        self.sites.note(parts, handle)
        return handle

    def by_head(self, parts: tuple[LinearParts, ...], *, layer: int, divides: bool = False) -> LinearHandle:
        """In bf16 likewise, of a rank its own heads', which nobody else reads; what divides is in the weights' format."""
        spec, own = self._heads[layer]
        if not divides:
            return by_head_handle(parts, own, self.router, of_keys=len(parts) == spec.n_kv_heads)
        return by_part_handle(parts, own, spec.head_dim, self.weights_format, self.packer.pack)

    def experts(self, spec: MoeSpec, parts: MixtureParts, *, role: Role | None = None) -> ExpertsHandle:
        """Each expert packed on its own; the router in bf16. Ranks have a part of each expert, and the whole router.

        Experts share their rows, so all keep their values or none.
        """
        stored = [(*expert.gate_up.weights, *expert.down.weights) for expert in parts.experts]
        keep = all(self.packer.is_alike(of_experts) for of_experts in zip(*stored, strict=True))
        joined, before = None if spec.joins_apart else spec.activation, self.packer.n_values.copy()
        gate_up = tuple(self._gated_own(expert.gate_up, joined, role, keep=keep) for expert in parts.experts)
        down = tuple(self._pack_own(expert.down, self.weights_format, role, keep=keep) for expert in parts.experts)
        self.n_expert_values += self.packer.n_values - before
        for e, expert in enumerate(parts.experts):
            self.sites.note_expert(e, (expert.gate_up, gate_up[e]), (expert.down, down[e]))
        few = (parts.choice_bias, parts.scales, parts.table)  # fp32 holds the numbers of the last
        choice_bias, scales, table = (-1 if one is None else self._vector(one) for one in few)
        last, behind = parts.behind, -1
        if last is not None:
            behind = self._add_vector(torch.cat([self._values(last), torch.ones(*last.shape)]))
        return ExpertsHandle(
            spec=spec,
            router=self.router(parts.router),
            choice_bias=choice_bias,
            scales=scales,
            table=table,
            behind=behind,
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
            return self.packer.pack(parts, weights_format, role=role, keep=keep)
        begin, end = self.rank.share(parts.n_outputs)
        handle = self.packer.pack(parts, weights_format, role=role, rows=((begin, end),), keep=keep)
        return replace(handle, n_outputs=parts.n_outputs, column=begin, is_gathered=True)

    def _gated_own(
        self, parts: LinearParts, activation: Activation | None, role: Role | None, *, keep: bool = True
    ) -> LinearHandle:
        """The same of gate and up; as plain outputs where no activation joins them."""
        runs = self.packer.runs(parts) if keep else [parts]
        if activation is None and len(runs) == 2 and role is not None:
            begin, end = self.rank.share(parts.n_outputs)
            handle = self._joined(parts, role, ((begin, end),))
            return replace(handle, n_outputs=parts.n_outputs, column=begin, is_gathered=self.rank.size > 1)
        if activation is None:
            return self._pack_own(parts, self.weights_format, role, keep=keep)
        if len(runs) == 2:
            return self._gated_apart(runs[0], runs[1], activation, role)
        if self.rank.size == 1 or role is None:
            return self.packer.pack(parts, self.weights_format, activation=activation, role=role, keep=keep)
        ffn = parts.n_outputs // 2
        begin, end = self.rank.share(ffn, lanes=2)
        rows = ((begin, end), (ffn + begin, ffn + end))
        handle = self.packer.pack(parts, self.weights_format, activation=activation, role=role, rows=rows, keep=keep)
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
        is_gathered, kept = spec.qk_norm is QkNorm.FULL, self.packer.kept_of(of_all)
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
            for run in self.packer.runs(parts):
                self.packer.count_elsewhere(run)
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
        for run in self.packer.runs(parts):
            end = begin + run.n_outputs
            own = tuple((max(low, begin), min(high, end)) for low, high in rows if max(low, begin) < min(high, end))
            is_whole = own == ((begin, end),)
            if own:
                of_run = None if is_whole else tuple((low - begin, high - begin) for low, high in own)
                piece = self.packer.pack(run, self.weights_format, role=role, rows=of_run)
                is_all = is_whole and run.n_outputs == parts.n_outputs
                pieces.append(replace(piece, rows=None if is_all else own, begin=begin, column=column))
                column += piece.n_outputs
            else:
                self.packer.count_elsewhere(run)
            begin = end
        if len(pieces) == 1:
            return pieces[0]
        return replace(pieces[0], n_outputs=column, rows=rows, pieces=tuple(pieces))
