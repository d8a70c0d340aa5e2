// The playground: a conversation with the served model, and what depth does to it.

import { Answer, following } from "./answer.js";
import { ApiError, chat, fetchModel } from "./api.js";
import { create } from "./markdown.js";
import { showCost, showLegend, showPolicy } from "./policies.js";
import { areValid, showSettings } from "./settings.js";

const $ = (id) => document.getElementById(id);
const chosen = (name) => document.querySelector(`[name=${name}]:checked`)?.value;
// The fields of sampling, and their names in requests.
const SAMPLING = {
  temperature: "temperature",
  "top-p": "top_p",
  "top-k": "top_k",
  "repetition-penalty": "repetition_penalty",
  seed: "seed",
};
const NOTES = {
  full: "Every layer for every token: the model as it is.",
  taper: "Fewer layers per token as the answer grows.",
  exact: "Every layer for every token, sooner where the text can be drafted.",
  compare: "The same prompt at full depth and tapered, a token of each in turn, so that what slows the machine slows both alike.",
};

let model = null;
let history = []; // [{role, content}]; answers also have their policy, tokens [text, depth] and figures
let running = null; // AbortController of the turn that runs

// Completes a conversation into one answer, or into the two that are compared.
async function complete(answers, conversation, signal) {
  const { policy } = answers.at(-1).element.dataset;
  const taper = policy === "full" ? { mode: chosen("mode") === "exact" ? "exact" : "full" } : { policy };
  const body = {
    model: model.id,
    messages: [...systemMessage(), ...conversation.map(({ role, content }) => ({ role, content }))],
    max_tokens: Number($("max-tokens").value),
    taper: answers.length > 1 ? { ...taper, mode: "compare" } : taper,
  };
  for (const [id, name] of Object.entries(SAMPLING)) {
    if ($(id).value !== "") body[name] = Number($(id).value);
  }
  try {
    for await (const event of chat(body, signal)) answers[event.choices[0].index].take(event);
  } finally {
    for (const answer of answers) {
      answer.stopped = signal.aborted && !answer.summary;
      answer.end();
    }
  }
}

function systemMessage() {
  const content = $("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

// The conversation is kept when the page is reloaded, until its tab is closed.
function save() {
  sessionStorage.setItem("chat", JSON.stringify({ history, system: $("system").value }));
}

function restore() {
  const saved = JSON.parse(sessionStorage.getItem("chat") ?? "null");
  if (!saved || $("messages").children.length) return;
  $("system").value = saved.system;
  history = saved.history.filter(({ policy }) => !policy || policy in model.taper.policies);
  $("welcome").hidden = history.length > 0;
  for (const message of history) {
    if (message.role === "user") create($("messages"), "div", "user", message.content);
    else new Answer(create($("messages"), "div"), model, message.policy, "").restore(message);
  }
  showRegenerate();
  scrollToEnd();
}

// Only the last answer can be generated again.
function showRegenerate() {
  document.querySelector(".regenerate")?.remove();
  const actions = [...document.querySelectorAll(".actions")].at(-1);
  if (!actions || history.at(-1)?.role !== "assistant") return;
  const button = create(actions, "button", "regenerate", "Regenerate");
  button.type = "button";
  button.addEventListener("click", () => {
    if (!areValid()) return;
    history.pop();
    const { content } = history.pop();
    const users = [...document.querySelectorAll(".user")];
    while (users.at(-1).nextSibling) users.at(-1).nextSibling.remove();
    users.at(-1).remove();
    turn(content);
  });
}

async function turn(text) {
  const mode = chosen("mode");
  const policy = chosen("policy") ?? "full";
  $("welcome").hidden = true;
  for (const error of document.querySelectorAll(".error")) error.remove();
  const message = create($("messages"), "div", "user", text);
  const conversation = history; // "New chat" begins another one
  conversation.push({ role: "user", content: text });
  showRegenerate();
  const parent = create($("messages"), "div", mode === "compare" ? "pair" : "");
  const tapered = runsAll(mode) ? "full" : policy;
  running = new AbortController();
  const { signal } = running;
  showRunning(true);
  say("Answering");
  const answers = [];
  try {
    const full = `full depth, ${model.taper.num_hidden_layers} layers`;
    if (mode === "compare") answers.push(new Answer(parent, model, "full", full));
    const answer = new Answer(parent, model, tapered, mode === "compare" ? `tapered, ${policy}` : "");
    answers.push(answer);
    scrollToEnd();
    try {
      await complete(answers, conversation, signal);
    } finally {
      if (answer.content) conversation.push(answer.message);
    }
    const compared = mode === "compare" ? verdict(...answers) : "";
    if (compared) following(() => create($("messages"), "p", "verdict", compared));
    say(`The answer is complete: ${answer.figures.textContent}. ${compared}`);
  } catch (error) {
    say(error.name === "AbortError" ? "The answer was stopped." : "");
    if (error.name !== "AbortError") {
      if (!answers.some((answer) => answer.content)) takeBack(text, message, parent);
      showError(error);
    }
  } finally {
    if (conversation.at(-1)?.role === "user") conversation.pop();
    $("welcome").hidden = history.length > 0 || $("messages").querySelector(".user") !== null;
    running = null;
    save();
    following(() => {
      showRunning(false);
      showRegenerate();
    });
    if ([document.body, $("stop")].includes(document.activeElement)) $("prompt").focus(); // whoever is elsewhere stays
  }
}

// A prompt that was refused goes back to where it can be changed.
function takeBack(text, ...elements) {
  for (const element of elements) element.remove();
  $("prompt").value ||= text;
}

// The result of a comparison; outputs that are too short have none.
function verdict(full, tapered) {
  if (!full.summary?.tokens_per_second || !tapered.summary?.tokens_per_second) return "Too short to compare.";
  const [ratio, low, high] = speedup(full.seconds, tapered.seconds).map((value) => `${value.toFixed(2)}x`);
  const pairs = full.tokens.map((token, i) => token.text === tapered.tokens[i]?.text);
  const same = pairs.includes(false) ? pairs.indexOf(false) : pairs.length;
  const beginning = same > 1 ? `The first ${same} tokens are the same.` : "The texts differ from the beginning.";
  const text = full.content === tapered.content ? "The texts are the same." : beginning;
  const speed = `Tapered ran at ${ratio} the tokens per second of full depth, between ${low} and ${high} with 95 % confidence.`;
  return `${speed} ${text} The chat goes on from the tapered answer.`;
}

// The median ratio over steps that ran in turn, and its 95 % interval, as src/taper/cli/terminal.py computes them.
function speedup(full, tapered) {
  const steps = (seconds) => seconds.slice(1).map((second, i) => Math.max(second - seconds[i], 1e-9));
  const shorter = steps(tapered);
  const ratios = steps(full).slice(0, shorter.length).map((step, i) => step / shorter[i]).sort((a, b) => a - b);
  const middle = (ratios.length - 1) / 2;
  const spread = 0.98 * Math.sqrt(ratios.length);
  return [middle, middle - spread, middle + spread].map((rank) => {
    return ratios[Math.min(Math.max(Math.round(rank), 0), ratios.length - 1)];
  });
}

function showError(error) {
  const box = create($("messages"), "p", "error", error instanceof ApiError ? error.message : `The page failed: ${error.message}`);
  box.setAttribute("role", "alert");
  box.scrollIntoView({ block: "nearest" });
  if (error.status === 401) {
    $("key-field").hidden = false;
    showSettings();
    $("api-key").focus();
  }
}

// Tells those who hear the page how an answer goes; a notice is seen too.
function say(text, isNotice = false) {
  $("status").textContent = text;
  $("status").classList.toggle("hidden", !isNotice);
}

function scrollToEnd() {
  $("conversation").scrollTop = $("conversation").scrollHeight;
}

function showRunning(runs) {
  $("send").hidden = runs;
  $("stop").hidden = !runs;
}

const runsAll = (mode) => mode === "full" || mode === "exact";

function showMode() {
  const mode = chosen("mode");
  const { num_hidden_layers: layers, policies } = model.taper;
  const name = chosen("policy");
  $("mode-note").textContent = NOTES[mode] + (mode === "full" && policies.full.default ? " This is the default." : "");
  $("policies").hidden = runsAll(mode);
  $("chosen-policy").replaceChildren();
  if (name) showPolicy($("chosen-policy"), name, policies[name], layers);
  showLegend($("legend"), layers, policies[name]?.min_depth ?? layers);
}

function showModel() {
  const { num_hidden_layers: layers, context_length: context, policies } = model.taper;
  $("model").textContent = `${model.id}, ${layers} layers, context of ${context} tokens`;
  $("max-tokens").max = context;
  const off = { temperature: 1, top_p: 1, top_k: 0, repetition_penalty: 1 };
  for (const [id, name] of Object.entries(SAMPLING)) {
    if (name in off) $(id).placeholder = model.taper.sampling[name] ?? off[name];
  }
  $("policy-list").replaceChildren();
  const tapering = Object.entries(policies).filter(([, policy]) => policy.min_depth < layers);
  const healed = tapering.find(([name]) => !name.endsWith("-plain"));
  const preferred = tapering.find(([, policy]) => policy.default) ?? healed ?? tapering[0];
  for (const [name, policy] of tapering) {
    const label = create($("policy-list"), "label", "policy");
    const input = create(label, "input");
    Object.assign(input, { type: "radio", name: "policy", value: name, checked: name === preferred[0] });
    showPolicy(label, name, policy, layers);
    showCost(label, policy);
  }
  const isFull = !tapering.length || policies.full.default;
  for (const input of document.querySelectorAll("[name=mode]")) {
    input.disabled = !tapering.length && !runsAll(input.value);
    input.checked = input.value === (isFull ? "full" : "taper");
  }
  showMode();
  restore();
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

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return say("An answer is running. Wait for its end or stop it, then send this.", true);
  const text = $("prompt").value.trim();
  if (!text || !model || !areValid()) return;
  $("prompt").value = "";
  turn(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("sheet").open) running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => {
  running?.abort();
  history = [];
  sessionStorage.removeItem("chat");
  $("messages").replaceChildren();
  $("welcome").hidden = false;
  $("prompt").focus();
});
$("examples").addEventListener("click", (event) => {
  if (event.target.tagName !== "BUTTON" || running || !model || !areValid()) return;
  turn(event.target.textContent);
});
$("modes").addEventListener("change", showMode);
$("policies").addEventListener("change", showMode);
$("system").addEventListener("change", save);
$("api-key").addEventListener("change", () => {
  sessionStorage.setItem("api-key", $("api-key").value);
  $("messages").replaceChildren();
  connect();
});
$("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.body).colorScheme === "dark" || matchMedia("(prefers-color-scheme: dark)").matches;
  const current = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = current === "dark" ? "light" : "dark";
});

connect();
