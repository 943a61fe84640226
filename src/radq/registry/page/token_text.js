// A text of coloured tokens. A character that is made of several tokens is shown once, whole: these tokens share an
// element. One element at a time can be reached with the Tab key; arrow keys move between them.
import { make } from "./dom.js";
import { foldedElements, visibleElements } from "./folding.js";
import { leanOfTokens } from "./scale.js";
import { isPart, shownText, spokenText } from "./visible.js";

// In a narrow window the details cover the lower half of it: they wait for a click, or the focus.
const HOVER = matchMedia("(min-width: 641px)");

// listener: { inspect(element, details, index of the first), enter(), leave(), close() }
export function createTokenText(label, listener) {
  const given = make("span", { class: "given" });
  const tokens = make("span", { class: "tokens" });
  const properties = { class: "token-text", dir: "auto", role: "group", "aria-label": label };
  const element = make("div", properties, given, tokens);
  const details = [];
  const units = []; // { element, first, count } for each element: its tokens
  let paint = () => ({ side: "none", amount: 0 });

  const detailsOf = ({ first, count }) => details.slice(first, first + count);
  const indexOf = (target) => units.findIndex((unit) => unit.element === target.closest?.(".token"));
  const inspect = (event) => {
    const index = indexOf(event.target);
    if (index >= 0) listener.inspect(units[index].element, detailsOf(units[index]), units[index].first);
    return index;
  };

  tokens.addEventListener("pointerover", (event) => HOVER.matches && event.pointerType !== "touch" && inspect(event));
  tokens.addEventListener("pointerout", (event) => HOVER.matches && event.pointerType !== "touch" && listener.leave());
  tokens.addEventListener("focusin", (event) => {
    const index = inspect(event);
    for (const [place, unit] of units.entries()) unit.element.tabIndex = place === index ? 0 : -1;
  });
  tokens.addEventListener("click", (event) => {
    const index = indexOf(event.target);
    if (index < 0) return;
    units[index].element.focus();
    inspect(event);
  });
  tokens.addEventListener("keydown", (event) => {
    const index = indexOf(event.target);
    const last = units.length - 1;
    const ahead = getComputedStyle(element).direction === "rtl" ? -1 : 1;
    const places = { ArrowRight: index + ahead, ArrowLeft: index - ahead, Home: 0, End: last };
    if (event.key in places) units[Math.min(Math.max(places[event.key], 0), last)].element.focus();
    else if (["Enter", " ", "ArrowDown"].includes(event.key)) listener.enter();
    else if (event.key === "Escape") listener.close();
    else return;
    event.preventDefault();
  });

  function colour(unit) {
    const { side, amount } = paint(detailsOf(unit));
    unit.element.classList.toggle("low", side === "low");
    unit.element.classList.toggle("high", side === "high");
    unit.element.style.setProperty("--amount", String(amount));
  }

  function fill(unit) {
    const { first, count } = unit;
    const { text, ghost } = shownText(detailsOf(unit));
    const forced = details.slice(first, first + count).some((detail) => detail.forced);
    unit.element.classList.toggle("ghost", ghost);
    unit.element.classList.toggle("forced", forced);
    unit.element.setAttribute("aria-label", spokenText(text) + (forced ? ", your choice" : ""));
    // Only the word is painted, not the space before it, which may be left at the end of a line.
    const space = /^ \S/u.test(text) ? " " : "";
    unit.element.replaceChildren(
      space,
      make("span", { class: "body" }, ...visibleElements(text.slice(space.length))),
    );
    colour(unit);
  }

  function addUnit() {
    const properties = { class: "token", role: "button", "aria-haspopup": "dialog", tabindex: units.length ? -1 : 0 };
    const unit = { element: make("span", properties), first: details.length, count: 0 };
    units.push(unit);
    tokens.append(unit.element);
    return unit;
  }

  return {
    element,
    details,
    begin(text) {
      given.replaceChildren(...foldedElements(text));
      tokens.replaceChildren();
      details.length = units.length = 0;
    },
    append(detail) {
      const open = details.length > 0 && isPart(details.at(-1)) && (isPart(detail) || Boolean(detail.piece));
      const unit = open ? units.at(-1) : addUnit();
      unit.count += 1;
      details.push(detail);
      fill(unit);
    },
    cut(length) {
      while (units.length && units.at(-1).first >= length) units.pop().element.remove();
      details.length = Math.min(details.length, length);
      const unit = units.at(-1);
      if (unit && unit.first + unit.count > length) {
        unit.count = length - unit.first;
        fill(unit);
      }
      if (unit && !tokens.querySelector("[tabindex='0']")) units[0].element.tabIndex = 0;
    },
    colourBy(colouring, attributes) {
      paint = (some) => leanOfTokens(some, colouring, attributes);
      units.forEach(colour);
    },
    text: () => details.map((detail) => detail.piece ?? "").join(""),
    focus: (index) => units.findLast((unit) => unit.first <= index)?.element.focus(),
  };
}
