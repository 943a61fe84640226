// Tabs of a narrow window, where form and texts have no room beside each other. In a wide one everything is shown.
import { find, make } from "./dom.js";

const NARROW = matchMedia("(max-width: 860px)"); // as in screens.css

// For each view, its tabs and the places that belong to them; the second tab opens when texts are asked for.
const TABS = {
  compare: { Settings: ["controls"], Effect: ["effect"], Unguided: ["pane-unguided"], Guided: ["pane-guided"] },
  score: { Text: ["controls"], Rewards: ["scored"] },
  grid: { Settings: ["controls"], Grid: ["grid-view"] },
};

export function createTabs() {
  const list = find("tabs");
  let view = null;
  let chosen = null;

  function choose(name, focus = false) {
    chosen = name;
    const entries = Object.entries(TABS[view]);
    list.replaceChildren(...entries.map(([tab, [place]]) => makeTab(tab, place)));
    for (const place of Object.values(TABS).flatMap((tabs) => Object.values(tabs).flat())) {
      const [tab] = entries.find(([, places]) => places.includes(place)) ?? [];
      const element = find(place);
      element.classList.toggle("other-tab", NARROW.matches && tab !== chosen);
      if (element.matches("form")) continue; // which stays a form
      if (NARROW.matches && tab) {
        element.setAttribute("role", "tabpanel");
        element.setAttribute("aria-labelledby", `tab-${place}`);
      } else if (element.getAttribute("role") === "tabpanel") {
        element.removeAttribute("role");
        element.removeAttribute("aria-labelledby");
      }
    }
    document.body.dataset.tab = Object.keys(TABS[view])[0] === chosen ? "settings" : "results";
    if (focus) list.querySelector("[aria-selected=true]").focus();
  }

  function makeTab(name, place) {
    const selected = name === chosen;
    const properties = {
      type: "button",
      role: "tab",
      id: `tab-${place}`,
      "aria-selected": String(selected),
      "aria-controls": place,
      tabindex: selected ? 0 : -1,
      on: { click: () => choose(name, true) },
    };
    return make("button", properties, name);
  }

  list.addEventListener("keydown", (event) => {
    const names = Object.keys(TABS[view]);
    const index = names.indexOf(chosen);
    const places = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: names.length - 1 };
    if (!(event.key in places)) return;
    event.preventDefault();
    choose(names.at(places[event.key] % names.length), true);
  });
  NARROW.addEventListener("change", () => view && choose(chosen));

  return {
    show(name) {
      if (name === view) return;
      view = name;
      choose(Object.keys(TABS[view])[0]);
    },
    showSettings: () => choose(Object.keys(TABS[view])[0]),
    showResults: () => chosen === Object.keys(TABS[view])[0] && choose(Object.keys(TABS[view])[1]),
  };
}
