"""The files of the page, without a browser: small, of their own, and never text as markup."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from serving import serving

PAGE = Path(__file__).parent.parent / "src" / "taper" / "server" / "page"
FILES = sorted(PAGE.iterdir())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_are_small_and_load_nothing_from_elsewhere(file):
    text = file.read_text()
    assert len(text.splitlines()) <= 300
    assert max(map(len, text.splitlines())) <= 160 or file.suffix in (".svg", ".css")
    assert set(re.findall(r"https?://[\w./-]+\w", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert not re.search(r"\son\w+=|style=|<style|@import|@font-face|url\(", text)


def test_they_are_served_with_headers_that_allow_nothing_else(tiny_llama):
    with serving(tiny_llama) as server:
        for file in FILES:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            response = server.http.get(path)
            assert (response.status_code, response.content) == (200, file.read_bytes())
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
        html = (PAGE / "index.html").read_text()
        links = re.findall(r'(?:src|href)="([^"#]+)"', html)
        assert len(links) > 3
        for link in links:
            assert server.http.get(f"/{link}").status_code == 200


def test_nothing_leaves_the_prefix_that_a_proxy_serves_it_under(tiny_llama):
    with serving(tiny_llama, root_path="/taper") as server:
        pages = {path: server.http.get(path).text for path in ("/", "/docs")}
        pages |= {file.name: file.read_text() for file in FILES}
        for name, text in pages.items():
            assert not re.search(r'(?:src|href)="/|(?:ask|fetch)\(["`]/|from "/', text), name
        assert server.http.get("/openapi.json").json()["servers"] == [{"url": "/taper"}]
