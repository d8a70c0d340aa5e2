// Depth by step, as a picture that grows; and the tints of depths.

const SVG = "http://www.w3.org/2000/svg";
const LEVELS = 8;
const WIDTH = 600;
const HEIGHT = 68;

// The class that tints a token: none at full depth, the strongest at the policy's least depth.
export function tint(depth, layers, least) {
  const span = Math.max(1, layers - least);
  const level = Math.ceil((LEVELS * (layers - depth)) / span);
  return level > 0 ? `t${Math.min(LEVELS, level)}` : "t0";
}

export class DepthChart {
  constructor(layers) {
    this.layers = layers;
    this.depths = [];
    this.element = document.createElement("figure");
    this.svg = node("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.area = node("path", { class: "area" });
    this.curve = node("path", { class: "curve" });
    this.svg.append(node("line", { class: "all", x1: 0, x2: WIDTH, y1: 2, y2: 2 }), this.area, this.curve);
    this.axis = document.createElement("figcaption");
    this.axis.className = "axis";
    this.axis.append(document.createElement("span"), document.createElement("span"));
    this.element.append(this.svg, this.axis);
  }

  add(depth) {
    this.depths.push(depth);
  }

  draw() {
    const count = this.depths.length;
    if (!count) return;
    const x = (step) => ((WIDTH * step) / count).toFixed(1);
    const y = (depth) => (HEIGHT - ((HEIGHT - 2) * depth) / this.layers).toFixed(1);
    const steps = this.depths.map((depth, step) => `H${x(step)}V${y(depth)}H${x(step + 1)}`).join("");
    const path = `M0 ${y(this.depths[0])}${steps}`;
    this.curve.setAttribute("d", path);
    this.area.setAttribute("d", `${path}V${HEIGHT}H0Z`);
    const last = this.depths[count - 1];
    this.svg.setAttribute("aria-label", `Layers by step: ${this.layers} at first, ${last} at step ${count - 1}`);
    this.axis.firstChild.textContent = `${this.depths[0]} of ${this.layers} layers`;
    this.axis.lastChild.textContent = `${last} at step ${count - 1}`;
  }
}

function node(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
