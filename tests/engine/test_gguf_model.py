"""A GGUF file as the only thing a user gives: `generate`, `LLM`, `plan`, whole or split, and files that lie."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from tests.checkpoints import make_reference
from tests.gguf_files import write_gguf

from diptych.cost.parameters import parameter_count
from diptych.cost.setup import find_model
from diptych.engine.llm import LLM
from diptych.engine.load import BUNDLED_MODEL, bundled_dir
from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.ground.request import SamplingParams
from started import run

FP32 = {"backend": "torch", "weights": "fp32", "kv": "fp32"}
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@cache
def bundled_reference(name: str = BUNDLED_MODEL) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(bundled_dir(name))


@cache
def bundled_tokenizer(name: str = BUNDLED_MODEL) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(bundled_dir(name))


def write_bundled(
    path: Path,
    kind: str = "BF16",
    pooling: int | None = None,
    *,
    name: str = BUNDLED_MODEL,
    swapped: int | None = None,
    model: transformers.PreTrainedModel | None = None,
    **writer: object,
) -> Path:
    """A bundled model as one GGUF file, with its tokenizer and template. pooling: what an embedding model says.

    swapped: the id of a token that changes places with the next. model: another, with the same words.
    """
    tokenizer = bundled_tokenizer(name)

    def add_words(out: gguf.GGUFWriter) -> None:
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        if swapped is not None:
            words[swapped : swapped + 2] = words[swapped + 1], words[swapped]
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre("qwen2")
        out.add_token_list(words)
        out.add_token_types(
            [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(words))]
        )
        gguf.SpecialVocab(bundled_dir(name), load_merges=True).add_to_gguf(out)
        if pooling is not None:
            out.add_pooling_type(gguf.PoolingType(pooling))

    return write_gguf(model or bundled_reference(name), path, choose=lambda name: kind, add_words=add_words, **writer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundled(tmp_path_factory.mktemp("gguf") / "model.gguf")


def answer(model: str) -> str:
    llm = LLM(model, threads=1)
    (choice,) = llm.generate(llm.render(CHAT), SamplingParams(temperature=0.0, max_tokens=24))[0].choices
    return choice.text


@pytest.mark.native
def test_one_file_is_a_model(whole: Path) -> None:
    """Weights, config, tokenizer, template and ends of turn: what any of them lacks shows in the answer."""
    assert answer(str(whole)) == answer("bundled")


@pytest.mark.native
def test_the_folder_of_one_file_and_a_split_file_are_the_model_too(whole: Path, tmp_path: Path) -> None:
    """Large models come in parts, and people name the folder."""
    write_bundled(tmp_path / "split.gguf", split_max_tensors=20)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    assert {find_model(str(part)).name for part in parts} == {"split"}  # it was called by the part that was named
    assert answer(str(parts[0])) == answer(str(tmp_path)) == answer(str(whole.parent))
    parts[1].rename(tmp_path / "elsewhere")
    with pytest.raises(LoadError, match=f"1 of {len(parts)} parts are missing"):
        LLM(str(parts[0]))


@pytest.mark.native
def test_a_file_may_be_an_embedding_model(tmp_path: Path) -> None:
    """pooling_type was refused, and Qwen3-Embedding's files with it. Mean and last token against transformers."""
    text = "The fox went into the woods."
    small = "diptych-1m-draft"
    ids = torch.tensor([bundled_tokenizer()(text)["input_ids"]])
    with torch.no_grad():
        states = bundled_reference(small).model(ids).last_hidden_state[0].float()
    for pooling, state in ((1, states.mean(0)), (3, states[-1])):
        llm = LLM(str(write_bundled(tmp_path / f"{pooling}.gguf", pooling=pooling, name=small)), threads=1)
        vector = llm.embed(text)[0].vector
        assert float(np.dot(vector, state / state.norm())) > 0.999, pooling
    with pytest.raises(UnsupportedModel, match="first token's state, which has seen no other"):
        LLM(str(write_bundled(tmp_path / "first.gguf", pooling=2, name=small)))
    with pytest.raises(UnsupportedModel, match=r"pooling_type .* is 4"):
        LLM(str(write_bundled(tmp_path / "rank.gguf", pooling=4, name=small)))


@pytest.mark.native
@pytest.mark.parametrize("window", [12, 64])
def test_a_file_may_be_an_embedding_model_that_attends_both_ways(window: int, tmp_path: Path) -> None:
    """EmbeddingGemma: the file has the window as published, half of it to either side, and layers for the vectors or none."""
    text = (
        "The fox went into the woods, and nobody saw it for a week; then it came back and slept in the barn until noon."
    )
    tokenizer = bundled_tokenizer()
    fields = {"use_bidirectional_attention": True, "sliding_window": window, "query_pre_attn_scalar": 24}
    model = make_reference("gemma3", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **fields)
    with torch.no_grad():
        state = model.model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0].mean(0)
    how = {
        "called": "gemma-embedding",
        "metadata": {"attention.sliding_window": window, "attention.causal": False},
        "model": model,
    }
    path = write_bundled(tmp_path / "m.gguf", "F32", pooling=1, **how)
    for settings in (FP32, {"backend": "cpu"}):
        vector = LLM(str(path), threads=1, **settings).embed(text)[0].vector
        assert float(np.dot(vector, state / state.norm())) > (0.99999 if "kv" in settings else 0.999)
    dense = [
        np.random.default_rng(i).normal(size=size).astype(np.float32) for i, size in enumerate([(96, 64), (48, 96)])
    ]
    added = {f"dense_{i + 2}.weight": weight for i, weight in enumerate(dense)}
    write_bundled(path, "F32", pooling=1, change=lambda tensors: tensors | added, **how)
    vector = LLM(str(path), threads=1, **FP32).embed(text)[0].vector
    behind = dense[1] @ (dense[0] @ state.numpy())
    assert float(np.dot(vector, behind / np.linalg.norm(behind))) > 0.99999
    write_bundled(path, "F32", pooling=1, change=lambda tensors: tensors | {"dense_2.weight": dense[1]}, **how)
    with pytest.raises(LoadError, match=r"dense_2\.weight .* has shape \[48, 96\]; \[48, 64\] is expected"):
        LLM(str(path))


def test_planner_and_engine_count_alike(whole: Path) -> None:
    """What is planned is what is loaded."""
    spec = find_model(str(whole))
    llm = LLM(str(whole), backend="torch", weights="bf16")
    assert parameter_count(spec) == llm.loaded.model.n_parameters == parameter_count(find_model("bundled"))
    assert llm.loaded.model.spec.layers == spec.layers


@pytest.mark.native
def test_the_commands_take_a_file(whole: Path) -> None:
    """`--model model.gguf` with nothing else."""
    done = run("generate", "Once", "-m", str(whole), "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    planned = run("plan", str(whole), "--hardware", "h100-80gb-sxm")
    assert planned.returncode == 0, planned.stderr
    cut = whole.with_name("cut.bin")
    cut.write_bytes(whole.read_bytes()[:100_000])
    done = run("generate", "Once", "-m", str(cut))
    cut.unlink()
    assert done.returncode == 2
    assert "was cut short or damaged; download it again" in done.stderr
