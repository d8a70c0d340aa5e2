"""Tasks of lm-evaluation-harness: names to their problems, and outputs to their scores.

Prompts, filters and metrics are the harness's own. Knows no model. The harness takes seconds to import, so it is
imported where it is used.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError, TaperError, shown
from .data import SPLITS, SUFFIX, has_data, load_data, own_task

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

FEWSHOT_SEED = 1234  # the harness's default: the same examples as there
_QUICK_FOLDERS = ("gsm8k", "bbh")  # the harness takes 10 seconds to read all of its task files
_NAMES = re.compile(r"^['\"]?(?:task|group)['\"]?:\s*['\"]?([\w.-]+)", re.MULTILINE)
Metrics = dict[str, dict[str, Any]]  # of a problem: filter, metric, value
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
        """What tells its prompts and generation options from others: 16 hex digits."""
        text = json.dumps([request.args for request in self.requests], default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class EvalTask:
    """A generative task of the harness, ready to be asked and scored."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.name: str = task.config.task
        self.version = str((task.config.metadata or {}).get("version", task.VERSION))
        self.num_fewshot: int = task.config.num_fewshot
        self.filters: list[str] = [ensemble.name for ensemble in task._filters]

    @property
    def num_problems(self) -> int:
        """How many there are."""
        return len(self._task.eval_docs)

    def problems(
        self,
        limit: int | None = None,
        render_chat: RenderChat | None = None,
        indices: Collection[int] | None = None,
    ) -> list[Problem]:
        """The first `limit` problems, or those with these indices; as conversations, if `render_chat` makes prompts.

        Raises:
            RequestError: the task has too few examples for its prompts, or asks for log-likelihoods.
            TaperError: what `render_chat` raises.
        """
        self._task.set_fewshot_seed(FEWSHOT_SEED)  # the same examples each time
        try:
            with quiet():
                self._task.build_all_requests(
                    limit=limit,
                    samples=None if indices is None else set(indices),
                    apply_chat_template=render_chat is not None,
                    fewshot_as_multiturn=render_chat is not None,
                    chat_template=render_chat,
                )
        except (AssertionError, ValueError) as error:
            raise RequestError(
                f"task {self.name} with {self.num_fewshot} examples: {error}", "lower --fewshot"
            ) from None
        requests: dict[int, list[Instance]] = {}
        for request in self._task.instances:
            if request.request_type != "generate_until":
                raise _scores_given_answers(self.name, request.request_type)
            requests.setdefault(request.doc_id, []).append(request)
        repeats, numbered = self._task.config.repeats, sorted(indices or ())  # it counts the chosen ones from 0
        return [
            Problem(self.name, numbered[number] if numbered else number, tuple(asked), repeats)
            for number, asked in requests.items()
        ]

    def score(self, problem: Problem, texts: Sequence[Sequence[str]]) -> tuple[Metrics, dict[str, str]]:
        """Every metric under every filter, and what each took for the answer, by the outputs for each request."""
        answered = [
            replace(request, resps=list(outputs), filtered_resps={})
            for request, outputs in zip(problem.requests, texts, strict=True)
        ]
        for ensemble in self._task._filters:
            ensemble.apply(answered)
        scores, extracted = {}, {}
        for name in self.filters:
            filtered = [request.filtered_resps[name] for request in answered]
            metrics = self._task.process_results(problem.requests[0].doc, filtered)
            scores[name] = {metric: _plain(value) for metric, value in metrics.items()}
            extracted[name] = str(filtered[0] if len(filtered) == 1 else filtered)
        return scores, extracted


@dataclass(frozen=True)
class Selection:
    """The tasks that some names stand for."""

    tasks: list[EvalTask]
    groups: dict[str, list[str]]  # the tasks of each name that stands for several
    missing: list[str]  # tasks of groups that have no local data
    split: str | None  # of the data sets; None: the one that each task is tested on


def load_tasks(
    names: Sequence[str], *, fewshot: int | None = None, data_dir: Path | None = None, split: str | None = None
) -> Selection:
    """Tasks of the harness, where a group or tag stands for all of its tasks, and of your own, from files.

    Args:
        names: tasks, groups and tags of the harness, and files of JSON lines (.jsonl) with "prompt" and "answer".
        fewshot: examples before each problem; default the task's own number.
        data_dir: a folder with the data of GSM8K and BBH; default the Hugging Face hub.
        split: ask the problems of this part of the data sets, such as "train"; default the one for testing.

    Raises:
        RequestError: an unknown name, a task that does not generate or cannot be run here, `fewshot` for a task that is
            defined without examples, a split that a task does not have, or data that is missing or damaged.
        TaperError: the harness is not installed.
    """
    with quiet():
        own = [own_task(Path(name)) for name in names if name.endswith(SUFFIX)]
        named = [name for name in names if not name.endswith(SUFFIX)]
        manager = _manager(named)
        leaves = {name: _leaves(manager, {"task": name}) for name in named}
        missing: list[str] = []
        for name, members in leaves.items():
            for member in members:
                _check_generates(member)
                if split is not None:
                    member["test_split"] = _checked_split(member, split)
            if data_dir is not None:
                there = [member for member in members if has_data(member, data_dir)]
                if not there:
                    load_data(members[0], data_dir)  # says what is missing
                missing += [member["task"] for member in members if member not in there]
                leaves[name] = there
        configs = [config for members in leaves.values() for config in members]
        if data_dir is not None:
            specs: Sequence[Any] = [_with_data(config, load_data(config, data_dir)) for config in configs]
        else:
            specs = named if split is None else configs
        try:
            loaded = manager.load([*specs, *own])["tasks"]
        except TaperError:
            raise
        except Exception as error:  # it may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            hint = "check the connection, or give local data with --data-dir"
            raise RequestError(f"the tasks {', '.join(names)} cannot be loaded: {reason}", hint) from None
    for task in loaded.values():
        _set_fewshot(task, fewshot)
    groups = {name: [member["task"] for member in members] for name, members in leaves.items() if len(members) > 1}
    return Selection([EvalTask(task) for task in loaded.values()], groups, missing, split)


def _manager(names: Sequence[str]) -> TaskManager:
    """The harness's index of tasks: the whole of it only if a name needs it."""
    try:
        import lm_eval.tasks
    except ImportError:
        raise TaperError("evaluation needs lm-evaluation-harness", 'pip install "taper-llm[eval]"') from None
    root = Path(lm_eval.tasks.__file__).parent
    quick = lm_eval.tasks.TaskManager(include_defaults=False, include_path=[root / name for name in _QUICK_FOLDERS])
    unknown = [name for name in names if name not in quick.task_index]
    if not unknown:
        return quick
    texts = [path.read_text(errors="replace") for path in root.rglob("*.yaml")]
    for name in unknown:
        if not any(name in text for text in texts):
            raise _unknown(name, {found for text in texts for found in _NAMES.findall(text)})
    whole = lm_eval.tasks.TaskManager()
    for name in unknown:
        if name not in whole.task_index:
            raise _unknown(name, whole.all_tasks)
    return whole


def _unknown(name: str, known: Sequence[str] | set[str]) -> RequestError:
    near = difflib.get_close_matches(name, sorted(known), n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "see: python -m taper.evals ls tasks"
    return RequestError(f"there is no task {name!r} in lm-evaluation-harness", hint)


def _leaves(manager: TaskManager, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The configurations of the tasks that a name stands for."""
    from lm_eval.tasks._index import Kind
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = manager.task_index.get(config["task"])
    if entry is None:
        return []
    if entry.kind in (Kind.GROUP, Kind.TAG):
        members = sorted(entry.tags) if entry.kind is Kind.TAG else (entry.cfg or {}).get("task", [])
        named = [{"task": member} if isinstance(member, str) else member for member in members]
        return [leaf for member in named if "task" in member for leaf in _leaves(manager, member)]
    return [{**load_yaml(entry.yaml_path, resolve_func=True), **config}]


def _check_generates(config: Mapping[str, Any]) -> None:
    """Reject what cannot be run, before its data is fetched."""
    name, kind = config["task"], config.get("output_type", "generate_until")
    if kind != "generate_until":
        raise _scores_given_answers(name, kind)
    if config.get("unsafe_code"):
        raise RequestError(
            f"task {name} runs code that the model wrote",
            "if you accept that, use python -m taper.evals with --confirm_run_unsafe_code",
        )
    if config.get("doc_to_image") or config.get("doc_to_audio"):
        raise RequestError(f"task {name} asks about pictures or sound, and only text is supported")


def _checked_split(config: Mapping[str, Any], split: str) -> str:
    """The split, if the task names it as one of its own."""
    known = sorted({config[name] for name in SPLITS if config.get(name)})
    if split not in known:
        raise RequestError(f"task {config['task']} has no split {shown(split)}", f"it has {' and '.join(known)}")
    return split


def _scores_given_answers(name: str, kind: str) -> RequestError:
    return RequestError(
        f"task {name} scores given answers by log-likelihood ({kind}): nothing is generated, so there is no step to "
        "run with fewer layers",
        "choose tasks that generate, such as gsm8k or bbh_cot_fewshot",
    )


def _with_data(config: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """A task's configuration with its data set in place of the hub's; the rest of it stays."""
    return {**config, "custom_dataset": lambda **_: data}


def _set_fewshot(task: Task, fewshot: int | None) -> None:
    own = task.config.num_fewshot
    if fewshot and own == 0:
        raise RequestError(f"task {task.config.task} is defined without examples", "leave out --fewshot, or give 0")
    task.set_config("num_fewshot", (own or 0) if fewshot is None else fewshot)


def _plain(value: Any) -> Any:
    """A value as JSON has it; None for what is not a number."""
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str) else str(value)


@contextmanager
def quiet() -> Generator[None, None, None]:
    """Without the harness's bars, log lines and prints."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
