"""Embedding models whose tokens attend to those behind them too, held against sentence-transformers over the same files."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoints import make_checkpoint
from tests.embedding_files import make_classifier, make_embedder, oracle
from tests.engine.conftest import BACKENDS, tiny_config

from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.engine.llm import LLM
from diptych.engine.load import bundled_dir
from diptych.ground.config import ComputeConfig, SchedulerConfig
from diptych.ground.errors import PromptTooLong, RequestError, UnsupportedModel
from diptych.ground.events import StepBeginEvent
from diptych.ground.request import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore")  # of sentence-transformers and what it brings

TEXTS = [
    "Once upon a time there was a fox.",
    "The fox ran into the woods, and nobody saw it for a week; then it came back and slept in the barn until noon.",
    "Bread.",
]
LONG = " ".join(TEXTS * 3)
FP32 = {"backend": "torch", "weights": "fp32", "kv": "fp32"}
# as they are published: GritLM, one with windows, gte-Qwen2, EmbeddingGemma
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gritlm": ("mistral", "mean", {"is_causal": False, "sliding_window": None}),
    "windows": ("mistral", "mean", {"is_causal": False, "sliding_window": 7}),
    "gte": ("qwen2", "lasttoken", {"is_causal": False}),
    "gemma": ("gemma3", "mean", {"use_bidirectional_attention": True, "sliding_window": 12, "has_head": False}),
}


def fp32(path: Path, **settings: object) -> LLM:
    return LLM(path, **{"max_context_tokens": 256, **FP32, **settings})  # type: ignore[arg-type]


def vectors(llm: LLM, *arguments: object, **options: object) -> np.ndarray:
    return np.stack([one.vector for one in llm.embed(*arguments, **options)])  # type: ignore[arg-type]


def needs(backend: str) -> None:
    if backend == "cpu" and not cpu_kernels.is_available()[0]:
        pytest.skip(cpu_kernels.is_available()[1])


def change(path: Path, **fields: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


@pytest.fixture(scope="module")
def gritlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mistral under another mask, a mean over what stands behind the instruction, an output projection that writes."""
    return make_embedder(
        tmp_path_factory.mktemp("gritlm") / "made", family="mistral", pooling="mean", include_prompt=False,
        is_causal=False, sliding_window=None, tie_word_embeddings=True,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_sentence_transformers(tmp_path: Path, kind: str) -> None:
    family, pooling, fields = KINDS[kind]
    path = make_embedder(tmp_path / "made", family=family, pooling=pooling, **fields)
    reference, llm = oracle(path), fp32(path)
    texts = [*TEXTS, LONG]  # of several lengths together, so that transformers makes a mask
    want = reference.encode(texts, prompt_name="query")
    np.testing.assert_allclose(vectors(llm, texts, prompt_name="query"), want, atol=2e-5)
    if "is_causal" in fields:
        change(path, is_causal=True)
        assert np.abs(vectors(fp32(path), texts, prompt_name="query") - want).max() > 0.01, (
            "the mask changes nothing here"
        )
    else:
        with pytest.raises(RequestError, match="writes none"):
            llm.generate("hello")


@pytest.mark.native
@pytest.mark.parametrize("kind", ["gritlm", "gemma"])
def test_the_kernels_agree_with_sentence_transformers(tmp_path: Path, kind: str) -> None:
    needs("cpu")
    family, pooling, fields = KINDS[kind]
    path = make_embedder(tmp_path / "made", family=family, pooling=pooling, **fields)
    texts = [*TEXTS, LONG]
    want = oracle(path).encode(texts)
    for settings in ({"weights": "bf16"}, {"weights": "int8", "kv": "int8"}):
        llm = LLM(path, backend="cpu", threads=1, max_context_tokens=256, **settings)  # type: ignore[arg-type]
        assert ((want * vectors(llm, texts)).sum(axis=1) > (0.999 if settings["weights"] == "bf16" else 0.98)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_neighbours_and_budgets_change_no_bit(gritlm: Path, backend: str) -> None:
    """A text is read whole whatever the step holds besides; nothing of it is kept, nor found."""
    needs(backend)
    first: np.ndarray | None = None
    for step_tokens, threads in ((256, 1), (136, 2)):
        scheduler = SchedulerConfig(max_step_tokens=step_tokens, max_running_sequences=4, max_context_tokens=256)
        compute = ComputeConfig(backend=backend, weights="fp32" if backend == "torch" else "bf16", threads=threads)
        llm = LLM(gritlm, tiny_config(backend, scheduler=scheduler, compute=compute))
        answer = llm.generate(LONG, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))[0]
        steps: list[StepBeginEvent] = []
        llm.engine.listen(
            lambda events, into=steps: into.extend(one for one in events if isinstance(one, StepBeginEvent))
        )
        embedded = llm.embed([LONG, *TEXTS, LONG])
        assert all(len(one.record.chunks) == 1 and one.usage.cached_tokens == 0 for one in embedded)
        assert all(one.prefill_tokens <= step_tokens for one in steps)
        together = np.stack([one.vector for one in embedded])
        alone = np.concatenate([vectors(llm, text) for text in [LONG, *TEXTS, LONG]])
        again = llm.generate(LONG, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))[0]
        assert again.choices[0].token_ids == answer.choices[0].token_ids
        assert again.usage.cached_tokens > 0, "what was written is found again, and only that"
        assert llm.engine.stats().blocks_in_use == 0
        first = together if first is None else first
        if backend == "cpu":
            assert (together == first).all()
            assert (alone == first).all()
        else:
            np.testing.assert_allclose(together, first, atol=1e-5)
            np.testing.assert_allclose(alone, first, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_texts_are_embedded_beside_running_answers(gritlm: Path, backend: str) -> None:
    """GritLM's two sides in one step: the answer is causal, the vector is not."""
    needs(backend)
    llm = LLM(gritlm, tiny_config(backend))
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    want = llm.generate(TEXTS[0], greedy)[0].choices[0].text
    vector = llm.embed(TEXTS[1])[0].vector
    engine, encoder, said = llm.engine, llm.loaded.encoder, []
    assert encoder is not None
    engine.submit(engine.make_request(TEXTS[0], greedy, arrival_s=0.0), lambda delta: said.append(delta.text))
    for _ in range(3):
        engine.step()
    prompt = encoder.prompt(TEXTS[1])
    opened = engine.submit(
        engine.make_request(prompt.rendered, greedy, arrival_s=0.0, pooling=prompt.pooling), lambda delta: None
    )
    steps: list[StepBeginEvent] = []
    engine.listen(lambda events: steps.extend(one for one in events if isinstance(one, StepBeginEvent)))
    while engine.has_work:
        engine.step()
    assert any(one.prefill_tokens and one.decode_tokens for one in steps)
    assert "".join(said) == want
    assert opened.state is not None
    got = encoder.vector(opened.state)
    assert (got == vector).all() if backend == "cpu" else np.allclose(got, vector, atol=1e-5)


def test_a_text_that_no_step_can_hold_is_refused_with_both_numbers(gritlm: Path) -> None:
    llm = fp32(gritlm, max_step_tokens=64)
    n_tokens = len(llm.loaded.encoder.prompt(LONG).token_ids)  # type: ignore[union-attr]
    with pytest.raises(PromptTooLong, match=rf"{n_tokens} tokens; .* one step, of at most 64") as caught:
        llm.embed(LONG)
    assert "--max-step-tokens" in str(caught.value.hint)
    assert len(llm.embed(TEXTS[1])[0].record.chunks) == 1


def test_layers_behind_the_pooling_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    """EmbeddingGemma: two layers Dense between pooling and normalisation; the second makes another width."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense

    family, pooling, fields = KINDS["gemma"]
    base = make_embedder(tmp_path / "base", family=family, pooling=pooling, **fields)
    transformer, pooled, normal = oracle(base)
    torch.manual_seed(0)
    layers = [Dense(64, 96, bias=False, activation_function=None), Dense(96, 48, activation_function=torch.nn.Tanh())]
    path = tmp_path / "made"
    SentenceTransformer(modules=[transformer, pooled, *layers, normal]).save_pretrained(
        str(path), create_model_card=False
    )
    reference, llm = oracle(path), fp32(path)
    want = reference.encode(TEXTS)
    assert want.shape == (3, 48)
    np.testing.assert_allclose(vectors(llm, TEXTS), want, atol=2e-5)
    np.testing.assert_allclose(llm.score(TEXTS[0], TEXTS[1:]).scores, want[1:] @ want[0], atol=2e-5)
    cut = reference.encode(TEXTS, truncate_dim=16, normalize_embeddings=True)
    np.testing.assert_allclose(vectors(llm, TEXTS, dimensions=16), cut, atol=2e-5)
    with pytest.raises(RequestError, match="dimensions is 64"):
        llm.embed("hello", dimensions=64)
    change_module(path, "3_Dense", activation_function="torch.nn.modules.activation.ReLU")
    with pytest.raises(UnsupportedModel, match="ReLU"):
        fp32(path)


def change_module(path: Path, folder: str, **fields: object) -> None:
    file = path / folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_code_of_its_own_is_never_run_and_the_config_says_how_tokens_attend(
    gritlm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """gte-Qwen2 brings code and `is_causal: false`; GritLM-7B the code alone; another's code may do anything."""
    want = vectors(fp32(gritlm), TEXTS)
    path = tmp_path / "made"
    path.mkdir()
    for file in gritlm.rglob("*"):
        if file.is_file():
            (path / file.relative_to(gritlm)).parent.mkdir(exist_ok=True)
            (path / file.relative_to(gritlm)).write_bytes(file.read_bytes())
    change(path, auto_map={"AutoModel": "someone/some-model--modeling_other.MistralModel"})
    assert (vectors(fp32(path), TEXTS) == want).all()
    config = json.loads((path / "config.json").read_text())
    del config["is_causal"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="modeling_other"):
        fp32(path)
    change(path, auto_map={"AutoModel": "GritLM/GritLM-7B--modeling_gritlm7b.MistralModel"})
    assert (vectors(fp32(path), TEXTS) == want).all()
    change(path, is_causal=False)
    with caplog.at_level(logging.WARNING):
        fp32(path, task="generate")
    assert "written causally" in caplog.text


def test_pairs_are_judged_both_ways(tmp_path: Path) -> None:
    """A reranker without a mask (Llama with `is_causal: false` under a classification head), against transformers."""
    import transformers

    path = make_classifier(tmp_path / "made", family="Llama")
    change(path, is_causal=False)
    llm = fp32(path)
    got = llm.score(TEXTS[0], TEXTS[1:]).scores
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(
        str(path), attn_implementation="eager"
    ).eval()
    encoder = llm.loaded.encoder
    assert encoder is not None
    for text, score in zip(TEXTS[1:], got, strict=True):
        (prompt,) = encoder.ranking([(TEXTS[0], text)]).prompts
        with torch.no_grad():
            logit = reference(input_ids=torch.tensor([prompt.token_ids])).logits[0, 0]
        assert score == pytest.approx(torch.sigmoid(logit).item(), abs=2e-5)


def test_an_index_chooses_of_what_came_before_alone(tmp_path: Path) -> None:
    """DeepSeek V3.2 as an embedding model that attends both ways would be attended to by a causal choice."""
    path = make_checkpoint("deepseek_v32", tmp_path / "it", vocab_size=4096, num_hidden_layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_dir() / name, path / name)
    fp32(path, task="embed").close()
    change(path, is_causal=False)
    with pytest.raises(UnsupportedModel, match="an index that chooses"):
        fp32(path, task="embed")
