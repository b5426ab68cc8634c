"""Measures held-out loss: nats per token, perplexity, bits per byte, and loss by position in a 4096-token row.

Example:
    python -m training.evaluate src/diptych/bundled/diptych-10m --text src/diptych/bundled/heldout.txt
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from tokenizers import Tokenizer
from torch import Tensor

from training.books import DOCUMENT_SEPARATOR
from training.export import load_exported

BUCKET_STARTS = [0, 64, 256, 512, 1024, 2048, 3072]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutReport:
    """Loss in nats per token; buckets map "first-last position" to the loss there."""

    loss: float
    perplexity: float
    bits_per_byte: float
    n_tokens: int
    buckets: dict[str, float]


def held_out_rows(tokenizer: Tokenizer, text: str, row_tokens: int) -> list[list[int]]:
    """Cut each document of `text` into rows of at most row_tokens + 1 ids; a row's last id is the next row's first."""
    rows = []
    for document in text.strip().split(DOCUMENT_SEPARATOR):
        ids = tokenizer.encode(document, add_special_tokens=False).ids
        rows += [ids[start : start + row_tokens + 1] for start in range(0, len(ids) - 1, row_tokens)]
    return rows


@torch.no_grad()
def held_out_loss(
    logits: Callable[[Tensor], Tensor], tokenizer: Tokenizer, text: str, *, row_tokens: int, max_rows: int | None = None
) -> HeldOutReport:
    """`logits` maps [1,T] ids to [1,T,V] fp32. Every id but the first of each row is predicted once."""
    rows = held_out_rows(tokenizer, text, row_tokens)
    if max_rows is not None:
        rows = rows[:: max(1, len(rows) // max_rows)][:max_rows]
    losses: list[Tensor] = []
    n_bytes = 0
    for row in rows:
        ids = torch.tensor([row])
        losses.append(F.cross_entropy(logits(ids[:, :-1])[0], ids[0, 1:], reduction="none"))
        n_bytes += len(tokenizer.decode(row[1:], skip_special_tokens=False).encode())
    flat = torch.cat(losses)
    buckets = {}
    for start, end in zip(BUCKET_STARTS, [*BUCKET_STARTS[1:], 1 << 30], strict=True):
        inside = [row_losses[start:end] for row_losses in losses if len(row_losses) > start]
        if inside:
            buckets[f"{start}-{min(end, row_tokens) - 1}"] = float(torch.cat(inside).mean())
    loss = float(flat.mean())
    bits_per_byte = float(flat.sum()) / math.log(2) / n_bytes
    return HeldOutReport(
        loss=loss, perplexity=math.exp(loss), bits_per_byte=bits_per_byte, n_tokens=len(flat), buckets=buckets
    )


def main(
    model: Annotated[Path, typer.Argument(help="folder with config.json and model.safetensors")],
    text: Annotated[Path, typer.Option(help="held-out text")] = Path("src/diptych/bundled/heldout.txt"),
    row_tokens: Annotated[int, typer.Option(help="tokens of one row")] = 4096,
    threads: Annotated[int, typer.Option(help="cores to use")] = 2,
) -> None:
    """Print the report as JSON."""
    torch.set_num_threads(threads)
    network = load_exported(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    report = held_out_loss(network.logits, tokenizer, text.read_text(encoding="utf-8"), row_tokens=row_tokens)
    print(json.dumps(asdict(report), indent=2))


if __name__ == "__main__":
    typer.run(main)
