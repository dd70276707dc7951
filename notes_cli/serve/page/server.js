// Sends requests to the server, with the API key, and throws all failures as ServerError.

import { allowed } from "./dom.js";
import { events } from "./sse.js";

const KEY = "notes-key"; // in sessionStorage, which ends with the tab

// `kind`: "key", "busy", "away", "stopped" or "refused"; the message is a sentence for the user.
export class ServerError extends Error {
  constructor(kind, message, { code = "", wait = 0, detail = "" } = {}) {
    super(message);
    this.kind = kind;
    this.code = code; // of the API
    this.wait = wait; // seconds
    this.detail = detail; // the server's own words
  }
}

// Sentences for codes of the API.
const WORDS = {
  context_length_exceeded: "That is more than this model can read at once. Shorten the question or the system text, pick fewer skills, or begin a new conversation.",
  draining: "The server is about to end, and takes no new questions.",
  engine_error: "The server could not compute the answer.",
  failed: "The server has stopped working, and must be started again.",
  loading: "The server is still loading its model.",
  no_room: "The server is busy with other answers.",
  queue_full: "Too many questions are waiting.",
  shutting_down: "The server has ended.",
  skill_not_found: "A skill that you picked is no longer on the server. Reload this page.",
  too_large: "That is too large for this server.",
  unwritable: "The server cannot write to its library.",
};

const worded = ({ code, message }) => WORDS[code] ?? message;

let held = "";
allowed(() => { held = sessionStorage.getItem(KEY) ?? ""; });

export const key = {
  get: () => held,
  set: (value) => {
    held = value;
    allowed(() => sessionStorage.setItem(KEY, value));
  },
};

const listeners = new Set();

// Call `listener` after each request, with its error or null.
export function onContact(listener) {
  listeners.add(listener);
}

const tell = (error) => listeners.forEach((listener) => listener(error));

async function send(path, { body, signal, method } = {}) {
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    throw gone(error, signal, "The server does not answer.");
  }
  if (response.ok) {
    tell(null);
    return response;
  }
  const error = await refusal(response);
  tell(error);
  throw error;
}

async function refusal(response) {
  const { status } = response;
  let found = { message: `The server answered ${status} ${response.statusText}`.trim() + "." };
  try {
    found = { ...found, ...(await response.json()).error };
  } catch { /* not one of its errors: its status is all there is to say */ }
  const kind = status === 401 ? "key" : status === 429 || status === 503 ? "busy" : "refused";
  const wait = Number(response.headers.get("Retry-After")) || 0;
  return new ServerError(kind, worded(found), { code: found.code, wait, detail: found.message });
}

function gone(error, signal, message) {
  if (signal?.aborted) return new ServerError("stopped", "Stopped.");
  if (!(error instanceof TypeError)) return error; // an error of the page, not of the network
  const found = new ServerError("away", message);
  tell(found);
  return found;
}

export async function get(path) {
  return (await send(path)).json();
}

export async function post(path, body, signal) {
  return (await send(path, { body, signal })).json();
}

// Yield the values of a streamed answer. An error event in the stream is thrown.
export async function* stream(path, body, signal) {
  const response = await send(path, { body, signal });
  try {
    for await (const value of events(response)) {
      if (value.error) {
        const { code, message = "The server failed." } = value.error;
        throw new ServerError("refused", worded({ code, message }), { code, detail: message });
      }
      yield value;
    }
  } catch (error) {
    if (error instanceof ServerError) throw error;
    if (error instanceof SyntaxError) throw new ServerError("refused", "The server sent what is not JSON.");
    throw gone(error, signal, "The server went away while it answered.");
  }
}

// Return the status from /health: "ok", "loading" or "draining"; "away" without an answer.
export async function health() {
  try {
    const response = await fetch("health", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    const found = (await response.json()).status;
    return ["ok", "loading", "draining"].includes(found) ? found : response.ok ? "ok" : "away";
  } catch {
    return "away";
  }
}
