// Numbers about a text, from the details of its tokens.
import { mean } from "./numbers.js";

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
