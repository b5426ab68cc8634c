"""Why known kinds of models are not run: what in them has no op here. A kind that is on no list is refused without a reason.

>>> reason_for("doge")
'a mask that is made of the values'
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from diptych.ground.errors import UnsupportedModel

LISTED = "docs/models.md lists what is"
_ENDING = re.compile("(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)$")
ENCODER_BESIDE = "an encoder beside the decoder"
LIGHTNING = "Lightning attention whose queries and keys are normed and turned, and not bent"
# what is missing -> model_type of transformers
MISSING: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "a state per sequence of another kind (RWKV, xLSTM)": ("rwkv", "xlstm"),
    "attention whose queries and outputs a router chooses": ("jetmoe",),
    "a mask that is made of the values": ("doge",),
    "latent attention within windows, and rotary keys that are normed": ("dots3_note", "dots3_note_text"),
    "queries and keys that are convolved over tokens": ("zaya",),
    "an encoder alone, of a kind that few embedding models have": (
        "bert-generation", "big_bird", "convbert", "flaubert", "mobilebert", "roc_bert", "squeezebert", "xlm", "xmod",
        "ibert", "luke", "splinter"),
    "an encoder of proteins": ("esm", "esmc"),
    "an encoder beside pictures": ("clip_text_model", "lxmert", "modernvbert", "neomme", "tipsv2_text_model", "ultravbert"),
    "attention that is made without the scores of all pairs": ("fnet", "funnel", "mra", "nystromformer", "perceiver", "yoso"),
    "tokens that all others see beside windows": ("longformer",),
    "places on a page or in a table beside each token": (
        "bros", "layoutlm", "layoutlmv2", "layoutlmv3", "lilt", "markuplm", "tapas"),
    "characters by hashes": ("canine",),
    "a head that labels tokens": ("openai_privacy_filter",),
    ENCODER_BESIDE: (
        "bart", "mbart", "pegasus", "marian", "whisper", "blenderbot", "bigbird_pegasus", "blenderbot-small",
        "mvp", "plbart", "prophetnet", "trocr", "florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop",
        "vision-encoder-decoder", "blip", "musicgen", "musicgen_melody", "encoder-decoder", "fsmt", "led", "longt5", "m2m_100",
        "nllb-moe", "pegasus_x", "seamless_m4t", "seamless_m4t_v2", "switch_transformers", "t5gemma", "umt5", "canary",
        "cohere_asr", "moonshine", "moonshine_streaming", "pop2piano", "speech_to_text"),
    # beside pictures and sound
    "a prompt that attends both ways": ("paligemma", "pi0", "git"),
    "layers that attend to pictures or proteins between the others": ("idefics", "evolla"),
    "sound that is added to tokens, or drawn beside them": (
        "voxtral_realtime", "kyutai_speech_to_text", "moshi", "clvp", "csm", "dia", "gradium_phonon_tts", "higgs_audio_v2",
        "pocket_tts", "vibevoice"),
    "pictures that are drawn behind the tokens": ("glm_image",),
    "norms of each head with biases of its own": ("chameleon",),
    "norms inside of attention and MLPs": ("kosmos-2", "kosmos-2.5"),
    "windows behind a prompt that all tokens see": ("unlimited_ocr", "unlimited_ocr_text"),
    "a decoder by names of another program": ("nemo_speechlm",),
    "text that is written in no order": ("diffusion_gemma",),
    # of new kinds
    "scores of distances that each query makes for itself, and convolutions of keys, values and what layers add": (
        "inkling_mm_model", "inkling_text", "inkling2", "inkling2_text", "inkling2_loop", "inkling2_loop_text"),
    "residuals weighed by depth, and queries by powers of their positions": ("beam",),
    "layers that run in cycles": ("hrm_text", "dory"),
    "bytes in patches of any length": ("blt",),
    # of old kinds
    "scores by distance and segment": ("cpmant", "xlnet"),
    "sines of positions by a rule of its own": ("ctrl",),
    "attention by hashes": ("reformer",),
    "drafts alone, of another model": ("gemma4_assistant", "gemma4_unified_assistant", "muse_glimmer_assistant"),
})  # fmt: skip


# architectures that call themselves by the model_type of another one -> what is missing
NAMESAKES: Mapping[str, str] = MappingProxyType({
    # Ling 2.5 and Ring 2.5; Ring-linear and Ling-linear 2.0, whose kind no class of transformers has
    **dict.fromkeys(("BailingMoeV2_5ForCausalLM", "BailingMoeLinearV2ForCausalLM", "bailing_moe_linear"), LIGHTNING),
    # of which the encoder alone is read
    **dict.fromkeys(("T5ForConditionalGeneration", "T5WithLMHeadModel", "T5Model", "MT5ForConditionalGeneration", "MT5Model",
                     "T5ForSequenceClassification", "MT5ForSequenceClassification"), ENCODER_BESIDE),
    "EuroBertForSequenceClassification": "a head that judges by states that other layers bend before the mean",
})  # fmt: skip
# names of GGUF architectures that are more than a spelling of the model_type
IN_GGUF: Mapping[str, str] = MappingProxyType({
    "rwkv6": "rwkv", "rwkv7": "rwkv",
})  # fmt: skip


def reason_for(kind: object) -> str | None:
    """What is missing for a model_type, an architecture or one of GGUF; None for one that is on no list."""
    if not isinstance(kind, str):
        return None
    if kind in NAMESAKES:
        return NAMESAKES[kind]
    named = _spelt(IN_GGUF.get(kind, kind))
    return next((reason for reason, kinds in MISSING.items() if named in map(_spelt, kinds)), None)


def not_supported(
    what: str, name: object, place: str, known: Iterable[str], *, reason: str | None, hint: str = LISTED
) -> UnsupportedModel:
    """The refusal of a kind of model in `place`: with the reason where one is known, else the nearest of `known` and `hint`.

    >>> print(not_supported("model_type", "qwen9", "config.json", ["qwen3", "gemma"], reason=None).message)
    model_type 'qwen9' in config.json is not supported; the nearest that is: qwen3
    """
    stems = {_stem(one): one for one in known}
    near = get_close_matches(_stem(name), stems) if isinstance(name, str) and reason is None else []
    are = "is" if len(near) == 1 else "are"
    nearest = f"; the nearest that {are}: {', '.join(stems[stem] for stem in near)}" if near else ""
    missing = "" if reason is None else f" ({reason})"
    return UnsupportedModel(
        f"{what} {name!r} in {place} is not supported{missing}{nearest}", hint=hint if reason is None else None
    )


def _stem(name: str) -> str:
    """What tells architectures apart: nearly all of them end alike."""
    return _ENDING.sub("", name).lower()


def _spelt(kind: str) -> str:
    """qwen3_next and qwen3next are one kind."""
    return re.sub(r"[-_.]", "", kind)
