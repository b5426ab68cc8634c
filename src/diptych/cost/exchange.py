"""What the ranks of one model tell each other in a step: all-reduces, or the gathering that keeps the bits of one rank.

Two ways to divide a layer. By inputs in every second projection, whose partial sums are then added up (Megatron-LM, arXiv
1909.08053): two all-reduces of the residual width, and bits that depend on the number of ranks. By outputs in all of them, as
the engine's own ranks do (docs/parallel.md): what the next projection sums over is gathered, more bytes and more meetings.

    gathered(model, tp=2, weights="bf16").row_bytes / all_reduced(model, tp=2).row_bytes
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.cost.components import gathered_bytes, ring_bytes
from diptych.models.gates import Activation
from diptych.models.mlp import MoeSpec
from diptych.models.spec import LayerSpec, ModelSpec, Norms, QkNorm

FP32, BF16 = 4, 2
# one meeting of two ranks: through shared memory, and a small collective of gloo over loopback (LAB.md, Ranks)
SHARED_MEETING_S, GLOO_MEETING_S = 0.4e-6, 288e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Of one step, without its logits. meetings: times that all ranks wait for each other; row_bytes: what a rank takes in from
    the others for each token.
    """

    meetings: int
    row_bytes: float

    def time_s(self, rows: int, *, meeting_s: float, bytes_per_s: float | None = None) -> float:
        """Of a step of so many tokens, with nothing computed meanwhile. bytes_per_s None: ranks write to one memory."""
        return self.meetings * meeting_s + (0.0 if bytes_per_s is None else rows * self.row_bytes / bytes_per_s)


def all_reduced(model: ModelSpec, *, tp: int, activation_bytes: float = BF16) -> Exchange:
    """A ring all-reduce of the residual stream behind each attention and each MLP."""
    width = model.hidden * activation_bytes
    return Exchange(meetings=model.n_parts, row_bytes=model.n_parts * ring_bytes(width, tp))


def gathered(model: ModelSpec, *, tp: int, weights: str = "bf16") -> Exchange:
    """What the cpu backend's ranks write for each other, with these weights; the embedding and the step's end meet, too."""
    if tp == 1:
        return Exchange(meetings=0, row_bytes=0.0)
    are_whole, value_bytes = model.streams is not None, FP32 if weights != "bf16" else BF16
    settings = {"are_whole": are_whole, "is_normed": model.has_inner_norms}
    layers = [_gathered(layer, model.hidden, value_bytes, **settings) for layer in model.layers]
    if model.residual_temperature is not None:
        layers += [_weighed(layer, model.hidden * FP32) for layer in model.layers]
    # behind a layer its own embedding is projected and added to the stream, which is scaled
    behind = model.n_layers * (model.scales_layers + 2 * (model.layer_inputs is not None and not are_whole))
    behind += model.has_embedding_norm  # whose rows' owners make it, or every rank what is projected then
    width = sum(row_bytes for _, row_bytes in layers) + (behind * model.hidden + model.row_width) * FP32
    meetings = sum(meetings for meetings, _ in layers) + behind + 2
    return Exchange(meetings=meetings, row_bytes=gathered_bytes(width, tp))


def _kept(layer: LayerSpec, stream: int) -> tuple[int, float]:
    """The same of norms that become the stream, written by the rows' owners, of what scales that and what is added to it, and
    of norms of what heads give that are gated behind.
    """
    scales, state = layer.scales, layer.attention.state
    is_scaled, is_apart = scales.before_attention != 1.0, scales.attention_out != 1.0
    n = 2 + is_scaled + (is_scaled or is_apart) + (scales.before_mlp != 1.0)
    heads = layer.attention.width * FP32 if state is not None and state.is_steady else 0
    return n + (heads > 0), float(n * stream + heads)


def _weighed(layer: LayerSpec, stream: int) -> tuple[int, float]:
    """More of a layer whose sums are weighed by channel: of heads that are normed, of what attention and MLP add to, of
    what the MLP gives before its norm, all by the rows' owners; of a mixture, too, what its sum is projected to.
    """
    heads = layer.attention.width * FP32 * layer.attention.norms_given
    n = 4 if isinstance(layer.mlp, MoeSpec) else 3
    return n + (heads > 0), float(n * stream + heads)


def _gathered(
    layer: LayerSpec, hidden: int, value_bytes: int, *, are_whole: bool, is_normed: bool
) -> tuple[int, float]:
    """(meetings, bytes of one row that ranks share) of a layer. value_bytes: of the heads' values; are_whole: each rank has
    streams of its own, to which it adds everything. is_normed: what the heads give is normed before o.
    """
    attention, mlp, stream = layer.attention, layer.mlp, hidden * FP32
    has_norms_behind = layer.norms in (Norms.AFTER, Norms.AROUND, Norms.SUMS) and not are_whole
    is_sum_apart = has_norms_behind or layer.norms is Norms.AROUND_MLP or layer.scales.mlp_out != 1.0
    heads = attention.n_heads * attention.value_dim
    values = heads * (FP32 if is_normed or attention.differs else value_bytes)
    if attention.mla is not None:
        values = attention.n_heads * attention.mla.v_dim * FP32
    meetings, row_bytes = (0, 0.0) if attention.is_absent else (2, values + stream)  # the heads' values, o
    is_gated = attention.has_gate if attention.state is None else attention.state.gate_width > 0
    if is_gated:  # what gates them, in fp32
        width = heads if attention.mla is None else attention.n_heads * attention.mla.v_dim
        meetings, row_bytes = 3, 2 * width * FP32 + stream
    if attention.state is not None and attention.state.is_selective:  # and what its taps give, which all read whole
        meetings, row_bytes = meetings + 1, row_bytes + heads * FP32
    if layer.norms is Norms.KEPT:
        more, wider = _kept(layer, stream)
        meetings, row_bytes = meetings + more, row_bytes + wider
    is_gated_apart = attention.gates_heads or attention.gate_by is Activation.SOFTPLUS
    if attention.has_gate and is_gated_apart:  # or numbers in a buffer, and what they leave, by the rows' owners
        meetings, row_bytes = 4, row_bytes + attention.gate_width * FP32
    if attention.qk_norm is QkNorm.FULL:
        meetings += 3
        row_bytes += (attention.n_heads * attention.head_dim + attention.kv_width) * FP32
    if has_norms_behind:  # each is added to the stream by the rows' owners
        meetings += 1
        row_bytes += stream
    if isinstance(mlp, MoeSpec):  # the experts' hidden rows, their outputs, their sum, the stream
        k = mlp.experts_per_token
        # halves that are joined by an operation of its own are joined by each rank
        expert = mlp.expert_ffn * (mlp.n_products - 1) * FP32 if mlp.joins_apart else mlp.expert_ffn * value_bytes
        given = (mlp.latent or hidden) * FP32
        meetings, row_bytes = meetings + 4, row_bytes + k * (expert + given) + given + stream
        if mlp.latent:  # what experts read; by what takes it back it is added to the stream
            meetings, row_bytes = meetings + 1, row_bytes + given
        if mlp.shared_ffn:  # their gate and what they add, which is a row of its own where it is gated
            adds_apart = mlp.has_shared_gate and not are_whole  # streams of its own each rank adds the sum of both to
            meetings += 3 if adds_apart else 2
            halves = 2 * FP32 if mlp.shared.form is not None else BF16 if mlp.is_gated else FP32
            row_bytes += mlp.shared_ffn * halves + (2 if adds_apart else 1) * stream
            if is_sum_apart and not mlp.is_apart:  # of their sum, normed or scaled, which the rows' owners make
                meetings, row_bytes = meetings + 1, row_bytes + stream
        elif are_whole:  # each rank adds their sum to streams of its own
            meetings, row_bytes = meetings - 1, row_bytes - stream
        return meetings, row_bytes
    if mlp is None:
        return meetings, row_bytes
    if layer.is_aside:  # what projects the MLP's sum, and what adds to gate and up, if anything
        meetings, row_bytes = meetings + 1, row_bytes + stream
        if mlp.own_rank:
            meetings, row_bytes = meetings + 1, row_bytes + 2 * mlp.ffn * FP32
    # each rank joins whole rows of gate and up, or bends those of up, where that is an operation of its own
    gated = mlp.ffn * BF16 if mlp.is_gated else mlp.ffn * FP32
    gated = gated if mlp.cutoff is None and mlp.form is None else 2 * mlp.ffn * FP32
    meetings, row_bytes = meetings + 2, row_bytes + gated + stream
    return (meetings + 1, row_bytes + stream) if has_norms_behind else (meetings, row_bytes)
