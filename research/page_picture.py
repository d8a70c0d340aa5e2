"""Draws docs/pictures/playground.png: the page of taper serve in Chromium, after a real answer of the default model.

python research/page_picture.py
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright
from server_process import free_port, serving

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "playground.png"
QUESTION, POLICY, TOKENS = "What is photosynthesis?", "fast", 96
SIZE = {"width": 1180, "height": 760}
ANSWER_MILLISECONDS = 120_000


def main() -> None:
    """Ask one question on the page and draw what is seen."""
    port = free_port()
    command = [sys.executable, "-m", "taper", "serve", "--port", str(port)]
    with serving(command, port), sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(f"http://127.0.0.1:{port}/")
        page.check("[name=mode][value=taper]", force=True)
        page.click("summary")
        page.check(f"[name=policy][value={POLICY}]", force=True)
        page.fill("#max-tokens", str(TOKENS))
        page.fill("#seed", "2")
        page.fill("#prompt", QUESTION)
        page.press("#prompt", "Enter")
        page.wait_for_selector("#send", state="visible", timeout=ANSWER_MILLISECONDS)
        page.eval_on_selector("#panel", "panel => panel.scrollTo(0, 0)")
        page.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main()
