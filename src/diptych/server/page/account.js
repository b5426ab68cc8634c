// The account that every answer carries, as the pages show it.
import { milliseconds, short } from "./charts.js";

export const text = (ms) => (ms === null || ms === undefined ? "-" : milliseconds(ms / 1e3));

export function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node[name] = value;
  node.append(...children);
  return node;
}

function bar(name, ms, all) {
  const part = make("span", { className: name, title: `${name} ${milliseconds(ms / 1e3)}` });
  part.style.width = `${(100 * ms) / all}%`;
  return part;
}

// the phases as parts of one bar
export function phasesOf(own) {
  const all = Math.max(1e-6, own.queue_ms + own.prefill_ms + own.transfer_ms + own.decode_ms);
  const parts = [["queue", own.queue_ms], ["prefill", own.prefill_ms], ["transfer", own.transfer_ms], ["decode", own.decode_ms - own.stall_ms], ["stall", own.stall_ms]];
  return make("div", { className: "phases" }, ...parts.filter(([, ms]) => ms > 0).map(([name, ms]) => bar(name, ms, all)));
}

// the account of an answer: where its time went, by phase and by part of the prompt
export function accountOf(timings) {
  const own = timings.diptych;
  const named = (name, word, ms) => make("span", {}, make("i", { className: name }), `${word} ${text(ms)}`);
  const line = [
    `first token after ${text(own.ttft_ms)} = `, named("queue", "queue", own.queue_ms), " + ", named("prefill", "prefill", own.prefill_ms),
    ...(own.transfer_ms > 0 ? [" + ", named("transfer", "transfer", own.transfer_ms)] : []), " · ", named("decode", "decode", own.decode_ms),
    ...(own.stall_ms > 0 ? [", of it ", named("stall", "stalled", own.stall_ms)] : []),
  ];
  const head = ["", "tokens", "measured", "rate", "predicted of its steps", "ceiling allows"];
  const rows = [
    ["prefill", `${timings.prompt_n} (+${timings.cache_n} cached)`, text(own.prefill_ms), `${short(timings.prompt_per_second)} tok/s`, text(own.predicted.prefill_ms), text(own.roofline.prefill_ms)],
    ["decode", `${timings.predicted_n}`, text(own.decode_ms), `${short(timings.predicted_per_second)} tok/s`, text(own.predicted.decode_ms), text(own.roofline.decode_ms)],
  ];
  if (own.thinking_n > 0) rows.push(["of it thinking", `${own.thinking_n}`, text(own.thinking_ms), "", "", ""]);
  const longest = Math.max(1e-9, ...own.segments.map((one) => one.prefill_ms));
  const segments = own.segments.map((one) => {
    const mini = make("i", { className: one.cached_tokens === one.tokens ? "mini hit" : "mini" });
    mini.style.width = `${Math.max(2, (80 * one.prefill_ms) / longest)}px`;
    return [one.name, `${one.tokens}`, `${one.cached_tokens}`, text(one.prefill_ms), mini];
  });
  const table = (titles, lines) => make("div", { className: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...titles.map((title) => make("th", {}, title)))), make("tbody", {}, ...lines.map((cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell)))))));
  return [
    make("h3", {}, "where the time went"), phasesOf(own), make("p", { className: "legend parts" }, ...line), table(head, rows),
    ...(own.predicted.reason === null ? [] : [make("p", { className: "note" }, `no prediction: ${own.predicted.reason}`)]),
    make("h3", {}, "time to first token by part of the prompt"), table(["part", "tokens", "cached", "prefill", ""], segments),
  ];
}
