// A chart of depth by step that grows with the output, and the token that is chosen in it; and the tints of depths.

import { create } from "./markdown.js";

const SVG = "http://www.w3.org/2000/svg";
const LEVELS = 5; // as many colours as in the terminal
const WIDTH = 600;
const HEIGHT = 68;

// The class of a token's colour: t0 for all layers, the highest for the policy's minimum depth.
export function tint(depth, layers, least) {
  const span = Math.max(1, layers - least);
  return `t${Math.floor(((LEVELS - 1) * (layers - depth)) / span)}`;
}

// The depths that share each colour: [class, most, least].
export function legend(layers, least) {
  const groups = new Map();
  for (let depth = layers; depth >= least; depth -= 1) {
    const name = tint(depth, layers, least);
    groups.set(name, [name, groups.get(name)?.[1] ?? depth, depth]);
  }
  return [...groups.values()];
}

export class DepthChart {
  constructor(parent, layers, least) {
    this.layers = layers;
    this.least = least;
    this.depths = [];
    this.element = create(parent, "figure");
    this.element.hidden = true;
    this.svg = node("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.area = node("path", { class: "area" });
    this.curve = node("path", { class: "curve" });
    this.svg.append(node("line", { class: "all", x1: 0, x2: WIDTH, y1: 2, y2: 2 }), this.area, this.curve);
    this.element.append(this.svg);
    const axis = create(this.element, "figcaption", "axis");
    this.start = create(axis, "span");
    this.end = create(axis, "span");
  }

  // Has a slider choose a step, by key, pointer or touch; describe(step) says what there is at one.
  letChoose(describe, leave) {
    const slider = document.createElement("input");
    Object.assign(slider, { type: "range", min: 0, max: this.depths.length - 1, value: 0 });
    slider.setAttribute("aria-label", "Step");
    const show = () => {
      this.start.textContent = describe(slider.valueAsNumber);
      slider.setAttribute("aria-valuetext", this.start.textContent);
    };
    slider.addEventListener("input", show);
    slider.addEventListener("focus", show);
    slider.addEventListener("blur", () => {
      leave();
      this.draw();
    });
    this.svg.after(slider);
  }

  // Hidden until a token skips a layer.
  draw() {
    const count = this.depths.length;
    this.element.hidden = this.depths.every((depth) => depth === this.layers);
    if (this.element.hidden) return;
    const x = (step) => ((WIDTH * step) / count).toFixed(1);
    const span = Math.max(1, this.layers - this.least);
    const y = (depth) => (2 + ((HEIGHT - 4) * (this.layers - depth)) / span).toFixed(1);
    const steps = this.depths.map((depth, step) => `H${x(step)}V${y(depth)}H${x(step + 1)}`).join("");
    const path = `M0 ${y(this.depths[0])}${steps}`;
    this.curve.setAttribute("d", path);
    this.area.setAttribute("d", `${path}V2H0Z`); // the layers that were not run
    const last = this.depths[count - 1];
    this.svg.setAttribute("aria-label", `Layers by step: ${this.layers} at first, ${last} at step ${count - 1}`);
    this.start.textContent = `${this.depths[0]} of ${this.layers} layers`;
    const saved = this.depths.reduce((sum, depth) => sum + this.layers - depth, 0) / (count * this.layers);
    this.end.textContent = `${last} at step ${count - 1}, ${Math.round(100 * saved)} % of all layers saved`;
  }
}

function node(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
