// One slider per attribute, with the calibrated safe zone marked on its track.
import { make } from "./dom.js";
import { formatStrength } from "./numbers.js";

// onChange: (name, value) => void. The slider of an attribute can be hidden.
export function createStrengths(attributes, onChange) {
  const sliders = Object.entries(attributes).map(([name, facts], index) =>
    createSlider(name, facts, `strength-${index}`, onChange),
  );
  return {
    elements: sliders.map((slider) => slider.element),
    show(strengths, hiddenName) {
      for (const slider of sliders) {
        slider.element.hidden = slider.name === hiddenName;
        slider.show(strengths[slider.name]);
      }
    },
  };
}

function createSlider(name, facts, id, onChange) {
  const [low, high] = facts.range;
  const share = (value) => (value - low) / (high - low);
  const change = (value) => Number.isFinite(value) && onChange(name, Math.min(Math.max(value, low), high));
  const read = (event) => event.target.value !== "" && change(Number(event.target.value));

  const step = [0.01, 0.05, 0.1, 0.5, 1, 5].find((size) => (high - low) / size <= 250) ?? (high - low) / 250;
  const range = make("input", {
    type: "range",
    id,
    min: low,
    max: high,
    step,
    on: { input: read },
    "aria-describedby": `${id}-help`,
  });
  const exact = make("input", {
    type: "number",
    min: low,
    max: high,
    step: "any",
    "aria-label": `${name}, exact strength`,
    on: { change: read },
  });
  const help = make("span", { class: "soft", id: `${id}-help` });
  const set = (text, value) =>
    make("button", { type: "button", class: "link", on: { click: () => change(value) } }, text);
  const marks = [];
  if (facts.safe) {
    const [from, to] = facts.safe.map((value) => Math.min(Math.max(share(value), 0), 1));
    marks.push(make("span", { class: "safe", variables: { from, to } }));
  }
  if (low < 0 && high > 0) marks.push(make("span", { class: "zero", variables: { at: share(0) } }));
  if (facts.suggested) marks.push(make("span", { class: "suggested", variables: { at: share(facts.suggested) } }));
  const links = make(
    "span",
    { class: "pair" },
    set("off", 0),
    facts.strengths?.strong
      ? set("strong", facts.strengths.strong)
      : facts.suggested
        ? set(`suggested ${formatStrength(facts.suggested)}`, facts.suggested)
        : null,
  );
  const element = make(
    "div",
    { class: "strength" },
    make(
      "div",
      { class: "row" },
      make(
        "label",
        { for: id },
        name,
        facts.description && facts.description !== name ? make("small", { class: "soft" }, facts.description) : null,
      ),
      exact,
    ),
    make("div", { class: "track" }, ...marks, range),
    make("div", { class: "row small" }, help, links),
  );

  return {
    name,
    element,
    show(value) {
      range.value = String(value);
      if (document.activeElement !== exact || Number(exact.value) !== value) exact.value = String(value);
      range.setAttribute("aria-valuetext", value === 0 ? "0, not steered" : String(value));
      const outside = facts.safe && (value < facts.safe[0] || value > facts.safe[1]);
      element.classList.toggle("outside", Boolean(outside));
      help.textContent = describe(facts.safe, outside);
    },
  };
}

function describe(safe, outside) {
  if (!safe) return "not calibrated";
  if (outside) return "beyond the safe zone: texts may suffer";
  return `safe zone ${formatStrength(safe[0])} to ${formatStrength(safe[1])}`;
}
