"""The paper's experiment on any model: accuracy on tasks with fewer layers per token, the clock, and the NLL by step.

Methods are compared at the mean depth of the paper's headline and at the one that a budget of quality allows. The
policy for the budget and the measured order of layers come from a calibration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..calibration.clock import TimedRuns, measure_speedup
from ..calibration.store import Conditions, current_conditions, numbers
from ..calibration.summary import MEASURED_ORDER, CalibratedModel
from ..errors import RequestError, whole_number
from ..llm import LLM
from ..models.download import content_hash
from ..policy import DepthPolicy
from .comparison import Say, Study, TaskStudy, by_step, joined
from .methods import FULL, mean_depth, methods
from .summary import MARGIN, Score, check_comparison, summarise
from .tasks import Selection

FEWER = 1.5  # times fewer layers, the paper's headline
LENGTHS = (128, 512)  # most tokens of an output
CALIBRATED = "calibrated policy"
MAIN_METHODS = (MEASURED_ORDER, "middle first")  # words of their names
NUM_REPLAYED = 32  # outputs of each task that the NLL by step comes from


@dataclass(frozen=True)
class Result:
    """What one method did on a task, or on all tasks of a group together."""

    task: str
    max_tokens: int  # of an output
    method: str
    depth: float | None  # the mean depth that it was tuned to; None: full depth or the calibrated policy
    problems: int
    figure: str  # what is right or wrong: the metric and the filter
    score: Score


@dataclass(frozen=True)
class Speed:
    """The clock, for one output at a time."""

    max_tokens: int  # of the output, all of them written
    method: str
    mean_depth: float
    speedup: TimedRuns  # time per token at full depth over that of the method


@dataclass(frozen=True)
class NllBySteps:
    """How surely full depth predicts its own outputs to a task, or to a group of tasks, by step."""

    task: str
    rows: list[dict[str, Any]]  # steps, outputs, nll with its interval in nats


@dataclass(frozen=True)
class Reproduction:
    """All that was measured; `to_plain` makes the content of results.json of it."""

    model: CalibratedModel
    budget: str  # where the calibrated policy comes from, in words
    policy: dict[str, Any] | None  # its numbers; None: no policy meets the budget
    order: list[int]  # layers in the measured order of skipping
    margin: float  # the loss of accuracy that is accepted
    asked: dict[str, Any]  # chat, examples of each task, limit
    groups: dict[str, list[str]]  # the tasks of each name that stands for several
    missing: list[str]  # tasks of groups that have no local data
    left_out: list[str]  # methods that cannot come near a mean depth, in words
    results: list[Result]
    speeds: list[Speed]
    nll: list[NllBySteps]
    conditions: Conditions


def reproduce(
    llm: LLM,
    selection: Selection,
    order: Sequence[int],
    policy: DepthPolicy | None,
    folder: Path,
    *,
    budget: str = "",
    lengths: Sequence[int] = LENGTHS,
    limit: int | None = None,
    chat: bool = False,
    margin: float = MARGIN,
    baselines: bool = False,
    say: Say = print,
) -> Reproduction:
    """Compare methods on tasks, at each length of outputs.

    Args:
        llm: the model; its `max_batch_size` is the number of outputs at a time.
        selection: the tasks.
        order: flex layers in the order in which calibration skips them.
        policy: the fastest policy that a budget of quality allows; None if there is none.
        folder: keeps outputs and replays; the same call continues an interrupted one.
        budget: where the policy comes from, in words.
        lengths: most tokens of an output, at least 2 each.
        limit: problems of each task, the first ones; default all.
        chat: ask by the model's chat template.
        margin: the loss of accuracy that is accepted, in (0, 1).
        baselines: compare every method, not only the measured order and the middle first.
        say: told what is being done, a line at a time.

    Raises:
        RequestError: a number is out of range, records in the folder are of other settings, or full depth writes at
            most one token to every problem of a task.
        PolicyError: the order names a layer twice or one that the model does not have.
        ModelError: the model's output is not a number.
    """
    margin, lengths = check_comparison(selection, margin, None), sorted(set(lengths))
    check_numbers(llm, lengths, limit)
    layers, results, speeds, nll = llm.config.num_hidden_layers, [], [], []
    left_out: list[str] = []

    def leave_out(line: str) -> None:
        if line not in left_out:
            left_out.append(line)
            say(line)

    for length in lengths:
        study = Study(
            llm, order, folder / f"{length}-tokens", limit=limit, max_tokens=length, num_replayed=NUM_REPLAYED, say=say
        )
        with closing(study):
            alone = [Selection([task], {}, selection.missing, selection.split) for task in selection.tasks]
            tasks = [TaskStudy(study, task, chat) for task in alone]
            words = ("",) if baselines else MAIN_METHODS
            results += _results(tasks, length, selection, policy, words, margin, leave_out)
            say(f"the clock, {length} tokens")
            speeds += _speeds(tasks[0], policy, length)
            if length == lengths[-1]:
                nll = _nll(tasks, selection)
    return Reproduction(
        model=CalibratedModel(Path(llm.model).name, content_hash(llm.path), layers),
        budget=budget,
        policy=None if policy is None else numbers(policy),
        order=list(order),
        margin=margin,
        asked={"chat": chat, "limit": limit, "fewshot": {t.name: t.num_fewshot for t in selection.tasks}},
        groups=selection.groups,
        missing=selection.missing,
        left_out=left_out,
        results=results,
        speeds=speeds,
        nll=nll,
        conditions=current_conditions(llm),
    )


def check_numbers(llm: LLM, lengths: Sequence[int], limit: int | None) -> None:
    """Reject lengths of outputs and numbers of problems that cannot be compared.

    Raises:
        RequestError: there is no length, one is below 2 or leaves no room for a prompt, or the limit is below 1.
    """
    if limit is not None:
        whole_number("limit", limit, 1)
    room = llm.engine.backend.context_length
    if not lengths:
        raise RequestError("no length of outputs is given", "give one, such as 128")
    for length in lengths:
        if not 2 <= length < room:
            raise RequestError(
                f"an output of {length} tokens is asked for; it must have 2 or more, and leave room for the prompt in "
                f"a context of {room}",
                "change --lengths or --context",
            )


def _results(
    tasks: Sequence[TaskStudy],
    max_tokens: int,
    selection: Selection,
    policy: DepthPolicy | None,
    words: Sequence[str],
    margin: float,
    leave_out: Say,
) -> list[Result]:
    """Full depth, the calibrated policy, and methods by words of their names, on each task and group.

    A method that cannot come near a mean depth on one of the tasks is left out on all of them.
    """
    layers = tasks[0].study.num_hidden_layers
    depths = _depths(layers, policy, [tokens for task in tasks for tokens in task.lengths])
    compared: dict[tuple[str, float | None], DepthPolicy] = {(FULL, None): DepthPolicy.full(layers)}
    if policy is not None:
        compared[CALIBRATED, None] = replace(policy, name=CALIBRATED)
    tuned = {depth: [_wanted(task.methods(depth, leave_out), words) for task in tasks] for depth in depths}
    parts = []
    for number, task in enumerate(tasks):
        for depth, by_task in tuned.items():
            names = [name for name in by_task[0] if all(name in policies for policies in by_task)]
            compared |= {(name, depth): by_task[number][name] for name in names}
        parts.append(task.evaluate(list(compared.values())))
    return [
        Result(result.name, max_tokens, name, depth, result.problems, result.figure, score)
        for result in summarise(joined(parts, selection.groups), margin).results
        for (name, depth), score in zip(compared, result.scores, strict=True)
    ]


def _wanted(policies: Mapping[str, DepthPolicy], words: Sequence[str]) -> dict[str, DepthPolicy]:
    """Those whose names contain one of some words, less full depth."""
    return {name: own for name, own in policies.items() if name != FULL and any(word in name for word in words)}


def _depths(num_hidden_layers: int, policy: DepthPolicy | None, lengths: Sequence[int]) -> list[float]:
    """Mean depths at which methods are compared: that of the headline, and that of a policy over known outputs."""
    depths = [num_hidden_layers / FEWER]
    if policy is not None and max(lengths, default=0) > 1:
        depths.append(mean_depth(policy, lengths))
    return [round(depth, 2) for depth in depths if 2 <= depth <= num_hidden_layers - 1]


def _speeds(task: TaskStudy, policy: DepthPolicy | None, length: int) -> list[Speed]:
    """The calibrated policy and the measured order at the headline's depth, after a prompt of the task."""
    study, headline = task.study, round(task.study.num_hidden_layers / FEWER, 2)
    tuned = methods(study.num_hidden_layers, headline, [length], study.order, study.influence, lambda _: None)
    timed = {} if policy is None else {CALIBRATED: policy}
    timed |= {f"{name} at depth {headline:g}": own for name, own in _wanted(tuned, [MEASURED_ORDER]).items()}
    return [
        Speed(length, name, own.mean_depth(length), measure_speedup(study.llm.engine, task.prompts[0], own, length))
        for name, own in timed.items()
    ]


def _nll(tasks: Sequence[TaskStudy], selection: Selection) -> list[NllBySteps]:
    """Full depth's outputs to each task and group, replayed at full depth."""
    study, found = tasks[0].study, []
    for name, members in ({task.task.name: [task.task.name] for task in tasks} | selection.groups).items():
        references = [reference for task in tasks if task.task.name in members for reference in task.references]
        scores = study.scores(references, {FULL: DepthPolicy.full(study.num_hidden_layers)})[FULL]
        found.append(NllBySteps(name, by_step(scores, {"nll": scores.nll_full})))
    return found
