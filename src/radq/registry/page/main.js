// The page of `radq serve`: reads what the server offers, and puts form, views and address together.
import { createCompare } from "./compare.js";
import { createControls } from "./controls.js";
import { createCopying } from "./copying.js";
import { announce, find, make } from "./dom.js";
import { createGrid } from "./grid.js";
import { createInspector } from "./inspector.js";
import { legendOf, SHIFT, SURPRISE } from "./scale.js";
import { createScore } from "./score.js";
import { getInfo } from "./server.js";
import { ConnectionBroke } from "./sse.js";
import { toAddress } from "./state.js";
import { createStore } from "./store.js";
import { createTabs } from "./tabs.js";
import { explainTerms } from "./terms.js";

const GO = { compare: "Generate", score: "Score", grid: "Fill the grid" };
const TITLES = { compare: "radq", score: "Score · radq", grid: "Grid · radq" };
let running = null; // the controller of the work in progress, which can stop it
let ended = Promise.resolve(); // when the work before has ended

let retry = null; // what the button beside a problem does

// A problem that may pass has a button that tries again.
function showProblem(text, again = null) {
  find("problem-text").textContent = text;
  find("problem").hidden = text === "";
  find("retry").hidden = again === null;
  retry = again;
}

const againAfter = (error, again) => (error instanceof ConnectionBroke ? again : null);

// Run one work at a time: a new one stops the one before.
function run(work) {
  running?.abort();
  const controller = (running = new AbortController());
  ended = ended.then(() => perform(work, controller));
}

// Errors are shown, and end all requests of the work. Stopping is no error.
async function perform(work, controller) {
  showProblem("");
  find("stop").hidden = false;
  try {
    await work(controller.signal);
  } catch (error) {
    if (error.name === "AbortError") announce("Stopped.");
    else showProblem(error.message, againAfter(error, () => run(work)));
    controller.abort();
  } finally {
    if (running === controller) {
      running = null;
      if (document.activeElement === find("stop")) find("go").focus();
      find("stop").hidden = true;
    }
  }
}

function showView(state, info) {
  for (const element of document.querySelectorAll("[data-views]")) {
    element.hidden = !element.dataset.views.split(" ").includes(state.view);
  }
  for (const link of document.querySelectorAll("nav [data-view]")) {
    link.href = toAddress({ ...state, view: link.dataset.view }, info);
    if (link.dataset.view === state.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  find("go").textContent = GO[state.view];
  document.title = TITLES[state.view];
}

// The shift belongs to generated texts, the surprise to pasted ones.
function colouringOf(state, info) {
  const names = Object.keys(info.attributes);
  if (state.view !== "score") return state.colouring === SURPRISE ? SHIFT : state.colouring;
  return state.colouring === SHIFT ? (names[0] ?? SURPRISE) : state.colouring;
}

function showLegend(state, info) {
  const colouring = colouringOf(state, info);
  const special = state.view === "score" ? [[SURPRISE, "surprise"]] : [[SHIFT, "shift"]];
  const names = Object.keys(info.attributes).filter((name) => info.attributes[name].rewards);
  const choices = [...special, ...names.map((name) => [name, `${name} reward`])];
  const select = find("colouring");
  if (select.dataset.view !== state.view) {
    select.dataset.view = state.view;
    select.replaceChildren(...choices.map(([value, text]) => make("option", { value }, text)));
  }
  select.value = colouring;
  const legend = legendOf(colouring, info.attributes);
  find("legend-low").textContent = legend.low;
  find("legend-high").textContent = legend.high;
  find("legend-meaning").textContent = legend.meaning;
}

function start(info) {
  find("tagline").textContent = `A small reward model steers a language model, token by token. Here: ${info.title}.`;
  const store = createStore(info, showProblem);
  const inspector = createInspector(info.attributes);
  const tabs = createTabs();
  const parts = { info, store, inspector, run, tabs };
  const views = { compare: createCompare(parts), score: createScore(parts), grid: createGrid(parts) };
  const showControls = createControls(info, store);
  createCopying(info, store);
  explainTerms();
  store.listen((state) => {
    showView(state, info);
    tabs.show(state.view);
    showControls(state);
    showLegend(state, info);
    for (const view of Object.values(views)) view.colourBy(colouringOf(state, info));
  });

  find("colouring").addEventListener("change", (event) => store.change({ colouring: event.target.value }));
  find("controls").addEventListener("submit", (event) => {
    event.preventDefault();
    inspector.close(false);
    tabs.showResults();
    run(views[store.state.view].generate);
  });
  find("controls").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("controls").requestSubmit();
  });
  find("stop").addEventListener("click", () => running?.abort());
  find("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address holds the state
    tabs.showResults();
    find("stage").focus();
  });
  find("controls").hidden = find("toolbar").hidden = false;
}

find("problem-close").addEventListener("click", () => showProblem(""));
find("retry").addEventListener("click", () => {
  const again = retry;
  showProblem("");
  again();
});

function load() {
  getInfo()
    .then(start)
    .catch((error) => showProblem(error.message, againAfter(error, load)));
}
load();
