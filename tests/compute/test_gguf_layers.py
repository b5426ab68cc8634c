"""GGUF files of models whose layers differ: what their metadata say layer by layer, and what they do not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden import ask_reference, check_golden

from diptych.compute.runner import load_model
from diptych.cost.parameters import parameter_count
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.models.gguf.checkpoint import count_parameters, load_gguf_spec
from diptych.models.gguf.file import open_gguf
from gguf_files import Tensors, gguf_reference, write_gguf
from gguf_layers import searched_metadata

REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
WINDOWED = [False, True, True, False]
DRAFTING = {"block_count": 5, "nextn_predict_layers": 1}


@pytest.mark.parametrize(
    ("family", "lists"),
    [
        ("mimo_v2_flash", {"attention.head_count_kv": [1, 2, 2, 1, 2]}),
        (
            "step3p7",
            {
                "attention.head_count": [4, 6, 6, 4, 6],
                "attention.head_count_kv": [2] * 5,
                "swiglu_clamp_exp": [0.0, 0.0, 0.6, 0.0, 0.0],
                "swiglu_clamp_shexp": [0.5, 0.0, 0.7, 0.0, 0.0],
            },
        ),
    ],
)
def test_lists_go_on_for_layers_that_draft(family: str, lists: dict[str, Any], tmp_path: Path) -> None:
    """Published models have such layers behind the others, which are left alone with their tensors."""
    reference = gguf_reference(family)
    usual = load_gguf_spec(write_gguf(reference, tmp_path / "usual.gguf"))
    pattern = {"attention.sliding_window_pattern": [*WINDOWED, True]}

    def add_drafter(tensors: Tensors) -> Tensors:
        return tensors | {"blk.4.attn_norm.weight": np.ones(64, dtype=np.float32)}

    path = write_gguf(reference, tmp_path / "m.gguf", metadata={**DRAFTING, **pattern, **lists}, change=add_drafter)
    assert load_gguf_spec(path).layers == usual.layers
    check_golden(load_model(path, REFERENCE), ask_reference(reference, path, new_tokens=4), chunk=7)


def test_what_older_files_of_mimo_do_not_say(tmp_path: Path) -> None:
    """By what values are multiplied: as in all that is published; the base of windowed layers, as in its class."""
    reference = gguf_reference("mimo_v2_flash")
    given = {"attention.value_scale": None, "rope.freq_base_swa": None}
    path = write_gguf(reference, tmp_path / "m.gguf", metadata=given)
    check_golden(load_model(path, REFERENCE), ask_reference(reference, path, new_tokens=4), chunk=None)


def test_layers_of_glm_that_share_a_choice(tmp_path: Path) -> None:
    """GLM-5 has an index in each layer; of GLM-5.2, whose files may not say which has, a context of a million tells."""
    reference = gguf_reference("glm_moe_dsa", num_hidden_layers=8, indexer_types=["full"] * 8)
    silent: dict[str, Any] = {"attention.indexer.types": None}
    for context, kinds in ((4096, "FFFFFFFF"), (1_048_576, "FFFSSSFS")):
        path = write_gguf(reference, tmp_path / f"{context}.gguf", metadata={**silent, "context_length": context})
        layers = load_gguf_spec(path).layers
        assert "".join("F" if layer.attention.own_index else "S" for layer in layers) == kinds
    load_model(path, REFERENCE)  # the index of a layer that takes another's choice is left alone


def test_one_number_may_bend_the_activations_of_all_layers(tmp_path: Path) -> None:
    """As llama.cpp reads it; and what is computed with it is another model, so keys and values are no longer shared."""
    reference = gguf_reference("apertus")
    for layer in reference.model.layers:
        layer.mlp.act_fn.alpha_p.data.fill_(0.75)
    usual = write_gguf(reference, tmp_path / "usual.gguf")
    single = write_gguf(reference, tmp_path / "single.gguf", metadata={"xielu.alpha_p": 0.75})
    check_golden(load_model(single, REFERENCE), ask_reference(reference, single, new_tokens=4), chunk=7)
    other = write_gguf(reference, tmp_path / "other.gguf", metadata={"xielu.alpha_p": 0.5})
    revisions = {path: load_model(path, REFERENCE).revision for path in (usual, single, other)}
    assert revisions[other] != revisions[single]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"xielu.alpha_n": None}, r"xielu\.alpha_n is missing"),
        ({"xielu.alpha_n": [0.5, 0.5]}, r"xielu\.alpha_n .* has 2 numbers; the model has 3 layers"),
        ({"xielu.alpha_p": [0.5, float("nan"), 0.5]}, "holds what is no number"),
        ({"xielu.beta": [0.6] * 3}, r"xielu\.beta .* is 0\.6; 0\.5 can be read"),
        ({"xielu.eps": 0.0}, r"xielu\.eps .* is 0; -1e-06 can be read"),
    ],
)
def test_activations_that_are_not_known_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    """What a checkpoint has in tensors lies in the metadata here."""
    path = write_gguf(gguf_reference("apertus"), tmp_path / "m.gguf", metadata=changed)
    with pytest.raises(LoadError, match=message):
        load_gguf_spec(path)


def test_layers_that_a_search_has_taken_apart(tmp_path: Path) -> None:
    """Nemotron NAS: rows of k by the KV heads of each layer, layers without attention, without an MLP, with neither."""
    reference = gguf_reference("nemotron-nas", rope_parameters={
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32})  # fmt: skip
    lists = searched_metadata(reference.config)
    path = write_gguf(reference, tmp_path / "m.gguf", called="deci", metadata=lists)
    model = load_model(path, REFERENCE)
    check_golden(model, ask_reference(reference, path, prompt_tokens=50, new_tokens=6), chunk=7)
    assert model.n_parameters == parameter_count(load_gguf_spec(path)) == count_parameters(open_gguf(path))
    for name, values, what in (
        ("attention.head_count", [4, 4, 4, 0, 4, 0], "layer 1 .* a product in place of attention"),
        ("attention.head_count_kv", [2, 0, 3, 0, 4, 0], "layer 2 .* has 4 query heads for 3 KV heads"),
        ("feed_forward_length", [96], "feed_forward_length .* must hold 6 whole numbers"),
    ):
        wrong = write_gguf(reference, tmp_path / f"{what[:7]}.gguf", called="deci", metadata={**lists, name: values})
        with pytest.raises(LoadError, match=what):
            load_gguf_spec(wrong)


@pytest.mark.parametrize(
    ("family", "metadata", "what"),
    [
        ("mimo_v2_flash", {"attention.sliding_window_pattern": None}, "sliding_window_pattern .* 4 truth values"),
        ("mimo_v2_flash", {"attention.sliding_window_pattern": [0, 1, 1]}, "sliding_window_pattern .* 4 truth values"),
        ("mimo_v2_flash", {"attention.sliding_window_pattern": [0, 1, 2, 0]}, "sliding_window_pattern .* 4 truth"),
        (
            "mimo_v2_flash",
            {"attention.head_count_kv": [1, 2, 4, 1]},
            "head_count_kv .* differs between layers of one kind",
        ),
        ("mimo_v2_flash", {"attention.head_count_kv": [1, 2]}, "head_count_kv .* has 2 entries"),
        ("step3p7", {"attention.head_count_kv": [2, 1, 1, 2]}, "head_count_kv .* differs from layer to layer"),
        ("step3p7", {"swiglu_clamp_exp": [0.5]}, "swiglu_clamp_exp .* has 1 entries"),
        ("step3p7", {"moe_every_n_layers": 2}, "moe_every_n_layers .* changes the mathematics"),
        ("glm_moe_dsa", {"attention.indexer.types": [True]}, "indexer.types .* 3 truth values"),
        ("glm_moe_dsa", {"attention.indexer.types": [False, True, True]}, "none was made before it"),
    ],
)
def test_what_contradicts_itself_is_told(family: str, metadata: dict[str, Any], what: str, tmp_path: Path) -> None:
    path = write_gguf(gguf_reference(family), tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(LoadError, match=what):
        load_gguf_spec(path)
