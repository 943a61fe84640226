// The form: every field shows a part of the state, and changes it.
import { find, make } from "./dom.js";
import { ROLES } from "./pane.js";
import { gridStrengths } from "./state.js";
import { createStrengths } from "./strengths.js";

const EXAMPLES = ["The meeting this morning was", "My first day at work", "The film was", "The food was"];
const CHAT_EXAMPLES = ["Was the film worth seeing?", "How was your first day?"];
const PLACEHOLDERS = { user: "Write two sentences about the new café in our street.", system: "How to answer" };

export function createControls(info, store) {
  const sliders = createStrengths(info.attributes, (name, value) =>
    store.change({ strengths: { ...store.state.strengths, [name]: value } }),
  );
  find("strengths").replaceChildren(...sliders.elements);
  fillChoices(info);
  listenToTexts(store);
  listenToNumbers(info, store);
  listenToChoices(info, store);
  find("max-tokens").max = info.limits.max_tokens;
  find("top-k").max = info.limits.top_k;
  find("samples").max = find("grid-samples").max = info.limits.choices ?? info.limits.rows;
  find("mode-field").hidden = !info.chat;
  if (!info.chat) delete find("mode-field").dataset.views;

  return function show(state) {
    const varied = state.view === "grid" ? state.gridAttribute : null;
    sliders.show(state.strengths, varied);
    find("strength-field").hidden =
      state.view === "score" || Object.keys(info.attributes).every((name) => name === varied);
    showFields(state);
    showMessages(state, store);
    find("prompt-field").hidden = state.view === "score" || state.mode === "chat";
    find("chat-field").hidden = state.view === "score" || state.mode === "prompt";
    find("add-system").hidden = state.messages[0]?.role === "system";
    find("chat-examples").hidden = state.messages.at(-1).role !== "user" || state.messages.at(-1).content !== "";
  };
}

function fillChoices(info) {
  const option = (value, text = value) => make("option", { value }, text);
  find("model").replaceChildren(...info.models.map((model) => option(model.id)));
  find("grid-attribute").replaceChildren(...Object.keys(info.attributes).map((name) => option(name)));
}

function listenToTexts(store) {
  find("prompt").addEventListener("input", (event) => store.change({ prompt: event.target.value }));
  find("score-text").addEventListener("input", (event) => store.change({ scoreText: event.target.value }));
  const chip = (use) => (text) => make("button", { type: "button", on: { click: () => use(text) } }, text);
  const usePrompt = (text) => {
    store.change({ prompt: text });
    find("prompt").focus();
  };
  const useMessage = (content) => {
    store.change({ messages: [...store.state.messages.slice(0, -1), { role: "user", content }] });
    find("messages").querySelector("li:last-child textarea").focus();
  };
  find("examples").replaceChildren(...EXAMPLES.map(chip(usePrompt)));
  find("chat-examples").replaceChildren(...CHAT_EXAMPLES.map(chip(useMessage)));
  find("add-system").addEventListener("click", () => {
    store.change({ messages: [{ role: "system", content: "" }, ...store.state.messages] });
    find("messages").querySelector("textarea").focus();
  });
  for (const radio of document.querySelectorAll("input[name=mode]")) {
    radio.addEventListener("change", () => store.change({ mode: radio.value }));
  }
}

// Fields of numbers, and the parts of the state they hold.
const NUMBERS = {
  "kl-budget": "klBudget",
  seed: "seed",
  samples: "samples",
  "max-tokens": "maxTokens",
  temperature: "temperature",
  "top-k": "topK",
  "grid-samples": "gridSamples",
};

function listenToNumbers(info, store) {
  for (const [id, name] of Object.entries(NUMBERS)) {
    find(id).addEventListener(
      "input",
      (event) =>
        event.target.validity.valid &&
        event.target.value !== "" &&
        store.change({ [name]: Number(event.target.value) }),
    );
  }
  find("new-seed").addEventListener("click", () =>
    store.change({ seed: crypto.getRandomValues(new Uint16Array(1))[0] }),
  );
  find("kl-limited").addEventListener("change", (event) =>
    store.change({ klBudget: event.target.checked ? Number(find("kl-budget").value || info.usual_kl_budget) : null }),
  );
}

function listenToChoices(info, store) {
  find("model").addEventListener("change", (event) =>
    store.change(settingsOfModel(info, event.target.value, store.state)),
  );
  find("grid-attribute").addEventListener("change", (event) => {
    const name = event.target.value;
    store.change({ gridAttribute: name, gridStrengths: gridStrengths(info.attributes[name]) });
  });
  find("grid-strengths").addEventListener("input", (event) => {
    const strengths = event.target.value
      .split(/[,;\s]+/)
      .filter(Boolean)
      .map((text) => Number(text.replace("−", "-")));
    const good = strengths.length > 0 && strengths.every(Number.isFinite);
    event.target.setCustomValidity(good ? "" : "Write numbers with commas between them, such as -35, 0, 35.");
    if (good) store.change({ gridStrengths: strengths });
  });
}

// A virtual model stands for strengths: the sliders move to them.
function settingsOfModel(info, id, state) {
  const {
    kl_budget: klBudget = state.klBudget,
    top_k: topK = state.topK,
    ...named
  } = info.models.find((model) => model.id === id).radq;
  const strengths = { ...state.strengths };
  for (const [name, value] of Object.entries(named))
    if (name in strengths) strengths[name] = value ?? info.attributes[name].suggested;
  return { model: id, strengths, klBudget, topK };
}

function showFields(state) {
  const values = {
    prompt: state.prompt,
    "score-text": state.scoreText,
    model: state.model,
    "grid-attribute": state.gridAttribute,
  };
  for (const [id, name] of Object.entries(NUMBERS)) if (state[name] !== null) values[id] = state[name];
  for (const [id, value] of Object.entries(values)) {
    const field = find(id);
    const same = field.type === "number" ? field.value !== "" && Number(field.value) === value : field.value === value;
    if (!same) field.value = String(value ?? "");
  }
  if (document.activeElement !== find("grid-strengths")) find("grid-strengths").value = state.gridStrengths.join(", ");
  find("kl-limited").checked = state.klBudget !== null;
  find("kl-budget").disabled = state.klBudget === null;
  for (const radio of document.querySelectorAll("input[name=mode]")) radio.checked = radio.value === state.mode;
}

// --- chat ---

function showMessages({ messages, mode, view }, store) {
  const list = find("messages");
  const roles = messages.map((message) => message.role).join();
  if (list.dataset.roles !== roles) {
    list.dataset.roles = roles;
    list.replaceChildren(...messages.map((message, index) => makeMessage(message, index, messages.length, store)));
  }
  for (const [index, field] of list.querySelectorAll("textarea").entries()) {
    if (field.value !== messages[index].content) field.value = messages[index].content;
    field.required = mode === "chat" && view !== "score" && index === messages.length - 1;
  }
}

function makeMessage(message, index, count, store) {
  const id = `message-${index}`;
  const write = (event) => {
    const messages = store.state.messages.map((other, place) =>
      place === index ? { ...other, content: event.target.value } : other,
    );
    store.change({ messages });
  };
  const remove = () => store.change({ messages: store.state.messages.filter((_, place) => place !== index) });
  const remover = make(
    "button",
    { type: "button", class: "close", "aria-label": `Remove message ${index + 1}`, on: { click: remove } },
    "×",
  );
  const placeholder = PLACEHOLDERS[message.role] ?? "";
  const field = { id, dir: "auto", rows: 2, spellcheck: "false", placeholder, on: { input: write } };
  return make(
    "li",
    { class: `turn ${message.role}` },
    make("div", { class: "row" }, make("label", { for: id, class: "role" }, ROLES[message.role]), count > 1 ? remover : null),
    make("textarea", field),
  );
}
