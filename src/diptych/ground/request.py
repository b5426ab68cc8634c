"""What a client asks for: `SamplingParams`, prompt `Segment`s and the `Request` itself.

Owns the bounds of every sampling option, so that the command line, the Python API and the server refuse alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from diptych.ground.errors import BadSampling

MAX_N = 64
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it: smaller ones could overflow
GREEDY_BELOW_TEMPERATURE = 1e-5  # the likeliest token would be drawn anyway, and dividing by less could overflow


class Bound(NamedTuple):
    """low <= value <= high, or low < value where `is_low_open`."""

    low: float
    high: float
    is_low_open: bool = False


# every number of a request
BOUNDS: Mapping[str, Bound] = MappingProxyType(
    {
        "max_tokens": Bound(1, 2**31 - 1),
        "min_tokens": Bound(0, 2**31 - 1),
        "temperature": Bound(0.0, 100.0),
        "top_k": Bound(1, 2**31 - 1),
        "top_p": Bound(0.0, 1.0, is_low_open=True),
        "min_p": Bound(0.0, 1.0),
        "repetition_penalty": Bound(MIN_REPETITION_PENALTY, 100.0),
        "presence_penalty": Bound(-2.0, 2.0),
        "frequency_penalty": Bound(-2.0, 2.0),
        "logit_bias": Bound(-100.0, 100.0),
        "n": Bound(1, MAX_N),
        "logprobs": Bound(0, MAX_TOP_LOGPROBS),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeReasoning:
    """Free text that ends with the tag `end` and stands before a constrained output.

    It may be left out, and begins with the tag `begin`; where the prompt has opened it already, `begin` is None and the
    output starts inside.
    """

    begin: str | None
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredSpec:
    """A constraint on the output text. `kind` is json_object | json_schema | regex | choice | grammar.

    `source` is the schema as JSON text, the regex, the choices as a JSON array, or the Lark grammar. It holds for what
    comes after `reasoning`, where there may be any.
    """

    kind: str
    source: str
    reasoning: FreeReasoning | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop. `temperature` 0 (or below 1e-5) is greedy.

    Raises BadSampling on construction when a value is impossible; the error names the field, the value and the limit.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None  # None: the engine draws one per request
    n: int = 1
    logprobs: int | None = None  # number of top alternatives per output token (0: only the chosen token)
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    structured: StructuredSpec | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values, each by name, value and limit."""
        _between("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _between("temperature", self.temperature, 0.0, 100.0)
        if self.top_k is not None:
            _between("top_k", self.top_k, 1, 2**31 - 1)
        _between("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between("n", self.n, 1, MAX_N)
        _between("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _between("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _between("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None:
            _between("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        self._check_lists()

    def _check_lists(self) -> None:
        _between("number of stop strings", len(self.stop), 0, MAX_STOP_STRINGS, param="stop")
        for text in self.stop:
            _between("length of a stop string in bytes", len(text.encode()), 1, MAX_STOP_BYTES, param="stop")
        _between("number of stop_token_ids", len(self.stop_token_ids), 0, MAX_STOP_TOKEN_IDS, param="stop_token_ids")
        _between("number of logit_bias entries", len(self.logit_bias), 0, MAX_LOGIT_BIAS, param="logit_bias")
        for token_id, bias in self.logit_bias.items():
            _between(f"logit_bias of token {token_id}", bias, -100.0, 100.0, param="logit_bias")

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the arg-max of the (penalised, masked) logits."""
        return self.temperature < GREEDY_BELOW_TEMPERATURE


def _between(
    name: str, value: float, low: float, high: float, *, low_open: bool = False, param: str | None = None
) -> None:
    """Raise BadSampling unless low <= value <= high (low < value when `low_open`)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if is_number and (low < value if low_open else low <= value) and value <= high:
        return
    rule = f"greater than {low:g} and at most {high:g}" if low_open else f"between {low:g} and {high:g}"
    raise BadSampling(f"{name} is {value}; it must be {rule}", param=param or name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens [start, end) of a prompt and where they came from (system, tools, user, assistant, document, ...)."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation request as control sees it: integers only, text already left behind.

    `eos_token_ids` are the model's; `sampling.ignore_eos` switches them off. `cache_salt` keeps prefix-cache
    entries of different tenants apart. Higher `priority` is served sooner.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str | None = None
    segments: tuple[Segment, ...] = ()
