"""MLPs and mixtures of layers as handles: gate, up and down, routers, experts, and what every token meets beside them."""

from __future__ import annotations

import math
from typing import Any

from diptych.compute.loading.balance import balance_curve, balance_gated
from diptych.compute.loading.heads import reordered
from diptych.compute.loading.layer_tensors import LayerTensors
from diptych.compute.loading.views import (
    MXFP4_BLOCK,
    Mxfp4Tensor,
    ReorderedTensor,
    RowsTensor,
    ScaledTensor,
    TransposedTensor,
    halves_order,
    second_half_first,
)
from diptych.compute.loading.weights import SlicedTensor, entry_of
from diptych.compute.ops.contract import (
    Experts,
    Heads,
    Linear,
    LinearParts,
    NormParts,
    Table,
    Vector,
    WeightTensor,
)
from diptych.compute.ops.contract_parts import ExpertParts, MixtureParts, Split
from diptych.compute.walk.part_weights import ApartNorms, LatentExperts, SharedExperts
from diptych.ground.errors import LoadError
from diptych.models.gates import XIELU_LEAST, XIELU_SLOPE, Activation
from diptych.models.mlp import MlpSpec, MoeSpec
from diptych.models.spec import Norms


class MlpsLoader(LayerTensors[Table, Vector, Linear, Heads, Experts]):
    """Loads what of a layer stands behind attention, as `HeadsLoader` loads attention."""

    def mlp(
        self, mlp: MlpSpec, norm: NormParts | None, root: str | None = None
    ) -> tuple[NormParts | None, tuple[Linear, Linear], Vector | None]:
        """The norm that a dense MLP reads, its gate_up and down, and the norm that down reads, if it has one. root: where its
        tensors lie, unless in the usual place.
        """
        root, hidden = root or self._dense_root, self.spec.hidden
        widths = (mlp.ffn,) * (2 if mlp.is_gated else 1)
        names, name = self.mlp_names(root, is_gated=mlp.is_gated)
        gate_up = self.linear(root, names, widths, hidden, has_bias=mlp.has_bias)
        if self.names.up_first:
            order = second_half_first(2 * mlp.ffn)
            gate_up = LinearParts(weights=tuple(ReorderedTensor(one, order) for one in gate_up.weights))
        down = self.linear(root, (name,), (hidden,), mlp.ffn, has_bias=mlp.has_bias or mlp.has_down_bias)
        inner = self.inner_norm(f"{root}{self.names.down_norm}", mlp.ffn)
        if self.loader.is_balancing:
            norm, (gate_up,) = self.balance_norm(norm, (gate_up,))
            if inner is None:
                gate_up, down = balance_inner(gate_up, down, mlp)
            else:
                inner, (down,) = self.balance_norm(inner, (down,))
        first = self._first(gate_up, mlp)
        dense = first, self.loader.linear(down, role=self.role(Split.INPUTS, down=hidden))
        return norm, dense, self.norm(inner)

    @property
    def _dense_root(self) -> str:
        """Where a dense MLP lies: transformers saves Kimi Linear's as it saves mixtures."""
        roots = [f"{self.mlp_prefix}{one}" for one in ((self.names.dense,) if self.names.dense else self.names.mlp)]
        return next((one for one in roots if self.source.has(f"{one}{self.names.down}.weight")), roots[0])

    def _first(self, parts: LinearParts, mlp: MlpSpec) -> Linear:
        """What makes the inner values of an MLP: gate and up, or up alone."""
        if not mlp.is_gated:
            return self.loader.gate(parts, mlp.activation, role=self.role(Split.OUTPUTS, up=mlp.ffn))
        role = self.role(Split.OUTPUTS, gate=mlp.ffn, up=mlp.ffn)
        is_apart = mlp.cutoff is not None or mlp.form is not None
        return self.loader.gated(parts, mlp.activation, role=role, is_apart=is_apart)

    def experts(self, moe: MoeSpec, norm: NormParts | None) -> tuple[NormParts | None, dict[str, Any]]:
        """The norm that a router and its experts read, and of `LayerWeights` the mixture of them, what every token meets beside
        it, their own norms, and what takes the stream to the experts and back.
        """
        roots = [f"{self.mlp_prefix}{root}" for root in self.names.mlp]
        root = next((root for root in roots if self.source.has(f"{root}{self.names.router}.weight")), roots[0])
        ffn, hidden = moe.expert_ffn, self.spec.hidden
        if self.names.transposes_router:
            stored = self.source.tensor(f"{root}{self.names.router}.weight", hidden, moe.n_scored)
            router = LinearParts(weights=(TransposedTensor(stored),))
        else:
            router = self.linear(root, (self.names.router,), (moe.n_scored,), hidden, has_bias=moe.has_router_bias)
        experts = self._expert_parts(moe, root)
        shared = self._shared_parts(moe, roots, root)
        latent = self._latent_parts(moe, root)
        own = self.norm_tensor(self.names.apart[0]) if moe.is_apart else None
        if self.loader.is_balancing:
            gate_ups = tuple(expert.gate_up for expert in experts)
            readers = latent[:1] or gate_ups  # of the norm that experts have
            if moe.n_identities or self.parts.norms is Norms.KEPT:  # which give, or go on with, the norm as it is
                scaled = (router, *readers, *shared[::2])
            elif own is None:
                norm, scaled = self.balance_norm(norm, (router, *readers, *shared[::2]))
            else:
                own, readers = self.balance_norm(own, readers)
                norm, beside = self.balance_norm(norm, shared[:1])
                scaled = (router, *readers, *beside)
            router, readers, ends = scaled[0], scaled[1 : len(readers) + 1], scaled[len(readers) + 1 :]
            gate_ups, latent = (gate_ups, (*readers, *latent[1:])) if latent else (readers, latent)
            pairs = [
                balance_inner(gate_up, expert.down, moe) for gate_up, expert in zip(gate_ups, experts, strict=True)
            ]
            experts = tuple(ExpertParts(gate_up=gate_up, down=down) for gate_up, down in pairs)
            if shared:
                shared = (*balance_inner(ends[0], shared[1], moe.shared), *ends[1:])
        sites = {"gate": ffn, "up": ffn} if moe.is_gated else {"up": ffn}
        role = self.role(Split.OUTPUTS, **sites, down=moe.latent or hidden)
        mixture = self.loader.experts(moe, self._mixture_parts(moe, root, router, experts), role=role)
        return norm, {
            "experts": mixture,
            "shared": self._shared(moe, shared),
            "apart": self._apart(own, root),
            "latent": self._latent(latent, None if moe.behind_eps is None else f"{root}pre_expert_norm.weight"),
        }

    def _mixture_parts(
        self, moe: MoeSpec, root: str, router: LinearParts, experts: tuple[ExpertParts, ...]
    ) -> MixtureParts:
        """Router and experts with what the mixture has beside them."""
        name, choice_bias = self.names.choice_bias, None
        bias_name = f"{self.prefix}{name[1:]}" if name.startswith(".") else f"{root}{name}"
        if name in self.names.others and not self.source.has(bias_name):
            bias_name = f"{root}{self.names.others[name]}"
        if moe.has_choice_bias and (self.source.has(bias_name) or not self.names.choice_bias_may_lack):
            choice_bias = self.source.tensor(bias_name, *self.names.choice_axes, moe.n_scored)
            choice_bias = RowsTensor(choice_bias, 0, 1) if moe.choice_rows > 1 else choice_bias
        scales = self.source.tensor(f"{root}{self.names.expert_scales}", moe.n_experts) if moe.is_apart else None
        table = behind = None
        if moe.by_token:
            size = self.spec.vocab_size, moe.experts_per_token
            table = self.source.ids(f"{root}{self.names.router}.tid2eid", *size, below=moe.n_experts)
        if moe.behind_eps is not None:
            stored = self.source.tensor(f"{root}experts.post_expert_norm.weight", moe.latent or self.spec.hidden)
            behind = ScaledTensor(stored, 1.0, self.spec.norm_offset)
        return MixtureParts(
            router=router, experts=experts, choice_bias=choice_bias, scales=scales, table=table, behind=behind
        )

    def _latent_parts(self, moe: MoeSpec, root: str) -> tuple[LinearParts, ...]:
        """What takes the stream to the experts, and back; nothing where they read it."""
        if not moe.latent:
            return ()
        ends = ((moe.latent, self.spec.hidden), (self.spec.hidden, moe.latent))
        return tuple(self.linear(root, (name,), (n,), k) for name, (n, k) in zip(self.names.latent, ends, strict=True))

    def _latent(self, parts: tuple[LinearParts, ...], norm: str | None) -> LatentExperts[Vector, Linear] | None:
        if not parts:
            return None
        down, up = parts
        return LatentExperts(
            down=self.loader.linear(down, role=self.role(Split.OUTPUTS, latent=down.n_outputs)),
            up=self.loader.linear(up, role=self.role(Split.INPUTS, down=up.n_outputs)),
            norm=None if norm is None else self.norm(NormParts(weight=self.source.tensor(norm, down.n_outputs))),
        )

    def _apart(self, own: NormParts | None, root: str) -> ApartNorms[Vector] | None:
        """Norms of mixture, shared experts and router; `own` is the one before the mixture."""
        if own is None:
            return None
        hidden = self.spec.hidden
        of_router = ScaledTensor(self.source.tensor(f"{root}{self.names.router_scale}", hidden), hidden**-0.5)
        behind = [self.norm_tensor(name) for name in self.names.apart[1:]]
        assert behind[0] is not None
        assert behind[1] is not None
        offset = self.spec.norm_offset
        return ApartNorms(
            router=self.loader.norm(NormParts(weight=of_router), is_read=False),
            mixture=self.loader.norm(own, offset=offset),
            behind_shared=self.loader.norm(behind[0], offset=offset, is_read=False),
            behind_mixture=self.loader.norm(behind[1], offset=offset, is_read=False),
        )

    def _expert_parts(self, moe: MoeSpec, root: str) -> tuple[ExpertParts, ...]:
        """One tensor per expert and projection, or all experts stacked in one tensor each."""
        n, ffn, hidden = moe.n_experts, moe.expert_ffn, moe.latent or self.spec.hidden
        widths = (ffn,) * (moe.n_products - 1)
        others, stacked = self.names.others, [f"{root}{name}" for name in self.names.stacked]
        if self.names.stacked[0] in others and not self.source.has(stacked[0]):
            stacked = [f"{root}{others[name]}" for name in self.names.stacked]
        first, second = stacked[0], stacked[-1]
        is_stacked = self.source.has(first) or self.source.has(f"{first}_blocks")
        if is_stacked and self.names.is_flat:
            return self._flat_parts(moe, stacked)
        if is_stacked and self._are_transposed(first, (n, sum(widths), hidden)):
            return self._transposed_parts(moe, first, second)
        if self.source.has(first):
            rows = sum(widths) if len(stacked) == 2 else ffn
            halves = [self.source.tensor(one, n, rows, hidden) for one in stacked[:-1]]
            down = self.source.tensor(second, n, hidden, ffn)
            return tuple(
                ExpertParts(
                    gate_up=LinearParts(weights=tuple(entry_of(one, e) for one in halves)),
                    down=LinearParts(weights=(entry_of(down, e),)),
                )
                for e in range(n)
            )
        *gate_up_names, down_name = self.names.expert
        joined = stacked[0].rpartition(".")[2]  # of one expert, as Quark takes gpt-oss's apart
        is_joined = len(stacked) == 2 and self.source.has(f"{root}experts.0.{joined}.weight")
        names = (joined,) if is_joined else tuple(gate_up_names)

        def gate_up(own: str) -> LinearParts:
            parts = self.linear(own, names, widths, hidden, has_bias=moe.has_expert_bias)
            return reordered(parts, halves_order(2 * ffn, 2 * ffn)) if is_joined and self.names.takes_turns else parts

        return tuple(
            ExpertParts(
                gate_up=gate_up(f"{root}experts.{e}."),
                down=self.linear(f"{root}experts.{e}.", (down_name,), (hidden,), ffn, has_bias=moe.has_expert_bias),
            )
            for e in range(n)
        )

    def _flat_parts(self, moe: MoeSpec, stacked: list[str]) -> tuple[ExpertParts, ...]:
        """All experts below each other: of gate and up one matrix each, and of down, which lies as [inputs, outputs]."""
        ffn, hidden = moe.expert_ffn, self.spec.hidden
        *firsts, down = (self.source.tensor(one, moe.n_experts * ffn, hidden) for one in stacked)
        begins = [e * ffn for e in range(moe.n_experts)]
        return tuple(
            ExpertParts(
                gate_up=LinearParts(weights=tuple(RowsTensor(one, at, at + ffn) for one in firsts)),
                down=LinearParts(weights=(TransposedTensor(RowsTensor(down, at, at + ffn)),)),
            )
            for at in begins
        )

    def _are_transposed(self, first: str, shape: tuple[int, ...]) -> bool:
        """Whether stacked experts lie as [inputs, outputs]: as in the family, or as the first's shape says."""
        if self.names.is_transposed is not None:
            return self.names.is_transposed
        try:
            self.source.tensor(first, *shape)
        except LoadError:
            return True
        return False

    def _transposed_parts(self, moe: MoeSpec, first: str, second: str) -> tuple[ExpertParts, ...]:
        """All experts stacked, as [inputs, outputs] or in MXFP4, rows of gate and up in turn or one behind the other."""
        n, ffn, hidden = moe.n_experts, moe.expert_ffn, self.spec.hidden
        order = halves_order(2 * ffn, 2 * ffn)

        def parts(name: str, rows: int, columns: int, *, takes_turns: bool) -> list[LinearParts]:
            weights: tuple[WeightTensor, ...] = self._stacked(name, n, rows, columns)
            bias = self.source.tensor(f"{name}_bias", n, rows) if moe.has_expert_bias else None
            biases: tuple[WeightTensor, ...] = () if bias is None else tuple(SlicedTensor(bias, e) for e in range(n))
            if takes_turns:
                weights, biases = (tuple(ReorderedTensor(one, order) for one in some) for some in (weights, biases))
            return [LinearParts(weights=(weights[e],), biases=biases[e : e + 1]) for e in range(n)]

        gate_ups = parts(first, 2 * ffn, hidden, takes_turns=self.names.takes_turns)
        downs = parts(second, hidden, ffn, takes_turns=False)
        return tuple(ExpertParts(gate_up=gate_ups[e], down=downs[e]) for e in range(n))

    def _stacked(self, name: str, n: int, rows: int, columns: int) -> tuple[WeightTensor, ...]:
        """n matrices [rows, columns] that lie transposed in one tensor, or as blocks of MXFP4."""
        if not self.source.has(f"{name}_blocks"):
            stacked = self.source.tensor(name, n, columns, rows)
            return tuple(TransposedTensor(entry_of(stacked, e)) for e in range(n))
        if columns % MXFP4_BLOCK:
            raise LoadError(f"{name}_blocks holds rows of {columns}; MXFP4 has blocks of {MXFP4_BLOCK}")
        groups = columns // MXFP4_BLOCK
        blocks = self.source.raw(f"{name}_blocks", n, rows, groups, MXFP4_BLOCK // 2, n_values=n * rows * columns)
        scales = self.source.raw(f"{name}_scales", n, rows, groups, n_values=0)
        return tuple(Mxfp4Tensor(name, blocks, scales, e) for e in range(n))

    def _shared_parts(self, moe: MoeSpec, roots: list[str], root: str) -> tuple[LinearParts, ...]:
        """gate_up and down of the shared experts, and their gate where they have one; nothing where there are none."""
        if not moe.shared_ffn:
            return ()
        names = self.names
        root = next(
            (one for one in (root, *roots) if self.source.has(f"{one}{names.shared}.{names.down}.weight")), root
        )
        ffn, hidden = moe.shared_ffn, self.spec.hidden
        of_shared, name = self.mlp_names(f"{root}{names.shared}.", is_gated=moe.is_gated)
        gate_up = self.linear(
            f"{root}{names.shared}.", of_shared, (ffn,) * (moe.n_products - 1), hidden, has_bias=moe.has_shared_bias
        )
        down = self.linear(f"{root}{names.shared}.", (name,), (hidden,), ffn, has_bias=moe.has_shared_bias)
        gate = (self.linear(root, (names.shared_gate,), (1,), hidden),) if moe.has_shared_gate else ()
        return (gate_up, down, *gate)

    def _shared(self, moe: MoeSpec, parts: tuple[LinearParts, ...]) -> SharedExperts[Linear] | None:
        if not parts:
            return None
        return SharedExperts(
            gate_up=self._first(parts[0], moe.shared),
            down=self.loader.linear(parts[1], role=self.role(Split.INPUTS, down=self.spec.hidden)),
            gate=self.loader.router(parts[2]) if moe.has_shared_gate else None,
        )

    def curve(self, mlp: MlpSpec | MoeSpec | None) -> tuple[float, ...]:
        """The numbers of an activation that has its own, as `Activation` has them."""
        if mlp is None or mlp.activation is not Activation.XIELU:
            return ()
        names = (f"{self.mlp_prefix}{self.names.mlp[0]}act_fn.{name}" for name in ("alpha_p", "alpha_n"))
        numbers = (self.loader.numbers(self.source.tensor(name, 1))[0] for name in names)
        above, below = (math.log1p(math.exp(number)) for number in numbers)
        return above, XIELU_SLOPE + below, XIELU_SLOPE, XIELU_LEAST


def balance_inner(first: LinearParts, down: LinearParts, mlp: MlpSpec | MoeSpec) -> tuple[LinearParts, LinearParts]:
    """What makes the inner values of an MLP or an expert, and down, where a factor passes from one to the other."""
    if not mlp.is_gated:
        return balance_curve(first, down, mlp.activation)
    # what is held within bounds is not linear in up
    return balance_gated(first, down) if mlp.form is None else (first, down)
