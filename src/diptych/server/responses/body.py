"""What clients of Responses may send: the Open Responses specification of 2026-04-24, and what OpenAI's clients add to it.

Fields that nothing here could honour are refused by name (`REFUSED`), or have no effect on the answer (`NO_EFFECT`);
`docs/serving.md` shows all of them, and a test holds them to the params of the `openai` package.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from diptych.ground.request import BOUNDS
from diptych.server.http.bases import MAX_TOOLS, Body, StopAtFirst, branch_of_type, conflict
from diptych.server.http.fields import NO_EFFECT as NO_EFFECT_ON_ALL
from diptych.server.http.fields import REFUSED as REFUSED_BY_ALL
from diptych.server.http.fields import Refusal
from diptych.server.schema import MAX_MESSAGES, FunctionSpec, SamplingBody, ToolName
from diptych.server.tool_choice import ToolChoice, chosen
from diptych.server.values import JsonSchema, Stop, TemplateVariables, User, Whole, bounded, json_size

_STORED_ONLY = "only responses are kept here; go on from one with previous_response_id"

REFUSED: Mapping[str, Refusal] = {
    **{name: one for name, one in REFUSED_BY_ALL.items() if name != "store"},
    "access_programs": Refusal("there are none here"),
    "context_management": Refusal("nothing is summarised here; truncation 'auto' drops the oldest items"),
    "conversation": Refusal(_STORED_ONLY),
    "image": Refusal("this server reads and writes text only"),
    "max_tool_calls": Refusal("tools run at the client, which can count their calls"),
    "personality": Refusal("no template here has one; write it into instructions"),
    "prompt": Refusal("no prompts are kept here; send instructions and input"),
    # the chat route's names for what Responses call otherwise
    "logprobs": Refusal("include message.output_text.logprobs here, or send top_logprobs", (False,)),
    "max_completion_tokens": Refusal("it is max_output_tokens here"),
    "max_tokens": Refusal("it is max_output_tokens here"),
    "messages": Refusal("they are input here"),
    "n": Refusal("a response is one answer; the chat route gives several", (1,)),
    "reasoning_effort": Refusal("it is reasoning.effort here"),
    "response_format": Refusal("it is text.format here"),
    "return_progress": Refusal("Responses have no event for it; the chat route has", (False,)),
    "structured_outputs": Refusal("it is text.format here; the chat route takes other constraints too"),
    "verbosity": Refusal("it is text.verbosity here"),
}
_READ_HERE = ("metadata", "prompt_cache_options", "user")
NO_EFFECT: Mapping[str, str] = {name: why for name, why in NO_EFFECT_ON_ALL.items() if name not in _READ_HERE}
# reasoning as an opaque string that comes back with the next request; nothing in it is a secret
ENCODED_REASONING = "diptych.1."


class InputText(Body):
    """Text that is given."""

    type: Literal["input_text", "text"]
    text: str


def _check_notes(value: list[Any] | None) -> list[Any] | None:
    json_size(value)
    return value


Notes = Annotated[list[Any] | None, AfterValidator(_check_notes)]


class OutputText(Body):
    """Text of an earlier answer; what was noted beside it is not shown to the model."""

    type: Literal["output_text"]
    text: str
    annotations: Notes = None
    logprobs: Notes = None


class RefusalText(Body):
    """A refusal of an earlier answer."""

    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[
    Annotated[InputText, Tag("~input_text")]
    | Annotated[InputText, Tag("~text")]
    | Annotated[OutputText, Tag("~output_text")]
    | Annotated[RefusalText, Tag("~refusal")],
    Discriminator(branch_of_type),
]
ItemId = Annotated[str, Field(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


class Item(Body):
    """What every item may have."""

    id: ItemId | None = None
    status: Status | None = None


class MessageItem(Item):
    """A message. phase labels it for models that know the label; no template here does."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[ContentPart], StopAtFirst()]
    phase: Literal["commentary", "final_answer"] | None = None


# of a tool and its calls: they wait for each other here
NotAsync = Annotated[Literal[False] | None, Field(alias="async", exclude=True)]


class DirectCaller(Body):
    """Who calls a tool: the model."""

    type: Literal["direct"]


class CallItem(Item):
    """What a call and its result may have."""

    call_id: ItemId
    caller: DirectCaller | None = None
    namespace: str | None = Field(None, min_length=1, max_length=64)


class FunctionCallItem(CallItem):
    """A call that an earlier answer made; arguments is JSON text."""

    type: Literal["function_call"]
    name: str = Field(min_length=1, max_length=256)
    arguments: str
    async_: NotAsync = None


class FunctionCallOutputItem(CallItem):
    """What a call gave; name: of its tool, where the call itself is not there."""

    type: Literal["function_call_output"]
    name: str | None = Field(None, max_length=256)
    output: str | Annotated[list[InputText], StopAtFirst()]


class SummaryText(Body):
    """A part of a summary."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(Body):
    """A part of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Item):
    """Reasoning of an earlier answer, which the template shows or leaves out: its content, else what this server encoded."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], StopAtFirst()] = Field(default_factory=list)
    content: Annotated[list[ReasoningText], StopAtFirst()] | None = None
    encrypted_content: str | None = None

    @model_validator(mode="after")
    def _is_readable(self) -> Self:
        if not self.content and not self.summary and self.encrypted_content is not None:
            decoded_reasoning(self.encrypted_content)
        return self


class ItemReference(Body):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: ItemId


def _branch_of_item(value: object) -> str | None:
    """Messages and references may leave out their type."""
    branch = branch_of_type(value)
    if branch is not None or not isinstance(value, dict):
        return branch
    return "~message" if "role" in value else "~item_reference" if "id" in value else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("~message")]
    | Annotated[FunctionCallItem, Tag("~function_call")]
    | Annotated[FunctionCallOutputItem, Tag("~function_call_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")]
    | Annotated[ItemReference, Tag("~item_reference")],
    Discriminator(_branch_of_item),
]


class FunctionTool(FunctionSpec):
    """A tool that the client runs, shown to the model from the beginning and called by it. Templates show no output_schema."""

    type: Literal["function"]
    async_: NotAsync = None
    allowed_callers: list[Literal["direct"]] | None = Field(None, exclude=True)
    defer_loading: Literal[False] | None = Field(None, exclude=True)
    output_schema: None = Field(None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "function":
            hint = '; in Codex: web_search = "disabled"' if kind.startswith("web_search") else ""
            told = "only functions and namespaces of them can be offered, which the client runs"
            raise ValueError(f"has the type {kind[:100]!r}; {told}{hint}")
        return value


class NamespaceTool(Body):
    """Functions under a name of their own, which the model is shown as functions called `namespace.name`."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = Field(None, max_length=65536)
    tools: Annotated[list[FunctionTool], StopAtFirst()] = Field(min_length=1, max_length=MAX_TOOLS)

    @property
    def functions(self) -> list[FunctionTool]:
        """Its functions as the model is shown them; the first one tells what all of them are for."""
        made = [tool.model_copy(update={"name": shown_name(self.name, tool.name)}) for tool in self.tools]
        if self.description:
            told = f"{self.name}: {self.description}"
            made[0].description = f"{told}\n\n{made[0].description}" if made[0].description else told
        return made


def shown_name(namespace: str | None, name: str) -> str:
    """By which the model calls a function."""
    return name if namespace is None else f"{namespace}.{name}"


def _branch_of_tool(value: object) -> str:
    return "~namespace" if branch_of_type(value) == "~namespace" else "~function"


Tool = Annotated[
    Annotated[FunctionTool, Tag("~function")] | Annotated[NamespaceTool, Tag("~namespace")],
    Discriminator(_branch_of_tool),
]


class TextFormat(Body):
    """The form that the text must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    description: str | None = Field(None, max_length=4096)
    schema_: JsonSchema = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("must have a schema when its type is json_schema, and only then")
        return self


class TextParam(Body):
    """Form and length of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningParam(Body):
    """How much to think. Reasoning comes whole; nobody summarises it, and "auto" leaves that to the server, as it leaves to the
    template which thoughts of before are shown.
    """

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class CacheOptions(Body):
    """Hints how long to keep a prompt, but one, which wants no answer."""

    prewarm: Literal[False] | None = None


class ResponsesStreamOptions(Body):
    """Padding of events is left out here, so asking for it is refused."""

    include_obfuscation: Literal[False] | None = None


class ResponsesCountBody(SamplingBody):
    """`POST /v1/responses/input_tokens`: what makes the prompt."""

    _refused = REFUSED
    _no_effect = NO_EFFECT

    input: str | Annotated[list[InputItem], StopAtFirst(), Field(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: ItemId | None = None
    tools: Annotated[list[Tool], StopAtFirst()] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextParam | None = None
    reasoning: ReasoningParam | None = None
    truncation: Literal["auto", "disabled"] | None = None
    prompt_cache_options: CacheOptions | None = None
    chat_template_kwargs: TemplateVariables = None

    @model_validator(mode="after")
    def _tools_agree(self) -> Self:
        names = [tool.name for tool in self.functions]
        chosen(self.tool_choice).check(names)
        if len(names) > MAX_TOOLS:
            raise conflict("tools", f"tools has {len(names)} functions in all; at most {MAX_TOOLS} are allowed")
        twice = next((name for name in self.namespaces if names.count(name) > 1), None)
        if twice is not None:
            raise conflict("tools", f"tools has two functions that the model would call {twice!r}")
        if not self.input and self.previous_response_id is None:
            raise conflict("input", "input is missing; it is required without previous_response_id")
        return self

    @property
    def functions(self) -> list[FunctionTool]:
        """All functions among the tools, by the names that the model calls them."""
        groups = (tool.functions if isinstance(tool, NamespaceTool) else [tool] for tool in self.tools or ())
        return [function for group in groups for function in group]

    @property
    def namespaces(self) -> dict[str, tuple[str, str]]:
        """(namespace, name) of a function by the name that the model calls it, of those in a namespace."""
        spaces = [tool for tool in self.tools or () if isinstance(tool, NamespaceTool)]
        return {shown_name(space.name, tool.name): (space.name, tool.name) for space in spaces for tool in space.tools}

    @property
    def offered(self) -> list[FunctionTool]:
        """The functions that the model is shown."""
        return chosen(self.tool_choice).of(self.functions)


LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class ResponsesBody(ResponsesCountBody):
    """`POST /v1/responses`."""

    max_output_tokens: Whole | None = Field(None, ge=1, le=BOUNDS["max_tokens"].high)
    stop: Stop = ()
    top_logprobs: Whole | None = bounded("logprobs")
    include: list[Includable] | None = Field(None, max_length=16)
    store: bool | None = None
    background: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    safety_identifier: str | None = Field(None, max_length=64)
    prompt_cache_key: str | None = Field(None, max_length=64)
    user: User

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, as vLLM takes it here too."""
        return self.stop

    @property
    def logprobs(self) -> int | None:
        """How many alternatives to tell of each token; None for no log-probabilities."""
        is_included = LOGPROBS in (self.include or ())
        return self.top_logprobs if self.top_logprobs is not None else 0 if is_included else None

    @property
    def is_answered_at_length(self) -> bool:
        """Log-probabilities come with every token."""
        return self.logprobs is not None

    @property
    def is_stored(self) -> bool:
        """Unless told not to, as at OpenAI."""
        return self.store is not False

    @model_validator(mode="after")
    def _modes_agree(self) -> Self:
        if self.background and self.stream:
            raise conflict("background", "background is true; a response in the background is read when it is done")
        if self.background and not self.is_stored:
            raise conflict("background", "background is true; it is only allowed when store is not false")
        if self.stream_options is not None and not self.stream:
            raise conflict("stream_options", "stream_options is set; it is only allowed when stream is true")
        return self


def encoded_reasoning(text: str) -> str:
    """Reasoning as `encrypted_content`."""
    return ENCODED_REASONING + base64.urlsafe_b64encode(text.encode()).decode()


def decoded_reasoning(content: str) -> str:
    """What `encoded_reasoning` was given. Raises ValueError for what another server has made."""
    try:
        if not content.startswith(ENCODED_REASONING):
            raise ValueError
        return base64.b64decode(content.removeprefix(ENCODED_REASONING), altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise ValueError("has an encrypted_content that was not made by this server, so it cannot be read") from None
