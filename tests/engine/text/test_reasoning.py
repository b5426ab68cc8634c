"""Thinking apart from answering, whatever the pieces."""

import random

import pytest

from diptych.engine.text.reasoning import ReasoningSplitter, is_opened_by_prompt, tags_of_template

CASES = [
    # (output, prompt opened the tag, reasoning, answer)
    ("<think>\n2 + 2\n is 4\n</think>\n\nFour.\n", False, "2 + 2\n is 4", "Four.\n"),
    ("2 + 2</think>Four", True, "2 + 2", "Four"),
    ("\n\n<think></think>Four", False, "", "Four"),
    ("Four", False, "", "Four"),
    ("  Four <think>is</think> it", False, "", "  Four <think>is</think> it"),
    ("<think>never ends </thi", False, "never ends </thi", ""),
    ("<thin", False, "", "<thin"),
    ("<think>a < b </think> x </think> y", False, "a < b", "x </think> y"),
    ("", False, "", ""),
    ("", True, "", ""),
]


@pytest.mark.parametrize(("output", "is_open", "reasoning", "answer"), CASES)
def test_parts_do_not_depend_on_how_the_text_is_cut(output, is_open, reasoning, answer):
    """Tokens cut tags anywhere; a half tag shown to the user cannot be taken back."""
    for seed in range(30):
        cuts = random.Random(seed)
        splitter = ReasoningSplitter(is_open=is_open)
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
    assert is_opened_by_prompt("<|im_start|>assistant\n<think>\n")
    assert not is_opened_by_prompt("<think>\n\n</think>\n\n")
