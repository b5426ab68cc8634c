"""More checkpoints as other programs quantise them, with `coded_files`' machinery: layouts written out place by place, after
AutoAWQ 0.2.9 (`gemv.py`, `gemv_fast.py`, `marlin.py`), AutoGPTQ 0.7 (`qlinear_marlin.py`), GPTQModel 7.7 (`gptq_p`),
compressed-tensors 0.12 (sparsity), aqlm 1.1.7, optimum-quanto 0.2.7, sinq 0.2, torchao 0.18, PyTorch's `int4mm.cu` and
amd-quark 0.6 to 0.13. Each was compared with what these programs write (of Quark with what its packing reads), once, by hand,
but for packed int4, which only GPUs write: that goes by their source.
"""

from __future__ import annotations

from typing import Any

import scipy.linalg
import torch
from transformers.integrations.metal_quantization import _affine_dequantize_tensor, _affine_quantize_tensor

from coded_files import Layout, Tensors, quark, rounded, valued


def words(values: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """[n, k] -> int32 [n, k * bits / 32], the first in the lowest bits."""
    per_word = 32 // bits
    found = torch.zeros(values.shape[0], values.shape[1] // per_word, dtype=torch.int64)
    for i in range(per_word):
        found |= values[:, i::per_word] << (i * bits)
    return found.to(torch.int32)


def awq_gemv(group: int, *, is_fast: bool = False) -> Layout:
    """AutoAWQ's `gemv` and `gemv_fast`."""
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = w.shape
        codes, scales, zeros = rounded(w, 4, group, symmetric=False)
        index = torch.arange(k) // group
        padded = 8 * {32: 4, 64: 2}.get(group, 1)  # groups come in so many
        room = -(-scales.shape[1] // padded) * padded
        wide_scales, wide_zeros = torch.zeros(n, room, dtype=torch.float16), torch.zeros(n, room, dtype=torch.int64)
        wide_scales[:, : scales.shape[1]], wide_zeros[:, : zeros.shape[1]] = scales, zeros
        if not is_fast:
            tensors = {"qweight": words(codes), "qzeros": words(wide_zeros), "scales": wide_scales}
            return tensors, valued(codes, scales, zeros, index)
        minima = (-(scales.float() * zeros)).half()
        wide_minima = torch.zeros(n, room, dtype=torch.float16)
        wide_minima[:, : minima.shape[1]] = minima
        stored = torch.zeros(n // 4, k, dtype=torch.int64)
        for c in range(k):
            eight, pair, odd = c % 32 // 8, c % 8 // 2, c % 2
            place = c // 32 * 32 + 8 * pair + 4 * odd + eight
            for r in range(4):  # and every fourth row behind it
                flat = 64 * r + place % 64
                stored[:, place // 64 * 64 + flat // 4] |= codes[r::4, c] << 4 * (flat % 4)
        stored = torch.where(stored >= 1 << 15, stored - (1 << 16), stored)
        tensors = {"qweight": stored.to(torch.int16), "qzeros": wide_minima.T, "scales": wide_scales.T}
        return tensors, scales.float()[:, index] * codes + minima.float()[:, index]

    return Layout(config | {"version": "gemv_fast" if is_fast else "gemv"}, write)


def marlin_words(group: int | None, names: tuple[str, str], **config: Any) -> Layout:
    """The same in AutoAWQ (`marlin.py`) and AutoGPTQ (`qlinear_marlin.py`: `_get_perms` and `pack`), place by place."""
    rows, pairs = [0, 8], [0, 1, 8, 9]  # of a word: outputs apart, and inputs

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = w.shape
        codes, scales, zeros = rounded(w, 4, group or k, symmetric=True)
        stored = torch.zeros(k // 16, 2 * n, dtype=torch.int64)
        for place in range(128):  # words of 16 inputs by 64 outputs
            lane, tile = divmod(place, 4)
            found = [(16 * tile + lane // 4 + row, 2 * (lane % 4) + pair) for row in rows for pair in pairs]
            for nibble, one in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                output, inputs = found[one]
                stored[:, place::128] |= codes[output::64, inputs::16].T << 4 * nibble
        stored = torch.where(stored >= 1 << 31, stored - (1 << 32), stored)
        order = (
            [i + 8 * j for i in range(8) for j in range(8)]
            if group
            else [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
        )
        tensors = {
            names[0]: stored.to(torch.int32),
            names[1]: scales.T.reshape(-1, len(order))[:, order].reshape(-1, n),
        }
        return tensors, valued(codes, scales, zeros, torch.arange(k) // (group or k))

    return Layout({"bits": 4, "group_size": group or -1, **config}, write)


def awq_marlin(group: int | None) -> Layout:
    """AutoAWQ's `marlin`. group: None, a row."""
    return marlin_words(group, ("qweight", "scales"), quant_method="awq", zero_point=False, version="marlin")


def gptq_marlin(group: int | None, **config: Any) -> Layout:
    """AutoGPTQ's. config: how it says so."""
    return marlin_words(group, ("B", "s"), quant_method="gptq", sym=True, desc_act=False, **config)


def gptq_planes(bits: int, *, symmetric: bool) -> Layout:
    """GPTQModel's `gptq_p` (`utils/planar_packing.py`), code by code; zero points as they are."""
    planes = {3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}[bits]

    def packed(values: torch.Tensor) -> torch.Tensor:  # [n, k] -> [n, k * bits / 32]
        words = torch.zeros(len(values), values.shape[1] // 32 * bits, dtype=torch.int64)
        for at in range(values.shape[1]):
            first, low = at // 32 * bits, 0
            for width in planes:
                word, place = divmod(at % 32 * width, 32)
                words[:, first + word] |= (values[:, at] >> low & (1 << width) - 1) << place
                first, low = first + width, low + width
        return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros = rounded(w, bits, 32, symmetric=symmetric)
        index = torch.arange(w.shape[1]) // 32
        tensors = {
            "qweight": packed(codes).T,
            "qzeros": packed(zeros.T),
            "scales": scales.T,
            "g_idx": index.to(torch.int32),
        }
        return tensors, valued(codes, scales, zeros, index)

    section = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": symmetric, "desc_act": False}
    return Layout({**section, "checkpoint_format": "gptq_p", "pack_dtype": "int32"}, write)


def quark_awq(*, symmetric: bool = False, in_order: bool = False) -> Layout:
    """Quark's export for programs that read AutoAWQ's (`custom_mode="awq"`, `main_export/quant_config_parser.py`)."""
    inner = quark("int4" if symmetric else "uint4", in_order=in_order)
    names = {"weight": "qweight", "weight_scale": "scales", "weight_zero_point": "qzeros"}

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, values = inner.write(w)
        return {names[name]: one for name, one in tensors.items()}, values

    config = {"quant_method": "awq", "zero_point": not symmetric, "group_size": 32, "bits": 4, "version": "gemm",
              "modules_to_not_convert": ["lm_head"], "pack_method": "order" if in_order else "reorder"}  # fmt: skip
    return Layout(config, write)


def quark_fp8() -> Layout:
    """Quark's export for programs that read fp8 (`custom_mode="fp8"`), of weights alone, with what a cache has."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = w.abs().amax() / 448.0
        codes = (w / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale, "output_scale": torch.tensor(0.5)}, codes.float() * scale

    config = {
        "quant_method": "fp8",
        "activation_scheme": None,
        "ignored_layers": ["lm_head"],
        "kv_cache_scheme": "static",
    }
    return Layout(config, write)


def quark_blocks(rows: int, inputs: int) -> Layout:
    """fp8 with a scale for a block (`per_block`), by the name that scales of rows have."""
    section = quark("fp8_e4m3").config
    spec = {
        "dtype": "fp8_e4m3",
        "qscheme": "per_block",
        "ch_axis": None,
        "block_size": [rows, inputs],
        "is_dynamic": False,
    }

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = w.shape
        padded = torch.zeros(-(-n // rows) * rows, -(-k // inputs) * inputs)
        padded[:n, :k] = w
        scales = padded.view(-(-n // rows), rows, -1, inputs).abs().amax((1, 3)) / 448.0
        wide = scales.repeat_interleave(rows, 0).repeat_interleave(inputs, 1)[:n, :k]
        codes = (w / wide).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scales}, codes.float() * wide

    return Layout({**section, "global_quant_config": {"weight": spec, "input_tensors": None}}, write)


def quark_nvfp4(*, by_module: bool = False) -> Layout:
    """Quark's NVFP4 (`ScaleQuantSpec`): E2M1 in groups of 16, E4M3, and what multiplies both.

    by_module: tensors by the modules that made them, as files of Quark 0.11 have them (github.com/amd/Quark/issues/44).
    """
    stages = [
        {"dtype": "fp4", "is_dynamic": False, "qscheme": "per_group", "ch_axis": -1, "group_size": 16,
         "scale_format": "float32", "is_scale_quant": False},
        {"dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor", "ch_axis": None, "group_size": None,
         "scale_format": None, "is_scale_quant": True},
    ]  # fmt: skip
    names = (
        ("weight_quantizer.0.scale", "weight_quantizer.1.scale") if by_module else ("weight_scale", "weight_scale_2")
    )

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        whole = w.abs().amax() / 448.0 / 6.0
        groups = w.reshape(len(w), -1, 16)
        scales = (groups.abs().amax(-1) / 6.0 / whole).clamp(2**-9, 448.0).to(torch.float8_e4m3fn)
        each = (scales.float() * whole)[..., None]
        ladder = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        nearest = ((groups / each).abs()[..., None] - ladder).abs().argmin(-1)
        codes = (nearest + 8 * (groups < 0)).view(len(w), -1).to(torch.uint8)
        values = torch.where(groups < 0, -1.0, 1.0) * ladder[nearest] * each
        tensors = {"weight": codes[:, 1::2] << 4 | codes[:, ::2], names[0]: scales, names[1]: whole}
        return tensors, values.view(len(w), -1)

    config = {**quark("fp4").config, "global_quant_config": {"weight": stages, "input_tensors": stages}}
    return Layout(config, write)


def by_quantisers(inner: Layout) -> Layout:
    """Quark's tensors by the modules that made them."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, values = inner.write(w)
        beside = {"output_quantizer.scale": torch.tensor(0.5), "input_quantizer.scale": torch.tensor(0.5)}
        renamed = {name.replace("weight_", "weight_quantizer."): one for name, one in tensors.items()}
        return renamed | beside, values

    return Layout(inner.config, write)


def two_of_four(w: torch.Tensor) -> torch.Tensor:
    """With the two smallest of four inputs zero."""
    fours = w.reshape(-1, 4)
    return fours.scatter(1, fours.abs().topk(2, 1, largest=False).indices, 0.0).view_as(w)


def sparse(inner: Layout, form: str = "sparse-24-bitmask") -> Layout:
    """The codes, or floats, that `inner` makes of two of four inputs, without zeros and with a mask."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, values = inner.write(two_of_four(w))
        weight = tensors.pop("weight")
        is_there = two_of_four(w) != 0
        packed = sum(is_there[:, bit::8].to(torch.uint8) << bit for bit in range(8))
        as_bytes = weight.view(torch.uint8) if weight.element_size() == 1 else weight
        stored = as_bytes[is_there].view(weight.dtype)
        sides = torch.tensor(weight.shape)
        if form == "sparse-bitmask":
            counts = is_there.sum(1)
            tensors |= {"compressed": stored, "row_offsets": counts.cumsum(0) - counts, "shape": sides}
        else:
            tensors |= {"compressed": stored.view(len(w), -1), "shape": sides[:, None]}
        return tensors | {"bitmask": packed}, values

    section = {"quant_method": "compressed-tensors", **inner.config, "sparsity_config": {"format": form}}
    return Layout(section, write)


def plain_floats() -> Layout:
    """In bf16."""
    return Layout({}, lambda w: ({"weight": w.bfloat16()}, w.bfloat16().float()))


def marlin(bits: int, group: int | None) -> Layout:
    """compressed-tensors' `marlin-24`, which writes groups of 128 alone: here smaller ones stand for them."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = w.shape
        of, middle = k if group is None else group, 1 << (bits - 1)
        codes, scales, zeros = rounded(two_of_four(w), bits, of, symmetric=True)
        is_there = two_of_four(w).view(n, k // 4, 4) != 0
        pairs = is_there.int().argsort(dim=-1, descending=True, stable=True)[..., :2].sort(-1).values
        kept = codes.view(n, k // 4, 4).gather(-1, pairs).view(n, k // 2)
        tensors = {"weight_packed": words(_in_tiles(kept.T, bits), bits), "meta": _places(pairs, n, k)}
        stored = scales.T
        if of < k // 2:
            stored = stored.reshape(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(k // of, n)
        assert int(zeros.min()) == middle
        return tensors | {"scale_packed": stored}, valued(codes, scales, zeros, torch.arange(k) // of)

    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": "channel" if group is None else "group",
        "group_size": group,
    }
    config = {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"a": {"weights": weights}}}
    return Layout(config, write)


def _in_tiles(kept: torch.Tensor, bits: int) -> torch.Tensor:
    """[k / 2, n] -> [k / 32, 16 n]: tiles of 16 by 16, four of them beside one another, in the order of 32 threads."""
    inputs, n = kept.shape
    tiles = kept.reshape(inputs // 16, 16, n // 16, 16).permute(0, 2, 1, 3).reshape(-1, 1024)
    order = []
    for thread in range(32):
        column = thread // 4
        for step in range(4):
            eight = [
                16 * row + 256 * (column // 2) + 8 * (column % 2) + 4 * block + step
                for block in (0, 1)
                for row in (2 * (thread % 4), 2 * (thread % 4) + 1, 2 * (thread % 4 + 4), 2 * (thread % 4 + 4) + 1)
            ]
            order += [eight[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)] if bits == 4 else eight
    if bits == 8:
        order = [order[i + j] for i in range(0, 1024, 4) for j in (0, 2, 1, 3)]
    return tiles[:, order].reshape(inputs // 16, 16 * n)


def _places(pairs: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """[n, k / 4, 2] -> int16 [k / 32, 2 n]: CUTLASS's metadata, of four fours to a word."""
    stored = torch.zeros(n * k // 16, dtype=torch.int64)
    nibbles = (pairs[..., 0] | pairs[..., 1] << 2).tolist()
    for row in range(n):
        at = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 4 // 2 * 32 + row % 64 // 8 * 4
        for column in range(k // 16):
            word = sum(nibbles[row][4 * column + i] << 4 * i for i in range(4))
            r, c = at, column
            if r % 2 == 0 and c % 2 == 1:
                r, c = r + 1, c - 1
            elif r % 2 == 1 and c % 2 == 0:
                r, c = r - 1, c + 1
            stored[c // 2 * 2 * n + 2 * r + c % 2] = word
    return torch.where(stored >= 1 << 15, stored - (1 << 16), stored).to(torch.int16).view(k // 32, 2 * n)


def aqlm(bits: int, books: int, *, rows: int = 1, inputs: int = 8) -> Layout:
    """Random codes and codebooks: what they are made of w by is another matter."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        (n, k), generator = w.shape, torch.Generator().manual_seed(w.shape[1])
        codes = torch.randint(1 << bits, (n // rows, k // inputs, books), generator=generator)
        vectors = torch.randn(books, 1 << bits, rows, inputs, generator=generator).half()
        scales = (0.2 + torch.rand(n // rows, 1, 1, 1, generator=generator)).half() / (books * k) ** 0.5
        values = torch.empty(n, k)
        for r in range(n // rows):
            total = sum(vectors[b][codes[r, :, b]].float() for b in range(books)) * float(scales[r])
            for row in range(rows):
                values[r * rows + row] = total[:, row].flatten()
        signed = torch.where(codes >= 1 << (bits - 1), codes - (1 << bits), codes)
        stored = signed.to(torch.int8 if bits <= 8 else torch.int16)
        return {"codes": stored, "codebooks": vectors, "scales": scales}, values

    config = {"quant_method": "aqlm", "nbits_per_codebook": bits, "num_codebooks": books, "in_group_size": inputs,
              "out_group_size": rows, "linear_weights_not_to_quantize": ["lm_head.weight"]}  # fmt: skip
    return Layout(config, write)


def quanto(bits: int, group: int | None, *, has_zero_points: bool = False) -> Layout:
    """Its groups as rows of their own, of which several share a byte, the first part of them in the lowest bits."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        (n, k), ones = w.shape, {"input_scale": torch.ones(()), "output_scale": torch.ones(())}
        if bits == 8:
            scale = (w.abs().amax(1, keepdim=True) / 127).bfloat16()
            codes = (w / scale.float()).round().clamp(-128, 127)
            return {"weight._data": codes.to(torch.int8), "weight._scale": scale, **ones}, codes * scale.float()
        of, most = k if group is None else group, (1 << bits) - 1
        rows = w.reshape(-1, of)
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        scale = ((high - low) / most).bfloat16()
        if has_zero_points:
            shift = (-low / scale.float()).round().clamp(0, most).to(torch.int8)
            codes = (rows / scale.float() + shift).round().clamp(0, most)
            values = scale.float() * (codes - shift)
        else:
            shift = (-low).bfloat16()
            codes = ((rows + shift.float()) / scale.float()).round().clamp(0, most)
            values = scale.float() * codes - shift.float()
        each = len(rows) * bits // 8
        stored = sum(codes[i * each : (i + 1) * each].to(torch.uint8) << bits * i for i in range(8 // bits))
        parts = {"weight._data._data": stored, "weight._scale": scale, "weight._shift": shift}
        return parts | ones, values.view(n, k)

    config = {"quant_method": "quanto", "weights": f"int{bits}", "activations": None, "modules_to_not_convert": None}
    return Layout(config, write)


def sinq(bits: int, group: int, *, has_small_scales: bool = True) -> Layout:
    """sinq's packing, by parts of all groups, and its scales of inputs; the scales of those are quantised, too."""
    per_item = {8: 1, 6: 5, 5: 6, 4: 2, 3: 10, 2: 4, 1: 8}[bits]

    def small(values: torch.Tensor, rows: int) -> tuple[Tensors, torch.Tensor]:
        """In whole numbers of 8 bits, so many to a column."""
        x = values.view(rows, -1)
        least = x.amin(0, keepdim=True).half()
        step = ((x - least.float()).amax(0, keepdim=True) / 255).clamp(min=1e-4).half()
        whole = ((x - least.float()) / step.float()).round().clamp(0, 255).to(torch.uint8)
        return {"x": whole, "s": step, "m": least}, (whole.float() * step.float() + least.float()).view(-1, 1)

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        of_inputs = (0.5 + torch.rand(1, w.shape[1], generator=torch.Generator().manual_seed(bits))).half()
        rows, most = (w / of_inputs.float()).reshape(-1, group), (1 << bits) - 1
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        scale, tensors = ((high - low) / max(most, 1)).half(), {"meta.scale2": of_inputs}
        zero = (-low / scale.float()).round().half()
        values_of = {"scale": scale.float(), "zero": zero.float()}
        for name, one in (("scale", scale), ("zero", zero)):
            if not has_small_scales:
                tensors[f"meta.{name}"] = one
                continue
            parts, values_of[name] = small(one.float(), 32 if name == "scale" else len(one))
            tensors |= {f"meta.{name}.{part}": tensor for part, tensor in parts.items()}
        codes = (rows / values_of["scale"] + values_of["zero"]).round().clamp(0, most)
        n_rows = -(-len(codes) // per_item)
        padded = torch.cat([codes.int(), torch.zeros(n_rows * per_item - len(codes), group, dtype=torch.int32)])
        stored = sum(padded[i * n_rows : (i + 1) * n_rows] << bits * (per_item - 1 - i) for i in range(per_item))
        tensors["W_q"] = stored.to(torch.uint8) if 8 % bits == 0 else stored
        values = ((codes - values_of["zero"]) * values_of["scale"]).view_as(w) * of_inputs.float()
        return tensors, values

    config = {"quant_method": "sinq", "nbits": bits, "group_size": group, "method": "sinq", "tiling_mode": "1D"}
    return Layout(config, write)


def quanto_fp8(kind: str) -> Layout:
    """'float8_e5m2' or 'float8_e4m3fnuz', by torch's own cast, as optimum-quanto makes them (`tensor/qbytes.py`)."""
    dtype = getattr(torch, kind)

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = (w.abs().amax(1, keepdim=True) / torch.finfo(dtype).max).bfloat16()
        codes = (w / scale.float()).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
        ones = {"input_scale": torch.ones(()), "output_scale": torch.ones(())}
        return {"weight._data": codes, "weight._scale": scale, **ones}, codes.float() * scale.float()

    return Layout(
        {"quant_method": "quanto", "quanto_qmap.json": {"a": {"weights": f"q{kind}", "activations": "none"}}}, write
    )


def metal(bits: int) -> Layout:
    """By transformers' own functions."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        stored, scales, offsets = _affine_quantize_tensor(w, 32, bits)
        values = _affine_dequantize_tensor(stored, scales, offsets, 32, bits)
        return {"weight": stored, "scales": scales, "qbiases": offsets}, values.float()

    return Layout({"quant_method": "metal", "bits": bits, "group_size": 32, "modules_to_not_convert": None}, write)


def torchao_int4(form: str, group: int = 32, *, symmetric: bool = False) -> Layout:
    """Packed int4 in pairs (`PLAIN`), or in the tiles of a GPU's kernel (`TILE_PACKED_TO_4D`)."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = w.shape
        groups = w.reshape(n, k // group, group)
        low, high = groups.amin(-1), groups.amax(-1)
        scale = (torch.maximum(high, -low) / 7 if symmetric else (high - low) / 15).bfloat16()
        zero = (torch.zeros_like(low) if symmetric else low + 8 * scale.float()).bfloat16()
        codes = ((groups - zero.float()[..., None]) / scale.float()[..., None]).round().clamp(-8, 7).long()
        values = (scale.float()[..., None] * codes + zero.float()[..., None]).view(n, k)
        codes = codes.view(n, k)
        if form == "PLAIN":
            stored = ((codes[:, ::2] & 15) | (codes[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
            return {"_weight_qdata": stored, "_weight_scale": scale.T, "_weight_zero_point": zero.T}, values
        wide = -(-k // 1024) * 1024
        padded = torch.nn.functional.pad(codes + 8, (0, wide - k))
        both = torch.zeros(wide // group, n, 2, dtype=torch.bfloat16)
        both[: k // group] = torch.stack((scale.T, zero.T), -1)
        return {"_weight_qdata": _in_fragments(padded), "_weight_scale_and_zero": both}, values

    data: dict[str, Any] = {
        "group_size": group,
        "int4_packing_format": {"_type": "Int4PackingFormat", "_data": form},
        "int4_tile_packed_ntile": 8,
    }
    name = "Float8DynamicActivationInt4WeightConfig" if symmetric else "Int4WeightOnlyConfig"
    kind = {"_type": name, "_version": 2, "_data": data}
    return Layout({"quant_method": "torchao", "quant_type": {"default": kind}}, write)


def torchao_int8_whole() -> Layout:
    """int8 with one scale for a matrix (`PerTensor`)."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = (w.abs().amax() / 127.5).view(1, 1)
        codes = (w / scale).round().clamp(-128, 127)
        parts = {"_weight_qdata": codes.to(torch.int8), "_weight_scale": scale}
        return parts | {"_weight_zero_point": torch.zeros(1, 1, dtype=torch.int8)}, codes * scale

    data = {"granularity": {"_type": "PerTensor", "_version": 1, "_data": {}}, "set_inductor_config": True}
    kind = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": data}
    return Layout({"quant_method": "torchao", "quant_type": {"default": kind}}, write)


def scaled_inputs(inner: Layout) -> Layout:
    """torchao's AWQ around it: rows of inputs times numbers of their own meet the codes."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scales = (0.5 + torch.rand(w.shape[1], generator=torch.Generator().manual_seed(3))).bfloat16()
        tensors, values = inner.write(w / scales.float())
        return tensors | {"_weight_act_pre_scale": scales}, values * scales.float()

    data = {"base_config": inner.config["quant_type"]["default"], "step": "prepare_for_loading"}
    kind = {"_type": "AWQConfig", "_version": 1, "_data": data}
    return Layout({"quant_method": "torchao", "quant_type": {"default": kind}}, write)


def _in_fragments(codes: torch.Tensor) -> torch.Tensor:
    """[n, k] -> int32 [n / 8, k / 128, 32, 4], thread by thread; pairs of codes are bytes, the even one in the upper bits."""
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    found = torch.zeros(codes.shape[0] // 8, codes.shape[1] // 128, 32, 4, dtype=torch.int64)
    for thread in range(32):
        rows = pairs[thread // 4 :: 8]
        for inner in range(4):
            first = 16 * inner + thread % 4
            bytes_of = [rows[:, first + step :: 64] for step in (0, 4, 8, 12)]
            for i, byte in enumerate(bytes_of):
                found[:, :, thread, inner] |= (byte >> 4) << 4 * i | (byte & 15) << 4 * (i + 4)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32)


def fp_quant(
    kind: str, transform: str = "hadamard", *, sides: int = 32, scale: float = 1.0, padded: bool = False
) -> Layout:
    """As fp-quant 0.3 has it, its numbers by the formula of its `_dq_fp4`: grid[code] * scale / weight_global_scale.

    kind: 'mxfp4', 'nvfp4' or 'floats'; padded: scales to 128 rows and four columns, as QuTLASS makes them.
    """
    group = 16 if kind == "nvfp4" else 32
    grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = torch.cat((grid, -grid))
    turn = torch.tensor(scipy.linalg.hadamard(sides) * sides**-0.5)
    if transform == "gsr":
        turn = turn[:, (turn.diff(dim=0) != 0).sum(0).argsort()]
    turn = (torch.eye(sides) if transform == "identity" else turn).bfloat16()

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = w.shape
        generator = torch.Generator().manual_seed(n + k)
        codes = torch.randint(16, (n, k), generator=generator)
        if kind == "nvfp4":
            scales = (torch.rand(n, k // group, generator=generator) + 0.1).to(torch.float8_e4m3fn)
        else:
            scales = torch.exp2(torch.randint(-5, -2, (n, k // group), generator=generator)).to(torch.float8_e8m0fnu)
        values = (
            grid[codes].view(n, -1, group) * (scales.float() / scale if kind == "nvfp4" else scales.float())[..., None]
        )
        values = (values if kind == "nvfp4" else values / scale).flatten(1)
        stored = scales.view(torch.uint8)
        if padded:
            stored = torch.nn.functional.pad(stored, (0, -stored.shape[1] % 4, 0, -n % 128), value=9)
        parts = {"qweight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), "scales": stored}
        if kind == "floats":
            parts = {"dqweight": values.bfloat16()}
            values = values.bfloat16().float()
        parts |= {"forward_hadamard_matrix": turn.clone(), "backward_hadamard_matrix": turn.clone()}
        parts |= {one: torch.tensor([scale]).bfloat16() for one in ("weight_global_scale", "act_global_scale")}
        # x H meets the values, so that x meets them times H transposed
        return parts, (values.view(n, -1, sides).double() @ turn.double().T).flatten(1).float()

    method = "quest" if scale == 1.0 else "abs_max"
    config = {"quant_method": "fp_quant", "forward_dtype": "nvfp4" if kind == "nvfp4" else "mxfp4", "backward_dtype": "bf16",
              "forward_method": method, "hadamard_group_size": sides, "transform_init": transform,
              "pseudoquantization": kind == "floats", "store_master_weights": False,
              "modules_to_not_convert": ["lm_head"]}  # fmt: skip
    return Layout(config, write)


def four_over_six(rule: str = "mse", most: int = 6 * 256) -> Layout:
    """As fouroversix 1.0 has it: NVFP4 filled up to 128 rows and 64 inputs, scales in blocks of 128 rows by four.

    most: in codes and scales, what the largest value is.
    """

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        (n, k), generator = w.shape, torch.Generator().manual_seed(w.shape[1])
        rows, groups = -(-n // 128) * 128, -(-k // 64) * 4
        codes = torch.randint(16, (rows, groups * 16), generator=generator)
        scales = (torch.rand(rows, groups, generator=generator) * 200 + 1).to(torch.float8_e4m3fn)
        r, c = torch.meshgrid(torch.arange(rows), torch.arange(groups), indexing="ij")
        places = (r // 128 * (groups // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        stored = torch.empty(rows * groups, dtype=torch.uint8)
        stored[places.flatten()] = scales.view(torch.uint8).flatten()
        largest = w.abs().amax().float()
        grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        parts = {
            "quantized_weight_values": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
            "quantized_weight_scale_factors": stored.view(torch.float8_e4m3fn),
            "quantized_weight_amax": largest,
            "quantized_weight_metadata": torch.tensor([n, k, rows, groups * 16, 1, 1]),
        }
        values = grid[codes].view(rows, groups, 16) * (scales.float() * (largest / most))[..., None]
        return parts, values.flatten(1)[:n, :k].contiguous()

    config = {"quant_method": "fouroversix", "dtype": "nvfp4", "scale_rule": rule, "keep_master_weights": False,
              "module_config_overrides": None, "modules_to_not_convert": ["lm_head"]}  # fmt: skip
    return Layout(config, write)
