"""What a client asks for: `SamplingParams`, prompt `Segment`s and the `Request` itself.

Owns the bounds of every option (`BOUNDS` and the limits of lists), so that the command line, the Python API and the server
refuse alike; help pages and the server's schema are made from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from types import MappingProxyType

from diptych.ground.bounds import Bound, entries, exactly, ids, shown, text, whole
from diptych.ground.errors import BadSampling, RequestError
from diptych.ground.shape import AdapterShape

MAX_N = 64
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_TOKEN_ID = 2**31 - 1
MAX_REQUEST_ID_CHARS = 256
MAX_CACHE_SALT_CHARS = 256
GREEDY_BELOW_TEMPERATURE = 1e-5  # the likeliest token would be drawn anyway, and dividing by less could overflow

# every number of a request; a field that is not here is a flag, a text or a list
BOUNDS: Mapping[str, Bound] = MappingProxyType(
    {
        "max_tokens": Bound(int, 0, 2**31 - 1, "most tokens to write (0: the prompt is read, and nothing is written)"),
        "min_tokens": Bound(int, 0, 2**31 - 1, "tokens to write before the text may end"),
        "temperature": Bound(float, 0.0, 100.0, "0 is greedy"),
        "top_k": Bound(int, 1, 2**31 - 1, "keep the k likeliest tokens", is_optional=True),
        "top_p": Bound(float, 0.0, 1.0, "keep the likeliest tokens that hold this probability", is_low_open=True),
        "min_p": Bound(float, 0.0, 1.0, "keep tokens at least this likely, relative to the likeliest"),
        # logits are divided by it: smaller ones could overflow
        "repetition_penalty": Bound(float, 0.01, 100.0, "divide the logits of tokens already seen"),
        "presence_penalty": Bound(float, -2.0, 2.0, "subtract once from tokens already written"),
        "frequency_penalty": Bound(float, -2.0, 2.0, "subtract per occurrence from tokens already written"),
        "logit_bias": Bound(float, -100.0, 100.0, "added to the logits of these tokens"),
        "seed": Bound(int, -(2**63), 2**64 - 1, "noise depends on the seed and the position only", is_optional=True),
        "n": Bound(int, 1, MAX_N, "how many answers (they share the prompt's KV)"),
        "logprobs": Bound(int, 0, MAX_TOP_LOGPROBS, "likeliest alternatives told per output token", is_optional=True),
        "prompt_logprobs": Bound(
            int, 0, MAX_TOP_LOGPROBS, "likeliest alternatives told per prompt token", is_optional=True
        ),
        "max_draft_tokens": Bound(
            int, 0, 2**31 - 1, "most tokens guessed ahead per step (0: none, and no answer changes)", is_optional=True
        ),
        "priority": Bound(int, -(2**31), 2**31 - 1, "higher is served sooner"),
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

    def __post_init__(self) -> None:
        """Refuse what is no text."""
        if self.begin is not None:
            text("begin", self.begin, BadSampling)
        text("end", self.end, BadSampling)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredSpec:
    """A constraint on the output text. `kind` is json_object | json_schema | regex | choice | grammar.

    `source` is the schema as JSON text, the regex, the choices as a JSON array, or the Lark grammar; `looser` stands in its
    place where it cannot be compiled. It holds for what comes after `reasoning`, where there may be any.
    """

    kind: str
    source: str
    reasoning: FreeReasoning | None = None
    looser: str | None = None

    def __post_init__(self) -> None:
        """Refuse what is no text; whether the constraint has a meaning is seen when it is compiled."""
        text("kind", self.kind, BadSampling)
        text("source", self.source, BadSampling)
        _instance("reasoning", self.reasoning, FreeReasoning)
        if self.looser is not None:
            text("looser", self.looser, BadSampling)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop. `temperature` 0 (or below 1e-5) is greedy.

    Numbers of any type (NumPy's too), one stop string or several, and any mapping of biases are taken; what is kept is
    plain and frozen. Raises BadSampling on construction when a value is impossible; the error names the field, the value
    and the limit.
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
    stop: str | Sequence[str] = ()  # one text or several; kept as a tuple
    stop_token_ids: Sequence[int] = ()  # kept as a tuple
    include_stop_str_in_output: bool = False
    structured: StructuredSpec | None = None
    max_draft_tokens: int | None = None  # None: as many as pay
    prediction: str | None = None  # what the answer may be: the drafts of this request, whoever else guesses

    def __post_init__(self) -> None:
        """Refuse impossible values, each by name, value and limit; make the others plain."""
        keep = object.__setattr__
        for name in _NUMBERS:
            keep(self, name, BOUNDS[name].take(name, getattr(self, name), BadSampling))
        if self.min_tokens > self.max_tokens:
            raise BadSampling(
                f"min_tokens is {self.min_tokens}; it must be at most max_tokens, which is {self.max_tokens}",
                param="min_tokens",
            )
        exactly(bool, "ignore_eos", self.ignore_eos, BadSampling)
        exactly(bool, "include_stop_str_in_output", self.include_stop_str_in_output, BadSampling)
        _instance("structured", self.structured, StructuredSpec)
        if self.prediction is not None:
            text("prediction", self.prediction, BadSampling)
        keep(self, "stop", _stop_strings(self.stop))
        keep(self, "stop_token_ids", ids("stop_token_ids", self.stop_token_ids, BadSampling, n_ids=MAX_TOKEN_ID + 1))
        _at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        keep(self, "logit_bias", _logit_bias(self.logit_bias))

    def __reduce__(self) -> tuple[partial[SamplingParams], tuple[()]]:
        """How it is copied, and sent to other processes: a read-only mapping of biases can be neither by itself."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return partial(SamplingParams, **{**given, "logit_bias": dict(self.logit_bias)}), ()

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the arg-max of the (penalised, masked) logits."""
        return self.temperature < GREEDY_BELOW_TEMPERATURE


_NUMBERS = tuple(name for name in BOUNDS if name not in ("logit_bias", "priority"))


def _at_most(name: str, number: int, limit: int) -> None:
    if number > limit:
        raise BadSampling(f"{name} has {number} entries; it must have at most {limit}", param=name)


def _instance(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise BadSampling(f"{name} is {shown(value)}; it must be a {kind.__name__} or None", param=name)


def _stop_strings(value: object) -> tuple[str, ...]:
    rule = "a string or a list of strings"
    given = (value,) if isinstance(value, str) else entries("stop", value, BadSampling, rule=rule)
    _at_most("stop", len(given), MAX_STOP_STRINGS)
    stop = []
    for entry in given:
        if not isinstance(entry, str):
            raise BadSampling(f"stop has the entry {shown(entry)}; each must be a string", param="stop")
        stop.append(text("stop", entry, BadSampling, least=1, most=MAX_STOP_BYTES))
        if len(entry.encode()) > MAX_STOP_BYTES:
            raise BadSampling(
                f"stop has an entry of {len(entry.encode())} bytes; each must have 1 to {MAX_STOP_BYTES}", param="stop"
            )
    return tuple(stop)


def _logit_bias(value: object) -> Mapping[int, float]:
    if value is not None and not isinstance(value, Mapping):
        raise BadSampling(f"logit_bias is {shown(value)}; it must map token ids to numbers", param="logit_bias")
    biases: dict[int, float] = {}
    _at_most("logit_bias", len(value or ()), MAX_LOGIT_BIAS)
    for key, bias in (value or {}).items():
        token_id = whole(key)
        if token_id is None or not 0 <= token_id <= MAX_TOKEN_ID:
            raise BadSampling(f"logit_bias has the key {shown(key)}; keys must be token ids", param="logit_bias")
        number = BOUNDS["logit_bias"].take(f"logit_bias of token {token_id}", bias, BadSampling, param="logit_bias")
        assert number is not None, "logit_bias is not optional"
        biases[token_id] = number
    return MappingProxyType(biases)


class Pool(Enum):
    """What becomes of the states of a prompt: that of its last token is kept, or their mean, or, where all attend both ways,
    that of the first.
    """

    FIRST = "first"
    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """A request for states in place of tokens: its prompt is read, nothing is written, and its blocks go at once.

    first: where the mean begins, or which token is the first; what stands before it (an instruction) is read and not pooled.
    both_ways: every token attends to all of the prompt, which is then read in one chunk, and found in no cache.
    second: where the second text of a pair begins, for models that tell the two apart; None: there is one, or they do not.
    """

    pool: Pool
    first: int = 0
    both_ways: bool = False
    second: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens [start, end) of a prompt and where they came from (system, tools, user, assistant, document, ...)."""

    name: str
    start: int
    end: int


# whose cached prefixes a request may use: those of a salt, or of an adapter's revision and a salt
CacheScope = str | tuple[str, str | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """The adapter that answers a request: its name, its number in the model, a digest and the count of its numbers."""

    name: str
    number: int
    revision: str
    n_parameters: int

    @property
    def shape(self) -> AdapterShape:
        """What it costs depends on this alone."""
        return AdapterShape(self.number, self.n_parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation request as control sees it: integers only, text already left behind.

    `eos_token_ids` are the model's; `sampling.ignore_eos` switches them off. `cache_salt` keeps prefix-cache
    entries of different tenants apart. Higher `priority` is served sooner. prediction_token_ids: of `sampling.prediction`.
    adapter: None: the model as it is.
    pooling: states are wanted and no tokens; then of `sampling` nothing is used.
    trace: the W3C traceparent of the span that this request is; None: nobody follows it.

    Raises RequestError for an impossible value; the prompt's ids are checked by whoever knows the vocabulary.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str | None = None
    segments: tuple[Segment, ...] = ()
    prediction_token_ids: tuple[int, ...] = ()
    adapter: AdapterRef | None = None
    pooling: Pooling | None = None
    trace: str | None = None

    def __post_init__(self) -> None:
        """Refuse what would go wrong only later, in the middle of others' work."""
        text("request_id", self.request_id, RequestError, least=1, most=MAX_REQUEST_ID_CHARS)
        if self.cache_salt is not None:
            text("cache_salt", self.cache_salt, RequestError, least=1, most=MAX_CACHE_SALT_CHARS)
        if not isinstance(self.sampling, SamplingParams):
            raise RequestError(f"sampling is {shown(self.sampling)}; it must be SamplingParams", param="sampling")
        object.__setattr__(self, "priority", BOUNDS["priority"].take("priority", self.priority, RequestError))
        object.__setattr__(self, "arrival_s", _ARRIVAL.take("arrival_s", self.arrival_s, RequestError))
        object.__setattr__(self, "prompt_token_ids", entries("prompt", self.prompt_token_ids, RequestError))

    @property
    def only_reads(self) -> bool:
        """Whether no token is wanted: a state, or what the model says of the prompt itself."""
        return self.pooling is not None or self.sampling.max_tokens == 0

    @property
    def cache_scope(self) -> CacheScope:
        """What keys and values depend on beside the model and the tokens, and who may see that they are there."""
        return self.cache_salt if self.adapter is None else (self.adapter.revision, self.cache_salt)


# of a prompt that is read for another engine: its token is not wanted, and may not end it
READ_ONLY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
_ARRIVAL = Bound(float, -1e12, 1e12, "when the request came in, on the engine's clock")
