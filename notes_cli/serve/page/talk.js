// Runs the conversation: sends questions, streams answers, and shows each turn with its cost or error.

import { announce, byId, count, el, press } from "./dom.js";
import { markdown } from "./markdown.js";
import { ServerError, stream } from "./server.js";
import { cost, strip } from "./strip.js";

// Those of this conversation, also with partial answers and without one:
// { question, model, system, splice, errata, news, thoughts, answer, note, speed, report }.
export const turns = [];
let running = null;

export const busy = () => running !== null;

export const stop = () => running?.abort();

// Remove the turns from this one on.
export function goBack(at) {
  turns.splice(at);
  for (const node of [...byId("turns").children].slice(at)) node.remove();
}

// Show a conversation in place of this one.
export function show(found) {
  goBack(0);
  for (const turn of found) add(turn).end();
}

function add(turn) {
  const view = turnView(turn);
  turns.push(turn);
  byId("turns").append(view.node);
  return view;
}

// Ask a question, with the model of /v1/models, the sampling, and what else is sent and kept with the turn.
export async function ask(question, { model, sampling, ...setting }) {
  const { system, splice, errata } = setting;
  const body = {
    ...sampling,
    model: model.id ?? "",
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history(), { role: "user", content: question }],
    stream: true,
    stream_options: { include_usage: true },
    notes: { splice, errata, explain: true },
  };
  const turn = { question, model: model.id ?? "", ...setting, thoughts: "", answer: "" };
  const view = add(turn);
  const began = performance.now();
  running = new AbortController();
  document.dispatchEvent(new CustomEvent("busy"));
  let cut = false;
  let used = {};
  try {
    for await (const chunk of stream("v1/chat/completions", body, running.signal)) {
      const [choice] = chunk.choices ?? [];
      turn.thoughts += choice?.delta?.reasoning_content ?? "";
      turn.answer += choice?.delta?.content ?? "";
      if (choice?.delta) view.write();
      if (choice?.finish_reason === "length") cut = true;
      used = chunk.usage ?? used;
      if (chunk.notes?.pieces) turn.report = chunk.notes;
    }
    turn.speed = speed(used.completion_tokens, performance.now() - began - turn.report?.ms?.prompt);
    if (cut) turn.note = whyCut(used, model.max_model_len, sampling.max_tokens);
    view.end();
    announce(`Answer: ${turn.answer.trim()}${turn.report ? `. ${sentence(turn.report.pieces)}` : ""}`);
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    if (error.kind === "stopped") turn.note = "Stopped.";
    view.end(error.kind === "stopped" ? null : error);
  } finally {
    running = null;
    document.dispatchEvent(new CustomEvent("busy"));
  }
}

// Format the speed of an answer, without the time of its prompt.
const speed = (tokens, ms) => (ms > 0 ? `${count(tokens, "token")}, ${((1000 * tokens) / ms).toFixed(1)} per second` : "");

function whyCut({ completion_tokens: tokens = 0, total_tokens: total = 0 }, longest, most) {
  if (longest && total >= longest - 1) return `The answer was cut: the conversation fills the ${count(longest, "token")} that the model can read. Begin a new one.`;
  if (most && tokens >= most) return `The answer was cut after ${count(tokens, "token")}, your longest answer. Allow more under “Longest answer”.`;
  return `The answer was cut after ${count(tokens, "token")}: the server allows no longer ones.`;
}

const history = () => turns.filter((turn) => turn.answer.trim()).flatMap((turn) => [
  { role: "user", content: turn.question },
  { role: "assistant", content: turn.answer.trim() },
]);

function sentence(pieces) {
  const { total, computed } = cost(pieces);
  return `${computed} of ${count(total, "token")} of the prompt decoded`;
}

// Make the element of a turn, with functions that show more of the turn, and its end.
function turnView(turn) {
  const correction = turn.news.length ? el("p", { class: "correction" }, `Corrected: ${turn.news.map(spaced).join(", ")}`) : null;
  const thought = el("p");
  const thoughts = el("details", { class: "thoughts", hidden: true }, el("summary", {}, "Reasoning"), thought);
  const reply = el("div", { class: "answer running", "aria-busy": "true" });
  const after = el("div", { class: "after" });
  const node = el("article", { class: "turn" }, correction,
    el("div", { class: "question" }, el("p", { class: "who" }, "You"), el("h3", {}, turn.question)),
    el("p", { class: "who" }, turn.model), thoughts, reply, after);
  let drawing = 0;
  const draw = () => {
    cancelAnimationFrame(drawing);
    drawing = 0;
    thoughts.hidden = !turn.thoughts;
    thought.textContent = turn.thoughts;
    reply.replaceChildren(...markdown(turn.answer.trim()));
  };
  const near = () => window.innerHeight + window.scrollY > document.documentElement.scrollHeight - 120;
  const follow = (change) => {
    const stays = near();
    change();
    if (stays) window.scrollTo(0, document.documentElement.scrollHeight);
  };
  requestAnimationFrame(() => window.scrollTo(0, document.documentElement.scrollHeight));
  return {
    node,
    write: () => { drawing ||= requestAnimationFrame(() => follow(draw)); },
    end: (error = null) => follow(() => {
      draw();
      reply.classList.remove("running");
      reply.removeAttribute("aria-busy");
      reply.hidden = !turn.answer.trim();
      if (error) after.append(failure(error));
      if (turn.note) after.append(el("p", { class: "quiet" }, turn.note));
      after.append(actions(turn, node));
      if (turn.report) {
        after.append(
          ...(turn.report.notices ?? []).map((notice) => el("p", { class: "quiet" }, notice)),
          strip(turn.report.pieces, { ms: turn.report.ms?.prompt ?? null }));
      }
    }),
  };
}

function failure(error) {
  const wait = error.wait ? ` Try again in ${count(error.wait, "second")}.` : "";
  return el("p", { class: "error", role: "alert", title: error.detail || null }, error.message.replace(/\w$/, "$&.") + wait);
}

// Make the buttons of a turn: to copy its answer, to change its question, and, in the last turn, to ask it again.
function actions(turn, node) {
  const again = (question) => document.dispatchEvent(new CustomEvent("again", { detail: { question, at: turns.indexOf(turn) } }));
  const copy = press("Copy", async () => {
    if (!await copied(turn.answer.trim(), node.querySelector(".answer"))) return;
    announce("The answer is copied.");
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 2000);
  });
  const change = press("Edit", () => {
    const asked = node.querySelector(".question");
    const words = el("textarea", { "aria-label": "The question, edited", rows: "3", required: true }, turn.question);
    const cancel = () => {
      form.replaceWith(asked);
      change.hidden = false;
      change.focus();
    };
    const form = el("form", { class: "edit", on: {
      submit: (event) => {
        event.preventDefault();
        again(words.value.trim());
      },
      keydown: (event) => { if (event.key === "Escape") cancel(); },
    } }, words, el("div", { class: "row" }, el("button", { type: "submit", class: "main" }, "Ask"), press("Cancel", cancel)));
    asked.replaceWith(form);
    change.hidden = true;
    words.focus();
  });
  const repeat = press(turn.answer.trim() ? "Regenerate" : "Ask again", () => again(turn.question),
    { class: "plain again", title: "At temperature 0, the same question has the same answer" });
  return el("p", { class: "actions quiet" }, turn.answer.trim() ? copy : null, change, repeat, turn.speed ? el("span", {}, turn.speed) : null);
}

// Copy a text, or the element that shows it, where the browser offers no more; return true if it is done.
async function copied(text, node) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // the page is neither on this machine nor has it https
    document.getSelection().selectAllChildren(node);
    return document.execCommand("copy");
  }
}

// Format "returns.date=2026-07-01" for the user.
export const spaced = (erratum) => erratum.replace("=", " = ");
