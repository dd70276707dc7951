// Keeps conversations in the browser, and lists them. API keys are not among what it keeps.

import { allowed, byId, el, press } from "./dom.js";

const NAME = "notes-conversation-"; // and its id: the key of a conversation in localStorage
const OPEN = "notes-open"; // in sessionStorage: the id of the conversation in this tab
const MOST = 2_000_000; // characters of all; browsers allow a site about 5 million
const STRIPS = 20; // turns, the last ones, that are kept with the pieces of their prompt

let id = ""; // none before the first question
let at = 0; // when this tab kept it, in milliseconds

const show = (turns) => document.dispatchEvent(new CustomEvent("open", { detail: turns }));

// Go on as a new conversation; the one before stays as it is kept.
export function fork() {
  id = "";
}

export function newConversation() {
  fork();
  show([]);
  byId("question").focus();
  allowed(() => {
    sessionStorage.removeItem(OPEN);
    list();
  });
}

// Open the conversation that was in this tab before it was reloaded.
export function reopen() {
  allowed(() => {
    const found = all().find((one) => one.id === sessionStorage.getItem(OPEN));
    if (found) open(found);
    else list();
  });
}

function open(found) {
  ({ id, at } = found);
  show(found.turns);
  sessionStorage.setItem(OPEN, id);
  list();
}

// Keep the conversation; the oldest are removed where there is no room.
export function keep(turns) {
  const kept = allowed(() => {
    const found = all();
    if (found.find((one) => one.id === id)?.at !== at) id = `${Date.now()}-${Math.random()}`; // new, or changed by another tab
    const now = Date.now();
    const short = turns.map((turn, i) => (i < turns.length - STRIPS ? { ...turn, report: undefined } : turn));
    const text = JSON.stringify({ id, at: now, turns: short });
    let room = MOST - text.length;
    if (room < 0) throw new DOMException("The conversation is too long.", "QuotaExceededError");
    for (const other of found.filter((one) => one.id !== id)) {
      room -= other.size;
      if (room < 0) localStorage.removeItem(NAME + other.id);
    }
    localStorage.setItem(NAME + id, text);
    at = now;
    sessionStorage.setItem(OPEN, id);
    list();
  });
  byId("not-kept").hidden = kept;
}

// Return the kept conversations, the newest first.
function all() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(NAME));
  const found = names.map((name) => ({ ...JSON.parse(localStorage.getItem(name)), size: localStorage.getItem(name).length }));
  return found.sort((a, b) => b.at - a.at);
}

function list() {
  const found = all();
  byId("conversations").hidden = !found.length;
  byId("kept").replaceChildren(...found.map((one) => el("li", { class: "row" },
    press(title(one), () => { open(one); byId("question").focus(); }, {
      "aria-current": one.id === id ? "true" : null,
      title: `${new Date(one.at).toLocaleString("en")}, ${one.turns.at(-1).model}`,
    }),
    press("Delete", () => remove([one]), { title: `Delete “${title(one)}”` }))));
}

const title = ({ turns: [first] }) => first.question.split("\n")[0].slice(0, 80);

function remove(found) {
  if (!window.confirm(`Delete ${found.length > 1 ? `all ${found.length} conversations` : `“${title(found[0])}”`}?`)) return;
  for (const one of found) localStorage.removeItem(NAME + one.id);
  if (found.some((one) => one.id === id)) return newConversation();
  list();
  byId("kept").querySelector("button")?.focus();
}

byId("delete-all").addEventListener("click", () => remove(all()));
window.addEventListener("storage", () => allowed(list)); // another tab has kept or removed one
