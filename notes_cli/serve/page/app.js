// Starts the page and connects its parts.

import { byId } from "./dom.js";
import { showText } from "./text.js";
import { askForKey, onKey } from "./key.js";
import { watch } from "./link.js";
import { ServerError, get, onContact } from "./server.js";
import { failed, load, newConversation, onText, prompted, wereTold } from "./skills.js";
import { ask, busy, clear, spaced, stop } from "./talk.js";

const question = byId("question");
let model = "";

async function begin() {
  try {
    const { data } = await get("v1/models");
    model = data[0]?.id ?? "";
    byId("model").textContent = model;
    await load();
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    if (error.kind === "refused") failed(error); // other errors show in the banner or the form for the key
  }
}

const setting = () => ({ model, system: byId("system").value.trim(), ...prompted() });

function fit() {
  question.style.setProperty("height", "auto");
  question.style.setProperty("height", `${Math.min(question.scrollHeight, 240)}px`);
}

function submit(event) {
  event?.preventDefault();
  const words = question.value.trim();
  if (!words || busy()) return;
  question.value = "";
  fit();
  const first = !byId("turns").childElementCount;
  ask(words, setting, wereTold);
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
  question.focus();
});

document.addEventListener("busy", () => {
  const focused = [byId("ask"), byId("stop")].includes(document.activeElement);
  byId("ask").hidden = busy();
  byId("stop").hidden = !busy();
  byId("clear").hidden = busy() || !byId("turns").childElementCount;
  if (focused) question.focus();
});
document.addEventListener("change-question", (event) => {
  question.value = event.detail;
  fit();
  question.focus();
});
document.addEventListener("prompted", () => {
  const { news } = prompted();
  const said = byId("said");
  said.hidden = !news.length;
  said.textContent = `The model will be told: ${news.map(spaced).join(", ")}`;
});

const phone = matchMedia("(max-width: 52rem)");
const unfold = () => { byId("skills-panel").open = !phone.matches || !byId("turns").childElementCount; };
phone.addEventListener("change", unfold);
unfold();

onText(showText);
onKey(begin);
onContact((error) => {
  if (error?.kind === "key" && byId("key").hidden) askForKey();
});
document.addEventListener("visibilitychange", () => document.hidden || begin()); // skills may have been compiled
watch(begin);
