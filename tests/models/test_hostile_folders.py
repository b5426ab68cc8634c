"""Folders whose config, index, quantisation or headers are wrong: refused by name or read, and never another error."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bitsandbytes_files import DATA as BITSANDBYTES
from checkpoints import make_checkpoint
from coded_files import Layout, awq, compressed, gemma, gptq, mxfp4_checkpoint, mxfp8, quantised_checkpoints, quark
from diptych.compute.loading.held import what_is_held
from diptych.compute.loading.quant import save_quantised
from diptych.cost.setup import find_model
from diptych.ground.errors import ConfigError, LoadError
from diptych.models.config import HfConfig
from diptych.models.contents import contents_of
from diptych.models.heads import kind_of_heads, read_eagle, read_medusa
from diptych.models.pooling import read_pooling
from diptych.models.read import read_model
from mlx_files import DATA as MLX
from newer_files import fp_quant
from quantiser_files import DATA as QUANTISERS
from stacked_files import original_stacks, stacked_checkpoints

FIELDS = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32}
FEW = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 32}
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "default",
    "llama", [], [0], [[1]], {}, {"a": 1}, [None] * 3,
)  # fmt: skip


def coded(folder: Path, layout: Layout) -> Path:
    original = make_checkpoint("llama", folder / "original", dtype=torch.bfloat16, **FIELDS)
    return quantised_checkpoints(original, folder, layout)[0]


def turned(folder: Path) -> Path:
    """With rotations of inputs and outputs, in blocks and whole."""
    pytest.importorskip("compressed_tensors")
    from rotated_files import quip, rotated

    sides = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16}
    groups = {"v": quip("v", "random-hadamard"), "u": quip("u", "hadamard", 16)}
    layout = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
    return rotated(make_checkpoint("llama", folder.with_suffix(".plain"), **sides), folder, groups, layout)[0]


def own(folder: Path) -> Path:
    original = make_checkpoint("llama", folder / "original", dtype=torch.bfloat16, **FIELDS)
    save_quantised(original, folder / "packed", weights="int8", threads=1)
    return folder / "packed"


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "sharded": lambda folder: make_checkpoint("gemma3", folder, max_shard_size="40KB", num_hidden_layers=2),
    "Llama 4": lambda folder: make_checkpoint("llama4", folder, num_hidden_layers=2),
    "MLA": lambda folder: make_checkpoint("deepseek_v3", folder, num_hidden_layers=2),
    "Mamba-2": lambda folder: make_checkpoint("granitemoehybrid", folder),
    "Jamba": lambda folder: make_checkpoint("jamba", folder),
    "RecurrentGemma": lambda folder: make_checkpoint("recurrent_gemma", folder),
    "Zamba2": lambda folder: make_checkpoint("zamba2", folder),
    "LongCat-Flash": lambda folder: make_checkpoint("longcat_flash", folder),
    "DBRX": lambda folder: make_checkpoint("dbrx", folder),
    "LFM2": lambda folder: make_checkpoint("lfm2_moe", folder),
    "gpt-oss": lambda folder: mxfp4_checkpoint(folder)[0],
    "AWQ": lambda folder: coded(folder, awq(32)),
    "GPTQ": lambda folder: coded(folder, gptq(4, 32, symmetric=False, act_order=True)),
    "NF4": lambda folder: Path(shutil.copytree(BITSANDBYTES / "nf4", folder)),
    "AutoRound": lambda folder: Path(shutil.copytree(QUANTISERS / "auto-round-mixture", folder)),
    "modelopt": lambda folder: Path(shutil.copytree(QUANTISERS / "modelopt-fp8", folder)),
    "MXFP8 of MLX": lambda folder: Path(shutil.copytree(MLX / "mxfp8", folder)),
    "MXFP8": lambda folder: coded(folder, mxfp8(in_bytes=True)),
    "Quark": lambda folder: coded(folder, quark("uint4")),
    "Gemma": lambda folder: coded(folder, gemma(2)),
    "HQQ": lambda folder: Path(shutil.copytree(QUANTISERS / "hqq-mixture", folder)),
    "HQQ in columns": lambda folder: Path(shutil.copytree(QUANTISERS / "hqq-columns", folder)),
    "torchao": lambda folder: Path(shutil.copytree(QUANTISERS / "torchao-intx-4", folder)),
    "VPTQ": lambda folder: Path(shutil.copytree(QUANTISERS / "vptq-2", folder)),
    "FP-Quant": lambda folder: coded(folder, fp_quant("mxfp4", padded=True)),
    "Four Over Six": lambda folder: Path(shutil.copytree(QUANTISERS / "four-over-six", folder)),
    "AutoRound rotated": lambda folder: Path(shutil.copytree(QUANTISERS / "auto-round-mxfp4-hadamard", folder)),
    "rotated": lambda folder: turned(folder),
    "stacked fp8": lambda folder: stacked_checkpoints("gate and up", original_stacks(folder, **FEW), folder)[0],
    "own int8": lambda folder: own(folder),
    "W8A8": lambda folder: coded(folder, compressed("int-quantized", num_bits=8, strategy="channel", symmetric=True)),
}  # fmt: skip


def parts_of(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *parts_of(value[key]))]


def mutated(text: bytes, rng: random.Random) -> bytes:
    """A JSON file with one to three values wrong or missing, or with bytes wrong."""
    if rng.random() < 0.15:
        changed = bytearray(text)
        changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed[: rng.choice((len(changed), rng.randrange(len(changed))))])
    value = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        places = parts_of(value)
        if not places:
            break
        container, key = rng.choice(places)
        if isinstance(container, dict) and rng.random() < 0.2:
            del container[key]
        else:
            container[key] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(value).encode()


def with_header(file: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header, or the length before it, is wrong."""
    size = int.from_bytes(file[:8], "little")
    header = mutated(file[8 : 8 + size], rng)
    length = rng.choice((0, 2**63, size + 1)) if rng.random() < 0.1 else len(header)
    return length.to_bytes(8, "little") + header + file[8 + size :]


def storm(folder: Path, name: str, n: int, seed: int) -> int:
    path = FOLDERS[name](folder / "made")
    wrong = folder / "wrong"
    shutil.copytree(path, wrong)
    files = sorted(one for one in path.iterdir() if one.suffix in (".json", ".safetensors"))
    rng, refused = random.Random(seed), 0
    for number in range(n):
        source = rng.choice([*files, path / "config.json"])
        target, whole = wrong / source.name, source.read_bytes()
        target.write_bytes(mutated(whole, rng) if source.suffix == ".json" else with_header(whole, rng))
        said = str(wrong)
        try:
            contents_of(wrong)
            find_model(str(wrong))
            what_is_held(wrong)
        except (LoadError, ConfigError) as error:
            refused += 1
            said = error.message
        except Exception as error:
            raise AssertionError(f"{name}, mutation {number} of seed {seed}, {source.name}: {error!r}") from error
        finally:
            target.write_bytes(whole)
        assert str(wrong) in said, f"which folder? {said}"
    return refused


@pytest.mark.native
@pytest.mark.parametrize("name", FOLDERS)
def test_a_damaged_folder_is_refused_or_read_and_never_crashes(name: str, tmp_path: Path) -> None:
    """What somebody else wrote decides shapes, loops and divisions."""
    assert storm(tmp_path, name, 40, seed=1) > 10


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FOLDERS)
def test_many_damaged_folders(name: str, tmp_path: Path) -> None:
    """As above, for longer."""
    assert storm(tmp_path, name, 10_000, seed=2) > 3000


LAYER = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
         "max_position_embeddings": 128, "rms_norm_eps": 1e-5}  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "medusa": {"architectures": ["MedusaModel"], "medusa_num_heads": 3, "medusa_num_layers": 1, "hidden_size": 64},
    "eagle": {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 50, "target_hidden_size": 64, **LAYER,
              "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}},
    "speculators": {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 50,
                    "transformer_layer_config": LAYER},
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_a_damaged_config_of_heads_is_refused_or_read(name: str) -> None:
    """An `architectures` that is no list, or a section that is none, was a TypeError."""
    target = read_model(HfConfig({"model_type": "llama", "num_hidden_layers": 4, **LAYER}))
    rng = random.Random(3)
    for _ in range(400):
        config = json.loads(json.dumps(HEADS[name]))
        container, key = rng.choice(parts_of(config))
        container[key] = copy.deepcopy(rng.choice(VALUES))
        try:
            if kind_of_heads(config) == "medusa":
                read_medusa(config, target, "config.json", has_own_head=True)
            else:
                read_eagle(config, target, "config.json")
        except (LoadError, ConfigError):
            continue


def test_damaged_files_of_an_encoder_are_refused_or_read(tmp_path: Path) -> None:
    files: dict[str, Any] = {
        "modules.json": [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}],
        "config_sentence_transformers.json": {"prompts": {"query": "q: "}, "default_prompt_name": "query"},
        "sentence_bert_config.json": {"max_seq_length": 9, "processing_kwargs": {"chat_template": {"a": 1}},
                                      "modality_config": {"message": {}}},
        "1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": True},
    }  # fmt: skip
    (tmp_path / "1_Pooling").mkdir()
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    said = read_pooling(tmp_path, HfConfig({"model_type": "qwen3"}))
    assert said is not None
    assert said.reading.is_chat
    assert (said.reading.max_tokens, said.reading.template_variables) == (9, {"a": 1})
    rng = random.Random(4)
    for _ in range(400):
        name = rng.choice(list(files))
        wrong = json.loads(json.dumps(files[name]))
        container, key = rng.choice(parts_of(wrong))
        container[key] = copy.deepcopy(rng.choice(VALUES))
        (tmp_path / name).write_text(json.dumps(wrong))
        where = str(tmp_path)
        try:
            read_pooling(tmp_path, HfConfig({"model_type": "qwen3"}))
        except LoadError as error:
            where = error.message
        assert str(tmp_path) in where
        (tmp_path / name).write_text(json.dumps(files[name]))
