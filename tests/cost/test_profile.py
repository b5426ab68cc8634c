"""The measured profile: what calibration writes, the engine and the planner read."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from diptych.cli.plan import app
from diptych.cli.plan_picture import draw
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.cost.adapters import Loras
from diptych.cost.advice import _variants
from diptych.cost.calibrated import CalibratedModel
from diptych.cost.calibration import Cache
from diptych.cost.components import cost_of
from diptych.cost.kv_bytes import kv_bytes_per_token
from diptych.cost.memory import capacity_of, engine_weight_bytes
from diptych.cost.parameters import kv_bytes_stored
from diptych.cost.planner import Question, make_plan, quadratic_prompt_tokens
from diptych.cost.profile import load_profile, profile_path, read_profile
from diptych.cost.roofline import multiplies_in
from diptych.cost.setup import own_quant, setup_of
from diptych.cost.tables import device_spec, kv_spec, model_spec, quant_spec
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError
from diptych.ground.formats import engine_quant, mean_bytes, mix_of
from diptych.ground.phase import Phase
from diptych.ground.shape import ChunkShape, StepShape
from diptych.ground.specs import Flag, KVSpec, Stored
from diptych.ground.step import Chunk, StepPlan
from gguf_files import gguf_reference, write_gguf

PROFILE = {
    "schema": 1, "device": "test machine", "kind": "cpu", "date": "2026-01-31", "provenance": "a test",
    "memory_bytes_per_s": 5e10, "memory_bytes": 16e9, "flops_per_s": {"fp32": 2e11, "bf16": 1e12, "int8": 2e12},
    "t0_s": 1e-4, "layer_s": 1e-5, "sequence_s": 2e-6, "p": 3.0,
    "eb": {"bf16": 0.9, "int8": 0.8, "int4": 0.6}, "ef": {"bf16": 0.85, "int8": 0.7},
    "attention": {"kv_eb": 0.7, "prefill_ef": 0.4, "decode_ef": 0.3},
    "residuals": {
        "prefill": {"low": -0.06, "high": 0.08, "median_error": 0.03, "rows": 12},
        "decode": {"low": -0.05, "high": 0.05, "median_error": 0.02, "rows": 9},
    },
}  # fmt: skip


def damaged(path: str, value: object) -> dict:
    """A copy of the profile with one entry replaced (None: removed); `path` is dotted."""
    copy = json.loads(json.dumps(PROFILE))
    *parents, last = path.split(".")
    target = copy
    for key in parents:
        target = target[key]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return copy


def test_products_of_weights_in_groups_take_the_ends_of_their_groups() -> None:
    """A profile measures int4, int8 and bf16: a prompt on a file in Q4_K_M was said to take two thirds of what it took."""
    model, prompt = model_spec("llama-3.2-1b"), StepShape.prefill(batch=1, new_tokens=512)
    profile = PROFILE | {"ef": {"bf16": 0.7, "int8": 0.7}, "attention": {**PROFILE["attention"], "prefill_ef": 1e3}}

    def seconds(quant) -> float:
        return CalibratedModel.from_profile(profile, model, quant).predict_s(prompt)

    whole = seconds(engine_quant("int8", "int8"))
    groups = {
        "group4-g32-f16": 0.85,
        "group4-g128-f16": 0.96,
        "group4-g32-s8-minima": 0.76,
        "group8-g32-f16-wide": 0.44,
    }
    for name, rate in groups.items():
        assert whole / seconds(engine_quant(name, "int8")) == pytest.approx(rate, abs=0.02)
    formats = {"group4-g32-s8-minima": 830, "group6-g16-s8-wide": 143}
    mixed = replace(engine_quant("group4-g32-s8-minima", "int8"), mix=mix_of(formats, usual="group4-g32-s8-minima"))
    assert whole / seconds(mixed) == pytest.approx(1.0 / (0.853 / 0.76 + 0.147 / 0.39), abs=0.02)


def test_what_ends_a_group_takes_as_long_as_this_machine_was_seen_to_take() -> None:
    """Matrix tiles leave little to hide it behind: on them groups of 32 have a quarter of int4's rate, not Zen 4's 0.85."""
    model, prompt = model_spec("llama-3.2-1b"), StepShape.prefill(batch=1, new_tokens=512)
    profile = PROFILE | {"ef": {"bf16": 0.7, "int8": 0.7}, "attention": {**PROFILE["attention"], "prefill_ef": 1e3}}

    def seconds(name: str, **groups: float) -> float:
        said = profile | ({"groups": groups} if groups else {})
        return CalibratedModel.from_profile(said, model, engine_quant(name, "int8")).predict_s(prompt)

    usual, wide = "group4-g32-f16", "group8-g32-f16-wide"
    assert seconds(usual, int8=1.0, bf16=1.0) == pytest.approx(seconds(usual))
    assert seconds("int8") / seconds(usual, int8=17.0, bf16=1.0) == pytest.approx(0.25, abs=0.02)
    assert seconds("int8", int8=17.0) == pytest.approx(seconds("int8"))
    assert seconds(wide, int8=17.0, bf16=1.0) == pytest.approx(seconds(wide))
    assert seconds(wide, int8=1.0, bf16=3.0) > 1.2 * seconds(wide)


def test_codes_of_few_bits_have_a_rate_of_their_own() -> None:
    """Where no dot product is, int4 products take half as long as int8's, as which prompts in int4 were predicted."""
    model, prompt = model_spec("llama-3.2-1b"), StepShape.prefill(batch=1, new_tokens=512)
    own = {"flops_per_s": PROFILE["flops_per_s"] | {"int4": 4e12}, "ef": {"bf16": 0.7, "int8": 0.7, "int4": 0.7}}

    def seconds(weights: str, profile: dict) -> float:
        said = PROFILE | profile | {"attention": {**PROFILE["attention"], "prefill_ef": 1e3}}
        return CalibratedModel.from_profile(said, model, engine_quant(weights, "int8")).predict_s(prompt)

    for weights in ("int4", "group4-g128-f16", "group6-g16-s8"):
        assert seconds(weights, {}) / seconds(weights, own) == pytest.approx(2.0, abs=0.05)
    # products of wide rows are priced in bf16
    for weights in ("int8", "bf16", "group8-g32-f16", "group4-g32-f16-wide"):
        assert seconds(weights, {"ef": own["ef"]}) == pytest.approx(seconds(weights, own))
    # a profile of before says nothing of int4, which then is int8
    quant = engine_quant("int4", "int8")
    hardware = replace(device_spec("h100-80gb-sxm"), flops_per_s=PROFILE["flops_per_s"])
    assert quant.compute == "int4"
    assert multiplies_in(hardware, quant.compute)
    assert not multiplies_in(hardware, "fp8")


def test_adapters_beside_int4_multiply_in_int8() -> None:
    """Their rows are int8 there, too: what was measured beside int8 prices them."""
    model, plain = model_spec("llama-3.2-1b"), StepShape.prefill(batch=2, new_tokens=256)
    work = Loras.parse("2:16").spread(model, plain)
    adapters = {"layer_s": 1e-6, "prefill_ef": {"int8": 0.2}, "decode_ef": {"int8": 0.2}}
    own = {
        "flops_per_s": PROFILE["flops_per_s"] | {"int4": 4e12},
        "ef": {"int8": 0.7, "int4": 0.7},
        "adapters": adapters,
    }

    def added(weights: str) -> float:
        predictor = CalibratedModel.from_profile(PROFILE | own, model, engine_quant(weights, "int8"))
        return predictor.predict_s(work) - predictor.predict_s(plain)

    assert added("int4") == pytest.approx(added("int8"), rel=0.05)


def test_profile_predicts_a_plan():
    """What the scheduler calls: seconds for a plan, from a JSON file and a model."""
    model = CalibratedModel.from_profile(PROFILE, model_spec("smollm2-135m"), quant_spec("bf16"))
    chunk = Chunk(
        seq_id=1, phase=Phase.DECODE, start_pos=99, token_ids=(5,), first_new_block=0, new_block_ids=(), samples=True
    )
    decode_s = model.predict_s(StepPlan(step_id=0, chunks=(chunk,)).shape)
    weights_s = 134_515_008 * 2 / (5e10 * 0.9)
    assert decode_s == pytest.approx(weights_s + 1e-4 + 30e-5 + 2e-6, rel=0.05)


def test_weights_that_fit_the_cache_are_read_from_it():
    """A 10M model decodes from the last-level cache, twice as fast as the memory allows: predicting it from there is wrong."""
    cache = {"bytes": 3e8, "bytes_per_s": 2e11, "eb": {"bf16": 0.5, "int8": 0.4, "int4": 0.3}}
    step = StepShape.decode(batch=1, context_tokens=2)

    def seconds(name: str, profile: dict) -> float:
        return CalibratedModel.from_profile(profile, model_spec(name), quant_spec("bf16")).predict(step).total_s

    weights = 134_515_008 * 2
    gained_s = seconds("smollm2-135m", PROFILE) - seconds("smollm2-135m", PROFILE | {"cache": cache})
    assert gained_s == pytest.approx(weights / (5e10 * 0.9) - weights / (2e11 * 0.5), rel=0.01)
    too_small = cache | {"bytes": weights / 8}
    assert seconds("smollm2-135m", PROFILE | {"cache": too_small}) == seconds("smollm2-135m", PROFILE)


def test_weights_a_little_larger_than_the_cache_are_read_from_it_in_part():
    """24 MiB in a cache of 21 were priced at a third of the measured rate, the memory's; what is found there falls slowly."""
    cache = Cache(bytes=100.0, bytes_per_s=1.0, eb={})
    shares = [cache.share_of(n) for n in (50.0, 100.0, 101.0, 150.0, 300.0, 500.0, 800.0, 1e6)]
    assert shares[:2] == [1.0, 1.0]
    assert shares == sorted(shares, reverse=True)
    assert shares[2] == pytest.approx(1.0, abs=0.02), "no cliff where weights stop to fit"
    assert shares[3:6] == pytest.approx([0.62, 0.24, 0.086], abs=0.01)
    assert shares[6:] == [0.0, 0.0]


def test_the_roof_of_cached_weights_is_the_caches(monkeypatch, tmp_path, capsys):
    """A plan's roofline was the memory's: predictions from a cache stood above it. The picture draws both."""
    cache = {"bytes": 3e8, "bytes_per_s": 2e11, "eb": {"bf16": 0.5, "int8": 0.4, "int4": 0.3}}
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path))

    def decode(cached: dict):
        (tmp_path / "hardware.json").write_text(json.dumps(PROFILE | cached))
        return make_plan(setup_of("smollm2-135m", "local"), Question(prompt_tokens=64))

    plain, roofed = decode({}), decode({"cache": cache})
    assert plain.decode.bound_s == pytest.approx(4 * roofed.decode.bound_s, rel=0.01)
    assert roofed.decode.bound_s < roofed.decode.predicted_s < plain.decode.bound_s
    assert roofed.compute_bound_batch == pytest.approx(plain.compute_bound_batch / 4)
    assert any("so the roof is the cache's: 200 GB/s, not the memory's 50" in note for note in roofed.notes)
    draw(roofed, tmp_path / "plan.svg")
    picture = (tmp_path / "plan.svg").read_text()
    assert "roof of the memory, 50 GB/s" in picture
    assert "roof of the cache, 286 MiB at 200 GB/s" in picture
    assert decode({"cache": cache | {"bytes": 3e7}}).decode.bound_s == plain.decode.bound_s
    partly = decode({"cache": cache | {"bytes": 2.2e8}})
    assert roofed.decode.bound_s < partly.decode.bound_s < plain.decode.bound_s
    assert any("79% of the weights still lie in the 210 MiB of cache" in note for note in partly.notes)
    draw(partly, tmp_path / "plan.svg")
    assert "roof of the two in turns" in (tmp_path / "plan.svg").read_text()


def test_a_step_holds_the_hosts_time_once():
    """Kernels are timed without the scheduler, served tokens with it; counting it twice would double a small model's step."""
    with_host = PROFILE | {"host": {"step_s": 3e-4, "sequence_s": 1e-5}}
    model, quant, work = model_spec("smollm2-135m"), quant_spec("bf16"), StepShape.decode(batch=4, context_tokens=64)
    plain, hosted = (CalibratedModel.from_profile(profile, model, quant) for profile in (PROFILE, with_host))
    assert hosted.predict(work).total_s - plain.predict(work).total_s == pytest.approx(3e-4 + 4e-5)
    assert hosted.calibration.host.time_s(work) == pytest.approx(3e-4 + 4e-5)


def test_weights_that_no_cache_holds_displace_what_the_host_reads():
    """It was measured beside small weights, and decode of the bundled model came out 40 % short of its host's time."""
    model, quant, work = model_spec("smollm2-135m"), quant_spec("bf16"), StepShape.decode(batch=4, context_tokens=64)
    for n_bytes, share in ((3e7, 1.0), (1e9, 0.0)):
        cache = {"bytes": n_bytes, "bytes_per_s": 1.5e11, "eb": {"bf16": 0.5}}
        plain, hosted = (
            CalibratedModel.from_profile(PROFILE | {"cache": cache, "host": host}, model, quant)
            for host in ({"step_s": 3e-4}, {"step_s": 3e-4, "displaced_s": 2e-4})
        )
        assert hosted.cached_share == 1.0 - share
        assert hosted.predict_s(work) - plain.predict_s(work) == pytest.approx(2e-4 * share)
        assert hosted.calibration.host.time_s(work) == pytest.approx(3e-4 + 2e-4 * share)
        assert hosted.predict(work).total_s == pytest.approx(hosted.predict_s(work))


def test_prompts_have_a_host_time_of_their_own():
    """A prompt that comes, is looked up in the prefix cache and put there cost as little as one more token of an answer."""
    host = {"step_s": 3e-4, "sequence_s": 1e-5, "prompt_s": 2e-4, "prompt_token_s": 1e-6}
    model, quant = model_spec("smollm2-135m"), quant_spec("bf16")
    plain, hosted = (
        CalibratedModel.from_profile(profile, model, quant) for profile in (PROFILE, PROFILE | {"host": host})
    )
    decode = StepShape.decode(batch=4, context_tokens=64)
    mixed = decode.plus(StepShape.prefill(batch=2, new_tokens=50))
    for work, expected_s in ((decode, 3.4e-4), (mixed, 3e-4 + 6e-5 + 4e-4 + 1e-4)):
        assert hosted.predict_s(work) - plain.predict_s(work) == pytest.approx(expected_s)
        assert hosted.predict(work).total_s == pytest.approx(hosted.predict_s(work))
        assert hosted.calibration.host.time_s(work) == pytest.approx(expected_s)


def test_narrow_rows_cost_more_between_their_products_than_wide_ones():
    """Prompts of a model of 384 channels came out a tenth too short, in int8 a fifth, priced by what wide ones had taken."""
    passed = PROFILE | {"activation_bytes_per_s": 1e10}
    work, quant = StepShape.prefill(batch=1, new_tokens=256), quant_spec("int8")

    def more(name: str) -> float:
        plain, rows = (CalibratedModel.from_profile(profile, model_spec(name), quant) for profile in (PROFILE, passed))
        assert rows.predict(work).total_s == pytest.approx(rows.predict_s(work))
        passing = cost_of(model_spec(name), work, quant=quant, kv=KVSpec()).components
        n_bytes = sum(
            one.activation_bytes for one in passing if one.name not in ("scores", "values", "head", "embedding")
        )
        assert rows.predict_s(work) - plain.predict_s(work) == pytest.approx(n_bytes / 1e10)
        return rows.predict_s(work) / plain.predict_s(work)

    assert more("smollm2-135m") > more("llama-3.1-8b") > 1.0


def test_local_numbers_are_flagged_measured_and_say_when():
    """The reader must see that these come from this machine, and how old they are."""
    hardware, calibration = read_profile(PROFILE)
    assert hardware.flag_of("memory_bytes_per_s") is Flag.MEASURED
    assert "2026-01-31" in calibration.source
    assert calibration.is_local


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("schema", 2, "schema 2"),
        ("memory_bytes_per_s", None, "memory_bytes_per_s is None"),
        ("memory_bytes_per_s", -1.0, "memory_bytes_per_s is -1.0"),
        ("flops_per_s", {}, "no flops_per_s"),
        ("eb.bf16", "fast", "bf16 is 'fast'"),
        ("p", 0.0, "p is 0.0"),
        ("attention.kv_eb", None, "kv_eb is None"),
        ("residuals.decode", None, "no residuals for decode"),
        ("residuals", [1], "no residuals for prefill"),
        ("residuals.decode.rows", float("inf"), "rows is inf"),
        ("residuals.prefill.low", 0.5, "from 0.5 to 0.08"),
        ("layer_s", -1e-5, "layer_s is -1e-05"),
        ("groups", {"int8": 0.0}, "int8 is 0"),
        pytest.param("layer_s", 10**400, "layer_s is inf", id="a number that no float holds"),
        ("residuals.decode.high", float("inf"), "from -0.05 to inf"),
    ],
)
def test_damaged_profiles_are_refused_by_entry(path, value, words):
    """A profile is a file: a wrong entry is named, with how to write a new one."""
    with pytest.raises(ConfigError, match=words) as caught:
        read_profile(damaged(path, value))
    assert "lab calibrate" in str(caught.value)


def test_adapters_cost_what_was_measured_on_this_machine():
    """A profile of before adapters takes a share of the other matrices' rate; one with them has its own, by phase."""
    model, quant = model_spec("qwen2.5-1.5b"), own_quant("bf16")
    entry = {"layer_s": 1e-5, "prefill_ef": {"bf16": 0.5}, "decode_ef": {"bf16": 0.1}}
    before, after = (
        CalibratedModel.from_profile(one, model, quant) for one in (PROFILE, PROFILE | {"adapters": entry})
    )
    step, prompt = StepShape.decode(batch=16, context_tokens=64), StepShape.prefill(batch=1, new_tokens=512)
    for work, share in ((step, 0.1), (prompt, 0.5)):
        adapted = Loras(count=1).spread(model, work)
        products_s = 2.0 * work.n_tokens * 18_464_768 / (share * PROFILE["flops_per_s"]["bf16"])
        read_s = 2.0 * 18_464_768 / (PROFILE["eb"]["bf16"] * PROFILE["memory_bytes_per_s"])
        seen = after.predict(adapted).parts_s["adapters"]
        assert seen == pytest.approx(28 * 1e-5 + read_s + products_s)
        assert before.predict(adapted).parts_s["adapters"] != pytest.approx(seen, rel=0.05)
    for damage in ([], {"layer_s": -1.0}, {"layer_s": 0.0}):
        with pytest.raises(ConfigError, match=r"adapters|layer_s|prefill_ef"):
            read_profile(PROFILE | {"adapters": damage or [1]})


@pytest.mark.native
def test_a_quantised_file_is_priced_on_this_machine_as_the_engine_holds_it(tmp_path, monkeypatch):
    """`plan m.gguf` priced 16-bit weights, three times the bytes; other devices go on with what they would store."""
    if not instruction_sets():
        pytest.skip("the native kernels are not installed")
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path))
    profile_path().write_text(json.dumps(PROFILE))
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
    path = write_gguf(
        gguf_reference("llama", **wide), tmp_path / "m.gguf",
        choose=lambda name: "Q6_K" if "attn_v" in name else "Q4_K" if "blk" in name else "F16",
    )  # fmt: skip
    held = load_model(path, ComputeConfig(backend="cpu", threads=1)).formats
    setup = setup_of(str(path), "local", weights=None)
    assert len(held) == 2
    assert setup.quant.name in held
    assert setup.quant.weight_bytes == mean_bytes(held) < 0.7
    assert setup.quant.head_weight_bytes == 2.0
    assert setup_of(str(path), "local").quant.name == "bf16"
    for eb, name in (({"bf16": 0.9}, "bf16"), ({"bf16": 0.9, "int4": 0.8}, setup.quant.name)):
        profile_path("gpu").write_text(json.dumps(PROFILE | {"kind": "gpu", "eb": eb}))
        assert setup_of(str(path), "local-gpu", weights=None).quant.name == name
    assert setup_of(str(path), "h100-80gb-sxm", weights=None).quant.name == "bf16"


def test_local_hardware_reads_the_stored_profile(tmp_path, monkeypatch):
    """`--hardware local` is the machine as measured; before that it says how to measure."""
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="has not been measured") as caught:
        setup_of("smollm2-135m", "local")
    assert "diptych lab calibrate" in str(caught.value)
    profile_path().write_text(json.dumps(PROFILE))
    setup = setup_of("smollm2-135m", "local")
    assert setup.hardware.title == "test machine"
    prefill = StepShape.prefill(batch=1, new_tokens=512)
    plain_s, int8_s, int4_s = (
        setup_of("smollm2-135m", "local", weights=name).model_of_time().predict_s(prefill)
        for name in ("bf16", "int8", "int4")
    )
    assert int8_s < 0.8 * plain_s, "the engine's integers were priced as bf16: 574 ms for each of the three"
    assert int4_s < 0.8 * plain_s
    offered = {name for name, _ in _variants(setup) if name.startswith("weights")}
    assert offered == {"weights int8", "weights int4"}, "fp8 was offered, which no kernel of the engine multiplies"
    for damage in ("{", "[" * 100_000):
        profile_path().write_text(damage)
        with pytest.raises(ConfigError, match="cannot read"):
            load_profile()
    profile_path().write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        load_profile()


def test_formats_that_were_not_measured_leave_the_others(tmp_path, monkeypatch, capsys):
    """The torch backend has no int8 and no int4: what they would change ended all answers about a machine with its profile."""
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path))
    profile_path().write_text(
        json.dumps(PROFILE | {"flops_per_s": {"bf16": 1e12}, "eb": {"bf16": 0.9}, "ef": {"bf16": 0.8}})
    )
    app(["smollm2-135m", "--hardware", "local"])
    missing = "the calibration has no achieved fraction for int8 and no fallback"
    assert f"not possible: weights int8: {missing}" in capsys.readouterr().out
    app(["smollm2-135m", "--ask", "ttft=9s,tpot=9s,rate=1/min,in=9,out=9", "--hardware", "local"])
    text = capsys.readouterr().out
    assert "meets it: smollm2-135m bf16 on local" in text
    assert f"int8 on local: {missing}" in text


CACHE = {"bytes": 3e8, "bytes_per_s": 2e11, "eb": {"bf16": 0.5, "int8": 0.4, "int4": 0.3}, "kv_eb": 0.4}


def test_keys_and_values_beside_cached_weights_are_read_from_the_cache():
    """Attention over a short context came out at the memory's rate where weights were the cache's: decode of the bundled model
    was predicted 10 to 17 % too long from a few hundred tokens on. What does not fit in beside the weights stays memory's.
    """
    model, quant = model_spec("smollm2-135m"), quant_spec("bf16")
    sharp = PROFILE | {"p": 60.0, "attention": PROFILE["attention"] | {"decode_ef": 1e3}}  # reading alone
    measured, unknown = (
        CalibratedModel.from_profile(sharp | {"cache": {k: v for k, v in CACHE.items() if k in keys}}, model, quant)
        for keys in (CACHE.keys(), CACHE.keys() - {"kv_eb"})
    )
    kv_bytes = cost_of(model, StepShape.decode(batch=1, context_tokens=1000), quant=quant, kv=KVSpec()).kv_bytes
    few, many = (StepShape.decode(batch=batch, context_tokens=1000) for batch in (1, 16))
    gained_s = unknown.predict_s(few) - measured.predict_s(few)
    assert gained_s == pytest.approx(kv_bytes / (5e10 * 0.7) - kv_bytes / (2e11 * 0.4), rel=0.01)
    assert 16 * kv_bytes + 134_515_008 * 2 > CACHE["bytes"]
    assert measured.predict_s(many) == unknown.predict_s(many)
    for shape in (few, many, StepShape.prefill(batch=1, new_tokens=300)):
        assert measured.predict(shape).total_s == pytest.approx(measured.predict_s(shape))
    border = StepShape.decode(batch=1, context_tokens=int((3e8 - 134_515_008 * 2) / (kv_bytes / 1001)) - 3)
    run = measured.predict_run_s(border, 6)
    assert run == [pytest.approx(measured.predict_s(border.later(step))) for step in range(6)]
    assert max(after - before for before, after in pairwise(run)) > 1e-4  # somewhere it falls out of the cache


def test_narrow_keys_and_values_have_attention_of_their_own():
    """A profile had one share of the peak inside attention, that of bf16: int8 KV was predicted twice as fast in decode, by its
    bytes alone, where unpacking them takes what reading half as much saves. Of a cache met in bytes the share is of the peak of
    bytes; where nobody measured it, it is met as any other.
    """
    model, quant = model_spec("smollm2-135m"), quant_spec("bf16")
    attention = PROFILE["attention"] | {"kv_eb": 1e3, "int8": {"prefill_ef": 0.2, "decode_ef": 0.1}}
    step = StepShape.decode(batch=1, context_tokens=4000)

    def attention_s(kv: str, **own: object) -> float:
        profile = PROFILE | {"attention": attention | own}
        return CalibratedModel.from_profile(profile, model, quant, kv=kv_spec(kv)).predict(step).parts_s["attention"]

    assert attention_s("int8") == pytest.approx(3 * attention_s("bf16"), rel=1e-3)
    assert attention_s("fp8") == pytest.approx(attention_s("bf16"), rel=1e-3)
    assert attention_s("int8x8") == pytest.approx(attention_s("bf16"), rel=1e-3)
    in_bytes = attention_s("int8x8", int8x8={"prefill_ef": 0.2, "decode_ef": 0.1})
    assert in_bytes == pytest.approx(1.5 * attention_s("bf16"), rel=1e-3)
    with pytest.raises(ConfigError, match="decode_ef"):
        read_profile(PROFILE | {"attention": attention | {"int8": {"prefill_ef": 0.2}}})


def test_layers_of_two_formats_are_each_priced_as_what_they_are():
    """A checkpoint with attention in bf16 and the rest in int8 was priced as int8 with more bytes: its prompts came out as fast
    as if all were multiplied in int8.
    """
    model = model_spec("smollm2-135m")
    int8 = replace(quant_spec("w8a8"), head_weight_bytes=1.0)
    mixed = replace(int8, weight_bytes=1.25, mix=(Stored(0.75, 1.0, "int8"), Stored(0.25, 2.0, "bf16")))
    prompt, token = StepShape.prefill(batch=1, new_tokens=2048), StepShape.decode(batch=1, context_tokens=2)
    predictors = [CalibratedModel.from_profile(PROFILE | {"p": 60.0}, model, quant) for quant in (int8, mixed)]
    one, two = (predictor.predict(prompt).compute_s for predictor in predictors)
    flops = sum(
        part.flops
        for part in cost_of(model, prompt, quant=int8, kv=KVSpec()).components
        if part.name not in ("scores", "values", "head")
    )
    assert two - one == pytest.approx(0.25 * flops * (1 / (1e12 * 0.85) - 1 / (2e12 * 0.7)), rel=1e-3)
    n_bytes = [cost_of(model, token, quant=quant, kv=KVSpec()).component("mlp").weight_bytes for quant in (int8, mixed)]
    assert n_bytes[1] == pytest.approx(1.25 * n_bytes[0])
    one, two = (predictor.predict(token).memory_s for predictor in predictors)
    body = sum(part.weight_bytes for part in cost_of(model, token, quant=int8, kv=KVSpec()).components) - 49152 * 576
    assert two - one == pytest.approx(0.25 * body * (2 / (5e10 * 0.9) - 1 / (5e10 * 0.8)), rel=0.02)


def test_prompts_read_both_ways_have_twice_the_pairs():
    """They were priced as causal ones: an embedding of 2,000 tokens meets all keys with each of them."""
    both = StepShape([ChunkShape(Phase.PREFILL, 2000, 0, False, 1, None, True)])
    causal = StepShape.prefill(batch=1, new_tokens=2000, samples=False)
    assert both.prefill_pairs == 2000 * 2000
    assert causal.prefill_pairs == 2000 * 2001 // 2
    assert both.shapes[0].pairs(None) == both.prefill_pairs
    assert both.shapes[0].pairs(100) == sum(min(i + 1, 100) + min(2000 - i, 100) - 1 for i in range(2000))
    predictor = CalibratedModel.from_profile(PROFILE, model_spec("smollm2-135m"), quant_spec("bf16"))
    attention = [predictor.predict(shape).parts_s["attention"] for shape in (both, causal)]
    assert attention[0] > 1.9 * attention[1]
    assert predictor.predict_s(both) == pytest.approx(predictor.predict(both).total_s)


def test_this_machine_holds_what_its_engine_holds(tmp_path, monkeypatch):
    """Beside int8 weights the embedding stays in 16 bits, and a block keeps the KV of all layers: neither was counted."""
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path))
    profile_path().write_text(json.dumps(PROFILE))
    for weights in ("bf16", "int8", "int4"):
        small = setup_of("qwen2.5-0.5b", "local", weights=weights)
        held = capacity_of(small, context_tokens=1024, batch=1)
        assert held.weight_bytes == engine_weight_bytes(small.model, weights)
    windowed = setup_of("gemma-3-1b", "local")
    found = capacity_of(windowed, context_tokens=32_768, batch=1)
    each = 32_768 * kv_bytes_per_token(windowed.model, windowed.kv)
    assert found.max_batch == found.free_kv_bytes // each
    assert kv_bytes_stored(windowed.model, windowed.kv, 32_768, is_ours=True) == each


def test_latents_are_multiplied_as_this_machine_does(tmp_path, monkeypatch):
    """Our prefill works on the latents, whose products are wider: attention catches up with the layers at shorter prompts."""
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path))
    profile_path().write_text(json.dumps(PROFILE))
    ours, theirs = (quadratic_prompt_tokens(setup_of("deepseek-v2-lite", name)) for name in ("local", "h100-80gb-sxm"))
    assert ours == pytest.approx(theirs * (128 + 64 + 128) / (512 + 64 + 512))
