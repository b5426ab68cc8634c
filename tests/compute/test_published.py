"""Models as they were published: configs are read, names of tensors are those that loading asks for, and sizes agree."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diptych.compute.formats.mlx import MlxCheckpoint
from diptych.compute.loading.held import _Measure
from diptych.compute.loading.random_weights import RandomSource, RandomTensor
from diptych.compute.model import draw_blueprint
from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.cost.parameters import parameter_count
from diptych.ground.config import ComputeConfig
from diptych.models.config import HfConfig
from diptych.models.read import read_model

FILE = Path(__file__).parents[1] / "data" / "published" / "models.jsonl"
MODELS: dict[str, dict[str, Any]] = {entry["model"]: entry for entry in map(json.loads, FILE.read_text().splitlines())}
# of 8B, not of 8x7B, of 17B-128E, of which it is a part, nor of E2B, which leaves embeddings out
SIZE = re.compile(r"(?<=[-_])(\d+(?:\.\d+)?)b(?![a-z0-9])(?!-\d+e)", re.IGNORECASE)
BESIDE_TEXT = ("vl", "vision", "voxtral", "docling", "4.1v", "gemma-4")  # a part of it reads pictures or sound
INDEXED = [name for name, entry in MODELS.items() if "tensors" in entry]


PLAIN = [name for name in INDEXED if "quantization_config" not in MODELS[name]["config"]]
OF_MLX = [name for name in INDEXED if "quantization" in MODELS[name]["config"]]


def as_pattern(name: str) -> str:
    """With a sign for every number."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


class NamesAlone(RandomSource):
    """A checkpoint of which the names are known, by pattern and number. Asked for another, it says so."""

    def __init__(self, names: dict[str, int]) -> None:
        super().__init__(seed=0)
        self.names = names
        self.asked: dict[str, tuple[int, ...]] = {}

    def has(self, name: str) -> bool:
        return as_pattern(name) in self.names

    def differ(self, name: str, other: str) -> bool:
        return False

    def whole_numbers(self, name: str) -> list[int] | None:
        return None

    def tensor(self, name: str, *shape: int) -> RandomTensor:
        assert self.has(name), f"the published model has no {name}"
        self.asked[name] = shape
        return RandomTensor(name, shape, seed=0)

    def raw(self, name: str, *shape: int, n_values: int) -> RandomTensor:
        return self.tensor(name, *shape)

    def finish(self, is_ignored: Callable[[str], bool]) -> None:
        asked = Counter(map(as_pattern, self.asked))
        for pattern, count in self.names.items():
            # of the layers that draft behind the last some are told by their number
            numbered = [pattern.replace("#", str(i), 1) for i in range(count)] if "#" in pattern else [pattern]
            assert asked[pattern] == count or any(map(is_ignored, numbered)), (
                f"{asked[pattern]} of {count} {pattern} were asked for"
            )


class NamesOfMlx(NamesAlone):
    """Of a folder that mlx-lm wrote, by the names that it has for things."""

    place, _entry = MlxCheckpoint.place, MlxCheckpoint._entry

    def holds(self, name: str) -> bool:
        """By the folder's own name."""
        return super().has(name)

    def has(self, name: str) -> bool:
        stem, _, ending = name.rpartition(".")
        return self.holds(f"{self.place(stem)[1]}.{ending}")

    def tensor(self, name: str, *shape: int) -> RandomTensor:
        stem, _, ending = name.rpartition(".")
        place = self.place(stem)[1]
        assert self.holds(f"{place}.{ending}"), f"the published folder has no {name}"
        found = (f"{place}.{one}" for one in (ending, "scales", "biases"))
        self.asked |= {one: shape for one in found if self.holds(one)}
        return RandomTensor(name, shape, seed=0)


@pytest.mark.parametrize("model", MODELS)
def test_a_published_config_is_read(model: str) -> None:
    """Every key in it is known or harmless, and what it describes has the size that it is called by."""
    spec = read_model(HfConfig(MODELS[model]["config"]))
    found = SIZE.search(model.split("/")[-1])
    if found is None or any(word in model.lower() for word in BESIDE_TEXT):
        return
    is_rounded = len(found[1]) == 1  # Gemma 7B has 8.5 billion
    assert parameter_count(spec) == pytest.approx(float(found[1]) * 1e9, rel=0.4 if is_rounded else 0.13)


def test_the_list_is_of_many_families() -> None:
    """A list of one kind would say little."""
    families = {read_model(HfConfig(entry["config"])).family for entry in MODELS.values()}
    assert len(MODELS) > 140
    assert len(families) > 50
    assert len(INDEXED) > 35


@pytest.mark.native
@pytest.mark.skipif(not cpu_kernels.is_available()[0], reason=cpu_kernels.is_available()[1])
@pytest.mark.parametrize("model", PLAIN)
def test_a_published_model_has_the_tensors_that_loading_asks_for(model: str) -> None:
    """All of them and no others, but for those that are known to be of no use; of text alone, in all as many bytes."""
    entry = MODELS[model]
    source = NamesAlone(entry["tensors"])
    blueprint = draw_blueprint(entry["config"], source, path=model)
    blueprint.load(_Measure(ComputeConfig(backend="cpu", weights="bf16"), source))
    asked = Counter(map(as_pattern, source.asked))
    has_more = any(asked[pattern] != count for pattern, count in entry["tensors"].items())
    if "total_size" not in entry or has_more:
        return
    elements = sum(math.prod(shape) for shape in source.asked.values())
    assert any(entry["total_size"] / elements == pytest.approx(width, rel=1e-3) for width in (2, 4))


@pytest.mark.native
@pytest.mark.skipif(not cpu_kernels.is_available()[0], reason=cpu_kernels.is_available()[1])
@pytest.mark.parametrize("model", OF_MLX)
def test_a_published_folder_of_mlx_has_the_tensors_that_loading_asks_for(model: str) -> None:
    """Stacked experts and heads of latent attention under its own names, and what belongs to each matrix."""
    entry = MODELS[model]
    source = NamesOfMlx(entry["tensors"])
    draw_blueprint(entry["config"], source, path=model).load(
        _Measure(ComputeConfig(backend="cpu", weights="bf16"), source)
    )
    assert sum(entry["tensors"].values()) == len(source.asked)
