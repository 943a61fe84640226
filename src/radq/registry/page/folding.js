// Texts as nodes: marks of whitespace are drawn by the stylesheet, and the middle of a long text is folded away.
import { make } from "./dom.js";
import { foldPlaces, visibleParts } from "./visible.js";

export function visibleElements(text, allSpaces = false) {
  return visibleParts(text, allSpaces).map((part) =>
    part.mark === null ? part.text : make("span", { class: "mark", "data-mark": part.mark }, part.text),
  );
}

// A text whose middle can be unfolded, if it is long.
export function foldedElements(text) {
  const places = foldPlaces(text);
  if (!places) return visibleElements(text);
  const [first, second] = places;
  const middle = make("span", { hidden: true }, ...visibleElements(text.slice(first, second)));
  const show = (event) => {
    middle.hidden = !middle.hidden;
    event.target.textContent = name();
    event.target.setAttribute("aria-expanded", String(!middle.hidden));
  };
  const name = () => (middle.hidden ? `… ${second - first} more characters …` : "fold");
  const properties = { type: "button", class: "link fold", dir: "ltr", "aria-expanded": "false", on: { click: show } };
  const button = make("button", properties, name());
  return [...visibleElements(text.slice(0, first)), middle, button, ...visibleElements(text.slice(second))];
}
