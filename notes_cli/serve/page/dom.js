// Makes DOM elements of tags, attributes and text nodes, never of HTML.

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const press = (words, click, more = {}) => el("button", { type: "button", class: "plain", ...more, on: { click } }, words);

export const byId = (id) => document.getElementById(id);

// Run a job with the browser's storage; return false if the browser refuses, or has no room.
export function allowed(job) {
  try {
    job();
    return true;
  } catch (error) {
    if (error instanceof DOMException) return false;
    throw error;
  }
}

const status = byId("status");

// Announce a sentence to screen readers.
export function announce(sentence) {
  status.textContent = "";
  requestAnimationFrame(() => { status.textContent = sentence; });
}

// Return a function that slices a text by code points, as the server does; strings count in UTF-16.
export function parts(text) {
  const points = Array.from(text);
  return (start, end) => points.slice(start, end).join("");
}

export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

export function milliseconds(ms) {
  if (ms >= 10000) return `${(ms / 1000).toFixed(0)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}
