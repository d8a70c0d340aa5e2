// The playground: a conversation with the served model, and what depth does to it.

import { ApiError, chat, fetchModel } from "./api.js";
import { DepthChart, tint } from "./chart.js";
import { render } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const NOTES = {
  full: "Every layer for every token: the model as it is.",
  taper: "Fewer layers per token as the answer grows.",
  compare: "The same prompt at full depth and tapered, one after the other, so that neither slows the other.",
};

let model = null;
let history = []; // [{role, content}]
let running = null; // AbortController of the turn that runs

function create(parent, name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

// One output as it grows: its text, tinted by depth, its chart and its figures.
class Answer {
  constructor(parent, policy, title) {
    this.layers = model.taper.num_hidden_layers;
    this.least = model.taper.policies[policy].min_depth;
    this.tokens = [];
    this.summary = null;
    this.element = create(parent, "article", "answer running");
    this.element.dataset.policy = policy;
    if (title) create(this.element, "h3", "", title);
    this.text = create(this.element, "div", "text");
    this.chart = new DepthChart(this.layers);
    this.element.append(this.chart.element);
    this.chart.element.hidden = true;
    this.figures = create(this.element, "p", "figures", "reading the prompt");
    this.drawing = 0;
  }

  take(event) {
    const [choice] = event.choices;
    const { depth } = choice.taper;
    this.firstToken ??= performance.now();
    const title = depth ? `step ${this.chart.depths.length}: ${depth} of ${this.layers} layers` : "";
    const className = depth ? tint(depth, this.layers, this.least) : "t0";
    if (choice.delta.content) this.tokens.push({ text: choice.delta.content, className, title });
    if (depth) this.chart.add(depth);
    if (choice.finish_reason) this.summary = { ...choice.taper, finish_reason: choice.finish_reason };
    this.drawing ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.drawing = 0;
    const log = $("conversation");
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
    create(this.figures, "b", "speed", speed.toFixed(1));
    this.figures.append(" tokens/s");
    if (this.stopped) this.figures.append(", stopped");
    if (this.summary?.finish_reason === "length") this.figures.append(", cut at the most tokens");
  }

  end() {
    cancelAnimationFrame(this.drawing);
    this.element.classList.remove("running");
    if (!this.chart.depths.length) this.figures.textContent = this.stopped ? "stopped" : "";
    this.draw();
  }

  get content() {
    return this.tokens.map((token) => token.text).join("");
  }
}

async function complete(answer, conversation, signal) {
  const policy = answer.element.dataset.policy;
  const body = {
    model: model.id,
    messages: conversation,
    temperature: Number($("temperature").value),
    top_p: Number($("top-p").value),
    max_tokens: Number($("max-tokens").value),
    taper: policy === "full" ? { mode: "full" } : { policy },
  };
  if ($("seed").value !== "") body.seed = Number($("seed").value);
  try {
    for await (const event of chat(body, signal)) answer.take(event);
  } finally {
    answer.stopped = signal.aborted;
    answer.end();
  }
}

async function turn(text) {
  const mode = document.querySelector("[name=mode]:checked").value;
  const policy = document.querySelector("[name=policy]:checked")?.value ?? "full";
  $("welcome").hidden = true;
  create($("messages"), "div", "user", text);
  const conversation = history; // "New chat" begins another one
  conversation.push({ role: "user", content: text });
  const place = create($("messages"), "div", mode === "compare" ? "pair" : "");
  const tapered = mode === "full" ? "full" : policy;
  running = new AbortController();
  const { signal } = running;
  showRunning(true);
  try {
    let full = null;
    if (mode === "compare") {
      full = new Answer(place, "full", `full depth, ${model.taper.num_hidden_layers} layers`);
      await complete(full, conversation, signal);
    }
    const answer = new Answer(place, tapered, mode === "compare" ? `tapered, ${policy}` : "");
    try {
      await complete(answer, conversation, signal);
    } finally {
      if (answer.content) conversation.push({ role: "assistant", content: answer.content });
    }
    if (full) create($("messages"), "p", "verdict", verdict(full, answer));
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  } finally {
    if (conversation.at(-1)?.role === "user") conversation.pop();
    running = null;
    showRunning(false);
    $("conversation").scrollTop = $("conversation").scrollHeight;
    $("prompt").focus();
  }
}

// What a comparison comes to; says nothing that was not measured.
function verdict(full, tapered) {
  if (!full.summary?.tokens_per_second || !tapered.summary?.tokens_per_second) return "Too short to compare.";
  const ratio = tapered.summary.tokens_per_second / full.summary.tokens_per_second;
  const pairs = full.tokens.map((token, i) => token.text === tapered.tokens[i]?.text);
  const same = pairs.indexOf(false);
  const text =
    full.content === tapered.content ? "The texts are the same." : `The first ${same < 0 ? pairs.length : same} tokens are the same.`;
  return `Tapered ran at ${ratio.toFixed(2)}x the tokens per second of full depth. ${text} Measured here and now, once.`;
}

function showError(error) {
  const box = create($("messages"), "p", "error", error instanceof ApiError ? error.message : `The page failed: ${error.message}`);
  box.setAttribute("role", "alert");
  if (error.status === 401) {
    $("key-field").hidden = false;
    $("settings").classList.add("open");
    $("api-key").focus();
  }
}

function showRunning(runs) {
  $("send").hidden = runs;
  $("stop").hidden = !runs;
}

function showMode() {
  const mode = document.querySelector("[name=mode]:checked").value;
  $("mode-note").textContent = NOTES[mode];
  $("policies").disabled = mode === "full";
}

function percent(value) {
  return `${Math.round(100 * value)} %`;
}

// A policy's own provenance says what it costs; a policy without one says that nobody has measured it.
function cost(policy, layers) {
  const lines = [`${policy.mean_depth?.toFixed(1) ?? "at least " + policy.min_depth} of ${layers} layers`];
  if (policy.speedup) lines.push(`${policy.speedup[0].toFixed(2)}x as fast where it was measured`);
  if (policy.agreement) {
    const [value, low, high] = policy.agreement;
    lines.push(`same token ${percent(value)} (${percent(low)} to ${percent(high)})`);
  } else {
    lines.push("quality not measured");
  }
  return lines.join(", ");
}

function showModel() {
  const { num_hidden_layers: layers, context_length: context, policies } = model.taper;
  $("model").textContent = `${model.id}, ${layers} layers, context of ${context} tokens`;
  $("max-tokens").max = context;
  $("policy-list").replaceChildren();
  const tapering = Object.entries(policies).filter(([, policy]) => policy.min_depth < layers);
  const preferred = tapering.find(([, policy]) => policy.default) ?? tapering[0];
  for (const [name, policy] of tapering) {
    const label = create($("policy-list"), "label", "policy");
    const input = create(label, "input");
    Object.assign(input, { type: "radio", name: "policy", value: name, checked: name === preferred[0] });
    create(label, "strong", "", name);
    create(label, "small", "", cost(policy, layers));
  }
  const isFull = !tapering.length || policies.full?.default;
  for (const input of document.querySelectorAll("[name=mode]")) {
    input.disabled = !tapering.length && input.value !== "full";
    input.checked = input.value === (isFull ? "full" : "taper");
  }
  const legend = $("legend");
  legend.replaceChildren();
  create(legend, "span", "", `${layers} layers`);
  for (let level = 0; level <= 8; level += 1) create(legend, "i", `t${level}`);
  create(legend, "span", "", "fewer");
  showMode();
}

async function connect() {
  try {
    model = await fetchModel();
    showModel();
  } catch (error) {
    $("model").textContent = "not connected";
    showError(error);
  }
}

function send() {
  const text = $("prompt").value.trim();
  if (!text || running || !model) return;
  $("prompt").value = "";
  turn(text);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else $("settings").classList.remove("open");
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => {
  running?.abort();
  history = [];
  $("messages").replaceChildren();
  $("welcome").hidden = false;
  $("prompt").focus();
});
$("examples").addEventListener("click", (event) => {
  if (event.target.tagName !== "BUTTON" || running || !model) return;
  turn(event.target.textContent);
});
$("modes").addEventListener("change", showMode);
$("api-key").addEventListener("change", () => {
  sessionStorage.setItem("api-key", $("api-key").value);
  $("messages").replaceChildren();
  connect();
});
$("open-settings").addEventListener("click", () => {
  const open = $("settings").classList.toggle("open");
  $("open-settings").setAttribute("aria-expanded", String(open));
});
$("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.body).colorScheme === "dark" || matchMedia("(prefers-color-scheme: dark)").matches;
  const current = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = current === "dark" ? "light" : "dark";
});

connect();
