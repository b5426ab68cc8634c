"""Streams of tokens to text: equal to decoding at once, valid UTF-8, stopped in time."""

import random
from collections import deque
from functools import cache

import pytest
import tokenizers
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from diptych.engine.engine import Engine, OpenRequest, OutputDelta
from diptych.engine.text.detokenizer import TextStream
from diptych.engine.text.tokenizer import PieceKind, Tokenizer
from diptych.ground.events import ArrivalEvent, FinishEvent, TokenEvent
from diptych.ground.phase import FinishReason
from diptych.ground.request import Request, SamplingParams
from diptych.metrics import EventBook
from text.small_tokenizers import byte_level_json, sentencepiece_json


def tokenizer_of(source: str) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(source), {}, [])


def metaspace_json() -> str:
    """A decoder this engine does not take apart, so the window decoder must."""
    words = ["<unk>", "\u2581the", "\u2581dog", "s", "\u2581", "runs", "\u2581away"]
    tokenizer = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer.to_str()


KINDS = {
    "byte_level": tokenizer_of(byte_level_json()),
    "llama2": tokenizer_of(sentencepiece_json()),
    "gemma": tokenizer_of(sentencepiece_json(strips_space=False)),
    "window": tokenizer_of(metaspace_json()),
}


def streamed(stream: TextStream, ids: list[int]) -> str:
    out = []
    for token_id in ids:
        delta = stream.push(token_id)
        out.append(delta.text)
        if delta.is_stopped:
            return "".join(out)
    return "".join(out) + stream.finish().text


def test_kinds_are_the_ones_meant():
    """If a change of the library made all of them generic, the fast decoders would go untested."""
    kinds = [tokenizer.piece_kind for tokenizer in KINDS.values()]
    assert kinds == [PieceKind.BYTE_LEVEL, PieceKind.SENTENCEPIECE, PieceKind.SENTENCEPIECE, PieceKind.GENERIC]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_deltas_join_to_decode_of_all_ids(kind, data):
    """Any ids a model may draw, broken bytes and unused ids included."""
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=40))
    assert streamed(TextStream(tokenizer), ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma"])
@given(text=st.text(max_size=60))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_text_comes_back_without_replacement_characters(kind, text):
    """A multi-byte character split over tokens must not show its halves."""
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer)
    deltas = [stream.push(token_id).text for token_id in ids] + [stream.finish().text]
    assert "".join(deltas) == tokenizer.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


def test_incomplete_bytes_appear_only_at_the_true_end():
    """A client that has shown U+FFFD cannot take it back."""
    tokenizer = KINDS["byte_level"]
    emoji = tokenizer.encode("🎉", add_special_tokens=False)
    assert len(emoji) == 4
    stream = TextStream(tokenizer)
    assert [stream.push(token_id).text for token_id in emoji] == ["", "", "", "🎉"]
    cut = TextStream(tokenizer)
    assert [cut.push(token_id).text for token_id in emoji[:2]] == ["", ""]
    assert cut.finish().text == "\ufffd"


def test_first_space_is_kept_when_the_output_follows_text():
    """Llama 2 writes " Paris" as its first token; "The capital of France is" + "Paris" would be wrong."""
    tokenizer = KINDS["llama2"]
    ids = tokenizer.encode("Paris", add_special_tokens=False)
    assert streamed(TextStream(tokenizer), ids) == "Paris"
    assert streamed(TextStream(tokenizer, follows_text=True), ids) == " Paris"


def test_a_stop_string_in_what_was_held_to_the_end_ended_the_text():
    """A byte token shows only with the next one: where it was the last, the answer lacked the stop string and said "length"."""
    tokenizer = KINDS["llama2"]
    newline = tokenizer.token_id("<0x0A>")
    said: list[OutputDelta] = []
    engine = object.__new__(Engine)
    engine.book, engine._listeners, engine.on_end, engine._untold = EventBook(), [], [], deque()
    request = Request(
        request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(stop="\n", max_tokens=1), arrival_s=0.0
    )
    engine._open = {"a": OpenRequest(request, tokenizer=tokenizer, on_delta=said.append, follows_text=True)}
    engine._publish([ArrivalEvent(request_id="a", at_s=0.0, prompt_tokens=1, n=1)])
    record = engine.book.records["a"]
    token = TokenEvent(request_id="a", index=0, at_s=1.0, token_id=newline, position=0, step_id=0, logprobs=None)
    end = FinishEvent(request_id="a", index=0, at_s=1.0, reason=FinishReason.LENGTH, output_tokens=1)
    engine._publish([token, end])
    assert [(one.text, one.finish_reason, one.stop_reason) for one in said] == [
        ("", None, None),
        ("", FinishReason.STOP, "\n"),
    ]
    assert record.reasons == (FinishReason.STOP,)


def metaspace(scheme: str, kind: str) -> tokenizers.Tokenizer:
    """T5's and XLM-R's kind of tokenizer: the decoder drops the space of the very first token only."""
    words = ["<unk>", "\u2581the", "\u2581dog", "s", "\u2581", "runs", "\u2581\u2581two", "\u00e9", "<0xC3>", "<0xA9>"]
    vocab = {word: i for i, word in enumerate(words)}
    model = (
        models.Unigram([(word, -1.0) for word in words], 0, False)
        if kind == "unigram"
        else models.BPE(vocab, [], unk_token="<unk>")
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    steps = [decoders.Metaspace(prepend_scheme=scheme)]
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), *steps]) if kind == "bytes" else steps[0]
    return tokenizer


@cache
def both(scheme: str, kind: str) -> tuple[Tokenizer, transformers.PreTrainedTokenizerFast]:
    """Ours and the oracle."""
    backend = metaspace(scheme, kind)
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    return Tokenizer(backend, {}, []), oracle


@pytest.mark.parametrize("kind", ["bpe", "unigram", "bytes"])
@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@given(prompt=st.lists(st.integers(1, 7), min_size=1, max_size=4), output=st.lists(st.integers(0, 9), max_size=6))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_continuation_has_the_spaces_of_the_whole_text(kind, scheme, prompt, output):
    """After "the", Metaspace tokenizers wrote "dogs" for " dogs": each continuation lost its first space."""
    tokenizer, oracle = both(scheme, kind)
    assert tokenizer.piece_kind is PieceKind.GENERIC
    before, whole = oracle.decode(prompt), oracle.decode([*prompt, *output])
    assume(before)  # a prompt of one space has no text at all
    assert streamed(TextStream(tokenizer, follows_text=True), output) == whole[len(before) :]
    assert streamed(TextStream(tokenizer), output) == oracle.decode(output)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_run_of_bytes_is_held_until_it_ends(scheme):
    """A whole character was out when the byte behind it spoiled the run: another text than `decode`'s."""
    tokenizer, oracle = both(scheme, "bytes")
    for output in ([8, 9, 9], [8, 9, 9, 2], [8, 9, 2, 8, 9], [8, 8, 9, 1]):
        assert streamed(TextStream(tokenizer), output) == oracle.decode(output)
    stream = TextStream(tokenizer, follows_text=True)
    assert [stream.push(token_id).text for token_id in (8, 9, 2)] == ["", "", "é dog"]


def first_complete(text: str, stop: list[str]) -> tuple[int, str] | None:
    """Oracle: try every end, shortest first; at one end the longest stop string wins."""
    for end in range(1, len(text) + 1):
        matching = [one for one in stop if text[:end].endswith(one)]
        if matching:
            return end, max(matching, key=len)
    return None


@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_stop_strings_are_found_across_token_borders(text, stop, include):
    """The first stop string to be complete ends the text, however the tokens cut it."""
    tokenizer = KINDS["byte_level"]
    random_cuts = random.Random(f"{text}{stop}")
    ids: list[int] = []
    rest = text
    while rest:
        n = random_cuts.randint(1, 3)
        ids += tokenizer.encode(rest[:n], add_special_tokens=False)
        rest = rest[n:]
    stream = TextStream(tokenizer, stop, include)
    out, found = "", None
    for token_id in ids:
        delta = stream.push(token_id)
        out += delta.text
        # nothing that could still become a stop string may be out
        if delta.is_stopped:
            found = delta.stop_string
            break
        assert not any(out.endswith(one) for one in stop)
    expected = first_complete(text, stop)
    tail = stream.finish()
    if expected is None:
        assert (found, out + tail.text) == (None, text)
        return
    end, stop_string = expected
    assert found == stop_string
    assert out == text[: end if include else end - len(stop_string)]
    assert tail.text == ""


def test_possible_stop_prefix_is_held_and_released():
    """Half a stop string must wait, and come out when it turns out to be none."""
    tokenizer = KINDS["byte_level"]
    stream = TextStream(tokenizer, ("END",))
    texts = [stream.push(tokenizer.encode(piece)[0]).text for piece in ("x", "E", "N", "x")]
    assert texts == ["x", "", "", "ENx"]
    assert stream.push(tokenizer.encode("E")[0]).text == ""
    assert stream.finish().text == "E"


@pytest.mark.parametrize("kind", KINDS)
def test_work_per_token_does_not_grow(kind):
    """Decoding everything again for each token is quadratic; counted in ids handed to the library, not in time."""
    tokenizer = KINDS[kind]
    decoded_ids = 0
    original = tokenizer.decode

    def counting(ids, skip_special_tokens=True):
        nonlocal decoded_ids
        decoded_ids += len(ids)
        return original(ids, skip_special_tokens)

    tokenizer.decode = counting
    try:
        stream = TextStream(tokenizer, ("never",))
        for _ in range(500):
            stream.push(4)
    finally:
        del tokenizer.decode
    assert decoded_ids <= 8 * 500
