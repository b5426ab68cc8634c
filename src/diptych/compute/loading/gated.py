"""Residual streams in one row and embeddings of n-grams as weight handles (Qwen4-Exp)."""

from __future__ import annotations

import math

from diptych.compute.loading.views import ScaledTensor, ShiftingTensor, SpacedTensor
from diptych.compute.loading.weights import Source
from diptych.compute.ops.contract import (
    AttentionSpec,
    Experts,
    Heads,
    Linear,
    LinearParts,
    Loader,
    NormParts,
    RuleParts,
    Table,
    Vector,
    WeightTensor,
)
from diptych.compute.walk.stream_weights import GatedConnection, NgramWeights
from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.models.gates import Activation
from diptych.models.ngrams import NgramSpec
from diptych.models.spec import ModelSpec
from diptych.models.states import StateSpec
from diptych.models.streams import GatedSpec

ATTENTION, MLP, END = "attn_hyper_connection.", "mlp_hyper_connection.", "hyper_connection_mixer."
# what the hash is by, which files have beside the tables
BY = {"factors": "layer_multipliers", "sizes": "ngram_heads_vocab_sizes", "firsts": "ngram_heads_offsets"}


def load_gated(
    source: Source, loader: Loader[Table, Vector, Linear, Heads, Experts], spec: ModelSpec, gated: GatedSpec, root: str
) -> tuple[GatedConnection[Vector, Linear], GatedConnection[Vector, Linear]]:
    """Of the layer whose tensors begin with root: how its attention and its MLP read the streams, and are added to them."""
    attention, mlp = (
        _connection(source, loader, spec, gated, f"{root}{name}", injects=True) for name in (ATTENTION, MLP)
    )
    return attention, mlp


def load_gated_end(
    source: Source, loader: Loader[Table, Vector, Linear, Heads, Experts], spec: ModelSpec, prefix: str
) -> GatedConnection[Vector, Linear] | None:
    """How the head reads the streams, where they lie in one row."""
    if not isinstance(spec.streams, GatedSpec):
        return None
    return _connection(source, loader, spec, spec.streams, f"{prefix}{END}", injects=False)


def _connection(
    source: Source,
    loader: Loader[Table, Vector, Linear, Heads, Experts],
    spec: ModelSpec,
    gated: GatedSpec,
    root: str,
    *,
    injects: bool,
) -> GatedConnection[Vector, Linear]:
    """Whole on every rank, as streams are."""
    n, width = gated.n_streams, gated.n_streams * spec.hidden

    def tensor(name: str, *shape: int) -> WeightTensor:
        return source.tensor(f"{root}{name}.weight", *shape)

    down = ScaledTensor(tensor("input_mix_weight_down", gated.rank, width), 1 / n)
    inject = LinearParts(weights=(tensor("block_inject_weight", n, width),)) if injects else None
    return GatedConnection(
        norm=loader.norm(NormParts(weight=tensor("hc_norm", width)), offset=spec.norm_offset),
        down=loader.gate(LinearParts(weights=(down,)), Activation.SILU),
        up=loader.gate(LinearParts(weights=(tensor("input_mix_weight_up", width, gated.rank),)), Activation.SIGMOID),
        inject=None if inject is None else loader.router(inject),
    )


def load_ngrams(
    source: Source, loader: Loader[Table, Vector, Linear, Heads, Experts], spec: ModelSpec, layer: int, root: str
) -> NgramWeights[Table, Vector, Linear, Heads] | None:
    """Of the layer whose tensors begin with root, if it has any."""
    ngrams = spec.ngrams
    if ngrams is None or layer not in ngrams.layers:
        return None
    place, root = ngrams.layers.index(layer), f"{root}ple."
    width = spec.n_streams * spec.hidden
    _check_hash(source, ngrams, place, f"{root}ple_embedding.")

    def norm(name: str) -> Vector:
        return loader.norm(
            NormParts(weight=source.tensor(f"{root}{name}.weight", width)), offset=spec.norm_offset, is_read=False
        )

    def linear(name: str, n: int) -> Linear:
        return loader.linear(LinearParts(weights=(source.tensor(f"{root}{name}.weight", n, ngrams.width),)))

    taps = SpacedTensor(source.tensor(f"{root}conv1d.weight", width, 1, ngrams.n_taps), ngrams.longest)
    return NgramWeights(
        place=place,
        tables=tuple(_table(loader, one) for one in _tables(source, ngrams, place, f"{root}ple_embedding.")),
        key=linear("key_proj", width),
        value=linear("value_proj", spec.hidden),
        key_norm=norm("norm_key"),
        query_norm=norm("norm_query"),
        taps_norm=norm("norm_conv"),
        taps=_taps(loader, spec, spec.n_layer_states + place, taps),
    )


def load_ids(loader: Loader[Table, Vector, Linear, Heads, Experts], spec: ModelSpec, ngrams: NgramSpec) -> Heads:
    """What hands on the ids of tokens."""
    return _taps(loader, spec, len(spec.states) - 1, ShiftingTensor(ngrams.n_before))


def _taps(
    loader: Loader[Table, Vector, Linear, Heads, Experts], spec: ModelSpec, place: int, taps: WeightTensor
) -> Heads:
    """Of the place-th of all states; each rank has them whole."""
    state: StateSpec = spec.states[place]
    heads = AttentionSpec(
        layer=place,
        n_heads=state.n_value_heads,
        n_kv_heads=state.n_key_heads,
        head_dim=state.value_dim,
        scale=1.0,
        state=state,
        place=place,
        is_whole=True,
    )
    return loader.state_rule(heads, RuleParts(taps=taps))


def _tables(source: Source, ngrams: NgramSpec, place: int, root: str) -> list[WeightTensor]:
    """The table whole, or in parts that are equally long but for the last."""
    rows, name = ngrams.rows(place), f"{root}ngram_embedding"
    if source.has(f"{name}.weight") or ngrams.parts == 1:
        return [source.tensor(f"{name}.weight", rows, ngrams.head_width)]
    each = -(-rows // ngrams.parts)
    return [
        source.tensor(f"{name}.shard_{i}.weight", min(each, rows - i * each), ngrams.head_width)
        for i in range(-(-rows // each))
    ]


def _table(loader: Loader[Table, Vector, Linear, Heads, Experts], tensor: WeightTensor) -> Table:
    """Where it lies in the file. UnsupportedModel for one in codes, which would have to be unpacked whole."""
    if tensor.kept is not None:
        raise UnsupportedModel(
            f"{tensor.name} is quantised ({math.prod(tensor.shape)} values); tables of n-grams are read in 32 and 16 bits only",
            hint="use a checkpoint that leaves them as they were",
        )
    return loader.table(tensor, head=None)


def _check_hash(source: Source, ngrams: NgramSpec, place: int, root: str) -> None:
    """LoadError where a file has n-grams found by other numbers than the config gives."""
    sizes, firsts = zip(*ngrams.heads(place), strict=True)
    wanted = {"factors": ngrams.factors(place), "sizes": sizes, "firsts": firsts}
    for what, name in BY.items():
        found = source.whole_numbers(f"{root}{name}")
        if found is not None and tuple(found) != tuple(wanted[what]):
            raise LoadError(
                f"{root}{name} has other numbers than config.json gives ({found[0]}, not {wanted[what][0]}, is the first)",
                hint="config.json contradicts the weights; they must come from the same model",
            )
