"""Mistral Large 4's config: whose latents a layer attends to, which layers turn, what its index reads."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.read import read_model
from diptych.models.spec import ModelSpec

SMALL: dict[str, Any] = {
    "model_type": "mistral_large4_text", "num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 32, "intermediate_size": 96, "vocab_size": 256, "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


def read(**fields: Any) -> ModelSpec:
    return read_model(HfConfig({**SMALL, **fields}))


def test_every_fourth_layer_turns_nothing_and_its_rows_are_as_much_narrower() -> None:
    spec = read()
    kinds = [(one.attention.rope is None, one.attention.mla) for one in spec.layers]
    assert [is_unturned for is_unturned, _ in kinds] == [False, False, False, True] * 2
    assert {(mla.nope_dim, mla.rope_dim, mla.row) for is_unturned, mla in kinds if mla and is_unturned} == {
        (128, 0, 32)
    }
    assert {(mla.nope_dim, mla.rope_dim, mla.row) for is_unturned, mla in kinds if mla and not is_unturned} == {
        (64, 64, 96)
    }
    assert {one.attention.scale for one in spec.layers} == {128**-0.5}, "of all dimensions, whichever turn"
    assert all(one.attention.scales_heads for one in spec.layers)


def test_a_layer_keeps_latents_an_index_key_or_nothing() -> None:
    """Latents come first in a cache, and behind them the keys of indices, each a layer of its own."""
    spec = read(
        kv_source_layers=[0, 1, 0, 3, 0, 5, 5, 3], indexer_types=["full"] * 3 + ["shared", "full"] + ["shared"] * 3
    )
    assert spec.kv_layers == (0, 1, 3, 5)
    assert spec.index_layers == (0, 1, 2, 4)
    assert [spec.kv_place(i) for i in range(8)] == [0, 1, 0, 2, 0, 3, 3, 2]
    assert [one.head_dim for one in spec.caches] == [96, 96, 32, 96, 128, 128, 128, 128]
    assert [one.attended for one in spec.caches] == [96, 96, 32, 96, None, None, None, None]


@pytest.mark.parametrize(
    ("sources", "why"),
    [([0, 1, 2], "has 3 entries; the model has 8 layers"),
     ([0, 1, 3, 3, 4, 5, 6, 7], r"layer 2 .* latents of layer 3 .* is none"),
     ([0, 1, 2, 0, 4, 5, 6, 7], r"layer 3 .* latents of layer 0 .* without rotary positions .* is none"),
     ([0, 1, 0, 3, 1, 0, 6, 7], r"layer 2 .* latents of layer 0 .* with rotary positions .* is 1"),
     ([0, 0, 1, 3, 4, 5, 6, 7], r"layer 2 .* latents of layer 1 .* is 0")],
)  # fmt: skip
def test_latents_of_other_layers_than_its_class_remembers_are_refused(sources: list[int], why: str) -> None:
    """It has one place for those of each kind, whatever number a layer names."""
    with pytest.raises(LoadError, match=why):
        read(kv_source_layers=sources)


def test_what_no_layer_has_is_refused() -> None:
    for fields, why in (({"q_lora_rank": 24}, "q_lora_rank"), ({"indexer_rope_interleave": False}, "indexer_rope_interleave"),
                        ({"index_head_dim": 32}, "64 of it turn"), ({"no_rope_layers": [1, 0]}, "2 entries")):  # fmt: skip
        with pytest.raises(LoadError, match=why):
            read(**fields)
