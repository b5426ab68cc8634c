"""The doctor must name the cause that was built in, with its numbers, from our names and from vLLM's."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from diptych.cli.doctor import app, text_of
from diptych.ground.errors import ConfigError
from diptych.insight.diagnosis import diagnose, read_scrape
from server_process import ServerProcess


def metrics(**values: float | tuple[float, float]) -> str:
    """Exposition text in vLLM's names: (mean, count) makes a histogram whose values all lie in one bucket."""
    lines = []
    for name, value in values.items():
        full = f"vllm:{name}"
        if isinstance(value, tuple):
            mean, count = value
            lines.append(f"# TYPE {full} histogram")
            for edge in (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0, 10_000.0):
                lines.append(f'{full}_bucket{{le="{edge}"}} {count if mean <= edge else 0}')
            lines += [f'{full}_bucket{{le="+Inf"}} {count}', f"{full}_sum {mean * count}", f"{full}_count {count}"]
        else:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE {full} {kind}", f"{full} {value}"]
    return "\n".join([*lines, ""])


BASE: dict[str, float | tuple[float, float]] = {
    "time_to_first_token_seconds": (5.0, 100),
    "request_queue_time_seconds": (0.1, 100),
    "request_prefill_time_seconds": (4.9, 100),
    "inter_token_latency_seconds": (0.02, 10_000),
    "request_time_per_output_token_seconds": (0.02, 100),
    "request_decode_time_seconds": (2.0, 100),
    "request_prompt_tokens": (3000.0, 100),
    "iteration_tokens_total": (50.0, 10_000),
    "generation_tokens_total": 10_000.0,
    "num_requests_running": 3.0,
    "num_requests_waiting": 0.0,
    "kv_cache_usage_perc": 0.2,
    "num_preemptions_total": 0.0,
}


def causes(**changes: float | tuple[float, float]) -> list[str]:
    return [finding.cause for finding in diagnose(read_scrape(metrics(**{**BASE, **changes}))).findings]


def test_long_prompts_are_named_with_their_length() -> None:
    diagnosis = diagnose(read_scrape(metrics(**BASE)))
    assert [finding.cause for finding in diagnosis.findings] == ["prompt length"]
    assert "3000 tokens on average" in diagnosis.findings[0].evidence
    assert "98%" in diagnosis.findings[0].evidence


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        ("queueing", {"request_queue_time_seconds": (4.5, 100), "request_prefill_time_seconds": (0.5, 100)}),
        ("prefill batching", {"iteration_tokens_total": (9000.0, 100), "request_prompt_tokens": (500.0, 100)}),
        ("cache pressure", {"num_preemptions_total": 40.0, "kv_cache_usage_perc": 0.97}),
        (
            "decode batching",
            {"request_time_per_output_token_seconds": (0.5, 100), "generation_tokens_total": 300_000.0},
        ),
        ("model size or hardware", {"request_time_per_output_token_seconds": (0.5, 100)}),
    ],
)
def test_each_cause_is_found_where_it_was_built_in(cause: str, changes: dict[str, float | tuple[float, float]]) -> None:
    assert cause in causes(**changes)
    assert cause not in causes()


def test_a_line_of_requests_is_no_cold_start() -> None:
    """Seen on a small pool: 24 requests, most of them waiting, were called a cold start beside the queueing."""
    lines = ["# TYPE vllm:time_to_first_token_seconds histogram"]
    for edge, count in ((0.1, 14), (1.0, 18), (10.0, 24)):
        lines.append(f'vllm:time_to_first_token_seconds_bucket{{le="{edge}"}} {count}')
    lines += ['vllm:time_to_first_token_seconds_bucket{le="+Inf"} 24', "vllm:time_to_first_token_seconds_sum 20", ""]
    changes = {
        "request_queue_time_seconds": (0.8, 24),
        "request_prefill_time_seconds": (0.02, 24),
        "num_preemptions_total": 28.0,
    }
    rest = metrics(
        **{name: value for name, value in {**BASE, **changes}.items() if name != "time_to_first_token_seconds"}
    )
    found = {one.cause: one for one in diagnose(read_scrape("\n".join(lines) + rest)).findings}
    assert "cold start" not in found
    assert "28 sequences lost their place" in found["queueing"].evidence


def test_a_quick_server_gets_no_finding() -> None:
    quick = {"time_to_first_token_seconds": (0.05, 100), "request_prefill_time_seconds": (0.04, 100)}
    assert causes(**quick) == []


def test_stalls_show_as_uneven_gaps_between_tokens() -> None:
    lines = ["# TYPE vllm:inter_token_latency_seconds histogram"]
    for edge, count in ((0.01, 900), (0.1, 950), (1.0, 1000)):
        lines.append(f'vllm:inter_token_latency_seconds_bucket{{le="{edge}"}} {count}')
    lines += ['vllm:inter_token_latency_seconds_bucket{le="+Inf"} 1000', "vllm:inter_token_latency_seconds_sum 40", ""]
    rest = metrics(**{name: value for name, value in BASE.items() if name != "inter_token_latency_seconds"})
    found = diagnose(read_scrape("\n".join(lines) + rest)).findings
    assert "stalls by prefill" in [finding.cause for finding in found]


def test_a_server_that_was_restarted_and_busier_since_is_read_whole() -> None:
    """100 short waits before and 200 long ones after it were -100 short ones and 300 long ones."""
    before = read_scrape(metrics(**{**BASE, "request_queue_time_seconds": (0.005, 100)}))
    after = read_scrape(metrics(**{**BASE, "request_queue_time_seconds": (5.0, 200)}))
    assert after.since(before).histograms["queue_s"] == after.histograms["queue_s"]


@pytest.mark.parametrize("stall_s", [0.0, 0.2])
def test_a_tail_is_no_stall_where_the_server_says_that_prompts_cost_nothing(stall_s: float) -> None:
    """Streams spent 0% of their time beside prompts, and "stalls by prefill" was the cause."""
    lines = ["# TYPE vllm:inter_token_latency_seconds histogram"]
    for edge, count in (("0.01", 900), ("0.1", 950), ("1.0", 1000), ("+Inf", 1000)):
        lines.append(f'vllm:inter_token_latency_seconds_bucket{{le="{edge}"}} {count}')
    lines.append("# TYPE diptych_request_phase_seconds histogram")
    for edge, count in (("0.1", 100 if stall_s == 0.0 else 0), ("1.0", 100), ("+Inf", 100)):
        lines.append(f'diptych_request_phase_seconds_bucket{{phase="stall",le="{edge}"}} {count}')
    lines += [f'diptych_request_phase_seconds_sum{{phase="stall"}} {stall_s * 100}', ""]
    rest = metrics(**{name: value for name, value in BASE.items() if name != "inter_token_latency_seconds"})
    found = [one.cause for one in diagnose(read_scrape("\n".join(lines) + rest)).findings]
    assert ("stalls by prefill" in found) == (stall_s > 0.0)


def test_of_several_engines_the_fullest_cache_counts() -> None:
    """Four caches half full were one of 200%."""
    lines = ["# TYPE vllm:kv_cache_usage_perc gauge"]
    lines += [f'vllm:kv_cache_usage_perc{{engine="{i}"}} {0.5 + i / 100}' for i in range(4)]
    lines += ["# TYPE vllm:num_requests_running gauge"]
    lines += [f'vllm:num_requests_running{{engine="{i}"}} 2' for i in range(4)]
    found = read_scrape("\n".join([*lines, ""]))
    assert found.numbers == {"kv_usage": 0.53, "running": 8.0}
    assert diagnose(found).findings == []


def test_a_gauge_called_bucket_is_no_histogram() -> None:
    """It ended the doctor in a traceback, whoever exports it."""
    found = read_scrape("# TYPE other_bucket gauge\nother_bucket 3\n" + metrics(**BASE))
    assert found.numbers["running"] == 3.0


def test_what_a_server_does_not_tell_is_no_number() -> None:
    """Of a server without vLLM's names "KV cache 0% in use" was said beside its preemptions."""
    text = "# TYPE diptych_preemptions_total counter\ndiptych_preemptions_total 5\n"
    told = [one.evidence for one in diagnose(read_scrape(text)).findings]
    assert told == ["5 preemptions for 0 requests, each of which is computed again"]


def test_a_stream_older_than_the_window_is_judged() -> None:
    """Its tokens were measured, and "there is nothing to judge" was said."""
    window = read_scrape(metrics(inter_token_latency_seconds=(0.02, 100), time_to_first_token_seconds=(0.02, 0)))
    assert "between tokens, p50" in text_of(diagnose(window))
    idle = read_scrape(metrics(inter_token_latency_seconds=(0.02, 0), time_to_first_token_seconds=(0.02, 0)))
    assert "nothing to judge" in text_of(diagnose(idle))


def test_percentiles_say_that_they_are_estimates_and_one_value_is_what_it_is() -> None:
    """Of one request whose queue and prefill took 36.7 ms the median was 30.0, the middle of its bucket."""
    text = metrics(time_to_first_token_seconds=(0.0367, 1))
    alone = diagnose(read_scrape(text))
    assert [alone.numbers[f"ttft_s.p{share}"] for share in (50, 95, 99)] == pytest.approx([0.0367] * 3)
    assert "estimates" not in text_of(alone)
    several = diagnose(read_scrape(metrics(time_to_first_token_seconds=(0.0367, 2))))
    assert "percentiles are estimates" in text_of(several)
    window = read_scrape(metrics(time_to_first_token_seconds=(0.0367, 3)))
    assert window.since(read_scrape(metrics(time_to_first_token_seconds=(0.05, 2)))).histograms["ttft_s"].quantile(
        0.5
    ) == pytest.approx(3 * 0.0367 - 2 * 0.05)


def test_a_window_looks_at_what_happened_in_it() -> None:
    before = read_scrape(metrics(**{**BASE, "request_queue_time_seconds": (1.5, 100)}))
    after = read_scrape(
        metrics(**{**BASE, "request_queue_time_seconds": (3.0, 200), "generation_tokens_total": 15_000.0})
    )
    window = after.since(before)
    assert window.histograms["queue_s"].mean == pytest.approx(4.5)
    assert window.numbers["output_tokens_total"] == 5000.0
    assert window.numbers["kv_usage"] == 0.2


@pytest.mark.parametrize("is_idle", [False, True])
def test_kernels_that_are_not_the_processors_best_are_named(is_idle: bool) -> None:
    """Whatever the times are, and before the first request too; a server that says nothing of kernels has no such cause."""
    text = metrics() if is_idle else metrics(**BASE)
    info = '# TYPE diptych_build_info gauge\ndiptych_build_info{kernels="avx2",faster_kernels="%s"} 1\n'
    for faster in ("", "avx512"):
        scrape = read_scrape(info % faster + text)
        diagnosis = diagnose(scrape.since(scrape))
        assert ("slower kernels than there are" in [one.cause for one in diagnosis.findings]) == bool(faster)
        assert ("kernels use avx2; this processor also has avx512" in text_of(diagnosis)) == bool(faster)


def test_the_command_reads_a_running_server(server: ServerProcess) -> None:
    server.client().post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})
    result = CliRunner().invoke(app, ["--url", server.url, "--json"])
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.output)["numbers"]
    assert numbers["requests"] >= 1
    assert numbers["ttft_s.p50"] > 0
    assert numbers["stall_s.mean"] is not None
    text = CliRunner().invoke(app, ["--url", server.url])
    assert "time to first token" in text.output


@pytest.mark.parametrize("window_s", ["nan", "inf", "-1"])
def test_a_window_that_is_none_is_refused(window_s: str) -> None:
    """Of no number and of less than 0 it told all since the start; an endless one ended in a traceback."""
    told = CliRunner().invoke(app, ["--window-s", window_s])
    assert isinstance(told.exception, ConfigError)
    assert "--window-s is" in str(told.exception)
