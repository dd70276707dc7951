// Starts the page and connects its parts.

import { byId, el } from "./dom.js";
import { onTexts } from "./compile.js";
import { showText } from "./text.js";
import { askForKey, onKey } from "./key.js";
import { watch } from "./link.js";
import { ServerError, get, onContact } from "./server.js";
import { example, failed, load, newConversation, onText, pick, prompted, recordStated } from "./skills.js";
import { ask, busy, clear, spaced, stop } from "./talk.js";

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

function submit(event) {
  event?.preventDefault();
  const words = question.value.trim();
  if (!words || busy() || !valid()) return;
  question.value = "";
  fit();
  const first = !byId("turns").childElementCount;
  ask(words, setting, recordStated);
  if (first) unfold(); // else the answer is out of sight on a phone
}

byId("composer").addEventListener("submit", submit);
question.addEventListener("input", fit);
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && busy() && !byId("text").open) stop();
});
byId("stop").addEventListener("click", stop);
byId("clear").addEventListener("click", () => {
  clear();
  newConversation();
  byId("clear").hidden = true;
  begins();
  question.focus();
});

document.addEventListener("busy", () => {
  const focused = [byId("ask"), byId("stop")].includes(document.activeElement);
  byId("ask").hidden = busy();
  byId("stop").hidden = !busy();
  byId("clear").hidden = busy() || !byId("turns").childElementCount;
  begins();
  if (focused) question.focus();
});
document.addEventListener("change-question", (event) => {
  question.value = event.detail;
  fit();
  question.focus();
});
// Show the introduction while there is no turn, with a question about a skill.
function begins() {
  const { skill, words } = example();
  const tryIt = () => {
    if (skill) pick(skill);
    question.value = words;
    submit();
  };
  byId("start").hidden = byId("turns").childElementCount > 0;
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
  byId("skills-panel").open = !phone.matches || !byId("turns").childElementCount;
  byId("sampling").open = !phone.matches;
};
phone.addEventListener("change", unfold);
unfold();

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
