"""Owns the tokenizer: a byte-level BPE of 4096 entries that splits numbers into digits, and its Hugging Face files.

Example:
    tokenizer = train_tokenizer(texts)
    write_tokenizer(tokenizer, Path("model"))
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.chat_format import SPECIAL_TOKENS

VOCAB_SIZE = 4096
MAX_CONTEXT_TOKENS = 4096
TEMPLATE_PATH = Path(__file__).parent / "chat_template.jinja"
# The pattern of Qwen2's tokenizer: contractions, words with a leading space, single digits, punctuation, line ends.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# These stay visible when special tokens are skipped, so that a client can find them in the text.
VISIBLE_TOKENS = {"<think>", "</think>", "<tool_call>", "</tool_call>"}


def added_token(text: str) -> AddedToken:
    return AddedToken(text, special=text not in VISIBLE_TOKENS, normalized=False)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train on whole documents; special tokens take the ids from 0 on, in the order of SPECIAL_TOKENS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[added_token(text) for text in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json (template included) and chat_template.jinja into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = TEMPLATE_PATH.read_text(encoding="utf-8")
    added = {
        str(tokenizer.token_to_id(text)): {
            "content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": text not in VISIBLE_TOKENS,
        }
        for text in SPECIAL_TOKENS
    }  # fmt: skip
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": MAX_CONTEXT_TOKENS,
        "pad_token": "<|pad|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
