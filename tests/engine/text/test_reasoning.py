"""Thinking apart from answering, whatever the pieces."""

import random

import pytest

from diptych.engine.text.reasoning import Opening, ReasoningSplitter, opening_of_prompt, tags_of_template

FREE, INSIDE, BEHIND = Opening.FREE, Opening.INSIDE, Opening.BEHIND
CASES = [
    # (output, where the prompt leaves the model, reasoning, answer)
    ("<think>\n2 + 2\n is 4\n</think>\n\nFour.\n", FREE, "2 + 2\n is 4", "Four.\n"),
    ("2 + 2</think>Four", INSIDE, "2 + 2", "Four"),
    ("\n\n<think></think>Four", FREE, "", "Four"),
    ("Four", FREE, "", "Four"),
    ("  Four <think>is</think> it", FREE, "", "  Four <think>is</think> it"),
    ("<think>never ends </thi", FREE, "never ends </thi", ""),
    ("<thin", FREE, "", "<thin"),
    ("<think>a < b </think> x </think> y", FREE, "a < b", "x </think> y"),
    ("", FREE, "", ""),
    ("", INSIDE, "", ""),
    ("<think>is a tag</think>", BEHIND, "", "<think>is a tag</think>"),
    (" \n Four", BEHIND, "", " \n Four"),
]


@pytest.mark.parametrize(("output", "opening", "reasoning", "answer"), CASES)
def test_parts_do_not_depend_on_how_the_text_is_cut(output, opening, reasoning, answer):
    """Tokens cut tags anywhere; a half tag shown to the user cannot be taken back."""
    for seed in range(30):
        cuts = random.Random(seed)
        splitter = ReasoningSplitter(opening=opening)
        got = ["", ""]
        rest, pushes = output, 0
        while rest:
            n = cuts.randint(1, 4) if seed else len(rest)
            delta = splitter.push(rest[:n])
            got = [got[0] + delta.reasoning, got[1] + delta.answer]
            rest, pushes = rest[n:], pushes + 1
            assert reasoning.startswith(got[0])
            assert answer.startswith(got[1])
        delta = splitter.finish()
        assert (got[0] + delta.reasoning, got[1] + delta.answer) == (reasoning, answer), seed
        assert splitter.reasoning_tokens + splitter.answer_tokens == pushes


def test_tokens_are_counted_by_part():
    """reasoning_tokens is billed and timed apart; the tags count as reasoning, and no token is counted twice."""
    splitter = ReasoningSplitter()
    for piece in ["<th", "ink>", "a", "b", "</", "think>", "\n\n", "x", "y"]:
        splitter.push(piece)
    splitter.finish()
    assert (splitter.reasoning_tokens, splitter.answer_tokens) == (6, 3)


def test_other_tags_and_the_template_say_which():
    """Models use different words for the same thing."""
    tags = tags_of_template("{{ '[THINK]' }}")
    assert tags == ("[THINK]", "[/THINK]")
    assert tags_of_template("{{ messages }}") is None
    delta = ReasoningSplitter(tags).push("[THINK]a[/THINK]b")
    assert (delta.reasoning, delta.answer) == ("a", "b")
    assert opening_of_prompt("<|im_start|>assistant\n<think>\n") is INSIDE
    assert opening_of_prompt("<think>\n\n</think>\n\n") is BEHIND
    assert opening_of_prompt("<|im_start|>assistant\n") is FREE
