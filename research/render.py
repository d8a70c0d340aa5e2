"""Renders the pages of research, and the marked sections of README and docs, from results and templates.

    python research/render.py

`results/*.json` are the numbers, `templates/*.md.j2` the words: a template for each page, and one for each section that
a mark in README.md or docs/ names. `tables.py` computes what is more than formatting. A test checks them.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import long_outputs as promises
import tables
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from taper.lab.calibration import long_outputs
from taper.lab.calibration.summary import interval
from taper.models.download import DEFAULT_MODEL
from taper.models.policies import fastest_holding, shipped_policies

ROOT = Path(__file__).parent.parent
RESULTS, PAGES, TEMPLATES = (ROOT / "research" / name for name in ("results", "pages", "templates"))
SECTIONS = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("healing", "reliability", "serving", "vllm", "guide/generate")),
)
_BY_MODEL = (
    *("bench", "calibration", "claims", "cpu_bench", "exact", "gaps", "gpu_bench", "harness", "healing", "methods"),
    *(
        "depth_signals",
        "gates",
        "head",
        "head_frontier",
        "head_speed",
        "head_tasks",
        "healing_long",
        "long_outputs",
        "repetition",
        "rising",
        "second_turn",
        "session",
        "shapes",
        "task_calibration",
        "task_signals",
    ),
)
MARK = re.compile(r"(<!-- (\w+\.md\.j2): python research/render\.py -->\n).*?(<!-- end of \2 -->\n)", re.S)


def load(folder: Path = RESULTS) -> dict[str, Any]:
    """The results by kind: `decode` is decode.json, and `methods` has methods-MODEL.json of each model by its name."""
    results: dict[str, Any] = {kind: {} for kind in _BY_MODEL}
    for path in sorted(folder.glob("*.json")):
        kind, _, model = path.stem.partition("-")
        (results[kind] if model else results)[model or kind] = json.loads(path.read_text())
    return results


def shipped(model: str, folder: Path = ROOT / "src" / "taper" / "policies") -> dict[str, dict[str, Any]]:
    """The provenance of the policies that come with Taper for a model, by name, deepest first."""
    files = {path.stem: json.loads(path.read_text())["provenance"] for path in (folder / model).glob("*.json")}
    return dict(sorted(files.items(), key=lambda item: -item[1]["mean_depth"]))


def fixed(value: float, digits: int) -> str:
    """So many decimals."""
    return f"{value:.{digits}f}"


def estimate(values: Sequence[float] | None, factor: float = 1, digits: int | None = None, unit: str = "") -> str:
    """A value and its 95 % interval; a dash for None."""
    return interval(values and (values[0], values[1], values[2]), factor, unit, digits)  # type: ignore[arg-type]


def percent(values: Sequence[float] | None, digits: int | None = None) -> str:
    """A share and its 95 % interval, in percent."""
    return estimate(values, 100, digits)


def listed(names: Sequence[str]) -> str:
    """One, two and three."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def environment() -> Environment:
    """Jinja with the filters that templates use."""
    jinja = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    jinja.filters |= {"fixed": fixed, "estimate": estimate, "percent": percent, "listed": listed}
    jinja.filters["thousands"] = "{:,}".format
    jinja.globals |= {
        "margins": long_outputs,
        "tables": tables,
        "shipped": shipped,
        "default_model": DEFAULT_MODEL,
        "zip": zip,
    }
    defaults = {model: fastest_holding(policies) for model, policies in shipped_policies().items()}
    jinja.globals["shipped_models"] = sorted(shipped_policies())
    jinja.globals["promises"] = promises
    jinja.globals["default_policies"] = {model: policy.name for model, policy in defaults.items() if policy}
    return jinja


def wrapped(text: str) -> str:
    """Markdown with its paragraphs and list items in lines of at most 120 characters."""
    blocks = [block for block in re.split(r"\n(?:[ \t]*\n)+", text.strip("\n")) if block.strip()]
    return "\n\n".join("\n".join(_wrapped_block(block)) for block in blocks) + "\n"


def _wrapped_block(block: str) -> Iterator[str]:
    if block.startswith(("|", "    ", "#", "![")):
        yield block
    elif block.startswith("- "):
        for item in re.split(r"\n(?=- )", block):
            yield _filled(item, "  ")
    else:
        yield _filled(block)


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()), 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def rendered(folder: Path = RESULTS) -> dict[Path, str]:
    """The files as they should be."""
    jinja, results = environment(), load(folder)

    def text(template: str, **more: Any) -> str:
        return wrapped(jinja.get_template(template).render(results, **more))

    pages = {PAGES / f"{name}.md": text(f"{name}.md.j2") for name in ("results", "fleets", "gpu", "session")}
    for name, kind in {
        "paper": "claims",
        "methods": "methods",
        "signals": "task_signals",
        "tasks": "task_calibration",
        "head": "head",
        "long": "long_outputs",
        "gates": "gates",
    }.items():
        if results[kind]:
            pages[PAGES / f"{name}.md"] = text(f"{name}.md.j2")
    for model in results["calibration"]:
        if model != DEFAULT_MODEL:
            pages[PAGES / model / "README.md"] = text("model.md.j2", model=model)
    for path in SECTIONS:
        pages[path] = MARK.sub(lambda match: match[1] + text(match[2]) + match[3], path.read_text())
    return pages


def main() -> None:
    """Write all pages."""
    for path, text in rendered().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
