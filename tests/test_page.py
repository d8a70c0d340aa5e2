"""The page in a real browser: Debian's Chromium, headless, driven by Playwright."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from serving import before_each_forward, serving

from taper.engine.drafting import Drafting
from taper.models.download import DEFAULT_MODEL
from taper.models.policies import shipped_policies

# Playwright comes with it.
Axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="make test-ci installs it").Axe
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
SLOW = 20_000  # milliseconds; a busy machine must not fail a test
SIZES = {"desktop": {"width": 1280, "height": 720}, "phone": {"width": 360, "height": 700}}


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
    open_page(page, server)
    yield page
    assert page.problems == []
    page.close()


def open_page(page, server) -> None:
    page.goto(server.url)
    page.wait_for_selector(".policy", state="attached")


def new_page(browser, server, size: str, scheme: str = "light"):
    page = browser.new_page(viewport=SIZES[size], color_scheme=scheme)
    page.set_default_timeout(SLOW)
    open_page(page, server)
    return page


def in_view(page, selector: str) -> bool:
    """Whether all of an element is seen, and nothing lies over its middle."""
    return page.eval_on_selector(
        selector,
        """element => {
          const { top, bottom, left, right } = element.getBoundingClientRect();
          const seen = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
          return top >= 0 && bottom <= innerHeight && element.contains(seen);
        }""",
    )


def choose_policy(page, name: str) -> None:
    page.click("summary")
    page.check(f"[name=policy][value='{name}']", force=True)


def hidden_below(page) -> float:
    """How many pixels of the conversation are below what is in view."""
    return page.eval_on_selector("#conversation", "log => log.scrollHeight - log.scrollTop - log.clientHeight")


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
    titles = page.eval_on_selector_all(".pair .answer h2", "titles => titles.map(title => title.textContent)")
    assert titles == ["full depth, 6 layers", "tapered, d3"]
    left, right = (page.locator(".pair .answer").nth(i).bounding_box() for i in (0, 1))
    assert left["x"] + left["width"] <= right["x"]
    assert abs(left["y"] - right["y"]) < 2
    verdict = page.text_content(".verdict")
    figures = re.search(r"ran at (.*)x the tokens per second of full depth, between (.*)x and (.*)x with 95 %", verdict)
    ratio, low, high = map(float, figures.groups())
    assert 0 < low <= ratio <= high
    assert re.search("tokens are the same|texts are the same|differ from the beginning", verdict)
    assert [page.locator(".pair .chart").nth(i).is_visible() for i in (0, 1)] == [False, True]
    ends = [page.locator(".pair .figures").nth(i).bounding_box() for i in (0, 1)]
    assert abs(ends[0]["y"] + ends[0]["height"] - ends[1]["y"] - ends[1]["height"]) < 2
    assert "goes on from the tapered answer" in verdict


def test_exact_mode_says_how_many_drafted_tokens_were_accepted(page, server, monkeypatch):
    drafting = Drafting("ngram", min_match=1, always=True)
    monkeypatch.setattr(server.served, "_drafting", lambda fields: drafting if fields.mode == "exact" else None)
    page.check("[name=mode][value=exact]", force=True)
    assert page.is_hidden("#policies")
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
    open_page(page, server)
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
    open_page(page, server)
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


@pytest.mark.parametrize("size", SIZES)
def test_a_setting_that_cannot_be_is_said_at_its_field_before_anything_is_sent(browser, server, size):
    page = new_page(browser, server, size)
    for field, value, rule in (
        ("temperature", "9", "Give a number from 0 to 2."),
        ("seed", "0.5", "Give a whole number of at least 0."),
        ("max-tokens", "", "Give a whole number from 1 to 1000."),
    ):
        page.eval_on_selector(f"#{field}", f"input => input.value = '{value}'")
        page.fill("#prompt", "hello")
        page.press("#prompt", "Enter")
        assert page.text_content(f"#{field}-problem") == rule
        assert in_view(page, f"#{field}")
        assert in_view(page, f"#{field}-problem")
        assert page.evaluate("document.activeElement.id") == field
        assert page.query_selector_all(".user") == []
        assert page.input_value("#prompt") == "hello"
        page.fill(f"#{field}", "1")
        assert page.text_content(f"#{field}-problem") == ""
        page.keyboard.press("Escape")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".figures")
    wait_for_end(page)
    page.close()


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
    assert "at least 3 of 6 layers, quality not measured" in page.text_content(".policy >> nth=0")
    choose_policy(page, "static")
    assert page.text_content("summary").startswith("static")
    ask(page)
    wait_for_end(page)
    assert page.get_attribute(".answer", "data-policy") == "static"
    least = server.served.policies["static"].min_depth
    titles = page.eval_on_selector_all(".answer .text span[title]", "spans => spans.map(span => span.title)")
    assert titles[-1].endswith(f": {least} of 6 layers")


def test_full_depth_has_no_tint(page):
    page.check("[name=mode][value=full]", force=True)
    assert page.is_hidden("#policies")
    ask(page)
    wait_for_end(page)
    classes = page.eval_on_selector_all(".answer .text span", "spans => spans.map(span => span.className)")
    assert set(classes) == {"t0"}
    assert "mean depth 6.0 of 6" in page.text_content(".figures")
    assert page.is_hidden(".chart"), "it would be empty"


def test_a_card_says_which_policy_is_the_default_and_over_how_many_tokens_its_figures_hold(page, server, monkeypatch):
    fast = shipped_policies()[DEFAULT_MODEL][-1]
    for name in ("d3", "static"):
        measured = replace(server.served.policies[name], provenance=fast.provenance)
        monkeypatch.setitem(server.served.policies, name, measured)
    monkeypatch.setitem(server.served.policies, "static-plain", server.served.policies["static"])
    open_page(page, server)
    cards = page.eval_on_selector_all(".policy", "all => all.map(one => one.textContent)")
    assert [card for card in cards if "default" in card] == [card for card in cards if card.startswith("d3default")]
    depth, speed = fast.provenance["mean_depth"], fast.provenance["speedup"]["measured"][0]
    assert f"{depth:.1f} of 6 layers and {speed:.2f}x as fast" in page.text_content("summary")
    assert f"over {fast.provenance['answer_tokens']} tokens" in page.text_content("summary")
    assert ["without trained adapters" in card for card in cards] == [card.startswith("static-plain") for card in cards]
    colours = [
        page.eval_on_selector(f".policy .{kind} i", "bar => getComputedStyle(bar).backgroundColor")
        for kind in ("better", "worse")
    ]
    assert colours[0] != colours[1]


def test_full_depth_is_called_the_default_where_no_policy_is(page, server, monkeypatch):
    page.check("[name=mode][value=full]", force=True)
    assert "default" not in page.text_content("#mode-note")
    monkeypatch.setattr(server.served, "default_policy", "full")
    open_page(page, server)
    assert page.is_checked("[name=mode][value=full]")
    assert "This is the default." in page.text_content("#mode-note")
    assert "default" not in page.text_content("#policies")


def test_an_answer_that_ends_before_its_policy_skips_says_from_where_it_does(page):
    choose_policy(page, "d3 late")
    for tokens, is_short in ((10, True), (11, False)):
        ask(page, tokens=tokens)
        wait_for_end(page)
        said = "this policy skips from token 11 on" in page.text_content(".figures >> nth=-1")
        assert (said, page.is_hidden(".chart >> nth=-1")) == (is_short, is_short)


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
    assert in_view(page, "[role=alert]")
    assert page.is_visible("#send")
    page.problems.clear()  # Chromium logs the 400


def test_a_prompt_that_is_refused_goes_back_into_the_box(page):
    ask(page, "one", tokens=3)
    wait_for_end(page)
    ask(page, "x" * 5000)
    page.wait_for_selector("[role=alert]")
    assert page.input_value("#prompt") == "x" * 5000
    assert page.eval_on_selector_all(".user", "all => all.map(one => one.textContent)") == ["one"]
    page.problems.clear()  # Chromium logs the 400
    ask(page, "two", tokens=3)
    wait_for_end(page)
    assert page.eval_on_selector_all(".user", "all => all.map(one => one.textContent)") == ["one", "two"]
    assert page.query_selector_all("[role=alert]") == []


@pytest.mark.parametrize("size", ["phone", "desktop"])
def test_the_end_of_an_answer_stays_in_view_over_three_turns(browser, server, monkeypatch, size):
    before_each_forward(server, monkeypatch, lambda: time.sleep(0.004))
    script(server, "a long text\n\n" * 14, monkeypatch)
    page = new_page(browser, server, size)
    page.evaluate(
        """() => {
          const log = document.querySelector("#conversation");
          window.most = 0;
          const watch = () => {
            const hidden = log.scrollHeight - log.scrollTop - log.clientHeight;
            if (document.querySelector(".running")) window.most = Math.max(window.most, hidden);
            requestAnimationFrame(watch);
          };
          watch();
        }"""
    )
    page.fill("#prompt", "a question\n" * 30)
    page.press("#prompt", "Enter")
    wait_for_end(page)
    for text in ("two", "three"):
        page.eval_on_selector("#conversation", "log => log.scrollTo(0, 0)")
        page.fill("#prompt", text)
        page.press("#prompt", "Enter")
        wait_for_end(page)
        assert page.evaluate("window.most") < 2
        assert hidden_below(page) < 2
    page.close()


def test_a_reader_who_scrolls_up_is_left_there(page, server, monkeypatch):
    before_each_forward(server, monkeypatch, lambda: time.sleep(0.01))
    script(server, "a long text\n\n" * 25, monkeypatch)
    ask(page, "a question\n" * 30, tokens=400)
    page.wait_for_selector(".running .text span", state="attached")
    page.eval_on_selector("#conversation", "log => log.scrollTo(0, 0)")
    wait_for_end(page)
    assert page.eval_on_selector("#conversation", "log => log.scrollTop") == 0


def test_enter_while_an_answer_runs_says_what_to_do(page, server, monkeypatch):
    before_each_forward(server, monkeypatch, lambda: time.sleep(0.02))
    script(server, "a long text " * 60, monkeypatch)
    ask(page, tokens=900)
    page.wait_for_selector(".running")
    page.fill("#prompt", "and this?")
    page.press("#prompt", "Enter")
    assert "stop it" in page.text_content("#status")
    assert in_view(page, "#status")
    assert page.input_value("#prompt") == "and this?"
    page.keyboard.press("Escape")
    wait_for_end(page)


def test_tints_end_with_the_text(page, server, monkeypatch):
    script(server, "  some text  \n\n- an item   \n\n```\ncode  \n```\n\n", monkeypatch)
    ask(page, tokens=200)
    wait_for_end(page)
    for block in ("p", "li", "pre"):
        text = page.text_content(f".answer .text {block}")
        assert text == text.rstrip()
        assert text


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


def test_the_depth_of_each_token_can_be_read_by_keyboard(page):
    ask(page, tokens=20)
    wait_for_end(page)
    page.focus("[type=range]")
    for key, step in (("End", 19), ("Home", 0), ("ArrowRight", 1)):
        page.keyboard.press(key)
        said = page.get_attribute("[type=range]", "aria-valuetext")
        assert said.startswith(f"step {step}: ")
        assert page.text_content(".axis span") == said
        titles = page.eval_on_selector_all(".marked", "spans => spans.map(span => span.title)")
        assert set(titles) <= {re.match(r"step \d+: \d of 6 layers", said)[0]}
    page.keyboard.press("Tab")
    assert page.query_selector_all(".marked") == []
    assert page.text_content(".axis span") == "6 of 6 layers"


def test_the_end_of_an_answer_is_announced(page):
    ask(page, tokens=4)
    wait_for_end(page)
    status = page.locator("[role=status]")
    assert "The answer is complete: 4 tokens" in status.text_content()


def test_settings_of_a_phone_are_a_dialog(browser, server):
    page = new_page(browser, server, "phone")
    page.focus("#open-settings")
    page.keyboard.press("Enter")
    focus = "document.activeElement.closest('dialog, body').id"
    assert page.evaluate(focus) == "sheet"
    seen = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id"))
        assert page.evaluate("document.querySelector('#sheet').matches(':modal')")
        assert page.evaluate(focus) in ("sheet", ""), "at its end, focus may leave the page, for the browser's own"
    assert {"close-settings", "system", "seed"} <= seen
    assert not {"prompt", "send", "new"} & seen
    page.keyboard.press("Escape")
    assert page.is_hidden("#settings")
    assert page.evaluate("document.activeElement.id") == "open-settings"
    page.close()


@pytest.mark.parametrize(("size", "scheme"), [("desktop", "light"), ("phone", "dark")])
def test_axe_finds_nothing(browser, server, monkeypatch, size, scheme):
    script(server, MARKDOWN, monkeypatch)
    page = new_page(browser, server, size, scheme)

    def check(state: str) -> None:
        found = Axe().run(page)
        assert found.violations_count == 0, f"{state}: {found.generate_report()}"

    check("welcome")
    page.fill("#prompt", "tell me")
    page.press("#prompt", "Enter")
    wait_for_end(page)
    if size == "phone":
        page.click("#open-settings")
    page.check("[name=mode][value=compare]", force=True)
    page.click("summary")
    page.fill("#temperature", "9")
    check("settings")
    page.fill("#temperature", "")
    page.keyboard.press("Escape")
    page.fill("#prompt", "tell me")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".verdict")
    check("conversation")
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tints_of_neighbouring_depths_differ_in_lightness_and_placeholders_can_be_read(browser, server, scheme):
    page = new_page(browser, server, "desktop", scheme)
    colours = page.evaluate(
        """() => [0, 1, 2, 3, 4].map((level) => {
          document.querySelector("#legend").className = `t${level}`;
          return getComputedStyle(document.querySelector("#legend")).backgroundColor;
        })"""
    )
    for one, next_one in pairwise(colours):
        assert contrast(one, next_one) > 1.1
    placeholder = page.eval_on_selector("#prompt", "box => getComputedStyle(box, '::placeholder').color")
    box = page.eval_on_selector("#prompt", "box => getComputedStyle(box).backgroundColor")
    assert contrast(placeholder, box) >= 4.5
    page.close()


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, as WCAG defines it."""

    def luminance(colour: str) -> float:
        channels = [int(value) / 255 for value in re.findall(r"\d+", colour)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("size", SIZES)
def test_system_message_and_sampling_are_within_the_first_screen(browser, server, size):
    page = new_page(browser, server, size)
    if size == "phone":
        page.click("#open-settings")
    for field in ("#system", "#temperature", "#max-tokens", "#seed"):
        assert in_view(page, field)
    page.close()


def test_it_fits_on_a_phone(browser, server):
    page = new_page(browser, server, "phone")
    assert not page.is_visible("#settings")
    page.click("#open-settings")
    assert page.is_visible("#settings")
    page.check("[name=mode][value=compare]", force=True)
    for close in (
        lambda: page.click("#close-settings"),
        lambda: page.mouse.click(180, 30),
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
        page.wait_for_selector(".policy", state="attached")
        ask(page, "x", tokens=3)
        wait_for_end(page)
        assert "tokens/s" in page.text_content(".figures")
    ask(page, "x")
    page.wait_for_selector("[role=alert]")
    assert "cannot be reached" in page.text_content("[role=alert]")
    page.close()
