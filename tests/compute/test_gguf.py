"""GGUF files against transformers: the checkpoint that they were made from, and what transformers itself reads out of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from golden import ask_reference, check_golden
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from diptych.compute.formats.gguf import GgufCheckpoint
from diptych.compute.formats.gguf_codes import FEW_BITS
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.cost.parameters import parameter_count
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.models.contents import contents_of
from diptych.models.gguf.checkpoint import count_parameters, load_gguf_spec, read_config
from diptych.models.gguf.file import BLOCK_TYPES, open_gguf
from gguf_files import ARCHITECTURES, Tensors, gguf_reference, joined, quantised, write_gguf
from stepping import Stepper

REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_gguf_file_gives_the_logits_of_the_checkpoint_it_was_made_from(family: str, tmp_path: Path) -> None:
    """Rows of q and k, norms plus 1, stacked experts: each of them undone, or the text is noise."""
    reference = gguf_reference(family)
    path = write_gguf(reference, tmp_path / "model.gguf")
    model = load_model(path, REFERENCE)
    check_golden(model, ask_reference(reference, path, new_tokens=6), chunk=7)
    assert model.n_parameters == parameter_count(load_gguf_spec(path)) == count_parameters(open_gguf(path))


ROPES = {
    "llama 3": ("llama", {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}),
    "yarn": ("qwen2", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}),
    "linear": ("qwen3", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    "longrope": ("phi3", {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2, 3, 4],
                          "long_factor": [1.0, 1.5, 2, 3, 4, 5, 6, 7], "original_max_position_embeddings": 64}),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_a_rope_that_is_scaled_is_scaled_alike(name: str, tmp_path: Path) -> None:
    """Llama 3's rule and Phi 3's two sets lie in tensors, not in the metadata: a reader that skips them is wrong far away."""
    family, rope = ROPES[name]
    length = rope.get("original_max_position_embeddings")  # Phi 3 has it beside the others
    reference = gguf_reference(family, rope_parameters=rope, original_max_position_embeddings=length)
    path = write_gguf(reference, tmp_path / "model.gguf")
    golden = ask_reference(reference, path, prompt_tokens=80, new_tokens=8)
    check_golden(load_model(path, REFERENCE), golden, chunk=None)


@pytest.mark.parametrize(("family", "kind"), [("llama", "F32"), ("qwen3_moe", "F32"), ("glm", "F32")])
def test_joined_tensors_are_taken_apart(family: str, kind: str, tmp_path: Path) -> None:
    """Old files of GLM-4, and what the converter makes of any model when asked to join projections."""
    reference = gguf_reference(family)
    path = write_gguf(reference, tmp_path / "model.gguf", choose=lambda name: kind, change=joined)
    golden = ask_reference(reference, path, new_tokens=8)
    check_golden(load_model(path, REFERENCE), golden, chunk=7)


def test_joined_tensors_have_the_rows_that_the_metadata_give_them(tmp_path: Path) -> None:
    """With another number of heads k and v were cut out of the wrong places."""
    metadata = {"attention.head_count_kv": 1}
    path = write_gguf(gguf_reference("glm"), tmp_path / "model.gguf", change=joined, metadata=metadata)
    with pytest.raises(LoadError, match=r"attn_qkv.* joins 128 rows; its metadata calls for 0 to 63 and 96 to 111 and"):
        load_model(path, REFERENCE)


def test_experts_of_gpt_oss_may_have_gate_and_up_in_two_types(tmp_path: Path) -> None:
    """As mixed files have it: each by its own blocks, with its own bias. The reference has the values that the blocks hold."""
    reference = gguf_reference("gpt_oss")
    kinds = {"gate": gguf.GGMLQuantizationType.Q4_0, "up": gguf.GGMLQuantizationType.Q8_0}
    with torch.no_grad():
        for name, values in reference.named_parameters():
            if name.endswith("experts.gate_up_proj"):  # [expert, inputs, outputs], gate and up in turn
                for first, kind in enumerate(kinds.values()):
                    part = values[..., first::2].transpose(1, 2).contiguous().numpy()
                    held = gguf.dequantize(gguf.quantize(part, kind), kind)
                    values[..., first::2] = torch.from_numpy(held).transpose(1, 2)
    path = write_gguf(
        reference,
        tmp_path / "model.gguf",
        choose=lambda name: next(
            (kind.name for part, kind in kinds.items() if f"ffn_{part}_exps.weight" in name), "F32"
        ),
    )
    assert {tensor.type.name for name, tensor in open_gguf(path).tensors.items() if name.endswith("exps.weight")} == {
        "Q4_0", "Q8_0", "F32",
    }  # fmt: skip
    check_golden(load_model(path, REFERENCE), ask_reference(reference, path, new_tokens=4), chunk=7)


def test_llama_4_with_128_experts_norms_no_queries(tmp_path: Path) -> None:
    """Maverick, which a file tells from Scout by that number alone; and Maverick has a mixture on every other layer."""
    reference = gguf_reference("llama4", num_local_experts=128, num_experts_per_tok=1, use_qk_norm=False)
    path = write_gguf(reference, tmp_path / "model.gguf")
    check_golden(load_model(path, REFERENCE), ask_reference(reference, path, new_tokens=4), chunk=7)


@pytest.mark.parametrize(
    ("called", "family", "fields"),
    [
        # its converter takes q, k and v apart and reorders them as a Llama's
        ("internlm2", "llama", {"attention_bias": False, "mlp_bias": False}),
        ("exaone", "exaone", {}),
        ("pangu-embedded", "pangu", {}),
        ("minicpm", "minicpm", {}),
    ],
)
def test_what_transformers_has_no_class_of_is_another_by_its_name(
    called: str, family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Rows of q and k as that name's converter leaves them."""
    reference = gguf_reference(family, **fields)
    metadata = {"attention.scale": None} if called == "minicpm" else {}  # a Granite's converter has it
    path = write_gguf(reference, tmp_path / "model.gguf", called=called, metadata=metadata)
    assert open_gguf(path).metadata["general.architecture"] == called
    check_golden(load_model(path, REFERENCE), ask_reference(reference, path, new_tokens=4), chunk=7)


def test_an_older_minicpm_scales_as_the_first_did(tmp_path: Path) -> None:
    """Its files had no keys for that; llama.cpp has the numbers in its code, but divides logits by a fraction."""
    width, layers = 64, 3
    fields = {"embedding_multiplier": 12.0, "residual_multiplier": 1.4 / layers**0.5, "logits_scaling": width / 256}
    reference = gguf_reference("minicpm", **fields)
    keys = dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale", "attention.scale"))
    path = write_gguf(reference, tmp_path / "model.gguf", called="minicpm", metadata=keys)
    check_golden(load_model(path, REFERENCE), ask_reference(reference, path, new_tokens=4), chunk=7)


def whole_latents(tensors: Tensors) -> Tensors:
    left = dict(tensors)
    for name in tensors:
        if ".attn_k_b." in name:
            keys, values = (left.pop(name.replace("k_b", one)) for one in ("k_b", "v_b"))
            left[name.replace("k_b", "kv_b")] = np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(
                -1, values.shape[-1]
            )
    return left


def test_latents_may_be_expanded_by_one_tensor(tmp_path: Path) -> None:
    """Files of DeepSeek from before llama.cpp took latent attention apart: heads of their own width, kv_b whole."""
    reference = gguf_reference("deepseek_v2")
    sizes = {"attention.key_length": 24, "attention.value_length": 12, "attention.head_count_kv": 4,
             "attention.key_length_mla": None, "attention.value_length_mla": None}  # fmt: skip
    path = write_gguf(reference, tmp_path / "model.gguf", change=whole_latents, metadata=sizes)
    check_golden(load_model(path, REFERENCE), ask_reference(reference, path, new_tokens=4), chunk=7)


def test_layers_that_only_draft_are_left_alone(tmp_path: Path) -> None:
    """GLM-4.5's files end in such a layer, which counts as a block."""
    reference = gguf_reference("glm4_moe")

    def with_drafter(tensors: Tensors) -> Tensors:
        copies = {name.replace("blk.2.", "blk.3."): values for name, values in tensors.items() if "blk.2." in name}
        return tensors | copies | {"blk.3.nextn.eh_proj.weight": np.zeros((64, 128), dtype=np.float32)}

    path = write_gguf(
        reference, tmp_path / "m.gguf", change=with_drafter, metadata={"block_count": 4, "nextn_predict_layers": 1}
    )
    model = load_model(path, REFERENCE)
    check_golden(model, ask_reference(reference, path, new_tokens=4), chunk=7)
    assert model.n_parameters == parameter_count(load_gguf_spec(path)) == count_parameters(open_gguf(path))


def test_keys_of_layers_that_attend_to_another_s_are_left_alone(tmp_path: Path) -> None:
    """Published files of Gemma 3n hold them, as its checkpoints do."""
    reference = gguf_reference("gemma3n")

    def with_all_keys(tensors: Tensors) -> Tensors:
        names = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
        return tensors | {f"blk.{layer}.{name}": tensors[f"blk.0.{name}"] for layer in (4, 5) for name in names}

    path = write_gguf(reference, tmp_path / "m.gguf", change=with_all_keys)
    model = load_model(path, REFERENCE)
    check_golden(model, ask_reference(reference, path, new_tokens=4), chunk=7)
    assert model.n_parameters == parameter_count(load_gguf_spec(path)) == count_parameters(open_gguf(path))


def test_widths_of_gemma_3n_may_differ_by_layer(tmp_path: Path) -> None:
    """Sizes between the published ones (Matformer) were refused, as the width is an array there."""
    widths = [96, 64, 96, 128, 96, 64]
    reference = gguf_reference("gemma3n", intermediate_size=widths)
    path = write_gguf(reference, tmp_path / "m.gguf")
    model = load_model(path, REFERENCE)
    assert [layer.mlp.ffn for layer in model.spec.layers] == widths  # type: ignore[union-attr]
    check_golden(model, ask_reference(reference, path, new_tokens=4), chunk=7)


@pytest.mark.parametrize("freqs", [[1.0] * 4, [1.0] * 6 + [8.0] * 6, [1e30] * 6 + [1.0] * 6])
def test_pairs_that_gemma_4_does_not_turn_come_last(freqs: list[float], tmp_path: Path) -> None:
    """Other divisors mean other mathematics."""

    def other(tensors: Tensors) -> Tensors:
        return tensors | {"rope_freqs.weight": np.array(freqs, dtype=np.float32)}

    path = write_gguf(gguf_reference("gemma4"), tmp_path / "m.gguf", change=other)
    with pytest.raises(LoadError, match=r"rope_freqs.weight in .* must hold 12 numbers: 1 for pairs that turn"):
        load_gguf_spec(path)


@pytest.mark.parametrize(
    ("family", "metadata", "said"),
    [
        ("gemma4", {"attention.head_count_kv": [2, 1, 1, 1]}, "head_count_kv .* differs between layers of one kind"),
        ("gemma4", {"attention.head_count_kv": [2, 1]}, "head_count_kv .* differs between layers of one kind"),
        ("gemma4", {"feed_forward_length": [96, 96, 0, 96]}, "feed_forward_length .* whole numbers of at least 1"),
        ("gemma4", {"feed_forward_length": [96, 64]}, "has 2 entries; the model has 4 layers"),
        ("gemma4", {"rope.dimension_count": 12}, "rope.dimension_count .* is 12 of heads of 24"),
        ("gemma3", {"expert_count": 4}, "expert_count .* is 4; it changes the mathematics"),
        ("granite", {"rope.scaling.finetuned": False}, r"rope\.scaling\.finetuned .* is False"),
        ("glm4_moe", {"expert_gating_func": 1}, "expert_gating_func .* is 1"),
        ("deepseek_v2", {"expert_gating_func": 3}, "expert_gating_func .* is 3"),
        ("deepseek_v2", {"rope.dimension_count": 500}, r"rope\.dimension_count is 500 of heads of"),
        ("cohere2", {"attention.sliding_window_pattern": -1}, "sliding_window_pattern is -1"),
        ("cohere2", {"rope.freq_base_swa": 7.0}, "freq_base_swa is 7.0"),
        ("qwen2", {"rope.scaling.alpha": 1000.0}, r"rope\.scaling\.alpha .* is 1000"),
        ("llama4", {"attention.sliding_window": 0}, "sliding_window .* is 0"),
        ("gemma3n", {"attention.shared_kv_layers": 6}, "num_kv_shared_layers .* is 6; at most 5"),
        ("gemma3n", {"altup.num_inputs": 9}, "altup_num_inputs .* is 9; at most 8"),
        ("llama", {"nextn_predict_layers": 3}, "3 blocks, of which 3 draft"),
        ("llama", {"attention.key_length": 0}, "are 0 wide"),  # was a division by zero
        ("granitemoehybrid", {"embedding_length": 0}, "hidden_size in .* is 0"),  # likewise
        ("qwen3_5", {"attention.recurrent_layers": [True]}, "recurrent_layers in .* must hold 4 truth values"),
        ("qwen3_5", {"attention.recurrent_layers": [1, 0, 1, 0]}, "recurrent_layers in .* must hold 4 truth values"),
        ("nemotron_h", {"feed_forward_length": [0, 96]}, "feed_forward_length in .* must hold 8 whole numbers"),
        ("nemotron_h", {"feed_forward_length": None}, "feed_forward_length in .* must hold 8 whole numbers"),
        ("nemotron_h", {"ssm.group_count": 3}, "each must be at least 1 and divide the next"),
        ("mamba2", {"ssm.group_count": 3}, "each must be at least 1 and divide the next"),
        ("jamba", {"ssm.inner_size": 100}, "inner_size in .* is 100; it must be a multiple of the model's width, 64"),
        ("jamba", {"attention.head_count_kv": [2, 0]}, "head_count_kv in .* must hold 4 whole numbers"),
        ("mamba", {"ssm.state_size": 0}, "mamba_d_state in .* is 0"),
        ("mamba", {"ssm.dt_b_c_rms": False, "attention.scale": 0.5}, r"attention\.scale .* is 0.5"),
    ],
)
def test_metadata_that_change_the_mathematics_are_refused(
    family: str, metadata: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """A file that is nearly of a known kind is not of that kind."""
    path = write_gguf(gguf_reference(family), tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(LoadError, match=said):
        load_gguf_spec(path)


@pytest.mark.parametrize(("family", "lost"), [("gpt2", "blk.0.ffn_down.weight"), ("granitemoehybrid", "blk.0.ssm_d")])
def test_a_tensor_that_is_not_there_is_named(family: str, lost: str, tmp_path: Path) -> None:
    """A family without gates was asked for them where down was missing."""

    def without(tensors: Tensors) -> Tensors:
        return {name: one for name, one in tensors.items() if name != lost}

    path = write_gguf(gguf_reference(family), tmp_path / "m.gguf", change=without)
    with pytest.raises(LoadError, match=rf"tensor {lost} is missing from "):
        load_model(path, REFERENCE)


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_layers_are_bounded_before_a_list_of_them_is_made(family: str, tmp_path: Path) -> None:
    """A header that names four billion blocks took all memory there is, and `inspect` was enough for that."""
    path = write_gguf(gguf_reference(family), tmp_path / "m.gguf", metadata={"block_count": 2**20})
    with pytest.raises(LoadError, match=r"num_hidden_layers in .*m\.gguf is 1048576; it must be at most 2048"):
        read_config(open_gguf(path))


def read_by_transformers(path: Path) -> Any:
    """The model as `from_pretrained(gguf_file=)` makes it, which wants the package accelerate for nothing but this."""
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model


WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32, "num_hidden_layers": 1}
FP32: dict[str, Any] = {"backend": "torch", "weights": "fp32"}
RARE = ("IQ1", "IQ2", "IQ3", "TQ")
TYPES = [
    pytest.param(kind.name, marks=[pytest.mark.slow] if kind.name.startswith(RARE) else [])
    for kind in BLOCK_TYPES.values()
    if kind.name not in FEW_BITS  # which the package does not dequantise
]


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_gives_the_logits_that_transformers_reads_out_of_the_file(kind: str, tmp_path: Path) -> None:
    """transformers reads the container and dequantises without us; only the sums may differ."""
    path = write_gguf(gguf_reference("qwen2", **WIDE), tmp_path / "model.gguf", choose=lambda name: kind)
    theirs = read_by_transformers(path)
    prompt = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = theirs(prompt).logits[0]
    logits = Stepper(load_model(path, REFERENCE)).prefill("it", prompt[0].tolist(), chunk=None)
    assert expected.std() > 1e-3
    assert (logits - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.native
def test_files_of_one_bit_answer_as_their_values_do(tmp_path: Path) -> None:
    """The package writes them and does not read them: values are a block's scale, below 0 where a bit is not set."""
    kind = gguf.GGMLQuantizationType.Q1_0

    def is_coded(name: str) -> bool:
        return name.startswith("blk.") and "norm" not in name and name.endswith("weight")

    def valued(tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for name in filter(is_coded, tensors):
            blocks = quantised(tensors[name], kind).reshape(-1, 18)
            signs = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little") * np.float32(2) - 1
            scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
            found[name] = (signs * scales).reshape(tensors[name].shape)
        return found

    reference = gguf_reference("qwen2", **WIDE)
    coded = write_gguf(reference, tmp_path / "coded.gguf", choose=lambda name: kind.name if is_coded(name) else "F32")
    plain = write_gguf(reference, tmp_path / "plain.gguf", change=valued)
    prompt = list(range(3, 40))
    expected, exact, got = (
        Stepper(load_model(path, ComputeConfig(threads=1, **how))).prefill("it", prompt, chunk=None).clone()
        for path, how in ((plain, FP32), (coded, FP32), (coded, {"backend": "cpu"}))
    )
    assert torch.equal(exact, expected)
    assert (got - expected).abs().max() < 0.06 * expected.abs().max()
    assert contents_of(coded).kept == "group2-g128-f16"


@pytest.mark.native
@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_nvfp4_has_scales_of_whole_matrices_beside_it(family: str, tmp_path: Path) -> None:
    """Of experts one each. Without them, as files of other programs may be, it is read too."""
    scales = np.array([0.5, 3.0, 0.25, 2.0], np.float32)
    nvfp4 = gguf.GGMLQuantizationType.NVFP4

    def is_coded(name: str, tensors: Tensors) -> bool:
        return name.startswith("blk.") and tensors[name].ndim > 1 and "gate_inp" not in name

    def with_scales(tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for name in tensors:
            if is_coded(name, tensors):
                stem = name.removesuffix("weight")
                found[f"{stem}scale"] = scales[: tensors[name].shape[0]] if tensors[name].ndim == 3 else scales[1:2]
                found[f"{stem}input_scale"] = scales[:1]
        return found

    def valued(tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for name, values in tensors.items():
            if is_coded(name, tensors):
                whole = scales[: len(values), None, None] if values.ndim == 3 else scales[1]
                found[name] = gguf.dequantize(quantised(values, nvfp4), nvfp4) * whole
        return found

    experts = (
        {"num_local_experts": 4, "num_experts_per_tok": 4} if family == "mixtral" else {}
    )  # all: no choice is near
    reference = gguf_reference(family, **WIDE, **experts)
    coded = write_gguf(
        reference, tmp_path / "coded.gguf", change=with_scales,
        choose=lambda name: "NVFP4" if name.startswith("blk.") and "gate_inp" not in name else "F32",
    )  # fmt: skip
    plain = write_gguf(reference, tmp_path / "plain.gguf", change=valued)
    for wrong in (np.zeros(1, np.float32), np.ones(3, np.float32)):
        bad = write_gguf(
            reference, tmp_path / "bad.gguf", change=lambda t, wrong=wrong: t | {"blk.0.attn_q.scale": wrong},
            choose=lambda name: "NVFP4" if "attn_q" in name else "F32",
        )  # fmt: skip
        with pytest.raises(LoadError, match=r"attn_q\.scale in .* has [13] scales for 1 matrices"):
            load_model(bad, REFERENCE)
    assert count_parameters(open_gguf(coded)) == count_parameters(open_gguf(plain)), (
        "inspect and plan refuse another number"
    )
    prompt = list(range(3, 40))
    exact = Stepper(load_model(plain, REFERENCE)).prefill("it", prompt, chunk=None)
    assert torch.equal(Stepper(load_model(coded, REFERENCE)).prefill("it", prompt, chunk=None), exact)
    if instruction_sets():
        model = load_model(coded, ComputeConfig(backend="cpu", threads=1))
        assert set(model.formats) == {"group4-g16-e4m3-e2m1"}  # type: ignore[attr-defined]
        assert (Stepper(model).prefill("it", prompt, chunk=None) - exact).std() < 0.05 * exact.std()


SMALL = ("gate_inp", "ssm_conv1d", "ssm_a", "ssm_b", "ssm_dt", "norm")  # also ssm_alpha, ssm_ba, ssm_beta
TILED = {**WIDE, "num_hidden_layers": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
         "linear_value_head_dim": 64, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip


@pytest.mark.native
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_value_heads_of_states_come_in_order_out_of_any_blocks(family: str, kind: str, tmp_path: Path) -> None:
    """Rows by rows of blocks, and inputs, of which a block holds several heads', as the kernels' own order of inputs."""

    def is_coded(name: str) -> bool:
        return name.startswith("blk.") and name.endswith("weight") and not any(one in name for one in SMALL)

    def valued(tensors: Tensors) -> Tensors:
        found, coding = dict(tensors), gguf.GGMLQuantizationType[kind]
        for name, values in tensors.items():
            if is_coded(name):
                found[name] = gguf.dequantize(quantised(values, coding), coding)
        return found

    experts = {"num_experts_per_tok": 6, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    reference = gguf_reference(family, **TILED, **({} if family == "qwen3_5" else experts))
    coded = write_gguf(reference, tmp_path / "coded.gguf", choose=lambda name: kind if is_coded(name) else "F32")
    plain = write_gguf(reference, tmp_path / "plain.gguf", change=valued)
    prompt = list(range(3, 40))
    exact = Stepper(load_model(plain, REFERENCE)).prefill("it", prompt, chunk=None)
    assert torch.equal(Stepper(load_model(coded, REFERENCE)).prefill("it", prompt, chunk=None), exact)
    if instruction_sets():
        config = ComputeConfig(backend="cpu", threads=1)
        model = load_model(coded, config)
        assert all(name.startswith("group") for name in model.formats), model.formats  # type: ignore[attr-defined]
        logits = Stepper(model).prefill("it", prompt, chunk=None)
        assert (logits - exact).std() < 0.02 * exact.std(), float((logits - exact).std() / exact.std())
        again = load_model(coded, config)  # of which what was packed is found again
        assert torch.equal(Stepper(again).prefill("it", prompt, chunk=5), logits)


@pytest.mark.native
@pytest.mark.parametrize(
    ("family", "weights"),
    [("llama", "bf16"), ("llama", "int8"), ("llama", "int4"), ("deepseek_v2", "bf16"), ("gpt_oss", "int8"),
     ("granitemoe", "bf16"), ("qwen3_next", "bf16"), ("qwen3_5_moe", "int8"), ("granitemoehybrid", "bf16"),
     ("lfm2_moe", "int8"), ("nemotron-3", "int8"), ("jamba", "int8"), ("falcon_mamba", "bf16")],
)  # fmt: skip
def test_a_bf16_file_has_the_bits_of_the_checkpoint(family: str, weights: str, tmp_path: Path) -> None:
    """The two containers hold the same numbers, so nothing after the reader may tell them apart."""
    fields = {"tie_word_embeddings": True} if family == "llama" else {}
    reference = gguf_reference(family, **fields).to(torch.bfloat16)
    reference.save_pretrained(str(tmp_path / "folder"))
    # the converter leaves numbers of states in 32 bits, by their ending
    choose = {True: "BF16", False: "F32"}
    path = write_gguf(reference, tmp_path / "model.gguf", choose=lambda name: choose[name.endswith(".weight")])
    config = ComputeConfig(backend="cpu", weights=weights, threads=1)
    folder, file = load_model(tmp_path / "folder", config), load_model(path, config)
    prompt = list(range(3, 60))
    assert torch.equal(
        Stepper(folder).prefill("it", prompt, chunk=None), Stepper(file).prefill("it", prompt, chunk=None)
    )
    assert (folder.n_parameters, folder.weight_bytes) == (file.n_parameters, file.weight_bytes)


def test_one_tensor_of_another_fine_tune_is_another_revision(tmp_path: Path) -> None:
    """Only the last bytes of the file were looked at: adapters merged into some projections left the revision as it was."""

    def fingerprint(path: Path) -> str:
        return GgufCheckpoint(open_gguf(path), dtype=torch.float32, table_dtype=torch.float32).fingerprint()

    path = write_gguf(gguf_reference("llama"), tmp_path / "model.gguf")
    first, stored = fingerprint(path), path.read_bytes()
    tensor = open_gguf(path).tensors["blk.0.attn_q.weight"]
    middle = tensor.begin + tensor.nbytes // 2
    other = tmp_path / "other.gguf"
    other.write_bytes(stored)
    assert fingerprint(other) == first
    other = tmp_path / "tuned.gguf"
    other.write_bytes(stored[:middle] + bytes([stored[middle] ^ 1]) + stored[middle + 1 :])
    assert fingerprint(other) != first


@pytest.mark.parametrize(
    ("called", "family", "metadata"),
    [
        ("qwen2vl", "qwen2", {"rope.dimension_sections": [2, 3, 3, 0]}),
        ("qwen3vl", "qwen3", {"rope.dimension_sections": [6, 5, 5, 0], "n_deepstack_layers": 3}),
        ("qwen3vlmoe", "qwen3_moe", {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 3}),
        ("glm4moe", "glm4_moe", {"rope.dimension_sections": [2, 2, 2, 0]}),
        ("paddleocr", "seed_oss", {"rope.dimension_sections": [2, 2, 2, 0]}),
        ("hunyuan_vl", "hunyuan_v1_dense", {"rope.dimension_sections": [2, 2, 2, 2]}),
    ],
)
def test_the_text_parts_of_models_for_pictures(
    called: str, family: str, metadata: dict[str, Any], tmp_path: Path
) -> None:
    """Of a token of text the positions of pictures are one, and nothing comes into its layers from beside."""
    reference = gguf_reference(family, **({"attention_bias": False} if called == "paddleocr" else {}))
    path = write_gguf(reference, tmp_path / "m.gguf", called=called, metadata=metadata)
    golden = ask_reference(reference, path, new_tokens=4)
    check_golden(load_model(path, ComputeConfig(backend="torch", device="cpu", weights="fp32")), golden, chunk=9)


def test_rows_of_glm_4v_lie_as_three_axes_turn(tmp_path: Path) -> None:
    """llama.cpp's converter moves rows of q and k, biases too, where a dense one has three axes of positions."""
    reference = gguf_reference("glm4")
    width = reference.config.head_dim
    rotary = width // 2

    def moved(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        order = [*range(0, rotary, 2), *range(1, rotary, 2), *range(rotary, width)]
        return {
            name: values.reshape(-1, width, *values.shape[1:])[:, order].reshape(values.shape)
            if "attn_q." in name or "attn_k." in name
            else values
            for name, values in tensors.items()
        }

    path = write_gguf(reference, tmp_path / "m.gguf", change=moved, metadata={"rope.dimension_sections": [2, 2, 2, 0]})
    golden = ask_reference(reference, path, new_tokens=4)
    model = load_model(path, ComputeConfig(backend="torch", device="cpu", weights="fp32"))
    assert model.spec.family == "glm4v_text"
    check_golden(model, golden, chunk=9)
    write_gguf(reference, tmp_path / "none.gguf", metadata={"rope.dimension_sections": [0, 0, 0, 0]})
    with pytest.raises(LoadError, match="dimension_sections"):  # no axis has a pair, and no row was moved
        load_gguf_spec(tmp_path / "none.gguf")
