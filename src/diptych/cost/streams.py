"""What a model with residual streams beside each other multiplies and reads outside attention and MLP (Gemma 3n,
HY V4, GLM-5.3-Flash, DeepSeek V4, Qwen4-Exp), and what layers that share their weights have of their own (Zamba2).

>>> from diptych.cost.tables import model_spec
>>> stream_matrices(model_spec("llama-3.1-8b"))
0
"""

from __future__ import annotations

from diptych.models.mlp import MlpSpec, MoeSpec
from diptych.models.spec import AttentionLayer, LayerSpec, ModelSpec
from diptych.models.streams import GatedSpec, HyperSpec


def stream_matrices(model: ModelSpec) -> int:
    """Parameters of matrices that every token meets: ends of streams, routers, connections, branches, gates of layers'
    embeddings and of norms.
    """
    hidden, n = model.hidden, model.n_layers
    n_gated = n + sum(isinstance(layer.mlp, MoeSpec) for layer in model.layers) if model.norm_rank else 0
    count = 2 * n * model.low_rank * hidden + 2 * n_gated * model.norm_rank * hidden
    if isinstance(model.streams, HyperSpec):
        count += _connected(model, model.streams) * model.streams.n_streams * hidden
    elif isinstance(model.streams, GatedSpec):
        width = model.streams.n_streams * hidden
        count += 2 * (model.n_parts + 1) * model.streams.rank * width + model.n_parts * model.streams.n_streams * width
    elif model.streams is not None:
        count += 2 * (model.streams.n_streams - 1) * hidden**2 + n * model.streams.n_streams * hidden
    if model.ngrams is not None:
        count += model.ngrams.n_matrices(hidden, model.n_streams)
    if model.layer_inputs is not None:
        count += 3 * n * model.layer_inputs.width * hidden  # one from the stream's beginning, two in the layer
    return count


def stream_vectors(model: ModelSpec) -> int:
    """Norms and coefficients beside them, kept in fp32."""
    hidden, n = model.hidden, model.n_layers
    count = (n * hidden if model.low_rank else 0) + (n if model.scales_layers else 0)
    if isinstance(model.streams, HyperSpec):  # a base for each output, a scale for those of one kind
        count += _connected(model, model.streams) + model.n_parts * model.streams.n_scales + model.streams.has_end
    elif isinstance(model.streams, GatedSpec):
        count += (model.n_parts + 1) * model.streams.n_streams * hidden
    elif model.streams is not None:
        count += n * (2 * hidden + model.streams.n_streams**3 + model.streams.n_streams**2)
    if model.ngrams is not None:
        count += model.ngrams.n_vectors(hidden, model.n_streams)
    if model.layer_inputs is not None:
        count += n * hidden + model.layer_inputs.width
    return count


def _connected(model: ModelSpec, streams: HyperSpec) -> int:
    """Outputs of all connections: of each attention and each MLP, and for each stream one at the end, unless that is a mean."""
    return model.n_parts * streams.n_connected + (streams.n_streams if streams.has_end else 0)


def own_heads(model: ModelSpec, attention: AttentionLayer) -> int:
    """Parameters of what adds to q, k and v, which a layer has of its own whatever it shares."""
    read = attention.n_heads * attention.head_dim + attention.kv_width
    return attention.own_rank * (3 * (model.hidden + attention.beside) + read)


def own_inner(model: ModelSpec, layer: LayerSpec) -> int:
    """Likewise of what adds to gate and up, and of the projection behind a layer that stands aside."""
    added = layer.mlp.own_rank * (model.hidden + 2 * layer.mlp.ffn) if isinstance(layer.mlp, MlpSpec) else 0
    return added + layer.is_aside * model.hidden**2


def inner_width(model: ModelSpec, layer: LayerSpec) -> int:
    """Numbers of a token that a layer norms before o and before down."""
    ffn = layer.mlp.ffn if isinstance(layer.mlp, MlpSpec) else 0
    return layer.attention.width + ffn if model.has_inner_norms else 0


def table_width(model: ModelSpec) -> int:
    """Numbers that a token gathers from the table of layers' embeddings, or from those of n-grams."""
    of_ngrams = 0 if model.ngrams is None else len(model.ngrams.layers) * model.ngrams.width
    return of_ngrams + (0 if model.layer_inputs is None else model.n_layers * model.layer_inputs.width)


def ngram_elements(model: ModelSpec) -> int:
    """Numbers that a sequence keeps for its entries and n-grams, which each chunk reads and writes."""
    return sum(state.state_elements for state in model.states[model.n_layer_states :])


def related_matrices(attention: AttentionLayer) -> int:
    """Numbers that a token's queries and keys meet for what scores gain of contents and distances; they are made at a start."""
    if attention.related is None:
        return 0
    return 2 * attention.n_heads * attention.head_dim * attention.related.n_places


def word_matrix(model: ModelSpec) -> int:
    """Parameters of what takes a row of the embedding to the stream's width, without its bias."""
    return model.word_width * model.hidden


def end_norms(model: ModelSpec) -> int:
    """Norms behind the last layer: none where what joins streams norms them, two where one stands before the head."""
    has_none = isinstance(model.streams, GatedSpec) or not model.has_final_norm
    return (0 if has_none else 1) + model.transforms_head
