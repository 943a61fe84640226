// A text of coloured tokens. One token at a time can be reached with the Tab key; arrow keys move between tokens.
import { make } from "./dom.js";
import { leanOfToken } from "./scale.js";
import { shownText, spokenText, visibleParts } from "./visible.js";

// In a narrow window the details cover the lower half of it: they wait for a click, or the focus.
const HOVER = matchMedia("(min-width: 641px)");

// listener: { inspect(token element, detail, index), enter(), leave(), close() }, all about the details of one token.
export function createTokenText(label, listener) {
  const given = make("span", { class: "given" });
  const tokens = make("span", { class: "tokens" });
  const element = make("div", { class: "token-text", dir: "auto", role: "group", "aria-label": label }, given, tokens);
  const details = [];
  let paint = () => ({ side: "none", amount: 0 });

  const indexOf = (target) => {
    const token = target.closest?.(".token");
    return token ? [...tokens.children].indexOf(token) : -1;
  };
  const inspect = (event) => {
    const index = indexOf(event.target);
    if (index >= 0) listener.inspect(tokens.children[index], details[index], index);
    return index;
  };

  tokens.addEventListener("pointerover", (event) => HOVER.matches && event.pointerType !== "touch" && inspect(event));
  tokens.addEventListener("pointerout", (event) => HOVER.matches && event.pointerType !== "touch" && listener.leave());
  tokens.addEventListener("focusin", (event) => {
    const index = inspect(event);
    for (const [place, token] of [...tokens.children].entries()) token.tabIndex = place === index ? 0 : -1;
  });
  tokens.addEventListener("click", (event) => {
    const index = indexOf(event.target);
    if (index < 0) return;
    tokens.children[index].focus();
    inspect(event);
  });
  tokens.addEventListener("keydown", (event) => {
    const index = indexOf(event.target);
    const last = tokens.children.length - 1;
    const ahead = getComputedStyle(element).direction === "rtl" ? -1 : 1;
    const places = { ArrowRight: index + ahead, ArrowLeft: index - ahead, Home: 0, End: last };
    if (event.key in places) tokens.children[Math.min(Math.max(places[event.key], 0), last)].focus();
    else if (["Enter", " ", "ArrowDown"].includes(event.key)) listener.enter();
    else if (event.key === "Escape") listener.close();
    else return;
    event.preventDefault();
  });

  function colour(token, detail) {
    const { side, amount } = paint(detail);
    token.classList.toggle("low", side === "low");
    token.classList.toggle("high", side === "high");
    token.style.setProperty("--amount", String(amount));
  }

  return {
    element,
    details,
    begin(text) {
      given.replaceChildren(...visibleElements(text));
      tokens.replaceChildren();
      details.length = 0;
    },
    append(detail) {
      const token = makeToken(detail);
      token.tabIndex = details.length ? -1 : 0;
      colour(token, detail);
      details.push(detail);
      tokens.append(token);
    },
    cut(length) {
      while (tokens.children.length > length) tokens.lastChild.remove();
      details.length = length;
      if (length && !tokens.querySelector("[tabindex='0']")) tokens.children[0].tabIndex = 0;
    },
    colourBy(colouring, attributes) {
      paint = (detail) => leanOfToken(detail, colouring, attributes);
      for (const [index, detail] of details.entries()) colour(tokens.children[index], detail);
    },
    text: () => details.map((detail) => detail.piece ?? "").join(""),
    focus: (index) => tokens.children[index]?.focus(),
  };
}

function makeToken(detail) {
  const { text, ghost } = shownText(detail);
  const spoken = spokenText(text) + (detail.forced ? ", your choice" : "");
  const classes = ["token", ghost && "ghost", detail.forced && "forced"].filter(Boolean).join(" ");
  const properties = { class: classes, role: "button", "aria-label": spoken, "aria-haspopup": "dialog" };
  // Only the word is painted, not the space before it, which may be left at the end of a line.
  const space = /^ \S/u.test(text) ? " " : "";
  return make("span", properties, space, make("span", { class: "body" }, ...visibleElements(text.slice(space.length))));
}

// The parts of a text as nodes; marks of whitespace are drawn by the stylesheet.
export function visibleElements(text, allSpaces = false) {
  return visibleParts(text, allSpaces).map((part) =>
    part.mark === null ? part.text : make("span", { class: "mark", "data-mark": part.mark }, part.text),
  );
}
