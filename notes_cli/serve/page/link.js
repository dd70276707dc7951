// Polls the server's health, and shows it as a dot in the header and a banner while it is down.

import { announce, byId } from "./dom.js";
import { health, onContact } from "./server.js";

const CALM = 15000; // milliseconds between two polls while the server is up
const LOST = 2000; // and while it is down
const WORDS = {
  ok: ["connected", ""],
  loading: ["loading", "The server is loading its model. This page goes on when it is ready."],
  draining: ["shutting down", "The server is shutting down: it takes no new questions."],
  away: ["offline", "The server does not answer. What you wrote stays here; this page looks for it every two seconds."],
};

let state = "";
let timer = 0;

// Poll the server; `back` is called whenever it comes up.
export function watch(back) {
  const look = async () => {
    clearTimeout(timer);
    const found = await health();
    show(found, back);
    clearTimeout(timer);
    timer = setTimeout(look, found === "ok" ? CALM : LOST);
  };
  onContact((error) => {
    if (error?.kind === "away") look();
  });
  document.addEventListener("visibilitychange", () => document.hidden || look());
  window.addEventListener("online", look);
  window.addEventListener("offline", look);
  look();
}

function show(found, back) {
  if (found === state) return;
  const before = state;
  state = found;
  const [word, sentence] = WORDS[found];
  byId("link").dataset.state = found;
  byId("link-text").textContent = word;
  const banner = byId("banner");
  banner.textContent = sentence;
  banner.hidden = !sentence;
  if (found !== "ok") return;
  if (before) announce("The server is there again.");
  back();
}
