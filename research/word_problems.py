"""Writes word problems of one step, two steps and several steps with their answers: JSON lines, the same for a seed.

    python research/word_problems.py --out src/taper/lab/calibration/problems.jsonl

Calibration asks them. They are also a small task for `taper eval` and `taper calibrate --task`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from word_templates import SEVERAL_STEPS, Template

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "stickers", "shells", "cards")
# Small models otherwise go on about something else; and one for code answers "calculate" with a program.
ENDINGS = {1: "Calculate it", 2: "Calculate it", 3: "Explain it step by step"}
# By the number of steps; f is a + b.
TEMPLATES: dict[int, tuple[Template, ...]] = {
    1: (
        ("{name} has {a} {things} and gets {b} more. How many {things} is that?", lambda a, b, c, p: a + b),
        ("{name} has {f} {things} and gives away {b} of them. How many {things} are left?", lambda a, b, c, p: a),
        ("There are {a} boxes with {b} {things} in each. How many {things} are there?", lambda a, b, c, p: a * b),
        ("What is {a} plus {b}?", lambda a, b, c, p: a + b),
        ("What is {f} minus {b}?", lambda a, b, c, p: a),
        ("What is {a} times {b}?", lambda a, b, c, p: a * b),
    ),
    2: (
        (
            "{name} buys {a} packs of {b} {things} and gives {b} {things} to a friend. How many {things} are left?",
            lambda a, b, c, p: a * b - b,
        ),
        (
            "{name} has {a} {things}. {other} has {b} times as many. How many {things} do they have together?",
            lambda a, b, c, p: a + a * b,
        ),
        (
            "{name} earns {a} dollars an hour and works {b} hours a day. How many dollars is that in {c} days?",
            lambda a, b, c, p: a * b * c,
        ),
        (
            "{name} pays with a {p} dollar note for {a} {things} at {b} dollars each. How many dollars come back?",
            lambda a, b, c, p: p - a * b,
        ),
    ),
    3: SEVERAL_STEPS,
}


def problems(count: int, seed: int = 0, steps: Sequence[int] = (1, 2, 3)) -> list[dict[str, Any]]:
    """So many different problems of each number of steps."""
    draw, problems = random.Random(seed), []
    for number in steps:
        of_this: dict[str, dict[str, Any]] = {}
        while len(of_this) < count:
            text, answer = draw.choice(TEMPLATES[number])
            a, b, c = draw.randint(3, 12), draw.randint(2, 9), draw.randint(3, 12)
            p = 100 if a * b + 2 * c < 100 else 200
            name, other = draw.sample(NAMES, 2)
            facts = {"name": name, "other": other, "things": draw.choice(THINGS), "a": a, "b": b, "c": c, "p": p}
            prompt = f"{text.format(**facts, f=a + b)} {ENDINGS[number]}, and give the number at the end."
            of_this[prompt] = {"prompt": prompt, "answer": str(answer(a, b, c, p)), "steps": number}
        problems += of_this.values()
    return problems


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=128, help="of each number of steps; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--steps", type=int, nargs="+", choices=TEMPLATES, default=[1, 2, 3], help="all by default")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    options = parser.parse_args()
    lines = (json.dumps(problem) for problem in problems(options.count, options.seed, options.steps))
    options.out.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
