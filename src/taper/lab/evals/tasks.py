"""Tasks of lm-evaluation-harness: from names to problems, and from outputs to scores. Knows no model.

Prompts, filters and metrics are the harness's own. Data comes from the Hugging Face hub or, for machines that cannot
reach it, from a folder:

    FOLDER/gsm8k/train.jsonl, FOLDER/gsm8k/test.jsonl    {"question": ..., "answer": ...} in each line
    FOLDER/bbh/tasks/NAME.json                           {"examples": [{"input": ..., "target": ...}]}

The harness takes seconds to import, so functions import it when they need it.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import RequestError, TaperError, shown
from ...models.files import read_text, text_lines
from ..calibration.problems import is_right
from ..calibration.prompts import is_table, table_rows

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

FEWSHOT_SEED = 1234  # the harness's default, so the examples are the same as there
_QUICK_FOLDERS = ("gsm8k", "bbh")  # the harness needs 10 seconds to read all of its task files
_NAMES = re.compile(r"^['\"]?(?:task|group)['\"]?:\s*['\"]?([\w.-]+)", re.MULTILINE)
_GSM8K, _BBH = "openai/gsm8k", "SaylorTwift/bbh"  # the harness's names of the data sets
_SPLITS = ("training_split", "validation_split", "fewshot_split", "test_split")
OWN = "own"  # version of a task from a user's own file
_MAX_BYTES = 64 << 20  # the largest real data file has 4 MB
Metrics = dict[str, dict[str, Any]]  # of one problem: filter, metric, value
RenderChat = Callable[..., str]


@dataclass(frozen=True)
class Problem:
    """A problem of a task as the harness asks it: one request, in most tasks."""

    task: str
    index: int
    requests: tuple[Instance, ...]
    repeats: int  # outputs that the task wants for each request

    @property
    def prompt_hash(self) -> str:
        """A hash of the prompts and the generation options: 16 hex digits."""
        text = json.dumps([request.args for request in self.requests], default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class EvalTask:
    """A generative task of the harness: its problems, and the scores of outputs."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.name: str = task.config.task
        self.version = str((task.config.metadata or {}).get("version", task.VERSION))
        self.num_fewshot: int = task.config.num_fewshot
        self.filters: list[str] = [ensemble.name for ensemble in task._filters]

    @property
    def first_prompt(self) -> str:
        """The first problem as text, without examples."""
        with quiet():
            return str(self._task.doc_to_text(self._task.eval_docs[0]))

    @property
    def num_problems(self) -> int:
        """The number of problems in the split that is asked."""
        return len(self._task.eval_docs)

    def problems(self, indices: Collection[int], render_chat: RenderChat | None = None) -> dict[int, Problem]:
        """Problems by index: as conversations, if `render_chat` is given.

        The harness draws the examples of one problem after the other. In a task with examples, problems before those
        that are asked for are therefore made too.

        Raises:
            RequestError: the task has too few examples for its prompts, or asks for log-likelihoods.
            TaperError: what `render_chat` raises.
        """
        made = range(max(indices) + 1) if self.num_fewshot else sorted(indices)
        self._task.set_fewshot_seed(FEWSHOT_SEED)
        chat = render_chat is not None
        try:
            with quiet():
                self._task.build_all_requests(
                    samples=set(made), apply_chat_template=chat, fewshot_as_multiturn=chat, chat_template=render_chat
                )
        except (AssertionError, ValueError) as error:
            reason = f"task {self.name} with {self.num_fewshot} examples: {error}"
            raise RequestError(reason, "lower --fewshot") from None
        requests: dict[int, list[Instance]] = {index: [] for index in made}
        for request in self._task.instances:
            if request.request_type != "generate_until":
                raise _generates_nothing(self.name, request.request_type)
            requests[made[request.doc_id]].append(request)  # the harness numbers them from 0
        repeats = self._task.config.repeats
        return {index: Problem(self.name, index, tuple(own), repeats) for index, own in requests.items()}

    def score(self, problem: Problem, texts: Sequence[Sequence[str]]) -> tuple[Metrics, dict[str, str]]:
        """Every metric under every filter, and the text that each filter extracted.

        Args:
            problem: one of this task.
            texts: the outputs of each of its requests.
        """
        instances = [
            replace(request, resps=list(outputs), filtered_resps={})
            for request, outputs in zip(problem.requests, texts, strict=True)
        ]
        for ensemble in self._task._filters:
            ensemble.apply(instances)
        scores, extracted = {}, {}
        for name in self.filters:
            filtered = [instance.filtered_resps[name] for instance in instances]
            metrics = self._task.process_results(problem.requests[0].doc, filtered)
            scores[name] = {metric: _to_json(value) for metric, value in metrics.items()}
            extracted[name] = str(filtered[0] if len(filtered) == 1 else filtered)
        return scores, extracted


@dataclass(frozen=True)
class Selection:
    """The tasks that some names stand for."""

    tasks: list[EvalTask]
    groups: dict[str, list[str]]  # the tasks of each name that stands for several
    missing: list[str]  # tasks of groups that have no local data
    split: str | None  # of the data sets; None: the one that each task is tested on

    @property
    def is_own(self) -> bool:
        """Whether all problems come from the user's own files."""
        return all(task.version == OWN for task in self.tasks)


def load_tasks(
    names: Sequence[str], *, fewshot: int | None = None, data_dir: Path | None = None, split: str | None = None
) -> Selection:
    """Load tasks of the harness, where a group or tag stands for all of its tasks, and your own tasks from files.

    Args:
        names: tasks, groups and tags of the harness, and files with "prompt" and "answer": JSON lines (.jsonl) or
            tables (.csv, .tsv).
        fewshot: examples before each problem; default the task's own number.
        data_dir: a folder with the data of GSM8K and BBH; default the Hugging Face hub.
        split: ask the problems of this part of the data sets, such as "train"; default the one for testing.

    Raises:
        RequestError: an unknown name, a task that generates nothing or cannot be run here, `fewshot` for a task that is
            defined without examples, a split that a task does not have, or data that is missing or damaged.
        TaperError: the harness is not installed.
    """
    with quiet():
        own = [_own_task(Path(name)) for name in names if is_own(name)]
        named = [name for name in names if not is_own(name)]
        manager = _manager(named)
        members = {name: _members(manager, {"task": name}) for name in named}
        missing: list[str] = []
        for name, configs in members.items():
            for config in configs:
                _check(config, split)
                if split is not None:
                    config["test_split"] = split
            if data_dir is not None:
                # If no member has data, the error about the first one says which file is missing.
                present = [config for config in configs if _has_data(config, data_dir)] or configs[:1]
                missing += [config["task"] for config in configs if config not in present]
                members[name] = [{**config, "custom_dataset": _local_data(config, data_dir)} for config in present]
        configs = [config for own_members in members.values() for config in own_members]
        specs: Sequence[Any] = named if data_dir is None and split is None else configs
        try:
            loaded = manager.load([*specs, *own])["tasks"]
        except TaperError:
            raise
        except Exception as error:  # it may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            hint = "check the connection, or give local data with --data-dir"
            raise RequestError(f"the tasks {', '.join(names)} cannot be loaded: {reason}", hint) from None
    for task in loaded.values():
        default = task.config.num_fewshot
        if fewshot and default == 0:
            raise RequestError(f"task {task.config.task} is defined without examples", "leave out --fewshot, or give 0")
        task.set_config("num_fewshot", (default or 0) if fewshot is None else fewshot)
    groups = {name: [config["task"] for config in configs] for name, configs in members.items() if len(configs) > 1}
    return Selection([EvalTask(task) for task in loaded.values()], groups, missing, split)


def is_own(name: str) -> bool:
    """Whether a task is a file of the user's own problems, by its name."""
    return name.lower().endswith(".jsonl") or is_table(Path(name))


def _manager(names: Sequence[str]) -> TaskManager:
    """The harness's index of tasks; the whole index, which is slow to build, only if a name needs it."""
    try:
        import lm_eval.tasks
    except ImportError:
        raise TaperError("evaluation needs lm-evaluation-harness", 'pip install "taper-llm[eval]"') from None
    root = Path(lm_eval.tasks.__file__).parent
    quick = lm_eval.tasks.TaskManager(include_defaults=False, include_path=[root / name for name in _QUICK_FOLDERS])
    unknown = [name for name in names if name not in quick.task_index]
    if not unknown:
        return quick
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in root.rglob("*.yaml"))
    _check_known([name for name in unknown if name not in text], _NAMES.findall(text))
    whole = lm_eval.tasks.TaskManager()
    _check_known([name for name in unknown if name not in whole.task_index], whole.all_tasks)
    return whole


def _check_known(unknown: Sequence[str], known: Iterable[str]) -> None:
    if unknown:
        close = difflib.get_close_matches(unknown[0], sorted(set(known)), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "see: python -m taper.lab.evals ls tasks"
        raise RequestError(f"there is no task {unknown[0]!r} in lm-evaluation-harness", hint)


def _members(manager: TaskManager, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The configurations of the tasks that a name stands for, those of nested groups included."""
    from lm_eval.tasks._index import Kind
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = manager.task_index.get(config["task"])
    if entry is None:
        return []
    if entry.kind in (Kind.GROUP, Kind.TAG):
        members = sorted(entry.tags) if entry.kind is Kind.TAG else (entry.cfg or {}).get("task", [])
        named = [{"task": member} if isinstance(member, str) else member for member in members]
        return [leaf for member in named if "task" in member for leaf in _members(manager, member)]
    return [{**load_yaml(entry.yaml_path, resolve_func=True), **config}]


def _check(config: Mapping[str, Any], split: str | None) -> None:
    """Reject what cannot be run, before its data is fetched."""
    name, kind = config["task"], config.get("output_type", "generate_until")
    if kind != "generate_until":
        raise _generates_nothing(name, kind)
    if config.get("unsafe_code"):
        raise RequestError(
            f"task {name} runs code that the model wrote",
            "if you accept that, use python -m taper.lab.evals with --confirm_run_unsafe_code",
        )
    if config.get("doc_to_image") or config.get("doc_to_audio"):
        raise RequestError(f"task {name} asks about pictures or sound, and only text is supported")
    if split is not None and split not in _splits(config):
        raise RequestError(f"task {name} has no split {shown(split)}", f"it has {' and '.join(_splits(config))}")


def _generates_nothing(name: str, kind: str) -> RequestError:
    return RequestError(
        f"task {name} scores given answers by log-likelihood ({kind}): nothing is generated, so there is no step to "
        "run with fewer layers",
        "choose tasks that generate, such as gsm8k or bbh_cot_fewshot",
    )


def _splits(config: Mapping[str, Any]) -> list[str]:
    return sorted({config[name] for name in _SPLITS if config.get(name)})


# Data from files


def _data_files(config: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """The file of each split of a task's data set."""
    if config.get("dataset_path") == _GSM8K and config.get("dataset_name") == "main":
        return {split: folder / "gsm8k" / f"{split}.jsonl" for split in _splits(config)}
    if config.get("dataset_path") == _BBH:
        return dict.fromkeys(_splits(config), folder / "bbh" / "tasks" / f"{config['dataset_name']}.json")
    raise RequestError(
        f"task {config['task']} belongs neither to GSM8K nor to BBH, and --data-dir holds only those",
        "leave out --data-dir to load its data from the hub",
    )


def _has_data(config: Mapping[str, Any], folder: Path) -> bool:
    return all(path.exists() for path in _data_files(config, folder).values())


def _local_data(config: Mapping[str, Any], folder: Path) -> Callable[..., Any]:
    """A task's data set from a folder, as the harness takes it."""
    if not folder.is_dir():
        raise RequestError(f"--data-dir {folder} is not a folder")
    keys = ("question", "answer") if config.get("dataset_path") == _GSM8K else ("input", "target")
    return _custom_dataset({split: _rows(path, keys) for split, path in _data_files(config, folder).items()})


def _own_task(path: Path) -> dict[str, Any]:
    """The configuration of the task in a file of problems, each with its prompt and answer."""
    return {
        "task": path.stem,
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "custom_dataset": _custom_dataset({"test": _rows(path, ("prompt", "answer"), allow_empty=False)}),
        "process_results": lambda doc, results: {"exact_match": float(is_right(results[0], doc["answer"]))},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": {"until": [], "do_sample": False},
        "num_fewshot": 0,
        "metadata": {"version": OWN},
    }


def _custom_dataset(splits: Mapping[str, list[dict[str, str]]]) -> Callable[..., Any]:
    from datasets import Dataset, DatasetDict

    data = DatasetDict({split: Dataset.from_list(rows) for split, rows in splits.items()})
    return lambda **_: data


def _rows(path: Path, keys: tuple[str, str], allow_empty: bool = True) -> list[dict[str, str]]:
    """The problems in a table, a file of JSON lines, a JSON list, or the "examples" of a .json file; two texts each."""
    text = read_text(path, _MAX_BYTES, RequestError)
    rows: Any
    if is_table(path):
        rows = table_rows(text, path, keys)
    elif path.suffix == ".json" or text.lstrip().startswith("["):
        data = _parsed(text, str(path))
        rows = data.get("examples") if isinstance(data, dict) else data
        if not isinstance(rows, list):
            raise RequestError(f'{path} needs a list of "examples"')
    else:
        lines = enumerate(text_lines(text), 1)
        rows = [_parsed(line, f"line {number} of {path}") for number, line in lines if line.strip()]
    if not rows:
        raise RequestError(f"{path} has no problems")
    for number, row in enumerate(rows, 1):
        texts = [row.get(key) for key in keys] if isinstance(row, dict) else [None]
        if not all(isinstance(text, str) and (text or allow_empty) for text in texts):
            raise RequestError(f'{path}: problem {number} needs the texts "{keys[0]}" and "{keys[1]}"')
    return [{key: row[key] for key in keys} for row in rows]


def _parsed(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{source} is not JSON: {error}") from None


def _to_json(value: Any) -> Any:
    """A metric's value as JSON has it; None for an infinite number and for NaN."""
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    return value if value is None or isinstance(value, str) else str(value)


@contextmanager
def quiet() -> Generator[None, None, None]:
    """Without the harness's progress bars, log lines and prints."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
