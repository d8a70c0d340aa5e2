// What policies cost, and which colours stand for which depths.

import { legend } from "./chart.js";
import { create } from "./markdown.js";

function percent(value) {
  return `${Math.round(100 * value)} %`;
}

// What a policy costs, from its provenance; without one, that nobody has measured it.
export function showCost(parent, policy, layers) {
  const lines = [`${policy.mean_depth?.toFixed(1) ?? "at least " + policy.min_depth} of ${layers} layers`];
  if (policy.speedup) lines.push(`${policy.speedup[0].toFixed(2)}x as fast where it was measured`);
  if (!policy.agreement) lines.push("quality not measured");
  create(parent, "small", "", lines.join(", "));
  if (policy.agreement) {
    const [value, low, high] = policy.agreement;
    const length = policy.measured_tokens ? ` in ${policy.measured_tokens} tokens` : "";
    bar(parent, value, `same token ${percent(value)} (${percent(low)} to ${percent(high)})${length}`);
  }
  if (policy.late_agreement) {
    const [value, low, high] = policy.late_agreement;
    bar(parent, value, `from token ${policy.late_from} on ${percent(value)} (${percent(low)} to ${percent(high)})`);
  }
  if (policy.repetition) {
    const [value] = policy.repetition;
    bar(parent, value, `repeats ${percent(value)} of itself, full depth ${percent(policy.full_repetition)}`);
  }
}

function bar(parent, value, text) {
  create(parent, "small", "", text);
  create(create(parent, "span", "bar"), "i").style.width = percent(value).replace(" ", "");
}

export function showLegend(parent, layers, least) {
  parent.replaceChildren();
  create(parent, "span", "", "layers");
  for (const [name, most, fewest] of legend(layers, least)) {
    create(parent, "i", name, most === fewest ? `${most}` : `${most}\u2013${fewest}`);
  }
}
