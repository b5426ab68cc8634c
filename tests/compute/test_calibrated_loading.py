"""int8 and int4 made when a model is loaded are balanced by a text that it reads first."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_packed_cache import AtOnce, entries

from checkpoints import make_checkpoint
from diptych.compute import runner
from diptych.compute.loading import balance, packed_cache
from diptych.compute.loading.calibration import Calibration, measured_inputs, received, sent
from diptych.compute.loading.quant import save_quantised
from diptych.compute.model import Model
from diptych.compute.ops.contract import WeightTensor
from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.compute.runner import load_model, open_blueprint
from diptych.engine.load import bundled_dir
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import CapacityError, ConfigError, LoadError
from gguf_files import gguf_reference, write_gguf
from stepping import Stepper
from thread_ranks import ThreadRanks

MODEL = bundled_dir("diptych-1m-draft")
TEXT = bundled_dir("calibration.txt").read_text(encoding="utf-8")
native = pytest.mark.skipif(not cpu_kernels.is_available()[0], reason=cpu_kernels.is_available()[1])
INT8 = ComputeConfig(backend="cpu", weights="int8", threads=1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder, in which even small models are kept."""
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(packed_cache, "CALIBRATED_BYTES", 0)
    monkeypatch.setattr(packed_cache, "Thread", AtOnce)
    return tmp_path / "home" / "packed"


def windows() -> list[list[int]]:
    return [Tokenizer.from_dir(MODEL).encode(one)[:24] for one in TEXT.split("\n\n\n")]


def calibration(
    read: Callable[[], Sequence[Sequence[int]]] = windows, *, name: str = "a text", **fields: object
) -> Calibration:
    return Calibration(name=name, windows=read, **fields)


def measured(path: Path, own: Sequence[Sequence[int]], **settings: int) -> dict[str, torch.Tensor]:
    return measured_inputs(open_blueprint(path, INT8).blueprint, own, **settings)


def random_windows(*lengths: int, vocab: int = 160) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


def logits(model: Model) -> torch.Tensor:
    return Stepper(model).prefill("it", list(range(3, 40)), chunk=None)


def test_sizes_do_not_depend_on_threads_or_neighbours() -> None:
    """Packed weights, and what keys of other engines stand for, would depend on them. A window sees no other one."""
    own = windows()
    one, several = (measured(MODEL, own, threads=n) for n in (1, 3))
    assert one.keys() == several.keys()
    assert all(torch.equal(one[name], several[name]) for name in one)
    first, turned = (measured(MODEL, some, threads=1) for some in (own, own[::-1]))
    assert all((first[name].log2() - turned[name].log2()).abs().max() <= 1 / 32 for name in first)


@native
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe", "zamba2", "gemma3n", "qwen4_exp"])
def test_whatever_is_balanced_between_neighbours_was_measured(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that lie in stacks were balanced by their weights though a text was read."""
    path = make_checkpoint(family, tmp_path / "model", dtype=torch.bfloat16)
    by_weights: list[str] = []
    plain = balance._measured

    def watched(tensors: Sequence[WeightTensor]) -> torch.Tensor | None:
        found = plain(tensors)
        by_weights.extend(tensor.name for tensor in tensors if found is None)
        return found

    monkeypatch.setattr(balance, "_measured", watched)
    load_model(path, INT8, calibration=calibration(lambda: random_windows(60, 40), is_asked=True)).close()
    assert not by_weights


def test_a_channel_that_was_quiet_is_not_taken_for_none(tmp_path: Path) -> None:
    """Of a ReLU many are zero over a short text: divided by next to nothing, one that spoke later took all levels."""
    path = make_checkpoint("opt", tmp_path / "model", dtype=torch.float32)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.0.fc1.bias"))
    tensors[name][:3] = -1e4
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    found = measured(path, random_windows(60))
    (sizes,) = found[name.replace("fc1.bias", "fc2.weight")]
    assert sizes.min() > 0.1 * sizes.median()
    assert torch.equal(sizes[:3], sizes.min().expand(3))


def test_the_same_model_in_gguf_has_the_same_sizes(tmp_path: Path) -> None:
    """GGUF files could not be calibrated. Their tensors have other names, orders and types, and are asked for by ours."""
    reference = gguf_reference("llama", num_hidden_layers=2)
    reference.save_pretrained(str(tmp_path / "folder"))
    file = write_gguf(reference, tmp_path / "model.gguf")
    own = random_windows(50, 30)
    there, here = measured(tmp_path / "folder", own), measured(file, own)
    assert here.keys() == there.keys()
    assert len(here) > 10
    for name, sizes in here.items():
        assert (sizes.log2() - there[name].log2()).abs().max() <= 1 / 32, name


def test_an_encoder_reads_both_ways(tmp_path: Path) -> None:
    """What a token's projections meet depends on the tokens behind it."""
    path = make_checkpoint("mistral", tmp_path / "model", is_causal=False, sliding_window=None)
    own = random_windows(12)
    whole = measured(path, own)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"is_causal": True}))
    causal = measured(path, own)
    assert any(not torch.equal(whole[name], causal[name]) for name in whole)


def test_code_that_a_folder_brings_along_changes_nothing(tmp_path: Path) -> None:
    """Models that write have some, too; only who makes vectors of one has to know whether it attends both ways."""
    path = make_checkpoint("llama", tmp_path / "model")
    own = random_windows(30)
    before = measured(path, own)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}))
    after = measured(path, own)
    assert before.keys() == after.keys()
    assert all(torch.equal(sizes, after[name]) for name, sizes in before.items())


@native
@pytest.mark.parametrize("is_gguf", [False, True])
def test_a_text_is_read_once(is_gguf: bool, tmp_path: Path, folder: Path) -> None:
    """The second start has the bits of the first, and of no other text's; who wants none has another entry."""
    if is_gguf:
        path = write_gguf(gguf_reference("llama", num_hidden_layers=2), tmp_path / "model.gguf")
    else:
        path = make_checkpoint("llama", tmp_path / "model", dtype=torch.bfloat16)
    reads: list[int] = []

    def read() -> list[list[int]]:
        reads.append(1)
        return random_windows(60)

    first = load_model(path, INT8, calibration=calibration(read))
    second = load_model(path, INT8, calibration=calibration(read))
    assert len(reads) == 1
    assert len(entries(folder)) == 1
    assert torch.equal(logits(first), logits(second))
    assert first.revision == second.revision
    other = load_model(path, INT8, calibration=calibration(lambda: random_windows(9, 80)[1:], name="another"))
    plain = load_model(path, INT8)
    for one in (other, plain):
        assert not torch.equal(logits(first), logits(one))
        assert one.revision != first.revision, "keys of one would be taken for the other's"


@native
def test_loading_and_packing_give_the_same_weights(tmp_path: Path) -> None:
    """A folder that was packed elsewhere answers as the model here does."""
    path = make_checkpoint("qwen3_moe", tmp_path / "model", dtype=torch.bfloat16)
    own = random_windows(60)
    save_quantised(path, tmp_path / "packed", weights="int8", measure=lambda one: measured_inputs(one, own, threads=2))
    loaded = load_model(path, INT8, calibration=calibration(lambda: own))
    packed = load_model(tmp_path / "packed", ComputeConfig(backend="cpu", threads=1))
    assert torch.equal(logits(loaded), logits(packed))


@native
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_all_ranks_have_the_numbers_of_the_first(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would read the text by itself, and on other processors come to other bits."""
    config = replace(INT8, weights=weights)
    path = make_checkpoint("mixtral", tmp_path / "model", dtype=torch.bfloat16)
    reads: list[int] = []

    def read() -> list[list[int]]:
        reads.append(1)
        return random_windows(60)

    one = load_model(path, config, calibration=calibration(read))
    monkeypatch.setattr(runner, "Ranks", ThreadRanks)
    ranks = load_model(path, replace(config, tp=2, threads=2), calibration=calibration(read))
    assert ranks.revision == one.revision
    assert torch.equal(logits(one), logits(ranks))
    ranks.close()
    assert len(reads) == 2
    assert one.revision != load_model(path, config).revision


def test_what_is_sent_to_ranks_comes_back() -> None:
    """Projections of one input share its numbers."""
    both = torch.tensor([[1.0, 0.5, 2.0], [-1.0, 0.0, 3.0]])  # with a direction
    found = {"q": both, "k": both, "down": torch.tensor([[0.25]])}
    head, payload = sent(found)
    assert len(payload) == 28
    back = received(json.loads(json.dumps(head)), payload)
    assert list(back) == list(found)
    assert all(torch.equal(back[name], sizes) for name, sizes in found.items())
    assert received(*sent({})) == {}


def no_words() -> list[list[int]]:
    raise LoadError("there is no tokenizer.json")


@native
@pytest.mark.parametrize(
    ("own", "why"),
    [
        (calibration(no_words), "there is no tokenizer.json"),
        (calibration(lambda: [[3, 160]]), "has token 160; the model has 160"),
        (calibration(lambda: random_windows(60), most_bytes=1000), "of memory; 1000 may be used"),
        (calibration(lambda: [[]]), "0 tokens"),
    ],
)
def test_where_no_text_can_be_read_the_weights_decide(
    own: Calibration, why: str, tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says so; who named the text hears of it."""
    path = make_checkpoint("llama", tmp_path / "model", dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING, "diptych.compute"):
        found = load_model(path, INT8, calibration=own)
    assert why in caplog.text
    assert torch.equal(logits(found), logits(load_model(path, INT8)))
    assert not entries(folder), "it would be taken for one that was calibrated"
    with pytest.raises((CapacityError, ConfigError, LoadError), match=why):
        load_model(path, INT8, calibration=replace(own, is_asked=True))


@native
def test_only_what_is_balanced_reads_a_text(tmp_path: Path) -> None:
    """bf16, blocks and what was packed before have nothing to learn."""
    path = make_checkpoint("llama", tmp_path / "model", dtype=torch.bfloat16)
    save_quantised(path, tmp_path / "packed", weights="int8")
    asked = calibration(lambda: pytest.fail("read"), is_asked=True)
    for weights in ("bf16", "q8_0"):
        load_model(path, replace(INT8, weights=weights), calibration=asked).close()
    with pytest.raises(ConfigError, match="is packed already"):
        load_model(tmp_path / "packed", replace(INT8, weights="auto"), calibration=asked)
    load_model(tmp_path / "packed", replace(INT8, weights="auto"), calibration=replace(asked, is_asked=False)).close()
