"""Measures what drafters of a model are worth in tokens per step, on beginnings of held-out text and of generated dialogues.

Rows are taken as free, so that every step verifies as many drafts as are allowed.

Example:
    python -m training.acceptance --drafter draft --drafter eagle --drafter medusa --depth 4
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from diptych.control.speculation import EveryGuess
from diptych.engine.llm import LLM
from diptych.engine.load import LoadedModel, load
from diptych.ground.config import engine_config
from diptych.ground.request import SamplingParams
from training.books import DOCUMENT_SEPARATOR
from training.synthetic import make_documents

PROMPT_TOKENS = 64


def prompts_of(loaded: LoadedModel, text: str, n: int) -> dict[str, list[list[int]]]:
    """`n` beginnings of each kind: windows of held-out books, and generated texts that no training run with seed 1 has seen."""
    ids = [loaded.tokenizer.encode(document) for document in text.strip().split(DOCUMENT_SEPARATOR)]
    flat = [token for document in ids for token in document]
    stride = (len(flat) - PROMPT_TOKENS) // n
    documents = make_documents(n, seed=77)
    made = [loaded.tokenizer.encode("".join(part for part, _ in parts))[: PROMPT_TOKENS // 4] for parts in documents]
    return {"books": [flat[i * stride : i * stride + PROMPT_TOKENS] for i in range(n)], "generated": made}


def tokens_per_step(
    loaded: LoadedModel, prompts: list[list[int]], *, drafter: str, depth: int, temperature: float, draft: Path | None
) -> dict[str, float]:
    """Greedy or sampled, one sequence at a time."""
    named = {"draft_model": str(draft)} if draft is not None else {}
    llm = LLM(loaded, speculate=drafter, max_draft_tokens=depth, max_running_sequences=1, **named)
    llm.engine.core._scheduler.drafts.depths = EveryGuess(rows=1 + depth)
    steps: list[object] = []
    llm.engine.book.on_step.append(steps.append)
    done = llm.generate(prompts, SamplingParams(max_tokens=96, temperature=temperature, seed=5, ignore_eos=True))
    output = sum(one.usage.output_tokens for one in done)
    drafted = sum(one.usage.drafted_tokens for one in done)
    accepted = sum(one.usage.accepted_tokens for one in done)
    # of each sequence the first token comes with its prefill
    return {
        "tokens_per_step": round((output - len(done)) / (len(steps) - len(done)), 3),
        "acceptance": round(accepted / max(1, drafted), 3),
    }


def main(
    drafter: Annotated[list[str], typer.Option(help="draft, eagle, medusa or lookup (may be repeated)")],
    model: Annotated[str, typer.Option(help="the model to draft for")] = "bundled",
    draft_model: Annotated[Path | None, typer.Option(help="its drafter; default: the bundled one")] = None,
    text: Annotated[Path, typer.Option(help="held-out text")] = Path("src/diptych/bundled/heldout.txt"),
    depth: Annotated[int, typer.Option(help="drafts of a step")] = 4,
    prompts: Annotated[int, typer.Option(help="beginnings of each kind")] = 16,
    threads: Annotated[int | None, typer.Option(help="compute threads")] = None,
) -> None:
    """Print one JSON line for each drafter, kind of text and temperature."""
    loaded = load(model, engine_config(threads=threads))
    kinds = prompts_of(loaded, text.read_text(encoding="utf-8"), prompts)
    for one in drafter:
        for kind, some in kinds.items():
            for temperature in (0.0, 0.8):
                found = tokens_per_step(
                    loaded, some, drafter=one, depth=depth, temperature=temperature, draft=draft_model
                )
                named = {"drafter": one, "text": kind, "temperature": temperature, "depth": depth}
                print(json.dumps(named | found), flush=True)


if __name__ == "__main__":
    typer.run(main)
