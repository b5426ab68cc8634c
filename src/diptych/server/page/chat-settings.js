// What is asked of the server besides the messages, what this server can do, and whether it is there.
import { keepSettings, keptSettings } from "./chat-store.js";

const el = (id) => document.getElementById(id);
const NAMES = ["model", "system", "temperature", "top_p", "max_tokens", "seed", "thinking"];
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const LOOK_S = 15;
const RETRY_S = 3;
const THINKING = { none: "off", medium: "on" };
let values = keptSettings();
let sentKey = null; // for a browser that keeps nothing for pages
let abilities = null;

function key() {
  try {
    return sessionStorage.getItem("diptych.key") ?? sentKey;
  } catch {
    return sentKey;
  }
}

// the headers of a JSON body; without a key of ours the browser sends the one that it asked for
export function headers() {
  const sent = key();
  return { "content-type": "application/json", ...(sent ? { authorization: `Bearer ${sent}` } : {}) };
}

// the fields of a request, but its messages
export function asked() {
  const made = { stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if (values[name]?.trim() && Number.isFinite(Number(values[name]))) made[name] = Number(values[name]);
  if (values.model && [...el("set-model").options].some((one) => one.value === values.model)) made.model = values.model;
  if (values.thinking && abilities?.thinking.includes(values.thinking)) made.reasoning_effort = values.thinking;
  return made;
}

export const system = () => (values.system?.trim() ? values.system : "");

export function openSettings() {
  for (const name of NAMES) el(`set-${name}`).value = values[name] ?? "";
  if (!el("set-model").value) el("set-model").selectedIndex = 0;
  el("settings").showModal();
}

// the server has refused for want of a key
export function askForKey() {
  el("key-field").hidden = false;
  if (!el("settings").open) openSettings();
  el("key").focus();
}

function take() {
  values = Object.fromEntries(NAMES.map((name) => [name, el(`set-${name}`).value]));
  keepSettings(values);
  if (!el("key-field").hidden && el("key").value) {
    sentKey = el("key").value;
    try {
      sessionStorage.setItem("diptych.key", sentKey);
    } catch {
      // it holds for this page
    }
    learn();
  }
  showModel();
}

function showModel() {
  el("model").textContent = el("set-model").value;
}

function offer(select, options) {
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
}

async function read(path) {
  const response = await fetch(path, { headers: headers() });
  if (response.status === 401) askForKey();
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  return response.json();
}

// what can be chosen, and what must be said of this model
async function learn() {
  try {
    const [models, able] = await Promise.all([read("v1/models"), read("page/abilities")]);
    abilities = able;
    offer(el("set-model"), models.data.map((one) => [one.id, one.parent ? `${one.id} (adapter)` : one.id]));
    if (models.data.some((one) => one.id === values.model)) el("set-model").value = values.model;
    const isSwitch = !able.thinking.includes("high");
    offer(el("set-thinking"), [["", "as the model has it"], ...able.thinking.map((one) => [one, isSwitch ? THINKING[one] : THINKING[one === "none" ? one : ""] ?? one])]);
    el("set-thinking").value = able.thinking.includes(values.thinking) ? values.thinking : "";
    el("thinking-field").hidden = able.thinking.length === 0;
    el("set-max_tokens").max = able.context_tokens;
    el("model-note").hidden = able.note === null;
    el("model-note").replaceChildren(able.note ?? "");
    if (able.note !== null) {
      const link = Object.assign(document.createElement("a"), { href: "./", textContent: able.writes ? "try a prompt on the live page" : "the live page" });
      el("model-note").append(". ", link);
    }
    for (const id of ["prompt", "send"]) el(id).disabled = !able.writes;
    showModel();
  } catch {
    abilities = null; // asked again when the server is there
  }
}

let looking = null;

// whether requests are taken; asked again now and then, and soon where they are not
export async function look() {
  clearTimeout(looking);
  let told = "";
  try {
    const response = await fetch("ready", { cache: "no-store" });
    if (!response.ok) told = "the server takes no requests now";
  } catch {
    told = "connection lost, trying again";
  }
  if (el("status").textContent !== (told || "ready")) el("status").textContent = told || "ready";
  el("status").className = `status ${told ? "lost" : "live"}`;
  if (told) abilities = null; // another may come in its place
  else if (abilities === null) await learn();
  looking = setTimeout(look, (told ? RETRY_S : LOOK_S) * 1e3);
}

export function setUpSettings() {
  el("show-settings").addEventListener("click", openSettings);
  el("settings").addEventListener("close", take);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(looking);
    else look();
  });
  look();
}
