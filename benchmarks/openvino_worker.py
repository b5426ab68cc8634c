"""OpenVINO as a peer: one JSON request per line on standard input, one JSON answer per line on standard output.

    {"op": "load", "checkpoint": DIR, "weights": "int8", "threads": 2, "precision": "bf16"} -> {"engine", "version", "details"}
    {"op": "logits", "prompt": [ids], "probe": [ids]}                    -> {"logits": [one per probed id]}
    {"op": "run", "prompts": [[ids], ...], "new_tokens": N}              -> {"prefill_s", "decode_s", "decode_tokens"}

Prompts of one run are equally long. An error is answered as {"error": text}. Runs in the peers' environment.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino_graph import Graph


class Worker:
    """One compiled model and its state."""

    def __init__(self) -> None:
        self._graph: Graph | None = None
        self._compiled: Any = None
        self._request: Any = None

    def load(self, checkpoint: str, weights: str, threads: int, precision: str) -> dict[str, Any]:
        """Build and compile; says which ops the plugin really runs."""
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": precision,
        }
        self._graph = Graph(Path(checkpoint), weights)
        self._compiled = ov.Core().compile_model(self._graph.build(), "CPU", settings)
        self._request = self._compiled.create_infer_request()
        kinds = Counter(
            op.get_rt_info()["layerType"].astype(str) for op in self._compiled.get_runtime_model().get_ops()
        )
        details = {name: str(self._compiled.get_property(name)) for name in (
            "INFERENCE_NUM_THREADS", "INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE",
        )}  # fmt: skip
        return {"engine": "openvino", "version": ov.get_version(), "details": {**details, "ops": dict(kinds)}}

    def logits(self, prompt: list[int], probe: list[int]) -> dict[str, Any]:
        """Logits after a prompt, of some ids."""
        self._request.reset_state()
        return {"logits": self._step(np.array([prompt], dtype=np.int64), 0)[0, probe].tolist()}

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Greedy: prompts to their first token, then all together, after a short warm-up of the same shape."""
        ids = np.array(prompts, dtype=np.int64)
        self._write(ids, min(new_tokens, 4))
        prefill_s, decode_s = self._write(ids, new_tokens)
        return {"prefill_s": prefill_s, "decode_s": decode_s, "decode_tokens": len(prompts) * (new_tokens - 1)}

    def _write(self, ids: np.ndarray, new_tokens: int) -> tuple[float, float]:
        self._request.reset_state()
        begin_s = time.perf_counter()
        tokens = self._step(ids, 0).argmax(1)
        middle_s = time.perf_counter()
        for position in range(ids.shape[1], ids.shape[1] + new_tokens - 1):
            tokens = self._step(tokens[:, None], position).argmax(1)
        return middle_s - begin_s, time.perf_counter() - middle_s

    def _step(self, ids: np.ndarray, start: int) -> np.ndarray:
        batch, length = ids.shape
        positions = np.arange(start, start + length, dtype=np.int64)
        self._request.infer(
            {
                "input_ids": ids,
                "position_ids": np.broadcast_to(positions, (batch, length)).copy(),
                "key_positions": np.arange(start + length, dtype=np.int64),
                "beam_idx": np.arange(batch, dtype=np.int32),
            },
            share_inputs=True,
        )
        return self._request.get_output_tensor(0).data


def main() -> None:
    """Answer until standard input ends."""
    worker = Worker()
    verbs: dict[str, Callable[..., dict[str, Any]]] = {"load": worker.load, "logits": worker.logits, "run": worker.run}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = verbs[request.pop("op")](**request)
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
