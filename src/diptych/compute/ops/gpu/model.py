"""A Model on a GPU: that of the torch backend, by our kernels, its steps recorded and replayed."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import torch
import triton

from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import KVStore, TorchKVStore
from diptych.compute.model import Blueprint, Want
from diptych.compute.ops.contract import Taps
from diptych.compute.ops.gpu.graphs import StepGraphs
from diptych.compute.ops.gpu.ops import TritonOps, item_tokens_of
from diptych.compute.ops.gpu.rows import rms_norm
from diptych.compute.ops.torch.model import TorchModel
from diptych.compute.ops.torch.ops import TorchOps
from diptych.ground.clock import MonotonicClock
from diptych.ground.config import ComputeConfig
from diptych.models.gpu_kernels import asks_the_host, left_to_torch

logger = logging.getLogger("diptych.compute")

HOPPER = 9  # compute capability: on no other cards were the tiles' memory and the equality of their instructions seen
# of a layer's eight launches, at 20 us each, and 600 TFLOP/s
LAUNCH_FLOPS = 1e11
WARM_UP_ROWS = (2, 24, 48, 300)  # of steps that between them call every kernel, in its commonest tiles


class TritonModel(TorchModel):
    """In 16 bits; a model in fp32 stays with torch's own kernels, as tensor cores would round its numbers."""

    compiler = f", triton {triton.__version__}"
    multiplies_codes = True

    def __init__(self, blueprint: Blueprint, config: ComputeConfig, device: torch.device) -> None:
        self._graphs: StepGraphs | None = None
        super().__init__(blueprint, config, device)
        self.ops = TritonOps if self._dtype == torch.bfloat16 else TorchOps
        if self.ops is TritonOps and asks_the_host(self.spec) is None:
            self._graphs = StepGraphs(
                partial(TritonOps, device=device, dtype=self._dtype),
                lambda ops: self._blueprint.forward(ops, self._weights),
                device,
                item_tokens=item_tokens_of(self.spec),
                most_tokens=self._launched_tokens(),
            )
            self.keeps_bits = left_to_torch(self.spec) is None

    def _rows(
        self,
        batch: ForwardBatch,
        kv: TorchKVStore,
        wants_hidden: bool,
        given: torch.Tensor | None,
        taps: Taps | None,
    ) -> torch.Tensor:
        with torch.cuda.device(self.device):  # where kernels are launched
            if self._graphs is not None and given is None and taps is None and not wants_hidden:
                rows = self._graphs.run(batch, kv)
                if rows is not None:
                    return rows
            return super()._rows(batch, kv, wants_hidden, given, taps)

    def _launched_tokens(self) -> int:
        """Tokens of a step that computes no longer than its kernels take to be launched."""
        moe = self.spec.moe
        share = 1.0 if moe is None else moe.experts_per_token / moe.n_experts
        return int(LAUNCH_FLOPS * self.spec.n_layers / (2 * self.n_parameters * share))

    def warm_up(self, kv: KVStore) -> None:
        """One token, then WARM_UP_ROWS, in block 0: kernels are compiled when first called, the larger tiles with the first
        step that takes them.
        """
        clock = MonotonicClock()
        begin_s = clock.now_s()
        super().warm_up(kv)
        for rows in WARM_UP_ROWS if self.ops is TritonOps and not kv.n_places else ():
            self.forward(_chunks(rows, kv.block_tokens), kv, Want.BEST)
        logger.info("kernels ready seconds=%.1f", clock.now_s() - begin_s)

    def close(self) -> None:
        """Drop the weights and what was recorded over them."""
        self._graphs = None
        super().close()


def check(device: torch.device) -> None:
    """RuntimeError, or what else Triton raises, where the kernels cannot run, or were never seen to keep their promise."""
    major, minor = torch.cuda.get_device_capability(device)
    if major != HOPPER:
        raise RuntimeError(f"they were measured on Hopper (9.0); this card has compute capability {major}.{minor}")
    with torch.cuda.device(device):  # a compiler may be missing, which Triton wants besides its own
        rms_norm(torch.ones(1, 16, dtype=torch.bfloat16, device=device), torch.ones(16, device=device), 1e-6)


def _chunks(rows: int, block_tokens: int) -> ForwardBatch:
    """So many rows, in sequences of a block each, which is the same for all."""
    lens_S = np.array([*[block_tokens] * (rows // block_tokens), rows % block_tokens], dtype=np.int32)
    lens_S = lens_S[lens_S > 0]
    return ForwardBatch(
        token_ids_T=np.zeros(rows, dtype=np.int32),
        query_start_S1=np.concatenate([[0], np.cumsum(lens_S)]).astype(np.int32),
        context_tokens_S=lens_S,
        block_table_SM=np.zeros((len(lens_S), 1), dtype=np.int32),
        logits_rows_R=np.array([rows - 1], dtype=np.int32),
    )
