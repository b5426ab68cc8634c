"""A Model on the C++ backend: a family's forward, recorded once at load, becomes one native program.

`CpuLoader` packs weights as they are asked for, `CpuOps` turns the calls of the family's forward into the program's list of
operations, and a step runs the whole list in one native call. Nothing of it runs per layer in Python. The program owns its
kernels and its threads: models of different instruction sets live side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from diptych.compute.adapters import Adapter, LowRank
from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import KVStore
from diptych.compute.model import Best, Blueprint, Model, Want
from diptych.compute.ops.contract import Taps, refuse_logits
from diptych.compute.ops.cpu.handles import LinearHandle
from diptych.compute.ops.cpu.kernels import _cpu, cache_sizes, state_floats
from diptych.compute.ops.cpu.kv import CpuKVStore
from diptych.compute.ops.cpu.loader import CpuLoader
from diptych.compute.ops.cpu.recorder import CpuOps
from diptych.compute.ops.shares import Rank
from diptych.compute.sampling.drawing import Weighed
from diptych.compute.sites import Site
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError, ExecutorError, LoadError

logger = logging.getLogger("diptych.compute")

# 39 MB for a vocabulary of 152k; more rows are wanted only where log-probabilities of prompts are
KEPT_LOGITS_ROWS = 64


def build_cpu_model(
    blueprint: Blueprint,
    config: ComputeConfig,
    *,
    beside: Model | None = None,
    on_packed: Callable[[CpuLoader], None] | None = None,
) -> CpuModel:
    """Pack the weights, hand them to `on_packed`, record the program. ConfigError for what this backend lacks, LoadError.

    beside: a model that never runs while this one does; its threads are used.
    """
    if config.device not in ("auto", "cpu"):
        raise ConfigError(f"device is {config.device!r}; the cpu backend runs on cpu", hint="use --backend torch")
    return CpuModel(blueprint, config, beside if isinstance(beside, CpuModel) else None, on_packed)


class CpuModel(Model):
    """Packed weights and a recorded program; one native call per step. Not thread-safe: one step at a time."""

    backend_name = "cpu"
    keeps_bits = True
    device = torch.device("cpu")

    def __init__(
        self,
        blueprint: Blueprint,
        config: ComputeConfig,
        beside: CpuModel | None = None,
        on_packed: Callable[[CpuLoader], None] | None = None,
        rank: Rank | None = None,
    ) -> None:
        self.spec = blueprint.spec
        self.hf_config = blueprint.hf_config
        loader = CpuLoader(config, blueprint.source, None if beside is None else beside.program, rank)
        weights = blueprint.load(loader)
        if on_packed is not None:
            on_packed(loader)
        blueprint.forward(CpuOps(loader), weights)
        self.program: Any = loader.program
        self._sites, self._exponents = loader.sites, loader.packer.exponents
        self._sites.has_multiplied = blueprint.has_multiplied
        self.weights_format = loader.packer.main_format
        self.formats = dict(loader.packer.n_values)
        self.expert_formats = dict(loader.n_expert_values)
        self.kv_format = loader.kv_format
        self._has_head = weights.head is not None
        self.head_format = self.weights_format if weights.head is None else weights.head.format
        self.weight_bytes = int(self.program.weight_bytes)
        self.n_parameters = blueprint.source.n_parameters
        self.instruction_set = loader.instruction_set
        self.threads = int(self.program.threads)
        self.placement = loader.placement
        numbers = (*sorted(self.formats), self.head_format, self.kv_format)
        self.revision, self.lineage = blueprint.revisions(
            (self.backend_name, self.instruction_set, *numbers), (self.backend_name, *numbers)
        )
        self._cache = {**cache_sizes(self.spec), "format": loader.kv_format}
        self._state_floats = state_floats(self.spec, loader.rank)
        self._kept_logits = torch.empty((0, self.spec.vocab_size), dtype=torch.float32)
        logger.info(
            "model loaded backend=cpu architecture=%s instructions=%s weights=%s head=%s kv=%s threads=%d cpus=%s "
            "parameters=%d bytes=%d",
            self.spec.architecture, self.instruction_set, self.weights_format, self.head_format, self.kv_format,
            self.threads, ",".join(map(str, self.placement.cpus)) or "any", self.n_parameters, self.weight_bytes,
        )  # fmt: skip

    def kv_bytes_per_block(self, block_tokens: int) -> int:
        """Bytes of one block in all layers."""
        return int(_cpu.kv_bytes_per_block(block_tokens=block_tokens, **self._cache))

    @property
    def state_bytes(self) -> int:
        """In fp32, columns padded to whole lanes."""
        return 4 * sum(self._state_floats)

    def make_kv(self, n_blocks: int, block_tokens: int, n_places: int = 1) -> KVStore:
        """An empty cache; ConfigError for a block size that is not a multiple of 16, CapacityError without memory."""
        return CpuKVStore(
            self._cache,
            n_blocks=n_blocks,
            block_tokens=block_tokens,
            nodes=self.placement.nodes,
            revision=self.revision,
            state_floats=self._state_floats,
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
        """As `Model.forward`. For BEST the logits are compared where the product leaves them in cache and written nowhere."""
        if not self._has_head:
            refuse_logits(len(batch.logits_rows_R))
        native = kv.native  # type: ignore[attr-defined]
        arrays = (
            batch.token_ids_T,
            batch.query_start_S1,
            batch.context_tokens_S,
            batch.block_table_SM,
            batch.logits_rows_R,
        )
        ends: tuple[object, ...] = ()
        states = batch.states
        places = None if states is None else (states.reads_S, states.writes_S, states.saves_N3)
        of_sequences = (batch.adapters_S, batch.both_ways_S, batch.second_S, places)
        if given is not None or taps is not None or any(one is not None for one in of_sequences):
            ends = (given, None if taps is None else self._tapped(taps, batch.n_tokens), *of_sequences)
        try:
            if want is Want.BEST:
                best: Best = self.program.run_best(*arrays, native, *ends)
                return best
            if want is Want.HIDDEN:
                hidden_RD = torch.empty((len(batch.logits_rows_R), self.program.hidden_width), dtype=torch.float32)
                self.program.run_hidden(*arrays, native, hidden_RD.numpy(), *of_sequences)
                return hidden_RD
            logits_RV = self._logits(len(batch.logits_rows_R))
            # as numpy: the binding asks a tensor in Python for its memory, and loses a Ctrl-C that arrives meanwhile
            self.program.run(*arrays, native, logits_RV.numpy(), *ends)
        except ValueError as error:
            raise ExecutorError(f"the step was refused: {error}") from error
        return logits_RV

    def _tapped(self, taps: Taps, n_tokens: int) -> tuple[np.ndarray, torch.Tensor]:
        """The taps' numbers and room for their states."""
        numbers = np.array(taps.numbers, dtype=np.int32)
        width = int(self.program.tap_width(taps.numbers[0]))
        taps.states = torch.empty((len(numbers), n_tokens, width), dtype=torch.float32)
        return numbers, taps.states

    def _logits(self, n_rows: int) -> torch.Tensor:
        """Room for logits; few rows share one tensor, because fresh megabytes cost a page fault for every 4 KB."""
        if n_rows > KEPT_LOGITS_ROWS:
            return torch.empty((n_rows, self.spec.vocab_size), dtype=torch.float32)
        if n_rows > len(self._kept_logits):
            self._kept_logits = torch.empty((n_rows, self.spec.vocab_size), dtype=torch.float32)
        return self._kept_logits[:n_rows]

    def settle(self, *, waits: bool = False) -> None:
        """On a thread that gives way to all others; each weight is taken over between two steps."""
        self.program.settle(waits)

    def argmax(self, logits_RV: torch.Tensor) -> list[int]:
        """On the program's threads; faster than torch for wide rows."""
        return [int(token_id) for token_id in self.program.argmax(logits_RV.numpy())]

    def weigh(
        self, logits_RV: np.ndarray, rows: Sequence[int], temperatures: Sequence[float], quantiles: Sequence[float]
    ) -> list[Weighed]:
        """On the program's threads."""
        drawn = self.program.draw(
            logits_RV, np.array(rows, dtype=np.int32), np.array(temperatures, dtype=np.float32), np.array(quantiles)
        )
        return [Weighed(*one) for one in zip(*drawn, strict=True)]

    def add_adapter(self, adapter: Adapter) -> int:
        """In bf16, packed as the projections are: of a rank, A whole and B's rows for its own outputs."""
        sites: dict[int, list[tuple[int, int, np.ndarray, np.ndarray]]] = {}
        for site, low_rank in sorted(self._sites.fit(adapter), key=lambda one: one[0].begin):
            for linear in site.linear.pieces or (site.linear,):
                first, own = linear.own_rows(site.begin, site.end)
                if linear.index is None or not own:
                    continue
                a, b = self._scaled(linear, site, low_rank, adapter)
                rows = torch.cat([b[some] for some in own]) if len(own) > 1 else b[own[0]]
                sites.setdefault(linear.index, []).append((first, first + len(rows), a.numpy(), rows.numpy()))
        return int(self.program.add_adapter(list(sites.items())))

    def _scaled(
        self, linear: LinearHandle, site: Site, low_rank: LowRank, adapter: Adapter
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B for a projection whose inputs and outputs may have been balanced. LoadError where nobody knows how."""
        if not linear.is_balanced:
            return low_rank.a, low_rank.b
        exponents = self._exponents.get(linear.key)
        if exponents is None:
            raise LoadError(
                f"adapter {adapter.path} needs to know how the weights were balanced, and the checkpoint was packed by a "
                "version that did not say",
                hint="write it again with `diptych quantize`",
            )
        outputs, inputs = (one.exp2() for one in exponents.read().tensor_split((-site.n_inputs,)))
        return low_rank.a * inputs, low_rank.b * outputs[site.begin - linear.begin : site.end - linear.begin, None]

    def drop_adapter(self, number: int) -> None:
        """Its pages go back to the system."""
        self.program.drop_adapter(number)

    def adapter_bytes(self, number: int) -> int:
        """Of A and B, packed."""
        return int(self.program.adapter_bytes(number))

    def nanoseconds(self) -> dict[str, int]:
        """Time of the last step by kind of operation, in ns."""
        return dict(self.program.nanoseconds())

    def close(self) -> None:
        """Drop the program with its packed weights."""
        del self.program, self._sites
