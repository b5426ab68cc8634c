"""Weights of a model that has none yet: what its shape costs can be measured without a download."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping

import torch

from diptych.compute.loading.weights import IdsTensor, Meanwhile, Saved
from diptych.compute.ops.contract import WeightTensor
from diptych.ground.errors import LoadError

# random tensors repeat a block of this many values (a prime, so that rows differ): a 7B shape in seconds, not minutes
RANDOM_BLOCK = 1_048_573


class RandomTensor(WeightTensor):
    """A WeightTensor of seeded random numbers, scaled so that activations stay of order one through many layers."""

    dtype = torch.bfloat16

    def __init__(self, name: str, shape: tuple[int, ...], seed: int) -> None:
        self.name = name
        self.shape = shape
        self.random_seed: int | None = seed

    def read(self) -> torch.Tensor:
        """Uniform values with standard deviation 1 / sqrt(inputs); norm weights are 1."""
        assert self.random_seed is not None
        if len(self.shape) == 1:
            is_norm = self.name.endswith(".weight")
            return torch.ones(self.shape, dtype=self.dtype) if is_norm else torch.zeros(self.shape, dtype=self.dtype)
        generator = torch.Generator().manual_seed(self.random_seed)
        bound = math.sqrt(3.0 / self.shape[-1])
        n = math.prod(self.shape)
        block = torch.empty(min(n, RANDOM_BLOCK)).uniform_(-bound, bound, generator=generator).to(self.dtype)
        return block.repeat(-(-n // len(block)))[:n].view(self.shape)


class RandomSource:
    """A checkpoint that is not there: every tensor exists, in bf16, as a pure function of (seed, name)."""

    origin = "random weights"
    is_balanceable = False  # even already, and a backend may make numbers of its own
    is_keeping = False
    is_lasting = False
    is_plain = False

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.measured: Mapping[str, torch.Tensor] = {}
        self.unchecked: list[Saved] = []
        self.meanwhile: Meanwhile | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    def has(self, name: str) -> bool:
        """Separate projections exist; stacked experts do not, so that a family asks for one expert at a time."""
        stacked = ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj", "experts.fc1.weight")
        return not name.removesuffix("_blocks").endswith(stacked)

    def tensor(self, name: str, *shape: int) -> RandomTensor:
        """The random tensor of that name."""
        self._shapes[name] = shape
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        return RandomTensor(name, shape, int.from_bytes(digest[:7], "little"))

    def raw(self, name: str, *shape: int, n_values: int) -> RandomTensor:
        """Never: no bytes are here."""
        raise LoadError(f"there are no bytes of {name}: random tensors are bf16")

    def ids(self, name: str, *shape: int, below: int) -> WeightTensor:
        """All in turn."""
        numbers = torch.arange(math.prod(shape)).remainder(below).view(shape)
        return IdsTensor(numbers, below, name)

    def differ(self, name: str, other: str) -> bool:
        """Never: a tied head is the embedding."""
        return False

    def whole_numbers(self, name: str) -> list[int] | None:
        """None: there are random tensors alone."""
        return None

    def find_packed(self, key: str, nbytes: int) -> Saved | None:
        """None: nothing is packed here."""
        return None

    def finish(self, is_ignored: Callable[[str], bool]) -> None:
        """Nothing is left over."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of every tensor."""
        return RandomTensor.dtype

    @property
    def n_parameters(self) -> int:
        """Elements of all tensors asked for, each counted once."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    def fingerprint(self) -> str:
        """The seed and the shapes."""
        return hashlib.sha256(f"random {self._seed} {sorted(self._shapes.items())}".encode()).hexdigest()
