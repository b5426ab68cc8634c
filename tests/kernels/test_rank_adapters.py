"""Adapters over ranks: the bits of one process, on every rank or on none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from coded_files import awq, quantised_checkpoints
from diptych.compute.adapters import Adapter, read_adapter
from diptych.compute.model import Model, Want
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.ops.cpu.model import CpuModel
from diptych.compute.ops.cpu.ranks import RankedModel
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import CapacityError, ExecutorError, LoadError
from lora import ALL, write_adapter
from stepping import Stepper
from thread_ranks import load_over_threads
from worlds import Answer, prompt, read_cache

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]

CONFIG = ComputeConfig(backend="cpu", threads=1)
TOKENS = prompt(29)
SOME = {**ALL, "q_proj": 5, "v_proj": 3, "down_proj": 17}
STACKED = {"qkv_proj": 5, "o_proj": 2, "gate_up_proj": 4}
LATENT = {"q_proj": 3, "kv_a_proj_with_mqa": 2, "o_proj": 5}
# family, weights, modules: heads of 24 lanes, three KV heads on four ranks; stacked in the file; q, k and v gathered one by one
# for a norm over them; latents; balanced weights
KINDS: dict[str, tuple[str, str, dict[str, int], dict[str, int]]] = {
    "separate": ("llama", "bf16", SOME, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 72}),
    "stacked": ("phi3", "int8", STACKED, {}),
    "full norms": ("olmo2", "int4", SOME, {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "by head": ("falcon-40b", "int8", {"query_key_value": 5, "dense": 3}, {}),
    "latents": ("deepseek_v2", "int8", LATENT, {}),
    "gated latents": ("axk2", "int8", {"q_b_proj": 3, "W_down": 2, "W_up": 4, "o_proj": 5}, {}),
    "streams by connections": ("hy_v4", "int8", {"q_b_proj": 3, "linear_gate": 2, "o_proj": 5}, {}),
    "streams that mix": (
        "glm5_next",
        "int8",
        {"q_b_proj": 3, "f_b_proj": 2, "g_a_proj": 2, "wq_b": 2, "o_proj": 5},
        {},
    ),
    "entries": ("deepseek_v4", "int8", {"wq_b": 3, "wkv": 2, "wgate": 4, "wo_b": 5}, {}),
    "states in one step": (
        "bailing_hybrid",
        "int8",
        {"f_proj": 3, "g_proj": 2, "dense": 5, "kv_a_proj_with_mqa": 2},
        {},
    ),
    "streams in one row": ("qwen4_exp", "int8", {"q_proj": 3, "in_proj_qkv": 2, "o_proj": 5}, {}),
    "inner norms": ("bitnet", "int4", SOME, {}),
    "an embedding that is normed": ("nanochat", "int8", {"q_proj": 3, "fc1": 4, "fc2": 2, "o_proj": 5}, {}),
    "gates by softplus": ("laguna", "int8", {"g_proj": 3, "q_proj": 2, "o_proj": 5}, {}),
    "experts": ("qwen3_moe", "int8", {**SOME, "lm_head": 3}, {}),
    "experts beside shared ones": ("aria", "int8", {**SOME, "lm_head": 3}, {}),
    "one head": ("llama", "int8", SOME, {"num_attention_heads": 2, "num_key_value_heads": 1}),
}


def over(path: Path, config: ComputeConfig, ranks: int) -> Model:
    return load_over_threads(path, replace(config, tp=ranks, threads=ranks))


def answers(model: Model, numbers: list[int | None]) -> list[Answer]:
    """Of each adapter: the prompt in steps that hold all of them, in chunks of different sizes."""
    stepper = Stepper(model)
    stepper.adapters = {str(i): number for i, number in enumerate(numbers) if number is not None}
    rows: list[list[torch.Tensor]] = [[] for _ in numbers]
    for begin in range(0, len(TOKENS), 10):
        for name, logits in stepper.step({str(i): TOKENS[begin : begin + 10] for i in range(len(numbers))}).items():
            rows[int(name)].append(logits)
    return [Answer(torch.cat(rows[i]), read_cache(model, stepper, str(i))) for i in range(len(numbers))]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_change_no_bit_of_an_adapter(tmp_path: Path, kind: str) -> None:
    """A is every rank's, B is cut where the projection is cut: along its outputs, so that no sum is."""
    family, weights, modules, fields = KINDS[kind]
    base = make_checkpoint(family, tmp_path / "base", num_hidden_layers=2, dtype=torch.bfloat16, **fields)
    paths = [
        write_adapter(tmp_path / "all", base, modules, seed=1),
        write_adapter(tmp_path / "o", base, {"o_proj": 3, "dense": 3, "wo_b": 3}, seed=2),
    ]
    adapters = [read_adapter(path, max_rank=64) for path in paths]
    config = replace(CONFIG, weights=weights)
    one = load_model(base, config)
    numbers: list[int | None] = [*(one.add_adapter(adapter) for adapter in adapters), None]
    expected = answers(one, numbers)
    (alone,) = answers(one, [0])
    assert expected[0].differs_from(expected[2])
    assert expected[1].differs_from(expected[2])
    for ranks in (2, 4):
        model = over(base, config, ranks)
        assert [model.add_adapter(adapter) for adapter in adapters] == numbers[:2]
        found = answers(model, numbers)
        assert not any(ours.differs_from(theirs) for ours, theirs in zip(found, expected, strict=True))
        stepper = Stepper(model)
        stepper.adapters = {"it": 0}
        best, _ = model.forward(stepper.batch({"it": TOKENS}, logits_rows=[len(TOKENS) - 1]), stepper.kv, Want.BEST)
        assert best == [int(alone.logits[-1].argmax())]
        model.close()


def test_weights_that_keep_their_values_take_adapters_on_ranks(tmp_path: Path) -> None:
    """Nothing was balanced there, and B's rows go where the codes' rows are."""
    original = make_checkpoint(
        "llama", tmp_path / "original", num_hidden_layers=2, dtype=torch.bfloat16, intermediate_size=160, head_dim=16
    )
    path = quantised_checkpoints(original, tmp_path, awq(32))[0]
    adapter = read_adapter(write_adapter(tmp_path / "all", original, SOME), max_rank=64)
    one, two = load_model(path, CONFIG), over(path, CONFIG, 2)
    for model in (one, two):
        model.add_adapter(adapter)
    pairs = zip(answers(two, [0, None]), answers(one, [0, None]), strict=True)
    assert not any(ours.differs_from(theirs) for ours, theirs in pairs)
    two.close()


@pytest.mark.parametrize("victim", [0, 1])
def test_what_one_rank_cannot_take_no_rank_keeps(tmp_path: Path, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter on some ranks would give answers of a model that nobody trained. The engine goes on."""
    base = make_checkpoint("llama", tmp_path / "base", num_hidden_layers=2, dtype=torch.bfloat16)
    adapter = read_adapter(write_adapter(tmp_path / "all", base, SOME), max_rank=64)
    model, one = over(base, CONFIG, 2), load_model(base, CONFIG)
    add = CpuModel.add_adapter
    for error, told in (
        (MemoryError(), CapacityError),
        (LoadError("no"), LoadError),
        (LoadError("/модели/" * 40), LoadError),  # three times as long as JSON, and the end of the team
        (ValueError("odd"), ExecutorError),
    ):

        def refuse(self: CpuModel, adapter: Adapter, error: Exception = error) -> int:
            if isinstance(self, RankedModel) == (victim == 0):
                raise error
            return add(self, adapter)

        monkeypatch.setattr(CpuModel, "add_adapter", refuse)
        with pytest.raises(told, match=f"refused by rank {victim}"):
            model.add_adapter(adapter)
    monkeypatch.undo()
    assert model.add_adapter(adapter) == one.add_adapter(adapter) == 0
    assert not answers(model, [0])[0].differs_from(answers(one, [0])[0])
    model.drop_adapter(0)
    with pytest.raises(ExecutorError, match="adapter"):
        answers(model, [0])
    with pytest.raises(ValueError, match="no adapter"):
        model.drop_adapter(0)
    model.close()


def test_an_adapter_s_bytes_are_counted_once_and_a_s_for_each_rank(tmp_path: Path) -> None:
    """Memory figures say what ranks cost: A is kept by each of them."""
    base = make_checkpoint("llama", tmp_path / "base", num_hidden_layers=1, hidden_size=128, dtype=torch.bfloat16)
    adapter = read_adapter(write_adapter(tmp_path / "down", base, {"down_proj": 16}), max_rank=64)
    one, two = load_model(base, CONFIG), over(base, CONFIG, 2)
    a, b = 16 * 128 * 2, 16 * 128 * 2  # inputs are padded from 96 to 128
    assert one.adapter_bytes(one.add_adapter(adapter)) == a + b
    assert two.adapter_bytes(two.add_adapter(adapter)) == 2 * a + b
    two.close()
