"""What published services were told to do, beyond what their rows state: the scheduler's options in public recipes.

InferenceX (SemiAnalysis; its repository has the server's command line and configuration of every run, by date) publishes most
of the rows that have a date; the others were taken with the options that each engine has where nobody sets one. What is here
was read in those recipes and in the documentation of the engines, and none of it in what the runs measured:

* All three run the device while the host plans the next step (vLLM with `async-scheduling`, which the recipes set; the overlap
  schedulers of SGLang and TensorRT-LLM). Who comes is planned behind the step that runs and the one that is planned already.
  Not so here where lengths are all the same: streams that end together would march in step for ever, which they do not.
* vLLM mixes both phases in a step of `max_num_batched_tokens`, decode first, as Diptych does.
* SGLang puts prompts into steps of their own and lets decode wait, unless told otherwise (`--enable-mixed-chunk`). With
  `--scheduler-recv-interval N` it looks for new requests only every N steps while it decodes.
* TensorRT-LLM takes a request only if KV for its whole answer is free (`GUARANTEED_NO_EVICT`). With `batch_wait_timeout_iters`
  N and `batch_wait_max_tokens_ratio` R, prompts wait N steps for R of `max_num_tokens` to come together while others decode.
* Keys and values are held in 8 bits where the recipe or the checkpoint asks for it, else in 16, whatever the weights.
* Runs of the recipes named `-mtp` draft tokens (multi-token prediction); how many of them held, nobody states.

    scheduling_of(run).poll_steps
"""

from __future__ import annotations

from dataclasses import dataclass, replace

USUAL_STEP_TOKENS = 8192  # of a step, where nobody says: what all three engines take on such devices
# lengths of InferenceX's runs: drawn from 0.8 of the stated one up to it (`--random-range-ratio 0.8`), ten requests per stream,
# `--request-rate inf --max-concurrency N`
_BLACKWELL = ("b200", "b300", "gb200", "gb300")
INFERENCE_X_LENGTHS = ((1024, 1024), (1024, 8192), (8192, 1024))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """How an engine plans its steps.

    step_tokens: token budget of a step. ahead_steps: who comes waits for so many that are launched or planned already.
    prefills_alone: prompts get steps of their own, before decode. poll_steps: while it
    only decodes it looks for new requests every so many steps. gather_steps, gather_tokens: while others decode, new prompts
    wait so many steps for so many tokens to come together. reserves_answers: a request runs only if KV for its whole answer is
    free. max_running: sequences at one time; None: what the memory holds.
    """

    step_tokens: int = USUAL_STEP_TOKENS
    ahead_steps: int = 0
    prefills_alone: bool = False
    poll_steps: int = 1
    gather_steps: int = 0
    gather_tokens: int = 0
    reserves_answers: bool = False
    max_running: int | None = None


USUAL = Scheduling()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a row says of a run. streams: clients at one time. measured: its date, or nothing."""

    stack: str
    version: str
    device: str
    model: str
    weights: str
    tp: int
    streams: int
    input_tokens: int
    output_tokens: int
    measured: str

    @property
    def is_inference_x(self) -> bool:
        """Whether its date and lengths are those of one of InferenceX's."""
        return bool(self.measured) and (self.input_tokens, self.output_tokens) in INFERENCE_X_LENGTHS

    @property
    def kv(self) -> str:
        """The format of keys and values: what its recipe asks for, else what the checkpoint does.

        NVIDIA's checkpoints, all of those in 4 bits among them, ask for 8 bits. Others ask for nothing, which is 16 bits.
        """
        if self.weights in ("bf16", "int4"):
            return "bf16"
        if self.weights == "fp4":
            return "fp8"
        is_blackwell = self.device.startswith(_BLACKWELL)
        if self.weights == "mxfp4":
            return "fp8" if is_blackwell else "bf16"
        if self.stack == "tensorrt-llm":
            return "bf16" if self.model == "qwen3-235b-a22b" and not self.measured else "fp8"
        if self.stack == "sglang":
            return "fp8" if is_blackwell else "bf16"
        # MiniMax-M2.5: on B200 and B300 since the recipe of vLLM 0.19, of 3 April 2026; on H200 since 12 May
        is_asked = self.model == "minimax-m2" and is_blackwell and not self.version.startswith("0.17")
        return "fp8" if is_asked or self.model.startswith("llama-3.1") else "bf16"

    @property
    def drafted(self) -> bool:
        """Whether it was one of the recipes `dsr1-*-trt-mtp`, by the images and dates of their changelog."""
        if self.stack != "tensorrt-llm" or self.model != "deepseek-v3" or not self.is_inference_x:
            return False
        return self.version == "1.2.0rc6.post3" or (self.version == "1.1.0rc2.post2" and self.measured == "2026-01-14")


def scheduling_of(run: Run) -> Scheduling:
    """The options that its recipe sets, or the engine's own."""
    if run.stack == "sglang":
        return _of_sglang(run)
    if run.stack == "tensorrt-llm":
        return _of_tensorrt_llm(run)
    return Scheduling(ahead_steps=2) if run.is_inference_x else USUAL


def _of_sglang(run: Run) -> Scheduling:
    if not run.is_inference_x:
        return Scheduling(prefills_alone=True)
    poll_steps = 1
    if run.device.startswith(("b200", "b300")):
        poll_steps = 30 if run.streams >= 16 and (run.weights == "fp4" or run.tp == 8) else 10
    return Scheduling(
        step_tokens=16_384 if run.weights == "fp4" else 32_768,
        ahead_steps=2,
        prefills_alone=True,
        poll_steps=poll_steps,
    )


def _of_tensorrt_llm(run: Run) -> Scheduling:
    if not run.is_inference_x:
        return Scheduling(reserves_answers=True)
    usual = Scheduling(ahead_steps=2, reserves_answers=True)
    if run.model == "deepseek-v3":
        return replace(usual, step_tokens=(run.streams + run.input_tokens + 127) // 64 * 64)
    if run.model == "gpt-oss-120b":
        return replace(usual, step_tokens=20_000)
    if run.model != "llama-3.1-70b":
        return usual
    if (run.input_tokens, run.output_tokens) != (1024, 1024) or run.tp == 8:
        return replace(usual, step_tokens=16_384)
    return replace(usual, step_tokens=16_384, gather_steps=20, gather_tokens=int(0.9 * 16_384))
