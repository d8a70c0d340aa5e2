// What policies are and cost, and which colours stand for which depths.

import { legend } from "./chart.js";
import { create } from "./markdown.js";

function percent(value) {
  return `${Math.round(100 * value)} %`;
}

function interval([, low, high], shown) {
  return `(${shown(low)} to ${shown(high)})`;
}

// A policy in a few words: its name, and the depth and speed that were measured, with the length of those outputs.
export function showPolicy(parent, name, policy, layers) {
  create(parent, "strong", "", name);
  if (policy.default) create(parent, "span", "badge", "default");
  if (name.endsWith("-plain")) create(parent, "small", "", "without trained adapters");
  if (policy.speedup) {
    const speed = `${policy.speedup[0].toFixed(2)}x as fast ${interval(policy.speedup, (value) => value.toFixed(2))}`;
    const depth = `${policy.mean_depth.toFixed(1)} of ${layers} layers`;
    create(parent, "small", "", `${depth} and ${speed} over ${policy.measured_tokens} tokens`);
  } else {
    create(parent, "small", "", `at least ${policy.min_depth} of ${layers} layers, quality not measured`);
  }
}

// What a policy costs, from its provenance.
export function showCost(parent, policy) {
  create(parent, "small", "", `skips layers from token ${policy.first_skip + 1} on`);
  if (policy.agreement) {
    const same = `same token ${percent(policy.agreement[0])} ${interval(policy.agreement, percent)}`;
    bar(parent, "better", policy.agreement[0], `${same} in ${policy.measured_tokens} tokens`);
  }
  if (policy.late_agreement) {
    const late = `${percent(policy.late_agreement[0])} ${interval(policy.late_agreement, percent)}`;
    bar(parent, "better", policy.late_agreement[0], `from token ${policy.late_from} on ${late}`);
  }
  if (policy.repetition) {
    const [value] = policy.repetition;
    bar(parent, "worse", value, `repeats ${percent(value)} of itself, full depth ${percent(policy.full_repetition)}`);
  }
}

function bar(parent, name, value, text) {
  create(parent, "small", "", text);
  create(create(parent, "span", `bar ${name}`), "i").style.width = percent(value).replace(" ", "");
}

export function showLegend(parent, layers, least) {
  parent.replaceChildren();
  create(parent, "span", "", "layers");
  for (const [name, most, fewest] of legend(layers, least)) {
    create(parent, "i", name, most === fewest ? `${most}` : `${most}\u2013${fewest}`);
  }
}
