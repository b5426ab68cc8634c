"""Which text is read where weights are made int8 or int4: one that ships, one that is named, or none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from diptych.cli import bench, generate, lab, quantize
from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.engine.calibration_text import BETWEEN_PASSAGES, SHIPPED, calibration_of
from diptych.engine.llm import LLM
from diptych.engine.load import bundled_dir, load
from diptych.engine.phases import TwoPhase
from diptych.engine.text.words import tokenizer_of
from diptych.ground.config import EngineConfig, engine_config
from diptych.ground.errors import ConfigError

native = pytest.mark.skipif(not cpu_kernels.is_available()[0], reason=cpu_kernels.is_available()[1])
MODEL = str(bundled_dir("diptych-1m-draft"))
INT8 = {"backend": "cpu", "weights": "int8", "threads": 1, "max_context_tokens": 64}


def logits(model: str, **settings: object) -> torch.Tensor:
    config = engine_config(**{**INT8, **settings})
    with TwoPhase(load(model, config), config) as phases:
        return phases.logits_at_every_position(list(range(10, 40))).clone()


def test_the_text_that_ships_is_no_text_that_quality_is_measured_with() -> None:
    """Else tables would flatter int8 and int4. Each passage of it is read."""
    passages = SHIPPED.read_text(encoding="utf-8").strip().split(BETWEEN_PASSAGES)
    held_out = bundled_dir("heldout.txt").read_text(encoding="utf-8")
    lines = [line for passage in passages for line in passage.splitlines() if len(line) > 20]
    assert not [line for line in lines if line in held_out]
    found = calibration_of("auto", lambda: tokenizer_of(bundled_dir()))
    assert found.windows is not None
    windows = found.windows()
    assert len(windows) == len(passages) > 10
    assert 200 < sum(map(len, windows)) < 400


@native
def test_one_that_ships_is_read_where_nobody_says_otherwise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A named one gives other numbers, and so does none; the second start of each is the first."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    with caplog.at_level(logging.INFO, "diptych.compute"):
        own = logits(MODEL)
    assert "calibrated text=" in caplog.text
    named, none = (logits(MODEL, calibrate=one) for one in (str(text), "weights"))
    assert torch.equal(own, logits(MODEL, calibrate="auto"))
    assert not torch.equal(own, none)
    assert not torch.equal(own, named)
    assert not torch.equal(named, none)


@native
def test_packing_reads_what_loading_does(tmp_path: Path) -> None:
    """A folder of `diptych quantize` answers as the checkpoint does that is loaded in its format; it has its text behind it."""
    for calibrate in ("auto", "weights"):
        folder = str(tmp_path / calibrate)
        told = CliRunner().invoke(quantize.app, [MODEL, "-o", folder, "--calibrate", calibrate], catch_exceptions=False)
        assert told.exit_code == 0, told.output
        assert torch.equal(logits(folder, weights="auto"), logits(MODEL, calibrate=calibrate))
    text = tmp_path / "text.txt"
    text.write_text("A text.", encoding="utf-8")
    for named in (str(text), "weights"):
        with pytest.raises(ConfigError, match="is packed already"):
            LLM(folder, **{**INT8, "calibrate": named})  # type: ignore[arg-type]


@native
def test_a_draft_model_reads_it_too(caplog: pytest.LogCaptureFixture) -> None:
    """It is loaded as its model is."""
    with caplog.at_level(logging.INFO, "diptych.compute"):
        llm = LLM("bundled", **INT8, speculate="draft")  # type: ignore[arg-type]
        llm.loaded.model.close()
    assert caplog.text.count("calibrated text=") == 2


@pytest.mark.parametrize("weights", ["auto", "bf16", "q8_0", "file"])
def test_what_nobody_would_read_is_refused(weights: str) -> None:
    """An option is honoured or refused."""
    for calibrate in ("weights", "some.txt"):
        with pytest.raises(ConfigError, match=f"calibrate is '{calibrate}', and weights is '{weights}'"):
            engine_config(weights=weights, calibrate=calibrate)
    with pytest.raises(ConfigError, match="it must be auto, weights or a text's path"):
        EngineConfig(calibrate="")


@native
def test_a_text_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Before anything is loaded."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfa")
    for name in ("nowhere", "bytes", "."):
        with pytest.raises(ConfigError, match="cannot read the text in"):
            load(MODEL, engine_config(**INT8, calibrate=str(tmp_path / name)))
    loaded = load(MODEL, engine_config(**INT8))
    with pytest.raises(ConfigError, match="calibrate is set, but the model is already loaded"):
        LLM(loaded, engine_config(weights="int8"), calibrate="weights")


@pytest.mark.parametrize(
    ("app", "arguments", "words"),
    [
        (bench.app, ["--shape", "llama-1b", "--weights", "int8", "--calibrate", "weights"], "has random weights"),
        (lab.app, ["--quick", "--weights", "int8", "--calibrate", "weights"], "has random weights"),
        (generate.app, ["The", "--calibrate", "some.txt"], "calibrate is 'some.txt', and weights is 'auto'"),
        (lab.app, ["--calibrate", "weights"], "calibrate is 'weights', and weights is 'auto'"),
    ],
)
def test_commands_refuse_it_where_it_means_nothing(app: object, arguments: list[str], words: str) -> None:
    """Random weights have nothing to learn."""
    told = CliRunner().invoke(app, arguments)  # type: ignore[arg-type]
    assert isinstance(told.exception, ConfigError), told.output
    assert words in str(told.exception)
