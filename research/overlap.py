"""Fingerprints of the problems of GSM8K and BBH, so that a test can tell that no prompt of training is one of them.

    python research/overlap.py --data-dir DIR

Writes `tests/benchmark_problems.bin`: for each problem, 32 bits of a hash of its first eight words, with digits masked.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np

WORDS = 8
FILE = Path(__file__).parent.parent / "tests" / "benchmark_problems.bin"


def fingerprints(text: str) -> list[int]:
    """Hashes of each run of eight words, in order; of the whole text if it is shorter."""
    words = re.sub(r"\d", "#", text.lower()).split()
    runs = [" ".join(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))]
    return [int.from_bytes(blake2b(run.encode(), digest_size=4).digest(), "little") for run in runs]


def problems(folder: Path) -> Iterator[str]:
    """The texts of all problems."""
    for file in sorted((folder / "gsm8k").glob("*.jsonl")):
        yield from (json.loads(line)["question"] for line in file.read_text().splitlines())
    for file in sorted((folder / "bbh" / "tasks").glob("*.json")):
        yield from (example["input"] for example in json.loads(file.read_text())["examples"])


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with gsm8k/*.jsonl and bbh/tasks/*.json")
    found = {fingerprints(text)[0] for text in problems(parser.parse_args().data_dir)}
    np.array(sorted(found), np.uint32).tofile(FILE)


if __name__ == "__main__":
    main()
