"""Checks that a wrong row in the device or model table cannot pass."""

from __future__ import annotations

import json

import pytest

from diptych.cost.parameters import active_parameter_count, linear_parameter_count, parameter_count
from diptych.cost.tables import data_text, device_names, device_spec, kv_spec, model_names, model_spec, quant_spec
from diptych.ground.errors import ConfigError
from diptych.ground.specs import Flag
from diptych.models.named import TABLE as MODELS

ACCELERATORS = ("gpu", "tpu", "accelerator")
DEVICES = json.loads(data_text("devices.json"))


def test_tables_are_large_enough():
    """The issue asks for at least 45 devices and 45 models, GPU, TPU, Apple and CPU among them."""
    assert len(device_names()) >= 45
    assert len(model_names()) >= 45
    assert {device_spec(name).kind for name in device_names()} >= {"gpu", "tpu", "apple", "cpu"}
    assert len(set(device_names())) == len(device_names())
    assert len(set(model_names())) == len(model_names())


@pytest.mark.parametrize("name", model_names())
def test_parameter_count_is_exact(name):
    """The checksum that catches wrong copies in circulation (Qwen3-4B with head_dim 80, Qwen3-14B with 64 heads)."""
    model = model_spec(name)
    assert parameter_count(model) == model.published_parameters


@pytest.mark.parametrize(
    ("name", "active_b", "linear_gflop"),
    [
        ("llama-3.1-8b", 7.50, 13.96), ("mixtral-8x7b", 12.75, 25.24), ("qwen3-235b-a22b", 21.57, 41.89),
        ("deepseek-v3", 36.63, 71.40), ("kimi-k2", 31.69, 61.02), ("glm-4.5-air", 12.80, 24.36),
        ("gpt-oss-120b", 5.13, 9.10), ("gemma-3-27b", 27.01, 51.20), ("phi-4", 14.15, 27.26),
    ],
)  # fmt: skip
def test_active_parameters_and_linear_flops_equal_the_reference(name, active_b, linear_gflop):
    """Table C's derived columns: what one token is multiplied with."""
    model = model_spec(name)
    assert active_parameter_count(model) / 1e9 == pytest.approx(active_b, abs=6e-3)
    assert 2 * linear_parameter_count(model) / 1e9 == pytest.approx(linear_gflop, abs=6e-3)


@pytest.mark.parametrize("table", [DEVICES, MODELS], ids=["devices.json", "models.json"])
def test_every_number_has_a_source_and_a_flag(table):
    """A number without a source cannot be checked by anyone."""
    facts = [fact for row in table.get("devices", []) for fact in row["numbers"].values()]
    facts += [fact for row in table.get("models", []) for fact in row["provenance"]]
    assert len(facts) > 100
    for fact in facts:
        assert fact["source"].strip()
        assert Flag(fact["flag"]) in Flag


@pytest.mark.parametrize("name", device_names())
def test_peaks_are_dense_and_in_proportion(name):
    """Sparse peaks listed as dense break bf16 = fp8 / 2 = fp4 / 4 (found in three public tables)."""
    hardware = device_spec(name)
    peaks = hardware.flops_per_s
    assert "bf16" in peaks
    if hardware.architecture in ("hopper", "ada", "blackwell", "ada-consumer", "blackwell-consumer", "cdna3", "cdna4"):
        for wider, narrower in (("bf16", "fp8"), ("fp8", "fp4")):
            if narrower in peaks:
                assert peaks[narrower] / peaks[wider] == pytest.approx(2.0, rel=0.02)
    if "fp32" in peaks:
        assert peaks["fp32"] <= peaks["bf16"]


@pytest.mark.parametrize("name", device_names())
def test_bandwidth_peak_and_memory_are_in_range(name):
    """A slipped unit or digit lands outside: GB200 at 13.4 TB/s, an A10 with 28 GB."""
    hardware = device_spec(name)
    ridge = hardware.flops_per_s["bf16"] / hardware.memory_bytes_per_s
    cut_down = ("h20-96gb",)  # sold with a seventh of the arithmetic of an H200
    if hardware.kind in ACCELERATORS and name not in cut_down:
        assert 60 <= ridge <= 600
    assert 30e9 <= hardware.memory_bytes_per_s <= 8e12
    assert 8e9 <= hardware.memory_bytes <= 2e12
    if hardware.link_bytes_per_s is not None:
        assert 10e9 <= hardware.link_bytes_per_s <= 1e12
        assert hardware.max_linked_devices > 1
        assert hardware.link_name


@pytest.mark.parametrize(
    ("name", "mib"),
    [("a100-80gb-sxm", 81_920), ("h100-80gb-sxm", 81_559), ("h200-141gb-sxm", 143_771), ("b200-180gb", 183_359)],
)
def test_memory_is_what_an_engine_finds(name, mib):
    """Makers' gigabytes are of 2^30 bytes here: 141 of an H200 were taken for 131, and its KV pool for a tenth too small."""
    assert device_spec(name).memory_bytes == mib * 2**20


@pytest.mark.parametrize(
    ("name", "ridge"),
    [
        ("a100-80gb-sxm", 153), ("h100-80gb-sxm", 295), ("h200-141gb-sxm", 206), ("mi300x", 247),
        ("tpu-v5e", 240), ("tpu-v6e", 560),
    ],
)  # fmt: skip
def test_balance_points_equal_the_reference(name, ridge):
    """An A100's is 153 FLOP per byte, not the 312 that circulates."""
    hardware = device_spec(name)
    assert hardware.flops_per_s["bf16"] / hardware.memory_bytes_per_s == pytest.approx(ridge, abs=1)


def test_names_of_the_issue_exist():
    """The documented names are the interface."""
    for name in ("llama-2-7b", "llama-3.1-70b", "deepseek-v3"):
        assert model_spec(name).name == name
    for name in ("a100-80gb-sxm", "h100-80gb-sxm", "m2-max-38", "epyc-9654"):
        assert device_spec(name).name == name


def test_aliases_point_to_rows():
    """A dangling alias would only be found by the user who types it."""
    for table, find in ((DEVICES, device_spec), (MODELS, model_spec)):
        for alias, target in table["aliases"].items():
            assert find(alias).name == target


@pytest.mark.parametrize(
    ("find", "wrong", "near"),
    [
        (device_spec, "h100-sxm-80gb", "h100-80gb-sxm"),
        (model_spec, "llama3.1-8b", "llama-3.1-8b"),
        (quant_spec, "in8", "int8"),
        (kv_spec, "bf61", "bf16"),
    ],
)
def test_unknown_names_come_with_the_nearest_ones(find, wrong, near):
    """A typo is answered with what was meant."""
    with pytest.raises(ConfigError, match=near):
        find(wrong)


def test_windows_follow_the_published_patterns():
    """Gemma-3: five local layers to one full; gpt-oss alternates; counts decide KV memory."""
    gemma, oss = model_spec("gemma-3-27b"), model_spec("gpt-oss-20b")
    assert gemma.windows[:6] == (1024,) * 5 + (None,)
    assert sum(window is None for window in gemma.windows) == 10
    assert oss.windows[:2] == (128, None)
