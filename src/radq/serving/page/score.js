// The second view: the reward of every token of a pasted text.
import { announce, find, make } from "./dom.js";
import { formatNumber } from "./numbers.js";
import { rewardMeter } from "./pane.js";
import { scoreText } from "./server.js";
import { createTokenText } from "./token_text.js";

export function createScore({ info, store, inspector }) {
  const tokens = createTokenText("Scored text", {
    inspect: (token, detail) => inspector.show(token, detail, null),
    enter: inspector.enter,
    leave: inspector.leave,
    close: () => inspector.close(true),
  });
  const numbers = make("dl", { class: "numbers" });
  const element = make("section", { class: "pane", "aria-label": "Scored text" }, make("h2", {}, "Token by token"), numbers, tokens.element);
  find("scored").replaceChildren(element);

  function showNumbers(scores) {
    const entries = Object.entries(scores.rewards).map(([name, reward]) => [name, rewardMeter(reward, info.attributes[name] ?? {})]);
    entries.push(["perplexity", formatNumber(scores.perplexity, 1)], ["tokens", String(scores.tokens.length)]);
    numbers.replaceChildren(...entries.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  }

  return {
    async generate(signal) {
      const scores = await scoreText(store.state.scoreText, signal);
      tokens.begin("");
      element.classList.add("filled");
      for (const { id, token, logprob, rewards } of scores.tokens) {
        tokens.append({ id, token, piece: token, base_logprob: logprob, rewards, candidates: [] });
      }
      showNumbers(scores);
      announce(`${scores.tokens.length} tokens scored.`);
    },
    colourBy: (colouring) => tokens.colourBy(colouring, info.attributes),
  };
}
