// Starts the page and connects its parts.

import { byId, el } from "./dom.js";
import { onTexts } from "./compile.js";
import { showText } from "./text.js";
import { askForKey, onKey } from "./key.js";
import { watch } from "./link.js";
import { ServerError, get, onContact } from "./server.js";
import { fork, keep, newConversation, reopen } from "./kept.js";
import { example, failed, load, onText, pick, prompted, recordStated, resume } from "./skills.js";
import { ask, busy, goBack, show, spaced, stop, turns } from "./talk.js";

const question = byId("question");
let model = {}; // of /v1/models

async function begin() {
  try {
    const { data } = await get("v1/models");
    model = data[0] ?? {};
    byId("model").textContent = model.id ?? "";
    await load();
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    if (error.kind === "refused") failed(error); // other errors show in the banner or the form for the key
  }
}

const numbers = [...byId("sampling").querySelectorAll("input")];

// The numbers that are given, by the names of the API.
const sampling = () => Object.fromEntries(numbers.filter((input) => input.value).map((input) => [input.id, input.valueAsNumber]));

const setting = () => ({ model, system: byId("system").value.trim(), sampling: sampling(), ...prompted() });

function fit() {
  question.style.setProperty("height", "auto");
  question.style.setProperty("height", `${Math.min(question.scrollHeight, 240)}px`);
}

// Return true if the numbers are valid; else show which one is not.
function valid() {
  const wrong = numbers.find((input) => !input.checkValidity());
  if (wrong) byId("skills-panel").open = byId("sampling").open = true;
  return wrong?.reportValidity() ?? true;
}

// Ask a question, in place of the turns from this one on; return true if it is asked.
function send(words, at = turns.length) {
  if (!words || busy() || !valid()) return false;
  if (at < turns.length - 1) fork(); // what is removed stays in the conversation that is kept
  goBack(at);
  changed();
  ask(words, setting());
  if (!at && phone.matches) unfold(); // else the answer is out of sight on a phone
  return true;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!send(question.value.trim())) return;
  question.value = "";
  fit();
});
question.addEventListener("input", fit);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && busy() && !byId("text").open) stop();
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || !event.target.matches("form textarea")) return;
  event.preventDefault();
  event.target.form.requestSubmit();
});
byId("stop").addEventListener("click", stop);
byId("clear").addEventListener("click", newConversation);
document.addEventListener("again", ({ detail }) => {
  if (send(detail.question, detail.at)) question.focus();
});

// Update what depends on the turns.
function changed() {
  byId("clear").hidden = busy() || !turns.length;
  recordStated(turns.filter((turn) => turn.answer).flatMap((turn) => turn.errata));
}

document.addEventListener("busy", () => {
  const focused = [byId("ask"), byId("stop")].includes(document.activeElement);
  byId("ask").hidden = busy();
  byId("stop").hidden = !busy();
  byId("kept-set").disabled = busy();
  byId("turns").classList.toggle("busy", busy());
  changed();
  keep(turns);
  if (focused) question.focus();
});
window.addEventListener("pagehide", () => busy() && keep(turns));

// Show the introduction while there is no turn, with a question about a skill.
function begins() {
  const { skill, words } = example();
  const tryIt = () => {
    if (skill) pick(skill);
    send(words);
  };
  byId("start").hidden = turns.length > 0;
  byId("example").replaceChildren("For example: ", el("button", { type: "button", class: "try", on: { click: tryIt } }, words),
    skill ? el("span", { class: "quiet" }, ` with the skill ${skill}`) : "");
}

document.addEventListener("prompted", () => {
  begins();
  const { news } = prompted();
  const line = byId("correction");
  line.hidden = !news.length;
  line.textContent = `Corrected in the next question: ${news.map(spaced).join(", ")}`;
});

const phone = matchMedia("(max-width: 52rem)");
const unfold = () => {
  byId("skills-panel").open = !phone.matches || !turns.length;
  byId("sampling").open = byId("conversations").open = !phone.matches;
};
phone.addEventListener("change", unfold);
unfold();

document.addEventListener("open", ({ detail }) => {
  show(detail);
  const last = turns.at(-1);
  if (last) {
    byId("system").value = last.system;
    resume(last);
  }
  if (phone.matches) unfold();
  changed();
});
reopen();
onTexts(async (name) => {
  await load();
  pick(name);
});
onText(showText);
onKey(begin);
onContact((error) => {
  if (error?.kind === "key" && byId("key").hidden) askForKey();
});
document.addEventListener("visibilitychange", () => document.hidden || begin()); // skills may have been compiled
watch(begin);
