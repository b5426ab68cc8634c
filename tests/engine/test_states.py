"""Models whose layers keep a state of a sequence: whatever is cached, forked, preempted, guessed or cut, no answer changes."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import make_checkpoint
from tests.engine.conftest import BACKENDS, tiny_config

import diptych.engine.load as engine_load
from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.control.speculation import EveryGuess
from diptych.engine.llm import LLM
from diptych.engine.load import LoadedModel, bundled_dir, load
from diptych.engine.phases import TwoPhase
from diptych.ground.config import BlockConfig, ComputeConfig, SchedulerConfig
from diptych.ground.errors import CapacityError, ConfigError, RequestError
from diptych.ground.request import SamplingParams, StructuredSpec

BLOCK = 16
# so that states take as much memory as some keys and values
LARGER = {"recurrent_gemma": {"lru_width": 288}, "zamba": {"mamba_d_state": 48}, "zamba2": {"mamba_d_state": 48}}


# the second one's states hand on tokens' ids, too; the third has two for each layer, the fourth no layer that attends, and of
# DeepSeek V4 each layer attends beside its state
@pytest.fixture(
    scope="module",
    params=[
        "qwen3_5", "qwen4_exp", "jamba", "falcon_mamba", "minimax", "recurrent_gemma", "zamba2", "zamba", "deepseek_v4",
    ],
)  # fmt: skip
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    directory = tmp_path_factory.mktemp("tiny-states")
    sizes: dict[str, Any] = {"vocab_size": 4096, "max_position_embeddings": 512, **LARGER.get(request.param, {})}
    make_checkpoint(request.param, directory, dtype=torch.bfloat16, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(bundled_dir() / name, directory / name)
    return directory


@pytest.fixture(scope="module", params=BACKENDS)
def loaded(folder: Path, request: pytest.FixtureRequest) -> LoadedModel:
    if request.param == "cpu" and not cpu_kernels.is_available()[0]:
        pytest.skip(cpu_kernels.is_available()[1])
    return load(str(folder), tiny_config(request.param))


def prompt(n_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 4096), k=n_tokens)


def engine(loaded: LoadedModel, **scheduler: object) -> LLM:
    settings = {"max_step_tokens": 48, "max_running_sequences": 4, "max_context_tokens": 256} | scheduler
    return LLM(loaded, tiny_config(scheduler=SchedulerConfig(**settings)))  # type: ignore[arg-type]


def answer(llm: LLM, tokens: list[int], **options: object) -> tuple[list[list[int]], int]:
    """The tokens of each choice, and how many of the prompt were cached."""
    given = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True} | options
    (done,) = llm.generate([tokens], SamplingParams(**given))  # type: ignore[arg-type]
    llm.engine.core.check()
    return [list(choice.token_ids) for choice in done.choices], done.usage.cached_tokens


def exact(loaded: LoadedModel) -> bool:
    """Whether bits are promised: rows in other company are rounded otherwise by torch."""
    return loaded.model.backend_name == "cpu"


def test_what_is_cached_changes_no_token(loaded: LoadedModel) -> None:
    """The second message begins behind the first one's state, the third where two prompts part, all with the same answer."""
    first = prompt(70)
    length = {"max_tokens": 40 if exact(loaded) else 12}  # into another block; steps of torch take eight times as long
    plain, cached = answer(engine(loaded, enable_prefix_cache=False), first, **length)
    assert cached == 0
    llm = engine(loaded)
    assert answer(llm, first, **length) == (plain, 0)
    again, cached = answer(llm, first, **length)
    assert cached == 64, "the last whole block of the prompt has a state"
    assert again == plain
    # the answer's own blocks, as the next message of a conversation brings them back
    short = length if exact(loaded) else {"max_tokens": 4}
    longer = [*first, *plain[0], *prompt(9, seed=1)]
    expected, _ = answer(engine(loaded, enable_prefix_cache=False), longer, **short)
    found, cached = answer(llm, longer, **short)
    assert cached == (70 + length["max_tokens"] - 1) // BLOCK * BLOCK > 64
    assert found == expected
    # a prompt that parts inside: nothing has a state there, until a second one came by
    for seed, wanted in ((2, 0), (3, 48), (4, 48)):
        parting = [*first[:50], *prompt(30, seed=seed)]
        expected, _ = answer(engine(loaded, enable_prefix_cache=False), parting, **short)
        assert answer(llm, parting, **short) == (expected, wanted)
    llm.engine.core.reset_prefix_cache()
    assert answer(llm, first, **short) == ([plain[0][: short["max_tokens"]]], 0)


@pytest.mark.parametrize("caches", [True, False])
def test_choices_share_a_prompt_that_is_read_once_or_again(loaded: LoadedModel, caches: bool) -> None:
    """Each choice has a state of its own."""
    tokens = prompt(45)
    options = {"temperature": 1.0, "seed": 5, "n": 3, "max_tokens": 40 if exact(loaded) else 6}
    llm = engine(loaded, enable_prefix_cache=caches)
    together, _ = answer(llm, tokens, **options)
    assert len({tuple(one) for one in together}) == 3
    if exact(loaded):
        one_by_one = engine(loaded, max_running_sequences=1, enable_prefix_cache=False)
        assert together == answer(one_by_one, tokens, **options)[0]


def test_many_at_once_in_few_blocks_are_preempted_and_lose_nothing(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever loses its blocks loses its state, and begins behind what is cached or from nothing."""
    # torch, of which no bits are promised, takes eight times as long for a step
    n_prompts, n_tokens, context, blocks = (6, 50, 160, 14) if exact(loaded) else (4, 18, 96, 8)
    prompts = [prompt(30 + 7 * i, seed=i) for i in range(n_prompts)]
    params = SamplingParams(max_tokens=n_tokens, temperature=0.0, ignore_eos=True)
    # a pool has room for as many keys as its states take: more than these prompts fill
    monkeypatch.setattr(
        engine_load, "BlockConfig", lambda **sizes: BlockConfig(**sizes | {"n_blocks": min(sizes["n_blocks"], blocks)})
    )
    scheduler = SchedulerConfig(max_step_tokens=48, max_running_sequences=4, max_context_tokens=context)
    llm = LLM(loaded, tiny_config(scheduler=scheduler, max_context_tokens=context))
    core = llm.engine.core
    done = llm.generate(prompts, params)
    core.check()
    assert core.stats().preemptions > 0
    assert core.stats().blocks_in_use == 0
    assert [len(one.choices[0].token_ids) for one in done] == [n_tokens] * n_prompts
    if exact(loaded):
        alone = [answer(engine(loaded, enable_prefix_cache=False), tokens, max_tokens=50)[0] for tokens in prompts]
        assert [[list(one.choices[0].token_ids)] for one in done] == alone


@pytest.mark.native
@pytest.mark.parametrize("places", [24, 5])
def test_guesses_that_fail_are_as_if_never_made(folder: Path, places: int) -> None:
    """A state is left behind every guess; where places are few, fewer guesses are made. Greedy and drawn, long and short."""
    if not cpu_kernels.is_available()[0]:
        pytest.skip(cpu_kernels.is_available()[1])
    loaded = load(str(folder), tiny_config("cpu"))
    tokens = [*prompt(12), *prompt(8, seed=1) * 4]  # which lookup finds something in
    drafted = accepted = 0
    # few tokens to choose from, so that some guesses hold
    few = {"max_tokens": 70, "temperature": 0.0, "ignore_eos": True, "logit_bias": {3: 60.0, 4: 60.0, 5: 60.0}}
    for given in (few, few | {"temperature": 0.8, "seed": 3}, few | {"logit_bias": {}}):
        (plain,) = engine(loaded).generate([tokens], SamplingParams(**given))  # type: ignore[arg-type]
        expected = list(plain.choices[0].token_ids)
        scheduler = SchedulerConfig(
            max_step_tokens=48, max_running_sequences=2, max_context_tokens=256, speculate="lookup"
        )
        few_bytes = places * loaded.model.state_bytes
        few_bytes += max(few_bytes, (256 // BLOCK + 1) * loaded.model.kv_bytes_per_block(BLOCK))
        config = tiny_config("cpu", scheduler=scheduler, kv_memory_bytes=few_bytes if places < 6 else None)
        llm = LLM(loaded, config)
        llm.engine.core._scheduler.drafts.depths = EveryGuess(rows=8)
        for _ in range(2):  # the second time what is cached takes part
            (done,) = llm.generate([tokens], SamplingParams(**given))  # type: ignore[arg-type]
            llm.engine.core.check()
            assert list(done.choices[0].token_ids) == expected
            drafted, accepted = drafted + done.usage.drafted_tokens, accepted + done.usage.accepted_tokens
    assert drafted > accepted > 0


def test_the_two_phases_by_hand(loaded: LoadedModel, tmp_path: Path) -> None:
    """Forks have a state of their own, what is cut off is read again, and a saved state is the same when it comes back."""
    tokens = prompt(40)
    with TwoPhase(loaded, tiny_config()) as phases:
        state = phases.prefill(tokens, chunk_tokens=7)
        whole = phases.prefill(tokens)
        if exact(loaded):
            assert torch.equal(state.logits, whole.logits)
        child = phases.fork(state)
        for token in (5, 6, 7):
            phases.decode(state, token)
        phases.decode(child, 9)
        torch.testing.assert_close(child.logits, phases.prefill([*tokens, 9]).logits, atol=1e-4, rtol=0)
        phases.save(state, tmp_path / "state.safetensors")
        phases.truncate(state, 40)
        torch.testing.assert_close(state.logits, whole.logits, atol=1e-4, rtol=0)
        back = phases.load_state(tmp_path / "state.safetensors")
        phases.decode(back, 3)
        torch.testing.assert_close(back.logits, phases.prefill([*tokens, 5, 6, 7, 3]).logits, atol=1e-4, rtol=0)
        if not loaded.model.spec.state_layers:  # each layer keeps both
            keys, _ = phases.keys_values(back, 0)
            assert keys.shape[2] == 44
            return
        with pytest.raises(RequestError, match="keeps a state in place of keys and values"):
            phases.keys_values(back, 0)
        if loaded.model.spec.kv_layers:
            keys, _ = phases.keys_values(back, loaded.model.spec.kv_layers[0])
            assert keys.shape[2] == 44
        else:
            with pytest.raises(RequestError, match="no layer keeps those"):
                phases.keys_values(back, 1)


def test_a_fork_without_a_place_for_its_state_takes_no_block(loaded: LoadedModel) -> None:
    """Its blocks were taken before, and belonged to nobody any more."""
    with TwoPhase(loaded, tiny_config(kv_memory_bytes=2**24)) as phases:
        made = [phases.prefill(prompt(3))]
        made += [phases.fork(made[0]) for _ in range(phases.kv.n_places - 1)]
        with pytest.raises(CapacityError, match="places for states of sequences are taken"):
            phases.fork(made[0])
        for state in made:
            phases.free(state)
        assert len(phases._free_block_ids) == phases.kv.n_blocks
        assert len(phases._free_places) == phases.kv.n_places


def test_too_little_memory_for_the_states_is_said(loaded: LoadedModel) -> None:
    with pytest.raises(CapacityError, match=r"8 sequences need .* bytes for their states"):
        LLM(loaded, tiny_config(kv_memory_bytes=loaded.model.state_bytes * 15))


@pytest.mark.parametrize(("caches", "expected"), [(True, 128), (False, 64)])
def test_without_a_cache_every_place_is_a_sequence_s(loaded: LoadedModel, caches: bool, expected: int) -> None:
    """A third of them waited for prefixes that were never kept: 42 of 64 ran."""
    scheduler = SchedulerConfig(max_step_tokens=256, max_context_tokens=64, enable_prefix_cache=caches)
    llm = LLM(loaded, tiny_config(kv_memory_bytes=2**28, scheduler=scheduler))
    assert llm.engine.core.config.max_running_sequences == expected


@pytest.mark.native
def test_grammars_force_tokens_over_states(folder: Path) -> None:
    """What a grammar forces is verified like a guess."""
    if not cpu_kernels.is_available()[0]:
        pytest.skip(cpu_kernels.is_available()[1])
    loaded = load(str(folder), tiny_config("cpu"))
    schema = json.dumps(
        {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
    )
    answers = []
    for speculate in ("off", "auto"):
        scheduler = SchedulerConfig(max_step_tokens=48, max_running_sequences=2, speculate=speculate)
        llm = LLM(loaded, tiny_config("cpu", scheduler=scheduler, compute=ComputeConfig(backend="cpu", threads=1)))
        params = SamplingParams(
            max_tokens=60, temperature=0.0, structured=StructuredSpec(kind="json_schema", source=schema)
        )
        (done,) = llm.generate([prompt(20)], params)
        llm.engine.core.check()
        answers.append(list(done.choices[0].token_ids))
    assert answers[0] == answers[1]


def test_a_draft_model_with_states_is_refused(loaded: LoadedModel, folder: Path) -> None:
    """Its guesses would move states on that nobody could take back."""
    with pytest.raises(ConfigError, match=r"keeps a state of each sequence in \d of its layers"):
        LLM(loaded, tiny_config(loaded.model.backend_name), speculate="draft", draft_model=str(folder))
