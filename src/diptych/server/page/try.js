// The box to try a prompt: streams the answer and shows its account, phase by phase and segment by segment.
import { milliseconds, short } from "./charts.js";

const el = (id) => document.getElementById(id);

function body(isChat) {
  const shared = {
    max_tokens: Number(el("try-max").value) || 128,
    temperature: Number(el("try-temperature").value) || 0,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (!isChat) return { ...shared, prompt: el("try-prompt").value };
  const messages = [{ role: "user", content: el("try-prompt").value }];
  if (el("try-system").value.trim()) messages.unshift({ role: "system", content: el("try-system").value });
  return { ...shared, messages };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const blocks = buffer.split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function say(text, isError = false) {
  el("try-note").className = isError ? "note error" : "quiet note";
  el("try-note").textContent = text;
}

// columns of code and of tables stand under each other only in a type of one width
function write(answer, text) {
  answer.append(text);
  if (/[`|]/.test(text) && /^(```|\|[ :|-]+\|)/m.test(answer.textContent)) answer.classList.add("fixed");
}

// the reason why the answer ended, where this chunk tells one
function show(chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  let reason = null;
  for (const choice of chunk.choices) {
    const delta = choice.delta ?? { content: choice.text };
    reason = choice.finish_reason ?? reason;
    if (delta.content || delta.reasoning_content) say("");
    if (delta.reasoning_content) {
      el("try-reasoning").hidden = false;
      el("try-reasoning").append(delta.reasoning_content);
    }
    // appended: a text written anew with every token is read aloud from its beginning, and loses what was selected in it
    if (delta.content) write(el("try-answer"), delta.content);
  }
  if (chunk.timings) report(chunk.usage, chunk.timings);
  return reason;
}

async function send(controller) {
  const isChat = el("try-chat").checked;
  const response = await fetch(isChat ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body(isChat)),
    signal: controller.signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  let reason = null;
  for await (const chunk of events(response)) reason = show(chunk) ?? reason;
  if (reason === null) throw new Error("the answer broke off: the server ended the connection");
  say({ length: "cut off: max tokens or the end of the context was reached", abort: "ended by another" }[reason] ?? "");
}

// what the browser says of a lost connection differs from one to the next, and in none says what was lost
export const words = (error) => (error instanceof TypeError ? "the connection to the server is lost, or there was none" : error.message);

function make(tag, attributes, ...children) {
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

function report(usage, timings) {
  const own = timings.diptych;
  const all = Math.max(1e-6, own.queue_ms + own.prefill_ms + own.transfer_ms + own.decode_ms);
  const text = (ms) => (ms === null ? "-" : milliseconds(ms / 1e3));
  const parts = [["queue", own.queue_ms], ["prefill", own.prefill_ms], ["transfer", own.transfer_ms], ["decode", own.decode_ms - own.stall_ms], ["stall", own.stall_ms]];
  const phases = make("div", { className: "phases" }, ...parts.filter(([, ms]) => ms > 0).map(([name, ms]) => bar(name, ms, all)));
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
  el("try-report").replaceChildren(
    make("h3", {}, "where the time went"), phases, make("p", { className: "legend parts" }, ...line), table(head, rows),
    ...(own.predicted.reason === null ? [] : [make("p", { className: "note" }, `no prediction: ${own.predicted.reason}`)]),
    make("h3", {}, "time to first token by part of the prompt"), table(["part", "tokens", "cached", "prefill", ""], segments),
  );
}

// not `disabled`: whoever is at a button with the keyboard would be sent to the top of the page
function setBusy(isBusy) {
  el("try-send").setAttribute("aria-disabled", isBusy);
  el("try-stop").setAttribute("aria-disabled", !isBusy);
}

export function setUpTry() {
  let controller = null;
  const chat = el("try-chat");
  const showUse = () => { el("try-system").disabled = !chat.checked; }; // a prompt alone has no system message
  chat.addEventListener("change", showUse);
  showUse();
  const stop = () => controller?.abort();
  el("try-stop").addEventListener("click", stop);
  el("try").addEventListener("keydown", (press) => {
    if (press.key === "Escape") stop();
    else if (press.key === "Enter" && (press.ctrlKey || press.metaKey)) el("try").requestSubmit();
  });
  el("try").addEventListener("submit", async (submit) => {
    submit.preventDefault();
    if (controller !== null) return;
    controller = new AbortController();
    setBusy(true);
    say("waiting for the first token");
    el("try-answer").textContent = "";
    el("try-answer").classList.remove("fixed");
    el("try-reasoning").textContent = "";
    el("try-reasoning").hidden = true;
    el("try-report").replaceChildren();
    try {
      await send(controller);
    } catch (error) {
      if (error.name === "AbortError") say("stopped");
      else say(words(error), true);
    } finally {
      controller = null;
      setBusy(false);
    }
  });
}
