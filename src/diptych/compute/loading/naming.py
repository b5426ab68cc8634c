"""How the tensors at the ends of a model are called in its checkpoint: the embedding, the final norm, the output projection."""

from __future__ import annotations

from diptych.compute.loading.views import OnesTensor
from diptych.compute.loading.weights import Source
from diptych.compute.ops.contract import NormParts
from diptych.models.families.family import Family
from diptych.models.families.table import AROUND_WRAPPED, BY_MODEL_TYPE, WRAPPED_PREFIXES
from diptych.models.spec import ModelSpec
from diptych.models.streams import GatedSpec


def family_named(spec: ModelSpec) -> Family:
    """The entry of the table that the spec was read by."""
    return BY_MODEL_TYPE[spec.family]


def prefix_of(source: Source, spec: ModelSpec) -> str:
    """Where the tensors of the language model begin."""
    family = family_named(spec)
    around: tuple[str, ...] = ()
    if spec.is_wrapped:
        around = (*(f"{before}{own}" for before in AROUND_WRAPPED for own in family.prefixes), *WRAPPED_PREFIXES)
    known = (*family.prefixes, *around, "")  # "": a decoder that was saved without the model around it
    return next((p for p in known for name in _embeddings(family) if source.has(f"{p}{name}")), family.prefixes[0])


def _embeddings(family: Family) -> tuple[str, ...]:
    """What the embedding is called, and what some files call it."""
    name, ending = family.names.embedding, family.names.embedding_ending
    names = (name, family.names.others[name]) if name in family.names.others else (name,)
    return tuple(f"{one}{ending}" for one in names)


def table_name(source: Source, spec: ModelSpec) -> str:
    """The embedding."""
    names = [f"{prefix_of(source, spec)}{name}" for name in _embeddings(family_named(spec))]
    return next((name for name in names if source.has(name)), names[0])


def head_name(source: Source, spec: ModelSpec) -> str:
    """Where the output projection lies: beside the language model of a multimodal checkpoint, around it, or at the top."""
    name = f"{family_named(spec).names.head}.weight"
    parts = prefix_of(source, spec).split(".")[:-1]
    around = (".".join((*parts[:depth], name)) for depth in range(len(parts), -1, -1))
    return next((one for one in around if source.has(one)), name)


def norm_parts(source: Source, name: str, spec: ModelSpec, width: int | None = None) -> NormParts:
    """A norm over so many numbers; None: the residual width."""
    width = width or spec.hidden
    is_old = spec.has_norm_weight and not source.has(f"{name}.weight") and source.has(f"{name}.gamma")  # of TensorFlow
    of_weight, of_bias = ("gamma", "beta") if is_old else ("weight", "bias")
    weight = source.tensor(f"{name}.{of_weight}", width) if spec.has_norm_weight else OnesTensor(width)
    bias = source.tensor(f"{name}.{of_bias}", width) if spec.has_norm_bias else None
    return NormParts(weight=weight, bias=bias, is_centred=spec.centres_norms)


def embedding_norm(source: Source, spec: ModelSpec) -> NormParts:
    """The norm before the first layer, of a model that has one."""
    if not spec.has_embedding_norm_weight:
        return NormParts(weight=OnesTensor(spec.hidden))
    name = f"{prefix_of(source, spec)}{family_named(spec).names.embedding_norm}"
    return norm_parts(source, name, spec, spec.row_width)


def final_norm(source: Source, spec: ModelSpec) -> NormParts | None:
    """The norm behind the last layer; None where what joins streams norms them, or layers norm what they leave."""
    if isinstance(spec.streams, GatedSpec) or not spec.has_final_norm:
        return None
    return norm_parts(source, f"{prefix_of(source, spec)}{family_named(spec).names.final_norm}", spec)
