// The third view: one attribute at several strengths, with the same random numbers in every column.
import { drawTradeoff } from "./chart.js";
import { announce, find, make } from "./dom.js";
import { fillMeters, rewardMeter } from "./meters.js";
import { formatNumber, formatStrength } from "./numbers.js";
import { detailedRequest, plainRequest } from "./request.js";
import { streamChoices } from "./server.js";
import { summarise } from "./statistics.js";
import { createTokenText } from "./token_text.js";

const AT_ONCE = 2; // requests

export function createGrid({ info, store, inspector }) {
  const place = find("grid");
  const chart = find("grid-chart");
  let columns = [];
  let colouring = store.state.colouring;

  function showChart(attribute) {
    const known = columns.map(({ strength, summary }) => ({ strength, ...summary() }));
    chart.replaceChildren(...drawTradeoff(known, attribute, info.attributes[attribute]));
  }

  return {
    async generate(signal) {
      const { state } = store;
      const { gridAttribute: attribute, gridStrengths: strengths, gridSamples: samples } = state;
      columns = strengths.map((strength) => {
        const request = plainRequest(state, { ...state.strengths, [attribute]: strength }, samples);
        return createColumn({ strength, attribute, request, samples, info, inspector });
      });
      for (const column of columns) column.colourBy(colouring);
      chart.replaceChildren();
      place.replaceChildren(...columns.map((column) => column.element));
      announce(`Generating texts at ${strengths.length} strengths.`);
      const waiting = [...columns];
      const work = async () => {
        for (let column = waiting.shift(); column; column = waiting.shift()) {
          await column.stream(signal);
          showChart(attribute);
        }
      };
      await Promise.all(Array.from({ length: AT_ONCE }, work));
      announce(`Done: texts at ${strengths.length} strengths.`);
    },
    colourBy(name) {
      colouring = name;
      for (const column of columns) column.colourBy(name);
    },
  };
}

function createColumn({ strength, attribute, request, samples, info, inspector }) {
  const title = `${attribute} ${formatStrength(strength)}`;
  const texts = Array.from({ length: samples }, (_, index) =>
    createTokenText(`${title}, text ${index + 1}`, inspector.listener()),
  );
  for (const text of texts) text.begin(request.body.prompt ?? "");
  const numbers = make("dl", { class: "numbers" });
  const heading = make(
    "h2",
    {},
    formatStrength(strength),
    " ",
    make("span", { class: "soft" }, strength === 0 ? `${attribute} not steered` : attribute),
  );
  const element = make(
    "section",
    { class: "pane filled", "aria-label": title },
    heading,
    numbers,
    ...texts.map((text) => text.element),
  );
  const summary = () => summarise(texts.flatMap((text) => text.details));

  function update() {
    const { rewards, perplexity, kl } = summary();
    const meter = rewardMeter(rewards[attribute], info.attributes[attribute]);
    fillMeters(numbers, { [attribute]: meter, perplexity: formatNumber(perplexity, 1), KL: formatNumber(kl) });
  }

  update();
  return {
    strength,
    element,
    summary,
    colourBy: (name) => texts.forEach((text) => text.colourBy(name, info.attributes)),
    async stream(signal) {
      element.classList.add("streaming");
      try {
        for await (const { index, details } of streamChoices(detailedRequest(request), signal)) {
          for (const detail of details) texts[index].append(detail);
          update();
        }
      } finally {
        element.classList.remove("streaming");
      }
    },
  };
}
