// Runs the conversation: sends a question, streams its answer, and shows its cost or error, one element per turn.

import { announce, byId, count, el } from "./dom.js";
import { markdown } from "./markdown.js";
import { ServerError, stream } from "./server.js";
import { cost, strip } from "./strip.js";

const turns = []; // { question, answer }, also of partial answers
let running = null;

export const busy = () => running !== null;

export const stop = () => running?.abort();

export function clear() {
  stop();
  turns.length = 0;
  byId("turns").replaceChildren();
}

// Ask a question. `setting` returns the current { model, system, sampling, splice, errata, news }; `report` is called
// with the errata once the model has read them.
export async function ask(question, setting, report) {
  const view = turnView(question, setting().model.id);
  byId("turns").append(view.node);
  const again = () => {
    if (busy()) return;
    view.node.remove();
    ask(question, setting, report);
  };
  await answer(question, setting(), view, again, report);
}

async function answer(question, { model, system, sampling, splice, errata, news }, view, again, whenStated) {
  running = new AbortController();
  document.dispatchEvent(new CustomEvent("busy"));
  const body = {
    ...sampling,
    model: model.id ?? "",
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history(), { role: "user", content: question }],
    stream: true,
    stream_options: { include_usage: true },
    notes: { splice, errata, explain: true },
  };
  if (news.length) view.corrected(news);
  let cut = false;
  let used = {};
  let report = null;
  try {
    for await (const chunk of stream("v1/chat/completions", body, running.signal)) {
      const [choice] = chunk.choices ?? [];
      if (choice?.delta?.reasoning_content) view.thought(choice.delta.reasoning_content);
      if (choice?.delta?.content) view.write(choice.delta.content);
      if (choice?.finish_reason === "length") cut = true;
      used = chunk.usage ?? used;
      if (chunk.notes?.pieces) report = chunk.notes;
    }
    view.end(cut ? whyCut(used, model.max_model_len, sampling.max_tokens) : "");
    whenStated(errata);
    if (report) view.cost(report);
    announce(`Answer: ${view.text()}${report ? `. ${sentence(report.pieces)}` : ""}`);
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    view.end("");
    const change = () => {
      view.node.remove();
      document.dispatchEvent(new CustomEvent("change-question", { detail: question }));
    };
    if (error.kind === "stopped") view.note("Stopped.", press("Ask again", again));
    else view.error(error, error.kind === "refused" ? press("Change the question", change) : press("Ask again", again));
  } finally {
    running = null;
    if (view.text()) turns.push({ question, answer: view.text() });
    document.dispatchEvent(new CustomEvent("busy"));
  }
}

function whyCut({ completion_tokens: tokens = 0, total_tokens: total = 0 }, longest, most) {
  if (longest && total >= longest - 1) return `The answer was cut: the conversation fills the ${count(longest, "token")} that the model can read. Begin a new one.`;
  if (most && tokens >= most) return `The answer was cut after ${count(tokens, "token")}, your longest answer. Allow more under “Longest answer”.`;
  return `The answer was cut after ${count(tokens, "token")}: the server allows no longer ones.`;
}

const history = () => turns.flatMap((turn) => [
  { role: "user", content: turn.question },
  { role: "assistant", content: turn.answer },
]);

function sentence(pieces) {
  const { total, computed } = cost(pieces);
  return `${computed} of ${count(total, "token")} of the prompt decoded`;
}

// Make the element of a turn, with functions to update it.
function turnView(question, model) {
  const correction = el("p", { class: "correction", hidden: true });
  const thoughts = el("details", { class: "thoughts", hidden: true }, el("summary", {}, "Reasoning"));
  const thought = thoughts.appendChild(el("p", {})).appendChild(new Text());
  const reply = el("div", { class: "answer running", "aria-busy": "true" });
  const after = el("div", { class: "after" });
  const node = el("article", { class: "turn" }, correction,
    el("div", { class: "question" }, el("p", { class: "who" }, "You"), el("h3", {}, question)),
    el("p", { class: "who" }, model), thoughts, reply, after);
  let words = "";
  let drawing = 0;
  const draw = () => {
    cancelAnimationFrame(drawing);
    drawing = 0;
    reply.replaceChildren(...markdown(words.trim()));
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
    text: () => words.trim(),
    corrected: (errata) => { correction.hidden = false; correction.textContent = `Corrected: ${errata.map(spaced).join(", ")}`; },
    thought: (more) => follow(() => { thoughts.hidden = false; thought.appendData(more); }),
    write: (more) => {
      words += more;
      drawing ||= requestAnimationFrame(() => follow(draw));
    },
    end: (note) => follow(() => {
      draw();
      reply.classList.remove("running");
      reply.removeAttribute("aria-busy");
      if (!words.trim()) reply.hidden = true;
      if (note) after.append(el("p", { class: "quiet" }, note));
    }),
    note: (sentence, button) => follow(() => after.append(el("p", { class: "quiet" }, sentence, " ", button))),
    error: (error, button) => follow(() => {
      const wait = error.wait ? ` Try again in ${count(error.wait, "second")}.` : "";
      after.append(el("p", { class: "error", role: "alert", title: error.detail || null }, error.message.replace(/\w$/, "$&.") + wait, " ", button));
    }),
    cost: (report) => follow(() => after.append(
      ...(report.notices ?? []).map((notice) => el("p", { class: "quiet" }, notice)),
      strip(report.pieces, { ms: report.ms?.prompt ?? null }))),
  };
}

// Format "returns.date=2026-07-01" for the user.
export const spaced = (erratum) => erratum.replace("=", " = ");

const press = (words, click) => el("button", { type: "button", class: "plain", on: { click } }, words);
