"""`taper eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from .common import load, model_options, say


@click.command(name="eval")
@model_options
@click.option("--tasks", required=True, metavar="NAMES", help="Tasks, groups and tags of lm-evaluation-harness.")
@click.option("--modes", default="full,taper", metavar="MODES", help="full, taper, or both.")
@click.option("--policy", "policies", multiple=True, metavar="POLICY", help="Name or file, for mode taper.")
@click.option("--limit", type=int, help="Problems of each task, the first ones. Default: all.")
@click.option("--fewshot", type=int, help="Examples before each problem. Default: the task's own number.")
@click.option("--chat/--no-chat", default=False, help="Ask by the model's chat template.")
@click.option("--max-tokens", type=int, help="Most tokens of an output. Default: the task's own limit.")
@click.option("--data-dir", type=Path, metavar="FOLDER", help="Data of GSM8K and BBH, instead of the hub's.")
@click.option("--batch-size", type=click.IntRange(1), default=16, help="Outputs generated at a time.")
@click.option("--seed", type=click.IntRange(0), default=0, help="For tasks that sample.")
@click.option("--out", type=Path, metavar="FILE", help="Where to write the records.")
def evaluate(
    tasks: str, modes: str, policies: tuple[str, ...], data_dir: Path | None, batch_size: int, **options: Any
) -> None:
    """Evaluate a model at full depth and tapered, on tasks of lm-evaluation-harness."""
    from ..evals import evaluate as run
    from ..evals import load_tasks

    selection = load_tasks(tasks.split(","), fewshot=options["fewshot"], data_dir=data_dir)
    llm = load(options, max_batch_size=batch_size)
    wanted = ["full", *(policies or ["balanced"])]
    names = ("limit", "chat", "max_tokens", "seed", "out")
    result = run(llm, selection, wanted, **{name: options[name] for name in names})
    for label in result.policies:
        mine = [record for record in result.records if record.policy == label]
        for task in selection.tasks:
            for name in task.filters:
                values = [next(iter(record.metrics[name].values())) for record in mine if record.task == task.name]
                click.echo(json.dumps([task.name, name, label, sum(values) / len(values)]))
    say("done")
