// The server behind the page: requests with the key, answers, and errors in plain words.
import { askForKey } from "./key.js";
import { ConnectionBroke, readChoices, readEvents } from "./sse.js";

const STORED_KEY = "radq-key"; // in the session only: closing the tab forgets it
const BUSY = [429, 502, 503, 504]; // states of the server that pass
let asking = null; // one question at a time, however many requests were refused

class ServerError extends Error {}

export async function getInfo() {
  return readJson(await send("radq/info", null, null));
}

export async function scoreText(text, signal) {
  return readJson(await send("radq/score", { text }, signal));
}

// The choices of a streamed answer, as they come.
export async function* streamChoices({ path, body }, signal) {
  const answer = await send(path, body, signal);
  for await (const event of readEvents(answer.body)) {
    if (event.error) throw new ConnectionBroke(event.error.message ?? "The server stopped with an error.");
    yield* readChoices(event);
  }
}

async function send(path, body, signal) {
  for (;;) {
    const answer = await fetchWithKey(path, body, signal);
    if (answer.ok) return answer;
    if (BUSY.includes(answer.status)) throw new ConnectionBroke(await readError(answer));
    if (answer.status !== 401) throw new ServerError(await readError(answer));
    asking ??= askForKey(sessionStorage.getItem(STORED_KEY) !== null).finally(() => (asking = null));
    const key = await asking;
    if (key === null) throw new ServerError("This server needs a key, and none was given.");
    sessionStorage.setItem(STORED_KEY, key);
  }
}

async function fetchWithKey(path, body, signal) {
  const key = sessionStorage.getItem(STORED_KEY);
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  const asked = body === null ? {} : { method: "POST", body: JSON.stringify(body) };
  if (body !== null) headers["Content-Type"] = "application/json";
  try {
    return await fetch(path, { ...asked, headers, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ConnectionBroke("The connection broke: the server cannot be reached. Is it still running?");
  }
}

async function readJson(answer) {
  try {
    return await answer.json();
  } catch (error) {
    throw error.name === "AbortError" ? error : new ConnectionBroke("The connection broke before the answer was complete.");
  }
}

async function readError(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered with status ${answer.status} and without an explanation.`;
  }
}
