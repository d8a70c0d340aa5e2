"""The package's description: README.md, with links that work outside of the repository. pyproject.toml has the rest."""

import re
import shutil
from pathlib import Path

from setuptools import setup

PYPROJECT = Path("pyproject.toml").read_text(encoding="utf-8")
REPOSITORY = re.findall(r'Repository = "https://github.com/(.+)"', PYPROJECT)[0]
PICTURES = (".svg", ".png")
LINK = re.compile(r"(?<=\]\()(?!https?:|#)[^)\s]+")


def absolute(link: re.Match[str]) -> str:
    """The address of a file of the repository."""
    if link[0].endswith(PICTURES):
        return f"https://raw.githubusercontent.com/{REPOSITORY}/main/{link[0]}"
    return f"https://github.com/{REPOSITORY}/blob/main/{link[0]}"


shutil.rmtree("build/lib", ignore_errors=True)  # files of an earlier version, which would join the package
setup(
    long_description=LINK.sub(absolute, Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
