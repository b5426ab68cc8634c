"""What `diptych lab quality` says of formats: against a plain computation, for files with codes, and within memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from coded_files import gptq, quantised_checkpoints
from diptych.cli import lab
from diptych.cli.lab import app
from diptych.cli.tables import LEAST_COLUMNS
from diptych.engine.load import bundled_dir
from diptych.engine.phases import TwoPhase
from diptych.ground.config import EngineConfig
from diptych.ground.errors import CapacityError, ConfigError
from diptych.lab import quality
from diptych.lab.quality import measure_quality

MODEL = bundled_dir("diptych-1m-draft")
TEXT = bundled_dir("heldout.txt").read_text(encoding="utf-8")[:2000]
TOKENS = 96

pytestmark = pytest.mark.native


def test_rows_say_what_a_plain_computation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users choose formats by these three numbers; here they are computed once more, without the module."""
    monkeypatch.setattr(quality, "WINDOW_TOKENS", 64)
    monkeypatch.setattr(quality, "PIECE_VALUES", 10 * 4096)  # of a vocabulary of 4,096
    rows = measure_quality(str(MODEL), TEXT, config=EngineConfig(), n_tokens=TOKENS)
    assert [(row.weights, row.activations, row.kv) for row in rows] == [
        ("fp32", None, "fp32"),
        *((weights, None, "bf16") for weights in ("bf16", "q8_0", "int8", "int4")),
        ("bf16", None, "int8"),
        ("bf16", None, "int8x8"),
        ("bf16", None, "fp8"),
    ]
    logprobs = []
    for settings in ({"backend": "torch", "weights": "fp32", "kv": "fp32"}, {"backend": "cpu", "weights": "int4"}):
        with TwoPhase(str(MODEL), **settings) as phases:
            ids = phases.encode(TEXT)[:TOKENS]
            both = [phases.logits_at_every_position(window)[:-1] for window in (ids[:64], ids[64:])]
            logprobs.append(torch.log_softmax(torch.cat(both).double(), dim=-1))
    exact, got = logprobs
    targets = torch.tensor(ids[1:64] + ids[65:])
    (int4,) = [row for row in rows if row.weights == "int4"]
    assert int4.tokens == len(targets) == TOKENS - 2
    assert int4.kl_nats == pytest.approx(float((exact.exp() * (exact - got)).sum(-1).mean()), rel=1e-3)
    assert int4.same_token == pytest.approx(float((exact.argmax(-1) == got.argmax(-1)).double().mean()))
    assert int4.perplexity == pytest.approx(float(torch.nn.functional.nll_loss(got, targets).exp()), rel=1e-6)
    assert rows[0].kl_nats == pytest.approx(0.0, abs=1e-6)
    assert rows[0].same_token == 1.0
    assert int4.kl_nats > 10 * next(row.kl_nats for row in rows if row.weights == "bf16") > 0


def test_a_model_of_few_positions_is_read_in_windows_of_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused for a context of 512 that nobody had asked for, and that no option changes."""
    shutil.copytree(MODEL, tmp_path / "short")
    config = json.loads((MODEL / "config.json").read_text()) | {"max_position_embeddings": 40}
    (tmp_path / "short" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(quality, "FORMATS", (quality.BF16,))
    rows = measure_quality(str(tmp_path / "short"), TEXT, config=EngineConfig(), n_tokens=90)
    assert [row.tokens for row in rows] == [87, 87], "two windows of 40 and one of 10, without the first of each"


def test_a_file_with_codes_has_rows_of_its_own(tmp_path: Path) -> None:
    """They were left out, so that the format that such a file is served in by default could not be judged."""
    coded, _ = quantised_checkpoints(MODEL, tmp_path, gptq(8, 32, symmetric=True))
    rows = measure_quality(str(coded), TEXT, config=EngineConfig(), n_tokens=TOKENS)
    own = {row.activations: row for row in rows if row.weights == "file"}
    assert list(own) == ["int8", "int15"]
    assert 0 < own["int15"].kl_nats < own["int8"].kl_nats


def test_a_reference_that_memory_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 262,144 made it 17 GB, and the system ended the process."""
    monkeypatch.setattr(quality, "REFERENCE_SHARE", 0.0)
    with pytest.raises(CapacityError, match=r"of 96 tokens takes 0\.0 GiB") as told:
        measure_quality(str(MODEL), TEXT, config=EngineConfig(), n_tokens=TOKENS)
    assert "--tokens" in str(told.value.hint)


def test_a_text_of_nothing_is_refused() -> None:
    """There is nothing to predict."""
    with pytest.raises(ConfigError, match="at least 2"):
        measure_quality(str(MODEL), "", config=EngineConfig())


def test_the_command_prints_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table and the JSON are all that a user sees of it."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    asked = ["quality", "--model", str(MODEL), "--text", str(path), "--tokens", "40"]
    rows = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)
    assert {row["tokens"] for row in rows} == {39}
    assert rows[0]["same_token"] == 1.0
    monkeypatch.setattr(lab, "page", lambda: Console(width=LEAST_COLUMNS, soft_wrap=True))  # as on such a terminal
    lines = CliRunner().invoke(app, asked).output.splitlines()
    assert max(map(len, lines)) <= LEAST_COLUMNS  # it had 87
    table = " ".join(" ".join(lines).split())
    assert "same token" in table
    assert "39 tokens of text.txt" in table
    assert "-0.000000" not in table, "of fp32 to itself: rounding may leave a last bit below nothing"
