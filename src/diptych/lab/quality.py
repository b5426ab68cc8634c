"""What a number format costs in quality: perplexity on held-out text, the mean KL divergence to fp32, and the share of
positions where the likeliest token is fp32's.

The fp32 torch backend is the reference; every format reads the same windows of the same text. Of a file that holds codes the
reference has the codes' values, so what the file has lost before is in no row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from diptych.compute.loading.held import what_is_held
from diptych.compute.runner import open_blueprint
from diptych.engine.load import LoadedModel, load, model_dir
from diptych.engine.memory import memory_of
from diptych.engine.phases import TwoPhase
from diptych.ground.config import BALANCED, BY_TEXT, ComputeConfig, EngineConfig
from diptych.ground.errors import CapacityError, ConfigError
from diptych.ground.formats import KV_IN_BYTES

WINDOW_TOKENS = 512
USUAL_TOKENS = 16_384
PIECE_VALUES = 2**22
REFERENCE_SHARE = 0.5  # of the memory that is free: the formats' weights and their logits need some, too
REFERENCE = ComputeConfig(backend="torch", weights="fp32", kv="fp32")
BF16 = ComputeConfig(backend="cpu", weights="bf16", kv="bf16")
FORMATS = (
    BF16,
    replace(BF16, weights="q8_0"),
    replace(BF16, weights="int8"),
    replace(BF16, weights="int4"),
    replace(BF16, kv="int8"),
    replace(BF16, kv=KV_IN_BYTES),
    replace(BF16, kv="fp8"),
)
KEPT = replace(BF16, weights="file")
KEPT_ROWS = (replace(KEPT, activations="int8"), replace(KEPT, activations="int15"))  # what meets codes in groups


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRow:
    """One format. kl_nats: mean over positions of KL(fp32 || format). perplexity_over_bf16: relative, 0 is equal.

    same_token: of the positions, the share whose likeliest token is that of fp32. activations: of weights that keep a file's
    codes in groups, the rows that they meet; None of all others, which have one kind.
    """

    backend: str
    weights: str
    activations: str | None
    kv: str
    perplexity: float
    perplexity_over_bf16: float
    kl_nats: float
    same_token: float
    tokens: int

    def as_json(self) -> dict[str, object]:
        """A plain dict."""
        return asdict(self)


def measure_quality(
    model: str,
    text: str,
    *,
    config: EngineConfig,
    calibrate: str = BY_TEXT,
    n_tokens: int | None = None,
    progress: Callable[[str], None] = lambda told: None,
) -> list[QualityRow]:
    """Rows for fp32, the file's own codes where it has some, and every format of the cpu backend.

    calibrate: of the formats that are balanced, as `EngineConfig` has it. n_tokens: how many of the text; None: as many as
    memory takes what fp32 says of each, and `USUAL_TOKENS` at most.
    CapacityError where memory does not take those that are asked for, ConfigError for a text of less than two tokens.
    """
    found: list[tuple[ComputeConfig, _Sums]] = []
    # of a model that is made for less: all that it has positions for
    window_tokens = min(WINDOW_TOKENS, open_blueprint(model_dir(model), REFERENCE).blueprint.spec.max_context_tokens)
    own = replace(config, max_context_tokens=window_tokens)
    windows: list[list[int]] = []
    reference: list[torch.Tensor] = []
    formats = [REFERENCE]
    for compute in formats:  # which grows behind the first
        progress(_told(compute))
        by = calibrate if compute.weights in BALANCED else BY_TEXT
        loaded = load(model, replace(own, compute=replace(compute, threads=config.compute.threads), calibrate=by))
        loaded.must_write("a perplexity")
        with TwoPhase(loaded, own) as phases:
            if not found:
                windows = _windows(loaded, text, n_tokens, window_tokens)
                formats += (*_kept(loaded.directory), *FORMATS)
            sums = _Sums()
            for number, window in enumerate(windows):
                logits_TV = phases.logits_at_every_position(window)[:-1]
                if not found:
                    reference.append(torch.empty_like(logits_TV))
                for rows in _pieces(*logits_TV.shape):
                    logprobs_RV = torch.log_softmax(logits_TV[rows].double(), dim=-1)
                    if not found:
                        reference[number][rows] = logprobs_RV
                    sums.add(reference[number][rows], logprobs_RV, torch.tensor(window[1:][rows]))
            found.append((compute, sums))
        loaded.model.close()
    bf16 = next(sums.loss for compute, sums in found if compute == BF16)
    return [_row(compute, sums, bf16) for compute, sums in found]


def _kept(path: Path) -> tuple[ComputeConfig, ...]:
    """How the codes of a file may be used. None where it holds floats alone."""
    held = what_is_held(path)
    names = set() if held is None else {*held.dense, *held.experts}
    if any(name.startswith("group") for name in names):
        return KEPT_ROWS
    return (KEPT,) if names - {"bf16"} else ()


def _pieces(n_rows: int, width: int) -> Iterator[slice]:
    """Rows whose numbers in fp64 take 32 MiB: a window's would take a gigabyte of a large vocabulary, several times over."""
    step = max(1, PIECE_VALUES // width)
    return (slice(begin, begin + step) for begin in range(0, n_rows, step))


def _told(compute: ComputeConfig) -> str:
    rows = "" if compute.activations == "auto" else f", activations of {compute.activations}"
    return f"{compute.weights} weights{rows}, {compute.kv} KV"


def _windows(loaded: LoadedModel, text: str, n_tokens: int | None, window_tokens: int) -> list[list[int]]:
    position_bytes = 4 * loaded.model.spec.vocab_size
    most = int(memory_of(torch.device("cpu")).available_bytes * REFERENCE_SHARE) // position_bytes
    if n_tokens is not None and n_tokens > most:
        raise CapacityError(
            f"what fp32 says of {n_tokens} tokens takes {n_tokens * position_bytes / 2**30:.1f} GiB; half of the free "
            f"memory takes that of {most}",
            hint=f"--tokens {most}, or less",
        )
    token_ids = loaded.tokenizer.encode(text)[: min(most, USUAL_TOKENS) if n_tokens is None else n_tokens]
    if len(token_ids) < 2:
        raise ConfigError(f"the text has {len(token_ids)} tokens; at least 2 are needed to measure anything")
    starts = range(0, len(token_ids), window_tokens)
    return [window for start in starts if len(window := token_ids[start : start + window_tokens]) > 1]


class _Sums:
    """Over all predicted tokens of a format."""

    def __init__(self) -> None:
        self._loss = self._divergence = 0.0
        self._same = self.tokens = 0

    def add(self, expected_TV: torch.Tensor, logprobs_TV: torch.Tensor, targets_T: torch.Tensor) -> None:
        """One window: log-probabilities of the reference (fp32) and of the format (fp64), and the tokens that came."""
        self._loss -= float(logprobs_TV.gather(1, targets_T[:, None]).sum())
        expected_TV = expected_TV.double()
        self._divergence += float(
            torch.nn.functional.kl_div(logprobs_TV, expected_TV, reduction="sum", log_target=True)
        )
        self._same += int((expected_TV.argmax(-1) == logprobs_TV.argmax(-1)).sum())
        self.tokens += len(targets_T)

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self._loss / self.tokens

    @property
    def divergence(self) -> float:
        """Nats a token."""
        return self._divergence / self.tokens

    @property
    def same(self) -> float:
        """Share of the positions."""
        return self._same / self.tokens


def _row(compute: ComputeConfig, sums: _Sums, bf16: float) -> QualityRow:
    return QualityRow(
        backend=compute.backend,
        weights=compute.weights,
        activations=None if compute.activations == "auto" else compute.activations,
        kv=compute.kv,
        perplexity=math.exp(sums.loss),
        perplexity_over_bf16=math.exp(sums.loss - bf16) - 1.0,
        kl_nats=sums.divergence,
        same_token=sums.same,
        tokens=sums.tokens,
    )
