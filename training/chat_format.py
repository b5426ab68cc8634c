"""Owns how a dialogue becomes text: that of chat_template.jinja, in parts that are trained on or only read.

Example:
    parts = render_chat([Turn(user="Hi", answer="Hello!")])
    "".join(text for text, _ in parts)   # what the template renders, plus the answer
"""

import json
from dataclasses import dataclass

SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
]  # fmt: skip
EMPTY_THINKING = "<think>\n\n</think>\n\n"

Part = tuple[str, bool]  # text, and whether the loss counts it
Parts = list[Part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange. `thinking` is None when the answer is direct; `is_tool_result` says that `user` is one."""

    user: str
    answer: str
    thinking: str | None = None
    is_tool_result: bool = False


def render_tools(tools: list[dict[str, object]]) -> str:
    lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call these functions:\n<tools>" + lines + "\n</tools>\n\nTo call one, write:\n<tool_call>\n"
        '{"name": <name>, "arguments": <arguments as JSON>}\n</tool_call>'
    )


def render_tool_call(name: str, arguments: dict[str, object]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def render_chat(turns: list[Turn], *, system: str | None = None, tools: list[dict[str, object]] | None = None) -> Parts:
    """Render turns to parts. Only answers (with their end mark) and chains of thought are counted by the loss.

    As in the template, thinking survives only in the last turn; earlier ones keep the empty thinking block.
    """
    parts: Parts = []
    if tools:
        prefix = f"{system}\n\n" if system is not None else ""
        parts.append((f"<|im_start|>system\n{prefix}{render_tools(tools)}<|im_end|>\n", False))
    elif system is not None:
        parts.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    for index, turn in enumerate(turns):
        content = f"\n<tool_response>\n{turn.user}\n</tool_response>" if turn.is_tool_result else "\n" + turn.user
        head = f"<|im_start|>user{content}<|im_end|>\n<|im_start|>assistant\n"
        if turn.thinking is not None and index == len(turns) - 1:
            parts.append((head, False))
            parts.append((f"<think>\n{turn.thinking}\n</think>\n\n{turn.answer}<|im_end|>", True))
        else:
            parts.append((head + EMPTY_THINKING, False))
            parts.append((turn.answer + "<|im_end|>", True))
        parts.append(("\n", False))
    return parts
