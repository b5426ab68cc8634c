"""Which experts a token has on the torch backend, and by what each is weighed.

Legend: T packed tokens, E experts, k of them for a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diptych.compute.ops.torch.loader import TorchExperts
from diptych.models.mlp import MoeSpec, Scores

SMALLEST_SUM = 1e-20  # of the chosen experts' scores, which sigmoids may all leave at nothing


def route(
    logits_TE: torch.Tensor, experts: TorchExperts, token_ids_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, experts), each [T, k]."""
    own_Tk = None if experts.table is None else experts.table[token_ids_T]
    weights_Tk, chosen_Tk = _route(logits_TE, experts.choice_bias, experts.spec, own_Tk)
    return weights_Tk if experts.scales is None else weights_Tk * experts.scales[chosen_Tk], chosen_Tk


def _route(
    logits_TE: torch.Tensor, choice_bias: torch.Tensor | None, spec: MoeSpec, own_Tk: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, experts), each [T, k]."""
    if spec.score_scale != 1.0:
        logits_TE = logits_TE * spec.score_scale
    if spec.softcap is not None:
        logits_TE = torch.tanh(logits_TE / spec.softcap) * spec.softcap
    if spec.scores is Scores.SPARSEMIXER:
        return _route_one_by_one(logits_TE, spec)
    scores_TE = logits_TE.softmax(dim=-1) if spec.scores is Scores.SOFTMAX else logits_TE.sigmoid()
    if spec.scores is Scores.ROOT_SOFTPLUS:
        scores_TE = F.softplus(logits_TE).sqrt()
    choice_TE = logits_TE if spec.scores is Scores.LATE_SIGMOID else scores_TE
    choice_TE = choice_TE if choice_bias is None else choice_TE + choice_bias
    if spec.n_groups > 1:
        by_group = choice_TE.unflatten(1, (spec.n_groups, -1))
        groups_Tg = (
            by_group.topk(spec.group_best, dim=-1).values.sum(dim=-1).topk(spec.groups_per_token, dim=-1).indices
        )
        is_out = torch.ones(by_group.shape[:2], dtype=torch.bool, device=logits_TE.device).scatter(1, groups_Tg, False)
        choice_TE = by_group.masked_fill(is_out[..., None], float("-inf")).flatten(1)
    chosen_Tk = choice_TE.topk(spec.experts_per_token, dim=-1).indices if own_Tk is None else own_Tk
    weights_Tk = scores_TE.gather(1, chosen_Tk)
    if spec.renormalises:
        weights_Tk = weights_Tk / weights_Tk.sum(dim=-1, keepdim=True).clamp(min=SMALLEST_SUM)
    return weights_Tk * spec.routed_scale, chosen_Tk


def _route_one_by_one(logits_TE: torch.Tensor, spec: MoeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    left_TE, weights, chosen = logits_TE, [], []
    for _ in range(spec.experts_per_token):
        best_T1, index_T1 = left_TE.max(dim=-1, keepdim=True)
        is_far = best_T1 - left_TE > spec.margin * left_TE.abs().clamp(min=best_T1)
        weights.append(left_TE.masked_fill(is_far, float("-inf")).softmax(dim=-1).gather(1, index_T1))
        chosen.append(index_T1)
        left_TE = left_TE.scatter(1, index_T1, float("-inf"))
    return torch.cat(weights, dim=1) * spec.routed_scale, torch.cat(chosen, dim=1)
