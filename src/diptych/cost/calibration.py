"""What one software achieves on one device: the constants that turn a roofline into a prediction.

>>> Constants(eb={"bf16": 0.82}).weight_fraction("int8")
Traceback (most recent call last):
diptych.cost.roofline.NoRate: the calibration has no achieved fraction for int8 and no fallback
hint: it has those of bf16
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from diptych.cost.roofline import NoRate
from diptych.ground.formats import rows_dtype
from diptych.ground.shape import StepShape
from diptych.ground.specs import Stored
from diptych.models.mlp import MoeSpec
from diptych.models.spec import ModelSpec

# Expert GEMMs against the dense ones of the same software and dtype, where no row tells: measured ratios run from
# 0.15 (fp8, TensorRT-LLM) over 0.3 (integers, llama.cpp on CUDA) to 0.9 (llama.cpp on Metal).
EXPERT_SHARE = 0.4
# The same for low-rank products: our kernels reach 0.15 (int8, 16 rows) to 0.6 (int8, a prompt) of what they do elsewhere.
ADAPTER_SHARE = 0.35
# Of weights of so many times a cache's bytes nothing is found there any more when they are read again from the front. Measured
# on a cache shared with others (Zen 4): 0.86 of 24 MiB were found, 0.45 of 48, 0.16 of 96.
CACHE_REACH = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What one software on one device achieves in one phase.

    eb: fraction of memory bandwidth by weight format; ef: fraction of peak by compute dtype; both fall back to "other".
    p: exponent of the p-norm (large: a sharp maximum). kv_eb, attention_ef: the same fractions inside attention;
    attention_ef_of: by KV format, where one was measured apart, since what is stored narrow is unpacked first.
    step_s, layer_s, sequence_s: launch and host time per step, per layer, per sequence; prompt_s, prompt_token_s: host time
    per prompt chunk and per token of it, on top of that (`Host`); moe_layer_s, latent_layer_s: on top of layer_s in layers with
    experts, and with latent attention. allreduce_s: latency of one all-reduce (of two devices; of more, times the power
    allreduce_growth of their number over two, as all wait for the last); link_fraction: achieved share of the link.
    one_shot: share of the all-reduces in which every device sends all it has to every other, as kernels for small messages do;
    the rest goes round in a ring.
    launch_p: exponent that joins launch and device time: 1 adds them, a large one lets the longer hide the other.
    expert_skew: how unevenly experts are chosen where the model does not say: the i-th in proportion to i^-expert_skew.
    expert_ef: share of the peak in expert GEMMs by compute dtype; where no mixture was measured in a dtype, experts reach
    EXPERT_SHARE of what the other matrices do. adapter_layer_s, adapter_ef: the same of low-rank products, per layer of a step
    that has any, and ADAPTER_SHARE where they were not measured.
    group_ends: how many times as long as `formats.END` says the end of a group of codes takes, by the dtype of its products.
    activation_bytes_per_s: at which rows pass between the products (norms, rotations, activations, other number formats),
    beside the products' own time; activation_eb: the same as a share of the memory's bandwidth, where it was not measured in
    bytes. None of both: it is in the products' share of the peak.
    """

    step_s: float = 0.0
    layer_s: float = 0.0
    moe_layer_s: float = 0.0
    sequence_s: float = 0.0
    prompt_s: float = 0.0
    prompt_token_s: float = 0.0
    eb: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({"other": 0.8}))
    ef: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({"other": 0.6}))
    p: float = 3.0
    kv_eb: float = 0.8
    attention_ef: float = 0.4
    allreduce_s: float = 0.0
    allreduce_growth: float = 0.0
    link_fraction: float = 0.6
    launch_p: float = 1.0
    expert_ef: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    adapter_layer_s: float = 0.0
    adapter_ef: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    attention_ef_of: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    group_ends: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    activation_bytes_per_s: float | None = None
    activation_eb: float | None = None
    expert_skew: float | None = None
    one_shot: float | None = None
    latent_layer_s: float | None = None

    def launch_s(self, model: ModelSpec) -> float:
        """Launches and host time of a step, beside what its sequences take."""
        experts = sum(n for layer, n in model.layer_groups if isinstance(layer.mlp, MoeSpec))
        latent_s = latent_layers(model) * (self.latent_layer_s or 0.0)
        return self.step_s + model.n_parts / 2 * self.layer_s + experts * self.moe_layer_s + latent_s

    def weight_fraction(self, weight_format: str) -> float:
        """Achieved share of memory bandwidth when reading weights of this format; of fp4 int4's where it was not measured."""
        if weight_format == "fp4" and "fp4" not in self.eb:
            weight_format = "int4"
        return _pick(self.eb, weight_format)

    def compute_fraction(self, dtype: str) -> float:
        """Achieved share of the peak when multiplying in this dtype."""
        return _pick(self.ef, dtype)

    def expert_fraction(self, dtype: str) -> float:
        """Achieved share of the peak in expert GEMMs in this dtype."""
        found = self.expert_ef.get(dtype)
        return EXPERT_SHARE * self.compute_fraction(dtype) if found is None else found

    def group_pace(self, stored: Stored) -> float:
        """The part of their dtype's rate that is left to weights whose sums end with every group (`Stored.pace`)."""
        ends = self.group_ends.get(rows_dtype(stored.compute), 1.0)
        return 1.0 / (1.0 + ends * (1.0 / stored.pace - 1.0))

    def attention_fraction(self, kv_format: str) -> float:
        """Achieved share of the peak inside attention over keys and values of this format."""
        return self.attention_ef_of.get(kv_format, self.attention_ef)

    def activations_rate(self, bandwidth: float) -> float | None:
        """Bytes per second at which rows pass between the products, on a memory of this bandwidth."""
        if self.activation_bytes_per_s is None and self.activation_eb is not None:
            return bandwidth * self.activation_eb
        return self.activation_bytes_per_s

    def adapter_fraction(self, dtype: str) -> float:
        """Achieved share of the peak in low-rank products beside matrices of this dtype."""
        found = self.adapter_ef.get(dtype)
        return ADAPTER_SHARE * self.compute_fraction(dtype) if found is None else found


def latent_layers(model: ModelSpec) -> int:
    """How many of a model's layers have latent attention."""
    return sum(n for layer, n in model.layer_groups if layer.attention.mla is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Measured / predicted - 1 on rows that the fit did not see: the bounds of the 80 % interval, median size, rows."""

    low: float
    high: float
    median_error: float
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What the rows behind one phase's constants had: outside of it a prediction is an extrapolation (`cost/reach.py`).

    formats: of weights. mixtures: dtypes in which a mixture of experts was measured. splits: device counts.
    longest_tokens: of one sequence. borrowed_from: the software of the rows, where it is not the one asked for.
    widths: spread of one step along an axis, where held-back rows showed it.
    """

    devices: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    mixtures: tuple[str, ...] = ()
    splits: tuple[int, ...] = (1,)
    largest_batch: int = 1
    longest_tokens: int = 1
    borrowed_from: str | None = None
    widths: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The last-level cache: what of a model's weights lies in `bytes` is read at bytes_per_s, of which eb is achieved.

    kv_eb: the same for keys and values that fit in beside such weights; None: where nobody measured it, they are memory's.
    reach: weights of so many times `bytes` find nothing there; 1: what does not fit is not looked for.
    """

    bytes: float
    bytes_per_s: float
    eb: Mapping[str, float]
    kv_eb: float | None = None
    reach: float = CACHE_REACH

    def share_of(self, n_bytes: float) -> float:
        """How much of weights that are read from front to back, step after step, is still in the cache."""
        times = n_bytes / self.bytes
        if times <= 1.0:
            return 1.0
        return 0.0 if times >= self.reach else (self.reach - times) / (self.reach - 1.0) / times

    def weights_rate(self, weight_format: str) -> float:
        """Achieved bytes per second when reading weights of this format."""
        return self.bytes_per_s * _pick(self.eb, weight_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Time of the scheduler, the executor and the sampler around the kernels of a step.

    prompt_s: of each prompt chunk on top of sequence_s, what its request costs when it comes and goes included;
    prompt_token_s: of each of its tokens, which are looked up in the prefix cache and put there. wake_s: what the first step
    takes longer behind a time without work, kernels included; no price of a shape has it. displaced_s: what a step takes
    longer where its weights are more than the last-level cache holds, and so displace what the host reads.
    """

    step_s: float = 0.0
    sequence_s: float = 0.0
    prompt_s: float = 0.0
    prompt_token_s: float = 0.0
    wake_s: float = 0.0
    displaced_s: float = 0.0

    def time_s(self, shape: StepShape) -> float:
        """Of one step."""
        prompts_s = prompts_in(shape) * self.prompt_s + shape.prefill_tokens * self.prompt_token_s
        return self.step_s + shape.n_sequences * self.sequence_s + prompts_s


def prompts_in(shape: StepShape) -> int:
    """Chunks of prompts in a step, as its sums tell them: drafts beside prompts may hide all but one."""
    if shape.decode_tokens == shape.n_tokens:
        return 0
    return max(1, shape.n_sequences - shape.decode_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants of both phases with their residuals and where they come from. Coverage None: measured locally.

    cache: None where nobody measured one (every published row is of a model far larger than any cache).
    host: the part of step_s, sequence_s, prompt_s and prompt_token_s that is not the kernels', where it was measured apart.
    request_s: what passes between a client and the scheduler, of each request, all of it before the first token; of services,
    and 0 where nobody measured it.
    is_of_our_kernels: on this machine's GPU our kernels were timed, not torch's, which are used where ours do not run.
    on_latents: constants of prefill and decode for models with latent attention, where its kernels were timed apart.
    """

    name: str
    prefill: Constants
    decode: Constants
    prefill_residual: Residual
    decode_residual: Residual
    source: str
    prefill_coverage: Coverage | None = None
    decode_coverage: Coverage | None = None
    is_local: bool = False
    cache: Cache | None = None
    host: Host = Host()
    request_s: float = 0.0
    is_of_our_kernels: bool = False
    on_latents: tuple[Constants, Constants] | None = None

    def of(self, model: ModelSpec) -> Calibration:
        """With the constants that are this model's."""
        if self.on_latents is None or not latent_layers(model):
            return self
        return replace(self, prefill=self.on_latents[0], decode=self.on_latents[1], on_latents=None)

    def beside_weights(self, cached_share: float) -> Calibration:
        """Of a model of whose weights so much stays in the cache: what the rest displaces of the host's is in its steps."""
        more_s = (1.0 - cached_share) * self.host.displaced_s
        if more_s == 0.0:
            return self
        host = replace(self.host, step_s=self.host.step_s + more_s, displaced_s=0.0)
        prefill, decode = (replace(one, step_s=one.step_s + more_s) for one in (self.prefill, self.decode))
        return replace(self, prefill=prefill, decode=decode, host=host)


def _pick(fractions: Mapping[str, float], key: str) -> float:
    found = fractions.get(key, fractions.get("other"))
    if found is None:
        raise NoRate(
            f"the calibration has no achieved fraction for {key} and no fallback",
            hint=f"it has those of {', '.join(sorted(fractions))}",
        )
    return found
