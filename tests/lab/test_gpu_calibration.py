"""A GPU is calibrated like a CPU: the same way with smaller models where there is none, the real one under the mark `gpu`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.cli.plan import app as plan
from diptych.compute.device_ceilings import cache_of, device_ceilings
from diptych.compute.ops.torch.model import card_of
from diptych.compute.runner import random_model
from diptych.cost import planner as planner_room
from diptych.cost import profile as profile_room
from diptych.cost.calibrated import CalibratedModel
from diptych.cost.calibration import Cache
from diptych.cost.memory import capacity_of
from diptych.cost.profile import load_profile, profile_path, read_profile
from diptych.cost.setup import find_hardware, own_quant, setup_of
from diptych.cost.tables import kv_spec
from diptych.engine import model_profile
from diptych.engine.memory import Memory
from diptych.engine.model_profile import local_predictor, profile_gap
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import CapacityError, ConfigError
from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape
from diptych.lab import calibrate as calibration
from diptych.lab import fitted as fitting
from diptych.lab import gpu_calibration
from diptych.lab.calibration_words import calibration_words
from diptych.lab.fingerprint import fingerprint
from diptych.lab.fitted import TimedStep, fit, fit_held_out
from diptych.lab.gpu_calibration import (
    LAUNCH_MODEL,
    MIXTURE,
    MODELS,
    NARROW,
    USUAL,
    Extent,
    calibrate_gpu,
    latents_unfitted,
    unfitted,
)
from diptych.lab.rounds import Effort, Estimate
from diptych.models.config import HfConfig
from diptych.models.named import SHAPES
from diptych.models.read import read_model
from h200 import CARD, DECODE, H200, H200_BYTES, KERNELS, PREFILL, h200_profile, h200_samples

TINY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
        "num_hidden_layers": 2, "vocab_size": 512}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENTS = {
    "first_k_dense_replace": 2,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}
SMALL = Extent(
    models={
        "narrow": NARROW | TINY,
        "wide": NARROW | TINY | {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 4},
        "mixture": MIXTURE | TINY | EXPERTS,
        "larger experts": MIXTURE | TINY | EXPERTS | {"moe_intermediate_size": 256},
        "latents": SHAPES["deepseek-v2-lite"] | TINY | LATENTS,
    },
    launch_model=LAUNCH_MODEL | {"num_hidden_layers": 4},
    host_model=NARROW | TINY,
    decode=[StepShape.decode(batch=b, context_tokens=c) for b, c in ((1, 64), (4, 200), (16, 64))],
    prefill=[StepShape.prefill(batch=1, new_tokens=n, cached_tokens=c) for n, c in ((30, 0), (90, 0), (40, 200))],
    launch=[StepShape.decode(batch=1, context_tokens=16), StepShape.prefill(batch=1, new_tokens=16)],
    copy_mib=(1, 2, 8),
    side=256,
    climbs=1,
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for profiles."""
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path))
    return tmp_path


def model_on(device: str, **facts: Any) -> Any:
    """What a profile is asked about, of a model on that device."""
    spec = read_model(HfConfig(SHAPES["qwen2.5-0.5b"], path="x"))
    plain = {"spec": spec, "backend_name": "torch", "instruction_set": KERNELS, "keeps_bits": True, "weights_format": "bf16",
             "threads": 8, "head_format": "bf16", "kv_format": "bf16", "formats": {"bf16": 1},
             "expert_formats": {}}  # fmt: skip
    return SimpleNamespace(device=torch.device(device), **(plain | facts))


def test_the_form_says_what_an_h200_took() -> None:
    """The constants of a CPU's profile describe a GPU: two dense models and a mixture, in both phases, by one set of them."""
    profile = h200_profile()
    hardware, calibration = read_profile(profile)
    assert (hardware.kind, hardware.title, hardware.memory_bytes) == ("gpu", CARD, H200_BYTES)
    for phase, rows in ((Phase.PREFILL, 8), (Phase.DECODE, 11)):
        residual = profile["residuals"][phase.value]
        assert (residual["rows"], residual["median_error"] < 0.06) == (rows, True)
        assert -0.12 < residual["low"] <= residual["high"] < 0.12
    assert calibration.decode.moe_layer_s > 0.0
    assert calibration.prefill.expert_ef["bf16"] < calibration.prefill.ef["bf16"]
    # without kernels of their own experts are priced as what was measured
    plain = read_profile({key: value for key, value in profile.items() if key != "experts"})[1]
    assert (plain.decode.moe_layer_s, plain.decode.expert_ef) == (0.0, plain.decode.ef)
    with pytest.raises(ConfigError, match="experts is not an object"):
        read_profile(profile | {"experts": 3})


def test_latent_attention_is_fitted_apart() -> None:
    """Its kernels reach other shares of the card than those of keys and values, by which its steps came out up to 24 % off."""
    true = {"layer_s": 6e-5, "kv_eb": 0.3, "prefill_ef": 0.2, "decode_ef": 0.1}
    card, plain = h200_profile() | {"latents": true}, h200_samples()
    latent = list[TimedStep]()
    for name in ("latents of 16 heads", "latents of 128 heads"):
        view: Any = SimpleNamespace(
            spec=read_model(HfConfig(MODELS[name], path=name)), quant=own_quant("bf16"), kv=kv_spec("bf16")
        )
        model = CalibratedModel.from_profile(card, view.spec, view.quant)
        latent += [
            TimedStep(view=view, work=work, measured=Estimate.of([model.predict_s(work)]), read_bytes_per_s=4.2e12)
            for work in (*USUAL.decode, *USUAL.prefill)
        ]

    def times(profile: dict[str, Any], samples: list[TimedStep]) -> list[float]:
        models = {id(one.view): CalibratedModel.from_profile(profile, one.view.spec, one.view.quant) for one in samples}
        return [models[id(one.view)].predict_s(one.work) for one in samples]

    start = partial(unfitted, H200, CARD, H200_BYTES, kernels=KERNELS)
    before, after = fit(start(), plain + latent), fit(start() | {"latents": latents_unfitted()}, plain + latent)
    assert after["latents"] == pytest.approx(true, rel=0.01)
    measured = [one.measured.value for one in latent]
    assert times(after, latent) == pytest.approx(measured, rel=0.002)
    assert times(before, latent) != pytest.approx(measured, rel=0.2)
    assert times(card, plain) == times(h200_profile(), plain), "nothing changes for others"
    with pytest.raises(ConfigError, match="latents is not an object"):
        read_profile(card | {"latents": 3})


def test_errors_are_of_models_that_the_fit_did_not_see() -> None:
    """One that is in every fit has none; those of the others are larger than where all were fitted."""
    samples = h200_samples()
    start = partial(unfitted, H200, CARD, H200_BYTES, kernels=KERNELS)
    seen, held = fit(start(), samples), fit_held_out(start(), samples, kept=[samples[0].view])
    assert {key: held[key] for key in ("t0_s", "eb", "ef")} == {key: seen[key] for key in ("t0_s", "eb", "ef")}
    for phase, rows in (("prefill", 5), ("decode", 7)):
        assert held["residuals"][phase]["rows"] == rows
        assert held["residuals"][phase]["median_error"] > seen["residuals"][phase]["median_error"]
    assert start()["residuals"]["decode"]["rows"] == 0, "profiles share no table"


@pytest.mark.parametrize("slower", Phase)
def test_nothing_of_a_model_is_in_the_fit_that_judges_it(slower: Phase) -> None:
    """Its prompts were, when its decode steps were judged, and the other way round."""
    samples = h200_samples()
    judged = samples[-1].view
    kept = [sample.view for sample in samples if sample.view is not judged]

    def twice(sample: TimedStep) -> TimedStep:
        is_slow = sample.view is judged and sample.phase is slower
        return replace(sample, measured=Estimate.of([sample.measured.value * 2.0])) if is_slow else sample

    start = partial(unfitted, H200, CARD, H200_BYTES, kernels=KERNELS)
    plain, slow = (fit_held_out(start(), one, kept=kept)["residuals"] for one in (samples, list(map(twice, samples))))
    for phase in Phase:
        scale = 2.0 if phase is slower else 1.0
        for end in ("low", "high"):
            expected = scale * (1.0 + plain[phase.value][end]) - 1.0
            assert slow[phase.value][end] == pytest.approx(expected, abs=2e-4)  # they are rounded


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({8: 7e12, 16: 6e12, 32: 4.9e12, 64: 4.3e12, 2048: 4.2e12}, (32, 4.9e12)),
        ({8: 7e12, 16: 4.3e12, 32: 6e12, 2048: 4.2e12}, (8, 7e12)),
        ({8: 3e12, 2048: 4.2e12}, None),
        ({}, None),
    ],
)
def test_the_cache_is_what_is_faster_than_memory(rates: dict[int, float], expected: tuple[int, float] | None) -> None:
    """Behind the first size that memory must serve a faster one is chance."""
    found = cache_of(rates, 4.2e12)
    assert found == (None if expected is None else {"bytes": expected[0] * 2**20, "bytes_per_s": expected[1]})


def test_what_does_not_fit_a_gpus_cache_is_not_looked_for_there() -> None:
    """How much of larger weights a last-level cache still holds was measured on CPUs."""
    entry = {"bytes": 100.0, "bytes_per_s": 6e12, "eb": {"bf16": 0.9}, "kv_eb": 0.9, "reach": 1.0}
    cache = read_profile(h200_profile() | {"cache": entry})[1].cache
    assert cache is not None
    assert [cache.share_of(n) for n in (50.0, 100.0, 101.0, 300.0)] == [1.0, 1.0, 0.0, 0.0]
    assert Cache(bytes=100.0, bytes_per_s=1.0, eb={}).share_of(300.0) > 0.2


def test_ceilings_of_a_device_are_measured() -> None:
    """As on a GPU, without its recorded runs."""
    found = device_ceilings(torch.device("cpu"), copy_mib=(1, 4), side=128)
    assert found.copy_bytes_per_s.keys() == {1, 4}
    assert found.flops_per_s.keys() == {"bf16", "fp32"}
    rates = [found.read_bytes_per_s, found.launch_s, *found.copy_bytes_per_s.values(), *found.flops_per_s.values()]
    assert all(0.0 < rate < math.inf for rate in rates)


def test_a_calibration_writes_a_gpus_profile_that_plans_read(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it but the device: the very writer, with the card's name put in and few steps of the fit, then what reads it."""
    device, told = torch.device("cpu"), list[str]()
    monkeypatch.setattr(calibration, "gpu_of", lambda compute: device)
    monkeypatch.setattr(calibration, "calibrate_gpu", partial(calibrate_gpu, extent=SMALL))
    monkeypatch.setattr(gpu_calibration, "device_name", lambda device: CARD)
    monkeypatch.setattr(gpu_calibration, "memory_of", lambda device: Memory(H200_BYTES, H200_BYTES // 2))
    monkeypatch.setattr(gpu_calibration, "WARM_UPS", 1)
    monkeypatch.setattr(fitting, "STEPS", 3)
    (home / "hardware.json").write_text("{}")
    profile = calibration.calibrate(
        ComputeConfig(backend="torch", device="cpu"), progress=told.append, effort=Effort(rounds=1, budget_s=0.0)
    )
    assert load_profile(kind="gpu") == json.loads(json.dumps(profile))
    assert (home / "hardware.json").read_text() == "{}", "the processor's was written over"
    assert [line.split(":")[0] for line in told] == [
        f"measuring what {CARD} can do at most",
        *(f"timing steps, model {n} of 6" for n in range(1, 7)),
        "fitting",
        "measuring the host",
    ]
    assert "torch" in profile["fingerprint"]
    assert profile["host"]["step_s"] > 0.0
    assert profile["adapters"]["prefill_ef"]["bf16"] > 0.0
    assert [one["rows"] for one in profile["residuals"].values()] == [15, 15]
    words = "\n".join(calibration_words(profile))
    assert f"{CARD}, 140 GiB" in words
    assert "latent attention: " in words
    assert words.count("each predicted without the steps of its model") == 2

    hardware, calibrated = find_hardware("local")
    assert (hardware.kind, hardware.title, hardware.name) == ("gpu", CARD, "local")
    assert calibrated.is_local
    setup = setup_of("smollm2-135m", "local")
    assert capacity_of(setup, context_tokens=1024, batch=1).memory_bytes == H200_BYTES
    assert 0.0 < setup.model_of_time().predict_s(DECODE[0]) < math.inf
    assert calibrated.on_latents is not None
    assert calibrated.on_latents[0].attention_ef == profile["latents"]["prefill_ef"]
    assert not any("not timed" in note for note in planner_room.notes_of(setup_of("deepseek-v2-lite", "local")))
    plan(["smollm2-135m"])
    assert CARD in capsys.readouterr().out
    with pytest.raises(ConfigError, match="schema None"):
        find_hardware("local-cpu")


def test_what_it_was_taken_on_names_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two cards was written down as the first, and neither with its memory."""
    cards = [
        SimpleNamespace(name=name, total_memory=gib * 2**30, major=9, minor=0, multi_processor_count=132)
        for name, gib in (("NVIDIA H100", 80), (CARD, 140))
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    found = [fingerprint(torch.device(name)) for name in ("cuda", "cuda:1", "cpu")]
    assert [(one["gpu"], one["gpu memory"]) for one in found] == [
        ("NVIDIA H100", "80 GiB"),
        (CARD, "140 GiB"),
        ("NVIDIA H100", "80 GiB"),
    ]
    assert found[1]["gpu capability"] == "9.0, 132 multiprocessors"


def test_a_card_that_is_full_is_refused_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs hold what the models would take: torch's own error says nothing of what to do."""

    def full(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_calibration, "random_model", full)
    monkeypatch.setattr(gpu_calibration, "memory_of", lambda device: Memory(H200_BYTES, 2**30))
    with pytest.raises(CapacityError, match=r"has 1\.0 of 140\.4 GiB free") as caught:
        calibrate_gpu(
            ComputeConfig(), torch.device("cpu"), progress=lambda text: None, effort=Effort(rounds=1), extent=SMALL
        )
    assert "12 GiB" in str(caught.value)


def test_a_machine_has_two_profiles_and_local_is_the_gpus(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine takes a GPU where it finds one; each may be named, and who has none is told how to get it."""
    monkeypatch.setattr(profile_room, "has_gpu", lambda: True)
    for name, device in (("local", "cpu"), ("local-cpu", "cpu"), ("local-gpu", "cuda")):
        with pytest.raises(ConfigError, match="has not been measured") as caught:
            find_hardware(name)
        assert f"lab calibrate --device {device}" in str(caught.value)
    cpu = h200_profile() | {"kind": "cpu", "device": "a processor"}
    profile_path("cpu").write_text(json.dumps(cpu))
    monkeypatch.setattr(planner_room, "has_gpu", lambda: True)
    told = "they are of the processor: no GPU was measured here (diptych lab calibrate --device cuda)"
    assert told in planner_room.notes_of(setup_of("smollm2-135m", "local"))
    assert told not in planner_room.notes_of(setup_of("smollm2-135m", "local-cpu"))
    profile_path("gpu").write_text(json.dumps(h200_profile()))
    found = {name: find_hardware(name)[0] for name in ("local", "local-cpu", "local-gpu")}
    assert {name: one.title for name, one in found.items()} == {
        "local": CARD,
        "local-cpu": "a processor",
        "local-gpu": CARD,
    }
    assert all(one.name == name for name, one in found.items())
    assert told not in planner_room.notes_of(setup_of("smollm2-135m", "local"))
    assert "bf16" in setup_of("smollm2-135m", "local-gpu", weights=None).label
    for name in ("local", "local-gpu"):
        with pytest.raises(ConfigError, match="kv is int8; on a GPU the engine keeps"):
            setup_of("smollm2-135m", name, kv="int8")
    assert setup_of("smollm2-135m", "local-cpu", kv="int8").kv.name == "int8"


def _gpu_profile(home: Path, **changed: object) -> None:
    (home / "hardware-gpu.json").write_text(json.dumps(h200_profile() | changed))


def test_profiles_of_cpu_and_gpu_say_so_to_each_other(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both heard "only CPUs are measured", or what the other's steps take."""
    monkeypatch.setattr(model_profile, "memory_of", lambda device: Memory(H200_BYTES, H200_BYTES))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_gpu, on_cpu = model_on("cuda"), model_on("cpu")
    assert profile_gap(on_gpu) == "this GPU was never measured (diptych lab calibrate --device cuda)"
    (home / "hardware.json").write_text("{}")
    assert profile_gap(on_gpu) == (
        "this GPU was never measured, only the processor beside it was (diptych lab calibrate --device cuda)"
    )
    assert local_predictor(on_gpu) is None
    (home / "hardware.json").unlink()
    _gpu_profile(home)
    assert profile_gap(on_cpu) == (
        "this machine was never measured, only its GPU was (diptych lab calibrate --device cpu)"
    )
    assert local_predictor(on_cpu) is None
    assert profile_gap(on_gpu) is None
    predictor = local_predictor(on_gpu)
    assert predictor is not None
    # the row of 0.5B in LAB.md, ms
    assert predictor.predict_s(DECODE[3]) == pytest.approx(1.87e-3, rel=0.12)


STALE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another card": (
        {"instruction_set": "NVIDIA H100 80GB HBM3 sm_90, triton 3.6.0"},
        {},
        f"measured with {KERNELS}, torch {torch.__version__}, not with NVIDIA H100 80GB HBM3 sm_90, triton 3.6.0, torch",
    ),
    "another compiler": ({"instruction_set": "NVIDIA H200 sm_90, triton 3.7.0"}, {}, "not with NVIDIA H200 sm_90, triton 3.7"),
    "another torch": ({}, {"kernels": f"{KERNELS}, torch 2.0.0"}, "torch 2.0.0, not with"),
    "our kernels": (
        {"keeps_bits": False, "instruction_set": f"{CARD} sm_90"},
        {},
        f"not with {CARD} sm_90, torch {torch.__version__}",
    ),
    "a part of the card": ({}, {"memory_bytes": 2.0**34}, "with 16 GiB of memory, not with 140"),
}  # fmt: skip


@pytest.mark.parametrize("name", STALE)
def test_a_profile_of_another_gpu_is_stale(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of another kernel set is on a CPU."""
    facts, changed, words = STALE[name]
    monkeypatch.setattr(model_profile, "memory_of", lambda device: Memory(H200_BYTES, H200_BYTES))
    monkeypatch.setattr(model_profile, "card_of", lambda device: f"{CARD} sm_90")
    _gpu_profile(home, **changed)
    model = model_on("cuda", **facts)
    assert words in (profile_gap(model) or "")
    assert (profile_gap(model) or "").endswith("(diptych lab calibrate --device cuda)")
    assert local_predictor(model) is None


UNTIMED: dict[str, tuple[dict[str, Any], str]] = {
    "states": (
        {"keeps_bits": False, "spec": read_model(HfConfig(SHAPES["lfm2-350m"], path="x"))},
        "torch's kernels compute this model on a GPU, for its states; only ours are timed",
    ),
    "fp32": (
        {"keeps_bits": False, "weights_format": "fp32"},
        "torch's kernels compute this model on a GPU, for fp32 weights; only ours are timed",
    ),
    "codes": (
        {"weights_format": "group8-g32-f16", "formats": {"group8-g32-f16": 1}},
        "group8-g32-f16 weights are not timed on a GPU: the calibration has no achieved fraction for int8 and no fallback",
    ),
}


@pytest.mark.parametrize("name", UNTIMED)
def test_no_calibration_is_asked_for_that_would_change_nothing(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who ran the command that was named here, heard the same again."""
    facts, words = UNTIMED[name]
    monkeypatch.setattr(model_profile, "memory_of", lambda device: Memory(H200_BYTES, H200_BYTES))
    monkeypatch.setattr(model_profile, "card_of", lambda device: f"{CARD} sm_90")
    model = model_on("cuda", **facts)
    before = profile_gap(model)
    assert before == (
        words if "torch's" in words else "this GPU was never measured (diptych lab calibrate --device cuda)"
    )
    _gpu_profile(home)
    assert profile_gap(model) == words
    assert local_predictor(model) is None


def test_a_cpu_config_measures_the_cpu_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of the two is measured follows the engine's own choice of a device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    expected = {("auto", "auto"): "cuda", ("torch", "cuda:1"): "cuda:1", ("auto", "cpu"): None, ("cpu", "auto"): None}
    for (backend, device), found in expected.items():
        gpu = calibration.gpu_of(ComputeConfig(backend=backend, device=device))
        assert (None if gpu is None else str(gpu)) == found


def on_the_card(test: Callable[..., None]) -> Callable[..., None]:
    """Of tests that a real one is needed for."""
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
    return pytest.mark.gpu(skip(test))


@on_the_card
def test_a_real_gpu_is_calibrated_and_its_steps_are_predicted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel of ours, recorded and replayed; no time is asserted, only that all are possible."""
    monkeypatch.setattr(calibration, "calibrate_gpu", partial(calibrate_gpu, extent=SMALL))
    compute = ComputeConfig(backend="torch", device="cuda", weights="bf16")
    profile = calibration.calibrate(compute, progress=lambda text: None, effort=Effort(rounds=2, budget_s=0.0))
    assert profile["device"] == profile["fingerprint"]["gpu"] == torch.cuda.get_device_name()
    assert profile["kernels"].startswith(card_of(torch.device("cuda")))
    assert profile["memory_bytes"] == torch.cuda.mem_get_info()[1]
    ceilings = [profile["memory_bytes_per_s"], profile["launch_s"], *profile["flops_per_s"].values()]
    assert all(0.0 < rate < math.inf for rate in (*ceilings, *profile["copy"].values()))
    model = random_model(NARROW | TINY, compute, seed=1)
    assert profile_gap(model) is None
    predictor = local_predictor(model)
    assert predictor is not None
    for work in (DECODE[0], DECODE[3], *PREFILL):
        assert 0.0 < predictor.predict_s(work) < math.inf
    model.close()
    fp32 = random_model(NARROW | TINY, ComputeConfig(backend="torch", device="cuda", weights="fp32"), seed=1)
    assert "for fp32 weights; only ours are timed" in (profile_gap(fp32) or "")
    on_cpu = random_model(NARROW | TINY, ComputeConfig(backend="torch", device="cpu", weights="bf16"), seed=1)
    assert "this machine was never measured, only its GPU was" in (profile_gap(on_cpu) or "")


@on_the_card
def test_the_ceilings_of_a_real_gpu_are_plausible() -> None:
    """Copies of every size, those within the L2 among them."""
    found = device_ceilings(torch.device("cuda"))
    rates = [*found.copy_bytes_per_s.values(), *found.flops_per_s.values(), found.read_bytes_per_s, found.launch_s]
    assert len(rates) > 4
    assert all(0.0 < rate < math.inf for rate in rates)
