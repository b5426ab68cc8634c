// What a finished request's times would have been: the server runs its last minutes again with one thing changed.
import { text as time } from "./account.js";
import { words } from "./stream.js";

const el = (id) => document.getElementById(id);
let asked = null; // the request on show

export function setUpWhatIf() {
  el("requests").addEventListener("click", (click) => {
    const id = click.target.dataset.request;
    if (id) ask(id, []);
  });
  el("what-if-form").addEventListener("submit", (submit) => {
    submit.preventDefault();
    if (el("what-if-ask").ariaDisabled === "true") return;
    const change = el("what-if-change").value.trim();
    ask(asked, change ? [change] : []);
  });
  el("what-if-close").addEventListener("click", close);
  el("what-if").addEventListener("keydown", (press) => { if (press.key === "Escape") close(); });
}

// back to the line that it was asked from, for whoever came with the keyboard
function close() {
  el("what-if").hidden = true;
  [...el("requests").querySelectorAll("button")].find((one) => one.dataset.request === asked)?.focus();
  asked = null;
}

async function ask(id, changes) {
  asked = id;
  el("what-if").hidden = false;
  el("what-if-id").textContent = id.replace(/^(chat)?cmpl-/, "");
  el("what-if-note").className = "quiet note";
  el("what-if-note").textContent = "running its minutes again";
  el("what-if-rows").replaceChildren();
  el("what-if-ask").setAttribute("aria-disabled", true); // a focused button that is disabled has the focus no more
  const query = changes.map((one) => `change=${encodeURIComponent(one)}`).join("&");
  try {
    const answer = await fetch(`v1/requests/${encodeURIComponent(id)}/what-if?${query}`);
    const found = await answer.json();
    if (asked !== id) return;
    if (answer.ok) show(found);
    else refuse(found.error.message);
  } catch (error) {
    if (asked === id) refuse(words(error));
  } finally {
    if (asked === id) el("what-if-ask").setAttribute("aria-disabled", false);
  }
}

function refuse(text) {
  el("what-if-note").className = "error note";
  el("what-if-note").textContent = text;
}

function show(found) {
  const rows = [{ words: "measured", ...found.measured }, ...found.outcomes];
  const longest = Math.max(...rows.map((row) => row.ttft_ms ?? 0), 1e-9);
  const slowest = Math.max(...rows.map((row) => row.tpot_ms ?? 0), 1e-9);
  el("what-if-rows").replaceChildren(...rows.map((row) => line(row, longest, slowest)));
  const notes = found.outcomes.filter((row) => row.note).map((row) => `${row.words}: ${row.note}.`);
  const off = ["ttft_ms", "tpot_ms"].map((key) => apart(key, found.outcomes[0], found.measured)).filter(Boolean);
  const trust = `Run again as it was, ${off.join(" and ")} what was measured: trust the others as far.`;
  el("what-if-note").textContent = [...(off.length ? [trust] : []), ...notes].join(" ");
}

function apart(key, again, measured) {
  if (!measured[key] || again[key] === null || again[key] === undefined) return "";
  const off = again[key] / measured[key] - 1;
  return `${key.slice(0, 4).toUpperCase()} comes out ${Math.round(Math.abs(off) * 100)} % ${off < 0 ? "below" : "above"}`;
}

function line(row, longest, slowest) {
  const tr = document.createElement("tr");
  const cells = row.error
    ? [row.words, row.error]
    : [row.words, time(row.queue_ms), time(row.prefill_ms), time(row.ttft_ms), time(row.tpot_ms), row.cached_tokens];
  cells.forEach((text) => tr.insertCell().textContent = text);
  if (row.error) {
    tr.cells[1].colSpan = 5;
    tr.cells[1].className = "error";
    return tr;
  }
  bars(tr.cells[3], [["queue", row.queue_ms / longest], ["prefill", row.prefill_ms / longest]]);
  bars(tr.cells[4], [["decode", (row.tpot_ms ?? 0) / slowest]]);
  return tr;
}

// drawn in the cell behind its number
function bars(cell, parts) {
  const box = document.createElement("span");
  box.className = "phases";
  box.setAttribute("aria-hidden", "true");
  for (const [kind, share] of parts) {
    const part = document.createElement("span");
    part.className = kind;
    part.style.width = `${100 * Math.max(0, share)}%`;
    box.append(part);
  }
  cell.append(box);
}
