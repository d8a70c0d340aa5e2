"""What an evaluation found, as text: a small table for each task."""

from __future__ import annotations

from ..calibration.wording import interval
from .summary import Score, Summary, TaskSummary

_TITLES = ("", "solved, %", "mean depth", "tokens", "difference, points", "McNemar p", "")
_MANY = 0.05  # share of outputs at the limit of tokens from which readers are told


def as_text(summary: Summary) -> str:
    """The tables, and what a reader should know before using them."""
    lines: list[str] = []
    for result in summary.results:
        lines += [*_table(result, summary), ""]
    return "\n".join([*lines, *_remarks(summary)])


def _table(result: TaskSummary, summary: Summary) -> list[str]:
    """A task's title and table."""
    settings = summary.settings["tasks"][result.tasks[0]]
    problems = "1 problem" if result.problems == 1 else f"{result.problems} problems"
    facts = [problems, f"{settings['fewshot']}-shot{' chat' if summary.settings['chat'] else ''}"]
    if len(result.tasks) > 1:
        facts.insert(0, f"{len(result.tasks)} tasks together")
    else:
        facts.append(f"version {settings['version']}")
    facts.append(result.figure or "no figure that is right or wrong; the records have its metrics")
    margin = f"loss within {100 * summary.margin:g} {'point' if summary.margin == 0.01 else 'points'}"
    rows = [(*_TITLES[:-1], margin), *(_row(score) for score in result.scores)]
    if all(score.against_full is None for score in result.scores):
        rows = [row[:4] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"{result.name}: {', '.join(facts)}", *(f"  {line}" for line in table)]


def _row(score: Score) -> tuple[str, ...]:
    """A policy's line."""
    name = "full" if score.mode == "full" else f"taper {score.policy}"
    cells = (name, interval(score.accuracy, 100, digits=1), f"{score.mean_depth:.1f}", f"{score.tokens:.0f}")
    compared = score.against_full
    if compared is None:
        return (*cells, "", "", "")
    return (*cells, interval(compared.difference, 100, digits=1), f"{compared.p_value:.2g}", compared.conclusion)


def _remarks(summary: Summary) -> list[str]:
    """What a reader should know."""
    remarks = ["Intervals are 95 %; the verdict is a one-sided test at the 5 % level."]
    for result in summary.results:
        if len(result.tasks) == 1 and any(score.cut_off > _MANY for score in result.scores):
            shares = ", ".join(f"{score.cut_off:.0%} ({score.policy})" for score in result.scores)
            remarks.append(
                f"{result.name}: outputs that reached the limit of tokens, which --max-tokens raises: {shares}."
            )
    if summary.missing:
        remarks.append(f"Not run, as the data folder has no data for them: {', '.join(summary.missing)}.")
    if summary.num_truncated:
        cut = f"{summary.num_truncated} prompts did" if summary.num_truncated > 1 else "1 prompt did"
        remarks.append(f"{cut} not fit with the output and lost the beginning; --context raises the limit.")
    return remarks
