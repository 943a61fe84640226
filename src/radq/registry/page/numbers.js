// Numbers as people read them.

const signed = (text) => text.replace("-", "−");

export function formatNumber(value, digits = 2) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const text = value.toFixed(digits);
  return signed(Number(text) === 0 ? text.replace("-", "") : text); // no minus before zero
}

export const formatSigned = (value, digits = 2) => (value > 0 ? "+" : "") + formatNumber(value, digits);

export const formatStrength = (value) => signed(String(value));

export function formatProbability(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const percent = 100 * value;
  if (percent > 0 && percent < 0.1) return "<0.1%";
  return `${percent.toFixed(percent < 9.95 ? 1 : 0)}%`;
}

// How many times likelier something became: "×3.2", or "÷3.2" if it became less likely.
export function formatRatio(logRatio) {
  if (logRatio === null || !Number.isFinite(logRatio)) return "–";
  const factor = Math.exp(Math.abs(logRatio));
  const digits = factor < 9.95 ? 1 : 0;
  if (factor.toFixed(digits) === "1.0") return "×1";
  const shown = factor < 1000 ? factor.toFixed(digits) : factor.toExponential(0).replace("e+", "e");
  return `${logRatio < 0 ? "÷" : "×"}${shown}`;
}

export function mean(values) {
  const known = values.filter((value) => Number.isFinite(value));
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}
