"""What clients may send: pydantic models with the bounds of the contract, also the source of the OpenAPI schema.

Strict types as in the OpenAI API (a string is no number), a known field with a bad value refused. What other servers know and
this one does not read stands in `fields`; what values of a field may be, with their bounds, in `values`.
Every list stops at its first fault, so that a hostile body cannot make millions of error records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AliasChoices, ConfigDict, Field, PrivateAttr, model_validator
from pydantic.config import JsonValue
from pydantic_core import PydanticCustomError

from diptych.compute.sampling.json_schema import MAX_SCHEMA_BYTES
from diptych.compute.sampling.structured import MAX_REGEX_BYTES
from diptych.ground.request import MAX_STOP_TOKEN_IDS
from diptych.server.http.bases import MAX_TOOLS, Body, StopAtFirst, conflict
from diptych.server.http.fields import (
    NEEDS_CONTENT,
    NO_EFFECT,
    OF_CHATS,
    OF_PROMPTS,
    REFUSED,
    FieldRefused,
    Refusal,
    Said,
    check_extra,
)
from diptych.server.tool_choice import ChatToolChoice, chosen
from diptych.server.values import (
    CacheSalt,
    JsonSchema,
    LogitBias,
    Name,
    Prompts,
    Seed,
    Stop,
    TemplateVariables,
    User,
    Whole,
    bounded,
)

MAX_MESSAGES = 16384
REQUEST_ID_PATTERN = r"^[A-Za-z0-9_.:\-]{1,128}$"


class StreamOptions(Body):
    """`include_usage` adds OpenAI's extra last chunk; else the last choice's chunk carries usage and timings.

    `continuous_usage_stats` (vLLM) puts the usage so far on every chunk.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    # padding of events against a reader of the encrypted stream; left out here, so asking for it is refused
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Body):
    """The `json_schema` of a response format."""

    name: str | None = Field(None, max_length=64)
    description: str | None = Field(None, max_length=4096)
    schema_: JsonSchema = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`; `schema` beside `type` is llama.cpp's form, with `json_object` too."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: JsonSchema = Field(None, alias="schema")

    @property
    def held_schema(self) -> dict[str, Any] | None:
        """The schema of either form."""
        return self.json_schema.schema_ if self.json_schema is not None else self.schema_

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.held_schema is None:
            raise ValueError("needs json_schema.schema when type is json_schema")
        if self.type == "text" and self.held_schema is not None:
            raise ValueError("has a schema and the type 'text'; a schema needs the type json_schema")
        if self.json_schema is not None and self.schema_ is not None:
            raise ValueError("has both json_schema and schema; give one of them")
        return self


Schema = dict[str, Any] | str
Regex = Annotated[str, Field(min_length=1, max_length=MAX_REGEX_BYTES)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=4096)]], StopAtFirst(), Field(min_length=1, max_length=1024)
]
Grammar = Annotated[str, Field(min_length=1, max_length=MAX_SCHEMA_BYTES)]


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one of the constraints.

    Blanks in JSON are free within bounds and objects are closed, so only the matching values of vLLM's switches are taken.
    """

    json_: Annotated[Schema | None, Field(None, alias="json")]
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None
    structural_tag: None = None
    whitespace_pattern: None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: bool | None = None  # closed already where a schema does not say otherwise
    disable_fallback: bool | None = None  # there is one library and no fallback

    @model_validator(mode="after")
    def _has_constraint(self) -> StructuredOutputs:
        if all(value is None for value in (self.json_, self.regex, self.choice, self.grammar, self.json_object)):
            raise ValueError("has no constraint; give one of regex, choice, grammar, json and json_object")
        return self


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")]


class FunctionSpec(Body):
    """A function the model may call; `parameters` is a JSON schema."""

    name: ToolName
    description: str | None = Field(None, max_length=65536)
    parameters: JsonSchema = None
    strict: bool | None = None


class Tool(Body):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionSpec

    @property
    def name(self) -> str:
        """Of the function."""
        return self.function.name


class CalledFunction(Body):
    """A call in the history; `arguments` is JSON text."""

    name: str = Field(max_length=256)
    arguments: str = ""


class HistoryToolCall(Body):
    """A tool call that an earlier assistant turn made."""

    id: str | None = Field(None, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class ContentPart(Body):
    """A part of a message. Only text is read; other types are refused by name."""

    type: Literal["text", "input_text"]
    text: str


# what `Said` refuses, for the document
_CONTENT_OF_ROLE: list[JsonValue] = [
    {"properties": {"role": {"not": {"enum": list(NEEDS_CONTENT)}}}},
    {"properties": {"content": {"type": ["string", "array"]}}},
]


class Message(Body):
    """One turn of a conversation."""

    model_config = ConfigDict(json_schema_extra={"required": ["role", "content"], "anyOf": _CONTENT_OF_ROLE})
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Said[str | Annotated[list[ContentPart], StopAtFirst()] | None] = Field(None, validate_default=True)
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name
    name: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[HistoryToolCall], StopAtFirst()] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: str | None = Field(None, max_length=256)
    refusal: str | None = None  # said, as content is
    audio: None = None
    function_call: None = None  # replaced by tool_calls


class PredictedOutput(Body):
    """OpenAI's `prediction`: a text that the answer may be. It is tried and never trusted."""

    type: Literal["content"]
    content: str | Annotated[list[ContentPart], StopAtFirst()]

    @property
    def text(self) -> str:
        """All of it."""
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class TellingBody(Body):
    """The model that a body is meant for, and what becomes of fields that nothing reads."""

    # unknown fields are kept as far as `fields` has looked at them
    model_config = ConfigDict(extra="allow")

    model: Name | None = None
    _ignored: tuple[str, ...] = PrivateAttr(())
    # fields that this protocol knows and does not read: refused by name, or of no effect
    _refused: ClassVar[Mapping[str, Refusal]] = REFUSED
    _no_effect: ClassVar[Mapping[str, str]] = NO_EFFECT

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Fields that nobody here knows."""
        return self._ignored

    @model_validator(mode="after")
    def _without_extra(self) -> Self:
        try:
            self._ignored = tuple(check_extra(self.__pydantic_extra__ or {}, self._refused, self._no_effect))
        except FieldRefused as error:
            raise PydanticCustomError("refused", "{message}", {"message": error.message, "param": error.name}) from None
        self.__pydantic_extra__ = {}
        return self


class RequestBody(TellingBody):
    """Fields that every route that computes has, in whichever protocol."""

    priority: Whole | None = Field(None, ge=-(2**31), le=2**31 - 1)
    request_id: str | None = Field(None, pattern=REQUEST_ID_PATTERN)
    cache_salt: CacheSalt = None


class SamplingBody(RequestBody):
    """Fields that every route that generates has: how tokens are drawn, and when an answer ends."""

    temperature: float | None = bounded("temperature")
    top_p: float | None = bounded("top_p")
    top_k: Whole | None = bounded("top_k", low=-1)
    min_p: float | None = bounded("min_p")
    repetition_penalty: float | None = bounded("repetition_penalty")
    presence_penalty: float | None = bounded("presence_penalty")
    frequency_penalty: float | None = bounded("frequency_penalty")
    logit_bias: LogitBias = None
    seed: Seed | None = bounded("seed")
    stop_token_ids: Annotated[list[Annotated[Whole, Field(ge=0, lt=2**31)]], StopAtFirst()] | None = Field(
        None, max_length=MAX_STOP_TOKEN_IDS
    )
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Whole | None = bounded("min_tokens")
    stream: bool | None = None
    # llama.cpp's name, too: 0 is how its clients switch speculation off
    max_draft_tokens: Whole | None = Field(
        None, ge=0, le=2**31 - 1, validation_alias=AliasChoices("max_draft_tokens", "speculative.n_max")
    )
    _trace_parent: Mapping[str, str] = PrivateAttr({})

    @property
    def trace_parent(self) -> Mapping[str, str]:
        """The headers that came with the body and say of which trace it is a part."""
        return self._trace_parent

    def follow(self, headers: Mapping[str, str]) -> None:
        """Take these as `trace_parent`."""
        self._trace_parent = headers

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return ()

    @property
    def choices(self) -> int:
        """How many answers are asked for."""
        return 1

    @property
    def predicted_text(self) -> str | None:
        """A text that the answer may be; only the chat and completion routes have a field for it."""
        return None

    @property
    def is_answered_at_length(self) -> bool:
        """Whether the answer has more than its text for each token: too much to be made on the event loop."""
        return False


class GenerationBody(SamplingBody):
    """Fields that both of OpenAI's older generation routes share."""

    max_tokens: Whole | None = bounded("max_tokens", low=1)
    max_completion_tokens: Whole | None = bounded("max_tokens", low=1)
    n: Whole | None = bounded("n")
    best_of: Whole | None = bounded("n")
    suffix: str | None = Field(None, max_length=0)
    stop: Stop = ()
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    json_schema: Schema | None = None
    grammar: Grammar | None = None
    prediction: PredictedOutput | None = None
    return_token_ids: bool | None = None
    user: User
    metadata: dict[str, Any] | None = None

    @property
    def predicted_text(self) -> str | None:
        """See SamplingBody."""
        return None if self.prediction is None else self.prediction.text

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`."""
        return self.stop

    @property
    def choices(self) -> int:
        """`n`."""
        return self.n or 1

    @property
    def is_answered_at_length(self) -> bool:
        """Log-probabilities or token ids come with every token."""
        logprobs = getattr(self, "logprobs", None)
        return bool(self.return_token_ids) or (logprobs is not None and logprobs is not False)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in ("stream_options", "return_progress"):
            if getattr(self, name) and not self.stream:
                raise conflict(name, f"{name} is set; it is only allowed when stream is true")
        if self.best_of is not None and self.best_of != self.choices:
            raise conflict("best_of", f"best_of is {self.best_of}; it must equal n, which is {self.choices}")
        return self

    @property
    def asked_tokens(self) -> tuple[int | None, str]:
        """The limit of an answer's tokens, and by which of its two names it was given."""
        newer, older = self.max_completion_tokens, self.max_tokens  # both hold where both are said
        if newer is not None and (older is None or newer <= older):
            return newer, "max_completion_tokens"
        return self.max_tokens, "max_tokens"


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    _refused: ClassVar[Mapping[str, Refusal]] = {
        **REFUSED,
        **OF_CHATS,
    }  # what the other route honours, and this one cannot

    prompt: Prompts
    max_tokens: Whole | None = bounded("max_tokens")  # 0 where the prompt is echoed alone
    logprobs: Whole | None = bounded("logprobs")
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _one_progress(self) -> Self:
        if self.return_progress and len(self.prompt) > 1:
            message = f"return_progress is set; it is only allowed with one prompt, and there are {len(self.prompt)}"
            raise conflict("return_progress", message)
        return self


class ChatPrompt(Body):
    """What makes the prompt of a chat, besides its messages."""

    tools: Annotated[list[Tool], StopAtFirst()] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ChatToolChoice | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    documents: Annotated[list[dict[str, Any]], StopAtFirst()] | None = Field(None, max_length=1024)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables = None

    @model_validator(mode="after")
    def _prompt_agrees(self) -> Self:
        chosen(self.tool_choice).check([tool.name for tool in self.tools or ()])
        if self.continue_final_message and self.add_generation_prompt:
            raise conflict(
                "continue_final_message",
                "continue_final_message is true; it is only allowed when add_generation_prompt is not",
            )
        return self

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is shown."""
        return chosen(self.tool_choice).of(self.tools or [])


class ChatBody(ChatPrompt, GenerationBody):
    """`POST /v1/chat/completions`."""

    _refused: ClassVar[Mapping[str, Refusal]] = {**REFUSED, **OF_PROMPTS}

    messages: Annotated[list[Message], StopAtFirst()] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = None
    top_logprobs: Whole | None = bounded("logprobs")
    parallel_tool_calls: bool | None = None
    # of the prompt: the template writes BOS itself, and the prompt is no part of an answer
    add_special_tokens: Literal[False] | None = None
    echo: Literal[False] | None = None

    @model_validator(mode="after")
    def _logprobs_agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise conflict("top_logprobs", "top_logprobs is set; it is only allowed when logprobs is true")
        return self
