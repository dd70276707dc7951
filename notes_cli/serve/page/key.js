// Asks for an API key when the server requires one.

import { byId } from "./dom.js";
import { key } from "./server.js";

const form = byId("key");
const input = byId("key-input");

// Show the form for a key, with an error if the server refused the last one.
export function askForKey() {
  byId("key-error").textContent = key.get() ? "The server does not accept this key." : "";
  key.set("");
  form.hidden = false;
  input.value = "";
  input.focus();
}

export function onKey(again) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    key.set(input.value.trim());
    form.hidden = true;
    again();
  });
}
