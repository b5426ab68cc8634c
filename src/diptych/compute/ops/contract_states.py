"""The part of the op vocabulary that is about states of sequences: how they move on with a step's tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from diptych.compute.ops.contract_streams import Hidden, Linear

Heads = TypeVar("Heads")  # a layer's attention


class StateOps(ABC, Generic[Hidden, Linear, Heads]):
    """What `contract.Ops` has of them."""

    @abstractmethod
    def move_states(
        self, qkv: Hidden, rates: Hidden | None, attention: Heads, *, decays: Hidden | None = None
    ) -> Hidden:
        """a [T, H v] from qkv [T, inputs] and rates [T, R], as `StateSpec` counts them; moves the sequences' states on.

        c = silu(bias + sum over taps of tap * the channel's inputs) is q, k and v, each q and k for H / K value heads.
        Delta rule: q and k have length 1 (with 1e-6 in the root), q is scaled. With beta = most_weight sigmoid(rates[:H]) and
        r = exp(-decay softplus(rates[H:] + shift)): S = r S, S += k (beta (v - S^T k))^T, and S^T q is normed over v. By key
        r is a number for each row of S, of decays [T, H d] in place of rates[H:], and where that has a bound it is
        exp(least_decay sigmoid(decay (decays + shift))).
        SSD: with step = softplus(rate_scale rates + shift) within its limits and r = exp(-decay step): S = r S + k (step v)^T,
        and S^T q + skip v; steady: c is silu of what is projected, and step is 1. Convolution: qkv is b, c and x, and
        a = c * (bias + sum over taps of tap * (b * x)).
        Taps: a = the sum over taps of tap * qkv, bent taps: silu of bias + it.
        Selective: qkv is v, rates are k and q [T, K 2d], decays [T, H v]; with step = softplus(decays + shift) of each channel
        and r = exp(-decay step) of each of its rows: S = r S + k (step v)^T, and S^T q + skip v.
        Recurrent units: qkv is v, rates [T, H 2 v] are of each head what lets values in and what lets them fade, both before a
        sigmoid; with r = exp(-decay sigmoid(fade)): s = r s + sqrt(1 - r^2) sigmoid(in) v, without the root where nothing was
        before.
        A sequence begins with the state that the batch names, or with zeros.
        """

    @abstractmethod
    def by_head(self, h: Hidden, weight: Linear) -> Hidden:
        """y [T, H n]: of each of H equal parts of h its own W^T + b."""
