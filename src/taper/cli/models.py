"""`taper pull`."""

from __future__ import annotations

import click

from .common import say


@click.command()
@click.argument("model", required=False)
def pull(model: str | None) -> None:
    """Fetch MODEL: a hub id ORG/MODEL, or nothing for the default model."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from ..models import DEFAULT_MODEL
    from ..models import pull as fetch
    from ..terminal import console

    name = DEFAULT_MODEL if model is None else model
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    screen = console()
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(name, total=None, visible=model is None)
        path = fetch(name, lambda done, total: bar.update(task, completed=done, total=total))
    say(f"{name} is at {path}")
