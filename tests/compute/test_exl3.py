"""ExLlamaV3's EXL3, step by step as its kernels read it (`exllamav3_ext/quant`); compared with GPTQModel 7.7 by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from coded_files import Layout, Tensors, check_in_use, damaged, logits_of, opened, quantised_checkpoints
from diptych.ground.errors import LoadError
from diptych.models.config import read_json

# inputs and outputs that the first thread of a GPU's tensor core has of a tile, in the order of its values
FIRST = [(0, 0), (1, 0), (8, 0), (9, 0), (0, 8), (1, 8), (8, 8), (9, 8)]
HADAMARD = scipy.linalg.hadamard(128) / 128**0.5
LAYOUTS = {
    f"{bits} {rule}": (bits, rule) for bits, rule in ((1, "3inst"), (2, "mcg"), (3, "mul1"), (4, "3inst"), (8, "mcg"))
}
DOWN = "model.layers.0.mlp.down_proj."


def half(bits: int) -> np.float16:
    return np.array(bits, dtype=np.uint16).view(np.float16)[()]


def value(state: int, rule: str) -> float:
    """Of the last 16 bits, in 16 bits as a GPU adds them."""
    if rule == "mul1":
        total = 0x6400 + sum((state * 0x83DCD12D).to_bytes(8, "little")[:4])
        return float(np.float16(float(half(total)) * float(half(0x1EEE)) + float(half(0xC931))))
    mixed = state * 89226354 + 64248484 if rule == "3inst" else state * 0xCBAC1FED
    mixed = (mixed & 0x8FFF8FFF) ^ 0x3B603B60
    return float(half(mixed & 0xFFFF) + half(mixed >> 16))


def tile_of(words: list[int], bits: int, rule: str) -> np.ndarray:
    """[16 inputs, 16 outputs]; of two words the second comes first."""
    stream = "".join(f"{words[i ^ 1]:016b}" for i in range(len(words)))
    ring, found = stream[-16:] + stream, np.zeros((16, 16))
    for step in range(256):
        thread, one = divmod(step, 8)
        place = FIRST[one][0] + 2 * (thread % 4), FIRST[one][1] + thread // 4
        found[place] = value(int(ring[(step + 1) * bits : (step + 1) * bits + 16], 2), rule)
    return found


def exl3(bits: int, rule: str) -> Layout:
    """Random walks, scaled as the weights are."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = (-(-side // 128) * 128 for side in w.shape)
        draw = np.random.default_rng(n + k + bits)
        words = draw.integers(0, 1 << 16, (k // 16, n // 16, 16 * bits))
        inner = np.block([[tile_of(tile.tolist(), bits, rule) for tile in row] for row in words])
        signs, scales = draw.choice([-1.0, 1.0], k), draw.uniform(0.5, 1.0, n) * float(w.std())
        suh, svh = signs.astype(np.float16), scales.astype(np.float16)
        rotations = [np.kron(np.eye(side // 128), HADAMARD) for side in (k, n)]
        made = suh[:, None].astype(float) * (rotations[0] @ inner @ rotations[1]) * svh.astype(float)
        tensors = {
            "trellis": torch.from_numpy(words.astype(np.uint16).view(np.int16)),
            "suh": torch.from_numpy(suh),
            "svh": torch.from_numpy(svh),
        }
        if rule != "3inst":
            multiplier = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[rule]
            tensors[rule] = torch.tensor(multiplier - (1 << 32), dtype=torch.int32)
        return tensors, torch.from_numpy(made.T[: w.shape[0], : w.shape[1]].copy()).float()

    section = {"quant_method": "exl3", "version": "1.4.1", "bits": float(bits), "head_bits": 6, "codebook": rule}
    return Layout(section, write)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of sides that are filled up, and of one that is not."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16}
    return make_checkpoint("llama", tmp_path_factory.mktemp("plain"), dtype=torch.bfloat16, **sizes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_walk_gives_its_values(layout: str, original: Path, tmp_path: Path) -> None:
    """Within what fp32 rounds of a rotation. It was refused, as no method that is known."""
    coded, plain = quantised_checkpoints(original, tmp_path, exl3(*LAYOUTS[layout]))
    checkpoint = opened(coded)
    for name, values in load_file(plain / "model.safetensors").items():
        got = checkpoint.tensor(name, *values.shape)
        torch.testing.assert_close(got.read().float(), values.float(), rtol=0, atol=2e-6 * float(values.abs().max()))
        if values.ndim == 2 and name.endswith("proj.weight"):
            assert torch.equal(got.part(slice(3, None, 5), 40), got.read()[3::5, :40])


@pytest.mark.native
def test_the_kernels_have_its_values_in_16_bits(
    original: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_in_use(*quantised_checkpoints(original, tmp_path, exl3(4, "mul1")), None, caplog)


def test_a_head_of_its_own_bits_is_read_beside_the_embedding(original: Path, tmp_path: Path) -> None:
    """Its program quantises the head of a tied model, and leaves what the config says."""
    coded, plain = quantised_checkpoints(original, tmp_path, exl3(3, "mcg"))
    embedding = load_file(plain / "model.safetensors")["model.embed_tokens.weight"]
    parts, values = exl3(6, "mcg").write(embedding.float())
    for path, beside in (
        (coded, {f"lm_head.{name}": one for name, one in parts.items()}),
        (plain, {"lm_head.weight": values}),
    ):
        tensors = {name: one for name, one in load_file(path / "model.safetensors").items() if name != "lm_head.weight"}
        save_file(tensors | beside, path / "model.safetensors", metadata={"format": "pt"})
        config = read_json(path / "config.json")
        (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    wanted = logits_of(plain, backend="torch", weights="fp32")
    torch.testing.assert_close(logits_of(coded, backend="torch", weights="fp32"), wanted, rtol=0, atol=1e-4)


def test_projections_that_its_program_takes_apart_are_read(tmp_path: Path) -> None:
    """Phi-3's q, k and v lie in one matrix, and gate and up in one; in its files each is one of its own."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16}
    original = make_checkpoint("phi3", tmp_path / "original", dtype=torch.bfloat16, **sizes)
    tensors = load_file(original / "model.safetensors")
    config = read_json(original / "config.json")
    n_kv = config["num_key_value_heads"] * 16
    layer, apart = "model.layers.0.", dict(tensors)
    q, k, v = apart.pop(f"{layer}self_attn.qkv_proj.weight").split([config["num_attention_heads"] * 16, n_kv, n_kv])
    gate, up = apart.pop(f"{layer}mlp.gate_up_proj.weight").split(96)
    apart |= {f"{layer}self_attn.{name}_proj.weight": one.clone() for name, one in (("q", q), ("k", k), ("v", v))}
    apart |= {f"{layer}mlp.{name}_proj.weight": one.clone() for name, one in (("gate", gate), ("up", up))}
    save_file(apart, original / "model.safetensors", metadata={"format": "pt"})
    coded, plain = quantised_checkpoints(original, tmp_path / "made", exl3(4, "mcg"))
    values = load_file(plain / "model.safetensors")
    qkv = [values.pop(f"{layer}self_attn.{name}_proj.weight") for name in "qkv"]
    gate_up = [values.pop(f"{layer}mlp.{name}_proj.weight") for name in ("gate", "up")]
    stacked = {
        f"{layer}self_attn.qkv_proj.weight": torch.cat(qkv),
        f"{layer}mlp.gate_up_proj.weight": torch.cat(gate_up),
    }
    save_file(values | stacked, plain / "model.safetensors", metadata={"format": "pt"})
    wanted = logits_of(plain, backend="torch", weights="fp32")
    torch.testing.assert_close(logits_of(coded, backend="torch", weights="fp32"), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{DOWN}suh"), r"suh is missing; shape \[128\]"),
        (lambda t: t.update({f"{DOWN}svh": t[f"{DOWN}svh"][:64].clone()}), r"svh is F16 \[64\]; F16 \[128\]"),
        (lambda t: t[f"{DOWN}svh"].fill_(float("nan")), "svh has a number that is not finite"),
        (lambda t: t[f"{DOWN}mcg"].fill_(7), r"mcg is \[7\]; 0xcbac1fed can be read"),
        (lambda t: t.update({f"{DOWN}trellis": t[f"{DOWN}trellis"].repeat(1, 1, 5)}), "steps of 1 to 8 bits are expected"),
        (lambda t: t.update({f"{DOWN}trellis": t[f"{DOWN}trellis"][1:].clone()}), r"trellis is I16 \[7, 8, 32\]"),
    ],
)  # fmt: skip
def test_damaged_walks_are_refused(
    change: Callable[[Tensors], object], message: str, original: Path, tmp_path: Path
) -> None:
    coded, _ = quantised_checkpoints(original, tmp_path, exl3(2, "mcg"))
    damaged(coded, change)
    with pytest.raises(LoadError, match=message):
        logits_of(coded, backend="torch", weights="fp32")
