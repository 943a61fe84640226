// Numbers about a text, from the details of its tokens.
import { formatNumber, mean } from "./numbers.js";

export function summarise(details) {
  const names = [...new Set(details.flatMap((detail) => Object.keys(detail.rewards ?? {})))];
  const surprise = mean(details.map((detail) => -(detail.base_logprob ?? NaN)));
  return {
    tokens: details.filter((detail) => detail.id !== null).length,
    rewards: Object.fromEntries(names.map((name) => [name, mean(details.map((detail) => detail.rewards?.[name]))])),
    perplexity: surprise === null ? null : Math.exp(surprise),
    kl: mean(details.map((detail) => detail.kl)),
  };
}

// The mean of the known values, and their standard deviation; null if they are too few.
export function spreadOf(values) {
  const known = values.filter((value) => Number.isFinite(value));
  const middle = mean(known);
  const squares = known.reduce((sum, value) => sum + (value - middle) ** 2, 0);
  return { mean: middle, spread: known.length < 2 ? null : Math.sqrt(squares / (known.length - 1)) };
}

// One sentence about what steering did. unguided and guided: summaries of texts; strengths: by attribute.
export function describeEffect(unguided, guided, strengths) {
  const names = Object.keys(strengths).filter((name) => strengths[name] !== 0);
  if (!names.length) return "Nothing is steered: all strengths are 0.";
  const both = (read) => [unguided, guided].map((summaries) => mean(summaries.map(read)));
  const parts = names.map((name) => describeChange(name, ...both((one) => one.rewards[name]))).filter(Boolean);
  const [before, after] = both((one) => one.perplexity);
  if (!parts.length || before === null || after === null) return "Texts are on their way.";
  const count = guided.length === 1 ? "In one text" : `Over ${guided.length} texts`;
  return `${count}, ${parts.join(" and ")}, at ${formatNumber(after / before)} times the perplexity.`;
}

function describeChange(name, before, after) {
  if (before === null || after === null) return null;
  const [from, to] = [formatNumber(before), formatNumber(after)];
  if (from === to) return `${name} stays at ${to}`;
  return `${name} ${after > before ? "rises" : "falls"} from ${from} to ${to}`;
}

// Tokens per second between the first and the last token; times are in milliseconds.
export function tokensPerSecond(count, first, last) {
  return count < 2 || last <= first ? null : (1000 * (count - 1)) / (last - first);
}

// The detail of a candidate that takes the place of the token that was drawn. Candidates' probabilities are
// proportional to the base model's, raised to 1 / temperature: its base probability follows from the drawn token's.
export function forcedDetail(detail, candidate, temperature) {
  const drawn = detail.candidates.find((other) => other.id === detail.id);
  const difference = drawn ? Math.log(candidate.base_probability / drawn.base_probability) : NaN;
  const known = temperature > 0 || candidate.id === detail.id;
  return {
    ...detail,
    id: candidate.id,
    token: candidate.token,
    piece: candidate.token,
    logprob: Math.log(candidate.probability),
    base_logprob: known && Number.isFinite(difference) ? detail.base_logprob + temperature * difference : null,
    shift: candidate.shift,
    rewards: candidate.rewards,
    forced: true,
  };
}
