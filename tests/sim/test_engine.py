"""The simulator: the real scheduler under predicted time, so what it says is what the same decisions would have taken."""

from __future__ import annotations

import pytest

from diptych.control.recording import Recorder, replay
from diptych.cost.calibrated import CalibratedModel
from diptych.cost.stacks import calibration_for
from diptych.cost.tables import device_spec, model_spec, quant_spec
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.shape import StepShape
from diptych.metrics import summarize
from diptych.sim.engine import SimulatedEngine
from diptych.workload import LengthRange, WorkloadSpec, requests_of

BLOCKS = BlockConfig(n_blocks=2000, block_tokens=16)
MIX = WorkloadSpec(
    n_requests=40, prompt=LengthRange(low=20, high=400), output=LengthRange(low=5, high=60), rate_per_s=8.0, seed=3
)


def seconds(shape: StepShape) -> float:
    """10 ms a step and 0.1 ms a row."""
    return 0.01 + 1e-4 * shape.n_tokens


def test_one_request_takes_the_sum_of_its_steps() -> None:
    """By hand: 300 tokens in chunks of 128 at 10 ms + 0.1 ms a row, then 4 decode steps."""
    engine = SimulatedEngine(SchedulerConfig(max_step_tokens=128), BLOCKS, predict_s=seconds)
    spec = WorkloadSpec(n_requests=1, prompt=LengthRange(low=300, high=300), output=LengthRange(low=5, high=5))
    engine.serve(requests_of(spec, vocab_size=100))
    (record,) = engine.book.records.values()
    timings = record.timings()
    assert timings.ttft_s == pytest.approx(3 * 0.01 + 300e-4)
    assert timings.itl_s == pytest.approx((0.0101,) * 4)
    assert engine.clock.now_s() == pytest.approx(timings.e2e_s)


def test_a_load_is_served_whole_and_the_same_every_time() -> None:
    """Arrivals wait for nothing but the clock: idle spells are skipped, not slept through."""

    def run() -> list[float]:
        engine = SimulatedEngine(SchedulerConfig(max_running_sequences=4), BLOCKS, predict_s=seconds)
        engine.serve(requests_of(MIX, vocab_size=1000))
        summary = summarize([record.sample() for record in engine.book.records.values()])
        assert (summary.n_complete, summary.n_failed) == (40, 0)
        engine.core.check()
        return [record.timings().e2e_s for record in engine.book.records.values()]

    assert run() == run()


def test_a_recorded_simulation_replays_identically() -> None:
    """The stall budget bisects over shapes of a calibrated model; the replay must decide as the run did."""
    device = device_spec("a100-80gb-sxm")
    predictor = CalibratedModel(
        model_spec("gemma-3-4b"), device, quant_spec("bf16"), calibration=calibration_for(device)
    )
    config = SchedulerConfig(max_running_sequences=8, stall_budget_s=0.02)
    engine = SimulatedEngine(config, BLOCKS, predict_s=predictor.predict_s)
    recorder = Recorder(engine.core)
    engine.stepper.core = recorder
    engine.serve(requests_of(MIX, vocab_size=1000))
    again = CalibratedModel(model_spec("gemma-3-4b"), device, quant_spec("bf16"), calibration=calibration_for(device))
    assert replay(recorder.lines(), predict_s=again.predict_s) == []


def test_a_book_without_notes_of_steps_has_the_same_latencies() -> None:
    """A note of each token told whose prefill it waited for, which no simulation asks: a tenth of its time."""
    samples, stalls = [], []
    for notes in (True, False):
        engine = SimulatedEngine(SchedulerConfig(), BLOCKS, predict_s=seconds, notes_steps=notes)
        engine.serve(requests_of(MIX, vocab_size=1000))
        records = engine.book.records.values()
        samples.append([(record.sample(), record.usage()) for record in records])
        stalls.append(sum(record.timings().stall_s for record in records))
    assert samples[0] == samples[1]
    assert stalls[0] > 0.0 == stalls[1]
