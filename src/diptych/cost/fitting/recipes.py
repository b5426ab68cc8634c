"""What published services were told to do, beyond what their rows state: the options in public recipes.

InferenceX (SemiAnalysis; its repository has the server's command line and configuration of every run, by date) publishes most
of the rows that have a date; the others were taken with the options that each engine has where nobody sets one. What is here
was read in those recipes and in the documentation of the engines, and none of it in what the runs measured:

* All three run the device while the host plans the next step (vLLM with `async-scheduling`, which the recipes set; the overlap
  schedulers of SGLang and TensorRT-LLM). Who comes is planned behind the step that runs and the one that is planned already.
  Not so here where lengths are all the same: streams that end together would march in step for ever, which they do not.
* There (the rows that are not InferenceX's) a client of vLLM sends, and the server reads, one request after another: two come
  in one step, which spreads the streams over the steps; so do TensorRT-LLM's, which plans one step ahead there. That it is two
  was chosen on the rows. Streams of SGLang march in step, as its decode waits until all have been read.
* vLLM mixes both phases in a step of `max_num_batched_tokens`, decode first, as Diptych does. Recipes of April 2026 and later
  for Blackwell set it to two prompts (`$((ISL * 2))`).
* vLLM replays steps of up to `max-cudagraph-capture-size` tokens from graphs, but for their attention, prompts among them
  (`FULL_AND_PIECEWISE`). Recipes for gpt-oss set it to 2048, as do those for MiniMax-M2.5 that set two prompts; the others
  leave it at 512 or less.
* TensorRT-LLM runs gpt-oss's experts with Triton's kernels on H200 (`moe_config: backend: TRITON`), and with its own elsewhere.
* SGLang puts prompts into steps of their own and lets decode wait, unless told otherwise (`--enable-mixed-chunk`). With
  `--scheduler-recv-interval N` it looks for new requests only every N steps while it decodes.
* TensorRT-LLM takes a request only if KV for its whole answer is free (`GUARANTEED_NO_EVICT`). With `batch_wait_timeout_iters`
  N and `batch_wait_max_tokens_ratio` R, prompts wait N steps for R of `max_num_tokens` to come together while others decode.
  With attention-data parallel and `enable_balance` it starts prompts where every group has one to start, and else every
  `timeout_iters` steps (`PyExecutor._balance_adp_requests`).
* TensorRT-LLM sends tokens in tens in the recipes for DeepSeek and Llama (`stream_interval: 10`), in twenties for gpt-oss. The
  first comes at once, and all the same DeepSeek's clients see no text before the tenth, on either device, at 7 ms a token as
  at 50; the others' do. That it is DeepSeek's alone was seen in the rows.
* Each group of attention-data parallel plans steps of its own, in step with the others: budget and places count once for each.
* vLLM and SGLang give an engine a part of all memory, TensorRT-LLM a part of what is free when the weights are loaded; SGLang's
  part holds weights and KV alone, and buffers lie beside it.
* How many sequences run at one time is set: `--max-running-requests`, `--max_batch_size`, `--max-num-seqs`.
* Recipes of 2025 chose expert and attention-data parallel by the number of streams, in the script, where rows say neither;
  those of MiniMax-M2.5 in March 2026 turned expert parallel on whatever the row says (`EP_SIZE -ge 1`).
* Keys and values are held in 8 bits where the recipe or the checkpoint asks for it, else in 16, whatever the weights.
* Runs of the recipes named `-mtp` draft tokens (multi-token prediction); how many of them held, nobody states.

    scheduling_of(run).poll_steps
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from diptych.cost.layout import PLAIN, Layout
from diptych.cost.memory import MemoryRule

USUAL_STEP_TOKENS = 8192  # of a step, where nobody says: what all three engines take on such devices
# lengths of InferenceX's runs: drawn from 0.8 of the stated one up to it (`--random-range-ratio 0.8`), ten requests per stream,
# `--request-rate inf --max-concurrency N`
GRAPH_TOKENS = 2048
STREAM_INTERVAL = 10  # tokens of TensorRT-LLM's recipes for DeepSeek
AT_ONCE = 2  # requests that come in one step where all lengths are the same
_BLACKWELL = ("b200", "b300", "gb200", "gb300")
INFERENCE_X_LENGTHS = ((1024, 1024), (1024, 8192), (8192, 1024))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """How an engine plans its steps.

    step_tokens: token budget of a step. ahead_steps: who comes waits for so many that are launched or planned already.
    prefills_alone: prompts get steps of their own, before decode. poll_steps: while it only decodes it looks for new requests
    every so many steps, or where poll_prompts of them have come (0: no sooner). gather_steps, gather_tokens: while others
    decode, new prompts wait so many steps for so many tokens to come together. reserves_answers: a request runs only if KV for
    its whole answer is free. max_running: sequences at one time; None: what the memory holds. at_once: so many requests at most
    come in one step behind the first of all; None: all that were sent.
    """

    step_tokens: int = USUAL_STEP_TOKENS
    ahead_steps: int = 0
    prefills_alone: bool = False
    poll_steps: int = 1
    poll_prompts: int = 0
    gather_steps: int = 0
    gather_tokens: int = 0
    reserves_answers: bool = False
    max_running: int | None = None
    at_once: int | None = None


USUAL = Scheduling()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a row says of a run.

    streams: clients at one time. measured: its date (2026-04-17), or nothing. is_complete: whether it states every degree of
    its split, as rows of InferenceX do; some of those without a date repeat dated ones, number for number.
    """

    stack: str
    version: str
    device: str
    model: str
    weights: str
    devices: int
    layout: Layout
    streams: int
    input_tokens: int
    output_tokens: int
    measured: str
    is_complete: bool = True

    @property
    def is_inference_x(self) -> bool:
        """Whether its lengths are those of InferenceX's, and nothing that these state is missing."""
        return (bool(self.measured) or self.is_complete) and self.lengths in INFERENCE_X_LENGTHS

    @property
    def kv(self) -> str:
        """The format of keys and values: what its recipe asks for, else what the checkpoint does.

        NVIDIA's checkpoints, all of those in 4 bits among them, ask for 8 bits. Others ask for nothing, which is 16 bits.
        """
        if self.weights in ("bf16", "int4"):
            return "bf16"
        if self.weights == "fp4":
            return "fp8"
        is_blackwell = self.is_blackwell
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

    @property
    def is_blackwell(self) -> bool:
        """Whether of those devices."""
        return self.device.startswith(_BLACKWELL)

    @property
    def lengths(self) -> tuple[int, int]:
        """Of prompts and of answers."""
        return self.input_tokens, self.output_tokens


def scheduling_of(run: Run) -> Scheduling:
    """The options that its recipe sets, or the engine's own."""
    if run.stack == "sglang":
        return _of_sglang(run)
    layout = layout_of(run)
    found = _of_tensorrt_llm(run, layout) if run.stack == "tensorrt-llm" else _of_vllm(run)
    if layout.dp == 1:
        return found
    return replace(found, step_tokens=found.step_tokens * layout.dp)


def graph_tokens_of(run: Run) -> int:
    """Steps with prompts of at most so many tokens are replayed from graphs."""
    if run.stack != "vllm" or not run.is_inference_x:
        return 0
    return GRAPH_TOKENS if run.model == "gpt-oss-120b" or _is_recent_minimax(run) else 0


def has_triton_experts(run: Run) -> bool:
    """Whether TensorRT-LLM was told to take Triton's kernels for the experts, which are launched as vLLM's are."""
    is_told = run.stack == "tensorrt-llm" and run.model == "gpt-oss-120b" and run.device.startswith("h200")
    return is_told and run.is_inference_x


def shown_tokens_of(run: Run) -> int:
    """A client sees the first so many tokens of an answer at one time."""
    is_late = run.stack == "tensorrt-llm" and run.model == "deepseek-v3" and run.is_inference_x
    return STREAM_INTERVAL if is_late else 1


def _is_recent_minimax(run: Run) -> bool:
    return run.model == "minimax-m2" and run.is_blackwell and run.measured >= "2026-04-03"


def _of_vllm(run: Run) -> Scheduling:
    if not run.is_inference_x:
        return Scheduling(at_once=AT_ONCE)
    step_tokens = USUAL_STEP_TOKENS
    is_kimi = (
        run.model == "kimi-k2"
        and run.weights == "fp4"
        and run.device.startswith("b200")
        and run.measured >= "2026-04-20"
    )
    if _is_recent_minimax(run) or is_kimi:
        step_tokens = 2 * run.input_tokens
    return Scheduling(ahead_steps=2, step_tokens=step_tokens)


def _of_sglang(run: Run) -> Scheduling:
    if not run.is_inference_x:
        return Scheduling(prefills_alone=True)
    usual = Scheduling(ahead_steps=2, prefills_alone=True)
    if not run.is_blackwell:
        return replace(usual, step_tokens=32_768, max_running=512 if run.lengths == (1024, 1024) else 256)
    poll_steps = 30 if run.streams >= 16 else 10
    if run.weights == "fp4":
        return replace(usual, step_tokens=16_384, poll_steps=poll_steps, max_running=256)
    if run.devices == 4:
        return replace(usual, step_tokens=8192, poll_steps=10, max_running=32)
    # its runs of 256 and 512 streams, of March 2026, had more places than the recipe kept: their clients waited for none
    return replace(usual, step_tokens=32_768, poll_steps=poll_steps, max_running=128 if run.streams <= 128 else None)


def _of_tensorrt_llm(run: Run, layout: Layout) -> Scheduling:
    if not run.is_inference_x:
        return Scheduling(reserves_answers=True, at_once=AT_ONCE, ahead_steps=1)
    found = Scheduling(ahead_steps=2, reserves_answers=True)
    if run.model == "deepseek-v3":
        found = _of_deepseek(run, found)
    elif run.model == "gpt-oss-120b":
        found = replace(found, step_tokens=20_000, max_running=512 * layout.dp)
    elif run.model == "llama-3.1-70b":
        found = replace(found, step_tokens=16_384)
        if run.lengths == (1024, 1024) and run.devices < 8:
            found = replace(found, gather_steps=20, gather_tokens=int(0.9 * 16_384))
    is_deepseek = run.model == "deepseek-v3"
    if layout.dp > 1 and (is_deepseek or run.is_blackwell):  # gpt-oss on H200 asks for no balance
        return replace(found, poll_steps=60 if is_deepseek else 50, poll_prompts=math.ceil(_to_have_all(layout.dp)))
    return found


def _to_have_all(groups: int) -> float:
    """Prompts that come, to one of the groups each, until all have one: the coupon collector's."""
    return groups * sum(1.0 / n for n in range(1, groups + 1))


def _of_deepseek(run: Run, found: Scheduling) -> Scheduling:
    step_tokens = (run.streams + run.input_tokens + 127) // 64 * 64
    if run.measured < "2026-01-21":
        return replace(found, step_tokens=step_tokens)
    found = replace(found, step_tokens=max(step_tokens, USUAL_STEP_TOKENS))
    is_delayed = run.weights == "fp8" and run.is_blackwell and run.measured >= "2026-01-29"
    if is_delayed and run.lengths == (1024, 1024) and run.streams >= 64:
        return replace(found, gather_steps=40, gather_tokens=int(0.8 * found.step_tokens))
    return found


def layout_of(run: Run) -> Layout:
    """That of its row, or the one that its recipe chose where the row says none or less."""
    if not run.is_inference_x:
        return run.layout
    if run.stack == "vllm":
        return _of_minimax(run) if run.model == "minimax-m2" else run.layout
    is_early = run.measured < "2025-11-14"
    if run.layout != PLAIN or not is_early:
        return run.layout
    if run.stack == "sglang":
        return Layout(ep=run.devices) if run.weights == "fp4" else PLAIN
    if run.model == "gpt-oss-120b":
        return PLAIN if run.is_blackwell else Layout(ep=run.devices)
    return _of_early_deepseek(run) if run.model == "deepseek-v3" else PLAIN


def _of_minimax(run: Run) -> Layout:
    """In 4 bits on two devices its recipe has attention-data parallel from 256 streams of short prompts on."""
    devices, is_new = run.devices, run.measured >= "2026-04-21"
    if run.weights == "fp4" and devices == 2 and run.layout.ep == 2 and is_new:
        least = 256 if run.lengths == (1024, 1024) else 512 if run.device == "b300" else math.inf
        return Layout(dp=2, ep=2) if run.streams >= least else run.layout
    is_whole = "2026-03-11" <= run.measured < "2026-04-03" and not run.device.startswith("h100")
    return Layout(ep=devices) if is_whole and run.layout == PLAIN else run.layout


def _of_early_deepseek(run: Run) -> Layout:
    """TensorRT-LLM until 13 November 2025: from how many streams on experts stand whole, and groups have attention each."""
    devices, is_short = run.devices, run.lengths == (1024, 1024)
    if run.weights == "fp4":
        few = {4: (33, 33), 8: (9, 17)}.get(devices, (1, 1))
        whole, own = ((few[0], 256) if is_short else (few[1], 256)) if run.input_tokens == 1024 else (33, 33)
    elif run.is_blackwell:
        whole, own = 1, 33 if is_short else 65
    else:
        whole, own = 1, 65 if run.input_tokens == 1024 else 33
    if run.streams >= own:
        return Layout(dp=devices, ep=devices)
    return Layout(ep=devices) if run.streams >= whole else Layout()


def memory_of(run: Run) -> MemoryRule:
    """What of a device's memory its engine may use."""
    if run.stack == "sglang":
        return _memory_of_sglang(run)
    if run.stack == "tensorrt-llm":
        return MemoryRule(share=_free_share(run), is_of_free=True)
    is_minimax = run.model == "minimax-m2" and not run.device.startswith("h100") and run.measured < "2026-04-03"
    is_h200 = run.model == "minimax-m2" and run.device.startswith("h200")
    is_most = run.is_inference_x and (is_minimax or is_h200 or (run.model == "kimi-k2" and run.weights == "int4"))
    return MemoryRule(share=0.95) if is_most else MemoryRule()


def _memory_of_sglang(run: Run) -> MemoryRule:
    if not run.is_inference_x:
        return MemoryRule()
    share = 0.85 if run.weights == "fp4" else 0.82
    if run.weights == "fp8" and run.is_blackwell and run.devices == 4:
        share = 0.95
    return MemoryRule(share=share, has_buffers=False)


def _free_share(run: Run) -> float:
    if not run.is_inference_x or run.model not in ("deepseek-v3", "gpt-oss-120b"):
        return 0.9
    if run.model == "gpt-oss-120b":
        return 0.85
    if not run.is_blackwell:
        return 0.75
    if run.weights == "fp8" and run.measured >= "2026-01-29":
        if run.lengths == (8192, 1024) and run.devices == 4:
            return 0.75
        if run.lengths == (1024, 8192) and run.streams >= 256:
            return 0.7
    return 0.8
