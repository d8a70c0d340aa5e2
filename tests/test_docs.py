"""What README and docs claim is what the committed results and the code say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import render
from click.testing import CliRunner

from taper.cli import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_numbers_are_those_of_the_committed_results():
    for path, text in render.rendered().items():
        assert path.read_text() == text, "run: python benchmarks/render.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_in_the_docs_exist(page):
    help_of = {}
    for name in ("pull", "generate", "chat", "policy", "calibrate"):
        help_of[name] = CliRunner().invoke(cli, [name, "--help"]).stdout
    for line in page.read_text().splitlines():
        for command in re.findall(r"taper (\w+)\b(?=[^.]*$)", line):
            if command in help_of:
                for option in re.findall(r"--[a-z][a-z-]+", line.split("#")[0].split(f"taper {command}")[1]):
                    assert option in help_of[command], line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_python_examples_in_the_readme_compile():
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S):
        compile(code, "README.md", "exec")
