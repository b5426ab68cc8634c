"""What tests of the pages share: the browser's path, a feed in the words of `/live`, an answer as it is streamed."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")

HELLO = {
    "kind": "hello", "model": "m", "parameters": None, "backend": "b", "weights": "w", "kv": "k", "context_tokens": 9,
    "load_s": None, "now_s": 0.0, "max_running": 4, "block_tokens": 32, "ceilings": None,
}  # fmt: skip
NOTHING = {"edges": [1.0], "counts": [0, 0]}
ENDS = {"stop": 0, "length": 0, "abort": 0, "error": 0}

# text that can be read, and what is behind it: [ratio of contrast, tag, text]
CONTRASTS = """() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => parts(colour).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0.05);
  const ratio = (a, b) => Math.max(light(a), light(b)) / Math.min(light(a), light(b));
  const behind = (one) => {
    while (one && (parts(getComputedStyle(one).backgroundColor)[3] ?? 1) === 0) one = one.parentElement;
    return getComputedStyle(one ?? document.documentElement).backgroundColor;
  };
  const found = [];
  for (const one of document.querySelectorAll("body *")) {
    const style = getComputedStyle(one);
    if (!one.checkVisibility() || style.opacity < 1) continue;
    const name = `${one.tagName} ${one.id}`;
    if ([...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()))
      found.push([ratio(style.color, behind(one)), 4.5, `text of ${name}`]);
    if (one.placeholder)
      found.push([ratio(getComputedStyle(one, "::placeholder").color, behind(one)), 4.5, `placeholder of ${name}`]);
    if (["INPUT", "TEXTAREA", "SELECT"].includes(one.tagName))
      found.push([ratio(style.borderTopColor, behind(one.parentElement)), 3, `edge of ${name}`]);
  }
  return found.filter(([ratio, least]) => ratio < least);
}"""

# what a page waits for, a twentieth as long
HASTE = """() => { const later = window.setTimeout;
  window.setTimeout = (act, after = 0, ...given) => later(act, after / 20, ...given); }"""
# what was written on canvases, and how far down
DRAWN = """window.drawn = {}; const fill = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  (window.drawn[this.canvas.id] ??= {})[text] = y; fill.call(this, text, x, y); };"""


def frame(now_s: float, requests: int, *steps: dict[str, Any], busy_s: float) -> dict[str, object]:
    """What happened up to now_s, in the words of the feed; the open requests are r0, r1, ..."""
    counts = {"prompt_tokens": 4, "computed_to": 4, "output_tokens": 1, "preemptions": 0}
    names = ("computed_tokens", "cached_tokens", "output_tokens", "preemptions", "refused", "rejected")
    return {
        "kind": "frame", "now_s": now_s, "is_draining": False, "running": requests, "waiting": 0, "waiting_tokens": 0,
        "blocks": [0, 0, 9], "steps": steps, "busy_s": busy_s, "finished": [],
        "prefill_tokens": sum(one["p"] for one in steps), "decode_tokens": sum(one["d"] for one in steps),
        "requests": [{"id": f"r{i}", "arrival_s": i / 10} | counts for i in range(requests)],
        "ttft_s": NOTHING, "itl_s": NOTHING, "totals": dict.fromkeys(names, 0) | {"finished": ENDS},
    }  # fmt: skip


def step(at_s: float, *ids: str, prompt: str | None = None) -> dict[str, Any]:
    """One that decodes these, and reads another's prompt."""
    chunks = [] if prompt is None else [[prompt, 4, 0]]
    return {"t": at_s, "s": 0.1, "p": 4 * len(chunks), "d": len(ids), "g": [3, 1], "chunks": chunks, "seqs": ids}


def told(*parts: dict[str, Any], end: str | None = "stop") -> str:
    """An answer streamed in these deltas, as the server sends it."""
    deltas = [*({"delta": one, "finish_reason": None} for one in parts), {"delta": {}, "finish_reason": end}]
    return "".join(f"data: {json.dumps({'choices': [{'index': 0} | one]})}\n\n" for one in deltas) + "data: [DONE]\n\n"
