"""The live page for whoever reads it: with a keyboard, in any script, in many tabs, under load. In a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from live_page import CONTRASTS, DRAWN, HASTE, HELLO, frame, needs_browser, told
from server_process import ServerProcess

pytestmark = [pytest.mark.browser, needs_browser]


@pytest.fixture
def wait() -> Any:
    return pytest.importorskip("playwright.sync_api").expect


@pytest.fixture
def page(server: ServerProcess, context: Any, wait: Any) -> Any:
    """The server's page on a phone, live."""
    opened = context.new_page()
    opened.set_viewport_size({"width": 390, "height": 844})
    opened.add_init_script(DRAWN)
    opened.goto(f"{server.url}/")
    wait(opened.locator("#status")).to_have_text("live", timeout=60_000)
    return opened


def play(page: Any, wait: Any, file: Path, *events: dict[str, Any]) -> None:
    """Show a kept feed to its end, faster than it was."""
    file.write_text("".join(f"data: {json.dumps(one)}\n\n" for one in events))
    page.evaluate(HASTE)
    page.set_input_files("#open", str(file))
    wait(page.locator("#status")).to_have_text(f"{file.name}, at its end", timeout=60_000)


def test_pages_out_of_sight_leave_the_server_to_others(server: ServerProcess, context: Any, wait: Any) -> None:
    """A browser has six connections to a server. Each open page held one: the seventh never came, and no prompt was sent."""
    turn = "isAway => { window.isAway = isAway; document.dispatchEvent(new Event('visibilitychange')); }"
    pages = [context.new_page() for _ in range(7)]
    for page in pages:
        page.add_init_script("Object.defineProperty(document, 'hidden', {get: () => window.isAway ?? false})")
        page.add_init_script(f"({HASTE})()")
    for page in pages[:6]:
        page.goto(f"{server.url}/")
        wait(page.locator("#status")).to_have_text("live", timeout=60_000)
    first, last = pages[0], pages[-1]
    wait(first.locator("#totals")).to_contain_text("finished", timeout=60_000)
    before = first.text_content("#totals")
    for page in pages[:6]:
        page.evaluate(turn, True)
    last.goto(f"{server.url}/")
    wait(last.locator("#status")).to_have_text("live", timeout=60_000)
    last.click("#try-send")
    wait(last.locator("#try-report table").first).to_be_visible(timeout=60_000)
    first.evaluate(turn, False)
    wait(first.locator("#totals")).not_to_have_text(before, timeout=60_000)


def test_the_keyboard_does_what_the_mouse_does(page: Any, wait: Any) -> None:
    """A button that one pressed was switched off under one's feet: the focus went to the top of the page."""
    asked: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: asked.append(route))  # never answered
    send, stop, note = (page.locator(f"#try-{name}") for name in ("send", "stop", "note"))
    send.focus()
    for press in ("Enter", "Enter"):  # the second is nothing: one is on its way
        page.keyboard.press(press)
    wait(note).to_have_text("waiting for the first token")
    wait(send).to_be_focused()
    wait(send).to_be_disabled()
    page.keyboard.press("Tab")
    wait(stop).to_be_focused()
    page.keyboard.press("Enter")
    wait(note).to_have_text("stopped")
    wait(stop).to_be_focused()
    page.focus("#try-prompt")
    page.keyboard.press("Enter")
    assert len(asked) == 1, "a new line in the message sent it"
    page.keyboard.press("Control+Enter")
    wait(note).to_have_text("waiting for the first token")
    page.keyboard.press("Escape")
    wait(note).to_have_text("stopped")
    assert len(asked) == 2


def test_answers_of_every_kind_fit_the_page(page: Any, wait: Any) -> None:
    """A long word of the thinking made a phone's page wider than the phone; Arabic began at the left; tables stood askew."""
    markup = "<img src=x onerror=window.isTaken=1><script>window.isTaken=1</script>"
    answers = [
        told({"reasoning_content": "y" * 900 + markup}, {"content": markup + "x" * 900}),
        told({"reasoning_content": "مرحبا"}, {"content": "שלום עולם, and more"}),
        told({"content": "as a table\n"}, {"content": "| a | b |\n|---|"}, {"content": "---|\n"}),
        told({"content": "plain | again"}),
    ]
    left = iter(answers)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, body=next(left)))
    of_answer = "name => getComputedStyle(document.getElementById('try-answer'))[name]"
    seen = []
    for text in ("x" * 9, "עולם", "---|", "again"):
        page.click("#try-send")
        wait(page.locator("#try-answer")).to_contain_text(text)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), text
        seen.append([page.evaluate(of_answer, "direction"), "monospace" in page.evaluate(of_answer, "fontFamily")])
        if text == "עולם":
            assert page.evaluate("getComputedStyle(document.getElementById('try-reasoning')).direction") == "rtl"
    assert seen == [["ltr", False], ["rtl", False], ["ltr", True], ["ltr", False]]
    assert page.evaluate("[window.isTaken ?? 0, document.querySelectorAll('main img, main script').length]") == [0, 0]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_that_is_written_can_be_read(page: Any, wait: Any, theme: str) -> None:
    """What a box is for was grey on grey, and where one begins could not be seen. The chosen theme was lost with a reload."""
    if page.evaluate("document.documentElement.dataset.theme") != theme:
        page.click("#theme")
    page.reload()
    wait(page.locator("#status")).to_have_text("live", timeout=60_000)
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    page.click("#try-send")
    wait(page.locator("#try-report table").first).to_be_visible(timeout=60_000)
    assert page.evaluate(CONTRASTS) == []


def test_a_step_longer_than_a_frame_is_work_of_the_frames_before(page: Any, wait: Any, tmp_path: Path) -> None:
    """Its tokens were those of the frame it ended in: above what the machine can do, then nothing, and the engine half idle."""
    long = {"t": 0.0, "s": 1.0, "p": 2000, "d": 0, "g": [0, 0], "chunks": [["r0", 2000, 0]], "seqs": []}
    feed = [frame(at, 1, busy_s=0.0) for at in (0.25, 0.5, 0.75)] + [frame(1.0, 1, long, busy_s=1.0)]
    feed += [frame(at, 1, busy_s=0.0) for at in (1.25, 1.5, 1.75)]  # in the next step
    for one in feed:
        one["prefill_tokens"] = sum(step["p"] for step in one["steps"])  # type: ignore[attr-defined]
    play(page, wait, tmp_path / "long.txt", HELLO, *feed)
    wait(page.locator("#prefill-rate")).to_have_text("2000")
    wait(page.locator("#rate-text")).to_have_text("engine busy 100 %")
    assert "2000 tokens/s" in page.evaluate("window.drawn['rates']")


def test_times_of_right_now_are_of_the_last_minute(page: Any, wait: Any, tmp_path: Path) -> None:
    """They were of all since the start: after hours nothing that happened moved them.

    Of many open requests there were only lines, and none of those that had ended.
    """
    edges = [1.0, 2.0]
    counts = [{"ttft_s": {"edges": edges, "counts": [9, n, 0]}} for n in (0, 1)]
    ended = {"id": "r99", "at_s": 0.2, "reason": "stop", "prompt_tokens": 1, "computed_to": 1, "output_tokens": 1}
    new = frame(0.25, 40, busy_s=0.0) | {"n_requests": 70, "finished": [ended]} | counts[1]
    play(page, wait, tmp_path / "now.txt", HELLO | counts[0] | {"itl_s": {"edges": [1.0], "counts": [0, 0]}}, new)
    wait(page.locator("#ttft")).to_have_text("≈ 1.50 s")
    wait(page.locator("#ttft-text")).to_contain_text("10 measured")
    wait(page.locator("#requests-text")).to_have_text("70 open, the oldest 28 of them shown")
    wait(page.locator("#requests tbody tr")).to_have_count(29)
    wait(page.locator("#requests tbody tr").last).to_contain_text("r99")
    later = [frame(at, 0, busy_s=0.0) | counts[1] for at in (31.0, 61.5)]
    play(page, wait, tmp_path / "later.txt", HELLO | counts[0], new, *later)
    wait(page.locator("#ttft-note")).to_have_text("none in the last minute")
    wait(page.locator("#requests-text")).to_have_text("0 open")
    assert "no step has ended in this time" in page.evaluate("window.drawn['timeline']")


def test_numbers_of_a_lost_server_look_old(page: Any, wait: Any) -> None:
    """They stood there as if they were of now."""
    events = (HELLO, frame(1.0, 3, busy_s=0.0))
    first = "retry: 100\n\n" + "".join(f"data: {json.dumps(one)}\n\n" for one in events)
    answers = iter([first])

    def answer(route: Any) -> None:
        body = next(answers, None)
        route.abort() if body is None else route.fulfill(status=200, body=body, content_type="text/event-stream")

    page.route("**/live", answer)
    page.reload()
    wait(page.locator("#running")).to_have_text("3", timeout=60_000)
    wait(page.locator("#status")).to_contain_text("trying again", timeout=60_000)
    wait(page.locator(".tile").first).to_have_css("opacity", "0.6")
    page.unroute("**/live")
    wait(page.locator("#status")).to_have_text("live", timeout=60_000)
    wait(page.locator(".tile").first).to_have_css("opacity", "1")
