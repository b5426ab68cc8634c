"""The online step-time model, against machines of known law."""

from __future__ import annotations

import random

import pytest

from diptych.cost.step_time import StepTimeModel, features_of
from diptych.ground.phase import Phase
from diptych.ground.shape import ChunkShape, StepShape


def shape_of(*chunks):
    """(phase, start, tokens) triples."""
    return StepShape([ChunkShape(phase, n_tokens, start, phase is Phase.DECODE) for phase, start, n_tokens in chunks])


def random_shape(rng):
    decodes = [(Phase.DECODE, rng.randint(10, 4000), 1) for _ in range(rng.randint(0, 16))]
    prefills = [(Phase.PREFILL, rng.randint(0, 2000), rng.randint(16, 512)) for _ in range(rng.randint(0, 2))]
    return shape_of(*(decodes + prefills or [(Phase.DECODE, 5, 1)]))


def machine(coefficients):
    return lambda a_shape: sum(c * x for c, x in zip(coefficients, features_of(a_shape), strict=True))


FAST = (0.001, 2e-6, 1e-5, 1e-11, 1e-9)
LAPTOP = (0.02, 0.001, 0.0003, 3e-8, 4e-7)
SLOW = (0.3, 0.02, 0.002, 1e-6, 1e-5)


def test_features_count_rows_pairs_and_context():
    """The quantities themselves, by hand: 1 decode at context 10, prefill of 3 tokens after 5."""
    features = features_of(shape_of((Phase.DECODE, 9, 1), (Phase.PREFILL, 5, 3)))
    assert features == (1.0, 4.0, 1.0, 6.0 + 7.0 + 8.0, 10.0)


@pytest.mark.parametrize("law", [FAST, LAPTOP, SLOW])
def test_learns_a_machine_of_any_speed(law):
    """After 100 noisy steps the estimate is within 10 % on unseen plans, four orders of magnitude apart."""
    rng = random.Random(1)
    true_s, model = machine(law), StepTimeModel()
    for _ in range(100):
        step = random_shape(rng)
        model.observe(step, true_s(step) * rng.uniform(0.95, 1.05))
    errors = [abs(model.estimate_s(p) / true_s(p) - 1.0) for p in (random_shape(rng) for _ in range(200))]
    assert sorted(errors)[180] < 0.10
    assert model.margin < 0.2


@pytest.mark.parametrize("law", [FAST, LAPTOP])
def test_is_careful_before_it_has_data(law):
    """A first long chunk must not break the stall budget because nothing was known."""
    rng = random.Random(2)
    true_s, model = machine(law), StepTimeModel()
    assert all(model.predict_s(p) > true_s(p) for p in (random_shape(rng) for _ in range(100)))


def test_decode_steps_alone_do_not_make_prefill_look_free():
    """Only decode was seen so far: a prefill of 512 tokens must not be predicted like one token."""
    true_s, model = machine(LAPTOP), StepTimeModel()
    for k in range(200):
        step = shape_of(*[(Phase.DECODE, 100 + k, 1)] * 4)
        model.observe(step, true_s(step))
    assert model.predict_s(shape_of((Phase.DECODE, 300, 1), (Phase.PREFILL, 0, 512))) > 0.3


def test_a_chunk_that_samples_nothing_costs_a_step():
    """One user's steps all sample one row, and the launch was taken for that row's: chunks of any size took the same time."""
    true_s, model = machine(FAST), StepTimeModel()
    for k in range(600):
        prompt = k % 40 == 0
        step = shape_of((Phase.PREFILL, 0, 8 + k // 3)) if prompt else shape_of((Phase.DECODE, 100 + k % 40, 1))
        model.observe(step, true_s(step))
    chunk = StepShape((ChunkShape(Phase.PREFILL, 16, 0, samples=False),))
    assert model.estimate_s(chunk) == pytest.approx(true_s(chunk), rel=0.05)


def test_a_hiccup_of_the_machine_does_not_spoil_the_estimate():
    """One step in fifty takes thirty times as long because the machine was busy elsewhere."""
    rng = random.Random(3)
    true_s, model = machine(LAPTOP), StepTimeModel()
    for k in range(300):
        step = random_shape(rng)
        model.observe(step, true_s(step) * (30.0 if k % 50 == 40 else 1.0))
    probes = [random_shape(rng) for _ in range(100)]
    assert sorted(abs(model.estimate_s(p) / true_s(p) - 1.0) for p in probes)[90] < 0.10


def test_follows_a_machine_that_changes():
    """Memory speed has two states here: after a change of 1.6 times the model comes along."""
    rng = random.Random(4)
    true_s, model = machine(LAPTOP), StepTimeModel()
    for factor, steps in ((1.0, 300), (1.6, 600)):
        for _ in range(steps):
            step = random_shape(rng)
            model.observe(step, factor * true_s(step))
    probes = [random_shape(rng) for _ in range(100)]
    assert sorted(abs(model.estimate_s(p) / (1.6 * true_s(p)) - 1.0) for p in probes)[90] < 0.15


def test_more_work_is_never_predicted_faster():
    """Coefficients are not negative, so the stall search is monotone."""
    rng = random.Random(5)
    model = StepTimeModel()
    for _ in range(60):
        model.observe(random_shape(rng), rng.uniform(0.001, 1.0))
    times = [model.predict_s(shape_of((Phase.DECODE, 50, 1), (Phase.PREFILL, 0, n))) for n in range(1, 600, 7)]
    assert times == sorted(times)


def test_ignores_times_that_are_none():
    model = StepTimeModel()
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        model.observe(shape_of((Phase.DECODE, 5, 1)), bad)
    assert model.n_observed == 0
