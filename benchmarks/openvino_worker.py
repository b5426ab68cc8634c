"""OpenVINO GenAI as a peer (peer_worker.py says what a worker answers).

The checkpoint is exported by optimum-intel and compressed by NNCF, both once (kept in DIR/openvino-WEIGHTS), and run by the
engine of its own server: continuous batching over paged attention, activations quantised in groups of 128. What is
not quantised is computed in bf16 or in fp32, whichever is faster: on some processors that have it, bf16 runs at half rate.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from peer_worker import PeerWorker, made_once, python, serve

STEP_TOKENS = 8192  # of one step: a prompt of any case is read whole
CACHE_GB = 4
INT4_GROUP = 64
ACTIVATION_GROUP = 128  # faster than its default of 32
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

    def make(directory: Path) -> None:
        if weights == "bf16":
            python("-c", EXPORT, checkpoint, directory)
            return
        wide = exported(checkpoint, "bf16")
        shutil.copytree(wide, directory, ignore=shutil.ignore_patterns("openvino_model.*"))
        python("-c", COMPRESS, wide / MODEL, directory / MODEL, weights, INT4_GROUP)

    return made_once(checkpoint / f"openvino-{weights}", make)


class OpenVino(PeerWorker):
    """One model, and the engine that runs it in the precision at hand."""

    ways = ("bf16", "f32")

    def __init__(self) -> None:
        self._directory = Path()
        self._settings: dict[str, Any] = {}
        self._way = ""
        self._engine: Any = None
        self._handles: list[Any] = []
        self._n_requests = 0

    def load(self, checkpoint: str, weights: str, threads: int) -> dict[str, Any]:
        """Export where needed, and compile."""
        self._directory = exported(Path(checkpoint), weights)
        self._settings = {"INFERENCE_NUM_THREADS": threads}
        if weights != "bf16":
            self._settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = ACTIVATION_GROUP
        details = {name: str(value) for name, value in self._settings.items()}
        return {"engine": "openvino-genai", "version": genai.__version__, "details": details, "ways": self.ways}

    def prepare(self, way: str, prompts: list[list[int]], lengths: list[int]) -> None:
        """The engine in this precision; the last one is kept."""
        if way == self._way:
            return
        self._engine = None  # its memory goes first
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = STEP_TOKENS
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = False
        settings = {**self._settings, "INFERENCE_PRECISION_HINT": way}
        self._engine = genai.ContinuousBatchingPipeline(str(self._directory), scheduler, "CPU", settings)
        self._way = way

    def logits(self, prompt: list[int], probe: list[int]) -> dict[str, Any]:
        """By the same model without the engine."""
        settings = {**self._settings, "INFERENCE_PRECISION_HINT": "bf16"}
        request = ov.Core().compile_model(self._directory / MODEL, "CPU", settings).create_infer_request()
        ids = np.array([prompt], dtype=np.int64)
        inputs = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(ids.shape[1], dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        return {"logits": request.infer(inputs)["logits"][0, -1, probe].tolist()}

    def begin(self, prompts: list[list[int]], lengths: list[int]) -> None:
        """One request per prompt."""
        self._handles = []
        for prompt, length in zip(prompts, lengths, strict=True):
            config = genai.GenerationConfig(max_new_tokens=length, ignore_eos=True, eos_token_id=0, do_sample=False)
            self._n_requests += 1
            ids = ov.Tensor(np.array([prompt], dtype=np.int64))
            self._handles.append(self._engine.add_request(self._n_requests, ids, config))

    def step(self) -> Iterator[int]:
        """One step of continuous batching."""
        if not self._engine.has_non_finished_requests():
            raise RuntimeError("the engine has ended its requests too early")
        self._engine.step()
        for number, handle in enumerate(self._handles):
            if handle.can_read():
                for output in handle.read().values():
                    yield from [number] * len(output.generated_ids)


if __name__ == "__main__":
    serve(OpenVino())
