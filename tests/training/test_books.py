"""Cleaning decides what the model learns to write: no broken lines, no typesetter's marks, no held-out text."""

import pytest
from training.books import clean, load_books, split_tail


def test_wrapped_lines_become_one_paragraph():
    assert clean("It was a\ndark night.\n\nHe\nslept.") == "It was a dark night.\n\nHe slept."


def test_emphasis_and_editor_notes_go():
    assert clean("So _then_ he saw\n[Illustration: a cat] it.") == "So then he saw it."


def test_word_broken_by_the_typesetter_is_joined_and_a_real_hyphen_stays():
    assert (
        clean("the ad- \nmonitory looks of a well-\nbred man--\nhe said")
        == "the admonitory looks of a well-bred man--he said"
    )


def test_verse_keeps_its_lines():
    assert clean("He sang:\n\n  O moon\n  O sun\n\nand left.") == "He sang:\n\nO moon\nO sun\n\nand left."


def test_page_heading_inside_a_sentence_goes():
    assert clean("He began to\n\nOLIVER TWIST. 29\n\nspeak at last.") == "He began to speak at last."


def test_loose_quotes_are_closed_up():
    assert clean('" Why, sir! " said Mrs. Mann ; " come in. "') == '"Why, sir!" said Mrs. Mann; "come in."'


def test_curly_quotes_become_plain():
    assert clean("\u201cDon\u2019t\u201d") == '"Don\'t"'


def test_tail_is_cut_at_a_paragraph_border_and_nothing_is_lost():
    text = "\n\n".join(f"Paragraph {number}." for number in range(50))
    head, tail = split_tail(text, 100)
    assert f"{head}\n\n{tail}" == text
    assert 0 < len(tail) < 100


def test_held_out_tail_is_not_in_the_training_text(tmp_path):
    paragraphs = [f"This is paragraph number {number} of the tale." for number in range(2000)]
    (tmp_path / "grimm.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    (tmp_path / "other.txt").write_text("\n\n".join(paragraphs[:5]), encoding="utf-8")
    train, held_out = load_books(tmp_path)
    assert list(held_out) == ["grimm"]
    assert paragraphs[-1] in held_out["grimm"]
    assert paragraphs[-1] not in train["grimm"]
    assert "other" in train


def test_folder_without_books_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load_books(tmp_path)
