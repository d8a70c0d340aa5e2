"""Writes word problems of one to three steps with their answers: JSON lines, the same for a seed.

    python benchmarks/word_problems.py --out src/taper/calibration/problems.jsonl

Calibration asks them. They are also a small task for `taper eval` and `taper calibrate --task`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "stickers", "shells", "cards")
ENDING = "Calculate it, and give the number at the end."  # small models otherwise go on about something else
# By the number of steps. Numbers: a, c 3 to 12, b 2 to 9; p more than any result that it pays for; f = a + b.
Template = tuple[str, Callable[[int, int, int, int], int]]
TEMPLATES: dict[int, tuple[Template, ...]] = {
    1: (
        (
            "{name} has {a} {things} and gets {b} more. How many {things} is that?",
            lambda a, b, c, p: a + b,
        ),
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
    3: (
        (
            "{name} buys {a} {things} at {b} dollars each and {c} pens at 2 dollars each, and pays with a {p} dollar "
            "note. How many dollars does {name} get back?",
            lambda a, b, c, p: p - a * b - 2 * c,
        ),
        (
            "{name} reads {a} pages on Monday, twice as many on Tuesday, and {b} pages more on Wednesday than on "
            "Tuesday. How many pages does {name} read in the three days?",
            lambda a, b, c, p: a + 2 * a + 2 * a + b,
        ),
        (
            "A farmer has {a} rows of {b} trees. Each tree gives {c} baskets of apples, and {b} baskets are sold. How "
            "many baskets are left?",
            lambda a, b, c, p: a * b * c - b,
        ),
        (
            "{name} saves {a} dollars a week for {b} weeks. {other} saves {c} dollars more than that. How many dollars "
            "do they have together?",
            lambda a, b, c, p: 2 * a * b + c,
        ),
    ),
}


def problems(count: int, seed: int = 0, steps: Sequence[int] = (1, 2, 3)) -> list[dict[str, Any]]:
    """So many different problems of each number of steps."""
    draw, found = random.Random(seed), []
    for number in steps:
        of_this: dict[str, dict[str, Any]] = {}
        while len(of_this) < count:
            text, answer = draw.choice(TEMPLATES[number])
            a, b, c = draw.randint(3, 12), draw.randint(2, 9), draw.randint(3, 12)
            p = 100 if a * b + 2 * c < 100 else 200
            name, other = draw.sample(NAMES, 2)
            facts = {"name": name, "other": other, "things": draw.choice(THINGS), "a": a, "b": b, "c": c, "p": p}
            prompt = f"{text.format(**facts, f=a + b)} {ENDING}"
            of_this[prompt] = {"prompt": prompt, "answer": str(answer(a, b, c, p)), "steps": number}
        found += of_this.values()
    return found


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
