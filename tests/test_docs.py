"""What README and docs claim is what the committed results and the code say: numbers, commands, examples, names."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import shlex
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import metadata
from inspect import signature
from pathlib import Path

import click
import pytest
import render
from click.testing import CliRunner
from eval_data import write_data
from lm_eval._cli import HarnessCLI
from summaries import summary
from test_architecture import ALLOWED
from tiny import DEFAULT_MODEL_FILE, TinyModel

import taper
import taper.lab.evals
from taper import LLM, DepthPolicy, SamplingParams
from taper.cli import cli
from taper.errors import RequestError
from taper.lab.calibration.run import Calibration
from taper.models.policies import find_policy

ROOT = Path(__file__).parent.parent
README, TOUR = ROOT / "README.md", ROOT / "docs" / "tour.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "research").rglob("*.md"))]
PAGES.append(ROOT / "CONTRIBUTING.md")
PROSE = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]  # the changelog names commands that are gone
LINKS = re.compile(r"\]\(([^)]+)\)")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_numbers_are_those_of_the_committed_results():
    for path, text in render.rendered().items():
        assert path.read_text() == text, "run: python research/render.py"


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


def test_the_repository_is_where_pyproject_says_it_is():
    files = [*PROSE, ROOT / "pyproject.toml", ROOT / "mkdocs.yml", *(ROOT / ".github").rglob("*.yml")]
    text = "\n".join(file.read_text() for file in files)
    (repository,) = re.findall(r'^Repository = "https://github.com/(.+)"', text, re.M)
    assert set(re.findall(r"github\.com/([\w-]+/taper)\b", text)) == {repository}
    assert set(re.findall(r"([\w-]+)\.github\.io/taper\b", text)) == {repository.split("/")[0]}


def test_pictures_are_small_and_load_nothing_from_elsewhere():
    pictures = list((ROOT / "docs" / "pictures").glob("*.svg"))
    assert pictures
    for picture in pictures:
        text = picture.read_text()
        assert len(text) < 100_000
        assert set(re.findall(r"\w+://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}
        assert not re.search(r"@import|@font-face|url\((?!#)|href|<script|<image", text)
    assert all(picture.stat().st_size < 300_000 for picture in (ROOT / "docs" / "pictures").glob("*.png"))


def test_the_packages_description_has_no_relative_link(monkeypatch):
    given: dict[str, str] = {}
    monkeypatch.setattr("setuptools.setup", lambda **options: given.update(options))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    text = given["long_description"]
    urls = dict(entry.split(", ") for entry in metadata("taper-llm").get_all("Project-URL"))
    repository = urls["Repository"]
    for old, new in zip(LINKS.findall(README.read_text()), LINKS.findall(text), strict=True):
        if old.startswith(("https:", "#")):
            assert new == old
        else:
            pictures = repository.replace("github.com", "raw.githubusercontent.com") + f"/main/{old}"
            assert new == (pictures if Path(old).suffix == ".svg" else f"{repository}/blob/main/{old}")


# Commands


def code_lines(page: Path) -> list[str]:
    """The lines of a page's code blocks, indented or fenced, Python and JSON left out."""
    lines, fence = [], None
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            fence = line.strip().removeprefix("```") if fence is None else None
        elif fence in ("", "sh", "console") or (fence is None and line.startswith("    ")):
            lines.append(line.strip().removeprefix("$ "))
    return lines


def commands(line: str) -> Iterator[list[str]]:
    """The words of each command in a line of shell: those of $(...), and the parts of pipes and lists."""
    while found := re.search(r"\$\(([^()]*)\)", line):
        yield from commands(found[1])
        line = line.replace(found[0], "SUBSTITUTED")
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();<>|&"):
            while words and re.fullmatch(r"\w+=.*", words[0]):  # variables of the environment
                words = words[1:]
            if words:
                yield words
            words = []
        else:
            words.append(word)


def check_command(words: list[str]) -> bool:
    """Whether it is a command that this repository answers for; fails if it would not run.

    Raises:
        AssertionError, click.UsageError, RequestError: there is no such command, script, target, extra or option.
    """
    program, *arguments = words
    if program == "taper":
        check_taper(arguments)
    elif program in ("python", "python3") and arguments[:1] and arguments[0].startswith("research/"):
        check_script(*arguments)
    elif program in ("python", "python3") and arguments[:2] == ["-m", "taper.lab.evals"]:
        try:
            HarnessCLI()._parser.parse_args(arguments[2:])
        except SystemExit:
            raise AssertionError(words) from None
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(arguments) <= set(targets), words
    elif program == "pip" and arguments[0] == "install":
        extras = metadata("taper-llm").get_all("Provides-Extra")
        for argument in arguments[1:]:
            if wanted := re.fullmatch(r"(?:\.|taper-llm)\[(.*)\]", argument):
                assert set(wanted[1].split(",")) <= set(extras), words
    else:
        return False
    return True


def check_taper(arguments: list[str]) -> None:
    """Parse as the command line does, with click's own parser, and run nothing."""
    command: click.Command = cli
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
        assert name in command.commands, f"no command {name}"
        command = command.commands[name]
    with suppress(click.exceptions.Exit):  # --help and --version
        command.make_context("taper", arguments)


def check_begun_command(words: list[str]) -> None:
    """As `check_command`, but required arguments and options may still be missing."""
    try:
        check_command(words)
    except click.MissingParameter as error:
        option = error.param.opts[:1] if isinstance(error.param, click.Option) else []
        check_begun_command([*words, *option, "VALUE"])


def check_script(script: str, *arguments: str) -> None:
    """A script of research/ that has these options, itself or in a module beside it that it imports from."""
    nodes = list(ast.walk(ast.parse((ROOT / script).read_text())))
    for name in [node.module for node in nodes if isinstance(node, ast.ImportFrom)]:
        if (beside := (ROOT / script).with_name(f"{name}.py")).exists():
            nodes += ast.walk(ast.parse(beside.read_text()))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    added = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    known = {call.args[0].value for call in added}
    assert {word for word in arguments if word.startswith("-")} <= known, script
    assert not arguments or known, f"{script} takes no arguments"


@each_page
def test_commands_of_code_blocks_would_run(page):
    checked = 0
    for line in code_lines(page):
        if re.search(r"(^|\s|\()(taper|python3?|make|pip) ", line):
            checked += sum([check_command(words) for words in commands(line)])
    assert checked or page.name in ("tour.md", "fleets.md", "reliability.md")


@each_page
def test_commands_within_sentences_exist_and_know_their_options(page):
    """As `taper generate --compare`: required arguments may be missing here."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for line in re.findall(r"`((?:taper|python|make|pip) [^`]+)`", text):
        for words in commands(line):
            check_begun_command(words)


@pytest.mark.parametrize(
    "line",
    [
        "taper generat x",
        "taper generate --polcy fast x",
        "taper generate --max-tokens many x",
        "taper generate one two",
        "taper policy sho fast",
        "taper calibrate --seed=-1 --max-kl 1",
        'eval "vllm serve MODEL $(taper vllm-args --polcy fast)"',
        "cat prompts | taper chatt",
        "TAPER_CACHE=/tmp taper pul  # a comment",
        "python research/none.py",
        "taper bench --shap 34b",
        "python -m taper.lab.evals run --modell taper",
        "python research/decode.py --outt x.json",
        "python research/render.py x",
        "make tests",
        'pip install ".[tourch]"',
    ],
)
def test_wrong_commands_are_found(line):
    with pytest.raises((AssertionError, OSError, click.UsageError, RequestError)):
        assert [check_command(words) for words in commands(line)]


# Examples


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


@pytest.fixture
def short_outputs(tmp_path, monkeypatch):
    """The default model in the test's own cache, with outputs cut short, and an empty folder to work in."""
    if not DEFAULT_MODEL_FILE.is_file():
        pytest.skip("fetch the default model with: taper pull")
    folder = tmp_path / "taper-cache" / "models"
    folder.mkdir(parents=True)
    (folder / DEFAULT_MODEL_FILE.name).symlink_to(DEFAULT_MODEL_FILE)
    monkeypatch.chdir(tmp_path)
    stream = LLM.stream

    def short(self, prompts, params=None, **options):
        given = {name: options.pop(name) for name in SamplingParams.__dataclass_fields__ if name in options}
        params = params or self.sampling_params(**given)
        return stream(self, prompts, replace(params, max_tokens=min(params.max_tokens, 12)), **options)

    monkeypatch.setattr(LLM, "stream", short)
    write_data(tmp_path / "data", problems=2)
    evaluate = taper.lab.evals.run.evaluate
    monkeypatch.setattr(taper.lab.evals, "evaluate", lambda *args, **options: evaluate(*args, **options, max_tokens=4))


@pytest.fixture
def quick_calibration(monkeypatch):
    """`taper.calibrate` takes minutes: a result made by hand, for arguments that the real one takes."""
    arguments = signature(taper.calibrate)

    def stand_in(*args, **options):
        arguments.bind(*args, **options)
        return Calibration(DepthPolicy.static(6, 4, [3, 2]), summary())

    monkeypatch.setattr(taper, "calibrate", stand_in)


@pytest.fixture
def tiny_transformers(tiny_llama: TinyModel, monkeypatch) -> dict[str, object]:
    """What `from_pretrained` returns, whatever the name: a tiny random model and its tokenizer; and names for them."""
    transformers = importlib.import_module("transformers")  # what an example would import now
    importlib.import_module("taper.hf")  # as the guide's examples do
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tiny_llama.folder / "tokenizer.json"))
    for name, value in (("AutoModelForCausalLM", tiny_llama.hf), ("AutoTokenizer", tokenizer)):
        monkeypatch.setattr(transformers, name, types.SimpleNamespace(from_pretrained=lambda _, value=value: value))
    inputs = tokenizer("why", return_tensors="pt", return_token_type_ids=False)
    policy = DepthPolicy.middle_first(tiny_llama.hf.config.num_hidden_layers, alpha=0.9)
    return {"taper": taper, "model": tiny_llama.hf, "inputs": inputs, "policy": policy, "prompts": ["why?"] * 8}


@pytest.mark.ci
@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
@pytest.mark.usefixtures("short_outputs", "quick_calibration")
def test_python_examples_run(page, tiny_transformers, capsys):
    """README's examples run as they stand, one after another; those of other pages may use the names of README's."""
    names = {} if page == README else dict(tiny_transformers)
    for code in python_blocks(page):
        exec(compile(code, page.name, "exec"), names)
    if page == README:
        assert len(names["outputs"]) == 2
        assert capsys.readouterr().out
    if page.name == "python.md":
        assert names["ids"].shape[1] == names["inputs"]["input_ids"].shape[1] + 64
    if page.name == "calibration.md":
        assert DepthPolicy.from_json(Path("policy.json").read_text()) == names["result"].policy


def test_readme_says_to_which_depth_its_picture_falls():
    depth = find_policy("fast").depth(127)
    text = " ".join(README.read_text().split())
    assert f"falls from 30 to {depth} layers" in text
    assert f"all of its 30 layers, the last ones {depth}." in text


def test_the_guide_shows_what_policy_show_prints():
    page = (ROOT / "docs" / "guide" / "policies.md").read_text()
    printed = CliRunner().invoke(cli, ["policy", "show", "fast", "--tokens", "64"]).stdout
    assert "taper policy show fast --tokens 64\n" in page
    assert "\n".join(["```text", *map(str.rstrip, printed.splitlines()), "```"]) in page


def test_policies_shown_in_the_docs_are_policies():
    shown = [block for page in PAGES for block in re.findall(r"```json\n(.*?)```", page.read_text(), re.S)]
    policies = [DepthPolicy.from_json(block) for block in shown if "format_version" in block]
    assert policies


# The tour


def test_the_diagram_of_the_tour_shows_which_way_imports_go():
    diagram = re.search(r"```\n(┌.*?┘)\n```", TOUR.read_text(), re.S)[1]
    rows = [line.split("│")[1].split() for line in diagram.splitlines() if line.startswith("│")]
    row_of = {part: number for number, row in enumerate(rows) for part in row}
    outside = {"__init__", "__main__"}
    assert set(row_of) == set(ALLOWED) - outside
    for part, others in ALLOWED.items():
        for other in others - outside - {part}:
            assert part in outside or row_of[other] > row_of[part], f"{part} imports {other}, which is not below it"


def test_names_in_the_tour_are_names_in_the_code():
    files = [*(ROOT / "src" / "taper").rglob("*.py"), *(ROOT / "tests").glob("*.py")]
    defined, members = set(ALLOWED), set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            if isinstance(node, ast.ClassDef):
                inside = {getattr(part, "name", None) for part in node.body}
                inside |= {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
                members |= {f"{node.name}.{name}" for name in inside if name}
            if isinstance(node, ast.arg):
                defined.add(node.arg)
    defined |= {member.split(".")[1] for member in members}
    text = re.sub(r"```.*?```", "", TOUR.read_text(), flags=re.S)
    for name in re.findall(r"`([^`]+)`", text):
        if "/" in name or name.endswith(".py"):
            places = (ROOT, ROOT / "src" / "taper", ROOT / "src")
            assert any((place / name).exists() for place in places), name
        elif re.fullmatch(r"\w+\.\w+", name) and name[0].isupper():
            assert name in members, name
        elif re.fullmatch(r"\w+", name) and name not in ("stop", "length", "next"):
            assert name in defined, name
