"""How the services of each software are modelled: which constants are fitted to published services.

One form for all software, with starting values of each, which serve as priors; how their schedulers differ is in `recipes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diptych.cost.calibration import Constants
from diptych.cost.fitting.fit import FRACTION, TIME, Free, with_values


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceForm:
    """How one software's services are modelled: constants of both phases.

    A path is "both.X" for one value in both phases, "prefill.X" or "decode.X" for one phase, or "request_s": what passes
    between a client and the scheduler, seconds per request, all of it before the first token.
    one_shot: of decode's all-reduces, as `Constants` has it.
    """

    stack: str
    fixed: Constants
    free: tuple[Free, ...]
    one_shot: float | None = None


@dataclass(frozen=True, slots=True)
class ServiceConstants:
    """What a form was fitted to."""

    prefill: Constants
    decode: Constants
    request_s: float


def put_in(form: ServiceForm, values: Sequence[float]) -> ServiceConstants:
    """A form with its free constants."""
    prefill, decode, request_s = form.fixed, replace(form.fixed, one_shot=form.one_shot), 0.0
    for entry, value in zip(form.free, values, strict=True):
        where, _, path = entry.path.partition(".")
        if where == "request_s":
            request_s = value
            continue
        one = (replace(entry, path=path),)
        if where in ("both", "prefill"):
            prefill = with_values(prefill, one, (value,))
        if where in ("both", "decode"):
            decode = with_values(decode, one, (value,))
    return ServiceConstants(prefill, decode, request_s)


_FREE = (
    Free(path="decode.step_s", start=0.5e-3, limits=TIME, width=1.0),
    Free(path="prefill.step_s", start=5e-3, limits=TIME, width=1.0),
    Free(path="decode.layer_s", start=30e-6, limits=TIME, width=0.4),
    Free(path="prefill.layer_s", start=60e-6, limits=TIME, width=0.7),
    # decode is replayed from a graph; prompts are launched kernel by kernel, and a layer with experts has dozens of them. They
    # run ahead of the device, so that a long prompt hides most of them
    Free(path="prefill.launch_p", start=2.0, limits=(1.0, 8.0), width=0.3),
    Free(path="decode.moe_layer_s", start=15e-6, limits=TIME, width=0.5),
    Free(path="prefill.moe_layer_s", start=400e-6, limits=TIME, width=1.0),
    # queries and keys by way of two narrow products each, their norms, and the products that take the latents in
    Free(path="decode.latent_layer_s", start=15e-6, limits=TIME, width=0.5),
    Free(path="prefill.latent_layer_s", start=300e-6, limits=TIME, width=1.0),
    Free(path="both.sequence_s", start=10e-6, limits=TIME, width=1.0),
    Free(path="both.eb.bf16", start=0.8, limits=FRACTION, width=0.2),
    Free(path="both.eb.fp8", start=0.75, limits=FRACTION, width=0.2),
    Free(path="both.eb.fp4", start=0.7, limits=FRACTION, width=0.2),
    Free(path="both.eb.int4", start=0.6, limits=FRACTION, width=0.3),
    # kernel tables (ai-dynamo/aiconfigurator, 512 rows and more): 0.73 to 0.82 on H100 and H200 in bf16, 0.59 to 0.73 in fp8.
    # Norms, rotations and what experts gather and sum up are no part of a product; they pass at a share of the memory's rate
    Free(path="prefill.activation_eb", start=0.5, limits=FRACTION, width=0.3),
    Free(path="both.ef.bf16", start=0.75, limits=FRACTION, width=0.3),
    Free(path="both.ef.fp8", start=0.62, limits=FRACTION, width=0.3),
    Free(path="both.ef.fp4", start=0.4, limits=FRACTION, width=0.4),
    Free(path="both.expert_ef.bf16", start=0.3, limits=FRACTION, width=0.7),
    Free(path="both.expert_ef.fp8", start=0.25, limits=FRACTION, width=0.7),
    Free(path="both.expert_ef.fp4", start=0.15, limits=FRACTION, width=0.7),
    Free(path="both.kv_eb", start=0.7, limits=FRACTION, width=0.3),
    # the same tables: 0.39 for prompts of 1,024 tokens, 0.62 for 4,096 and 0.71 for 16,384
    Free(path="both.attention_ef", start=0.55, limits=FRACTION, width=0.3),
    # of two devices: vLLM's kernels on H100 take 4.2 to 5 us replayed from a graph, 21 to 24 launched one by one
    Free(path="decode.allreduce_s", start=5e-6, limits=TIME, width=0.7),
    Free(path="prefill.allreduce_s", start=22e-6, limits=TIME, width=0.7),
    Free(path="both.link_fraction", start=0.75, limits=FRACTION, width=0.2),
    Free(path="request_s", start=15e-3, limits=TIME, width=1.0),
)

# Routing is uneven: TPOT of Qwen3-235B, MiniMax-M2 and gpt-oss was said too long by every software at 16 to 64 streams, by 10
# to 40 % more than at 4 and at 256, as even routing reads most experts there and uneven routing does not. Of 0, 0.6 and 0.7
EXPERT_SKEW = 0.7
# few rows are reduced by kernels in which every device reads what all others have (vLLM's and TensorRT-LLM's own), and whose
# latency grows less than the devices do
_FIXED = Constants(p=3.0, allreduce_growth=0.5, expert_skew=EXPERT_SKEW)
ONE_SHOT = 1.0
# Graphs of prompts are piecewise (vLLM: cudagraph_mode FULL_AND_PIECEWISE): between the pieces of a layer attention is called
# from Python, with the kernel that writes keys and values before it. Of 0 to 250 us, together with a prompt's launches below
ATTENTION_CALL_S = 150e-6
TRITON_EXPERTS_S = {"prefill": 700e-6, "decode": 20e-6}  # launches of a layer with experts that are Triton's kernels

# vLLM and SGLang launch a prompt's kernels from Python, many of them Triton's and each for itself; TensorRT-LLM has operators
# of its own that hold several; SGLang, layers with experts most of all. Shares of 8 and 4 bits are others, too. Chosen with the
# rows in view, as all starts were; docs/planner.md says what gained on which share of their halves
_OF_VLLM_AND_SGLANG = {
    "prefill.step_s": 15e-3,
    "prefill.layer_s": 250e-6,
    "prefill.moe_layer_s": TRITON_EXPERTS_S["prefill"],
    "decode.layer_s": 40e-6,
    "decode.moe_layer_s": TRITON_EXPERTS_S["decode"],
    "both.eb.fp8": 0.7,
    "both.eb.fp4": 0.8,
    "both.ef.fp4": 0.5,
    "both.expert_ef.fp4": 0.2,
}
_STARTS: dict[str, dict[str, float]] = {
    "tensorrt-llm": {},
    # its experts are Triton's kernels, which reach less than the other two's own
    "vllm": _OF_VLLM_AND_SGLANG | {"both.expert_ef.fp8": 0.2},
    "sglang": _OF_VLLM_AND_SGLANG | {"prefill.moe_layer_s": 1.2e-3},
}

SERVICE_FORMS = tuple(
    ServiceForm(
        stack=stack,
        fixed=_FIXED,
        free=tuple(replace(entry, start=starts.get(entry.path, entry.start)) for entry in _FREE),
        one_shot=ONE_SHOT,
    )
    for stack, starts in _STARTS.items()
)
