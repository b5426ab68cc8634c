"""DeepSeek V4 as it is published: names of its own, fp8 in blocks with powers of two, experts in pairs of four bits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from checkpoints import make_checkpoint
from coded_files import Tensors, block_fp8, damaged, logits_of
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.models.contents import contents_of

# what `inference/model.py` of its publisher calls otherwise than transformers saves it
PUBLISHED = {
    "model.embed_tokens.": "embed.",
    "model.hc_head.hc_": "hc_head_",
    "model.": "",
    ".attn.norm.": ".attn.kv_norm.",
}
IN_FP8 = re.compile(r"attn\.(w[qo]_[ab]|wkv|indexer\.wq_b)\.weight|shared_experts\.w[123]\.weight")
IN_FP4 = re.compile(r"\.experts\.\d+\.w[123]\.weight")


def fp4(n: int, k: int, seed: int) -> tuple[Tensors, torch.Tensor]:
    """Every code, and scales around 2^-5; oracle: transformers."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(-128, 128, (n, k // 2), generator=generator, dtype=torch.int8)
    scales = torch.randint(121, 124, (n, k // 32), generator=generator, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return {"weight": pairs, "scale": scales}, Fp8Dequantize(None)._dequantize_one(pairs, scales, torch.float32)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(as it is published, plain fp32 of the same values as transformers saves them)."""
    folder = tmp_path_factory.mktemp("both")
    original = make_checkpoint("deepseek_v4", folder / "original", moe_intermediate_size=64, intermediate_size=64)
    config = json.loads((original / "config.json").read_text())
    layout = block_fp8(in_powers=True)
    coded: Tensors = {"mtp.0.norm.weight": torch.ones(64)}
    plain: Tensors = {}
    for seed, (name, tensor) in enumerate(sorted(load_file(original / "model.safetensors").items())):
        parts, values = {"weight": tensor}, tensor
        if IN_FP4.search(name):
            parts, values = fp4(*tensor.shape, seed)
        elif IN_FP8.search(name):
            parts, values = layout.write(tensor)
            parts["scale"] = parts.pop("weight_scale_inv")
        theirs = name
        for ours, own in PUBLISHED.items():
            theirs = theirs.replace(ours, own)
        root = theirs.removesuffix("weight")
        coded |= {theirs if one == "weight" else f"{root}{one}": part.contiguous() for one, part in parts.items()}
        plain[name] = values.contiguous()
    section = {**layout.config, "scale_fmt": "ue8m0"}
    for path, tensors, more in (
        (folder / "coded", coded, {"quantization_config": section, "expert_dtype": "fp4"}),
        (folder / "plain", plain, {}),
    ):
        shutil.copytree(original, path)
        (path / "config.json").write_text(json.dumps({**config, **more}))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return folder / "coded", folder / "plain"


def test_published_files_have_the_values_of_plain_ones(both: tuple[Path, Path]) -> None:
    """Bit for bit in fp32; the kernels keep the codes, and lie near."""
    coded, plain = both
    exact = logits_of(plain, backend="torch", weights="fp32")
    assert torch.equal(logits_of(coded, backend="torch", weights="fp32"), exact)
    if instruction_sets():
        kept = logits_of(coded, backend="cpu")
        assert (kept - exact).abs().mean() < 0.1 * exact.std()
        model = load_model(coded, ComputeConfig(backend="cpu", threads=1))
        assert set(model.formats) == {"fp8-g128", *model.expert_formats}
        assert set(model.expert_formats) == {"group4-g32-e8m0-e2m1"}


def test_what_lies_there_is_counted_without_loading(both: tuple[Path, Path]) -> None:
    counted = [sum(group.parameters for group in contents_of(one).groups) for one in both]
    loaded = [load_model(one, ComputeConfig(backend="torch", device="cpu")).n_parameters for one in both]
    assert counted[1] == loaded[0] == loaded[1]


def test_experts_without_scales_are_refused(both: tuple[Path, Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(both[0], tmp_path / "other"))
    damaged(other, lambda tensors: tensors.pop("layers.1.ffn.experts.2.w3.scale"))
    with pytest.raises(LoadError, match=r"experts\.2\.w3"):
        load_model(other, ComputeConfig(backend="torch", device="cpu"))
