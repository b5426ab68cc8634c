"""What entries of several files of families have in common: keys of configs with their class defaults, and settings."""

from __future__ import annotations

from typing import Any

from diptych.models.mlp import Scores
from diptych.models.spec import Norms, QkNorm

# The class defaults that most classes share; an entry overrides what differs.
USUAL: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0,
}  # fmt: skip
# of classes that have no key for it: torch's own
FIXED_EPS = {"rms_norm_eps": (1e-5,)}
QWEN = {**USUAL, "vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32,
        "max_position_embeddings": 32_768, "sliding_window": 4096, "use_sliding_window": False}  # fmt: skip
QWEN_WINDOWS = {"max_window_layers": 28, "layer_types": None}
GRANITE = {"attention_bias": False, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
           "attention_multiplier": 1.0}  # fmt: skip
EXAONE = {**USUAL, "vocab_size": 102_400, "intermediate_size": 16_384, "num_key_value_heads": 32, "sliding_window": 4096,
          "rms_norm_eps": 1e-5, "layer_types": None}  # fmt: skip
# windows but on every fourth layer, which knows no positions, unless no layer has a window
EXAONE_LAYERS: dict[str, Any] = {
    "fixed": {"sliding_window_pattern": (None, 0, 4, "LLLG")}, "qk_norm": QkNorm.HEAD, "full_every": 4,
    "turns_windowed_only": True, "turns_full_alone": True}  # fmt: skip
# Granite with windows, sinks, and a base of the rotation for each layer
GRANITE_WINDOWS = {"sliding_window": 128, "layer_types": None, "layer_rope_theta": None}
GRANITE_WINDOWED: dict[str, Any] = {"full_every": 4, "full_first": True, "has_sinks": True}
BY_GROUPS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
LOCAL_EXPERTS = {"num_local_experts": "num_experts"}
BESIDE_VISION: dict[str, Any] = {
    "prefixes": ("model.", "language_model.model.", "model.language_model."),
    "ignored": ("rotary_emb.inv_freq", "vision_tower.", "multi_modal_projector."),
}
BESIDE_PICTURES: dict[str, Any] = {
    "prefixes": ("model.", "model.language_model."), "ignored": ("rotary_emb.inv_freq", "visual.")}  # fmt: skip
BY_ATTENTION_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
BY_USE_BIAS: dict[str, Any] = {"qkv_bias": "use_bias", "o_bias": "use_bias", "mlp_bias": "use_bias"}
CHOSEN_BY_SIGMOID: dict[str, Any] = {
    "scores": Scores.SIGMOID, "has_choice_bias": True, "group_best": 2,
    "renamed": {"n_routed_experts": "num_experts", **LOCAL_EXPERTS}}  # fmt: skip
# what published files of Sarvam's say beside that, in the one form that runs here
SARVAM: dict[str, Any] = {
    **CHOSEN_BY_SIGMOID,
    "renamed": {**CHOSEN_BY_SIGMOID["renamed"], "num_shared_experts": "n_shared_experts",
                "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size"},
    "fixed": {"topk_method": ("noaux_tc",), "score_function": ("sigmoid",), "scoring_func": ("sigmoid",), "use_bias": (False,),
              "moe_router_enable_expert_bias": (True,)}}  # fmt: skip
COHERE = {**USUAL, "vocab_size": 256_000, "hidden_size": 8192, "intermediate_size": 22_528, "logit_scale": 0.0625,
          "num_hidden_layers": 40, "num_attention_heads": 64, "max_position_embeddings": 8192,
          "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "attention_bias": False}  # fmt: skip
COHERE_LAYERS: dict[str, Any] = {"norms": Norms.PARALLEL, "centres_norms": True, "is_interleaved": True,
                                 **BY_ATTENTION_BIAS}  # fmt: skip
