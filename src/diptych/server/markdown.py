"""A model's Markdown as HTML that runs nothing: whatever was written, only text, links to other pages and plain marks come out.

Bounded in bytes and in time. A thread cannot be ended from outside, so the parser looks at the clock wherever it begins a rule.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.renderer import RendererProtocol
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from markdown_it.utils import OptionsDict

from diptych.server.http.bases import Body
from diptych.server.http.errors import ApiError

MAX_BYTES = 256 * 1024  # of UTF-8; an answer of 32,768 tokens of English has about half of it
MAX_S = 2.0  # some texts take the square of their length: 100,000 opening brackets 20 s
MAX_NESTING = 20
SCHEMES = ("http", "https", "mailto")
_OPENED = {"rel": "noreferrer noopener", "target": "_blank"}


class MarkdownBody(Body):
    """`POST /page/markdown`."""

    text: str


class _TooLongError(Exception):
    """The time is over."""


def html_of(text: str, *, now_s: Callable[[], float]) -> str:
    """HTML of Markdown with tables; HTML in it is text, and so are links but to http, https and mailto. now_s: a clock.

    Raises ApiError 413 for more than MAX_BYTES, 400 for what takes more than MAX_S or more depth than there is.
    """
    size = len(text.encode())
    if size > MAX_BYTES:
        raise ApiError(413, f"text has {size} bytes; at most {MAX_BYTES} are set", param="text", code="body_too_large")
    until_s = now_s() + MAX_S

    def look(state: StateBlock | StateInline, *_: Any) -> bool:
        if now_s() > until_s:
            raise _TooLongError
        return False  # no rule of Markdown: the next one is tried

    try:
        return str(_setter(look).render(text))
    except _TooLongError:
        message = f"text took more than {MAX_S:g} s to set\nhint: show it as it is"
        raise ApiError(400, message, param="text", code="too_complex") from None
    except RecursionError:
        message = "text is nested too deeply to set\nhint: show it as it is"
        raise ApiError(400, message, param="text", code="too_complex") from None


def _setter(look: Callable[..., bool]) -> MarkdownIt:
    made = MarkdownIt("js-default", {"html": False, "linkify": False, "maxNesting": MAX_NESTING})
    made.block.ruler.before("table", "clock", look, {"alt": []})
    made.inline.ruler.before("text", "clock", look)
    made.validateLink = _is_safe  # type: ignore[method-assign]
    made.add_render_rule("link_open", _link_open)
    made.add_render_rule("image", _image)
    for name in ("th_open", "td_open"):
        made.add_render_rule(name, _cell_open)
    return made


def _is_safe(url: str) -> bool:
    try:
        return urlsplit(url.strip()).scheme.lower() in SCHEMES
    except ValueError:
        return False


def _link_open(
    renderer: RendererProtocol, tokens: Sequence[Token], at: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    tokens[at].attrs.update(_OPENED)
    return str(renderer.renderToken(tokens, at, options, env))  # type: ignore[attr-defined]


def _image(
    renderer: RendererProtocol, tokens: Sequence[Token], at: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    """A picture is not loaded: whoever wrote its address would learn who reads, and when. Its words lead to it."""
    token = tokens[at]
    words = renderer.renderInlineAsText(token.children or [], options, env) or "picture"  # type: ignore[attr-defined]
    opened = " ".join(f'{name}="{value}"' for name, value in _OPENED.items())
    return f'<a href="{escapeHtml(str(token.attrs["src"]))}" {opened}>{escapeHtml(words)}</a>'


def _cell_open(
    renderer: RendererProtocol, tokens: Sequence[Token], at: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    """A class in place of `style`, which the page's CSP forbids."""
    style = str(tokens[at].attrs.pop("style", ""))
    if style:
        tokens[at].attrs["class"] = style.rpartition(":")[2]
    return str(renderer.renderToken(tokens, at, options, env))  # type: ignore[attr-defined]
