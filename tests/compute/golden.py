"""What transformers says about a tiny checkpoint, and ours held against it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB, made_once, make_checkpoint, make_reference, write_checkpoint
from diptych.compute.model import Model
from republished import REPUBLISHED
from stepping import Stepper

LOGIT_TOLERANCE = 1e-4
PROMPT_TOKENS = 41
NEW_TOKENS = 32  # past two borders of blocks
ANSWER = "answer.safetensors"  # beside a checkpoint that is kept


@dataclass(frozen=True)
class Golden:
    """A checkpoint with its reference answer: greedy tokens, and logits [prompt + new - 1, V] at every position."""

    path: Path
    prompt: list[int]
    greedy: list[int]
    logits: torch.Tensor


def make_golden(
    family: str,
    directory: Path,
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    new_tokens: int = NEW_TOKENS,
    **overrides: Any,
) -> Golden:
    """Write the checkpoint and ask transformers, with its cache, for the greedy continuation and all logits."""
    if family in REPUBLISHED or "dtype" in overrides:  # asked as it was before it was written
        path = make_checkpoint(family, directory, **overrides)
        return ask_reference(make_reference(family, **overrides), path, prompt_tokens, new_tokens)

    def make(folder: Path) -> None:
        reference = make_reference(family, **overrides)
        golden = ask_reference(reference, write_checkpoint(family, reference, folder), prompt_tokens, new_tokens)
        answer = {"prompt": torch.tensor(golden.prompt), "greedy": torch.tensor(golden.greedy), "logits": golden.logits}
        save_file(answer, folder / ANSWER)

    made = made_once(make, "golden", family, prompt_tokens, new_tokens, sorted(overrides.items()))
    ignored = shutil.ignore_patterns(ANSWER)
    path = shutil.copytree(made, directory, copy_function=shutil.copyfile, dirs_exist_ok=True, ignore=ignored)
    answer = load_file(made / ANSWER)
    return Golden(Path(path), answer["prompt"].tolist(), answer["greedy"].tolist(), answer["logits"])


@torch.no_grad()
def ask_reference(
    reference: Any, path: Path, prompt_tokens: int = PROMPT_TOKENS, new_tokens: int = NEW_TOKENS
) -> Golden:
    """The answer of a transformers model."""
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(3, VOCAB, (1, prompt_tokens), generator=generator)
    out = reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
        do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    prompt_logits = reference(prompt, use_cache=False).logits[0]
    logits = torch.cat([prompt_logits[:-1], torch.cat(out.logits).float()])
    return Golden(path, prompt[0].tolist(), out.sequences[0, prompt_tokens:].tolist(), logits)


def check_golden(model: Model, golden: Golden, *, chunk: int | None, tolerance: float = LOGIT_TOLERANCE) -> None:
    """Prefill in chunks, then decode greedily: same tokens, and logits within tolerance at every position."""
    stepper = Stepper(model)
    prompt_logits = stepper.prefill("it", golden.prompt, chunk=chunk)
    greedy, decode_logits = stepper.greedy("it", prompt_logits, len(golden.greedy))
    logits = torch.cat([prompt_logits, decode_logits])
    error = (logits - golden.logits).abs().max().item()
    assert golden.logits.std() > 0.3, "the reference says nearly the same everywhere; the test would see nothing"
    assert error < tolerance, f"logits differ by {error}"
    assert greedy == golden.greedy
