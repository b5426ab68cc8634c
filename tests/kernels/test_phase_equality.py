"""Phase equality on the native backend: not one bit depends on how the work was cut (ARCHITECTURE.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoints import FAMILIES, MORE_FAMILIES, make_checkpoint
from diptych.compute.model import Model
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.models.read import load_model_file
from family_configs import fewest_layers
from worlds import KERNEL_SETS, after_prefix_hit, alone, beside, differing, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]

CONFIG = ComputeConfig(backend="cpu", threads=1)
FORMATS = [("bf16", "bf16"), ("int8", "bf16"), ("int4", "bf16"), ("bf16", "int8")]
N_TOKENS = 75
# more than two softmax tiles of 256 keys, with a tile edge inside a chunk
N_LONG = 530


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for family in FAMILIES:
        made[family] = make_checkpoint(
            family, tmp_path_factory.mktemp(family), num_hidden_layers=2, dtype=torch.bfloat16
        )
    longer = {
        "max_position_embeddings": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
    }
    made["long"] = make_checkpoint("llama", tmp_path_factory.mktemp("long"), dtype=torch.bfloat16, **longer)
    return made


def models(directories: dict[str, Path], family: str, *configs: ComputeConfig) -> list[Model]:
    return [load_model(directories[family], config) for config in configs]


@pytest.mark.parametrize(("weights", "kv"), FORMATS, ids=["-".join(pair) for pair in FORMATS])
@pytest.mark.parametrize("family", FAMILIES)
def test_cut_of_the_work_changes_no_bit(directories: dict[str, Path], family: str, weights: str, kv: str) -> None:
    """Chunked prefill, prefix hits, forks and neighbours are lossless only if this holds for every family and format."""
    model = models(directories, family, replace(CONFIG, weights=weights, kv=kv))[0]
    tokens = prompt(N_TOKENS)
    whole = alone(model, tokens, None)
    assert torch.isfinite(whole.logits).all()
    assert whole.logits.std() > 0.1, "the model says nearly the same everywhere; the test would see nothing"
    assert not (found := differing(model, tokens, whole)), found


@pytest.mark.parametrize(("weights", "kv"), [("bf16", "bf16"), ("int4", "int8")], ids=["bf16-bf16", "int4-int8"])
@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_cut_changes_no_bit_of_other_families(family: str, weights: str, kv: str, tmp_path: Path) -> None:
    """What these have of their own is a sum, too: centred norms, groups of experts, sinks, latents."""
    path = make_checkpoint(family, tmp_path, num_hidden_layers=fewest_layers(family), dtype=torch.bfloat16)
    model = load_model(path, replace(CONFIG, weights=weights, kv=kv))
    tokens = prompt(43)
    whole = alone(model, tokens, None)
    assert torch.isfinite(whole.logits).all()
    assert whole.logits.std() > 0.1, "the model says nearly the same everywhere; the test would see nothing"
    answers = {"token by token": alone(model, tokens, 1), "neighbours": beside(model, tokens, 3, seed=1)}
    answers["prefix hit"] = after_prefix_hit(model, tokens, hit_blocks=1)
    differing = {name: what for name, answer in answers.items() if (what := answer.differs_from(whole))}
    assert not differing, differing


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in MORE_FAMILIES if fewest_layers(family) == 2])
def test_a_third_layer_is_as_one_of_the_two(family: str, tmp_path: Path) -> None:
    """So that two show above what three would."""
    two, three = (
        load_model_file(make_checkpoint(family, tmp_path / str(n), num_hidden_layers=n, dtype=torch.bfloat16))
        for n in (2, 3)
    )
    assert all(layer in two.layers for layer in three.layers)
    assert replace(three, name=two.name, layers=two.layers) == two


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_many_neighbours_change_no_bit(directories: dict[str, Path], weights: str) -> None:
    """48 neighbours reach the widest register tiles of the products."""
    model = models(directories, "qwen2", replace(CONFIG, weights=weights))[0]
    tokens = prompt(20)
    differing = beside(model, tokens, 48, seed=1).differs_from(alone(model, tokens, None))
    assert not differing, differing


@pytest.mark.parametrize("kv", ["bf16", "int8", "int8x8", "fp8"])
def test_long_prompt_is_equal_over_tiles_splits_and_threads(directories: dict[str, Path], kv: str) -> None:
    """Past 256 keys the softmax is joined from tiles, and with two threads a decode's tiles are split between them."""
    one, two, three = models(directories, "long", *(replace(CONFIG, kv=kv, threads=threads) for threads in (1, 2, 3)))
    tokens = prompt(N_LONG)
    whole = alone(one, tokens, None)
    answers = {
        "chunks of 64": alone(one, tokens, 64),
        "chunks of 512": alone(one, tokens, 512),
        "two threads": alone(two, tokens, None),
        "two threads, chunks of 64": alone(two, tokens, 64),
        "three threads": alone(three, tokens, 100),
    }
    differing = {name: what for name, answer in answers.items() if (what := answer.differs_from(whole))}
    assert not differing, differing


def test_decode_past_two_tiles_equals_prefill_on_two_threads(directories: dict[str, Path]) -> None:
    """The split decode (partials joined after a barrier) against the same rows of a whole prefill."""
    one, two = models(directories, "long", CONFIG, replace(CONFIG, threads=2))
    tokens = prompt(N_LONG)
    whole = alone(one, tokens, None)
    stepper_answer = alone(two, tokens, 524)  # the last six tokens are one chunk
    assert not stepper_answer.differs_from(whole)
    from stepping import Stepper

    stepper = Stepper(two)
    rows = [stepper.step({"it": tokens[:524]})["it"]]
    rows += [stepper.step({"it": [token]})["it"] for token in tokens[524:]]
    assert torch.equal(torch.cat(rows), whole.logits)


@pytest.mark.parametrize("name", KERNEL_SETS)
def test_each_instruction_set_is_equal_within_itself(directories: dict[str, Path], name: str) -> None:
    """A machine without AVX-512 gets the same promise."""
    for weights, kv in (*FORMATS, ("bf16", "int8x8")):
        model = models(directories, "gemma2", replace(CONFIG, weights=weights, kv=kv, instruction_set=name))[0]
        tokens = prompt(40)
        whole = alone(model, tokens, None)
        for chunk in (1, 7):
            assert not alone(model, tokens, chunk).differs_from(whole)
        assert not beside(model, tokens, 5, seed=3).differs_from(whole)


@pytest.mark.skipif(len(instruction_sets()) < 2, reason="this machine runs one kernel set only")
@pytest.mark.parametrize("n_heads", [4, 40])
def test_models_of_two_instruction_sets_live_side_by_side(tmp_path: Path, n_heads: int) -> None:
    """The set used to be a switch of the process: loading the second model changed the first one's bits, and a set with larger
    scratch memory wrote past the end of what the first had taken.
    """
    path = make_checkpoint(
        "llama", tmp_path, hidden_size=80, num_attention_heads=n_heads, num_key_value_heads=2, head_dim=64
    )
    configs = [replace(CONFIG, threads=2, instruction_set=name) for name in instruction_sets()]
    tokens = prompt(70)
    expected = []
    for config in configs:
        model = load_model(path, config)
        expected.append(alone(model, tokens, None))
        model.close()
    together = [load_model(path, config) for config in configs]
    for order in (range(len(configs)), reversed(range(len(configs)))):  # scratch is taken at the first step
        for i in order:
            assert not alone(together[i], tokens, 9).differs_from(expected[i]), instruction_sets()[i]
    assert len({model.revision for model in together}) == len(together)
    assert expected[0].differs_from(expected[-1]), "equal bits would prove nothing"
