"""Writes a random checkpoint of a known shape in Hugging Face layout, so that two engines load the same files.

python benchmarks/random_checkpoint.py qwen2.5-0.5b build/peers/qwen2.5-0.5b
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from diptych.models.named import SHAPES

EOS = "<|endoftext|>"
LONGEST_WORD = 12  # characters of a random token
STD = 0.02  # the usual initialisation of these families
BIASES = {"qwen2": ("q_proj", "k_proj", "v_proj")}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a llama or qwen2 checkpoint. ValueError for another family."""
    family = config["model_type"]
    if family not in ("llama", "qwen2"):
        raise ValueError(f"model_type is {family!r}; it must be llama or qwen2")
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    wide, narrow = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    linears = {
        "self_attn.q_proj": (wide, hidden), "self_attn.k_proj": (narrow, hidden), "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, wide), "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        for name, shape in linears.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if name.rpartition(".")[2] in BIASES.get(family, ()):
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    return shapes


def write_checkpoint(config: dict[str, Any], directory: Path, *, seed: int = 0) -> None:
    """config.json and model.safetensors (bf16): a pure function of config and seed. Leaves no half-written file behind."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.empty(shape, dtype=torch.float32).normal_(0.0, STD, generator=generator)
        # norms around one, as in trained models; all the rest around zero
        tensors[name] = (noise + 1.0 if "norm" in name else noise).to(torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    unfinished = directory / "model.safetensors.part"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    os.replace(unfinished, directory / "model.safetensors")


def write_tokenizer(vocab_size: int, directory: Path, *, seed: int = 0) -> None:
    """tokenizer.json and what goes with it: byte-level BPE of exactly vocab_size entries with random merges, as large as a
    trained one. Reads any text; EOS is the last entry.
    """
    noise = random.Random(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [char for char in alphabet if char.isascii() and char.isalpha()] + ["Ġ"]
    vocab = {char: token_id for token_id, char in enumerate(alphabet)}
    words, merges = list(letters), []
    while len(vocab) < vocab_size - 1:
        left, right = noise.choice(words), noise.choice(letters if noise.random() < 0.5 else words)
        if len(left + right) <= LONGEST_WORD and left + right not in vocab:
            merges.append((left, right))
            words.append(left + right)
            vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="write a random checkpoint")
    parser.add_argument("shape", choices=[name for name, c in SHAPES.items() if c["model_type"] in ("llama", "qwen2")])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = SHAPES[arguments.shape]
    write_checkpoint(config, arguments.directory, seed=arguments.seed)
    write_tokenizer(config["vocab_size"], arguments.directory, seed=arguments.seed)


if __name__ == "__main__":
    main()
