"""Folders of mlx-lm, quantised (`mlx_lm.convert -q`) or left in 16 bits, as a `Source` of weights.

Matrices lie as `layouts` says. Beside that mlx-lm's classes change what they load, and a folder holds what they made of
it: experts and heads of latent attention are stacked, convolutions have their last axes the other way round, norms that add 1
have it added. Each is undone here, or the family is refused. Source: `sanitize` in mlx_lm/models/*.py, version 0.32.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from diptych.compute.formats.coded import CodedCheckpoint, CodedTensor
from diptych.compute.formats.matrices import RawTensors
from diptych.compute.formats.stacks import Entry
from diptych.compute.loading.weights import FileTensor, SlicedTensor
from diptych.compute.ops.contract import WeightTensor
from diptych.ground.errors import UnsupportedModel
from diptych.models.families.family import Family
from diptych.models.quantised.fields import HINT, Quantisation
from diptych.models.states import StateRule

EXPERT = re.compile(r"(?P<root>.*\.)experts\.(?P<entry>\d+)\.(?P<part>\w+)")
LATENT = re.compile(r"(?P<root>.*\.)(?P<part>k_b_proj|v_b_proj)\.(?P<entry>\d+)")
# our names -> theirs: of experts, of MLPs with the names of Mixtral's experts, of Nemotron's experts, of latent attention
OTHER_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
NEMOTRON_NAMES = {"up_proj": "fc1", "down_proj": "fc2"}
LATENT_NAMES = {"k_b_proj": "embed_q", "v_b_proj": "unembed_out"}
STACKS = ("switch_mlp.", "experts.", "experts.switch_glu.")
# whose projections it joins or takes apart, whose tensors it drops, or of which it keeps other numbers
REWRITTEN = ("kimi_linear", "gemma3n_text", "ernie4_5_moe", "granitemoehybrid", "falcon_h1", "qwen4_exp_text", "dbrx")
CORRECTION = ".mlp.e_score_correction_bias"  # of K-EXAONE, which it has with the router
WITH_ONE_ADDED = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)


class Shifted(WeightTensor):
    """A norm without the 1 that was added to it, in fp32."""

    random_seed: int | None = None

    def __init__(self, tensor: FileTensor) -> None:
        self.name, self.shape, self.dtype = tensor.name, tensor.shape, torch.float32
        self._tensor = tensor

    def read(self) -> torch.Tensor:
        """New."""
        return self._tensor.read().float() - 1


class Turned(WeightTensor):
    """Taps [channels, n, 1] as [channels, 1, n], a number by itself as [1]: as many in the same order."""

    random_seed: int | None = None

    def __init__(self, tensor: FileTensor, shape: tuple[int, ...]) -> None:
        self.name, self.shape, self.dtype = tensor.name, shape, tensor.dtype
        self._tensor = tensor

    def read(self) -> torch.Tensor:
        """A view."""
        return self._tensor.read().view(self.shape)


class Renamed(WeightTensor):
    """A tensor under the name that a plain checkpoint has for it, by which what is packed of it is kept, and measured."""

    random_seed: int | None = None

    def __init__(self, tensor: WeightTensor, name: str) -> None:
        self.name, self.shape, self.dtype, self.measured = name, tensor.shape, tensor.dtype, tensor.measured
        self._tensor = tensor

    def read(self) -> torch.Tensor:
        """As it is."""
        return self._tensor.read()


class MlxCheckpoint(CodedCheckpoint):
    """A folder of mlx-lm by the names, and with the values, of the checkpoint that it was made of."""

    def __init__(self, directory: Path, how: Quantisation, *, dtype: torch.dtype, family: Family) -> None:
        if family.has_pairs or family.names.transposes or family.name in REWRITTEN:
            raise UnsupportedModel(
                f"mlx-lm rewrites what {family.name} loads in a way that is not undone here ({directory})", hint=HINT
            )
        super().__init__(directory, how, dtype=dtype)
        # which it adds where it turns the taps, and to a folder whose taps lie as they were it has not
        turned = [self.header(name)[0][-1:] == (1,) for name in self._file_of if name.endswith("conv1d.weight")]
        self._renamed: dict[str, tuple[int, ...]] = {}  # their shapes
        self._adds_one = bool(family.norm_offset) and family.state_rule is StateRule.DELTA and any(turned)

    def has(self, name: str) -> bool:
        """Whether a plain checkpoint would have it."""
        stem, _, ending = name.rpartition(".")
        return super().has(f"{self.place(stem)[1]}.{ending}")

    def place(self, prefix: str) -> tuple[RawTensors, str]:
        """Experts, and heads of latent attention, are entries of stacks; some MLPs have other names."""
        if self.holds(f"{prefix}.weight"):
            return self, prefix
        found = EXPERT.fullmatch(prefix)
        if found is not None:
            part = OTHER_NAMES.get(found["part"], found["part"])
            names = [
                f"{found['root']}{stack}{one}" for stack in STACKS for one in (part, NEMOTRON_NAMES.get(part, part))
            ]
            return self._entry(names, int(found["entry"])) or (self, prefix)
        found = LATENT.fullmatch(prefix)
        if found is not None:
            return self._entry([found["root"] + LATENT_NAMES[found["part"]]], int(found["entry"])) or (self, prefix)
        root, _, last = prefix.rpartition(".")
        other = f"{root}.{OTHER_NAMES.get(last, last)}"
        return self, other if self.holds(f"{other}.weight") else prefix

    def _entry(self, names: list[str], index: int) -> tuple[RawTensors, str] | None:
        name = next((name for name in names if self.holds(f"{name}.weight")), None)
        return None if name is None else (Entry(self, index), name)

    def tensor(self, name: str, *shape: int) -> FileTensor | CodedTensor | WeightTensor:  # type: ignore[override]
        """As of a plain checkpoint."""
        found = self._found(name, *shape)
        if found.name == name:
            return found
        self._renamed[name] = found.shape
        return Renamed(found, name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """As of a plain checkpoint."""
        return self._renamed[name] if name in self._renamed else super().shape_of(name)

    def _found(self, name: str, *shape: int) -> FileTensor | CodedTensor | WeightTensor:
        """By the name that it has here, but for a quantised one."""
        if name.endswith(CORRECTION) and not self.holds(name):
            name = name.replace(CORRECTION, ".mlp.gate.e_score_correction_bias")
        stem, _, ending = name.rpartition(".")
        raw, place = self.place(stem)
        stored = f"{place}.{ending}"
        if shape == (1,) and self.holds(stored) and self.header(stored)[0] == ():
            return Turned(self._checked_plain(stored, ()), shape)
        if isinstance(raw, Entry) and self.holds(stored):
            raw.header(stored)
            if not (ending == "weight" and self.holds(f"{place}.scales")):
                return SlicedTensor(super().tensor(stored, self.header(stored)[0][0], *shape), raw.index)
        if len(shape) == 3 and self.holds(stored) and self.header(stored)[0] == (shape[0], shape[2], shape[1]):
            return Turned(self._checked_plain(stored, (shape[0], shape[2], shape[1])), shape)
        if self._adds_one and name.endswith(WITH_ONE_ADDED):
            return Shifted(self._checked_plain(name, shape))
        return super().tensor(name if ending == "weight" and self.holds(f"{place}.scales") else stored, *shape)

    def _checked_plain(self, name: str, shape: tuple[int, ...]) -> FileTensor:
        found = super().tensor(name, *shape)
        assert isinstance(found, FileTensor), name
        return found
