// The second view: the reward of every token of a pasted text.
import { drawCourses } from "./chart.js";
import { announce, find, make } from "./dom.js";
import { fillMeters, rewardMeters } from "./meters.js";
import { formatNumber } from "./numbers.js";
import { scoreText } from "./server.js";
import { createTokenText } from "./token_text.js";

export function createScore({ info, store, inspector }) {
  const tokens = createTokenText("Scored text", inspector.listener());
  const numbers = make("dl", { class: "numbers" });
  const invitation = make(
    "p",
    { class: "invitation soft" },
    "Press Score to see how each token of your text changes the reward.",
  );
  const element = make(
    "section",
    { class: "pane", "aria-label": "Scored text" },
    make("h2", {}, "Token by token"),
    numbers,
    invitation,
    tokens.element,
  );
  const charts = make("div", { class: "charts" });
  find("scored").replaceChildren(element, charts);

  return {
    async generate(signal) {
      const scores = await scoreText(store.state.scoreText, signal);
      tokens.begin("");
      element.classList.add("filled");
      for (const { id, token, logprob, rewards } of scores.tokens) {
        tokens.append({ id, token, piece: token, base_logprob: logprob, rewards, candidates: [] });
      }
      fillMeters(numbers, {
        ...rewardMeters(scores.rewards, info.attributes),
        perplexity: formatNumber(scores.perplexity, 1),
        tokens: String(scores.tokens.length),
      });
      charts.replaceChildren(...drawCourses(scores.tokens, info.attributes));
      announce(`${scores.tokens.length} tokens scored.`);
    },
    colourBy: (colouring) => tokens.colourBy(colouring, info.attributes),
  };
}
