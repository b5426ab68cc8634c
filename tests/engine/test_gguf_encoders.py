"""BERT in GGUF files: names by the `gguf` package, words as llama.cpp's converter writes them, against the checkpoint's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.encoder_files import SIZES, make_plain, make_reference_encoder
from tests.engine.test_encoders import FP32, POSITIONS, TEXTS

from diptych.compute.ops import cpu_kernels
from diptych.cost.parameters import parameter_count
from diptych.engine.llm import LLM
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.models.gguf import load_gguf_spec

pytestmark = pytest.mark.filterwarnings("ignore")
POOLED = {1: lambda states: states.mean(0), 2: lambda states: states[0]}


def written(word: str) -> str:
    """What begins a word is marked in place of what goes on."""
    if word.startswith("["):
        return word
    return word[2:] if word.startswith("##") else f"\u2581{word}"


def write_bert(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    tok: Any,
    *,
    kind: str = "bert",
    pooling: int = 1,
    is_causal: bool = False,
    lost: str = "",
) -> Path:
    out = gguf.GGUFWriter(path, kind)
    out.add_context_length(POSITIONS)
    out.add_embedding_length(SIZES["hidden_size"])
    out.add_feed_forward_length(SIZES["intermediate_size"])
    out.add_block_count(SIZES["num_hidden_layers"])
    out.add_head_count(SIZES["num_attention_heads"])
    out.add_layer_norm_eps(1e-12)
    if kind == "nomic-bert":
        out.add_rope_freq_base(1e3)
    out.add_causal_attention(is_causal)
    out.add_pooling_type(gguf.PoolingType(pooling))
    out.add_token_type_count(2)
    words = tok.convert_ids_to_tokens(range(len(tok)))
    out.add_tokenizer_model("bert")
    out.add_token_list([word for word in map(written, words) if word != lost])
    out.add_token_types([gguf.TokenType.CONTROL if one.startswith("[") else gguf.TokenType.NORMAL for one in words])
    architecture = {name: one for one, name in gguf.MODEL_ARCH_NAMES.items()}[kind]
    names = gguf.get_tensor_name_map(architecture, SIZES["num_hidden_layers"])
    for name, tensor in tensors.items():
        if not name.startswith("pooler."):
            out.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


@pytest.mark.parametrize("kind", ["bert", "nomic_bert"])
@pytest.mark.parametrize("pooling", POOLED)
def test_vectors_are_those_of_the_checkpoint(tmp_path: Path, kind: str, pooling: int) -> None:
    model, tok = make_reference_encoder(kind)
    model.save_pretrained(tmp_path / "made")  # by the names that the converter reads
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    path = write_bert(tmp_path / "it.gguf", tensors, tok, kind=kind.replace("_", "-"), pooling=pooling)
    llm = LLM(str(path), **FP32)
    for text in TEXTS:
        with torch.no_grad():
            state = POOLED[pooling](model(**tok(text, return_tensors="pt")).last_hidden_state[0])
        np.testing.assert_allclose(llm.embed(text)[0].vector, (state / state.norm()).numpy(), atol=2e-5)
        if cpu_kernels.is_available()[0]:
            vector = LLM(str(path), backend="cpu").embed(text)[0].vector
            assert float(np.dot(vector, state / state.norm())) > 0.999
    assert parameter_count(load_gguf_spec(path)) == llm.loaded.model.n_parameters


def test_words_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    """Capitals, accents, signs and characters that stand for words; what is in no vocabulary; two texts with their types."""
    model, tok = make_reference_encoder("bert")
    make_plain(tmp_path / "made", "bert")
    ours = Tokenizer.from_dir(tmp_path / "made")
    llm = LLM(str(write_bert(tmp_path / "bert.gguf", model.state_dict(), tok)), **FP32)
    theirs = llm.loaded.tokenizer
    for text in (*TEXTS, "The FOXES, once-upon: na\u00efve \u4e2d\u6587 \u00df 3.14!", "", "   ", "a" * 120):
        assert theirs.encode(text) == ours.encode(text), text
        assert theirs.encode_pair(text, TEXTS[0]) == ours.encode_pair(text, TEXTS[0]), text


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model, tok = make_reference_encoder("bert")
    with pytest.raises(LoadError, match=r"attention\.causal .* is True"):
        LLM(str(write_bert(tmp_path / "causal.gguf", model.state_dict(), tok, is_causal=True)), **FP32)
    with pytest.raises(UnsupportedModel, match=r"pooling_type .* is 4"):
        LLM(str(write_bert(tmp_path / "rank.gguf", model.state_dict(), tok, pooling=4)), **FP32)
    with pytest.raises(LoadError, match=r"has no \[SEP\]"):
        LLM(str(write_bert(tmp_path / "lost.gguf", model.state_dict(), tok, lost="[SEP]")), **FP32)
