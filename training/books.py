"""Owns the cleaning of the public-domain books: hard-wrapped plain text in, paragraphs out, tails held out.

Example:
    train, held_out = load_books(Path("corpus"))
"""

import re
from pathlib import Path

# Tails of these books are never trained on: five authors' styles, each tail longer than one 4096-token window.
HELD_OUT_TAIL_CHARS = {
    "austen-emma": 24_000,
    "chesterton-brown": 24_000,
    "doyle-holmes": 24_000,
    "edgeworth-parents": 24_000,
    "grimm": 24_000,
    "sawyer-twain": 24_000,
    "wilde-dorian": 24_000,
}
DOCUMENT_SEPARATOR = "\n\n\n"

_ASCII = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": "--",
        "\u00a0": " ",
        "\ufeff": "",
    }
)
_EDITOR_NOTES = re.compile(
    r"\[(\*|(Illustration|At this point|See next page|Extracted from|Coleridge|Wordsworth)[^\]]*)\]"
)
_RUNNING_HEAD = re.compile(r"(\d+ )?OLIVER TWIST\.?( \d+)?")


def unwrap(paragraph_lines: list[str]) -> str:
    """Join the hard-wrapped lines of one paragraph; indented verse keeps its lines."""
    if all(line.startswith("  ") for line in paragraph_lines):
        return "\n".join(line.strip() for line in paragraph_lines)
    text = ""
    for line in paragraph_lines:
        if re.search(r"[a-z]- +$", line):  # a word broken by a typesetter: "ad- " + "monitory"
            text += line.rstrip().removesuffix("-")
        elif re.search(r"[^-]-$", line) or line.endswith("--"):  # a real hyphen or dash at the line's end
            text += line.strip()
        else:
            text += line.strip() + " "
    return text.strip()


def close_up_quotes(paragraph: str) -> str:
    """Set right quotes that were typeset with inner spaces: `" Why? " said he` becomes `"Why?" said he`."""
    if not re.search(r'(^|\s)" \w', paragraph):
        return paragraph
    pieces = paragraph.split('"')
    for index in range(1, len(pieces), 2):
        pieces[index] = pieces[index].strip()
    return '"'.join(pieces)


def clean(text: str) -> str:
    """One book: editor's notes, emphasis marks and line wrapping removed; paragraphs separated by one blank line."""
    text = text.translate(_ASCII).replace("\r\n", "\n").replace("&;c.", "&c.")
    text = _EDITOR_NOTES.sub("", text).replace("_", "")
    paragraphs: list[str] = []
    is_cut = False  # a page's running head stood before this paragraph, perhaps inside a sentence
    for block in re.split(r"\n[ \t]*\n", text):
        lines = [line for line in block.split("\n") if line.strip()]
        if not lines:
            continue
        paragraph = re.sub(r"[ \t]{2,}", " ", unwrap(lines))
        paragraph = re.sub(r" +([;:!?,.])", r"\1", paragraph)
        if _RUNNING_HEAD.fullmatch(paragraph):
            is_cut = True
            continue
        if re.fullmatch(r"[\s*.\-]*|END|THE END|FINIS", paragraph):  # rules and endings
            continue
        paragraph = close_up_quotes(paragraph)
        if is_cut and paragraphs and paragraph[0].islower() and re.search(r"[a-z,;]$", paragraphs[-1]):
            paragraphs[-1] += " " + paragraph
        else:
            paragraphs.append(paragraph)
        is_cut = False
    return "\n\n".join(paragraphs)


def split_tail(text: str, tail_chars: int) -> tuple[str, str]:
    """Cut a book at the first paragraph border inside its last `tail_chars` characters."""
    cut = text.find("\n\n", len(text) - tail_chars)
    if cut < 0:
        raise ValueError(f"no paragraph border in the last {tail_chars} characters")
    return text[:cut], text[cut + 2 :]


def load_books(corpus: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Read every `*.txt` of `corpus`; return (training text, held-out text), each by book name in sorted order."""
    paths = sorted(corpus.glob("*.txt"))
    if not paths:
        raise FileNotFoundError(f"no .txt files in {corpus}")
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    for path in paths:
        text = clean(path.read_text(encoding="utf-8", errors="strict"))
        tail_chars = HELD_OUT_TAIL_CHARS.get(path.stem)
        if tail_chars is None:
            train[path.stem] = text
        else:
            train[path.stem], held_out[path.stem] = split_tail(text, tail_chars)
    return train, held_out
