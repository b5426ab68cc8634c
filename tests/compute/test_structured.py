"""Structured output: whatever the model prefers, a finished answer obeys its grammar."""

import contextlib
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from diptych.compute.sampling import structured
from diptych.compute.sampling.sampler import Sampler
from diptych.compute.sampling.structured import GrammarCompiler
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.errors import GrammarError, LoadError
from diptych.ground.request import SamplingParams, StructuredSpec
from diptych.ground.step import SequenceStart
from schemas import random_object_schema

WIDTH = 640  # of the logits; the tokenizer is smaller, as in padded models
EOS = (0, 1)


def make_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ['{"name": "value", "items": [1, 2.5, true, null], "kind": "alpha"}', 'a ", "b": {"c": -12e3}}, x"']
    tokenizer.train_from_iterator(text * 4, trainer)
    return tokenizer


TOKENIZER = make_tokenizer()
COMPILER = GrammarCompiler(Tokenizer(TOKENIZER, {}, EOS), WIDTH)
# A model that wanders would fill every string up to max_tokens, so ends are a little more likely than the rest.
ENDS = torch.tensor([3.0 if set(TOKENIZER.id_to_token(i) or "") & set('"}]') else 0.0 for i in range(WIDTH)])
ENDS[list(EOS)] = 4.0


def write(spec: StructuredSpec, *, seed: int, max_tokens: int = 400, **options: object) -> tuple[str, bool]:
    """(text, is finished) of a model with random preferences."""
    sampler = Sampler(WIDTH, grammars=COMPILER)
    params = SamplingParams(structured=spec, max_tokens=max_tokens, **options)
    sampler.begin(SequenceStart(seq_id=1, prompt_token_ids=(9,), sampling=params, seed=seed, eos_token_ids=EOS))
    noise = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    for step in range(max_tokens):
        row = torch.randn(1, WIDTH, generator=noise) * 2 + ENDS
        token = sampler.sample(row, [1], [1 + step])[0]
        if token.token_id in EOS:
            return TOKENIZER.decode(ids), True
        ids.append(token.token_id)
        if token.is_complete:
            return TOKENIZER.decode(ids), True
    return TOKENIZER.decode(ids), False


def test_an_end_that_the_model_cannot_write_ends_no_grammar() -> None:
    """Some configs name an id behind the model's vocabulary: every constrained answer failed."""
    ends = (0, WIDTH + 7)
    sampler = Sampler(WIDTH, grammars=GrammarCompiler(Tokenizer(TOKENIZER, {}, ends), WIDTH))
    params = SamplingParams(structured=spec("regex", "ab"), max_tokens=9, temperature=0.0)
    sampler.begin(SequenceStart(seq_id=1, prompt_token_ids=(9,), sampling=params, seed=0, eos_token_ids=ends))
    drawn = [sampler.sample(torch.zeros(1, WIDTH), [1], [1 + step])[0].token_id for step in range(2)]
    assert TOKENIZER.decode(drawn) == "ab"


def test_tokens_that_only_prompts_hold_may_lie_behind_the_logits() -> None:
    """Llama 3.2 Vision reads a token that stands for a picture and has no logit of it; a word there is an error."""
    larger = tokenizers.Tokenizer.from_str(TOKENIZER.to_str())
    width = larger.get_vocab_size()
    larger.add_special_tokens(["<|image|>"])
    state = GrammarCompiler(Tokenizer(larger, {}, EOS), width).compile(spec("choice", ["<|image|>"])).begin()
    written = b""
    while not state.is_complete:
        token = int(np.flatnonzero(state.allowed())[0])
        written += Tokenizer(larger, {}, EOS).token_bytes(token)
        state.advance(token)
    assert written == b"<|image|>"
    larger.add_tokens(["picture"])
    with pytest.raises(LoadError, match=f"it has {width + 2} tokens and the model {width} logits"):
        GrammarCompiler(Tokenizer(larger, {}, EOS), width).compile(spec("regex", "a"))


def spec(kind: str, source: object) -> StructuredSpec:
    return StructuredSpec(kind=kind, source=source if isinstance(source, str) else json.dumps(source))


def test_answers_to_200_schemas_parse_and_validate():
    """The promise of json_schema: no retry loop in the client. Every finished answer is checked by another library."""
    finished = 0
    for number in range(200):
        schema = random_object_schema(number)
        text, is_finished = write(spec("json_schema", schema), seed=number, max_tokens=300)
        if not is_finished:
            continue
        finished += 1
        value = json.loads(text)
        jsonschema_rs.validator_for(schema, validate_formats=True).validate(value)
    assert finished >= 180


@pytest.mark.parametrize(
    ("structured_spec", "pattern"),
    [
        (spec("regex", "[a-z]{3}-[0-9]+!"), r"[a-z]{3}-[0-9]+!"),
        (spec("choice", ["yes", "no", 'né "x"\n', "日本"]), r'yes|no|né "x"\n|日本'),
        (spec("grammar", 'start: "a" (b | "c")+ "."\nb: /[0-9]{2}/'), r"a([0-9]{2}|c)+\."),
        (spec("grammar", 'root ::= "x" [0-9] "y"'), r"x[0-9]y"),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
def test_other_kinds_are_obeyed(structured_spec, pattern):
    """regex, choice and grammars, greedy and drawn."""
    texts = [write(structured_spec, seed=seed, temperature=seed % 2) for seed in range(12)]
    assert all(is_finished for _, is_finished in texts)
    assert all(re.fullmatch(pattern, text) for text, _ in texts), texts
    assert len({text for text, _ in texts}) > 1


def test_choices_may_be_thousands():
    """More than 2,000 were compiled, and the answer ended with an error behind its first token."""
    state = COMPILER.compile(spec("choice", [f"label {i}" for i in range(4000)])).begin()
    for token_id in TOKENIZER.encode("label 3999", add_special_tokens=False).ids:
        assert state.admits(token_id)
        state.advance(token_id)
    assert state.is_accepting


def test_json_object_is_any_object():
    """response_format json_object."""
    finished = [
        text for text, is_finished in (write(spec("json_object", ""), seed=seed) for seed in range(30)) if is_finished
    ]
    assert len(finished) >= 15
    assert all(isinstance(json.loads(text), dict) for text in finished)


def test_end_is_allowed_only_where_the_output_may_end():
    """An early EOS would cut the JSON; a late one would let the model ramble."""
    state = COMPILER.compile(spec("regex", "ab?")).begin()
    a, b = TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("b")
    assert not state.allowed()[list(EOS)].any()
    assert not state.is_accepting
    state.advance(a)
    assert state.is_accepting
    assert not state.is_complete
    assert set(np.flatnonzero(state.allowed())) == {*EOS, b}
    state.advance(b)
    assert state.is_complete
    assert set(np.flatnonzero(state.allowed())) == set(EOS)


def test_mask_covers_exactly_the_logits():
    """Padded rows of the embedding have logits but no token; they must never be drawn."""
    state = COMPILER.compile(spec("regex", "(.|\\n)*")).begin()
    allowed = state.allowed()
    assert allowed.shape == (WIDTH,)
    assert not allowed[TOKENIZER.get_vocab_size() :].any()
    row = np.zeros(WIDTH, dtype=np.float32)
    state.mask(row)
    assert np.array_equal(np.isneginf(row), ~allowed)


def test_rollback_returns_to_the_same_masks():
    """Speculation takes tokens back; the grammar must stand where it stood."""
    rng = random.Random(1)
    state = COMPILER.compile(spec("json_schema", {"type": "array", "items": {"enum": ["alpha", 12]}})).begin()
    masks = [state.allowed().copy()]
    for _ in range(12):
        choices = [i for i in np.flatnonzero(masks[-1]) if i not in EOS]
        state.advance(int(rng.choice(choices)))
        masks.append(state.allowed().copy())
        if state.is_complete:
            break
    for back in (3, 2):
        state.rollback(back)
        masks = masks[:-back]
        assert np.array_equal(state.allowed(), masks[-1])
    assert len(masks) > 3


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", '(The first line, word for word|The second "line", and more of it|Tea){3}'),
        (
            "json_schema",
            {"type": "object", "properties": {"name": {"enum": ["value", "alpha"]}, "kind": {"const": "x, true"}}},
        ),
        ("choice", ["alpha and more", "alpha and less", "beta"]),
    ],
)
def test_what_is_forced_is_what_the_masks_of_llguidance_admit(kind, source):
    """Runs of forced tokens are found at once and remembered: each mask, forwards and backwards, is the library's own."""
    grammar = COMPILER.compile(spec(kind, source))
    rng = random.Random(3)
    n_forced = 0
    for _ in range(8):
        state, known = grammar.begin(), []
        for _ in range(60):
            other = grammar.matcher.deep_copy()
            assert other.consume_tokens(known)
            bits = np.unpackbits(np.frombuffer(other.compute_bitmask(), dtype=np.uint8), bitorder="little")[:WIDTH]
            allowed = np.flatnonzero(state.allowed())
            assert set(np.flatnonzero(bits)) - set(EOS) == set(allowed) - set(EOS)
            assert all(state.admits(i) == (i in allowed) for i in rng.sample(range(WIDTH), 12))
            forced = state.forced(16)
            if forced:
                assert allowed.tolist() == forced[:1]
                n_forced += 1
            choices = [int(i) for i in allowed if i not in EOS]
            if not choices:
                break
            if len(known) > 5 and rng.random() < 0.2:
                back = rng.randint(1, 5)
                state.rollback(back)
                del known[-back:]
                continue
            known.append(rng.choice(choices))
            state.advance(known[-1])
    assert n_forced > 20


def test_a_greedy_token_is_the_likeliest_that_is_admitted():
    """The likeliest of all is taken where it is admitted, and a mask is laid on the row only where it is not: same token."""
    sampler, state = Sampler(WIDTH, grammars=COMPILER), COMPILER.compile(spec("json_object", "")).begin()
    params = SamplingParams(structured=spec("json_object", ""), temperature=0.0)
    sampler.begin(SequenceStart(seq_id=1, prompt_token_ids=(9,), sampling=params, seed=0, eos_token_ids=EOS))
    noise = torch.Generator().manual_seed(1)
    n_admitted = 0
    for step in range(80):
        row = torch.round(torch.randn(1, WIDTH, generator=noise) * 2)  # many are equal
        allowed = state.allowed()
        likeliest = int(row[0].argmax())
        n_admitted += bool(allowed[likeliest])
        token_id = sampler.sample(row, [1], [1 + step])[0].token_id
        assert token_id == int(np.where(allowed, row[0].numpy(), -np.inf).argmax())
        state.advance(token_id)
        if state.is_complete:
            break
    assert 3 < n_admitted < step - 3


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("wrong_at", [None, 0, 3])
def test_forced_tokens_are_drawn_without_logits(temperature, wrong_at):
    """Rows whose token the grammar alone decides are not asked of the model; what is drawn is what all logits give."""
    params = SamplingParams(structured=spec("regex", "(The top value|A low second)[a-z]+"), temperature=temperature)
    samplers = [Sampler(WIDTH, grammars=COMPILER) for _ in range(2)]
    for sampler in samplers:
        sampler.begin(SequenceStart(seq_id=1, prompt_token_ids=(9,), sampling=params, seed=4, eos_token_ids=EOS))
    logits_RV = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(2))
    first = [sampler.sample(logits_RV[:1], [1], [1])[0].token_id for sampler in samplers]
    assert first[0] == first[1]
    one, other = samplers
    drafts = list(one.forced(1, 16))
    n_forced = len(drafts)
    assert 4 < n_forced < 16
    if wrong_at is not None:
        drafts[wrong_at] += 1
    n_skipped = one.n_forced(1, 2, drafts)
    assert n_skipped == (n_forced if wrong_at is None else n_forced + 1)
    place, behind = [1] * (n_forced + 1), [*drafts, None]
    at = list(range(2, n_forced + 3))
    rows = [None] * n_skipped + list(range(n_forced + 1 - n_skipped))
    drawn = one.verify(logits_RV[n_skipped : n_forced + 1], place, at, behind, rows)
    assert drawn == other.verify(logits_RV[: n_forced + 1], place, at, behind)
    assert len([token for token in drawn if token is not None]) == (n_forced + 1 if wrong_at is None else wrong_at + 1)
    assert one.n_forced(1, 2, ()) == 0, "what is drawn again is drawn from logits"
    assert one.n_forced(2, 2, ()) == 0, "nobody's"


def test_sampler_rolls_the_grammar_back_too():
    """The same position drawn again with other logits must follow the grammar from there."""
    sampler = Sampler(WIDTH, grammars=COMPILER)
    params = SamplingParams(structured=spec("regex", "(ab|cd)+"), temperature=0.0)
    sampler.begin(SequenceStart(seq_id=1, prompt_token_ids=(9,), sampling=params, seed=0, eos_token_ids=EOS))
    letters = {letter: TOKENIZER.token_to_id(letter) for letter in "abcd"}

    def prefer(letter: str, position: int) -> int:
        row = torch.zeros(1, WIDTH)
        row[0, letters[letter]] = 9.0
        return sampler.sample(row, [1], [position])[0].token_id

    assert prefer("a", 1) == letters["a"]
    assert prefer("b", 2) == letters["b"]
    assert prefer("c", 1) == letters["c"]
    assert prefer("d", 2) == letters["d"]


def test_grammar_wins_over_min_tokens():
    """Nothing but the end is left: drawing something else would break the promise, drawing nothing is impossible."""
    text, is_finished = write(spec("choice", ["a"]), seed=3, min_tokens=5)
    assert (text, is_finished) == ("a", True)


def test_same_grammar_is_compiled_once_and_begun_apart():
    """Sequences share the compiled form, never the place they stand at."""
    compiled = COMPILER.compile(spec("regex", "xy"))
    assert COMPILER.compile(spec("regex", "xy")) is compiled
    one, other = compiled.begin(), compiled.begin()
    before = other.allowed().copy()
    one.advance(TOKENIZER.token_to_id("x"))
    assert np.array_equal(other.allowed(), before)
    assert not np.array_equal(one.allowed(), before)


BAD = [
    ("regex", "(a", "unclosed group"),
    ("regex", "(?=a)b", "look-ahead"),
    ("regex", "a" * 5000, "regex has 5000 bytes; at most 4096"),
    ("json_schema", "{", "not JSON"),
    ("json_schema", "[]", "must be an object"),
    ("json_schema", {"type": "nonsense"}, "Invalid type"),
    ("json_schema", {"not": {"type": "integer"}}, "not"),
    ("json_schema", {"$ref": "http://example.com/x"}, "example.com"),
    ("json_schema", '{"a":' * 40 + "1" + "}" * 40, "nested more than 32 deep"),
    ("json_schema", "[" * 60000, "nested more than 32 deep"),
    ("json_schema", {"enum": ["v" * 70000]}, "at most 65536"),
    ("json_schema", '{"const": "\\ud800"}', "cannot be compiled"),
    ("json_schema", '{"const": 1e999}', "cannot be compiled"),
    ("choice", [], "at least one"),
    ("choice", '{"a": 1}', "at least one"),
    ("choice", "[", "not a JSON array"),
    ("grammar", "start: foo", "foo"),
    ("grammar", 'start: "a" | "', "cannot"),
    ("xml", "<a/>", "must be one of json_object"),
]


@pytest.mark.parametrize(("kind", "source", "words"), BAD)
def test_wrong_or_oversize_grammars_are_refused_by_name(kind, source, words):
    """A 400 that says what and how much, and never a broken engine."""
    with pytest.raises(GrammarError, match=re.escape(words)):
        COMPILER.compile(spec(kind, source))


BOMBS = [
    ("regex", "(((a{1,1000}){1,1000}){1,1000}){1,1000}"),
    ("regex", ".*" * 1000),
    ("regex", "(a|b|c|d|e|[f-z]{10,500}){500}"),
    ("regex", "(.*a.*){50}b{0,500}"),
    ("json_schema", {"type": "string", "pattern": "((a{1,9999}){1,9999}){1,99}"}),
    ("json_schema", {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}),
    ("json_schema", {"type": "string", "minLength": 10**8}),
    ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    ("json_schema", {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(8)]} for i in range(20)]}),
    ("grammar", 'start: start start | "a" | '),
    ("grammar", "start: /(.*a.*){50}/"),
    ("grammar", "start: " + '("a"|' * 500 + '"b"' + ")" * 500),
    ("grammar", 'start: x{1000000}\nx: "a"'),
]


@pytest.mark.parametrize(("kind", "source"), BOMBS)
def test_bombs_end_in_an_error_or_in_use(kind, source):
    """Refused at the door or on the way, or usable: no hang, and every step leaves some token to draw."""
    with contextlib.suppress(GrammarError):
        state = COMPILER.compile(spec(kind, source)).begin()
        for _ in range(10):
            allowed = np.flatnonzero(state.allowed())
            assert len(allowed)
            if state.is_complete:
                break
            state.advance(int(allowed[0]))


DEEP = """
import gc, sys
import numpy as np
sys.path[:0] = sys.argv[1:]
from test_structured import COMPILER, spec
chain = lambda name, open_, close, n: "\\n".join(
    [f"start: {name}0", *(f"{name}{i}: {open_}{name}{i + 1}{close}" for i in range(n)), f'{name}{n}: "a"'])
for source in (chain("a", "", "", 3500), chain("a", "(" * 28, ")" * 28, 900), chain("T", "(" * 28, ")?" * 28, 600)):
    state = COMPILER.compile(spec("grammar", source)).begin()
    state.advance(int(np.flatnonzero(state.allowed())[0]))
    assert state.is_accepting
    del state
    gc.collect()
"""


def test_rules_that_lead_to_rules_end_no_process() -> None:
    """43 KB of a grammar overran the stack of the thread that compiled it, and took the server with it."""
    here = Path(__file__).parent
    command = [sys.executable, "-c", DEEP, str(here), str(here.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-1000:]


BLIND = [
    spec("grammar", 'start: "one " X\nX: /a/ & /b/'),
    spec("json_schema", {"properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]} | {
        "type": "object", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
]  # fmt: skip


@pytest.mark.parametrize("blind", BLIND, ids=["lark", "schema"])
def test_grammar_that_leads_nowhere_is_an_error_and_no_short_answer(blind):
    """It used to force the end of text: the client got half an answer that said it was finished."""
    sampler = Sampler(WIDTH, grammars=COMPILER)
    params = SamplingParams(structured=blind, max_tokens=99)
    sampler.begin(SequenceStart(seq_id=1, prompt_token_ids=(9,), sampling=params, seed=0, eos_token_ids=EOS))
    for position in range(1, 99):
        token = sampler.sample(ENDS[None].clone(), [1], [position])[0]
        if isinstance(token, GrammarError):
            break
        assert token.token_id not in EOS
    assert isinstance(token, GrammarError)
    assert "no token can come next" in token.message


LEADS_ASTRAY = "[a-m]{1,40}|z" + ".{0,1000}" * 50


def go_astray(state: structured.GrammarState) -> int:
    """On the way of z the lexer goes over its limits; answers after how many tokens."""
    for n, text in enumerate("z" + "a" * 40):
        try:
            state.allowed()
        except GrammarError:
            return n
        state.advance(one(text))
    raise AssertionError("it kept within them")


def one(text: str) -> int:
    """Its token."""
    return TOKENIZER.token_to_id(text)


def test_a_way_too_complex_to_follow_ends_no_other_sequence_and_no_later_one() -> None:
    """Copies of a matcher share a lexer: what one met on its way ended all of its grammar, for as long as that was known."""
    grammar = spec("regex", LEADS_ASTRAY)
    before = COMPILER.compile(grammar).begin()
    before.advance(one("a"))
    go_astray(COMPILER.compile(grammar).begin())
    for state in (before, COMPILER.compile(grammar).begin()):
        for text in "abc":
            assert state.admits(one(text))
            state.advance(one(text))
        assert state.is_accepting
        assert state.allowed()[one("m")]


def test_a_guess_on_a_way_too_complex_to_follow_is_taken_back() -> None:
    """A drafter that went there took the sequence with it, whose own token was another."""
    state = COMPILER.compile(spec("regex", LEADS_ASTRAY)).begin()
    expected = state.allowed().tolist()
    state.rollback(go_astray(state))
    assert state.allowed().tolist() == expected
    state.advance(one("c"))
    assert state.is_accepting


def test_grammar_without_any_output_is_refused_at_once():
    """Better a 400 before the prompt is read than an error after."""
    with pytest.raises(GrammarError, match="allows no output at all"):
        COMPILER.compile(spec("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}))


def test_grammar_in_use_is_not_compiled_again(monkeypatch):
    """However many others come between: the second compilation would be on the thread that steps every sequence."""
    held = COMPILER.compile(spec("regex", "held"))
    monkeypatch.setattr(structured, "_MAX_CACHED", 2)
    for number in range(4):
        COMPILER.compile(spec("regex", f"other{number}"))
    assert COMPILER.compile(spec("regex", "held")) is held


@pytest.mark.parametrize(
    "lark",
    [
        'start: %json {"type": "integer", "multipleOf": 31536000}',
        'start: a b\na: %json {"type": "integer", "multiple\\u004ff": 30011}\nb: %json\n{"multipleOf": 30013}',
        'start: %lark {\n start: %json {"type": "integer", "multipleOf": 99991}\n}',
    ],
)
def test_what_no_limit_of_the_compiler_counts_is_counted_before(lark: str) -> None:
    """As of a schema by itself, so of those in a grammar."""
    with pytest.raises(GrammarError, match="multipleOf"):
        COMPILER.compile(spec("grammar", lark))
    assert COMPILER.compile(spec("grammar", 'start: %json {"type": "integer", "multipleOf": 5} "%json"'))


@pytest.mark.parametrize("line", ["\n", " \n", "\r\n", "\t\r\n"])
def test_empty_lines_cost_next_to_nothing(line: str) -> None:
    """Of 60,000 in a row a search took half a minute, in which no other thread could do anything."""
    lark = f"{line * (60_000 // len(line))}root ::= [0-9] {line * 3}{line * 9}"
    begin_s = time.process_time()
    state = COMPILER.compile(spec("grammar", lark)).begin()
    assert time.process_time() - begin_s < 5.0
    assert state.admits(TOKENIZER.token_to_id("1"))


def test_tokenizer_that_does_not_fit_the_model_is_refused():
    """Fewer logits than tokens means the files do not belong together."""
    compiler = GrammarCompiler(Tokenizer(TOKENIZER, {}, EOS), 10)
    with pytest.raises(LoadError, match="structured output"):
        compiler.compile(spec("regex", "a"))
    compiler.close()
