"""The live page in a real browser. Set DIPTYCH_SCREENSHOTS to a folder to keep the pictures."""

from __future__ import annotations

import json
import os
import re
import socket
from contextlib import ExitStack
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from typer.testing import CliRunner

from checkpoints import make_checkpoint
from diptych.cli.doctor import app as doctor
from diptych.cli.simulate import app as simulate
from diptych.compute.runner import load_model
from diptych.engine.cost_view import CostView
from diptych.ground.config import ComputeConfig
from diptych.ground.shape import StepShape
from diptych.metrics import StepRecord
from diptych.server.watch.live import MAX_FRAME_STEPS, MAX_WATCHERS, LiveFeed
from live_page import DRAWN, HASTE, HELLO, frame, needs_browser, step
from server_process import ServerProcess


def test_what_a_server_says_first_names_its_pages(server: ServerProcess, http: httpx.Client) -> None:
    """Its address alone told nobody that there is a page to chat in."""
    pages = re.findall(r"http://\S+", server.pages)
    assert pages == [f"{server.url}/", f"{server.url}/chat"]
    assert all(http.get(page).headers["content-type"].startswith("text/html") for page in pages)


def test_the_page_asks_nothing_of_other_machines(http: httpx.Client) -> None:
    """Self-contained: it must work on a machine without a network, and tell nobody that it is open."""
    folder = resources.files("diptych.server") / "page"
    for file in folder.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]", text), file.name
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    for path in re.findall(r'(?:href|src)="(page/[^"]+)"', page.text):
        assert http.get(f"/{path}").status_code == 200


def test_the_feed_says_hello_then_sends_frames_and_stops_listening_after(http: httpx.Client) -> None:
    """Nobody watching must cost nothing: without watchers no listener of the page hangs on the engine.

    A finished request has its final counts; the page used to show what it had last seen, "34 or more". It is told once: with
    several choices it stood in the table several times, finished while it still ran.
    """
    with http.stream("GET", "/live") as feed:
        lines = (line for line in feed.iter_lines() if line.startswith("data: "))
        hello = json.loads(next(lines).removeprefix("data: "))
        assert hello["kind"] == "hello"
        assert hello["blocks"] > 0
        http.post("/v1/completions", json={"prompt": "watched", "max_tokens": 5, "ignore_eos": True, "n": 2})
        frames = [json.loads(next(lines).removeprefix("data: ")) for _ in range(3)]
    steps = [step for frame in frames for step in frame["steps"]]
    assert sum(step["p"] for step in steps) > 0
    assert sum(step["d"] for step in steps) == 8
    ended = [one for frame in frames for one in frame["finished"]]
    counts = [(one["reason"], one["output_tokens"], one["computed_to"]) for one in ended]
    assert counts == [("length", 10, ended[0]["prompt_tokens"])]
    assert {"kind", "blocks", "ttft_s", "itl_s", "requests", "totals"} <= set(frames[0])


def test_a_busy_engine_is_drawn_without_gaps() -> None:
    """Of 150 steps in a quarter of a second 48 were drawn, and the engine looked idle behind them."""
    feed = LiveFeed(*[Mock()] * 2, work=Mock(), view=None, ceilings=None, keeps_minutes=True)
    decode, prefill = StepShape.decode(batch=1, context_tokens=9), StepShape.prefill(batch=1, new_tokens=9)
    for i in range(200):
        shape, ids = (prefill, ()) if i == 100 else (decode, ("a",) if i < 150 else ("a", "b"))
        step = StepRecord(i, i / 10, i / 10 + 0.09, shape, None, [], ids, 0.0, 0.0, drafted_tokens=0)
        feed._on_step(step)
    steps = feed._frame.steps
    assert len(steps) < 2 * MAX_FRAME_STEPS
    assert sum(step["n"] for step in steps) == 200
    assert max(after["t"] - before["t"] - before["s"] for before, after in pairwise(steps)) < 0.011
    assert sum(step["d"] for step in steps) == 199
    assert [step["p"] for step in steps if step["p"]] == [9]


@pytest.mark.parametrize(("family", "least", "most"), [("llama", 0.9, 1.0), ("mixtral", 0.4, 0.7), ("zamba", 1.2, 1.4)])
def test_the_ceiling_of_decode_is_what_a_step_reads(family: str, least: float, most: float, tmp_path: Path) -> None:
    """It was what lies in memory: a mixture, of which a step reads two experts of eight, ran above its ceiling, and Zamba,
    whose layers read one block in turn, far below.
    """
    model = load_model(make_checkpoint(family, tmp_path), ComputeConfig(backend="torch", device="cpu", weights="bf16"))
    machine = Mock(roof_bytes_per_s=1e9, flops_per_s=1e12)
    feed = LiveFeed(*[Mock()] * 2, work=Mock(linear=1.0), view=CostView(model), ceilings=machine, keeps_minutes=True)
    ceilings = feed._ceilings()
    assert ceilings is not None
    assert least < 1e9 / ceilings["decode_steps_per_s"] / (2 * model.n_parameters) <= most


def test_one_page_too_many_is_refused(server: ServerProcess, http: httpx.Client) -> None:
    """It got a 200 and a broken connection, and the log a traceback, again with every try of the browser's."""
    with ExitStack() as pages:
        for _ in range(MAX_WATCHERS):
            page = pages.enter_context(socket.create_connection((server.host, server.port), timeout=30))
            page.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while b"hello" not in page.recv(65536):
                pass
        refused = http.get("/live")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize(
    ("name", "theme", "width"), [("light", "light", 1280), ("dark", "dark", 1280), ("narrow", "dark", 390)]
)
def test_a_person_sees_requests_and_tries_a_prompt(
    server: ServerProcess, tab: Any, tmp_path: Path, name: str, theme: str, width: int
) -> None:
    wait = pytest.importorskip("playwright.sync_api").expect  # not wait_for_function: the page's CSP forbids eval
    tab.set_viewport_size({"width": width, "height": 1400})
    tab.emulate_media(color_scheme=theme)
    problems: list[str] = []
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    tab.goto(f"{server.url}/")
    wait(tab.locator("#status")).to_have_text("live", timeout=60_000)
    tab.fill("#try-system", "You answer in one sentence.")
    tab.click("#try-send")
    wait(tab.locator("#try-report table").first).to_be_visible(timeout=90_000)
    wait(tab.locator("#requests tbody tr").first).to_be_visible(timeout=60_000)
    wait(tab.locator("#ttft")).to_contain_text("s", timeout=60_000)
    assert tab.inner_text("#try-answer").strip()
    written = tab.evaluate("[...document.querySelectorAll('#try-report tbody tr')][1].cells[1].textContent")
    cells = tab.locator("#requests tbody tr").first.locator("td")
    wait(cells.nth(1)).to_have_text("stop", timeout=60_000)
    assert cells.nth(4).inner_text() == written  # the final count, not what a frame had last seen
    report = tab.inner_text("#try-report")
    for word in ("prefill", "decode", "system", "new message", "queue"):
        assert word in report
    assert tab.evaluate("document.documentElement.dataset.theme") == theme
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    drawn = "(id) => { const c = document.getElementById(id); const d = c.getContext('2d')"
    drawn += ".getImageData(0, 0, c.width, c.height).data; return d.some((value, i) => i % 4 === 3 && value > 0); }"
    for canvas in ("timeline", "rates", "ttft-chart", "itl-chart"):
        assert tab.evaluate(drawn, canvas), canvas
    tables = "[...document.querySelectorAll('td, th')].every(c => c.getBoundingClientRect().right <= window.innerWidth)"
    assert tab.evaluate(tables), "a column of a table is cut off"
    tab.click("#theme")
    assert tab.evaluate("document.documentElement.dataset.theme") != theme
    tab.click("#theme")
    folder = Path(os.environ.get("DIPTYCH_SCREENSHOTS", tmp_path))
    tab.screenshot(path=folder / f"page-{name}.png", full_page=True, timeout=90_000)
    assert problems == []


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_a_person_asks_what_would_have_been(
    server: ServerProcess, tab: Any, tmp_path: Path, theme: str, width: int
) -> None:
    """From a line of the table to its times with one thing changed; a change that is none is answered with words."""
    wait = pytest.importorskip("playwright.sync_api").expect
    tab.set_viewport_size({"width": width, "height": 1200})
    tab.emulate_media(color_scheme=theme)
    tab.goto(f"{server.url}/")
    wait(tab.locator("#status")).to_have_text("live", timeout=60_000)
    body = {"prompt": "A lamp in the dark. " * 12, "max_tokens": 24, "ignore_eos": True}
    server.client().post("/v1/completions", json=body).raise_for_status()
    button = tab.locator("#requests tbody tr button:enabled").first
    wait(button).to_be_visible(timeout=60_000)
    button.click()
    rows = tab.locator("#what-if-rows tr")
    wait(rows).to_have_count(7, timeout=90_000)
    assert rows.nth(0).locator("td").first.inner_text() == "measured"
    assert "trust the others as far" in tab.inner_text("#what-if-note")
    assert re.search(r"\d", rows.nth(2).locator("td").nth(3).inner_text())
    folder = Path(os.environ.get("DIPTYCH_SCREENSHOTS", tmp_path))
    tab.locator("#what-if").scroll_into_view_if_needed()
    tab.screenshot(path=folder / f"what-if-{theme}.png", full_page=True, timeout=90_000)
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    fits = "(t => [t.parentElement.scrollWidth - t.parentElement.clientWidth, t.tBodies[0].rows[0].clientHeight])"
    beyond, height = tab.evaluate(f"{fits}(document.getElementById('requests'))")
    assert beyond <= 0
    assert height < 34, "an age that wraps now and then moves the buttons below it"
    tab.fill("#what-if-change", "chunk=64")
    tab.click("#what-if-ask")
    wait(rows).to_have_count(3, timeout=60_000)
    tab.fill("#what-if-change", "quicker")
    tab.click("#what-if-ask")
    wait(tab.locator("#what-if-note")).to_contain_text("cannot change 'quicker'", timeout=60_000)
    tab.route("**/what-if*", lambda route: route.abort())
    tab.click("#what-if-ask")
    wait(tab.locator("#what-if-note")).to_contain_text("the connection to the server is lost")
    tab.keyboard.press("Escape")
    wait(tab.locator("#what-if")).to_be_hidden()
    wait(button).to_be_focused()  # whoever came with the keyboard was sent to the top of the page


@pytest.mark.browser
@needs_browser
def test_a_line_stays_its_request_s(server: ServerProcess, tab: Any) -> None:
    """A request that came above took over the line that one had tabbed to, and Enter asked about another."""
    wait = pytest.importorskip("playwright.sync_api").expect
    tab.goto(f"{server.url}/")
    wait(tab.locator("#status")).to_have_text("live", timeout=60_000)
    lines = tab.locator("#requests tbody tr button:enabled")
    for n in (1, 2):
        server.client().post("/v1/completions", json={"prompt": "hello", "max_tokens": 2}).raise_for_status()
        wait(lines).to_have_count(n, timeout=60_000)
        if n == 1:
            lines.first.focus()
            asked = tab.evaluate("document.activeElement.dataset.request")
    assert tab.evaluate("document.activeElement.dataset.request") == asked
    assert lines.nth(1).get_attribute("data-request") == asked


@pytest.mark.browser
@needs_browser
def test_an_answer_that_breaks_off_stays_and_is_said_to(server: ServerProcess, tab: Any) -> None:
    """What had come was replaced by "network error"; a stream that just ended, and one cut by max tokens, looked whole."""
    wait = pytest.importorskip("playwright.sync_api").expect
    tab.set_viewport_size({"width": 390, "height": 900})
    tab.goto(f"{server.url}/")
    note = tab.locator("#try-note")
    tab.fill("#try-max", "3")
    tab.click("#try-send")
    wait(note).to_contain_text("cut off: max tokens", timeout=60_000)
    half = json.dumps({"choices": [{"index": 0, "delta": {"content": "half of it"}, "finish_reason": None}]})
    failed = json.dumps({"error": {"message": "the engine failed\nhint: see its log"}})
    left = iter([f"data: {half}\n\n", f"data: {half}\n\nevent: error\ndata: {failed}\n\n"])
    tab.route(
        "**/v1/chat/completions",
        lambda route: route.abort() if (body := next(left, None)) is None else route.fulfill(status=200, body=body),
    )
    for answer, said in (
        ("half of it", "the answer broke off"),
        ("half of it", "the engine failed"),
        ("", "the connection to the server is lost"),
    ):
        tab.click("#try-send")
        wait(note).to_contain_text(said, timeout=60_000)
        wait(note).to_have_class("note error")
        assert tab.inner_text("#try-answer") == answer
    tab.unroute("**/v1/chat/completions")
    tab.fill("#try-max", "64")
    tab.click("#try-send")
    wait(tab.locator("#try-report table").first).to_be_visible(timeout=60_000)
    parts = tab.evaluate("document.getElementById('try-answer').childNodes.length")
    assert parts > 1, "all that was there was written, and read aloud, again with every token"
    wait(tab.locator("#try-send")).to_be_enabled()
    tab.uncheck("#try-chat")  # a system text was dropped in silence
    wait(tab.locator("#try-system")).to_be_disabled()
    tab.check("#try-chat")
    wait(tab.locator("#try-system")).to_be_enabled()


@pytest.mark.browser
@needs_browser
def test_a_browser_sends_the_key_as_its_password(browser: Any) -> None:
    """Chromium, told of two ways in one line, asked for no password: a server with a key had no page."""
    wait = pytest.importorskip("playwright.sync_api").expect
    with ServerProcess("--kv-memory-bytes", "33554432", key="a-key") as server:
        context = browser.new_context(http_credentials={"username": "me", "password": "a-key"})
        try:
            page = context.new_page()
            page.goto(f"{server.url}/")
            wait(page.locator("#status")).to_have_text("live", timeout=60_000)
            page.click("#try-send")
            wait(page.locator("#try-report table").first).to_be_visible(timeout=90_000)
        finally:
            context.close()


@pytest.mark.browser
@needs_browser
def test_a_request_has_one_short_name(server: ServerProcess, tab: Any) -> None:
    """A step named by their ends those whose rows began with their beginnings; prompts of one body looked the same."""
    tab.goto(f"{server.url}/")
    ids = ["chatcmpl-c967bfcecf8d4fcf", "cmpl-c967bfcecf8d4fcf-0", "cmpl-c967bfcecf8d4fcf-11", "job-7", "7"]
    named = tab.evaluate("ids => import('/page/charts.js').then(charts => ids.map(charts.label))", ids)
    assert named == ["c967bfcecf8d", "c967bfcecf-0", "c967bfcec-11", "job-7", "7"]


@pytest.mark.browser
@needs_browser
def test_no_number_is_written_with_an_exponent(server: ServerProcess, tab: Any) -> None:
    """99.7 tokens per second were "1.0e+2", a million of them "1.00e+3k"."""
    tab.goto(f"{server.url}/")
    numbers = [0.5, 7, 99.4, 99.7, 9999.7, 12_345, 999_400, 999_600, 999_999_999]
    written = tab.evaluate("ids => import('/page/charts.js').then(charts => ids.map(charts.short))", numbers)
    assert written == ["0.50", "7", "99", "100", "10000", "12.3k", "999k", "1.00M", "1.00G"]


@pytest.mark.browser
@needs_browser
def test_a_kept_feed_is_drawn_by_its_own_clock(server: ServerProcess, context: Any, tmp_path: Path) -> None:
    """Frames were a quarter of a second apart, however far they are: in the chart, in the first one's rates; and behind a step
    longer than one the engine was idle. The oldest request stood at the top, and steps were for those who can point at them.
    """
    wait = pytest.importorskip("playwright.sync_api").expect
    feed = [
        HELLO,
        frame(1.0, 2, step(0.8, prompt="r0"), step(0.9, "r0", prompt="r1"), busy_s=0.2),
        frame(1.3, 3, step(1.1, "r0", "r1", prompt="r2"), step(1.2, "r0", "r1", "r2"), busy_s=0.2),
        frame(21.0, 3, busy_s=19.0),
    ]
    file = tmp_path / "kept.txt"
    file.write_text("".join(f"data: {json.dumps(one)}\n\n" for one in feed))
    page = context.new_page()
    page.add_init_script(DRAWN)
    page.goto(f"{server.url}/")
    wait(page.locator("#status")).to_have_text("live", timeout=60_000)
    watch = "new MutationObserver(all => { window.said = (window.said ?? 0) + all.length; })"
    page.evaluate(f"{watch}.observe(document.getElementById('status'), {{childList: true, subtree: true}})")
    page.evaluate(HASTE)
    page.set_input_files("#open", str(file))
    wait(page.locator("#status")).to_have_text("kept.txt, at its end", timeout=60_000)
    assert page.evaluate("window.said") <= 4, "a state that stays was said with every frame"
    rows = page.evaluate("window.drawn['timeline']")
    assert rows["r2"] < rows["r1"] < rows["r0"]
    assert "-20 s" in page.evaluate("window.drawn['rates']")
    assert "8 tokens/s" in page.evaluate("window.drawn['rates']")  # 8 in the first second, then 4 in 0.3 s
    wait(page.locator("#rate-text")).to_have_text("engine busy 92 %")
    page.focus("#timeline")
    note = page.locator("#timeline-note")
    for key, told in (
        ("ArrowLeft", "0 prefill tokens · 3 decode (1 of 3 drafts kept)"),
        ("ArrowLeft", "4 prefill tokens: r2 4 · 2 decode"),
        ("ArrowRight", "0 prefill tokens · 3 decode"),
        ("ArrowRight", "0 prefill tokens · 3 decode"),
    ):
        page.keyboard.press(key)
        wait(note).to_contain_text(told)


@pytest.mark.browser
@needs_browser
def test_a_page_that_was_refused_tries_again(server: ServerProcess, context: Any) -> None:
    """One page too many, or a proxy whose server starts anew: a browser gives up then, and the page stayed dead.

    A server that was started anew was asked about requests of the one before, of which it knows nothing.
    """
    wait = pytest.importorskip("playwright.sync_api").expect
    page = context.new_page()
    page.add_init_script(f"({HASTE})()")
    ended = {"id": "r9", "at_s": 0.9, "reason": "stop", "prompt_tokens": 1, "computed_to": 1, "output_tokens": 1}
    first, anew = (
        "retry: 100\n\n"
        + "".join(
            f"data: {json.dumps(one)}\n\n" for one in (HELLO | {"load_s": load_s}, frame(1.0, 0, busy_s=0.0) | more)
        )
        for load_s, more in ((0.1, {"finished": [ended]}), (0.2, {}))
    )
    asked: list[Any] = []

    def answer(**given: Any) -> None:
        while not asked:
            page.wait_for_timeout(20)
        asked.pop().fulfill(content_type="text/event-stream", **given)

    page.route("**/live", lambda route: asked.append(route))
    page.goto(f"{server.url}/")
    answer(status=503)
    wait(page.locator("#status")).to_have_text("connection refused, trying again", timeout=60_000)
    answer(body=first)
    rows = page.locator("#requests tbody tr")
    wait(rows).to_have_count(1, timeout=60_000)
    answer(body=anew)
    wait(rows).to_have_count(0, timeout=60_000)
    answer(status=503)
    page.unroute("**/live")
    wait(page.locator("#status")).to_have_text("live", timeout=60_000)


@pytest.mark.browser
@needs_browser
def test_refusals_are_seen_on_the_page_and_by_the_doctor(tab: Any) -> None:
    """An overloaded server that refuses looked healthy: short waits, no errors, and a sum that mixed in bad requests."""
    wait = pytest.importorskip("playwright.sync_api").expect
    limits = ("--max-open-requests", "1", "--kv-memory-bytes", "33554432", "--keep-minutes", "0")
    with ServerProcess(*limits) as server:
        client = server.client()
        assert client.post("/v1/completions", json={"prompt": "hello", "temperature": -1}).status_code == 400
        tab.set_viewport_size({"width": 390, "height": 900})
        tab.goto(f"{server.url}/")
        wait(tab.locator("#totals")).to_contain_text("refused (503)0", timeout=60_000)
        body = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            parts = stream.iter_raw()  # closes the stream when it is dropped
            next(parts)
            assert server.client().post("/v1/completions", json={"prompt": "hello"}).status_code == 503
        wait(tab.locator("#totals")).to_contain_text("refused (503)1", timeout=60_000)
        wait(tab.locator("#totals")).to_contain_text("bad requests (4xx)1", timeout=60_000)
        wait(tab.locator("#waiting-note")).to_contain_text("1 refused (503)")
        wait(tab.locator("#requests tbody tr").first).to_contain_text("abort", timeout=60_000)
        assert tab.locator("#requests-hint").is_hidden()  # with nothing kept, each answer to it was a refusal
        tab.goto("about:blank")  # it would ask a server that has ended
        told = CliRunner().invoke(doctor, ["--url", server.url]).output
        assert "refusals: overload" in told
        assert "1 requests were refused (503)" in told


@pytest.mark.browser
@needs_browser
def test_simulated_steps_are_seen_as_a_server_s(server: ServerProcess, tab: Any, tmp_path: Path) -> None:
    """The page that shows what happened shows what would happen: the file of `diptych simulate --steps`."""
    wait = pytest.importorskip("playwright.sync_api").expect
    file = tmp_path / "steps.txt"
    simulate(["llama-3.1-8b", "-d", "l40s", "--rate", "9/s", "--requests", "6", "--output", "9", "--steps", str(file)])
    tab.goto(f"{server.url}/")
    wait(tab.locator("#status")).to_have_text("live", timeout=60_000)
    server.client().post("/v1/completions", json={"prompt": "hello", "max_tokens": 2}).raise_for_status()
    rows = tab.locator("#requests tbody tr")
    wait(rows.first).to_be_visible(timeout=60_000)
    other = tmp_path / "other.txt"
    other.write_text("once upon a time\n\n")
    tab.set_input_files("#open", str(other))
    wait(tab.locator("#timeline-note")).to_contain_text("other.txt holds no steps")
    tab.set_input_files("#open", str(file))
    wait(tab.locator("#model")).to_contain_text("simulated, l40s", timeout=60_000)
    assert "parameters" not in tab.inner_text("#model")  # "- parameters, loaded in -"
    wait(tab.locator("#status")).to_have_text("steps.txt, at its end", timeout=60_000)
    wait(rows).to_have_count(6)  # none of the server's own, whose times are on another clock
    wait(rows.locator("button:enabled")).to_have_count(0)  # nor can the server be asked about these
    wait(tab.locator("#requests-hint")).to_be_hidden()
    line, box = tab.locator("#timeline"), tab.locator("#timeline").bounding_box()
    line.dispatch_event("pointerdown", {"clientX": box["x"] + 250, "clientY": box["y"] + 30})  # a finger
    wait(tab.locator("#timeline-note")).to_contain_text("step of")
    before = tab.inner_text("#timeline-note")
    tab.hover("#timeline", position={"x": 120, "y": 30})
    wait(tab.locator("#timeline-note")).not_to_have_text(before)
    cut = tmp_path / "cut.txt"
    cut.write_text(file.read_text()[:-20].replace('"transferred_tokens":0', '"transferred_tokens":60'))
    for one in (file, cut):  # the second ends the first
        tab.set_input_files("#open", str(one))
    wait(tab.locator("#status")).to_have_text("cut.txt, at its end", timeout=60_000)
    wait(rows.filter(has_text="length")).to_have_count(3)  # the others' ends were cut off, as Ctrl-C leaves curl's file
    wait(tab.locator("#totals")).to_contain_text("prompt tokens2000")  # with those that another worker has read
    tab.screenshot(path=Path(os.environ.get("DIPTYCH_SCREENSHOTS", tmp_path)) / "page-simulated.png", timeout=90_000)
