// Server-sent events, as the server streams them.

export const DONE = "[DONE]";

// The server is gone, or is too busy: the same request may succeed later.
export class ConnectionBroke extends Error {}

// A parser that takes pieces of a stream, cut anywhere, and returns the data of each event that is complete.
export function createParser() {
  let rest = "";
  let lines = [];
  return function feed(piece) {
    const events = [];
    rest += piece;
    // A carriage return at the end may be the first half of a line end.
    const usable = rest.endsWith("\r") ? rest.length - 1 : rest.length;
    const parts = rest.slice(0, usable).split(/\r\n|\n|\r/);
    rest = parts.pop() + rest.slice(usable);
    for (const line of parts) {
      if (line.startsWith("data:")) lines.push(line.slice(line.startsWith("data: ") ? 6 : 5));
      else if (line === "" && lines.length) {
        events.push(lines.join("\n"));
        lines = [];
      }
    }
    return events;
  };
}

// All events of a response's body. The last one must be [DONE]: a stream that ends before has broken off.
export async function* readEvents(body) {
  const feed = createParser();
  const reader = body.getReader();
  const decoder = new TextDecoder();
  for (;;) {
    const { value, done } = await read(reader);
    for (const data of feed(done ? `${decoder.decode()}\n\n` : decoder.decode(value, { stream: true }))) {
      if (data === DONE) return;
      yield JSON.parse(data);
    }
    if (done) throw new ConnectionBroke(BROKE);
  }
}

const BROKE = "The connection broke before the text was complete.";

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    throw error.name === "AbortError" ? error : new ConnectionBroke(BROKE);
  }
}

// One event as { index, details, promptIds, finish } for each of its texts, for completions and chats alike.
export function readChoices(event) {
  return (event.choices ?? []).map((choice) => {
    const text = choice.text ?? choice.delta?.content ?? "";
    const logprobs = choice.logprobs;
    const details = (logprobs?.radq ?? logprobs?.content?.map((entry) => entry.radq) ?? []).filter(Boolean);
    // The end of a text may have been held back, and comes without a token.
    const rest = text.slice(details.map((detail) => detail.piece).join("").length);
    if (rest !== "") details.push({ id: null, token: rest, piece: rest, rewards: {}, candidates: [] });
    return {
      index: choice.index,
      details,
      promptIds: choice.prompt_token_ids ?? event.prompt_token_ids ?? null,
      finish: choice.finish_reason ?? null,
    };
  });
}
