"""The calibrated model: launch constants and achieved fractions on top of the roofline, with an interval.

    t = step + L launch + B per-sequence + sum over GEMMs of pnorm(bytes / (eb BW), flops / (ef F))
      + pnorm of prefill attention + pnorm of decode attention + all-reduces

Constants come from a `Calibration`: fitted to published results (`data/calibrations.json`), or measured on this
machine (`CalibratedModel.from_profile`). One step with several chunks is one GEMM over all its rows.

>>> from diptych.cost.tables import device_spec, model_spec, quant_spec
>>> from diptych.cost.stacks import calibration_for
>>> device, quant = device_spec("a100-80gb-sxm"), quant_spec("bf16")
>>> predictor = CalibratedModel(model_spec("llama-2-7b"), device, quant, calibration=calibration_for(device))
>>> predictor.predict(StepShape.decode(batch=1, context_tokens=105)).total_s < 0.012
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from diptych.cost.adapters import adapter_bytes, adapter_parameters
from diptych.cost.attended import Attended, Reach, Scored, all_of, pairs, reach_of, read_tokens
from diptych.cost.calibration import Calibration, Constants, Coverage, prompts_in
from diptych.cost.components import attention_widths, cost_of
from diptych.cost.kv_bytes import index_kv_bytes, layer_kv_bytes
from diptych.cost.layout import HOP_S, PLAIN, Layout
from diptych.cost.phase_cost import ATTENTION
from diptych.cost.profile import read_profile
from diptych.cost.reach import Gap, gaps_of, interval, load_gaps, load_spread_squared, squared
from diptych.cost.roofline import attention_peak, compute_dtype, link_rate, longest, multiplies_in, peak_flops_per_s
from diptych.cost.routing import touched_experts
from diptych.cost.weight_formats import experts_of, read_as, weight_class
from diptych.ground.formats import rows_dtype
from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape
from diptych.ground.specs import HardwareSpec, KVSpec, QuantSpec, StepCost, Stored
from diptych.models.mlp import MoeSpec
from diptych.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """What one model costs per unit of work on one of `tp` devices, before any device is known."""

    dense_bytes: float
    dense_class: str
    expert_bytes: float  # one expert, over all its layers
    expert_class: str
    head_bytes: float
    head_class: str
    row_flops: float
    row_activation_bytes: float
    expert_row_flops: float
    head_row_flops: float
    state_row_flops: float
    state_bytes: float  # of a sequence, read and written with each of its chunks
    # reach; over its layers: bytes of one token's KV, FLOPs of a pair in prefill and in decode, where MLA takes the latents
    windows: tuple[tuple[Reach, float, float, float], ...]
    expand_flops: float  # MLA prefill expands each cached latent
    all_reduces: int
    moe_layers: int
    row_link_bytes: float
    logits_link_bytes: float


@lru_cache(maxsize=256)
def _units_of(model: ModelSpec, quant: QuantSpec, kv: KVSpec, tp: int, *, is_ours: bool = False) -> _Units:
    """is_ours: latent attention works on the latents in prefill, too, as the engine does; else prefill expands them."""
    unit = cost_of(model, StepShape.decode(batch=1, context_tokens=1), quant=quant, kv=kv, tp=tp)
    head, experts = unit.component("head"), unit.component("experts")
    body = [part for part in unit.components if part.name not in (*ATTENTION, "head", "experts", "embedding", "states")]
    states = unit.component("states")
    windows: dict[Reach, tuple[float, float, float]] = {}
    expand = 0.0
    for layer, n in model.layer_groups:
        attention, mla, heads = layer.attention, layer.attention.mla, layer.attention.n_heads / tp
        if attention.state is not None or attention.is_absent:
            continue
        if mla is not None and attention.index is None and not mla.n_groups and not is_ours:
            expand += 2.0 * n * mla.kv_rank * heads * (mla.nope_dim + mla.v_dim)
        pair_flops, absorbed = (
            2.0 * n * heads * sum(attention_widths(attention, on_latents=form)) for form in (is_ours, True)
        )
        touched: list[tuple[Reach, float, float, float]] = [
            (reach_of(attention), n * layer_kv_bytes(attention, kv, tp), pair_flops, absorbed)
        ]
        own = attention.own_index
        if own is not None:
            scored = 2.0 * n * own.n_heads * own.key_width
            touched.append((Scored(own.n_unchosen), n * index_kv_bytes(attention, kv), scored, scored))
        for reach, *added in touched:
            sums = windows.get(reach, (0.0, 0.0, 0.0))
            windows[reach] = (sums[0] + added[0], sums[1] + added[1], sums[2] + added[2])
    return _Units(
        dense_bytes=sum(part.weight_bytes for part in body),
        dense_class=weight_class(quant.weight_bytes, quant.name),
        expert_bytes=0.0 if model.moe is None else experts.weight_bytes / model.moe.met_experts,
        expert_class=weight_class(quant.expert_bytes, quant.name),
        head_bytes=head.weight_bytes,
        head_class=weight_class(quant.head_bytes, quant.name),
        row_flops=sum(part.flops for part in body),
        row_activation_bytes=sum(part.activation_bytes for part in body) + experts.activation_bytes,
        expert_row_flops=experts.flops,
        head_row_flops=head.flops,
        state_row_flops=states.flops,
        state_bytes=states.kv_read_bytes + states.kv_write_bytes,
        windows=tuple((window, *sums) for window, sums in windows.items()),
        expand_flops=expand,
        all_reduces=model.n_parts if tp > 1 else 0,
        moe_layers=sum(n for layer, n in model.layer_groups if isinstance(layer.mlp, MoeSpec)),
        row_link_bytes=sum(part.link_bytes for part in unit.components if part.name != "head"),
        logits_link_bytes=head.link_bytes,
    )


_Windows = tuple[tuple[Reach, float, float, float], ...]


@dataclass(frozen=True, slots=True)
class _Terms:
    """One phase's constants, divided out for one model: seconds per unit of work."""

    base_s: float
    sequence_s: float
    prompt_s: float
    prompt_token_s: float
    p: float
    dense_weights_s: float
    expert_s: float  # one expert read, over all MoE layers
    row_s: float
    row_activation_s: float  # between the products
    expert_row_s: float
    head_weights_s: float
    head_row_s: float
    # window, s per kv token, s per pair (prefill, decode); the same of keys and values that lie in the cache
    windows: _Windows
    near_windows: _Windows
    cached_row_s: float  # MLA: expanding one cached latent
    link_base_s: float
    link_row_s: float
    link_logits_row_s: float
    launch_p: float
    adapter_base_s: float  # of a step with adapters
    adapter_parameter_s: float  # one element of A or B read
    adapter_product_s: float  # and multiplied with one row


class CalibratedModel:
    """Predicts step times of one model on `tp` devices under one calibration."""

    def __init__(
        self,
        model: ModelSpec,
        hardware: HardwareSpec,
        quant: QuantSpec,
        *,
        calibration: Calibration,
        kv: KVSpec | None = None,
        tp: int = 1,
        layout: Layout = PLAIN,
    ) -> None:
        """Divide out everything that does not depend on the step. Raises ConfigError for an impossible split."""
        self.model = model
        self.hardware = hardware
        self.quant = quant
        self.kv = kv or KVSpec()
        self.tp = tp
        self.layout = layout
        # once: hashing a model costs more than pricing a step
        self._units = _units_of(model, quant, self.kv, tp, is_ours=calibration.is_local)
        self.calibration = calibration = calibration.of(model)
        self.calibration = calibration = calibration.beside_weights(self.cached_share)
        self._expert_skew = calibration.decode.expert_skew or 0.0  # the router's, whatever the phase
        self._prefill = self._terms(calibration.prefill)
        is_one = calibration.decode is calibration.prefill  # as in a fit, which builds thousands of these
        self._decode = self._prefill if is_one else self._terms(calibration.decode)
        # attention of one token that a plain decode step reads and meets once: a step takes a multiple of it. None: windows
        is_whole = [window for window, *_ in self._decode.windows] == [None]
        self._token_s, self._near_token_s = (
            pnorm(windows[0][1], windows[0][3], self._decode.p) if is_whole else None
            for windows in (self._decode.windows, self._decode.near_windows)
        )
        self._near_tokens = self._tokens_beside_weights()
        self._attended = {window: Attended(window) for window, *_ in self._decode.windows if window is not None}
        self._reach = tuple(
            self._gaps(coverage) for coverage in (calibration.prefill_coverage, calibration.decode_coverage)
        )
        self._spreads = tuple(squared(gaps) for gaps in self._reach)
        # by sequences and rows, which are few numbers: what decode steps share
        self._decode_rows_s: dict[tuple[int, int], float] = {}

    def _gaps(self, coverage: Coverage | None) -> tuple[Gap, ...]:
        if coverage is None:  # measured on this machine
            return ()
        dtype = compute_dtype(self.hardware, self.quant.compute)
        found = gaps_of(coverage, self.model, self.hardware, self.quant.name, dtype=dtype, tp=self.tp)
        return found if self.layout == PLAIN else (*found, _layout_gap(self.layout))

    def gaps(self, work: StepShape) -> tuple[Gap, ...]:
        """Where this step leaves the rows behind the constants of its phase; empty: nowhere, or measured locally."""
        is_decode = work.phase is Phase.DECODE
        coverage = self.calibration.decode_coverage if is_decode else self.calibration.prefill_coverage
        found = self._reach[is_decode]
        return found if coverage is None else found + load_gaps(coverage, batch=work.n_sequences, tokens=_longest(work))

    def _interval(self, work: StepShape, *, is_decode: bool) -> tuple[float, float]:
        """(low, high) factors of the 80 % interval: wider with every gap between the step and the rows."""
        calibration = self.calibration
        coverage = calibration.decode_coverage if is_decode else calibration.prefill_coverage
        residual = calibration.decode_residual if is_decode else calibration.prefill_residual
        if coverage is None:
            return 1.0 + residual.low, 1.0 + residual.high
        load = load_spread_squared(coverage, batch=work.n_sequences, tokens=_longest(work))
        return interval(residual, self._spreads[is_decode] + load)

    @property
    def cached_share(self) -> float:
        """How much of the weights lies in the last-level cache that was measured on this machine; 1: memory is never asked."""
        cache = self.calibration.cache
        return 0.0 if cache is None else cache.share_of(self._weight_bytes)

    @property
    def _weight_bytes(self) -> float:
        units, n_experts = self._units, 0 if self.model.moe is None else self.model.moe.n_experts
        return units.dense_bytes + n_experts * units.expert_bytes + units.head_bytes

    def _tokens_beside_weights(self) -> float:
        """Tokens whose keys and values lie in the cache with all the weights; below 0 where not even those do."""
        cache, token_bytes = self.calibration.cache, sum(kv_bytes for _, kv_bytes, *_ in self._units.windows)
        if cache is None or self.cached_share < 1.0 or not token_bytes:
            return -1.0
        return (cache.bytes - self._weight_bytes) / token_bytes

    def _windows(self, terms: _Terms, shape: StepShape) -> _Windows:
        """Attention's prices: the cache's where what the step reads of keys and values fits in beside the weights."""
        is_near = shape.decode_context_tokens + shape.prefill_context_tokens <= self._near_tokens
        return terms.near_windows if is_near else terms.windows

    @classmethod
    def from_profile(
        cls, profile: Mapping[str, Any], model: ModelSpec, quant: QuantSpec, *, kv: KVSpec | None = None
    ) -> CalibratedModel:
        """A predictor from a profile that `diptych lab calibrate` wrote. Raises ConfigError when it is damaged."""
        hardware, calibration = read_profile(profile)
        return cls(model, hardware, quant, calibration=calibration, kv=kv)

    def with_kv_in_memory(self) -> CalibratedModel:
        """The same where keys and values come from memory, however few they are: a token has one price at any length."""
        cache = self.calibration.cache
        if cache is None or cache.kv_eb is None:
            return self
        calibration = replace(self.calibration, cache=replace(cache, kv_eb=None))
        shape = (self.model, self.hardware, self.quant)
        return CalibratedModel(*shape, calibration=calibration, kv=self.kv, tp=self.tp, layout=self.layout)

    def _terms(self, c: Constants) -> _Terms:
        units, hardware, quant = self._units, self.hardware, self.quant
        bandwidth = hardware.memory_bytes_per_s
        flop_s = self._flop_s(quant.mix, c, c.compute_fraction)
        head_flop_s = self._flop_s(
            (Stored(1.0, quant.head_bytes, quant.head_compute or quant.compute),), c, c.compute_fraction
        )
        is_unpacked = not multiplies_in(hardware, quant.compute)  # e.g. fp8 weights on an A100
        has_fp4 = "fp4" in hardware.flops_per_s
        of_adapters = rows_dtype(quant.compute)  # which meet the rows of the weights beside them
        # in a dtype of the cache's own only where that was measured: a share of another's peak says nothing of it
        is_measured = self.kv.compute is None or self.kv.name in c.attention_ef_of
        kv = self.kv if is_measured else replace(self.kv, compute=None)
        attention_rate = attention_peak(hardware, quant, kv) * c.attention_fraction(kv.name)
        adapter_share = c.adapter_fraction(compute_dtype(hardware, of_adapters))
        # on this machine states move on in fp32; devices with a product of matrices multiply chunks of them
        state_rate = hardware.flops_per_s.get("fp32", attention_rate) if self.calibration.is_local else attention_rate
        activations = c.activations_rate(bandwidth)
        adapter_width = adapter_bytes(quant, is_ours=self.calibration.is_local)
        cache, near_share = self.calibration.cache, self.cached_share
        link = link_rate(hardware, self.tp * self.layout.dp) * c.link_fraction
        layout, parts = self.layout, self.layout.parts
        exchange_row_s, exchanges = self._exchange(link)

        def windows_at(kv_rate: float) -> _Windows:
            return tuple(
                (window, kv_bytes / kv_rate / parts, pairs / attention_rate / parts, absorbed / attention_rate / parts)
                for window, kv_bytes, pairs, absorbed in units.windows
            )

        windows = near_windows = windows_at(bandwidth * c.kv_eb)
        if cache is not None and cache.kv_eb is not None:
            near_windows = windows_at(cache.bytes_per_s * cache.kv_eb)

        def weights_s(n_bytes: float, weights: str, mix: tuple[Stored, ...] = ()) -> float:
            if mix:
                each = [(one.share * one.bytes, weight_class(one.bytes, quant.name)) for one in mix]
                return sum(n_bytes * part / sum(part for part, _ in each) * weights_s(1.0, name) for part, name in each)
            form = read_as(weights, is_unpacked=is_unpacked, has_fp4=has_fp4)
            far_s = n_bytes / (bandwidth * c.weight_fraction(form))
            if cache is None or near_share == 0.0:
                return far_s
            return near_share * n_bytes / cache.weights_rate(form) + (1.0 - near_share) * far_s

        return _Terms(
            base_s=c.launch_s(self.model),
            sequence_s=(c.sequence_s + units.state_bytes / (bandwidth * c.kv_eb)) / parts,
            prompt_s=c.prompt_s / parts,
            prompt_token_s=c.prompt_token_s / parts,
            p=c.p,
            dense_weights_s=weights_s(units.dense_bytes, units.dense_class, quant.mix),
            expert_s=weights_s(units.expert_bytes, units.expert_class, quant.expert_mix) / layout.dp,
            row_s=(units.row_flops * flop_s + units.state_row_flops / state_rate) / parts,
            row_activation_s=units.row_activation_bytes / activations / parts if activations else 0.0,
            expert_row_s=units.expert_row_flops
            * self._flop_s(experts_of(quant, hardware), c, c.expert_fraction)
            / parts,
            head_weights_s=weights_s(units.head_bytes, units.head_class),
            head_row_s=units.head_row_flops * head_flop_s / parts,
            windows=windows,
            near_windows=near_windows,
            cached_row_s=units.expand_flops * flop_s / parts,
            link_base_s=(units.all_reduces + exchanges) * self._meeting_s(c) + (layout.pp > 1) * layout.pp * HOP_S,
            link_row_s=units.row_link_bytes * self._sent(c) / link / parts + exchange_row_s,
            link_logits_row_s=units.logits_link_bytes / link / parts,
            launch_p=c.launch_p,
            adapter_base_s=self.model.n_layers * c.adapter_layer_s,
            adapter_parameter_s=weights_s(adapter_width, units.dense_class) / self.tp,
            adapter_product_s=2.0 / (peak_flops_per_s(hardware, of_adapters) * adapter_share * self.tp) / parts,
        )

    def _flop_s(self, mix: tuple[Stored, ...], c: Constants, fraction: Callable[[str], float]) -> float:
        """Seconds of one operation in products of weights so stored."""
        hardware, whole = self.hardware, (Stored(1.0, self.quant.weight_bytes, self.quant.compute, self.quant.pace),)
        return sum(
            one.share
            / (
                peak_flops_per_s(hardware, one.compute)
                * fraction(compute_dtype(hardware, one.compute))
                * c.group_pace(one)
            )
            for one in mix or whole
        )

    def _sent(self, c: Constants) -> float:
        """Of an all-reduce in bytes of a ring's: of one shot tp - 1 parts for 2 (tp - 1) / tp of one."""
        return 1.0 if self.tp == 1 else 1.0 + (c.one_shot or 0.0) * (self.tp / 2.0 - 1.0)

    def _meeting_s(self, c: Constants) -> float:
        """Latency of one message that all devices of a layer wait for."""
        return c.allreduce_s * math.pow(max(self.tp * self.layout.dp, 2) / 2.0, c.allreduce_growth)

    def _exchange(self, link: float) -> tuple[float, int]:
        """Between groups and stages: seconds of a row of the whole step, and messages of a step that wait for one another."""
        layout, model, width = self.layout, self.model, self.quant.activation_bytes * self.model.hidden
        row_s = width / link if layout.pp > 1 else 0.0
        if layout.dp == 1 or model.moe is None:
            return row_s, 0
        mixtures = self._units.moe_layers
        away = (layout.dp - 1) / layout.dp
        return row_s + 2 * mixtures * model.moe.met_experts * width * away / layout.parts / link, 2 * mixtures

    def predict(self, work: StepShape) -> StepCost:
        """The predicted time of a step with its parts and its interval."""
        is_decode = work.phase is Phase.DECODE
        terms = self._decode if is_decode else self._prefill
        linear = self._linear(terms, work)
        prefill_kv_s = prefill_pair_s = decode_kv_s = decode_pair_s = 0.0
        reads, writes = self._crowded(work)
        for window, kv_s, pair_s, absorbed_pair_s in self._windows(terms, work):
            for shape in work.shapes:
                if shape.is_decode:
                    decode_kv_s += writes * shape.count * read_tokens(window, shape) * kv_s
                    decode_pair_s += writes * shape.count * pairs(window, shape) * absorbed_pair_s
                else:
                    prefill_kv_s += reads * shape.count * read_tokens(window, shape) * kv_s
                    prefill_pair_s += reads * shape.count * pairs(window, shape) * pair_s
        attention_s = pnorm(prefill_kv_s, prefill_pair_s, terms.p) + pnorm(decode_kv_s, decode_pair_s, terms.p)
        rows = reads * work.prefill_tokens + writes * work.decode_tokens
        link_s = terms.link_base_s + rows * terms.link_row_s + work.n_logits_rows * terms.link_logits_row_s
        host_s = terms.base_s + _sequences_s(terms, work)
        adapters_s = _adapters_s(terms, work) if work.adapters else 0.0
        total_s = _join(terms, linear.total_s + attention_s + link_s + adapters_s, work)
        low, high = self._interval(work, is_decode=is_decode)
        compute_s = linear.compute_s + prefill_pair_s + decode_pair_s
        memory_s = linear.memory_s + prefill_kv_s + decode_kv_s
        return StepCost(
            compute_s=compute_s,
            memory_s=memory_s,
            link_s=link_s,
            host_s=host_s,
            total_s=total_s,
            low_s=total_s * low,
            high_s=total_s * high,
            bound=longest(compute_s=compute_s, memory_s=memory_s, link_s=link_s, host_s=host_s),
            is_bound=False,
            parts_s=MappingProxyType(
                {
                    "linear": linear.total_s,
                    "attention": attention_s,
                    "link": link_s,
                    "adapters": adapters_s,
                    "launch": total_s - linear.total_s - attention_s - link_s - adapters_s,
                }
            ),
        )

    def _linear(self, terms: _Terms, work: StepShape) -> _LinearTime:
        rows, (reads, writes) = work.n_tokens, self._crowded(work)
        experts_s = self._experts(rows) * terms.expert_s
        compute_s = (reads * work.prefill_tokens + writes * work.decode_tokens) * terms.row_s
        compute_s += reads * work.prefill_start_tokens * terms.cached_row_s
        logits = work.n_logits_rows
        head_weights_s = terms.head_weights_s if logits else 0.0
        head_s = pnorm(head_weights_s, logits * terms.head_row_s, terms.p)
        return _LinearTime(
            compute_s=compute_s + self._expert_rows(rows) * terms.expert_row_s + logits * terms.head_row_s,
            memory_s=terms.dense_weights_s + experts_s + head_weights_s,
            total_s=pnorm(terms.dense_weights_s, compute_s, terms.p)
            + (reads * work.prefill_tokens + writes * work.decode_tokens) * terms.row_activation_s
            + pnorm(experts_s, self._expert_rows(rows) * terms.expert_row_s, terms.p)
            + head_s,
        )

    def _crowded(self, work: StepShape) -> tuple[float, float]:
        """How many times its even share of the prompts, and of the decoding sequences, the busiest group or stage has.

        A prompt is read by one group; only as many sequences as there are parts keep all of them at work.
        """
        parts = self.layout.parts
        if parts == 1:
            return _EVENLY
        decoding = min(work.decode_tokens, work.n_sequences)
        return max(1.0, parts / max(prompts_in(work), 1)), max(1.0, parts / max(decoding, 1))

    def _experts(self, rows: int) -> float:
        moe = self.model.moe
        if moe is None:
            return 0.0
        skew = moe.skew or self._expert_skew
        read = touched_experts(moe, -(-rows // self.layout.pp), skew=skew)
        return self.layout.most_experts(self.model, read)

    def _expert_rows(self, rows: int) -> float:
        """As many rows as the busiest devices have work for."""
        return rows * self.layout.crowding(self.model, rows / self.layout.pp)

    def predict_s(self, shape: StepShape) -> float:
        """Seconds a step will take: `predict(shape).total_s` from the sums that a shape carries.

        Quick enough for the scheduler's bisection: it costs the chunks added since the last call at most.
        """
        is_decode = shape.decode_tokens == shape.n_tokens
        if is_decode and self._token_s is not None and shape.n_tokens == shape.n_sequences == shape.n_logits_rows:
            return self.predict_run_s(shape, 1)[0]
        terms = self._decode if is_decode else self._prefill
        p, rows, logits = terms.p, shape.n_tokens, shape.n_logits_rows
        key = shape.n_sequences, rows
        known = self._decode_rows_s.get(key) if is_decode and rows == logits else None
        device_s = self._rows_s(terms, shape) if known is None else known
        if known is None and is_decode and rows == logits:
            self._decode_rows_s[key] = device_s
        prefill_kv_s = prefill_pair_s = decode_kv_s = decode_pair_s = 0.0
        for window, kv_s, pair_s, absorbed_pair_s in self._windows(terms, shape):
            seen = self._attended[window].of(shape) if window is not None else all_of(shape)
            prefill_kv_s += seen[0] * kv_s
            prefill_pair_s += seen[1] * pair_s
            decode_kv_s += seen[2] * kv_s
            decode_pair_s += seen[3] * absorbed_pair_s
        reads, writes = _EVENLY
        link_rows: float = rows
        if self.layout.parts > 1:
            reads, writes = self._crowded(shape)
            link_rows = reads * shape.prefill_tokens + writes * shape.decode_tokens
        device_s += reads * pnorm(prefill_kv_s, prefill_pair_s, p) + writes * pnorm(decode_kv_s, decode_pair_s, p)
        device_s += terms.link_base_s + link_rows * terms.link_row_s + logits * terms.link_logits_row_s
        if shape.adapters:
            device_s += _adapters_s(terms, shape)
        return _join(terms, device_s, shape)

    def predict_run_s(self, shape: StepShape, n_steps: int) -> list[float]:
        """`predict_s(shape.later(k))` for k below n_steps, of a step that only decodes one token of each sequence."""
        terms, rows, tokens = self._decode, shape.n_tokens, shape.decode_context_tokens
        is_near = tokens + (n_steps - 1) * rows <= self._near_tokens
        token_s = self._near_token_s if is_near else self._token_s
        if token_s is None or (not is_near and tokens <= self._near_tokens):  # or some of them read from either
            return [self.predict_s(shape.later(step)) for step in range(n_steps)]
        device_s = self._decode_rows_s.get((rows, rows))
        if device_s is None:
            device_s = self._decode_rows_s[rows, rows] = self._rows_s(terms, shape)
        launch_p, writes = terms.launch_p, self._crowded(shape)[1]
        link_s = terms.link_base_s + writes * rows * terms.link_row_s + rows * terms.link_logits_row_s
        if shape.adapters:
            device_s += _adapters_s(terms, shape)
        base_s, sequences_s = terms.base_s, rows * terms.sequence_s
        contexts = range(tokens, tokens + n_steps * rows, rows)
        if launch_p == 1.0:
            return [base_s + (device_s + writes * (context * token_s) + link_s) + sequences_s for context in contexts]
        return [
            pnorm(base_s, device_s + writes * (context * token_s) + link_s, launch_p) + sequences_s
            for context in contexts
        ]

    def _rows_s(self, terms: _Terms, shape: StepShape) -> float:
        """Everything that is done to rows one by one: linear layers, experts, the head."""
        p, rows, logits = terms.p, shape.n_tokens, shape.n_logits_rows
        reads, writes = self._crowded(shape)
        crowded_rows = reads * shape.prefill_tokens + writes * shape.decode_tokens
        dense_s = crowded_rows * terms.row_s + reads * shape.prefill_start_tokens * terms.cached_row_s
        device_s = pnorm(terms.dense_weights_s, dense_s, p) + crowded_rows * terms.row_activation_s
        if terms.expert_s:
            device_s += pnorm(self._experts(rows) * terms.expert_s, self._expert_rows(rows) * terms.expert_row_s, p)
        if logits:
            device_s += pnorm(terms.head_weights_s, logits * terms.head_row_s, p)
        return device_s


_EVENLY = (1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinearTime:
    compute_s: float
    memory_s: float
    total_s: float


def _adapters_s(terms: _Terms, shape: StepShape) -> float:
    """Low-rank products beside the matrices: each adapter read once, and multiplied with its rows."""
    read_s = adapter_parameters(shape) * terms.adapter_parameter_s
    return terms.adapter_base_s + read_s + shape.adapted_products * terms.adapter_product_s


def _join(terms: _Terms, device_s: float, shape: StepShape) -> float:
    """Launch and device one after the other, or partly side by side where launches run ahead."""
    return pnorm(terms.base_s, device_s, terms.launch_p) + _sequences_s(terms, shape)


def _sequences_s(terms: _Terms, shape: StepShape) -> float:
    """Host time of every sequence, and of the prompts among them."""
    sequences_s = shape.n_sequences * terms.sequence_s
    prompt_tokens = shape.prefill_tokens
    if not prompt_tokens:
        return sequences_s
    return sequences_s + prompts_in(shape) * terms.prompt_s + prompt_tokens * terms.prompt_token_s


def pnorm(a: float, b: float, p: float) -> float:
    """(a^p + b^p)^(1/p): the sum at p = 1, the maximum at p = infinity, stable for tiny numbers."""
    high, low = (a, b) if a >= b else (b, a)
    if low <= 0.0:
        return high
    return float(high * (1.0 + (low / high) ** p) ** (1.0 / p))


def _layout_gap(layout: Layout) -> Gap:
    text = f"no row of such a layout ({layout.words}); it is priced by formulas"
    return Gap(axis="layout", text=text, spread=math.sqrt(layout.spread_squared))


def _longest(work: StepShape) -> int:
    return max(shape.end_pos for shape in work.shapes)
