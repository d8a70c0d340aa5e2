"""The page in a real browser: Debian's Chromium, headless, driven by Playwright."""

from __future__ import annotations

import re
import shutil
import time

import pytest
from serving import before_each_forward, serving

from taper.engine.drafting import Drafting

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
SLOW = 20_000  # milliseconds; a busy machine must not fail a test


@pytest.fixture(scope="module")
def server(tiny_llama):
    with serving(tiny_llama, context=1000) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    """The page, which must never log an error nor ask anyone but its own server."""
    page = browser.new_page()
    page.set_default_timeout(SLOW)
    page.problems = []
    page.on("console", lambda message: message.type == "error" and page.problems.append(message.text))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda request: request.url.startswith(server.url) or page.problems.append(request.url))
    page.goto(server.url)
    page.wait_for_selector(".policy")
    yield page
    assert page.problems == []
    page.close()


def ask(page, text: str = "tell me", tokens: int = 40) -> None:
    page.fill("#temperature", "0")
    page.fill("#max-tokens", str(tokens))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_for_end(page) -> None:
    page.wait_for_selector("#send", state="visible")


def script(server, text: str, monkeypatch) -> None:
    """Make every completion this text."""
    from test_server import force_text

    monkeypatch.setattr(server.served, "chat", server.served.chat)  # put back at the end
    force_text(server, text)


def test_a_message_streams_with_tints_a_chart_and_figures(page, server):
    assert "tiny, 6 layers" in page.text_content("#model")
    ask(page)
    wait_for_end(page)
    assert page.text_content(".user") == "tell me"
    shown = page.text_content(".answer .text")
    assert shown.strip()
    classes = page.eval_on_selector_all(".answer .text span", "spans => spans.map(span => span.className)")
    assert classes[0] == "t0", "the first token runs every layer"
    assert "t4" in classes, "later ones run the fewest"
    levels = [int(name[1:]) for name in classes]
    assert levels == sorted(levels), "depth never rises"
    colours = {
        page.eval_on_selector(f".answer .text .{name}", "span => getComputedStyle(span).backgroundColor")
        for name in ("t0", "t4")
    }
    assert len(colours) == 2
    assert page.get_attribute(".chart .curve", "d").count("V") == 40
    figures = page.text_content(".figures")
    assert "mean depth" in figures
    assert "tokens/s" in figures
    assert "Layers by step: 6 at first" in page.get_attribute(".chart", "aria-label")


def test_comparing_shows_both_side_by_side_and_says_what_was_measured(page):
    page.check("[name=mode][value=compare]", force=True)
    ask(page)
    wait_for_end(page)
    titles = page.eval_on_selector_all(".pair .answer h3", "titles => titles.map(title => title.textContent)")
    assert titles == ["full depth, 6 layers", "tapered, d3"]
    left, right = (page.locator(".pair .answer").nth(i).bounding_box() for i in (0, 1))
    assert left["x"] + left["width"] <= right["x"]
    assert abs(left["y"] - right["y"]) < 2
    verdict = page.text_content(".verdict")
    figures = re.search(r"ran at (.*)x the tokens per second of full depth, between (.*)x and (.*)x with 95 %", verdict)
    ratio, low, high = map(float, figures.groups())
    assert 0 < low <= ratio <= high
    assert "tokens are the same" in verdict or "texts are the same" in verdict
    assert len(page.query_selector_all(".pair .chart")) == 2
    assert "goes on from the tapered answer" in verdict


def test_exact_mode_says_how_many_drafted_tokens_were_accepted(page, server, monkeypatch):
    drafting = Drafting("ngram", min_match=1, always=True)
    monkeypatch.setattr(server.served, "_drafting", lambda fields: drafting if fields.mode == "exact" else None)
    page.check("[name=mode][value=exact]", force=True)
    assert page.evaluate("document.querySelector('#policies').disabled")
    ask(page, "abcabcabcabc")
    wait_for_end(page)
    assert re.search(r", \d+ of \d+ drafted tokens accepted", page.text_content(".figures"))


def test_a_chat_survives_a_reload_and_its_last_answer_can_be_written_again(page, server):
    page.fill("#system", "be kind")
    for text in ("one", "two"):
        ask(page, text, tokens=5)
        wait_for_end(page)
    shown = page.eval_on_selector_all(".user, .answer .text, .figures", "all => all.map(one => one.textContent)")
    classes = page.eval_on_selector_all(".answer .text span", "spans => spans.map(span => span.className)")
    page.reload()
    page.wait_for_selector(".policy")
    again = page.eval_on_selector_all(".user, .answer .text, .figures", "all => all.map(one => one.textContent)")
    assert again == shown
    assert page.eval_on_selector_all(".answer .text span", "spans => spans.map(span => span.className)") == classes
    assert page.input_value("#system") == "be kind"
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "9")
    page.click(".regenerate")
    wait_for_end(page)
    assert page.eval_on_selector_all(".user", "all => all.map(one => one.textContent)") == ["one", "two"]
    assert "9 tokens" in page.text_content(".figures >> nth=-1")
    page.click("#new")
    page.reload()
    page.wait_for_selector(".policy")
    assert page.query_selector_all(".user") == []


def test_a_system_message_reaches_the_model(page, server):
    counts = []
    for text in ("", "be kind"):
        page.fill("#system", text)
        before = server.metric("taper_prompt_tokens_total")
        ask(page, "one", tokens=2)
        wait_for_end(page)
        counts.append(server.metric("taper_prompt_tokens_total") - before)
        page.click("#new")
    assert counts[1] - counts[0] > len("be kind")


def test_a_setting_that_cannot_be_is_told_before_anything_is_sent(page, server):
    page.fill("#temperature", "7")
    page.fill("#prompt", "hello")
    page.press("#prompt", "Enter")
    assert "Temperature is 7" in page.text_content("[role=alert]")
    assert page.query_selector_all(".user") == []
    assert page.input_value("#prompt") == "hello"
    page.fill("#temperature", "")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".figures")
    wait_for_end(page)


def test_empty_fields_show_what_the_model_recommends(page, server):
    shown = page.get_attribute("#temperature", "placeholder"), page.get_attribute("#top-k", "placeholder")
    assert shown == (str(server.llm.sampling["temperature"]), str(server.llm.sampling["top_k"]))


def test_the_legend_says_which_depths_have_which_colours(page, server):
    texts = page.eval_on_selector_all("#legend i", "all => all.map(one => one.textContent)")
    assert texts[0].startswith("6")
    assert texts[-1].endswith(str(server.served.policies["d3"].min_depth))
    ask(page, tokens=3)
    wait_for_end(page)
    assert page.is_visible("#legend")


def test_a_policy_can_be_chosen_and_says_what_it_costs(page, server):
    assert "quality not measured" in page.text_content(".policy >> nth=0")
    page.check("[name=policy][value=static]", force=True)
    ask(page)
    wait_for_end(page)
    assert page.get_attribute(".answer", "data-policy") == "static"
    least = server.served.policies["static"].min_depth
    titles = page.eval_on_selector_all(".answer .text span[title]", "spans => spans.map(span => span.title)")
    assert titles[-1].endswith(f": {least} of 6 layers")


def test_full_depth_has_no_tint(page):
    page.check("[name=mode][value=full]", force=True)
    assert page.eval_on_selector("#policies", "fieldset => fieldset.disabled")
    ask(page)
    wait_for_end(page)
    classes = page.eval_on_selector_all(".answer .text span", "spans => spans.map(span => span.className)")
    assert set(classes) == {"t0"}
    assert "mean depth 6.0 of 6" in page.text_content(".figures")


def test_stopping_keeps_what_there_is_and_frees_the_slot(page, server, monkeypatch):
    before_each_forward(server, monkeypatch, lambda: time.sleep(0.02))
    script(server, "a long text " * 60, monkeypatch)
    for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
        ask(page, tokens=900)
        page.wait_for_selector(".running .text span", state="attached")
        stop()
        wait_for_end(page)
        assert "stopped" in page.text_content(".answer >> nth=-1")
        assert server.is_idle()
        page.click("#new")


def test_a_conversation_goes_on_and_starts_over(page, server):
    for text in ("one", "two"):
        ask(page, text, tokens=5)
        wait_for_end(page)
    assert page.eval_on_selector_all(".user", "all => all.map(one => one.textContent)") == ["one", "two"]
    page.click("#new")
    assert page.query_selector_all(".user") == []
    assert page.is_visible("#welcome")


def test_an_error_is_shown_in_words(page, server):
    ask(page, "x" * 5000)
    page.wait_for_selector("[role=alert]")
    assert "context" in page.text_content("[role=alert]")
    assert page.is_visible("#send")
    page.problems.clear()  # Chromium logs the 400


def test_a_message_of_markup_is_text(page, server, monkeypatch):
    """Neither what a user types nor what a model writes becomes elements or runs."""
    hostile = '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1"> [a](javascript:hacked)'
    script(server, hostile, monkeypatch)
    ask(page, hostile, tokens=200)
    wait_for_end(page)
    assert page.text_content(".user") == hostile
    assert page.text_content(".answer .text") == hostile
    assert page.query_selector_all("#messages script, #messages img, #messages a") == []
    assert page.evaluate("window.hacked") is None


MARKDOWN = """# A title

Some *soft* and **strong** words, `code`, 2 * 3 * 4 and [a link](https://example.org/x).

- one
- two **bold**

3. three
4. four

> quoted

```python
x = "<b>" * 2
```

---
"""


def test_markdown_is_rendered_and_keeps_its_tints(page, server, monkeypatch):
    script(server, MARKDOWN, monkeypatch)
    ask(page, tokens=400)
    wait_for_end(page)

    def texts(selector):
        return page.eval_on_selector_all(f".answer .text {selector}", "all => all.map(one => one.textContent)")

    assert texts("h2") == ["A title"]
    assert (texts("em"), texts("strong"), texts("p code")) == (["soft"], ["strong", "bold"], ["code"])
    assert texts("ul li") == ["one", "two bold"]
    assert texts("ol li") == ["three", "four"]
    assert page.eval_on_selector(".answer ol li", "item => item.value") == 3
    assert texts("pre code") == ['x = "<b>" * 2']
    assert texts("blockquote") == ["quoted"]
    assert page.get_attribute(".answer a", "href") == "https://example.org/x"
    assert "2 * 3 * 4" in texts("p")[0]
    assert len(texts("hr")) == 1
    loose = page.evaluate(
        """() => {
          const root = document.querySelector('.answer .text');
          const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
          let loose = 0;
          while (walker.nextNode()) loose += walker.currentNode.parentElement.tagName !== 'SPAN';
          return loose;
        }"""
    )
    assert loose == 0, "each text belongs to a token"


def test_it_works_by_keyboard_alone(page):
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    wait_for_end(page)
    assert page.text_content(".user") == "one\ntwo"
    assert page.evaluate("document.activeElement.id") == "prompt"


def test_it_fits_on_a_phone(browser, server):
    page = browser.new_page(viewport={"width": 360, "height": 700})
    page.set_default_timeout(SLOW)
    page.goto(server.url)
    page.wait_for_selector(".policy", state="attached")
    assert not page.is_visible("#settings")
    page.click("#open-settings")
    assert page.is_visible("#settings")
    page.check("[name=mode][value=compare]", force=True)
    for close in (
        lambda: page.click("#close-settings"),
        lambda: page.mouse.click(180, 100),
        lambda: page.keyboard.press("Escape"),
    ):
        if not page.is_visible("#settings"):
            page.click("#open-settings")
        close()
        assert not page.is_visible("#settings")
    sizes = page.eval_on_selector_all(
        "button", "all => all.filter(b => b.offsetParent).map(b => Math.min(b.offsetWidth, b.offsetHeight))"
    )
    assert min(sizes) >= 44
    page.fill("#prompt", "x")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".verdict")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    boxes = [page.locator(".pair .answer").nth(i).bounding_box() for i in (0, 1)]
    assert boxes[1]["y"] >= boxes[0]["y"] + boxes[0]["height"], "one below the other"
    page.close()


def test_dark_and_light_differ_and_can_be_switched(browser, server):
    seen = set()
    for scheme in ("dark", "light"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(server.url)
        background = "getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(background)
        page.click("#theme")
        after = page.evaluate(background)
        assert before != after
        seen.add((before, after))
        page.close()
    (a, b), (c, d) = seen
    assert (a, b) == (d, c)


def test_a_key_is_asked_for_and_used_and_a_server_that_is_gone_is_said_in_words(browser, tiny_llama):
    with serving(tiny_llama, api_key="secret") as server:
        page = browser.new_page()
        page.set_default_timeout(SLOW)
        page.goto(server.url)
        page.wait_for_selector("[role=alert]")
        page.fill("#api-key", "secret")
        page.press("#api-key", "Tab")
        page.wait_for_selector(".policy")
        ask(page, "x", tokens=3)
        wait_for_end(page)
        assert "tokens/s" in page.text_content(".figures")
    ask(page, "x")
    page.wait_for_selector("[role=alert]")
    assert "cannot be reached" in page.text_content("[role=alert]")
    page.close()
