"""Wrappers around decoders that are read: their decoders' fields, and the smallest parts for pictures and sound beside them."""

from __future__ import annotations

from typing import Any

from family_fields import SMALL_TOWER
from latent_configs import WITHOUT_FIRST

CLIP = {"model_type": "clip_vision_model", **SMALL_TOWER}
WIDE = {**SMALL_TOWER, "hidden_size": 64, "num_attention_heads": 1}  # heads of 64 beside it
SIGLIP = {"model_type": "siglip_vision_model", **SMALL_TOWER}
SAM = {"hidden_size": 16, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
       "patch_size": 8, "mlp_dim": 16, "window_size": 2, "global_attn_indexes": [0]}  # fmt: skip
QFORMER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20,
           "encoder_hidden_size": 16}  # fmt: skip
QWEN_TOWER = {"depth": 1, "num_heads": 2, "patch_size": 8, "hidden_size": 16, "out_hidden_size": 64, "intermediate_size": 16,
              "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0], "num_position_embeddings": 16}  # fmt: skip
QWEN_EAR = {"num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16,
            "max_source_positions": 8, "output_dim": 64, "downsample_hidden_size": 8}  # fmt: skip
EAR = {"num_mel_bins": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
       "num_key_value_heads": 2, "max_source_positions": 8, "max_position_embeddings": 8}  # fmt: skip
CONFORMER = {"input_dim": 8, "num_layers": 1, "hidden_dim": 16, "num_heads": 2, "dim_head": 8, "output_dim": 8,
             "context_size": 8, "max_pos_emb": 8}  # fmt: skip
HEADS_24 = {"model_type": "qwen3", "head_dim": 24}
DELTA_RULE = {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2,
              "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32}  # fmt: skip
SCALED = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 1.5}
OPT = {
    "model_type": "opt",
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "num_key_value_heads": None,
    "intermediate_size": None,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
INTERNVIT = {**SMALL_TOWER, "image_size": [16, 16], "patch_size": [8, 8]}

# class -> fields of its decoder, and of what is beside it
WRAPPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LlavaNextVideo": ({"model_type": "llama"}, {"vision_config": CLIP}),
    "VideoLlava": ({"model_type": "llama"}, {"vision_config": CLIP}),
    "VipLlava": ({"model_type": "llama"}, {"vision_config": CLIP}),
    "VideoLlama3": ({"model_type": "qwen2"}, {"vision_config": SMALL_TOWER}),
    "GotOcr2": ({"model_type": "qwen2"}, {"vision_config": SAM}),
    "HyperCLOVAXVisionV2": (
        {"model_type": "hyperclovax", **SCALED},
        {"vision_config": {"model_type": "qwen2_5_vl", **QWEN_TOWER}},
    ),
    "Idefics2": (
        {"model_type": "mistral", "sliding_window": None},
        {
            "vision_config": SMALL_TOWER,
            "perceiver_config": {"resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 2,
                                 "resampler_head_dim": 8, "num_key_value_heads": 1},
        },
    ),
    "Janus": (
        {"model_type": "llama"},
        {
            "vision_config": {**SMALL_TOWER, "projection_dim": 64, "depth": 1},
            "vq_config": {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 32, "base_channels": 32,
                          "channel_multiplier": [1], "num_res_blocks": 1, "projection_dim": 64, "num_hidden_layers": 1},
        },
    ),
    "DeepseekVL": ({"model_type": "llama"}, {"vision_config": SIGLIP}),
    "DeepseekVLHybrid": ({"model_type": "llama"}, {"vision_config": SIGLIP, "high_res_vision_config": SAM}),
    "LightOnOcr": (HEADS_24, {"vision_config": {"model_type": "pixtral", "head_dim": 8, **SMALL_TOWER}}),
    "QianfanOCR": (HEADS_24, {"vision_config": INTERNVIT}),
    "MiniCPMV4_6": (DELTA_RULE, {"vision_config": {**SMALL_TOWER, "insert_layer_id": 0}, "insert_layer_id": 0}),
    "MiniCPMV4_7": (DELTA_RULE, {"vision_config": {**SMALL_TOWER, "insert_layer_id": 0}, "insert_layer_id": 0}),
    "MiniCPMOcr": (DELTA_RULE, {"vision_config": {**SMALL_TOWER, "insert_layer_id": 0}, "insert_layer_id": 0}),
    "Blip2": (OPT, {"vision_config": SMALL_TOWER, "qformer_config": QFORMER}),
    "InstructBlip": ({"model_type": "llama"}, {"vision_config": SMALL_TOWER, "qformer_config": QFORMER}),
    "InstructBlipVideo": ({"model_type": "llama"}, {"vision_config": SMALL_TOWER, "qformer_config": QFORMER}),
    "GraniteSpeech": ({"model_type": "granite", **SCALED}, {"encoder_config": CONFORMER, "projector_config": QFORMER}),
    "GraniteSpeechPlus": ({"model_type": "granite", **SCALED}, {"encoder_config": CONFORMER, "projector_config": QFORMER}),
    "Granite4Vision": (SCALED, {"vision_config": {**CLIP, **WIDE}, "qformer_config": QFORMER, "downsample_rate": "1/2",
                                "spatial_target_layers": [0, 1], "deepstack_layer_map": [[0, 1]]}),
    "GraniteDocling": (SCALED, {"vision_config": {**SMALL_TOWER, "out_hidden_size": 64, "scale_factor": 2,
                                                  "deepstack_visual_indexes": [0]}}),
    "GlmAsr": ({"model_type": "llama"}, {"audio_config": EAR}),
    "Qwen3ASR": (HEADS_24, {"audio_config": QWEN_EAR}),
    "FunAsrNano": (HEADS_24, {"audio_config": EAR, "adaptor_config": {
        "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1,
        "projector_hidden_size": 16}}),
    "MossTranscribeDiarize": (HEADS_24, {"audio_config": EAR}),
    "VibeVoiceAsr": (
        {"model_type": "qwen2"},
        {f"{kind}_tokenizer_encoder_config": {
            "hidden_size": 16, "num_filters": 4, "downsampling_ratios": [2], "depths": [1, 1], "kernel_size": 3}
         for kind in ("semantic", "acoustic")},
    ),
    "OmniASR": ({"model_type": "llama"}, {"audio_config": {
        "model_type": "omniasr_audio", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "conv_dim": [8, 8], "conv_kernel": [3, 3], "conv_stride": [2, 2],
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}}),
    "AudioFlamingo3": ({"model_type": "qwen2"}, {"audio_config": EAR}),
    "MusicFlamingo": ({"model_type": "qwen2"}, {"audio_config": {"model_type": "audioflamingo3_encoder", **EAR}}),
    "GlmOcr": ({"head_dim": 24, "rope_parameters": {**MROPE, "mrope_section": [4, 4, 4]}}, {"vision_config": QWEN_TOWER}),
    "PaddleOCRVL": ({"head_dim": 16, "rope_parameters": MROPE}, {"vision_config": SMALL_TOWER}),
    "HunYuanVL": (
        {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4,
                                             "mrope_section": [2, 2, 2, 2]}},
        {"vision_config": {**SMALL_TOWER, "num_key_value_heads": 2, "out_hidden_size": 64, "text_hidden_size": 64}},
    ),
    "Qwen2_5OmniThinker": ({"rope_parameters": MROPE}, {"vision_config": QWEN_TOWER, "audio_config": QWEN_EAR}),
    "Qwen3OmniMoeThinker": (
        {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "rope_parameters": {**MROPE, "interleaved": True, "mrope_interleaved": True, "mrope_section": [4, 4, 4]}},
        {"vision_config": QWEN_TOWER, "audio_config": QWEN_EAR},
    ),
    "Molmo2": (
        {"head_dim": 24, "additional_vocab_size": 8},
        {"vision_config": {**SMALL_TOWER, "image_size": [16, 16], "head_dim": 8, "num_key_value_heads": 2},
         "adapter_config": {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
                            "intermediate_size": 16, "text_hidden_size": 64, "vit_layers": [0, 0]}},
    ),
    "Ernie4_5_VLMoe": (
        {"head_dim": 16, "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": [40, 24], "moe_num_shared_experts": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}},
        {"vision_config": {**QWEN_TOWER, "text_hidden_size": 64}},
    ),
    "Emu3": (
        {},
        {"vq_config": {"codebook_size": 16, "embed_dim": 8, "latent_channels": 8, "base_channels": 32,
                       "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": [4], "hidden_size": 16,
                       "num_attention_heads": 1},
         "vocabulary_map": {"<image>": 5, "<|visual token 000000|>": 6}},
    ),
    # words that are not written, which are those of pictures and sounds
    "Apertus1p5": (
        {"output_vocab_size": 120},
        {"vision_config": {"codebook_size": 16, "embed_dim": 8, "latent_channels": 8, "base_channels": 32,
                           "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": []},
         "audio_config": {"model_type": "wavtokenizer_encoder", "codebook_size": 8},
         "image_token_offset": 120, "audio_token_offset": 136, "image_token_id": 1, "audio_token_id": 2},
    ),
    # latents normed by the model's own eps
    "HYV4VL": (
        {**WITHOUT_FIRST, "q_lora_rank": 24, "mlp_layer_types": ["dense", "sparse", "sparse"],
         "index_topk": 12, "index_n_heads": 8, "index_head_dim": 32, "indexer_types": ["full", "shared", "full"], "hc_mult": 3,
         "rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        {"vision_config": {**SMALL_TOWER, "num_key_value_heads": 2, "out_hidden_size": 64, "text_hidden_size": 64}},
    ),
    "Cosmos3Omni": ({"head_dim": 24, "rope_parameters": {**MROPE, "mrope_section": [4, 4, 4]}}, {"vision_config": QWEN_TOWER}),
    "Cosmos3Edge": (
        {"head_dim": 24, "rope_parameters": {**MROPE, "mrope_section": [4, 4, 4]}},
        {"vision_config": {**SMALL_TOWER, "num_patches": 16}},
    ),
    "DeepseekOcr2": (
        {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 1,
         "mlp_layer_types": ["dense", "sparse", "sparse"], "routed_scaling_factor": 1.5},
        {"vision_config": {"sam_config": {**SAM, "downsample_channels": [16, 16]}, "encoder_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2}}},
    ),
}  # fmt: skip
# what the classes write by the names of other parts: transformers reads a name by patterns that it does not write back
MISSPELT: dict[str, dict[str, str]] = {
    "QianfanOCR": {"language_model.model.encoder.": "language_model.model."},
}
# what these classes leave out of the logits that the decoder alone has
UNSCALED = {"GraniteSpeech": 1 / SCALED["logits_scaling"], "GraniteSpeechPlus": 1 / SCALED["logits_scaling"]}
