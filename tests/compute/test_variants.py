"""Switches inside the families against transformers: rotary scalings, config layouts, head counts, file layouts and dtypes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import ask_reference, check_golden, make_golden
from safetensors.torch import load_file, save_file

from checkpoints import COMMON, VOCAB, enliven, make_checkpoint, make_reference
from diptych.compute.runner import load_model
from diptych.cost.components import BF16, cost_of
from diptych.cost.kv_bytes import kv_bytes_per_token
from diptych.cost.parameters import parameter_count
from diptych.ground.config import ComputeConfig
from diptych.ground.shape import StepShape
from diptych.ground.specs import KVSpec
from diptych.models.contents import contents_of
from diptych.models.read import load_model_file
from diptych.models.stored import check_stored
from family_configs import MORE
from part_configs import PARTS_MORE
from stepping import Stepper

REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
NEW_TOKENS = 12
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SHORT, LONG = [1.0, 1.1, 1.3, 1.5, 1.7, 2.0, 2.2, 2.5], [1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 9.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}

# name -> (family, config fields)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain Llama": ("llama", {"attention_bias": False, "mlp_bias": False, "head_dim": None}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied Gemma": ("gemma2", {"tie_word_embeddings": False}),
    "every head its own": ("llama", {"num_key_value_heads": 4}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    "llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "yarn": ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 1e4}}),
    "yarn, attention factor": ("llama", {"rope_parameters": {**YARN, "rope_theta": 1e4, "attention_factor": 0.8}}),
    "yarn, mscale": ("llama", {"rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.4}}),
    "yarn, betas": ("llama", {"rope_parameters": {**YARN, "rope_theta": 1e4, "beta_fast": 8, "beta_slow": 2,
                                                  "truncate": False}}),
    "A.X K2 without groups, with biases, stretched": (
        "axk2", {"n_group": None, "topk_group": None, "attention_bias": True,
                 "rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.4}}),
    "LongCat-Flash with biases, stretched": (
        "longcat_flash", {"attention_bias": True, "num_hidden_layers": 2, "zero_expert_num": 1, "moe_topk": 2,
                          "rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.4}}),
    "LongCat-Flash whose experts all have weights": ("longcat_flash", {"zero_expert_num": 0}),
    "DBRX of one KV head": ("dbrx", {"attn_config": {"kv_n_heads": 1, "clip_qkv": 0.8, "rope_theta": 500.0}}),
    "no window": ("mistral", {"sliding_window": None}),
    "windows off": ("qwen2", {"use_sliding_window": False}),
    "windows by layer_types": (
        "qwen2", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "Qwen3 with biases and windows": (
        "qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "partial rotary": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                    "partial_rotary_factor": 0.5}}),
    "Phi-3 with a window": ("phi3", {"sliding_window": 11}),
    "Gemma 2 without caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "Gemma 3 with a final cap": ("gemma3", {"final_logit_softcapping": 3.0}),
    "Gemma 3 scaled": ("gemma3", {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "OLMo 2 with biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "NoPE by list": ("smollm3", {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 9}),
    "Phi-4 mini": ("phi3", {"original_max_position_embeddings": 512, "tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "short_factor": SHORT[:6],
        "long_factor": LONG[:6]}}),
    "SmolLM 2, Falcon 3": ("llama", {"attention_bias": False, "mlp_bias": False, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000042.0}}),
    "StableLM in parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": False}),
    "Cohere with biases": ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
    "ERNIE with experts on some layers": ("ernie4_5_moe", {"num_hidden_layers": 4, "moe_layer_interval": 2,
                                                           "moe_layer_end_index": 2}),
    "MiniMax M2 by a part beside a number": ("minimax_m2", {"rotary_dim": 12, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}, "head_dim": 16}),
    "MiniMax M2 that turns whole heads beside a number": ("minimax_m2", {"rotary_dim": 12, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}, "head_dim": 16}),
    "DeepSeek V4 whose kinds of layers say how they turn": ("deepseek_v4", {"rope_parameters": {
        "main": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.25},
        "compress": {**YARN, "rope_theta": 1e5, "mscale": 0.7, "mscale_all_dim": 0.4, "partial_rotary_factor": 0.25}}}),
    "Ettin's decoder whose file says its window": ("modernbert-decoder", {"sliding_window": 9}),
    "GLM-4.5 Air": ("glm4_moe", {"use_qk_norm": False, "attention_bias": True, "n_group": 1, "topk_group": 1}),
    "HyperCLOVA X with a large epsilon": ("hyperclovax", {"rms_norm_eps": 0.05}),
    "EXAONE that windows no layer": ("exaone4", {"layer_types": ["full_attention"] * 4}),
    "gpt-oss without windows": ("gpt_oss", {"layer_types": ["full_attention"] * 3}),
    "DeepSeek V2": ("deepseek_v2", {"q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 4,
                                    "topk_group": 2, "routed_scaling_factor": 4.0}),
    "Kimi": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "attention_bias": True, "rope_interleave": False}),
    "GPT-NeoX one after the other": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "Falcon 11B": ("falcon-40b", {"num_ln_in_parallel_attn": 1, "bias": False}),
    "Falcon one after the other": ("falcon", {"parallel_attn": False, "multi_query": False, "tie_word_embeddings": False}),
    "SantaCoder's heads": ("gpt_bigcode", {"multi_query": False, "activation_function": "gelu_fast"}),
    "GPT-J that turns whole heads": ("gptj", {"rotary_dim": 16, "tie_word_embeddings": True}),
    "nanochat whose logits have no cap": ("nanochat", {"final_logit_softcapping": None, "tie_word_embeddings": True,
                                                       "num_key_value_heads": 1, "rms_norm_eps": 0.05}),
    "Ling whose decays have no bound": ("bailing_hybrid", {"kda_safe_gate": False, "attention_bias": True,
                                                           "norm_topk_prob": False, "tie_word_embeddings": True}),
    "Ling of whose pairs half turn": ("bailing_hybrid", {"rope_parameters": {
        "rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    "GLM-5.3-Flash whose decays have no bound": ("glm5_next", {"linear_lower_bound": None, "index_kpool": 2, "hc_mult": 4,
                                                               "attention_bias": True, "index_topk": 6}),
    "Mamba-2 whose channels have no bias": ("bamba", {"mamba_conv_bias": False, "mamba_d_conv": 2}),
    "Granite 4 without a state": ("granite-h-dense", {"layer_types": ["full_attention"] * 4}),
    "convolutions of one tap": ("lfm2", {"conv_L_cache": 1, "block_auto_adjust_ff_dim": False}),
    "a mixture whose experts have no bias": ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False}),
    "Phi-2": ("phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.4, "hidden_size": 80}),
    "experts not renormalised": ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
    "Qwen2-MoE that has no experts": ("qwen2_moe", {"num_experts": 0, "mlp_only_layers": []}),
    "Qwen3-MoE that has no experts": ("qwen3_moe", {"num_experts": 0, "mlp_only_layers": []}),
    "Qwen3-Next that has no experts": ("qwen3_next", {"num_experts": 0}),
    "every layer of a mixture dense": ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
    "Ettin's decoder whose norms have biases": ("modernbert-decoder", {"norm_bias": True}),
    "ERNIE whose shared experts and head have biases": ("ernie4_5_moe", {"use_bias": True}),
    "GPT-2 whose layers divide scores by their number": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "GPT-2 whose scores nothing divides": ("gpt2", {"scale_attn_weights": False}),
    "SantaCoder whose scores nothing divides": ("gpt_bigcode", {"scale_attn_weights": False}),
    "Galactica": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"}),
    "OPT without biases of projections": ("opt", {"enable_bias": False}),
    "Phi with norms of heads": ("phi", {"qk_layernorm": True}),
    "experts on every other layer": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_matches_transformers(name: str, tmp_path: Path) -> None:
    """Real configs switch these; a switch that is read and ignored gives fluent nonsense."""
    family, fields = VARIANTS[name]
    golden = make_golden(family, tmp_path, new_tokens=NEW_TOKENS, **fields)
    check_golden(load_model(golden.path, REFERENCE), golden, chunk=9)


def test_gpt2_is_read_as_it_lies_on_the_hub(tmp_path: Path) -> None:
    """Without the model's name before its tensors, and with the masks that older versions saved."""
    golden = make_golden("gpt2", tmp_path, new_tokens=NEW_TOKENS)
    tensors = {
        name.removeprefix("transformer."): one.clone()
        for name, one in load_file(tmp_path / "model.safetensors").items()
    }
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 8, 8) for i in range(COMMON["num_hidden_layers"])}
    save_file({**tensors, **masks}, tmp_path / "model.safetensors")
    model = load_model(tmp_path, REFERENCE)
    check_golden(model, golden, chunk=9)
    check_stored(tmp_path, model.spec, parameter_count(model.spec))


@pytest.mark.parametrize(
    ("family", "ours", "theirs"),
    [
        ("openai-gpt", "transformer.", ""),
        ("mamba", "backbone.embeddings.", "backbone.embedding."),
        ("mamba2", "backbone.embeddings.", "backbone.embedding."),
    ],
)
def test_names_that_files_have_from_elsewhere_are_read(family: str, ours: str, theirs: str, tmp_path: Path) -> None:
    """GPT-1 without the model's name before its tensors, Mamba with the words of its makers' own code, as in transformers."""
    golden = make_golden(family, tmp_path, new_tokens=NEW_TOKENS)
    tensors = {
        f"{theirs}{name.removeprefix(ours)}" if name.startswith(ours) else name: one
        for name, one in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_model(tmp_path, REFERENCE)
    check_golden(model, golden, chunk=9)
    check_stored(tmp_path, model.spec, parameter_count(model.spec))
    assert {group.part for group in contents_of(tmp_path).groups} >= {"embedding", "norms"}


def old_layout(config: dict[str, Any]) -> dict[str, Any]:
    """config.json as transformers 4 wrote it."""
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    return config


@pytest.mark.parametrize("name", ["theta", "linear", "llama3", "yarn", "partial rotary", "Gemma 3 scaled"])
def test_old_config_layout_gives_the_same_model(name: str, tmp_path: Path) -> None:
    """Most checkpoints on the hub were written before `rope_parameters` existed."""
    family, fields = VARIANTS[name]
    fields = {**fields, "sliding_window_pattern": 3} if family == "gemma3" else fields
    path = make_checkpoint(family, tmp_path, **fields)
    new = load_model(path, REFERENCE)
    config = json.loads((path / "config.json").read_text())
    assert "rope_parameters" in config, "transformers writes the new layout"
    (path / "config.json").write_text(json.dumps(old_layout(config)))
    old = load_model(path, REFERENCE)
    assert old.spec == new.spec


@pytest.mark.parametrize(("max_context", "prompt"), [(64, 40), (256, 80)], ids=["short", "long"])
def test_longrope_on_both_sides_of_its_limit(max_context: int, prompt: int, tmp_path: Path) -> None:
    """The engine chooses once by its longest context; transformers by each sequence. They agree on each side."""
    fields = {"original_max_position_embeddings": 64, "rope_parameters": {**LONGROPE, "rope_theta": 1e4}}
    golden = make_golden("phi3", tmp_path, prompt_tokens=prompt, new_tokens=NEW_TOKENS, **fields)
    model = load_model(golden.path, REFERENCE, max_context_tokens=max_context)
    check_golden(model, golden, chunk=17)
    other = load_model(golden.path, REFERENCE, max_context_tokens=256 if max_context == 64 else 64)
    assert other.spec.attention.rope != model.spec.attention.rope
    assert other.revision != model.revision, "keys turned by other angles must not be taken for equal"


def test_dynamic_rope_beyond_the_trained_length(tmp_path: Path) -> None:
    """For a sequence as long as the engine's longest, the frequencies are those transformers computes."""
    fields = {
        "max_position_embeddings": 48,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    }
    path = make_checkpoint("llama", tmp_path, **fields)
    tokens = torch.randint(3, VOCAB, (1, 96), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = make_reference("llama", **fields)(tokens, use_cache=False).logits[0]
    model = load_model(path, REFERENCE, max_context_tokens=96)
    assert model.spec.max_context_tokens == 96
    got = Stepper(model).prefill("a", tokens[0].tolist(), chunk=13)
    assert (got - expected).abs().max() < 1e-4
    assert load_model(path, REFERENCE).spec.max_context_tokens == 48, "unasked, a model keeps its trained length"
    assert load_model(path, REFERENCE, max_context_tokens=999).spec.max_context_tokens == 192, "factor 4 is the most"


def test_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    """Anything above 5 GB comes in parts."""
    whole = make_checkpoint("qwen2", tmp_path / "whole")
    parts = make_checkpoint("qwen2", tmp_path / "parts", max_shard_size="60KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    tokens = list(range(5, 30))
    one, other = (Stepper(load_model(path, REFERENCE)).prefill("a", tokens) for path in (whole, parts))
    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_files_computed_in_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    """The file's dtype is storage: asked for fp32, the model computes in fp32 on exactly those values."""
    import transformers

    path = make_checkpoint("gemma3", tmp_path, dtype=dtype)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    check_golden(load_model(path, REFERENCE), ask_reference(reference.eval(), path, new_tokens=NEW_TOKENS), chunk=None)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_files_run_in_bf16_unasked(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """bf16 compute stays near the fp32 answer: the average logit differs by a few roundings."""
    golden = make_golden(family, tmp_path, dtype=dtype, new_tokens=NEW_TOKENS)
    model = load_model(golden.path, ComputeConfig(backend="torch", device="cpu"))
    assert (model.weights_format, model.kv_format) == ("bf16", "bf16")
    logits = Stepper(model).prefill("a", golden.prompt)
    error = (logits - golden.logits[: len(golden.prompt)]).abs().mean()
    assert error < 0.05 * golden.logits.std(), error


def test_minimax_m3_as_its_decoder_alone_is_saved(tmp_path: Path) -> None:
    """transformers stacks gate and up of what a token always meets, and keeps the bias of the choice with the router."""
    import transformers

    fields = MORE["minimax_m3"][2]
    reference = transformers.MiniMaxM3VLForCausalLM(transformers.MiniMaxM3VLTextConfig(**{**COMMON, **fields}))
    reference.eval().float().set_attn_implementation("eager")
    enliven(reference, 0)
    reference.save_pretrained(tmp_path)
    golden = ask_reference(reference, tmp_path, new_tokens=NEW_TOKENS)
    check_golden(load_model(tmp_path, REFERENCE), golden, chunk=None)


@pytest.mark.parametrize("family", ["axk2", *PARTS_MORE])
def test_every_tensor_is_counted(family: str, tmp_path: Path) -> None:
    """What gates norms and heads, experts below each other: all is read, and the planner knows how many numbers there are."""
    path = make_checkpoint(family, tmp_path)
    spec = load_model_file(path)
    check_stored(path, spec, parameter_count(spec))
    parts = {group.part for group in contents_of(path).groups}
    assert {"embedding", "attention", "norms"} <= parts
    assert ("other" in parts) == (family == "fuyu")  # what reads pictures
    assert ("mlp" in parts) == (spec.mlp is not None)


@pytest.mark.parametrize(
    "name",
    ["ERNIE whose shared experts and head have biases", "Galactica", "Ettin's decoder whose norms have biases",
     "Phi with norms of heads", "Qwen2-MoE that has no experts"],
)  # fmt: skip
def test_every_tensor_of_a_variant_is_counted(name: str, tmp_path: Path) -> None:
    """The planner and the loader know the biases and norms that a switch adds or takes away."""
    family, fields = VARIANTS[name]
    path = make_checkpoint(family, tmp_path, **fields)
    check_stored(path, spec := load_model_file(path), parameter_count(spec))


def test_experts_of_one_channel_are_packed(tmp_path: Path) -> None:
    """Llama 4 stores them with inputs and outputs exchanged; of one input torch takes any stride for contiguous."""
    path = make_checkpoint("llama4", tmp_path, intermediate_size=1)
    logits = [
        Stepper(load_model(path, config)).prefill("a", list(range(5, 30)))
        for config in (REFERENCE, ComputeConfig(backend="cpu", weights="bf16"))
    ]
    assert (logits[0] - logits[1]).abs().mean() < 0.1 * logits[0].std()


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_neighbours_change_nothing(family: str, tmp_path: Path) -> None:
    """A mixed step of ragged chunks gives each sequence the logits it has alone."""
    model = load_model(make_checkpoint(family, tmp_path), REFERENCE)
    generator = torch.Generator().manual_seed(5)
    prompts = {name: torch.randint(3, VOCAB, (n,), generator=generator).tolist() for name, n in
               (("a", 50), ("b", 1), ("c", 33), ("d", 17))}  # fmt: skip
    alone = {name: Stepper(model).prefill(name, tokens) for name, tokens in prompts.items()}
    stepper = Stepper(model)
    cuts = {"a": [7, 1, 41, 1], "b": [0, 1], "c": [16, 16, 1], "d": [1, 1, 14, 1]}
    got: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    for turn in range(4):
        chunks = {}
        for name, sizes in cuts.items():
            begin = sum(sizes[:turn])
            if turn < len(sizes) and sizes[turn]:
                chunks[name] = prompts[name][begin : begin + sizes[turn]]
        for name, logits in stepper.step(chunks).items():
            got[name].append(logits)
    for name, logits in alone.items():
        torch.testing.assert_close(torch.cat(got[name]), logits, atol=1e-4, rtol=0)


def test_both_names_of_what_is_in_an_olmo_hybrid(tmp_path: Path) -> None:
    """Files for vLLM call norms as other models do and join convolutions; transformers reads either."""
    make_checkpoint("olmo_hybrid", tmp_path / "apart")
    model = make_reference("olmo_hybrid")
    model.save_pretrained(str(tmp_path / "joined"), save_original_format=False)
    ids = list(range(3, 20))
    found = [Stepper(load_model(tmp_path / name, REFERENCE)).step({"a": ids})["a"] for name in ("apart", "joined")]
    assert torch.equal(*found)
    with torch.no_grad():
        assert (model(torch.tensor([ids])).logits[0] - found[0]).abs().max() < 1e-4


def test_layers_without_attention_cost_and_keep_nothing_of_it(tmp_path: Path) -> None:
    """Of six layers of a Nemotron NAS three attend, with KV heads of their own; planner, caches and phases agree."""
    path = make_checkpoint("nemotron-nas", tmp_path, dtype=torch.bfloat16)
    check_stored(path, spec := load_model_file(path), parameter_count(spec))
    assert kv_bytes_per_token(spec, KVSpec()) == 2 * 2 * 16 * (2 + 1 + 4)
    shape = StepShape.decode(batch=3, context_tokens=20)
    cost = cost_of(spec, shape, quant=BF16, kv=KVSpec())
    heads, kv_width = 3 * 4 * 16, 2 * 16 * (2 + 1 + 4)
    wanted = {"qkv": heads + kv_width, "o": heads, "mlp": 3 * (96 + 40 + 56 + 72)}
    assert {name: cost.component(name).flops for name in wanted} == {
        name: 2 * 3 * 64 * width for name, width in wanted.items()
    }
    for backend in ("cpu", "torch"):
        model = load_model(path, ComputeConfig(backend=backend, device="cpu", kv="bf16"))
        assert model.kv_bytes_per_block(16) == 16 * kv_bytes_per_token(spec, KVSpec())
