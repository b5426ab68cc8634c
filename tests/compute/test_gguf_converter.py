"""The converter of llama.cpp itself makes the file: what `tests/gguf_files.py` does in its words, held against it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from golden import ask_reference, check_golden
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint, make_reference
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.models.gguf.checkpoint import load_gguf_spec
from diptych.models.gguf.file import open_gguf
from gguf_files import ARCHITECTURES, gguf_reference, write_gguf
from llama_cpp import llama_cpp_source
from republished import REPUBLISHED

pytestmark = pytest.mark.slow
# without words: the converter knows tokenizers by a digest, and a random model has none that it knows
CONVERT = """
import json
import sys
from pathlib import Path
import torch
source, folder, out, kind = sys.argv[1:]
sys.path[:0] = [source, source + "/gguf-py"]
import gguf
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
from conversion.llama import LlamaModel
with torch.inference_mode():
    hparams = ModelBase.load_hparams(Path(folder), False)
    made = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    LlamaModel.set_vocab = made.set_vocab = lambda self: None
    made.no_mtp = True
    given = json.loads((Path(folder) / "config.json").read_text())
    # the classes of transformers add what the file has not, and have other words for layers
    more = {"hparams": given} if given["model_type"] in ("nemotron_h", "granitemoehybrid", "gpt_neox") else {}
    if given["model_type"] == "exaone":  # it wants a word of either
        more = {"hparams": {**hparams, **given}}
    made(Path(folder), getattr(gguf.LlamaFileType, kind), Path(out), eager=True, **more).write()
"""


# keys that the converter wants, which published files have and transformers does not write
PUBLISHED = {
    "cohere2": {"rotary_pct": 1.0},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "gemma4": {"global_head_dim": 24, "num_global_key_value_heads": 1},
    "gemma4-e2b": {"global_head_dim": 24},
    "gpt2": {"n_ctx": 256},
    "falcon": {"num_kv_heads": 1},
    "mpt": {"architectures": ["MPTForCausalLM"]},
    "hunyuan_v1_moe": {"moe_intermediate_size": [40] * 3, "moe_topk": [3] * 3, "num_shared_expert": [1] * 3},
}


def publish_kimi(folder: Path, config: Any) -> dict[str, Any]:
    """Puts the dense layer's MLP where published files have it; the keys that they have beside what transformers writes."""
    file = folder / "model.safetensors"
    dense = re.compile(r"block_sparse_moe\.(?=(gate|up|down)_proj)")
    tensors = {dense.sub("mlp.", name): one.clone() for name, one in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    numbers = [(i + 1, kind) for i, kind in enumerate(config.layer_types)]
    return {
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "full_attn_layers": [i for i, kind in numbers if kind == "full_attention"],
            "kda_layers": [i for i, kind in numbers if kind == "linear_attention"],
            "head_dim": config.linear_head_dim,
            "num_heads": config.linear_num_heads,
            "short_conv_kernel_size": config.linear_conv_kernel_dim,
        },
    }


# the converter loses the norms of stablelm-2-12b: it returns what stacks them from a function that yields; and of mistral4 what
# scales queries by their positions; of the others it wants the keys and names of published files, which transformers does not
# write, or has no key for layers that share a choice
UNCONVERTED = ("stablelm-2-12b", "mistral4", "mimo_v2_flash", "step3p7", "glm_moe_dsa")
# it does not know the first, and of the second only files that say how wide MLPs are in parts of the model's width
UNKNOWN = ("mimo", "nemotron-nas")


@pytest.mark.parametrize("family", [family for family in ARCHITECTURES if family not in UNCONVERTED])
def test_a_converted_checkpoint_has_its_logits(family: str, tmp_path: Path) -> None:
    """The whole way that people's files came: transformers, llama.cpp's converter, this reader."""
    # a pattern of windows that is not Gemma 3's own is lost in the converter
    fields = {"sliding_window_pattern": 6, "num_hidden_layers": 7} if family == "gemma3" else {}
    if family == "granite-h-dense":  # nor does it write that one with states knows positions
        fields = {"position_embedding_type": None}
    reference = gguf_reference(family, **fields)
    reference.save_pretrained(str(tmp_path / "folder"))
    (tmp_path / "folder" / "tokenizer.json").write_text('{"model": {"vocab": {}}, "added_tokens": []}')
    path = tmp_path / "model.gguf"
    command = [sys.executable, "-c", CONVERT, str(llama_cpp_source()), str(tmp_path / "folder"), str(path), "ALL_F32"]
    if family.startswith(("gemma3", "gemma4")):  # it cuts the embedding to the tokens that the tokenizer names
        words = ", ".join(f'"t{i}": {i}' for i in range(reference.config.vocab_size))
        (tmp_path / "folder" / "tokenizer.json").write_text(
            f'{{"model": {{"vocab": {{{words}}}}}, "added_tokens": []}}'
        )
    config = tmp_path / "folder" / "config.json"
    fields = json.loads(config.read_text()) | PUBLISHED.get(family, {})
    if family == "gpt_neox":
        fields["rotary_pct"] = reference.config.rope_parameters["partial_rotary_factor"]
    if reference.config.model_type == "granitemoehybrid":
        words = {"linear_attention": "mamba", "full_attention": "attention"}
        fields["layer_types"] = [words[kind] for kind in reference.config.layer_types]
    if family == "kimi_linear":
        fields |= publish_kimi(tmp_path / "folder", reference.config)
    if family == "nemotron_h":  # published files have letters for blocks, and say nothing of experts
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
        fields["hybrid_override_pattern"] = "".join(letters[kind] for kind in fields.pop("layers_block_type"))
        fields = {key: value for key, value in fields.items() if key != "num_experts_per_tok"}
        fields["num_hidden_layers"] = len(fields["hybrid_override_pattern"])
    config.write_text(json.dumps(fields))
    subprocess.run(command, check=True, timeout=600)
    golden = ask_reference(reference, path, new_tokens=8)
    check_golden(load_model(path, ComputeConfig(backend="torch", device="cpu", weights="fp32")), golden, chunk=7)
    ours = open_gguf(write_gguf(reference, tmp_path / "ours.gguf"))
    theirs = gguf.GGUFReader(path)
    assert {tensor.name for tensor in theirs.tensors} == set(ours.tensors)
    assert load_gguf_spec(path).layers == load_gguf_spec(ours.path).layers
    written = {tensor.name: tensor.data for tensor in gguf.GGUFReader(ours.path).tensors}
    for tensor in theirs.tensors:
        assert np.array_equal(tensor.data.squeeze(), written[tensor.name].squeeze()), tensor.name


@pytest.mark.parametrize("family", [family for family in REPUBLISHED if family not in UNKNOWN])
def test_what_transformers_has_no_class_of_converts(family: str, tmp_path: Path) -> None:
    """Its published names and keys to the converter, and what that makes of them to this reader."""
    # which the converter knows without biases, and with heads of a share of the width
    fields = {"internlm2": {"attention_bias": False}, "exaone": {"head_dim": 16}}.get(family, {})
    folder = make_checkpoint(family, tmp_path / "folder", **fields)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}, "added_tokens": []}')
    path = tmp_path / "model.gguf"
    command = [sys.executable, "-c", CONVERT, str(llama_cpp_source()), str(folder), str(path), "ALL_F32"]
    subprocess.run(command, check=True, timeout=600)
    golden = ask_reference(make_reference(family, **fields), path, new_tokens=8)
    check_golden(load_model(path, ComputeConfig(backend="torch", device="cpu", weights="fp32")), golden, chunk=7)
