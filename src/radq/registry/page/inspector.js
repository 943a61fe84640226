// The panel that shows why a token was chosen: each candidate's base probability, rewards and guided probability.
import { find, make } from "./dom.js";
import { formatNumber, formatProbability, formatRatio, formatSigned } from "./numbers.js";
import { chosenCandidate, leanOfReward, logRatio } from "./scale.js";
import { term } from "./terms.js";
import { visibleElements } from "./folding.js";
import { candidateName, shownText } from "./visible.js";

const FIRST_ROWS = 8;
const PATIENCE = 350; // milliseconds in which the pointer may travel from a token to the panel

export function createInspector(attributes) {
  const panel = find("inspector");
  let current = null; // { token, details, branchAt }
  let shown = 0; // the one of its tokens whose candidates are shown
  let leaving = null;
  let whole = false;

  function show(token, details, branchAt) {
    clearTimeout(leaving);
    if (current?.token === token) return;
    close(false);
    current = { token, details, branchAt };
    shown = 0;
    whole = false;
    token.setAttribute("aria-expanded", "true");
    fill();
    panel.hidden = false;
    scrollToChosen(panel);
    place(panel, token);
  }

  function fill() {
    const { details, branchAt } = current;
    const branch = branchAt(shown);
    const choose = branch && ((candidate) => (close(true), branch(candidate)));
    panel.replaceChildren(
      ...describeTitle(details, () => close(true)),
      ...(details.length > 1 ? [tokenChoice(details.length, shown, showToken)] : []),
      ...describe(details[shown], attributes, choose, whole, showAll),
    );
  }

  function showToken(place) {
    shown = place;
    whole = false;
    fill();
    panel.querySelectorAll(".parts input")[place].focus();
  }

  function showAll() {
    whole = true;
    fill();
    place(panel, current.token);
    panel.querySelectorAll("button.candidate")[FIRST_ROWS]?.focus();
  }

  function close(giveFocusBack) {
    clearTimeout(leaving);
    if (!current) return;
    const { token } = current;
    const held = panel.contains(document.activeElement);
    current = null;
    token.removeAttribute("aria-expanded");
    panel.hidden = true;
    if (giveFocusBack && held && token.isConnected) {
      token.focus();
      close(false); // the focus has opened it again
    }
  }

  // The panel stays while the pointer or the focus is in it, or the focus is on its token.
  function leave() {
    clearTimeout(leaving);
    leaving = setTimeout(() => {
      const focused = document.activeElement;
      const held = panel.matches(":hover") || panel.contains(focused) || focused === current?.token;
      if (!held) close(false);
    }, PATIENCE);
  }

  function enter() {
    (panel.querySelector(".chosen button") ?? panel.querySelector(".candidates, button"))?.focus();
  }

  panel.addEventListener("pointerleave", leave);
  panel.addEventListener("focusout", leave);
  panel.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close(true);
    else if (event.key === "ArrowDown" && moveFocus(1)) event.preventDefault();
    else if (event.key === "ArrowUp" && moveFocus(-1)) event.preventDefault();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && close(true));
  document.addEventListener("focusin", (event) => !panel.contains(event.target) && leave());
  document.addEventListener("pointerdown", (event) => {
    if (!panel.contains(event.target) && !event.target.closest?.(".token")) close(false);
  });
  window.addEventListener("resize", () => current && place(panel, current.token));

  function moveFocus(step) {
    const rows = [...panel.querySelectorAll("button.candidate, .more")];
    rows[Math.min(Math.max(rows.indexOf(document.activeElement) + step, 0), rows.length - 1)]?.focus();
    return rows.length > 1; // else the arrow keys scroll
  }

  // What a text of tokens tells the panel. branchAt: (index) => what happens to a chosen candidate, or null.
  const listener = (branchAt = () => null) => ({
    inspect: (token, details, first) => show(token, details, (place) => branchAt(first + place)),
    enter,
    leave,
    close: () => close(true),
  });

  return { listener, close };
}

function scrollToChosen(panel) {
  const row = panel.querySelector(".chosen");
  if (!row) return;
  const list = panel.querySelector(".candidates");
  list.scrollTop = Math.max(row.offsetTop + row.offsetHeight - list.clientHeight, 0);
}

// Below the token, above it or beside it, where there is room. On a phone the stylesheet makes a sheet at the bottom of
// the screen, which must not cover the token.
function place(panel, token) {
  const [box] = token.querySelector(".body").getClientRects();
  if (!box) return;
  if (getComputedStyle(panel).position === "fixed") {
    window.scrollBy(0, Math.max(box.bottom + 12 - panel.getBoundingClientRect().top, 0));
    return;
  }
  const screen = { width: document.documentElement.clientWidth, height: window.innerHeight };
  const { left, top } = findPlace(box, panel.getBoundingClientRect(), screen);
  panel.style.setProperty("--left", `${left + window.scrollX}px`);
  panel.style.setProperty("--top", `${top + window.scrollY}px`);
}

function findPlace(box, { width, height }, screen) {
  const gap = 6;
  const left = Math.max(Math.min(box.left - 24, screen.width - width - gap), gap);
  const below = { left, top: box.bottom + gap };
  if (below.top + height <= screen.height) return below;
  if (box.top - gap - height >= 0) return { left, top: box.top - gap - height };
  const top = Math.max(screen.height - height - gap, gap);
  if (box.right + gap + width <= screen.width) return { left: box.right + gap, top };
  if (box.left - gap - width >= 0) return { left: box.left - gap - width, top };
  return below;
}

// --- what it says ---

function describeTitle(details, close) {
  const { text } = shownText(details);
  const quoted = make("span", { class: "quoted", dir: "auto" }, ...visibleElements(text, true));
  const closer = make("button", { type: "button", class: "close", "aria-label": "Close", on: { click: close } }, "×");
  return [make("div", { class: "inspector-head" }, make("h3", { id: "inspector-title" }, quoted), closer)];
}

// The tokens of a character, one of which is looked at.
function tokenChoice(count, shown, show) {
  const radios = Array.from({ length: count }, (_, place) =>
    make(
      "label",
      {},
      make("input", { type: "radio", name: "part", checked: place === shown, on: { change: () => show(place) } }),
      make("span", {}, `${place + 1} of ${count}`),
    ),
  );
  const legend = make("legend", { class: "hidden" }, "Token of this character");
  return make("fieldset", { class: "segments parts" }, legend, ...radios);
}

function describe(detail, attributes, choose, whole, showAll) {
  const parts = [facts(detail, attributes)];
  if (!detail.candidates?.length) return parts;
  parts.push(candidateTable(detail, attributes, choose, whole));
  const hidden = detail.candidates.length - candidateRows(detail, whole).length;
  if (hidden > 0) {
    parts.push(make("button", { type: "button", class: "link more", on: { click: showAll } }, `Show ${hidden} more`));
  }
  if (choose) parts.push(make("p", { class: "soft" }, "Choose another candidate to continue the text from it."));
  return parts;
}

function facts(detail, attributes) {
  const list = make("dl", { class: "facts" });
  const add = (name, value) => list.append(make("div", {}, make("dt", {}, term(name)), make("dd", {}, value)));
  const candidate = chosenCandidate(detail);
  if (candidate) {
    add("Likelihood", formatRatio(logRatio(candidate)));
    add("Shift", formatSigned(logRatio(candidate)));
  }
  if (Number.isFinite(detail.kl)) add("KL", `${formatNumber(detail.kl)} nats`);
  if (candidate) return list;
  for (const name of Object.keys(detail.rewards ?? {})) add(name, rewardChip(detail.rewards[name], attributes[name]));
  if (Number.isFinite(detail.base_logprob)) add("Base probability", formatProbability(Math.exp(detail.base_logprob)));
  return list;
}

// The colours of candidates compare them with each other: small differences decide, where strengths are large.
function candidateChips(candidates, name, attribute) {
  const rewards = candidates.map((candidate) => candidate.rewards[name]);
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const [least, most] = attribute.rewards;
  const differ = high - low > (most - least) / 40;
  return (reward) => rewardChip(reward, differ ? { rewards: [low, high] } : { rewards: [reward - 1, reward + 1] });
}

function rewardChip(reward, attribute) {
  const { side, amount } = leanOfReward(reward, attribute);
  return make("span", { class: `chip ${side}`, variables: { amount } }, formatNumber(reward));
}

// The first candidates in the base model's order, and the chosen one even if it comes later.
function candidateRows(detail, whole) {
  return detail.candidates.filter((candidate, index) => whole || index < FIRST_ROWS || candidate.id === detail.id);
}

function candidateTable(detail, attributes, choose, whole) {
  const names = Object.keys(detail.candidates[0].rewards ?? {});
  const largest = Math.max(...detail.candidates.flatMap((one) => [one.base_probability, one.probability]));
  const chips = names.map((name) => candidateChips(detail.candidates, name, attributes[name]));
  const heads = ["Candidate", "Base", ...names, "Guided"].map((name) => make("th", { scope: "col" }, name));
  const rows = candidateRows(detail, whole).map((candidate) => {
    const chosen = candidate.id === detail.id;
    return make(
      "tr",
      { class: chosen ? "chosen" : "" },
      make("th", { scope: "row" }, candidateLabel(candidate, chosen, choose)),
      make("td", { class: "base" }, probabilityBar(candidate.base_probability, largest)),
      ...names.map((name, column) => make("td", { class: "reward" }, chips[column](candidate.rewards[name]))),
      make("td", { class: "guided" }, probabilityBar(candidate.probability, largest)),
    );
  });
  const title = "Base probability, rewards and guided probability of each candidate";
  const table = make(
    "table",
    {},
    make("caption", { class: "hidden" }, title),
    make("thead", {}, make("tr", {}, ...heads)),
  );
  table.append(make("tbody", {}, ...rows));
  return make("div", { class: "candidates", tabindex: "0", role: "region", "aria-label": "Candidates" }, table);
}

// A button where candidates can be chosen.
function candidateLabel(candidate, chosen, choose) {
  const text = make("span", { class: "quoted", dir: "auto" }, ...visibleElements(candidateName(candidate.token), true));
  const parts = chosen ? [text, make("span", { class: "tick" }, "chosen")] : [text];
  if (!choose) return make("span", { class: "candidate" }, ...parts);
  return make("button", { type: "button", class: "candidate", on: { click: () => choose(candidate) } }, ...parts);
}

function probabilityBar(probability, largest) {
  const share = largest > 0 ? probability / largest : 0;
  return make(
    "span",
    { class: "bar", variables: { share } },
    make("span", { class: "number" }, formatProbability(probability)),
  );
}
