"""The routes that read and do not write, behind workers and ranks: vectors, scores and labels have the bits of one engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.embedding_files import make_adapter, make_classifier, make_embedder
from tests.encoder_files import make_cross_encoder

from diptych.engine.llm import LLM
from server_process import ServerProcess

pytestmark = [
    pytest.mark.native,
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of sentence-transformers and what it brings
]

TEXTS = ["once upon a time there was a fox.", "bread is made of flour.", "fox", "the fox slept in the barn. " * 9]
PAIRS = ["the fox ran into the woods.", "nobody saw it", "it is bread", "a fox slept"]
RANKS, POOLS, WORKERS = ("--tp", "2", "--threads", "2"), ("--prefill", "1", "--decode", "1"), ("--workers", "2")


def ask(server: ServerProcess, path: str, **body: object) -> Any:
    answer = server.client().post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def serving(path: Path, *how: str) -> ServerProcess:
    return ServerProcess(
        str(path), "--served-model-name", "m", "--max-queue-s", "0", "--kv-memory-bytes", "16777216", *how
    )


def ends_well(server: ServerProcess) -> None:
    server.check_balance()
    code, errors = server.stop()
    assert code == 0, errors
    assert "Traceback" not in errors, errors


@pytest.mark.parametrize("how", [RANKS, POOLS, WORKERS])
@pytest.mark.parametrize("kind", ["qwen3", "bert"])
def test_labels_are_those_of_one_engine(tmp_path: Path, kind: str, how: tuple[str, ...]) -> None:
    make = make_classifier if kind == "qwen3" else make_cross_encoder
    path = make(tmp_path / "made", **({"kind": kind} if kind == "bert" else {}), n_labels=3)
    one = LLM(path, threads=1, kv_memory_bytes=16777216)
    with serving(path, *how) as server:
        for asked, wanted in (
            ({"input": TEXTS}, one.classify(TEXTS)),
            ({"input": TEXTS, "text_pair": PAIRS}, one.classify(TEXTS, PAIRS)),
        ):
            told = ask(server, "/v1/classify", **asked)["data"]
            assert [entry["probs"] for entry in told] == [list(entry.odds) for entry in wanted]
        ends_well(server)


@pytest.mark.parametrize("how", [RANKS, POOLS])
def test_vectors_and_scores_are_those_of_one_engine(tmp_path: Path, how: tuple[str, ...]) -> None:
    """By an adapter, too, where there is one process before the kernels."""
    path = make_embedder(tmp_path / "made")
    adapter = make_adapter(tmp_path / "adapter", path)
    has_adapters = how is RANKS
    one = LLM(path, threads=1, kv_memory_bytes=16777216, loras={"task": str(adapter)})
    with serving(path, *how, *(("--lora", f"task={adapter}") if has_adapters else ())) as server:
        for name in (None, "task", None) if has_adapters else (None, None):
            told = ask(server, "/v1/embeddings", model=name or "m", input=TEXTS)["data"]
            assert [entry["embedding"] for entry in told] == [
                entry.vector.tolist() for entry in one.embed(TEXTS, adapter=name)
            ]
            told = ask(server, "/v1/score", model=name or "m", text_1=TEXTS[2], text_2=PAIRS)["data"]
            scores = one.score(TEXTS[2], PAIRS, adapter=name).scores
            assert [entry["score"] for entry in told] == list(scores)
            best = ask(server, "/v1/rerank", model=name or "m", query=TEXTS[2], documents=PAIRS)["results"]
            assert [entry["relevance_score"] for entry in best] == sorted(scores, reverse=True)
        ends_well(server)
