"""Gemma 3n as a whole on the native backend: shared keys and values, streams, sparse gates over ranks, formats and adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints import make_checkpoint
from diptych.compute.adapters import read_adapter
from diptych.compute.loading.held import what_is_held
from diptych.compute.loading.quant import save_quantised
from diptych.compute.model import Model
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model, memory_of_block
from diptych.cost.exchange import gathered
from diptych.cost.kv_bytes import kv_bytes_per_token
from diptych.cost.parameters import parameter_count
from diptych.ground.config import ComputeConfig
from diptych.ground.specs import KVSpec
from gguf_files import gguf_reference, write_gguf
from lora import ALL, write_adapter
from stepping import Stepper
from thread_ranks import load_over_threads
from worlds import KERNEL_SETS, alone, differing, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]
CONFIG = ComputeConfig(backend="cpu", threads=1)
FORMATS = [("bf16", "bf16"), ("int8", "int8"), ("int4", "fp8")]
REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("gemma3n", tmp_path_factory.mktemp("gemma3n"), dtype=torch.bfloat16)


def over(path: Path, config: ComputeConfig, ranks: int) -> Model:
    return load_over_threads(path, replace(config, tp=ranks, threads=ranks))


@pytest.mark.parametrize(("weights", "kv"), FORMATS, ids=["-".join(pair) for pair in FORMATS])
def test_cut_of_the_work_changes_no_bit(path: Path, weights: str, kv: str) -> None:
    """A layer that attends to another's keys finds those of this very step, however the prompt was cut."""
    model = load_model(path, replace(CONFIG, weights=weights, kv=kv))
    tokens = prompt(75)
    whole = alone(model, tokens, None)
    assert whole.logits.std() > 0.3
    assert len(whole.cache) == 2 * 4  # six layers, of which two keep nothing
    found = differing(model, tokens, whole)
    assert not found, found
    threads = load_model(path, replace(CONFIG, weights=weights, kv=kv, threads=3))
    assert not alone(threads, tokens, 9).differs_from(whole)


@pytest.mark.parametrize("isa", KERNEL_SETS)
def test_each_set_is_equal_within_itself(path: Path, isa: str) -> None:
    """Sums of squares, means and deviations have one order in every set."""
    model = load_model(path, replace(CONFIG, instruction_set=isa))
    whole = alone(model, prompt(40), None)
    assert not alone(model, prompt(40), 3).differs_from(whole)


@pytest.mark.parametrize(("weights", "kv"), FORMATS, ids=["-".join(pair) for pair in FORMATS])
def test_ranks_change_no_bit(path: Path, weights: str, kv: str) -> None:
    """Streams are every rank's, heads and gates divided; blocks travel as one rank has them."""
    config, tokens, ids = replace(CONFIG, weights=weights, kv=kv), prompt(40), [3, 0, 5]
    one = load_model(path, config)
    whole = alone(one, tokens, None)
    for ranks in (2, 3):
        model = over(path, config, ranks)
        for chunk in (None, 7):
            assert not (found := alone(model, tokens, chunk).differs_from(whole)), found
        assert model.program.n_meetings == gathered(model.spec, tp=ranks, weights=model.weights_format).meetings  # type: ignore[attr-defined]
        ours, theirs = Stepper(model), Stepper(one)
        for stepper in (ours, theirs):
            stepper.prefill("it", tokens)
        assert np.array_equal(ours.kv.export_blocks(ids).data_NB, theirs.kv.export_blocks(ids).data_NB)
        assert memory_of_block(one.spec, replace(config, tp=ranks), 16)[1] == model.kv_bytes_per_block(16)
        model.close()


def test_what_is_kept_and_counted(path: Path) -> None:
    """Only layers with keys of their own are priced and held; the table of layers is no weight that a step reads."""
    model = load_model(path, CONFIG)
    assert model.make_kv(4, 16).header.n_layers == 4
    assert kv_bytes_per_token(model.spec, KVSpec(bytes_per_element=2)) == 4 * 2 * 2 * 24 * 2
    assert model.n_parameters == parameter_count(model.spec)
    inputs = model.spec.layer_inputs
    assert inputs is not None
    assert model.program.table_bytes == 2 * inputs.vocab * model.spec.n_layers * inputs.width  # type: ignore[attr-defined]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_packed_checkpoint_has_the_bits_of_the_plain_one(path: Path, weights: str, tmp_path: Path) -> None:
    """`diptych quantize` keeps what is not packed: the table of layers, coefficients, norms."""
    save_quantised(path, tmp_path / "packed", weights=weights)
    whole = alone(load_model(path, replace(CONFIG, weights=weights)), prompt(30), None)
    assert not alone(load_model(tmp_path / "packed", CONFIG), prompt(30), 7).differs_from(whole)


@pytest.mark.parametrize(("gate", "up"), [("Q4_0", "Q4_0"), ("Q4_0", "Q8_0")])
def test_codes_of_a_gguf_file_are_kept(gate: str, up: str, tmp_path: Path) -> None:
    """Gate and up of two types lie beside each other in one row, which is cut by the deviations of its half."""
    kinds = {
        "ffn_gate": gate,
        "ffn_up": up,
        "ffn_down": "Q4_0",
        "attn_": "Q4_0",
        "inp_gate": "Q8_0",
        "token_embd": "Q8_0",
    }
    reference = gguf_reference("gemma3n", head_dim=32, hidden_size_per_layer_input=32)
    path = write_gguf(
        reference, tmp_path / "m.gguf",
        choose=lambda name: next((kind for part, kind in kinds.items() if part in name and "norm" not in name), "F32"),
    )  # fmt: skip
    one = load_model(path, CONFIG)
    assert {name for name in one.formats if name.startswith("group")}  # type: ignore[attr-defined]
    # the table of layers is held in its codes, too: it is the largest tensor of such a file
    of_table, held = one.program.table_bytes, what_is_held(path)  # type: ignore[attr-defined]
    assert 160 * 6 * 32 < of_table < 1.5 * 160 * 6 * 32  # panels are padded
    assert held is not None
    assert sum(held.nbytes.values()) == one.weight_bytes + of_table
    # whatever is asked for matrices: in 16 bits it would be the largest part of the model
    asked = load_model(path, replace(CONFIG, weights="int8"))
    assert asked.program.table_bytes == of_table + 2 * 160 * 64  # type: ignore[attr-defined]
    whole = alone(one, prompt(40), None)
    exact = alone(load_model(path, REFERENCE), prompt(40), None)
    assert (whole.logits - exact.logits).std() < 0.05 * exact.logits.std()
    assert (alone(asked, prompt(40), None).logits - exact.logits).std() < 0.05 * exact.logits.std()
    for ranks in (2, 3):
        model = over(path, CONFIG, ranks)
        assert not (found := alone(model, prompt(40), 7).differs_from(whole)), found
        model.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_reach_sparse_gates_and_branches(path: Path, ranks: int, tmp_path: Path) -> None:
    """On the projections that the family has of its own, too; a neighbour without one has the bits it has alone."""
    sites = {**ALL, "linear_left": 3, "linear_right": 2, "per_layer_input_gate": 4, "per_layer_projection": 5}
    adapter = read_adapter(write_adapter(tmp_path / "adapter", path, sites, seed=1), max_rank=64)
    tokens, answers = prompt(37), []
    for config in (REFERENCE, CONFIG):
        model = load_model(path, config) if config is REFERENCE or ranks == 1 else over(path, config, ranks)
        number, stepper = model.add_adapter(adapter), Stepper(model)
        plain = stepper.prefill("plain", tokens)
        stepper.adapters = {"it": number}
        answers.append(stepper.prefill("it", tokens, chunk=None if config is REFERENCE else 5))
        assert (answers[-1] - plain).std() > 0.1 * plain.std()
        assert torch.equal(stepper.prefill("again", tokens), plain)
        model.close()
    assert (answers[1] - answers[0]).std() < 0.06 * answers[0].std()
