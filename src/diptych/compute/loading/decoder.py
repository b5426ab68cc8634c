"""A model's tensors as weight handles for the walk in `decoder`: found by the family's names, in the forms that ops take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.compute.loading.aside import AsideLoader
from diptych.compute.loading.attention import HeadsLoader
from diptych.compute.loading.balance import balance_norm
from diptych.compute.loading.gated import load_gated, load_gated_end, load_ids, load_ngrams
from diptych.compute.loading.layer_tensors import GatedNormParts, LayerTensors
from diptych.compute.loading.mlps import MlpsLoader
from diptych.compute.loading.naming import (
    embedding_norm,
    family_named,
    final_norm,
    head_name,
    norm_parts,
    prefix_of,
    table_name,
)
from diptych.compute.loading.streams import (
    load_branch,
    load_connection,
    load_connections,
    load_embedding,
    load_ends,
    load_inputs,
    load_mixing,
    own_gate,
)
from diptych.compute.loading.views import (
    RaisedTensor,
    ResidualTensor,
    ScaledTensor,
    SinesTensor,
)
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
)
from diptych.compute.ops.contract_parts import Split
from diptych.compute.walk.layer_weights import DecoderWeights, LayerWeights
from diptych.compute.walk.part_weights import NormGate, WeighedSums
from diptych.models.gates import Activation
from diptych.models.mlp import MlpSpec, MoeSpec
from diptych.models.spec import ModelSpec, Norms
from diptych.models.streams import GatedSpec, HyperSpec


def load_decoder(
    source: Source, loader: Loader[Table, Vector, Linear, Heads, Experts], spec: ModelSpec
) -> DecoderWeights[Table, Vector, Linear, Heads, Experts]:
    """Every weight of the model as handles, piece by piece, so that a loader may report progress and free as it goes."""
    prefix, family = prefix_of(source, spec), family_named(spec)
    names = family.names
    table = source.tensor(table_name(source, spec), spec.n_embeddings, spec.row_width)
    role = Role(sites=(("head", spec.vocab_size),), split=Split.OUTPUTS)
    norm = final_norm(source, spec)
    output = table if spec.is_tied else source.tensor(head_name(source, spec), spec.vocab_size, spec.hidden)
    bias = source.tensor(f"{names.head}.bias", spec.vocab_size) if spec.has_head_bias and spec.has_head else None
    reads_norm = not (spec.transforms_head or family.is_encoder)
    if loader.is_balancing and norm is not None and norm.weight.stored and reads_norm:
        norm, (parts,) = balance_norm(norm, (LinearParts(weights=(output,)),), offset=spec.end_offset)
        (output,) = parts.weights
    # the largest tensor comes first, while little else is held beside its pages in the file
    head = None if family.is_encoder else loader.head(output, bias=bias, role=role)
    embedding = loader.table(table, head=head if spec.is_tied else None)
    beside = _tables_beside(source, loader, spec, prefix)
    first = _first(source, loader, spec, prefix)
    inputs, (begin, end) = load_inputs(source, loader, spec, prefix), load_ends(source, loader, spec, prefix)
    layers = _layers(source, loader, spec, prefix)
    return DecoderWeights(
        embedding=embedding,
        positions=beside.get("positions"),
        types=beside.get("types"),
        layers=layers,
        norm=None if norm is None else loader.norm(norm, offset=spec.end_offset),
        head=head,
        inputs=inputs,
        begin=begin,
        end=end,
        connection=load_connection(source, loader, spec, prefix),
        embedding_norm=None if first is None else first[0],
        words=None if first is None else first[1],
        gated=load_gated_end(source, loader, spec, prefix),
        transform=_transform(source, loader, spec),
        ids=None if spec.ngrams is None else load_ids(loader, spec, spec.ngrams),
    )


def _tables_beside(
    source: Source, loader: Loader[Table, Vector, Linear, Heads, Experts], spec: ModelSpec, prefix: str
) -> dict[str, Table]:
    """Positions and types, rows of which are added to those of the embedding, in models that have them."""
    names, width, n = family_named(spec).names, spec.row_width, spec.n_position_embeddings
    found: dict[str, Table] = {}
    if n:
        is_made = spec.computes_positions
        rows = SinesTensor(n, width) if is_made else source.tensor(f"{prefix}{names.positions}.weight", n, width)
        found["positions"] = loader.table(rows, head=None)
    if spec.n_token_types:
        rows = source.tensor(f"{prefix}{names.types}.weight", spec.n_token_types, width)
        if spec.n_task_types:
            rows = RaisedTensor(rows, source.tensor(f"{prefix}{names.tasks}.weight", spec.n_task_types, width))
        found["types"] = loader.table(rows, head=None)
    return found


def _first(
    source: Source, loader: Loader[Table, Vector, Linear, Heads, Experts], spec: ModelSpec, prefix: str
) -> tuple[Vector, Linear | None] | None:
    """The norm before the first layer, of models that have one, and what takes its numbers to the stream's width, if any."""
    if not spec.has_embedding_norm:
        return None
    norm = embedding_norm(source, spec)
    if not spec.word_width:
        return loader.norm(norm, is_read=False), None
    name = f"{prefix}{family_named(spec).names.words}"
    parts = LinearParts(
        weights=(source.tensor(f"{name}.weight", spec.hidden, spec.word_width),),
        biases=(source.tensor(f"{name}.bias", spec.hidden),),
    )
    if loader.is_balancing:
        norm, (parts,) = balance_norm(norm, (parts,), offset=0.0)
    role = Role(sites=(("words", spec.hidden),), split=Split.OUTPUTS)
    return loader.norm(norm), loader.linear(parts, role=role)


def _layers(
    source: Source, loader: Loader[Table, Vector, Linear, Heads, Experts], spec: ModelSpec, prefix: str
) -> tuple[LayerWeights[Table, Vector, Linear, Heads, Experts], ...]:
    """One behind the other: some have the weights of one before."""
    made: list[LayerWeights[Table, Vector, Linear, Heads, Experts]] = []
    for i, layer in enumerate(spec.layers):
        if layer.is_aside:
            of = None if layer.shares is None else made[layer.shares]
            made.append(AsideLoader(source, loader, spec, i, prefix).load_layer(of))
        elif layer.shares is not None:  # all but what it keeps of a sequence
            own = LayerLoader(source, loader, spec, i, prefix).heads_alone()
            made.append(replace(made[layer.shares], attention=own))
        else:
            made.append(LayerLoader(source, loader, spec, i, prefix).load())
    return tuple(made)


def _transform(
    source: Source, loader: Loader[Table, Vector, Linear, Heads, Experts], spec: ModelSpec
) -> tuple[Linear, Vector] | None:
    """What stands between the last layer's norm and the head, whole on every rank."""
    names = family_named(spec).names.transform
    if not spec.transforms_head or names is None:
        return None
    dense = LinearParts(weights=(source.tensor(f"{names[0]}.weight", spec.hidden, spec.hidden),))
    norm = loader.norm(norm_parts(source, names[1], spec), offset=spec.norm_offset, is_read=False)
    return loader.gate(dense, Activation.GELU), norm


def scaled_norm(norm: NormParts | None, factor: float) -> NormParts | None:
    """What is read behind it is multiplied by the factor."""
    if norm is None or factor == 1.0:
        return norm
    return replace(norm, weight=ScaledTensor(norm.weight, factor))


class LayerLoader(LayerTensors[Table, Vector, Linear, Heads, Experts]):
    """Loads the tensors of one layer."""

    def load(self) -> LayerWeights[Table, Vector, Linear, Heads, Experts]:
        """All of them: a dense MLP first, a mixture last."""
        mlp = self.parts.mlp
        names, of_mlp = (self.names.norms[self.parts.norms][i : i + 2] for i in (0, 2))
        before, after = (self.norm_tensor(name) for name in names)
        before_mlp, after_mlp = (self.norm_tensor(name, self.mlp_prefix) for name in of_mlp)
        before = self._gated(before, self.prefix, "input_layernorm")
        if isinstance(mlp, MoeSpec):
            before_mlp = self._gated(before_mlp, self.mlp_prefix, "post_attention_layernorm")
        dense, down_norm, of_mixture = None, None, dict[str, Any]()
        is_parallel = self.parts.norms.are_side_by_side
        if isinstance(mlp, MlpSpec):  # where it reads the norm that attention reads, that stays as it is
            before_mlp, dense, down_norm = self._mlps.mlp(mlp, before_mlp)
        # what a branch adds is the norm as it is, and so is a stream that goes on from there
        is_kept = self.parts.norms is Norms.KEPT
        is_shared = is_kept or self.parts.norms is Norms.PARALLEL or self.spec.low_rank > 0
        before, of_attention = self._attention(before, is_shared=is_shared)
        scales = self.parts.scales  # of norms as they lie in the checkpoint, or balanced
        input_norm = self.norm(scaled_norm(before, scales.attention_in), is_read=not is_kept)
        if isinstance(mlp, MoeSpec):
            before_mlp, of_mixture = self._mlps.experts(mlp, before_mlp)
        return LayerWeights(
            **of_attention,
            input_norm=input_norm,
            pre_mlp_norm=self.norm(scaled_norm(before_mlp, scales.mlp_in), is_read=not is_kept),
            input_gate=self._norm_gate(before),
            mlp_gate=self._norm_gate(before_mlp),
            dense=dense,
            down_norm=down_norm,
            inner_eps=self.spec.norm_eps,
            is_parallel=is_parallel,
            is_shared=self.parts.norms is Norms.SHARED,
            is_late=isinstance(mlp, MoeSpec) and mlp.is_late,
            norms_sums=self.parts.norms is Norms.SUMS,
            keeps_norms=is_kept,
            before_attention=scales.before_attention,
            before_mlp=scales.before_mlp,
            attention_scale=scales.attention_out,
            mlp_scale=scales.mlp_out,
            is_gated=mlp is None or mlp.is_gated,
            cutoff=mlp.cutoff if isinstance(mlp, MlpSpec) else None,
            form=None if mlp is None else (mlp if isinstance(mlp, MlpSpec) else mlp.shared).form,
            curve=self._mlps.curve(mlp),
            clip=self.parts.attention.clip,
            branch=load_branch(self.source, self.loader, self.spec, self.prefix),
            scale=self.loader.numbers(self.source.tensor(f"{self.prefix}layer_scalar", 1))[0]
            if self.spec.scales_layers
            else 1.0,
            **of_mixture,
            **self._norms_behind(after, after_mlp),
            **self._streams(),
        )

    def _norms_behind(self, attention: NormParts | None, mlp: NormParts | None) -> dict[str, Any]:
        """The norms behind attention and MLP; where sums are weighed by channel, what is added is weighed by these."""
        temperature, root = self.spec.residual_temperature, self.prefix
        if temperature is None:
            return {
                "post_attention_norm": self.norm(attention, is_read=False),
                "post_mlp_norm": self.norm(mlp, is_read=False),
            }
        names = (f"{root}{name}_residual_gate.gate" for name in ("post_attention", "post_feedforward"))
        gates = [self.source.tensor(name, self.spec.hidden) for name in names]
        added = [self.loader.norm(NormParts(weight=ResidualTensor(one, temperature, is_kept=False))) for one in gates]
        kept = [self.loader.vector(ResidualTensor(one, temperature, is_kept=True)) for one in gates]
        given = self.source.tensor(f"{root}post_feedforward_layernorm.weight", self.spec.hidden)
        given = ScaledTensor(given, 1.0, self.spec.norm_offset)
        sums = WeighedSums(by_attention=kept[0], by_mlp=kept[1], mlp_given=self.loader.vector(given))
        return {"post_attention_norm": added[0], "post_mlp_norm": added[1], "weighed": sums}

    def _gated(self, norm: NormParts | None, root: str, name: str) -> NormParts | None:
        """The norm of that name with what gates it, in models that gate theirs."""
        rank, hidden = self.spec.norm_rank, self.spec.hidden
        if norm is None or not rank:
            return norm
        down = self.linear(f"{root}{name}.", ("W_down",), (rank,), hidden)
        up = self.linear(f"{root}{name}.", ("W_up",), (hidden,), rank)
        return GatedNormParts(weight=norm.weight, bias=norm.bias, is_centred=norm.is_centred, down=down, up=up)

    def _norm_gate(self, norm: NormParts | None) -> NormGate[Linear] | None:
        """What gates a norm, whole on every rank."""
        if not isinstance(norm, GatedNormParts):
            return None
        down, up = self.loader.gate(norm.down, Activation.SILU), self.loader.gate(norm.up, Activation.SIGMOID)
        return NormGate(down=down, up=up)

    def _attention(self, norm: NormParts | None, *, is_shared: bool) -> tuple[NormParts | None, dict[str, Any]]:
        """The norm that attention reads, and of `LayerWeights` what is attention's, if the layer has it."""
        if self.parts.attention.is_absent:
            return norm, {}
        of_heads = self._heads(self.layer)
        pair = self.spec.pair_of(self.layer)
        if self.loader.is_balancing and pair is not None:
            of_heads.beside = self._heads(pair).readers()
        norm, heads = of_heads.load(norm, is_shared=is_shared)
        parts = {"attention": heads.handle, "qkv": heads.qkv, "o": heads.o, "gate": heads.gate}
        named = ("difference", "o_norm", "o_norms", "gates_normed", "has_index")
        return norm, {**parts, **{name: getattr(heads, name) for name in named}}

    def heads_alone(self) -> Heads:
        """What attention keeps of a sequence, of a layer that has the weights of another."""
        first = LayerLoader(self.source, self.loader, self.spec, self.parts.shares or 0, self.of_model)
        return self._heads(self.layer).attention(f"{first.prefix}{self.names.attention}.")

    def _heads(self, layer: int) -> HeadsLoader[Table, Vector, Linear, Heads, Experts]:
        return HeadsLoader(self.source, self.loader, self.spec, layer, self.of_model)

    @property
    def _mlps(self) -> MlpsLoader[Table, Vector, Linear, Heads, Experts]:
        return MlpsLoader(self.source, self.loader, self.spec, self.layer, self.of_model)

    def _streams(self) -> dict[str, Any]:
        """How it mixes streams, and its own embedding."""
        spec, mlp = self.spec, self.parts.mlp
        if isinstance(spec.streams, HyperSpec):
            return {"connections": load_connections(self.source, self.loader, spec, spec.streams, self.prefix)}
        if isinstance(spec.streams, GatedSpec):
            gated = load_gated(self.source, self.loader, spec, spec.streams, self.prefix)
            return {"gated": gated, "ngrams": load_ngrams(self.source, self.loader, spec, self.layer, self.prefix)}
        if spec.layer_inputs is None:
            return {}
        assert mlp is not None
        source, loader = self.source, self.loader
        output, gate = own_gate(source, spec, spec.layer_inputs, self.prefix, is_balancing=loader.is_balancing)
        mixing = None
        if spec.streams is not None:
            mixing = load_mixing(source, loader, spec, spec.streams, output, self.prefix)
        role = self.role(Split.INPUTS, embedding=spec.hidden)
        embedding = load_embedding(source, loader, spec, spec.layer_inputs, gate, mlp, self.prefix, role)
        return {"mixing": mixing, "embedding": embedding}
