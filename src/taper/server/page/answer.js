// An answer on the page: its text, tinted by depth, its chart and its figures.

import { DepthChart, tint } from "./chart.js";
import { create, render } from "./markdown.js";

// Keeps the end of the conversation in view while it grows, unless its reader has scrolled up.
export function following(change) {
  const log = document.getElementById("conversation");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

export class Answer {
  constructor(parent, model, policy, title) {
    this.layers = model.taper.num_hidden_layers;
    this.least = model.taper.policies[policy].min_depth;
    this.firstSkip = model.taper.policies[policy].first_skip; // null at full depth
    this.tokens = [];
    this.titles = []; // of steps
    this.seconds = []; // when each token came
    this.summary = null;
    this.element = create(parent, "article", "answer running");
    this.element.dataset.policy = policy;
    if (title) create(this.element, "h2", "", title);
    this.text = create(this.element, "div", "text");
    this.chart = new DepthChart(this.element, this.layers, this.least);
    this.figures = create(this.element, "p", "figures", "reading the prompt");
    this.actions = create(this.element, "div", "actions");
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
    if (depth) this.titles.push(title);
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
    following(() => {
      this.text.replaceChildren(render(this.tokens));
      this.chart.draw();
      this.drawFigures();
    });
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
    if (this.ended && count <= this.firstSkip) this.figures.append(`; this policy skips from token ${this.firstSkip + 1} on`);
  }

  // Marks the token of a step, and says its depth.
  mark(step) {
    const title = this.titles[step];
    for (const span of this.text.querySelectorAll("span[title]")) span.classList.toggle("marked", span.title === title);
    const text = this.tokens.find((token) => token.title === title)?.text.trim();
    return text ? `${title}, “${text}”` : title;
  }

  end() {
    cancelAnimationFrame(this.drawing);
    this.ended = true;
    this.element.classList.remove("running");
    if (!this.chart.depths.length) this.figures.textContent = this.stopped ? "stopped" : "";
    this.draw();
    this.chart.letChoose((step) => this.mark(step), () => this.mark(null));
    if (!this.content || !navigator.clipboard) return;
    const copy = create(this.actions, "button", "", "Copy");
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
