"""States of sequences handed from one engine to another beside their keys and values: the same answers as one engine's."""

from __future__ import annotations

import importlib
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.checkpoints import make_checkpoint
from tests.cluster.local import LocalCluster, no_fault
from tests.cluster.test_hand_off import BLOCK, GREEDY, LENGTHS, SAMPLED, account, prompts, said
from tests.engine.conftest import tiny_config

from diptych.cluster.messages import Done, Parcel, StateParcel, ToWorker
from diptych.cluster.pool_config import PoolConfig
from diptych.engine.llm import LLM
from diptych.engine.load import LoadedModel, bundled_dir, load
from diptych.ground.config import ComputeConfig, EngineConfig, SchedulerConfig
from diptych.ground.errors import ConfigError, RequestError
from diptych.ground.request import SamplingParams

pytestmark = pytest.mark.native
Faulty = list[tuple[int, ToWorker]]
READ = sum((n - 1) // BLOCK * BLOCK for n in LENGTHS)


# of the other no layer attends, and a block has no bytes
@pytest.fixture(scope="module", params=[(one, backend) for one in ("qwen3_5", "mamba") for backend in ("cpu", "torch")])
def loaded(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> LoadedModel:
    directory = tmp_path_factory.mktemp("states")
    family, backend = request.param
    make_checkpoint(family, directory, vocab_size=4096, max_position_embeddings=512, dtype=torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(bundled_dir() / name, directory / name)
    return load(str(directory), tiny_config(backend))


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> Callable[[SamplingParams], list[object]]:
    """What one engine answers to all prompts, for each sampling once."""
    known: dict[str, list[object]] = {}

    def answers(sampling: SamplingParams) -> list[object]:
        key = repr(sampling)  # it has no hash
        if key not in known:
            known[key] = said(LLM(loaded, config_of(loaded)).generate(prompts(), sampling))
        return known[key]

    return answers


def config_of(loaded: LoadedModel, **scheduler: object) -> EngineConfig:
    settings = {"max_step_tokens": 48, "max_running_sequences": 4, "max_context_tokens": 256} | scheduler
    return tiny_config(loaded.model.backend_name, scheduler=SchedulerConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("machine", [None, "this"])
def test_two_engines_answer_as_one(
    loaded: LoadedModel, alone: Callable[[SamplingParams], list[object]], machine: str | None
) -> None:
    """Blocks alone are half of what was read: with the state behind them nothing is read twice."""
    if loaded.model.backend_name == "torch" and machine:
        pytest.skip("the link is the same")
    config = config_of(loaded)
    for sampling in (GREEDY, replace(SAMPLED, n=3), replace(SAMPLED, logprobs=2)):
        cluster = LocalCluster(loaded, config, machine=machine)
        got = cluster.llm.generate(prompts(), sampling)
        if loaded.model.backend_name == "cpu":  # whose bits depend on no neighbour
            assert said(got) == alone(sampling)
        for one in got:
            account(one)
        cluster.check()
        assert not cluster.reasons("recomputes")
        assert sum(one.usage.transferred_tokens for one in got) == READ
        assert sum(one.usage.cached_tokens for one in got) == 0


def test_the_next_message_goes_on_from_the_last(loaded: LoadedModel) -> None:
    """What both have cached is neither read nor sent again."""
    config = config_of(loaded)
    (first,) = prompts((100,))
    one, cluster = LLM(loaded, config), LocalCluster(loaded, config)
    for llm in (one, cluster.llm):
        (answer,) = llm.generate([first], GREEDY)
        said_before = [*first, *answer.choices[0].token_ids, *prompts((40,), seed=9)[0]]
        (second,) = llm.generate([said_before], GREEDY)
        usage = second.usage
        assert usage.cached_tokens + usage.transferred_tokens >= 96, usage
        account(second)
    cluster.check()


def test_a_prompt_that_was_read_elsewhere_is_found_by_the_next(loaded: LoadedModel) -> None:
    """Its blocks were kept and its state was not, so that nobody could begin behind them."""
    config = config_of(loaded)
    (first,) = prompts((100,))
    cluster = LocalCluster(loaded, config)
    for expected in (0, 96):
        (done,) = cluster.llm.generate([first], GREEDY)
        assert (done.usage.cached_tokens, done.usage.transferred_tokens) == (expected, 96 - expected)
        if loaded.model.backend_name == "cpu":
            assert said([done]) == said(LLM(loaded, config).generate([first], GREEDY))
    cluster.check()


def lost(message: ToWorker) -> Faulty:
    return [] if isinstance(message, StateParcel) else [(0, message)]


def changed(message: ToWorker) -> Faulty:
    if isinstance(message, StateParcel):
        data: np.ndarray = message.payload.data_NB.copy()
        data[0, 5] ^= 1
        message = replace(message, payload=replace(message.payload, data_NB=data))
    return [(0, message)]


def shorter(message: ToWorker) -> Faulty:
    if isinstance(message, StateParcel):
        message = replace(message, payload=replace(message.payload, data_NB=message.payload.data_NB[:, :-4]))
    return [(0, message)]


def of_others(message: ToWorker) -> Faulty:
    return [(0, replace(message, digest=b"another") if isinstance(message, StateParcel) else message)]


@pytest.mark.parametrize(
    ("fault", "reason"), [(lost, "missing"), (changed, "checksum"), (shorter, "shape"), (of_others, "tokens")]
)
def test_without_its_state_a_prompt_is_read_again(
    loaded: LoadedModel,
    alone: Callable[[SamplingParams], list[object]],
    fault: Callable[[ToWorker], Faulty],
    reason: str,
) -> None:
    """Whatever came of its blocks; the answer is the same, and a counter says why."""
    config = config_of(loaded)
    cluster = LocalCluster(loaded, config, fault=fault)
    got = cluster.llm.generate(prompts(), GREEDY)
    if loaded.model.backend_name == "cpu":
        assert said(got) == alone(GREEDY)
    cluster.check()
    assert list(cluster.reasons("recomputes")) == [reason]
    assert sum(one.usage.transferred_tokens for one in got) == 0
    assert sum(one.usage.computed_tokens for one in got) == sum(LENGTHS)


@pytest.mark.parametrize("seed", range(4))
def test_links_that_drop_double_and_delay(loaded: LoadedModel, seed: int) -> None:
    """Nothing waits for ever, nothing is held, and no answer changes; with places that are short, too."""
    if loaded.model.backend_name == "torch":
        pytest.skip("its bits depend on neighbours")
    rng = random.Random(seed)

    def fault(message: ToWorker) -> Faulty:
        if not isinstance(message, Parcel | StateParcel | Done):
            return [(0, message)]
        return [(rng.randrange(6), message) for _ in range(rng.choice([0, 1, 1, 1, 2]))]

    config = config_of(loaded, max_running_sequences=rng.choice([1, 2, 4]))
    cluster = LocalCluster(loaded, config, fault=fault, prefill=2, decode=2, lease_s=0.15, late_s=0.02)
    got = cluster.llm.generate(prompts(seed=seed), SAMPLED)
    assert said(got) == said(LLM(loaded, config).generate(prompts(seed=seed), SAMPLED))
    cluster.fault = no_fault
    cluster.check()


def test_what_would_leave_states_behind_is_refused(loaded: LoadedModel) -> None:
    """Every prompt would be read twice, and nobody would be told."""
    spec, pools = loaded.model.spec, PoolConfig(prefill=1, decode=1)
    pools.check_states(spec, config_of(loaded))
    with pytest.raises(ConfigError, match="the prefix cache"):
        pools.check_states(spec, config_of(loaded, enable_prefix_cache=False))
    ranks = replace(config_of(loaded), compute=ComputeConfig(tp=2))
    with pytest.raises(ConfigError, match="of one rank"):
        pools.check_states(spec, ranks)
    PoolConfig(decode=2).check_states(spec, ranks)
    rays = importlib.import_module("diptych.cluster.rays")
    cluster = object.__new__(rays.RayCluster)  # that has no reader yet
    cluster._pools, cluster._config = PoolConfig(decode=2), ranks
    cluster.hellos = {"decode-0": SimpleNamespace(card=SimpleNamespace(spec=spec))}
    with pytest.raises(RequestError, match="of one rank"):
        cluster._scale("prefill", 1)
