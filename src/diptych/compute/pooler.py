"""States of a prompt instead of tokens: the final norm, and what becomes of the rows of a prompt that comes in chunks.

A model's program ends in its head. What is pooled leaves it one step earlier: the residual stream behind the last layer is
tapped (`Ops.tap`), and the final norm is taken here, in fp32 and by the checkpoint's own weight, also where the program's
norm is balanced for an int8 head. A state depends on its row alone, and a mean adds row after row in the order of the
tokens, so neither chunks nor neighbours change a bit of it.

    pooler = Pooler(read_tail(folder, spec))
    pooler.begin(seq_id, Pooling(pool=Pool.MEAN), n_tokens=700)
    pooler.feed(seq_id, rows_TD, start=0)        # None: there is more of the prompt to come
    pooler.feed(seq_id, rows_TD, start=512)      # [D] fp32, as bytes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from diptych.compute.formats.gguf import GgufCheckpoint
from diptych.compute.loading.naming import family_named, final_norm, head_name, norm_parts, prefix_of, table_name
from diptych.compute.loading.quant import stored_weights
from diptych.compute.loading.weights import Checkpoint, Source
from diptych.compute.ops.contract import NormParts
from diptych.ground.bounds import whole
from diptych.ground.errors import EngineError, LoadError, SequenceError, UnsupportedModel
from diptych.ground.request import Pool, Pooling
from diptych.models.config import HfConfig, read_json
from diptych.models.gates import Activation
from diptych.models.gguf.architectures import architecture_of
from diptych.models.gguf.file import open_gguf
from diptych.models.spec import ModelSpec, Norms

CURVES: Mapping[Activation, Callable[[np.ndarray], np.ndarray]] = {
    Activation.TANH: np.tanh,
    Activation.RELU: lambda x: np.maximum(x, 0.0),
    Activation.GELU: lambda x: torch.nn.functional.gelu(torch.from_numpy(x)).numpy(),
}
SUMMED_ROWS = 64  # at one time, in fp64: 2 MB at a width of 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A layer that a pooled state goes through: norm(curve(W x + b)). weight_ND [N, D], bias_N or None, fp32; curve and norm
    None: as it is.
    """

    weight_ND: np.ndarray
    bias_N: np.ndarray | None = None
    curve: Activation | None = None
    norm: Tail | None = None

    def applied(self, state_D: np.ndarray) -> np.ndarray:
        """[N], in fp64 where the state is."""
        made = self.weight_ND @ state_D if self.bias_N is None else self.weight_ND @ state_D + self.bias_N
        made = made if self.curve is None else CURVES[self.curve](made)
        return made if self.norm is None else self.norm.normed(made[None])[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What stands behind a model's last layer. norm_D: fp32, the family's offset added, None: nothing does, as layers norm
    what they leave; bias_D: fp32, if any. is_centred: the mean is taken away first (LayerNorm).
    """

    norm_D: np.ndarray | None
    eps: float
    bias_D: np.ndarray | None = None
    is_centred: bool = False

    def normed(self, rows_RD: np.ndarray) -> np.ndarray:
        """x / sqrt(mean(x^2) + eps) * norm + bias of each row of the residual stream, of x - mean(x) if centred; fp32."""
        if self.norm_D is None:
            return rows_RD
        if self.is_centred:
            rows_RD = rows_RD - rows_RD.mean(axis=1, keepdims=True, dtype=np.float64)
        mean_R1 = np.square(rows_RD, dtype=np.float64).mean(axis=1, keepdims=True)
        normed = rows_RD / np.sqrt(mean_R1 + self.eps) * self.norm_D
        return (normed if self.bias_D is None else normed + self.bias_D).astype(np.float32)


def read_tail(directory: Path, spec: ModelSpec) -> Tail:
    """The final norm of a checkpoint folder or GGUF file. Raises LoadError, UnsupportedModel."""
    source = _open(directory)
    norm = final_norm(source, spec)
    if norm is None and spec.layers[-1].norms is Norms.SUMS:
        return Tail(norm_D=None, eps=spec.norm_eps)
    if norm is None:
        raise UnsupportedModel(f"{spec.name} has no norm behind its last layer; its states are not pooled")
    # as the walk, whose stream is the model's over that scale
    return _tail(norm, spec.norm_eps / spec.residual_scale**2, offset=spec.end_offset)


def read_classes(directory: Path, spec: ModelSpec, n_labels: int) -> tuple[Dense, ...]:
    """The layers of a sequence-classification head, the last of which makes a number for each label."""
    source = _open(directory)
    prefix, kinds = prefix_of(source, spec), family_named(spec).classifier
    layers: list[Dense] = []
    for layer in kinds:
        n_outputs = n_labels if layer is kinds[-1] else spec.hidden
        name = f"{prefix}{layer.name}" if source.has(f"{prefix}{layer.name}.weight") else layer.name
        weight = source.tensor(f"{name}.weight", n_outputs, spec.hidden)
        bias = source.tensor(f"{name}.bias", n_outputs) if source.has(f"{name}.bias") else None
        layers.append(
            Dense(
                weight_ND=_numbers(weight.read()),
                bias_N=None if bias is None else _numbers(bias.read()),
                curve=layer.curve,
                norm=None if layer.norm is None else _tail(norm_parts(source, layer.norm, spec), spec.norm_eps),
            )
        )
    return tuple(layers)


def _tail(norm: NormParts, eps: float, offset: float = 0.0) -> Tail:
    bias = None if norm.bias is None else _numbers(norm.bias.read())
    weight = _numbers(norm.weight.read()) + np.float32(offset)
    return Tail(norm_D=weight, eps=eps, bias_D=bias, is_centred=norm.is_centred)


def read_head_rows(directory: Path, spec: ModelSpec, token_ids: Sequence[int]) -> Dense:
    """The rows of the output projection that make the logits of these tokens, as a layer."""
    if spec.has_head_bias:
        raise UnsupportedModel(f"the output projection of {directory} adds a bias; it cannot judge by single tokens")
    if max(token_ids) >= spec.vocab_size:
        raise LoadError(
            f"{directory} judges by token {max(token_ids)}; its vocabulary has {spec.vocab_size}",
            hint="true_token_id and false_token_id belong to another model",
        )
    source = _open(directory)
    name = table_name(source, spec) if spec.is_tied else head_name(source, spec)
    head = source.tensor(name, spec.vocab_size, spec.hidden)
    return Dense(weight_ND=np.concatenate([_numbers(head.part(slice(i, i + 1), spec.hidden)) for i in token_ids]))


def read_dense(directory: Path, n_inputs: int) -> Dense:
    """The layer in a folder of sentence-transformers that takes so many inputs. Raises LoadError, UnsupportedModel."""
    config = read_json(directory / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in ("Identity", "Tanh"):
        raise UnsupportedModel(f"the activation of {directory} is {activation!r}; Identity and Tanh are supported")
    if config.get("use_residual"):
        raise UnsupportedModel(f"{directory} adds its input to its output (use_residual), which is not supported")
    source = Checkpoint(directory)
    n_outputs = whole(config.get("out_features"))
    if n_outputs is None or n_outputs < 1:
        raise LoadError(
            f"out_features in {directory / 'config.json'} is {config.get('out_features')!r}; it must be a number from 1 on"
        )
    bias = _numbers(source.tensor("linear.bias", n_outputs).read()) if config.get("bias", True) else None
    weight = _numbers(source.tensor("linear.weight", n_outputs, n_inputs).read())
    return Dense(weight_ND=weight, bias_N=bias, curve=Activation.TANH if activation == "Tanh" else None)


def read_dense_of_gguf(path: Path, n_inputs: int) -> tuple[Dense, ...]:
    """The layers for pooled states in a GGUF file, products alone as in llama.cpp; empty where it has none. LoadError."""
    file = open_gguf(path)
    source = GgufCheckpoint(file, dtype=torch.float32, table_dtype=torch.float32)
    layers: list[Dense] = []
    for name in [name for name in architecture_of(file).dense if name in file.tensors]:
        weight = _numbers(source.tensor(name, file.tensors[name].shape[0], n_inputs).read())
        layers.append(Dense(weight_ND=weight))
        n_inputs = len(weight)
    return tuple(layers)


def _open(directory: Path) -> Source:
    if not directory.is_dir():
        return GgufCheckpoint(open_gguf(directory), dtype=torch.float32, table_dtype=torch.float32)
    if stored_weights(HfConfig(read_json(directory / "config.json"), path=str(directory / "config.json"))) is not None:
        raise UnsupportedModel(
            f"{directory} was written by `diptych quantize`, which balances the final norm; states cannot be told from it",
            hint="load the original checkpoint, with --weights int8 or int4",
        )
    return Checkpoint(directory)


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    numbers: np.ndarray = tensor.detach().to(torch.float32).numpy().copy()  # the file is closed
    return numbers


class _Prompt:
    """A prompt on its way. end: how far its states have come."""

    __slots__ = ("end", "n_tokens", "pooling", "sum_D")

    def __init__(self, pooling: Pooling, n_tokens: int) -> None:
        self.pooling = pooling
        self.n_tokens = n_tokens
        self.end = 0
        self.sum_D: np.ndarray | None = None


class Pooler:
    """Holds what prompts have added up to so far. Owned by the executor, on whose thread it is used."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        self._prompts: dict[int, _Prompt] = {}

    def begin(self, seq_id: int, pooling: Pooling, *, n_tokens: int) -> None:
        """A prompt of so many tokens will come."""
        self._prompts[seq_id] = _Prompt(pooling, n_tokens)

    def end(self, seq_id: int) -> None:
        """Forget a prompt; unknown ids are fine."""
        self._prompts.pop(seq_id, None)

    def has(self, seq_id: int) -> bool:
        """Whether states of this sequence are wanted."""
        return seq_id in self._prompts

    def feed(self, seq_id: int, rows_TD: np.ndarray, *, start: int) -> bytes | EngineError | None:
        """The residual stream of tokens [start, start + T); the pooled state with the last of them, or why there is none.

        A chunk that starts where the mean begins, or before, starts it anew (the sequence was preempted).
        """
        prompt = self._prompts[seq_id]
        end = start + len(rows_TD)
        if prompt.pooling.pool is Pool.LAST:
            return None if end < prompt.n_tokens else _checked(self._tail.normed(rows_TD[-1:])[0])
        if prompt.pooling.pool is Pool.FIRST:  # which has seen the text where all of it attends both ways, in one chunk
            assert (start, end) == (0, prompt.n_tokens), (start, end)
            return _checked(self._tail.normed(rows_TD[prompt.pooling.first :][:1])[0])
        first = prompt.pooling.first
        if start <= first:
            prompt.sum_D, prompt.end = np.zeros(rows_TD.shape[1]), first
        assert prompt.sum_D is not None
        assert prompt.end == max(start, first), (prompt.end, start)
        prompt.sum_D = _added(prompt.sum_D, self._tail.normed(rows_TD[max(0, first - start) :]))
        prompt.end = max(end, first)
        return None if end < prompt.n_tokens else _checked(prompt.sum_D / max(1, end - first))


def _added(sum_D: np.ndarray, rows_TD: np.ndarray) -> np.ndarray:
    """sum + rows[0] + rows[1] + ..., in that order whatever the number of rows; a plain sum would add in pairs."""
    for begin in range(0, len(rows_TD), SUMMED_ROWS):
        part = rows_TD[begin : begin + SUMMED_ROWS]
        sum_D = np.add.accumulate(np.concatenate([sum_D[None], part], dtype=np.float64), axis=0)[-1]
    return sum_D


def _checked(state_D: np.ndarray) -> bytes | EngineError:
    if not np.isfinite(state_D).all():
        return SequenceError("the state of the prompt holds no finite numbers; nothing can be made of it")
    return state_D.astype(np.float32).tobytes()
