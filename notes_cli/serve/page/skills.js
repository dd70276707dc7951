// Shows the skills above the question, to pick and order them, and the fields of the picked ones, to correct them.

import { announce, byId, count, el, press } from "./dom.js";
import { ServerError, get, post } from "./server.js";

const chosen = []; // names, in the order of the prompt
const corrections = new Map(); // "skill.field" -> current value
const stated = new Map(); // "skill.field" -> value in the last erratum of this conversation
const notes = new Map(); // "skill.field" -> element shown below the field
let skills = [];
let sentences = []; // corrections of the server's options that are of no field
let loaded = false;
let resumed = null; // a turn to resume when the skills are loaded
let reached = ""; // the skill that Tab comes to: arrows go to the others
let openText = () => {};

// Return the skills and errata of the next prompt; `news`: the errata that are new in this conversation.
export function prompted() {
  const held = [...corrections].filter(([name]) => chosen.some((skill) => name.startsWith(`${skill}.`)));
  const written = (pairs) => pairs.map(([name, value]) => `${name}=${value}`);
  const news = written(held.filter(([name, value]) => stated.get(name) !== value));
  return { splice: [...chosen], errata: [...sentences, ...written(held)], news };
}

// Return a question to begin with, about a field of a skill if there is one.
export function example() {
  const usable = skills.filter((skill) => fits(skill) && Object.keys(skill.fields ?? {}).length);
  const skill = usable.find((one) => chosen.includes(one.name)) ?? usable[0];
  if (!skill) return { skill: "", words: "What can you help me with?" };
  return { skill: skill.name, words: `What is the ${Object.keys(skill.fields)[0].replaceAll("_", " ")}?` };
}

export const correction = (skill, field) => corrections.get(`${skill}.${field}`) ?? null;

// Return a field's value in a new conversation: the text's, or that of a global erratum.
export const holds = (skill, field) => skill.standing?.[field] ?? skill.fields[field];

// Split "skill.field=value".
function parted(erratum) {
  const [name] = erratum.split("=", 1);
  return [name.trim(), erratum.slice(name.length + 1).trim()];
}

// Record the errata that the model has read in this conversation, and drop corrections that repeat a field's own value.
export function recordStated(errata) {
  stated.clear();
  for (const erratum of errata) stated.set(...parted(erratum));
  for (const skill of skills) {
    for (const field of Object.keys(skill.fields ?? {})) {
      const name = `${skill.name}.${field}`;
      if (!stated.has(name) && correction(skill.name, field) === holds(skill, field)) corrections.delete(name);
    }
  }
  document.dispatchEvent(new CustomEvent("prompted"));
}

// Take over the skills and corrections of a turn that was kept, as far as they are still there.
export function resume(turn) {
  resumed = loaded ? null : turn;
  if (!loaded) return;
  chosen.splice(0, Infinity, ...turn.splice.filter(usable));
  corrections.clear();
  for (const [name, value] of turn.errata.map(parted)) {
    if (skills.some((skill) => Object.keys(skill.fields ?? {}).some((field) => name === `${skill.name}.${field}`))) corrections.set(name, value);
  }
  show();
}

// Set the function that opens a skill's text.
export function onText(open) {
  openText = open;
}

// Load the compiled skills from the server.
export async function load() {
  const { skills: found, splice = [], errata = [] } = await get("v1/notes");
  if (loaded && JSON.stringify(found) === JSON.stringify(skills)) return;
  if (!loaded && !skills.length) begin(found, splice, errata);
  [skills, loaded] = [found, true];
  for (const name of [...chosen]) if (!usable(name)) chosen.splice(chosen.indexOf(name), 1);
  if (resumed) resume(resumed);
  else show();
}

// Take over the skills and corrections of the server's options.
function begin(found, splice, errata) {
  chosen.push(...splice);
  for (const erratum of errata) {
    const [name, value] = parted(erratum);
    const field = name.split(".").at(-1);
    const of = found.filter((skill) => splice.includes(skill.name) && [field, `${skill.name}.${field}`, `*.${field}`].includes(name) && field in (skill.fields ?? {}));
    for (const skill of of) corrections.set(`${skill.name}.${field}`, value);
    if (!of.length) sentences = [...sentences, erratum];
  }
}

const usable = (name) => skills.some((skill) => skill.name === name && fits(skill));

const fits = (skill) => !skill.problem && skill.model_matches !== false;

// Show why the skills could not be loaded.
export function failed(error) {
  loaded = false;
  byId("fields").replaceChildren(el("p", { class: "error", role: "alert" }, error.message));
}

function show() {
  const list = byId("fields");
  const drafts = [...list.querySelectorAll(".field input")].filter((input) => input.value !== input.defaultValue);
  const here = skills.filter(fits);
  const elsewhere = skills.filter((skill) => !usable(skill.name));
  if (!here.some(({ name }) => name === reached)) reached = here[0]?.name;
  byId("skills").replaceChildren(...here.map(chip));
  list.replaceChildren(...chosen.flatMap((name) => here.filter((skill) => skill.name === name)).map(card));
  if (!chosen.length) {
    list.append(el("p", { class: "quiet" }, here.length ? "Pick one above the question: its fields are shown here." : "No skill is compiled for this model yet."));
  }
  if (elsewhere.length) {
    list.append(el("details", { class: "elsewhere" },
      el("summary", {}, `${count(elsewhere.length, "other skill")} cannot be used here`),
      el("ul", {}, ...elsewhere.map((skill) => el("li", {}, `${skill.name}: ${skill.problem || elsewhereWhy(skill)}`)))));
  }
  for (const { id, value } of drafts) {
    const input = byId(id);
    if (!input) continue;
    input.value = value;
    input.dispatchEvent(new Event("input"));
  }
  byId("skills-count").textContent = chosen.length ? `${chosen.length} in the prompt` : "";
  document.dispatchEvent(new CustomEvent("prompted"));
}

const elsewhereWhy = ({ name, identity }) => `compiled for ${identity?.model || "another model"}. For this one: notes compile --from ${name} -m ${byId("model").textContent}`;

// Make the checkbox of a skill, with its place among those that are picked.
function chip(skill) {
  const id = `skill-${skill.name}`;
  const on = chosen.includes(skill.name);
  const box = el("input", { type: "checkbox", id, checked: on, tabindex: skill.name === reached ? "0" : "-1",
    on: { change: () => choose(skill.name, box.checked) } });
  const place = chosen.length > 1 && on ? el("span", { class: "place", title: "its place among the skills" },
    String(chosen.indexOf(skill.name) + 1)) : null;
  return el("div", { class: on ? "chip on" : "chip" }, box, el("label", { for: id }, skill.name), place,
    el("span", { class: "quiet number" }, count(skill.tokens, "token")));
}

const boxes = () => [...byId("skills").querySelectorAll("input")];

byId("skills").addEventListener("focusin", ({ target }) => {
  reached = target.id.slice("skill-".length);
  for (const box of boxes()) box.tabIndex = box === target ? 0 : -1;
});
byId("skills").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step && event.key !== "Enter") return;
  event.preventDefault();
  if (step) boxes().at((boxes().indexOf(event.target) + step) % boxes().length).focus();
  else byId(`fields-${reached}`)?.querySelector("input")?.focus();
});
byId("fields").addEventListener("keydown", ({ key }) => {
  if (key === "Escape") byId(`skill-${reached}`).focus();
});

function card(skill) {
  return el("div", { class: "skill", id: `fields-${skill.name}` },
    el("div", { class: "row" }, el("h3", {}, skill.name), press("Text", () => openText(skill))),
    ...Object.keys(skill.fields ?? {}).map((field) => fieldForm(skill, field)));
}

export const pick = (name) => choose(name, true);

function choose(name, on) {
  if (on && !chosen.includes(name)) chosen.push(name);
  else if (!on && chosen.includes(name)) chosen.splice(chosen.indexOf(name), 1);
  show();
  byId(`skill-${name}`)?.focus();
}

// Make the form of a field's value. A changed value becomes an erratum before the next question.
function fieldForm(skill, field) {
  const name = `${skill.name}.${field}`;
  const value = holds(skill, field);
  const now = correction(skill.name, field) ?? value;
  const id = `field-${name}`;
  const input = el("input", { id, value: now, required: true, autocomplete: "off", spellcheck: "false" });
  const button = el("button", { type: "submit", hidden: true }, "Correct");
  input.addEventListener("input", () => { button.hidden = [now, ""].includes(input.value.trim()); });
  return el("form", {
    class: now === value ? "field" : "field corrected",
    on: { submit: (event) => { event.preventDefault(); correct(name, input.value.trim(), value); } },
  }, el("label", { for: id }, field), el("div", { class: "row" }, input, button), note(skill, field, now));
}

// Make the note below a field that was corrected, here or for everyone.
function note(skill, field, now) {
  const name = `${skill.name}.${field}`;
  const value = holds(skill, field);
  const status = notes.get(name);
  if (now !== value) {
    return el("div", { class: "quiet note" }, el("span", {}, "was ", el("s", {}, value)),
      press("Undo", () => correct(name, value, value)), press("Correct everywhere", () => correctEverywhere(skill.name, field, now)), status);
  }
  if (status) return el("div", { class: "quiet note" }, status);
  if (value === skill.fields[field]) return null;
  return el("div", { class: "quiet note" }, el("span", {}, "corrected everywhere; was ", el("s", {}, skill.fields[field])));
}

function correct(name, value, original) {
  const id = `field-${name}`;
  byId(id).value = byId(id).defaultValue; // no longer a draft
  notes.delete(name);
  if (value === original && !stated.has(name)) corrections.delete(name);
  else corrections.set(name, value); // also the original value, if the model has read another one
  show();
  announce(`${name} is ${value} from the next question on.`);
  byId(id)?.focus();
}

async function correctEverywhere(skill, field, value) {
  const name = `${skill}.${field}`;
  try {
    const found = await post("v1/notes/errata", { skill, field, value });
    const where = [count(found.conversations, "live conversation"), count(found.sessions.length, "session")];
    notes.set(name, el("span", { role: "status" }, `Corrected in ${where.join(", ")}, and all new ones.`));
    corrections.delete(name);
    await load();
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    notes.set(name, el("span", { class: "error", role: "alert" }, error.message));
  }
  show();
  byId(`field-${name}`)?.focus();
}
