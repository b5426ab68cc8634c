"""`diptych inspect`: what it says of a file against what the engine loads out of it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from bitsandbytes_files import DATA as BITSANDBYTES
from checkpoints import make_checkpoint
from coded_files import (
    Layout,
    awq,
    block_fp8,
    compressed,
    gemma,
    gptq,
    mxfp4_checkpoint,
    mxfp8,
    quantised_checkpoints,
    quark,
)
from diptych.cli.inspect import facts_of
from diptych.compute.loading.quant import save_quantised
from diptych.compute.ops.cpu.handles import native_shape
from diptych.compute.ops.cpu.kernels import _cpu, instruction_sets
from diptych.compute.runner import load_model
from diptych.cost.memory import engine_weight_bytes
from diptych.engine.load import bundled_dir
from diptych.ground.config import ComputeConfig
from diptych.ground.formats import KeptFormat
from diptych.models.contents import contents_of
from embedding_files import make_classifier, make_embedder
from encoder_files import KINDS, make_cross_encoder
from gguf_files import gguf_reference, write_gguf
from mlx_files import DATA as MLX
from quantiser_files import DATA as QUANTISERS
from stacked_files import original_stacks, stacked_checkpoints
from started import run


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "phi3", "qwen2_moe"])
def test_every_tensor_of_a_gguf_file_is_counted_once(family: str, tmp_path: Path) -> None:
    """Parts, types and bytes are of this file; together they are all parameters that the model has."""
    path = write_gguf(
        gguf_reference(family), tmp_path / "m.gguf", choose=lambda name: "Q8_0" if "attn" in name else "F16"
    )
    facts = facts_of(str(path), "h100-80gb-sxm")
    groups = facts["contents"].groups
    assert sum(group.parameters for group in groups) == facts["model"]["parameters"]
    assert {group.stored for group in groups if group.part == "attention"} - {"F32"} == {"Q8_0"}
    assert next(group.bits for group in groups if group.stored == "Q8_0") == 8.5
    assert not [group for group in groups if group.part == "other"]
    assert any(group.part == "experts" for group in groups) == (family in ("qwen3_moe", "qwen2_moe"))


MIXTURES = ("granitemoehybrid", "lfm2_moe", "qwen3_next", "nemotron-3", "jamba")
STATES = ("granite-h-dense", "lfm2", "nemotron_h", *MIXTURES)


@pytest.mark.parametrize("family", STATES)
def test_states_are_a_part_of_their_own(family: str, tmp_path: Path) -> None:
    """In folders and in GGUF files; nearly all of such models was "other"."""
    make_checkpoint(family, tmp_path / "folder")
    write_gguf(gguf_reference(family), tmp_path / "m.gguf")
    for path in (tmp_path / "folder", tmp_path / "m.gguf"):
        parts = {group.part for group in contents_of(path).groups}
        assert parts >= {"attention", "states", "norms"} | ({"experts"} if family in MIXTURES else {"mlp"})
        assert "other" not in parts


PARTS_OF_V4 = {"embedding", "head", "attention", "mlp", "router", "experts", "norms"}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_encoders_are_named(kind: str, tmp_path: Path) -> None:
    """BERT's MLPs, poolers and classifiers were "other"."""
    parts = {group.part for group in contents_of(make_cross_encoder(tmp_path, kind)).groups}
    assert parts == {"embedding", "head", "attention", "mlp", "norms"}


def test_an_encoder_is_priced_as_what_writes_nothing(tmp_path: Path) -> None:
    """It was decoded, its words' table was multiplied as a head, and its answers had ends."""
    path = make_cross_encoder(tmp_path, "bert")
    model = AutoModel.from_pretrained(path, add_pooling_layer=False)
    facts = facts_of(str(path), "h100-80gb-sxm")
    tables = sum(p.numel() for name, p in model.named_parameters() if name.endswith("_embeddings.weight"))
    assert facts["model"]["active_parameters"] == sum(p.numel() for p in model.parameters()) - tables
    phase = facts["phases"]["bf16"]
    assert phase["prefill_s"] > 0
    assert phase["decode_s"] is phase["decode_tokens_per_s"] is phase["decode_bound"] is None
    text = run("inspect", str(path), "-d", "h100-80gb-sxm").stdout
    assert "prefill, as nothing is written" in text
    assert "decode" not in text
    assert "answers end" not in text
    for command, *asked in (["plan"], ["simulate", "--rate", "3/s", "--prompt", "200", "--output", "50"]):
        refused = run(command, str(path), "-d", "h100-80gb-sxm", *asked)
        assert refused.returncode == 2
        assert "writes nothing" in refused.stderr


@pytest.mark.parametrize("kind", ["alone", "named otherwise", "under a head of labels"])
def test_a_decoder_without_an_output_projection_is_no_other_model(kind: str, tmp_path: Path) -> None:
    """e5-mistral, gte-Qwen2 (whose config names the head that its files lack) and rerankers with labels were refused."""
    path = tmp_path / "made"
    if kind == "under a head of labels":
        make_classifier(path, n_labels=3)
    else:
        make_embedder(path, family="mistral", has_head=kind == "named otherwise")
    tensors = load_file(path / "model.safetensors")
    count = sum(one.numel() for name, one in tensors.items() if name != "score.weight")
    facts = facts_of(str(path), "h100-80gb-sxm")
    assert facts["model"]["parameters"] == count
    assert facts["phases"]["bf16"]["decode_s"] is None
    del tensors["norm.weight" if "norm.weight" in tensors else "model.norm.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert "the files beside it hold" in run("inspect", str(path)).stderr


def test_what_lies_beside_a_window_is_said_and_no_tensor_is_other(tmp_path: Path) -> None:
    """DeepSeek V4's entries of many tokens, their offsets and norms, the streams' connections, and experts by token."""
    make_checkpoint("deepseek_v4", tmp_path)
    facts = facts_of(str(tmp_path), "h100-80gb-sxm")
    assert facts["model"]["entries"] == [[2, 4], [1, 16]]
    text = run("inspect", str(tmp_path)).stdout
    assert all(f"{n} of them beside entries of {tokens} tokens" in text for n, tokens in facts["model"]["entries"])
    assert {group.part for group in facts["contents"].groups} == PARTS_OF_V4


def test_a_name_in_brackets_is_told_whole(tmp_path: Path) -> None:
    """`x[dim]` was called x."""
    folder = Path(shutil.copytree(bundled_dir(), tmp_path / "x[dim]"))
    assert run("inspect", str(folder)).stdout.startswith("x[dim]: LlamaForCausalLM")


def test_an_end_that_the_tokenizer_has_not_is_named_by_its_number(tmp_path: Path) -> None:
    """It was a TypeError behind the model's description."""
    folder = Path(shutil.copytree(bundled_dir(), tmp_path / "copy"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 5000}')
    done = run("inspect", str(folder))
    assert done.returncode == 0
    assert "token 5000" in done.stdout


@pytest.mark.native
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_the_memory_it_names_is_the_memory_it_takes(weights: str, tmp_path: Path) -> None:
    """Packed weights and the embedding beside them; scales of int8 rows are the only thing left out."""
    model = load_model(bundled_dir(), ComputeConfig(backend="cpu", weights=weights, threads=1))
    table = 0 if weights == "bf16" else model.spec.vocab_size * model.spec.hidden * 2
    assert engine_weight_bytes(model.spec, weights) == pytest.approx(model.weight_bytes + table, rel=0.02)
    if weights != "bf16":
        save_quantised(bundled_dir(), tmp_path / "packed", weights=weights)
        groups = contents_of(tmp_path / "packed").groups
        once = [
            group for group in groups if (group.part, group.stored) != ("embedding", "BF16")
        ]  # the head is tied to it
        assert sum(group.parameters for group in once) == facts_of("bundled", "h100-80gb-sxm")["model"]["parameters"]


@pytest.mark.native
@pytest.mark.parametrize("layout", ["awq", "gptq 8", "gguf"])
def test_weights_that_will_be_kept_are_counted_and_priced(layout: str, tmp_path: Path) -> None:
    """Words of 32 bits are no parameters, and the memory named first is what `--weights auto` takes."""
    fields = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    if layout == "gguf":
        path = write_gguf(
            gguf_reference("llama", **fields),
            tmp_path / "m.gguf",
            choose=lambda name: "Q4_0" if "blk" in name else "F16",
        )
    else:
        original = make_checkpoint("llama", tmp_path / "original", dtype=torch.bfloat16, **fields)
        made = awq(64) if layout == "awq" else gptq(8, 64, symmetric=True)
        path, _ = quantised_checkpoints(original, tmp_path, made)
    facts = facts_of(str(path), "h100-80gb-sxm")
    assert sum(group.parameters for group in facts["contents"].groups) == facts["model"]["parameters"]
    kept = facts["contents"].kept
    assert kept in facts["memory"]["weight_bytes"]
    model = load_model(path, ComputeConfig(backend="cpu", threads=1))
    assert model.weights_format == kept
    table = model.spec.vocab_size * model.spec.hidden * 2
    assert facts["memory"]["weight_bytes"][kept] == pytest.approx(model.weight_bytes + table, rel=0.08)
    model.close()


FIELDS = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
MLA = {"hidden_size": 128, "kv_lora_rank": 64, "num_hidden_layers": 2}
HOLDERS: dict[str, Callable[[Path], Path]] = {
    "bf16": lambda folder: make_checkpoint("llama", folder, dtype=torch.bfloat16, **FIELDS),
    "fp32, tied": lambda folder: make_checkpoint("qwen3", folder, **FIELDS),
    "MLA": lambda folder: make_checkpoint("deepseek_v2", folder, dtype=torch.bfloat16, **MLA),
    "gpt-oss MXFP4": lambda folder: mxfp4_checkpoint(folder)[0],
    "AWQ": lambda folder: coded(folder, awq(64)),
    "GPTQ with act-order": lambda folder: coded(folder, gptq(4, 64, symmetric=False, act_order=True)),
    "compressed-tensors fp8": lambda folder: coded(
        folder, compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True)
    ),
    "W4A16": lambda folder: coded(
        folder, compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64)
    ),
    "W8A8": lambda folder: coded(folder, compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "fp8 in blocks": lambda folder: coded(folder, block_fp8()),
    "MXFP8": lambda folder: coded(folder, mxfp8()),
    "Quark": lambda folder: coded(folder, quark("int4")),
    "Gemma": lambda folder: coded(folder, gemma(2)),
    "AutoRound": lambda folder: QUANTISERS / "auto-round-mixture",
    "modelopt": lambda folder: QUANTISERS / "modelopt-fp8",
    "HQQ": lambda folder: QUANTISERS / "hqq-mixture",
    "HQQ in columns": lambda folder: QUANTISERS / "hqq-columns",
    "torchao": lambda folder: QUANTISERS / "torchao-intx-4",
    "torchao W8A8": lambda folder: QUANTISERS / "torchao-int8",
    "stacked fp8": lambda folder: stacked_checkpoints("experts", original_stacks(folder), folder)[0],
    "NVFP4 of MLX": lambda folder: MLX / "nvfp4",
    "NF4": lambda folder: BITSANDBYTES / "nf4",
    "LLM.int8": lambda folder: BITSANDBYTES / "int8",
    "Llama 4 in GGUF": lambda folder: write_gguf(
        gguf_reference("llama4", num_hidden_layers=2, intermediate_size=64), folder / "m.gguf",
        choose=lambda name: "Q8_0" if "token" in name else "Q4_0",
    ),
    "Q4_K_M": lambda folder: write_gguf(
        gguf_reference("llama", **FIELDS | {"hidden_size": 256}), folder / "m.gguf",
        choose=lambda name: "F16" if "token" in name else "Q6_K" if "ffn_down" in name or "attn_v" in name else "Q4_K",
    ),
    "gate and up of two types": lambda folder: write_gguf(
        gguf_reference("llama", **FIELDS | {"hidden_size": 256}), folder / "m.gguf",
        choose=lambda name: "F16" if "token" in name else "Q6_K" if "ffn_up" in name else "Q4_K",
    ),
    "of diptych quantize": lambda folder: quantised_folder(folder),
    "a delta rule": lambda folder: make_checkpoint("qwen3_next", folder, dtype=torch.bfloat16),
    "Mamba-2": lambda folder: make_checkpoint("granitemoehybrid", folder, dtype=torch.bfloat16),
    "convolutions": lambda folder: make_checkpoint("lfm2", folder, dtype=torch.bfloat16),
    "Mamba-1": lambda folder: make_checkpoint("jamba", folder, dtype=torch.bfloat16),
    "no attention": lambda folder: make_checkpoint("mamba2", folder, dtype=torch.bfloat16),
}  # fmt: skip


def coded(folder: Path, layout: Layout) -> Path:
    original = make_checkpoint("llama", folder / "original", dtype=torch.bfloat16, **FIELDS)
    return quantised_checkpoints(original, folder, layout)[0]


def quantised_folder(folder: Path) -> Path:
    original = make_checkpoint("llama", folder / "original", dtype=torch.bfloat16, **FIELDS)
    save_quantised(original, folder / "packed", weights="int8")
    return folder / "packed"


@pytest.mark.native
@pytest.mark.parametrize("name", HOLDERS)
def test_what_it_says_is_held_is_what_the_engine_holds(name: str, tmp_path: Path) -> None:
    """To the byte, by format. gpt-oss was priced as 4 bits all over, with attention and embeddings that are bf16.

    Other formats were the planner's: fp32 norms as 16 bits, an fp32 embedding as half of what it takes.
    """
    path = HOLDERS[name](tmp_path)
    facts = facts_of(str(path), "h100-80gb-sxm")
    model = load_model(path, ComputeConfig(backend="cpu", threads=1))
    held = facts["held"]
    if "MXFP4" not in name and "diptych" not in name:  # whose biases and tied heads are counted otherwise
        groups = [group for group in facts["contents"].groups if group.part != "positions"]
        assert sum(group.parameters for group in groups) == model.n_parameters
    assert sum(held.nbytes.values()) == model.program.weight_bytes + model.program.table_bytes
    assert Counter(held.dense) + Counter(held.experts) == Counter(model.formats)
    assert (held.main_format, held.head_format) == (model.weights_format, model.head_format)
    assert facts["memory"]["weight_bytes"][held.main_format] == sum(held.nbytes.values())
    assert held.scratch > 0
    if "diptych" in name:
        assert {*facts["memory"]["weight_bytes"]} == {*facts["phases"]} == {"int8"}, (
            "the engine loads it in no other format"
        )
    if name in ("gpt-oss MXFP4", "fp32, tied", "AWQ"):
        for weights in ("bf16", "int8", "int4"):
            with closing(load_model(path, ComputeConfig(backend="cpu", weights=weights, threads=1))) as asked:
                nbytes = asked.program.weight_bytes + asked.program.table_bytes
            assert facts["memory"]["weight_bytes"][weights] == nbytes, weights
    if name == "gpt-oss MXFP4":
        assert not [group for group in facts["contents"].groups if group.part == "mlp"]
        assert set(held.dense) == {"bf16"}
        assert set(held.experts) == {model.weights_format}
    model.close()


@pytest.mark.native
def test_what_threads_work_in_is_as_large_as_the_widest_layer_makes_it() -> None:
    """Up to 2.3 MB for each thread stood in no figure: 264 rows and a tile, their sums and where each group of theirs lies.

    Of other formats it was up to 11 MB: 192 rows, as words side by side where the tiles read them so (AVX2).
    """
    program = _cpu.Program(instruction_sets()[0], 1)

    def of(n_inputs: int, rows: int, kind: str = "group4-g32-f16") -> int:
        weights = KeptFormat.named(kind) if kind.startswith("group") else kind
        return int(program.linear_scratch_bytes(native_shape(weights, 64, n_inputs), rows, is_routed=False, threads=1))

    assert 0 < of(4096, 1) < of(4096, 264) == of(4096, 2**20)
    assert of(16_384, 264) - of(8192, 264) == 2 * (of(8192, 264) - of(4096, 264))
    assert of(4096, 264, "group4-g128-f16") < of(4096, 264)
    for own in ("bf16", "int8", "int4"):
        sums = 192 * 64 * 4
        assert sums <= of(4096, 192, own) <= of(4096, 2**20, own)
        assert 0 <= of(8192, 2**20, own) - of(4096, 2**20, own) <= 2 * 210 * 4096 * 4


@pytest.mark.native
def test_what_the_engine_would_refuse_is_said(tmp_path: Path) -> None:
    """A tensor that nobody asks for: the files are described all the same, and a script sees that it will not be loaded."""
    path = coded(tmp_path, awq(64))
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "model.layers.0.strange.weight": torch.ones(4)}, path / "model.safetensors")
    done = run("inspect", str(path), "--hardware", "h100-80gb-sxm", "--json")
    assert done.returncode == 2
    assert done.stderr.startswith("error: the engine does not load it: ")
    facts = json.loads(done.stdout)
    assert "strange" in facts["refusal"]
    assert facts["contents"]["container"] == "safetensors"


def test_a_config_alone_is_planned_and_nothing_is_refused(tmp_path: Path) -> None:
    """To know the memory before the download; weights beside a config of another name are not its own."""
    for name in ("config.json", "other.json"):
        (tmp_path / name).write_text((bundled_dir() / "config.json").read_text())
        facts = facts_of(str(tmp_path / name), "h100-80gb-sxm")
        assert (facts["contents"], facts["refusal"]) == (None, None)
        (tmp_path / "model.safetensors").write_bytes((bundled_dir() / "model.safetensors").read_bytes())
    facts = facts_of(str(tmp_path / "config.json"), "h100-80gb-sxm")
    assert facts["contents"].file_bytes == (tmp_path / "model.safetensors").stat().st_size


def test_text_and_json_say_the_same(tmp_path: Path) -> None:
    """One for people, one for programs."""
    said = run("inspect", "bundled", "--hardware", "h100-80gb-sxm", "--json")
    assert said.returncode == 0, said.stderr
    facts = json.loads(said.stdout)
    assert facts["words"]["ends"] == ["<|im_end|>", "<|endoftext|>"]
    assert facts["phases"]["bf16"]["decode_bound"]
    text = run("inspect", "bundled", "--hardware", "h100-80gb-sxm").stdout
    for shown in (
        "LlamaForCausalLM",
        "10.13 M parameters",
        "BF16",
        "int4",
        "the two phases on h100-80gb-sxm",
        "<|im_end|>",
    ):
        assert shown in text


def test_a_name_of_the_table_needs_no_file() -> None:
    """To know the memory before the download."""
    facts = facts_of("llama-3.1-8b", "h100-80gb-sxm")
    assert facts["contents"] is None
    assert facts["memory"]["weight_bytes"]["bf16"] == pytest.approx(2 * 8_030_261_248)


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    """One line, and an exit of 2, as for every command."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x01")
    done = run("inspect", str(tmp_path / "m.gguf"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 2)
    assert "reaches to byte 8; the file has 5" in done.stderr
