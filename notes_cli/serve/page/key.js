// The entry of an API key, shown when the server wants one.

import { byId } from "./dom.js";
import { key } from "./server.js";

const form = byId("key");
const input = byId("key-input");

// Ask for a key; `error` says that the server does not know the one it was given.
export function askForKey() {
  byId("key-error").textContent = key.get() ? "The server does not accept this key." : "";
  key.forget();
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
