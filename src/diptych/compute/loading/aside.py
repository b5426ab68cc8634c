"""Layers that stand aside as weight handles: a block that several share is loaded once, what each use has of its own."""

from __future__ import annotations

from dataclasses import replace

from diptych.compute.loading.attention import HeadsLoader
from diptych.compute.loading.balance import ScaledTensor
from diptych.compute.ops.contract import Experts, Heads, Linear, LinearParts, NormParts, Table, Vector
from diptych.compute.ops.contract_parts import Split
from diptych.compute.walk.layer_weights import LayerWeights
from diptych.compute.walk.part_weights import AsideWeights
from diptych.models.mlp import MlpSpec


class AsideLoader(HeadsLoader[Table, Vector, Linear, Heads, Experts]):
    """Loads one such layer."""

    def load_layer(
        self, shared: LayerWeights[Table, Vector, Linear, Heads, Experts] | None
    ) -> LayerWeights[Table, Vector, Linear, Heads, Experts]:
        """All of it. shared: the layer whose weights it has, if it has another's."""
        mlp, hidden = self.parts.mlp, self.spec.hidden
        assert isinstance(mlp, MlpSpec)
        first = self.layer if self.parts.shares is None else self.parts.shares
        root = f"{self.of_model}{self.names.layers}.{self.spec.blocks_of(first)[0]}.{self.names.aside}"
        handle = self.attention(f"{root}{self.names.attention}.")
        norm, qkv, own = self._heads(root)
        before_mlp, gate_up, inner = self._inner(root, mlp)
        behind = self.linear(self.prefix, (self.names.behind,), (hidden,), hidden)
        aside = AsideWeights(
            qkv=self._qkv(qkv) if shared is None or shared.aside is None else shared.aside.qkv,
            heads=None
            if own is None
            else (self.loader.linear(own[0]), self.loader.by_head(own[1:], layer=self.layer, divides=True)),
            inner=None
            if inner is None
            else (
                self.loader.linear(inner[0]),
                self.loader.gated(
                    inner[1], mlp.activation, role=self.role(Split.OUTPUTS, gate=mlp.ffn, up=mlp.ffn), is_apart=True
                ),
            ),
            behind=self.loader.linear(behind, role=self.role(Split.INPUTS, behind=hidden)),
        )
        if shared is not None:
            return replace(shared, attention=handle, aside=aside)
        o = self.linear(f"{root}{self.names.attention}.", (self.names.o,), (hidden,), self.parts.attention.width)
        down = self.linear(f"{root}{self.names.mlp[0]}", (self.names.down,), (hidden,), mlp.ffn)
        gates = self.shared_role(Split.OUTPUTS, gate=mlp.ffn, up=mlp.ffn)
        return LayerWeights(
            attention=handle,
            o=self.loader.linear(o, role=self.shared_role(Split.INPUTS, o=hidden)),
            input_norm=self.norm(norm),
            post_attention_norm=None,
            pre_mlp_norm=self.norm(before_mlp),
            post_mlp_norm=None,
            dense=(
                self.loader.gated(gate_up, mlp.activation, role=gates, is_apart=True),
                self.loader.linear(down, role=self.shared_role(Split.INPUTS, down=hidden)),
            ),
            form=mlp.form,
            aside=aside,
        )

    def _qkv(self, parts: LinearParts) -> Linear:
        return self.loader.linear(parts, role=self.shared_role(Split.OUTPUTS, **self._widths))

    def _heads(self, root: str) -> tuple[NormParts, LinearParts, tuple[LinearParts, ...] | None]:
        """The norm of both streams, q, k and v, and of those of the layer's own the first ones together, then each second."""
        attention, before = self.parts.attention, f"{root}{self.names.attention}."
        n_inputs, widths = self.spec.hidden + attention.beside, self._widths
        norm = NormParts(weight=self.source.tensor(f"{root}{self._norm_names[0]}.weight", n_inputs))
        qkv = self.linear(before, self.names.qkv, tuple(widths.values()), n_inputs)
        own = None
        if attention.own_rank:
            names = [f"{before}linear_{one}_adapter_list" for one in widths]
            pairs = [
                self._pair(name, attention.own_rank, n_inputs, n)
                for name, n in zip(names, widths.values(), strict=True)
            ]
            low = LinearParts(weights=tuple(weight for first, _ in pairs for weight in first.weights))
            own = (low, *(second for _, second in pairs))
        if self.loader.is_balancing:
            norm, qkv, low = self._balanced(norm, qkv, None if own is None else own[0])
            own = None if own is None else (low, *own[1:])
        return norm, qkv, own

    def _inner(self, root: str, mlp: MlpSpec) -> tuple[NormParts, LinearParts, tuple[LinearParts, LinearParts] | None]:
        """The norm before the MLP, gate and up, and the two projections that add to these, if there are any."""
        before, hidden = f"{root}{self.names.mlp[0]}", self.spec.hidden
        norm = NormParts(weight=self.source.tensor(f"{root}{self._norm_names[2]}.weight", hidden))
        gate_up = self.linear(before, self.names.gate_up, (mlp.ffn, mlp.ffn), hidden)
        own = None
        if mlp.own_rank:
            own = self._pair(f"{before}gate_up_proj_adapter_list", mlp.own_rank, hidden, 2 * mlp.ffn)
        if self.loader.is_balancing:
            norm, gate_up, low = self._balanced(norm, gate_up, None if own is None else own[0])
            own = None if own is None else (low, own[1])
        return norm, gate_up, own

    def _balanced(
        self, norm: NormParts, readers: LinearParts, low: LinearParts | None
    ) -> tuple[NormParts, LinearParts, LinearParts]:
        """By what all uses have in common, so that all come to the same norm; what reads it besides follows."""
        both, (readers,) = self.balance_norm(norm, (readers,))
        assert both is not None
        (scaled, *_) = readers.weights
        assert isinstance(scaled, ScaledTensor)
        weights = () if low is None else tuple(ScaledTensor(one, columns=scaled.columns) for one in low.weights)
        return both, readers, LinearParts(weights=weights)

    def _pair(self, name: str, rank: int, n_inputs: int, n_outputs: int) -> tuple[LinearParts, LinearParts]:
        """Two projections of this use, which the block has by the number of it."""
        use = [i for i, layer in enumerate(self.spec.layers) if layer.is_aside].index(self.layer)
        shapes = ((rank, n_inputs), (n_outputs, rank))
        first, second = (
            LinearParts(weights=(self.source.tensor(f"{name}.{use}.{i}.weight", *shape),))
            for i, shape in enumerate(shapes)
        )
        return first, second

    @property
    def _norm_names(self) -> tuple[str | None, ...]:
        return self.names.norms[self.parts.norms]
