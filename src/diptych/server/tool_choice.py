"""Which of its tools a model may call, and whether it must: `tool_choice` of chats and of Responses, and what both come to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeVar

from pydantic import Discriminator, Field, Tag

from diptych.server.http.bases import MAX_TOOLS, Body, StopAtFirst, branch_of_type, conflict


class FunctionName(Body):
    """The name of a function."""

    name: str = Field(min_length=1, max_length=64)


class NamedToolChoice(Body):
    """One function, as chats name it."""

    type: Literal["function"]
    function: FunctionName

    @property
    def name(self) -> str:
        """Of the function."""
        return self.function.name


class FunctionChoice(Body):
    """One function, as Responses name it; one in a namespace as `namespace.name`."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=129)


class AllowedNames(Body):
    """Some of a chat's tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], StopAtFirst()] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolsOfChat(Body):
    """`tool_choice` of a chat that names some of the tools; the model is shown no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


class AllowedTools(Body):
    """The same of a response."""

    type: Literal["allowed_tools"]
    mode: Literal["none", "auto", "required"] = "auto"
    tools: Annotated[list[FunctionChoice], StopAtFirst()] = Field(min_length=1, max_length=MAX_TOOLS)


def _branch_of_choice(value: object) -> str | None:
    # what is no object can only be meant as a word; its branch is no type
    is_object = isinstance(value, dict | Body)
    return branch_of_type(value) if is_object else "(word)"


Word = Annotated[Literal["none", "auto", "required"], Tag("(word)")]
ChatToolChoice = Annotated[
    Word | Annotated[NamedToolChoice, Tag("~function")] | Annotated[AllowedToolsOfChat, Tag("~allowed_tools")],
    Discriminator(_branch_of_choice),
]
ToolChoice = Annotated[
    Word | Annotated[FunctionChoice, Tag("~function")] | Annotated[AllowedTools, Tag("~allowed_tools")],
    Discriminator(_branch_of_choice),
]


class Named(Protocol):
    """A tool."""

    @property
    def name(self) -> str:
        """By which it is called."""
        ...


AnyTool = TypeVar("AnyTool", bound=Named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What a choice comes to. name: of the one tool that must be called. allowed: names of those that are shown; None: all."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None
    allowed: Sequence[str] | None = None

    @property
    def must_call(self) -> bool:
        """Whether the answer is a call."""
        return self.mode == "required"

    def check(self, known: Collection[str]) -> None:
        """Raise a conflict where a tool is named or demanded that is not among those given."""
        named = [self.name] if self.name is not None else self.allowed or ()
        unknown = next((name for name in named if name not in known), None)
        if unknown is not None:
            raise conflict("tool_choice", f"tool_choice names {unknown!r}; it must be one of the tools")
        if self.must_call and not known:
            raise conflict("tool_choice", "tool_choice is 'required'; it is only allowed when tools are given")

    def of(self, tools: Sequence[AnyTool]) -> list[AnyTool]:
        """Those of the tools that the model is shown."""
        if self.mode == "none":
            return []
        return [tool for tool in tools if self.allowed is None or tool.name in self.allowed]


def chosen(choice: ChatToolChoice | ToolChoice | None) -> Chosen:
    """The meaning of either protocol's form; auto where nothing was chosen."""
    match choice:
        case None:
            return Chosen(mode="auto")
        case NamedToolChoice() | FunctionChoice():
            return Chosen(mode="required", name=choice.name)
        case AllowedToolsOfChat(allowed_tools=some) | (AllowedTools() as some):
            return Chosen(mode=some.mode, allowed=[tool.name for tool in some.tools])
        case _:
            return Chosen(mode=choice)
