"""A checkpoint's tensors packed into a native program: the cpu backend's `Loader`, and the handles it gives out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from diptych.compute.ops.contract import (
    Activation,
    AttentionSpec,
    ExpertParts,
    LinearParts,
    Loader,
    NormParts,
    Role,
    RopeSpec,
    WeightTensor,
)
from diptych.compute.ops.cpu_kernels import _cpu, choose_instruction_set, is_available
from diptych.compute.ops.cpus import allowed_cpus, choose_cpus
from diptych.compute.weights import Source
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError, LoadError
from diptych.ground.formats import ENGINE_WEIGHTS, head_format
from diptych.models.spec import MoeSpec

# inputs that share 16 levels of the int8 grid: 4.25 bits a weight, quality in LAB.md
INT4_GROUP = ENGINE_WEIGHTS["int4"][0].group


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
    """The numbers of a norm's weight and bias (-1: none), and whether it takes the mean away."""

    index: int
    bias: int = -1
    is_centred: bool = False

    @property
    def kind(self) -> dict[str, Any]:
        """What distinguishes it from an RMSNorm, as the program's operations take it."""
        return {"bias": self.bias, "is_centred": self.is_centred}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHandle:
    """An embedding table's number and shape."""

    index: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHandle:
    """A norm's number, and packed weights by head: what takes queries to the latent, and latents to outputs."""

    norm: int
    keys: tuple[LinearHandle, ...]
    values: tuple[LinearHandle, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHandle:
    """A layer's attention: native shape, rotary table and norms by number."""

    spec: AttentionSpec
    shape: Any
    rope: int | None
    q_norm: int | None
    k_norm: int | None
    sinks: int = -1
    latent: LatentHandle | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsHandle:
    """A mixture's packed weights."""

    spec: MoeSpec
    router: LinearHandle
    choice_bias: int
    gate_up: tuple[LinearHandle, ...]
    down: tuple[LinearHandle, ...]


class CpuLoader(Loader[TableHandle | LinearHandle, VectorHandle, LinearHandle, AttentionHandle, ExpertsHandle]):
    """Packs a checkpoint's tensors into a native program. `formats`: weights in config.weights, the head and router as below.

    The head is kept in bf16 for bf16 weights and in int8 for int8 and int4: every token's probabilities pass through it,
    and LAB.md has the quality that results. The router is always bf16 (it is tiny and picks experts).
    """

    def __init__(self, config: ComputeConfig, source: Source, beside: Any = None) -> None:
        available, reason = is_available()
        if not available:
            raise ConfigError(reason, hint="use --backend torch meanwhile")
        if config.weights == "fp32" or config.kv == "fp32":
            raise ConfigError("the cpu backend has no fp32 weights or cache", hint="use --backend torch for fp32")
        self.instruction_set = choose_instruction_set(config.instruction_set)
        self.weights_format = "bf16" if config.weights == "auto" else config.weights
        self.kv_format = "bf16" if config.kv == "auto" else config.kv
        self.placement = choose_cpus(config.threads, config.numa, allowed_cpus())
        self.program = (
            _cpu.Program(self.instruction_set, self.placement.threads, self.placement.cpus)
            if beside is None
            else _cpu.Program(self.instruction_set, beside)  # its threads, one model running at a time
        )
        self.source = source
        self.is_balancing = self.weights_format != "bf16" and source.is_balanceable
        self.packed: dict[str, int] = {}  # key -> number in the program, of all that was packed
        self.plain: dict[str, WeightTensor] = {}  # used in their own form
        self._ropes: dict[RopeSpec, int] = {}

    def table(self, tensor: WeightTensor, *, head: LinearHandle | None) -> TableHandle | LinearHandle:
        """The embedding [V, D]: the head where that holds the same numbers, else rows of the checkpoint's own pages.

        An int8 head has lost bits, and so has a bf16 head of a 32-bit or fp16 tensor.
        """
        if head is not None and head.format == "bf16" and tensor.dtype == torch.bfloat16:
            return head
        self.plain[tensor.name] = tensor
        values = tensor.read()
        values = values if values.is_contiguous() else values.contiguous()
        return TableHandle(index=self.program.add_table(values.detach()), width=tensor.shape[1])

    def norm(self, parts: NormParts, *, offset: float = 0.0) -> VectorHandle:
        """Weight plus offset, and bias, as fp32."""
        bias = -1 if parts.bias is None else self._vector(parts.bias)
        return VectorHandle(index=self._vector(parts.weight, offset), bias=bias, is_centred=parts.is_centred)

    def _vector(self, tensor: WeightTensor, offset: float = 0.0) -> int:
        self.plain[tensor.name] = tensor
        values = tensor.read().detach().to(torch.float32).reshape(-1) + offset
        return int(self.program.add_vector(values.contiguous()))

    def linear(self, parts: LinearParts, *, role: Role | None = None) -> LinearHandle:
        """A projection in the weights' format."""
        return self._pack(parts, self.weights_format, role=role)

    def gated(self, parts: LinearParts, activation: Activation, *, role: Role | None = None) -> LinearHandle:
        """Gate and up interleaved, so that the product's epilogue can join them."""
        return self._pack(parts, self.weights_format, activation=activation, role=role)

    def attention(
        self,
        spec: AttentionSpec,
        *,
        q_norm: WeightTensor | None,
        k_norm: WeightTensor | None,
        norm_offset: float = 0.0,
        sinks: WeightTensor | None = None,
    ) -> AttentionHandle:
        """The layer's native attention shape; layers with equal rotary specs share one table."""
        norms = [self._vector(norm, norm_offset) if norm is not None else None for norm in (q_norm, k_norm)]
        return AttentionHandle(
            spec=spec,
            shape=_shape(spec),
            rope=self._rope(spec.rope),
            q_norm=norms[0],
            k_norm=norms[1],
            sinks=-1 if sinks is None else self._vector(sinks),
        )

    def latent_attention(
        self,
        spec: AttentionSpec,
        *,
        norm: NormParts,
        keys: tuple[LinearParts, ...],
        values: tuple[LinearParts, ...],
    ) -> AttentionHandle:
        """Each head's matrices packed by themselves."""
        latent = LatentHandle(
            norm=self._vector(norm.weight),
            keys=tuple(self.linear(parts) for parts in keys),
            values=tuple(self.linear(parts) for parts in values),
        )
        return AttentionHandle(
            spec=spec, shape=_shape(spec), rope=self._rope(spec.rope), q_norm=None, k_norm=None, latent=latent
        )

    def _rope(self, rope: RopeSpec | None) -> int | None:
        if rope is not None and rope not in self._ropes:
            self._ropes[rope] = self.program.add_rope(list(rope.inv_freq), rope.attention_factor)
        return None if rope is None else self._ropes[rope]

    def router(self, parts: LinearParts) -> LinearHandle:
        """In bf16 whatever the others are in."""
        return self._pack(parts, "bf16")

    def experts(
        self,
        spec: MoeSpec,
        *,
        router: LinearParts,
        choice_bias: WeightTensor | None,
        experts: tuple[ExpertParts, ...],
        role: Role | None = None,
    ) -> ExpertsHandle:
        """Each expert packed on its own; the router in bf16."""
        is_plain = spec.activation is Activation.CLAMPED  # its halves are joined by an operation of its own
        return ExpertsHandle(
            spec=spec,
            router=self.router(router),
            choice_bias=-1 if choice_bias is None else self._vector(choice_bias),
            gate_up=tuple(
                self.linear(expert.gate_up, role=role)
                if is_plain
                else self.gated(expert.gate_up, spec.activation, role=role)
                for expert in experts
            ),
            down=tuple(self.linear(expert.down, role=role) for expert in experts),
        )

    def head(self, tensor: WeightTensor, *, role: Role | None = None) -> LinearHandle:
        """The output projection, packed."""
        return self._pack(LinearParts(weights=(tensor,)), head_format(self.weights_format), role=role)

    def _pack(
        self, parts: LinearParts, weights_format: str, *, activation: Activation | None = None, role: Role | None = None
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
        saved = self.source.find_packed(key, shape.packed_bytes)
        seed = parts.weights[0].random_seed
        if saved is not None:
            index = self.program.add_packed_linear(shape, saved)
        elif seed is not None and not parts.biases:
            index = self.program.add_random_linear(shape, seed & (2**63 - 1), (3.0 / k) ** 0.5)
        else:
            weights = [part.read().detach() for part in parts.weights]
            if weights_format in ("int8", "int4"):  # rounding to a grid would make a number of it, and hide it
                for part, values in zip(parts.weights, weights, strict=True):
                    if not bool(torch.isfinite(values).all()):
                        raise LoadError(
                            f"tensor {part.name} has a weight that is not finite; {weights_format} cannot hold it",
                            hint="the checkpoint is damaged; download it again",
                        )
            bias = None
            if parts.biases:
                bias = torch.cat([part.read().detach().to(torch.float32).reshape(-1) for part in parts.biases])
            index = self.program.add_linear(shape, weights, bias)
        self.packed[key] = index
        return LinearHandle(
            index=index,
            format=weights_format,
            n_inputs=k,
            n_outputs=n if activation is None else n // 2,
            activation=activation,
            role=role,
        )


def _shape(spec: AttentionSpec) -> Any:
    return _cpu.AttentionShape(
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
    )
