"""Drafters and GGUF files: a draft model that is one, and heads for a model that is one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.test_drafters import counts
from tests.engine.test_gguf_model import write_bundled
from tests.engine.test_speculation import said, unpriced

from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.engine.drafters import open_drafters
from diptych.engine.llm import LLM
from diptych.engine.load import LoadedModel, bundled_dir, load
from diptych.ground.config import ComputeConfig, EngineConfig, engine_config
from diptych.ground.errors import ConfigError
from diptych.ground.request import SamplingParams

pytestmark = pytest.mark.native

ALONE = EngineConfig(compute=ComputeConfig(threads=1))
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PROMPTS = ["Once upon a time there was a little girl who", "The capital of France is"]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    if not cpu_kernels.is_available()[0]:
        pytest.skip(cpu_kernels.is_available()[1])


@pytest.fixture(scope="module")
def folder() -> LoadedModel:
    return load("bundled", ALONE)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def file(directory: Path) -> LoadedModel:
    """The bundled model as a GGUF file of 8-bit blocks."""
    return load(str(write_bundled(directory / "model.gguf", "Q8_0")), ALONE)


def drafted(model: LoadedModel, kind: str, draft: Path) -> tuple[int, int]:
    """(drafted, accepted) tokens; the answers are those without."""
    wanted = LLM(model).generate(PROMPTS, PARAMS)
    llm = unpriced(LLM(model, speculate=kind, draft_model=str(draft), max_draft_tokens=4))
    got = llm.generate(PROMPTS, PARAMS)
    assert [said(done) for done in got] == [said(done) for done in wanted]
    return counts(got)


def test_a_draft_model_may_be_a_gguf_file(folder: LoadedModel, file: LoadedModel, directory: Path) -> None:
    """`draft` said that a file is no folder; its guesses are those of the same numbers in a folder."""
    draft = write_bundled(directory / "draft.gguf", "BF16", name="diptych-1m-draft")
    told = drafted(folder, "draft", draft)
    assert told == drafted(folder, "draft", bundled_dir("diptych-1m-draft"))
    assert told[1] > 15
    assert drafted(file, "draft", draft)[1] > 15


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_draft_for_a_model_in_a_gguf_file(folder: LoadedModel, file: LoadedModel, kind: str) -> None:
    """They read embedding, norm and output head out of the blocks, and are right about as often as in the folder."""
    heads = bundled_dir(f"diptych-10m-{kind}")
    accepted = drafted(folder, kind, heads)[1]
    assert drafted(file, kind, heads)[1] > 0.8 * accepted > 10


def test_other_words_in_a_gguf_file_are_refused(folder: LoadedModel, directory: Path) -> None:
    """The same check as of a folder."""
    draft = write_bundled(directory / "other.gguf", "BF16", name="diptych-1m-draft", swapped=700)
    config = engine_config(EngineConfig(), speculate="draft", draft_model=str(draft))
    with pytest.raises(ConfigError, match=r"differs in 2 of 4096 tokens: id 700 is"):
        open_drafters(config, folder.model, tokenizer=folder.tokenizer)


def test_heads_in_a_gguf_file_are_refused(file: LoadedModel) -> None:
    """No layout of heads in GGUF is known here; the model may be one."""
    config = engine_config(EngineConfig(), speculate="medusa", draft_model=str(file.directory))
    with pytest.raises(ConfigError, match="heads are read from safetensors"):
        open_drafters(config, file.model, directory=file.directory, tokenizer=file.tokenizer)
