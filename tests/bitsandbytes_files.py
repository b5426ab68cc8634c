"""Checkpoints that bitsandbytes quantised: three small ones as it wrote them (tests/data/bitsandbytes), and fresh ones from it.

    python tests/bitsandbytes_files.py tests/data/bitsandbytes      # how those were made; wants the package

The package is large (it brings kernels for every GPU), so only slow tests that make fresh checkpoints import it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkpoints import make_checkpoint
from coded_files import Layout, Tensors
from diptych.models.config import QUANTO_MAP

DATA = Path(__file__).parent / "data" / "bitsandbytes"
DIGESTS = "values.json"  # beside a checkpoint: matrices -> SHA-256 of the fp32 values that bitsandbytes itself gives
FIELDS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16, "attention_bias": False,
          "mlp_bias": False, "tie_word_embeddings": True}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
MORE_KINDS: dict[str, dict[str, Any]] = {
    "nf4 plain": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4 nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "nf4 in floats": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
}


def quantise(folder: Path, kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """(the checkpoint, matrices in fp32 as bitsandbytes dequantises them): transformers and bitsandbytes do all of it."""
    import bitsandbytes.functional as bnb
    import transformers

    original = make_checkpoint("llama", folder / "original", dtype=torch.bfloat16, **FIELDS)
    how = transformers.BitsAndBytesConfig(**(KINDS | MORE_KINDS)[kind])
    model = transformers.AutoModelForCausalLM.from_pretrained(original, quantization_config=how, device_map="cpu")
    model.save_pretrained(folder / "coded")
    values = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if (state := getattr(weight, "quant_state", None)) is not None:
            state.dtype = torch.float32
            values[f"{name}.weight"] = bnb.dequantize_4bit(weight.data, state)
        elif getattr(weight, "SCB", None) is not None:
            values[f"{name}.weight"] = bnb.int8_vectorwise_dequant(weight.data, weight.SCB)
    return folder / "coded", values


def fours(kind: str) -> Layout:
    """nf4, fp4, or one of them and ' nested': by the package's own quantiser, in the tensors that it saves."""
    import bitsandbytes.functional as bnb

    table, is_nested = kind.split()[0], kind.endswith("nested")

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, state = bnb.quantize_4bit(w.to(torch.bfloat16), compress_statistics=is_nested, quant_type=table)
        beside = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        state.dtype = torch.float32
        return {"weight": codes, **beside}, bnb.dequantize_4bit(codes, state)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": table}
    return Layout(config, write)


def digest(values: torch.Tensor) -> str:
    """Of the bits."""
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def ship(kind: str, target: Path, quantise: Callable[[Path, str], tuple[Path, dict[str, torch.Tensor]]]) -> None:
    """What a tool makes of a kind, as a fixture: config, tensors, and the digests of the values that it reads itself."""
    coded, values = quantise(target / "made", kind)
    for name in ("config.json", "model.safetensors", QUANTO_MAP):
        if (coded / name).exists():
            shutil.copyfile(coded / name, target / name)
    shutil.rmtree(target / "made")
    (target / DIGESTS).write_text(json.dumps({name: digest(one) for name, one in values.items()}, indent=1) + "\n")


if __name__ == "__main__":
    for kind in KINDS:
        ship(kind, Path(sys.argv[1]) / kind, quantise)
