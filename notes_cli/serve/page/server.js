// Sends requests to the server, with the API key, and throws all failures as ServerError.

import { events } from "./sse.js";

const KEY = "notes-key"; // in sessionStorage, which ends with the tab

// `kind`: "key", "busy", "away", "stopped" or "refused"; the message is a sentence for the user.
export class ServerError extends Error {
  constructor(kind, message, { status = 0, wait = 0 } = {}) {
    super(message);
    this.kind = kind;
    this.status = status;
    this.wait = wait; // seconds
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
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
  let message = `The server answered ${status} ${response.statusText}`.trim() + ".";
  try {
    message = (await response.json()).error.message || message;
  } catch { /* not one of its errors: its status is all there is to say */ }
  const wait = Number(response.headers.get("Retry-After")) || 0;
  if (status === 401) return new ServerError("key", message, { status });
  if (status === 429 || status === 503) return new ServerError("busy", message, { status, wait });
  return new ServerError("refused", message, { status });
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
      if (value.error) throw new ServerError("refused", value.error.message ?? "The server failed.");
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
