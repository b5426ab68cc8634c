"""Trains one bundled model: warmup, stable, decay; short rows first, 4096-token rows last; resumes where it stopped.

Example:
    python -m training.train --model diptych-10m --corpus corpus --work build/training
"""

import functools
import json
import math
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from tokenizers import Tokenizer

from training.checkpoint import Progress, load_checkpoint, save_checkpoint
from training.data import Sampler, TrainingData
from training.evaluate import held_out_loss
from training.export import export_model, load_exported
from training.model import IGNORED, SHAPES, Llama, distillation_loss

SHORT_ROW_TOKENS = 512
LONG_ROW_TOKENS = 4096
WARMUP_FRACTION = 0.03
DECAY_FRACTION = 0.42  # of all tokens; the long rows lie inside it
FINAL_LR_FRACTION = 0.03
EVALUATE_EVERY_STEPS = 50
SAVE_EVERY_STEPS = 50

Batch = tuple[torch.Tensor, torch.Tensor]
LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # tokens, targets [B,T] -> sum over targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a run does besides its data. Learning rates are the peaks."""

    total_tokens: int
    long_fraction: float = 0.08
    batch_tokens: int = 4096
    micro_tokens: int = 512
    book_fraction: float = 0.3
    muon_lr: float = 0.02
    adamw_lr: float = 0.004
    weight_decay: float = 0.05
    seed: int = 1


def lr_factor(tokens_seen: int, total_tokens: int) -> float:
    """Warmup, stable, linear decay, as a share of the peak; by tokens, so that a run may be lengthened while stable."""
    share = tokens_seen / total_tokens
    if share < WARMUP_FRACTION:
        return (share + 0.001) / (WARMUP_FRACTION + 0.001)
    if share < 1 - DECAY_FRACTION:
        return 1.0
    return max(FINAL_LR_FRACTION, (1 - share) / DECAY_FRACTION)


def make_optimizers(model: Llama, recipe: Recipe) -> dict[str, torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embedding and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    return {
        "muon": torch.optim.Muon(matrices, lr=recipe.muon_lr, momentum=0.95, weight_decay=recipe.weight_decay),
        "adamw": torch.optim.AdamW(others, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
    }


def batch_shape(tokens_seen: int, recipe: Recipe) -> tuple[int, int]:
    """(rows, row_tokens) of the next step; at least two rows, one for each of two threads."""
    is_long = tokens_seen >= (1 - recipe.long_fraction) * recipe.total_tokens
    row_tokens = LONG_ROW_TOKENS if is_long else SHORT_ROW_TOKENS
    return max(2, recipe.batch_tokens // row_tokens), row_tokens


class Workers:
    """Threads that compute gradients of micro-batches, each on one core; they meet once a step, not at every operation.

    When other programs share the cores, two threads that meet at every operation run at the pace of the slower one.
    Gradients are added in the order of the micro-batches, so the result does not depend on who was faster.
    """

    def __init__(self, n_threads: int) -> None:
        self._pool = ThreadPoolExecutor(n_threads, initializer=torch.set_num_threads, initargs=(1,))
        for _ in self._pool.map(time.sleep, [0.05] * n_threads):  # every worker starts and takes its own setting
            pass
        torch.set_num_threads(n_threads)  # of the caller: the optimiser's matrix products

    def gradients(
        self, loss_of: LossFunction, parameters: list[torch.nn.Parameter], batches: list[Batch], *, n_targets: int
    ) -> float:
        """Add to each parameter's .grad; return the summed loss over n_targets."""

        def compute(batch: Batch) -> tuple[float, tuple[torch.Tensor, ...]]:
            loss = loss_of(*batch) / n_targets
            return loss.item(), torch.autograd.grad(loss, parameters)

        total = 0.0
        for loss, gradients in self._pool.map(compute, batches):
            total += loss
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return total


def train_step(
    loss_of: LossFunction,
    optimizers: dict[str, torch.optim.Optimizer],
    sampler: Sampler,
    *,
    recipe: Recipe,
    tokens_seen: int,
    workers: Workers,
) -> float:
    """One optimiser step; returns the mean loss in nats per counted token."""
    rows, row_tokens = batch_shape(tokens_seen, recipe)
    tokens, targets = sampler.batch(rows=rows, row_tokens=row_tokens, book_fraction=recipe.book_fraction)
    n_targets = int((targets != IGNORED).sum())
    micro_rows = max(1, recipe.micro_tokens // row_tokens)
    batches = list(zip(torch.split(tokens, micro_rows), torch.split(targets, micro_rows), strict=True))
    parameters = [p for optimizer in optimizers.values() for group in optimizer.param_groups for p in group["params"]]
    total = workers.gradients(loss_of, parameters, batches, n_targets=n_targets)
    factor = lr_factor(tokens_seen, recipe.total_tokens)
    for label, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            group["lr"] = factor * (recipe.muon_lr if label == "muon" else recipe.adamw_lr)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total


class StopRequest:
    """Becomes set on SIGTERM or SIGINT: the loop then ends after the running step and saves."""

    def __init__(self) -> None:
        self.is_set = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._set)

    def _set(self, _number: int, _frame: object) -> None:
        self.is_set = True


def run(
    model: Llama,
    data: TrainingData,
    *,
    name: str,
    work: Path,
    recipe: Recipe,
    n_threads: int = 2,
    teacher: Llama | None = None,
    stop_after_steps: int | None = None,
) -> Progress:
    """Train until the recipe's tokens are seen (or `stop_after_steps` steps are done), saving on the way.

    With a teacher the loss is the divergence from its distribution instead of the cross entropy of the text.
    """
    loss_of = model.loss if teacher is None else functools.partial(distillation_loss, model, teacher)
    optimizers = make_optimizers(model, recipe)
    path = work / f"{name}.safetensors"
    progress = load_checkpoint(path, model, optimizers) if path.exists() else Progress(seed=recipe.seed)
    sampler = Sampler(data, seed=progress.seed)
    sampler.book_tokens_seen, sampler.next_document = progress.book_tokens_seen, progress.next_document
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    held_out_text = (work / "heldout.txt").read_text(encoding="utf-8")
    stop = StopRequest()
    workers = Workers(n_threads)
    steps_done = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with ProgressBar(*columns) as bar, (work / f"{name}.log.jsonl").open("a", encoding="utf-8") as log:
        task = bar.add_task(name, total=recipe.total_tokens, completed=progress.tokens_seen)
        while progress.tokens_seen < recipe.total_tokens and not stop.is_set and steps_done != stop_after_steps:
            begin_s = time.monotonic()
            rows, row_tokens = batch_shape(progress.tokens_seen, recipe)
            loss = train_step(
                loss_of, optimizers, sampler, recipe=recipe, tokens_seen=progress.tokens_seen, workers=workers
            )
            if not math.isfinite(loss):
                raise RuntimeError(f"loss is {loss} at step {progress.step}; the checkpoint of an earlier step is kept")
            progress.step += 1
            steps_done += 1
            progress.tokens_seen += rows * row_tokens
            progress.book_tokens_seen, progress.next_document = sampler.book_tokens_seen, sampler.next_document
            entry: dict[str, float] = {"step": progress.step, "tokens": progress.tokens_seen, "loss": round(loss, 4)}
            entry["step_s"] = round(time.monotonic() - begin_s, 2)
            if progress.step % EVALUATE_EVERY_STEPS == 0:
                report = held_out_loss(model.logits, tokenizer, held_out_text, row_tokens=SHORT_ROW_TOKENS, max_rows=16)
                entry["held_out_loss"] = round(report.loss, 4)
            log.write(json.dumps(entry) + "\n")
            log.flush()
            bar.update(task, completed=progress.tokens_seen, description=f"{name} loss {loss:.3f}")
            if progress.step % SAVE_EVERY_STEPS == 0:
                save_checkpoint(path, model, optimizers, progress)
    save_checkpoint(path, model, optimizers, progress)
    return progress


def main(
    corpus: Annotated[Path, typer.Option(help="folder with the books as .txt")],
    model: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "diptych-10m",
    work: Annotated[Path, typer.Option(help="folder for checkpoints and logs")] = Path("build/training"),
    total_tokens: Annotated[int, typer.Option(help="length of the run; may be changed on resume")] = 8_000_000,
    batch_tokens: Annotated[int, typer.Option(help="tokens of one optimiser step")] = 4096,
    documents: Annotated[int, typer.Option(help="synthetic documents to generate")] = 100_000,
    seed: Annotated[int, typer.Option(help="of data order, synthetic text and initial weights")] = 1,
    threads: Annotated[int, typer.Option(help="cores to use")] = 2,
    stop_after_steps: Annotated[int | None, typer.Option(help="end early, for a trial")] = None,
    teacher: Annotated[Path | None, typer.Option(help="exported model to imitate instead of the text")] = None,
    export: Annotated[Path | None, typer.Option(help="write the finished model to this folder")] = None,
) -> None:
    """Train one model; run the same command again to resume."""
    torch.manual_seed(seed)
    data = TrainingData.build(corpus, work, n_documents=documents, seed=seed)
    print(f"book tokens {len(data.book_ids)}, synthetic tokens {len(data.synthetic_ids)}")
    recipe = Recipe(total_tokens=total_tokens, batch_tokens=batch_tokens, seed=seed)
    network = Llama(SHAPES[model])
    imitated = None if teacher is None else load_exported(teacher, compute_dtype=torch.bfloat16)
    progress = run(
        network,
        data,
        name=model,
        work=work,
        recipe=recipe,
        n_threads=threads,
        teacher=imitated,
        stop_after_steps=stop_after_steps,
    )
    print(f"{model}: step {progress.step}, {progress.tokens_seen} tokens, checkpoint in {work}")
    if export is not None:
        export_model(network, Tokenizer.from_file(str(work / "tokenizer.json")), export)


if __name__ == "__main__":
    typer.run(main)
