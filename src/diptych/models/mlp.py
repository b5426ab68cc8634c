"""What a layer has beside attention: an MLP, or a mixture of experts and the MLP that all tokens meet."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from diptych.models.gates import CLAMPED, EXACT, SQUARED, Activation, GateForm


class Scores(Enum):
    """How a router's logits become the weights of the chosen experts: over all experts, or each by itself. LATE_SIGMOID: they
    are chosen by logits. SPARSEMIXER (arXiv:2409.12136): one by one, each weighed by a softmax over those left that lie near.
    ROOT_SOFTPLUS: each by itself, the root of a softplus.
    """

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    LATE_SIGMOID = "late_sigmoid"
    SPARSEMIXER = "sparsemixer"
    ROOT_SOFTPLUS = "root_softplus"


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """A dense MLP of width `ffn`: down(act(gate) * up), or down(act(up)) when it is not gated.

    cutoff: of a row of gate only what stands out is left, max(gate - (mean + cutoff * deviation), 0), before the activation.
    limit: act(gate) is at most that, and up within it on both sides; limits_gate: gate is, before act. own_rank: of what adds
    to gate and up, as `AttentionLayer` has it. has_bias: of each projection; has_down_bias: of down alone.
    """

    ffn: int
    activation: Activation = Activation.SILU
    is_gated: bool = True
    has_bias: bool = False
    has_down_bias: bool = False
    own_rank: int = 0
    cutoff: float | None = None
    limit: float | None = None
    limits_gate: bool = False

    @property
    def form(self) -> GateForm | None:
        """How gate and up are joined where both are held within bounds."""
        return _form(self.activation, self.limit, self.limits_gate) if self.is_gated else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture of experts. renormalises: the chosen experts' weights are scaled to sum to 1.

    is_gated: whether experts and shared experts have a gate, as `MlpSpec` has it. latent: the width of what experts read and
    give, which projections take the stream to and back (0: they read and give the stream); shared experts and router read it.
    shared_ffn: the total width of the always-active experts. routed_scale multiplies the mixture's sum. n_groups,
    groups_per_token: experts are chosen among the best groups only (1 of 1: all), a group being as good as the sum of its
    `group_best` best. softcap: logits become softcap * tanh(logit / softcap). has_router_bias: on the logits; has_choice_bias:
    on the scores, for the choice only. choice_rows: of that bias in a checkpoint, of as many experts each; the first are read.
    margin: of sparsemixer, times the larger of a logit's size and the best logit.
    has_shared_gate: the shared experts' sum is multiplied by a sigmoid. has_shared_bias: as `MlpSpec.has_bias`. weighs_input:
    a chosen expert's input is multiplied by its weight, not what it gives. n_identities: experts without weights behind the
    others, which give what they read. is_late: what the mixture gives, but not shared experts, is added behind the layer that
    follows. is_apart: shared experts, mixture and router read the stream by norms of their own, what each of the first two
    gives is normed before they are added, and each expert has a scale. limit, shared_limit: of experts and of shared experts,
    as `MlpSpec` has it; limits_gate: of both. by_token: a table has the experts of each token id, which scores weigh alone.
    score_scale: what the router's outputs are multiplied by. behind_eps: what each expert gives is multiplied by a vector that
    all share, and normed with this eps; what they read is then normed, too, behind the projection to latents. None: neither.
    skew: of the routing, 0 is uniform; see `cost.routing.expected_experts`.
    """

    n_experts: int
    experts_per_token: int
    expert_ffn: int
    is_gated: bool = True
    latent: int = 0
    activation: Activation = Activation.SILU
    renormalises: bool = False
    shared_ffn: int = 0
    routed_scale: float = 1.0
    n_groups: int = 1
    groups_per_token: int = 1
    group_best: int = 1
    scores: Scores = Scores.SOFTMAX
    margin: float = 0.0
    softcap: float | None = None
    has_router_bias: bool = False
    has_choice_bias: bool = False
    choice_rows: int = 1
    has_expert_bias: bool = False
    has_shared_gate: bool = False
    has_shared_bias: bool = False
    weighs_input: bool = False
    n_identities: int = 0
    is_late: bool = False
    is_apart: bool = False
    limit: float | None = None
    limits_gate: bool = False
    shared_limit: float | None = None
    by_token: bool = False
    score_scale: float = 1.0
    behind_eps: float | None = None
    skew: float = 0.0

    @property
    def n_scored(self) -> int:
        """Outputs of the router."""
        return self.n_experts + self.n_identities

    @property
    def met_experts(self) -> float:
        """Experts with weights that a token meets, on average where all are chosen alike."""
        return self.experts_per_token * self.n_experts / self.n_scored

    @property
    def form(self) -> GateForm | None:
        """Of experts, as `MlpSpec` has it."""
        return _form(self.activation, self.limit, self.limits_gate) if self.is_gated else None

    @property
    def shared(self) -> MlpSpec:
        """The shared experts as the MLP that they are together."""
        limit = self.shared_limit
        return MlpSpec(
            ffn=self.shared_ffn,
            activation=self.activation,
            is_gated=self.is_gated,
            has_bias=self.has_shared_bias,
            limit=limit,
            limits_gate=self.limits_gate and limit is not None,
        )

    @property
    def n_own_norms(self) -> int:
        """Norms of a layer beside those that every layer has, but for the router's."""
        return 3 if self.is_apart else 0

    @property
    def joins_apart(self) -> bool:
        """Whether gate and up are joined, or up is bent, by an operation of its own, not where their product is made."""
        return self.weighs_input or self.form is not None or not self.is_gated

    @property
    def n_products(self) -> int:
        """Matrices of an expert."""
        return 3 if self.is_gated else 2


def _form(activation: Activation, limit: float | None, limits_gate: bool = False) -> GateForm | None:
    held = None if limit is None else GateForm(limit=limit) if limits_gate else GateForm(bound=limit)
    own = {Activation.CLAMPED: CLAMPED, Activation.SQUARED_RELU: SQUARED, Activation.GELU: EXACT}
    return own.get(activation, held)
