// The box to try a prompt: streams the answer and shows its account, phase by phase and segment by segment.
import { accountOf } from "./account.js";
import { endWords, events, words } from "./stream.js";

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
  if (chunk.timings) el("try-report").replaceChildren(...accountOf(chunk.timings));
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
  say(endWords[reason] ?? "");
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
