"""Measures how many dialogue questions of the trained kinds a model answers rightly, greedily, word for word.

Example:
    python -m training.quiz src/diptych/bundled/diptych-10m --count 32
"""

import json
import random
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer

from training.chat_format import Turn, render_chat
from training.export import load_exported
from training.model import Llama
from training.synthetic import arithmetic_turn, copying_turn, fact_turn, small_talk_turn

KINDS = {
    "facts": (fact_turn, False),
    "facts, thinking": (fact_turn, True),
    "small talk": (small_talk_turn, False),
    "sums up to 12": (arithmetic_turn, False),
    "sums up to 99, thinking": (arithmetic_turn, True),
    "copying and counting": (copying_turn, False),
}
MAX_ANSWER_TOKENS = 120
FIRST_SEED = 1_000_000  # far from the seeds of training


@torch.no_grad()
def answer_greedily(model: Llama, tokenizer: Tokenizer, prompts: list[str]) -> list[str]:
    """Answer all prompts together; the whole rows are computed anew for each token, which is simple and fast enough."""
    end_id, pad_id = (tokenizer.encode(text).ids[0] for text in ["<|im_end|>", "<|pad|>"])
    rows = [tokenizer.encode(prompt).ids for prompt in prompts]
    starts = [len(row) for row in rows]
    running = list(range(len(rows)))
    for _ in range(MAX_ANSWER_TOKENS):
        width = max(len(rows[index]) for index in running)
        padded = [rows[index] + [pad_id] * (width - len(rows[index])) for index in running]
        last = torch.tensor([len(rows[index]) - 1 for index in running])
        states = model.hidden(torch.tensor(padded))[torch.arange(len(running)), last]
        chosen = (states @ model.model.embed_tokens.weight.to(states.dtype).T).argmax(-1).tolist()
        for index, token in zip(running, chosen, strict=True):
            rows[index].append(token)
        running = [index for index in running if rows[index][-1] != end_id]
        if not running:
            break
    return [tokenizer.decode(row[start:], skip_special_tokens=False) for row, start in zip(rows, starts, strict=True)]


def ask_kind(model: Llama, tokenizer: Tokenizer, kind: str, *, count: int) -> list[tuple[Turn, str]]:
    """`count` seeded questions of one kind, each with what the model answered."""
    maker, has_thinking = KINDS[kind]
    turns = [maker(random.Random(FIRST_SEED + index), has_thinking=has_thinking) for index in range(count)]
    prompts = [render_chat([turn])[0][0] for turn in turns]
    return list(zip(turns, answer_greedily(model, tokenizer, prompts), strict=True))


def is_right(turn: Turn, answer: str) -> bool:
    _, mark, visible = answer.rpartition("</think>\n\n")
    return visible == turn.answer + "<|im_end|>" and bool(mark) == (turn.thinking is not None)


def main(
    model: Annotated[Path, typer.Argument(help="folder with config.json and model.safetensors")],
    count: Annotated[int, typer.Option(help="questions of each kind")] = 32,
    shows_wrong: Annotated[bool, typer.Option(help="print wrong answers too")] = False,
    threads: Annotated[int, typer.Option(help="cores to use")] = 2,
) -> None:
    """Print the share of right answers of each kind as JSON."""
    torch.set_num_threads(threads)
    network = load_exported(model, compute_dtype=torch.bfloat16)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    shares = {}
    for kind in KINDS:
        answered = ask_kind(network, tokenizer, kind, count=count)
        shares[kind] = sum(is_right(turn, answer) for turn, answer in answered) / count
        for turn, answer in answered:
            if shows_wrong and not is_right(turn, answer):
                print(f"{kind}: {turn.user!r} -> {answer!r}")
    print(json.dumps(shares, indent=2))


if __name__ == "__main__":
    typer.run(main)
