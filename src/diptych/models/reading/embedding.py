"""What a config says of a model's ends: how wide the rows of its tables are, how many words may be read and written, scales."""

from __future__ import annotations

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.families.family import Family


def embedding_width(config: HfConfig, family: Family) -> tuple[int, int]:
    """Numbers of the stream, and those of a row where they are projected to it, else 0. LoadError for a table of its own width
    in a family that projects none.
    """
    key, hidden = "word_embed_proj_dim", config.integer("hidden_size")
    words = config.integer(key, hidden)
    if words != hidden and family.names.words is None:
        called = next((name for name, ours in family.renamed.items() if ours == key), key)
        raise LoadError(f"{called} in {config.path} is {words}; only hidden_size, {hidden}, is supported")
    return hidden, words if words != hidden or family.projects_words else 0


def types_of(config: HfConfig, family: Family) -> int:
    """Rows of the table of types of texts."""
    if "type_vocab_size" not in family.keys:
        return 0
    return config.integer("type_vocab_size", low=0 if family.types_may_lack else 1)


def words_of(config: HfConfig, family: Family) -> tuple[int, int]:
    """Words that are written, and how many more only the embedding has: Apertus 1.5's pictures and sounds, Llama 3.2's picture.

    LoadError for a head of more words than the embedding has, or of fewer where it is the embedding.
    """
    read = config.integer("vocab_size")
    written = config.integer("output_vocab_size", read)
    config.at_most("output_vocab_size", written, read)
    if written < read and config.flag("tie_word_embeddings"):
        raise LoadError(
            f"output_vocab_size in {config.path} is {written} of {read} words; a tied head has all of them",
            hint="set tie_word_embeddings to false where the file has a head of its own",
        )
    return written, read - written + family.spare_embeddings


def residual_scale(config: HfConfig) -> float:
    """What is added to the stream is multiplied by; of MiniCPM a number that its layers share."""
    depth = config.optional_number("scale_depth")
    usual = 1.0 if depth is None else depth / config.integer("num_hidden_layers") ** 0.5
    return config.number("residual_multiplier", usual)


def base_stretch(config: HfConfig, hidden: int) -> float:
    """What logits are divided by where the width is a multiple of a base (MiniCPM)."""
    return hidden / config.integer("dim_model_base", hidden)
