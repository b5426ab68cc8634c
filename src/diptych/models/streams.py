"""What becomes of the residual stream: what scales what layers read and add, more streams, and embeddings for each layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScales:
    """What a layer multiplies: what its attention and its MLP read behind their norms, what each of them adds, and the stream
    that each is added to (`Norms.KEPT` alone).
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    mlp_in: float = 1.0
    mlp_out: float = 1.0
    before_attention: float = 1.0
    before_mlp: float = 1.0


UNSCALED = LayerScales()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """Residual streams beside each other (AltUp, arXiv 2301.13310): each layer computes one of them and predicts the others.

    active: which one it computes. scales_output: what gates the layer's own embedding is multiplied by a weight first.
    """

    n_streams: int
    active: int = 0
    scales_output: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperSpec:
    """Residual streams beside each other that hyper-connections join (arXiv 2409.19606, as HY V4 has them): each attention and
    each MLP reads their sum and is added to all of them, by weights that its own connection makes of all streams.

    magnitude: the most that a stream is added with. eps: added to each weight. rounds: where a connection says how streams mix,
    too, by a matrix whose rows and columns so many rounds bring near to sums of 1 (arXiv 2512.24880, as GLM-5.3-Flash has it);
    then eps is added to what is read and in those rounds alone. 0: they do not mix. has_end: a connection reads the streams at
    their end; otherwise it is their mean.
    """

    n_streams: int
    magnitude: float
    eps: float
    rounds: int = 0
    has_end: bool = True

    @property
    def n_connected(self) -> int:
        """Outputs of a connection: for each stream what is read and what is added, and by what streams mix."""
        return self.n_streams * (2 + (self.n_streams if self.rounds else 0))

    @property
    def n_scales(self) -> int:
        """Of those."""
        return 3 if self.rounds else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedSpec:
    """Residual streams beside each other, in one row (Qwen4-Exp's gated residual): each attention, each MLP and the head read
    the mean of all streams, each normed by itself and gated by a sigmoid of two projections of all, `rank` numbers between
    them. What attention and MLP give is added to each stream, times twice a sigmoid of a projection of all.
    """

    n_streams: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """Embeddings of `width` for each layer and token, beside the one that the stream begins with.

    vocab: how many tokens have one; all others have the first's.
    """

    width: int
    vocab: int
