"""What is said of a model that is not read: short, and what to look for instead."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.ground.errors import UnsupportedModel
from diptych.models.config import HfConfig
from diptych.models.read import read_model

SMALL = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}


@pytest.mark.parametrize(
    ("fields", "near"),
    [
        ({"model_type": "llamma"}, "llama"),
        ({"model_type": "qwen9"}, "qwen3"),
        ({"model_type": "x", "architectures": ["LlammaForCausalLM"]}, "LlamaForCausalLM"),
        ({"model_type": "x", "architectures": ["Mistral4ForConditionalGeneration"]}, "MistralForCausalLM"),
        ({"model_type": "x", "architectures": ["QzxyForCausalLM"]}, None),  # an ending is no likeness
        ({"model_type": "x", "architectures": [7]}, None),
    ],
)
def test_an_unknown_kind_is_told_the_nearest(fields: dict[str, Any], near: str | None) -> None:
    """All kinds that are read were told: 8 kB."""
    with pytest.raises(UnsupportedModel, match="is not supported") as caught:
        read_model(HfConfig(SMALL | fields))
    assert len(str(caught.value)) < 250
    assert ("the nearest that" in caught.value.message, caught.value.hint) == (
        bool(near),
        "docs/models.md lists what is",
    )
    assert near is None or near in caught.value.message.partition("the nearest that")[2]
