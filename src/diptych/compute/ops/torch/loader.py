"""The torch backend's loader: a checkpoint's tensors on a device, in the handles that `ops` computes with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
    RuleParts,
    WeightTensor,
)
from diptych.compute.ops.torch.device_codes import CodedWeight, JoinedWeight, Weight, empty_stack, joined, on_device
from diptych.compute.sites import Sites
from diptych.ground.formats import DeviceFormat
from diptych.models.mlp import MoeSpec


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """W [N, K] and b [N]; activation for gated ones. In codes only where the ops multiply by such."""

    weight: Weight
    bias: torch.Tensor | None
    activation: Activation | None = None
    role: Role | None = None


@dataclass(frozen=True, slots=True)
class TorchNorm:
    """weight and bias [D] fp32; a centred norm takes the mean away."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    is_centred: bool = False


@dataclass(frozen=True, slots=True)
class TorchLatent:
    """norm over the latent, keys [H, kv_rank, nope_dim], values [H, v_dim, kv_rank]; of rows that are met as they are no keys,
    and values [groups, outputs, H / groups * row]. scales [2 H] fp32.
    """

    norm: TorchNorm | None
    keys: torch.Tensor | None
    values: torch.Tensor
    entries: TorchEntries | None = None
    scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TorchEntries:
    """`EntryParts` on the device: offsets [tokens, n d] fp32."""

    series: TorchLinear
    offsets: torch.Tensor
    norm: TorchNorm


@dataclass(frozen=True, slots=True)
class TorchIndex:
    """`IndexParts` on the device."""

    queries: TorchLinear
    key: TorchLinear | None
    norm: TorchNorm | None
    weights: TorchLinear | None
    q_norm: TorchNorm | None
    gates: TorchLinear | None = None
    offsets: torch.Tensor | None = None
    entries: TorchEntries | None = None
    scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TorchRule:
    """`RuleParts`: taps [channels, n_taps], their bias [channels], and of each head [H] (shift by key [H d]; selective: decay
    [H v, d], others [H v]; units: [H v]), all fp32, and the heads' norm.
    """

    taps: torch.Tensor | None = None
    tap_bias: torch.Tensor | None = None
    decay: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    norm: TorchNorm | None = None


@dataclass(frozen=True, slots=True)
class TorchRelated:
    """keys and queries [H, n_places, d] in the compute dtype, places [2 reach + 1]: as `RelatedParts` has them."""

    keys: torch.Tensor
    queries: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """A layer's attention: its spec and, where it has them, norms over [d] or [H*d] and [K*d], and in fp32 sinks [H] and
    numbers of distances [H, 2 reach + 1].
    """

    spec: AttentionSpec
    q_norm: TorchNorm | None
    k_norm: TorchNorm | None
    sinks: torch.Tensor | None = None
    distances: torch.Tensor | None = None
    related: TorchRelated | None = None
    latent: TorchLatent | None = None
    index: TorchIndex | None = None
    rule: TorchRule | None = None


Stacked = tuple[torch.Tensor | CodedWeight, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class TorchExperts:
    """router [E, D], choice_bias and scales [E] fp32, table [V, k], gate_up and down per expert; stacked: W [E, N, K] and b
    [E, N] of all gate_up and of all down, whose parts those are, where the ops want them so. behind [D] fp32.
    """

    spec: MoeSpec
    router: TorchLinear
    choice_bias: torch.Tensor | None
    scales: torch.Tensor | None
    gate_up: tuple[TorchLinear, ...]
    down: tuple[TorchLinear, ...]
    stacked: tuple[Stacked, Stacked] | None = None
    table: torch.Tensor | None = None
    behind: torch.Tensor | None = None


class TorchLoader(Loader[torch.Tensor, TorchNorm, TorchLinear, TorchAttention, TorchExperts]):
    """Puts weights on the device in the compute dtype. A single tensor that already is there in that dtype is not copied.

    keeps_codes: what a file has in codes stays so, where there is a `DeviceFormat` for it.
    """

    is_balancing = False

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, stacks_experts: bool = False, keeps_codes: bool = False
    ) -> None:
        self._stacks_experts = stacks_experts
        self._keeps_codes = keeps_codes
        self._device = device
        self._dtype = dtype
        self.weight_bytes = 0
        self.n_values: Counter[str] = Counter()  # format of what is in codes, and "" -> weights of the layers
        self.n_expert_values: Counter[str] = Counter()  # those of experts among them
        self.head_format = ""
        self.lost: Counter[str] = Counter()  # why a matrix in codes was not kept -> how many
        self.sites = Sites()

    def table(self, tensor: WeightTensor, *, head: TorchLinear | None) -> torch.Tensor:
        """[V, D] in the compute dtype: the head's own matrix where tied, unless that is in codes."""
        if head is not None and isinstance(head.weight, torch.Tensor):
            return head.weight
        return tensor.read().to(device=self._device, dtype=self._dtype)

    def rows(self, tensor: WeightTensor) -> torch.Tensor:
        """[V, W] in the compute dtype."""
        return self.table(tensor, head=None)

    def norm(self, parts: NormParts, *, offset: float = 0.0, is_read: bool = True) -> TorchNorm:
        """[D] fp32."""
        del is_read
        bias = None if parts.bias is None else self._vector(parts.bias)
        return TorchNorm(self._vector(parts.weight, offset), bias, parts.is_centred)

    def linear(self, parts: LinearParts, *, role: Role | None = None) -> TorchLinear:
        """The parts stacked into one matrix."""
        linear = self._stacked(parts, role=role)
        self.sites.note(parts, linear)
        return linear

    def numbers(self, tensor: WeightTensor) -> tuple[float, ...]:
        """On no device."""
        return tuple(tensor.read().float().flatten().tolist())

    def vector(self, tensor: WeightTensor) -> TorchNorm:
        """fp32, in its shape."""
        return TorchNorm(self._vector(tensor))

    def gate(self, parts: LinearParts, activation: Activation, *, role: Role | None = None) -> TorchLinear:
        """With its activation."""
        linear = self._stacked(parts, activation, role=role)
        self.sites.note(parts, linear)
        return linear

    def gated(
        self, parts: LinearParts, activation: Activation, *, role: Role | None = None, is_apart: bool = False
    ) -> TorchLinear:
        """Gate rows first, then up rows, whatever joins them."""
        del is_apart
        linear = self._stacked(parts, activation, role=role)
        self.sites.note(parts, linear)
        return linear

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
    ) -> TorchAttention:
        """The spec beside the norms' weights."""
        return TorchAttention(
            spec,
            None if q_norm is None else self.norm(NormParts(weight=q_norm), offset=norm_offset),
            None if k_norm is None else self.norm(NormParts(weight=k_norm), offset=norm_offset),
            None if sinks is None else self._vector(sinks),
            None if distances is None else self._vector(distances),
            related=None if related is None else self._related(related),
            index=None if index is None else self._index(index),
        )

    def _related(self, related: RelatedParts) -> TorchRelated:
        keys, queries = (self.by_head(one, layer=0).weight for one in (related.keys, related.queries))
        assert isinstance(keys, torch.Tensor)
        assert isinstance(queries, torch.Tensor)
        return TorchRelated(keys, queries, self._vector(related.places).long())

    def _index(self, index: IndexParts) -> TorchIndex:
        return TorchIndex(
            queries=self.linear(index.queries),
            key=None if index.key is None else self.router(index.key),
            norm=None if index.norm is None else self.norm(index.norm, offset=index.norm_offset),
            weights=None if index.weights is None else self.router(index.weights),
            q_norm=None if index.q_norm is None else self.norm(index.q_norm, offset=index.norm_offset),
            gates=self.router(index.gates[0]) if index.gates else None,
            offsets=None if index.offsets is None else self._vector(index.offsets),
            entries=None if index.entries is None else self._entries(index.entries),
            scales=None if index.scales is None else self._vector(index.scales),
        )

    def _entries(self, entries: EntryParts) -> TorchEntries:
        return TorchEntries(self.rates(entries.series), self._vector(entries.offsets), self.norm(entries.norm))

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
    ) -> TorchAttention:
        """The heads' matrices stacked."""
        stacked = (
            torch.stack([self._stack(parts.weights) for parts in both]) if both else None for both in (keys, values)
        )
        of_keys, of_values = stacked
        assert of_values is not None
        latent = TorchLatent(
            None if norm is None else self.norm(norm),
            of_keys,
            of_values,
            None if entries is None else self._entries(entries),
            None if scales is None else self._vector(scales),
        )
        own, of_heads = None if index is None else self._index(index), None if sinks is None else self._vector(sinks)
        return TorchAttention(spec, None, None, of_heads, latent=latent, index=own)

    def state_rule(self, spec: AttentionSpec, rule: RuleParts) -> TorchAttention:
        """All of it in fp32."""
        assert spec.state is not None
        tap_bias, decay, shift, skip = (
            None if one is None else self._vector(one) for one in (rule.tap_bias, rule.decay, rule.shift, rule.skip)
        )
        norm = None if rule.norm is None else self.norm(rule.norm)
        taps = None if rule.taps is None else self._vector(rule.taps).view(spec.state.n_channels, -1)
        if spec.state.is_selective:
            assert decay is not None
            decay = decay.view(spec.state.width, -1)
            shift, skip = (None if one is None else one.view(-1) for one in (shift, skip))
        return TorchAttention(spec, None, None, rule=TorchRule(taps, tap_bias, decay, shift, skip, norm))

    def router(self, parts: LinearParts) -> TorchLinear:
        """In the compute dtype."""
        return TorchLinear(self._stack(parts.weights), self._stack(parts.biases) if parts.biases else None)

    def rates(self, parts: LinearParts) -> TorchLinear:
        """As any other."""
        return self.linear(parts)

    def by_head(self, parts: tuple[LinearParts, ...], *, layer: int, divides: bool = False) -> TorchLinear:
        """W [H, n, k], in the compute dtype."""
        del layer, divides
        weight = torch.stack([self._stack(one.weights) for one in parts])
        biases = tuple(bias for one in parts for bias in one.biases)
        return TorchLinear(weight, self._stack(biases) if biases else None)

    def experts(self, spec: MoeSpec, parts: MixtureParts, *, role: Role | None = None) -> TorchExperts:
        """One pair of matrices per expert."""
        stacked, before = None, self.n_values.copy()
        if self._stacks_experts:
            stacked = (
                self._all_of([one.gate_up for one in parts.experts]),
                self._all_of([one.down for one in parts.experts]),
            )
            gate_up, down = _parts(stacked[0], spec.activation, role), _parts(stacked[1], None, role)
        else:
            gate_up = tuple(self._stacked(expert.gate_up, spec.activation, role=role) for expert in parts.experts)
            down = tuple(self._stacked(expert.down, role=role) for expert in parts.experts)
        self.n_expert_values += self.n_values - before
        for e, expert in enumerate(parts.experts):
            self.sites.note_expert(e, (expert.gate_up, gate_up[e]), (expert.down, down[e]))
        few = (parts.choice_bias, parts.scales, parts.behind)
        bias, scale, last = (None if one is None else self._vector(one) for one in few)
        ids = None if parts.table is None else parts.table.read().to(device=self._device, dtype=torch.long)
        return TorchExperts(spec, self.router(parts.router), bias, scale, gate_up, down, stacked, ids, last)

    def head(self, tensor: WeightTensor, *, bias: WeightTensor | None = None, role: Role | None = None) -> TorchLinear:
        """[V, D]."""
        weight = self._weight((tensor,))
        self.head_format = _format_of(weight)
        linear = TorchLinear(weight, None if bias is None else self._place(bias.read()), role=role)
        self.sites.note_head(tensor, linear)
        return linear

    def _stacked(
        self, parts: LinearParts, activation: Activation | None = None, *, role: Role | None = None
    ) -> TorchLinear:
        weight = self._weight(parts.weights, is_gate=activation is not None)
        if role is not None and role.layer is not None:
            for piece in weight.pieces if isinstance(weight, JoinedWeight) else (weight,):
                self.n_values[_format_of(piece)] += len(piece) * parts.n_inputs
        return TorchLinear(weight, self._stack(parts.biases) if parts.biases else None, activation, role)

    def _weight(self, tensors: tuple[WeightTensor, ...], *, is_gate: bool = False) -> Weight:
        """The tensors behind one another: in codes, each run of one format by itself, unless a gate has several."""
        runs: list[tuple[DeviceFormat | None, list[WeightTensor]]] = []
        for tensor in tensors:
            form = self._form(tensor)
            if runs and runs[-1][0] == form:
                runs[-1][1].append(tensor)
            else:
                runs.append((form, [tensor]))
        if is_gate and len(runs) > 1:
            self.lost["gate and up lie in several formats"] += sum(len(run) for form, run in runs if form is not None)
            runs = [(None, list(tensors))]
        pieces = tuple(self._stack(tuple(run)) if form is None else self._coded(run) for form, run in runs)
        return pieces[0] if len(pieces) == 1 else JoinedWeight(pieces)

    def _form(self, tensor: WeightTensor) -> DeviceFormat | None:
        """What holds its codes, if it has any that are to stay."""
        kept = getattr(tensor, "kept", None) if self._keeps_codes else None
        if kept is None:
            return None
        form = DeviceFormat.of(kept)
        if tensor.order is not None:
            self.lost["inputs in an order of their own would be summed in it"] += 1
            return None
        if form is None:
            self.lost[f"no kernel for {kept.name}"] += 1
        return form

    def _coded(self, tensors: Sequence[WeightTensor]) -> CodedWeight:
        coded = joined([self._codes_of(tensor) for tensor in tensors])
        self.weight_bytes += coded.nbytes
        return coded

    def _codes_of(self, tensor: WeightTensor) -> CodedWeight:
        assert tensor.kept is not None, tensor.name
        return on_device(tensor.codes(), tensor.kept, self._device)

    def _all_of(self, several: list[LinearParts]) -> Stacked:
        """W [E, N, K] and b [E, N]; no second copy of a matrix stands beside it."""
        e, n, k = len(several), several[0].n_outputs, several[0].n_inputs
        forms = {self._form(tensor) for parts in several for tensor in parts.weights}
        weight: torch.Tensor | CodedWeight
        if len(forms) == 1 and None not in forms:
            weight = self._all_coded(several)
        else:
            if forms != {None}:
                self.lost["experts lie in several formats"] += sum(len(parts.weights) for parts in several)
            weight = torch.empty((e, n, k), dtype=self._dtype, device=self._device)
            for i, parts in enumerate(several):
                _fill(weight[i], parts.weights)
        bias = torch.empty((e, n), dtype=self._dtype, device=self._device) if several[0].biases else None
        for i, parts in enumerate(several):
            if bias is not None:
                _fill(bias[i], parts.biases)
        self.n_values[_format_of(weight)] += e * n * k
        self.weight_bytes += weight.nbytes + (0 if bias is None else bias.nbytes)
        return weight, bias

    def _all_coded(self, several: list[LinearParts]) -> CodedWeight:
        """[E, N, K]."""
        stack = None
        for i, parts in enumerate(several):
            one = joined([self._codes_of(tensor) for tensor in parts.weights])
            stack = stack or empty_stack(one, len(several))
            for target, values in zip(stack[i].tensors, one.tensors, strict=True):
                target.copy_(values)
        assert stack is not None, "a mixture has experts"
        return stack

    def _vector(self, tensor: WeightTensor, offset: float = 0.0) -> torch.Tensor:
        vector = tensor.read().to(device=self._device, dtype=torch.float32) + offset
        self.weight_bytes += vector.nbytes
        return vector

    def _stack(self, tensors: tuple[WeightTensor, ...]) -> torch.Tensor:
        if len(tensors) == 1:
            return self._place(tensors[0].read())
        shape = (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])
        stacked = torch.empty(shape, dtype=self._dtype, device=self._device)
        _fill(stacked, tensors)
        self.weight_bytes += stacked.nbytes
        return stacked

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        placed = tensor.to(device=self._device, dtype=self._dtype)
        self.weight_bytes += placed.nbytes
        return placed


def _fill(target: torch.Tensor, tensors: tuple[WeightTensor, ...]) -> None:
    row = 0
    for tensor in tensors:
        target[row : row + tensor.shape[0]] = tensor.read()
        row += tensor.shape[0]


def _format_of(weight: Weight) -> str:
    return weight.format.name if isinstance(weight, CodedWeight) else ""


def _parts(stacked: Stacked, activation: Activation | None, role: Role | None) -> tuple[TorchLinear, ...]:
    weight, bias = stacked
    biases = [None] * len(weight) if bias is None else list(bias)
    return tuple(TorchLinear(weight[e], b, activation, role) for e, b in enumerate(biases))
