// The row of numbers above a text.
import { make } from "./dom.js";
import { formatNumber } from "./numbers.js";
import { leanOfReward } from "./scale.js";
import { term } from "./terms.js";

// entries: { name: text or element }
export function fillMeters(list, entries) {
  const rows = Object.entries(entries).map(([name, value]) =>
    make("div", {}, make("dt", {}, term(name)), make("dd", {}, value)),
  );
  list.replaceChildren(...rows);
}

// A reward as a number and as a bar from the lowest to the highest reward.
export function rewardMeter(reward, attribute) {
  const [low, high] = attribute.rewards ?? [0, 1];
  const { side } = leanOfReward(reward, attribute);
  const share = Number.isFinite(reward) ? Math.min(Math.max((reward - low) / (high - low), 0), 1) : 0;
  const bar = make("span", { class: `meter ${side}`, variables: { share }, "aria-hidden": "true" });
  return make("span", {}, formatNumber(reward), bar);
}

export function rewardMeters(rewards, attributes) {
  return Object.fromEntries(
    Object.entries(attributes)
      .filter(([, facts]) => facts.rewards)
      .map(([name, facts]) => [name, rewardMeter(rewards[name], facts)]),
  );
}
