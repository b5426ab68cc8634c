"""Heads that draft, as walks in the op vocabulary: the weights of Medusa and EAGLE loaded, their forward on any backend.

A head is built like a model (`runner.build`) and run like one; it reads rows that it is given (states of the model it drafts
for) beside token ids. `models.heads` says what the files hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from diptych.compute.loading.attention import HeadsLoader
from diptych.compute.loading.mlps import MlpsLoader
from diptych.compute.loading.naming import final_norm, head_name, table_name
from diptych.compute.loading.weights import Checkpoint, FileTensor, Source
from diptych.compute.model import Blueprint
from diptych.compute.ops.contract import LinearParts, Loader, NormParts, Ops, WeightTensor
from diptych.compute.walk.decoder import run_layer
from diptych.compute.walk.layer_weights import LayerWeights
from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.models.gates import Activation
from diptych.models.heads import EagleSpec, MedusaSpec
from diptych.models.mlp import MlpSpec
from diptych.models.spec import ModelSpec
from diptych.models.streams import GatedSpec

# A head is walked on every backend, with whatever kinds of handle that has.
Handle = Any
AnyLoader = Loader[Any, Any, Any, Any, Any]
AnyOps = Ops[Any, Any, Any, Any, Any, Any, Any]
# our name -> what it is called in files, the first that is there
EAGLE_NAMES: Mapping[str, tuple[str, ...]] = {
    "fc.": ("fc.", "fusion_fc.", "model.fc."),
    "layers.0.": ("layers.0.", "midlayer.", "model.layers.0.", "transformer."),
    "norm.": ("norm.", "model.norm."),
    "lm_head.": ("lm_head.",),
    "embed_tokens.": ("embed_tokens.", "model.embed_tokens."),
    "embedding_norm.": ("embedding_layernorm.",),
    "head_norm.": ("pre_lm_head_layernorm.",),
}


class HeadSource(Checkpoint):
    """The tensors of a head by our names, whatever the layout calls them. Not balanced: small, and read by few."""

    is_balanceable = False

    def has(self, name: str) -> bool:
        """Whether it is there by any of its names."""
        return self._name(name) is not None

    def tensor(self, name: str, *shape: int) -> FileTensor:
        """As `Checkpoint.tensor`."""
        return super().tensor(self._name(name) or name, *shape)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """As `Checkpoint.shape_of`."""
        return super().shape_of(self._name(name) or name)

    def _name(self, name: str) -> str | None:
        for ours, theirs in EAGLE_NAMES.items():
            if name.startswith(ours):
                return next((n for n in (one + name[len(ours) :] for one in theirs) if n in self._file_of), None)
        return name if name in self._file_of else None

    def integers(self, name: str, length: int) -> torch.Tensor:
        """A table of whole numbers, such as d2t; int64."""
        if name not in self._file_of:
            raise LoadError(f"tensor {name} is missing from {self.directory}")
        values = self._files[self._file_of[name]].get_tensor(name)
        if values.shape != (length,) or values.dtype not in (torch.int64, torch.int32):
            raise LoadError(
                f"tensor {name} in {self.directory} is {values.dtype} of shape {list(values.shape)}; "
                f"whole numbers of shape {[length]} are expected"
            )
        return values.to(torch.int64)


class TargetTensors:
    """What a head shares with the model that it drafts for: its embedding, output projection and last norm."""

    def __init__(self, source: Source, spec: ModelSpec) -> None:
        """UnsupportedModel for one whose layers have no state of one width, and no norm behind them."""
        if spec.transforms_head or not spec.has_final_norm:
            raise UnsupportedModel(
                f"{spec.name} has more or less than a norm before its output projection; a head that drafts reads one",
                hint="use a draft model, or a drafter that reads tokens alone",
            )
        if isinstance(spec.streams, GatedSpec):
            raise UnsupportedModel(
                f"{spec.name} has {spec.n_streams} residual streams in one row; a head that drafts reads one",
                hint="use a draft model, or a drafter that reads tokens alone",
            )
        self._source = source
        self._spec = spec

    def embedding(self) -> WeightTensor:
        """[V, D], behind them rows that no text needs, if any."""
        return self._source.tensor(table_name(self._source, self._spec), self._spec.n_embeddings, self._spec.hidden)

    def head(self) -> WeightTensor:
        """[V, D], the embedding where it is tied to that."""
        if self._spec.is_tied:
            return self.embedding()
        return self._source.tensor(head_name(self._source, self._spec), self._spec.vocab_size, self._spec.hidden)

    def norm(self) -> torch.Tensor:
        """[D] fp32, its offset added."""
        norm = final_norm(self._source, self._spec)
        assert norm is not None
        values = norm.weight.read()
        return values.to(torch.float32) + self._spec.end_offset


class Columns(WeightTensor):
    """Inputs [begin, end) of a projection."""

    random_seed: int | None = None

    def __init__(self, tensor: WeightTensor, begin: int, end: int) -> None:
        self.name = f"{tensor.name}[:, {begin}:{end}]"
        self.shape: tuple[int, ...] = (tensor.shape[0], end - begin)
        self.dtype = tensor.dtype
        self._tensor, self._begin, self._end = tensor, begin, end

    def read(self) -> torch.Tensor:
        """A copy, as rows are packed that lie one behind the other."""
        return self._tensor.read()[:, self._begin : self._end].contiguous()


class Constant(WeightTensor):
    """A tensor that is in no file."""

    random_seed: int | None = None

    def __init__(self, name: str, values: torch.Tensor) -> None:
        self.name = name
        self.shape: tuple[int, ...] = tuple(values.shape)
        self.dtype = values.dtype
        self._values = values

    def read(self) -> torch.Tensor:
        """The values."""
        return self._values


def _split(parts: LinearParts, widths: tuple[int, int]) -> tuple[LinearParts, LinearParts]:
    """W [a; b] as two projections whose sum it is; the bias goes with the first."""
    first, second = widths
    return (
        LinearParts(weights=tuple(Columns(part, 0, first) for part in parts.weights), biases=parts.biases),
        LinearParts(weights=tuple(Columns(part, first, first + second) for part in parts.weights)),
    )


# ---- Medusa ----


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaWeights:
    """blocks[i]: head i's residual blocks; heads[i]: its output projection."""

    blocks: tuple[tuple[Handle, ...], ...]
    heads: tuple[Handle, ...]

    @property
    def head(self) -> Handle:
        """The first, for its format."""
        return self.heads[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaBlueprint(Blueprint):
    """Given normed states [T, D], tap i hands out head i's logits [T, V]: blocks h + silu(W h + b), then a projection."""

    source: HeadSource
    medusa: MedusaSpec
    target: TargetTensors

    def _load(self, loader: AnyLoader) -> MedusaWeights:  # type: ignore[override]
        """Every tensor of the heads."""
        medusa, source = self.medusa, self.source
        shared = None if medusa.has_own_head else loader.linear(LinearParts(weights=(self.target.head(),)))
        blocks, heads = [], []
        for i in range(medusa.n_heads):
            named = [_first(source, f"{i}.{j}.linear.", f"blocks.{i}.layers.{j}.") for j in range(medusa.n_blocks)]
            blocks.append(tuple(self._block(loader, name) for name in named))
            if shared is None:
                name = _first(source, f"{i}.{medusa.n_blocks}.", f"lm_heads.{i}.")
                tensor = source.tensor(f"{name}weight", medusa.vocab_size, medusa.hidden)
                heads.append(loader.linear(LinearParts(weights=(tensor,))))
        source.finish(lambda name: name in ("lm_head.weight", "token_map"))
        return MedusaWeights(blocks=tuple(blocks), heads=tuple(heads) or (shared,) * medusa.n_heads)

    def _block(self, loader: AnyLoader, name: str) -> Handle:
        """silu(W h + b) as a gate whose other half is 1."""
        width = self.medusa.hidden
        weight = self.source.tensor(f"{name}weight", width, width)
        bias = self.source.tensor(f"{name}bias", width)
        ones = Constant(f"{name}ones", torch.ones(width, dtype=bias.dtype))
        zeros = Constant(f"{name}zeros", torch.zeros(width, width, dtype=weight.dtype))
        return loader.gated(LinearParts(weights=(weight, zeros), biases=(bias, ones)), Activation.SILU)

    def forward(self, ops: AnyOps, weights: MedusaWeights) -> None:  # type: ignore[override]
        """All heads."""
        for i, (blocks, head) in enumerate(zip(weights.blocks, weights.heads, strict=True)):
            x = ops.input(self.medusa.hidden)
            for block in blocks:
                x = ops.add(x, ops.linear_gate(x, block))
            ops.tap(ops.linear(x, head), i)


def _first(source: HeadSource, *prefixes: str) -> str:
    return next((p for p in prefixes if source.has(f"{p}weight")), prefixes[0])


# ---- EAGLE ----


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleWeights:
    """EAGLE-1: `fuse` are fc's halves (embedding, state), the layer is whole. EAGLE-3: `fuse` are the halves of q, k and v."""

    embedding: Handle
    fuse: tuple[Handle, Handle]
    layer: LayerWeights
    head: Handle
    input_norm: Handle | None = None  # of the embedding
    state_norm: Handle | None = None
    norm: Handle | None = None  # before the head


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleBlueprint(Blueprint):
    """Given states [T, D] and the tokens behind them, logits of what follows; tap 0 hands out the layer's own states."""

    source: HeadSource
    eagle: EagleSpec
    target: TargetTensors

    def _load(self, loader: AnyLoader) -> EagleWeights:  # type: ignore[override]
        """Every tensor of the head, and the model's where it has none of its own."""
        spec, source = self.spec, self.source
        own_table, own_head = source.has("embed_tokens.weight"), source.has("lm_head.weight")
        words = source.tensor("embed_tokens.weight", self.eagle.n_words, spec.hidden) if own_table else None
        table: WeightTensor = words or self.target.embedding()
        output: WeightTensor = (
            source.tensor("lm_head.weight", spec.vocab_size, spec.hidden) if own_head else self.target.head()
        )
        head = loader.head(output)
        layer = MlpsLoader(source, loader, spec, 0, "")
        fuse, attention, norms = (self._first if self.eagle.version == 1 else self._third)(loader, layer)
        mlp = spec.layers[0].mlp
        assert isinstance(mlp, MlpSpec)
        pre_mlp, dense, _ = layer.mlp(mlp, layer.norm_tensor("post_attention_layernorm"))
        source.finish(lambda name: name in ("d2t", "t2d") or "rotary" in name)
        return EagleWeights(
            embedding=loader.table(table, head=head if table.name == output.name and not own_head else None),
            fuse=fuse,
            layer=LayerWeights(
                **attention,
                dense=dense,
                experts=None,
                pre_mlp_norm=layer.norm(pre_mlp),
                input_norm=None,
                post_attention_norm=None,
                post_mlp_norm=None,
            ),
            head=head,
            **norms,
        )

    def _first(
        self, loader: AnyLoader, layer: MlpsLoader[Any, Any, Any, Any, Any]
    ) -> tuple[tuple[Handle, Handle], dict[str, Any], dict[str, Any]]:
        """EAGLE-1: fc over (embedding, state); a layer that reads the stream itself."""
        width, source = self.spec.hidden, self.source
        bias = (source.tensor("fc.bias", width),) if source.has("fc.bias") else ()
        fc = LinearParts(weights=(source.tensor("fc.weight", width, 2 * width),), biases=bias)
        halves = _split(fc, (width, width))
        norms = {
            field: layer.norm(NormParts(weight=source.tensor(f"{name}.weight", width)))
            for field, name in (("input_norm", "embedding_norm"), ("norm", "head_norm"))
            if source.has(f"{name}.weight")
        }
        _, heads = HeadsLoader(source, loader, self.spec, 0, "").load(None)
        attention = {"attention": heads.handle, "qkv": heads.qkv, "o": heads.o}
        return (loader.linear(halves[0]), loader.linear(halves[1])), attention, norms

    def _third(
        self, loader: AnyLoader, layer: MlpsLoader[Any, Any, Any, Any, Any]
    ) -> tuple[tuple[Handle, Handle], dict[str, Any], dict[str, Any]]:
        """EAGLE-3: q, k and v read (embedding, state), each normed; `fc` is a walk of its own."""
        width, source = self.spec.hidden, self.source
        attention = self.spec.layers[0].attention
        q, kv = attention.n_heads * attention.head_dim, attention.n_kv_heads * attention.head_dim
        root = "layers.0.self_attn."
        qkv = layer.linear(
            root, ("q_proj", "k_proj", "v_proj"), (q, kv, kv), 2 * width, has_bias=attention.has_qkv_bias
        )
        o = layer.linear(root, ("o_proj",), (width,), q, has_bias=attention.has_o_bias)
        halves = _split(qkv, (width, width))
        for name in ("fc.weight", *(("fc.bias",) if source.has("fc.bias") else ())):
            source.tensor(name, *source.shape_of(name))  # FusionBlueprint reads it
        norms = {
            "input_norm": layer.norm(layer.norm_tensor("input_layernorm")),
            "norm": layer.norm(NormParts(weight=source.tensor("norm.weight", width))),
        }
        if self.eagle.norms_residual:  # the drafter norms what it gives
            source.tensor("layers.0.hidden_norm.weight", width)
        else:
            norms["state_norm"] = layer.norm(layer.norm_tensor("hidden_norm"))
        heads = HeadsLoader(source, loader, self.spec, 0, "").attention(root)
        attended = {"attention": heads, "qkv": None, "o": loader.linear(o)}
        return (loader.linear(halves[0]), loader.linear(halves[1])), attended, norms

    def forward(self, ops: AnyOps, weights: EagleWeights) -> Handle:  # type: ignore[override]
        """Logits [R, V] of the drafts' vocabulary."""
        spec = self.spec
        e = ops.embed(weights.embedding, scale=spec.embed_scale)
        x = ops.input(spec.hidden)
        words = e if weights.input_norm is None else ops.norm(e, weights.input_norm, eps=spec.norm_eps)
        if self.eagle.version == 1:
            x = ops.linear_add(words, weights.fuse[0], ops.start(x, weights.fuse[1]))
            x = run_layer(ops, x, weights.layer, eps=spec.norm_eps, added_eps=spec.norm_eps)
        else:
            x = self._layer(ops, weights, words, x)
        ops.tap(x, 0)
        return ops.head(x, weights.norm, weights.head, eps=spec.norm_eps, softcap=None)

    def _layer(self, ops: AnyOps, weights: EagleWeights, words: Handle, x: Handle) -> Handle:
        """EAGLE-3's: attention over both, the residual stream is the state."""
        layer, eps = weights.layer, self.spec.norm_eps
        qkv = ops.linear(words, weights.fuse[0])
        state = x if weights.state_norm is None else ops.norm(x, weights.state_norm, eps=eps)
        qkv = ops.linear_sum(state, weights.fuse[1], qkv)
        heads = ops.attention(ops.rotate_and_cache(qkv, layer.attention), layer.attention)
        x = ops.linear_add(heads, layer.o, x)
        h = ops.norm(x, layer.pre_mlp_norm, eps=eps)
        assert layer.dense is not None
        gate_up, down = layer.dense
        return ops.linear_add(ops.linear_gate(h, gate_up), down, x)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionWeights:
    """fc [D, 3 D]."""

    head: Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionBlueprint(Blueprint):
    """EAGLE-3's fc: given three states [T, 3 D] of the model, tap 0 hands out one [T, D]."""

    source: HeadSource
    eagle: EagleSpec

    @property
    def n_inputs(self) -> int:
        """Width of what is given."""
        return len(self.eagle.taps) * self.eagle.target_hidden

    def _load(self, loader: AnyLoader) -> FusionWeights:  # type: ignore[override]
        """One projection."""
        width, source = self.spec.hidden, self.source
        bias = (source.tensor("fc.bias", width),) if source.has("fc.bias") else ()
        weight = source.tensor("fc.weight", width, self.n_inputs)
        return FusionWeights(head=loader.linear(LinearParts(weights=(weight,), biases=bias)))

    def forward(self, ops: AnyOps, weights: FusionWeights) -> None:  # type: ignore[override]
        """W states."""
        ops.tap(ops.linear(ops.input(self.n_inputs), weights.head), 0)
