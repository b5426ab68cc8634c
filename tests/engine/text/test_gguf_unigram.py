"""Words of XLM-RoBERTa in GGUF files (bge-m3's, multilingual-e5's): as the converter writes them, against sentencepiece."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from tests.encoder_files import SIZES, make_reference_encoder
from tests.engine.text.test_sentencepiece_model import CORPUS, TEXTS

from diptych.engine.llm import LLM
from diptych.engine.text.gguf_vocabulary import gguf_tokenizer
from diptych.ground.errors import LoadError
from diptych.models.gguf.file import open_gguf

pytestmark = pytest.mark.filterwarnings("ignore")
MARKS = ["<s>", "<pad>", "</s>", "<unk>"]
N_PIECES = 600
Words = dict[str, Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A unigram model as multilingual ones are: characters composed, spaces joined, nothing for what no piece is."""
    prefix = tmp_path_factory.mktemp("unigram") / "sentencepiece.bpe"
    sentencepiece.SentencePieceTrainer.train(
        input=str(CORPUS),
        model_prefix=str(prefix),
        vocab_size=N_PIECES,
        model_type="unigram",
        minloglevel=2,
        num_threads=1,
    )
    return prefix.with_suffix(".bpe.model").read_bytes()


def words_of(model: bytes) -> Words:
    """Pieces behind the four marks, as fairseq has them, and places at the end that nothing fills."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    table = proto.normalizer_spec.precompiled_charsmap
    pieces = [(one.piece, one.score, 1) for one in proto.pieces[3:]]
    pieces.append((f"[PAD{N_PIECES}]", -10_000.0, 5))
    return {
        "tokens": [*MARKS, *(piece for piece, _, _ in pieces)], "scores": [0.0] * 4 + [score for _, score, _ in pieces],
        "token_type": [3, 3, 3, 2, *(kind for _, _, kind in pieces)], "precompiled_charsmap": table,
        "add_space_prefix": True, "remove_extra_whitespaces": False, "bos_token_id": 0, "eos_token_id": 2,
        "unknown_token_id": 3, "padding_token_id": 1,
    }  # fmt: skip


def write(path: Path, words: Words, fill: Callable[[gguf.GGUFWriter], None] = lambda out: None) -> Path:
    out = gguf.GGUFWriter(str(path), "bert")
    out.add_tokenizer_model("t5")
    out.add_tokenizer_pre("default")
    out.add_token_list(words["tokens"])
    for name, add in (("scores", out.add_token_scores), ("precompiled_charsmap", out.add_precompiled_charsmap)):
        if words.get(name):
            add(words[name])
    out.add_token_types(words["token_type"])
    out.add_add_space_prefix(words["add_space_prefix"])
    out.add_remove_extra_whitespaces(words["remove_extra_whitespaces"])
    for name, value in words.items():
        if name.endswith("_token_id") and value is not None:
            out.add_uint32(f"tokenizer.ggml.{name}", value)
    fill(out)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def test_ids_are_those_of_sentencepiece(trained: bytes, tmp_path: Path) -> None:
    """What is unknown among what is known, spaces, composed characters; the names of places that nothing fills are texts."""
    oracle = sentencepiece.SentencePieceProcessor(model_proto=trained)
    ours = gguf_tokenizer(open_gguf(write(tmp_path / "it.gguf", words_of(trained))))
    for text in (*(one for one in TEXTS if "<s>" not in one), f"a [PAD{N_PIECES}] b", "fox 狐狸fox狐 狸"):
        want = [3 if i == oracle.unk_id() else i + 1 for i in oracle.encode(text)]
        assert ours.encode(text, add_special_tokens=False) == want, text
        assert ours.encode(text) == [0, *want, 2], text
    pair = ours.encode_pair("the fox", "a wood")
    first, second = (ours.encode(one, add_special_tokens=False) for one in ("the fox", "a wood"))
    assert pair.token_ids == [0, *first, 2, 2, *second, 2]
    assert set(pair.type_ids) == {0}
    assert ours.encode("</s>", add_special_tokens=False)[-1] == 2


def test_vectors_of_a_whole_file_are_those_of_the_checkpoint(trained: bytes, tmp_path: Path) -> None:
    """The converter leaves out the rows of the table that stand for no position."""
    words = words_of(trained)
    model, _ = make_reference_encoder("xlm-roberta", vocab_size=len(words["tokens"]))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, SIZES["num_hidden_layers"])

    def fill(out: gguf.GGUFWriter) -> None:
        out.add_context_length(200)
        out.add_embedding_length(SIZES["hidden_size"])
        out.add_feed_forward_length(SIZES["intermediate_size"])
        out.add_block_count(SIZES["num_hidden_layers"])
        out.add_head_count(SIZES["num_attention_heads"])
        out.add_layer_norm_eps(1e-12)
        out.add_causal_attention(False)
        out.add_pooling_type(gguf.PoolingType.CLS)
        for name, tensor in model.state_dict().items():
            if not name.startswith("pooler."):
                rows = tensor[2:] if "position_embeddings" in name else tensor
                out.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), rows.numpy())

    llm = LLM(str(write(tmp_path / "it.gguf", words, fill)), backend="torch", weights="fp32", kv="fp32")
    ids = [0, *(one + 1 for one in sentencepiece.SentencePieceProcessor(model_proto=trained).encode(TEXTS[0])), 2]
    with torch.no_grad():
        state = model(input_ids=torch.tensor([ids])).last_hidden_state[0, 0]
    np.testing.assert_allclose(llm.embed(TEXTS[0])[0].vector, (state / state.norm()).numpy(), atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "scores of .* has 0 entries for"),
        ({"unknown_token_id": None}, "unknown_token_id is missing"),
        ({"precompiled_charsmap": b"\x08\x00\x00\x00abc"}, "contradicts itself"),
        ({"bos_token_id": None, "tokens": ["<b>", *MARKS[1:], *(f"w{i}" for i in range(N_PIECES - 2))]}, "has no <s>"),
    ],
    ids=lambda one: one if isinstance(one, str) else next(iter(one)),
)
def test_what_cannot_be_read_is_said(changes: Words, message: str, trained: bytes, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=message):
        gguf_tokenizer(open_gguf(write(tmp_path / "it.gguf", words_of(trained) | changes)))
