"""Answers as HTML: what a model writes runs nothing, loads nothing, and takes neither memory nor time beyond a bound."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from html.parser import HTMLParser
from unittest.mock import Mock

import httpx
import pytest
from fastapi import FastAPI

from diptych.ground.clock import MonotonicClock
from diptych.server.http.door import BodyLimits, BodyReader, Workers
from diptych.server.http.errors import ApiError
from diptych.server.markdown import MAX_BYTES, MAX_S, html_of
from diptych.server.page_routes import MAX_WAITING, abilities_json, add_page

NOW_S = MonotonicClock().now_s
TAGS = {
    *(f"h{n}" for n in range(1, 7)),
    "p",
    "a",
    "em",
    "strong",
    "s",
    "code",
    "pre",
    "ul",
    "ol",
    "li",
    "blockquote",
    "hr",
    "br",
}
TAGS |= {"table", "thead", "tbody", "tr", "th", "td"}
ATTRIBUTES = {
    "a": {"href", "rel", "target", "title"},
    "code": {"class"},
    "ol": {"start"},
    "th": {"class"},
    "td": {"class"},
}


class _Made(HTMLParser):
    """Every tag with its attributes, as a browser would read them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def checked(text: str) -> list[tuple[str, dict[str, str | None]]]:
    """The tags of a text's HTML, which are all among those that are harmless."""
    made = _Made(html_of(text, now_s=NOW_S)).tags
    for tag, attributes in made:
        assert tag in TAGS
        assert set(attributes) <= ATTRIBUTES.get(tag, set()), (tag, attributes)
        if tag == "a":
            assert re.match(r"(https?|mailto):", attributes["href"] or ""), attributes
            assert (attributes["rel"], attributes["target"]) == ("noreferrer noopener", "_blank")
    return made


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '<a href="javascript:alert(1)">x</a> <b onclick=alert(1)>y</b>',
    "text <svg/onload=alert(1)> <!-- c --> <?p x?> <![CDATA[x]]> <iframe srcdoc='<script>'>",
    "[x](javascript:alert(1)) [x](JAVASCRIPT:alert(1)) [x](java\tscript:alert(1)) [x](&#106;avascript:alert(1))",
    "[x](vbscript:x) [x](data:text/html,<script>alert(1)</script>) [x](data:image/png;base64,AA) [x](file:///x) [x](//host/x)",
    "[x](/reset_prefix_cache) [x](\x01javascript:alert(1)) [x]( javascript:alert(1) ) [x](<javascript:alert(1)>)",
    "[x][1]\n\n[1]: javascript:alert(1) 'title'",
    "<javascript:alert(1)> <https://a.b/\"onmouseover=alert(1)>",
    "[x](https://a.b/\"onmouseover=alert(1)) [y](https://a.b 'a\" onmouseover=\"alert(1)')",
    "![x](javascript:alert(1)) ![a\"><script>](https://a.b/\"><script>alert(1)</script>) ![![x](https://a.b)](https://c.d)",
    "```\"><script>\n</code></pre><script>alert(1)</script>\n```",
    "```py onclick=alert(1)\nx\n```\n\n    </code><script>alert(1)</script>",
    "`</code><script>alert(1)</script>`",
    "| a<script> | b |\n|:-:|--:|\n| <img onerror=alert(1)> | [x](javascript:alert(1)) |",
    "# <script>\n\n> <script>\n\n- <script>\n\n1. <script>",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_model_writes_runs(text: str) -> None:
    checked(text)


def test_what_is_harmless_is_set() -> None:
    made = checked(
        "# T\n\n**a** *b* `c` ~~d~~\n\n| x | y |\n|---|--:|\n| 1 | 2 |\n\n```py\ne\n```\n\n<https://a.b> [m](mailto:a@b.c)"
    )
    assert {tag for tag, _ in made} == TAGS - {
        *(f"h{n}" for n in range(2, 7)),
        "ul",
        "ol",
        "li",
        "blockquote",
        "hr",
        "br",
    }
    assert ("td", {"class": "right"}) in made
    assert ("code", {"class": "language-py"}) in made
    [(_, attributes)] = checked("![words](https://a.b/c.png)")[1:]
    assert attributes["href"] == "https://a.b/c.png"
    assert html_of("![the *words*](https://a.b/c.png)", now_s=NOW_S).count(">the words</a>") == 1
    assert html_of("see https://a.b", now_s=NOW_S) == "<p>see https://a.b</p>\n"


@pytest.mark.parametrize(
    "text",
    [
        ">" * 10_000 + " a",
        "- " * 10_000 + "a",
        "> - " * 10_000 + "a",
        "*a **b " * 10_000,
        "![a" * 10_000 + "](https://a.b)" * 10_000,
        "a" * MAX_BYTES,
        "|a" * 5_000 + "|\n" + "|-" * 5_000 + "|\n" + "|\n" * 5_000,
    ],
    ids=["quotes", "lists", "both", "emphasis", "pictures", "line", "cells"],
)
def test_depth_and_width_are_set_or_refused(text: str) -> None:
    """Nothing else is raised, and what comes is still of harmless tags."""
    try:
        checked(text)
    except ApiError as error:
        if error.code != "too_complex":
            raise


@pytest.mark.parametrize("text", ["[" * 200_000, "![" * 100_000, "- a\n" * 60_000, "[a][b" * 50_000])
def test_what_takes_the_square_of_its_length_is_given_up(text: str) -> None:
    """By a clock of this test: after 1,000 looks at it the time is over, however fast the machine is."""
    looks = iter(range(10_000_000))
    with pytest.raises(ApiError, match="took more than 2 s") as refused:
        html_of(text, now_s=lambda: next(looks) * MAX_S / 1_000)
    assert refused.value.status == 400
    assert next(looks) < 1_010


def test_the_route_has_bounds_and_the_door_of_all_others(http: httpx.Client) -> None:
    answer = http.post("/page/markdown", json={"text": "a **b** <i>"})
    assert answer.json() == {"html": "<p>a <strong>b</strong> &lt;i&gt;</p>\n"}
    line = http.post("/page/markdown", json={"text": "x" * 1_000_000})
    assert (line.status_code, line.json()["error"]["code"]) == (413, "body_too_large")
    assert "1000000 bytes; at most 262144" in line.json()["error"]["message"]
    for body in ({}, {"text": 1}, {"text": None}, []):
        assert http.post("/page/markdown", json=body).status_code == 400
    other = http.post("/page/markdown", json={"text": "a"}, headers={"origin": "https://elsewhere.example"})
    assert other.status_code == 403
    assert http.post("/page/markdown", content="text=a", headers={"content-type": "text/plain"}).status_code == 415


def test_texts_that_wait_are_bounded() -> None:
    """Each may take two seconds, and they are set one after the other."""

    async def ask() -> list[object]:
        app, state, workers = FastAPI(), Mock(), Workers(1)
        release = asyncio.Event()

        async def run(function: Callable[[], str]) -> str:
            await release.wait()
            return function()

        state.bodies = BodyReader(workers, BodyLimits.of_context(1024))
        state.workers.run, state.now_s = run, NOW_S
        add_page(app, state)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            asked = [
                asyncio.ensure_future(client.post("/page/markdown", json={"text": "a"})) for _ in range(MAX_WAITING + 2)
            ]
            while sum(one.done() for one in asked) < 2:
                await asyncio.sleep(0.001)
            release.set()
            answers = await asyncio.gather(*asked, return_exceptions=True)
            later = await client.post("/page/markdown", json={"text": "a"})
        workers.close()
        return [*(one.status if isinstance(one, ApiError) else one.status_code for one in answers), later.status_code]

    assert asyncio.run(ask()) == [200] * MAX_WAITING + [503] * 2 + [200]


def test_what_the_page_is_told_of_the_model(http: httpx.Client) -> None:
    told = http.get("/page/abilities").json()
    assert told == {
        "writes": True,
        "note": None,
        "thinking": ["none", "medium"],
        "context_tokens": told["context_tokens"],
    }
    assert http.get("/chat").headers["content-security-policy"].startswith("default-src 'self'")


def test_of_a_model_that_cannot_write_the_page_says_so() -> None:
    state = Mock()
    state.engine.loaded.model.spec.has_head = False
    state.reader.template.source = ""
    told = abilities_json(state)
    assert (told["writes"], told["thinking"]) == (False, [])
    assert "writes none" in told["note"]
