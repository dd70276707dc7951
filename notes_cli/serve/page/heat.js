// A skill's text, and on demand the heat of a probe over it: on which of its tokens does a decision rest?

import { announce, byId, count, el, parts } from "./dom.js";
import { ServerError, get, stream } from "./server.js";
import { correction } from "./skills.js";

const dialog = byId("heat");
let running = null;

// Open a skill's text; `question` is the one to begin with.
export async function showText(skill, question) {
  const picture = el("div", { class: "picture" });
  const text = el("pre", { class: "text", tabindex: "0", "aria-label": "Text of the skill" }, "…");
  dialog.replaceChildren(
    el("header", {}, el("h2", { id: "heat-title" }, skill.name, el("span", { class: "quiet" }, ` ${count(skill.tokens, "token")}`)),
      el("button", { type: "button", class: "plain", on: { click: () => dialog.close() } }, "Close")),
    form(skill, question, picture, text), picture, text);
  if (!dialog.open) dialog.showModal();
  try {
    const whole = await get(`v1/notes/${encodeURIComponent(skill.name)}`);
    if (!text.classList.contains("hot")) text.replaceChildren(...plain(whole));
  } catch (error) {
    text.replaceChildren(el("span", { class: "error", role: "alert" }, error.message));
  }
}

dialog.addEventListener("close", () => {
  running?.abort();
  dialog.replaceChildren();
});

// The text with its fields marked.
function plain({ text, spans }) {
  const part = parts(text);
  const found = [];
  let at = 0;
  for (const { start, end, name } of [...spans].sort((a, b) => a.start - b.start)) {
    found.push(part(at, start), el("mark", { title: name }, part(start, end)));
    at = end;
  }
  return [...found, part(at)];
}

function form(skill, question, picture, text) {
  const fields = Object.keys(skill.fields ?? {});
  if (!fields.length) return el("p", { class: "quiet" }, "It has no fields, so there is nothing to probe.");
  const field = el("select", { id: "heat-field" }, ...fields.map((name) => el("option", { value: name }, name)));
  const value = el("input", { id: "heat-value", autocomplete: "off", spellcheck: "false", placeholder: "made up" });
  const asked = el("input", { id: "heat-question", autocomplete: "off", placeholder: "the value of the field", value: question });
  const suggest = () => { value.value = correction(skill.name, field.value) ?? skill.standing?.[field.value] ?? ""; };
  field.value = fields.find((name) => correction(skill.name, name) !== null) ?? fields[0];
  field.addEventListener("change", suggest);
  suggest();
  const go = el("button", { type: "submit", class: "main" }, "Show heat");
  const progress = el("progress", { "aria-label": "Probing", hidden: true });
  const error = el("p", { class: "error", role: "alert" });
  const label = (id, words, input) => el("div", {}, el("label", { for: id }, words), input);
  return el("form", {
    class: "probe",
    on: {
      submit: async (event) => {
        event.preventDefault();
        if (running) { running.abort(); return; }
        error.textContent = "";
        go.textContent = "Stop";
        progress.hidden = false;
        progress.removeAttribute("value");
        running = new AbortController();
        const body = { skill: skill.name, field: field.value, stream: true };
        if (value.value.trim()) body.value = value.value.trim();
        if (asked.value.trim()) body.question = asked.value.trim();
        try {
          const found = await probe(body, progress, running.signal);
          draw(found, picture, text);
        } catch (failed) {
          if (!(failed instanceof ServerError)) throw failed;
          error.textContent = failed.kind === "stopped" ? "" : failed.message;
        } finally {
          running = null;
          go.textContent = "Show heat";
          progress.hidden = true;
        }
      },
    },
  }, label("heat-field", "Field", field), label("heat-value", "Other value", value),
  label("heat-question", "Question", asked), go, progress, error);
}

async function probe(body, progress, signal) {
  let found = null;
  for await (const value of stream("v1/notes/heat", body, signal)) {
    if (value.step) {
      progress.max = value.total;
      progress.value = value.done;
      progress.setAttribute("aria-label", value.step);
    } else found = value.heat;
  }
  if (!found) throw new ServerError("refused", "The server ended without a picture.");
  return found;
}

const number = (value) => (Math.round(value * 100) / 100 + 0).toFixed(2);

function draw(found, picture, text) {
  const top = Math.min(1, Math.max(0.1, ...found.windows.map((one) => one.alone)));
  const part = parts(found.text);
  const shown = [];
  let at = 0;
  for (const one of found.windows) {
    if (one.start < at) continue; // tokens that share a character
    shown.push(part(at, one.start), el("span", {
      class: one.field ? "token changed" : "token",
      title: `${number(one.alone)} alone, ${number(one.suffix)} with all after it`,
      style: { "--heat": String(Math.min(1, Math.max(0, one.alone / top))) },
    }, part(one.start, one.end)));
    at = one.end;
  }
  text.classList.add("hot");
  text.replaceChildren(...shown, part(at));
  const sentence = verdict(found);
  picture.replaceChildren(
    el("p", {}, `${found.question} With ${found.field} ${found.old}: `, el("b", {}, found.decision.stale),
      `; with ${found.new}: `, el("b", {}, found.decision.fresh), "."),
    el("p", {}, sentence),
    numbers(found),
    el("p", { class: "scale" }, el("span", {}, "0"), el("span", { class: "ramp", "aria-hidden": "true" }), el("span", {}, number(top)),
      el("span", { class: "quiet" }, found.window === 1 ? "what each token alone brings of the new decision"
        : `what each ${found.window} tokens alone bring of the new decision`)));
  announce(sentence);
}

function verdict(found) {
  const [own, after] = [found.field_only >= 0.5, found.after_only >= 0.5];
  if (own && after) return "It rests on both: the field's own tokens or those after it would do.";
  if (own) return "It rests on the field's own tokens: the value is looked up when it is asked for.";
  if (after) return "It rests on tokens after the field: what was written there from the old value outweighs the new one.";
  return "It rests on both together: neither the field's own tokens nor those after it would do.";
}

function numbers(found) {
  const best = found.best === null ? null : found.windows[found.best];
  const rows = [
    ["the field's own", found.tokens.field, found.field_only],
    ["all after it", found.tokens.after, found.after_only],
    ...(best ? [[`"${best.text.trim() || best.text.replace(/\n/g, "⏎")}" alone, after it`, best.tokens, best.alone]] : []),
    ["everything from the field on", found.tokens.field + found.tokens.after, found.windows[0]?.suffix ?? 1],
  ];
  return el("table", {},
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "rows of the new text"),
      el("th", { scope: "col", class: "number" }, "tokens"), el("th", { scope: "col", class: "number" }, "recovery"))),
    el("tbody", {}, ...rows.map(([what, tokens, recovery]) => el("tr", {}, el("td", {}, what),
      el("td", { class: "number" }, tokens.toLocaleString("en")), el("td", { class: "number" }, number(recovery))))));
}
