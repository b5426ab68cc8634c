"""onnxruntime-genai as a peer (peer_worker.py says what a worker answers).

Its own builder converts and quantises the checkpoint, once (kept in DIR/onnxruntime-WEIGHTS), with activations in int8
(accuracy level 4). It has no bf16 on a CPU: what is not quantised runs in fp32. Its generator runs one batch of equally long
sequences from begin to end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # noqa: F401, before the next: it brings the library that the next one loads
import onnxruntime_genai as genai
from peer_worker import PeerWorker, made_once, python, serve

BLOCK = {"int8": 128, "int4": 64}  # weights that share a scale


def converted(checkpoint: Path, weights: str) -> Path:
    """The folder of the model in ONNX, made when it is missing."""

    def make(directory: Path) -> None:
        builder = ["-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", directory, "-e", "cpu"]
        options = ["--extra_options", "accuracy_level=4", f"block_size={BLOCK[weights]}"] if weights in BLOCK else []
        python(*builder, "-p", weights if weights in BLOCK else "fp32", "-c", checkpoint / "cache", *options)

    return made_once(checkpoint / f"onnxruntime-{weights}", make)


class OnnxRuntime(PeerWorker):
    """One model, and the generator of the batch at hand."""

    def __init__(self) -> None:
        self._model: Any = None
        self._generator: Any = None
        self._n_prompts = 0

    def load(self, checkpoint: str, weights: str, threads: int) -> dict[str, Any]:
        """Convert where needed, and load."""
        config = genai.Config(str(converted(Path(checkpoint), weights)))
        session = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = genai.Model(config)
        details = {**session, "accuracy_level": 4, "block_size": BLOCK.get(weights)}
        return {"engine": "onnxruntime-genai", "version": genai.__version__, "details": details, "ways": self.ways}

    def logits(self, prompt: list[int], probe: list[int]) -> dict[str, Any]:
        """Of the prompt's last row."""
        self.begin([prompt], [1])
        return {"logits": self._generator.get_logits().reshape(-1)[probe].tolist()}

    def begin(self, prompts: list[list[int]], lengths: list[int]) -> None:
        """One batch: it is read here."""
        if len({(len(prompt), length) for prompt, length in zip(prompts, lengths, strict=True)}) != 1:
            raise ValueError("the sequences of a batch must be equally long here")
        tokens = len(prompts[0]) + lengths[0]
        parameters = genai.GeneratorParams(self._model)
        # min_length: no end of sequence
        parameters.set_search_options(batch_size=len(prompts), max_length=tokens, min_length=tokens, do_sample=False)
        self._n_prompts = len(prompts)
        self._generator = genai.Generator(self._model, parameters)
        self._generator.append_tokens(np.array(prompts, dtype=np.int32))

    def step(self) -> Iterable[int]:
        """The next token of every sequence."""
        if self._generator.is_done():
            raise RuntimeError("the generator has ended too early")
        self._generator.generate_next_token()
        return range(self._n_prompts)


if __name__ == "__main__":
    serve(OnnxRuntime())
