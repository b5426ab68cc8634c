"""Models none of whose layers attends, as the planner and the simulator see them: states take memory, tokens take none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cost.test_profile import PROFILE

from diptych.cli.inspect import app as inspect
from diptych.cli.plan import app
from diptych.cost.advice import pools_for
from diptych.cost.calibrated import CalibratedModel
from diptych.cost.components import cost_of
from diptych.cost.kv_bytes import kv_bytes_of_context, kv_bytes_per_token, state_bytes
from diptych.cost.memory import capacity_of, engine_weight_bytes
from diptych.cost.planner import Question, make_plan
from diptych.cost.setup import Setup, setup_of
from diptych.cost.tables import quant_spec
from diptych.ground.errors import LoadError
from diptych.ground.shape import StepShape
from diptych.models.config import HfConfig
from diptych.models.read import read_model
from diptych.sim.pools import MAX_BLOCKS, Pool

FALCON = {"model_type": "falcon_mamba", "hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 65_024}


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    (tmp_path / "config.json").write_text(json.dumps(FALCON))
    return setup_of(str(tmp_path / "config.json"), "h100-80gb-sxm")


def test_no_token_takes_memory_and_no_length_takes_time(setup: Setup) -> None:
    """Bytes of keys and values were divided by in five places."""
    plan, model = make_plan(setup, Question(batch=4)), setup.model
    assert (plan.kv_bytes_per_token, plan.quadratic_prompt_tokens) == (0.0, None)
    assert kv_bytes_of_context(model, setup.kv, 100_000) == state_bytes(model) == 64 * 8192 * (16 + 3) * 4
    assert plan.capacity.max_batch == plan.capacity.free_kv_bytes // state_bytes(model)
    assert plan.capacity.max_context_tokens == model.max_context_tokens
    short, long = (
        cost_of(model, StepShape.decode(batch=4, context_tokens=n), quant=setup.quant, kv=setup.kv)
        for n in (1, 100_000)
    )
    assert short.kv_bytes == long.kv_bytes == 2 * 4 * state_bytes(model)
    assert short.flops == long.flops


def test_a_pool_numbers_tokens_for_as_many_sequences_as_have_states(setup: Setup) -> None:
    """Its blocks are bounded by what the simulator can hold, not by a device's memory."""
    capacity = capacity_of(setup, context_tokens=2000, batch=1)
    assert capacity.kv_tokens == 2000 * capacity.max_batch
    pool = Pool.of(setup, context_tokens=2000, block_tokens=16)
    assert pool.blocks.n_blocks == capacity.kv_tokens // 16
    assert pool.blocks.n_places > 0
    assert Pool.of(setup, context_tokens=2**18, block_tokens=16).blocks.n_blocks == MAX_BLOCKS


def test_the_page_says_that_no_layer_attends(tmp_path: Path, setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    app([str(tmp_path / "config.json"), "--hardware", "h100-80gb-sxm"])
    text = capsys.readouterr().out
    assert "no layer attends" in text
    assert "KV 0 B/token" in text


def test_states_are_in_the_memory_of_a_sequence(
    tmp_path: Path, setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were left out, and one row stood there for each KV format and one column for each length, all equal."""
    with pytest.raises(LoadError, match="0 safetensors files"):  # of a config alone
        inspect([str(tmp_path), "--hardware", "h100-80gb-sxm"])
    memory = (
        capsys.readouterr().out.partition("memory: weights and the states of one sequence")[2].partition("phases")[0]
    )
    assert "at any length" in memory
    (row,) = [line.split() for line in memory.splitlines() if "bf16" in line]
    weights, whole = engine_weight_bytes(setup.model, "bf16"), float(row[4])
    assert whole == pytest.approx((weights + state_bytes(setup.model)) / 1e9, abs=0.005)
    assert whole > float(row[2])


@pytest.mark.parametrize("tokens", [16, 4096])
def test_what_a_prompt_leaves_behind_moves_with_its_states(setup: Setup, tokens: int) -> None:
    """Two pools of a model without keys sent nothing: as cheap as a split can be."""
    pools = pools_for(setup, Question(prompt_tokens=tokens))
    assert pools.kv_bytes == state_bytes(setup.model) > 0
    assert pools.network_s > 0


def test_a_measured_machine_prices_exponentials() -> None:
    """A state's numbers are few, and each takes a power for every token: Mamba-2's take the products alone."""
    one = read_model(HfConfig(FALCON))
    assert kv_bytes_per_token(one, setup_of("llama-3.1-8b", "h100-80gb-sxm").kv) == 0.0
    predictor = CalibratedModel.from_profile(PROFILE, one, quant_spec("bf16"))
    few, many = (predictor.predict_s(StepShape.prefill(batch=1, new_tokens=n)) for n in (512, 1024))
    powers_s = 64 * 8192 * 16 * 24.0 * 512 / PROFILE["flops_per_s"]["fp32"]
    assert many - few > powers_s
