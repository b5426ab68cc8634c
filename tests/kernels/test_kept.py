"""Weights that keep the values of another program's quantiser: equal bits however the work is cut, in every kernel set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_balance import reparametrised

from bitsandbytes_files import DATA as BITSANDBYTES
from bitsandbytes_files import fours
from checkpoints import make_checkpoint
from coded_files import Layout, awq, bitnet, block_fp8, gptq, quantised_checkpoints, whole_fp8
from diptych.compute.ops.cpu.kernels import _cpu, instruction_sets
from diptych.compute.runner import load_model
from diptych.engine.load import bundled_dir
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.config import ComputeConfig
from gguf_files import Tensors, gguf_reference, quantised, write_gguf
from stepping import Stepper
from worlds import KERNEL_SETS, alone, beside, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32, "num_hidden_layers": 1}
LAYOUTS: dict[str, tuple[str, Layout]] = {
    "zeros": ("llama", awq(32)),
    "bytes": ("gemma2", gptq(8, -1, symmetric=False)),
    "experts": ("mixtral", gptq(4, 32, symmetric=True)),
    "act-order": ("llama", gptq(4, 32, symmetric=True, act_order=True)),
    "fp8": ("gemma2", whole_fp8()),
    "fp8 blocks": ("mixtral", block_fp8()),
    "ternary": ("bitnet", bitnet()),
    "fp8 blocks, gated latents": ("axk2", block_fp8()),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (family, layout) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(name)
        wide = {"intermediate_size": 160, "num_hidden_layers": 2} | ({"hidden_size": 256} if "blocks" in name else {})
        original = make_checkpoint(family, folder / "original", dtype=torch.bfloat16, **wide)
        made[name] = quantised_checkpoints(original, folder, layout)[0]
    return made | {"nf4": BITSANDBYTES / "nf4"}


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize(
    ("layout", "activations"),
    [*((layout, "auto") for layout in (*LAYOUTS, "nf4")), ("zeros", "int15"), ("experts", "int15")],
)
def test_cut_of_the_work_changes_no_bit(folders: dict[str, Path], layout: str, activations: str, kernels: str) -> None:
    """Few rows meet packed codes and many rows expanded ones; the sums of groups must be the same numbers in the same order."""
    config = ComputeConfig(backend="cpu", threads=2, instruction_set=kernels, activations=activations)
    model = load_model(folders[layout], config)
    assert model.weights_format.startswith(("group", "fp8"))
    assert model.weights_format.endswith("-wide") or activations == "auto"
    tokens = prompt(40)
    whole = alone(model, tokens, None)
    assert whole.logits.std() > 0.1
    for chunk in (5, 16):
        assert not alone(model, tokens, chunk).differs_from(whole), chunk
    assert not beside(model, tokens, 3, 1).differs_from(whole)
    model.close()
    assert not alone(load_model(folders[layout], replace(config, threads=1)), tokens, 1).differs_from(whole)


EXACT = {"backend": "torch", "device": "cpu", "weights": "fp32", "kv": "bf16"}


def logprobs(path: Path, tokens: list[int], **compute: str) -> torch.Tensor:
    model = load_model(path, ComputeConfig(**compute))
    return torch.log_softmax(alone(model, tokens, None).logits.double(), dim=-1)


def divergence(expected: torch.Tensor, got: torch.Tensor) -> float:
    return float((expected.exp() * (expected - got)).sum(-1).mean())


def held_out(n: int) -> list[int]:
    bundled = bundled_dir()
    return Tokenizer.from_dir(bundled).encode((bundled.parent / "heldout.txt").read_text())[:n]


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (8, 128), pytest.param(4, 32, marks=pytest.mark.slow)])
def test_keeping_values_adds_a_tenth_of_what_the_file_s_rounding_cost(
    bits: int, group: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """KL over real text against the file's values in fp32, the cache in bf16 on both sides, as all formats have it.

    Rows of 8 bits (`activations="int8"`) would add more than weights of 8 bits cost themselves: the bound can be missed.
    """
    tokens = held_out(512)
    coded, plain = quantised_checkpoints(bundled_dir(), tmp_path, gptq(bits, group, symmetric=bits == 8))
    values = logprobs(plain, tokens, **EXACT)
    own = divergence(logprobs(bundled_dir(), tokens, **EXACT), values)
    assert divergence(values, logprobs(coded, tokens, backend="cpu")) < 0.1 * own
    assert "as large as the middle one" not in caplog.text
    if bits == 8:
        assert divergence(values, logprobs(coded, tokens, backend="cpu", activations="int8")) > own


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "fp4", "nf4 nested"])
def test_fractions_as_whole_numbers_add_a_tenth_of_what_bitsandbytes_cost(kind: str, tmp_path: Path) -> None:
    """Of its own quantiser: levels of 8 bits for its fractions and rows of 8 bits together."""
    pytest.importorskip("bitsandbytes")
    tokens = held_out(512)
    coded, plain = quantised_checkpoints(bundled_dir(), tmp_path, fours(kind))
    values = logprobs(plain, tokens, **EXACT)
    own = divergence(logprobs(bundled_dir(), tokens, **EXACT), values)
    assert divergence(values, logprobs(coded, tokens, backend="cpu")) < 0.1 * own


@pytest.mark.parametrize("layout", [whole_fp8(), block_fp8()], ids=["whole", "blocks"])
def test_fp8_adds_next_to_nothing_to_its_own_rounding(layout: Layout, tmp_path: Path) -> None:
    """E4M3 has 4 bits, and bf16 8, in which scaled codes are rounded: a 256th of its error, where the rows' own is larger."""
    tokens = held_out(512)
    coded, plain = quantised_checkpoints(bundled_dir(), tmp_path, layout)
    values = logprobs(plain, tokens, **EXACT)
    own = divergence(logprobs(bundled_dir(), tokens, **EXACT), values)
    added = divergence(values, logprobs(coded, tokens, backend="cpu"))
    assert added < 0.02 * own


def test_rows_of_15_bits_keep_a_file_of_4_bits_whose_channels_stand_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Codes that are kept cannot be balanced: channels of 64 times the rest take their groups' levels in rows of 8 bits.

    Where the norms show it the log says so.
    """
    tokens = held_out(256)
    planted = reparametrised(bundled_dir(), tmp_path / "planted", factor=64.0)
    coded, plain = quantised_checkpoints(planted, tmp_path / "coded", gptq(4, 128, symmetric=True))
    values = logprobs(plain, tokens, **EXACT)
    own = divergence(logprobs(planted, tokens, **EXACT), values)
    added, said = [], []
    for rows in ("auto", "int15"):
        caplog.clear()
        added.append(divergence(values, logprobs(coded, tokens, backend="cpu", activations=rows)))
        said.append("as large as the middle one" in caplog.text)
    assert added[1] < 0.02 * own
    assert added[0] > 0.2 * own
    assert said == [True, False]


@pytest.mark.parametrize(("norm", "is_told"), [("input_layernorm", True), ("post_attention_layernorm", False)])
def test_large_channels_are_told_of_norms_that_projections_read(
    norm: str, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma norms what attention and MLP give, too, by weights that spread far; no row is made of that."""
    original = make_checkpoint("gemma2", tmp_path / "original", dtype=torch.bfloat16, num_hidden_layers=2)
    tensors = load_file(original / "model.safetensors")
    tensors[f"model.layers.1.{norm}.weight"][3] = 100.0
    save_file(tensors, original / "model.safetensors", metadata={"format": "pt"})
    coded, _ = quantised_checkpoints(original, tmp_path, gptq(4, 32, symmetric=True))
    load_model(coded, ComputeConfig(backend="cpu", threads=1)).close()
    assert ("as large as the middle one" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"group": 128}, "at most 64"),
        ({"grid": "zeros"}, "no zeros"),
        ({"grid": "minima16"}, "as many"),
        ({"scale": "f32", "grid": "minima16"}, "as many"),
        ({"scale": "e8m0", "grid": "zeros"}, "neither zeros nor minima"),
        ({"scale": "e8m0", "grid": "minima"}, "neither zeros nor minima"),
        ({"scale": "e8m0", "grid": "minima16"}, "neither zeros nor minima"),
        ({"scale": "e8m0", "format": "int8"}, "in groups"),
    ],
    ids=str,
)
def test_scales_that_no_head_holds_are_refused(given: dict[str, Any], said: str) -> None:
    """Four groups share a line of factors, each of 256 inputs; powers of two have nothing beside them."""
    with pytest.raises(ValueError, match=said):
        _cpu.LinearShape(n=32, k=512, **({"format": "group4", "scale": "s8", "group": 32} | given))


@pytest.mark.parametrize(
    ("scale", "grid", "scales", "offsets"),
    [
        ("e8m0", "e2m1", torch.bfloat16, None),
        ("e8m0", "e2m1", torch.int8, None),
        ("bf16", "minima16", torch.bfloat16, torch.float32),
        ("bf16", "minima16", torch.bfloat16, torch.float16),
        ("f16", "minima", torch.float16, torch.float16),
    ],
    ids=str,
)
def test_numbers_of_another_type_than_the_shape_says_are_refused(
    scale: str, grid: str, scales: torch.dtype, offsets: torch.dtype | None
) -> None:
    """They would be read as other numbers, or behind their end."""
    shape = _cpu.LinearShape(format="group4", n=32, k=64, group=32, scale=scale, grid=grid)
    beside = None if offsets is None else torch.ones(32, 2, dtype=offsets)
    with pytest.raises(ValueError, match="another type than the shape"):
        _cpu.Program("scalar", 1).add_coded_linear(
            shape, [(torch.zeros(32, 64, dtype=torch.uint8), torch.ones(32, 2, dtype=scales), beside, None)], None
        )


# every table of levels, every width, with minima and without, scales as they are and nested
HEADS = (
    "Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ1_S",
    "IQ2_XS", "IQ3_XXS", "IQ3_S", "IQ4_NL", "MXFP4", "NVFP4", "TQ1_0",
)  # fmt: skip


@pytest.fixture(scope="module", params=HEADS)
def tied_and_apart(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A file whose embedding in blocks is the head, and one with the same values in two tables."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    reference, blocks = gguf_reference("llama", tie_word_embeddings=True, **WIDE), gguf.GGMLQuantizationType[kind]

    def apart(tensors: Tensors) -> Tensors:
        table = tensors["token_embd.weight"]
        return tensors | {
            "token_embd.weight": gguf.dequantize(quantised(table, blocks), blocks),
            "output.weight": table,
        }

    return (
        write_gguf(reference, folder / "tied.gguf", choose=lambda name: kind if name == "token_embd.weight" else "F32"),
        write_gguf(
            reference, folder / "two.gguf", choose=lambda name: kind if name == "output.weight" else "F32", change=apart
        ),
    )


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_an_embedding_in_blocks_lies_in_the_head_that_it_is_tied_to(
    tied_and_apart: tuple[Path, Path], kernels: str
) -> None:
    """A table of its own took as much again as the head; not one bit may tell, whether tokens come at once or one by one."""
    tokens, logits, sizes = list(range(3, 60)), [], []
    for path in tied_and_apart:
        model = load_model(path, ComputeConfig(backend="cpu", threads=1, instruction_set=kernels))
        steppers = [Stepper(model), Stepper(model)]
        logits += [steppers[0].prefill("it", tokens, chunk=None), steppers[1].prefill("it", tokens, chunk=1)]
        sizes.append(model.program.table_bytes)
        model.close()
    assert all(torch.equal(answer, logits[0]) for answer in logits)
    assert sizes[0] == 0 < sizes[1]


@pytest.mark.parametrize(
    "coded", [{"format": "fp8", "group": 0}, {"format": "group4", "group": 32}], ids=["fp8", "group4"]
)
def test_values_are_refused_where_codes_are_meant(coded: dict[str, Any]) -> None:
    """They were packed as nothing at all."""
    with pytest.raises(ValueError, match="codes"):
        _cpu.Program("scalar", 1).add_linear(_cpu.LinearShape(**coded, n=32, k=32), [torch.ones(32, 32)])


def test_rows_of_blocks_of_fp8_that_share_a_strip_share_their_scales() -> None:
    scales = torch.ones(32, 2)
    scales[3, 1] = 2.0
    shape = _cpu.LinearShape(format="fp8", group=128, n=32, k=256)
    with pytest.raises(ValueError, match="several scales"):
        _cpu.Program("scalar", 1).add_coded_linear(
            shape, [(torch.zeros(32, 256, dtype=torch.uint8), scales, None, None)], None
        )
