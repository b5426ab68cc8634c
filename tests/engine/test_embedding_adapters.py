"""Vectors and scores by LoRA adapters, held against sentence-transformers with peft over the same files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.embedding_files import adapted_oracle, judge, make_adapter, make_embedder, oracle
from tests.encoder_files import KINDS, make_cross_encoder, make_encoder

from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.engine.llm import LLM
from diptych.ground.errors import LoadError, RequestError

pytestmark = pytest.mark.filterwarnings("ignore")  # of sentence-transformers and what it brings

TEXTS = ["once upon a time there was a fox.", "bread is made of flour.", "fox"]
QUERIES = ["where did the fox go?", "what is bread?", "a fox"]
FP32 = {"backend": "torch", "weights": "fp32", "kv": "fp32"}


# of DeBERTa what can be adapted, and what cannot: by which rows of distances were made at the start
RELATED = {
    "deberta-v2": ("value_proj|dense", "query_proj"),
    "deberta-v2-apart": (r"self\.(query|key|value)_proj|dense", "pos_key_proj"),
    "deberta": ("in_proj|dense", "pos_q_proj"),
}


def vectors(llm: LLM, adapter: str | None) -> np.ndarray:
    return np.stack([one.vector for one in llm.embed(TEXTS, adapter=adapter)])


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_peft(tmp_path: Path, kind: str) -> None:
    """Whatever files and classes call the projections, and have in one or apart; beside it the model as it is."""
    path = make_encoder(tmp_path / "made", kind)
    adapter = make_adapter(tmp_path / "adapter", path, only=RELATED.get(kind, ("",))[0])
    llm = LLM(path, loras={"task": str(adapter)}, **FP32)  # type: ignore[arg-type]
    want, plain = adapted_oracle(path, adapter).encode(TEXTS), oracle(path).encode(TEXTS)
    assert np.abs(want - plain).max() > 0.01
    for name, expected in (("task", want), (None, plain), ("task", want)):
        np.testing.assert_allclose(vectors(llm, name), expected, atol=2e-5)


@pytest.mark.native
@pytest.mark.parametrize("kind", ["bert", "jina_embeddings_v3", "gte"])
def test_the_kernels_agree_with_peft(tmp_path: Path, kind: str) -> None:
    if not cpu_kernels.is_available()[0]:
        pytest.skip(cpu_kernels.is_available()[1])
    path = make_encoder(tmp_path / "made", kind)
    adapter = make_adapter(tmp_path / "adapter", path)
    want = adapted_oracle(path, adapter).encode(TEXTS)
    for weights, least in (("bf16", 0.999), ("int8", 0.99)):
        got = vectors(LLM(path, backend="cpu", threads=1, weights=weights, loras={"task": str(adapter)}), "task")
        assert ((want * got).sum(axis=1) > least).all(), (weights, (want * got).sum(axis=1))


def test_a_decoder_embeds_by_an_adapter(tmp_path: Path) -> None:
    """Keys and values of a text are the adapter's that read it: neither finds the other's in the prefix cache."""
    path = make_embedder(tmp_path / "made")
    adapters = [make_adapter(tmp_path / f"adapter-{seed}", path, seed=seed) for seed in (0, 1)]
    llm = LLM(path, loras={str(seed): str(one) for seed, one in enumerate(adapters)}, **FP32)  # type: ignore[arg-type]
    for name in ("0", "1", "0"):
        want = adapted_oracle(path, adapters[int(name)]).encode(TEXTS, prompt_name="document")
        np.testing.assert_allclose(vectors(llm, name), want, atol=2e-5)
    np.testing.assert_allclose(vectors(llm, None), oracle(path).encode(TEXTS, prompt_name="document"), atol=2e-5)


def test_pairs_are_judged_by_an_adapter(tmp_path: Path) -> None:
    """Of the encoder below the head, which stays the model's."""
    path = make_cross_encoder(tmp_path / "made", "bert")
    adapter = make_adapter(tmp_path / "adapter", path)
    llm = LLM(path, loras={"task": str(adapter)}, **FP32)  # type: ignore[arg-type]
    pairs = list(zip(QUERIES, TEXTS, strict=True))
    plain = judge(path).predict(pairs)
    made = judge(path)
    made.model.load_adapter(str(adapter))
    want = made.predict(pairs)
    assert np.abs(want - plain).max() > 1e-3
    np.testing.assert_allclose(llm.score(QUERIES, TEXTS, adapter="task").scores, want, atol=2e-5)
    np.testing.assert_allclose(llm.score(QUERIES, TEXTS).scores, plain, atol=2e-5)


@pytest.mark.parametrize("kind", RELATED)
def test_what_rows_of_distances_are_made_by_is_not_adapted(tmp_path: Path, kind: str) -> None:
    """They are made once, of the model's own weights."""
    path = make_encoder(tmp_path / "made", kind)
    adapter = make_adapter(tmp_path / "adapter", path, only=RELATED[kind][1])
    with pytest.raises(LoadError, match=f"{RELATED[kind][1]}, which this model does not have, cannot adapt"):
        LLM(path, loras={"task": str(adapter)}, **FP32)  # type: ignore[arg-type]


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    path = make_encoder(tmp_path / "made", "bert")
    with pytest.raises(RequestError, match="no adapter 'poet' is loaded"):
        LLM(path, **FP32).embed("fox", adapter="poet")  # type: ignore[arg-type]
    other = make_encoder(tmp_path / "other", "nomic_bert")
    adapter = make_adapter(tmp_path / "adapter", other)
    with pytest.raises(LoadError, match="down_proj, which this model does not have"):
        LLM(path, loras={"task": str(adapter)}, **FP32)  # type: ignore[arg-type]
