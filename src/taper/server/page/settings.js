// The settings: beside the conversation, or in a dialog on a narrow screen; and what is wrong with their fields.

import { create } from "./markdown.js";

const [settings, panel, sheet] = ["settings", "panel", "sheet"].map((id) => document.getElementById(id));
const fields = [...settings.querySelectorAll(".field input")];
const narrow = matchMedia("(max-width: 860px)"); // as in page.css

function place() {
  sheet.close();
  (narrow.matches ? sheet : panel).append(settings);
}

export function showSettings() {
  if (narrow.matches && !sheet.open) sheet.showModal();
}

// Whether all settings are valid; if not, the first invalid one is in view, with its rule below it.
export function areValid() {
  const wrong = fields.filter((input) => !check(input));
  if (!wrong.length) return true;
  showSettings();
  wrong[0].focus();
  wrong[0].parentElement.scrollIntoView({ block: "nearest" });
  return false;
}

function check(input) {
  const { min, max, step, validity, nextElementSibling: problem } = input;
  const range = max ? `from ${min} to ${max}` : `of at least ${min}`;
  problem.textContent = validity.valid ? "" : `Give a ${step === "1" ? "whole number" : "number"} ${range}.`;
  input.setAttribute("aria-invalid", String(!validity.valid));
  return validity.valid;
}

for (const input of fields) {
  create(input.parentElement, "p", "problem").id = `${input.id}-problem`;
  input.setAttribute("aria-describedby", `${input.id}-problem`);
  input.addEventListener("change", () => check(input));
  input.addEventListener("input", () => input.validity.valid && check(input)); // no error while a number is typed
}
document.getElementById("open-settings").addEventListener("click", showSettings);
document.getElementById("close-settings").addEventListener("click", () => sheet.close());
sheet.addEventListener("click", (event) => event.target === sheet && sheet.close()); // beside it
narrow.addEventListener("change", place);
place();
