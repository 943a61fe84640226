// Requests to the server: the ones the page sends, and the same ones as text to copy.

// A strength of zero for every attribute: nothing is steered, and all rewards are reported.
export const zeroStrengths = (info) => Object.fromEntries(Object.keys(info.attributes).map((name) => [name, 0]));

// The request as somebody would write it: { path, body }.
export function plainRequest(state, strengths, samples = 1) {
  const chat = state.mode === "chat";
  const asked = chat ? { messages: state.messages } : { prompt: state.prompt };
  const body = {
    model: state.model,
    ...asked,
    max_tokens: state.maxTokens,
    temperature: state.temperature,
    seed: state.seed,
    radq: { ...strengths, kl_budget: state.klBudget, top_k: state.topK },
  };
  if (samples > 1) body.n = samples;
  return { path: chat ? "v1/chat/completions" : "v1/completions", body };
}

// The request as the page sends it: as a stream, with the details of every token.
export function detailedRequest({ path, body }) {
  const radq = { ...body.radq, details: true };
  const logprobs = path.includes("chat") ? true : 1;
  return { path, body: { ...body, radq, logprobs, return_token_ids: true, stream: true } };
}

// The request that goes on behind given tokens.
export function continuedRequest({ body }, tokenIds, maxTokens) {
  const { messages, prompt, n, ...rest } = body;
  return detailedRequest({ path: "v1/completions", body: { ...rest, prompt: tokenIds, max_tokens: maxTokens } });
}

// --- as text ---

export const FORMS = {
  curl: asCurl,
  Python: asPython,
  openai: asOpenai,
};

const shellQuoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function asCurl(origin, { path, body }, needsKey) {
  const key = needsKey ? ` \\\n  -H "Authorization: Bearer $RADQ_API_KEY"` : "";
  const data = shellQuoted(JSON.stringify(body, null, 2));
  return `curl ${shellQuoted(`${origin}/${path}`)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${data}`;
}

function asPython(origin, { path, body }, needsKey) {
  const answer = path.includes("chat") ? `["message"]["content"]` : `["text"]`;
  return `import json${needsKey ? "\nimport os" : ""}
from urllib.request import Request, urlopen

body = ${pythonLiteral(body)}
headers = {"Content-Type": "application/json"}
${needsKey ? `headers["Authorization"] = "Bearer " + os.environ["RADQ_API_KEY"]\n` : ""}\
request = Request(${pythonLiteral(`${origin}/${path}`)}, json.dumps(body).encode(), headers)
with urlopen(request) as answer:
    for choice in json.load(answer)["choices"]:
        print(choice${answer})
`;
}

function asOpenai(origin, { path, body }, needsKey) {
  const chat = path.includes("chat");
  const { radq, ...known } = body;
  const lines = Object.entries({ ...known, extra_body: { radq } }).map(
    ([name, value]) => `    ${name}=${pythonLiteral(value, "    ")},`,
  );
  const key = needsKey ? `os.environ["RADQ_API_KEY"]` : `"none"`;
  return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${pythonLiteral(`${origin}/v1`)}, api_key=${key})
answer = client.${chat ? "chat.completions" : "completions"}.create(
${lines.join("\n")}
)
for choice in answer.choices:
    print(choice.${chat ? "message.content" : "text"})
`;
}

// A JSON value as Python writes it. Strings of JSON are strings of Python, too.
function pythonLiteral(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const deeper = `${indent}    `;
  const entries = Array.isArray(value)
    ? value.map((entry) => pythonLiteral(entry, deeper))
    : Object.entries(value).map(([name, entry]) => `${JSON.stringify(name)}: ${pythonLiteral(entry, deeper)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = `${open}${entries.join(", ")}${close}`;
  if (line.length + indent.length <= 88 && !line.includes("\n")) return line;
  return `${open}\n${entries.map((entry) => `${deeper}${entry},\n`).join("")}${indent}${close}`;
}
