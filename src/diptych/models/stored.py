"""How many parameters lie beside a config: from the headers of safetensors and GGUF files, else from an index. Nothing is read
but names, shapes and sizes. The check that a price is the price of the model that is there.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig, read_config_file, read_json
from diptych.models.families.table import BESIDE_WRAPPED, BY_MODEL_TYPE
from diptych.models.files import INDEX_FILE, safetensors_header, weight_files
from diptych.models.gguf.checkpoint import count_parameters
from diptych.models.gguf.file import open_gguf
from diptych.models.spec import ModelSpec

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PLAIN = ("F32", "BF16", "F16")
# of a flat config: what it holds beside the keys of its decoder, whose parts for pictures and sound an index counts, too
BESIDE_DECODER = ("vision_config", "audio_config", "embd_layer")
LAYER = re.compile(r"\blayers\.(\d+)\.")


def unused_names(spec: ModelSpec) -> tuple[str, ...]:
    """Parts of names of tensors that a checkpoint may hold and its layers have no use for: what the family leaves alone, parts
    for pictures, layers that attend to those, keys and values of layers that attend to another's, and what scores.
    """
    shared = [i for i, layer in enumerate(spec.layers) if layer.attention.kv_layer is not None]
    of_shared = (f"layers.{i}.self_attn.{name}." for i in shared for name in ("k_proj", "v_proj", "k_norm", "v_norm"))
    left_out = (f"layers.{i}." for i in spec.left_out)
    n_experts, n_named = (0, 0) if spec.moe is None else (spec.moe.n_experts, spec.moe.n_scored * spec.moe.choice_rows)
    # experts without weights, for which transformers writes gates that nobody reads, and experts of pictures
    identities = (f".experts.{e}." for e in range(n_experts, n_named))
    beside = (*BY_MODEL_TYPE[spec.family].ignored, *(BESIDE_WRAPPED if spec.is_wrapped else ()))
    # read by who scores (`pooler`)
    heads = () if spec.has_head else BY_MODEL_TYPE[spec.family].classifier
    scored = (f"{name}." for layer in heads for name in (layer.name, layer.norm) if name)
    return (*beside, *of_shared, *left_out, *identities, *scored)


def without_head(folder: Path, spec: ModelSpec) -> ModelSpec:
    """The model as it is loaded from the files in `folder`: without an output projection where they are those of a decoder that
    was saved alone, whatever its config says (gte-Qwen2, as sentence-transformers writes such folders).
    """
    names = BY_MODEL_TYPE[spec.family].names
    found = {name for name, _ in _tensors(folder) or ()}
    is_alone = f"{names.embedding}{names.embedding_ending}" in found and f"{names.head}.weight" not in found
    is_bare = is_alone and "" not in BY_MODEL_TYPE[spec.family].prefixes
    return replace(spec, is_tied=True, has_head=False) if is_bare and not spec.is_tied else spec


def check_stored(folder: Path, spec: ModelSpec, expected: int) -> None:
    """LoadError when the files beside config.json hold another number of parameters than the config gives.

    Files that hold packed weights, or none at all, say nothing.
    """
    config = read_config_file(folder / "config.json")
    if config.get("quantization_config"):
        return
    found = _in_headers(folder, spec)
    is_alone = HfConfig(config).decoder is None and not any(config.get(key) for key in BESIDE_DECODER)
    if found is None and is_alone and not config.get("num_nextn_predict_layers"):
        found = _in_index(folder, config)
    # a tied head may be stored a second time
    allowed = (expected, expected + spec.vocab_size * spec.hidden) if spec.is_tied else (expected,)
    if found is not None and found not in allowed:
        raise LoadError(
            f"{folder / 'config.json'} gives {expected} parameters; the files beside it hold {found}",
            hint="the config belongs to another model, or to a variant of its architecture that is not known here",
        )


def check_gguf(path: Path, expected: int) -> None:
    """LoadError when a GGUF file holds another number of parameters than its metadata gives."""
    found = count_parameters(open_gguf(path))
    if found != expected:
        raise LoadError(
            f"the metadata of {path} gives {expected} parameters; its tensors hold {found}",
            hint="the file is of a variant of its architecture that is not known here",
        )


def _tensors(folder: Path) -> list[tuple[str, dict[str, Any]]] | None:
    """By the headers of safetensors; None where there are none, or not all of them."""
    try:
        files = weight_files(folder)
    except LoadError:
        return None
    return [
        (name, tensor) for path in files for name, tensor in safetensors_header(path).items() if name != "__metadata__"
    ]


def _in_headers(folder: Path, spec: ModelSpec) -> int | None:
    tensors = _tensors(folder)
    if not tensors or any(tensor.get("dtype") not in PLAIN for _, tensor in tensors):
        return None
    ignored = unused_names(spec)
    count = 0
    for name, tensor in tensors:
        layer = LAYER.search(name)
        if any(part in name for part in ignored) or (layer and int(layer[1]) >= spec.n_blocks):
            continue  # buffers, vision, and layers for speculation
        count += math.prod(tensor.get("shape", ()))
    return count


def _in_index(folder: Path, config: dict[str, Any]) -> int | None:
    if not (folder / INDEX_FILE).is_file():
        return None
    metadata = read_json(folder / INDEX_FILE).get("metadata")
    if not isinstance(metadata, dict):
        return None
    count, size = metadata.get("total_parameters"), metadata.get("total_size")
    element_bytes = ELEMENT_BYTES.get(str(config.get("torch_dtype") or config.get("dtype")))
    if isinstance(count, int):
        return count
    if not isinstance(size, int | float) or element_bytes is None:
        return None
    return int(size) // element_bytes
