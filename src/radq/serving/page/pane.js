// One text of the comparison: it streams, shows its numbers, and branches.
import { announce, make } from "./dom.js";
import { fillMeters, rewardMeters } from "./meters.js";
import { formatNumber, formatStrength } from "./numbers.js";
import { continuedRequest, detailedRequest } from "./request.js";
import { streamChoices } from "./server.js";
import { forcedDetail, summarise, tokensPerSecond } from "./statistics.js";
import { createTokenText } from "./token_text.js";

const ENDS = { stop: "finished", length: "length limit reached", error: "stopped by an error", stopped: "stopped" };

// run: (work) => void, which gives a signal to the work, and shows its errors.
export function createPane({ title, hint, invitation, kind, attributes, inspector, run, onChat }) {
  const branchAt = (index) => (canBranch(index) ? (candidate) => branch(index, candidate) : null);
  const tokens = createTokenText(`${title} text`, inspector.listener(branchAt));
  const numbers = make("dl", { class: "numbers" });
  const status = make("p", { class: "status soft" });
  const undo = make(
    "button",
    { type: "button", class: "link", hidden: true, on: { click: undoBranch } },
    "Undo the branch",
  );
  const reply = make(
    "button",
    { type: "button", class: "link", hidden: true, on: { click: () => onChat(tokens.text()) } },
    "Reply to this answer",
  );
  const subtitle = make("span", { class: "soft" }, hint);
  const heading = make("h2", {}, title, " ", subtitle);
  const empty = make("p", { class: "invitation soft" }, invitation);
  const foot = make("div", { class: "pane-foot" }, status, undo, reply);
  const element = make(
    "section",
    { class: `pane ${kind}`, "aria-label": title },
    heading,
    numbers,
    empty,
    tokens.element,
    foot,
  );

  let request = null; // as it was sent
  let promptIds = null;
  let earlier = []; // texts before branches, the latest last
  let times = [];
  let painted = false;

  const canBranch = (index) =>
    promptIds !== null && tokens.details.slice(0, index + 1).every((detail) => detail.id !== null);

  function updateSoon() {
    if (painted) return;
    painted = true;
    requestAnimationFrame(() => {
      painted = false;
      update();
    });
  }

  function update() {
    const summary = summarise(tokens.details);
    fillMeters(numbers, {
      ...rewardMeters(summary.rewards, attributes),
      perplexity: formatNumber(summary.perplexity, 1),
      KL: formatNumber(summary.kl),
      "tokens/s": formatNumber(tokensPerSecond(times.length, times[0], times.at(-1)), 1),
    });
  }

  async function stream(sent, signal) {
    element.classList.add("streaming");
    status.textContent = "";
    times = [];
    let finish = "stopped";
    try {
      for await (const choice of streamChoices(sent, signal)) {
        if (promptIds === null && choice.promptIds) promptIds = choice.promptIds;
        for (const detail of choice.details) {
          if (detail.id !== null) times.push(performance.now());
          tokens.append(detail);
        }
        finish = choice.finish ?? finish;
        updateSoon();
      }
    } finally {
      element.classList.remove("streaming");
      const count = summarise(tokens.details).tokens;
      status.textContent = `${count} ${count === 1 ? "token" : "tokens"}, ${ENDS[finish] ?? finish}`;
      reply.hidden = !(request.path.includes("chat") && count);
      update();
    }
  }

  function begin(plain) {
    request = plain;
    promptIds = null;
    earlier = [];
    undo.hidden = reply.hidden = true;
    tokens.begin(plain.body.prompt ?? "");
    subtitle.textContent = describeSteering(plain.body.radq) || hint;
    element.classList.add("filled");
    update();
  }

  function branch(index, candidate) {
    const { body } = request;
    const kept = tokens.details.slice(0, index);
    const forced = forcedDetail(tokens.details[index], candidate, body.temperature);
    earlier.push([...tokens.details]);
    tokens.cut(index);
    tokens.append(forced);
    tokens.focus(index);
    inspector.close(false);
    undo.hidden = false;
    const ids = [...promptIds, ...kept.map((detail) => detail.id), forced.id];
    const left = Math.max(body.max_tokens - index - 1, 1);
    run(async (signal) => {
      tokens.cut(index + 1); // of what came before the connection broke
      await stream(continuedRequest(request, ids, left), signal);
      announce(`The text goes on: ${status.textContent}.`);
    });
  }

  function undoBranch() {
    tokens.cut(0);
    for (const detail of earlier.pop()) tokens.append(detail);
    undo.hidden = earlier.length === 0;
    status.textContent = `${tokens.details.length} tokens, before the branch`;
    times = [];
    update();
    if (undo.hidden) tokens.focus(0);
  }

  update();
  return {
    element,
    begin,
    stream: (signal) => stream(detailedRequest(request), signal),
    colourBy: (colouring) => tokens.colourBy(colouring, attributes),
    summary: () => summarise(tokens.details),
  };
}

// The strengths in use, such as "sentiment 35, KL at most 0.5"; nothing where nothing is steered.
function describeSteering({ kl_budget: budget, top_k: _, ...strengths }) {
  const parts = Object.entries(strengths)
    .filter(([, value]) => value !== 0)
    .map(([name, value]) => `${name} ${formatStrength(value)}`);
  if (parts.length && budget !== null) parts.push(`KL at most ${formatStrength(budget)}`);
  return parts.join(", ");
}
