"""Rotations beside quantised weights: checkpoints answer as the models of transformers that run them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from coded_files import compressed, damaged, logits_of, opened, said_in_use
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.models.contents import contents_of

pytest.importorskip("compressed_tensors")

from quantiser_files import DATA
from rotated_files import AUTO_ROUND, FOUR_OVER_SIX, LOGITS, Groups, quip, rotated, spinquant

W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
DOWN = "model.layers.0.mlp.down_proj."
CASES: dict[str, Groups] = {
    "R4": {"R4": spinquant()},
    "R4 of two inputs' blocks": {"R4": spinquant("random-hadamard", 64)},
    "inputs": {"v": quip("v", "random-hadamard")},
    "inputs in blocks": {"v": quip("v", "hadamard", 32)},
    "outputs": {"u": quip("u", "random-hadamard", 32)},
    "both": {"v": quip("v", "random-hadamard"), "u": quip("u", "hadamard")},
    "the head, too": {
        "v": {**quip("v", "hadamard", 64), "apply": [{**part, "ignore": []} for part in quip("v", "hadamard")["apply"]]}
    },
    "any matrix": {"v": quip("v", "random-matrix", 16)},
    "any matrix of outputs": {"u": quip("u", "random-matrix", 16)},
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases, whose sides are powers of two."""
    fields = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    return make_checkpoint("llama", tmp_path_factory.mktemp("plain"), dtype=torch.bfloat16, **fields)


@pytest.mark.parametrize("case", CASES)
def test_rotated_checkpoints_answer_as_the_models_that_rotate(case: str, original: Path, tmp_path: Path) -> None:
    """A matrix from the wrong side, or not divided by the root of its sides: another model."""
    path, expected = rotated(original, tmp_path / "it", CASES[case], compressed("pack-quantized", **W4))
    got = logits_of(path, backend="torch", weights="fp32")
    assert expected.std() > 0.3
    assert (got - expected).abs().max() < 2e-4 * expected.abs().max()
    down = opened(path).tensor(f"{DOWN}weight", 128, 256)
    assert torch.equal(down.part(slice(3, 20, 4), 40), down.read()[3:20:4, :40])  # as ranks ask for their parts
    loaded = load_model(path, ComputeConfig(backend="torch", threads=1)).n_parameters
    assert loaded == sum(group.parameters for group in contents_of(path).groups)
    assert loaded == sum(group.parameters for group in contents_of(original).groups)
    assert contents_of(path).kept == ("group4-g32-bf16" if case.startswith("R4") else None)


def test_floats_are_rotated_where_a_rotation_names_them(original: Path, tmp_path: Path) -> None:
    """A file of floats with R4 alone; what is linear is not seen of floats, so that rotations by class are refused."""
    path, expected = rotated(original, tmp_path / "it", {"R4": spinquant()}, None)
    got = logits_of(path, backend="torch", weights="fp32")
    assert (got - expected).abs().max() < 2e-4 * expected.abs().max()
    path, _ = rotated(original, tmp_path / "by class", {"v": quip("v", "hadamard")}, None)
    with pytest.raises(LoadError, match=r"whether model.layers.0.*_proj, which lies in floats, is so"):
        logits_of(path, backend="torch")


def test_queries_that_are_rotated_as_keys_are_score_alike(original: Path, tmp_path: Path) -> None:
    """R3 (q H)(k H)^T is q k^T: nothing is left of it but tensors, which are no parameters."""
    plain, expected = rotated(original, tmp_path / "plain", {}, compressed("pack-quantized", **W4))
    path, _ = rotated(original, tmp_path / "it", {}, compressed("pack-quantized", **W4))
    sides = [{"targets": ["re:.*self_attn$"], "location": place} for place in ("q_attn", "k_cache")]
    change_config(path, {"R3": {"type": "hadamard", "head_dim": 32, "apply": sides}})
    damaged(path, lambda t: t.update({"model.layers.0.self_attn.R3_q_attn.weight": torch.ones(32, 32)}))
    got = logits_of(path, backend="torch", weights="fp32")
    assert torch.equal(got, logits_of(plain, backend="torch", weights="fp32"))
    assert (got - expected).abs().max() < 2e-4 * expected.abs().max()
    assert contents_of(path).kept == "group4-g32-bf16"


@pytest.mark.native
def test_what_is_rotated_becomes_bf16_and_the_log_says_so(
    original: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Down alone; the others keep their codes."""
    path, _ = rotated(original, tmp_path / "it", {"R4": spinquant()}, compressed("pack-quantized", **W4))
    said = said_in_use(path, caplog, 0.02)
    assert "pack-quantized-4-rotated:" in said
    assert "kept=group4-g32-bf16:" in said
    assert " bf16:" in said
    assert "no kernel rotates rows (2 matrices)" in said
    assert "rotations are multiplied into the weights" in said


def change_config(path: Path, groups: dict[str, Any]) -> None:
    fields = json.loads((path / "config.json").read_text())
    fields["quantization_config"]["transform_config"] = {"config_groups": groups}
    (path / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{DOWN}v_input.weight"), r"no tensor model.layers.0.mlp.down_proj.v_input.weight of 256 by 256"),
        (lambda t: t.update({f"{DOWN}v_input.weight": 2 * t[f"{DOWN}v_input.weight"]}), "numbers of a size from 2 to 2"),
        (lambda t: t[f"{DOWN}v_input.weight"][3].fill_(0), "numbers of a size from 0 to 1; a Hadamard matrix has 1, or 0.0625"),
        (lambda t: t[f"{DOWN}v_input.weight"][3].fill_(float("nan")), "has a number that is not finite"),
        (
            lambda t: t.update({f"{DOWN}v_input.weight": torch.ones(128, 128)}),
            r"v_input.weight is F32 \[128, 128\]; .* \[256, 256\] is expected",
        ),
        (lambda t: t.update({f"{DOWN}v_input.weight": torch.ones(256, 256).char()}), "v_input.weight is I8"),
        (lambda t: t.update({f"{DOWN}w_input.weight": torch.ones(2, 2)}), "the first is .*w_input.weight"),
    ],
    ids=["missing", "scaled", "zeros", "no number", "sides", "type", "another"],
)  # fmt: skip
def test_damaged_rotations_are_refused(change: Any, message: str, original: Path, tmp_path: Path) -> None:
    """What, the number and the limit."""
    groups = {"v": quip("v", "random-hadamard")}
    path, _ = rotated(original, tmp_path / "it", groups, compressed("pack-quantized", **W4))
    damaged(path, change)
    with pytest.raises(LoadError, match=message):
        logits_of(path, backend="torch", weights="fp32")


def with_first(group: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A group whose first part has other fields."""
    return {**group, "apply": [{**group["apply"][0], **fields}, *group["apply"][1:]]}


R3 = {"type": "hadamard", "apply": [{"targets": "re:.*self_attn$", "location": one} for one in ("q_attn", "k_cache")]}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"a": {**spinquant(), "type": "learned"}}, "type in .* is 'learned'"),
        ({"a": {**spinquant(), "randomize": True}}, "randomize in .* is True"),
        ({"a": {**spinquant(), "head_dim": 0}}, "head_dim in .* is 0"),
        ({"a": {**spinquant(), "apply": {}}}, "apply in .* must be a list"),
        ({"a": {**spinquant(), "apply": [7]}}, "apply in .* must be a list"),
        ({"a": with_first(spinquant(), location="norm")}, "location in .* is 'norm'"),
        ({"a": with_first(spinquant(), targets=["LlamaMLP"])}, "targets in .*LlamaMLP"),
        ({"a": with_first(spinquant(), targets="re:(a+)+$")}, "a pattern that is not read"),
        ({"a": with_first(spinquant(), targets=["model.layers.7.mlp.down_proj"])}, "for none of the matrices"),
        ({"a": with_first(spinquant(), targets="re:.*(embed_tokens|down_proj)$")}, "model.embed_tokens 1 times"),
        ({"a": spinquant(), "b": spinquant()}, "inputs of model.layers.0.mlp.down_proj 2 times"),
        ({"a": {**spinquant(), "head_dim": 48}}, "256 inputs, which rotations of 48 do not divide"),
        ({"a": {**R3, "type": "random-matrix"}}, "queries and keys"),
        ({"a": {**R3, "apply": R3["apply"][:1]}}, "queries and keys"),
        ({"a": with_first(R3, inverse=True)}, "queries and keys"),
        ({str(i): spinquant() for i in range(65)}, "has 65 groups; at most 64"),
        (
            {"a": {**quip("v", "random-matrix"), "apply": [*quip("v", "x")["apply"], *quip("u", "x")["apply"]]}},
            "rotated both ways",
        ),
    ],
)  # fmt: skip
def test_other_rotations_are_refused_by_name(groups: Any, message: str, original: Path, tmp_path: Path) -> None:
    """Nothing is left out that would change the answer."""
    path, _ = rotated(original, tmp_path / "it", {}, compressed("pack-quantized", **W4))
    change_config(path, groups)
    with pytest.raises(LoadError, match=message):
        logits_of(path, backend="torch", weights="fp32")


@pytest.mark.parametrize("kind", [*AUTO_ROUND, *FOUR_OVER_SIX])
def test_folders_answer_as_the_models_of_their_own_tools_do(kind: str) -> None:
    """AutoRound's with the rotations that it runs, of MXFP4 in blocks of 32, of NVFP4 of 16; not rounding what they turn."""
    expected = torch.tensor(json.loads((DATA / kind / LOGITS).read_text()))
    got = logits_of(DATA / kind, backend="torch", weights="fp32")
    assert expected.std() > 0.3
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
    contents = contents_of(DATA / kind)
    assert contents.kept == (None if kind in AUTO_ROUND else "group4-g16-e4m3-e2m1")
    loaded = load_model(DATA / kind, ComputeConfig(backend="torch", threads=1)).n_parameters
    assert loaded == sum(group.parameters for group in contents.groups)


@pytest.mark.native
def test_four_over_six_keeps_its_four_bits(caplog: pytest.LogCaptureFixture) -> None:
    """As any NVFP4, though its scales go to another largest number."""
    assert "kept=group4-g16-e4m3-e2m1:100.0%" in said_in_use(DATA / "four-over-six", caplog, 0.02)


def test_without_their_rotations_they_answer_otherwise(tmp_path: Path) -> None:
    """So that the test above cannot pass by a rotation that is left out."""
    path = tmp_path / "it"
    shutil.copytree(DATA / "auto-round-mxfp4-hadamard", path)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]["rotation_config"]
    (path / "config.json").write_text(json.dumps(config))
    expected = torch.tensor(json.loads((path / LOGITS).read_text()))
    got = logits_of(path, backend="torch", weights="fp32")
    assert (got - expected).abs().max() > 0.1 * expected.abs().max()
    assert contents_of(path).kept == "group4-g32-e8m0-e2m1"
