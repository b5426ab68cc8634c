// Conversations, kept in this browser alone: an entry for each, so that two tabs do not write over each other's.
const PREFIX = "diptych.chat.";
const SETTINGS = "diptych.chat-settings";
const MOST = 200;

const isAnswer = (one) => one.role === "assistant" && typeof one.reasoning === "string" && Array.isArray(one.calls);
const isMessage = (one) => typeof one?.content === "string" && (one.role === "user" || isAnswer(one));
const isConversation = (one) => typeof one?.id === "string" && Array.isArray(one.messages) && one.messages.every(isMessage);

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

export function begin() {
  return { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`, at: Date.now(), messages: [] };
}

// the first words of what was asked first
export function titleOf({ messages }) {
  const words = (messages[0]?.content ?? "").trim().replace(/\s+/g, " ");
  if (words.length <= 48) return words || "empty";
  return `${words.slice(0, 48).replace(/\s\S*$/, "")} ...`;
}

// newest first; what is broken, or another's, is left alone
export function kept() {
  try {
    const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
    return names.map((name) => parsed(localStorage.getItem(name))).filter(isConversation).sort((a, b) => b.at - a.at);
  } catch {
    return [];
  }
}

// why it could not be kept, or ""
export function keep(conversation) {
  const name = PREFIX + conversation.id;
  try {
    const isNew = localStorage.getItem(name) === null;
    if (isNew && Object.keys(localStorage).filter((one) => one.startsWith(PREFIX)).length >= MOST) {
      return `this conversation is not kept: there are ${MOST} already; delete one, and it will be`;
    }
    localStorage.setItem(name, JSON.stringify(conversation));
    return "";
  } catch (error) {
    if (error.name === "QuotaExceededError") return "this conversation is not kept: the browser's store is full; delete others, or export it";
    return "this browser keeps nothing for pages: conversations are gone when the page is closed";
  }
}

export function forget(conversation) {
  try {
    localStorage.removeItem(PREFIX + conversation.id);
  } catch {
    // nothing was kept
  }
}

// another tab has changed the conversations
export function onOthers(tell) {
  window.addEventListener("storage", (change) => { if (change.key === null || change.key.startsWith(PREFIX)) tell(); });
}

export function keptSettings() {
  try {
    return parsed(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    return {};
  }
}

export function keepSettings(values) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(values));
  } catch {
    // they hold for this page
  }
}
