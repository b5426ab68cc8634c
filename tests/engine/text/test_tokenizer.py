"""The tokenizer of a checkpoint, against `transformers` reading the same folder."""

import json
import logging

import pytest
from transformers import AutoTokenizer

from diptych.engine.text.tokenizer import PieceKind, Tokenizer
from diptych.ground.errors import LoadError, PromptTooLong, RequestError
from text.small_tokenizers import byte_level_json, checkpoint, sentencepiece_json

SAMPLES = [
    "",
    " ",
    "Hello world",
    "  two  spaces ",
    "Où est l'été? 日本 🎉",
    "<|im_start|>user\nHi<|im_end|>",
    "a\x00b",
]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
def test_ids_and_text_equal_those_of_transformers(tmp_path, kind, flags):
    """Ids that differ from the ones a model was trained on make it worse without any error."""
    source = byte_level_json() if kind == "byte_level" else sentencepiece_json()
    names = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
    names = names if kind == "byte_level" else {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = checkpoint(tmp_path, source, config={**names, **flags})
    ours, oracle = Tokenizer.from_dir(folder), AutoTokenizer.from_pretrained(folder)
    for text in SAMPLES:
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == oracle.encode(text, add_special_tokens=special), text
            expected = oracle.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=False) == expected


def test_eos_ids_come_from_every_place(tmp_path):
    """Llama 3 names three of them in generation_config.json only; missing one means endless answers."""
    folder = checkpoint(
        tmp_path,
        byte_level_json(),
        config={"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}},
        generation_config={"eos_token_id": [0, 5]},
    )
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 3, "text_config": {"eos_token_id": 0}}))
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.eos_token_ids == (0, 5, 3, 2)


def test_what_a_file_asks_of_every_answer_is_named_where_it_is_not_done(tmp_path, caplog):
    """transformers heeds these in `generate` unasked, so a greedy answer there is another one, and nothing said so."""
    usual = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "repetition_penalty": 1.0, "bad_words_ids": None}
    asked = {"suppress_tokens": [*range(90)], "repetition_penalty": 1.05, "forced_bos_token_id": 0}
    with caplog.at_level(logging.WARNING):
        Tokenizer.from_dir(checkpoint(tmp_path / "a", byte_level_json(), generation_config=usual))
        assert not caplog.messages
        Tokenizer.from_dir(checkpoint(tmp_path / "b", byte_level_json(), generation_config={**usual, **asked}))
    (message,) = caplog.messages
    assert "generation_config.json asks" in message
    assert "repetition_penalty 1.05, suppress_tokens [0, 1, 2, 3, 4, 5, ...], forced_bos_token_id 0" in message


def test_an_end_that_is_no_token_is_none(tmp_path):
    """Configs say -1 for none, which was the last token of the vocabulary to some and too little to others."""
    folder = checkpoint(tmp_path, byte_level_json(), generation_config={"eos_token_id": [-1, 3, 2**40]})
    assert Tokenizer.from_dir(folder).eos_token_ids == (3,)


def test_tokens_known_only_to_the_config_are_added(tmp_path):
    """Some checkpoints list added tokens in tokenizer_config.json or added_tokens.json alone."""
    size = Tokenizer.from_dir(checkpoint(tmp_path / "a", byte_level_json())).vocab_size
    decoder = {str(size + 1): {"content": "<|two|>", "special": True}}
    folder = checkpoint(
        tmp_path / "b", byte_level_json(), config={"added_tokens_decoder": decoder}, added_tokens={"<one>": size}
    )
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.encode("<one><|two|>") == [size, size + 1]
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.decode([size, size + 1]) == "<one>"


def test_added_token_at_a_contradicting_id_is_refused(tmp_path):
    """A shifted id would select another row of the embedding."""
    decoder = {"9999": {"content": "<|new|>", "special": True}}
    with pytest.raises(LoadError, match="9999"):
        Tokenizer.from_dir(checkpoint(tmp_path, byte_level_json(), config={"added_tokens_decoder": decoder}))


@pytest.mark.parametrize("source", [byte_level_json(), sentencepiece_json(), sentencepiece_json(strips_space=False)])
def test_token_bytes_spell_the_text(tmp_path, source):
    """Logprobs report the bytes of each token; joined they must be the text."""
    tokenizer = Tokenizer.from_dir(checkpoint(tmp_path, source))
    assert tokenizer.piece_kind is not PieceKind.GENERIC
    for text in SAMPLES[2:]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert joined[tokenizer.stripped_spaces :] == tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_endless_text_is_refused_from_its_beginning(tmp_path):
    """A body of 32 MiB would take 5 GB and a minute to tokenise, to be told that it is too long."""
    tokenizer = Tokenizer.from_dir(checkpoint(tmp_path, byte_level_json()))
    read = []
    encode = tokenizer.encode
    tokenizer.encode = lambda text, **options: read.append(len(text)) or encode(text, **options)
    with pytest.raises(
        PromptTooLong, match=r"prompt has more than \d+ tokens \(1000000 characters\); at most 100 are read"
    ):
        tokenizer.refuse_endless("word " * 200_000, 100)
    assert read == [1600]
    tokenizer.refuse_endless("word " * 300, 100)  # may be too long, but is no bomb: the engine tells its exact number
    assert read == [1600]
    wide = tokenizer.encode("a" * 1600)
    tokenizer.refuse_endless("a" * 5000, len(wide))


def test_thinking_and_tool_marks_stay_visible(tmp_path):
    """Parsers look for them in the text, also where the checkpoint calls them special."""
    source = json.loads(byte_level_json())
    for token in source["added_tokens"]:
        token["special"] = True
    tokenizer = Tokenizer.from_dir(checkpoint(tmp_path, json.dumps(source)))
    ids = tokenizer.encode("<think>a</think><|im_end|>")
    assert tokenizer.decode(ids) == "<think>a</think>"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no tokenizer.json"),
        ({"vocab.json": "{}", "merges.txt": ""}, "no tokenizer.model; vocab.json, merges.txt there can't be read"),
        ({"tokenizer.model": "x"}, "no SentencePiece model"),
        ({"tokenizer.json": "{"}, "cannot be read"),
        ({"tokenizer.json": "{}"}, "cannot be read"),
        ({"tokenizer.json": byte_level_json(), "tokenizer_config.json": "["}, "tokenizer_config.json cannot be read"),
        ({"tokenizer.json": byte_level_json(), "config.json": '{"eos_token_id": "x"}'}, "eos_token_id"),
        (
            {"tokenizer.json": byte_level_json(), "added_tokens.json": '{"<a>": "x"}'},
            "does not map texts and ids: Value",
        ),
        (
            {"tokenizer.json": byte_level_json(), "tokenizer_config.json": '{"added_tokens_decoder": [1]}'},
            "does not map",
        ),
        (
            {"tokenizer.json": byte_level_json(), "tokenizer_config.json": '{"added_tokens_decoder": {"300": {}}}'},
            "KeyError",
        ),
    ],
)
def test_damaged_folders_are_refused_with_words(tmp_path, files, words):
    """Every way a download can be broken gets an answer instead of a traceback."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(LoadError, match=words):
        Tokenizer.from_dir(tmp_path)


def test_text_that_is_not_unicode_is_a_bad_request(tmp_path):
    """JSON can carry lone surrogates; they must not become a 500."""
    with pytest.raises(RequestError, match=r"surrogate \(U\+D800\) at character 2"):
        Tokenizer.from_dir(checkpoint(tmp_path, byte_level_json())).encode("ab\ud800")
