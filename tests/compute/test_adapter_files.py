"""Adapters against peft, and what is refused. The cpu backend's bits: tests/kernels/test_adapter_bits.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB, make_checkpoint
from diptych.compute.adapters import Adapter, read_adapter
from diptych.compute.ops import reference
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import CapacityError, EngineError, LoadError
from gguf_files import gguf_reference, write_gguf
from lora import ALL, peft_model, write_adapter
from stepping import Stepper

FP32 = ComputeConfig(backend="torch", device="cpu", weights="fp32")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
LATENT = ("fc1_latent_proj", "fc2_latent_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
# family -> fields of peft's config: every projection, other ranks and alphas for some, rslora, experts, the head, and rows that
# are kept in another order (heads whose neighbours turn together, gate and up in turns)
CASES: dict[str, dict[str, Any]] = {
    "llama": {"r": 5, "lora_alpha": 11, "target_modules": list(ALL), "rank_pattern": {"o_proj": 3},
              "alpha_pattern": {"layers.1.mlp.down_proj": 7}},
    "gemma2": {"r": 4, "lora_alpha": 6, "target_modules": list(ALL), "use_rslora": True},
    "phi3": {"r": 6, "lora_alpha": 12, "target_modules": list(FUSED)},
    "qwen3_moe": {"r": 3, "lora_alpha": 9, "target_modules": ["q_proj", "v_proj"], "target_parameters": list(EXPERTS)},
    "diffllama": {"r": 4, "lora_alpha": 8, "target_modules": list(ALL)},
    "mixtral": {"r": 4, "lora_alpha": 6, "target_modules": ["lm_head"], "target_parameters": list(EXPERTS[1:])},
    "gpt_oss": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": list(EXPERTS)},
    "qwen3": {"r": 4, "lora_alpha": 8, "target_modules": ["lm_head"]},
    "helium": {"r": 4, "lora_alpha": 8, "target_modules": list(ALL)},
    # values narrower than keys
    "mimo_v2_flash": {"r": 4, "lora_alpha": 8, "target_modules": list(ALL)},
    # as [inputs, outputs] in the file; by KV head; under names of their own; beside a bias
    "gpt2": {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "falcon-40b": {"r": 4, "lora_alpha": 8, "target_modules": ["query_key_value", "dense", "dense_4h_to_h"]},
    "gpt_neox": {"r": 4, "lora_alpha": 8, "target_modules": ["query_key_value", "lm_head"]},
    "biogpt": {"r": 4, "lora_alpha": 8, "target_modules": ["output_projection", "q_proj"]},
    "persimmon": {"r": 4, "lora_alpha": 8, "target_modules": ["query_key_value", "dense", "dense_4h_to_h"]},
    "openai-gpt": {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "modernbert-decoder": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "Wi", "Wo", "decoder"]},
    "gptj": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "fc_in"]},
    "codegen": {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj", "fc_in"]},
    # what a state is of; a gate that files call otherwise; blocks of their own
    "olmo_hybrid": {"r": 4, "lora_alpha": 8, "target_modules": [f"{one}_proj" for one in "qkvogab"]},
    "jamba": {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "x_proj", "out_proj", "q_proj"]},
    "minimax": {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj", "output_gate", "out_proj", "q_proj", "o_proj"]},
    "mamba": {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "x_proj"]},
    "zamba": {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "linear"]},
    "zamba2": {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "out_proj", "linear"]},
    "recurrent_gemma": {"r": 4, "lora_alpha": 8, "target_modules": ["linear_x", "linear_y", "linear_out", *sorted(ALL)]},
    "bitnet": {"r": 4, "lora_alpha": 8, "target_modules": list(ALL)},
    "lfm3": {"r": 4, "lora_alpha": 8, "target_modules": ["g_proj", "q_proj", "in_proj"]},
    "nemotron-3-super": {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "q_proj", *LATENT]},
    # inputs and outputs that are multiplied; projections in two steps, names that only the class has
    "falcon_h1": {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", *sorted(ALL)]},
    "kimi_linear": {"r": 4, "lora_alpha": 8, "target_modules": [
        f"{one}_proj" for one in ("q", "k", "v", "o", "b", "f_a", "f_b", "g_a", "g_b", "gate", "up", "down")]},
    "glm5_next": {"r": 4, "lora_alpha": 8, "target_modules": [
        f"{one}_proj" for one in ("q", "k", "v", "o", "b", "f_a", "f_b", "g_a", "g_b", "q_a", "q_b")]},
    # rows that all heads meet, what entries are made of, beside groups of heads that nothing adapts
    "deepseek_v4": {"r": 4, "lora_alpha": 8, "target_modules": [
        f"{one}_proj" for one in ("q_a", "q_b", "kv", "gate", "o_b", "up", "down")]},
    # by the names that it is published under, queries of an index that reads the layer's input
    "mistral_large4": {"r": 4, "lora_alpha": 8, "target_modules":
                       ".*language_model.*(q_proj|kv_a_proj_with_mqa|o_proj|wq_b|gate_proj|up_proj|down_proj)"},
    # layers of two parts, whose latents are scaled
    "longcat_flash": {"r": 4, "lora_alpha": 8, "target_modules": [
        f"{one}_proj" for one in ("q_a", "q_b", "o")]},
    # one name for what gates heads and for what gates MLPs
    "muse_glimmer": {"r": 4, "lora_alpha": 8, "target_modules": ["gate_proj", "o_proj", "down_proj"]},
    # queries and what precedes experts, whose outputs are multiplied and normed behind
    "muse_spark": {"r": 4, "lora_alpha": 8, "target_modules":
                   ".*language_model.*(q_proj|gate_proj|down_proj|pre_expert_proj|post_expert_proj)"},
    "dbrx": {"r": 4, "lora_alpha": 8, "target_modules": ["Wqkv", "out_proj"]},
    # what files and classes call otherwise, and what both have in one or both apart
    "sarvam_moe": {"r": 4, "lora_alpha": 8, "target_modules": list(ALL)},
    "sarvam_mla": {"r": 4, "lora_alpha": 8, "target_modules": [
        "q_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"]},
    "lara_mini": {"r": 4, "lora_alpha": 8, "target_modules": [
        *(f"in_proj_{one}" for one in ("qkv", "z", "b", "a")), "out_proj", "q_proj", "o_proj"]},
    "apertus1p5": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]},
    **{
        family: {"r": 4, "lora_alpha": 8, "target_modules":
                 r".*layers.*(shared_experts\.\w+_proj|[go]_proj|self_attn\.gate_proj|indexer\.q_proj)"}
        for family in ("hy_v3", "hy_v4", "laguna", "step3p7", "minimax_m3")
    },
    "bailing_hybrid": {"r": 4, "lora_alpha": 8, "target_modules": [
        f"{one}_proj" for one in ("q", "k", "v", "o", "b", "f", "g", "gate", "up", "down")]},
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"))


def prompt(n_tokens: int = 29) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCAB, (n_tokens,), generator=generator).tolist()


@pytest.mark.parametrize("family", CASES)
def test_logits_are_those_of_peft(family: str, tmp_path: Path) -> None:
    """Oracle: transformers with peft. Beside it in one step, the model as it is, and the same adapter once more."""
    path = make_checkpoint(family, tmp_path / "base")
    oracle = peft_model(family, tmp_path / "adapter", **CASES[family])
    ids = torch.tensor([prompt()])
    with torch.no_grad():
        adapted = oracle(ids, use_cache=False).logits[0]
        with oracle.disable_adapter():
            plain = oracle(ids, use_cache=False).logits[0]
    assert (adapted - plain).abs().max() > 0.5, "the adapter does next to nothing; the test would see nothing"
    model = load_model(path, FP32)
    number = model.add_adapter(read_adapter(tmp_path / "adapter", max_rank=8))
    stepper = Stepper(model)
    stepper.adapters = {"first": number, "second": number}
    found = stepper.step({"first": prompt(), "plain": prompt(), "second": prompt()})
    assert (found["first"] - adapted).abs().max() < 2e-4
    assert (found["second"] - adapted).abs().max() < 2e-4
    assert (found["plain"] - plain).abs().max() < 1e-4


def test_parts_of_rows_in_another_order_are_no_modules(tmp_path: Path) -> None:
    """GPT-NeoX has q, k and v in one as Sarvam 30B has, but head by head: a third of that is no q."""
    base = make_checkpoint("gpt_neox", tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", base, {"query_key_value": 3})
    tensors = {}
    for name, one in copied(folder).items():
        name = name.replace("attention.query_key_value", "self_attn.q_proj")
        tensors[name] = one[: len(one) // 3].clone() if "lora_B" in name else one
    save_file(tensors, folder / "adapter_model.safetensors")
    assert "self_attn.q_proj, which this model does not have" in refusal(folder, base)


def test_the_reference_op_is_what_merged_weights_give() -> None:
    """(W + B A) x, to its own outputs alone."""
    generator = torch.Generator().manual_seed(0)
    h, w = torch.randn(3, 8, generator=generator), torch.randn(10, 8, generator=generator)
    a, b = torch.randn(2, 8, generator=generator), torch.randn(4, 2, generator=generator)
    merged = w.clone()
    merged[5:9] += b @ a
    found = reference.adapted(reference.linear(h, w), h, a, b, begin=5)
    assert torch.allclose(found, reference.linear(h, merged), atol=1e-5)


def copied(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of an adapter, not of its mapped file: that is to be written anew."""
    return {name: one.clone() for name, one in load_file(folder / "adapter_model.safetensors").items()}


def refusal(folder: Path, base: Path, *, max_rank: int = 64) -> str:
    """What reading the adapter or fitting it to the model says."""
    with pytest.raises(EngineError) as caught:
        load_model(base, FP32).add_adapter(read_adapter(folder, max_rank=max_rank))
    assert isinstance(caught.value, LoadError | CapacityError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"), ("use_dora", True), ("bias", "all"), ("modules_to_save", ["lm_head"]), ("lora_bias", True),
        ("init_lora_weights", "pissa"), ("layer_replication", [[0, 1]]), ("task_type", "SEQ_CLS"),
        ("alora_invocation_tokens", [1, 2]),
        ("trainable_token_indices", [3]), ("rank_pattern", {"(a+)+(b+)+": 3}), ("r", 0), ("lora_alpha", "much"),
        ("rank_pattern", {"(a+)+b": 3}), ("alpha_pattern", {"(a|a)*b": 3}),
        ("lora_alpha", float("nan")), ("lora_alpha", float("inf")), ("lora_alpha", 10**400), ("r", 10**400),
    ],
)  # fmt: skip
def test_what_changes_the_mathematics_is_refused_by_name(base: Path, tmp_path: Path, field: str, value: object) -> None:
    """An adapter whose DoRA part is left out answers wrongly without a word."""
    more = {"rank_pattern": {}, "alpha_pattern": {}} if field in ("r", "lora_alpha") else {}
    folder = write_adapter(tmp_path / "adapter", base, {"q_proj": 3}, **(more | {field: value}))
    assert field in refusal(folder, base) or "pattern" in refusal(folder, base)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.lm_head.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
    ],
)
def test_tensors_beside_a_and_b_are_refused_by_name(base: Path, tmp_path: Path, name: str) -> None:
    """The config may say nothing of them."""
    folder = write_adapter(tmp_path / "adapter", base, {"q_proj": 3})
    tensors = copied(folder)
    save_file({**tensors, name: torch.zeros(3, 4)}, folder / "adapter_model.safetensors")
    assert name in refusal(folder, base)


def test_an_adapter_of_a_head_with_a_bias_is_refused(base: Path, tmp_path: Path) -> None:
    """peft writes the head beside it, with its bias, and only the head's weight is held against the model's."""
    folder = write_adapter(tmp_path / "adapter", base, {"q_proj": 3})
    bias = {"base_model.model.lm_head.base_layer.bias": torch.zeros(VOCAB)}
    save_file(copied(folder) | bias, folder / "adapter_model.safetensors")
    assert "a head with a bias" in refusal(folder, base)


def rename(folder: Path, before: str, after: str) -> None:
    """Another name for a module's tensors."""
    tensors = copied(folder)
    save_file({name.replace(before, after): one for name, one in tensors.items()}, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    "after", ["model.embed_tokens", "model.layers.0.mlp.experts.3.gate_proj", "model.layers.77.self_attn.q_proj",
              "model.vision.layers.0.self_attn.q_proj"],
)  # fmt: skip
def test_modules_that_the_model_does_not_adapt_are_refused_by_name(base: Path, tmp_path: Path, after: str) -> None:
    """The embedding, and what belongs to another model."""
    folder = write_adapter(tmp_path / "adapter", base, {"q_proj": 3})
    rename(folder, "model.layers.0.self_attn.q_proj", after)
    assert after in refusal(folder, base)


def test_another_head_beside_an_adapter_of_the_head_is_refused(tmp_path: Path) -> None:
    """peft writes the head itself too; one that was trained, or of another model, would be left out."""
    base = make_checkpoint("qwen3", tmp_path / "base")
    peft_model("qwen3", tmp_path / "adapter", **CASES["qwen3"])
    tensors = copied(tmp_path / "adapter")
    name = "base_model.model.lm_head.base_layer.weight"
    assert name in tensors
    tensors[name][100, 3] += 1
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    assert "not the model's own head" in refusal(tmp_path / "adapter", base)


def test_experts_may_be_modules_of_their_own(tmp_path: Path) -> None:
    """As adapters of transformers 4 have them; the same numbers as one stack of all experts give the same logits."""
    base = make_checkpoint("qwen3_moe", tmp_path / "base")
    config = {"r": 3, "lora_alpha": 9, "target_modules": [], "target_parameters": list(EXPERTS)}
    peft_model("qwen3_moe", tmp_path / "stacked", **config)
    stacked = read_adapter(tmp_path / "stacked", max_rank=8)
    tensors = {}
    for module, low_rank in stacked.modules.items():
        root, _, number = module.removesuffix("]").partition("[")
        place = f"{root.removesuffix('.base_layer')}.{number}"
        half = len(low_rank.b) // 2
        is_down = len(low_rank.b) == 64  # the hidden size
        names = {"down_proj": low_rank.b} if is_down else {"gate_proj": low_rank.b[:half], "up_proj": low_rank.b[half:]}
        for name, b in names.items():
            tensors[f"{place}.{name}.lora_A.weight"] = low_rank.a.clone()
            tensors[f"{place}.{name}.lora_B.weight"] = b.clone()
    (tmp_path / "own").mkdir()
    save_file(tensors, tmp_path / "own" / "adapter_model.safetensors")
    (tmp_path / "own" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 3}))
    model = load_model(base, FP32)
    numbers = [model.add_adapter(one) for one in (stacked, read_adapter(tmp_path / "own", max_rank=8))]
    stepper = Stepper(model)
    stepper.adapters = {"stacked": numbers[0], "own": numbers[1]}
    found = stepper.step({"stacked": prompt(), "own": prompt(), "plain": prompt()})
    assert torch.allclose(found["stacked"], found["own"], atol=1e-5)
    assert (found["stacked"] - found["plain"]).abs().max() > 0.1


def test_a_stack_of_experts_is_bounded_and_checked_by_the_rank_of_each(tmp_path: Path) -> None:
    """Its file has ranks times experts; another model's experts have other shapes."""
    peft_model("qwen3_moe", tmp_path / "adapter", r=3, target_modules=[], target_parameters=list(EXPERTS))
    with pytest.raises(CapacityError, match="rank 3; at most 2"):
        read_adapter(tmp_path / "adapter", max_rank=2)
    other = make_checkpoint("qwen3_moe", tmp_path / "other", moe_intermediate_size=32)
    assert "an expert model.layers.0.mlp.experts" in refusal(tmp_path / "adapter", other)


def test_a_module_that_comes_twice_is_refused(base: Path, tmp_path: Path) -> None:
    """By two names that mean the same: one of them would be left out."""
    folder = write_adapter(tmp_path / "adapter", base, {"q_proj": 3})
    tensors = copied(folder)
    again = {
        name.replace("model.model.model.layers.1", "model.model.layers.1"): one.clone()
        for name, one in tensors.items()
        if "layers.1" in name
    }
    save_file({**tensors, **again}, folder / "adapter_model.safetensors")
    assert "given already" in refusal(folder, base)


def test_shapes_of_another_model_are_refused_with_both_shapes(base: Path, tmp_path: Path) -> None:
    """Broadcasting would hide some of them."""
    other = make_checkpoint("qwen2", tmp_path / "other", hidden_size=32)
    folder = write_adapter(tmp_path / "adapter", other, {"o_proj": 3})
    said = refusal(folder, base)
    assert "model.layers.0.self_attn.o_proj" in said
    assert "[3, 32]" in said
    assert "[64, 64]" in said


def test_a_rank_beyond_the_bound_is_refused_with_both_numbers(base: Path, tmp_path: Path) -> None:
    """Memory is bounded by it."""
    folder = write_adapter(tmp_path / "adapter", base, {"q_proj": 9})
    said = refusal(folder, base, max_rank=8)
    assert "rank 9" in said
    assert "at most 8" in said


def test_files_that_are_no_adapter_are_refused(base: Path, tmp_path: Path) -> None:
    """A folder that is not there, one without weights, damaged ones, half an adapter, numbers that are none."""
    assert "no such folder" in refusal(tmp_path / "nowhere", base)
    folder = write_adapter(tmp_path / "adapter", base, {"q_proj": 3})
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    tensors = copied(folder)
    weights.write_bytes(whole[: len(whole) // 2])
    assert "damaged" in refusal(folder, base)
    name = next(name for name in tensors if "lora_B" in name)
    save_file({key: one for key, one in tensors.items() if key != name}, weights)
    assert "belong together" in refusal(folder, base)
    save_file({**tensors, name: tensors[name] * torch.nan}, weights)
    assert "not finite" in refusal(folder, base)
    weights.unlink()
    assert "adapter_model.safetensors" in refusal(folder, base)
    weights.write_bytes(whole)
    (folder / "adapter_config.json").write_text("{")
    assert "adapter_config.json" in refusal(folder, base)


def test_the_revision_tells_numbers_and_scales_apart(base: Path, tmp_path: Path) -> None:
    """Cached prefixes hang on it: equal for a copy elsewhere, other for another alpha or one other number."""

    def read(name: str, *, seed: int = 0, **config: Any) -> Adapter:
        return read_adapter(write_adapter(tmp_path / name, base, {"q_proj": 3}, seed=seed, **config), max_rank=8)

    first = read("one")
    assert first.revision == read("copy").revision
    assert first.revision != read("seed", seed=1).revision
    assert first.revision != read("alpha", alpha_pattern={"q_proj": 5}).revision
    config = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert first.revision != read("rslora", **{**config, "use_rslora": True}).revision
    assert (first.rank, first.n_parameters) == (3, 3 * 3 * (64 + 64))


def test_an_adapter_beside_multiplied_weights_is_refused(tmp_path: Path) -> None:
    """A converter multiplies Falcon-H1's weights by its multipliers; what an adapter adds would lack them."""
    path = write_gguf(gguf_reference("falcon_h1"), tmp_path / "m.gguf")
    peft_model("falcon_h1", tmp_path / "adapter", r=4, lora_alpha=8, target_modules=["k_proj"])
    assert "multiplied by the model's multipliers" in refusal(tmp_path / "adapter", path)
