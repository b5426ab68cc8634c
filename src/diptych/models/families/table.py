"""The families as data: one entry each. A family that existing ops can run is one more entry, and nothing else.

An entry names the architectures it serves, every key of config.json that it reads with the default of the configuration
class in transformers (files leave out what equals it), the keys it knows in one setting only, how its layers are made, and
how its tensors are called. `read` turns a config into a `ModelSpec` by these; `compute` loads by them.
They lie by kind: `dense`, `gemma`, `gpt` (around GPT-2), `early` (a few models each), `mixtures` (of experts;
`sigmoid_mixtures`: each of them weighed by itself), `latent` (attention), `states` (states of sequences), `encoders` (which
attend both ways and write nothing), `wrapped` (published beside pictures or sound alone); what several of those share is in
`shared`.
"""

from __future__ import annotations

from diptych.models.families.dense import DENSE
from diptych.models.families.early import EARLY
from diptych.models.families.encoders import ENCODERS
from diptych.models.families.family import Family
from diptych.models.families.gemma import GEMMAS
from diptych.models.families.gpt import GPT_KIND
from diptych.models.families.latent import LATENT_ATTENTION
from diptych.models.families.mixtures import MIXTURES
from diptych.models.families.sigmoid_mixtures import SIGMOID_MIXTURES
from diptych.models.families.states import STATES
from diptych.models.families.wrapped import WRAPPED

FAMILIES: tuple[Family, ...] = (
    *DENSE, *GEMMAS, *GPT_KIND, *EARLY, *MIXTURES, *SIGMOID_MIXTURES, *LATENT_ATTENTION, *STATES, *ENCODERS, *WRAPPED,
)  # fmt: skip
BY_ARCHITECTURE: dict[str, Family] = {name: family for family in FAMILIES for name in family.architectures}
BY_MODEL_TYPE: dict[str, Family] = {name: family for family in FAMILIES for name in family.model_types}
# wrappers around decoders, which a section of the config names: of more than one family, or of one that is published by itself
WRAPPERS: tuple[str, ...] = (
    "InternVLChatModel",
    "NemotronH_Omni_Reasoning_V3",
    *(
        f"{name}ForConditionalGeneration"
        for name in ("Mistral3", "Lfm2Vl", "Lfm3Vl", "Llava", "LlavaNext", "LlavaOnevision", "InternVL", "Idefics3",
                     "SmolVLM", "KimiK25", "Kimi_K25", "Ovis2", "AyaVision", "Cohere2Vision", "Exaone4_5_", "Voxtral",
                     "Qwen2Audio", "LlavaNextVideo", "VideoLlava", "VipLlava", "VideoLlama3", "FastVlm", "GotOcr2",
                     "HyperCLOVAXVisionV2", "Idefics2", "Janus", "DeepseekVL", "DeepseekVLHybrid", "LightOnOcr",
                     "QianfanOCR", "MiniCPMV4_6", "MiniCPMV4_7", "MiniCPMOcr", "PerceptionLM", "Blip2", "InstructBlip",
                     "InstructBlipVideo", "GraniteSpeech", "GraniteSpeechPlus", "GlmAsr", "Qwen3ASR", "FunAsrNano",
                     "MossTranscribeDiarize", "VibeVoiceAsr", "Granite4Vision", "AudioFlamingo3", "MusicFlamingo",
                     "OmniASR")
    ),
)  # fmt: skip
# what precedes the names of a decoder alone, where their decoders' tensors begin else, and parts of names of what is beside
AROUND_WRAPPED = ("language_model.", "model.language_model.", "thinker.")
WRAPPED_PREFIXES = (
    "model.language_model.", "model.text_model.", "thinker.model.language_model.",
    "language_model.", "text_model.",  # of one without a head around both
)  # fmt: skip
BESIDE_WRAPPED = (
    "vision_tower.", "vision_model.", "visual.", "audio_tower.", "image_tower.", "video_tower.",
    "encoder.",  # vision_encoder., acoustic_tokenizer_encoder.
    "projector.", "projectors.",  # multi_modal_projector., mm_projector.
    "vision_projection.", "language_projection.", "sound_projection.", "connector.", "aligner.", "merger.", "qformer.",
    "query_tokens", "image_newline", "visual_embeddings_table.", "high_res_vision_",
    "mlp1.",  # of InternVL's own files, between tower and decoder
    "mlp_AR.",  # of PaddleOCR-VL's
    "vqmodel.", "generation_embeddings.", "generation_head.",  # what draws
    "talker.", "token2wav.", "code2wav.",  # what speaks
)  # fmt: skip
SUPPORTED: tuple[str, ...] = (*BY_ARCHITECTURE, *WRAPPERS)
# architectures of transformers that are a family's decoder under another head, or under none, and under its own
HEADLESS = ("ForSequenceClassification", "Model", "TextForSequenceClassification", "TextModel")
HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def with_head(architecture: str) -> str:
    """The architecture that writes text: Qwen3ForCausalLM for Qwen3Model, Gemma3ForCausalLM for Gemma3TextModel,
    Qwen3VLForConditionalGeneration for Qwen3VLModel. One that is read by its own name, or in no way, is itself.
    """
    bare = [architecture.removesuffix(ending) for ending in HEADLESS if architecture.endswith(ending)]
    wholes = (f"{name}{head}" for head in HEADS for name in bare)
    return (
        architecture if architecture in SUPPORTED else next((one for one in wholes if one in SUPPORTED), architecture)
    )
