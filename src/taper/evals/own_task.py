"""A task of the user's own: JSON lines with a prompt and its answer, as a task of the harness."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .local_data import read_lines

if TYPE_CHECKING:
    from datasets import DatasetDict

SUFFIX = ".jsonl"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def own_task(path: Path) -> dict[str, Any]:
    """The configuration of the task in a file; its lines are `{"prompt": ..., "answer": ...}`.

    Raises:
        RequestError: the file is missing or damaged, or a line lacks one of the two texts.
    """
    rows = read_lines(path)
    if not rows:
        raise RequestError(f"{path} has no problems")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not all(isinstance(row.get(k), str) and row[k] for k in ("prompt", "answer")):
            raise RequestError(f'{path}: problem {number} needs the texts "prompt" and "answer"')
    return {
        "task": path.stem,
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "custom_dataset": lambda **_: _data(rows),
        "process_results": lambda doc, results: {"exact_match": float(is_right(results[0], doc["answer"]))},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": {"until": [], "do_sample": False},
        "num_fewshot": 0,
        "metadata": {"version": "own"},
    }


def is_right(output: str, answer: str) -> bool:
    """Whether an output gives the answer: a number must be its last number, a text must stand in its last line."""
    if _NUMBER.fullmatch(answer.strip()):
        numbers = _NUMBER.findall(output)
        return bool(numbers) and _value(numbers[-1]) == _value(answer.strip())
    lines = [line for line in output.splitlines() if line.strip()]
    words = re.escape(" ".join(answer.lower().split()))
    return bool(lines) and re.search(rf"(?<!\w){words}(?!\w)", " ".join(lines[-1].lower().split())) is not None


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _data(rows: list[dict[str, str]]) -> DatasetDict:
    from datasets import Dataset, DatasetDict

    return DatasetDict({"test": Dataset.from_list([{k: row[k] for k in ("prompt", "answer")} for row in rows])})
