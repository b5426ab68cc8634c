"""Plans, simulations and descriptions of files for a GPU that was calibrated here: what the engine would do there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from coded_files import block_fp8, quantised_checkpoints
from diptych.cli.inspect import facts_of
from diptych.compute.loading.quant import save_quantised
from diptych.compute.runner import load_model
from diptych.cost.planner import gpu_notes
from diptych.cost.profile import profile_path, read_profile
from diptych.cost.setup import find_hardware, setup_of
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError
from diptych.models.config import HfConfig
from diptych.models.gpu_kernels import left_to_torch
from diptych.models.latent import IndexSpec, MlaSpec
from diptych.models.mlp import MoeSpec
from diptych.models.named import SHAPES
from diptych.models.read import read_model
from diptych.models.spec import ModelSpec
from gguf_files import gguf_reference, write_gguf
from h200 import h200_profile
from started import run

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}


@pytest.fixture(scope="module")
def profile() -> str:
    """Of a GPU, as it is written."""
    return json.dumps(h200_profile())


@pytest.fixture(autouse=True)
def calibrated(profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has that GPU."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "hardware-gpu.json").write_text(profile)
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path / "home"))


def of_gguf(choose: Callable[[str], str]) -> Callable[[Path], Path]:
    """A file of tensors of the types that are chosen."""
    return lambda folder: write_gguf(gguf_reference("llama", **WIDE), folder / "m.gguf", choose=choose)


def fp8(folder: Path) -> Path:
    """A checkpoint in blocks of fp8."""
    original = make_checkpoint("llama", folder / "original", dtype=torch.bfloat16, **WIDE)
    return quantised_checkpoints(original, folder, block_fp8())[0]


FILES: dict[str, Callable[[Path], Path]] = {
    "Q8_0": of_gguf(lambda name: "F16" if "token" in name else "Q8_0"),
    "fp8 in blocks": fp8,
    # most values have 16 bits, and the mean is nearer to 8
    "two types": of_gguf(lambda name: "Q4_0" if "ffn_gate" in name or "ffn_up" in name else "F16"),
}


@pytest.mark.native
@pytest.mark.parametrize("name", FILES)
def test_files_in_formats_that_were_not_timed_are_described(name: str, tmp_path: Path) -> None:
    """The command ended with "no achieved fraction": what was not timed is left out, the engine reads values in bf16."""
    facts = facts_of(str(FILES[name](tmp_path)), "local")
    kept = facts["contents"].kept
    assert (kept is None) == (name == "two types")
    assert kept is None or kept in facts["memory"]["weight_bytes"]
    assert facts["phases"].keys() == {"bf16"}
    assert facts["phases"]["bf16"]["decode_s"] > 0.0


NOTES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "dense": ("llama-3.1-8b", {}, None),
    "mixture": ("qwen3-30b-a3b", {}, None),
    "states": ("qwen3-next-80b-a3b", {}, "for its states"),
    "wide heads": ("qwen2.5-0.5b", {"head_dim": 512}, "for its heads of 512 (at most 256)"),
    "latents": ("deepseek-v2-lite", {}, "latent attention was not timed"),
    "wide latents": ("deepseek-v2-lite", {"kv_lora_rank": 1024}, "for its latents of 1024 and 64 (at most 512 and 64)"),
}


@pytest.mark.parametrize("name", NOTES)
def test_what_was_not_timed_on_the_gpu_is_said(name: str) -> None:
    """As the engine predicts no such steps; of the processor and of others' devices nothing is said."""
    shape, changed, said = NOTES[name]
    spec = read_model(HfConfig(SHAPES[shape] | changed, path=name))
    for device in ("local", "local-gpu"):
        notes = gpu_notes(spec, *find_hardware(device))
        assert len(notes) == (said is not None)
        assert said is None or said in notes[0]
    assert not gpu_notes(spec, *find_hardware("h200-141gb-sxm"))
    hardware, calibration = find_hardware("local")
    assert not gpu_notes(spec, replace(hardware, kind="cpu"), calibration)
    # where torch's kernels were timed they are those that compute all models
    by_torch = gpu_notes(spec, hardware, replace(calibration, is_of_our_kernels=False))
    assert len(by_torch) == ("latents" in name)


def test_latents_that_were_timed_are_no_guess() -> None:
    """Only what an index chooses by is still priced by what was timed of others."""
    spec = read_model(HfConfig(SHAPES["deepseek-v2-lite"], path="x"))
    latents = {"latents": {"layer_s": 3e-5, "kv_eb": 0.4, "prefill_ef": 0.2, "decode_ef": 0.1}}
    hardware, calibration = read_profile(h200_profile() | latents)
    assert not gpu_notes(spec, hardware, calibration)
    indexed = read_model(HfConfig({"architectures": ["DeepseekV32ForCausalLM"]}))
    (said,) = gpu_notes(indexed, hardware, calibration)
    assert "what an index chooses by was not timed" in said


def test_what_our_kernels_lack_is_named() -> None:
    """Of each kind by itself; a mixture that they have stays theirs."""
    plain = read_model(HfConfig(SHAPES["qwen3-30b-a3b"], path="x"))
    first = plain.layers[0]
    assert isinstance(first.mlp, MoeSpec)
    index = IndexSpec(most=512, n_heads=4, head_dim=64, block=128)
    latents = MlaSpec(q_rank=64, kv_rank=64, nope_dim=64, rope_dim=0, v_dim=64)
    pools = IndexSpec(most=515, n_heads=4, head_dim=64, pool=4)

    def of(**changed: Any) -> ModelSpec:
        return replace(plain, layers=(replace(first, **changed), *plain.layers[1:]))

    found = {
        left_to_torch(spec)
        for spec in (
            plain,
            replace(plain, has_head=False),
            of(mlp=replace(first.mlp, limit=7.0)),
            of(attention=replace(first.attention, index=index)),
            of(attention=replace(first.attention, v_head_dim=320)),
            of(attention=replace(first.attention, mla=latents)),
            of(attention=replace(first.attention, mla=replace(latents, rope_dim=64), index=pools)),
        )
    }
    assert found == {
        None,
        "want of an output projection",
        "experts of silu within limits",
        "an index of blocks",
        "an index of pools",
        "latents without a part that turns",
        "heads of 320 (at most 256)",
    }


def test_plans_simulations_and_descriptions_have_the_note() -> None:
    """Each on its page and in its JSON."""
    shown = "note: latent attention was not timed"
    for command in (
        ("plan", "deepseek-v2-lite"),
        ("simulate", "deepseek-v2-lite", "--rate", "1/s", "--requests", "4"),
        ("inspect", "deepseek-v2-lite"),
    ):
        assert shown in " ".join(run(*command, "--hardware", "local").stdout.split()), command
        assert shown.removeprefix("note: ") in run(*command, "--hardware", "local", "--json").stdout
        assert shown not in run(*command, "--hardware", "h200-141gb-sxm").stdout


@pytest.mark.native
def test_a_packed_folder_is_refused_as_the_engine_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was priced in bf16, which nobody can run from it; the processor's profile and others' devices price it still."""
    make_checkpoint("llama", tmp_path / "original", dtype=torch.bfloat16, **WIDE)
    packed = str(tmp_path / "packed")
    save_quantised(tmp_path / "original", tmp_path / "packed", weights="int8", threads=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="packed for the cpu backend") as by_engine:
        load_model(tmp_path / "packed", ComputeConfig())
    for device, weights in product(("local", "local-gpu"), (None, "bf16", "int8")):
        with pytest.raises(ConfigError) as caught:
            setup_of(packed, device, weights=weights)
        assert caught.value.message == by_engine.value.message
        assert "--hardware local-cpu" in (caught.value.hint or "")
    facts = facts_of(packed, "local")
    assert (facts["phases"], facts["phases_missing"]) == ({}, by_engine.value.message)
    assert "int8" in facts["memory"]["weight_bytes"]
    cpu = h200_profile() | {"kind": "cpu"}
    cpu |= {key: cpu[key] | {"int8": 0.5} for key in ("eb", "ef")} | {"flops_per_s": {"bf16": 1e12, "int8": 2e12}}
    profile_path("cpu").write_text(json.dumps(cpu))
    assert setup_of(packed, "local-cpu", weights=None).quant.name == "int8"
    assert setup_of(packed, "h200-141gb-sxm", weights=None).quant.name == "bf16"
    assert setup_of(str(tmp_path / "original"), "local", weights=None).quant.name == "bf16"
