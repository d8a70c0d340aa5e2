// An answer on the page: its text, tinted by depth, its chart and its figures.

import { DepthChart, tint } from "./chart.js";
import { create, render } from "./markdown.js";

export class Answer {
  constructor(parent, model, policy, title) {
    this.layers = model.taper.num_hidden_layers;
    this.least = model.taper.policies[policy].min_depth;
    this.tokens = [];
    this.seconds = []; // when each token came
    this.summary = null;
    this.element = create(parent, "article", "answer running");
    this.element.dataset.policy = policy;
    if (title) create(this.element, "h3", "", title);
    this.text = create(this.element, "div", "text");
    this.chart = new DepthChart(this.element, this.layers, this.least);
    this.chart.element.hidden = true;
    this.figures = create(this.element, "p", "figures", "reading the prompt");
    this.drawing = 0;
  }

  take(event) {
    const [choice] = event.choices;
    this.firstToken ??= performance.now();
    this.add(choice.delta.content, choice.taper.depth);
    if (choice.taper.depth) this.seconds.push(choice.taper.seconds);
    if (choice.finish_reason) this.summary = { ...choice.taper, finish_reason: choice.finish_reason };
    this.drawing ||= requestAnimationFrame(() => this.draw());
  }

  add(text, depth) {
    const title = depth ? `step ${this.chart.depths.length}: ${depth} of ${this.layers} layers` : "";
    const className = depth ? tint(depth, this.layers, this.least) : "t0";
    if (text) this.tokens.push({ text, depth, className, title });
    if (depth) this.chart.depths.push(depth);
  }

  // Shows an answer from before the page was reloaded.
  restore({ tokens, figures }) {
    for (const [text, depth] of tokens) this.add(text, depth);
    this.end();
    this.figures.textContent = figures;
  }

  draw() {
    this.drawing = 0;
    const log = document.getElementById("conversation");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    this.text.replaceChildren(render(this.tokens));
    this.chart.element.hidden = !this.chart.depths.length;
    this.chart.draw();
    this.drawFigures();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  drawFigures() {
    const { depths } = this.chart;
    const count = depths.length;
    if (!count) return;
    const seconds = (performance.now() - this.firstToken) / 1000;
    const speed = this.summary ? this.summary.tokens_per_second : count > 1 ? (count - 1) / seconds : 0;
    const mean = this.summary?.mean_depth ?? depths.reduce((a, b) => a + b) / count;
    this.figures.replaceChildren();
    create(this.figures, "b", "", `${count}`);
    this.figures.append(count === 1 ? " token, mean depth " : " tokens, mean depth ");
    create(this.figures, "b", "", mean.toFixed(1));
    this.figures.append(` of ${this.layers}, `);
    create(this.figures, "b", "", speed.toFixed(1));
    this.figures.append(" tokens/s");
    const { accepted_tokens: accepted, drafted_tokens: drafted } = this.summary ?? {};
    if (drafted) this.figures.append(`, ${accepted} of ${drafted} drafted tokens accepted`);
    if (this.stopped) this.figures.append(", stopped");
    if (this.summary?.finish_reason === "length") this.figures.append(", cut at the token limit");
  }

  end() {
    cancelAnimationFrame(this.drawing);
    this.element.classList.remove("running");
    if (!this.chart.depths.length) this.figures.textContent = this.stopped ? "stopped" : "";
    this.draw();
    if (!this.content || !navigator.clipboard) return;
    const copy = create(this.element, "button", "copy", "Copy");
    copy.type = "button";
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(this.content);
      copy.textContent = "Copied";
    });
  }

  get message() {
    const tokens = this.tokens.map(({ text, depth }) => [text, depth]);
    const policy = this.element.dataset.policy;
    return { role: "assistant", content: this.content, policy, tokens, figures: this.figures.textContent };
  }

  get content() {
    return this.tokens.map((token) => token.text).join("");
  }
}
