"""Why known kinds of models are not run: what in them has no op here. A kind that is on no list is refused without a reason.

>>> reason_for("diffllama")
'attention with two softmaxes'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

OTHER_STATES = "a state per sequence of another kind (RWKV, Ling 2.5)"
# what is missing -> model_type of transformers
MISSING: Mapping[str, tuple[str, ...]] = MappingProxyType({
    OTHER_STATES: ("rwkv",),
    "attention whose queries and outputs a router chooses": ("jetmoe",),
    "a mask that is made of the values": ("doge",),
    "attention with two softmaxes": ("diffllama",),
    "latent attention within windows, and rotary keys that are normed": ("dots3_note", "dots3_note_text"),
    "queries and keys that are convolved over tokens": ("zaya",),
    "an encoder alone, with positions of its own": ("bert", "roberta", "xlm-roberta", "electra", "camembert"),
    "an encoder beside the decoder": ("bart", "mbart", "pegasus", "marian", "whisper", "blenderbot"),
})  # fmt: skip


# architectures that call themselves by the model_type of another one -> what is missing
NAMESAKES: Mapping[str, str] = MappingProxyType({
    "BailingMoeV2_5ForCausalLM": OTHER_STATES, "BailingMoeLinearV2ForCausalLM": OTHER_STATES,  # Ling 2.5
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


def _spelt(kind: str) -> str:
    """qwen3_next and qwen3next are one kind."""
    return re.sub(r"[-_.]", "", kind)
