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
from tests.gguf_files import write_gguf

from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.cost.parameters import parameter_count
from diptych.engine.llm import LLM
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.models.gguf.checkpoint import load_gguf_spec

pytestmark = pytest.mark.filterwarnings("ignore")
POOLED = {1: lambda states: states.mean(0), 2: lambda states: states[0]}


def written(word: str) -> str:
    """What begins a word is marked in place of what goes on."""
    if word.startswith("["):
        return word
    return word[2:] if word.startswith("##") else f"\u2581{word}"


def put_tensors(out: gguf.GGUFWriter, tensors: Mapping[str, torch.Tensor], kind: str, n_layers: int) -> None:
    """All that the package's table has a name for, without what precedes the model; the file is complete then."""
    architecture = {name: one for one, name in gguf.MODEL_ARCH_NAMES.items()}[kind]
    names = gguf.get_tensor_name_map(architecture, n_layers)
    for name, tensor in tensors.items():
        if not name.startswith("pooler."):
            known = names.get_name(name.removeprefix("model."), try_suffixes=(".weight", ".bias"))
            out.add_tensor(known, tensor.numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


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
    put_tensors(out, tensors, kind, SIZES["num_hidden_layers"])
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
            vector = LLM(str(path), backend="cpu", threads=1).embed(text)[0].vector
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


def add_words(out: gguf.GGUFWriter, n: int = 82) -> None:
    """A few, of bytes, between [CLS] and [SEP]."""
    words = ["[CLS]", "[SEP]", "a", "b", "ab"]
    words += [f"w{i}" for i in range(n - len(words))]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("modern-bert")
    out.add_token_list(words)
    out.add_token_types([gguf.TokenType.CONTROL if one.startswith("[") else gguf.TokenType.NORMAL for one in words])
    out.add_token_merges(["a b"])
    out.add_bos_token_id(0), out.add_eos_token_id(1)
    out.add_add_bos_token(True), out.add_add_eos_token(True), out.add_add_sep_token(True)


def write_modern_bert(path: Path, model: Any, tensors: Mapping[str, torch.Tensor], **more: object) -> Path:
    """As the converter writes it, with a few words. more: keys behind the architecture's name."""
    config = model.config
    out = gguf.GGUFWriter(path, "modern-bert")
    out.add_context_length(POSITIONS)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_head_count(config.num_attention_heads)
    (
        out.add_layer_norm_eps(config.norm_eps),
        out.add_layer_norm_rms_eps(config.norm_eps),
    )  # published configs have both keys
    for kind, add in (("full_attention", out.add_rope_freq_base), ("sliding_attention", out.add_rope_freq_base_swa)):
        add(config.rope_parameters[kind]["rope_theta"])
    out.add_causal_attention(False)
    out.add_pooling_type(gguf.PoolingType.CLS)
    out.add_sliding_window(config.local_attention)
    out.add_sliding_window_pattern(3)
    out.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    add_words(out, config.vocab_size)
    for key, value in more.items():
        out.add_string(f"modern-bert.{key}", str(value))
    put_tensors(out, tensors, "modern-bert", config.num_hidden_layers)
    return path


@pytest.mark.parametrize("act", ["gelu", "silu"])
def test_vectors_of_modern_bert_are_those_of_the_checkpoint(tmp_path: Path, act: str) -> None:
    """Windows on two layers of three, with another base; gates of exact GELU, or of SiLU where the file says so."""
    model, _ = make_reference_encoder("modernbert", hidden_activation=act)
    model.save_pretrained(tmp_path / "made")
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    more = {} if act == "gelu" else {"hidden_activation": act}  # files of before have no such key
    path = write_modern_bert(tmp_path / "it.gguf", model, tensors, **more)
    llm, ids = LLM(str(path), **FP32), [2, 5, 30, 12, *range(20, 60), 3]
    with torch.no_grad():
        state = model(input_ids=torch.tensor([ids])).last_hidden_state[0, 0]
    np.testing.assert_allclose(llm.embed([ids])[0].vector, (state / state.norm()).numpy(), atol=2e-5)
    assert llm.loaded.tokenizer.encode("ab") == [0, 4, 1]
    assert parameter_count(load_gguf_spec(path)) == llm.loaded.model.n_parameters
    with pytest.raises(LoadError, match=r"hidden_activation .* is 'relu'"):
        LLM(str(write_modern_bert(tmp_path / "relu.gguf", model, tensors, hidden_activation="relu")), **FP32)


def test_vectors_of_eurobert_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """jina-embeddings-v5-text-nano's files: the last token's state of a model whose tokens see each other."""
    model, _ = make_reference_encoder("eurobert", "ForMaskedLM", tie_word_embeddings=True)
    metadata = {"attention.causal": False, "pooling_type": 3, "rope.scaling.type": "none"}
    path = write_gguf(model, tmp_path / "it.gguf", called="eurobert", add_words=add_words, metadata=metadata)
    llm, ids = LLM(str(path), **FP32), [2, 5, 30, 12, *range(20, 60), 3]
    with torch.no_grad():
        state = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
    np.testing.assert_allclose(llm.embed([ids])[0].vector, (state / state.norm()).numpy(), atol=2e-5)
    assert parameter_count(load_gguf_spec(path)) == llm.loaded.model.n_parameters
