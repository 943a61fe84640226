// The colours of tokens: blue for low, none in the middle, orange for high. An underline (dotted for low, solid for
// high) says the same without colour. The stylesheet holds the colours themselves.

export const SHIFT = "shift"; // the colouring by what the guide did; other colourings are names of attributes
export const SURPRISE = "surprise"; // the colouring by the base model's own probability
const LARGEST_SHIFT = Math.log(10);
const FAINTEST = 0.04;

// Which side of the middle a value is on, and how far: 0 in the middle, 1 at or beyond the end.
export function lean(value, low, high) {
  if (!Number.isFinite(value) || high <= low) return { side: "none", amount: 0 };
  const position = Math.min(Math.max((2 * (value - low)) / (high - low) - 1, -1), 1);
  if (Math.abs(position) < FAINTEST) return { side: "none", amount: 0 };
  return { side: position < 0 ? "low" : "high", amount: Math.round(Math.abs(position) * 100) / 100 };
}

// The logarithm of how many times likelier the guide made a candidate. A shift that all candidates share cancels.
export function logRatio(candidate) {
  if (!candidate || !(candidate.probability > 0) || !(candidate.base_probability > 0)) return null;
  return Math.log(candidate.probability / candidate.base_probability);
}

export const chosenCandidate = (detail) => detail.candidates?.find((candidate) => candidate.id === detail.id);

// The same for tokens that are shown together: their ratios are multiplied.
export function sharedLogRatio(details) {
  const ratios = details.map((detail) => logRatio(chosenCandidate(detail)));
  return ratios.includes(null) ? null : ratios.reduce((sum, ratio) => sum + ratio, 0);
}

export function leanOfTokens(details, colouring, attributes) {
  if (colouring === SHIFT) return lean(sharedLogRatio(details), -LARGEST_SHIFT, LARGEST_SHIFT);
  if (colouring === SURPRISE) return lean(-details.reduce((sum, one) => sum + (one.base_logprob ?? NaN), 0), 0, 10);
  return leanOfReward(details.at(-1)?.rewards?.[colouring], attributes[colouring]);
}

export const leanOfReward = (reward, attribute) => lean(reward, ...(attribute?.rewards ?? [0, 1]));

// Texts for both ends and the middle of the legend.
export function legendOf(colouring, attributes) {
  if (colouring === SHIFT)
    return { low: "÷10", middle: "same", high: "×10", meaning: "less or more likely than unguided" };
  if (colouring === SURPRISE)
    return { low: "expected", middle: "", high: "surprising", meaning: "by the base model alone" };
  const [low, high] = attributes[colouring]?.rewards ?? [0, 1];
  return {
    low: String(low),
    middle: String((low + high) / 2),
    high: String(high),
    meaning: `reward of the text up to each token`,
  };
}
