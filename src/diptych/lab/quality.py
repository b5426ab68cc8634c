"""What a number format costs in quality: perplexity on held-out text and the mean KL divergence to fp32.

The fp32 torch backend is the reference; every format reads the same windows of the same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from diptych.engine.load import LoadedModel, load
from diptych.engine.phases import TwoPhase
from diptych.ground.config import ComputeConfig, EngineConfig
from diptych.ground.errors import ConfigError

WINDOW_TOKENS = 512
REFERENCE = ("torch", "fp32", "fp32")
FORMATS = (
    ("cpu", "bf16", "bf16"),
    ("cpu", "int8", "bf16"),
    ("cpu", "int4", "bf16"),
    ("cpu", "bf16", "int8"),
    ("cpu", "bf16", "fp8"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRow:
    """One format. kl_nats: mean over positions of KL(fp32 || format). perplexity_over_bf16: relative, 0 is equal."""

    backend: str
    weights: str
    kv: str
    perplexity: float
    perplexity_over_bf16: float
    kl_nats: float
    tokens: int

    def as_json(self) -> dict[str, object]:
        """A plain dict."""
        return asdict(self)


def measure_quality(
    model: str, text: str, *, config: EngineConfig, n_tokens: int, progress: Callable[[str], None]
) -> list[QualityRow]:
    """Rows for fp32 and every format of the cpu backend, over the first n_tokens of `text`."""
    found: list[tuple[tuple[str, str, str], float, float, int]] = []
    reference: list[torch.Tensor] = []
    for backend, weights, kv in (REFERENCE, *FORMATS):
        progress(f"{weights} weights, {kv} KV")
        compute = ComputeConfig(backend=backend, weights=weights, kv=kv, threads=config.compute.threads)
        own = replace(config, compute=compute, max_context_tokens=WINDOW_TOKENS)
        loaded = load(model, own)
        windows = _windows(loaded, text, n_tokens)
        if not reference:
            reference = [torch.empty(0)] * len(windows)
        loss, divergence, n = _losses(TwoPhase(loaded, own), windows, reference)
        found.append(((backend, weights, kv), loss / n, divergence / n, n))
        loaded.model.close()
    bf16 = next(loss for (_, weights, kv), loss, _, _ in found if (weights, kv) == ("bf16", "bf16"))
    return [
        QualityRow(
            backend=backend,
            weights=weights,
            kv=kv,
            perplexity=math.exp(loss),
            perplexity_over_bf16=math.exp(loss - bf16) - 1.0,
            kl_nats=divergence,
            tokens=n,
        )
        for (backend, weights, kv), loss, divergence, n in found
    ]


def _windows(loaded: LoadedModel, text: str, n_tokens: int) -> list[list[int]]:
    token_ids = loaded.tokenizer.encode(text)[:n_tokens]
    if len(token_ids) < 2:
        raise ConfigError(f"the text has {len(token_ids)} tokens; at least 2 are needed to measure anything")
    starts = range(0, len(token_ids), WINDOW_TOKENS)
    return [window for start in starts if len(window := token_ids[start : start + WINDOW_TOKENS]) > 1]


def _losses(
    phases: TwoPhase, windows: Sequence[Sequence[int]], reference: list[torch.Tensor]
) -> tuple[float, float, int]:
    """Summed negative log-likelihood and divergence over all predicted tokens; fills `reference` on its first use."""
    loss = divergence = 0.0
    n = 0
    for number, window in enumerate(windows):
        logprobs_TV = torch.log_softmax(phases.logits_at_every_position(window)[:-1].double(), dim=-1)
        if not len(reference[number]):
            reference[number] = logprobs_TV.float()
        expected_TV = reference[number].double()
        targets_T = torch.tensor(window[1:])
        loss -= float(logprobs_TV.gather(1, targets_T[:, None]).sum())
        divergence += float((expected_TV.exp() * (expected_TV - logprobs_TV)).sum())
        n += len(targets_T)
    return loss, divergence, n
