"""A hook of MkDocs: links that lead out of docs/ work in the repository; on the site, they lead to the repository."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<=\]\()\.\./[^)\s]+")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page with addresses in the repository instead of such links."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def absolute(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[0]))
        return link[0] if path.startswith("docs/") else f"{config.repo_url.rstrip('/')}/blob/main/{path}"

    return _LINK.sub(absolute, markdown)
