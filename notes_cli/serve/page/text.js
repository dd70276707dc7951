// Shows a skill's text in a dialog, with its fields marked.

import { byId, count, el, parts, press } from "./dom.js";
import { ServerError, get } from "./server.js";

const dialog = byId("text");

// Open the dialog with a skill's text.
export async function showText(skill) {
  const text = el("pre", { class: "text", tabindex: "0", "aria-label": "Text of the skill" }, "…");
  dialog.replaceChildren(
    el("header", {}, el("h2", { id: "text-title" }, skill.name, el("span", { class: "quiet" }, ` ${count(skill.tokens, "token")}`)),
      press("Close", () => dialog.close())),
    text);
  if (!dialog.open) dialog.showModal();
  try {
    text.replaceChildren(...marked(await get(`v1/notes/${encodeURIComponent(skill.name)}`)));
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    text.replaceChildren(el("span", { class: "error", role: "alert" }, error.message));
  }
}

dialog.addEventListener("close", () => dialog.replaceChildren());

function marked({ text, spans }) {
  const part = parts(text);
  const found = [];
  let at = 0;
  for (const { start, end, name } of [...spans].sort((a, b) => a.start - b.start)) {
    found.push(part(at, start), el("mark", { title: name }, part(start, end)));
    at = end;
  }
  return [...found, part(at)];
}
