"""The cheapest fitting setup: the queue's arithmetic, and refusing a verdict that the interval does not carry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.cost.calibration import Residual
from diptych.cost.setup import setup_of
from diptych.cost.sizing import (
    Ask,
    End,
    Judgement,
    judge,
    parse_ask,
    parse_duration_s,
    parse_rate,
    size,
    steady_state,
)
from diptych.ground.errors import ConfigError
from diptych.ground.shape import StepShape

ASK = Ask(ttft_s=0.5, tpot_s=0.05, requests_per_s=3.0, input_tokens=1500, output_tokens=200)


def with_spread(setup, low: float, high: float):
    """The same setup with another interval around its predictions."""
    residual = Residual(low=low, high=high, median_error=0.0, rows=10)
    calibration = replace(
        setup.calibration, prefill_residual=residual, decode_residual=residual,
        prefill_coverage=None, decode_coverage=None,
    )  # fmt: skip
    return replace(setup, calibration=calibration)


def test_ask_is_read_with_units():
    """The documented form, and other units."""
    assert parse_ask("ttft=500ms,tpot=50ms,rate=3/s,in=1500,out=200") == ASK
    other = parse_ask("ttft=0.5s, tpot=0.05s, rate=180/min, in=1500, out=200")
    assert (other.ttft_s, other.tpot_s) == (0.5, 0.05)
    assert other.requests_per_s == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ttft=500ms", "does not say tpot, rate, in, out"),
        ("ttft=fast,tpot=50ms,rate=3/s,in=1500,out=200", "ttft is 'fast'"),
        ("ttft=500,tpot=50ms,rate=3/s,in=1500,out=200", "with its unit"),
        ("ttft=500ms,tpot=0ms,rate=3/s,in=1500,out=200", "tpot is '0ms'"),
        ("ttft=500ms,tpot=50ms,rate=0/s,in=1500,out=200", "rate is '0/s'"),
        ("ttft=500ms,tpot=50ms,rate=3/s,in=1.5,out=200", "in is '1.5'"),
        ("price=1", "cannot read 'price=1'"),
        ("ttft=1s,ttft=2s,tpot=50ms,rate=3/s,in=15,out=20", "says ttft twice: 1s and 2s"),
        (f"ttft=1s,tpot=50ms,rate={'9' * 400},in=15,out=20", "rate is '999"),
        (f"ttft={'9' * 400}s,tpot=50ms,rate=3/s,in=15,out=20", "ttft is '999"),
        (f"ttft=1s,tpot=50ms,rate=3/s,in={'9' * 5000},out=20", "1 to 1,000,000,000"),
    ],
)
def test_a_wrong_ask_is_refused_by_part(text, words):
    """No default is slipped in for a limit that was not understood."""
    with pytest.raises(ConfigError, match=words):
        parse_ask(text)


def test_steady_state_satisfies_its_own_equations():
    """TPOT (1 - r t_pf) = t_dec(B) and B = r OSL TPOT (Little's law) at the fixed point."""
    predictor = setup_of("llama-3.1-8b", "a100-80gb-sxm").model_of_time()
    load = steady_state(predictor, ASK, end=End.MIDDLE)
    assert load.prefill_share == pytest.approx(3.0 * load.prefill_s)
    assert load.batch == pytest.approx(3.0 * 200 * load.tpot_s, rel=0.01)
    step_s = predictor.predict(StepShape.decode(batch=round(load.batch), context_tokens=1600)).total_s
    assert load.tpot_s * (1 - load.prefill_share) == pytest.approx(step_s, rel=0.03)
    assert load.wait_s == pytest.approx(load.prefill_share * load.prefill_s / (2 * (1 - load.prefill_share)))


def test_an_instance_that_cannot_keep_up_has_no_steady_state():
    """At 100 prompts a second the queue grows without end; a finite number would be a lie."""
    predictor = setup_of("llama-3.1-8b", "a100-80gb-sxm").model_of_time()
    assert steady_state(predictor, replace(ASK, requests_per_s=100.0), end=End.MIDDLE) is None


def test_verdict_is_refused_when_the_interval_straddles_the_limit():
    """The same prediction decides with a narrow interval and does not with a wide one."""
    setup = setup_of("llama-3.1-8b", "a100-80gb-sxm")
    load = steady_state(setup.model_of_time(), ASK, end=End.MIDDLE)
    tight = replace(ASK, ttft_s=load.ttft_s * 1.1)
    narrow = judge(with_spread(setup, -0.02, 0.02), tight, prices={})
    wide = judge(with_spread(setup, -0.3, 0.4), tight, prices={})
    assert [(c.verdict, c.instances) for c in narrow] == [(Judgement.MEETS, 1)]
    assert wide[0].verdict is Judgement.UNDECIDED
    assert "slow end of the interval" in wide[0].reason


def test_cheapest_by_price_then_by_devices():
    """The user's own price beats the table's; without any price fewer devices win."""
    setups = [setup_of("llama-3.1-8b", name) for name in ("a100-80gb-sxm", "h100-80gb-sxm")]
    table = size(setups, ASK, prices={})
    own = size(setups, ASK, prices={"h100-80gb-sxm": 0.5})
    assert table.best.setup.hardware.name == "a100-80gb-sxm"
    assert own.best.setup.hardware.name == "h100-80gb-sxm"
    assert own.best.usd_per_hour == 0.5
    assert any("price of a100" in note for note in table.unmeasured)
    assert not any("price of h100" in note for note in own.unmeasured)
    unpriced = size([setup_of("llama-3.1-8b", "mi325x", tp=tp) for tp in (2, 1)], ASK, prices={})
    assert unpriced.best.devices == 1
    assert any("no price" in note for note in unpriced.unmeasured)


def test_more_traffic_needs_more_instances():
    """Replicas are added until the pessimistic end meets the limits."""
    setup = setup_of("llama-3.1-8b", "a100-80gb-sxm")
    counts = [judge(setup, replace(ASK, requests_per_s=rate), prices={})[-1].instances for rate in (1.0, 10.0, 40.0)]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


def test_fewer_instances_that_might_do_are_found():
    """Prompts that may be read faster than predicted may do with fewer instances than the prediction needs."""
    setup = setup_of("llama-3.1-8b", "a100-80gb-sxm", weights="int4")
    ask = replace(ASK, ttft_s=5.0, tpot_s=0.5, requests_per_s=10.0, input_tokens=8000, output_tokens=20)
    undecided = judge(setup, ask, prices={})[0]
    assert undecided.verdict is Judgement.UNDECIDED
    share = replace(ask, requests_per_s=ask.requests_per_s / (undecided.instances - 1))
    fewer = steady_state(setup.model_of_time(), share, end=End.FAST)
    assert fewer is None or fewer.ttft_s > ask.ttft_s or fewer.tpot_s > ask.tpot_s


def test_what_cannot_work_says_why():
    """Too little memory, too long a context, too slow even when idle, over budget."""
    small = judge(setup_of("llama-3.1-70b", "a100-80gb-sxm"), ASK, prices={})[0]
    assert "do not fit in memory" in small.reason
    long = judge(setup_of("llama-2-7b", "a100-80gb-sxm"), replace(ASK, input_tokens=5000), prices={})[0]
    assert "context of 4096" in long.reason
    slow = judge(setup_of("llama-3.1-8b", "m2-max-38"), ASK, prices={})[0]
    assert slow.verdict is Judgement.MISSES
    assert "TTFT" in slow.reason
    poor = size([setup_of("llama-3.1-8b", "h100-80gb-sxm")], ASK, prices={}, budget_usd_per_hour=1.0)
    assert poor.best is None
    assert "budget" in poor.rejected[0].reason


def test_an_extrapolated_batch_is_named_as_unmeasured():
    """gpt-fast's rows are of one stream; an answer at many streams must say that it goes beyond them."""
    answer = size([setup_of("llama-3.1-8b", "a100-80gb-sxm")], ASK, prices={})
    assert any("go up to 1" in note for note in answer.unmeasured)


@pytest.mark.parametrize("text", ["1e6/s", "0/s", "-3/s", "nan", "3/day", ""])
def test_a_rate_that_is_none_is_answered_with_its_forms(text: str) -> None:
    """1e6/s "must be a positive number", which it is; that an exponent is not read was not said."""
    with pytest.raises(ConfigError, match=r"without an exponent: 3/s, 40/min or 900/h"):
        parse_rate(text)
    assert (parse_rate("3/s"), parse_rate("40/min"), parse_rate("900/h")) == (3.0, 40 / 60, 0.25)


@pytest.mark.parametrize("text", ["1h", "5", "0ms", "-5ms", "nan", ""])
def test_a_time_that_is_none_is_answered_with_its_units(text: str) -> None:
    """1h "must be a positive time with its unit", which it is; which units are read was not said."""
    with pytest.raises(ConfigError, match=r"with its unit \(us, ms, s or min\)"):
        parse_duration_s(text, "think time")
    times = [parse_duration_s(one, "think time") for one in ("250us", "5ms", "0.5s", "2min")]
    assert times == pytest.approx([0.00025, 0.005, 0.5, 120.0])
