"""Random models under random options: what everything odd at once says is what each request says alone, plainly, to the bit."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import FAMILIES, MORE_FAMILIES, make_checkpoint

from diptych.engine.llm import LLM, Completion
from diptych.engine.load import bundled_dir
from diptych.ground.request import SamplingParams, StructuredSpec
from lora import write_adapter

N_WORDS, BLOCK = 4096, 16
PROJECTIONS = ({"q_proj": 3}, {"o_proj": 8, "up_proj": 5}, {"q_proj": 4, "v_proj": 4, "down_proj": 2})
CITY = {"type": "object", "properties": {"name": {"enum": ["Nora the baker", "Nora"]}, "n": {"type": "integer"}},
        "required": ["name", "n"]}  # fmt: skip
CONSTRAINTS = (
    StructuredSpec(kind="regex", source="[a-c]{1,9}(foo|bar) [0-9]*"),
    StructuredSpec(kind="choice", source=json.dumps(["yes", "no", "yesterday"])),
    StructuredSpec(kind="json_schema", source=json.dumps(CITY)),
    StructuredSpec(kind="grammar", source='start: ("ab" | "cd")+ "!"'),
)
# each of these stands in some of the requests
OPTIONS: dict[str, tuple[Any, ...]] = {
    "top_k": (1, 2, 50, 10**6), "top_p": (1e-9, 0.5, 0.9), "min_p": (0.01, 0.5, 1.0), "repetition_penalty": (0.5, 1.3),
    "presence_penalty": (-2.0, 1.5), "frequency_penalty": (-1.0, 0.7), "n": (2, 3), "logprobs": (0, 1, 20),
    "prompt_logprobs": (0, 3), "ignore_eos": (True,), "stop": (["e"], ["the"], ["a", "b "], [" "]),
    "include_stop_str_in_output": (True,), "max_draft_tokens": (0, 1, 3), "prediction": ("Once upon a time",),
    "structured": CONSTRAINTS,
}  # fmt: skip


def sampling(rng: random.Random) -> SamplingParams:
    chosen = {name: rng.choice(values) for name, values in OPTIONS.items() if rng.random() < 0.2}
    return SamplingParams(
        max_tokens=rng.choice([1, 5, 40, 120]), temperature=rng.choice([0.0, 0.0, 0.7, 2.0]), seed=rng.randint(-5, 2**40),
        **chosen,
    )  # fmt: skip


def said(done: Completion) -> tuple[Any, ...]:
    """All that must be equal."""
    choices = [(one.text, one.token_ids, one.logprobs, one.finish_reason, one.stop_reason) for one in done.choices]
    return choices, done.prompt_token_ids, done.prompt_logprobs, None if done.error is None else done.error.message


def odd_settings(rng: random.Random, context: int) -> dict[str, Any]:
    speculate = rng.choice(["off", "lookup", "draft", "auto"])
    settings: dict[str, Any] = {
        "threads": rng.choice([1, 2, 3]), "block_tokens": BLOCK * rng.choice([1, 1, 2, 8]), "max_context_tokens": context,
        "max_step_tokens": rng.choice([1, 2, 7, 16, 33, 2048]), "max_running_sequences": rng.choice([1, 2, 8, 8]),
        "enable_prefix_cache": rng.random() < 0.75, "speculate": speculate, "max_draft_tokens": rng.choice([1, 4, 16]),
        "lookup_memory_tokens": rng.choice([0, 500]), "stall_budget_s": rng.choice([None, 1e-6, 0.01]),
    }  # fmt: skip
    if speculate in ("draft", "auto"):
        settings["draft_model"] = str(bundled_dir("diptych-1m-draft"))
    if rng.random() < 0.15:
        settings |= {"tp": 2, "threads": 2}
    return settings


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(60))
def test_odd_options_together_change_no_answer(seed: int, tmp_path: Path) -> None:
    """Chunks, blocks, batches, cached prefixes, few blocks, drafts of every kind, ranks and threads, whatever is asked."""
    rng = random.Random(seed)
    family = rng.choice([*FAMILIES, *MORE_FAMILIES])
    folder = make_checkpoint(
        family, tmp_path / "model", vocab_size=N_WORDS, max_position_embeddings=512, dtype=torch.bfloat16
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(bundled_dir() / name, folder / name)
    formats = {
        "backend": "cpu",
        "weights": rng.choice(["bf16", "int8", "int4"]),
        "kv": rng.choice(["bf16", "int8", "int8x8", "fp8"]),
    }
    if family in FAMILIES and rng.random() < 0.5:
        ranks = {"qkv_proj": 4} if family == "phi3" else rng.choice(PROJECTIONS)
        formats["loras"] = {"one": str(write_adapter(tmp_path / "lora", folder, ranks))}  # type: ignore[assignment]
    context = rng.choice([200, 256, 333])
    shared = rng.choices(range(3, N_WORDS), k=rng.choice([0, 5, 40, 70]))
    asked = [sampling(rng) for _ in range(rng.choice([1, 3, 6]))]
    prompts = [
        [
            *shared,
            *rng.choices(range(N_WORDS), k=min(rng.choice([1, 2, 33, 100]), context - len(shared) - one.max_tokens)),
        ]
        for one in asked
    ]
    adapters = [rng.choice([None, *formats.get("loras", {})]) for _ in asked]
    plain = {"threads": 1, "max_context_tokens": context, "max_running_sequences": 1, "enable_prefix_cache": False}
    with LLM(folder, **formats, **plain) as llm:
        expected = [
            said(llm.generate([one], how, adapter=name)[0])
            for one, how, name in zip(prompts, asked, adapters, strict=True)
        ]
        block_bytes, state_bytes = llm.loaded.model.kv_bytes_per_block(BLOCK), llm.loaded.model.state_bytes
    odd = odd_settings(rng, context)
    is_crowded = rng.random() < 0.7 and odd["speculate"] in ("off", "lookup")
    if is_crowded:  # hardly more than one context: who has blocks loses them
        n_tokens = context + odd["block_tokens"] * rng.choice([1, 2, 3])
        odd["kv_memory_bytes"] = block_bytes * n_tokens // BLOCK * odd.get("tp", 1) + 48 * state_bytes
    with LLM(folder, **formats, **odd) as llm:
        for number in range(2):  # the second time prefixes are cached, and drafts known
            found = [said(done) for done in llm.generate(prompts, asked, adapter=adapters)]
            llm.engine.core.check()
            for how, one, other in zip(asked, found, expected, strict=True):
                assert one == other, f"{family} {formats} {odd} time {number}: {how}"
