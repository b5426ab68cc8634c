// The live page: one event stream in, everything on the page redrawn from it four times a second.
import { drawDistribution, drawRates, drawTimeline, label, milliseconds, perSecond, quantile, short } from "./charts.js";
import { setUpTheme } from "./theme.js";
import { setUpTry } from "./try.js";
import { setUpWhatIf } from "./whatif.js";
import { drawWorkers } from "./workers.js";

const KEEP_S = 32;
const RATE_S = 60;
const LEAST_RATE_S = 10;
const MEAN_FRAMES = 8; // that the numbers of right now are the mean of: one alone is 0 or too much where a step is longer
const PAUSE_S = 2; // without a step: what comes after is a new piece of work
const MAX_LANES = 16;
const MAX_OPEN_ROWS = 28;
const RETRY_S = 5;
const LEAVE_S = 3; // that a page is out of sight before it leaves the feed
const el = (id) => document.getElementById(id);
const state = { hello: null, frame: null, steps: [], seen: new Map(), nSeen: 0, finished: [], rates: [], span: null, pointer: null, chosen: null, refused: [], lastAt: null };

setUpTheme(() => { if (state.frame) redraw(); });

let source = null;
let played = 0; // files so far: one that is opened takes the place of the one before

function receive(data) {
  if (data.kind === "hello") greet(data);
  else take(data);
}

// the events of a kept feed, none of another file; the last piece is nothing, or was cut when the keeping ended
function eventsOf(text) {
  try {
    const events = text.split("\n\n").slice(0, -1).filter((one) => one.startsWith("data: ")).map((one) => JSON.parse(one.slice(6)));
    return events[0]?.kind === "hello" ? events : [];
  } catch {
    return [];
  }
}

// a feed that was kept in a file (`diptych simulate --steps`, or curl of /live), at its own pace and on its own clock
async function replay(file) {
  const events = eventsOf(await file.text());
  if (events.length === 0) {
    el("timeline-note").textContent = `${file.name} holds no steps; they are what diptych simulate --steps writes`;
    return;
  }
  source.close();
  played += 1;
  const turn = played;
  Object.assign(state, { hello: null, frame: null }); // nothing of the server's
  let before = events[0].now_s;
  for (const data of events) {
    await new Promise((done) => setTimeout(done, Math.min(2, data.now_s - before) * 1e3));
    if (turn !== played) return;
    receive(data);
    setStatus(file.name, "live");
    before = data.now_s;
  }
  setStatus(`${file.name}, at its end`, "lost");
}

function connect() {
  if (played > 0 || document.hidden || (source !== null && source.readyState !== EventSource.CLOSED)) return;
  source = new EventSource("live");
  source.onmessage = (message) => receive(JSON.parse(message.data));
  source.onerror = () => {
    const isRefused = source.readyState === EventSource.CLOSED; // the browser has given up: too many pages, a proxy without its server
    setStatus(`connection ${isRefused ? "refused" : "lost"}, trying again`, "lost");
    document.body.classList.add("stale");
    if (isRefused) setTimeout(connect, RETRY_S * 1e3);
  };
}

// a browser has six connections to a server for all its pages: with one held by each, the seventh never came, and no prompt was sent
let leaving = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(leaving);
  if (played > 0) return;
  if (document.hidden) leaving = setTimeout(() => source?.close(), LEAVE_S * 1e3);
  else connect();
});

function setStatus(text, kind) {
  tell("status", text);
  el("status").className = `status ${kind}`;
}

// what is read aloud when it changes, is written only then
function tell(id, text) {
  if (el(id).textContent !== text) el(id).textContent = text;
}

function greet(hello) {
  // another process knows nothing of what one before did, and has a clock of its own
  if (state.hello === null || hello.load_s !== state.hello.load_s || hello.now_s < state.lastAt) {
    state.seen.clear();
    Object.assign(state, { finished: [], steps: [], chosen: null, rates: [] });
  }
  document.body.classList.remove("stale");
  state.hello = hello;
  state.refused = [];
  state.lastAt = null;
  const size = hello.parameters === null ? "" : ` · ${short(hello.parameters)} parameters`; // neither is told of a simulation
  const load = hello.load_s === null ? "" : ` · loaded in ${milliseconds(hello.load_s)}`;
  el("model").textContent = `${hello.model}${size} · ${hello.backend} backend · ${hello.weights} weights, ${hello.kv} KV · context ${hello.context_tokens}${load}`;
  if (played === 0) setStatus("live", "live");
}

function take(frame) {
  // the first may hold what other pages have waited for
  const elapsed = state.lastAt === null ? Math.max(0.25, frame.now_s - state.hello.now_s) : Math.max(0.05, frame.now_s - state.lastAt);
  const isFirst = state.lastAt === null;
  state.lastAt = frame.now_s;
  const told = isFirst ? state.hello : state.frame;
  const before = [told.ttft_s?.counts, told.itl_s?.counts]; // a simulation begins with none
  state.frame = frame;
  if (played === 0) setStatus(frame.is_draining ? "draining" : "live", frame.is_draining ? "lost" : "live");
  state.steps.push(...frame.steps);
  const oldest = frame.now_s - KEEP_S;
  while (state.steps.length > 0 && state.steps[0].t < oldest) state.steps.shift();
  for (const step of frame.steps) {
    for (const [id] of step.chunks) see(id, step.t);
    for (const id of step.seqs) see(id, step.t);
  }
  for (const request of frame.requests) if (!state.seen.has(request.id)) see(request.id, request.arrival_s);
  const open = new Set(frame.requests.map((one) => one.id));
  for (const [id, { at }] of state.seen) if (at < oldest && !open.has(id)) state.seen.delete(id);
  state.refused.push(frame.totals.refused);
  state.refused.splice(0, Math.max(0, state.refused.length - 40));
  state.finished.push(...frame.finished);
  state.finished.splice(0, Math.max(0, state.finished.length - 12));
  state.rates.push({ at: frame.now_s, elapsed, prefill: frame.prefill_tokens, decode: frame.decode_tokens, busy: frame.busy_s, isFirst, before });
  while (state.rates[0].at < frame.now_s - RATE_S) state.rates.shift();
  redraw();
}

// a request was in a step, or stands in line; numbers go by who was seen first
function see(id, at) {
  state.seen.set(id, { at, number: state.seen.get(id)?.number ?? (state.nSeen += 1) });
}

// per second, of the last frames together: of those up to the last step's end while another is on its way, as what it does is told when it ends
function rateNow(name) {
  const last = state.steps[state.steps.length - 1];
  const isInStep = last !== undefined && state.frame.running > 0 && state.frame.now_s - last.t - last.s < Math.max(1, 2 * last.s);
  let end = state.rates.length;
  while (isInStep && end > 1 && state.rates[end - 1].busy === 0) end -= 1;
  const from = Math.max(0, end - MEAN_FRAMES);
  const rates = perSecond(state.rates.slice(0, end), name).slice(from);
  const elapsed = state.rates.slice(from, end).map((one) => one.elapsed);
  return rates.reduce((all, rate, place) => all + rate * elapsed[place], 0) / elapsed.reduce((all, one) => all + one, 0);
}

// what the last minute has added to a distribution that counts from the start on
function lately(distribution, place) {
  const before = state.rates[0].before[place];
  return before === undefined ? distribution : { edges: distribution.edges, counts: distribution.counts.map((count, at) => count - before[at]) };
}

const measured = (distribution) => distribution.counts.reduce((sum, count) => sum + count, 0);

function redraw() {
  if (document.hidden || state.frame === null || state.hello === null) return;
  const { frame, hello } = state;
  drawTiles(frame, hello);
  drawSteps();
  drawBlocks(frame);
  drawWorkers(frame);
  const times = state.rates.map((one) => one.at);
  const series = ["prefill", "decode"].map((name) => ({ colour: name, values: perSecond(state.rates, name) }));
  drawRates(el("rates"), series, times, state.rates.map((one) => one.isFirst), Math.max(LEAST_RATE_S, frame.now_s - times[0]));
  drawDistribution(el("ttft-chart"), frame.ttft_s, "prefill");
  drawDistribution(el("itl-chart"), frame.itl_s, "decode");
  [["ttft", frame.ttft_s], ["itl", frame.itl_s]].forEach(([name, distribution], place) => {
    // estimates, within the bars of the chart
    const about = (found) => (found === null ? "" : "≈ ") + milliseconds(found);
    const shares = (of) => [0.5, 0.95, 0.99].map((share) => about(quantile(of, share)));
    const [p50, p95, p99] = shares(distribution);
    const n = measured(distribution);
    el(`${name}-text`).textContent = n === 0 ? "" : `p50 ${p50} · p95 ${p95} · p99 ${p99} · ${short(n)} measured`;
    const recent = lately(distribution, place);
    const [now, high] = shares(recent);
    el(name).textContent = now;
    el(`${name}-note`).textContent = measured(recent) === 0 ? "none in the last minute" : `p50 of the last minute · p95 ${high}`;
  });
  drawRequests(frame);
}

function drawTiles(frame, hello) {
  el("running").textContent = frame.running;
  el("running-note").textContent = `of at most ${hello.max_running}`;
  el("waiting").textContent = frame.waiting;
  const refused = frame.totals.refused - state.refused[0]; // of the last ten seconds
  const line = frame.waiting_tokens > 0 ? `${short(frame.waiting_tokens)} tokens in line` : "in line";
  el("waiting-note").textContent = refused > 0 ? `${line} · ${refused} refused (503)` : line;
  el("waiting-note").className = refused > 0 ? "error" : "";
  el("prefill-rate").textContent = short(rateNow("prefill"));
  el("decode-rate").textContent = short(rateNow("decode"));
  const limits = hello.ceilings;
  el("prefill-note").textContent = limits ? `tokens/s, ceiling ${short(limits.prefill_tokens_per_s)}` : "tokens/s";
  el("decode-note").textContent = limits ? `tokens/s, ${short(limits.decode_steps_per_s)} per stream at most` : "tokens/s";
  const busy = Math.min(1, rateNow("busy"));
  el("rate-text").textContent = `engine busy ${Math.round(busy * 100)} %`;
}

// what the timeline shows: the chosen seconds up to now, or the last piece of work from its first step to its last
function shownTime() {
  const now = state.frame.now_s;
  if (state.span !== null) return { from: now - state.span, span: state.span, origin: now };
  let first = state.steps.length - 1;
  if (first < 0) return { from: now - 10, span: 10, origin: now };
  const last = state.steps[first];
  while (first > 0 && state.steps[first].t - state.steps[first - 1].t - state.steps[first - 1].s < PAUSE_S) first -= 1;
  const from = state.steps[first].t;
  const span = Math.max(0.01, last.t + last.s - from);
  return { from, span: span * 1.02, origin: from };
}

function drawSteps() {
  const open = new Set(state.frame.requests.map((one) => one.id));
  const shown = shownTime();
  const seen = [...state.seen.entries()].filter(([id, { at }]) => open.has(id) || at >= shown.from);
  seen.sort((a, b) => (open.has(b[0]) - open.has(a[0])) || b[1].at - a[1].at); // where room is little, those at work have it
  const lanes = seen.slice(0, MAX_LANES).sort((a, b) => b[1].number - a[1].number).map(([id]) => id);
  const pointed = drawTimeline(el("timeline"), { steps: state.steps, lanes, ...shown, pointer: state.pointer, chosen: state.chosen });
  if (pointed !== null) {
    const chunks = pointed.chunks.map(([id, tokens, cached]) => `${label(id)} ${tokens}${cached ? ` (+${cached} cached)` : ""}`);
    const [drafted, kept] = pointed.g ?? [0, 0]; // an older file does not tell
    const n = pointed.n ?? 1; // steps that are drawn as one
    const parts = [n > 1 ? `${n} steps of ${milliseconds(pointed.s / n)}` : `step of ${milliseconds(pointed.s)}`, `${pointed.p} prefill tokens${chunks.length ? `: ${chunks.join(", ")}` : ""}`, `${pointed.d} decode${drafted ? ` (${kept} of ${drafted} drafts kept)` : ""}`];
    if (pointed.p > 0 && pointed.d > 0) parts.push(`${pointed.seqs.length} streams waited for ${pointed.chunks.map(([id]) => label(id)).join(", ")}`);
    tell("timeline-note", parts.join(" · "));
  }
}

// by arrow keys, from the newest step on
function choose(press) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[press.key];
  if (by === undefined || state.frame === null) return;
  press.preventDefault();
  const { from } = shownTime();
  const steps = state.steps.filter((step) => step.t + step.s >= from);
  const place = steps.indexOf(state.chosen);
  state.chosen = steps[place < 0 ? steps.length - 1 : Math.min(steps.length - 1, Math.max(0, place + by))] ?? null;
  state.pointer = null;
  drawSteps();
}

function drawBlocks(frame) {
  const [used, cached, free] = frame.blocks;
  const all = Math.max(1, used + cached + free);
  const spans = el("blocks").children;
  [used, cached, free].forEach((count, place) => { spans[place].style.width = `${(100 * count) / all}%`; });
  el("blocks-text").textContent = `${used} in use · ${cached} cached · ${free} free of ${all}, ${state.hello.block_tokens} tokens each`;
  const totals = frame.totals;
  const prompt = totals.computed_tokens + totals.cached_tokens + (totals.transferred_tokens ?? 0); // these another worker read
  const rows = [
    ["prompt tokens", short(prompt)], ["from the cache", prompt ? `${Math.round((100 * totals.cached_tokens) / prompt)} %` : "-"],
    ["output tokens", short(totals.output_tokens)], ["preemptions", totals.preemptions],
    ["finished", totals.finished.stop + totals.finished.length], ["aborted", totals.finished.abort], ["errors", totals.finished.error],
    ["refused (503)", totals.refused], ["bad requests (4xx)", totals.rejected],
  ];
  el("totals").replaceChildren(...rows.map(([name, value]) => {
    const box = document.createElement("div");
    const term = document.createElement("dt");
    const detail = document.createElement("dd");
    term.textContent = name;
    detail.textContent = value;
    box.append(term, detail);
    return box;
  }));
}

function drawRequests(frame) {
  const open = frame.requests.slice(0, MAX_OPEN_ROWS);
  const nOpen = frame.n_requests ?? frame.requests.length; // an older file does not tell
  el("requests-text").textContent = `${nOpen} open${nOpen > open.length ? `, the oldest ${open.length} of them shown` : ""}`;
  const rows = open.map((one) => {
    const isReading = one.output_tokens === 0;
    const stateWord = isReading ? (one.computed_to > 0 ? "prefill" : "waiting") : "decode";
    const note = one.preemptions > 0 ? `${stateWord}, preempted ${one.preemptions}x` : stateWord;
    return [`${one.id} ${one.arrival_s}`, one.id, note, one.prompt_tokens, one.computed_to, one.output_tokens, milliseconds(Math.max(0, frame.now_s - one.arrival_s))];
  });
  for (const one of [...state.finished].reverse()) rows.push([`${one.id} ${one.at_s} over`, one.id, one.reason, one.prompt_tokens ?? "", one.computed_to ?? "", one.output_tokens ?? "", `${milliseconds(Math.max(0, frame.now_s - one.at_s))} ago`]);
  el("requests-empty").hidden = rows.length > 0;
  const canAsk = state.hello.keeps_minutes && played === 0; // of a file's requests the server knows nothing
  el("requests-hint").hidden = state.finished.length === 0 || !canAsk;
  const body = el("requests").tBodies[0];
  const keys = new Set(rows.map(([key]) => key));
  const lines = new Map([...body.rows].map((line) => [line.dataset.key, line]));
  for (const [key, line] of lines) if (!keys.has(key)) line.remove();
  rows.forEach(([key, ...cells], place) => {
    const line = lines.get(key) ?? document.createElement("tr");
    line.dataset.key = key;
    if (body.rows[place] !== line) body.insertBefore(line, body.rows[place] ?? null);
    fillRow(line, cells, canAsk && place >= open.length);
  });
}

// in place, four times a second: the line that a person points at or has tabbed to stays that request's, though others come above it
function fillRow(line, [id, ...cells], canAsk) {
  if (line.cells.length === 0) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "link";
    line.insertCell().append(button);
    cells.forEach(() => line.insertCell());
  }
  const button = line.cells[0].firstChild;
  button.textContent = id.replace(/^(chat)?cmpl-/, "");
  button.disabled = !canAsk;
  if (canAsk) button.dataset.request = id;
  else delete button.dataset.request;
  cells.forEach((text, place) => { line.cells[place + 1].textContent = text; });
}

el("window").addEventListener("change", (change) => { state.span = Number(change.target.value) || null; redraw(); });
// a finger that taps does not move
for (const kind of ["pointerdown", "pointermove"]) el("timeline").addEventListener(kind, (point) => { state.pointer = point.offsetX; state.chosen = null; if (state.frame) drawSteps(); });
el("timeline").addEventListener("pointerleave", () => { state.pointer = null; });
el("timeline").addEventListener("keydown", choose);
el("timeline").addEventListener("blur", () => { state.chosen = null; });
window.addEventListener("resize", redraw);
el("open").addEventListener("change", (change) => { if (change.target.files.length) replay(change.target.files[0]); });
setUpTry();
setUpWhatIf();
connect();
