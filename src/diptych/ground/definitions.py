"""What other tools call the quantities of `diptych.metrics`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One quantity and what other tools call it ("-": they do not report it). n output tokens, t_s sent, t_1 .. t_n."""

    name: str
    formula: str
    vllm_sglang: str
    aiperf: str
    guidellm: str
    inference_perf: str
    llmperf: str
    vidur: str


DEFINITIONS = (
    Definition(
        name="ttft_s",
        formula="t_1 - t_s",
        vllm_sglang="ttft",
        aiperf="time_to_first_token",
        guidellm="time_to_first_token",
        inference_perf="time_to_first_token",
        llmperf="ttft",
        vidur="prefill_e2e_time",
    ),
    Definition(
        name="tpot_s",
        formula="(t_n - t_1) / (n - 1)",
        vllm_sglang="tpot",
        aiperf="inter_token_latency",
        guidellm="inter_token_latency",
        inference_perf="time_per_output_token",
        llmperf="-",
        vidur="-",
    ),
    Definition(
        name="e2e_per_token_s",
        formula="(t_n - t_s) / n",
        vllm_sglang="-",
        aiperf="-",
        guidellm="time_per_output_token",
        inference_perf="normalized_time_per_output_token",
        llmperf="inter_token_latency",
        vidur="request_e2e_time_normalized",
    ),
    Definition(
        name="itl_s",
        formula="t_(i+1) - t_i, pooled over requests",
        vllm_sglang="itl",
        aiperf="inter_chunk_latency",
        guidellm="-",
        inference_perf="inter_token_latency",
        llmperf="-",
        vidur="TBT",
    ),
    Definition(
        name="e2e_s",
        formula="t_n - t_s",
        vllm_sglang="e2el",
        aiperf="request_latency",
        guidellm="request_latency",
        inference_perf="request_latency",
        llmperf="end_to_end_latency",
        vidur="request_e2e_time",
    ),
    Definition(
        name="output_tokens_per_s_per_user",
        formula="1 / tpot_s",
        vllm_sglang="-",
        aiperf="output_token_throughput_per_user",
        guidellm="-",
        inference_perf="-",
        llmperf="-",
        vidur="-",
    ),
    Definition(
        name="goodput_requests_per_s",
        formula="requests that meet every limit / duration; failures are misses",
        vllm_sglang="request_goodput",
        aiperf="goodput",
        guidellm="-",
        inference_perf="request goodput",
        llmperf="-",
        vidur="-",
    ),
)
