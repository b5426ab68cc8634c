"""The page to chat in, in a real browser. Set DIPTYCH_SCREENSHOTS to a folder to keep the pictures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from live_page import CONTRASTS, HASTE, needs_browser, told
from server_process import ServerProcess

pytestmark = [pytest.mark.browser, needs_browser]

ANSWERS = "**/v1/chat/completions"
HOSTILE = """# <img src=x onerror=window.isTaken=1>
<script>window.isTaken=1</script> <b onclick="window.isTaken=1">bold</b> <a href="javascript:window.isTaken=1">a</a>
[one](javascript:window.isTaken=1) [two](JaVaScRiPt:window.isTaken=1) [three](data:text/html,<script>window.isTaken=1</script>)
![a picture](https://example.org/x.png "t") [fine](https://example.org/?a=1&b="2)
<iframe srcdoc="<script>parent.isTaken=1</script>"></iframe> <style>body{display:none}</style>

```"><img src=x onerror=window.isTaken=1>
</code></pre><script>window.isTaken=1</script>
```

| a | b |
|---|--:|
| <svg onload=window.isTaken=1> | `<script>` |
"""


# answers begin with this event and go no further until they are stopped, or window.more is called with another
HELD = """event => { const real = window.fetch; window.fetch = (path, options) => {
  if (path !== 'v1/chat/completions') return real(path, options);
  const stream = new ReadableStream({ start(to) {
    window.more = more => to.enqueue(new TextEncoder().encode(more));
    window.more(event);
    options.signal.addEventListener('abort', () => to.error(new DOMException('', 'AbortError'))); } });
  return Promise.resolve(new Response(stream)); }; }"""


@pytest.fixture
def wait() -> Any:
    return pytest.importorskip("playwright.sync_api").expect


def opened(server: ServerProcess, page: Any, wait: Any) -> Any:
    """The page, ready."""
    page.goto(f"{server.url}/chat")
    wait(page.locator("#status")).to_have_text("ready", timeout=60_000)
    wait(page.locator("#set-model option").first).to_be_attached(timeout=60_000)
    return page


@pytest.fixture
def page(server: ServerProcess, tab: Any, wait: Any) -> Any:
    """The page on a phone."""
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.emulate_media(reduced_motion="reduce")
    return opened(server, tab, wait)


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def answers(page: Any, *bodies: str) -> list[dict[str, Any]]:
    """Have these be the next answers; returns what was asked, in the order in which it comes."""
    asked: list[dict[str, Any]] = []
    left = iter(bodies)

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json)
        body = next(left, None)
        route.abort() if body is None else route.fulfill(status=200, body=body)

    page.route(ANSWERS, answer)
    return asked


def last(page: Any) -> Any:
    return page.locator(".message").last


def said(page: Any) -> list[str]:
    return [one.strip() for one in page.locator(".message .text").all_inner_texts()]


def test_a_conversation_is_streamed_told_of_and_kept(server: ServerProcess, page: Any, wait: Any) -> None:
    ask(page, "What is the capital of France?")
    wait(last(page).locator(".told")).to_be_visible(timeout=90_000)
    account = last(page).locator(".told summary").inner_text()
    for word in ("first token after", "tokens/s", "prompt", "cached"):
        assert word in account
    assert last(page).locator(".told summary .phases .prefill").count() == 1
    assert last(page).locator(".told summary .phases .decode").count() == 1
    last(page).locator(".told summary").click()
    wait(last(page).locator(".told tbody").last).to_contain_text("new message")
    first = said(page)
    ask(page, "And of Spain?")
    wait(page.locator(".told")).to_have_count(2, timeout=90_000)
    last(page).locator(".told summary").click()
    wait(last(page).locator(".told tbody").last).to_contain_text("turn 1 assistant")
    both = said(page)
    assert both[:2] == first
    wait(page.locator("details.told[open]")).to_have_count(2)  # what was opened was closed by the next message
    page.reload()
    wait(page.locator(".told")).to_have_count(2, timeout=60_000)
    assert said(page) == both
    wait(page.locator("#list .open")).to_have_text(["What is the capital of France?"])
    wait(page.locator(".again:visible")).to_have_count(1)
    page.click("text=live page")
    page.click("header a")
    assert page.url == f"{server.url}/chat"


def test_an_answer_is_stopped_and_what_came_stays(server: ServerProcess, page: Any, wait: Any) -> None:
    page.evaluate(HELD, told({"content": "half of it"}, end=None).partition("\n\n")[0] + "\n\n")
    for by in ("Escape", "button"):
        ask(page, by)
        wait(last(page).locator(".text")).to_have_text("half of it")
        wait(page.locator("#send")).to_be_disabled()
        ask(page, "not yet")
        wait(page.locator("#prompt")).to_have_value("not yet")
        page.keyboard.press("Escape") if by == "Escape" else page.click("#stop")
        wait(last(page).locator(".note")).to_have_text("stopped")
        wait(last(page).locator(".text")).to_have_text("half of it")
        wait(page.locator("#send")).to_be_enabled()


def test_a_long_answer_of_the_server_is_stopped_there_too(server: ServerProcess, page: Any, wait: Any) -> None:
    page.click("#show-settings")
    page.fill("#set-system", "You tell stories.")
    page.fill("#set-temperature", "0.7")
    page.keyboard.press("Escape")
    page.evaluate(
        """() => { const real = window.fetch; window.fetch = (path, options) => {
        if (path === 'v1/chat/completions') {
          window.asked = JSON.parse(options.body);
          options = { ...options, body: JSON.stringify({ ...window.asked, ignore_eos: true }) };
        }
        return real(path, options); }; }"""
    )
    ask(page, "Tell me a story.")
    wait(last(page).locator(".text")).to_contain_text(" ", timeout=60_000)
    page.keyboard.press("Escape")
    wait(last(page).locator(".note")).to_have_text("stopped")
    server.wait_idle()
    asked = page.evaluate("window.asked")
    assert asked["temperature"] == 0.7
    assert asked["messages"][0] == {"role": "system", "content": "You tell stories."}
    assert "seed" not in asked


def test_an_answer_is_made_anew_and_a_question_changed(page: Any, wait: Any) -> None:
    asked = answers(page, *(told({"content": f"answer {n}"}) for n in range(1, 6)))
    ask(page, "one")
    wait(last(page).locator(".text")).to_have_text("answer 1")
    ask(page, "two")
    wait(last(page).locator(".text")).to_have_text("answer 2")
    page.click(".again:visible")
    wait(last(page).locator(".text")).to_have_text("answer 3")
    assert [one["content"] for one in asked[2]["messages"]] == ["one", "answer 1", "two"]
    page.locator(".mine").first.get_by_role("button", name="edit").click()
    page.keyboard.type(" more")
    page.keyboard.press("Enter")
    wait(page.locator(".message .text")).to_have_text(["one more", "answer 4"])
    assert [one["content"] for one in asked[3]["messages"]] == ["one more"]
    page.click("#undo")
    wait(page.locator(".message .text")).to_have_text(["one", "answer 1", "two", "answer 3"])
    page.locator(".mine").first.get_by_role("button", name="edit").click()
    page.keyboard.press("Escape")
    wait(page.locator(".message .text").first).to_have_text("one")
    page.fill("#prompt", "a line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and another")
    page.keyboard.press("Enter")
    wait(last(page).locator(".text")).to_have_text("answer 5")
    assert asked[4]["messages"][-1]["content"] == "a line\nand another"


def test_conversations_come_and_go(page: Any, wait: Any) -> None:
    answers(page, *(told({"content": f"answer {n}"}) for n in range(9)))
    for text in ("the first one of them", "<b>the second</b>"):
        page.set_viewport_size({"width": 1280, "height": 800})
        page.click("#new")
        ask(page, text)
        wait(last(page).locator(".text")).to_contain_text("answer")
    titles = page.locator("#list .open")
    wait(titles).to_have_text(["<b>the second</b>", "the first one of them"])
    page.get_by_role("button", name="the first one of them", exact=True).click()
    wait(page.locator(".mine .text")).to_have_text("the first one of them")
    page.get_by_role("button", name="delete the first one of them").click()
    wait(titles).to_have_text(["<b>the second</b>"])
    wait(page.locator(".message")).to_have_count(0)
    page.click("#undo")
    wait(titles).to_have_text(["<b>the second</b>", "the first one of them"])
    page.get_by_role("button", name="delete <b>the second</b>").click()
    page.reload()
    wait(titles).to_have_text(["the first one of them"])
    other = page.context.new_page()
    other.set_viewport_size({"width": 1280, "height": 800})
    other.goto(page.url)
    other.locator("#list .delete").click()
    wait(titles).to_have_count(0)


REFUSES = "void (Storage.prototype.setItem = () => { throw new DOMException('', '%s'); })"
MANY = "for (let n = 0; n < 200; n += 1) localStorage.setItem(`diptych.chat.${n}`, '{}')"


@pytest.mark.parametrize(
    ("obstacle", "said_of_it"),
    [
        (REFUSES % "QuotaExceededError", "store is full"),
        (REFUSES % "SecurityError", "keeps nothing"),
        (MANY, "200 already"),
    ],
    ids=["full", "forbidden", "many"],
)
def test_what_is_not_kept_is_said_so(page: Any, wait: Any, obstacle: str, said_of_it: str) -> None:
    """Once: with each save it would stand where the undo of what was made anew stands."""
    page.evaluate(obstacle)
    answers(page, told({"content": "yes"}), told({"content": "no"}))
    ask(page, "are you there?")
    wait(last(page).locator(".text")).to_have_text("yes")
    wait(page.locator("#notice")).to_contain_text(said_of_it)
    page.click(".again:visible")
    wait(last(page).locator(".text")).to_have_text("no")
    page.click("#undo")
    wait(last(page).locator(".text")).to_have_text("yes")


def test_thoughts_and_calls_stand_apart(page: Any, wait: Any) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "look", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"at": "<b>"}'}}
    asked = answers(
        page,
        told({"reasoning_content": "let me "}, {"reasoning_content": "see"}, {"content": "**four**"}),
        told({"tool_calls": [call]}, {"tool_calls": [more]}, end="tool_calls"),
        told({"content": "cut"}, end="length"),
    )
    ask(page, "2 + 2?")
    wait(last(page).locator("strong")).to_have_text("four")
    wait(last(page).locator(".reasoning")).to_be_hidden()
    last(page).locator(".thought summary").click()
    wait(last(page).locator(".reasoning")).to_have_text("let me see")
    ask(page, "look")
    wait(last(page).locator("figure")).to_have_text('calls look{"at": "<b>"}')
    wait(last(page).locator(".note")).to_contain_text("calls a tool")
    ask(page, "more")
    wait(last(page).locator(".note")).to_contain_text("cut off")
    assert asked[2]["messages"][3]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "<b>"}'}
    assert asked[1]["messages"][1]["reasoning_content"] == "let me see"


def test_the_model_of_the_tests_thinks_when_told_to(page: Any, wait: Any) -> None:
    page.click("#show-settings")
    wait(page.locator("#set-thinking option")).to_have_text(["as the model has it", "off", "on"])
    page.select_option("#set-thinking", label="on")
    page.fill("#set-seed", "1")
    page.fill("#set-max_tokens", "40")
    page.click("#settings button[type=submit]")
    ask(page, "What is 3 plus 4?")
    wait(last(page).locator(".thought")).to_be_visible(timeout=60_000)
    wait(last(page).locator(".thought summary")).to_contain_text("thought for", timeout=60_000)


def test_hostile_markdown_runs_nothing(page: Any, wait: Any) -> None:
    answers(page, told({"content": HOSTILE}))
    ask(page, HOSTILE)
    wait(last(page).locator("table")).to_be_visible()
    assert page.evaluate("window.isTaken ?? 0") == 0
    assert page.evaluate("document.querySelectorAll('main :is(img, script, iframe, style, svg, b)').length") == 0
    links = last(page).locator(".text a")
    assert [one.get_attribute("href").partition("?")[0] for one in links.all()] == [
        "https://example.org/x.png",
        "https://example.org/",
    ]
    assert {(one.get_attribute("rel"), one.get_attribute("target")) for one in links.all()} == {
        ("noreferrer noopener", "_blank")
    }
    inline = (
        "[...document.querySelectorAll('main *')].flatMap(e => e.getAttributeNames()).filter(n => n.startsWith('on'))"
    )
    assert page.evaluate(inline) == []
    wait(last(page).locator("pre")).to_contain_text("</code></pre><script>")


def test_what_breaks_off_stays_and_is_tried_again(page: Any, wait: Any) -> None:
    half = told({"content": "half of it"}, end=None).partition("\n\n")[0] + "\n\n"
    failed = f"event: error\ndata: {json.dumps({'error': {'message': 'the engine failed'}})}\n\n"
    asked = answers(page, half, half + failed, told({"content": "whole"}))
    ask(page, "go")
    for told_of in ("broke off", "the engine failed"):
        wait(last(page).locator(".note")).to_contain_text(told_of)
        wait(last(page).locator(".note")).to_have_class("error note")
        wait(last(page).locator(".text")).to_have_text("half of it")
        page.get_by_role("button", name="try again").click()
    wait(last(page).locator(".text")).to_have_text("whole")
    assert [len(one["messages"]) for one in asked] == [1, 1, 1]
    page.route("**/ready", lambda route: route.abort())
    ask(page, "and then?")  # nobody answers
    wait(last(page).locator(".note")).to_contain_text("connection to the server is lost")
    wait(page.locator("#status")).to_have_text("connection lost, trying again")
    page.unroute("**/ready")
    page.reload()
    wait(last(page).locator(".note")).to_contain_text("connection to the server is lost")
    wait(page.get_by_role("button", name="try again")).to_be_visible()


def test_a_page_that_is_left_keeps_what_had_come(page: Any, wait: Any) -> None:
    page.evaluate(HELD, told({"content": "**half** of it"}, end=None).partition("\n\n")[0] + "\n\n")
    ask(page, "go")
    wait(last(page).locator(".text")).to_have_text("**half** of it")
    page.reload()
    wait(last(page).locator("strong")).to_have_text("half")
    wait(last(page).locator(".note")).to_contain_text("not finished")
    answers(page, told({"content": "whole"}))
    page.get_by_role("button", name="try again").click()
    wait(last(page).locator(".text")).to_have_text("whole")
    wait(page.locator("#said")).to_have_text("answer: whole")


def test_a_server_that_goes_and_comes_back(page: Any, wait: Any) -> None:
    page.evaluate(HASTE)
    page.route("**/ready", lambda route: route.abort())
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    wait(page.locator("#status")).to_have_text("connection lost, trying again")
    page.unroute("**/ready")
    wait(page.locator("#status")).to_have_text("ready", timeout=30_000)


def test_the_reader_who_reads_is_left_there(page: Any, wait: Any) -> None:
    lines = told({"content": "".join(f"line {n}\n" for n in range(120))}, end=None).partition("\n\n")[0] + "\n\n"
    page.evaluate(HELD, lines)
    ask(page, "much")
    at_end = "(t => t.scrollHeight - t.scrollTop - t.clientHeight < 24)(document.getElementById('thread'))"
    wait(last(page).locator(".text")).to_contain_text("line 119")
    wait(page.locator("#to-end")).to_be_hidden()
    assert page.evaluate(at_end)
    page.hover("#thread")
    page.mouse.wheel(0, -900)
    wait(page.locator("#to-end")).to_be_visible()
    top, height = page.evaluate("(t => [t.scrollTop, t.scrollHeight])(document.getElementById('thread'))")
    page.evaluate("more => window.more(more)", lines)
    wait(last(page).locator(".text")).to_contain_text("line 119\nline 0")
    new_top, new_height = page.evaluate("(t => [t.scrollTop, t.scrollHeight])(document.getElementById('thread'))")
    assert (new_top, new_height > height) == (top, True)
    page.click("#to-end")
    wait(page.locator("#to-end")).to_be_hidden()
    page.evaluate("more => window.more(more)", lines.replace("line 119", "the end"))
    wait(last(page).locator(".text")).to_contain_text("the end")
    assert page.evaluate(at_end)
    assert page.inner_text("#said") == "waiting for the answer", "every token is read aloud"
    assert page.locator("#thread :is([aria-live], [role=status], [role=log])").count() == 0
    page.keyboard.press("Escape")
    wait(page.locator("#said")).to_have_text("stopped")


def test_what_is_copied_and_exported_is_what_was_written(page: Any, wait: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = "see **this**:\n\n```py\nif a < b:\n    c\n```\n"
    answers(page, told({"content": text}))
    ask(page, "code, please")
    wait(last(page).locator("pre")).to_be_visible()
    for button, copied in (("copy this code", "if a < b:\n    c\n"), ("copy", text)):
        last(page).get_by_role("button", name=button, exact=True).click()
        wait(page.locator("#said")).to_have_text("copied")
        assert page.evaluate("navigator.clipboard.readText()") == copied
    with page.expect_download() as download:
        page.click("#export")
    kept = json.loads(Path(download.value.path()).read_text())
    assert kept["title"] == "code, please"
    assert [(one["role"], one["content"]) for one in kept["messages"]] == [
        ("user", "code, please"),
        ("assistant", text),
    ]


def test_a_key_is_asked_for_and_kept_for_the_tab(tab: Any, wait: Any) -> None:
    """A browser that has the page, and has not, or no longer, the key by its own dialog: there is a field for it."""
    with ServerProcess("--kv-memory-bytes", "33554432", key="a-key") as server:

        def pass_on(route: Any) -> None:
            """As a browser does whose reader has closed its dialog: what it is refused, the page sees."""
            path = route.request.url.removeprefix(server.url)
            is_file = path == "/chat" or path.endswith((".js", ".css"))
            headers = route.request.headers | ({"x-api-key": "a-key"} if is_file else {})
            answer = route.fetch(headers=headers)
            kind = answer.headers["content-type"]
            route.fulfill(status=answer.status, body=answer.body(), headers={"content-type": kind})

        tab.route("**/*", pass_on)
        tab.goto(f"{server.url}/chat")
        for key in ("another", "a-key"):
            wait(tab.locator("#key")).to_be_focused(timeout=60_000)
            tab.fill("#key", key)
            tab.keyboard.press("Enter")
        wait(tab.locator("#model")).to_have_text("diptych-10m", timeout=60_000)
        wait(tab.locator("#settings")).to_be_hidden()
        ask(tab, "Hello")
        wait(last(tab).locator(".told")).to_be_visible(timeout=90_000)
        wait(last(tab).locator(".text p").first).to_be_visible()  # its Markdown, too
        kept = "[localStorage, sessionStorage].map(store => JSON.stringify(store).includes('a-key'))"
        assert tab.evaluate(kept) == [False, True]
        tab.goto("about:blank")  # it would ask a server that has ended


@pytest.mark.parametrize("writes", [True, False])
def test_a_model_that_never_learnt_to_chat_says_so(page: Any, wait: Any, writes: bool) -> None:
    able = {"writes": writes, "note": "this model has no chat template", "thinking": [], "context_tokens": 64}
    page.route("**/page/abilities", lambda route: route.fulfill(json=able))
    page.reload()
    wait(page.locator("#model-note")).to_contain_text("no chat template. ")
    wait(page.locator("#model-note a")).to_have_attribute("href", "./")
    wait(page.locator("#prompt")).to_be_enabled() if writes else wait(page.locator("#prompt")).to_be_disabled()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_all_of_it_fits_and_can_be_read(
    server: ServerProcess, tab: Any, wait: Any, tmp_path: Path, theme: str, width: int
) -> None:
    tab.set_viewport_size({"width": width, "height": 844 if width == 390 else 800})
    tab.emulate_media(color_scheme=theme)
    page = opened(server, tab, wait)
    code = (
        "```python\n"
        + "print('a line that is much wider than the phone that it is read on')  # "
        + "x" * 90
        + "\n```\n"
    )
    table = "| a | b | c | d |\n|---|---|--:|---|\n" + "| some words | " + "y" * 60 + " | 12 | and more words |\n"
    many = "Words, `code` and a [link](https://example.org).\n\n> said\n\n1. one\n2. two\n\n"
    answers(
        page,
        told({"content": many + code + "\n" + table}),
        told({"reasoning_content": "z" * 300}, {"content": "w" * 400}, end="length"),
        told({"content": "half"}, end=None),
        told({"content": "שלום עולם, and more\n\nplain again"}),
    )
    for text in ("Show me all that there is", "v" * 300, "go", "مرحبا"):
        ask(page, text)
        wait(page.locator("#send")).to_be_enabled()
    wait(last(page).locator("p")).to_have_count(3)  # two lines and the note
    direction = "e => getComputedStyle(e).direction"
    assert [one.evaluate(direction) for one in last(page).locator(".text p").all()] == ["rtl", "ltr"]
    assert page.locator(".mine .text").last.evaluate(direction) == "rtl"
    page.unroute(ANSWERS)
    ask(page, "What is the capital of France?")
    wait(last(page).locator(".told")).to_be_visible(timeout=90_000)
    folder = Path(os.environ.get("DIPTYCH_SCREENSHOTS", tmp_path))
    page.screenshot(path=folder / f"chat-{theme}-{width}.png", timeout=90_000)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate("(t => t.scrollWidth <= t.clientWidth)(document.getElementById('thread'))")
    assert page.evaluate(CONTRASTS) == []
    last(page).locator(".told summary").click()
    page.locator(".thought:visible summary").click()
    page.locator(".message").nth(1).scroll_into_view_if_needed()
    page.screenshot(path=folder / f"chat-all-{theme}-{width}.png", timeout=90_000)
    assert page.evaluate("(t => t.scrollWidth <= t.clientWidth)(document.getElementById('thread'))")
    assert page.evaluate(CONTRASTS) == []
    page.click("#show-settings")
    page.screenshot(path=folder / f"chat-settings-{theme}-{width}.png", timeout=90_000)
    assert page.evaluate(CONTRASTS) == []
    page.keyboard.press("Escape")
    wait(page.locator("#show-settings")).to_be_focused()
    if width == 390:
        page.click("#show-list")
        wait(page.locator("#list .open")).to_be_visible()
        page.screenshot(path=folder / f"chat-list-{theme}.png", timeout=90_000)
        page.locator("#list .open").click()
        wait(page.locator("#thread")).to_be_visible()
