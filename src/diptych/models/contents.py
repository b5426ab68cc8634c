"""What lies in a model's files: each tensor's kind, stored type and bytes, from the headers alone.

>>> contents_of(Path("model.gguf")).groups[0]  # doctest: +SKIP
Group(part='embedding', stored='Q6_K', tensors=1, parameters=262144, nbytes=215040)
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diptych.ground.errors import LoadError
from diptych.ground.formats import KEPT_MXFP4, gguf_kept
from diptych.models.config import HfConfig, read_config_file
from diptych.models.files import has_weights, safetensors_header, stored_numbers, weight_files
from diptych.models.gguf.checkpoint import ROPE_TENSOR, is_beside
from diptych.models.gguf.file import GgufFile, find_gguf, open_gguf
from diptych.models.quantised.compressed import MARLIN
from diptych.models.quantised.fields import Quantisation
from diptych.models.quantised.hqq import tag_of
from diptych.models.quantised.method import (
    BESIDE_CODES,
    BESIDE_HQQ,
    BESIDE_STACKS,
    CODES,
    METAL,
    MLX,
    own_section,
    quantisation_of,
)

# parts of names -> the part of the model, the first that fits; of safetensors and of GGUF files
PARTS: tuple[tuple[str, str], ...] = (
    ("embed_tokens_extend", "other"), (".lora_", "other"), ("vision", "other"), ("multi_modal", "other"), ("nextn", "other"),
    ("mtp.", "other"), ("rope_f", "positions"), ("rotary_emb", "positions"), ("LayerNorm.", "norms"),
    ("emb_ln.", "norms"), (".ln.", "norms"),
    ("embed_tokens", "embedding"), ("embeddings.", "embedding"), ("embeddings_project.", "embedding"),
    ("embedding_hidden_mapping_in.", "embedding"), ("backbone.embedding.", "embedding"),
    ("token_embd", "embedding"), ("wte", "embedding"),
    ("tokens_embed", "embedding"), ("positions_embed", "embedding"), ("embed_in", "embedding"), ("embed_out", "head"),
    ("lm_head", "head"), ("decoder.bias", "head"), ("norm_attn_norm.attn.", "attention"), ("ffn.router.", "router"),
    ("ffn.gate.", "router"), ("norm", "norms"), ("layernorm", "norms"), ("gate_inp", "router"), ("exp_probs", "router"),
    ("e_score_correction", "router"), ("mixer.gate.", "router"), ("latent_proj", "experts"),
    ("experts", "experts"), ("_exps", "experts"), ("_shexp", "experts"), ("mlp.gate.", "router"),
    ("moe.gate.", "router"), ("feed_forward.gate.", "router"), ("expert_bias", "router"), ("moe.router.", "router"),
    ("mlp.router.", "router"), ("block_sparse_moe.", "experts"), ("linear_attn", "states"), (".mamba.", "states"),
    ("mixer.up_proj", "mlp"), ("mixer.down_proj", "mlp"), *((f"mixer.{one}_proj", "attention") for one in "qkvo"),
    (".mixer.", "states"),
    (".conv.", "states"), ("ssm_", "states"), ("shortconv", "states"), ("attn", "attention"), ("mlp", "mlp"),
    ("ffn", "mlp"), ("feed_forward", "mlp"), ("output.weight", "head"), ("attention.", "attention"), ("fc1.", "mlp"),
    ("fc2.", "mlp"), ("wpe.", "embedding"), ("embed_positions.", "embedding"), ("position_embd.", "embedding"),
    ("ln_1.", "norms"), ("ln_2.", "norms"), ("ln_f.", "norms"), ("embed.weight", "embedding"), ("head.", "head"),
    ("relative_attention_bias", "attention"), ("SelfAttention.", "attention"), ("DenseReluDense.", "mlp"),
    ("shared.", "embedding"), ("intermediate.dense.", "mlp"), ("output.dense.", "mlp"), ("pooler.", "head"),
    ("classifier.", "head"), ("dense.", "head"), ("predictions.", "head"),
)  # fmt: skip
ORDER = ("embedding", "head", "attention", "states", "mlp", "router", "experts", "norms", "positions", "other")
EXPONENTS = "|exponents"  # behind such a name: by what channels were balanced, which is no parameter
INPUT_ORDER = "|order"  # likewise: in which order a weight has its inputs
PACKED = "packed:"  # what `diptych quantize` writes before the names of the tensors that it packed together


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors of one part of the model that are stored alike."""

    part: str
    stored: str
    tensors: int
    parameters: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits per parameter."""
        return 8 * self.nbytes / max(1, self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The files of a model. container: 'GGUF' or 'safetensors'; groups: by part, then by stored type.

    formats, head: in which the engine holds the matrices of layers, with so many values each, and the output projection, where
    `kept` says that it keeps what they are.
    """

    container: str
    files: tuple[str, ...]
    file_bytes: int
    groups: tuple[Group, ...]
    kept: str | None = None  # the format in which a kernel keeps the values of most matrices
    formats: Mapping[str, int] = field(default_factory=dict)
    head: str = "bf16"

    @property
    def bits(self) -> float:
        """Bits per parameter over all that is stored."""
        return 8 * sum(group.nbytes for group in self.groups) / max(1, sum(group.parameters for group in self.groups))


def contents_of(path: Path) -> Contents:
    """What lies in a GGUF file, or in the safetensors files of a folder. LoadError for neither, or a damaged one."""
    gguf = find_gguf(path)
    if gguf is not None:
        return _gguf(gguf)
    files = weight_files(path) if has_weights(path) else []
    config = path / "config.json"
    raw = read_config_file(config) if config.is_file() else {}
    own = own_section(raw)
    parsed = HfConfig(raw, path=str(config))
    how = None if own is not None or parsed.is_mxfp4 else quantisation_of(parsed)
    entries = (entry for file in files for entry in _safetensors(file, how))
    contents = _contents("safetensors", files, sum(file.stat().st_size for file in files), entries)
    kept = KEPT_MXFP4 if parsed.is_mxfp4 else None if how is None else how.kept
    if own is not None:
        return replace(contents, kept=own.get("weights"))
    return contents if kept is None else replace(contents, kept=kept.name, formats={kept.name: 1})


Entry = tuple[str, str, int, int]  # name, stored type, parameters, bytes


def _gguf(path: Path) -> Contents:
    file = open_gguf(path)
    entries = ((_named(t.name, file), t.type.name, math.prod(t.shape), t.nbytes) for t in file.tensors.values())
    contents = _contents("GGUF", list(file.paths), file.file_bytes, entries)
    layers = file.layer_values

    def held(kind: str) -> str:
        kept = gguf_kept(kind, layers)
        return "bf16" if kept is None else kept.name

    main = held(layers.most_common(1)[0][0]) if layers else "bf16"
    if main == "bf16":
        return contents
    head = file.tensors.get("output.weight") or file.tensors.get("token_embd.weight")
    formats: Counter[str] = Counter()
    for kind, count in layers.items():
        formats[held(kind)] += count
    return replace(contents, kept=main, formats=formats, head="bf16" if head is None else held(head.type.name))


def _named(name: str, file: GgufFile) -> str:
    """A tensor's name, by which those of layers that only draft are known as such."""
    return f"nextn.{name}" if is_beside(name, file) and not ROPE_TENSOR.match(name) else name


def _safetensors(path: Path, how: Quantisation | None) -> Iterator[Entry]:
    header = safetensors_header(path)
    metadata = header.pop("__metadata__", None) or {}
    packed = _packed_shapes(path, metadata) if "packed_shapes" in metadata else {}
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        nbytes, count, stored = end - begin, math.prod(tensor["shape"]), str(tensor.get("dtype"))
        if name.endswith((EXPONENTS, INPUT_ORDER)):
            count, stored = 0, "balance"
        elif name.endswith(".tid2eid"):  # experts by a token's id
            count, stored = 0, "numbers"
        elif how is not None and name.endswith(tuple(one.ending for one in how.rotations)):
            count, stored = 0, "rotations"
        elif name.startswith(PACKED):
            count = sum(packed.get(one, 0) for one in name.removeprefix(PACKED).split("+"))
            stored = f"packed {8 * nbytes / max(1, count):.2g} bit"
        elif name.endswith("_blocks") and stored == "U8":
            count, stored = 2 * count, "MXFP4"
        elif name.endswith("_scales") and stored == "U8":
            count, stored = 0, "MXFP4 scales"
        elif how is not None and how.method in (MLX, METAL) and stored == "U32":
            module, words = name.removesuffix(".weight"), count
            scales = header.get(f"{module}.scales") or {"shape": (0,)}  # without them it is refused by who reads it
            count = math.prod(scales["shape"]) * how.group_of(module)
            stored = f"{how.method} {32 * words / max(1, count):.2g} bit"
        elif how is not None and how.method == "hqq" and f"{name.rpartition('.')[0]}.W_q" in header:
            is_codes, is_beside = name.endswith(".W_q"), name.endswith(_endings(BESIDE_HQQ))
            count = _hqq_values(how, name, header, path) if is_codes else 0 if is_beside else count
            stored = "hqq" if is_codes else "hqq scales" if is_beside else stored
        elif how is not None and name.endswith(CODED_ENDINGS) and (found := _coded(how, name, header)) is not None:
            count, stored = found
        elif how is not None and name.endswith(_endings(CODES)) and stored in ("I32", "I16"):
            bits = _bits(how, name, header, path)
            count, stored = 8 * nbytes // bits, f"{how.method} {bits} bit"
        elif how is not None and how.method == "gemma" and stored == "U8":
            bits = how.bits_of(name.rpartition(".")[0])
            count, stored = nbytes * 8 // bits, f"gemma {bits} bit"
        elif how is not None and how.method == "quark" and stored in ("U8", "I32") and name.endswith(".weight"):
            groups = _sides(header, f"{name}_scale" if f"{name}_scale" in header else f"{name}_quantizer.scale")
            is_of_6 = stored == "U8" and 4 * tensor["shape"][-1] == 96 * groups[-1]
            count, stored = (nbytes * 4 // 3, "quark 6 bit") if is_of_6 else (2 * nbytes, "quark 4 bit")
        elif how is not None and how.method == "fp_quant" and name.endswith(".qweight"):
            count, stored = 2 * nbytes, "fp-quant 4 bit"
        elif how is not None and how.method == "fouroversix" and name.endswith(".quantized_weight_values"):
            beside = header.get(f"{name.removesuffix('values')}metadata")
            sides = () if beside is None else stored_numbers(path, beside)[:2]  # without what is filled up
            count, stored = math.prod(sides) if sides else 2 * nbytes, "fouroversix 4 bit"
        elif how is not None and how.method == "bitnet" and stored == "U8":
            count, stored = 4 * nbytes, "bitnet 2 bit"
        elif how is not None and how.method == "fp8" and stored == "I8":
            count, stored = 2 * nbytes, "fp8 4 bit"
        elif how is not None and how.method == "fp8" and stored == "F8_E8M0":
            count, stored = 0, "fp8 scales"
        elif how is not None and stored == "U8" and _has_pairs(name, header):
            count, stored = 2 * nbytes, f"{how.method} 4 bit"
        elif how is not None and name.endswith(
            (*_endings(BESIDE_CODES), *BESIDE_STACKS)
        ):  # scales and zeros are no parameters
            count, stored = 0, f"{how.method} scales"
        yield name, stored, count, nbytes


def _bits(how: Quantisation, name: str, header: Mapping[str, Any], path: Path) -> int:
    """Of the codes in words of 32: those of the config, of a mixture those that fit the scales beside them."""
    if not how.own_schemes:
        return how.bits or 4
    if name.endswith(".weight_packed"):
        return _packed_bits(how, name, header, path)
    module = name.removesuffix(".qweight")
    words, groups = (_sides(header, f"{module}.{one}") for one in ("qweight", "scales"))
    return how.scheme_of(module, words[0], groups[0]).bits


def _packed_bits(how: Quantisation, name: str, header: Mapping[str, Any], path: Path) -> int:
    """Of compressed-tensors: in a mixture those by which a row, whose length lies beside the codes, takes as many words."""
    found = {scheme.bits for scheme in how.own_schemes.values()}
    beside = header.get(f"{name.removesuffix('packed')}shape")
    sides = stored_numbers(path, beside) if beside is not None and len(found) > 1 else ()
    words = _sides(header, name)[-1]
    return next((bits for bits in found if sides and -(-sides[-1] * bits // 32) == words), min(found))


def _hqq_values(how: Quantisation, name: str, header: Mapping[str, Any], path: Path) -> int:
    """Of the codes W_q: so many as its groups have, by rows of codes; in columns, and seen as floats, by the sides."""
    module, columns = name.removesuffix(".W_q"), (header[name].get("shape") or [0])[-1]
    groups = (header.get(f"{module}.scale") or {}).get("shape") or [0]
    if groups[-1] == 1 and header[name].get("dtype") in ("U8", "I32"):
        return int(math.prod(groups) * columns)
    beside = header.get(f"{module}.shape")
    sides = () if beside is None else stored_numbers(path, beside)
    return math.prod(sides) if sides else int(math.prod(groups)) * how.group_of(tag_of(module))


CODED_ENDINGS = (
    ".compressed", ".codes", ".indices", "._weight_qdata", ".weight._data._data", ".weight_packed", ".W_q", ".trellis",
)  # fmt: skip


def _coded(how: Quantisation, name: str, header: Mapping[str, Any]) -> tuple[int, str] | None:
    """(values, how they are stored) of codes whose number the tensors beside them tell; None where it is theirs."""
    module, _, ending = name.rpartition(".")
    own, kind = _sides(header, name), str(header[name].get("dtype"))
    count = math.prod(own)
    if ending == "compressed":
        return 8 * math.prod(_sides(header, f"{module}.bitmask")), f"sparse {kind}"
    if ending == "codes":
        books = _sides(header, f"{module}.codebooks")
        return count // max(1, own[-1]) * math.prod(books[2:]), "aqlm"
    if ending == "trellis":
        return 256 * math.prod(own[:-1]), f"exl3 {own[-1] // 16} bit"
    if ending == "indices":
        vectors = how.vectors_of(module)
        return None if vectors is None else (math.prod(vectors.sides), "vptq")
    if ending == "_data":
        bits = round(8 * own[0] / max(1, math.prod(_sides(header, f"{module.removesuffix('._data')}._scale"))))
        return 8 * count // max(1, bits), f"quanto {bits} bit"
    if ending == "W_q":
        groups = header.get(f"{module}.meta.zero.x") or header.get(f"{module}.meta.zero") or {}
        return math.prod(groups.get("shape") or [0]) * own[-1], f"sinq {how.bits} bit"
    if ending == "weight_packed":
        if f"{module}.scale_packed" in header:
            return count * 64 // (how.bits or 4), f"{MARLIN} {how.bits} bit"
        is_of_6 = kind == "U8" and 4 * own[-1] == 96 * _sides(header, f"{module}.weight_scale")[-1]
        return (count * 4 // 3, f"{how.method} 6 bit") if is_of_6 else None
    if kind == "I32":
        return 8 * count, f"{how.method} 4 bit"
    of_pairs = str((header.get(f"{module}._weight_zero_point") or {}).get("dtype")) in ("BF16", "F16", "F32")
    return (2 * count, f"{how.method} 4 bit") if kind == "U8" or of_pairs else None


def _sides(header: Mapping[str, Any], name: str) -> list[int]:
    return [int(side) for side in (header.get(name) or {}).get("shape") or [0]]


def _packed_shapes(path: Path, metadata: Mapping[str, Any]) -> dict[str, int]:
    """Parameters of the tensors that `diptych quantize` packed, by name."""
    try:
        shapes = json.loads(metadata["packed_shapes"]).items()
        return {name: math.prod(int(size) for size in shape) for name, shape in shapes}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise LoadError(
            f"{path} has no list of packed shapes: {error}", hint="write the checkpoint again with `diptych quantize`"
        ) from error


def _has_pairs(name: str, header: Mapping[str, Any]) -> bool:
    """Whether two codes of 4 bits lie in each byte: bitsandbytes, and fp4 of compressed-tensors and modelopt."""
    return name.endswith(".weight_packed") or f"{name}.absmax" in header or f"{name}_scale_2" in header


def _endings(parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f".{part}" for part in parts)


def _contents(container: str, files: list[Path], file_bytes: int, entries: Any) -> Contents:
    sums: dict[tuple[str, str], list[int]] = {}
    for name, stored, count, nbytes in entries:
        held = sums.setdefault((part_of(name), stored), [0, 0, 0])
        for i, value in enumerate((1, count, nbytes)):
            held[i] += value
    groups = sorted(sums.items(), key=lambda item: (ORDER.index(item[0][0]), -item[1][2]))
    return Contents(
        container=container,
        files=tuple(str(path) for path in files),
        file_bytes=file_bytes,
        groups=tuple(
            Group(part=part, stored=stored, tensors=tensors, parameters=count, nbytes=nbytes)
            for (part, stored), (tensors, count, nbytes) in groups
        ),
    )


def part_of(name: str) -> str:
    """The part of the model that a tensor belongs to, by its name."""
    if ROPE_TENSOR.match(name):
        return "positions"
    if "encoder.layers." in name:
        name = name.replace(".mixer.", ".attention.")  # Jina 3's
    name = name.removeprefix("roberta_prelayernorm.")  # which is no norm
    return next((part for mark, part in PARTS if mark in name), "other")
