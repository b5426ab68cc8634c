"""Text in a grammar is text, also where it looks like a special token; reasoning may stand before it."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import tokenizers

from diptych.compute.sampling.structured import GrammarCompiler
from diptych.engine.load import bundled_dir
from diptych.engine.text.detokenizer import TextStream
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.request import FreeReasoning, StructuredSpec
from text.small_tokenizers import byte_level_json, sentencepiece_json


def bundled() -> Tokenizer:
    return Tokenizer.from_dir(bundled_dir())


def byte_level() -> Tokenizer:
    """Tags that are added but not flagged special, as Qwen has them."""
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    backend.add_tokens([tokenizers.AddedToken(tag, special=False, normalized=False) for tag in ("<tool_call>",)])
    return Tokenizer(backend, {}, (0, 2))


def normalising() -> Tokenizer:
    """Composes accents as it reads: the decomposed text has no tokens of its own but bytes."""
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    backend.normalizer = tokenizers.normalizers.NFC()
    return Tokenizer(backend, {}, (0, 2))


def sentencepiece() -> Tokenizer:
    """Puts a space before every text it encodes, which must not happen in the middle of an output."""
    return Tokenizer(tokenizers.Tokenizer.from_str(sentencepiece_json()), {}, (2,))


def without_tags() -> Tokenizer:
    """Adds no space, and knows no thinking tag as a token."""
    return Tokenizer(tokenizers.Tokenizer.from_str(sentencepiece_json(strips_space=False)), {}, (2,))


TOKENIZERS = {one.__name__: one() for one in (bundled, byte_level, normalising, sentencepiece, without_tags)}
COMPILERS = {name: GrammarCompiler(one, one.vocab_size + 7) for name, one in TOKENIZERS.items()}
TEXTS = [
    "<think>",
    "<|im_end|>",
    "a<|endoftext|>b",
    "</s> and <s>",
    "say <|im_start|> now, <tool_call>{}</tool_call>",
    "[INST] x [/INST]<0x41>",
    " leading and  double spaces ",
    "e\u0301 \u00e9 \u6771\u4eac \U0001f389",
]


def write(name: str, spec: StructuredSpec, *, prefers_marks: bool = False, seed: int = 0) -> tuple[list[int], str]:
    """(ids, text as a client sees it) of random draws; with prefers_marks a special token wherever one is allowed."""
    tokenizer, state = TOKENIZERS[name], COMPILERS[name].compile(spec).begin()
    stream = TextStream(tokenizer, follows_text=True)
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    text = ""
    while not state.is_complete and len(ids) < 200:
        allowed = [int(i) for i in np.flatnonzero(state.allowed())]
        marks = [i for i in allowed if i in tokenizer.mark_token_ids]
        token_id = int(rng.choice(marks if prefers_marks and marks else allowed))
        if token_id in tokenizer.eos_token_ids:
            break
        ids.append(token_id)
        text += stream.push(token_id).text
        state.advance(token_id)
    return ids, text + stream.finish().text


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_of_a_special_token_is_spelled_with_ordinary_tokens(name: str, text: str) -> None:
    """It used to end the answer: the tokenizer cut the forced text to the special token, the grammar refused that."""
    specs = [
        StructuredSpec(kind="choice", source=json.dumps([text])),
        StructuredSpec(kind="regex", source=re.escape(text)),
        StructuredSpec(kind="grammar", source="start: " + json.dumps(text)),
    ]
    for spec in specs:
        ids, written = write(name, spec, prefers_marks=True)
        assert written == text, spec.kind
        assert TOKENIZERS[name].mark_token_ids.isdisjoint(ids)
    _, written = write(name, StructuredSpec(kind="json_schema", source=json.dumps({"const": {"k": text}})))
    assert json.loads(written) == {"k": text}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_free_text_never_matches_a_special_token(name: str) -> None:
    """A wildcard that takes a turn marker would let the model forge the next turn inside a JSON string."""
    state = COMPILERS[name].compile(StructuredSpec(kind="regex", source="(.|\\n){5,40}")).begin()
    allowed = state.allowed()
    assert allowed.sum() > 100
    assert not allowed[sorted(TOKENIZERS[name].mark_token_ids)].any()


@pytest.mark.parametrize("name", ["bundled", "byte_level"])
def test_bare_name_in_a_grammar_is_the_token_itself(name: str) -> None:
    """How a grammar asks for reasoning or a tool call."""
    tokenizer = TOKENIZERS[name]
    ids, _ = write(name, StructuredSpec(kind="grammar", source='start: <think> "x" </think> "<think>"'))
    begin, end = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    assert (ids[0], ids.count(begin), ids.count(end)) == (begin, 1, 1)


ANSWERS = [
    StructuredSpec(kind="json_schema", source=json.dumps({"enum": [{"a": 1}, "b"]})),
    StructuredSpec(kind="json_object", source=""),
    StructuredSpec(kind="regex", source="[ab]/[0-9]{2}"),
    StructuredSpec(kind="choice", source='["yes", "no"]'),
    StructuredSpec(kind="grammar", source='start: "x" y\ny: /[0-9]/'),
    StructuredSpec(kind="grammar", source='root ::= "x" [0-9]'),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda spec: spec.kind)
@pytest.mark.parametrize("begin", ["<think>", None])
@pytest.mark.parametrize(
    ("name", "tags"), [("bundled", "</think>"), ("byte_level", "</think>"), ("without_tags", "</think>")]
)
def test_constraint_holds_behind_reasoning(answer: StructuredSpec, begin: str | None, name: str, tags: str) -> None:
    """A grammar used to take the thinking away from a model that needs it; tags may be tokens or plain text."""
    tokenizer = TOKENIZERS[name]
    state = COMPILERS[name].compile(replace(answer, reasoning=FreeReasoning(begin=begin, end=tags))).begin()

    def says(text: str) -> bool:
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            if not state.allowed()[token_id]:
                return False
            state.advance(token_id)
        return True

    sample = {"json_schema": '{"a":1}', "json_object": "{}", "regex": "a/12", "choice": "yes", "grammar": "x7"}[
        answer.kind
    ]
    assert not state.allowed()[list(tokenizer.eos_token_ids)].any()
    assert says(f"{begin or ''}The answer, {{ that is")
    assert not state.allowed()[list(tokenizer.eos_token_ids)].any(), "the end of text would cut the answer off"
    assert says(f" }} it.{tags}\n\n{sample}")
    assert state.is_accepting
    if begin is not None:
        state = COMPILERS[name].compile(replace(answer, reasoning=FreeReasoning(begin=begin, end=tags))).begin()
        assert says(sample), "a model may also leave the thinking out"
        assert state.is_accepting
