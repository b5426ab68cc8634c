"""Small tokenizers of the two real kinds, trained in the test, and checkpoint folders around them."""

import json
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Once upon a time there was a small engine that read fast and wrote slowly.",
    "Paris is the capital of France; Rome is the capital of Italy. Où est l'été?",
    '{"name": "weather", "arguments": {"city": "Paris"}} user assistant system think answer',
] * 4
BYTE_LEVEL_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<start_of_turn>", "<end_of_turn>"]
SENTENCEPIECE_SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]


@cache
def byte_level_json(vocab_size: int = 420) -> str:
    """A GPT-2 / Llama-3 / Qwen style tokenizer.json; every byte has a token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=BYTE_LEVEL_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    shown = [tokenizers.AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>", "a|b c")]
    tokenizer.add_tokens(shown)
    return tokenizer.to_str()


@cache
def sentencepiece_json(*, strips_space: bool = True) -> str:
    """A Llama-2 (strips_space) or Gemma style tokenizer.json: U+2581 for space, byte tokens for what is unknown."""
    marked = normalizers.Replace(" ", "\u2581")
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = marked
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = [*SENTENCEPIECE_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: i for i, piece in enumerate([*pieces, *(p for p in model["vocab"] if p not in pieces)])}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), marked]) if strips_space else marked
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_space else steps)
    tokenizer.add_special_tokens(SENTENCEPIECE_SPECIAL)
    return tokenizer.to_str()


def checkpoint(folder: Path, tokenizer_json: str, *, config: dict | None = None, **files: object) -> Path:
    """Write tokenizer.json, tokenizer_config.json and further `name.json` files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder
