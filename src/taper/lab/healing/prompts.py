"""The prompts that adapters are trained on by default: many kinds, none of them from a benchmark."""

from __future__ import annotations

import json
import random
from importlib import resources

FORMS_OF_A_TOPIC = 6  # of twelve, drawn for each topic
PROBLEMS = 9  # of each kind of arithmetic, with different names and numbers
CHOOSING, VALIDATION = 8, 20  # most prompts that are held out to choose the best state by, and for the final figures


def builtin_prompts() -> list[str]:
    """About 700 prompts, always the same: topics, code, advice, passages, stories and arithmetic, in mixed order."""
    data = json.loads(resources.files(__package__).joinpath("prompts.json").read_text(encoding="utf-8"))
    rng, prompts = random.Random(0), []
    for kind in ("topics", "code", "advice", "passages", "creative"):
        subjects, forms = data[kind]["subjects"], data[kind]["forms"]
        for subject in subjects:
            chosen = rng.sample(forms, FORMS_OF_A_TOPIC) if kind == "topics" else forms
            texts = [form.format(subject) for form in chosen]
            prompts += [text[0].upper() + text[1:] for text in texts]
    for problem in data["arithmetic"]:
        for _ in range(PROBLEMS):
            name, other = rng.sample(data["names"], 2)
            numbers = {
                "a": rng.randint(6, 24),
                "b": rng.randint(3, 12),
                "c": rng.randint(2, 9),
                "big": 10 * rng.randint(20, 40),
            }
            prompts.append(problem.format(name=name, other=other, **numbers))
    rng.shuffle(prompts)
    return prompts


def held_out(count: int) -> tuple[int, int]:
    """How many of so many prompts are held out to choose the best state by, and for the final figures."""
    return min(CHOOSING, count // 8 + 1), min(VALIDATION, count // 8 + 1)
