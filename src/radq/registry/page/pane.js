// One side of the comparison: several texts that stream together. One of them is large, with its numbers.
import { announce, make } from "./dom.js";
import { foldedElements } from "./folding.js";
import { createGenerated } from "./generated.js";
import { fillMeters, rewardMeters } from "./meters.js";
import { formatNumber, formatStrength } from "./numbers.js";
import { detailedRequest } from "./request.js";
import { streamChoices } from "./server.js";
import { tokensPerSecond } from "./statistics.js";

export const ROLES = { system: "System", user: "You", assistant: "Answer" };

// run: (work) => void, which gives a signal to the work, and shows its errors.
// onSelect: (index) => void chooses the large text on both sides; onChange: () => void tells that texts have grown.
export function createPane({ title, hint, invitation, kind, attributes, inspector, run, onChat, onSelect, onChange }) {
  const link = (text, click) => make("button", { type: "button", class: "link", hidden: true, on: { click } }, text);
  const numbers = make("dl", { class: "numbers" });
  const status = make("p", { class: "status soft" });
  const undo = link("Undo the branch", () => {
    texts[selected].undo();
    update();
  });
  const reply = link("Reply to this answer", () => onChat(texts[selected].text()));
  const subtitle = make("span", { class: "soft" }, hint);
  const turns = make("ol", { class: "turns" });
  const place = make("div", { class: "large" });
  const list = make("ol", { class: "samples" });
  const element = make(
    "section",
    { class: `pane ${kind}`, id: `pane-${kind}`, "aria-label": title },
    make("h2", {}, title, " ", subtitle),
    numbers,
    make("p", { class: "invitation soft" }, invitation),
    turns,
    place,
    make("div", { class: "pane-foot" }, status, undo, reply),
    list,
  );

  let request = null; // as it was asked for
  let texts = [];
  let buttons = [];
  let selected = 0;
  let colouring = null;
  let shown = null; // the attribute whose reward stands beside small texts
  let times = [];
  let painted = false;

  function updateSoon() {
    if (painted) return;
    painted = true;
    requestAnimationFrame(() => {
      painted = false;
      update();
      onChange();
    });
  }

  function update() {
    const text = texts[selected];
    const summary = text?.summary() ?? { rewards: {} };
    fillMeters(numbers, {
      ...rewardMeters(summary.rewards, attributes),
      perplexity: formatNumber(summary.perplexity, 1),
      KL: formatNumber(summary.kl),
    });
    for (const [index, button] of buttons.entries()) showSmall(button, texts[index]);
    if (!text) return;
    const streaming = element.classList.contains("streaming");
    const speed = tokensPerSecond(times.length, times[0], times.at(-1));
    status.textContent = streaming ? "" : text.status + (speed ? `, ${formatNumber(speed, 1)} tokens/s` : "");
    undo.hidden = streaming || !text.branched;
    reply.hidden = streaming || !(request.path.includes("chat") && text.details.length);
  }

  function showSmall(button, text) {
    const [, excerpt, number] = button.children;
    excerpt.textContent = text.text().trimStart();
    number.textContent = formatNumber(text.summary().rewards[shown]);
  }

  async function stream(sent, takers, signal) {
    element.classList.add("streaming");
    times = [];
    try {
      for await (const choice of streamChoices(sent, signal)) {
        times.push(...choice.details.filter((detail) => detail.id !== null).map(() => performance.now()));
        takers[choice.index].take(choice);
        updateSoon();
      }
    } finally {
      element.classList.remove("streaming");
      update();
    }
  }

  function makeText(index) {
    const text = createGenerated({
      label: `${title} text${index ? ` ${index + 1}` : ""}`,
      inspector,
      onBranch: (sent, restart) =>
        run(async (signal) => {
          restart();
          await stream(sent, [text], signal);
          announce(`The text goes on: ${text.status}.`);
        }),
    });
    text.colourBy(colouring, attributes);
    return text;
  }

  function makeButton(index) {
    const parts = ["place", "excerpt", "number"].map((name) => make("span", { class: name }));
    parts[0].textContent = String(index + 1);
    parts[1].dir = "auto";
    return make("button", { type: "button", class: "sample", on: { click: () => onSelect(index) } }, ...parts);
  }

  function select(index) {
    selected = Math.min(index, texts.length - 1);
    place.replaceChildren(texts[selected].element);
    for (const [number, button] of buttons.entries()) button.setAttribute("aria-pressed", String(number === selected));
    update();
  }

  update();
  return {
    element,
    select,
    begin(plain, attribute) {
      request = plain;
      shown = attribute;
      const count = plain.body.n ?? 1;
      texts = Array.from({ length: count }, (_, index) => makeText(index));
      for (const text of texts) text.begin(plain);
      buttons = count > 1 ? texts.map((_, index) => makeButton(index)) : [];
      list.replaceChildren(...buttons.map((button) => make("li", {}, button)));
      list.setAttribute("aria-label", `${title}: all ${count} texts, with their ${shown}`);
      turns.replaceChildren(...(plain.body.messages ?? []).map(makeTurn));
      subtitle.textContent = describeSteering(plain.body.radq) || hint;
      element.classList.add("filled");
      select(Math.min(selected, count - 1));
    },
    stream: (signal) => stream(detailedRequest(request), texts, signal),
    colourBy(name) {
      colouring = name;
      for (const text of texts) text.colourBy(colouring, attributes);
    },
    summaries: () => texts.map((text) => text.summary()),
  };
}

function makeTurn({ role, content }) {
  const words = make("span", { class: "words", dir: "auto" }, ...foldedElements(content));
  return make("li", { class: `turn ${role}` }, make("span", { class: "role" }, ROLES[role]), words);
}

// The strengths in use, such as "sentiment 35, KL at most 0.5"; nothing where nothing is steered.
function describeSteering({ kl_budget: budget, top_k: _, ...strengths }) {
  const parts = Object.entries(strengths)
    .filter(([, value]) => Number(value) !== 0)
    .map(([name, value]) => `${name} ${formatStrength(value)}`);
  if (parts.length && budget !== null) parts.push(`KL at most ${formatStrength(budget)}`);
  return parts.join(", ");
}
