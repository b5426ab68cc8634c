"""What a decoder may have beside its one residual stream: more streams, and embeddings for each layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """Residual streams beside each other (AltUp, arXiv 2301.13310): each layer computes one of them and predicts the others.

    active: which one it computes. scales_output: what gates the layer's own embedding is multiplied by a weight first.
    """

    n_streams: int
    active: int = 0
    scales_output: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """Embeddings of `width` for each layer and token, beside the one that the stream begins with.

    vocab: how many tokens have one; all others have the first's.
    """

    width: int
    vocab: int
