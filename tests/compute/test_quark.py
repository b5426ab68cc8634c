"""Checkpoints of AMD's Quark: whole numbers by row, MXFP6 and MXFP8, and gpt-oss with its experts one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from coded_files import Layout, Tensors, check_in_use, check_values, damaged, logits_of, quantised_checkpoints
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.contents import contents_of
from diptych.models.quantised.method import quantisation_of
from quark_files import MX, by_row, gpt_oss_of_quark, int8_alone, mx, with_weights

# layout -> how it is made, and what holds it
LAYOUTS: dict[str, tuple[Callable[[], Layout], str | None]] = {
    "int4 rows": (lambda: by_row("int4"), "group4-g128-f16"),
    "uint4 rows": (lambda: by_row("uint4"), "group4-g128-f16-zeros"),
    "uint4 rows in order": (lambda: by_row("uint4", in_order=True), "group4-g128-f16-zeros"),
    "int8 alone": (int8_alone, "group8-g128-bf16-wide"),
    "mxfp6 e2m3": (lambda: mx("fp6_e2m3"), "group8-g32-bf16-wide"),
    "mxfp6 e3m2": (lambda: mx("fp6_e3m2"), None),
    "mxfp8": (lambda: mx("fp8_e4m3"), None),
}
DOWN = "model.layers.0.mlp.down_proj."


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("plain"), dtype=torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_values_of_its_own_formula(layout: str, original: Path, tmp_path: Path) -> None:
    """They were refused by name."""
    make, kept = LAYOUTS[layout]
    coded, plain = quantised_checkpoints(original, tmp_path, make())
    check_values(coded, plain, kept)


@pytest.mark.native
@pytest.mark.parametrize("layout", ["uint4 rows", "int8 alone", "mxfp6 e2m3", "mxfp6 e3m2"])
def test_kept_weights_answer_as_their_values_do(
    layout: str, original: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the kernels, within what rows of few bits cost."""
    make, kept = LAYOUTS[layout]
    check_in_use(*quantised_checkpoints(original, tmp_path, make()), kept, caplog)


@pytest.mark.parametrize("in_order", [False, True])
def test_words_that_are_filled_up_are_read(tmp_path: Path, in_order: bool) -> None:
    """Sides that eights do not divide: a row's last codes, and the last zero points."""
    sizes = {"intermediate_size": 100, "hidden_size": 52, "head_dim": 26}
    original = make_checkpoint("llama", tmp_path / "plain", dtype=torch.bfloat16, **sizes)
    coded, plain = quantised_checkpoints(original, tmp_path / "made", by_row("uint4", in_order=in_order))
    exact = logits_of(plain, backend="torch", weights="fp32")
    assert torch.equal(logits_of(coded, backend="torch", weights="fp32"), exact)


def test_experts_of_gpt_oss_are_read_one_by_one(tmp_path: Path) -> None:
    """Rows of gate and up lie in turn, as in OpenAI's blocks; it was refused for its names."""
    coded, published = gpt_oss_of_quark(tmp_path)
    wanted = logits_of(published, backend="torch", weights="fp32")
    assert torch.equal(logits_of(coded, backend="torch", weights="fp32"), wanted)
    if instruction_sets():
        assert torch.equal(logits_of(coded, backend="cpu"), logits_of(published, backend="cpu"))
    counted = sum(group.parameters for group in contents_of(coded).groups)
    sizes = [load_model(path, ComputeConfig(backend="torch", threads=1)).n_parameters for path in (coded, published)]
    assert [counted, counted] == sizes


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("int4 rows", lambda t: t.pop(f"{DOWN}weight_scale"), "weight_scale is missing"),
        ("int4 rows", lambda t: t.update({f"{DOWN}weight_scale": torch.ones(64, 1)}), r"weight_scale is F32 \[64, 1\]"),
        (
            "int4 rows",
            lambda t: t.update({f"{DOWN}weight": t[f"{DOWN}weight"].T.contiguous()}),
            r"weight is I32 \[12, 64\]",
        ),
        ("mxfp6 e3m2", lambda t: t[f"{DOWN}weight_scale"].fill_(255), "has a scale that is not finite"),
        ("mxfp6 e3m2", lambda t: t.pop(f"{DOWN}weight_scale"), "weight_scale is missing"),
    ],
)
def test_damaged_codes_are_refused(
    layout: str, change: Callable[[Tensors], object], message: str, original: Path, tmp_path: Path
) -> None:
    """What, the number and the limit, by the names that the file has."""
    coded, _ = quantised_checkpoints(original, tmp_path, LAYOUTS[layout][0]())
    damaged(coded, change)
    with pytest.raises(LoadError, match=message):
        logits_of(coded, backend="torch", weights="fp32")


@pytest.mark.parametrize(
    ("weight", "more", "message"),
    [
        ({"dtype": "int4", "qscheme": "per_tensor"}, {}, "qscheme .* is 'per_tensor'; 'per_group' can be read"),
        ({"dtype": "int4", "qscheme": "per_channel", "ch_axis": 1}, {}, "ch_axis .* is 1; 0 or None"),
        ({"dtype": "fp8_e5m2", **MX}, {}, "dtype .* is 'fp8_e5m2'"),
        ({"dtype": "fp6_e2m3", **MX, "group_size": 16}, {}, "group_size .* is 16; 32 can be read"),
        (
            {"dtype": "fp6_e2m3", **MX},
            {"layer_quant_config": {"*v_proj": {"weight": {"dtype": "fp6_e3m2", **MX}}}},
            "layer_quant_config .* one kind of floats of 6 bits",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(weight: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        quantisation_of(HfConfig({"quantization_config": {**with_weights(weight), **more}}))
