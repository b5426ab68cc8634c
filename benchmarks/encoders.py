"""A judge of pairs of texts in turns with sentence-transformers' CrossEncoder: DeBERTa v3 base's shape, random weights.

    python benchmarks/encoders.py --words 120 --pairs 8 --turns 3

The files are made by transformers (`tests/encoder_files.py`); torch computes them in fp32 on as many threads as there are CPUs.
Prints tokens per second of each turn, Diptych's in bf16 and in int8.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "tests")]  # appended: names of installed packages go first

from tests.embedding_files import judge  # noqa: E402
from tests.encoder_files import make_cross_encoder  # noqa: E402

from diptych import LLM  # noqa: E402
from diptych.ground.clock import MonotonicClock  # noqa: E402

BASE = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "position_buckets": 256,
    "max_relative_positions": 512, "max_position_embeddings": 512,
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("words", 120), ("pairs", 8), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    asked = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    clock, drawn = MonotonicClock(), random.Random(1)
    words = ("the", "fox", "bread", "once", "upon", "of", "flour")
    query, texts = "the fox", [" ".join(drawn.choices(words, k=asked.words)) for _ in range(asked.pairs)]
    with tempfile.TemporaryDirectory() as folder:
        path = make_cross_encoder(Path(folder) / "deberta", "deberta-v2", **BASE)
        other = judge(path)
        tokens = sum(len(other.tokenizer(query, text)["input_ids"]) for text in texts)
        pairs = [(query, text) for text in texts]
        ways: dict[str, Callable[[], object]] = {
            "torch fp32": lambda: other.predict(pairs, batch_size=len(pairs), show_progress_bar=False)
        }
        for weights in ("bf16", "int8"):
            ours = LLM(str(path), weights=weights)
            ways[f"diptych {weights}"] = lambda ours=ours: ours.score(query, texts)  # type: ignore[misc]
        print(f"{len(texts)} pairs, {tokens} tokens in all; tok/s of {asked.turns} turns")
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(asked.turns):
            for name, run in ways.items():
                begin_s = clock.now_s()
                run()
                rates[name].append(tokens / (clock.now_s() - begin_s))
        for name, each in rates.items():
            print(f"{name:<14}" + "".join(f"{rate:8.0f}" for rate in each))


if __name__ == "__main__":
    main()
