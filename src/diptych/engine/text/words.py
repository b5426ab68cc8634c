"""The words of a model: tokenizer and chat template, out of a checkpoint folder or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from diptych.engine.text.gguf_vocabulary import gguf_template, gguf_tokenizer
from diptych.engine.text.template import ChatTemplate
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.importing import uncollected
from diptych.models.gguf.file import open_gguf


def words_of(path: Path) -> tuple[Tokenizer, ChatTemplate]:
    """Tokenizer and chat template of a checkpoint folder or of a GGUF file. Raises LoadError."""
    with uncollected():  # a vocabulary is a few hundred thousand objects that stay
        if path.is_dir():
            tokenizer = Tokenizer.from_dir(path)
            return tokenizer, ChatTemplate.from_dir(path, tokenizer)
        file = open_gguf(path)
        tokenizer = gguf_tokenizer(file)
        return tokenizer, gguf_template(file, tokenizer)


def tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer alone. Raises LoadError."""
    return Tokenizer.from_dir(path) if path.is_dir() else gguf_tokenizer(open_gguf(path))
