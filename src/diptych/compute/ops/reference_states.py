"""The plain definition of right for what moves the states of sequences on: one sequence, one token and one head at a time.

Legend: as in `reference`; C channels of taps, R rates of a token, v a value's width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from diptych.compute.ops.contract import Activation
from diptych.compute.ops.reference import curve, rms_norm
from diptych.models.states import StateRule, StateSpec


def move_states(
    qkv: torch.Tensor,
    rates: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor],
    form: StateSpec,
    rule: Mapping[str, torch.Tensor],
    *,
    scale: float,
    eps: float,
    decays: torch.Tensor | None = None,
    begins: bool = False,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """One sequence's a [T, H v] fp32 and the state behind it: matrices [H, d, v] and the last inputs of taps.

    qkv [T, C], rates [T, R], decays [T, H d] by key; rule: what `RuleParts` has, by name: taps [C, n], of heads [H], norm [v].
    begins: whether nothing came before.
    """
    if form.is_unit:
        a, units = _recur(qkv.float(), rates.float(), state[0].float().clone(), rule, begins=begins)
        return a, (units, state[1])
    if form.is_selective:
        assert decays is not None
        a, matrix = _select(qkv.float(), rates.float(), decays.float(), state[0].float().clone(), rule)
        return a, (matrix, state[1])
    matrices, tail = (one.float().clone() for one in state)
    heads, keys, group = form.n_value_heads, form.n_key_heads * form.key_dim, form.n_value_heads // form.n_key_heads
    out = torch.zeros(len(qkv), heads, form.value_dim)
    is_delta, bias = form.rule is StateRule.DELTA, rule.get("tap_bias", torch.zeros(form.n_channels))
    for t in range(len(qkv)):
        given = qkv[t].float()
        if form.rule is StateRule.CONVOLUTION:
            b, c, x = given.chunk(3)
            seen = torch.cat([tail, (b * x)[None]])
            out[t], tail = (c * (bias + (seen * rule["taps"].T).sum(dim=0))).view(heads, -1), seen[1:]
            continue
        seen = torch.cat([tail, given[None]])
        if not form.has_matrix:
            sums, tail = bias + (seen * rule["taps"].T).sum(dim=0), seen[1:]
            out[t] = (curve(sums, Activation.SILU) if form.rule is StateRule.BENT_TAPS else sums).view(heads, -1)
            continue
        sums = given if form.is_steady else bias + (seen * rule["taps"].T).sum(dim=0)
        mixed, tail = curve(sums, Activation.SILU), seen[1:]
        for h in range(heads):
            at = h // group * form.key_dim
            q, k = mixed[at : at + form.key_dim], mixed[keys + at : keys + at + form.key_dim]
            v = mixed[2 * keys :][h * form.value_dim : (h + 1) * form.value_dim]
            if form.is_steady:
                matrices[h] = torch.exp(-rule["decay"][h]) * matrices[h] + torch.outer(k, v)
                out[t, h] = q @ matrices[h]
                continue
            own = slice(h * form.key_dim, (h + 1) * form.key_dim)
            rate, shift = (
                (rates[t, h - heads], rule["shift"][h]) if decays is None else (decays[t, own], rule["shift"][own])
            )
            given = form.rate_scale * rate.float() + shift
            step = torch.log1p(torch.exp(given))
            if is_delta:
                q, k = scale * q / torch.sqrt(q @ q + 1e-6), k / torch.sqrt(k @ k + 1e-6)
                log = -rule["decay"][h] * step
                if form.least_decay is not None:
                    log = form.least_decay * torch.sigmoid(rule["decay"][h] * given)
                matrices[h] *= torch.exp(log).view(-1, 1)
                matrices[h] += torch.outer(k, form.most_weight * rates[t, h].float().sigmoid() * (v - k @ matrices[h]))
                out[t, h] = q @ matrices[h]
            else:
                step = step.clamp(*form.step_limits)
                matrices[h] = torch.exp(-rule["decay"][h] * step) * matrices[h] + torch.outer(k, step * v)
                out[t, h] = q @ matrices[h] + rule["skip"][h] * v
    a = rms_norm(out, rule["norm"], eps=eps) if is_delta else out
    return a.flatten(1), (matrices, tail)


def _select(
    v: torch.Tensor,
    rates: torch.Tensor,
    steps: torch.Tensor,
    matrices: torch.Tensor,
    rule: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the selective rule: v and steps [T, H v], k and q [T, K 2 d], decays [H v, d]."""
    out, (_, d, width) = torch.zeros_like(v), matrices.shape
    n_keys = rates.shape[1] // (2 * d)
    for t in range(len(v)):
        for c in range(v.shape[1]):
            k, q = rates[t].view(n_keys, 2, d)[c * n_keys // v.shape[1]]
            step = torch.log1p(torch.exp(steps[t, c] + rule["shift"][c]))
            column = matrices[c // width, :, c % width]
            column.copy_(torch.exp(-rule["decay"][c] * step) * column + k * (step * v[t, c]))
            out[t, c] = q @ column + rule["skip"][c] * v[t, c]
    return out, matrices


def _recur(
    v: torch.Tensor, gates: torch.Tensor, units: torch.Tensor, rule: Mapping[str, torch.Tensor], *, begins: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by recurrent units [H, 1, v]: v [T, H v], gates [T, H 2 v], decays [H v]."""
    out, (heads, _, width) = torch.zeros_like(v), units.shape
    for t in range(len(v)):
        for h in range(heads):
            own = slice(h * width, (h + 1) * width)
            let_in, fade = torch.sigmoid(gates[t, 2 * h * width :][: 2 * width]).chunk(2)
            left = torch.exp(-rule["decay"][own] * fade)
            weight = 1.0 if begins and t == 0 else torch.sqrt(1 - left * left)
            units[h, 0] = left * units[h, 0] + weight * let_in * v[t, own]
            out[t, own] = units[h, 0]
    return out, units
