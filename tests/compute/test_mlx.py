"""Folders that mlx-lm wrote give the logits that it gives; what is not undone of what it does to a family is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coded_files import said_in_use
from diptych.compute.formats.coded import CodedCheckpoint
from diptych.compute.formats.mlx import WITH_ONE_ADDED
from diptych.compute.loading.quant import save_quantised
from diptych.compute.ops.contract import LinearParts
from diptych.compute.ops.torch.device_codes import CodedWeight
from diptych.compute.ops.torch.loader import TorchLoader
from diptych.compute.runner import load_model
from diptych.cost.parameters import parameter_count
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.models.config import HfConfig, read_json
from diptych.models.contents import contents_of
from diptych.models.quantised.method import quantisation_of
from diptych.models.read import load_model_file
from mlx_files import DATA, KINDS, PROMPT, logits_by_mlx, quantise
from stepping import Stepper

REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
HELD = {"2 bits": "group2-g32-bf16-minima16", "3 bits": "group3-g32-bf16-minima16", "4 bits": "group4-g32-bf16-minima16",
        "5 bits": "group5-g32-bf16-minima16", "6 bits": "group6-g32-bf16-minima16-wide",
        "8 bits": "group8-g32-bf16-minima-wide", "powers": "group4-g32-e8m0-e2m1", "nvfp4": "group4-g16-e4m3-e2m1"}  # fmt: skip


def folder_of(kind: str) -> Path:
    """As it is shipped."""
    return DATA / kind.replace(" ", "-")


def check_logits(folder: Path) -> None:
    """Ours are mlx-lm's."""
    expected = logits_by_mlx(folder)
    got = Stepper(load_model(folder, REFERENCE)).prefill("it", PROMPT, chunk=None)
    assert expected.std() > 0.3
    assert (got - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_the_logits_that_mlx_gives(kind: str) -> None:
    """Codes across words, stacked experts and heads, a router of other bits, norms plus 1, taps with turned axes."""
    check_logits(folder_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_holds_as_many_parameters_as_its_model_has(kind: str) -> None:
    """Matrices with bits and groups of their own are counted by those."""
    contents = contents_of(folder_of(kind))
    assert sum(group.parameters for group in contents.groups) == parameter_count(load_model_file(folder_of(kind)))


@pytest.mark.native
@pytest.mark.parametrize("kind", [kind for kind, (_, bits, _) in KINDS.items() if bits is not None and kind != "mxfp8"])
def test_values_are_kept_and_the_log_says_so(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Scales in bf16 and what code 0 stands for, per group, as the file has them."""
    said = said_in_use(folder_of(kind), caplog, 0.06)
    assert "kept=" + HELD.get(kind, "group4-g32-bf16-minima16") in said
    assert said.endswith("the kernels hold the file's values")


@pytest.mark.native
def test_floats_of_8_bits_in_groups_go_to_bf16_which_holds_them(caplog: pytest.LogCaptureFixture) -> None:
    """E4M3 times a power of two has no more than 4 bits."""
    path = folder_of("mxfp8")
    said = said_in_use(path, caplog, 0.06)
    assert (
        "stored=mxfp8:100.0% at 8.25 bits per weight, kept=bf16:100.0% at 16.00, because no kernel has blocks of 1 by 32"
        in said
    )
    how = quantisation_of(HfConfig(read_json(path / "config.json")))
    assert how is not None
    exact, rounded = (
        CodedCheckpoint(path, how, dtype=dtype).tensor(f"{Q}.weight", 96, 64).read()
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert exact.count_nonzero()
    assert torch.equal(exact, rounded.float())


OTHER_TYPES = {
    "alike": (torch.float16, torch.float16, "f16-minima16", "gpu4-g32-f16-minima"),
    "wider": (torch.float16, torch.float32, "f16-minima", "gpu4-g32-f32-minima"),
    "other": (torch.bfloat16, torch.float16, "bf16-minima", "gpu4-g32-f32-minima"),
    "wide": (torch.float32, torch.float32, "f32-minima", "gpu4-g32-f32-minima"),
}


@pytest.mark.parametrize(("scales", "biases", "kept", "on_gpu"), OTHER_TYPES.values(), ids=OTHER_TYPES)
def test_offsets_of_another_type_than_the_scales_are_held_whole(
    scales: torch.dtype, biases: torch.dtype, kept: str, on_gpu: str, tmp_path: Path
) -> None:
    """16 bits may not hold them: a GPU's loader ended in an assertion."""

    def as_others(tensors: dict[str, torch.Tensor]) -> None:
        numbers = torch.Generator().manual_seed(1)
        for name, one in tensors.items():
            kind = {"scales": scales, "biases": biases}.get(name.rpartition(".")[2])
            if kind is not None:
                tensors[name] = (one.float() * (1 + 0.01 * torch.rand(one.shape, generator=numbers))).to(kind)

    path = damaged(tmp_path, as_others)
    how, tensors = quantisation_of(HfConfig(read_json(path / "config.json"))), load_file(path / "model.safetensors")
    assert how is not None
    matrix = CodedCheckpoint(path, how, dtype=torch.bfloat16).tensor(f"{Q}.weight", 96, 64)
    assert matrix.kept is not None
    assert matrix.kept.name == f"group4-g32-{kept}"
    codes = matrix.codes()
    assert codes.offsets is not None
    assert torch.equal(codes.offsets.to(biases), tensors[f"{Q}.biases"])
    held = TorchLoader(torch.device("cpu"), torch.bfloat16, keeps_codes=True).linear(LinearParts(weights=(matrix,)))
    assert isinstance(held.weight, CodedWeight)
    assert held.weight.format.name == on_gpu
    offsets = held.weight.heads.T.contiguous().view(biases)[:, 1::2] if held.weight.more is None else held.weight.more.T
    assert torch.equal(offsets[:, :2].to(biases), tensors[f"{Q}.biases"])


def damaged(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], kind: str = "4 bits") -> Path:
    """A copy with other tensors."""
    path = tmp_path / "damaged"
    shutil.copytree(folder_of(kind), path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:, :1].clone()}), r"q_proj.biases is BF16 \[96, 2\]; .*\[96, 1\]"),
        (lambda t: t.update({f"{Q}.scales": torch.ones(96, 5)}), "with 5 scales a row; 96 by 64 codes"),
        (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:, :7].clone()}), r"weight is U32 \[96, 7\] with 2 scales"),
        (lambda t: t.pop(f"{Q}.biases"), "q_proj.biases is missing"),
        (lambda t: t.pop(f"{Q}.weight"), "q_proj.weight is missing"),
        (lambda t: t[f"{Q}.biases"].fill_(torch.nan), "has a scale that is not finite"),
        (lambda t: t.update({f"{Q}.scales": torch.tensor(1.0)}), r"q_proj.scales is F32 \[\]; .* \[96, 64\]"),
        (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:, 0].clone()}), r"q_proj.weight is U32 \[96\]; .* \[96, 64\]"),
        (lambda t: t.update(beside=torch.ones(3)), "does not call for, the first is beside"),
    ],
    ids=lambda one: one if isinstance(one, str) else "changed",
)  # fmt: skip
def test_what_is_wrong_with_a_matrix_is_said(
    change: Callable[[dict[str, torch.Tensor]], None], said: str, tmp_path: Path
) -> None:
    """Before anything is loaded of it."""
    with pytest.raises(LoadError, match=said):
        load_model(damaged(tmp_path, change), REFERENCE)


@pytest.mark.parametrize(
    ("kind", "name", "change", "said"),
    [
        ("mxfp8", f"{Q}.scales", lambda one: one.fill_(255), "q_proj.scales has a scale that is not finite"),
        (
            "mxfp8",
            f"{Q}.weight",
            lambda one: one.view(torch.uint8).fill_(127).view(one.dtype),
            "q_proj.weight has a value that is no number",
        ),
        ("mxfp8", f"{Q}.scales", lambda one: one[:, :1].clone(), r"q_proj.scales is U8 \[96, 1\]; U8 \[96, 2\]"),
        ("mxfp8", f"{Q}.weight", lambda one: one[:, :9].clone(), r"q_proj.weight is U32 \[96, 9\]; U32 \[96, 8\]"),
        ("nvfp4", f"{Q}.scales", lambda one: one.fill_(128), "q_proj.scales has a scale that is negative"),
    ],
)
def test_what_is_wrong_with_floats_is_said(
    kind: str, name: str, change: Callable[[torch.Tensor], torch.Tensor], said: str, tmp_path: Path
) -> None:
    """No number comes of what is none."""
    with pytest.raises(LoadError, match=said):
        load_model(damaged(tmp_path, lambda tensors: tensors.update({name: change(tensors[name])}), kind), REFERENCE)


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
def test_experts_that_are_too_few_are_refused(part: str, tmp_path: Path) -> None:
    """A stack is cut by its first axis."""

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if f"switch_mlp.up_proj.{part}" in name]:
            tensors[name] = tensors[name][:5].clone()

    with pytest.raises(LoadError, match=rf"up_proj\.{part} has 5 entries; entry 5 is asked for"):
        load_model(damaged(tmp_path, cut, "experts"), REFERENCE)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mode": "mxfp6"}, "mode in quantization of .* is 'mxfp6'; 'affine' or 'mxfp4' or 'nvfp4' or 'mxfp8' can be read"),
        ({"mode": "mxfp8", "group_size": 32, "bits": 4}, "bits in quantization of .* is 4; 8 can be read"),
        ({"mode": "mxfp4", "group_size": 64}, "group_size in quantization of .* is 64; 32 can be read"),
        ({"bits": 7}, "bits in quantization of .* is 7"),
        ({"group_size": 48}, "group_size in quantization of .* is 48"),
        ({"model.layers.0.mlp.up_proj": {"mode": "int4"}}, "mode in model.layers.0.mlp.up_proj .* is 'int4'"),
        ({"model.layers.0.mlp.up_proj": {"mode": "nvfp4", "global_scale": True}}, "global_scale in model.layers.0.mlp.up_proj"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(fields: dict[str, object], said: str, tmp_path: Path) -> None:
    """Formats whose scales are floats of 8 bits, codes that are, and groups that no kernel has."""
    path = tmp_path / "it"
    shutil.copytree(folder_of("4 bits"), path)
    config = json.loads((path / "config.json").read_text())
    how = {**config["quantization"], **fields}
    (path / "config.json").write_text(json.dumps({**config, "quantization": how, "quantization_config": how}))
    with pytest.raises(LoadError, match=said):
        load_model(path, REFERENCE)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("FalconH1ForCausalLM", "falcon_h1"),  # whose multipliers are in the weights there, and in the config still
        ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),  # whose correction of choices it drops
        ("DbrxForCausalLM", "dbrx"),  # whose experts it takes apart
        ("GPT2LMHeadModel", "gpt2"),
        ("Gemma3nForCausalLM", "gemma3n_text"),
    ],
)
def test_a_family_that_mlx_rewrites_is_refused(architecture: str, kind: str, tmp_path: Path) -> None:
    """By name, before a tensor of another shape or meaning is."""
    path = tmp_path / "it"
    shutil.copytree(folder_of("4 bits"), path)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": [architecture], "model_type": kind}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=f"mlx-lm rewrites what {kind} loads"):
        load_model(path, REFERENCE)


def test_a_folder_whose_taps_lie_as_they_were_has_nothing_added(tmp_path: Path) -> None:
    """mlx-lm adds 1 to norms where it turns taps; what another program quantised in its layout may have done neither."""

    def as_published(tensors: dict[str, torch.Tensor]) -> None:
        for name, one in tensors.items():
            if name.endswith("conv1d.weight"):
                tensors[name] = one.movedim(2, 1).contiguous()
            elif name.endswith(WITH_ONE_ADDED):
                tensors[name] = one.float() - 1

    got = Stepper(load_model(damaged(tmp_path, as_published, "delta"), REFERENCE)).prefill("it", PROMPT, chunk=None)
    expected = logits_by_mlx(folder_of("delta"))
    assert (got - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.slow
@pytest.mark.native
def test_floats_that_it_left_are_packed_as_loading_packs_them(tmp_path: Path) -> None:
    """`diptych quantize` read the folder as no other program's, and said that its config contradicts it."""
    save_quantised(folder_of("plain"), tmp_path / "packed", weights="int8", threads=1)
    said = []
    for path, weights in ((folder_of("plain"), "int8"), (tmp_path / "packed", "auto")):
        model = load_model(path, ComputeConfig(backend="cpu", weights=weights, threads=1))
        said.append(Stepper(model).prefill("it", PROMPT, chunk=None).clone())
    assert torch.equal(*said)
    with pytest.raises(LoadError, match="quantised already, with 'mlx'"):
        save_quantised(folder_of("4 bits"), tmp_path / "again", weights="int8")


@pytest.mark.parametrize("kind", KINDS)
def test_what_mlx_writes_now_is_read(kind: str, tmp_path: Path) -> None:
    """Fresh from the package."""
    pytest.importorskip("mlx_lm")
    check_logits(quantise(tmp_path, kind))
