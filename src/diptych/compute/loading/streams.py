"""What some decoders have beside attention and MLP, as weight handles: streams, branches, embeddings of layers."""

from __future__ import annotations

from diptych.compute.loading.balance import balance_norm
from diptych.compute.loading.weights import Source
from diptych.compute.ops.contract import Experts, Heads, Linear, LinearParts, Loader, NormParts, Role, Table, Vector
from diptych.compute.walk.stream_weights import BranchWeights, Connection, InputsWeights, MixingWeights, OwnEmbedding
from diptych.models.mlp import MlpSpec, MoeSpec
from diptych.models.spec import ModelSpec
from diptych.models.streams import HyperSpec, LayerInputs, StreamsSpec

# what precedes the names of a hyper-connection's tensors, before attention, before the MLP and at the end: as the class of
# transformers has them, as HY V4's own files do, as transformers saves those, and as GLM-5.3-Flash's and DeepSeek V4's own
# files do
ATTENTION_HC = ("attn_hc.", "hc_attn_layer.hc_pre.hc_", "hc_attn_layer.hc_", "hc_pre.hc_attn_layer.hc_", "hc_attn_")
MLP_HC = ("ffn_hc.", "hc_mlp_layer.hc_pre.hc_", "hc_mlp_layer.hc_", "hc_pre.hc_mlp_layer.hc_", "hc_ffn_")
END_HC = ("hc_head.hc_", "hc_head.hc_pre.hc_head_", "hc_head.hc_head_", "hc_pre.hc_head.hc_head_", "hc_head_")


def load_inputs(
    source: Source, loader: Loader[Table, Vector, Linear, Heads, Experts], spec: ModelSpec, prefix: str
) -> InputsWeights[Table, Vector, Linear] | None:
    """The embeddings of all layers, if there are any."""
    inputs = spec.layer_inputs
    if inputs is None:
        return None
    width = spec.n_layers * inputs.width
    return InputsWeights(
        table=loader.rows(source.tensor(f"{prefix}embed_tokens_per_layer.weight", inputs.vocab, width)),
        projection=loader.linear(_matrix(source, f"{prefix}per_layer_model_projection", width, spec.hidden)),
        norm=_norm(source, loader, f"{prefix}per_layer_projection_norm", inputs.width),
    )


def load_ends(
    source: Source, loader: Loader[Table, Vector, Linear, Heads, Experts], spec: ModelSpec, prefix: str
) -> tuple[tuple[Linear, ...], tuple[Linear, ...]]:
    """How streams begin and end: a projection for each but the first."""
    begin, end = (
        tuple(
            loader.linear(_matrix(source, f"{prefix}{name}.{i}", spec.hidden, spec.hidden))
            for i in range(spec.streams.n_streams - 1 if isinstance(spec.streams, StreamsSpec) else 0)
        )
        for name in ("altup_projections", "altup_unembed_projections")
    )
    return begin, end


def load_mixing(
    source: Source,
    loader: Loader[Table, Vector, Linear, Heads, Experts],
    spec: ModelSpec,
    streams: StreamsSpec,
    output: NormParts | None,
    root: str,
) -> MixingWeights[Vector, Linear]:
    """Of the layer whose tensors begin with root. output: as `own_gate` gives it."""
    n = streams.n_streams
    return MixingWeights(
        norm=_norm(source, loader, f"{root}altup.router_norm", spec.hidden),
        router=loader.router(_matrix(source, f"{root}altup.modality_router", n, spec.hidden)),
        predict=loader.vector(source.tensor(f"{root}altup.prediction_coefs.weight", n * n, n)),
        correct=loader.vector(source.tensor(f"{root}altup.correction_coefs.weight", n, n)),
        output=None if output is None else loader.vector(output.weight),
    )


def load_connections(
    source: Source, loader: Loader[Table, Vector, Linear, Heads, Experts], spec: ModelSpec, hyper: HyperSpec, root: str
) -> tuple[Connection[Vector], Connection[Vector]]:
    """Of the layer whose tensors begin with root: how its attention and its MLP read the streams, and are added to them."""
    attention, mlp = (_connection(source, loader, spec, hyper, root, names) for names in (ATTENTION_HC, MLP_HC))
    return attention, mlp


def load_connection(
    source: Source, loader: Loader[Table, Vector, Linear, Heads, Experts], spec: ModelSpec, prefix: str
) -> Connection[Vector] | None:
    """How the streams are joined at their end, where they are so, and not by their mean."""
    if not isinstance(spec.streams, HyperSpec) or not spec.streams.has_end:
        return None
    return _connection(source, loader, spec, spec.streams, prefix, END_HC, is_end=True)


def _connection(
    source: Source,
    loader: Loader[Table, Vector, Linear, Heads, Experts],
    spec: ModelSpec,
    hyper: HyperSpec,
    root: str,
    names: tuple[str, ...],
    *,
    is_end: bool = False,
) -> Connection[Vector]:
    """is_end: it says what is read alone."""
    name = next((one for one in names if source.has(f"{root}{one}fn")), names[0])
    n, m, n_scales = hyper.n_streams, hyper.n_connected, hyper.n_scales
    m, n_scales = (n, 1) if is_end else (m, n_scales)
    return Connection(
        weight=loader.vector(source.tensor(f"{root}{name}fn", m, n * spec.hidden)),
        scale=loader.vector(source.tensor(f"{root}{name}scale", n_scales)),
        base=loader.vector(source.tensor(f"{root}{name}base", m)),
    )


def load_branch(
    source: Source,
    loader: Loader[Table, Vector, Linear, Heads, Experts],
    spec: ModelSpec,
    root: str,
) -> BranchWeights[Vector, Linear] | None:
    """Of the layer whose tensors begin with root, if there is one."""
    if not spec.low_rank:
        return None
    return BranchWeights(
        left=loader.linear(_matrix(source, f"{root}laurel.linear_left", spec.low_rank, spec.hidden)),
        right=loader.linear(_matrix(source, f"{root}laurel.linear_right", spec.hidden, spec.low_rank)),
        norm=_norm(source, loader, f"{root}laurel.post_laurel_norm", spec.hidden),
    )


def own_gate(
    source: Source, spec: ModelSpec, inputs: LayerInputs, root: str, *, is_balancing: bool
) -> tuple[NormParts | None, LinearParts]:
    """What weighs a stream before the gate of the layer's embedding reads it, if anything does, and that gate."""
    gate = _matrix(source, f"{root}per_layer_input_gate", inputs.width, spec.hidden)
    if not isinstance(spec.streams, StreamsSpec):
        return None, gate
    output = NormParts(weight=source.tensor(f"{root}altup.correct_output_scale", spec.hidden))
    if not spec.streams.scales_output:
        return None, gate
    if is_balancing:
        output, (gate,) = balance_norm(output, (gate,), offset=0.0)
    return output, gate


def load_embedding(
    source: Source,
    loader: Loader[Table, Vector, Linear, Heads, Experts],
    spec: ModelSpec,
    inputs: LayerInputs,
    gate: LinearParts,
    mlp: MlpSpec | MoeSpec,
    root: str,
    role: Role,
) -> OwnEmbedding[Vector, Linear]:
    """Of the layer whose tensors begin with root; its gate has the MLP's activation. role: of the projection."""
    return OwnEmbedding(
        gate=loader.gate(gate, mlp.activation),
        # what is added to streams is every rank's, whole, as they are
        projection=loader.linear(
            _matrix(source, f"{root}per_layer_projection", spec.hidden, inputs.width),
            role=role if spec.streams is None else None,
        ),
        norm=_norm(source, loader, f"{root}post_per_layer_input_norm", spec.hidden),
    )


def _matrix(source: Source, name: str, n_outputs: int, n_inputs: int) -> LinearParts:
    return LinearParts(weights=(source.tensor(f"{name}.weight", n_outputs, n_inputs),))


def _norm(source: Source, loader: Loader[Table, Vector, Linear, Heads, Experts], name: str, width: int) -> Vector:
    return loader.norm(NormParts(weight=source.tensor(f"{name}.weight", width)), is_read=False)
