// Messages as they stand on the page: a question, or an answer with its thoughts, calls and account.
import { accountOf, make, phasesOf, text } from "./account.js";
import { short } from "./charts.js";
import { htmlOf } from "./chat-send.js";
import { endWords } from "./stream.js";

const ENDS = { ...endWords, stopped: "stopped", tool_calls: "the model calls a tool; none is given here, so nothing answers" };
const LINES = "p, li, ul, ol, blockquote, table, h1, h2, h3, h4, h5, h6";

function button(words, act, more = {}) {
  const made = make("button", { type: "button", ...more }, words);
  made.addEventListener("click", () => act(made));
  return made;
}

// only where a page is not from this machine or by https, a browser has no clipboard
async function copy(copied, pressed) {
  try {
    await navigator.clipboard.writeText(copied);
  } catch {
    const field = make("textarea", { value: copied, className: "unseen" });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    pressed.focus();
  }
  pressed.textContent = "copied";
  document.getElementById("said").textContent = "copied";
  setTimeout(() => { pressed.textContent = "copy"; }, 1500);
}

// what an answer's HTML lacks: buttons at code, and boxes for what is wider than the page
function dress(box) {
  for (const line of box.querySelectorAll(LINES)) line.dir = "auto";
  for (const code of box.querySelectorAll("pre")) {
    const around = make("div", { className: "code" });
    code.replaceWith(around);
    code.tabIndex = 0; // what scrolls, scrolls by keyboard, too
    const language = code.firstElementChild?.className.replace(/^language-/, "") ?? "";
    const press = button("copy", (pressed) => copy(code.textContent, pressed), { ariaLabel: "copy this code" });
    around.append(make("div", { className: "top" }, make("span", {}, language), press), code);
  }
  for (const table of box.querySelectorAll("table")) {
    const around = make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "table" });
    table.replaceWith(around);
    around.append(table);
  }
}

export function questionView(message, { edit }) {
  const said = make("div", { className: "text", dir: "auto" }, message.content);
  const tools = make("div", { className: "tools" }, button("edit", () => open()), button("copy", (pressed) => copy(message.content, pressed)));
  const node = make("article", { className: "message mine", ariaLabel: "you" }, said, tools);
  const close = () => {
    node.replaceChildren(said, tools);
    tools.firstChild.focus();
  };
  function open() {
    const field = make("textarea", { value: message.content, dir: "auto", ariaLabel: "your message" });
    const done = () => (field.value.trim() ? edit(field.value) : close());
    field.addEventListener("keydown", (press) => {
      if (press.key === "Escape") close();
      else if (press.key === "Enter" && !press.shiftKey && !press.isComposing) done();
      else return;
      press.preventDefault();
      press.stopPropagation(); // Escape would stop an answer
    });
    node.replaceChildren(field, make("div", { className: "tools" }, button("send from here", done), button("cancel", close)));
    field.focus();
  }
  return { node };
}

function accountLine({ usage, timings }) {
  const own = timings.diptych;
  const cached = usage.prompt_tokens_details.cached_tokens;
  const parts = [`first token after ${text(own.ttft_ms)}`, `${short(timings.predicted_per_second)} tokens/s`, `${usage.completion_tokens} tokens`, `prompt ${usage.prompt_tokens} tokens, ${cached} cached`];
  const whole = make("details", { className: "told account" }, make("summary", {}, parts.join(" · "), phasesOf(own)));
  whole.addEventListener("toggle", () => { if (whole.open && whole.children.length === 1) whole.append(...accountOf(timings)); });
  return whole;
}

// update: more has come. settle: it is over, now or long ago.
export function answerView(message, { again }) {
  const thoughts = make("div", { className: "reasoning", dir: "auto" });
  const heading = make("summary", {}, "thinking");
  const thought = make("details", { className: "thought", hidden: true }, heading, thoughts);
  const said = make("div", { className: "text plain", dir: "auto" });
  const calls = make("div", {});
  const note = make("p", { className: "quiet note" });
  const tools = make("div", { className: "tools" });
  const account = make("div", {});
  const node = make("article", { className: "message", ariaLabel: "answer" }, thought, said, calls, note, account, tools);

  // appended: a text that is written anew loses what was selected in it
  function grow(box, whole) {
    if (box.firstChild === null) box.append("");
    if (box.firstChild.length < whole.length) box.firstChild.appendData(whole.slice(box.firstChild.length));
  }

  function update() {
    thought.hidden = !message.reasoning;
    grow(thoughts, message.reasoning);
    grow(said, message.content);
    note.textContent = message.content || message.calls.length > 0 ? "" : message.reasoning ? "thinking" : "waiting for the first token";
    calls.replaceChildren(...message.calls.filter(Boolean).map((call) => {
      const code = make("pre", { tabIndex: 0 }, make("code", {}, call.args));
      return make("figure", { className: "code", ariaLabel: `calls ${call.name}` }, make("figcaption", { className: "top" }, `calls ${call.name}`), code);
    }));
  }

  async function settle() {
    update();
    const n = message.timings?.diptych.thinking_n ?? 0;
    heading.textContent = n > 0 ? `thought for ${text(message.timings.diptych.thinking_ms)}, ${n} tokens` : "thoughts";
    const isBroken = message.finish === null || message.finish === "error";
    note.className = isBroken ? "error note" : "quiet note";
    note.textContent = message.finish === null
      ? "not finished: the page that asked was closed, or another tab still writes it"
      : message.finish === "error" ? message.error : ENDS[message.finish] ?? (message.finish === "stop" ? "" : `ended: ${message.finish}`);
    if (!note.textContent && !message.content && message.calls.length === 0) note.textContent = "the model wrote nothing";
    account.replaceChildren(...(message.timings ? [accountLine(message)] : []));
    tools.replaceChildren(...(message.content ? [button("copy", (pressed) => copy(message.content, pressed))] : []));
    tools.append(button(isBroken ? "try again" : "regenerate", again, { className: "again" }));
    const html = message.content ? await htmlOf(message.content) : null;
    if (html === null) return;
    const made = make("template", { innerHTML: html }).content; // the server's, in which nothing of the model's runs
    dress(made);
    said.replaceChildren(made);
    said.className = "text";
    said.removeAttribute("dir"); // each line has its own
  }
  return { node, update, settle };
}
