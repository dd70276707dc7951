// Compiles texts that the user drops on the page or chooses, as skills of the server.

import { byId, count, el, press } from "./dom.js";
import { ServerError, stream } from "./server.js";

const status = byId("adding");

const say = (...parts) => status.replaceChildren(...parts);

// Compile files one after the other; `added` is called with the name of each skill.
export async function addTexts(files, added) {
  for (const file of files) {
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      await compile(nameOf(file, text), text, added);
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // of the decoder
      say(el("span", { class: "error" }, `${file.name} is not a text: it has no UTF-8.`));
    }
  }
}

async function compile(name, text, added, force = false) {
  say(`Reading ${name} …`);
  try {
    for await (const event of stream("v1/notes/compile", { name, text, force })) {
      if (event.skill) {
        say(`${name} is added: ${count(event.skill.tokens, "token")}.`);
        await added(name);
      } else if (event.step === "compiling") say(`Reading ${name}: ${event.done} of ${count(event.total, "token")} …`);
    }
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    const replace = () => compile(name, text, added, true);
    const taken = error.code === "name_taken";
    const words = taken ? `There is another skill called ${name}. ` : `${error.message} `;
    say(el("span", { class: "error" }, words),
      taken ? press("Replace it", replace) : "");
  }
}

// Make the name of a skill: that in the head of a SKILL.md, else the file's.
function nameOf(file, text) {
  const [, own] = (/^skill\.md$/i.test(file.name) && text.match(/^name: *(.+)$/m)) || [];
  const word = own ?? file.name.replace(/(?<=.)\.[^.]*$/, "");
  const name = word.normalize("NFC").toLowerCase().replace(/[^\p{L}\p{N}\p{M}]+/gu, "-").replace(/^[-\p{M}]+|-+$/gu, "");
  return name.slice(0, 64).replace(/-+$/, "") || "text";
}

// Take files that are dropped anywhere on the page, or chosen by the button.
export function onTexts(added) {
  const input = byId("file");
  input.addEventListener("change", async () => {
    await addTexts([...input.files], added);
    input.value = "";
  });
  const files = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", (event) => {
    if (!files(event)) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dropping");
  });
  document.addEventListener("drop", (event) => {
    if (!files(event)) return;
    event.preventDefault();
    document.body.classList.remove("dropping");
    addTexts([...event.dataTransfer.files], added);
  });
}
