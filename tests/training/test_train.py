"""A run that is stopped and resumed must be the run that was never stopped, or the recipe cannot be repeated."""

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer
from training.data import Sampler, TrainingData
from training.evaluate import held_out_loss, held_out_rows
from training.export import export_model, load_exported, shape_of
from training.model import IGNORED, Llama, ModelShape, causal_attention, distillation_loss
from training.train import Recipe, batch_shape, lr_factor, run
from transformers import AutoModelForCausalLM

TINY = ModelShape(hidden_size=32, intermediate_size=64, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16)
RECIPE = Recipe(total_tokens=1 << 20, batch_tokens=2048, micro_tokens=1024, seed=7)
SMALL = replace(RECIPE, batch_tokens=1024, micro_tokens=512)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    corpus = folder / "corpus"
    corpus.mkdir()
    book = "\n\n".join(f"Chapter {n}. The wolf number {n} went into the wood and met a fox." for n in range(1500))
    (corpus / "grimm.txt").write_text(book, encoding="utf-8")
    data = TrainingData.build(corpus, folder, n_documents=400, seed=7)
    return folder, data


def tiny_model():
    torch.manual_seed(7)
    return Llama(TINY, compute_dtype=torch.float32)


def train(work, name, *, stops):
    """Run in legs of the given numbers of steps, each leg a fresh model that resumes from the file."""
    folder, data = work
    for n_steps in stops:
        model = tiny_model()
        run(model, data, name=name, work=folder, recipe=SMALL, stop_after_steps=n_steps)
    return model, folder


def test_resumed_run_ends_in_the_weights_of_the_uninterrupted_run(work):
    whole, _ = train(work, "whole", stops=[4])
    resumed, folder = train(work, "resumed", stops=[2, 2])
    for (name, expected), (_, actual) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(expected, actual), name
    losses = [json.loads(line)["loss"] for line in (folder / "resumed.log.jsonl").read_text().splitlines()]
    assert losses == [json.loads(line)["loss"] for line in (folder / "whole.log.jsonl").read_text().splitlines()]


def test_loss_falls(work):
    _, folder = train(work, "falling", stops=[12])
    losses = [json.loads(line)["loss"] for line in (folder / "falling.log.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.2


def test_distillation_is_zero_for_the_teacher_itself_and_positive_for_another(work):
    _, data = work
    tokens, targets = Sampler(data, seed=3).batch(rows=3, row_tokens=64, book_fraction=0.5)
    teacher, other = tiny_model(), tiny_model()
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    assert float(distillation_loss(teacher, teacher, tokens, targets).detach()) == pytest.approx(0, abs=1e-3)
    assert float(distillation_loss(other, teacher, tokens, targets).detach()) > 1


def test_student_approaches_its_teacher(work):
    folder, data = work
    teacher, student = tiny_model(), tiny_model()
    for parameter in teacher.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    run(student, data, name="student", work=folder, recipe=SMALL, teacher=teacher, stop_after_steps=10)
    losses = [json.loads(line)["loss"] for line in (folder / "student.log.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]


def test_sampler_repeats_itself_from_its_two_cursors(work):
    _, data = work
    first = Sampler(data, seed=1)
    first.batch(rows=4, row_tokens=128, book_fraction=0.5)
    second = Sampler(data, seed=1)
    second.book_tokens_seen, second.next_document = first.book_tokens_seen, first.next_document
    for expected, actual in zip(
        first.batch(rows=4, row_tokens=128, book_fraction=0.5),
        second.batch(rows=4, row_tokens=128, book_fraction=0.5),
        strict=True,
    ):
        assert torch.equal(expected, actual)


def test_targets_are_the_next_tokens_or_ignored(work):
    _, data = work
    tokens, targets = Sampler(data, seed=2).batch(rows=6, row_tokens=256, book_fraction=0.5)
    assert tokens.shape == targets.shape == (6, 256)
    counted = targets[:, :-1] != IGNORED
    assert torch.equal(tokens[:, 1:][counted], targets[:, :-1][counted])
    assert 0.5 < counted.float().mean() < 1


def test_learning_rate_warms_up_stays_and_decays():
    factors = [lr_factor(tokens, 1000) for tokens in range(0, 1000, 5)]
    assert factors[0] < 0.1
    assert factors[40] == factors[100] == 1.0
    assert factors[-1] < 0.1
    assert max(factors) == 1.0


def test_last_part_of_a_run_has_long_rows():
    assert batch_shape(0, RECIPE) == (4, 512)
    assert batch_shape(RECIPE.total_tokens - 1, RECIPE) == (2, 4096)


@pytest.mark.parametrize("n_tokens", [1, 7, 256, 300, 1030])
def test_blocked_attention_is_causal_attention(n_tokens):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n_tokens, 8, dtype=torch.float64) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(causal_attention(q, k, v), expected)


def test_exported_folder_gives_the_same_logits_in_transformers(work, tmp_path):
    """The training model is written here; the oracle says that it is a Llama."""
    folder, _ = work
    model = tiny_model()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    export_model(model, Tokenizer.from_file(str(folder / "tokenizer.json")), tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    loaded = load_exported(tmp_path)
    tokens = torch.randint(0, TINY.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(loaded.logits(tokens), oracle(tokens).logits, atol=1e-4, rtol=1e-4)
    assert shape_of(json.loads((tmp_path / "config.json").read_text())) == TINY


def test_held_out_loss_of_an_even_guess_is_the_log_of_the_vocabulary(work):
    folder, _ = work
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = (folder / "heldout.txt").read_text(encoding="utf-8")[:3000]
    report = held_out_loss(lambda ids: torch.zeros(1, ids.shape[1], 4096), tokenizer, text, row_tokens=100)
    assert report.loss == pytest.approx(8.3178, abs=1e-3)
    assert report.perplexity == pytest.approx(4096, rel=1e-3)
    assert list(report.buckets) == ["0-63", "64-99"]
    rows = held_out_rows(tokenizer, text, 100)
    assert sum(len(row) - 1 for row in rows) == report.n_tokens == len(tokenizer.encode(text.strip()).ids) - 1
