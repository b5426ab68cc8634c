"""What keeping a quantised file's values costs on top of the file's own quantisation, as divergence over held-out text.

    .venv/bin/python benchmarks/kept.py --bits 4 8 --groups 32 128
    .venv/bin/python benchmarks/kept.py --bits --bitsandbytes nf4 "nf4 nested" fp4      # wants that package

The bundled model is rounded to groups and laid out as GPTQ does, by the packing of the tests, or quantised by bitsandbytes
itself. All divergences are KL, in nats a token: of the file, KL(original || the file's values), both computed in fp32 by torch;
of the engine, KL(the file's values in fp32 || engine). `bf16` is the engine over the same values in bf16, so it pays for the
16-bit cache, attention, head and rows that every format of the engine shares, and for weights of 16 bits. The last column has
the cache in bf16 on all sides, in what the file costs too: what keeping the values adds by itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from diptych.engine.load import load
from diptych.engine.phases import TwoPhase
from diptych.ground.config import ComputeConfig, EngineConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))
from bitsandbytes_files import fours  # noqa: E402
from coded_files import Layout, gptq, quantised_checkpoints  # noqa: E402

BUNDLED = ROOT / "src/diptych/bundled"
WINDOW_TOKENS = 512
ENGINES = {
    "kept": ComputeConfig(backend="cpu"),
    "kept, rows of 8 bits": ComputeConfig(backend="cpu", activations="int8"),
    "kept, rows of 15 bits": ComputeConfig(backend="cpu", activations="int15"),
    "bf16": ComputeConfig(backend="cpu", weights="bf16"),
}


def logprobs(model: Path, compute: ComputeConfig, n_tokens: int) -> list[torch.Tensor]:
    """Of every position of every window, [T, V]."""
    config = EngineConfig(compute=compute, max_context_tokens=WINDOW_TOKENS)
    loaded = load(str(model), config)
    tokens = loaded.tokenizer.encode((BUNDLED / "heldout.txt").read_text())[:n_tokens]
    phases = TwoPhase(loaded, config)
    windows = [tokens[start : start + WINDOW_TOKENS] for start in range(0, len(tokens), WINDOW_TOKENS)]
    found = [torch.log_softmax(phases.logits_at_every_position(window).double(), dim=-1) for window in windows]
    loaded.model.close()
    return found


def divergence(expected: list[torch.Tensor], got: list[torch.Tensor]) -> float:
    """Mean KL(expected || got)."""
    sums = [float((p.exp() * (p - q)).sum()) for p, q in zip(expected, got, strict=True)]
    return sum(sums) / sum(len(p) for p in expected)


def layouts_of(options: argparse.Namespace) -> Iterator[tuple[str, Layout]]:
    """What was asked for, with its name."""
    for bits, group in product(options.bits, options.groups):
        yield f"{bits} bits, groups of {group}", gptq(bits, group, symmetric=bits == 8)
    for kind in options.bitsandbytes:
        yield kind, fours(kind)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="*", default=[4, 8], choices=[4, 8])
    parser.add_argument("--groups", type=int, nargs="+", default=[32, 128], choices=[32, 64, 128])
    parser.add_argument("--bitsandbytes", nargs="*", default=[], choices=["nf4", "nf4 nested", "fp4", "fp4 nested"])
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    exact = ComputeConfig(backend="torch", weights="fp32", kv="fp32")
    same_cache = replace(exact, kv="bf16")
    original, original_cached = (
        logprobs(BUNDLED / "diptych-10m", compute, options.tokens) for compute in (exact, same_cache)
    )
    table = Table("file", "its own", *(f"added, {name}" for name in ENGINES), "kept, over the same cache")
    for name, layout in layouts_of(options):
        with tempfile.TemporaryDirectory() as folder:
            coded, plain = quantised_checkpoints(BUNDLED / "diptych-10m", Path(folder), layout)
            values = logprobs(plain, exact, options.tokens)
            own = divergence(original, values)
            got = [logprobs(coded, compute, options.tokens) for compute in ENGINES.values()]
            cached = logprobs(plain, same_cache, options.tokens)
        added = [(divergence(values, one), own) for one in got]
        added.append((divergence(cached, got[0]), divergence(original_cached, cached)))
        cells = [f"{one:.2e} ({100 * one / of:.1f} %)" for one, of in added]
        table.add_row(name, f"{own:.2e}", *cells)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    main()
