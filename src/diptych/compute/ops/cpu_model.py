"""A Model on the C++ backend: the family's forward recorded once into a native program."""

from __future__ import annotations

import logging
from functools import partial

import torch

from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import KVStore
from diptych.compute.model import Best, Blueprint, Model
from diptych.compute.ops.cpu import CpuKVStore, CpuLoader, CpuOps, CpuProgram, PackedSource, weigh
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError

logger = logging.getLogger("diptych.compute")


def build_cpu_model(blueprint: Blueprint, config: ComputeConfig) -> CpuModel:
    """Pack the weights and record the program. Raises ConfigError for what this backend lacks, LoadError."""
    if config.device not in ("auto", "cpu"):
        raise ConfigError(f"device is {config.device!r}; the cpu backend runs on cpu", hint="use --backend torch")
    return CpuModel(blueprint, config)


class CpuModel(Model):
    """Packed weights and a recorded program; one native call per step."""

    backend_name = "cpu"
    device = torch.device("cpu")

    def __init__(self, blueprint: Blueprint, config: ComputeConfig) -> None:
        self.spec = blueprint.spec
        self.hf_config = blueprint.hf_config
        packed = blueprint.source if isinstance(blueprint.source, PackedSource) else None
        loader = CpuLoader(config, packed)
        ops = CpuOps(loader)
        weights = blueprint.load(loader)
        blueprint.forward(ops, weights)
        self.program = CpuProgram(loader, self.spec.vocab_size)
        self.argmax = self._argmax
        self.weigh = partial(weigh, loader.program)
        self.forward_best = self._forward_best
        self.weights_format = loader.weights_format
        self.kv_format = loader.kv_format
        self.head_format = weights.head.format
        self.weight_bytes = self.program.weight_bytes
        self.n_parameters = blueprint.source.n_parameters
        self.threads = int(loader.program.threads)
        self.placement = loader.placement
        self.revision = blueprint.revision(self.backend_name, self.weights_format, self.kv_format)
        logger.info(
            "model loaded backend=cpu architecture=%s weights=%s head=%s kv=%s threads=%d cpus=%s parameters=%d bytes=%d",
            self.spec.architecture, self.weights_format, self.head_format, self.kv_format, self.threads,
            ",".join(map(str, self.placement.cpus)) or "any", self.n_parameters, self.weight_bytes,
        )  # fmt: skip

    def kv_bytes_per_block(self, block_tokens: int) -> int:
        """Bytes of one block in all layers."""
        return self.program.kv_bytes_per_block(block_tokens)

    def make_kv(self, n_blocks: int, block_tokens: int) -> CpuKVStore:
        """An empty cache; ConfigError for a block size that is not a multiple of 16, CapacityError without memory."""
        return self.program.make_kv(n_blocks, block_tokens)

    def forward(self, batch: ForwardBatch, kv: KVStore) -> torch.Tensor:
        """Logits [R, V] fp32 of the batch's logits rows."""
        assert isinstance(kv, CpuKVStore), type(kv)
        return self.program.forward(batch, kv)

    def _forward_best(self, batch: ForwardBatch, kv: KVStore) -> Best:
        assert isinstance(kv, CpuKVStore), type(kv)
        return self.program.forward_best(batch, kv)

    def _argmax(self, logits: torch.Tensor) -> list[int]:
        return [int(token_id) for token_id in self.program.argmax(logits)]

    def close(self) -> None:
        """Drop the program with its packed weights."""
        self.argmax = self.weigh = self.forward_best = None
        del self.program
