// One slider per attribute: what both directions do, the strengths that have names, and the calibrated safe zone.
import { make } from "./dom.js";
import { formatStrength } from "./numbers.js";
import { levelsOf, reachOf } from "./state.js";

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
  const [least, most] = facts.range;
  const [low, high] = reachOf(facts);
  const share = (value) => Math.min(Math.max((value - low) / (high - low), 0), 1);
  const change = (value) => Number.isFinite(value) && onChange(name, Math.min(Math.max(value, least), most));
  const read = (event) => event.target.value !== "" && change(Number(event.target.value));

  const step = [0.01, 0.05, 0.1, 0.5, 1, 5].find((size) => (high - low) / size <= 250) ?? (high - low) / 250;
  const help = `${id}-help`;
  const range = make("input", {
    type: "range",
    id,
    min: low,
    max: high,
    step,
    on: { input: read },
    "aria-describedby": help,
  });
  const exact = make("input", {
    type: "number",
    min: least,
    max: most,
    step: "any",
    "aria-label": `${name}, exact strength`,
    on: { change: read },
  });
  const levels = Object.entries(levelsOf(facts)).map(([level, value]) => ({
    value,
    level,
    button: make("button", { type: "button", on: { click: () => change(value) } }, level),
  }));
  const marks = levels.map(({ value }) => make("span", { class: "mark", variables: { at: share(value) } }));
  if (facts.safe) {
    const [from, to] = facts.safe.map(share);
    marks.unshift(make("span", { class: "safe", variables: { from, to } }));
  }
  const meaning = facts.description || name;
  const warning = make("p", { class: "soft small", id: help });
  const element = make(
    "div",
    { class: "strength", role: "group", "aria-label": name },
    make("div", { class: "row" }, make("label", { for: id }, name), exact),
    make("div", { class: "track" }, ...marks, range),
    make(
      "div",
      { class: "row small soft" },
      make("span", {}, `− less ${meaning}`),
      make("span", {}, `more ${meaning} +`),
    ),
    make("div", { class: "levels" }, ...levels.map(({ button }) => button)),
    warning,
  );

  return {
    name,
    element,
    show(value) {
      range.value = String(value);
      if (document.activeElement !== exact || Number(exact.value) !== value) exact.value = String(value);
      const named = levels.find((one) => one.value === value)?.level;
      const words = value === 0 ? "not steered" : `${named ? `${named}, ` : ""}${value < 0 ? "less" : "more"} ${meaning}`;
      range.setAttribute("aria-valuetext", `${value}, ${words}`);
      for (const one of levels) one.button.setAttribute("aria-pressed", String(one.value === value));
      const outside = facts.safe && (value < facts.safe[0] || value > facts.safe[1]);
      element.classList.toggle("outside", Boolean(outside));
      warning.textContent = describe(facts.safe, outside);
    },
  };
}

function describe(safe, outside) {
  if (!safe) return "not calibrated";
  if (outside) return "beyond the safe zone: texts may suffer";
  return `safe zone ${formatStrength(safe[0])} to ${formatStrength(safe[1])}`;
}
