"""A text read before packing finds channels that are large where no weight says so."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from checkpoints import make_checkpoint
from diptych.cli.quantize import app
from diptych.compute.loading.calibration import DIRECTIONS, measured_inputs
from diptych.compute.loading.quant import save_quantised
from diptych.compute.loading.weights import Checkpoint
from diptych.compute.model import Blueprint, draw_blueprint
from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.compute.ops.cpu.handles import native_shape
from diptych.compute.ops.cpu.loader import CpuLoader
from diptych.compute.runner import load_model
from diptych.engine.load import bundled_dir
from diptych.engine.phases import TwoPhase
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError
from stepping import Stepper

MODEL = bundled_dir("diptych-1m-draft")
TEXT = bundled_dir("heldout.txt").read_text(encoding="utf-8")[:6000]
LARGE = 60.0


@pytest.fixture(scope="module")
def tilted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft model, in fp32, with two channels of the residual stream that are large whatever the text."""
    folder = tmp_path_factory.mktemp("tilted") / "model"
    folder.mkdir()
    for path in MODEL.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = {name: tensor.float() for name, tensor in load_file(MODEL / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][:, [5, 77]] += LARGE * tensors["model.embed_tokens.weight"].std()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((MODEL / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def windows() -> list[list[int]]:
    ids = Tokenizer.from_dir(MODEL).encode(TEXT)[:384]
    return [ids[start : start + 128] for start in range(0, len(ids), 128)]


def logprobs(path: Path, **settings: str) -> torch.Tensor:
    """Of a text that was not measured on."""
    ids = Tokenizer.from_dir(MODEL).encode(TEXT)[400:600]
    with TwoPhase(str(path), kv="fp32" if "weights" in settings else "bf16", **settings) as phases:
        return torch.log_softmax(phases.logits_at_every_position(ids).double(), dim=-1)


def test_sizes_are_those_that_transformers_sees() -> None:
    """The oracle: hooks before the very projections."""
    own = windows()
    found = measured_inputs(draw_blueprint(json.loads((MODEL / "config.json").read_text()), Checkpoint(MODEL)), own)
    model = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    squares: dict[str, list[torch.Tensor]] = {}

    def watch(name: str, module: torch.nn.Module) -> None:
        rows = squares.setdefault(name, [])
        module.register_forward_pre_hook(lambda _, given: rows.append(given[0][0].square()))

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            watch("model.embed_tokens.weight" if name == "lm_head" else f"{name}.weight", module)  # tied
    with torch.no_grad():
        for window in own:
            model(torch.tensor([window]))
    assert found.keys() == squares.keys()
    for name, rows in squares.items():
        squares_of_row = torch.cat(rows)
        expected = (
            (squares_of_row / squares_of_row.mean(-1, keepdim=True)).mean(0).sqrt()
        )  # each row has a scale of its own
        assert (found[name] - expected).norm() < 0.02 * expected.norm(), name  # to a 32nd of an octave


def test_directions_hold_as_much_as_any_could() -> None:
    """The oracle: rows that hooks of transformers see, and their singular values."""
    own, n = windows(), 24
    found = measured_inputs(
        draw_blueprint(json.loads((MODEL / "config.json").read_text()), Checkpoint(MODEL)), own, n_directions=n
    )
    model = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for name in ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"):
        rows: list[torch.Tensor] = []
        hook = model.get_submodule(name).register_forward_pre_hook(lambda _, given, rows=rows: rows.append(given[0][0]))
        with torch.no_grad():
            for window in own:
                model(torch.tensor([window]))
        hook.remove()
        x = torch.cat(rows).double()
        x = x / x.square().mean(-1, keepdim=True).sqrt()
        directions = found[f"{name}.weight"][1:].double()
        assert directions.shape == (n, x.shape[1])
        values, right = torch.linalg.svd(x, full_matrices=False)[1:]
        held = directions.square().sum()
        assert held > 0.98 * values[:n].square().sum()
        assert (directions @ right[: 2 * n].T).square().sum() > 0.98 * held  # they are directions of the rows


@pytest.mark.native
def test_int4_takes_back_what_rounding_took_where_a_text_lies(tmp_path: Path) -> None:
    """Of a text that was not measured on."""
    exact = logprobs(MODEL, backend="torch", weights="fp32")
    cost = []
    for n in (0, DIRECTIONS["int4"]):
        measure = partial(measured_inputs, windows=windows(), n_directions=n)
        save_quantised(MODEL, tmp_path / str(n), weights="int4", measure=measure)
        got = logprobs(tmp_path / str(n), backend="cpu")
        cost.append(float((exact.exp() * (exact - got)).sum(-1).mean()))
    assert cost[1] < 0.9 * cost[0]


@pytest.mark.native
def test_feedback_has_the_same_bytes_in_every_set_and_cut() -> None:
    """Each output is rounded by itself, and by the scalar set's arithmetic."""
    blueprint = draw_blueprint(json.loads((MODEL / "config.json").read_text()), Checkpoint(MODEL))
    measured = measured_inputs(blueprint, windows(), n_directions=DIRECTIONS["int4"])

    def packed(instruction_set: str, threads: int, *, is_fed: bool = True) -> list[bytes]:
        checkpoint = Checkpoint(MODEL)
        checkpoint.measured = measured if is_fed else {name: one[:1] for name, one in measured.items()}
        config = ComputeConfig(backend="cpu", weights="int4", threads=threads, instruction_set=instruction_set)
        loader = CpuLoader(config, checkpoint)
        draw_blueprint(json.loads((MODEL / "config.json").read_text()), checkpoint).load(loader)
        return [loader.program.packed_blob(index).tobytes() for index in loader.packer.packed.values()]

    scalar = packed("scalar", 1)
    assert all(packed(one, 2) == scalar for one in cpu_kernels.instruction_sets())
    assert packed("scalar", 1, is_fed=False) != scalar


@pytest.mark.native
def test_directions_of_another_size_are_refused() -> None:
    shape = native_shape("int4", 16, 64)
    program = CpuLoader(ComputeConfig(backend="cpu", weights="int4", threads=1), Checkpoint(MODEL)).program
    for directions in (np.ones((65, 64), np.float32), np.ones((2, 63), np.float32)):
        with pytest.raises(ValueError, match="at most 64 by k"):
            program.add_linear(shape, [np.ones((16, 64), np.float32)], None, directions)


@pytest.mark.native
@pytest.mark.parametrize(("weights", "most"), [("int8", 0.5), ("int4", 0.75)])
def test_channels_that_no_weight_tells_cost_less(tilted: Path, tmp_path: Path, weights: str, most: float) -> None:
    """SmolLM2-135M lost 0.047 nats in int8: its norms are small where channels are large, which the weights misread."""
    exact = logprobs(tilted, backend="torch", weights="fp32")
    cost = []
    for name, measure in (("by weights", None), ("by text", partial(measured_inputs, windows=windows()))):
        save_quantised(tilted, tmp_path / name, weights=weights, measure=measure)
        got = logprobs(tmp_path / name, backend="cpu")
        cost.append(float((exact.exp() * (exact - got)).sum(-1).mean()))
    assert cost[1] < most * cost[0]


@pytest.mark.native
@pytest.mark.parametrize("family", ["phi3", "gemma2", "mixtral", "falcon_h1", "nemotron_h", "lfm2", "opt"])
def test_every_family_is_still_itself(family: str, tmp_path: Path) -> None:
    """A factor from the wrong place, or put on one side alone, would give another model. All experts are asked: what another
    number chooses would say little of this.
    """
    chosen = {"num_experts_per_tok": 4} if family == "mixtral" else {}
    path = make_checkpoint(family, tmp_path / "plain", dtype=torch.bfloat16, **chosen)
    generator = torch.Generator().manual_seed(0)
    prompt, *others = (torch.randint(160, (48,), generator=generator).tolist() for _ in range(3))
    seen: dict[str, torch.Tensor] = {}

    def measure(blueprint: Blueprint) -> dict[str, torch.Tensor]:
        seen.update(measured_inputs(blueprint, others))
        return seen

    save_quantised(path, tmp_path / "packed", weights="int8", threads=1, measure=measure)
    assert len(seen) > 4
    assert all(sizes.isfinite().all() for sizes in seen.values())
    reference, found = (logits_of(one, prompt, kv) for one, kv in ((path, "fp32"), (tmp_path / "packed", "bf16")))
    assert (found - reference).norm() < 0.1 * reference.norm()


def logits_of(path: Path, prompt: list[int], kv: str) -> torch.Tensor:
    """fp32 by torch where the cache is."""
    settings = {"backend": "torch", "device": "cpu", "weights": "fp32"} if kv == "fp32" else {"backend": "cpu"}
    model = load_model(path, ComputeConfig(kv=kv, threads=1, **settings))
    logits = Stepper(model).prefill("it", prompt, chunk=None)
    model.close()
    return logits.double()


@pytest.mark.native
def test_the_command_reads_the_text_that_it_names(tilted: Path, tmp_path: Path) -> None:
    """The folder differs from one that was packed without, and what cannot be read is said."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")

    def packed(name: str, *options: str) -> bytes:
        result = CliRunner().invoke(app, [str(tilted), "-o", str(tmp_path / name), *options], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return (tmp_path / name / "model.safetensors").read_bytes()

    assert packed("plain") == packed("again")
    assert packed("calibrated", "--calibrate", str(text)) != packed("plain-too")
    with pytest.raises(ConfigError, match="cannot read the text"):
        packed("none", "--calibrate", str(tmp_path / "nowhere.txt"))
    text.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="0 tokens"):
        packed("empty", "--calibrate", str(text))
    assert not (tmp_path / "empty").exists()
