// One answer, from the question to its account.
import { asked, askForKey, headers, look, system } from "./chat-settings.js";
import { events, words } from "./stream.js";

// a message as the API has it, of one as it is kept here
function sent({ role, content, reasoning, calls }) {
  const made = { role, content };
  if (reasoning) made.reasoning_content = reasoning;
  if (calls?.length) made.tool_calls = calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } }));
  return made;
}

// what came to nothing is left out, and what was asked before and behind it is one question: many templates demand turns
function history(messages) {
  const made = [];
  for (const one of messages.filter(({ role, content, calls }) => role === "user" || content || calls?.length).map(sent)) {
    const last = made[made.length - 1];
    if (last?.role === "user" && one.role === "user") last.content += `\n\n${one.content}`;
    else made.push(one);
  }
  return made;
}

export function emptyAnswer() {
  return { role: "assistant", content: "", reasoning: "", calls: [], finish: null, error: "" };
}

function take(answer, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  for (const { delta, finish_reason: finish } of chunk.choices) {
    answer.content += delta.content ?? "";
    answer.reasoning += delta.reasoning_content ?? "";
    for (const { index, id, function: named } of delta.tool_calls ?? []) {
      const call = (answer.calls[index] ??= { id, name: "", args: "" });
      call.name ||= named.name ?? "";
      call.args += named.arguments ?? "";
    }
    if (finish) answer.finish = finish;
  }
  if (chunk.timings) Object.assign(answer, { usage: chunk.usage, timings: chunk.timings });
}

// fills in `answer` to `messages`, and says when there is more of it; what went wrong stands in it
export async function ask(messages, answer, signal, onMore) {
  const told = [...(system() ? [{ role: "system", content: system() }] : []), ...history(messages)];
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify({ ...asked(), messages: told }), signal,
    });
    if (!response.ok) {
      if (response.status === 401) askForKey();
      const refused = await response.json().catch(() => null);
      throw new Error(refused?.error?.message ?? `the server answered ${response.status}`);
    }
    for await (const chunk of events(response)) {
      take(answer, chunk);
      onMore();
    }
    if (answer.finish === null) throw new Error("the answer broke off: the server ended the connection");
  } catch (error) {
    answer.finish = error.name === "AbortError" ? "stopped" : "error";
    if (answer.finish === "error") answer.error = words(error);
    if (error instanceof TypeError) look(); // the server may be gone
    return error;
  }
  return null;
}

const set = new Map(); // Markdown -> HTML or what will be it, of this page's time
const MOST_SET = 200;

let before = Promise.resolve(); // a conversation that is opened has many: one after the other

// the server's HTML of Markdown; null where it gives none, and the text stays as it is
export function htmlOf(text) {
  if (!set.has(text)) {
    if (set.size >= MOST_SET) set.delete(set.keys().next().value);
    before = before.then(() => asHtml(text));
    set.set(text, before);
  }
  return set.get(text);
}

async function asHtml(text) {
  try {
    const response = await fetch("page/markdown", { method: "POST", headers: headers(), body: JSON.stringify({ text }) });
    if (response.ok) return (await response.json()).html;
    if (response.status < 500 && response.status !== 401) return null; // it never will
  } catch {
    // the server is gone
  }
  set.delete(text); // asked for again when it is shown again
  return null;
}
