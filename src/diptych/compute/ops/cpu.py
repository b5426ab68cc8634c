"""The C++ backend: a family's forward, recorded once at load, becomes one native program.

`CpuLoader` packs weights as they are asked for, `CpuOps` turns the calls of a family's forward into the program's list of
operations, and `CpuProgram.forward` runs the whole list in one native call. Nothing of it runs per layer in Python.
A handle of an activation is a `Value`: where it will lie and how it comes about. Norms, gates and attention are recorded
only when their consumer is known, because the consumer's weight format decides the form in which they are written.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from diptych.compute.batch import ForwardBatch
from diptych.compute.ops.contract import (
    Activation,
    AttentionSpec,
    ExpertParts,
    ExpertsSpec,
    LinearParts,
    QkNorm,
    Role,
    RopeSpec,
    WeightTensor,
)
from diptych.compute.ops.cpus import Placement, allowed_cpus, choose_cpus
from diptych.compute.sampler import Weighed
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import CapacityError, ConfigError, ExecutorError
from diptych.ground.formats import ENGINE_WEIGHTS

try:
    from diptych.compute.ops import _cpu  # type: ignore[attr-defined]

    IMPORT_FAILURE = ""
except ImportError as error:
    _cpu = None
    IMPORT_FAILURE = str(error)

logger = logging.getLogger("diptych.compute")

COMPILERS = ("c++", "g++", "clang++")

# What a projection is, by what it reads (its time is counted under this name).
CATEGORIES = {"norm": "qkv", "residual": "qkv", "attention": "o", "gate": "down"}
BACKED_BYTES = 32 << 20  # asked for at a time: a twentieth of a second on a slow host
KEPT_LOGITS_ROWS = (
    64  # 39 MB for a vocabulary of 152k; more rows are wanted only where log-probabilities of prompts are
)
# inputs that share 16 levels of the int8 grid: 4.25 bits a weight, quality in LAB.md
INT4_GROUP = ENGINE_WEIGHTS["int4"][0].group


def is_available() -> tuple[bool, str]:
    """(whether the native kernels can be used, what they run on or why not)."""
    if _cpu is None:
        return False, _why_missing()
    return True, f"native kernels, {_cpu.instruction_sets()[0]}"


def _why_missing() -> str:
    """pip hides why a build failed, so the first use says what is known and how to see the rest."""
    if find_spec("diptych.compute.ops._cpu") is not None:
        return f"the cpu kernels do not load: {IMPORT_FAILURE}"
    compiler = next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        now = "no C++ compiler is on PATH: install g++ or clang++, then Diptych again"
    else:
        now = f"{compiler} is on PATH now: install Diptych again, with `pip install -v` to see the compiler's messages"
    return f"the cpu kernels were not built when Diptych was installed; {now}"


def instruction_sets() -> list[str]:
    """The sets whose kernels this CPU runs, widest first."""
    return list(_cpu.instruction_sets()) if _cpu is not None else []


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearHandle:
    """A packed weight: its number in the program, the format of the rows it multiplies, its shape."""

    index: int
    format: str
    n_inputs: int
    n_outputs: int
    activation: Activation | None = None
    role: Role | None = None

    @property
    def rows_format(self) -> str:
        """The form of the rows it multiplies: int8 and int4 weights share one."""
        return "bf16" if self.format == "bf16" else "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorHandle:
    """A norm weight's number."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHandle:
    """An embedding table's number and shape."""

    index: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHandle:
    """A layer's attention: native shape, rotary table and norms by number."""

    spec: AttentionSpec
    shape: Any
    rope: int | None
    q_norm: int | None
    k_norm: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsHandle:
    """A mixture's packed weights."""

    spec: ExpertsSpec
    router: LinearHandle
    gate_up: tuple[LinearHandle, ...]
    down: tuple[LinearHandle, ...]


@dataclass(slots=True)
class Residual:
    """The residual stream's buffer; version counts the writes, so that a late reader of an old value is caught."""

    buffer: int
    width: int
    version: int = 0


@dataclass(slots=True)
class Value:
    """An activation. `kind` says what made it; `emit` records that into a buffer once the consumer's need is known."""

    kind: str
    width: int
    source: Residual | None = None
    source_version: int = 0
    buffer: int | None = None  # fp32, where it lies already
    emit_rows: Callable[[int], None] | None = None
    emit_f32: Callable[[int], None] | None = None
    emit_bf16: Callable[[int], None] | None = None  # where rounding before a quantisation is worth half the traffic
    rows: dict[str, int] = field(default_factory=dict)
    norm: tuple[int, float] | None = None  # (vector, eps) of a norm of `buffer`


class PackedSource:
    """Where already packed weights come from and go to (`diptych quantize`). This one has none."""

    def find(self, key: str, nbytes: int) -> np.ndarray | None:
        """The packed bytes saved under `key`, or None when it must be packed from the checkpoint."""
        return None

    def keep(self, key: str, index: int) -> None:
        """Told of every packed weight: its key and its number in the program."""

    def keep_plain(self, tensor: WeightTensor) -> None:
        """Told of every tensor that is used in its own form."""


class CpuLoader:
    """Packs a checkpoint's tensors into a native program. `formats`: weights in config.weights, the head and router as below.

    The head is kept in bf16 for bf16 weights and in int8 for int8 and int4: every token's probabilities pass through it,
    and LAB.md has the quality that results. The router is always bf16 (it is tiny and picks experts).
    """

    def __init__(self, config: ComputeConfig, packed: PackedSource | None = None) -> None:
        available, reason = is_available()
        if not available:
            raise ConfigError(reason, hint="use --backend torch meanwhile")
        if config.weights == "fp32" or config.kv == "fp32":
            raise ConfigError("the cpu backend has no fp32 weights or cache", hint="use --backend torch for fp32")
        choose_instruction_set(config.instruction_set)
        self.weights_format = "bf16" if config.weights == "auto" else config.weights
        self.kv_format = "bf16" if config.kv == "auto" else config.kv
        self.placement = choose_cpus(config.threads, config.numa, allowed_cpus())
        self.program = _cpu.Program(self.placement.threads, self.placement.cpus)
        self.packed = packed or PackedSource()
        self.specs: list[AttentionSpec] = []
        self._ropes: dict[RopeSpec, int] = {}

    def table(self, tensor: WeightTensor, *, head: LinearHandle | None) -> TableHandle | LinearHandle:
        """The embedding [V, D]: the head where that holds the same numbers, else rows of the checkpoint's own pages.

        An int8 head has lost bits, and so has a bf16 head of a 32-bit or fp16 tensor.
        """
        if head is not None and head.format == "bf16" and tensor.dtype == torch.bfloat16:
            return head
        self.packed.keep_plain(tensor)
        values = tensor.read()
        values = values if values.is_contiguous() else values.contiguous()
        return TableHandle(index=self.program.add_table(values.detach()), width=tensor.shape[1])

    def vector(self, tensor: WeightTensor, *, offset: float = 0.0) -> VectorHandle:
        """A norm weight as fp32 plus offset."""
        self.packed.keep_plain(tensor)
        values = tensor.read().detach().to(torch.float32).contiguous() + offset
        return VectorHandle(index=self.program.add_vector(values))

    def linear(self, parts: LinearParts, *, role: Role | None = None) -> LinearHandle:
        """A projection in the weights' format."""
        return self._pack(parts, self.weights_format, role=role)

    def gated(self, parts: LinearParts, activation: Activation, *, role: Role | None = None) -> LinearHandle:
        """Gate and up interleaved, so that the product's epilogue can join them."""
        return self._pack(parts, self.weights_format, activation=activation, role=role)

    def attention(
        self, spec: AttentionSpec, *, q_norm: WeightTensor | None, k_norm: WeightTensor | None, norm_offset: float = 0.0
    ) -> AttentionHandle:
        """The layer's native attention shape; layers with equal rotary specs share one table."""
        self.specs.append(spec)
        shape = _cpu.AttentionShape(
            n_heads=spec.n_heads,
            n_kv_heads=spec.n_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
        )
        rope = None
        if spec.rope is not None:
            if spec.rope not in self._ropes:
                self._ropes[spec.rope] = self.program.add_rope(list(spec.rope.inv_freq), spec.rope.attention_factor)
            rope = self._ropes[spec.rope]
        norms = [self.vector(norm, offset=norm_offset).index if norm is not None else None for norm in (q_norm, k_norm)]
        return AttentionHandle(spec=spec, shape=shape, rope=rope, q_norm=norms[0], k_norm=norms[1])

    def experts(
        self,
        spec: ExpertsSpec,
        *,
        router: WeightTensor,
        experts: tuple[ExpertParts, ...],
        role: Role | None = None,
    ) -> ExpertsHandle:
        """Each expert packed on its own; the router in bf16."""
        return ExpertsHandle(
            spec=spec,
            router=self._pack(LinearParts(weights=(router,)), "bf16"),
            gate_up=tuple(self.gated(expert.gate_up, spec.activation, role=role) for expert in experts),
            down=tuple(self.linear(expert.down, role=role) for expert in experts),
        )

    def head(self, tensor: WeightTensor, *, role: Role | None = None) -> LinearHandle:
        """The output projection, packed."""
        head_format = "bf16" if self.weights_format == "bf16" else "int8"
        return self._pack(LinearParts(weights=(tensor,)), head_format, role=role)

    def _pack(
        self,
        parts: LinearParts,
        weights_format: str,
        *,
        activation: Activation | None = None,
        role: Role | None = None,
    ) -> LinearHandle:
        n, k = parts.n_outputs, parts.n_inputs
        shape = _cpu.LinearShape(
            format=weights_format,
            n=n,
            k=k,
            group=INT4_GROUP,
            is_gated=activation is not None,
            has_bias=bool(parts.biases),
        )
        key = "+".join(part.name for part in (*parts.weights, *parts.biases))
        saved = self.packed.find(key, shape.packed_bytes)
        seed = parts.weights[0].random_seed
        if saved is not None:
            index = self.program.add_packed_linear(shape, saved)
        elif seed is not None and not parts.biases:
            index = self.program.add_random_linear(shape, seed & (2**63 - 1), (3.0 / k) ** 0.5)
        else:
            weights = [part.read().detach() for part in parts.weights]
            bias = None
            if parts.biases:
                bias = torch.cat([part.read().detach().to(torch.float32).reshape(-1) for part in parts.biases])
            index = self.program.add_linear(shape, weights, bias)
        self.packed.keep(key, index)
        return LinearHandle(
            index=index,
            format=weights_format,
            n_inputs=k,
            n_outputs=n if activation is None else n // 2,
            activation=activation,
            role=role,
        )


class CpuOps:
    """Records a family's forward into the loader's program. Buffers are shared by role: a layer's die with the layer.

    What a Value records later holds the program alone: a circle back to here would keep a closed model's weights.
    """

    def __init__(self, loader: CpuLoader) -> None:
        self.program = loader.program
        self._buffers: dict[tuple[Any, ...], int] = {}
        self._owner: dict[int, Value] = {}

    def embed(self, table: TableHandle | LinearHandle, *, scale: float) -> Residual:
        """x = scale * rows of the table, or of the packed head that serves as one."""
        if isinstance(table, LinearHandle):
            width, record = table.n_inputs, self.program.embed_tied
        else:
            width, record = table.width, self.program.embed
        x = Residual(self._f32("residual", width), width)
        record(table.index, x.buffer, scale)
        return x

    def rms_norm(self, x: Residual | Value, weight: VectorHandle, *, eps: float) -> Value:
        """Recorded by its consumer: a projection takes it as rows, `add` fuses it."""
        if isinstance(x, Value):
            buffer = self._materialised(x)
            value = Value("norm", x.width, buffer=buffer, norm=(weight.index, eps))
        else:
            buffer = x.buffer
            value = Value("norm", x.width, source=x, source_version=x.version, buffer=buffer, norm=(weight.index, eps))
        program = self.program
        value.emit_rows = lambda rows: program.norm(buffer, weight.index, eps, rows)
        return value

    def linear(self, h: Value | Residual, weight: LinearHandle) -> Value:
        """y in an fp32 buffer."""
        h = self._as_value(h)
        category = CATEGORIES[h.kind]
        out = self._f32(f"{category} out", weight.n_outputs)
        self.program.linear(category=category, weight=weight.index, rows=self._rows(h, weight), out=out)
        return Value("projection", weight.n_outputs, buffer=out)

    def linear_gate(self, h: Value | Residual, weight: LinearHandle) -> Value:
        """act(gate) * up, written by the product's epilogue in the form that the next projection reads."""
        assert weight.activation is not None
        rows = self._rows(self._as_value(h), weight)
        settings = {"category": "gate_up", "weight": weight.index, "rows": rows, "activation": weight.activation.value}
        value = Value("gate", weight.n_outputs)
        program = self.program
        value.emit_f32 = lambda out: program.linear(out=out, store="f32", **settings)
        value.emit_bf16 = value.emit_rows = lambda out: program.linear(out=out, store="bf16", **settings)
        return value

    def linear_add(self, h: Value, weight: LinearHandle, x: Residual) -> Residual:
        """x += h W^T + b in the product's epilogue."""
        category = CATEGORIES[h.kind]
        rows = self._rows(h, weight)
        self.program.linear(category=category, weight=weight.index, rows=rows, out=x.buffer, store="add_f32")
        return self._written(x)

    def add(self, x: Residual, y: Value) -> Residual:
        """x += y, with y's norm fused where it is one."""
        if y.kind == "norm":
            assert y.norm is not None
            assert y.source is None, "the norm of the residual stream is not added to it"
            self.program.add_norm(y.buffer, y.norm[0], y.norm[1], x.buffer)
        else:
            self.program.add(self._materialised(y), x.buffer)
        return self._written(x)

    def rotate_and_cache(self, qkv: Value, attention: AttentionHandle) -> Value:
        """q in bf16 for the attention kernel; k and v go to the cache."""
        spec = attention.spec
        q = self._buffer("q", spec.n_heads * spec.head_dim, lambda width: self.program.add_bf16(width))
        self.program.rotate(
            qkv=qkv.buffer,
            q=q,
            layer=spec.layer,
            shape=attention.shape,
            rope=attention.rope,
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
            has_full_width_norm=spec.qk_norm is QkNorm.FULL,
            norm_eps=spec.norm_eps,
        )
        return Value("query", spec.n_heads * spec.head_dim, buffer=q)

    def attention(self, q: Value, attention: AttentionHandle) -> Value:
        """Recorded by its consumer, as rows in bf16 or as fp32 to be quantised."""
        settings = {"q": q.buffer, "layer": attention.spec.layer, "shape": attention.shape}
        value = Value("attention", q.width)
        program = self.program
        value.emit_f32 = lambda out: program.attention(out=out, **settings)
        value.emit_rows = lambda out: program.attention(out=out, **settings)
        return value

    def experts_add(self, h: Value | Residual, experts: ExpertsHandle, x: Residual) -> Residual:
        """x += the mixture, summed per token in ascending order of expert."""
        h = self._as_value(h)
        spec, first, down = experts.spec, experts.gate_up[0], experts.down[0]
        top_k = spec.experts_per_token
        router_rows, rows = self._rows(h, experts.router), self._rows(h, first)
        out = self._f32("experts out", x.width)
        hidden = None
        if down.format != "bf16":
            hidden = self._buffer("experts hidden", spec.ffn, lambda width: self.program.add_f32(width, top_k), top_k)
        self.program.moe(
            router=experts.router.index,
            router_rows=router_rows,
            scores=self._f32("experts scores", spec.n_experts),
            gate_up=[expert.index for expert in experts.gate_up],
            down=[expert.index for expert in experts.down],
            rows=rows,
            hidden=hidden,
            hidden_rows=self._rows_buffer("experts hidden rows", spec.ffn, down, top_k),
            expanded=self._buffer("experts wide", x.width, lambda width: self.program.add_f32(width, top_k), top_k),
            out=out,
            top_k=top_k,
            renormalises=spec.renormalises,
            activation=spec.activation.value,
        )
        self.program.add(out, x.buffer)
        return self._written(x)

    def head(self, x: Residual, norm: VectorHandle, weight: LinearHandle, *, eps: float, softcap: float | None) -> None:
        """Norm, projection and softcap of the wanted rows, straight into the caller's logits."""
        rows = self._rows_buffer("head", x.width, weight)
        self.program.head(
            x=x.buffer, norm=norm.index, eps=eps, rows=rows, weight=weight.index, scale=1.0, softcap=softcap
        )

    def _buffer(self, role: str, width: int, make: Callable[[int], int], *more: Any) -> int:
        key = (role, width, *more)
        if key not in self._buffers:
            self._buffers[key] = make(width)
        return self._buffers[key]

    def _f32(self, role: str, width: int) -> int:
        return self._buffer(role, width, lambda width: self.program.add_f32(width))

    def _rows_buffer(self, role: str, width: int, weight: LinearHandle, rows_per_token: int = 1) -> int:
        kind = weight.rows_format
        return self._buffer(
            f"{role} rows",
            width,
            lambda width: self.program.add_rows(kind, width, rows_per_token),
            kind,
            rows_per_token,
        )

    def _rows(self, h: Value, weight: LinearHandle) -> int:
        """The rows buffer of h in the form the weight reads; recorded on first use, again if another took the buffer."""
        key = weight.rows_format
        rows = self._rows_buffer(h.kind, h.width, weight)
        if h.rows.get(key) == rows and self._owner.get(rows) is h:
            return rows
        assert h.source is None or h.source.version == h.source_version, "the norm's input has been overwritten"
        if h.emit_rows is not None and (h.kind == "norm" or key == "bf16"):
            h.emit_rows(rows)
        elif h.emit_bf16 is not None:
            half = self._buffer(f"{h.kind} bf16", h.width, lambda width: self.program.add_bf16(width))
            h.emit_bf16(half)
            self.program.prepare(half, rows)
        else:
            self.program.prepare(self._materialised(h), rows)
        h.rows[key] = rows
        self._owner[rows] = h
        return rows

    def _as_value(self, h: Value | Residual) -> Value:
        """The residual stream itself as an input (families without a norm before the projection)."""
        if isinstance(h, Value):
            return h
        return Value("residual", h.width, source=h, source_version=h.version, buffer=h.buffer)

    def _materialised(self, h: Value) -> int:
        """The fp32 buffer of h."""
        if h.buffer is None:
            assert h.emit_f32 is not None
            h.buffer = self._f32(h.kind, h.width)
            h.emit_f32(h.buffer)
        return h.buffer

    def _written(self, x: Residual) -> Residual:
        x.version += 1
        return x


class CpuProgram:
    """The recorded program, ready to run. Not thread-safe: one step at a time."""

    def __init__(self, loader: CpuLoader, vocab: int) -> None:
        self.program = loader.program
        self.weights_format = loader.weights_format
        self.kv_format = loader.kv_format
        self.vocab = vocab
        self._nodes = loader.placement.nodes
        self._kept_logits = torch.empty((0, vocab), dtype=torch.float32)
        spec = loader.specs[0]
        if any((s.n_kv_heads, s.head_dim) != (spec.n_kv_heads, spec.head_dim) for s in loader.specs):
            raise ConfigError("the layers' caches differ in shape", hint="use --backend torch for this model")
        self._cache = {
            "n_layers": 1 + max(s.layer for s in loader.specs),
            "n_kv_heads": spec.n_kv_heads,
            "head_dim": spec.head_dim,
            "format": loader.kv_format,
        }

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights and norms, which a decode step reads."""
        return int(self.program.weight_bytes)

    @property
    def table_bytes(self) -> int:
        """Bytes of an embedding table that is not the head: a step reads single rows of it."""
        return int(self.program.table_bytes)

    def kv_bytes_per_block(self, block_tokens: int) -> int:
        """Bytes of one block over all layers."""
        return int(_cpu.kv_bytes_per_block(block_tokens=block_tokens, **self._cache))

    def make_kv(self, n_blocks: int, block_tokens: int) -> CpuKVStore:
        """An empty cache; ConfigError for a block size that is not a multiple of 16, CapacityError without memory."""
        return CpuKVStore(self._cache, n_blocks=n_blocks, block_tokens=block_tokens, nodes=self._nodes)

    def forward(self, batch: ForwardBatch, kv: CpuKVStore) -> torch.Tensor:
        """Logits [R, V] fp32 of the batch's rows, valid until the next forward; writes its tokens' keys and values to kv."""
        logits = self._logits(len(batch.logits_rows_R))
        try:
            self.program.run(*_arrays(batch), kv.native, logits)
        except ValueError as error:
            raise ExecutorError(f"the step was refused: {error}") from error
        return logits

    def forward_best(self, batch: ForwardBatch, kv: CpuKVStore) -> tuple[list[int], list[float]]:
        """As forward, but only the arg-max of each row, the lowest id among equals, and its logit (NaN: the row has no number).

        The logits are compared where the product leaves them in cache and written nowhere.
        """
        try:
            best: tuple[list[int], list[float]] = self.program.run_best(*_arrays(batch), kv.native)
        except ValueError as error:
            raise ExecutorError(f"the step was refused: {error}") from error
        return best

    def _logits(self, n_rows: int) -> torch.Tensor:
        """Room for logits; few rows share one tensor, because fresh megabytes cost a page fault for every 4 KB."""
        if n_rows > KEPT_LOGITS_ROWS:
            return torch.empty((n_rows, self.vocab), dtype=torch.float32)
        if n_rows > len(self._kept_logits):
            self._kept_logits = torch.empty((n_rows, self.vocab), dtype=torch.float32)
        return self._kept_logits[:n_rows]

    def argmax(self, logits: torch.Tensor) -> np.ndarray:
        """The most likely id of each row [R], the lowest among equals; faster than torch for wide rows."""
        return self.program.argmax(logits)

    def nanoseconds(self) -> dict[str, int]:
        """Time of the last step by kind of operation, in ns."""
        return dict(self.program.nanoseconds())


def weigh(
    program: Any,
    logits_RV: np.ndarray,
    rows: Sequence[int],
    temperatures: Sequence[float],
    quantiles: Sequence[float],
) -> list[Weighed]:
    """For each named row a token of softmax(logits / temperature), by inverse CDF at its quantile in [0, 1)."""
    drawn = program.draw(
        logits_RV, np.array(rows, dtype=np.int32), np.array(temperatures, dtype=np.float32), np.array(quantiles)
    )
    return [Weighed(*one) for one in zip(*drawn, strict=True)]


def _arrays(batch: ForwardBatch) -> tuple[np.ndarray, ...]:
    """The batch in the order of the program's arguments."""
    return (
        batch.token_ids_T,
        batch.query_start_S1,
        batch.context_tokens_S,
        batch.block_table_SM,
        batch.logits_rows_R,
    )


class CpuKVStore:
    """The native cache behind the KVStore interface."""

    def __init__(self, cache: dict[str, Any], *, n_blocks: int, block_tokens: int, nodes: Sequence[int] = ()) -> None:
        if block_tokens % 16 != 0:
            raise ConfigError(f"block_tokens is {block_tokens}; the cpu backend needs a multiple of 16")
        self.n_blocks = n_blocks
        self.block_tokens = block_tokens
        self._heads = (cache["n_kv_heads"], cache["head_dim"])
        try:
            self.native = _cpu.KvCache(n_blocks=n_blocks, block_tokens=block_tokens, **cache)
            # any thread may meet any block
            if len(nodes) > 1 and not self.native.interleave(list(nodes)):
                logger.warning(
                    "the KV cache stays where it is first written: the system refused to deal it out over nodes"
                )
        except MemoryError as error:
            per_block = _cpu.kv_bytes_per_block(block_tokens=block_tokens, **cache)
            raise CapacityError(
                f"the KV cache of {n_blocks} blocks needs {n_blocks * per_block} bytes, which this machine does not have",
                hint="ask for a smaller max_context_tokens or kv_memory_bytes",
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.native.nbytes)

    def back_memory(self, wants_stop: Callable[[], bool]) -> None:
        """A huge page that is first written inside a step holds every stream for milliseconds, so servers ask ahead."""
        for begin in range(0, self.nbytes, BACKED_BYTES):
            if wants_stop():
                return
            self.native.back(begin, begin + BACKED_BYTES)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block source to block target in every layer, in the order of the pairs."""
        self.native.copy_blocks([list(pair) for pair in pairs])

    def read(self, layer: int, block_ids: Sequence[int], n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of the first n_tokens of a sequence that lies in block_ids, each [K, T, d] fp32; copies."""
        n_heads, head_dim = self._heads
        keys, values = (torch.empty((n_heads, n_tokens, head_dim), dtype=torch.float32) for _ in range(2))
        self.native.read(layer, np.asarray(block_ids, dtype=np.int32), keys, values)
        return keys, values

    def write(self, layer: int, block_ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [K, T, d] as the first T tokens of block_ids."""
        self.native.write(
            layer,
            np.asarray(block_ids, dtype=np.int32),
            keys.to(torch.float32).contiguous(),
            values.to(torch.float32).contiguous(),
        )


def choose_instruction_set(name: str) -> None:
    """Use one set's kernels from now on (for the whole process); ConfigError when this CPU lacks it."""
    wanted = _cpu.instruction_sets()[0] if name == "auto" else name
    if not _cpu.set_instruction_set(wanted):
        raise ConfigError(f"instruction_set is {name}; this CPU has {', '.join(_cpu.instruction_sets())}")


def measure_read_bytes_per_s(n_bytes: int, placement: Placement, repeats: int) -> float:
    """The best rate at which these threads read `n_bytes` of memory; n_bytes should exceed every cache."""
    return float(_cpu.measure_read_bytes_per_s(n_bytes, placement.threads, placement.cpus, repeats))


def measure_ops_per_s(dtype: str, placement: Placement, repeats: int = 25) -> float:
    """The best rate of the instructions that multiply `dtype` (bf16 or int8) from registers, on these threads."""
    burst = {"bf16": _cpu.measure_bf16_ops_per_s, "int8": _cpu.measure_int8_ops_per_s}[dtype]
    return float(burst(placement.threads, placement.cpus, repeats))
