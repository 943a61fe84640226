// A small drawing of the trade-off: reward and perplexity against strength.
import { draw, make } from "./dom.js";
import { formatNumber, formatStrength } from "./numbers.js";

const WIDTH = 300;
const HEIGHT = 130;
const MARGIN = { left: 38, right: 12, top: 14, bottom: 26 };

export function drawTradeoff(points, attribute, facts) {
  const known = points.filter((point) => point.tokens > 0).sort((one, other) => one.strength - other.strength);
  if (known.length < 2) return [];
  const perplexities = known.map((point) => point.perplexity);
  return [
    drawLine(known, (point) => point.rewards[attribute], facts.rewards ?? [0, 1], `Mean ${attribute}`, "reward"),
    drawLine(known, (point) => point.perplexity, [0, 1.1 * Math.max(...perplexities)], "Perplexity", "perplexity"),
  ];
}

function drawLine(points, read, [low, high], title, kind) {
  const strengths = points.map((point) => point.strength);
  const [left, right] = [Math.min(...strengths), Math.max(...strengths)];
  const x = (value) => MARGIN.left + ((value - left) / (right - left || 1)) * (WIDTH - MARGIN.left - MARGIN.right);
  const y = (value) => HEIGHT - MARGIN.bottom - ((value - low) / (high - low || 1)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const places = points.map((point) => [x(point.strength), y(read(point))]);
  const description = points.map((point) => `${formatStrength(point.strength)}: ${formatNumber(read(point))}`).join("; ");
  const drawing = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title} by strength. ${description}`, class: `chart ${kind}` });
  for (const value of [low, high]) {
    drawing.append(
      draw("line", { class: "axis", x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: y(value), y2: y(value) }),
      draw("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, formatNumber(value, high < 10 ? 1 : 0)),
    );
  }
  drawing.append(draw("polyline", { class: "curve", points: places.map((place) => place.join(",")).join(" ") }));
  for (const [index, [cx, cy]] of places.entries()) {
    drawing.append(
      draw("circle", { cx, cy, r: 4 }),
      draw("text", { x: cx, y: HEIGHT - 8, "text-anchor": "middle" }, formatStrength(strengths[index])),
    );
  }
  return make("figure", {}, make("figcaption", {}, `${title} by strength`), drawing);
}
