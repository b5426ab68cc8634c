// The page to chat in: conversations, the one on show, and the answers that are on their way.
import { ask, emptyAnswer } from "./chat-send.js";
import { setUpSettings } from "./chat-settings.js";
import { begin, forget, keep, kept, onOthers, titleOf } from "./chat-store.js";
import { answerView, questionView } from "./chat-view.js";
import { setUpTheme } from "./theme.js";

const el = (id) => document.getElementById(id);
const SAVE_S = 1; // between two, while an answer comes
const MOST_SAID = 2000; // characters of an answer that are read aloud without being asked for
const running = new Map(); // id of a conversation -> what stops its answer
const unkept = new Set(); // ids of conversations that this page alone has
let all = kept();
let current = begin();
let views = new Map(); // message -> its view, of the conversation on show
let follows = true; // the reader is at the newest
let undo = null;
let warned = ""; // why something is not kept: said once, as it would take the place of an undo each second

function say(words, back = null) {
  undo = back;
  el("notice").hidden = words === "";
  el("notice").firstElementChild.textContent = words;
  el("undo").hidden = back === null;
}

function save(conversation) {
  if (conversation.messages.length === 0) return;
  const why = keep(conversation);
  if (why) unkept.add(conversation.id);
  else unkept.delete(conversation.id);
  if (why && why !== warned) say(why);
  warned = why;
}

function toEnd() {
  if (follows) el("thread").scrollTop = el("thread").scrollHeight;
  el("to-end").hidden = follows;
}

// up: somebody reads; down to the end: follows again
let lastTop = 0;
function onScroll() {
  const { scrollTop, scrollHeight, clientHeight } = el("thread");
  if (scrollHeight - scrollTop - clientHeight < 24) follows = true;
  else if (scrollTop < lastTop) follows = false;
  lastTop = scrollTop;
  el("to-end").hidden = follows || scrollHeight <= clientHeight;
}

function showList() {
  el("list").replaceChildren(...all.map((one) => {
    const line = document.createElement("li");
    const open = Object.assign(document.createElement("button"), { type: "button", className: "open", textContent: titleOf(one), title: titleOf(one), dir: "auto" });
    const remove = Object.assign(document.createElement("button"), { type: "button", className: "delete", textContent: "×", ariaLabel: `delete ${titleOf(one)}` });
    if (one === current) {
      line.className = "current";
      open.setAttribute("aria-current", "true");
    }
    open.addEventListener("click", () => show(one));
    remove.addEventListener("click", () => drop(one));
    line.append(open, remove);
    return line;
  }));
}

// what stands there already stays as it is: opened, selected, scrolled
function showMessages() {
  const { messages } = current;
  const before = views;
  views = new Map(messages.map((one) => [one, before.get(one) ?? viewOf(one)]));
  for (const [one, { node }] of before) if (!views.has(one)) node.remove();
  for (const one of messages.filter((each) => !before.has(each))) {
    el("messages").append(views.get(one).node);
    if (one.role === "user") continue;
    if (running.get(current.id)?.answer === one) views.get(one).update();
    else views.get(one).settle().then(toEnd);
  }
  showState();
  toEnd();
}

function viewOf(message) {
  if (message.role === "user") return questionView(message, { edit: (text) => edit(current.messages.indexOf(message), text) });
  return answerView(message, { again: regenerate });
}

// of another conversation nothing stands there
function showAnew() {
  for (const { node } of views.values()) node.remove();
  views = new Map();
  showMessages();
}

// what depends on whether an answer is on its way; only the last answer can be asked for anew
function showState() {
  const isBusy = running.has(current.id);
  el("send").setAttribute("aria-disabled", isBusy); // not `disabled`: whoever is at it with the keyboard would lose their place
  el("stop").setAttribute("aria-disabled", !isBusy);
  el("export").hidden = current.messages.length === 0;
  el("hello").hidden = current.messages.length > 0;
  const last = current.messages[current.messages.length - 1];
  for (const [message, { node }] of views) for (const again of node.querySelectorAll(".again")) again.hidden = message !== last;
}

function show(conversation) {
  current = conversation;
  follows = true;
  document.body.classList.remove("list-open");
  el("show-list").setAttribute("aria-expanded", false);
  showList();
  showAnew();
  focusPrompt();
}

// where it brings up no keyboard over half the page
function focusPrompt() {
  if (matchMedia("(pointer: fine)").matches) el("prompt").focus();
}

function stop(conversation) {
  running.get(conversation.id)?.controller.abort();
  running.delete(conversation.id);
}

function drop(conversation) {
  const place = all.indexOf(conversation);
  stop(conversation);
  forget(conversation);
  all = all.filter((one) => one !== conversation);
  if (conversation === current) show(begin());
  else showList();
  (el("list").querySelectorAll(".delete")[Math.max(0, Math.min(place, all.length - 1))] ?? el("new")).focus();
  say(`deleted: ${titleOf(conversation)}`, () => {
    all = [...all, conversation].sort((a, b) => b.at - a.at);
    save(conversation);
    show(conversation);
  });
}

// the conversation with other messages, and a way back
function replace(messages, words) {
  const [conversation, before] = [current, current.messages];
  stop(conversation);
  conversation.messages = messages;
  if (words) {
    say(words, () => {
      stop(conversation);
      conversation.messages = before;
      save(conversation);
      show(conversation);
    });
  }
}

function edit(at, text) {
  const isLast = at >= current.messages.length - 1;
  replace([...current.messages.slice(0, at), { role: "user", content: text }], isLast ? "" : "what stood behind your message is replaced");
  answerNow();
  focusPrompt();
}

function regenerate() {
  const last = current.messages[current.messages.length - 1];
  replace(current.messages.slice(0, -1), last.content ? "the answer before is replaced" : "");
  answerNow();
  focusPrompt();
}

async function answerNow() {
  const conversation = current;
  const asked = [...conversation.messages];
  const run = { controller: new AbortController(), answer: emptyAnswer() };
  const { answer } = run;
  conversation.messages = [...asked, answer];
  conversation.at = Date.now();
  running.set(conversation.id, run);
  all = [conversation, ...all.filter((one) => one !== conversation)];
  follows = true;
  save(conversation);
  showList();
  showMessages();
  el("said").textContent = "waiting for the answer";
  let isDue = false;
  let savedAt = Date.now();
  const draw = () => {
    isDue = false;
    if (running.get(conversation.id) !== run) return;
    views.get(answer)?.update();
    toEnd();
  };
  const problem = await ask(asked, answer, run.controller.signal, () => {
    if (!isDue) requestAnimationFrame(draw); // a fast model writes more often than a screen shows
    isDue = true;
    if (Date.now() - savedAt < SAVE_S * 1e3 || running.get(conversation.id) !== run) return;
    savedAt = Date.now();
    save(conversation);
  });
  if (running.get(conversation.id) === run) running.delete(conversation.id);
  if (!conversation.messages.includes(answer) || !all.includes(conversation)) return; // replaced, or deleted
  save(conversation);
  if (conversation === current) {
    await views.get(answer)?.settle();
    showState();
    toEnd();
  }
  el("said").textContent = problem === null ? `answer: ${answer.content.slice(0, MOST_SAID)}` : answer.error || "stopped";
}

function send() {
  const text = el("prompt").value;
  if (!text.trim() || running.has(current.id) || el("prompt").disabled) return;
  el("prompt").value = "";
  say("");
  current.messages = [...current.messages, { role: "user", content: text }];
  answerNow();
}

function exportIt() {
  const body = JSON.stringify({ title: titleOf(current), messages: current.messages }, null, 2);
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([body], { type: "application/json" })), download: "conversation.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1e3);
}

el("compose").addEventListener("submit", (submit) => { submit.preventDefault(); send(); });
el("prompt").addEventListener("keydown", (press) => {
  if (press.key !== "Enter" || press.shiftKey || press.isComposing) return;
  press.preventDefault();
  send();
});
document.addEventListener("keydown", (press) => { if (press.key === "Escape" && !el("settings").open) running.get(current.id)?.controller.abort(); });
el("stop").addEventListener("click", () => running.get(current.id)?.controller.abort());
el("new").addEventListener("click", () => show(begin()));
el("export").addEventListener("click", exportIt);
el("undo").addEventListener("click", () => { const back = undo; say(""); back(); });
el("dismiss").addEventListener("click", () => { say(""); el("prompt").focus(); });
el("to-end").addEventListener("click", () => { follows = true; toEnd(); });
el("thread").addEventListener("scroll", onScroll);
el("show-list").addEventListener("click", () => {
  const isOpen = document.body.classList.toggle("list-open");
  el("show-list").setAttribute("aria-expanded", isOpen);
});
window.addEventListener("pagehide", () => { for (const one of all) if (running.has(one.id)) keep(one); });
// another tab's are taken over, but for what is being written here
onOthers(() => {
  const isMine = (one) => running.has(one.id) || unkept.has(one.id);
  const mine = all.filter(isMine);
  const others = kept().filter((one) => !isMine(one));
  all = [...mine, ...others.map((one) => (one.id === current.id && JSON.stringify(one) === JSON.stringify(current) ? current : one))].sort((a, b) => b.at - a.at);
  if (current.messages.length > 0 && !all.includes(current)) {
    current = all.find((one) => one.id === current.id) ?? begin();
    showAnew();
  }
  showList();
});
setUpTheme();
setUpSettings();
if (all.length > 0) [current] = all;
show(current);
