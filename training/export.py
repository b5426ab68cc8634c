"""Owns the way from a checkpoint to a Hugging Face model folder, and back for evaluation.

Example:
    python -m training.export --model diptych-10m --work build/training --out src/diptych/bundled/diptych-10m
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from training.checkpoint import load_checkpoint
from training.model import SHAPES, Llama, ModelShape
from training.tokenizer import write_tokenizer


def config_of(shape: ModelShape, tokenizer: Tokenizer) -> dict[str, object]:
    """config.json of a LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_context_tokens,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.n_heads,
        "num_hidden_layers": shape.n_layers,
        "num_key_value_heads": shape.n_kv_heads,
        "pad_token_id": tokenizer.token_to_id("<|pad|>"),
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def shape_of(config: dict[str, object]) -> ModelShape:
    """Inverse of config_of."""
    number = {key: value for key, value in config.items() if isinstance(value, int | float)}
    return ModelShape(
        hidden_size=int(number["hidden_size"]), intermediate_size=int(number["intermediate_size"]),
        n_layers=int(number["num_hidden_layers"]), n_heads=int(number["num_attention_heads"]),
        n_kv_heads=int(number["num_key_value_heads"]), head_dim=int(number["head_dim"]),
        vocab_size=int(number["vocab_size"]), max_context_tokens=int(number["max_position_embeddings"]),
        rope_theta=float(number["rope_theta"]), rms_norm_eps=float(number["rms_norm_eps"]),
    )  # fmt: skip


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export_model(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors (bf16) and the tokenizer files; keeps README.md."""
    write_tokenizer(tokenizer, folder)
    write_json(folder / "config.json", config_of(model.shape, tokenizer))
    end_ids = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    pad_id = tokenizer.token_to_id("<|pad|>")
    write_json(folder / "generation_config.json", {"eos_token_id": end_ids, "pad_token_id": pad_id, "do_sample": False})
    tensors = {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")


def load_exported(folder: Path, *, compute_dtype: torch.dtype = torch.float32) -> Llama:
    """Read a folder that export_model wrote; the bf16 weights are computed with in `compute_dtype`."""
    model = Llama(
        shape_of(json.loads((folder / "config.json").read_text(encoding="utf-8"))), compute_dtype=compute_dtype
    )
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    model.load_state_dict(tensors, strict=True)
    return model


def main(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")],
    out: Annotated[Path, typer.Option(help="model folder to write")],
    work: Annotated[Path, typer.Option(help="folder with the checkpoint")] = Path("build/training"),
) -> None:
    """Export the latest checkpoint of a model, finished or not."""
    network = Llama(SHAPES[model])
    progress = load_checkpoint(work / f"{model}.safetensors", network, {})
    export_model(network, Tokenizer.from_file(str(work / "tokenizer.json")), out)
    print(f"{model}: step {progress.step}, {progress.tokens_seen} tokens -> {out}")


if __name__ == "__main__":
    typer.run(main)
