"""How far a calibration or a healing is, told to whoever wants to show it."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[str, float], None]  # a stage, and what part of it, 0 to 1, was done since the last call


class Progress:
    """Stages, one after the other; `report`, if there is one, hears of every part that is done."""

    def __init__(self, report: Report | None = None) -> None:
        self._report = report or (lambda name, part: None)

    def stage(self, name: str, parts: float) -> Stage:
        """Begin a stage of so many parts."""
        self._report(name, 0.0)
        return Stage(self._report, name, max(1.0, parts))


class Stage:
    """A stage that goes on."""

    def __init__(self, report: Report, name: str, parts: float) -> None:
        self._report, self._name, self._parts = report, name, parts

    def done(self, parts: float = 1) -> None:
        """Some of its parts are done."""
        self._report(self._name, parts / self._parts)


SILENT = Progress().stage("", 1)  # that nobody hears of
