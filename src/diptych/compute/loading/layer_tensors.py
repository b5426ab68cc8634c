"""What is common to all that loads a layer: where its tensors lie, projections, norms, and how they are balanced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic

from diptych.compute.loading.balance import balance_norm
from diptych.compute.loading.naming import family_named, norm_parts
from diptych.compute.loading.views import TransposedTensor
from diptych.compute.loading.weights import Source
from diptych.compute.ops.contract import (
    Experts,
    Heads,
    Linear,
    LinearParts,
    Loader,
    NormParts,
    Role,
    Table,
    Vector,
    WeightTensor,
)
from diptych.compute.ops.contract_parts import Split
from diptych.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedNormParts(NormParts):
    """A norm times a sigmoid of two projections of it: down [r, D], and up [D, r] of what an activation makes of that."""

    down: LinearParts
    up: LinearParts


class LayerTensors(Generic[Table, Vector, Linear, Heads, Experts]):
    """The tensors of one layer of a source, for a loader. prefix: where the model's begin; its own `prefix` is where the
    layer's do, and `mlp_prefix` where those of its MLP do.
    """

    def __init__(
        self,
        source: Source,
        loader: Loader[Table, Vector, Linear, Heads, Experts],
        spec: ModelSpec,
        layer: int,
        prefix: str,
    ) -> None:
        self.names = family_named(spec).names.of_half(spec.half_of(layer))
        self.source = source
        self.loader = loader
        self.spec = spec
        self.layer = layer
        self.parts = spec.layers[layer]
        self.of_model = prefix
        attention, mlp = spec.blocks_of(layer)
        self.prefix = f"{prefix}{self.names.layers}.{attention}."
        self.mlp_prefix = f"{prefix}{self.names.layers}.{mlp}."

    def balance_norm(
        self, norm: NormParts | None, readers: tuple[LinearParts, ...]
    ) -> tuple[NormParts | None, tuple[LinearParts, ...]]:
        """Nothing to share where projections read the residual stream itself, or a norm without a weight.

        What gates a norm reads it, too: while that is what it was, what the others read is divided as the norm is.
        """
        if norm is None or not norm.weight.stored:
            return norm, readers
        own = (norm.down,) if isinstance(norm, GatedNormParts) else ()
        norm, scaled = balance_norm(norm, (*own, *readers), offset=self.spec.norm_offset)
        if isinstance(norm, GatedNormParts):
            norm = replace(norm, down=scaled[0])
        return norm, scaled[len(own) :]

    def role(self, split: Split, **outputs: int) -> Role:
        """Of a projection of the layer with these outputs, site by site."""
        return Role(sites=tuple(outputs.items()), split=split, layer=self.layer)

    def shared_role(self, split: Split, **outputs: int) -> Role:
        """Likewise, of one that other layers may have, too."""
        return replace(self.role(split, **outputs), is_shared=True)

    def linear(
        self, root: str, names: tuple[str, ...], rows: tuple[int, ...], n_inputs: int, *, has_bias: bool = False
    ) -> LinearParts:
        """Projections stacked along their outputs; one name for all of them: stacked in the file already."""
        rows = rows if len(names) == len(rows) else (sum(rows),)
        named = [(self.spelt(root, name, ".weight"), n) for name, n in zip(names, rows, strict=True)]
        weights: tuple[WeightTensor, ...]
        if self.names.transposes and not self.source.is_plain:
            weights = tuple(
                TransposedTensor(self.source.tensor(f"{root}{name}.weight", n_inputs, n)) for name, n in named
            )
        else:
            weights = tuple(self.source.tensor(f"{root}{name}.weight", n, n_inputs) for name, n in named)
        biases = tuple(self.source.tensor(f"{root}{name}.bias", n) for name, n in named) if has_bias else ()
        return LinearParts(weights=weights, biases=biases)

    def spelt(self, root: str, name: str, ending: str = "") -> str:
        """What this file calls it: as the family does, by its other name, or by that of what adapters beside it adapt."""
        other, base = self.names.others.get(name), self.names.base
        if other is not None and self.source.has(f"{root}{other}{ending}"):
            return other
        if base is not None and self.source.has(f"{root}{name}.{base}{ending}"):
            return f"{name}.{base}"
        return name

    def mlp_names(self, root: str, *, is_gated: bool = True) -> tuple[tuple[str, ...], str]:
        """Of gate and up, and of down; where a converter has taken gate and up apart, or stacked them, as it calls them."""
        apart = "gate_proj", "up_proj"
        if is_gated and self.source.is_plain and not self.source.has(f"{root}{self.names.down}.weight"):
            return apart, "down_proj"
        own, stacked = self.names.gate_up, "gate_up_proj"
        if not is_gated and own[0] in self.names.others:
            own = (self.names.others[own[0]],)
        if is_gated and not self.source.has(f"{root}{own[0]}.weight") and self.source.has(f"{root}{stacked}.weight"):
            own = (stacked,)
        elif is_gated and own == (stacked,) and self.are_apart(root, stacked, apart[0]):
            own = apart
        return own, self.names.down

    def are_apart(self, root: str, stacked: str, first: str) -> bool:
        """Whether a file has not one projection but those that it is made of (ExLlamaV3's of Phi-3)."""
        return not self.source.has(f"{root}{stacked}.weight") and self.source.has(f"{root}{first}.weight")

    def norm_tensor(self, name: str | None, prefix: str | None = None) -> NormParts | None:
        """A norm over the residual width. prefix: where it lies, unless with the layer's attention."""
        if name is None:
            return None
        root = prefix or self.prefix
        return norm_parts(self.source, f"{root}{self.spelt(root, name, '.weight')}", self.spec)

    def inner_norm(self, name: str, width: int) -> NormParts | None:
        """What o or down reads, of models that norm before those."""
        return NormParts(weight=self.source.tensor(f"{name}.weight", width)) if self.spec.has_inner_norms else None

    def norm(self, parts: NormParts | None, *, is_read: bool = True) -> Vector | None:
        """A norm's handle; None where there is none."""
        return None if parts is None else self.loader.norm(parts, offset=self.spec.norm_offset, is_read=is_read)
