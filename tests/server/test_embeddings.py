"""Embeddings, rerank, score and classify over HTTP, with the clients that people use, against sentence-transformers."""

from __future__ import annotations

import base64
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from tests.embedding_files import adapted_oracle, judge, make_adapter, make_embedder, make_reranker, oracle
from tests.encoder_files import make_cross_encoder

from diptych.ground.clock import sleep_s
from server_process import BACKEND, ServerProcess

pytestmark = pytest.mark.filterwarnings("ignore")  # of sentence-transformers and what it brings

TEXTS = ["Once upon a time there was a fox.", "Bread is made of flour.", "The fox slept in the barn until noon."]
QUERY = "where did the fox sleep?"
FP32 = (
    "--backend",
    "torch",
    "--weights",
    "fp32",
    "--kv",
    "fp32",
    "--max-queue-s",
    "0",
    "--kv-memory-bytes",
    "16777216",
)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("embedder") / "made", max_position_embeddings=2048, max_tokens=2048)


@pytest.fixture(scope="module")
def adapter(embedder: Path) -> Path:
    return make_adapter(embedder.parent / "adapter", embedder)


@pytest.fixture(scope="module")
def embedding(embedder: Path, adapter: Path) -> Iterator[ServerProcess]:
    if BACKEND not in ("auto", "torch"):
        pytest.skip("the oracle computes in fp32, which the torch backend has")
    with ServerProcess(str(embedder), "--served-model-name", "e", "--lora", f"task={adapter}", *FP32) as process:
        yield process
        code, errors = process.stop()
        assert code == 0, errors
        assert "Traceback" not in errors, errors


@pytest.fixture
def http(embedding: ServerProcess) -> Iterator[httpx.Client]:
    with embedding.client() as client:
        yield client


@pytest.fixture(scope="module")
def want(embedder: Path) -> np.ndarray:
    return oracle(embedder).encode(TEXTS)


def close(got: object, want: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(got), want, atol=2e-5)


def check_account(answer: dict, prompts: int) -> None:
    usage, timings = answer["usage"], answer["timings"]
    own = timings["diptych"]
    assert usage["completion_tokens"] == timings["predicted_n"] == 0
    assert usage["total_tokens"] == usage["prompt_tokens"] == timings["prompt_n"] + timings["cache_n"]
    assert own["decode_ms"] == 0
    assert own["ttft_ms"] is None or prompts > 1
    assert own["queue_ms"] + own["prefill_ms"] == pytest.approx(own["e2e_ms"], abs=1e-4)
    assert len(own.get("prompts", [1])) == prompts


def test_openai_client_gets_the_vectors(embedding: ServerProcess, want: np.ndarray) -> None:
    """It asks for base64 unless told otherwise, and decodes it itself."""
    client: OpenAI = embedding.openai()
    for how in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.embeddings.create(model="e", input=TEXTS, **how)  # type: ignore[arg-type]
        assert [one.index for one in answer.data] == [0, 1, 2]
        vectors = [one.embedding for one in answer.data]
        if how.get("encoding_format") == "base64":
            vectors = [np.frombuffer(base64.b64decode(one), "<f4").tolist() for one in vectors]  # type: ignore[arg-type]
        close(vectors, want)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 20
    short = client.embeddings.create(model="e", input=TEXTS[0], dimensions=16).data[0].embedding
    assert len(short) == 16
    assert np.linalg.norm(short) == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(BadRequestError, match="dimensions is 65"):
        client.embeddings.create(model="e", input="a", dimensions=65)


def test_langchain_embeds_documents_and_queries(embedding: ServerProcess, want: np.ndarray) -> None:
    """It sends token ids of OpenAI's tokenizers unless told that the server reads text; both are taken."""
    from langchain_openai import OpenAIEmbeddings

    model = OpenAIEmbeddings(
        model="e", base_url=f"{embedding.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    close(model.embed_documents(TEXTS), want)
    close(model.embed_query(TEXTS[0]), want[0])


def test_the_model_of_a_request_chooses_the_adapter(
    embedding: ServerProcess, http: httpx.Client, embedder: Path, adapter: Path, want: np.ndarray
) -> None:
    """As where text is written; answers say who read."""
    client: OpenAI = embedding.openai()
    assert [one.id for one in client.models.list().data] == ["e", "task"]
    model = adapted_oracle(embedder, adapter)
    by_adapter = model.encode(TEXTS)
    prints = {}
    for name, vectors in (("task", by_adapter), ("e", want), ("task", by_adapter)):
        answer = client.embeddings.create(model=name, input=TEXTS)
        close([one.embedding for one in answer.data], vectors)
        assert answer.model == name
        prints[name] = answer.to_dict()["system_fingerprint"]
    assert prints["task"] != prints["e"] or prints["e"] is None  # of torch, whose last bits nobody promises
    pairs = {"model": "task", "text_1": TEXTS[0], "text_2": TEXTS[1:]}
    scores = [one["score"] for one in http.post("/v1/score", json=pairs).json()["data"]]
    query, documents = model.encode(TEXTS[:1], prompt_name="query"), model.encode(TEXTS[1:], prompt_name="document")
    close(scores, (query * documents).sum(axis=1))


def test_inputs_of_every_kind(http: httpx.Client, want: np.ndarray) -> None:
    ids = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
    for body, rows in (
        (TEXTS[0], want[:1]),
        (ids[0], want[:1]),
        (ids, want),
        ([TEXTS[0], ids[1], TEXTS[2]], want),
    ):
        answer = http.post("/v1/embeddings", json={"input": body}).json()
        assert answer["object"] == "list"
        close([one["embedding"] for one in answer["data"]], rows)
        check_account(answer, len(rows))
    for path in ("/embeddings", "/v1/embeddings"):
        assert http.post(path, json={"input": TEXTS}).status_code == 200


def test_instructions_by_name_and_in_words(http: httpx.Client, embedder: Path) -> None:
    reference = oracle(embedder)
    for sent, asked in (
        ({"prompt_name": "query"}, {"prompt_name": "query"}),
        ({"instruction": "Say: "}, {"prompt": "Say: "}),
    ):
        answer = http.post("/v1/embeddings", json={"input": TEXTS} | sent).json()
        close([one["embedding"] for one in answer["data"]], reference.encode(TEXTS, **asked))
    raw = http.post("/v1/embeddings", json={"input": TEXTS[0], "normalize": False}).json()["data"][0]["embedding"]
    assert np.linalg.norm(raw) > 2
    names = [one["name"] for one in answer["timings"]["diptych"]["prompts"][0]["diptych"]["segments"]]
    assert names == ["instruction", "text"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "input is missing"),
        ({"input": ""}, "entry 0"),
        ({"input": []}, "list"),
        ({"input": ["a", ""]}, "entry 1"),
        ({"input": [[]]}, "entry 0"),
        ({"input": ["a"] * 2049}, "2049 entries; it must have at most 2048"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "prompt_name": "title"}, "no prompt named 'title'; this model has document, query"),
        ({"input": "a", "prompt_name": "query", "instruction": "x"}, "both set"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not supported: a text is never cut"),
        ({"input": "a", "input_type": "query"}, "prompt_name"),
        ({"input": [4095, 4096]}, "4096"),
        ({"input": "fox " * 3000}, "at most 2048"),
        ({"input": ["a", [5] * 3000]}, "3000 tokens; this model reads at most 2048"),
    ],
)
def test_bad_inputs_are_refused_with_numbers(http: httpx.Client, body: dict, said: str) -> None:
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


def test_unknown_fields_are_named(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"input": "a", "colour": "blue", "user": "me"})
    assert answer.status_code == 200
    assert answer.headers["x-diptych-ignored"] == "colour"


def test_rerank_is_jinas_and_coheres(http: httpx.Client, embedder: Path) -> None:
    """An embedding model compares: by cosine, with the prompts named query and document."""
    reference = oracle(embedder)
    left = reference.encode([QUERY], prompt_name="query")
    scores = (left @ reference.encode(TEXTS, prompt_name="document").T)[0]
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        answer = http.post(path, json={"model": "e", "query": QUERY, "documents": TEXTS}).json()
        order = [one["index"] for one in answer["results"]]
        assert order == sorted(range(3), key=lambda index: -scores[index])
        close([one["relevance_score"] for one in answer["results"]], scores[order])
        assert answer["results"][0]["document"] == {"text": TEXTS[order[0]]}
        check_account(answer, 4)
    documents = [{"text": text} for text in TEXTS]
    body = {"query": QUERY, "documents": documents, "top_n": 2, "return_documents": False}
    answer = http.post("/v1/rerank", json=body).json()
    assert [sorted(one) for one in answer["results"]] == [["index", "relevance_score"]] * 2
    refused = http.post("/v1/rerank", json=body | {"max_tokens_per_doc": 10})
    assert refused.status_code == 400


def test_score_is_vllms(http: httpx.Client) -> None:
    one = http.post("/v1/score", json={"text_1": QUERY, "text_2": TEXTS[0]}).json()
    many = http.post("/score", json={"text_1": QUERY, "text_2": TEXTS}).json()
    pairs = http.post("/v1/score", json={"queries": [QUERY] * 3, "documents": TEXTS}).json()
    assert [entry["object"] for entry in many["data"]] == ["score"] * 3
    assert many["data"] == pairs["data"]
    assert many["data"][0]["score"] == pytest.approx(one["data"][0]["score"], abs=1e-6)
    refused = http.post("/v1/score", json={"text_1": [QUERY] * 2, "text_2": TEXTS})
    assert refused.status_code == 400
    assert "2 entries and text_2 has 3" in refused.json()["error"]["message"]


def test_reranker_judges_over_http(tmp_path: Path) -> None:
    path = make_reranker(tmp_path / "made", prompts={"web": "Given a web search, judge."})
    want = judge(path).predict([(QUERY, text) for text in TEXTS])
    with ServerProcess(str(path), *FP32) as server, server.client() as http:
        answer = http.post("/v1/rerank", json={"query": QUERY, "documents": TEXTS}).json()
        got = {one["index"]: one["relevance_score"] for one in answer["results"]}
        close([got[index] for index in range(3)], want)
        check_account(answer, 3)
        refused = http.post("/v1/embeddings", json={"input": "a"})
        assert refused.status_code == 400
        assert "/v1/score" in refused.json()["error"]["message"]
        # it is a causal model with a head, and writes as ever
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        server.check_balance()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = {0: "entailment", 1: "neutral", 2: "contradiction"}
    return make_cross_encoder(tmp_path_factory.mktemp("classifier") / "made", "bert", n_labels=3, id2label=names)


@pytest.fixture(scope="module")
def classifying(classifier: Path) -> Iterator[ServerProcess]:
    with ServerProcess(str(classifier), "--served-model-name", "c", *FP32) as process:
        yield process
        code, errors = process.stop()
        assert code == 0, errors
        assert "Traceback" not in errors, errors


def test_classify_is_vllms_with_the_pairs_of_transformers(classifying: ServerProcess, classifier: Path) -> None:
    import transformers

    pipe = transformers.pipeline("text-classification", model=str(classifier), top_k=None)
    alone = pipe(TEXTS)
    paired = pipe([{"text": TEXTS[0], "text_pair": text} for text in TEXTS])
    with classifying.client() as http:
        ids = http.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
        for path, body, want in (
            ("/v1/classify", {"model": "c", "input": TEXTS}, alone),
            ("/classify", {"input": TEXTS[0]}, alone[:1]),
            ("/classify", {"input": [ids, TEXTS[1]]}, alone[:2]),
            ("/classify", {"input": TEXTS[0], "text_pair": TEXTS}, paired),
            ("/classify", {"input": TEXTS[:1], "text_pair": TEXTS[1]}, paired[1:2]),
        ):
            answer = http.post(path, json=body).json()
            assert [one["index"] for one in answer["data"]] == list(range(len(want)))
            for one, labels in zip(answer["data"], want, strict=True):
                assert (one["label"], one["num_classes"]) == (labels[0]["label"], 3)
                close(one["probs"], [{it["label"]: it["score"] for it in labels}[name] for name in answer["labels"]])
            assert (answer["object"], answer["model"], answer["id"][:9]) == ("list", "c", "classify-")
            check_account(answer, len(want))
        probs, logits = (
            np.array(http.post("/classify", json={"input": "fox"} | more).json()["data"][0]["probs"])
            for more in ({}, {"use_activation": False})
        )
        close(probs, np.exp(logits) / np.exp(logits).sum())
        assert abs(logits.sum() - 1) > 0.1
    classifying.check_balance()


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("classify", {}, "input is missing"),
        ("classify", {"input": ["a", ""]}, "entry 1 is empty"),
        ("classify", {"input": ["a", "b"], "text_pair": ["c"] * 3}, "input has 2 entries and text_pair 3"),
        ("classify", {"input": [5, 6], "text_pair": "c"}, "token ids"),
        ("classify", {"input": "a", "text_pair": ""}, "text_pair"),
        ("classify", {"input": "a", "use_activation": 1}, "use_activation"),
        ("classify", {"input": "a", "truncate_prompt_tokens": 5}, "a text is never cut"),
        ("classify", {"messages": [{"role": "user", "content": "a"}], "input": "a"}, "token ids that /tokenize makes"),
        ("classify", {"input": "fox " * 3000}, "at most 200 are read"),
        ("score", {"text_1": "a", "text_2": "b"}, "tells 3 labels apart (entailment, neutral, contradiction)"),
        ("rerank", {"query": "a", "documents": ["b"]}, "send texts to /v1/classify"),
        ("embeddings", {"input": "a"}, "gives no vectors"),
    ],
)
def test_what_a_classifier_cannot_read_is_refused(classifying: ServerProcess, path: str, body: dict, said: str) -> None:
    with classifying.client() as http:
        answer = http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]
    assert (answer.json()["error"]["code"] == "wrong_task") is (path != "classify")


def test_a_model_that_embeds_tells_no_labels(http: httpx.Client) -> None:
    answer = http.post("/v1/classify", json={"input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wrong_task")
    assert "embeds texts, and gives no labels\nhint: send texts to /v1/embeddings" in answer.json()["error"]["message"]


def test_a_model_that_writes_says_so(server: ServerProcess) -> None:
    """vLLM refuses too, unless told to pool; here --task embed does that."""
    bodies = {
        "embeddings": {"input": "a"},
        "rerank": {"query": "a", "documents": ["b"]},
        "score": {"text_1": "a", "text_2": "b"},
        "classify": {"input": "a"},
    }
    with server.client() as http:
        for path, body in bodies.items():
            answer = http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["code"] == "wrong_task"
            assert "--task embed" in error["message"]


def test_the_page_to_chat_in_says_what_this_model_is_for(http: httpx.Client) -> None:
    told = http.get("/page/abilities").json()
    assert told["writes"] is True  # it has a head, and answers
    assert "made for embeddings" in told["note"]


def test_answers_run_beside_a_long_list(embedding: ServerProcess) -> None:
    """A thousand texts go in as far as two steps reach; a stream beside them is not kept waiting for all of them."""
    before = embedding.metric("diptych_states_total")
    texts = [f"{TEXTS[i % 3]} {i}" for i in range(400)]
    answers: dict[str, httpx.Response] = {}

    def embed() -> None:
        with embedding.client() as http:
            answers["embed"] = http.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"})

    thread = threading.Thread(target=embed)
    thread.start()
    with embedding.client() as http:
        written = http.post("/v1/completions", json={"prompt": "The fox", "max_tokens": 8, "ignore_eos": True})
    thread.join()
    assert written.json()["usage"]["completion_tokens"] == 8
    answer = answers["embed"].json()
    assert len(answer["data"]) == 400
    assert "prompts" not in answer["timings"]["diptych"]
    assert embedding.metric("diptych_states_total") - before == 400
    embedding.check_balance()


def test_client_that_leaves_frees_everything(embedding: ServerProcess) -> None:
    texts = ["The fox slept in the barn until noon. " * 40] * 300
    with httpx.Client(base_url=embedding.url, timeout=0.3) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/embeddings", json={"input": texts})
    embedding.wait_idle(60.0)
    embedding.check_balance()


def test_key_draining_and_aborts(embedder: Path) -> None:
    with ServerProcess(str(embedder), *FP32, "--max-open-requests", "300", key="secret") as server:
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}).status_code == 401
        with server.client() as http:
            done = http.post("/v1/embeddings", json={"input": TEXTS}, headers={"x-request-id": "mine"})
            assert done.status_code == 200
            assert done.json()["id"] == "embd-mine"
            timeline = http.get("/v1/requests/embd-mine/timeline").json()
            assert len(timeline["prompts"]) == 3
            answers: list[httpx.Response] = []
            long = {"input": ["fox " * 1500] * 200, "request_id": "long"}
            thread = threading.Thread(target=lambda: answers.append(http.post("/v1/embeddings", json=long)))
            thread.start()
            with server.client() as other:
                for _ in range(1000):
                    if other.delete("/v1/requests/embd-long").status_code == 200:
                        break
                    sleep_s(0.005)
                thread.join()
            assert answers[0].status_code == 409
            assert answers[0].json()["error"]["code"] == "aborted"
            server.wait_idle()
            server.check_balance()
            begun, answers[:] = server.metric("diptych_states_total"), []
            last = {"input": [f"fox {i}" for i in range(1200)]}
            thread = threading.Thread(target=lambda: answers.append(http.post("/v1/embeddings", json=last)))
            thread.start()
            with server.client() as other:
                while server.metric("diptych_states_total") < begun + 100:
                    sleep_s(0.005)
                # texts of others that were read are not open any more
                assert other.post("/v1/embeddings", json={"input": "a"}).status_code == 200
            server.process.send_signal(signal.SIGTERM)
            thread.join()
            assert len(answers[0].json()["data"]) == 1200, "what was begun is finished"
        code, errors = server.stop()
        assert code == 0
        assert "Traceback" not in errors, errors


def test_what_if_replays_minutes_in_which_texts_were_embedded(embedding: ServerProcess) -> None:
    """The scheduler runs them again beside the answers; of an embedding itself there is no first token to ask about."""
    with embedding.client() as http:
        http.post("/v1/embeddings", json={"input": TEXTS, "request_id": "read"})
        http.post(
            "/v1/completions", json={"prompt": TEXTS[0], "max_tokens": 16, "ignore_eos": True, "request_id": "wrote"}
        )
        refused = http.get("/v1/requests/embd-read/what-if")
        assert refused.status_code == 404
        assert "an embedding, a score or a prompt alone never has one" in refused.json()["error"]["message"]
        told = http.get("/v1/requests/cmpl-wrote/what-if")
        assert told.status_code == 200, told.text
