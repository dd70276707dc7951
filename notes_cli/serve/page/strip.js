// Draws a prompt as a strip: its pieces by their tokens and the origin of their K/V, with a legend and the numbers.

import { count, el, milliseconds } from "./dom.js";

// Origins of a piece's K/V, in the order of the legend.
const KINDS = {
  kept: "reused from an earlier prompt that begins alike",
  restored: "reused at the place where it was compiled",
  rotated: "reused, keys rotated to their new place",
  seam: "recomputed, where a skill begins",
  erratum: "decoded: a correction",
  decoded: "decoded",
};

export function kindOf(piece) {
  if (piece.how === "seam") return "seam";
  if (piece.how === "live") return "kept";
  if (piece.how === "spliced") return piece.moved ? "rotated" : "restored";
  return piece.kind === "erratum" ? "erratum" : "decoded";
}

const sum = (pieces) => pieces.reduce((total, piece) => total + piece.tokens, 0);

// Count the tokens of the prompt, and those that were computed and reused.
export function cost(pieces) {
  const total = sum(pieces);
  const computed = total - sum(pieces.filter(reusedRows)) + rewritten(pieces);
  return { total, computed, reused: total - computed };
}

const reusedRows = (piece) => ["spliced", "live"].includes(piece.how);

const rewritten = (pieces) => pieces.filter(reusedRows).reduce((n, p) => n + (p.rewritten ?? 0), 0);

const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part < whole / 100 ? 1 : 0)}%` : "0%");

// Make the strip of a prompt; `ms`: its prefill time from the server.
export function strip(pieces, { ms = null } = {}) {
  const shown = pieces.filter((piece) => piece.tokens > 0);
  const { total, computed, reused } = cost(shown);
  const took = ms === null ? "" : ` in ${milliseconds(ms)}`;
  const sentence = `${count(computed, "token")} decoded${took}, ${reused.toLocaleString("en")} reused`;
  return el("div", { class: "strip" },
    el("p", { class: "cost" }, el("b", {}, computed.toLocaleString("en")), ` of ${count(total, "token")} decoded${took}`,
      el("span", { class: "quiet" }, ` · ${reused.toLocaleString("en")} reused`)),
    el("div", { class: "bar", role: "img", "aria-label": `The prompt: ${sentence}` },
      ...shown.map((piece) => el("span", {
        class: kindOf(piece),
        title: `${named(piece)}: ${count(piece.tokens, "token")}, ${kindOf(piece)}`,
        style: { "flex-grow": String(piece.tokens) },
      }))),
    el("details", { class: "numbers" },
      el("summary", {}, legend(shown), el("span", { class: "more" }, "numbers")),
      prefill(computed, total, ms),
      table(shown)));
}

function legend(pieces) {
  const list = el("span", { class: "legend" });
  for (const kind of Object.keys(KINDS)) {
    const tokens = sum(pieces.filter((piece) => kindOf(piece) === kind));
    if (!tokens) continue;
    const name = kind === "erratum" ? "correction" : kind;
    list.append(el("span", { class: "key-of", title: KINDS[kind] },
      el("i", { class: kind, "aria-hidden": "true" }), `${name} ${tokens.toLocaleString("en")}`));
  }
  return list;
}

// Draw the decoded tokens in proportion to a prefill of the whole prompt.
function prefill(computed, total, ms) {
  const row = (name, tokens, note) => [
    el("dt", {}, name),
    el("dd", {},
      el("span", { class: name === "full prefill" ? "length whole" : "length", style: { "--share": String(total ? tokens / total : 0) }, "aria-hidden": "true" }),
      el("span", {}, `${count(tokens, "token")}${note}`)),
  ];
  return el("dl", { class: "beside" },
    ...row("this prompt", computed, `, ${share(computed, total)}${ms === null ? "" : `, ${milliseconds(ms)}`}`),
    ...row("full prefill", total, ""));
}

const named = (piece) => (piece.kind === "splice" ? "skill" : piece.kind) + (piece.name ? ` ${piece.name}` : "");

function table(pieces) {
  const right = { class: "number" };
  const head = ["position", "tokens", "piece", "how", "why"];
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Pieces of the prompt" }, el("table", {},
    el("thead", {}, el("tr", {}, ...head.map((name, i) => el("th", { scope: "col", ...(i < 2 ? right : {}) }, name)))),
    el("tbody", {}, ...pieces.map((piece) => el("tr", {},
      el("td", right, piece.position.toLocaleString("en")),
      el("td", right, piece.tokens.toLocaleString("en")),
      el("td", {}, named(piece)),
      el("td", {}, el("i", { class: kindOf(piece), "aria-hidden": "true" }), kindOf(piece) === "erratum" ? "decoded" : kindOf(piece)),
      el("td", { class: "quiet" }, piece.why || ""))))));
}
