"""How each software is modelled: which constants are fitted to its published rows, and which are fixed.

The forms were chosen by looking at the development rows; refit before trusting the constants on newer software.
"""

from __future__ import annotations

from types import MappingProxyType

from diptych.cost.calibration import Constants
from diptych.cost.fitting.fit import FRACTION, TIME, Free, StackForm
from diptych.cost.tables import CONSUMER
from diptych.ground.phase import Phase

_DATACENTER = ("volta", "turing", "ampere", "ada", "hopper", "blackwell", "blackwell-ultra")


def _table(**entries: float) -> MappingProxyType[str, float]:
    return MappingProxyType(entries)


# Weight-only formats reach less bandwidth; these two come from the gpt-fast rows.
_UNPACKED = _table(other=0.8, int8=0.68, int4=0.59)


def _from_graphs(stack: str, *, layer_s: float, sequence_s: float, allreduce_s: float) -> StackForm:
    """Decode in batches, replayed from a graph; where the launches start."""
    return StackForm(
        stack=stack,
        phase=Phase.DECODE,
        fixed=Constants(eb=_UNPACKED, ef=_table(other=0.6), p=3.0, attention_ef=0.4),
        free=(
            Free(path="layer_s", start=layer_s, limits=TIME),
            Free(path="sequence_s", start=sequence_s, limits=TIME),
            Free(path="eb.bf16", start=0.85, limits=FRACTION),
            Free(path="eb.fp8", start=0.8, limits=FRACTION),
            Free(path="kv_eb", start=0.8, limits=FRACTION, width=0.3),
            Free(path="allreduce_s", start=allreduce_s, limits=TIME),
        ),
    )


FORMS: tuple[StackForm, ...] = (
    # CUDA graphs, one launch constant per layer, achieved bandwidth by weight format, one all-reduce latency.
    StackForm(
        stack="gpt-fast",
        phase=Phase.DECODE,
        fixed=Constants(eb=_table(other=0.8), ef=_table(other=0.7), p=3.0, kv_eb=0.8, attention_ef=0.4),
        free=(
            Free(path="layer_s", start=50e-6, limits=TIME),
            Free(path="eb.bf16", start=0.82, limits=FRACTION),
            Free(path="eb.int8", start=0.68, limits=FRACTION),
            Free(path="eb.int4", start=0.59, limits=FRACTION),
            Free(path="allreduce_s", start=10e-6, limits=TIME),
        ),
    ),
    StackForm(
        stack="tensorrt-llm-2024",
        phase=Phase.PREFILL,
        fixed=Constants(eb=_table(other=0.8), p=2.0, kv_eb=0.8, attention_ef=0.45, allreduce_s=10e-6),
        free=(
            Free(path="layer_s", start=60e-6, limits=TIME),
            Free(path="ef.fp8", start=0.55, limits=FRACTION),
            Free(path="ef.bf16", start=0.75, limits=FRACTION),
            Free(path="expert_ef.fp8", start=0.22, limits=FRACTION),
            Free(path="expert_ef.bf16", start=0.3, limits=FRACTION),
            Free(path="link_fraction", start=0.6, limits=FRACTION, width=0.3),  # kernel tables: 0.6 to 0.83
        ),
    ),
    StackForm(
        stack="tensorrt-llm",
        phase=Phase.PREFILL,
        fixed=Constants(eb=_table(other=0.8), p=3.0, kv_eb=0.8, attention_ef=0.45, allreduce_s=10e-6),
        free=(
            Free(path="layer_s", start=40e-6, limits=TIME, width=0.5),
            Free(path="ef.fp8", start=0.6, limits=FRACTION, width=0.15),
            Free(path="ef.bf16", start=0.77, limits=FRACTION, width=0.15),  # kernel tables: 0.77 to 0.80
            Free(path="expert_ef.fp8", start=0.22, limits=FRACTION),
            Free(path="link_fraction", start=0.6, limits=FRACTION, width=0.3),
        ),
    ),
    _from_graphs("tensorrt-llm", layer_s=25e-6, sequence_s=10e-6, allreduce_s=6e-6),
    StackForm(
        stack="vllm",
        phase=Phase.PREFILL,
        fixed=Constants(eb=_table(other=0.8), p=3.0, kv_eb=0.8, attention_ef=0.45, allreduce_s=10e-6),
        free=(
            Free(path="layer_s", start=40e-6, limits=TIME, width=0.5),
            Free(path="ef.other", start=0.75, limits=FRACTION, width=0.15),
            Free(path="expert_ef.bf16", start=0.3, limits=FRACTION),
            Free(path="link_fraction", start=0.6, limits=FRACTION, width=0.3),
        ),
    ),
    _from_graphs("vllm", layer_s=40e-6, sequence_s=20e-6, allreduce_s=10e-6),
    # No CUDA graphs: launches run ahead of the device, each sequence costs host time.
    StackForm(
        stack="vllm-2023",
        phase=Phase.DECODE,
        fixed=Constants(ef=_table(other=0.6), p=3.0, kv_eb=0.5),
        free=(
            Free(path="layer_s", start=400e-6, limits=TIME),
            Free(path="sequence_s", start=0.33e-3, limits=TIME),
            Free(path="eb.other", start=0.66, limits=FRACTION),
        ),
        per_device=True,
    ),
    StackForm(
        stack="vllm-2023",
        phase=Phase.PREFILL,
        fixed=Constants(eb=_table(other=0.7), p=2.0, kv_eb=0.7, launch_p=4.0),
        free=(
            Free(path="layer_s", start=400e-6, limits=TIME),
            Free(path="ef.other", start=0.65, limits=FRACTION),
            Free(path="attention_ef", start=0.3, limits=FRACTION, width=0.3),
            Free(path="link_fraction", start=0.3, limits=FRACTION),
        ),
        per_device=True,
    ),
    StackForm(
        stack="llama.cpp-metal",
        phase=Phase.DECODE,
        fixed=Constants(ef=_table(other=0.7), p=8.0, kv_eb=0.8),
        free=(Free(path="layer_s", start=170e-6, limits=TIME), Free(path="eb.other", start=0.92, limits=FRACTION)),
    ),
    StackForm(
        stack="llama.cpp-metal",
        phase=Phase.PREFILL,
        fixed=Constants(eb=_table(other=0.9), p=8.0, kv_eb=0.8, attention_ef=0.4),
        free=(
            Free(path="layer_s", start=100e-6, limits=TIME),
            Free(path="ef.other", start=0.72, limits=FRACTION),
            Free(path="expert_ef.bf16", start=0.6, limits=FRACTION),
        ),
    ),
    *(
        form
        for architectures, int8_fraction, launch_s, experts in (
            (CONSUMER, 0.22, 30e-6, (Free(path="expert_ef.int8", start=0.088, limits=FRACTION),)),
            (_DATACENTER, 0.085, 70e-6, ()),  # no row of a mixture: experts by what other software reaches
        )
        for form in (
            StackForm(
                stack="llama.cpp-cuda",
                phase=Phase.DECODE,
                fixed=Constants(ef=_table(other=0.5), p=4.0, kv_eb=0.8),
                free=(
                    Free(path="layer_s", start=launch_s, limits=TIME, width=0.3),
                    Free(path="moe_layer_s", start=40e-6, limits=TIME),
                    Free(path="eb.other", start=0.8, limits=FRACTION, width=0.2),
                ),
                architectures=architectures,
            ),
            # Integer tensor cores on quantised blocks: far from the peak, and further on data-centre parts.
            StackForm(
                stack="llama.cpp-cuda",
                phase=Phase.PREFILL,
                fixed=Constants(eb=_table(other=0.8), ef=_table(other=0.6), p=4.0, attention_ef=0.3, layer_s=60e-6),
                free=(Free(path="ef.int8", start=int8_fraction, limits=FRACTION), *experts),
                architectures=architectures,
            ),
        )
    ),
    StackForm(
        stack="llama.cpp-cpu",
        phase=Phase.DECODE,
        fixed=Constants(ef=_table(other=0.5), p=4.0, kv_eb=0.7),
        free=(Free(path="eb.other", start=0.8, limits=FRACTION),),
    ),
    StackForm(
        stack="llama.cpp-cpu",
        phase=Phase.PREFILL,
        fixed=Constants(eb=_table(other=0.8), p=4.0, attention_ef=0.3),
        free=(Free(path="ef.other", start=0.5, limits=FRACTION),),
    ),
)


def _neutral(stack: str, phase: Phase) -> StackForm:
    return StackForm(
        stack=stack,
        phase=phase,
        fixed=Constants(p=3.0, kv_eb=0.8, attention_ef=0.4),
        free=(
            Free(path="layer_s", start=50e-6, limits=TIME),
            Free(path="eb.other", start=0.8, limits=FRACTION),
            Free(path="ef.other", start=0.6, limits=FRACTION),
            Free(path="allreduce_s", start=10e-6, limits=TIME),
            Free(path="link_fraction", start=0.6, limits=FRACTION),
        ),
    )


# One form with one set of starting values for all software and both phases: what the rows give without the choices above.
# `diptych plan accuracy --neutral` shows how much of the accuracy those choices are.
NEUTRAL_FORMS: tuple[StackForm, ...] = tuple(
    _neutral(stack, phase) for stack, phase in dict.fromkeys((form.stack, form.phase) for form in FORMS)
)
