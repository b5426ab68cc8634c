"""Streams in one row, n-grams, and an index that chooses blocks by the means of their keys: each operation, and Qwen4-Exp."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_stream_ops import T, others, torch_ops

from checkpoints import make_checkpoint
from diptych.compute.adapters import read_adapter
from diptych.compute.drafting.heads import TargetTensors
from diptych.compute.loading.quant import save_quantised
from diptych.compute.loading.views import ShiftingTensor
from diptych.compute.loading.weights import Checkpoint
from diptych.compute.ops import reference
from diptych.compute.ops.cpu import kernels as cpu
from diptych.compute.ops.shares import OwnHeads
from diptych.compute.ops.tolerances import EdgeShape
from diptych.compute.pooler import read_tail
from diptych.compute.runner import load_model, memory_of_block
from diptych.cost.kv_bytes import kv_bytes_per_token
from diptych.cost.parameters import parameter_count
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.ground.specs import KVSpec
from diptych.models.ngrams import NgramSpec, ngram_states
from diptych.models.read import load_model_file
from lora import write_adapter
from op_bench import Bench, check, make_batch, noise
from stepping import Stepper
from worlds import (
    KERNEL_SETS,
    alone,
    differing,
    differing_past_tiles,
    in_dirty_blocks,
    on_sets,
    prompt,
)

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.instruction_sets(), reason="the native kernels are not installed"),
]
CONFIG = ComputeConfig(backend="cpu", threads=1)
REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
FORMATS = [("bf16", "bf16"), ("int8", "int8"), ("int4", "fp8")]
END = 2  # of the small checkpoints' texts


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("width", [1, 15, 64, 130])
def test_streams_in_one_row(isa: str, width: int, n: int) -> None:
    """Their sum by weights, what is added to each by a weight of its own, and values that keys and queries gate."""
    weights = tuple((0.9 - 0.7 * i) / n for i in range(n))
    x, keys, y = noise(T, n * width, seed=1), noise(T, n * width, seed=2), noise(T, width, seed=3)
    c = noise(T, n, seed=4, scale=4.0)
    keys[0, :width] = 0.0  # which meets nothing: half of the value
    expected = {
        "fold": reference.fold(x, weights),
        "inject": reference.inject(x, y, c, magnitude=1.5, scale=0.3),
        "meet_keys": reference.meet_keys(keys, x, y),
    }
    assert torch.equal(expected["meet_keys"][0, :width], 0.5 * y[0])
    for name, wanted in expected.items():
        bench = Bench(isa, x)
        program, (of_keys, of_y, of_c) = bench.program, others(bench, keys, y, c)
        out = program.add_f32(wanted.shape[1])
        if name == "fold":
            program.fold(x=bench.x, out=out, weights=weights)
        elif name == "inject":
            program.inject(x=bench.x, y=of_y, c=of_c, magnitude=1.5, scale=0.3)
        else:
            program.meet_keys(keys=of_keys, queries=bench.x, values=of_y, out=out)
        check(name, bench.run(bench.x if name == "inject" else out, wanted.shape[1]), wanted)
    ops = torch_ops()
    found = {
        "fold": ops.fold(x, weights),
        "inject": ops.inject(x, y, c, magnitude=1.5, scale=0.3),
        "meet_keys": ops.meet_keys(keys, x, y),
    }
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, atol=1e-5, rtol=0)


SPEC = NgramSpec(layers=(0, 3), width=18, longest=4, n_heads=2, least_rows=11, multiple=8, seed=7, parts=3, vocab=1 << 20,
                 end=9, n_taps=3)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_n_grams(isa: str, dtype: torch.dtype) -> None:
    """Found over tokens before, which a state hands on; behind the end of a text stand ends alone."""
    tokens, place = list(range(23)), 1  # the ninth ends a text
    rows = SPEC.rows(place)
    whole = noise(rows, SPEC.head_width, seed=1).to(dtype)
    tables = [part.contiguous() for part in whole.split(-(-rows // SPEC.parts))]
    expected = reference.ngrams(tokens, tables, SPEC, place)
    bench = Bench(isa, noise(len(tokens), 4, seed=2), threads=2)
    program, n = bench.program, SPEC.n_before
    ids, before, out = (program.add_f32(width) for width in (n, n, SPEC.width))
    state = ngram_states(SPEC, 6)[-1]
    shape = cpu.state_shape(state, OwnHeads(first_head=0, n_heads=1, first_kv_head=0, n_kv_heads=1))
    taps = program.add_vector(ShiftingTensor(n).read().T.reshape(-1).contiguous().numpy())
    program.ids(out=ids, shift=SPEC.end)
    program.move_states(qkv=ids, rates=-1, out=before, taps=taps, layer=0, shape=shape)
    program.ngrams(
        before=before, out=out, tables=[program.add_table(one) for one in tables], shift=SPEC.end,
        factors=list(SPEC.factors(place)), heads=[list(one) for one in SPEC.heads(place)],
    )  # fmt: skip
    bench._attend_for_form()
    program.head(x=bench.x, norm=bench.norm, eps=1e-6, rows=program.add_rows("bf16", 4), weight=bench.head)
    kv = cpu._cpu.KvCache(heads=[(1, 2, 2)], n_blocks=64, block_tokens=16, format="bf16")
    kv.add_states([shape.floats], 2)
    batch, _ = make_batch(EdgeShape(name="", sequences=((0, len(tokens)),)))
    np.testing.assert_array_equal(batch.token_ids_T, tokens)
    places = (np.array([-1], np.int32), np.array([0], np.int32), np.zeros((0, 3), np.int32))
    program.run(
        batch.token_ids_T, batch.query_start_S1, batch.context_tokens_S, batch.block_table_SM, batch.logits_rows_R, kv,
        torch.empty(0, 1), states=places,
    )  # fmt: skip
    found = torch.empty(len(tokens), SPEC.width)
    program.read_buffer(out, found)
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="beyond its tables"):
        program.ngrams(
            before=before, out=out, tables=[program.add_table(tables[0])], shift=0, factors=list(SPEC.factors(place)),
            heads=[list(one) for one in SPEC.heads(place)],
        )  # fmt: skip


N_HEADS, WIDTH, BLOCK, BUDGET = 5, 24, 4, 64
SEQUENCES = ((0, 300), (0, BUDGET + BLOCK - 1), (200, 1), (201, 2))


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "fp8"])
def test_blocks_of_the_highest_scores_are_chosen(isa: str, kv_format: str) -> None:
    """Oracle: the plain definition over what lies in the cache: means where a block ends, keys as they came elsewhere."""
    batch, n_blocks = make_batch(EdgeShape(name="", sequences=SEQUENCES))
    n, most = len(batch.token_ids_T), BUDGET + BLOCK - 1
    keys = [noise(int(end), WIDTH, seed=i) for i, end in enumerate(batch.context_tokens_S)]
    queries = noise(n, N_HEADS * WIDTH, seed=9)
    own = [of_all[int(end - (stop - start)) :] for of_all, end, start, stop in zip(
        keys, batch.context_tokens_S, batch.query_start_S1[:-1], batch.query_start_S1[1:], strict=True)]  # fmt: skip
    bench = Bench(isa, torch.ones(n, 8), threads=2)
    program = bench.program
    rope = program.add_rope([0.0] * 8, 1.0)  # which turns nothing
    key, choice = program.add_f32(WIDTH), program.add_f32(BUDGET // BLOCK + 1)
    q, turned = program.add_f32(N_HEADS * WIDTH), program.add_bf16(N_HEADS * WIDTH)
    given = [torch.cat(own).contiguous(), queries]  # which a program reads where they are
    for table, buffer in zip(given, (key, q), strict=True):
        program.embed(program.add_table(table), buffer, 1.0)
    weight = noise(WIDTH, seed=10) + 1.5
    norm = program.add_vector(weight.contiguous())
    program.cache_index(x=key, layer=0, rope=rope)
    program.cache_index(x=key, layer=0, norm=norm, norm_eps=1e-6, rope=rope, pooled=BLOCK)
    shape = cpu._cpu.AttentionShape(
        n_heads=N_HEADS, n_kv_heads=1, head_dim=WIDTH, scale=1.0, most=most, block=BLOCK, by_means=True
    )
    program.choose_pooled(q=q, queries=turned, choice=choice, layer=0, rope=rope, shape=shape, norm=norm, norm_eps=1e-6)
    kv = cpu._cpu.KvCache(heads=[(1, WIDTH, 0)], n_blocks=n_blocks, block_tokens=16, format=kv_format)
    for of_sequence, table, start, stop in zip(
        keys, batch.block_table_SM, batch.query_start_S1[:-1], batch.query_start_S1[1:], strict=True
    ):
        past = of_sequence[: len(of_sequence) - int(stop - start)].clone()
        if len(past):
            whole = len(past) // BLOCK
            means = past[: whole * BLOCK].unflatten(0, (whole, BLOCK)).mean(dim=1)
            past[BLOCK - 1 : whole * BLOCK : BLOCK] = reference.rms_norm(means, weight, eps=1e-6)
            kv.write(0, table[: -(-len(past) // 16)], past[None].contiguous(), past[None].contiguous())
    found = bench.run(choice, BUDGET // BLOCK + 1, batch, kv).numpy().view(np.int32).reshape(n, -1)
    near = {"bf16": 0.05, "int8": 0.1, "fp8": 0.4}[kv_format]
    n_chosen = 0
    for s, of_sequence in enumerate(keys):
        end, table = len(of_sequence), batch.block_table_SM[s]
        lies = torch.empty(1, end, WIDTH), torch.empty(1, end, WIDTH)
        kv.read(0, table[: -(-end // 16)], *(one.numpy() for one in lies))
        means = of_sequence[: end // BLOCK * BLOCK].unflatten(0, (-1, BLOCK)).mean(dim=1)
        pooled = lies[0][0, BLOCK - 1 :: BLOCK][: end // BLOCK]
        torch.testing.assert_close(pooled, reference.rms_norm(means, weight, eps=1e-6), atol=near, rtol=near)
        for t in range(batch.query_start_S1[s], batch.query_start_S1[s + 1]):
            position = int(batch.positions_T[t])
            if position < most:
                continue
            normed = reference.rms_norm(queries[t].view(N_HEADS, WIDTH), weight, eps=1e-6)
            scores = (normed @ pooled[: (position + 1) // BLOCK].T).clamp(min=0).sum(dim=0)
            chosen = found[t].tolist()
            assert chosen[-1] == (position + 1) // BLOCK
            assert sorted(set(chosen[:-1])) == chosen[:-1]
            is_out = torch.ones(len(scores), dtype=torch.bool)
            is_out[chosen[:-1]] = False
            # queries meet keys as bf16 or as whole numbers
            assert scores[~is_out].min() > scores[is_out].max() - 0.01 * scores.max(), (s, t)
            n_chosen += 1
    assert n_chosen == 300 - most + 3


def test_what_does_not_fit_is_refused(isa: str) -> None:
    bench = Bench(isa, noise(T, 12, seed=1))
    program, four, two = bench.program, bench.program.add_f32(4), bench.program.add_f32(2)
    for width, weights in ((5, (0.5, 0.5)), (6, (1.0,)), (6, (0.2,) * 3), (12, ())):
        with pytest.raises(ValueError, match="a stream for each weight, at least one"):
            program.fold(x=bench.x, out=program.add_f32(width), weights=weights)
    with pytest.raises(ValueError, match="a stream for each weight"):
        program.inject(x=bench.x, y=four, c=two, magnitude=1.0, scale=1.0)
    with pytest.raises(ValueError, match="whole number of streams"):
        program.meet_keys(keys=bench.x, queries=bench.x, values=program.add_f32(5), out=program.add_f32(12))
    with pytest.raises(ValueError, match="pooled that lie in one group"):
        program.cache_index(x=four, layer=0, rope=program.add_rope([0.0], 1.0), pooled=3)
    shape: dict[str, Any] = {"n_heads": 1, "n_kv_heads": 1, "head_dim": 4, "scale": 1.0, "by_means": True}
    for most, block in ((7, 3), (8, 4), (3, 4), (31, 32)):
        with pytest.raises(ValueError, match="parts of a group"):
            cpu._cpu.AttentionShape(**shape, most=most, block=block)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen4_exp", tmp_path_factory.mktemp("qwen4"), dtype=torch.bfloat16)


def text(n: int) -> list[int]:
    """With ends of texts in it, two of them beside each other, and one at a block's end."""
    return [END if i in (7, 15, 30, 31) else token for i, token in enumerate(prompt(n))]


@pytest.mark.parametrize(("weights", "kv"), FORMATS, ids=["-".join(pair) for pair in FORMATS])
def test_cut_of_the_work_changes_no_bit(path: Path, weights: str, kv: str) -> None:
    """Nor a prefix found in the cache, whose place has tokens' ids and inputs of taps."""
    config = replace(CONFIG, weights=weights, kv=kv)
    model, tokens = load_model(path, config), text(75)
    whole = alone(model, tokens, None)
    assert whole.logits.std() > 0.3
    found = differing(model, tokens, whole)
    assert not found, found
    assert not alone(load_model(path, replace(config, threads=3)), tokens, 9).differs_from(whole)
    assert not in_dirty_blocks(model, tokens).differs_from(whole)
    assert model.n_parameters == parameter_count(model.spec)


@pytest.mark.parametrize("isa", KERNEL_SETS)
def test_each_set_is_equal_within_itself(path: Path, isa: str) -> None:
    for kv in ("bf16", "int8", "fp8"):
        model = load_model(path, replace(CONFIG, instruction_set=isa, kv=kv))
        whole = alone(model, text(60), None)
        for chunk in (1, 7):
            assert not alone(model, text(60), chunk).differs_from(whole)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_packed_checkpoint_has_the_bits_of_the_plain_one(path: Path, weights: str, tmp_path: Path) -> None:
    """`diptych quantize` keeps tables of n-grams as they are."""
    save_quantised(path, tmp_path / "packed", weights=weights)
    whole = alone(load_model(path, replace(CONFIG, weights=weights)), text(30), None)
    assert not alone(load_model(tmp_path / "packed", CONFIG), text(30), 7).differs_from(whole)


def test_a_token_takes_what_the_planner_says(path: Path) -> None:
    """Keys and values, an index's keys, and of a sequence matrices, tails of taps and ids."""
    spec = load_model_file(path)
    assert kv_bytes_per_token(spec, KVSpec()) == 2 * (2 * 2 * 32 + 32)
    rule = 4 * 16 * 32 + 3 * (2 * 2 * 16 + 4 * 32)
    assert spec.state_elements == 3 * rule + 2 * 9 * 3 * 64 + 2 * 2
    for backend in ("cpu", "torch"):
        config = ComputeConfig(backend=backend, device="cpu", kv="bf16")
        model = load_model(path, config)
        assert model.kv_bytes_per_block(16) == 16 * kv_bytes_per_token(spec, KVSpec())
        assert memory_of_block(spec, config, 16)[1] == model.kv_bytes_per_block(16)
    assert load_model(path, REFERENCE).state_bytes == 4 * spec.state_elements


# as published, but for how many
SIZES: dict[str, Any] = {
    "head_dim": 256, "num_attention_heads": 6, "num_key_value_heads": 2, "indexer_head_dim": 128, "indexer_n_heads": 4,
    "indexer_budget": 288, "num_hidden_layers": 2, "max_position_embeddings": 1024, "ple_layer_ids": [1],
    "num_experts_per_tok": 6,
}  # fmt: skip
N_TOKENS = 415


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen4_exp", tmp_path_factory.mktemp("wide"), dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def expected(wide: Path) -> torch.Tensor:
    return alone(load_model(wide, REFERENCE), text(N_TOKENS), None).logits


@pytest.mark.parametrize(("name", "kv"), on_sets(["bf16", "int8", "fp8"]))
def test_published_widths_on_every_set(wide: Path, expected: torch.Tensor, name: str, kv: str) -> None:
    """Near fp32, and the same bits however the work was cut."""
    one, two = (load_model(wide, replace(CONFIG, instruction_set=name, kv=kv, threads=n)) for n in (1, 2))
    tokens = text(N_TOKENS)
    whole = alone(one, tokens, None)
    far = (whole.logits - expected).abs().amax(dim=-1) / expected.std()
    bound = 0.3 if kv == "fp8" else 0.12
    assert (far < bound).float().mean() > 0.9, "now and then another of two nearly equal blocks is the larger"
    assert not (found := differing_past_tiles(one, two, tokens, whole)), found


@pytest.mark.parametrize(
    "field",
    [("indexer_budget", 1024), ("eos_token_id", 3), ("output_gate_type", "silu"), ("rms_norm_eps", 0.5)],
    ids=str,
)
def test_a_model_says_something_else_without_it(path: Path, field: tuple[str, Any], tmp_path: Path) -> None:
    """Otherwise no test of such models would see it wrong."""
    other = Path(shutil.copytree(path, tmp_path / "other"))
    config = json.loads((path / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, field[0]: field[1]}))
    first, second = (alone(load_model(one, REFERENCE), text(40), None).logits for one in (path, other))
    assert (first - second).abs().max() > 0.03


def test_n_grams_found_by_other_numbers_are_refused(path: Path, tmp_path: Path) -> None:
    """Files have the numbers of the hash beside its tables; and tables may lie in one tensor."""
    other = Path(shutil.copytree(path, tmp_path / "other"))
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.3.ple.ple_embedding."
    changed = {**tensors, f"{name}layer_multipliers": tensors[f"{name}layer_multipliers"] + 2}
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"layer_multipliers has other numbers than config\.json gives"):
        load_model(other, REFERENCE)
    parts = [f"{name}ngram_embedding.shard_{i}.weight" for i in range(3)]
    joined = {key: tensor for key, tensor in tensors.items() if key not in parts}
    joined[f"{name}ngram_embedding.weight"] = torch.cat([tensors[part] for part in parts])
    save_file(joined, other / "model.safetensors", metadata={"format": "pt"})
    whole = alone(load_model(path, CONFIG), text(20), None)
    assert not alone(load_model(other, CONFIG), text(20), 3).differs_from(whole)


def test_adapters_of_what_reads_the_streams(path: Path, tmp_path: Path) -> None:
    """Oracle: the checkpoint with the adapter's product added. What is multiplied or read in parts is refused by name."""
    modules = {"input_mix_weight_up": 4, "key_proj": 3, "value_proj": 5, "out_proj": 2, "q_proj": 4}
    adapter = write_adapter(tmp_path / "adapter", path, modules)
    merged = Path(shutil.copytree(path, tmp_path / "merged"))
    tensors, low_ranks = load_file(path / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, b in low_ranks.items():
        if "lora_B" in name:
            weight = name.removeprefix("base_model.model.").replace("lora_B.weight", "weight")
            tensors[weight] = tensors[weight].float() + 2 * b @ low_ranks[name.replace("lora_B", "lora_A")]
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    model, other = (load_model(one, REFERENCE) for one in (path, merged))
    stepper = Stepper(model)
    stepper.adapters = {"it": model.add_adapter(read_adapter(adapter, max_rank=64))}
    logits, expected = stepper.prefill("it", text(40), chunk=7), alone(other, text(40), None).logits
    assert (logits - expected).abs().max() < 1e-3
    assert (alone(model, text(40), None).logits - expected).abs().max() > 0.1
    for config in (REFERENCE, CONFIG):
        model = load_model(path, config)
        for name in ("input_mix_weight_down", "index_qk_proj", "block_inject_weight"):
            refused = write_adapter(tmp_path / name, path, {name: 4})
            with pytest.raises(LoadError, match=name):
                model.add_adapter(read_adapter(refused, max_rank=64))


def test_heads_and_pools_of_one_stream_are_refused(path: Path) -> None:
    """What they read, a norm behind the last layer or a state of one width, this model does not have."""
    spec = load_model_file(path)
    with pytest.raises(UnsupportedModel, match="3 residual streams in one row; a head that drafts"):
        TargetTensors(Checkpoint(path), spec)
    with pytest.raises(UnsupportedModel, match="no norm behind its last layer; its states are not pooled"):
        read_tail(path, spec)
