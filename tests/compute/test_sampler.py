"""Drawing tokens: the distributions of `transformers`, noise from (seed, position) alone, rows apart from each other."""

import math
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.compute.ops.cpu.model import CpuModel
from diptych.compute.sampling.drawing import Drawing, PlainDrawing, draw, uniform
from diptych.compute.sampling.sampler import Sampler
from diptych.ground.errors import BadSampling, InternalError, SequenceError
from diptych.ground.request import SamplingParams
from diptych.ground.step import SequenceStart

PROMPT = (3, 5, 5, 7)
EOS = (0, 1)


@pytest.fixture(params=["numpy", pytest.param("native", marks=pytest.mark.native)])
def drawing(request: pytest.FixtureRequest) -> Drawing:
    """The two ways to weigh a whole vocabulary."""
    if request.param == "numpy":
        return PlainDrawing()
    if not cpu_kernels.instruction_sets():
        pytest.skip("the native kernels are not installed")
    return native_drawing()


def native_drawing() -> Drawing:
    """A native model's weights, without the model."""
    native = SimpleNamespace(program=cpu_kernels._cpu.Program(cpu_kernels.instruction_sets()[0], 2))
    return SimpleNamespace(argmax=partial(CpuModel.argmax, native), weigh=partial(CpuModel.weigh, native))


def started(
    vocab_size: int = 50, *, seed: int = 11, seq_id: int = 1, drawing: Drawing | None = None, **options: object
) -> Sampler:
    sampler = Sampler(vocab_size, drawing=drawing)
    sampler.begin(start(seed=seed, seq_id=seq_id, **options))
    return sampler


def start(*, seed: int = 11, seq_id: int = 1, **options: object) -> SequenceStart:
    sampling = SamplingParams(**{"max_tokens": 1000, **options})
    return SequenceStart(seq_id=seq_id, prompt_token_ids=PROMPT, sampling=sampling, seed=seed, eos_token_ids=EOS)


def logits(vocab_size: int = 50, *, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def drawn_frequencies(row_V: torch.Tensor, params: SamplingParams, n: int = 2000) -> np.ndarray:
    """The exact probability of each token up to 1/n: how much of [0, 1) each one is drawn for."""
    values = row_V.numpy()
    counts = Counter(draw(values, params, (i + 0.5) / n) for i in range(n))
    return np.array([counts[token_id] / n for token_id in range(len(row_V))])


WARPS = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 500},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 1.8},
    {"top_p": 0.0001},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
    {"top_p": 0.9, "min_p": 0.1, "temperature": 2.0},
    {"temperature": 0.01, "top_p": 0.9},
]


@pytest.mark.parametrize("vocab_size", [50, 3000])
@pytest.mark.parametrize("options", WARPS, ids=str)
def test_distribution_equals_that_of_transformers(options, vocab_size):
    """The cuts and their order: a different order of top-p and min-p gives different text for the same request."""
    row_V = logits(vocab_size, spread=2.0)[0]
    params = SamplingParams(**options)
    warpers = LogitsProcessorList()
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k is not None:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    expected = torch.softmax(warpers(None, row_V.double()[None]), -1)[0].numpy()
    np.testing.assert_allclose(drawn_frequencies(row_V, params, 2000), expected, atol=1.5 / 2000)


def test_top_p_of_a_flat_distribution_is_exact():
    """Random weights and high temperatures: the set is larger than the first candidates, so the histogram finds it."""
    row_V = logits(1200, spread=0.1)[0]
    expected = torch.softmax(TopPLogitsWarper(0.93)(None, row_V.double()[None]), -1)[0]
    kept = {int(token_id) for token_id in torch.nonzero(expected)}
    assert 1024 < len(kept) < 1200
    # every kept token has more than 1/n, so all of them and no other must come
    n = 2500
    assert float(expected[expected > 0].min()) > 1 / n
    assert {draw(row_V.numpy(), SamplingParams(top_p=0.93), (i + 0.5) / n) for i in range(n)} == kept


def test_ties_at_the_border_of_top_k_are_kept():
    """bf16 logits tie often; dropping some of the tied would favour low ids."""
    row_V = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    frequencies = drawn_frequencies(row_V, SamplingParams(top_k=2), 6000)
    expected = torch.softmax(TopKLogitsWarper(2)(None, row_V[None]), -1)[0].numpy()
    assert np.count_nonzero(frequencies) == 4
    np.testing.assert_allclose(frequencies, expected, atol=1e-3)


def test_penalties_equal_transformers_and_openai():
    """Repetition over prompt and output (Hugging Face), presence and frequency over output (OpenAI)."""
    sampler = started(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.6, frequency_penalty=0.4)
    known = list(PROMPT)
    for step in range(60):
        raw = logits(seed=step, spread=1.0)
        expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([known]), raw.clone())[0]
        for token_id, count in Counter(known[len(PROMPT) :]).items():
            expected[token_id] -= 0.6 + 0.4 * count
        token = sampler.sample(raw, [1], [len(known)])[0].token_id
        assert token == int(expected.argmax()), step
        known.append(token)
    assert len(set(known)) > 20


def test_logit_bias_moves_tokens():
    """-100 bans and +100 forces, as OpenAI documents."""
    raw = logits()
    best = int(raw.argmax())
    assert started(temperature=0.0, logit_bias={best: -100.0}).sample(raw, [1], [4])[0].token_id != best
    assert started(temperature=1.0, logit_bias={9: 100.0}).sample(raw, [1], [4])[0].token_id == 9
    with pytest.raises(BadSampling, match="logit_bias names token 50"):
        started(logit_bias={50: 1.0})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_is_not_drawn_before_min_tokens(temperature):
    """min_tokens bans every EOS id and stop token id, and only until then."""
    raw = torch.zeros(1, 50)
    raw[0, [0, 1, 2]] = torch.tensor([50.0, 49.0, 48.0])
    sampler = started(temperature=temperature, min_tokens=2, stop_token_ids=(2,))
    tokens = [sampler.sample(raw, [1], [4 + i])[0].token_id for i in range(3)]
    assert all(token_id not in (0, 1, 2) for token_id in tokens[:2])
    assert tokens[2] in (0, 1, 2)


def test_noise_is_uniform_and_independent():
    """Chi-square over positions of one seed, over seeds at one position, and over neighbouring pairs."""
    bins, n = 64, 64000
    for values in (
        [uniform(123, position) for position in range(n)],
        [uniform(seed, 5) for seed in range(n)],
        [uniform(-(2**63), position) for position in range(n)],
    ):
        counts = np.bincount((np.array(values) * bins).astype(int), minlength=bins)
        chi2 = float(((counts - n / bins) ** 2 / (n / bins)).sum())
        assert 30 < chi2 < 110  # 63 degrees of freedom: beyond four standard deviations either way
        first, second = np.array(values[:-1]), np.array(values[1:])
        assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(n)
        assert 0.0 <= min(values) <= max(values) < 1.0


def test_drawn_frequencies_pass_chi_square():
    """The whole way through the sampler, with seeds as in production."""
    raw = logits(12, spread=1.0)
    n = 12000
    sampler = started(12, seed=77)
    counts = Counter(sampler.sample(raw, [1], [4 + i])[0].token_id for i in range(n))
    expected = torch.softmax(raw[0].double(), -1).numpy() * n
    chi2 = sum((counts[token_id] - expected[token_id]) ** 2 / expected[token_id] for token_id in range(12))
    assert chi2 < 33  # 11 degrees of freedom, p < 0.0005 beyond


OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "presence_penalty": 0.5, "top_p": 0.99, "min_p": 0.01},
    {"temperature": 0.9, "min_tokens": 3, "logit_bias": {7: 1.0}},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 3},
    {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {4: 2.0}, "min_tokens": 3},
]


@pytest.mark.native
@pytest.mark.skipif(not cpu_kernels.instruction_sets(), reason="the native kernels are not installed")
def test_the_backends_weights_draw_the_same_tokens():
    """A served model must not sample another text than the reference, whatever is asked of a row."""
    ways = (None, native_drawing())
    vocab_size, n = 3000, 40
    for i, options in enumerate(OPTIONS):
        drawn = []
        for way in ways:
            sampler = started(vocab_size, seed=i, drawing=way, **options)
            rows = [logits(vocab_size, seed=1000 * i + step, spread=1.0 + step % 4) for step in range(n)]
            drawn.append([sampler.sample(rows[step], [1], [4 + step])[0] for step in range(n)])
        assert drawn[0] == drawn[1], options
    flat = logits(vocab_size, spread=0.01)
    options = {"top_p": 0.9, "temperature": 1.5}
    tokens = [started(vocab_size, drawing=way, **options).sample(flat, [1], [4])[0] for way in ways]
    assert tokens[0] == tokens[1]


def test_neighbours_change_nothing(drawing):
    """The same sequence, alone and in every company, draws the same tokens and reports the same log-probabilities."""
    vocab_size = 3000
    rows = [[logits(vocab_size, seed=100 * i + step)[0] for step in range(6)] for i in range(len(OPTIONS))]
    alone = []
    for i, options in enumerate(OPTIONS):
        sampler = started(vocab_size, seed=i, seq_id=i, drawing=drawing, **options)
        alone.append([sampler.sample(rows[i][step][None], [i], [4 + step])[0] for step in range(6)])
    together = Sampler(vocab_size, drawing=drawing)
    for i, options in enumerate(OPTIONS):
        together.begin(start(seed=i, seq_id=i, **options))
    for step in range(6):
        order = [(i + step) % len(OPTIONS) for i in range(len(OPTIONS))][: len(OPTIONS) - step % 3]
        missing = [i for i in range(len(OPTIONS)) if i not in order]
        batch = torch.stack([rows[i][step] for i in order])
        for i, token in zip(order, together.sample(batch, order, [4 + step] * len(order)), strict=True):
            assert token == alone[i][step]
        for i in missing:
            assert together.sample(rows[i][step][None], [i], [4 + step])[0] == alone[i][step]


def test_drawing_a_position_again_forgets_what_came_after():
    """A rejected draft or a repeated step must leave no trace in the penalties."""
    options = {"temperature": 0.9, "repetition_penalty": 1.5, "frequency_penalty": 1.0}
    once = started(**options)
    expected = [once.sample(logits(seed=i), [1], [4 + i])[0].token_id for i in range(6)]
    again = started(**options)
    for i in range(3):
        again.sample(logits(seed=i), [1], [4 + i])
    for i in range(1, 4):
        again.sample(logits(seed=50 + i), [1], [4 + i])  # wrong logits, as of a rejected draft
    assert [again.sample(logits(seed=i), [1], [4 + i])[0].token_id for i in range(1, 6)] == expected[1:]
    skipped = again.sample(logits(), [1], [20])[0]
    assert isinstance(skipped, InternalError)
    assert "position 20" in skipped.message


def test_logprobs_are_those_of_the_model():
    """Before temperature, penalties and bans, with rank and alternatives, as OpenAI and vLLM report them."""
    raw = logits(300)
    sampler = started(300, temperature=2.0, logprobs=4, logit_bias={7: 100.0})
    token = sampler.sample(raw, [1], [4])[0]
    expected = torch.log_softmax(raw[0].double(), -1)
    assert token.token_id == token.logprobs.token_id == 7
    assert token.logprobs.logprob == pytest.approx(float(expected[7]), abs=1e-5)
    assert token.logprobs.rank == 1 + int((raw[0] > raw[0, 7]).sum())
    best = torch.topk(expected, 4)
    assert [token_id for token_id, _ in token.logprobs.top] == best.indices.tolist()
    assert [logprob for _, logprob in token.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert started(300, temperature=0.0, logprobs=0).sample(raw, [1], [4])[0].logprobs.top == ()


def test_prompt_logprobs_judge_the_given_tokens():
    """One entry per row; row p speaks about the token at p + 1."""
    rows = torch.cat([logits(300, seed=i) for i in range(5)])
    token_ids = [1, 50, 299, 4, 4]
    entries = Sampler(300).prompt_logprobs(rows, token_ids, 2)
    expected = torch.log_softmax(rows.double(), -1)
    for i, entry in enumerate(entries):
        assert entry.token_id == token_ids[i]
        assert entry.logprob == pytest.approx(float(expected[i, token_ids[i]]), abs=1e-5)
        assert entry.top[0][0] == int(rows[i].argmax())
        assert len(entry.top) == 2


def test_greedy_takes_the_first_of_equals_and_does_not_touch_logits():
    """Ties are common in bf16; and the logits belong to the model."""
    raw = torch.tensor([[1.0, 5.0, 5.0, 2.0], [7.0, 7.0, 0.0, 7.0]])
    before = raw.clone()
    sampler = Sampler(4)
    sampler.begin(start(seq_id=1, temperature=0.0))
    sampler.begin(start(seq_id=2, temperature=0.0, frequency_penalty=1.0))
    assert [token.token_id for token in sampler.sample(raw, [1, 2], [4, 4])] == [1, 0]
    assert torch.equal(raw, before)
    sampler.end(2)
    sampler.end(99)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}])
def test_logits_that_are_not_numbers_fail_their_own_row_alone(options, drawing):
    """Drawing from NaN would give plausible rubbish; failing every row would punish those who did nothing."""
    good, bad = logits(seed=1), logits()
    bad[0, 17] = math.nan
    sampler = Sampler(50, drawing=drawing)
    for seq_id in (1, 2, 3):
        sampler.begin(start(seq_id=seq_id, **options))
    first, second, third = sampler.sample(torch.cat([good, bad, good]), [1, 2, 3], [4, 4, 4])
    assert isinstance(second, SequenceError)
    assert "the largest logit is nan" in second.message
    alone = started(drawing=drawing, **options).sample(good, [1], [4])[0]
    assert first == third == alone


@pytest.mark.parametrize("options", [{"top_k": 3}, {"min_tokens": 4, "stop_token_ids": (516,)}, {"logprobs": 2}])
def test_a_nan_anywhere_in_a_wide_row_fails_it(options, drawing):
    """One behind the last whole block, or at a masked token, was passed over: the others were drawn from."""
    bad = torch.zeros(1, 517)
    bad[0, 516] = math.nan
    sampler = Sampler(517, drawing=drawing)
    sampler.begin(start(**options))
    assert isinstance(sampler.sample(bad, [1], [4])[0], SequenceError)


def test_a_row_that_meets_a_bug_of_ours_is_the_error_of_its_sequence(caplog):
    """A mistake in one option's code must cost one answer and leave a trace in the log."""
    sampler = Sampler(50)
    sampler.begin(start(seq_id=1, temperature=0.0))
    sampler.begin(start(seq_id=2, presence_penalty=1.0))
    state = sampler._states[2]
    assert state.penalty is not None
    state.penalty._ids = np.array([10**6])  # an id outside the vocabulary, as a wrong rollback would leave
    state.penalty._slots = {10**6: 0}
    good, failed = sampler.sample(logits().repeat(2, 1), [1, 2], [4, 4])
    assert good == started(temperature=0.0).sample(logits(), [1], [4])[0]
    assert isinstance(failed, SequenceError)
    assert "IndexError" in failed.message
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 2},
        {"logprobs": 0},
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
    ],
)
def test_only_sequences_that_take_the_raw_argmax_are_plain(options):
    """A step is run without logits where all are plain: what is called plain by mistake loses its option silently."""
    sampler = Sampler(50)
    sampler.begin(start(seq_id=1, temperature=0.0, stop_token_ids=(3,)))
    sampler.begin(start(seq_id=2, **{"temperature": 0.0, **options}))
    assert sampler.is_plain([1])
    assert not sampler.is_plain([1, 2])
    sampler.end(2)
    assert sampler.is_plain([1, 2])


def test_backends_own_argmax_is_used():
    """The CPU backend has one that needs no torch."""
    calls = []

    class Counted(PlainDrawing):
        def argmax(self, logits_RV: torch.Tensor) -> list[int]:
            calls.append(logits_RV.shape)
            return super().argmax(logits_RV)

    sampler = Sampler(50, drawing=Counted())
    sampler.begin(start(temperature=0.0))
    assert sampler.sample(logits(), [1], [4])[0].token_id == int(logits().argmax())
    assert calls == [(1, 50)]
