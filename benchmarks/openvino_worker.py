"""OpenVINO GenAI as a peer: one JSON request per line on standard input, one JSON answer per line on standard output.

    {"op": "load", "checkpoint": DIR, "weights": "int8", "threads": 2, "precision": "bf16"} -> {"engine", "version", "details"}
    {"op": "logits", "prompt": [ids], "probe": [ids]}            -> {"logits": [one per probed id]}
    {"op": "run", "prompts": [[ids], ...], "new_tokens": N}      -> {"prefill_s", "decode_s", "decode_tokens"}
    {"op": "mix", "prompts": [[ids], ...], "new_tokens": [N...]} -> {"wall_s", "output_tokens"}

The checkpoint is exported by optimum-intel and compressed by NNCF, both once (kept in DIR/openvino-WEIGHTS), and run by the
engine of its own server: continuous batching over paged attention. An error is answered as {"error": text}. Runs in the
peers' environment, so it imports nothing of Diptych.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

STEP_TOKENS = 8192  # of one step: a prompt of any case is read whole
CACHE_GB = 4
INT4_GROUP = 64
# the export is traced by torch, which nobody needs afterwards
EXPORT = (
    "import sys; from optimum.intel import OVModelForCausalLM as M; "
    "M.from_pretrained(sys.argv[1], export=True, compile=False, load_in_8bit=False).save_pretrained(sys.argv[2])"
)
COMPRESS = (
    "import sys, nncf, openvino as ov; from nncf import CompressWeightsMode as C; "
    "how = {'int8': dict(mode=C.INT8_SYM), 'int4': dict(mode=C.INT4_ASYM, group_size=int(sys.argv[4]), ratio=1.0)}; "
    "model = nncf.compress_weights(ov.Core().read_model(sys.argv[1]), **how[sys.argv[3]]); "
    "ov.save_model(model, sys.argv[2], compress_to_fp16=False)"
)
MODEL = "openvino_model.xml"


def exported(checkpoint: Path, weights: str) -> Path:
    """The folder of the model in OpenVINO's form, made when it is missing."""
    directory = checkpoint / f"openvino-{weights}"
    if (directory / MODEL).exists():
        return directory
    unfinished = checkpoint / f"openvino-{weights}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    if weights == "bf16":
        _python(EXPORT, checkpoint, unfinished)
    else:
        wide = exported(checkpoint, "bf16")
        shutil.copytree(wide, unfinished, ignore=shutil.ignore_patterns("openvino_model.*"))
        _python(COMPRESS, wide / MODEL, unfinished / MODEL, weights, INT4_GROUP)
    unfinished.rename(directory)
    return directory


def _python(program: str, *arguments: object) -> None:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode != 0:
        raise RuntimeError(f"the export failed: {done.stderr.strip().splitlines()[-1]}")


class Worker:
    """One model and the engine that runs it."""

    def __init__(self) -> None:
        self._directory = Path()
        self._settings: dict[str, Any] = {}
        self._engine: Any = None
        self._n_requests = 0

    def load(self, checkpoint: str, weights: str, threads: int, precision: str) -> dict[str, Any]:
        """Export where needed, and compile."""
        self._directory = exported(Path(checkpoint), weights)
        self._settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = STEP_TOKENS
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = False
        self._engine = genai.ContinuousBatchingPipeline(str(self._directory), scheduler, "CPU", self._settings)
        details = {name: str(value) for name, value in self._settings.items()}
        return {"engine": "openvino-genai", "version": genai.__version__, "details": details}

    def logits(self, prompt: list[int], probe: list[int]) -> dict[str, Any]:
        """Logits after a prompt, of some ids, by the same model without the engine."""
        request = ov.Core().compile_model(self._directory / MODEL, "CPU", self._settings).create_infer_request()
        ids = np.array([prompt], dtype=np.int64)
        inputs = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(ids.shape[1], dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        return {"logits": request.infer(inputs)["logits"][0, -1, probe].tolist()}

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Greedy: prompts to their first token, then all together, after a short warm-up of the same shape."""
        self._write(prompts, [min(new_tokens, 4)] * len(prompts))
        prefill_s, total_s, at_first, n_tokens = self._write(prompts, [new_tokens] * len(prompts))
        return {"prefill_s": prefill_s, "decode_s": total_s - prefill_s, "decode_tokens": n_tokens - at_first}

    def mix(self, prompts: list[list[int]], new_tokens: list[int]) -> dict[str, Any]:
        """All requests at once, each with its own length."""
        _, wall_s, _, n_tokens = self._write(prompts, new_tokens)
        return {"wall_s": wall_s, "output_tokens": n_tokens}

    def _write(self, prompts: list[list[int]], new_tokens: list[int]) -> tuple[float, float, int, int]:
        """(seconds until every prompt has its first token, seconds in all, tokens written until then, tokens in all)."""
        handles = []
        begin_s = time.perf_counter()
        for prompt, length in zip(prompts, new_tokens, strict=True):
            config = genai.GenerationConfig(max_new_tokens=length, ignore_eos=True, eos_token_id=0, do_sample=False)
            self._n_requests += 1
            handles.append(
                self._engine.add_request(self._n_requests, ov.Tensor(np.array([prompt], dtype=np.int64)), config)
            )
        waiting, n_tokens, at_first, first_s = set(range(len(handles))), 0, 0, 0.0
        while self._engine.has_non_finished_requests():
            self._engine.step()
            for number, handle in enumerate(handles):
                if handle.can_read():
                    waiting.discard(number)
                    n_tokens += sum(len(output.generated_ids) for output in handle.read().values())
            if not waiting and not first_s:
                first_s, at_first = time.perf_counter() - begin_s, n_tokens
        total_s = time.perf_counter() - begin_s
        if n_tokens != sum(new_tokens):
            raise RuntimeError(f"{n_tokens} tokens came; {sum(new_tokens)} were asked for")
        return first_s, total_s, at_first, n_tokens


def main() -> None:
    """Answer until standard input ends."""
    worker = Worker()
    verbs: dict[str, Callable[..., dict[str, Any]]] = {
        "load": worker.load, "logits": worker.logits, "run": worker.run, "mix": worker.mix
    }  # fmt: skip
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = verbs[request.pop("op")](**request)
        except (RuntimeError, ValueError, KeyError, OSError, TypeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
