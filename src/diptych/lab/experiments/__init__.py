"""The experiments, one file per theme, in the order of the report."""

from __future__ import annotations

from diptych.lab.experiment import Experiment
from diptych.lab.experiments.batching import BATCH_SIZE, CHUNKED_PREFILL, CONTINUOUS_BATCHING
from diptych.lab.experiments.lengths import DECODE_POSITION, KV_CACHE, PHASE_SHARES, PREFILL_LENGTH
from diptych.lab.experiments.memory import KV_MEMORY
from diptych.lab.experiments.models import HEAD_SHARING, WEIGHT_FORMATS
from diptych.lab.experiments.prompts import COLD_START, PREFIX_CACHE, PROMPT_SHAPE, THINKING
from diptych.lab.experiments.roofline import ROOFLINE
from diptych.lab.experiments.speculation import SPECULATION_BATCH, SPECULATION_DEPTH, SPECULATION_DRAFTERS

EXPERIMENTS: tuple[Experiment, ...] = (
    PREFILL_LENGTH,
    DECODE_POSITION,
    PHASE_SHARES,
    KV_CACHE,
    BATCH_SIZE,
    ROOFLINE,
    HEAD_SHARING,
    WEIGHT_FORMATS,
    CHUNKED_PREFILL,
    CONTINUOUS_BATCHING,
    SPECULATION_DEPTH,
    SPECULATION_BATCH,
    SPECULATION_DRAFTERS,
    KV_MEMORY,
    PREFIX_CACHE,
    PROMPT_SHAPE,
    THINKING,
    COLD_START,
)
# What `diptych lab --quick` runs: a request of 10 and of 10,000 tokens, and the claims that the rest builds on.
QUICK: tuple[Experiment, ...] = (PHASE_SHARES, PREFILL_LENGTH, DECODE_POSITION, KV_CACHE, BATCH_SIZE, ROOFLINE)
