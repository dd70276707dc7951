// Renders Markdown as DOM elements: paragraphs, headings, lists, tables, quotes, code, bold, italic. Links, HTML stay text.

import { el } from "./dom.js";

const FENCE = /^\s*(`{3,}|~{3,})/;
const HEADING = /^ {0,3}#{1,6}\s+(.*?)\s*#*$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const COLUMNS = /^\|?\s*(:?-+:?\s*\|\s*)+(:?-+:?)?$/; // below the head of a table
const DEEPEST = 8; // quotes in quotes
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
// Code, bold, italic with * or _ between words, and a link; bounded, so that a long text without ends takes no time.
const INLINE = /(`+)(.+?)\1(?!`)|(\*\*|__)(?=\S)(.{1,400}?)(?<=\S)\3|(?<![\w*])\*(?=[^\s*])(.{1,400}?)(?<=[^\s*])\*(?![\w*])|(?<!\w)_(?=[^\s_])(.{1,400}?)(?<=[^\s_])_(?!\w)|\[([^\]\n]{1,400})\]\(([^)\s]{1,400})\)/gs;

// Return the elements of a text, which is in that many quotes.
export function markdown(text, quotes = 0) {
  const lines = text.split("\n");
  const found = [];
  const quoted = (at) => quotes < DEEPEST && QUOTE.test(lines[at]);
  const table = (at) => lines[at].includes("|") && COLUMNS.test((lines[at + 1] ?? "").trim());
  const inside = (at) => lines[at].trim() && !quoted(at) && !table(at) && ![FENCE, HEADING, RULE, ITEM].some((one) => one.test(lines[at]));
  // Return the number of the first line from `at` on that is of another kind.
  const until = (at, kind) => {
    while (at < lines.length && kind(at)) at += 1;
    return at;
  };
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    const [, fence] = line.match(FENCE) ?? [];
    const [, heading] = line.match(HEADING) ?? [];
    if (fence) {
      const end = lines.findIndex((other, i) => i > at && other.trim().startsWith(fence));
      const last = end < 0 ? lines.length : end; // it is still being written
      found.push(el("pre", { tabindex: "0" }, el("code", {}, lines.slice(at + 1, last).join("\n"))));
      at = last + 1;
    } else if (heading !== undefined) {
      found.push(el("h4", {}, ...inline(heading)));
      at += 1;
    } else if (RULE.test(line)) {
      found.push(el("hr"));
      at += 1;
    } else if (ITEM.test(line)) {
      const { node, next } = list(lines, at);
      found.push(node);
      at = next;
    } else if (quoted(at)) {
      const end = until(at, quoted);
      const text = lines.slice(at, end).map((one) => one.replace(QUOTE, "")).join("\n");
      found.push(el("blockquote", {}, ...markdown(text, quotes + 1)));
      at = end;
    } else if (table(at)) {
      const end = until(at + 2, (row) => lines[row].includes("|"));
      found.push(tableOf(line, lines.slice(at + 2, end)));
      at = end;
    } else {
      const end = until(at + 1, inside);
      if (line.trim()) found.push(el("p", {}, ...inline(lines.slice(at, end).join("\n"))));
      at = line.trim() ? end : at + 1;
    }
  }
  return found;
}

function tableOf(head, rows) {
  const row = (line, tag, how = {}) => el("tr", {}, ...line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => el(tag, how, ...inline(cell.replaceAll("\\|", "|").trim()))));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, el("table", {},
    el("thead", {}, row(head, "th", { scope: "col" })), el("tbody", {}, ...rows.map((line) => row(line, "td")))));
}

// Make the list that begins in a line, with the lists inside of it; `next`: the line after it.
function list(lines, at) {
  const [, indent, mark] = lines[at].match(ITEM);
  const ordered = /\d/.test(mark);
  const items = [];
  for (; at < lines.length; at += 1) {
    const item = lines[at].match(ITEM);
    const deeper = item && item[1].length > indent.length && items.length;
    if (deeper) {
      const { node, next } = list(lines, at);
      items.at(-1).append(node);
      at = next - 1;
    } else if (item && item[1].length >= indent.length && /\d/.test(item[2]) === ordered) {
      items.push(el("li", {}, ...inline(item[3])));
    } else if (!item && items.length && /^\s+\S/.test(lines[at])) {
      items.at(-1).append("\n", ...inline(lines[at].trim()));
    } else if (lines[at].trim() || !ITEM.test(lines[at + 1] ?? "")) break; // a blank line may be between items
  }
  return { node: el(ordered ? "ol" : "ul", ordered ? { start: String(Number.parseInt(mark, 10)) } : {}, ...items), next: at };
}

// Return the nodes of a line or paragraph.
function inline(text) {
  const found = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const [all, , code, , bold, starred, underlined, label, address] = match;
    found.push(text.slice(at, match.index));
    if (code !== undefined) found.push(el("code", {}, code.trim() || code));
    else if (bold !== undefined) found.push(el("strong", {}, ...inline(bold)));
    else if (label !== undefined) found.push(...inline(label), ` (${address})`);
    else found.push(el("em", {}, ...inline(starred ?? underlined)));
    at = match.index + all.length;
  }
  return [...found, text.slice(at)];
}
