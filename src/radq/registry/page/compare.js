// The first view: what steering does over several texts, and these texts side by side, with the same random numbers.
import { announce, find } from "./dom.js";
import { createEffect } from "./effect.js";
import { createPane } from "./pane.js";
import { plainRequest, zeroStrengths } from "./request.js";

export function createCompare({ info, store, inspector, run, tabs }) {
  const effect = createEffect(info.attributes);
  let asked = store.state; // the state whose texts are shown
  const common = { attributes: info.attributes, inspector, run, onChat, onSelect, onChange: () => generating && show() };
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
  let generating = false; // branches do not count as effects
  find("effect").replaceChildren(effect.element);
  find("panes").replaceChildren(unguided.element, guided.element);

  const show = () => effect.show(unguided.summaries(), guided.summaries(), asked.strengths);

  function onSelect(index) {
    unguided.select(index);
    guided.select(index);
  }

  function onChat(answer) {
    const { messages } = store.state;
    store.change({ messages: [...messages, { role: "assistant", content: answer }, { role: "user", content: "" }] });
    tabs.showSettings();
    find("messages").querySelector("li:last-child textarea").focus();
  }

  return {
    async generate(signal) {
      asked = store.state;
      const names = Object.keys(info.attributes);
      const attribute = names.find((name) => asked.strengths[name] !== 0) ?? names[0];
      unguided.begin(plainRequest(asked, zeroStrengths(info), asked.samples), attribute);
      guided.begin(plainRequest(asked, asked.strengths, asked.samples), attribute);
      generating = true;
      announce(`Generating ${asked.samples} texts on each side.`);
      try {
        const ends = await Promise.allSettled([unguided.stream(signal), guided.stream(signal)]);
        const failed = ends.find((end) => end.status === "rejected");
        if (failed) throw failed.reason;
        announce(`Done. ${show()}`);
      } finally {
        generating = false;
      }
    },
    colourBy(colouring) {
      unguided.colourBy(colouring);
      guided.colourBy(colouring);
    },
  };
}
