// Words that explain themselves, when the pointer or the focus is on them. The explanations stand in index.html.
import { find, make } from "./dom.js";

const PATIENCE = 150; // milliseconds in which the pointer may travel from a word to its explanation
let current = null;
let leaving = null;

// A word that explains itself, if there is an explanation; a text otherwise.
export function term(word, text = word) {
  const id = `term-${word.toLowerCase().replaceAll(" ", "-")}`;
  if (!find(id)) return text;
  return make("button", { type: "button", class: "term", "aria-describedby": id }, text);
}

function show(word) {
  clearTimeout(leaving);
  if (word === current) return;
  current = word;
  const tip = find("tip");
  tip.textContent = find(word.getAttribute("aria-describedby")).textContent;
  tip.hidden = false;
  (word.closest("dialog, [role=dialog]") ?? document.body).append(tip); // above what it explains
  const box = word.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const room = document.documentElement.clientWidth - width - 8;
  const below = box.bottom + 6 + height <= window.innerHeight;
  tip.style.setProperty("--left", `${Math.max(Math.min(box.left - 8, room), 8)}px`);
  tip.style.setProperty("--top", `${below ? box.bottom + 6 : Math.max(box.top - height - 6, 8)}px`);
}

function hide() {
  clearTimeout(leaving);
  find("tip").hidden = true;
  current = null;
}

export function explainTerms() {
  const wordAt = (event) => event.target.closest?.(".term");
  const on = (event) => {
    if (wordAt(event)) show(wordAt(event));
    else if (find("tip").contains(event.target)) clearTimeout(leaving);
  };
  const off = () => (leaving = setTimeout(() => current !== document.activeElement && hide(), PATIENCE));
  document.addEventListener("pointerover", on);
  document.addEventListener("focusin", (event) => (wordAt(event) ? show(wordAt(event)) : hide()));
  document.addEventListener("click", on); // some browsers give buttons no focus
  document.addEventListener("pointerout", (event) => wordAt(event) && off());
  find("tip").addEventListener("pointerleave", off);
  document.addEventListener("scroll", hide, true);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
}
