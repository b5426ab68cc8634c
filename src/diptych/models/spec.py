"""The shape of a transformer, decoder or encoder alone: a tuple of layers, each with its attention, its MLP and its norms.

One description for all rooms: `compute` loads and runs it, `cost` counts its FLOPs, bytes and parameters. Plain data,
standard library only; numbers that need arrays (rotary tables) are made from it where they are used.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from diptych.ground.errors import UnsupportedModel
from diptych.ground.specs import Provenance
from diptych.models.gates import Activation
from diptych.models.latent import CacheShape, EntrySpec, IndexSpec, MlaSpec
from diptych.models.mlp import MlpSpec, MoeSpec
from diptych.models.ngrams import NgramSpec, ngram_states
from diptych.models.positions import Distances, QueryScale, Related, Rope
from diptych.models.states import StateSpec
from diptych.models.streams import UNSCALED, GatedSpec, HyperSpec, LayerInputs, LayerScales, StreamsSpec

LEAST_SINES = 4  # numbers of a made position: frequencies fall from the first sine to the last, so there are two


class QkNorm(Enum):
    """Whether queries and keys are normed, before the rotary embedding unless it is said otherwise, and over what."""

    NONE = "none"
    HEAD = "head"  # each head over d, weight [d]
    TURNED = "turned"  # the same, behind the rotary embedding
    UNIT = "unit"  # each head over d, without a weight
    HEADS = "heads"  # each head over d, its mean taken away, by a weight of its own: [H, d] for q and [K, d] for k
    CENTRED = "centred"  # each head over d, its mean taken away, by a weight and a bias [d] that all heads share
    FULL = "full"  # the whole projection, weight [H*d] for q and [K*d] for k


class Norms(Enum):
    """Where a layer norms."""

    BARE = "bare"  # nowhere: what joins the streams gives normed ones
    ALONE = "alone"  # one before attention; there is no MLP
    MLP_ALONE = "mlp_alone"  # one before the MLP; there is no attention
    SHARED = "shared"  # the same, by the norm of the layer behind it, and added with what that layer's attention gives
    PARALLEL = "parallel"  # one before attention and MLP, which run side by side
    BESIDE = "beside"  # one before each of them, which run side by side
    BEFORE = "before"  # before attention, before the MLP
    BEFORE_MLP = "before_mlp"  # before the MLP alone: attention reads the stream as it comes
    KEPT = "kept"  # before each of them, which adds to what the norm gives: the stream goes on from there
    SUMS = "sums"  # behind attention and behind the MLP, of the stream with what they add, which goes on from there
    AFTER = "after"  # after each of them
    AROUND = "around"  # before and after each
    AROUND_MLP = "around_mlp"  # before attention, before and after the MLP
    ASIDE = (
        "aside"  # before attention, of the stream beside the embedding; before the MLP, of what attention alone gives
    )

    @property
    def count(self) -> int:
        """Norms per layer."""
        numbers = {
            Norms.BARE: 0,
            Norms.SHARED: 0,
            Norms.ALONE: 1,
            Norms.MLP_ALONE: 1,
            Norms.PARALLEL: 1,
            Norms.BEFORE_MLP: 1,
            Norms.AROUND_MLP: 3,
            Norms.ASIDE: 3,  # of which two are one, twice as wide
        }
        return numbers.get(self, 4 if self is Norms.AROUND else 2)

    @property
    def are_side_by_side(self) -> bool:
        """Whether attention and MLP both read the stream as it comes to the layer."""
        return self in (Norms.PARALLEL, Norms.BESIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One layer's attention: grouped queries, latents where `mla` is given (then head_dim is the rotary part's), a state where
    `state` is (heads are its value heads, kv heads its key heads; it keeps no keys and values), or none: n_heads is 0.

    window: a query sees the last `window` positions up to and with its own; None: all. is_chunked: it sees those from the last
    multiple of `window` on instead (priced as a window, which is the most it sees). softcap: scores become softcap *
    tanh(score / softcap), after scale. clip: q, k and v are held within it on both sides of 0. rope None: no rotary positions.
    scales_heads: queries of each head are multiplied by s log(position + 1) + b, numbers of the head's own. has_k_bias: where q
    and v have biases, keys have one, too, and those of distances. has_sinks: one
    learned logit per head. slopes: what a score of each head loses for each position between query and key (ALiBi,
    arXiv:2108.12409), (): nothing. distances: what it gains by that distance, in all layers the same. related: what it gains of
    what query and key say of the distance. has_v_norm: values are normed like `qk_norm`'s heads, without a weight. has_v: there
    is a projection for values; where there is none they are the keys before norm and turn. kv_layer: the
    number of the layer before this one whose keys and values, or latents, it attends to; it has none of its own then, and keeps
    nothing but the keys of an index. None: its own.
    differs: each value is that of two KV heads, half of all apart, so v_head_dim is twice their width; of what the heads give
    a part of the second half's is taken from the first half's, and normed head by head (arXiv:2410.05258).
    norms_given: what the heads give is normed head by head, without a weight, before a gate.
    has_gate: what the heads give is multiplied by a projection bent by gate_by, gates_heads: of one number for each head.
    v_head_dim: how wide a value is, None: as a key. v_scale: what values are multiplied by. index: what chooses the positions
    that are attended to; None: all are. entries: what is attended to beside the window's tokens; index is of those then.
    beside: how many inputs it has behind those of the stream. own_rank: to q, k and v of the layer's input two projections of
    its own add as much again, each by way of so many values; 0: nothing does.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    is_chunked: bool = False
    softcap: float | None = None
    clip: float | None = None
    rope: Rope | None = None
    query_scale: QueryScale | None = None
    scales_heads: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    has_qkv_bias: bool = False
    has_k_bias: bool = True
    has_o_bias: bool = False
    has_sinks: bool = False
    slopes: tuple[float, ...] = ()
    distances: Distances | None = None
    related: Related | None = None
    has_v_norm: bool = False
    has_v: bool = True
    kv_layer: int | None = None
    has_gate: bool = False
    gates_heads: bool = False
    gate_by: Activation = Activation.SIGMOID
    v_head_dim: int | None = None
    v_scale: float = 1.0
    differs: bool = False
    norms_given: bool = False
    mla: MlaSpec | None = None
    state: StateSpec | None = None
    index: IndexSpec | None = None
    entries: EntrySpec | None = None
    beside: int = 0
    own_rank: int = 0

    @property
    def own_index(self) -> IndexSpec | None:
        """The index that the layer has itself, if it has one."""
        return self.index if self.index is not None and self.index.is_own else None

    @property
    def is_absent(self) -> bool:
        """Whether the layer has an MLP alone."""
        return self.n_heads == 0

    @property
    def heads_together(self) -> int:
        """Query heads that are projected together, which devices do not part."""
        return self.n_heads // self.mla.n_groups if self.mla is not None and self.mla.n_groups else 1

    @property
    def keeps_kv(self) -> bool:
        """Whether it keeps keys and values of its own."""
        return self.kv_layer is None and self.state is None and not self.is_absent

    @property
    def value_dim(self) -> int:
        """Width of a value, and of what a head of grouped queries gives."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def width(self) -> int:
        """Of what o reads, behind the heads of grouped queries."""
        return self.n_heads * self.value_dim // (2 if self.differs else 1)

    @property
    def gate_width(self) -> int:
        """Outputs of what gates heads."""
        width = self.width if self.mla is None else self.n_heads * self.mla.v_dim
        return self.has_gate * (self.n_heads if self.gates_heads else width)

    @property
    def own_kv_heads(self) -> int:
        """KV heads of its own, which it keeps."""
        return self.n_kv_heads if self.keeps_kv else 0

    @property
    def kv_width(self) -> int:
        """Outputs of the projections that it has for k and v, together."""
        return self.own_kv_heads * (self.head_dim + self.has_v * (self.head_dim if self.differs else self.value_dim))

    @property
    def cache(self) -> CacheShape:
        """What it keeps of a token, or finds where another layer keeps it.

        Of latent attention that is the latent beside the rotary part of the key, for all heads, a part of an entry, and the key
        of an index.
        """
        if self.mla is None:
            return CacheShape(n_heads=self.n_kv_heads, head_dim=self.head_dim, value_dim=self.value_dim)
        row, own = self.mla.row, self.own_index
        shared_by = 0 if self.entries is None else self.entries.shared_by
        behind = (row // shared_by if shared_by else 0) + (0 if own is None or own.is_apart else own.key_width)
        return CacheShape(
            n_heads=1,
            head_dim=row + behind,
            value_dim=0,
            attended=row if self.index is not None or self.mla.n_groups else None,
            shared_by=shared_by,
        )

    @property
    def entry_states(self) -> tuple[StateSpec, ...]:
        """What it keeps of a sequence for its entries, and for those that are the keys of its index."""
        widths = [] if self.entries is None or self.mla is None else [(self.entries, self.mla.row)]
        if self.own_index is not None and self.own_index.entries is not None:
            widths.append((self.own_index.entries, self.own_index.head_dim))
        return tuple(entries.state(width) for entries, width in widths)

    @property
    def index_cache(self) -> CacheShape | None:
        """What its index keeps of a token beside that: of latents mostly nothing, as its key lies with them."""
        if self.own_index is None or (self.mla is not None and not self.own_index.is_apart):
            return None
        return CacheShape(n_heads=1, head_dim=self.own_index.head_dim, value_dim=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer. mlp: None where there is attention alone.

    Where it stands aside (`Norms.ASIDE`) it adds nothing to the stream: what its MLP gives is projected once more, and the next
    layer alone reads the sum of that and the stream. shares: the number of the layer before it whose weights it has, but for
    that projection and what its own_ranks say; None: all are its own.
    """

    attention: AttentionLayer
    mlp: MlpSpec | MoeSpec | None
    norms: Norms = Norms.BEFORE
    scales: LayerScales = UNSCALED
    shares: int | None = None

    @property
    def is_aside(self) -> bool:
        """Whether only the next layer reads what it gives."""
        return self.norms is Norms.ASIDE


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model: its layers and its two ends.

    Layers may differ, but for their mixtures: one in all that have one, whatever their limits and by what their experts are
    chosen. max_context_tokens: the longest sequence an engine may run. norm_offset: added to every norm weight (1 where the
    family stores w - 1), final_norm_offset: to that behind the last layer, if not the same. added_norm_eps: of norms of what
    layers add, if not norm_eps. centres_norms: norms take the mean away first (LayerNorm). residual_scale multiplies what a
    layer adds, logit_scale the logits. is_wrapped:
    whether its checkpoint may have parts for pictures, too. has_head: whether there is an output projection that tokens are
    drawn by; a model without one gives states (embeddings, scores) and no tokens. has_head_bias: that projection adds one.
    has_embedding_norm: of the stream before the first layer, has_embedding_norm_weight: by a weight as the others.
    has_final_norm: behind the last layer; transforms_head: what it gives is projected, bent by GELU, and normed once more.
    word_width: of rows of the embedding, and of what is added to them, where a projection with a bias takes their norm to the
    stream's width; 0: they have it.
    n_position_embeddings: rows of a learned table of positions, which is added to the embedding; the first `first_position` of
    them stand for none. n_token_types: rows of a table of which one is added to each token, by which text of a pair it is of,
    0: there is none. n_task_types: rows of another, of which the first is added to every token, 0: there is none.
    computes_positions: they are sines and cosines, which no checkpoint has. low_rank: of a branch beside
    each layer's attention (LAuReL, arXiv 2411.07501), 0: there is none. norm_rank: of what gates norms before attention and
    before mixtures, 0: nothing does. has_inner_norms: what heads give and inner values of dense MLPs are normed before they
    are projected. scales_layers: behind each layer the stream is multiplied by a number of the layer's. residual_temperature:
    the stream and what is added to it are weighed by channel, by sigmoids of learned numbers over this; None: they are not.
    The norm behind attention has no weight then, and that behind the MLP has it in front. blocks: where
    checkpoints number something else than these layers, by which number each has its attention, and its MLP: of attention and
    MLPs that are blocks of their own, of attention and a state that are one layer there; else (). left_out: numbers there of
    what no text passes through. spare_embeddings: rows of the embedding behind the vocabulary.
    """

    name: str
    family: str
    architecture: str
    hidden: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    max_context_tokens: int
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    final_norm_offset: float | None = None
    added_norm_eps: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    is_tied: bool = False
    is_wrapped: bool = False
    has_head: bool = True
    centres_norms: bool = False
    has_norm_weight: bool = True
    has_norm_bias: bool = False
    has_embedding_norm: bool = False
    has_embedding_norm_weight: bool = True
    has_head_bias: bool = False
    has_final_norm: bool = True
    transforms_head: bool = False
    computes_positions: bool = False
    word_width: int = 0
    n_position_embeddings: int = 0
    first_position: int = 0
    n_token_types: int = 0
    n_task_types: int = 0
    low_rank: int = 0
    norm_rank: int = 0
    has_inner_norms: bool = False
    scales_layers: bool = False
    residual_temperature: float | None = None
    blocks: tuple[tuple[int, int | None], ...] = ()
    left_out: tuple[int, ...] = ()
    spare_embeddings: int = 0
    streams: StreamsSpec | HyperSpec | GatedSpec | None = None
    layer_inputs: LayerInputs | None = None
    ngrams: NgramSpec | None = None
    published_parameters: int | None = None
    provenance: tuple[Provenance, ...] = ()

    def __post_init__(self) -> None:
        limited = {layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeSpec)}
        by_bias = any(mixture.has_choice_bias for mixture in limited)
        mixtures = (
            limited
            if len(limited) < 2
            else {
                replace(
                    one, limit=None, shared_limit=None, by_token=False, has_choice_bias=by_bias or one.has_choice_bias
                )
                if one.by_token
                else replace(one, limit=None, shared_limit=None)
                for one in limited
            }
        )
        if len(mixtures) > 1:
            raise UnsupportedModel(f"{self.name} has {len(mixtures)} kinds of mixtures of experts; one is supported")
        if not self.kv_layers and not any(
            state.state_elements for state in self.states
        ):  # as of a convolution of one tap
            raise UnsupportedModel(
                f"{self.name} has no layer that attends to keys and values or keeps a state; one at least is needed"
            )
        if self.computes_positions and self.hidden < LEAST_SINES:
            raise UnsupportedModel(
                f"{self.name} is {self.hidden} numbers wide; made positions need {LEAST_SINES}, two sines and two cosines"
            )
        is_chosen = False
        for i, layer in enumerate(self.layers):
            is_chosen = is_chosen or layer.attention.own_index is not None
            if layer.attention.index is not None and not is_chosen:
                raise UnsupportedModel(
                    f"layer {i} of {self.name} attends to what the index of a layer before it chose, and none has one"
                )
            shared = layer.attention.kv_layer
            if shared is None:
                continue
            if not (0 <= shared < i and self.layers[shared].attention.keeps_kv):
                raise UnsupportedModel(
                    f"layer {i} of {self.name} attends to the keys and values of layer {shared}, which has none before it"
                )
            if layer.attention.cache != self.layers[shared].attention.cache:
                raise UnsupportedModel(
                    f"layer {i} of {self.name} attends to keys and values of another shape, which layer {shared} keeps"
                )

    @property
    def end_offset(self) -> float:
        """Added to the weight of the norm behind the last layer."""
        return self.norm_offset if self.final_norm_offset is None else self.final_norm_offset

    @property
    def added_eps(self) -> float:
        """Of the norms behind attention and behind the MLP."""
        return self.norm_eps if self.added_norm_eps is None else self.added_norm_eps

    def __hash__(self) -> int:
        """Of what tells most models apart: of all layers it would take longer than pricing a step."""
        return hash((self.name, self.architecture, self.hidden, self.vocab_size, len(self.layers)))

    @cached_property
    def layer_groups(self) -> tuple[tuple[LayerSpec, int], ...]:
        """The layers that differ in more than their rotary positions, in order, each with how many there are."""
        counts = Counter(replace(layer, attention=replace(layer.attention, rope=None)) for layer in self.layers)
        return tuple(counts.items())

    @cached_property
    def n_layers(self) -> int:
        """How many layers."""
        return len(self.layers)

    @cached_property
    def n_blocks(self) -> int:
        """How many layers its checkpoints number."""
        last = max((max(attention, mlp or 0) for attention, mlp in self.blocks), default=self.n_layers - 1)
        return 1 + max(last, *self.left_out, 0)

    @property
    def row_width(self) -> int:
        """Of the embedding."""
        return self.word_width or self.hidden

    @property
    def n_embeddings(self) -> int:
        """Rows of the embedding."""
        return self.vocab_size + self.spare_embeddings

    @cached_property
    def n_parts(self) -> int:
        """Attentions and MLPs together, two in most layers."""
        return sum((not layer.attention.is_absent) + (layer.mlp is not None) for layer in self.layers)

    def pair_of(self, layer: int) -> int | None:
        """The number of the layer that reads the same norm, if one does."""
        if self.layers[layer].norms is Norms.SHARED:
            return layer + 1
        return layer - 1 if layer and self.layers[layer - 1].norms is Norms.SHARED else None

    def half_of(self, layer: int) -> int:
        """Which part of what a checkpoint numbers as one layer with an attention in each part: 0 or 1."""
        return int(layer > 0 and bool(self.blocks) and self.blocks[layer][0] == self.blocks[layer - 1][0])

    def blocks_of(self, layer: int) -> tuple[int, int | None]:
        """By which number a checkpoint has a layer's attention, and by which its MLP."""
        return self.blocks[layer] if self.blocks else (layer, layer)

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that keep keys and values, in the order in which a cache has them."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.attention.keeps_kv)

    @cached_property
    def index_layers(self) -> tuple[int, ...]:
        """The numbers of the layers whose index keeps keys in a layer of the cache, which come behind those of kv_layers."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.attention.index_cache is not None)

    @cached_property
    def caches(self) -> tuple[CacheShape, ...]:
        """What each layer of a cache keeps of a token."""
        indices = (self.layers[i].attention.index_cache for i in self.index_layers)
        return (*(self.layers[i].attention.cache for i in self.kv_layers), *(one for one in indices if one is not None))

    def index_place(self, number: int) -> int | None:
        """Which of a cache's layers has the keys of a layer's index, if one has."""
        return len(self.kv_layers) + self.index_layers.index(number) if number in self.index_layers else None

    def kv_place(self, number: int) -> int:
        """Which of a cache's layers a layer attends to."""
        shared = self.layers[number].attention.kv_layer
        return self.kv_layers.index(number if shared is None else shared)

    @cached_property
    def state_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that keep a state of a sequence, in the order in which it has them."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.attention.state is not None)

    @cached_property
    def states(self) -> tuple[StateSpec, ...]:
        """All that it keeps of a sequence beside keys and values: those of state_layers, behind them those that theirs are made
        by, and behind these those of entries and of n-grams.
        """
        of_layers = [layer.attention.state for layer in self.layers if layer.attention.state is not None]
        before = (state.before for state in of_layers)
        return (*of_layers, *(state for state in before if state is not None), *self._states_beside)

    @cached_property
    def _states_beside(self) -> tuple[StateSpec, ...]:
        """Of entries, then of n-grams."""
        of_entries = (state for layer in self.layers for state in layer.attention.entry_states)
        of_ngrams = () if self.ngrams is None else ngram_states(self.ngrams, self.hidden * self.n_streams)
        return (*of_entries, *of_ngrams)

    def entry_places(self, layer: int) -> tuple[int, ...]:
        """Which of the states are those of a layer's entries, and of its index's."""
        first = self.n_layer_states + sum(len(one.attention.entry_states) for one in self.layers[:layer])
        return tuple(range(first, first + len(self.layers[layer].attention.entry_states)))

    @cached_property
    def n_layer_states(self) -> int:
        """How many of them are of layers, which ranks divide; others each rank has whole."""
        return len(self.states) - len(self._states_beside)

    def place_before(self, layer: int) -> int:
        """Which of the states is the one before a layer's own."""
        with_one = [i for i in self.state_layers if (own := self.layers[i].attention.state) and own.before]
        return len(self.state_layers) + with_one.index(layer)

    @property
    def n_with_states(self) -> int:
        """Layers that keep something of a sequence beside keys and values, or in their place."""
        return sum(one.attention.state is not None or bool(one.attention.entry_states) for one in self.layers)

    @property
    def n_streams(self) -> int:
        """Residual streams."""
        return 1 if self.streams is None else self.streams.n_streams

    @cached_property
    def state_elements(self) -> int:
        """Numbers that a sequence keeps in all layers, however long it is, beside its keys and values."""
        return sum(state.state_elements for state in self.states)

    @cached_property
    def attention(self) -> AttentionLayer:
        """The first attention to keys and values; of most models heads, biases and norms are the same in all layers. Where
        none attends, the first that keeps a state.
        """
        return self.layers[(self.kv_layers or self.state_layers)[0]].attention

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.attention.n_heads

    @property
    def n_kv_heads(self) -> int:
        """Key-value heads."""
        return self.attention.n_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.attention.head_dim

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """One entry per layer: None for full attention, else the number of tokens a query may see."""
        return tuple(layer.attention.window for layer in self.layers)

    @cached_property
    def mlp(self) -> MlpSpec | None:
        """The dense MLP of the layers that have one; None where all are mixtures."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, MlpSpec)), None)

    @cached_property
    def moe(self) -> MoeSpec | None:
        """The mixture of the layers that have one."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeSpec)), None)
