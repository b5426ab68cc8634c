"""The families as data: one entry each. A family that existing ops can run is one more entry, and nothing else.

An entry names the architectures it serves, every key of config.json that it reads with the default of the configuration
class in transformers (files leave out what equals it), the keys it knows in one setting only, how its layers are made, and
how its tensors are called. `read` turns a config into a `ModelSpec` by these; `compute` loads by them.
They lie by kind: `families_dense`, `families_gpt` (around GPT-2), `families_early` (a few models each), `families_mixtures`
(of experts), `families_latent` (attention), `families_states` (states of sequences); what several of those share is in
`families_shared`.
"""

from __future__ import annotations

from diptych.models.families_dense import DENSE
from diptych.models.families_early import EARLY
from diptych.models.families_gpt import GPT_KIND
from diptych.models.families_latent import LATENT_ATTENTION
from diptych.models.families_mixtures import MIXTURES
from diptych.models.families_states import STATES
from diptych.models.family import Family

FAMILIES: tuple[Family, ...] = (*DENSE, *GPT_KIND, *EARLY, *MIXTURES, *LATENT_ATTENTION, *STATES)
BY_ARCHITECTURE: dict[str, Family] = {name: family for family in FAMILIES for name in family.architectures}
BY_MODEL_TYPE: dict[str, Family] = {name: family for family in FAMILIES for name in family.model_types}
# wrappers around decoders, which a section of the config names: of more than one family, or of one that is published by itself
WRAPPERS: tuple[str, ...] = (
    "InternVLChatModel",
    *(
        f"{name}ForConditionalGeneration"
        for name in ("Mistral3", "Lfm2Vl", "Lfm3Vl", "Llava", "LlavaNext", "LlavaOnevision", "InternVL", "Idefics3",
                     "SmolVLM", "KimiK25", "Kimi_K25", "Ovis2", "AyaVision", "Cohere2Vision", "Exaone4_5_", "Voxtral",
                     "Qwen2Audio")
    ),
)  # fmt: skip
# where their decoders' tensors begin beside where those of decoders alone do, and parts of names of what is not the decoder's
WRAPPED_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.")
BESIDE_WRAPPED = (
    "vision_tower.",
    "vision_model.",
    "visual.",
    "audio_tower.",
    "multi_modal_projector.",
    "mm_projector.",
    "connector.",
    "image_newline",
    "visual_embeddings_table.",
    "mlp1.",  # of InternVL's own files, between tower and decoder
)
SUPPORTED: tuple[str, ...] = (*BY_ARCHITECTURE, *WRAPPERS)
