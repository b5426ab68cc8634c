"""Fields that small configs of several families have in common (`family_configs`)."""

from __future__ import annotations

from typing import Any

WINDOWS = {"num_hidden_layers": 4, "sliding_window": 16,
           "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}  # fmt: skip
LAGUNA = {**WINDOWS, "head_dim": 24, "num_attention_heads_per_layer": [4, 6, 2, 4], "num_experts": 6,
          "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48,
          "moe_routed_scaling_factor": 1.7, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
          "rope_parameters": {
             "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.5,
                                "original_max_position_embeddings": 64, "beta_fast": 64.0, "beta_slow": 1.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 1.0}}}  # fmt: skip
SMALL_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
               "image_size": 16, "patch_size": 8}  # fmt: skip
# the embedding and heads normed without weights, norms of what is added with another eps than the others; and its tower
MUSE: tuple[tuple[str, str, dict[str, Any]], tuple[str, dict[str, Any]]] = (
    ("MuseGlimmerTextConfig", "MuseGlimmerForConditionalGeneration", {
        "head_dim": 24, "num_hidden_layers": 5, "sliding_window": 16, "post_norm_eps": 0.1, "output_multiplier": 0.7,
        "qk_scale_factor": 1.7}),
    ("MuseGlimmerConfig", {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                           "patch_size": 8, "pos_emb_height": 2, "pos_emb_width": 2}),
)  # fmt: skip
# what adapts the output of a tower that no test runs, which the class makes 42 million weights of: 16 wide, in squares of 2 x 2
MUSE_ADAPTER = {"out_hidden_size": 64, "projector_hidden_size": 32}
# beside that sums by channel, norms behind heads and experts of latents, a dense layer; and what is beside it for sound
SPARK: tuple[str, str, dict[str, Any]] = ("MuseSparkTextConfig", "MuseSparkForConditionalGeneration", {
    **MUSE[0][2], "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "moe_hidden_size": 48,
    "routed_scaling_factor": 1.4, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"],
    "residual_gate_temperature": 0.4})  # fmt: skip
SPARK_EAR = {
    "patch_sizes": [2, 2],
    "hidden_sizes": [8, 8],
    "depths": [1, 1],
    "num_hidden_layers": 2,
    "out_hidden_size": 64,
}
