"""Settings: every number bounded, every name known, one flat list of names for those who want no objects."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from diptych.ground.config import (
    BOUNDS,
    SETTINGS,
    BlockConfig,
    ComputeConfig,
    EngineConfig,
    SchedulerConfig,
    engine_config,
)
from diptych.ground.errors import ConfigError

CONFIGS = [SchedulerConfig, BlockConfig, ComputeConfig, EngineConfig]
FIELDS = [(config, one.name) for config in CONFIGS for one in fields(config)]
NEEDED = {BlockConfig: {"n_blocks": 1}}


@pytest.mark.parametrize(("config", "name"), FIELDS)
def test_no_setting_takes_anything_strange(config: type, name: str) -> None:
    """`max_step_tokens=1.5` or `device=None` would fail somewhere in the engine, with a traceback."""
    for value in ([1], object(), 1j, b"cpu", float("nan"), "", -1):
        if name == "seed" and value == -1:
            continue
        with pytest.raises(ConfigError, match=f"{name} is"):
            config(**(NEEDED.get(config, {}) | {name: value}))
    if name in BOUNDS:
        for value in (True, "1", 10**5000, *([1.5] if BOUNDS[name].kind is int else [float("inf")])):
            with pytest.raises(ConfigError, match=f"{name} is"):
                config(**(NEEDED.get(config, {}) | {name: value}))


def test_numbers_of_other_libraries_are_kept_plain() -> None:
    """A context from a NumPy array is a whole number like any other."""
    made = EngineConfig(max_context_tokens=np.int64(64), scheduler=SchedulerConfig(max_step_tokens=np.int32(8)))
    assert (type(made.max_context_tokens), type(made.scheduler.max_step_tokens)) == (int, int)


def test_settings_by_name_reach_their_room() -> None:
    """Three config objects for `weights="int8"` are two too many."""
    made = engine_config(weights="int8", max_context_tokens=8192, max_running_sequences=3, seed=7)
    assert made == EngineConfig(
        compute=ComputeConfig(weights="int8"), scheduler=SchedulerConfig(max_running_sequences=3),
        max_context_tokens=8192, seed=7,
    )  # fmt: skip
    assert engine_config(made, threads=2).compute == ComputeConfig(weights="int8", threads=2)
    assert engine_config(made, threads=2).max_context_tokens == 8192


def test_every_setting_has_a_name_and_a_place() -> None:
    """A field that is added to a config can be given by name at once."""
    for config, part in ((SchedulerConfig, "scheduler"), (ComputeConfig, "compute"), (EngineConfig, "")):
        for one in fields(config):
            assert one.name in ("scheduler", "compute") or SETTINGS[one.name] in (part, "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight": "int8"}, "no setting 'weight'\nhint: did you mean weights"),
        ({"max_model_len": 8192}, "no setting 'max_model_len'"),
        ({"zzz": 1}, "no setting 'zzz'\nhint: known are activations, aging_s"),
        ({"weights": "int3"}, "weights is 'int3'; it must be one of auto, file, fp32"),
        ({"device": "gpu"}, "device is 'gpu'; it must be auto, cpu, cuda or cuda:N\nhint: a CUDA device is named cuda"),
    ],
)
def test_unknown_settings_name_their_neighbours(settings: dict[str, object], message: str) -> None:
    """`--device gpu` was told to use a backend that refused it as well."""
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        engine_config(**settings)


def test_a_base_of_another_kind_is_refused() -> None:
    """`LLM("bundled", {"weights": "int8"})` should say what is wrong."""
    with pytest.raises(ConfigError, match="config is"):
        engine_config({"weights": "int8"})  # type: ignore[arg-type]


def test_adapters_are_names_and_folders_within_the_bound() -> None:
    """A list of folders has no names, and what is beyond the bound would be refused only after a minute of loading."""
    assert engine_config(loras={"poet": "folder"}).loras == {"poet": "folder"}
    for loras in (["folder"], {"": "folder"}, {"poet": None}, "poet=folder"):
        with pytest.raises(ConfigError, match="loras"):
            engine_config(loras=loras)
    with pytest.raises(ConfigError, match="loras has 2 adapters; max_loras is 1"):
        engine_config(loras={"a": "b", "c": "d"}, max_loras=1)
