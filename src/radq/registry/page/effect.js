// What steering does, over all texts: mean and spread of each attribute and of the perplexity, unguided and guided.
import { make } from "./dom.js";
import { formatNumber, formatSigned } from "./numbers.js";
import { describeEffect, spreadOf } from "./statistics.js";
import { term } from "./terms.js";

const HEADS = ["Attribute", "One dot per text", "Unguided", "Guided", "Change"];

export function createEffect(attributes) {
  const lead = make("p", { class: "lead" }, "Press Generate to see it over several texts.");
  const rows = make("tbody");
  const heads = HEADS.map((head) => make("th", { scope: "col" }, head));
  const table = make("table", { hidden: true }, make("thead", {}, make("tr", {}, ...heads)), rows);
  const note = make(
    "p",
    { class: "soft small", hidden: true },
    term("Mean ± spread"),
    " of the texts below; attributes as the guide itself scores them.",
  );
  const title = make("h2", { id: "effect-title" }, "What steering does");
  const element = make("section", { class: "effect", "aria-labelledby": "effect-title" }, title, lead, table, note);

  // unguided and guided: summaries of texts; strengths: by attribute.
  function show(unguided, guided, strengths) {
    const kinds = Object.entries(attributes)
      .filter(([, facts]) => facts.rewards)
      .map(([name, facts]) => ({ name, read: (one) => one.rewards[name], range: facts.rewards, digits: 2 }));
    kinds.push({ name: "perplexity", read: (one) => one.perplexity, range: null, digits: 1 });
    rows.replaceChildren(
      ...kinds.map(({ name, read, range, digits }) => {
        const both = [unguided.map(read), guided.map(read)];
        return makeRow(name, both, range ?? rangeOf(both), digits, name === "perplexity" || strengths[name] !== 0);
      }),
    );
    table.hidden = note.hidden = false;
    return (lead.textContent = describeEffect(unguided, guided, strengths));
  }

  return { element, show };
}

const rangeOf = (both) => [0, 1.1 * Math.max(1, ...both.flat().filter(Number.isFinite))];

function makeRow(name, both, range, digits, steered) {
  const [before, after] = both.map(spreadOf);
  const number = (kind, { mean, spread }) =>
    make("td", { class: kind }, make("strong", {}, formatNumber(mean, digits)), spread === null ? "" : ` ± ${formatNumber(spread, digits)}`);
  const change = after.mean === null || before.mean === null ? null : after.mean - before.mean;
  const lanes = make("td", { class: "lanes", "aria-hidden": "true" });
  lanes.append(makeLane("unguided", both[0], before, range), makeLane("guided", both[1], after, range));
  return make(
    "tr",
    { class: steered ? "" : "free" },
    make("th", { scope: "row" }, term(name), steered ? null : make("small", { class: "soft" }, "not steered")),
    lanes,
    number("before", before),
    number("after", after),
    make("td", { class: "change" }, formatSigned(change, digits)),
  );
}

function makeLane(kind, values, { mean, spread }, [low, high]) {
  const share = (value) => Math.min(Math.max((value - low) / (high - low), 0), 1);
  const lane = make("span", { class: `lane ${kind}` });
  if (mean === null) return lane;
  const reach = spread ?? 0;
  lane.append(make("span", { class: "spread", variables: { from: share(mean - reach), to: share(mean + reach) } }));
  const known = values.filter(Number.isFinite);
  lane.append(...known.map((value) => make("span", { class: "dot", variables: { at: share(value) } })));
  lane.append(make("span", { class: "mean", variables: { at: share(mean) } }));
  return lane;
}
