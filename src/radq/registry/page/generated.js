// One generated text: its tokens, and the branches that take the place of its end.
import { continuedRequest } from "./request.js";
import { forcedDetail, summarise } from "./statistics.js";
import { createTokenText } from "./token_text.js";
import { asBegun, isPart } from "./visible.js";

const ENDS = { stop: "finished", length: "length limit reached", error: "stopped by an error", stopped: "stopped" };

// onBranch: (sent request) => void starts the request whose choices come back by `take`.
export function createGenerated({ label, inspector, onBranch }) {
  const branchAt = (index) => (canBranch(index) ? (candidate) => branch(index, candidate) : null);
  const tokens = createTokenText(label, inspector.listener(branchAt));
  let request = null; // as it was asked for
  let promptIds = null;
  let earlier = []; // texts before branches, the latest last
  let finish = null;
  let note = "";

  const canBranch = (index) =>
    promptIds !== null && tokens.details.slice(0, index + 1).every((detail) => detail.id !== null);

  function branch(index, candidate) {
    const { body } = request;
    const forced = asBegun(forcedDetail(tokens.details[index], candidate, body.temperature));
    const whole = tokens.details.slice(0, index).findLastIndex((detail) => !isPart(detail)) + 1;
    const parts = tokens.details.slice(whole, index).map(asBegun);
    earlier.push([...tokens.details]);
    tokens.cut(whole);
    for (const detail of [...parts, forced]) tokens.append(detail);
    tokens.focus(index);
    inspector.close(false);
    const ids = [...promptIds, ...tokens.details.map((detail) => detail.id)];
    onBranch(continuedRequest(request, ids, Math.max(body.max_tokens - index - 1, 1)), () => {
      tokens.cut(index + 1); // of what came before the connection broke
      finish = "stopped";
    });
  }

  return {
    element: tokens.element,
    details: tokens.details,
    begin(plain) {
      request = plain;
      promptIds = null;
      earlier = [];
      finish = "stopped";
      note = "";
      tokens.begin(plain.body.prompt ?? "");
    },
    take(choice) {
      promptIds ??= choice.promptIds;
      note = "";
      for (const detail of choice.details) tokens.append(detail);
      finish = choice.finish ?? finish;
    },
    undo() {
      tokens.cut(0);
      for (const detail of earlier.pop()) tokens.append(detail);
      note = ", before the branch";
      if (earlier.length === 0) tokens.focus(0);
    },
    get status() {
      const { tokens: count } = summarise(tokens.details);
      return `${count} ${count === 1 ? "token" : "tokens"}${note || `, ${ENDS[finish] ?? finish}`}`;
    },
    get branched() {
      return earlier.length > 0;
    },
    text: tokens.text,
    summary: () => summarise(tokens.details),
    colourBy: tokens.colourBy,
  };
}
