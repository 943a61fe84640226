// The first view: unguided and guided side by side, with the same random numbers.
import { announce, find } from "./dom.js";
import { formatNumber } from "./numbers.js";
import { createPane } from "./pane.js";
import { plainRequest, zeroStrengths } from "./request.js";

export function createCompare({ info, store, inspector, run }) {
  const common = { attributes: info.attributes, inspector, run, onChat };
  const unguided = createPane({
    ...common,
    title: "Unguided",
    hint: "the base model alone",
    invitation: "Press Generate, and the base model goes on with your text here, as it would on its own.",
    kind: "unguided",
  });
  const guided = createPane({
    ...common,
    title: "Guided",
    hint: "the same random numbers",
    invitation:
      "The same model with the same luck, steered by the strengths you set. Colours show where the guide stepped in.",
    kind: "guided",
  });
  find("panes").replaceChildren(unguided.element, guided.element);

  function onChat(answer) {
    const { messages } = store.state;
    store.change({ messages: [...messages, { role: "assistant", content: answer }, { role: "user", content: "" }] });
    find("messages").querySelector("li:last-child textarea").focus();
  }

  return {
    async generate(signal) {
      const { state } = store;
      unguided.begin(plainRequest(state, zeroStrengths(info)));
      guided.begin(plainRequest(state, state.strengths));
      announce("Generating two texts.");
      const ends = await Promise.allSettled([unguided.stream(signal), guided.stream(signal)]);
      const failed = ends.find((end) => end.status === "rejected");
      if (failed) throw failed.reason;
      announce(`Done. ${describe("Unguided", unguided.summary())} ${describe("Guided", guided.summary())}`);
    },
    colourBy(colouring) {
      unguided.colourBy(colouring);
      guided.colourBy(colouring);
    },
  };
}

function describe(name, { rewards, perplexity }) {
  const parts = Object.entries(rewards).map(([attribute, reward]) => `${attribute} ${formatNumber(reward)}`);
  return `${name}: ${[...parts, `perplexity ${formatNumber(perplexity, 1)}`].join(", ")}.`;
}
