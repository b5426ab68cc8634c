"""Every family on the cpu backend against transformers in fp32: equal bits prove nothing if the numbers are wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import FAMILIES, MORE_FAMILIES, make_checkpoint, make_reference
from compute.golden import Golden, ask_reference, make_golden
from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from stepping import Stepper
from worlds import KERNEL_SETS

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu_kernels.is_available()[0], reason=cpu_kernels.is_available()[1]),
]

# |ours - fp32| / |fp32| over all logits. With bf16 activations a router sometimes picks another of two nearly equal experts: in
# 1 to 2 % of the choices here, with the router's product in bf16 or in fp32 alike, and in transformers' bf16 too (up to 0.18).
DENSE_TOLERANCE = 0.04
MIXTURE_TOLERANCE = 0.2
MIXTURES = (
    "mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "flex_olmo", "gemma4-a4b", "granitemoe", "ernie4_5_moe", "glm4_moe",
    "gpt_oss",
    "deepseek_v2", "deepseek_v3", "solar_open", "dots1", "minimax_m2", "hunyuan_v1_moe", "glm4_moe_lite", "llama4",
    "qwen3_next", "qwen3_5_moe", "nemotron-3", "kimi_linear",
    "granitemoe_swa", "exaone_moe", "mellum", "flint", "afmoe",
    "cohere2_moe", "cohere2_moe-sums", "kolibri1", "axk1", "axk2",
    "phimoe", "hy_v3", "mistral4", "deepseek_v32", "glm_moe_dsa", "mimo_v2_flash", "minimax_m3", "step3p7",
    "laguna", "laguna-m", "aria", "hy_v4", "bailing_hybrid", "glm5_next", "qwen4_exp", "longcat_flash", "dbrx",
    "deepseek_v4", "mistral_large4", "muse_spark", "sarvam_moe", "sarvam_mla", "lara_mini",
)  # fmt: skip
# These choose twice in each layer, whom to attend to and which experts to ask, and drawn weights make many choices close: 0.02
# where nothing is chosen (which is held to the dense bound below), up to 0.19 by either alone, 0.07 to 0.38 by both, on every
# set, scalar as well. More chosen, and experts that weigh less, leave 0.04 to 0.13; without the index it would be 0.7.
INDEXED = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "glm5_next", "mistral_large4")
LESS_BY_CHANCE = {"index_topk": 24, "routed_scaling_factor": 1.0}
NOTHING_CHOSEN = {"index_topk": 64, "first_k_dense_replace": 3}
ALL_DENSE = {  # by the key that these have
    family: {"index_topk": 64, "mlp_layer_types": ["dense"] * n}
    for family, n in (("hy_v4", 3), ("glm5_next", 5), ("mistral_large4", 5))
}
TIED = ("qwen3", "gemma2", "gemma3", "smollm3")
ALL = (*FAMILIES, *MORE_FAMILIES)


@pytest.mark.parametrize(
    ("family", "dtype"), [*((f, torch.float32) for f in ALL), *((f, torch.bfloat16) for f in TIED)], ids=str
)
def test_family_agrees_with_transformers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """bf16 weights and activations: logits close everywhere, and the same greedy token wherever fp32 is clear about it.

    A tied head serves as the embedding too where the file is in bf16.
    """
    if dtype == torch.float32:
        golden = make_golden(family, tmp_path, new_tokens=8, **(LESS_BY_CHANCE if family in INDEXED else {}))
    else:
        oracle = make_reference(family)
        with torch.no_grad():
            for parameter in oracle.parameters():  # not oracle.to(): rotary frequencies stay in fp32
                parameter.copy_(parameter.to(dtype))
        golden = ask_reference(oracle, make_checkpoint(family, tmp_path, dtype=dtype), new_tokens=8)
    agree(golden, MIXTURE_TOLERANCE if family in MIXTURES else DENSE_TOLERANCE)


@pytest.mark.parametrize("family", INDEXED)
def test_layers_with_an_index_agree_where_nothing_is_chosen(family: str, tmp_path: Path) -> None:
    """As near as any dense model: what is farther above comes of choices alone."""
    nothing = ALL_DENSE.get(family, NOTHING_CHOSEN)
    agree(make_golden(family, tmp_path, new_tokens=8, **nothing), DENSE_TOLERANCE)


def agree(golden: Golden, tolerance: float) -> None:
    """Raises where the logits of the whole text, or a clear greedy token, are others."""
    model = load_model(golden.path, ComputeConfig(backend="cpu", weights="bf16", threads=1))
    text = golden.prompt + golden.greedy
    logits = Stepper(model).prefill("it", text[:-1], chunk=None)
    difference = logits - golden.logits
    relative = (difference.norm() / golden.logits.norm()).item()
    assert relative < tolerance
    best = golden.logits.topk(2, dim=-1)
    is_clear = best.values[:, 0] - best.values[:, 1] > 2 * difference.abs().amax(dim=-1)
    assert is_clear.sum() >= len(text) // 8, "too few clear positions; the test would see nothing"
    assert torch.equal(logits.argmax(dim=-1)[is_clear], best.indices[:, 0][is_clear])
    model.close()


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("family", TIED)
def test_tied_head_answers_as_a_table_beside_it(family: str, name: str, tmp_path: Path) -> None:
    """The packed head is the only copy of a tied bf16 embedding; not one bit may tell."""
    path = make_checkpoint(family, tmp_path / "tied", dtype=torch.bfloat16)
    separate = Path(shutil.copytree(path, tmp_path / "separate"))
    config = json.loads((path / "config.json").read_text())
    (separate / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": table.clone()}, separate / "model.safetensors")
    prompt = torch.randint(len(table), (41,), generator=torch.Generator().manual_seed(0)).tolist()
    logits, sizes = [], []
    for directory in (path, separate):
        model = load_model(directory, ComputeConfig(backend="cpu", threads=1, instruction_set=name))
        steppers = [Stepper(model), Stepper(model)]
        logits += [steppers[0].prefill("it", prompt, chunk=None), steppers[1].prefill("it", prompt, chunk=1)]
        sizes.append(model.program.table_bytes)
        model.close()
    assert all(torch.equal(answer, logits[0]) for answer in logits)
    assert sizes[1] - sizes[0] == table.nbytes
