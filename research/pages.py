"""Paragraphs and tables in Markdown, for the pages that scripts write."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def prose(text: str) -> str:
    """A paragraph, in lines of at most 120 characters."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table, one figure in a cell."""
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def measured(c: Mapping[str, Any]) -> str:
    """When, where and with what an evaluation was measured; the end of a sentence, without its full stop."""
    commit = f" (commit {c['commit']})" if "commit" in c else ""
    versions = "".join(f", {name} {number}" for name, number in c.get("versions", {}).items())
    return (
        f"on {c['date']}, on an {c['machine']}, with --threads {c['threads']}, Taper {c['taper']}{commit}, "
        f"{c['kernels']}{versions} and Python {c['python']}"
    )
