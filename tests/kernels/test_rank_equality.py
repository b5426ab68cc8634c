"""Ranks: a model whose outputs are divided among several has the bits of one, whatever it is made of."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import FAMILIES, MORE_FAMILIES, make_checkpoint
from coded_files import Layout, awq, compressed, gptq, mxfp4_checkpoint, quantised_checkpoints
from diptych.compute.loading.quant import save_quantised
from diptych.compute.model import Model, Want
from diptych.compute.ops.cpu.kernels import _cpu, instruction_sets
from diptych.compute.ops.cpus import Cpu
from diptych.compute.ops.shares import OwnHeads, Rank, copies_of_kv, rank_placements
from diptych.compute.runner import load_model, memory_of_block
from diptych.cost.exchange import gathered
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError, ExecutorError, LoadError
from gguf_files import gguf_reference, write_gguf
from mlx_files import DATA
from stepping import Stepper
from thread_ranks import load_over_threads
from worlds import after_fork, alone, beside, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]

CONFIG = ComputeConfig(backend="cpu", threads=1)
FORMATS = [("bf16", "bf16"), ("int8", "int8"), ("int4", "bf16"), ("bf16", "fp8")]
# heads, KV heads: more ranks than KV heads (each kept twice), one KV head (a rank has none), numbers that do not divide
HEADS = [(8, 2), (3, 1), (9, 3), (2, 1)]
N_TOKENS = 61


def over(path: Path, config: ComputeConfig, ranks: int) -> Model:
    return load_over_threads(path, replace(config, tp=ranks, threads=ranks))


def checkpoint(family: str, path: Path, **fields: int) -> Path:
    return make_checkpoint(family, path, num_hidden_layers=2, dtype=torch.bfloat16, **fields)


def differences(
    path: Path, config: ComputeConfig, ranks: tuple[int, ...] = (2, 4), n_tokens: int = N_TOKENS
) -> dict[str, str]:
    """What of KV, logits and blocks as they travel differs from one rank; nothing, it is hoped."""
    one, tokens, found = load_model(path, config), prompt(n_tokens), {}
    whole, ids = alone(one, tokens, None), [3, 0, 5]
    assert whole.logits.std() > 0.1
    for n in ranks:
        model = over(path, config, n)
        answers = {
            "whole": alone(model, tokens, None),
            "chunks": alone(model, tokens, 7),
            "neighbours": beside(model, tokens, 3, seed=1),
            "fork": after_fork(model, tokens, at=41),
        }
        found |= {
            f"{n} ranks, {name}": what for name, answer in answers.items() if (what := answer.differs_from(whole))
        }
        foretold = gathered(model.spec, tp=n, weights=model.weights_format).meetings
        if model.program.n_meetings != foretold:  # type: ignore[attr-defined]
            found[f"{n} ranks, meetings"] = f"{model.program.n_meetings}, foretold {foretold}"  # type: ignore[attr-defined]
        ours, theirs = Stepper(model), Stepper(one)
        hidden = [
            stepper.model.forward(stepper.batch({"it": tokens}), stepper.kv, Want.HIDDEN) for stepper in (ours, theirs)
        ]
        if not torch.equal(*hidden):
            found[f"{n} ranks, hidden"] = "differs"
        best = [stepper.model.forward(stepper.batch({"it": [5]}), stepper.kv, Want.BEST) for stepper in (ours, theirs)]
        if best[0] != best[1]:
            found[f"{n} ranks, best"] = f"{best}"
        sent = ours.kv.export_blocks(ids)
        if not np.array_equal(sent.data_NB, theirs.kv.export_blocks(ids).data_NB) or sent.header != theirs.kv.header:
            found[f"{n} ranks, blocks"] = "differ"
        ours.kv.import_blocks([60, 61, 62], sent)
        if not np.array_equal(ours.kv.export_blocks([60, 61, 62]).data_NB, sent.data_NB):
            found[f"{n} ranks, taken in"] = "differ"
        model.close()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_change_no_bit(tmp_path: Path, family: str) -> None:
    """Every sum is one rank's, so splitting a model is as lossless as batching it. Each family, in one format by turns."""
    path = checkpoint(family, tmp_path)
    weights, kv = FORMATS[FAMILIES.index(family) % len(FORMATS)]
    assert not (found := differences(path, replace(CONFIG, weights=weights, kv=kv))), found


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_ranks_change_no_bit_of_what_other_families_have(tmp_path: Path, family: str) -> None:
    """Sinks, shared experts, clamped gates, centred norms, a parallel residual: on ranks that divide nothing evenly."""
    path = checkpoint(family, tmp_path)
    config = replace(CONFIG, weights=FORMATS[MORE_FAMILIES.index(family) % 2][0])
    one, tokens = load_model(path, config), prompt(23)
    whole = alone(one, tokens, None)
    assert whole.logits.std() > 0.05
    model = over(path, config, 3)
    for chunk in (None, 5):
        assert not (found := alone(model, tokens, chunk).differs_from(whole)), found
    assert model.program.n_meetings == gathered(model.spec, tp=3, weights=model.weights_format).meetings  # type: ignore[attr-defined]
    model.close()


BEYOND: list[tuple[str, str, str, dict[str, int]]] = [
    ("minimax_m3", "int8", "int8", {"num_attention_heads": 3, "num_key_value_heads": 3, "index_n_heads": 3}),
    ("minimax_m3", "int4", "fp8", {"num_attention_heads": 9, "num_key_value_heads": 3, "index_n_heads": 3,
                                   "index_topk_blocks": 3, "index_local_blocks": 2}),
    ("minimax_m3", "bf16", "int8", {"num_attention_heads": 2, "num_key_value_heads": 1, "index_n_heads": 1}),
    ("nemotron-nas", "int8", "int8", {}),
    ("axk2", "bf16", "bf16", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    ("hy_v4", "int8", "int8", {"num_attention_heads": 3}),
    ("glm5_next", "int8", "int8", {"num_attention_heads": 3, "num_key_value_heads": 3, "linear_num_heads": 3}),
    ("deepseek_v4", "int8", "int8", {"num_attention_heads": 6, "o_groups": 3}),
    ("mistral_large4", "int8", "int8", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    ("mistral_large4", "bf16", "fp8", {}),
    ("qwen4_exp", "int8", "int8", {"num_attention_heads": 6, "num_key_value_heads": 3}),
    ("jamba", "int8", "int8", {}),
    ("minimax", "int8", "int8", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    ("minimax", "bf16", "bf16", {"full_attn_alpha_factor": 1, "full_attn_beta_factor": 1, "mlp_alpha_factor": 1}),
    ("recurrent_gemma", "int8", "int8", {}),
    ("recurrent_gemma", "bf16", "bf16", {"lru_width": 80, "num_attention_heads": 2, "num_key_value_heads": 2}),
    ("zamba2", "int8", "int8", {"num_attention_heads": 8, "num_key_value_heads": 8}),
    ("zamba2-7b", "bf16", "bf16", {}),
    ("zamba", "int8", "int8", {"n_mamba_heads": 4}),
    ("falcon_mamba", "int4", "bf16", {}),  # blocks of no bytes travel, too
]  # fmt: skip


@pytest.mark.parametrize(("family", "weights", "kv", "fields"), BEYOND)
def test_what_is_chosen_on_ranks_is_what_one_chooses(
    tmp_path: Path, family: str, weights: str, kv: str, fields: dict[str, int]
) -> None:
    """Behind more tokens than an index chooses, over layers of every kind: KV heads of ranks choose their own blocks."""
    path = make_checkpoint(family, tmp_path, dtype=torch.bfloat16, **fields)
    assert not (found := differences(path, replace(CONFIG, weights=weights, kv=kv), n_tokens=120)), found


def test_ranks_meet_as_planned_where_streams_are_added_a_mixture_alone(tmp_path: Path) -> None:
    """HY V4 without shared experts, which its class draws none of: each rank adds the sum to streams of its own."""
    path = make_checkpoint("hy_v4", tmp_path, dtype=torch.bfloat16)
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    kept = {name: tensor for name, tensor in tensors.items() if "shared_experts" not in name}
    assert len(kept) < len(tensors)
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**config, "n_shared_experts": 0}))
    whole = alone(load_model(path, replace(CONFIG, weights="int8")), prompt(40), None)
    model = over(path, replace(CONFIG, weights="int8"), 3)
    assert not (found := alone(model, prompt(40), 5).differs_from(whole)), found
    assert model.program.n_meetings == gathered(model.spec, tp=3, weights=model.weights_format).meetings  # type: ignore[attr-defined]
    model.close()


LATENTS = [("deepseek_v2", "int8", "int8", 4), ("deepseek_v3", "bf16", "bf16", 2), ("deepseek_v3", "int4", "bf16", 4)]


@pytest.mark.parametrize(("family", "weights", "kv", "heads"), LATENTS)
def test_latents_are_every_rank_s_and_heads_are_divided(
    tmp_path: Path, family: str, weights: str, kv: str, heads: int
) -> None:
    """One latent serves all heads, so each rank that has heads keeps it: counted so, and sent on as one. Two heads leave
    two of four ranks without attention.
    """
    path = checkpoint(family, tmp_path, num_attention_heads=heads, num_key_value_heads=heads)
    config = replace(CONFIG, weights=weights, kv=kv)
    assert not (found := differences(path, config)), found
    one, four = load_model(path, config), over(path, config, 4)
    assert four.kv_bytes_per_block(16) == heads * one.kv_bytes_per_block(16)
    assert memory_of_block(one.spec, replace(config, tp=4), 16)[1] == four.kv_bytes_per_block(16)
    four.close()


BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
LAYOUTS: dict[str, tuple[str, Layout, dict[str, int]]] = {
    "zeros": ("llama", awq(32), {}),
    "one head": ("llama", awq(32), {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}),
    "bytes": ("gemma2", gptq(8, -1, symmetric=False), {}),
    "experts": ("mixtral", gptq(4, 32, symmetric=True), {}),
    "full norms": ("olmo2", awq(32), {}),
    "shared experts": ("qwen2_moe", awq(32), {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}),
    "latents": ("deepseek_v2", awq(32), {"v_head_dim": 16, "moe_intermediate_size": 64}),
    "windows": ("mistral", gptq(4, 32, symmetric=False), {}),
    "bytes in groups": ("llama", gptq(8, 32, symmetric=False), {}),
    "act order": ("qwen2", gptq(4, 32, symmetric=True, act_order=True), {}),
    "rows": ("qwen2", compressed("int-quantized", BY_TOKEN, num_bits=8, type="int", strategy="channel"), {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_that_keep_their_values_are_divided(tmp_path: Path, layout: str) -> None:
    """A row's codes, scales and zero points go with the row, whichever rank has it."""
    family, form, fields = LAYOUTS[layout]
    original = checkpoint(family, tmp_path / "original", intermediate_size=160, **fields)
    check_divided(quantised_checkpoints(original, tmp_path, form)[0])


@pytest.mark.parametrize("kind", ["experts", "latent", "delta", "taps"])
def test_weights_that_mlx_stacked_are_divided(kind: str) -> None:
    """A rank's part of an expert is a part of an entry."""
    check_divided(DATA / kind)


def check_divided(path: Path) -> None:
    """Two ranks and three give what one gives."""
    one = load_model(path, CONFIG)
    assert set(one.formats) != {"bf16"}  # type: ignore[attr-defined]
    whole = alone(one, prompt(40), None)
    for ranks in (2, 3):
        model = over(path, CONFIG, ranks)
        assert model.revision == one.revision
        for chunk in (None, 7):
            assert not (found := alone(model, prompt(40), chunk).differs_from(whole)), found
        model.close()


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "kv"), FORMATS)
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_ranks_change_no_bit_in_any_format(tmp_path: Path, family: str, weights: str, kv: str) -> None:
    """All of them, and as many ranks as divide nothing evenly."""
    path = checkpoint(family, tmp_path)
    assert not (found := differences(path, replace(CONFIG, weights=weights, kv=kv), (2, 3, 4))), found


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads_that_ranks_do_not_divide_evenly(tmp_path: Path, heads: tuple[int, int]) -> None:
    """KV heads are kept by several ranks where there are too few, and a rank may be left without any."""
    fields = {
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 16,
        "hidden_size": 48 * heads[0],
    }
    assert not (found := differences(checkpoint("llama", tmp_path, **fields), CONFIG)), found
    path = checkpoint("olmo2", tmp_path / "full", num_attention_heads=4, num_key_value_heads=1)
    assert not (found := differences(path, CONFIG, (4,))), found  # a norm over all heads' q, which ranks gather


@pytest.mark.slow
@pytest.mark.parametrize("name", instruction_sets())
def test_ranks_change_no_bit_of_any_kernel_set(tmp_path: Path, name: str) -> None:
    """Which tiles a product takes depends on its rows, not on how many outputs a rank has of it."""
    path = checkpoint("gemma2", tmp_path, intermediate_size=272)
    for weights, kv in FORMATS[:2]:
        config = replace(CONFIG, weights=weights, kv=kv, instruction_set=name)
        whole = alone(load_model(path, config), prompt(40), None)
        model = over(path, config, 2)
        for chunk in (None, 3):
            assert not alone(model, prompt(40), chunk).differs_from(whole)
        model.close()


def test_two_threads_of_each_rank(tmp_path: Path) -> None:
    """The last thread of a rank meets the others for all of them."""
    path = checkpoint("gemma2", tmp_path)
    whole = alone(load_model(path, CONFIG), prompt(N_TOKENS), None)
    model = load_over_threads(path, replace(CONFIG, tp=2, threads=4))
    assert model.threads == 4
    assert not beside(model, prompt(N_TOKENS), 5, seed=2).differs_from(whole)


def test_a_packed_checkpoint_is_divided(tmp_path: Path) -> None:
    """What `diptych quantize` wrote is packed whole: ranks take strips of it, or refuse where these would be cut."""
    source = checkpoint("llama", tmp_path / "plain", intermediate_size=256, head_dim=32)
    save_quantised(source, tmp_path / "packed", weights="int8")
    one = load_model(source, replace(CONFIG, weights="int8"))
    whole = alone(one, prompt(20), None)
    assert not alone(over(tmp_path / "packed", CONFIG, 2), prompt(20), None).differs_from(whole)
    source = checkpoint("llama", tmp_path / "odd", intermediate_size=40)
    save_quantised(source, tmp_path / "packed_odd", weights="int8")
    with pytest.raises(ConfigError, match="cut a strip"):
        over(tmp_path / "packed_odd", CONFIG, 4)


def test_a_gguf_file_is_divided(tmp_path: Path) -> None:
    """Its tensors are unpacked by every rank, which keeps its rows."""
    path = write_gguf(gguf_reference("llama"), tmp_path / "model.gguf")
    whole = alone(load_model(path, CONFIG), prompt(20), None)
    assert not alone(over(path, CONFIG, 2), prompt(20), None).differs_from(whole)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0"])
def test_blocks_of_a_gguf_file_are_divided(tmp_path: Path, kind: str) -> None:
    """Its codes are kept in groups, of four bits or eight: whose rows they are does not change them."""
    path = write_gguf(
        gguf_reference("llama"), tmp_path / "model.gguf", choose=lambda name: kind if "blk" in name else "F16"
    )
    one = load_model(path, CONFIG)
    assert set(one.formats) - {"bf16"}  # type: ignore[attr-defined]
    whole = alone(one, prompt(20), None)
    for chunk in (None, 3):
        model = over(path, CONFIG, 2)
        assert not alone(model, prompt(20), chunk).differs_from(whole)
        model.close()


EXPERTS_JOINED_APART = {
    "llama4": {"num_hidden_layers": 2, "intermediate_size": 96, "intermediate_size_mlp": 96},
    "gpt_oss": {
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_local_experts": 3,
    },  # all chosen: no choice is near
}


@pytest.mark.parametrize("family", EXPERTS_JOINED_APART)
def test_experts_that_are_joined_apart_keep_gate_and_up_in_two_types(family: str, tmp_path: Path) -> None:
    """Llama 4's, and gpt-oss's with a bias of each. Of three ranks one has a part of gate, one of both, one of up."""
    reference = gguf_reference(family, **EXPERTS_JOINED_APART[family])
    kinds = {"ffn_up_exps": "Q8_0", "ffn_gate_exps": "Q4_0", "blk": "Q4_0"}
    path = write_gguf(
        reference, tmp_path / "m.gguf", choose=lambda name: next((kinds[part] for part in kinds if part in name), "F16")
    )
    one = load_model(path, CONFIG)
    formats = {name.removesuffix("-wide") for name in one.formats}  # type: ignore[attr-defined]
    assert formats == {"group4-g32-f16", "group8-g32-f16"}
    whole = alone(one, prompt(40), None)
    exact = alone(load_model(path, ComputeConfig(backend="torch", device="cpu", weights="fp32")), prompt(40), None)
    assert (whole.logits - exact.logits).std() < 0.05 * exact.logits.std()
    for ranks in (2, 3):
        model = over(path, CONFIG, ranks)
        assert not alone(model, prompt(40), 7).differs_from(whole)
        model.close()


def test_experts_in_blocks_of_mxfp4_are_divided(tmp_path: Path) -> None:
    """The experts of gpt-oss, by their width, with the blocks and scales that lie there."""
    path, _ = mxfp4_checkpoint(tmp_path)
    one = load_model(path, CONFIG)
    assert set(one.formats) - {"bf16"}  # type: ignore[attr-defined]
    whole = alone(one, prompt(40), None)
    for ranks in (2, 3):
        model = over(path, CONFIG, ranks)
        for chunk in (None, 7):
            assert not alone(model, prompt(40), chunk).differs_from(whole)
        model.close()


def test_random_weights_are_the_same_on_ranks() -> None:
    """A benchmark on several ranks multiplies the numbers of one."""
    n, k = 160, 64
    rows = [(32, 48), (80, 160)]

    def shape(n: int) -> object:
        return _cpu.LinearShape(format="int8", n=n, k=k)

    program = _cpu.Program(instruction_sets()[0], 1)
    whole = program.add_random_linear(shape(n), 7, 0.1)
    part = program.add_random_part(shape(96), shape(n), rows, 7, 0.1)
    cut = program.add_packed_part(shape(96), shape(n), rows, program.packed_blob(whole))
    strips = 96 * k  # bytes; behind them lies padding, which is nothing
    assert np.array_equal(program.packed_blob(part)[:strips], program.packed_blob(cut)[:strips])
    with pytest.raises(ValueError, match="cut a strip"):
        program.add_packed_part(shape(96), shape(n), [(30, 126)], program.packed_blob(whole))


def test_an_order_in_which_ranks_would_overtake_is_refused() -> None:
    """Nobody may write what another rank may still be reading; nothing but a meeting in between makes that sure."""
    fd = os.memfd_create("test")
    team = _cpu.Team(fd, 0, 2, False)
    program = _cpu.Program(instruction_sets()[0], 1)
    program.join(team)
    shared, other, private = (
        program.add_f32(16, is_shared=True),
        program.add_f32(16, is_shared=True),
        program.add_f32(16),
    )
    program.add(shared, private)  # reads it
    with pytest.raises(ValueError, match="another rank may still read"):
        program.add(private, shared)
    program.add(private, other)  # all ranks meet behind this
    program.add(private, shared)
    os.close(fd)


def test_what_one_rank_cannot_load_is_raised_by_all(tmp_path: Path) -> None:
    """A weight that is no number, in the rows of rank 1 alone."""
    path = checkpoint("llama", tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][-1, 0] = torch.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"down_proj.weight has a weight that is not finite"):
        over(path, replace(CONFIG, weights="int8"), 2)


def test_a_step_that_is_refused_leaves_the_ranks_in_order(tmp_path: Path) -> None:
    """The step is checked before the others hear of it."""
    path = checkpoint("llama", tmp_path)
    model = over(path, CONFIG, 2)
    stepper = Stepper(model)
    batch = stepper.batch({"it": [5, 6]})
    bad = replace(batch, token_ids_T=np.array([5, 999], dtype=np.int32))
    with pytest.raises(ExecutorError, match="outside the vocabulary"):
        model.forward(bad, stepper.kv)
    with pytest.raises(ValueError, match="outside the pool"):
        stepper.kv.copy_blocks([(0, 64)])
    whole = alone(load_model(path, CONFIG), prompt(20), None)
    assert not alone(model, prompt(20), 3).differs_from(whole)


def test_every_head_and_output_is_somebodys() -> None:
    """The same outputs are never computed twice, query heads neither; KV heads as often as ranks hold them."""
    for size in range(1, 9):
        ranks = [Rank(number=number, size=size) for number in range(size)]
        for n in (size, 40, 96, 160, 896, 151936):
            if n >= size:
                shares = [rank.share(n) for rank in ranks]
                assert [begin for begin, _ in shares] == [0, *(end for _, end in shares[:-1])]
                assert shares[-1][1] == n
                assert all(begin < end for begin, end in shares)
        for n_heads, n_kv_heads in ((32, 8), (9, 3), (8, 1), (14, 2), (2, 2), (3, 1)):
            own = [rank.heads(n_heads, n_kv_heads) for rank in ranks]
            seen = [
                head for heads in own if heads for head in range(heads.first_head, heads.first_head + heads.n_heads)
            ]
            assert sorted(seen) == list(range(n_heads)), (size, n_heads, n_kv_heads)
            group = n_heads // n_kv_heads
            for heads in filter(None, own):
                kv = {(heads.first_head + i) // group for i in range(heads.n_heads)}
                assert kv == set(range(heads.first_kv_head, heads.first_kv_head + heads.n_kv_heads))
    assert Rank(number=3, size=4).heads(8, 2) == OwnHeads(first_head=6, n_heads=2, first_kv_head=1, n_kv_heads=1)
    assert copies_of_kv(32, 8, 4) == 8
    assert copies_of_kv(8, 2, 4) == 4
    with pytest.raises(ConfigError, match="3 outputs"):
        Rank(number=0, size=4).share(3)


def test_ranks_have_cpus_of_their_own() -> None:
    """One node each where there are as many, else cores of their own; more threads than cores are not pinned."""
    two_nodes = [Cpu(number=n, core=n, node=n // 4) for n in range(8)]
    assert [one.cpus for one in rank_placements(2, None, "auto", two_nodes)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [one.cpus for one in rank_placements(2, 4, "auto", two_nodes)] == [(0, 1), (4, 5)]
    assert [one.cpus for one in rank_placements(4, None, "auto", two_nodes)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [one.cpus for one in rank_placements(2, None, "1", two_nodes)] == [(4, 5), (6, 7)]
    two_cores = [Cpu(number=n, core=n, node=0) for n in range(2)]
    assert [one.cpus for one in rank_placements(4, None, "auto", two_cores)] == [()] * 4
    assert [one.threads for one in rank_placements(4, None, "auto", two_cores)] == [1] * 4
    assert [one.cpus for one in rank_placements(2, None, "off", two_cores)] == [()] * 2
    with pytest.raises(ConfigError, match="threads is 3 and tp is 2"):
        rank_placements(2, 3, "auto", two_cores)
