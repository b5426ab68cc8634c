"""Workloads: the processes they claim to be, the same on every machine, and traces read as published."""

from __future__ import annotations

import json
import random
import tracemalloc
from dataclasses import replace
from itertools import islice

import pytest

from diptych.ground.errors import ConfigError
from diptych.workload import (
    LengthRange,
    WorkloadItem,
    WorkloadSpec,
    arrivals,
    items_of,
    make_workload,
    open_trace,
    spread_ticks,
    token_ids_of,
)


def spec(**changes):
    base = WorkloadSpec(
        n_requests=50, prompt=LengthRange(low=10, high=20), output=LengthRange(low=1, high=8), rate_per_s=2.0, seed=7
    )
    return replace(base, **changes)


def gaps_of(times):
    return [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]


def moments(values):
    mean = sum(values) / len(values)
    return mean, sum((v - mean) ** 2 for v in values) / len(values) / mean**2


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 4.0), (4.0, 0.25)])
def test_gaps_have_the_mean_and_the_spread_of_their_process(burstiness, variation):
    """Squared coefficient of variation 1 is Poisson; gamma gaps of shape k have 1 / k."""
    gaps = gaps_of(list(islice(arrivals(5.0, burstiness=burstiness, seed=3), 40_000)))
    mean, spread = moments(gaps)
    assert mean == pytest.approx(0.2, rel=0.03)
    assert spread == pytest.approx(variation, rel=0.08)


def test_schedule_is_not_stretched_to_the_nominal_length():
    """Rescaling the last arrival to n / rate makes short runs less random than Poisson is; counts must vary."""
    ends = [list(islice(arrivals(1.0, seed=seed), 16))[-1] for seed in range(400)]
    mean, spread = moments(ends)
    assert mean == pytest.approx(16.0, rel=0.05)
    assert spread == pytest.approx(1 / 16, rel=0.25)


def test_same_spec_same_load_and_streams_are_separate():
    """Changing the rate may not change the lengths, or two rates could not be compared."""
    first = make_workload(spec())
    assert first == make_workload(spec())
    assert first != make_workload(spec(seed=8))
    faster = make_workload(spec(rate_per_s=20.0))
    assert [item.prompt_tokens for item in faster] == [item.prompt_tokens for item in first]
    assert [item.output_tokens for item in faster] == [item.output_tokens for item in first]
    assert [item.at_s for item in faster] == pytest.approx([item.at_s / 10 for item in first])
    assert {item.at_s for item in make_workload(spec(rate_per_s=None))} == {0.0}


def test_this_load_stays_what_it_was():
    """A published command names a seed; the load behind it must not change unnoticed."""
    items = make_workload(spec(n_requests=3))
    assert [(item.prompt_tokens, item.output_tokens) for item in items] == [(12, 2), (11, 7), (11, 7)]
    assert [round(item.at_s, 6) for item in items] == [0.34853, 1.592981, 1.717899]


def test_lengths_cover_the_range_and_prompts_have_them():
    items = make_workload(spec(n_requests=400))
    assert {item.prompt_tokens for item in items} == set(range(10, 21))
    assert {item.output_tokens for item in items} == set(range(1, 9))
    for item in items[:20]:
        token_ids = token_ids_of(item, vocab_size=64, seed=1, low_id=3)
        assert len(token_ids) == item.prompt_tokens
        assert all(3 <= token_id < 64 for token_id in token_ids)
        assert token_ids == token_ids_of(item, vocab_size=64, seed=1, low_id=3)
    assert token_ids_of(items[0], vocab_size=64, seed=1) != token_ids_of(items[1], vocab_size=64, seed=1)


def test_shared_prefixes_are_shared_and_tails_are_not():
    items = make_workload(spec(shared_prefix_tokens=16, n_prefixes=3))
    prompts = [token_ids_of(item, vocab_size=50_000) for item in items]
    assert all(26 <= len(prompt) <= 36 for prompt in prompts)
    assert len({prompt[:16] for prompt in prompts}) == 3
    assert len({prompt[16:] for prompt in prompts}) == 50


def test_a_shared_prefix_is_drawn_once(monkeypatch):
    """A client that drew 8,192 tokens again before each request held it back for 3 ms."""
    drawn = []

    class Counted(random.Random):
        def __init__(self, seed):
            drawn.append(seed)
            super().__init__(seed)

    monkeypatch.setattr("diptych.workload.random.Random", Counted)
    items = make_workload(spec(shared_prefix_tokens=17, n_prefixes=1))
    for item in items:
        token_ids_of(item, vocab_size=40_000)
    assert drawn.count("prefix 0 0") <= 1
    assert drawn.count("prompt 0 7") == 1


@pytest.mark.parametrize(("text", "low", "high"), [("64:512", 64, 512), ("7", 7, 7), ("1:1", 1, 1)])
def test_length_range_reads_its_notation(text, low, high):
    assert LengthRange.parse(text) == LengthRange(low=low, high=high)


@pytest.mark.parametrize("text", ["", ":", "5:", "a:b", "1:2:3", "-1:4", "0:4", "9:3", "1.5", "²", "9" * 5000])
def test_length_range_refuses_anything_else(text):
    with pytest.raises(ConfigError, match=r"--prompt is .*; it must be N or LOW:HIGH"):
        LengthRange.parse(text, "--prompt")


@pytest.mark.parametrize(
    "changes",
    [
        {"n_requests": 0},
        {"rate_per_s": 0.0},
        {"rate_per_s": -1.0},
        {"rate_per_s": 1e-308},
        {"burstiness": 0.0},
        {"burstiness": 1e-320},
        {"burstiness": 1e308},
        {"n_prefixes": 0},
    ],
)
def test_impossible_specs_are_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        spec(**changes)


def test_azure_trace_is_read_with_both_time_notations(tmp_path):
    """2023 writes seven fractional digits and no zone, 2024 six and a zone; lines are not always in order."""
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-16 18:15:47,0,0\n"
    )
    items = tuple(open_trace(path))
    assert [(item.prompt_tokens, item.output_tokens) for item in items] == [(374, 44), (1, 1), (396, 109)]
    assert [item.at_s for item in items] == pytest.approx([0.0, 0.319410, 4.314579], abs=1e-6)
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:01.517000+00:00,2399,6\n"
    )
    assert [item.at_s for item in open_trace(path)] == pytest.approx([0.0, 1.50707], abs=1e-6)


def test_instants_of_a_trace_are_compared_in_utc(tmp_path):
    """Where clocks are put back, two seconds were an hour, and the later request came first."""
    path = tmp_path / "autumn.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-10-29 02:59:59.5+02:00,5,1\n"
        "2023-10-29 02:00:01.5+01:00,6,1\n"
        "2023-10-29 01:00:02,7,1\n",
        "utf-8",
    )
    assert [(item.at_s, item.prompt_tokens) for item in open_trace(path)] == [(0.0, 5), (2.0, 6), (2.5, 7)]


def test_mooncake_trace_shares_the_blocks_of_equal_hashes(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 27000, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
        {"timestamp": 30500, "input_length": 1030, "output_length": 26, "hash_ids": [46, 47, 2]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    items = tuple(open_trace(path))
    assert items[1] == WorkloadItem(
        index=1, at_s=3.5, prompt_tokens=1030, output_tokens=26, prefix_ids=(46, 47, 2), prefix_block_tokens=512
    )
    first, second = (token_ids_of(item, vocab_size=32_000) for item in items)
    assert (len(first), len(second)) == (1100, 1030)
    assert first[:1024] == second[:1024]
    assert first[1024:1030] != second[1024:]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens\n", "no column GeneratedTokens"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n", "a.csv line 2"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,4\n", "a.csv line 2"),
        ("m.jsonl", '{"timestamp": 1, "input_length": 4, "output_length": 2}\n{"timestamp": 1}\n', "m.jsonl line 2"),
        ("m.jsonl", "{not json\n", "m.jsonl line 1"),
        ("m.txt", "neither\n", "m.txt has no column ContextTokens, GeneratedTokens, TIMESTAMP"),
        ("a.csv", "ContextTokens,GeneratedTokens,TIMESTAMP\n1,2\n", "a.csv line 2 .*isoformat"),
        ("a.csv", '"' + "x" * 200_000, "a.csv line 1 .*field limit"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "x" * 200_000, "a.csv line 2 .*field limit"),
        ("m.jsonl", '{"timestamp": ' + "[" * 100_000, "m.jsonl line 1 .*recursion"),
        (
            "m.jsonl",
            '{"timestamp": 1, "input_length": 4, "output_length": 2}\n[1, 2]\n',
            "m.jsonl line 2 .*no JSON object",
        ),
        # numbers that were cut to whole ones, and cells that were passed over
        (
            "m.jsonl",
            '{"timestamp": 1, "input_length": 4.7, "output_length": 2}',
            "input_length is 4.7; it must be a whole",
        ),
        ("m.jsonl", '{"timestamp": 1, "input_length": 4, "output_length": true}', "output_length is True; it must be"),
        ("m.jsonl", '{"timestamp": "1", "input_length": 4, "output_length": 2}', "timestamp is '1'; .* milliseconds"),
        (
            "m.jsonl",
            '{"timestamp": 1, "input_length": 4, "output_length": 2, "hash_ids": "12"}',
            "hash_ids is '12'; it",
        ),
        ("m.jsonl", '{"timestamp": 1, "input_length": 4, "output_length": 2, "hash_ids": [1.5]}', "hash id is 1.5; it"),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,4,2,7\n",
            "a.csv line 2 .*1 more cells",
        ),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1.5,1\n", "ContextTokens is '1.5'; it"),
    ],
)
def test_a_broken_trace_names_its_line(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        open_trace(path)


def test_a_trace_may_begin_with_a_byte_order_mark(tmp_path):
    """It was passed over when the format was told, and refused when the line was read."""
    path = tmp_path / "m.jsonl"
    path.write_text('{"timestamp": 5, "input_length": 4, "output_length": 2, "hash_ids": null}', "utf-8-sig")
    assert [(item.at_s, item.prompt_tokens, item.prefix_ids) for item in open_trace(path)] == [(0.0, 4, ())]


def test_a_trace_may_begin_with_empty_lines(tmp_path):
    """They were passed over when lines were read, but the format was told by the first: JSON was no CSV."""
    path = tmp_path / "m.jsonl"
    path.write_text('\n\n{"timestamp": 5, "input_length": 4, "output_length": 2}\n')
    assert [(item.at_s, item.prompt_tokens) for item in open_trace(path)] == [(0.0, 4)]


def test_ticks_are_spread_until_the_next_one():
    """Mooncake's arrivals are ticks of 3 s: all at once would be a burst that nobody sent."""
    items = tuple(
        WorkloadItem(index=i, at_s=at_s, prompt_tokens=1, output_tokens=1) for i, at_s in enumerate((0, 0, 0, 3, 3, 9))
    )
    assert [item.at_s for item in spread_ticks(items)] == [0.0, 1.0, 2.0, 3.0, 6.0, 9.0]


def test_a_load_drawn_one_by_one_is_the_same_load():
    """Prefixes, lengths and arrivals draw from streams of their own, whoever asks."""
    wanted = spec(shared_prefix_tokens=64, n_prefixes=3)
    assert tuple(items_of(wanted)) == make_workload(wanted)


def test_a_trace_is_read_item_by_item(tmp_path):
    """A day of a million requests was held in memory whole; now a line is let go before the next is read."""
    path = tmp_path / "day.csv"
    rows = (f"2023-11-16 18:{i // 60:02}:{i % 60:02}.5,{100 + i % 900},{1 + i % 50}\n" for i in range(3600))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows), "utf-8")
    whole = tuple(open_trace(path))
    tracemalloc.start()
    try:
        trace = open_trace(path)
        peak_bytes = 0
        for i, item in enumerate(trace):
            assert item == whole[i]
            if i % 200 == 0:
                peak_bytes = max(peak_bytes, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert trace.n_requests == len(whole) == 3600
    assert peak_bytes < 100_000, "a WorkloadItem alone takes 100 bytes and more"


def test_a_trace_out_of_order_is_sorted_as_before(tmp_path):
    """Streaming must not hand out what comes later in the file and earlier in time too late."""
    path = tmp_path / "t.jsonl"
    lines = [{"timestamp": ms, "input_length": 10, "output_length": n} for n, ms in enumerate((3000, 0, 0, 9000), 1)]
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    assert [(item.at_s, item.output_tokens) for item in open_trace(path, limit=3)] == [(0.0, 2), (1.5, 3), (3.0, 1)]
