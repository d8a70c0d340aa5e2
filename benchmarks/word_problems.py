"""Writes a task of one-step word problems, which the small default model can do: JSON lines, the same for a seed.

python benchmarks/word_problems.py --count 400 --out problems.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "stickers", "shells", "cards")
TEMPLATES = (
    ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?", lambda a, b: a + b),
    ("{name} has {c} {things} and gives away {b} of them. How many {things} are left?", lambda a, b: a),
    ("There are {a} boxes with {b} {things} in each. How many {things} are there in all?", lambda a, b: a * b),
    ("What is {a} plus {b}?", lambda a, b: a + b),
    ("What is {c} minus {b}?", lambda a, b: a),
    ("What is {a} times {b}?", lambda a, b: a * b),
)


def problems(count: int, seed: int = 0) -> list[dict[str, str]]:
    """That many different problems."""
    draw, found = random.Random(seed), {}
    while len(found) < count:
        text, answer = draw.choice(TEMPLATES)
        a, b = draw.randint(2, 12), draw.randint(2, 9)
        facts = {"name": draw.choice(NAMES), "things": draw.choice(THINGS), "a": a, "b": b, "c": a + b}
        found[text.format(**facts)] = str(answer(a, b))
    return [{"prompt": prompt, "answer": answer} for prompt, answer in found.items()]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    options = parser.parse_args()
    lines = (json.dumps(problem) for problem in problems(options.count, options.seed))
    options.out.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
