"""Tiny random checkpoints of every family, written by transformers, for the tests of any room.

    path = make_checkpoint("gemma2", tmp_path, sliding_window=24)

The weights are scaled so that activations and logits are of order one: with the usual initialisation of 0.02 a model this
small says nearly the same everywhere, and no test could tell a right answer from a wrong one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from family_configs import CLASSES, MORE, VOCAB, WRAPPED
from republished import REPUBLISHED, published, republish
from searched import SearchedForCausalLM

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: tuple[str, ...] = tuple(CLASSES)
MORE_FAMILIES: tuple[str, ...] = tuple(MORE)
EMBEDDINGS = ("embed_tokens", "embed_in", "word_embeddings", "wte", "wpe", "embed_positions", "position_embeddings",
              "token_type_embeddings")  # fmt: skip
BY_LAYER = ("layer_types", "block_configs", "activation_sparsity_pattern", "layer_rope_theta", "mlp_layer_types",
            "swiglu_limits", "swiglu_limits_shared", "num_attention_heads_per_layer", "attention_types",
            "indexer_types", "no_rope_layers", "kv_source_layers")  # fmt: skip
UNSCALED = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")  # scores are not divided by anything
UNSCALED_QUERIES = ("gpt_neo", "zamba", "zamba2")  # likewise, or by less, and nothing norms them


def make_reference(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """The transformers model of a family, fp32, on the CPU, in eval mode, with lively random weights."""
    import transformers

    config_name, model_name, fields = {**CLASSES, **MORE}[family]
    asked = {**COMMON, **fields, **overrides}
    for by_layer in BY_LAYER:
        if by_layer in fields and by_layer not in overrides:
            asked[by_layer] = asked[by_layer][: asked["num_hidden_layers"]]
    if family.startswith("zamba"):  # the class of Nemotron-H, which has this list, too, goes by it alone
        asked["layers_block_type"] = asked["layers_block_type"][: asked["num_hidden_layers"]]
        if (
            family == "zamba" and asked["layers_block_type"].count("hybrid") < 2
        ):  # which refuses a block that is used once
            asked["layers_block_type"] = ["hybrid"] * asked["num_hidden_layers"]
    if "num_kv_shared_layers" in fields:  # of each kind one before them has its own
        asked["num_kv_shared_layers"] = min(asked["num_kv_shared_layers"], asked["num_hidden_layers"] - 2)
    if "ple_layer_ids" in fields:  # from 1 on
        asked["ple_layer_ids"] = [number for number in asked["ple_layer_ids"] if number <= asked["num_hidden_layers"]]
    config_class = getattr(transformers, config_name)
    usual = config_class()  # has no such key, under no name
    asked = {key: value for key, value in asked.items() if key not in COMMON or hasattr(usual, key)}
    config = config_class(**asked)
    if family in WRAPPED:
        wrapper, tower, *more = WRAPPED[family]
        beside = {"vision_config": tower, **(more[0] if more else {})}
        config = getattr(transformers, wrapper)(text_config=config.to_dict(), **beside)
    config._attn_implementation = "eager"
    made_of = SearchedForCausalLM if model_name == "SearchedForCausalLM" else getattr(transformers, model_name)
    model = made_of(config).eval().float()
    enliven(model, seed)
    return model


@torch.no_grad()
def enliven(model: torch.nn.Module, seed: int) -> None:
    """Random weights that keep activations of order one, norm weights that differ from 1, biases that differ from 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2 and not name.endswith("bias"):
            is_embedding = any(one in name for one in EMBEDDINGS)
            parameter.copy_(noise * (0.5 if is_embedding else 1.5 / parameter.shape[-1] ** 0.5))
            if "modality_router" in name:  # what it reads is divided by the width
                parameter.mul_(parameter.shape[-1])
            if "q_proj" in name and model.config.model_type in UNSCALED_QUERIES:
                parameter.mul_(0.25)
            if "_adapter_list." in name or re.search(r"layers\.\d+\.linear\.", name):  # which add to what is there
                parameter.mul_(0.3)
            if name.endswith("A_log") and parameter.ndim in (2, 3):  # so states fade in some tokens
                parameter.copy_(noise - 1.0)
            if "_coefs" in name:  # streams add up
                parameter.mul_(0.2)
        elif name.endswith("recurrent_param"):  # likewise drawn by the class; so units fade in some tokens
            parameter.copy_(noise - 1.0)
        elif "forget_gate." in name:  # by whose bound states would fade in a token or two
            parameter.copy_(0.3 * noise - (3.0 if name.endswith("dt_bias") else 0.0))
        elif ".lambda_" in name or name.endswith("residual_gate.gate"):  # the class draws them by no seed
            parameter.copy_(0.3 * noise)
        elif name.endswith("A_log"):  # the class draws it by a generator of its own; so states fade in some tokens
            parameter.copy_(noise - 1.0)
        elif name.endswith(("bias", "sinks")):
            parameter.copy_(0.3 * noise + name.endswith("softmax_scaling.bias"))  # by which queries are multiplied
        else:
            parameter.add_(0.2 * noise)
            if name.endswith(
                ("_hc.scale", "hc_scale")
            ):  # a hundredth at first, by which no weight would depend on a token
                parameter.add_(0.8)
            if name.endswith("final_layernorm.weight") and model.config.model_type in (
                "zamba",
                "zamba2",
            ):  # the embedding is its head
                parameter.mul_(0.3)
            if name.endswith("q_norm.weight") and model.config.model_type in UNSCALED:
                parameter.mul_(0.4)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(0.5 + 0.4 * torch.rand(buffer.shape, generator=generator))
        if name.endswith("rotary_emb.alpha"):
            buffer.copy_(0.5 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("correction_bias"):  # no parameter of some classes, but stored
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("tid2eid"):
            n = model.config.n_routed_experts
            buffer.copy_(torch.stack([torch.randperm(n, generator=generator)[: buffer.shape[1]] for _ in buffer]))
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()


def one_row_less(path: Path, part: str, shape: Sequence[int], copy: Path) -> Path:
    """A copy of a checkpoint whose first tensor with that part in its name, of that shape, has lost its first row."""
    shutil.copytree(path, copy)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if part in name)
    assert list(tensors[name].shape) == list(shape)
    save_file({**tensors, name: tensors[name][1:].clone()}, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def make_checkpoint(
    family: str,
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a tiny random checkpoint (config.json and safetensors) into directory; overrides are config fields.

    What any process of this run has made before is copied.
    """

    def make(folder: Path) -> None:
        model = make_reference(family, seed=seed, **overrides)
        write_checkpoint(family, model.to(dtype), folder, max_shard_size=max_shard_size)

    made = made_once(make, family, seed, dtype, max_shard_size, sorted(overrides.items()))
    return Path(shutil.copytree(made, directory, copy_function=shutil.copyfile, dirs_exist_ok=True))


def made_once(make: Callable[[Path], None], *asked: Any) -> Path:
    """The folder that `make` has written, in this process or another of this run, when it was asked for the same."""
    words = repr(asked)
    assert " at 0x" not in words, "an object that does not say what it is"
    made = Path(os.environ["DIPTYCH_TEST_CHECKPOINTS"]) / hashlib.sha256(words.encode()).hexdigest()
    if not made.exists():
        mine = Path(tempfile.mkdtemp(dir=made.parent))
        make(mine)
        with suppress(OSError):  # another process was first
            mine.rename(made)
    return made


def write_checkpoint(family: str, model: Any, directory: Path, *, max_shard_size: str = "5GB") -> Path:
    """Write a model of `make_reference` as its family publishes it; those of `REPUBLISHED` are another model afterwards."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if family in REPUBLISHED:
        republish(family, model, directory)
        return directory
    # transformers does not write OLMo Hybrid as it reads it: convolutions in equal parts, all norms renamed
    named = {"state_dict": published(model), "save_original_format": False} if family == "olmo_hybrid" else {}
    model.save_pretrained(str(directory), max_shard_size=max_shard_size, **named)
    return directory
