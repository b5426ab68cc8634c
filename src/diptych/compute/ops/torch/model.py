"""A Model on the torch backend."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch

from diptych.compute.adapters import Adapter, LowRank
from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import KVStore, TorchKVStore
from diptych.compute.model import Blueprint, Model, Want
from diptych.compute.ops.contract import Taps
from diptych.compute.ops.cpus import Placement
from diptych.compute.ops.torch.loader import TorchLoader
from diptych.compute.ops.torch.ops import TorchAdapter, TorchOps
from diptych.compute.sampling.drawing import PlainDrawing, Weighed
from diptych.compute.sites import by_linear
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError, ExecutorError
from diptych.models.spec import ModelSpec

logger = logging.getLogger("diptych.compute")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_torch_model(blueprint: Blueprint, config: ComputeConfig) -> TorchModel:
    """Load the weights onto the device. Raises ConfigError for a device or format that is not there, LoadError."""
    device = torch_device(config.device)
    if config.numa != "auto":
        raise ConfigError(
            f"numa is {config.numa!r}, and torch places its own threads",
            hint="use --backend cpu, or start the process under numactl",
        )
    if config.instruction_set != "auto":
        raise ConfigError(
            f"instruction_set is {config.instruction_set!r}, and torch chooses its own",
            hint="use --backend cpu, or set ATEN_CPU_CAPABILITY for torch",
        )
    if config.activations != "auto":
        raise ConfigError(
            f"activations is {config.activations!r}, and torch multiplies in floats",
            hint="use --backend cpu, or leave it out",
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return _class_for(device)(blueprint, config, device)


def _class_for(device: torch.device) -> type[TorchModel]:
    """With kernels of ours where the device is a GPU that they run on; their compiler takes a second to import."""
    if device.type != "cuda":
        return TorchModel
    try:
        ours = import_module("diptych.compute.ops.gpu.model")
        ours.check(device)
    except Exception as error:  # no Triton, no compiler, another card: torch's kernels are right on any
        logger.warning("kernels=torch reason=%s: steps are slower, and bits depend on the batch", error)
        return TorchModel
    chosen: type[TorchModel] = ours.TritonModel
    return chosen


def refuse_block(spec: ModelSpec, block_tokens: int) -> None:
    """ConfigError for blocks that part a row of entries: who shares the first would have what tokens of another wrote there."""
    shared_by = max((cache.shared_by for cache in spec.caches), default=0)
    if shared_by and block_tokens % shared_by:
        raise ConfigError(
            f"block_tokens is {block_tokens}; {shared_by} tokens of this model share a row of its cache: it needs a multiple"
        )


def torch_device(name: str) -> torch.device:
    """'auto': CUDA where torch sees it, else the CPU. ConfigError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; it must be auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; it must be auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"device is {name!r}; torch sees {count} CUDA devices", hint="use --device cpu")
    return device


class TorchModel(Model):
    """Weights as tensors on one device; every op is a torch call."""

    backend_name = "torch"
    keeps_bits = False  # torch chooses kernels by the number of rows
    ops: type[TorchOps] = TorchOps
    multiplies_codes = False
    compiler = ""  # of the kernels, where they are not torch's

    def __init__(self, blueprint: Blueprint, config: ComputeConfig, device: torch.device) -> None:
        self._drawing = PlainDrawing()
        self.device = device
        self.spec = blueprint.spec
        self.hf_config = blueprint.hf_config
        wants_codes = config.weights == "file"
        self.weights_format = _choose("weights", "auto" if wants_codes else config.weights, "auto")
        self._blueprint = blueprint
        if self.weights_format == "auto":
            self.weights_format = _auto_format(blueprint)
        plain = self.weights_format  # what all is in that is not in codes
        self._dtype = DTYPES[plain]
        self.kv_format = _choose("kv", config.kv, plain)
        if wants_codes and not (self.multiplies_codes and plain == "bf16"):
            why = (
                "its other weights are fp32" if self.multiplies_codes else f"torch's kernels on {device} have no codes"
            )
            raise ConfigError(
                f"weights is 'file', and {why}", hint="leave --weights out: values are read, in 16 or 32 bits"
            )
        loader = TorchLoader(device, self._dtype, stacks_experts=device.type == "cuda", keeps_codes=wants_codes)
        self._weights = blueprint.load(loader)
        self.formats = {name or plain: n for name, n in loader.n_values.items()} or {plain: 1}
        self.expert_formats = {name or plain: n for name, n in loader.n_expert_values.items()}
        self.weights_format = max(self.formats, key=lambda name: self.formats[name])
        self.head_format = loader.head_format or plain
        self._sites = loader.sites
        self._sites.has_multiplied = blueprint.has_multiplied
        self._adapters: dict[int, TorchAdapter] = {}
        self.weight_bytes = loader.weight_bytes
        self.n_parameters = blueprint.source.n_parameters
        self.instruction_set = _instruction_set(device) + self.compiler
        # codes stand for the very values that they are dequantised to
        self.revision, self.lineage = blueprint.revisions(
            (self.backend_name, torch.__version__, self.instruction_set, plain, self.kv_format),
            (self.backend_name, plain, self.kv_format),
        )
        self.threads = torch.get_num_threads()
        self.placement = Placement(threads=self.threads)
        logger.info(
            "model loaded backend=torch device=%s architecture=%s weights=%s kv=%s parameters=%d bytes=%d",
            device, self.spec.architecture, self.weights_format, self.kv_format, self.n_parameters, self.weight_bytes,
        )  # fmt: skip
        if loader.lost:
            reasons = "; ".join(f"{why} ({n} matrices)" for why, n in loader.lost.most_common())
            logger.info("weights in codes became %s, because %s", plain, reasons)

    def kv_bytes_per_block(self, block_tokens: int) -> int:
        """Bytes of one block in all layers."""
        return sum(cache.elements for cache in self.spec.caches) * block_tokens * DTYPES[self.kv_format].itemsize

    @property
    def state_bytes(self) -> int:
        """In fp32."""
        return self.spec.state_elements * torch.float32.itemsize

    def make_kv(self, n_blocks: int, block_tokens: int, n_places: int = 1) -> TorchKVStore:
        """An empty cache of this model; CapacityError when there is no memory for it."""
        refuse_block(self.spec, block_tokens)
        return TorchKVStore(
            heads=[cache.sizes for cache in self.spec.caches],
            n_blocks=n_blocks,
            block_tokens=block_tokens,
            dtype=DTYPES[self.kv_format],
            device=self.device,
            revision=self.revision,
            forms=self.spec.states,
            n_places=n_places,
        )

    def forward(
        self,
        batch: ForwardBatch,
        kv: KVStore,
        want: Want = Want.LOGITS,
        *,
        given: torch.Tensor | None = None,
        taps: Taps | None = None,
    ) -> Any:
        """As `Model.forward`."""
        assert isinstance(kv, TorchKVStore), type(kv)
        with torch.no_grad():
            rows = self._rows(batch, kv, want is Want.HIDDEN, given, taps)
            if want is not Want.BEST:
                return rows
            ids = self.argmax(rows)
            return ids, rows.gather(1, torch.tensor(ids, device=rows.device)[:, None])[:, 0].tolist() if ids else []

    def _rows(
        self,
        batch: ForwardBatch,
        kv: TorchKVStore,
        wants_hidden: bool,
        given: torch.Tensor | None,
        taps: Taps | None,
    ) -> torch.Tensor:
        """Logits [R, V], or the states [R, D] that they are made of."""
        if batch.adapters_S is not None and not self._adapters.keys() >= set(batch.adapters_S.tolist()) - {-1}:
            raise ExecutorError("the step was refused: it names an adapter that is not there")
        ops = self.ops(
            batch, kv, device=self.device, dtype=self._dtype, wants_hidden=wants_hidden, given=given, taps=taps,
            adapters=self._adapters,
        )  # fmt: skip
        rows: torch.Tensor = self._blueprint.forward(ops, self._weights)
        if taps is not None:
            taps.states = torch.stack([ops.tapped[number] for number in taps.numbers])
        return rows

    def settle(self, *, waits: bool = False) -> None:
        """Weights lie in memory from the start."""

    def argmax(self, logits_RV: torch.Tensor) -> list[int]:
        """Where the logits are."""
        return self._drawing.argmax(logits_RV)

    def weigh(
        self, logits_RV: np.ndarray, rows: Sequence[int], temperatures: Sequence[float], quantiles: Sequence[float]
    ) -> list[Weighed]:
        """With numpy."""
        return self._drawing.weigh(logits_RV, rows, temperatures, quantiles)

    def add_adapter(self, adapter: Adapter) -> int:
        """On the device in the compute dtype."""
        fitted = by_linear(self._sites.fit(adapter), id)
        number = next(i for i in range(len(self._adapters) + 1) if i not in self._adapters)
        self._adapters[number] = {
            linear: [(site, LowRank(a=self._placed(one.a), b=self._placed(one.b))) for site, one in several]
            for linear, several in fitted.items()
        }
        return number

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self.device, dtype=self._dtype)

    def drop_adapter(self, number: int) -> None:
        """Its tensors go."""
        del self._adapters[number]

    def adapter_bytes(self, number: int) -> int:
        """Of A and B in the compute dtype."""
        several = self._adapters[number].values()
        return sum(one.a.nbytes + one.b.nbytes for sites in several for _, one in sites)

    def close(self) -> None:
        """Drop the weights."""
        del self._weights, self._sites
        self._adapters = {}


def _instruction_set(device: torch.device) -> str:
    """What torch's own kernels are chosen by."""
    return str(torch.backends.cpu.get_cpu_capability()).lower() if device.type == "cpu" else card_of(device)


def device_name(device: torch.device) -> str:
    """What torch calls a CUDA device; of another the kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def card_of(device: torch.device) -> str:
    """A CUDA device's name and compute capability: "NVIDIA H200 sm_90"."""
    return f"{device_name(device)} sm_{''.join(map(str, torch.cuda.get_device_capability(device)))}"


def _choose(name: str, asked: str, auto: str) -> str:
    if asked == "auto":
        return auto
    if asked not in DTYPES:
        raise ConfigError(
            f"{name} is {asked!r}; the torch backend has {' and '.join(DTYPES)}", hint=f"use --backend cpu for {asked}"
        )
    return asked


def _auto_format(blueprint: Blueprint) -> str:
    # fp16 files run as bf16: the range of every value is kept, 3 of 11 significant bits are not; fp32 keeps all
    return "fp32" if blueprint.source.stored_dtype == torch.float32 else "bf16"
