"""Paragraphs and tables in Markdown, for the pages that scripts write."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence


def prose(text: str) -> str:
    """A paragraph, in lines of at most 120 characters."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table, one figure in a cell."""
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
