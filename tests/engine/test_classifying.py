"""Labels of texts and of pairs, held against transformers' pipeline for texts over the same files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.embedding_files import judge, make_classifier
from tests.encoder_files import make_cross_encoder
from typer.testing import CliRunner

from diptych.cli import classify
from diptych.engine.llm import LLM
from diptych.ground.errors import LoadError, RequestError, UnsupportedModel

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it brings

TEXTS = ["once upon a time there was a fox.", "bread is made of flour.", "fox"]
PAIRS = ["the fox ran into the woods.", "nobody saw it", "it is bread"]
NAMES = {0: "entailment", 1: "neutral", 2: "contradiction"}
FP32 = {"backend": "torch", "weights": "fp32", "kv": "fp32"}


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("classifiers")
    made = {kind: make_cross_encoder(root / kind, kind, n_labels=3, id2label=NAMES) for kind in ("bert", "deberta-v2")}
    return {**made, "qwen3": make_classifier(root / "qwen3", n_labels=3)}


def changed(base: Path, path: Path, **fields: object) -> Path:
    """A copy with other words in its config; of None, without them."""
    shutil.copytree(base, path)
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps({key: one for key, one in config.items() if one is not None}))
    return path


def piped(path: Path, asked: Sequence[str] | Sequence[Mapping[str, str]]) -> list[dict[str, float]]:
    """Each label's number by the pipeline, one text after the other."""
    import transformers

    pipe = transformers.pipeline("text-classification", model=str(path), top_k=None)
    return [{told["label"]: told["score"] for told in one} for one in pipe(list(asked))]


def same(got: Sequence[Any], want: Sequence[Mapping[str, float]]) -> None:
    assert len(got) == len(want)
    for one, labels in zip(got, want, strict=True):
        assert set(one.labels) == set(labels)
        np.testing.assert_allclose(one.odds, [labels[name] for name in one.labels], atol=2e-5)
        assert one.label == max(labels, key=labels.__getitem__)


@pytest.mark.parametrize("kind", ["bert", "deberta-v2", "qwen3"])
def test_labels_are_those_of_the_pipeline(judges: dict[str, Path], kind: str) -> None:
    llm = LLM(judges[kind], **FP32)
    want = piped(judges[kind], TEXTS)
    same(llm.classify(TEXTS), want)
    assert np.ptp([list(one.values()) for one in want]) > 0.1
    pairs = [{"text": text, "text_pair": pair} for text, pair in zip(TEXTS, PAIRS, strict=True)]
    same(llm.classify(TEXTS, PAIRS), piped(judges[kind], pairs))
    same(llm.classify(TEXTS[0], PAIRS), piped(judges[kind], [{**one, "text": TEXTS[0]} for one in pairs]))
    same(llm.classify([llm.loaded.tokenizer.encode(TEXTS[0])]), want[:1])


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification", "regression"])
def test_odds_are_of_the_kind_that_the_config_names(judges: dict[str, Path], tmp_path: Path, problem: str) -> None:
    """What sentence-transformers would do with scores is another matter: published judges of inference name Identity."""
    words = {"activation_fn": "torch.nn.modules.linear.Identity"}
    path = changed(judges["bert"], tmp_path / "made", problem_type=problem, sentence_transformers=words)
    got = LLM(path, **FP32).classify(TEXTS)
    same(got, piped(path, TEXTS))
    total = sum(got[0].odds)
    assert (abs(total - 1) < 1e-6) is problem.startswith("single")


def test_one_label_is_a_number_beside_the_score(tmp_path: Path) -> None:
    path = make_cross_encoder(tmp_path / "made", "bert")
    llm = LLM(path, **FP32)
    same(llm.classify(TEXTS), piped(path, TEXTS))
    np.testing.assert_allclose(
        llm.score(TEXTS, PAIRS).scores, judge(path).predict(list(zip(TEXTS, PAIRS, strict=True))), atol=2e-5
    )


def test_labels_without_names_are_numbered(judges: dict[str, Path], tmp_path: Path) -> None:
    path = changed(judges["bert"], tmp_path / "made", id2label=None, label2id=None, num_labels=3)
    assert LLM(path, **FP32).classify("fox")[0].labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_what_a_classifier_does_not_give_is_refused(judges: dict[str, Path]) -> None:
    llm = LLM(judges["bert"], **FP32)
    told = r"tells 3 labels apart \(entailment, neutral, contradiction\), and gives no "
    with pytest.raises(RequestError, match=f"{told}scores"):
        llm.score(TEXTS[0], PAIRS)
    with pytest.raises(RequestError, match=f"{told}vectors"):
        llm.embed("fox")
    with pytest.raises(RequestError, match="2 texts came with 3 pairs"):
        llm.classify(TEXTS[:2], PAIRS)
    with pytest.raises(RequestError, match="token ids came with a second text"):
        llm.classify([[5, 6]], "fox")
    for task, words in (("score", "tells 3 labels apart"), ("embed", "classification head, and embeds no texts")):
        with pytest.raises(UnsupportedModel, match=words):
            LLM(judges["bert"], task=task, **FP32)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"problem_type": "ranking"}, "problem_type in .* is 'ranking'"),
        ({"problem_type": ["regression"]}, "problem_type"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label in .* it must name the labels 0, 1 and on"),
        ({"id2label": ["a", "b"]}, "id2label"),
        ({"id2label": {"0": "a", "1": "b"}}, "classifier.weight"),
        ({"id2label": None, "num_labels": 10**6}, "num_labels in .* is 1000000; it must be at most 65536"),
        ({"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification"),
    ],
)
def test_other_heads_and_broken_labels_are_refused_by_name(
    judges: dict[str, Path], tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises((LoadError, UnsupportedModel), match=named):
        LLM(changed(judges["bert"], tmp_path / "made", **fields), **FP32)


def test_the_command_writes_a_line_for_each_pair(judges: dict[str, Path]) -> None:
    arguments = [TEXTS[0], "--pair", PAIRS[0], "--pair", PAIRS[1], "-m", str(judges["bert"])]
    told = CliRunner().invoke(classify.app, [*arguments, "--backend", "torch", "--weights", "fp32", "--kv", "fp32"])
    assert told.exit_code == 0, told.output
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert [(line["text"], line["text_pair"]) for line in lines] == [(TEXTS[0], pair) for pair in PAIRS[:2]]
    want = piped(judges["bert"], [{"text": TEXTS[0], "text_pair": pair} for pair in PAIRS[:2]])
    for line, labels in zip(lines, want, strict=True):
        assert line["probs"] == pytest.approx(labels, abs=2e-5)
        assert line["label"] == max(labels, key=labels.__getitem__)
    assert "no decode" in told.stderr
