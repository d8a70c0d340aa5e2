"""The data sets of GSM8K and BBH from a folder, for machines that cannot reach a hub.

DIR/gsm8k/train.jsonl, DIR/gsm8k/test.jsonl    {"question": ..., "answer": ...}, one a line
DIR/bbh/tasks/NAME.json                        {"examples": [{"input": ..., "target": ...}]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calibration.problems import is_right
from ..errors import RequestError
from ..models.files import read_text

if TYPE_CHECKING:
    from datasets import DatasetDict

_GSM8K, _BBH = "openai/gsm8k", "SaylorTwift/bbh"  # as the harness names them
SPLITS = ("training_split", "validation_split", "fewshot_split", "test_split")
_MAX_BYTES = 64 << 20  # the largest of them has 4 MB


def has_data(config: Mapping[str, Any], folder: Path) -> bool:
    """Whether the data of a task is there."""
    return all(path.exists() for path in _paths(config, folder).values())


def load_data(config: Mapping[str, Any], folder: Path) -> DatasetDict:
    """The data set of a task of the harness, given its configuration.

    Raises:
        RequestError: the folder or a file is missing or damaged, or the task is of another data set.
    """
    from datasets import Dataset, DatasetDict

    if not folder.is_dir():
        raise RequestError(f"--data-dir {folder} is not a folder")
    is_gsm8k = config.get("dataset_path") == _GSM8K
    read, keys = (read_lines, ("question", "answer")) if is_gsm8k else (_read_examples, ("input", "target"))
    splits = {}
    for split, path in _paths(config, folder).items():
        rows = read(path)
        if not rows:
            raise RequestError(f"{path} has no problems")
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in keys):
                raise RequestError(f'{path}: problem {number} needs the texts "{keys[0]}" and "{keys[1]}"')
        splits[split] = Dataset.from_list([{key: row[key] for key in keys} for row in rows])
    return DatasetDict(splits)


def _paths(config: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Where each split of a task's data set lies."""
    splits = sorted({config[name] for name in SPLITS if config.get(name)})
    if config.get("dataset_path") == _GSM8K and config.get("dataset_name") == "main":
        return {split: folder / "gsm8k" / f"{split}.jsonl" for split in splits}
    if config.get("dataset_path") == _BBH:
        return dict.fromkeys(splits, folder / "bbh" / "tasks" / f"{config['dataset_name']}.json")
    raise RequestError(
        f"task {config['task']} is neither of GSM8K nor of BBH, which are what --data-dir holds",
        "leave out --data-dir to load its data from the hub",
    )


def read_lines(path: Path) -> list[Any]:
    """JSON lines."""
    rows = []
    for number, line in enumerate(read_text(path, _MAX_BYTES, RequestError).split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise RequestError(f"line {number} of {path} is not JSON: {error}") from None
    return rows


def _read_examples(path: Path) -> list[Any]:
    """The examples of a JSON file."""
    try:
        data = json.loads(read_text(path, _MAX_BYTES, RequestError))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON: {error}") from None
    examples = data.get("examples") if isinstance(data, dict) else None
    if not isinstance(examples, list):
        raise RequestError(f'{path} needs a list of "examples"')
    return examples


SUFFIX = ".jsonl"


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


def _data(rows: list[dict[str, str]]) -> DatasetDict:
    from datasets import Dataset, DatasetDict

    return DatasetDict({"test": Dataset.from_list([{k: row[k] for k in ("prompt", "answer")} for row in rows])})
