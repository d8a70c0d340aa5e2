"""Small data sets of the form that `--data-dir` reads, made up here, and a model that answers them."""

from __future__ import annotations

import json
from pathlib import Path


def write_data(folder: Path, problems: int = 6) -> Path:
    """GSM8K with as many problems in each split, and two tasks of BBH."""
    (folder / "gsm8k").mkdir(parents=True)
    (folder / "bbh" / "tasks").mkdir(parents=True)
    for split, first in (("train", 100), ("test", 1)):
        rows = [
            {"question": f"Ann has {n} nuts, and Bob has 2. How many?", "answer": f"{n} + 2 = {n + 2}\n#### {n + 2}"}
            for n in range(first, first + problems)
        ]
        (folder / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sort = "Sort the following words alphabetically: List: "
    examples = {
        "boolean_expressions": {"not ( True ) is": "False", "True is": "True"},
        "word_sorting": {f"{sort}pear fig": "fig pear", f"{sort}oak elm": "elm oak"},
    }
    for name, rows in examples.items():
        data = {"canary": "", "examples": [{"input": a, "target": b} for a, b in rows.items()]}
        (folder / "bbh" / "tasks" / f"{name}.json").write_text(json.dumps(data))
    return folder
