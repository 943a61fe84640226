// Small drawings: reward and perplexity against strength, and rewards along a text.
import { draw, make } from "./dom.js";
import { formatNumber, formatStrength } from "./numbers.js";

const WIDTH = 300;
const HEIGHT = 130;
const MARGIN = { left: 38, right: 12, top: 14, bottom: 26 };
const MOST_DOTS = 12; // longer lines are drawn without them

// One drawing for the reward and one for the perplexity, as soon as two strengths are known.
export function drawTradeoff(columns, attribute, facts) {
  const known = columns.filter((column) => column.tokens > 0).sort((one, other) => one.strength - other.strength);
  if (known.length < 2) return [];
  const points = (read) =>
    known.map((column) => ({ at: column.strength, value: read(column), label: formatStrength(column.strength) }));
  const highest = Math.max(...known.map((column) => column.perplexity));
  return [
    drawLine(
      points((column) => column.rewards[attribute]),
      facts.rewards ?? [0, 1],
      `Mean ${attribute} by strength`,
    ),
    drawLine(
      points((column) => column.perplexity),
      [0, 1.1 * highest],
      "Perplexity by strength",
    ),
  ];
}

// One drawing per attribute: its reward after each token.
export function drawCourses(tokens, attributes) {
  const rewarded = Object.entries(attributes).filter(([, facts]) => facts.rewards);
  return rewarded.map(([name, facts]) => {
    const points = tokens.map((token, index) => ({ at: index, value: token.rewards[name], label: token.token.trim() }));
    return drawLine(points, facts.rewards, `${name}, from the first token to the last`);
  });
}

// points: [{ at, value, label }], from left to right.
function drawLine(points, [low, high], title) {
  const [left, right] = [points[0].at, points.at(-1).at];
  const x = (at) => MARGIN.left + ((at - left) / (right - left || 1)) * (WIDTH - MARGIN.left - MARGIN.right);
  const y = (value) =>
    HEIGHT - MARGIN.bottom - ((value - low) / (high - low || 1)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const spoken = points.map((point) => `${point.label}: ${formatNumber(point.value)}`).join("; ");
  const drawing = draw("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    role: "img",
    "aria-label": `${title}. ${spoken}`,
    class: "chart",
  });
  for (const value of [low, high]) {
    drawing.append(
      draw("line", { class: "axis", x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: y(value), y2: y(value) }),
      draw(
        "text",
        { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" },
        formatNumber(value, high - low < 10 ? 1 : 0),
      ),
    );
  }
  drawing.append(
    draw("polyline", { class: "curve", points: points.map((point) => `${x(point.at)},${y(point.value)}`).join(" ") }),
  );
  if (points.length <= MOST_DOTS) {
    for (const { at, value, label } of points) {
      drawing.append(
        draw("circle", { cx: x(at), cy: y(value), r: 4 }),
        draw("text", { x: x(at), y: HEIGHT - 8, "text-anchor": "middle" }, label),
      );
    }
  }
  return make("figure", {}, make("figcaption", {}, title), drawing);
}
