"""Muse Glimmer's config: which layers turn, what its bases may say, norms that differ from the others."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.read import read_model
from diptych.models.spec import ModelSpec, QkNorm

SMALL: dict[str, Any] = {
    "model_type": "muse_glimmer_text", "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 256, "sliding_window": 9,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip


def read(**fields: Any) -> ModelSpec:
    return read_model(HfConfig({**SMALL, **fields}))


def test_every_fourth_layer_from_the_last_sees_everything_and_knows_no_positions() -> None:
    spec = read()
    assert spec.windows == (9, None, 9, 9, 9, None)
    assert [layer.attention.rope is None for layer in spec.layers] == [window is None for window in spec.windows]
    assert {layer.attention.qk_norm for layer in spec.layers} == {QkNorm.UNIT}


def test_a_layer_s_base_says_whether_it_turns() -> None:
    spec = read(layer_rope_theta=[0, 5e5, 5e5, 0, 5e5, 5e5], layer_types=["full_attention"] * 6)
    assert [layer.attention.rope is None for layer in spec.layers] == [True, False, False, True, False, False]
    assert spec.windows == (None,) * 6


@pytest.mark.parametrize("thetas", [[5e5] * 5, [5e5, 0, 5e5, 1e4, 5e5, 0], 5e5, [None, True, "x", 0, 0, 0]], ids=str)
def test_other_bases_are_refused(thetas: object) -> None:
    """The class of transformers turns such a layer by the model's base all the same."""
    with pytest.raises(LoadError, match=r"layer_rope_theta in .* must hold 6 numbers"):
        read(layer_rope_theta=thetas)


def test_norms_of_what_is_added_and_the_last_one_are_other_than_the_rest() -> None:
    spec = read(post_norm_eps=1e-3, rms_norm_eps=1e-5, qk_scale_factor=2.0, output_multiplier=0.25)
    assert (spec.norm_eps, spec.added_eps, spec.norm_offset, spec.end_offset) == (1e-5, 1e-3, 1.0, 0.0)
    assert (spec.attention.scale, spec.logit_scale, spec.logit_softcap) == (0.5, 0.25, 20.0)
