"""Adapters on the native backend: right within the formats' rounding, and not one bit depends on how the work was cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import make_checkpoint
from coded_files import Layout, awq, block_fp8, gptq, quantised_checkpoints, whole_fp8
from diptych.compute.adapters import read_adapter
from diptych.compute.loading.quant import save_quantised
from diptych.compute.model import Model, Want
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ExecutorError
from gguf_files import gguf_reference, write_gguf
from lora import ALL, peft_model, write_adapter
from stepping import Stepper
from worlds import KERNEL_SETS, Answer, prompt, read_cache

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]

CONFIG = ComputeConfig(backend="cpu", threads=1)
TOKENS = prompt(37)
# ranks that are no multiple of a tile, one site of three, and one projection alone
RANKS: tuple[dict[str, int], ...] = (
    {**ALL, "q_proj": 5, "v_proj": 3, "down_proj": 17},
    {"v_proj": 8, "up_proj": 2},
    {"o_proj": 1},
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 24 lanes: a strip of 16 holds rows of k and of v."""
    folder = tmp_path_factory.mktemp("llama")
    return make_checkpoint("llama", folder, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / str(i), base, ranks, seed=i) for i, ranks in enumerate(RANKS)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Experts, a dense layer and the head; the last adapter has the head alone."""
    folder = tmp_path_factory.mktemp("mixture")
    base = make_checkpoint("qwen3_moe", folder / "base", num_hidden_layers=2)
    ranks: tuple[dict[str, int], ...] = (
        {**ALL, "lm_head": 6, "down_proj": 17},
        {"up_proj": 3, "lm_head": 2},
        {"lm_head": 4},
    )
    return base, [write_adapter(folder / str(i), base, some, seed=i) for i, some in enumerate(ranks)]


def loaded(base: Path, adapters: list[Path], config: ComputeConfig) -> tuple[Model, list[int]]:
    model = load_model(base, config)
    return model, [model.add_adapter(read_adapter(path, max_rank=64)) for path in adapters]


def alone(model: Model, number: int | None, chunk: int | None = None) -> Answer:
    """The prompt by itself with one adapter, or none."""
    stepper = Stepper(model)
    if number is not None:
        stepper.adapters = {"it": number}
    logits = stepper.prefill("it", TOKENS, chunk=chunk)
    return Answer(logits, read_cache(model, stepper, "it"))


def together(model: Model, numbers: list[int], n_each: int, seed: int) -> dict[str, Answer]:
    """The prompt with every adapter and with none, n_each times, in steps of random chunks in random order."""
    random = np.random.default_rng(seed)
    stepper = Stepper(model, n_blocks=16 * n_each * (len(numbers) + 1))
    names = [f"{number} {i}" for number in (*numbers, None) for i in range(n_each)]
    stepper.adapters = {name: int(name.split()[0]) for name in names if not name.startswith("None")}
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    while left := [name for name in names if stepper.lengths.get(name, 0) < len(TOKENS)]:
        random.shuffle(left)
        begun = {name: stepper.lengths.get(name, 0) for name in left}
        takes = {name: int(random.choice([1, 1, 2, 9])) for name in left}
        for name, logits in stepper.step({n: TOKENS[begun[n] : begun[n] + takes[n]] for n in left}).items():
            rows[name].append(logits)
    return {name: Answer(torch.cat(rows[name]), read_cache(model, stepper, name)) for name in names}


TARGETS = {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "falcon-40b": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "qwen3_next": ["q_proj", "v_proj", "in_proj_qkvz", "out_proj"],
    "qwen3_5": ["q_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "o_proj"],
    "granite-h-dense": ["v_proj", "in_proj", "out_proj", "input_linear"],
    "lfm2": ["q_proj", "in_proj", "out_proj", "w1", "w2"],
    "jamba-dense": ["q_proj", "in_proj", "x_proj", "out_proj", "down_proj"],
    "recurrent_gemma": ["linear_x", "linear_y", "linear_out", "q_proj", "o_proj", "up_proj"],
    "minimax": ["qkv_proj", "output_gate", "out_proj", "q_proj", "o_proj"],
}


LIKE = {"bf16": 0.999, "int8": 0.99, "int4": 0.8}
# a state adds up what was rounded, and experts are chosen by it
LIKE_STATES = {"bf16": 0.998, "int8": 0.98, "int4": 0.6}
WITH_STATES = ("qwen3_next", "qwen3_5", "granite-h-dense", "jamba-dense", "recurrent_gemma")


@pytest.mark.parametrize("family", [
    "qwen3", "gemma2", "phi3", "qwen3_moe", "gpt2", "falcon-40b", "qwen3_next", "qwen3_5", "granite-h-dense", "lfm2",
    "mimo_v2_flash", "bitnet", "jamba-dense", "recurrent_gemma", "sarvam_moe",
])  # fmt: skip
def test_logits_are_those_of_peft_as_the_model_s_own_are(family: str, tmp_path: Path) -> None:
    """Oracle: peft in fp32. The error with an adapter is of the size that the format's rounding has without one."""
    # values narrower than keys; routers would choose otherwise now and then, so all of their experts are asked
    fields = {
        "mimo_v2_flash": {"mlp_layer_types": ["dense"] * 4},
        "qwen3_moe": {"num_experts_per_tok": 4},
        "qwen3_next": {"num_experts_per_tok": 4},
        "sarvam_moe": {"num_experts_per_tok": 6},
    }.get(family, {})
    path = make_checkpoint(family, tmp_path / "base", **fields)
    targets = TARGETS.get(family, list(ALL))
    more: dict[str, Any] = {"fields": fields}
    if family == "qwen3_moe":
        targets = ["v_proj", "o_proj", "lm_head"]
        more |= {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    oracle = peft_model(family, tmp_path / "adapter", r=4, lora_alpha=8, target_modules=targets, size=0.3, **more)
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        adapted = oracle(ids, use_cache=False).logits[0]
        with oracle.disable_adapter():
            plain = oracle(ids, use_cache=False).logits[0]
    effect = (adapted - plain).abs().mean()
    for weights in ("bf16", "int8", "int4"):
        model, (number,) = loaded(path, [tmp_path / "adapter"], replace(CONFIG, weights=weights))
        usual = (alone(model, None).logits - plain).abs().mean()
        error = (alone(model, number).logits - adapted).abs().mean()
        assert error < 2 * usual, (weights, float(error), float(usual))
        # int4 alone is off by more than this adapter adds; what the adapter adds is still what it should be
        shift = (alone(model, number).logits - alone(model, None).logits).flatten()
        wanted = (adapted - plain).flatten()
        likeness = float(torch.nn.functional.cosine_similarity(shift, wanted, dim=0))
        assert likeness > (LIKE_STATES if family in WITH_STATES else LIKE)[weights], (
            weights,
            likeness,
        )
    assert effect > 0.1


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_neighbours_and_chunks_change_no_bit(base: Path, adapters: list[Path], kernels: str, weights: str) -> None:
    """Rows of several adapters and of none share a step; each has the bits that it has alone, in every kernel set."""
    model, numbers = loaded(base, adapters, replace(CONFIG, weights=weights, instruction_set=kernels))
    wanted = {str(number): alone(model, number) for number in (*numbers, None)}
    assert all(torch.isfinite(answer.logits).all() for answer in wanted.values())
    texts = {answer.logits.argmax(1).numpy().tobytes() for answer in wanted.values()}
    assert len(texts) == len(wanted), "two adapters say the same; the test would see nothing"
    for name, answer in together(model, numbers, n_each=3, seed=1).items():
        assert not answer.differs_from(wanted[name.split()[0]]), name
    for chunk in (1, 5, 16):
        assert not alone(model, numbers[0], chunk).differs_from(wanted[str(numbers[0])]), chunk


WEIGHTS = ["bf16", "int8", "int4"]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_experts_and_the_head_have_the_same_bits_beside_others(
    mixture: tuple[Path, list[Path]], kernels: str, weights: str
) -> None:
    """Rows come to an expert in another order than the step's, and few of its rows have the same adapter."""
    base, adapters = mixture
    config = replace(CONFIG, weights=weights, instruction_set=kernels)
    model, numbers = loaded(base, adapters, config)
    wanted = {str(number): alone(model, number) for number in (*numbers, None)}
    plain = load_model(base, config)
    assert not alone(plain, None).differs_from(wanted["None"])
    assert len({answer.logits.numpy().tobytes() for answer in wanted.values()}) == len(wanted)
    for name, answer in together(model, numbers, n_each=2, seed=1).items():
        assert not answer.differs_from(wanted[name.split()[0]]), name
    if (KERNEL_SETS.index(kernels) + WEIGHTS.index(weights)) % len(WEIGHTS):
        return  # three threads wait for each other, and for what runs beside them: each set meets them, and each format
    three, numbers = loaded(base, adapters, replace(config, threads=3, numa="off"))
    for number in numbers:
        assert not alone(three, number, 5).differs_from(wanted[str(number)])


# parts of names -> types: v alone in another one (as in every Q4_K_M file), and all three each in its own, gate beside up too
MIXED = {
    "v": {"attn_v": "Q8_0", "ffn_down": "Q8_0", "blk": "Q4_0"},
    "all": {"attn_q": "Q5_1", "attn_k": "IQ4_NL", "attn_v": "Q8_0", "ffn_gate": "Q4_1", "blk": "Q4_0"},
}


@pytest.mark.parametrize("mixed", MIXED)
def test_projections_of_several_types_take_adapters(mixed: str, tmp_path: Path) -> None:
    """Their outputs are several pieces beside one another, and an adapter adds to each of them at its own place.

    Oracle: the torch backend in fp32 on the values of the same file, held against peft by tests/compute.
    """
    fields = {"head_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    reference = gguf_reference("llama", **fields)
    reference.save_pretrained(tmp_path / "base")

    def choose(name: str) -> str:
        return next((kind for part, kind in MIXED[mixed].items() if part in name), "F16")

    path = write_gguf(reference, tmp_path / "m.gguf", choose=choose)
    folders = [write_adapter(tmp_path / str(i), tmp_path / "base", ranks, seed=i) for i, ranks in enumerate(RANKS)]
    exact, same = loaded(path, folders, ComputeConfig(backend="torch", device="cpu", weights="fp32"))
    plain = Stepper(exact).prefill("it", TOKENS).clone()
    model, numbers = loaded(path, folders, CONFIG)
    assert len(model.formats) > 1
    assert "bf16" not in model.formats
    wanted = {str(number): alone(model, number) for number in (*numbers, None)}
    usual = (wanted["None"].logits - plain).abs().mean()
    for number, theirs in zip(numbers, same, strict=True):
        stepper = Stepper(exact)
        stepper.adapters = {"it": theirs}
        adapted, got = stepper.prefill("it", TOKENS), wanted[str(number)].logits
        assert (got - adapted).abs().mean() < 2 * usual
        likeness = torch.nn.functional.cosine_similarity(
            (got - wanted["None"].logits).flatten(), (adapted - plain).flatten(), dim=0
        )
        assert likeness > 0.99, float(likeness)
        assert not alone(model, number, 5).differs_from(wanted[str(number)])
    for name, answer in together(model, numbers, n_each=2, seed=1).items():
        assert not answer.differs_from(wanted[name.split()[0]]), name


def test_threads_change_no_bit(base: Path, adapters: list[Path]) -> None:
    """A is divided among threads, and a row's sums are not."""
    for weights in ("bf16", "int8"):
        one, numbers = loaded(base, adapters, replace(CONFIG, weights=weights))
        three, same = loaded(base, adapters, replace(CONFIG, weights=weights, threads=3, numa="off"))
        assert numbers == same
        for number in numbers:
            assert not alone(one, number).differs_from(alone(three, number))


def test_a_model_that_held_adapters_has_the_bits_of_one_that_did_not(base: Path, adapters: list[Path]) -> None:
    """And so has the greedy way without logits, and a number that is given again."""
    fresh = load_model(base, CONFIG)
    model, numbers = loaded(base, adapters, CONFIG)
    assert not alone(fresh, None).differs_from(alone(model, None))
    before = alone(model, numbers[1])
    model.drop_adapter(numbers[0])
    assert not alone(model, numbers[1]).differs_from(before)
    assert model.add_adapter(read_adapter(adapters[2], max_rank=64)) == numbers[0]
    assert not alone(model, numbers[0]).differs_from(alone(model, numbers[2]))
    stepper = Stepper(model)
    stepper.adapters = {"a": numbers[1]}
    batch = stepper.batch({"a": TOKENS, "b": TOKENS}, logits_rows=[len(TOKENS) - 1, 2 * len(TOKENS) - 1])
    ids, _ = model.forward(batch, stepper.kv, Want.BEST)
    assert ids == [int(before.logits[-1].argmax()), int(alone(model, None).logits[-1].argmax())]
    hidden = model.forward(batch, stepper.kv, Want.HIDDEN)
    assert not torch.equal(hidden[0], hidden[1])


def test_a_number_that_is_not_there_is_refused(base: Path, adapters: list[Path]) -> None:
    """Memory that was given back must never be read."""
    model, numbers = loaded(base, adapters, CONFIG)
    model.drop_adapter(numbers[2])
    for number in (numbers[2], 99, -2):
        stepper = Stepper(model)
        stepper.adapters = {"a": number}
        with pytest.raises(ExecutorError, match="adapter"):
            stepper.step({"a": TOKENS})


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_an_adapter_fits_weights_that_were_packed_before(
    base: Path, adapters: list[Path], tmp_path: Path, weights: str
) -> None:
    """Weights are balanced before they are packed: without the factors an adapter would add to other channels' scale."""
    save_quantised(base, tmp_path / "packed", weights=weights)
    now, numbers = loaded(base, adapters, replace(CONFIG, weights=weights))
    before, same = loaded(tmp_path / "packed", adapters, CONFIG)
    for number, other in zip(numbers, same, strict=True):
        assert not alone(now, number).differs_from(alone(before, other))


@pytest.mark.parametrize(
    "layout",
    [awq(32), gptq(8, -1, symmetric=False), gptq(4, 32, symmetric=True, act_order=True), whole_fp8(), block_fp8()],
    ids=["group4", "group8", "act-order", "fp8", "fp8 blocks"],
)
def test_over_kept_weights_an_adapter_adds_what_it_adds_to_their_values(layout: Layout, tmp_path: Path) -> None:
    """Rows with a scale for each group were read as bf16, so A met their bytes, and rows in bf16 of fp8 as whole numbers.

    Oracle: the values themselves, in bf16.
    """
    wide = {"num_hidden_layers": 2, "intermediate_size": 160}
    original = make_checkpoint("llama", tmp_path / "original", dtype=torch.bfloat16, **wide)
    coded, plain = quantised_checkpoints(original, tmp_path, layout)
    path = write_adapter(tmp_path / "adapter", plain, RANKS[0], seed=1)
    shifts = []
    for folder in (coded, plain):
        model, (number,) = loaded(folder, [path], CONFIG)
        whole = alone(model, number)
        assert not alone(model, number, 5).differs_from(whole)
        shifts.append((whole.logits - alone(model, None).logits).flatten())
    likeness = float(torch.nn.functional.cosine_similarity(*shifts, dim=0))
    assert likeness > 0.98, likeness


def test_memory_is_what_the_ranks_call_for(base: Path, tmp_path: Path) -> None:
    """Bounded memory: twice the rank, twice the bytes; two bytes a number, or one and a scale for each rank and each output."""
    k_padded, n, n_layers = 128, 64, 2
    for weights in ("bf16", "int8", "int4"):
        model = load_model(base, replace(CONFIG, weights=weights))

        def taken(rank: int, model: Model = model) -> int:
            folder = write_adapter(tmp_path / str(rank), base, {"down_proj": rank})
            return model.adapter_bytes(model.add_adapter(read_adapter(folder, max_rank=64)))

        for rank in (16, 32):
            numbers = rank * (k_padded + n)
            assert taken(rank) == n_layers * (2 * numbers if weights == "bf16" else numbers + 4 * (rank + n))
