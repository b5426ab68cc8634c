"""`quantization_config` of a config.json: which program quantised a checkpoint's weights, and how its numbers are read.

What each matrix holds is seen from its tensors (`formats.coded`); here stands what they cannot say, and the refusal, by name,
of everything that would be read wrongly: methods, bits, layouts and sparsity that are not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from diptych.ground.errors import ConfigError, LoadError
from diptych.ground.formats import KEPT_MXFP4, KEPT_NVFP4, WIDE_BITS, KeptFormat
from diptych.models.config import HfConfig
from diptych.models.quantised.auto_round import read_auto_round
from diptych.models.quantised.compressed import read_compressed
from diptych.models.quantised.fields import (
    HINT,
    OF_CACHE_NOTE,
    Quantisation,
    Scheme,
    block_of,
    group_size,
    is_module,
    kept_fp8,
    kept_groups,
    one_of,
    refuse,
)
from diptych.models.quantised.gemma import read_gemma
from diptych.models.quantised.hqq import read_hqq
from diptych.models.quantised.quanto import read_quanto
from diptych.models.quantised.quark import read_quark
from diptych.models.quantised.torchao import read_torchao
from diptych.models.quantised.vptq import read_vptq

OWN = "diptych"  # what `diptych quantize` writes
AWQ_LAYOUTS = ("gemm", "gemv", "gemv_fast", "marlin")
AWQ_BACKENDS = (  # kernels of AutoAWQ and GPTQModel, which change no layout; llm-awq has one of its own
    "autoawq", "auto", "auto_trainable", "machete", "marlin", "exllama_v1", "exllama_v2", "gemm", "gemm_triton", "gemv",
    "gemv_fast", "torch_awq", "torch_fused_awq",
)  # fmt: skip
MLX = "mlx"  # which names itself nowhere
METAL = "metal"  # of transformers, by MLX's kernels
MLX_MODES = {"mxfp4": (4, 32, KEPT_MXFP4), "nvfp4": (4, 16, KEPT_NVFP4), "mxfp8": (8, 32, None)}  # beside "affine"
# what the largest value of a matrix is in codes and scales, by Four Over Six's rule for these
FOUR_OVER_SIX = {"mse": 6 * 256, "mae": 6 * 256, "abs_max": 6 * 256, "static_6": 6 * 448, "static_4": 4 * 448}
MLX_GROUPS = (32, 64, 128)
QUARK_PARTS = tuple(f"{level}{one}" for level in ("", "0.", "1.") for one in ("scale", "zero_point"))
MODELOPT: dict[str, KeptFormat | None] = {  # by quant_algo
    "nvfp4": KEPT_NVFP4, "w4a16_nvfp4": KEPT_NVFP4, "fp8": kept_fp8(None), "fp8_per_channel_per_token": kept_fp8(None),
    "fp8_pb_wo": kept_fp8((128, 128)), "mxfp8": None,
}  # fmt: skip
# how the tensors end in which one matrix lies: its codes, and what belongs to them and is no parameter
CODES = (
    "qweight", "weight_packed", "embedding_quantized", "W_q", "_weight_qdata", "compressed", "codes", "weight._data",
    "weight._data._data", "indices", "dqweight", "quantized_weight_values", "B",
    "trellis",
)  # fmt: skip
BESIDE_CODES = (
    "qzeros", "scales", "s", "g_idx", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_scale_inv",
    "input_scale", "input_zero_point", "activation_scale", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
    "weight.nested_quant_map", "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4", "SCB",
    "weight_format", "weight_global_scale", "weight_scale_2", "input_global_scale", "q_scale", "k_scale", "v_scale", "biases",
    "output_scale", "output_zero_point", "embedding_scale", "input_activation_scale", "output_activation_scale",
    "k_cache_scale", "v_cache_scale", "kv_scale", "k_zero_point", "v_zero_point", "_weight_scale", "_weight_zero_point",
    "_weight_scale_and_zero", "_weight_per_tensor_scale", "_weight_act_pre_scale", "bitmask", "row_offsets", "shape",
    "scale_packed", "meta", "codebooks", "centroids.weight", "res_centroids.weight",
    "outlier_centroids.weight", "outlier_indices", "perm", "weight_bias", "quantized_weight_scale_factors",
    "quantized_weight_amax", "quantized_weight_metadata",
    "suh", "svh", "mcg", "mul1", "act_global_scale", "weight_zero_point_2", "input_scale_2",
    *(f"{part}_quantizer.{one}" for part in ("weight", "input", "output") for one in QUARK_PARTS),
    "forward_hadamard_matrix", "backward_hadamard_matrix", "weight._scale", "weight._shift", "qbiases",
    *(f"meta.{one}" for one in ("scale2", "awq_scale")),
    *(f"meta.{one}{part}" for one in ("scale", "zero") for part in ("", ".x", ".s", ".m")),
)  # fmt: skip
BESIDE_HQQ = (
    "scale", "zero", "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale",
    "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize",
    "round_zero",
)  # fmt: skip
BESIDE_STACKS = ("_scale_inv", "_activation_scale")  # behind the name of stacked experts, of fp8
# whose layers have no matrix but in projections, all of which BitNet's online mode rounds
ROUNDED = ("BitNetForCausalLM", "LlamaForCausalLM")


def own_section(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a config.json says of weights that `diptych quantize` packed; None: it did not."""
    section = raw.get("quantization_config")
    return section if isinstance(section, dict) and section.get("quant_method") == OWN else None


def packed_for_cpu(backend: str, reason: str, *, hint: str) -> ConfigError:
    """The refusal of such weights anywhere but on the backend that multiplies them."""
    return ConfigError(
        f"the checkpoint is packed for the cpu backend, and the backend is {backend} ({reason})", hint=hint
    )


def quantisation_of(config: HfConfig) -> Quantisation | None:
    """What the config says; None for a checkpoint of plain floats. LoadError for what is not read."""
    raw = config.raw.get("quantization_config", config.raw.get("compression_config"))
    of_mlx = config.raw.get("quantization")  # which it writes by both names, in older files by this one alone
    if isinstance(of_mlx, Mapping) and "bits" in of_mlx and (not raw or raw == of_mlx):
        return _mlx(HfConfig(of_mlx, path=f"quantization of {config.path}"))
    if not raw:
        return None
    if not isinstance(raw, Mapping):
        raise LoadError(f"quantization_config in {config.path} is a {type(raw).__name__}; it must be an object")
    section = HfConfig(raw, path=f"quantization_config of {config.path}")
    method = raw.get("quant_method", raw.get("quantization_method"))  # the second of SINQ's own files
    method = "auto-round" if method == "intel/auto-round" else method  # as older files have it
    if method is None and any(
        raw.get(f"load_in_{bits}bit") is True for bits in (4, 8)
    ):  # before transformers named methods
        method = "bitsandbytes"
    read = READERS.get(str(method))
    if read is None:
        raise LoadError(
            f"{config.path} says the weights are quantised with {method!r}{UNREAD.get(str(method), '')}; of quantised files "
            f"{', '.join(READERS)}, GGUF and those of `diptych quantize` are read",
            hint=HINT,
        )
    if method == "fp8" and "expert_dtype" in config.raw:  # beside the section in DeepSeek V4's files
        section = HfConfig({"expert_dtype": config.raw["expert_dtype"], **raw}, path=section.path)
    how = read(section)
    named = config.raw.get("architectures")
    if how.is_online and not (isinstance(named, list) and named and named[0] in ROUNDED):
        raise LoadError(
            f"quantization_mode in {section.path} is 'online', and which weights of {named!r} that rounds is not known; it is "
            f"of {' and '.join(ROUNDED)}",
            hint="have transformers pack them first (quantization_mode 'offline')",
        )
    return how


def _awq(section: HfConfig) -> Quantisation:
    bits, group = ("bits", "group_size") if "bits" in section.raw else ("w_bit", "q_group_size")  # the older names
    one_of(section, "backend", (None, *AWQ_BACKENDS), None)
    layout = one_of(section, "version", AWQ_LAYOUTS, "gemm")
    if layout == "marlin":
        one_of(section, "zero_point", (False,), True)  # as it has none
    inputs = group_size(section, group)
    is_symmetric = not section.flag("zero_point", True) and layout in ("gemm", "marlin")
    # Quark's exports by this name (`custom_mode` of its versions 0.6 to 0.9): the field is its own
    is_ordered = one_of(section, "pack_method", ("reorder", "order"), "reorder") == "order"
    kept = kept_groups(4, inputs, "f16", is_symmetric=is_symmetric)
    if kept is not None and layout == "gemv_fast":
        kept = replace(kept, grid="minima16")
    return Quantisation(
        method="awq",
        bits=one_of(section, bits, (4,), 4),
        group=inputs,
        layout=layout,
        has_zeros=not is_symmetric,
        is_ordered=is_ordered,
        is_signed=is_symmetric and "pack_method" in section.raw,
        kept=kept,
    )


def _mlx(section: HfConfig) -> Quantisation:
    """Of mlx-lm: scale and offset of each group. Single matrices may have bits and groups of their own, or be plain floats."""
    own_groups = {}
    for name, own in section.raw.items():
        if isinstance(own, Mapping):
            own_groups[name] = _mlx_scheme(HfConfig(own, path=f"{name} in {section.path}"))[1]
    bits, group, kept = _mlx_scheme(section)
    return Quantisation(method=MLX, bits=bits, group=group, own_groups=own_groups, kept=kept)


def _mlx_scheme(section: HfConfig) -> tuple[int, int, KeptFormat | None]:
    """(bits, inputs that share a scale, what holds them)."""
    if section.flag("global_scale", False):
        refuse(section, "global_scale", "scales of whole matrices are not read")
    mode = one_of(section, "mode", ("affine", *MLX_MODES), "affine")
    if mode != "affine":
        bits, group, kept = MLX_MODES[mode]
        one_of(section, "bits", (bits,), bits)
        return bits, one_of(section, "group_size", (group,), group), kept
    bits, group = one_of(section, "bits", (2, 3, 4, 5, 6, 8), 4), one_of(section, "group_size", MLX_GROUPS, 64)
    grid = "minima" if bits == 8 else "minima16"
    held = KeptFormat(kind=f"group{bits}", group=group, scale="bf16", grid=grid, is_wide=bits >= WIDE_BITS)
    return bits, group, held


def _metal(section: HfConfig) -> Quantisation:
    """MLX's groups as transformers makes them, by names of its own."""
    bits, group = one_of(section, "bits", (2, 4, 8), 4), group_size(section, "group_size")
    if group is None:
        refuse(section, "group_size", "it must be a whole number of inputs")
    kept = kept_groups(bits, group, "f32", is_symmetric=False)
    return Quantisation(method=METAL, bits=bits, group=group, kept=kept and replace(kept, grid="minima"))


def _aqlm(section: HfConfig) -> Quantisation:
    """Sums of vectors of codebooks, whose sizes the tensors show."""
    return Quantisation(method="aqlm", bits=section.integer("nbits_per_codebook", 16))


def _fp_quant(section: HfConfig) -> Quantisation:
    """MXFP4 and NVFP4 of rotated weights, whose rotation lies beside each matrix."""
    kind = one_of(section, "forward_dtype", ("mxfp4", "nvfp4"), "nvfp4")
    one_of(section, "store_master_weights", (False,), False)  # which are rounded whenever the model runs
    is_turned = one_of(section, "transform_init", ("hadamard", "identity", "gsr"), "hadamard") != "identity"
    is_plain = section.flag("pseudoquantization", False)
    has_scale = one_of(section, "forward_method", ("abs_max", "quest"), "abs_max") == "abs_max" and kind == "mxfp4"  # 3
    kept = None if is_turned or is_plain or has_scale else KEPT_MXFP4 if kind == "mxfp4" else KEPT_NVFP4
    has = "16 bits, and are not rotated: that is in the weights" if kept is None else "8 bits"
    return Quantisation(
        method="fp_quant", bits=4, group=32 if kind == "mxfp4" else 16, kept=kept, note=f"activations have {has}"
    )


def _four_over_six(section: HfConfig) -> Quantisation:
    """NVFP4, whose groups reach to 4 or to 6, with the largest of a matrix beside it."""
    one_of(section, "dtype" if section.raw.get("weight_dtype") is None else "weight_dtype", ("nvfp4",), "nvfp4")
    one_of(section, "keep_master_weights", (False,), False)
    one_of(section, "weight_round_style", ("nearest", None), None)
    if section.raw.get("module_config_overrides"):
        refuse(section, "module_config_overrides", "modules that are all quantised alike can be read")
    usual = one_of(section, "scale_rule", tuple(FOUR_OVER_SIX), "mse")
    rule = one_of(section, "weight_scale_rule", (None, *FOUR_OVER_SIX), None) or usual
    return Quantisation(
        method="fouroversix",
        bits=4,
        largest=FOUR_OVER_SIX[rule],
        kept=KEPT_NVFP4,
        note="activations have 8 bits, not their publisher's 4",
    )


def _sinq(section: HfConfig) -> Quantisation:
    """As HQQ, with a scale of each input; which of its numbers are quantised themselves, the tensors show."""
    one_of(section, "tiling_mode", ("1d",), "1d")
    one_of(section, "method", ("sinq", "asinq"), "sinq")
    bits = one_of(section, "nbits", (8, 6, 5, 4, 3, 2, 1), 4)
    return Quantisation(method="sinq", bits=bits, note="values are made in fp32, not in its 16 bits")


def _exl3(section: HfConfig) -> Quantisation:
    """Of ExLlamaV3; each matrix says itself how many bits it has, and by which rule values are made of them."""
    del section
    return Quantisation(method="exl3", note="values are made in fp32, and rotations multiplied in")


def _gptq(section: HfConfig) -> Quantisation:
    layout = one_of(section, "checkpoint_format", ("gptq", "gptq_v2", "gptq_p", "marlin"), "gptq")
    widths = (2, 3, 4, 5, 6, 7, 8) if layout == "gptq_p" else (2, 3, 4, 8)
    bits = one_of(section, "bits", widths, None)
    one_of(section, "pack_dtype", ("int32",), "int32")
    group = group_size(section, "group_size")
    # as AutoGPTQ said it before it named formats
    if one_of(section, "is_marlin_format", (True, False, None), False) or layout == "marlin":
        return _marlin(section, group)
    return Quantisation(
        method="gptq",
        bits=bits,
        group=group,
        own_schemes=dict(_dynamic(section, bits, group, widths)),
        layout="planes" if layout == "gptq_p" else "gemm",
        has_zeros=True,
        has_order=section.flag("desc_act", False) and group is not None,
        zero_added=1 if layout == "gptq" else 0,
        kept=kept_groups(8 if bits == 7 else bits, group, "f16", is_symmetric=section.flag("sym", True)),
    )


def _marlin(section: HfConfig, group: int | None) -> Quantisation:
    """AutoGPTQ's words for a kernel, which have neither zero points nor an order of inputs."""
    for key, wanted in (("bits", 4), ("sym", True), ("desc_act", False)):
        one_of(section, key, (wanted,), wanted)
    if section.raw.get("dynamic"):
        refuse(section, "dynamic", "marlin has no mixtures")
    kept = kept_groups(4, group, "f16", is_symmetric=True)
    return Quantisation(method="gptq", bits=4, group=group, layout="marlin", kept=kept)


def _dynamic(section: HfConfig, bits: int, group: int | None, widths: tuple[int, ...]) -> Iterator[tuple[str, Scheme]]:
    """GPTQModel's mixtures, by pattern of a name. Those behind "-:" are floats, which the files show."""
    usual = {"bits": bits, "group_size": -1 if group is None else group}
    for pattern, own in section.section("dynamic").raw.items():
        if pattern.startswith("-:") or not own:
            continue
        if not isinstance(own, Mapping):
            raise LoadError(f"dynamic of {section.path} has a {type(own).__name__} for {pattern}; it must be an object")
        part = HfConfig({**usual, **own}, path=f"{pattern} in dynamic of {section.path}")
        yield pattern, Scheme(one_of(part, "bits", widths, None), group_size(part, "group_size"))


def _modelopt(section: HfConfig) -> Quantisation:
    """NVIDIA's TensorRT Model Optimizer: NVFP4, whose groups have 16 inputs, with a scale for each matrix; FP8; mixtures."""
    if section.raw.get("quant_algo") is None and (
        section.raw.get("kv_cache_quant_algo") or section.raw.get("kv_cache_scheme")
    ):
        return Quantisation(method="modelopt", note=OF_CACHE_NOTE)
    algorithm = one_of(section, "quant_algo", (*MODELOPT, "mixed_precision"), None)
    if algorithm == "mixed_precision":
        layers = section.section("quantized_layers")
        each = [one_of(layers.section(name), "quant_algo", tuple(MODELOPT), None) for name in layers.raw]
        if not each:
            refuse(section, "quantized_layers", "it must say how each layer of the mixture is quantised")
        algorithm = max(each, key=each.count)
    kept = MODELOPT[algorithm]
    return Quantisation(
        method="modelopt",
        bits=4 if kept == KEPT_NVFP4 else 8,
        kept=kept,
        note=f"activations have {8 if kept == KEPT_NVFP4 else 16} bits; scales for them and for a cache of 8 bits in the file "
        "are not used",
    )


def _fbgemm_fp8(section: HfConfig) -> Quantisation:
    """E4M3 with a scale of each row, as Meta publishes Llama 3.1 405B."""
    section.optional_number("activation_scale_ub")
    return Quantisation(
        method="fbgemm_fp8",
        kept=kept_fp8(None),
        note="activations have 16 bits, and no upper bound (activation_scale_ub)",
    )


def _mxfp8(section: HfConfig) -> Quantisation:
    """As `_fp8`, with a power of two for 32 inputs."""
    one_of(section, "scale_fmt", ("ue8m0",), "ue8m0")
    return _fp8(HfConfig({"weight_block_size": [1, 32], **section.raw}, path=section.path))


def _fp8(section: HfConfig) -> Quantisation:
    one_of(section, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    one_of(section, "activation_scheme", ("dynamic", "static", None), "dynamic")  # None: Quark's, of weights alone
    one_of(section, "scale_fmt", ("float", "ue8m0", None), None)  # which the scales themselves show
    has_fp4 = one_of(section, "expert_dtype", ("fp8", "fp4", None), None) == "fp4"  # DeepSeek V4's
    block = block_of(section, "weight_block_size")
    notes = (
        ["scales of activations in the file are not used"] if section.raw.get("activation_scheme") == "static" else []
    )
    notes += [OF_CACHE_NOTE] if section.raw.get("kv_cache_scheme") is not None else []
    kept = KEPT_MXFP4 if has_fp4 else kept_fp8(block)
    return Quantisation(method="fp8", block=block, kept=kept, note="; ".join(notes))


def _bitsandbytes(section: HfConfig) -> Quantisation:
    is_4bit, is_8bit = section.flag("load_in_4bit", False), section.flag("load_in_8bit", False)
    if is_4bit == is_8bit:
        refuse(section, "load_in_4bit", f"one of it and load_in_8bit ({is_8bit}) must be true", default=False)
    if is_4bit:
        grid = one_of(section, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        usual = KeptFormat(kind="group4", group=64, scale="bf16", grid=grid)  # no config names the size of its blocks
        return Quantisation(
            method="bitsandbytes",
            bits=4,
            kept=usual,
            note="fractions that are kept are the nearest whole numbers of 8 bits, their scales in bf16",
        )
    return Quantisation(
        method="bitsandbytes",
        bits=8,
        kept=kept_groups(8, None, "f32", is_symmetric=True),
        note="large activations are not taken apart (llm_int8_threshold): all have 15 bits",
    )


def _bitnet(section: HfConfig) -> Quantisation:
    """Ternary weights with one scale for each matrix, packed, or rounded whenever the model runs."""
    linear = one_of(section, "linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    mode = one_of(section, "quantization_mode", ("offline", "online"), "offline")
    if section.flag("use_rms_norm", False):
        refuse(section, "use_rms_norm", "norms inside of projections are not run", default=False)
    plain = section.raw.get("modules_to_not_convert")
    is_online = linear == "autobitlinear" and mode == "online"  # the other class packs whatever the mode
    if plain is not None and not (isinstance(plain, list) and all(is_module(one) for one in plain)):
        refuse(section, "modules_to_not_convert", "it must be a list of names of modules")
    if is_online and plain is not None and not any("lm_head".endswith(one) for one in plain):
        refuse(section, "modules_to_not_convert", "without lm_head that would be rounded, too, which is not read")
    return Quantisation(
        method="bitnet",
        bits=2,
        divides=linear == "bitlinear",
        is_online=is_online,
        plain=tuple(plain or ()),
        kept=KeptFormat(kind="group2", group=128, scale="f32" if linear == "bitlinear" else "bf16"),
        note="activations have 8 bits with a scale for each row and powers of two below it by group, not by row alone",
    )


UNREAD = {  # what is known, and why it is not read
    "eetq": ", in the order of a GPU that the file does not name",
    "higgs": ", whose vectors are rotated",
    "spqr": ", with single weights beside its groups",
    "nvfp4": ", which transformers makes when it loads and cannot save",
}
READERS = {
    "awq": _awq, "gptq": _gptq, "auto-round": read_auto_round, "compressed-tensors": read_compressed, "fp8": _fp8,
    "mxfp8": _mxfp8, "fbgemm_fp8": _fbgemm_fp8, "bitsandbytes": _bitsandbytes, "modelopt": _modelopt, "bitnet": _bitnet,
    "quark": read_quark, "gemma": read_gemma, "hqq": read_hqq, "torchao": read_torchao,
    "aqlm": _aqlm, "sinq": _sinq, "fp_quant": _fp_quant, "fouroversix": _four_over_six,
    "quanto": read_quanto, "vptq": read_vptq, "exl3": _exl3, METAL: _metal,
}  # fmt: skip
