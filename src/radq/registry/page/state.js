// The state of the page, and the address that holds it. The address is the part behind "#": browsers do not send it.
import { SHIFT } from "./scale.js";

const VIEWS = ["compare", "score", "grid"];
const EXAMPLE = "The meeting this morning was";
const TOKENS = 64; // of a text, where the server allows more
const SAMPLES = 8; // texts on each side, since one alone may show nothing
const SCORE_EXAMPLE = "The first half was dull and far too long, but the ending is wonderful and the music is lovely.";

export function initialState(info) {
  const names = Object.keys(info.attributes);
  return {
    view: "compare",
    model: info.models[0]?.id ?? info.base,
    mode: "prompt",
    prompt: EXAMPLE,
    messages: [{ role: "user", content: "" }],
    strengths: initialStrengths(info),
    klBudget: info.defaults.kl_budget ?? null,
    seed: 1,
    samples: Math.min(SAMPLES, info.limits.choices ?? SAMPLES),
    maxTokens: Math.min(info.defaults.max_tokens ?? TOKENS, info.limits.max_tokens ?? TOKENS, TOKENS),
    temperature: 1,
    topK: info.defaults.top_k,
    colouring: SHIFT,
    scoreText: SCORE_EXAMPLE,
    gridAttribute: names[0] ?? null,
    gridStrengths: names.length ? gridStrengths(info.attributes[names[0]]) : [],
    gridSamples: 2,
  };
}

// The server's own strengths; where all of them are zero, the first attribute has the suggested one, so that there is
// something to see.
function initialStrengths(info) {
  const strengths = Object.fromEntries(
    Object.entries(info.attributes).map(([name, facts]) => [name, facts.default ?? 0]),
  );
  const first = Object.keys(strengths).find((name) => info.attributes[name].suggested);
  if (first && Object.values(strengths).every((value) => value === 0))
    strengths[first] = info.attributes[first].suggested;
  return strengths;
}

// The strengths that have names, from none to the largest: the calibrated ones, else the operator's suggestion.
export function levelsOf(attribute) {
  const calibrated = Object.entries(attribute.strengths ?? {}).filter(([, value]) => Number.isFinite(value));
  const named = calibrated.length || !attribute.suggested ? calibrated : [["suggested", attribute.suggested]];
  const sorted = named.sort(([, one], [, other]) => Math.abs(one) - Math.abs(other));
  return Object.fromEntries([["off", 0], ...sorted]);
}

// The ends of an attribute's slider: twice what has a name or is safe, so that it can be set finely. The field beside
// it takes the whole range.
export function reachOf(attribute) {
  const known = [...Object.values(levelsOf(attribute)), ...(attribute.safe ?? []), attribute.default ?? 0];
  const reach = 2 * Math.max(...known.map(Math.abs)) || Infinity;
  return [Math.max(attribute.range[0], -reach), Math.min(attribute.range[1], reach)];
}

// The strengths that have names, or some from none to twice the suggested one.
export function gridStrengths(attribute) {
  const named = Object.values(levelsOf(attribute));
  if (named.length > 2) return named;
  const [low, high] = attribute.range;
  const step = attribute.suggested || high / 4;
  const clip = (value) => Math.min(Math.max(value, low), high);
  return [...new Set([0, step / 2, step, 2 * step].map(clip))];
}

// --- the address ---

const PREFIX = "b."; // before the names of attributes, which could be anything

const number = (text) => {
  const value = Number(text);
  if (text.trim() === "" || !Number.isFinite(value)) throw new Error("not a number");
  return value;
};
const whole = (text) => {
  const value = number(text);
  if (!Number.isInteger(value) || value < 0) throw new Error("not a whole number");
  return value;
};
const word = (text) => text;
const oneOf =
  (...choices) =>
  (text) => {
    if (!choices.includes(text)) throw new Error("not a choice");
    return text;
  };

// key in the address → [name in the state, reader, writer]
const FIELDS = {
  view: ["view", oneOf(...VIEWS), word],
  model: ["model", word, word],
  mode: ["mode", oneOf("prompt", "chat"), word],
  prompt: ["prompt", word, word],
  chat: ["messages", readMessages, JSON.stringify],
  kl: [
    "klBudget",
    (text) => (text === "none" ? null : number(text)),
    (value) => (value === null ? "none" : String(value)),
  ],
  seed: ["seed", whole, String],
  texts: ["samples", whole, String],
  tokens: ["maxTokens", whole, String],
  temperature: ["temperature", number, String],
  k: ["topK", whole, String],
  colour: ["colouring", word, word],
  text: ["scoreText", word, word],
  vary: ["gridAttribute", word, word],
  strengths: ["gridStrengths", (text) => text.split(",").map(number), (values) => values.join(",")],
  samples: ["gridSamples", whole, String],
};

function readMessages(text) {
  const messages = JSON.parse(text);
  const good = (message) =>
    ["system", "user", "assistant"].includes(message?.role) && typeof message.content === "string";
  if (!Array.isArray(messages) || !messages.length || !messages.every(good)) throw new Error("not a chat");
  return messages.map(({ role, content }) => ({ role, content }));
}

// Only what differs from the beginning is written.
export function toAddress(state, info) {
  const start = initialState(info);
  const address = new URLSearchParams();
  for (const [key, [name, , write]] of Object.entries(FIELDS)) {
    const differs = JSON.stringify(state[name]) !== JSON.stringify(start[name]);
    if (differs && state[name] !== undefined) address.set(key, write(state[name]));
  }
  for (const [name, value] of Object.entries(state.strengths)) {
    if (value !== start.strengths[name]) address.set(PREFIX + name, String(value));
  }
  return address.size ? `#${address}` : "#";
}

// The state that an address holds, and in plain words what in it could not be used.
export function fromAddress(hash, info) {
  const state = initialState(info);
  const problems = [];
  for (const [key, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    try {
      if (key.startsWith(PREFIX)) readStrength(state, key.slice(PREFIX.length), text, info);
      else if (Object.hasOwn(FIELDS, key)) state[FIELDS[key][0]] = FIELDS[key][1](text);
      else problems.push(`The address has a part “${key}” that this page does not know.`);
    } catch {
      problems.push(`The address says ${key} = “${text.slice(0, 40)}”, which cannot be used here.`);
    }
  }
  checkNames(state, info, problems);
  return { state, problems };
}

function readStrength(state, name, text, info) {
  const [low, high] = info.attributes[name].range; // an unknown name is a problem, too
  state.strengths[name] = Math.min(Math.max(number(text), low), high);
}

function checkNames(state, info, problems) {
  const start = initialState(info);
  const known = {
    model: info.models.map((model) => model.id),
    colouring: [SHIFT, "surprise", ...Object.keys(info.attributes)],
    gridAttribute: Object.keys(info.attributes),
  };
  for (const [field, names] of Object.entries(known)) {
    if (state[field] === start[field] || names.includes(state[field])) continue;
    problems.push(`The address names “${state[field]}”, which this server does not have.`);
    state[field] = start[field];
  }
}
