"""What clients of Anthropic's Messages may send, with the bounds of the other routes.

Fields that Anthropic's clients know and that nothing here could honour are refused by name (`REFUSED`), or have no effect on
the answer (`NO_EFFECT`); `docs/serving.md` shows all of them, and a test holds them to the params of the `anthropic` package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from diptych.ground.request import BOUNDS
from diptych.server.http.bases import MAX_TOOLS, Body, StopAtFirst, branch_of_type, conflict
from diptych.server.http.fields import REFUSED as REFUSED_BY_ALL
from diptych.server.http.fields import Refusal
from diptych.server.schema import MAX_MESSAGES, SamplingBody
from diptych.server.values import JsonSchema, Stop, TemplateVariables, Whole

_HERE = "nothing runs here but the model; run it yourself, and send what it gave as a tool_result"
# ways to say that nothing is to be cleared
_KEEPING_ALL = (
    {"edits": []},
    *({"edits": [{"type": "clear_thinking_20251015", "keep": keep}]} for keep in ("all", {"type": "all"})),
)

REFUSED: Mapping[str, Refusal] = {
    **REFUSED_BY_ALL,
    "compaction": Refusal("nothing is summarised here; leave out what the model need not see"),
    "container": Refusal(_HERE),
    "context_management": Refusal(
        "a conversation is never cut here; leave out what the model need not see", _KEEPING_ALL
    ),
    "diagnostics": Refusal("what the cache held is in usage; /apply-template shows it part by part"),
    "fallback_credit_token": Refusal("there is one model here"),
    "fallbacks": Refusal("there is one model here"),
    "inference_geo": Refusal("this server runs where it runs"),
    "mcp_servers": Refusal(_HERE),
    "output_format": Refusal("it is output_config.format here"),
    "speed": Refusal("there is one speed here", ("standard",)),
    "thread": Refusal("no conversation is kept here; send all of its messages, whose prefix is found in the cache"),
    # OpenAI's names for what Messages call otherwise
    "functions": Refusal("they are tools here"),
    "logprobs": Refusal("Messages show none; the chat route does", (False,)),
    "max_completion_tokens": Refusal("it is max_tokens here"),
    "n": Refusal("a message has one answer; the chat route gives several", (1,)),
    "parallel_tool_calls": Refusal("it is tool_choice.disable_parallel_tool_use here", (True,)),
    "reasoning_effort": Refusal("it is output_config.effort here"),
    "response_format": Refusal("it is output_config.format here"),
    "return_progress": Refusal("Messages have no event for it; the chat route has", (False,)),
    "stop": Refusal("it is stop_sequences here"),
    "top_logprobs": Refusal("Messages show none; the chat route does", (0,)),
}
NO_EFFECT: Mapping[str, str] = {
    "billing_policy": "nothing is billed",
    "cache_control": "every prompt's prefix is cached, and what is unused longest goes first",
    "metadata": "labels the caller; caches are kept apart by cache_salt",
    "service_tier": "there is one tier",
    "user_profile_id": "labels the caller; caches are kept apart by cache_salt",
    "workspace_id": "labels the caller; caches are kept apart by cache_salt",
}


class CacheControl(Body):
    """Where a client wants a prefix to be kept; every prefix is."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Body):
    """What every content block may have."""

    cache_control: CacheControl | None = None


class TextBlock(Block):
    """Text. Citations point into documents, which are refused, so there is nothing to cite."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class DirectCaller(Body):
    """Who calls a tool: the model."""

    type: Literal["direct"]


class ToolUseBlock(Block):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any]
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultBlock(Block):
    """What a call gave; is_error is shown to the model as `Error: ` before the text."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: str | Annotated[list[TextBlock], StopAtFirst()] | None = None
    is_error: bool | None = None
    toolset_name: None = None


class ThinkingBlock(Block):
    """Reasoning of an earlier answer, which the template shows or leaves out. The signature is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("~text")]
    | Annotated[ToolUseBlock, Tag("~tool_use")]
    | Annotated[ToolResultBlock, Tag("~tool_result")]
    | Annotated[ThinkingBlock, Tag("~thinking")],
    Discriminator(branch_of_type),
]
# which blocks a role may have
_BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "tool_use", "thinking"), "system": ("text",)}


Nothing = Annotated[dict[str, Any], Field(max_length=0)]  # of settings that nothing here has


class MessageParam(Body):
    """One turn, shown with every request that has it. output_config: there is one for all turns."""

    clear_at: Literal["never"] | None = None
    output_config: Nothing | None = None
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], StopAtFirst()]

    @model_validator(mode="after")
    def _blocks_of_role(self) -> Self:
        for number, block in enumerate(self.content if isinstance(self.content, list) else ()):
            if block.type not in _BLOCKS[self.role]:
                known = ", ".join(_BLOCKS[self.role])
                raise ValueError(f"has a {block.type} block at {number}; the role {self.role!r} may have {known}")
        return self


class ToolParam(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")
    description: str | None = Field(None, max_length=65536)
    input_schema: JsonSchema = Field(...)
    cache_control: CacheControl | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # input always comes as the model writes it
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None  # templates have no place for them


class ToolChoice(Body):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, min_length=1, max_length=128)
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("must have a name when its type is tool, and only then")
        return self


class ThinkingParam(Body):
    """Whether the model thinks. budget_tokens: no limit of its own here; max_tokens holds for all."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = Field(None, ge=1, le=BOUNDS["max_tokens"].high)
    display: Literal["summarized"] | None = None  # thinking comes as it was written
    block_binding: Nothing | None = None  # thinking that is sent back is not checked


class JsonFormat(Body):
    """A schema that the text must fit."""

    type: Literal["json_schema"]
    schema_: JsonSchema = Field(..., alias="schema")


class OutputConfig(Body):
    """`effort` where the template knows one ("high" is what leaving it out means); `format`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None
    task_budget: None = None  # nothing counts the tokens of several requests


class MessagesCountBody(SamplingBody):
    """`POST /v1/messages/count_tokens`: what makes the prompt."""

    _refused = REFUSED
    _no_effect = NO_EFFECT

    messages: Annotated[list[MessageParam], StopAtFirst()] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | Annotated[list[TextBlock], StopAtFirst()] | None = None
    tools: Annotated[list[ToolParam], StopAtFirst()] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateVariables = None

    @model_validator(mode="after")
    def _tools_agree(self) -> Self:
        choice = self.tool_choice
        names = [tool.name for tool in self.tools or ()]
        if choice is not None and choice.type in ("any", "tool") and not names:
            raise conflict("tool_choice", f"tool_choice is {choice.type!r}; it is only allowed when tools are given")
        if choice is not None and choice.name is not None and choice.name not in names:
            raise conflict("tool_choice", f"tool_choice names {choice.name!r}; it must be one of the tools")
        return self


class MessagesBody(MessagesCountBody):
    """`POST /v1/messages`."""

    max_tokens: Whole = Field(ge=1, le=BOUNDS["max_tokens"].high)
    stop_sequences: Stop = ()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop_sequences`."""
        return self.stop_sequences

    @model_validator(mode="after")
    def _thinking_fits(self) -> Self:
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            message = f"thinking.budget_tokens is {budget}; it must be less than max_tokens, which is {self.max_tokens}"
            raise conflict("thinking.budget_tokens", message)
        return self
