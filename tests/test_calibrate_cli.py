"""`taper calibrate`: what it prints and writes, what it rejects, and that a kill loses nothing."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from forked import posix_only, run_taper
from rich.progress import Task, TaskID
from test_calibration import comparable

from taper import DepthPolicy
from taper.cli import cli
from taper.cli.calibrate import calibrate
from taper.cli.common import Percent, Share
from taper.cli.terminal import TimeLeft
from taper.policy import Schedule

PROMPTS = "".join(f"tell me about number {i}\n" for i in range(10))


@pytest.fixture
def arguments(tiny_gguf, tmp_path):
    """A short calibration of a tiny model, whose budget is kept."""
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    options = ["--model", tiny_gguf, "--prompts", tmp_path / "prompts.txt", "--out", tmp_path / "out" / "policy.json"]
    options += ["--max-kl", "90", "--answer-tokens", "32", "--threads", "1", "--dtype", "f32"]
    return ["calibrate", *map(str, options)]


def test_options_are_listed_in_groups():
    said = CliRunner().invoke(cli, ["calibrate", "--help"]).output
    headings = ["Budget, one at least, or a speed:", "Prompts:", "Results:", "Adapters:", "Model:", "Other:"]
    places = [said.index(f"\n{heading}") for heading in headings]
    assert places == sorted(places)
    options = [param.opts[-1] for param in calibrate.params if not param.hidden]
    assert [name for name in options if not re.search(rf"{name}\b", said)] == []


def test_the_time_left_grows_while_nothing_gets_done():
    now, column = [0.0], TimeLeft()
    task = Task(TaskID(0), "search", 1.0, 0.0, _get_time=lambda: now[0])
    assert str(column.render(task)) == "-:--:--"
    now[0], task.completed = 0.1, 0.5  # measured before, and kept
    assert str(column.render(task)) == "0:00:01"
    now[0] = 50.0
    assert str(column.render(task)) == "0:00:50"
    now[0] = 100.0
    column.render(task)
    now[0] = 170.0  # the burst is forgotten
    assert str(column.render(task)) == "-:--:--"
    now[0], task.completed = 180.0, 0.75
    assert str(column.render(task)) == "0:01:20"
    task.completed = 1.0
    assert str(column.render(task)) == "0:00:00"


def test_writes_a_policy_and_says_what_it_costs(arguments, tmp_path):
    result = CliRunner().invoke(cli, [*arguments, "--name", "mine"])
    assert result.exit_code == 0, result.output
    policy = DepthPolicy.from_json((tmp_path / "out" / "policy.json").read_text())
    assert policy.name == "mine"
    assert policy.provenance["budget"] == {"max_kl": 90.0}
    said = ["policy mine", "budget mean KL at most 90 nats: kept\n", "measured", "5 held-out prompts"]
    for words in [*said, "KL to full depth", "repeated 4-grams", "full depth solves too few"]:
        assert words in result.stdout
    assert "taper generate --policy" in result.stderr
    shown = CliRunner().invoke(cli, ["policy", "show", str(tmp_path / "out" / "policy.json")])
    assert shown.exit_code == 0


@pytest.mark.parametrize(
    ("name", "text", "more", "said"),
    [
        ("prompts.txt", PROMPTS, [], "10 prompts from FILE: 5 for the search, 5 held out; the first: tell me about"),
        (
            "prompts.tsv",
            "id\tprompt\n" + "".join(f"{i}\ttell me\n" if i < 2 else f"{i}\ttell me {i}\n" for i in range(40)),
            ["--quick"],
            "40 prompts from FILE, 24 of them used: 12 for the search, 12 held out; the first: tell me\n",
        ),
    ],
)
def test_it_begins_with_what_it_read(arguments, tmp_path, monkeypatch, name, text, more, said):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("taper.cli.calibrate.load", stop)
    (tmp_path / name).write_text(text)
    arguments[arguments.index("--prompts") + 1] = str(tmp_path / name)
    result = CliRunner().invoke(cli, [*arguments, *more])
    assert result.stderr.startswith(said.replace("FILE", str(tmp_path / name))), result.stderr


@pytest.mark.ci
def test_a_policy_that_hardly_tapers_gets_no_verdict_and_the_line_says_why(arguments, monkeypatch, tmp_path):
    late = DepthPolicy(Schedule(6, "constant", 4, start=30), (2, 3))
    monkeypatch.setattr("taper.lab.calibration.search.fit_quality", lambda *_: late)
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1, result.output
    line = next(line for line in result.stdout.splitlines() if line.startswith("budget"))
    assert re.search("no verdict, as (only .* skips? a layer; at least 30|no held-out step)", line), line
    assert "taper: no verdict;" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.ci
def test_a_budget_that_no_policy_keeps_writes_none_and_names_the_nearest(arguments, tmp_path):
    arguments[arguments.index("--max-kl") + 1] = "1e-9"
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1
    assert "nearest policy" in result.stdout
    assert "not kept" in result.stdout
    assert "no policy" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.ci
def test_json_is_one_object_with_everything_and_the_report_is_written(arguments, tmp_path):
    result = CliRunner().invoke(cli, [*arguments, "--json", "--report", str(tmp_path / "report")])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["budget_met"], data["verdict"]) == (True, "kept")
    assert {"held_out", "free_running", "speedup", "importance", "frontier", "conditions"} <= set(data)
    assert {"index.html", "frontier.png", "importance.png"} <= {path.name for path in (tmp_path / "report").iterdir()}


# Runs `taper`, with a clock that is never disturbed, and kills it without warning while its n-th measurement is taken.
KILLED = """
import os, signal, sys
from taper.lab.calibration import clock
from taper.lab.calibration.store import Store
clock._alternate = lambda engine, prompt, policies, n: [[policy.mean_depth(n)] * (n - 1) for policy in policies]
remember, left = Store.remember, [int(sys.argv.pop(1))]
def killed(self, key, compute):
    def measure():
        left[0] -= 1
        value = compute()
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return value
    return remember(self, key, measure)
Store.remember = killed
from taper.cli import main
main()
"""


def numbers(value) -> list[float]:
    """Every number in nested lists and dicts, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for entry in value for number in numbers(entry)]
    return [value] if isinstance(value, int | float) else []


@posix_only
@pytest.mark.ci
def test_killed_three_times_it_finds_the_same_policy(arguments, tmp_path, monkeypatch):
    def run(after: int) -> int:
        command = [sys.executable, "-c", KILLED, str(after), *arguments]
        return subprocess.run(command, capture_output=True, timeout=120).returncode

    def measured() -> int:
        file = sqlite3.connect(tmp_path / "cache" / "calibration.sqlite")
        return file.execute("SELECT COUNT(*) FROM measured_3").fetchone()[0]

    out = tmp_path / "out" / "policy.json"
    monkeypatch.setenv("TAPER_CACHE", str(tmp_path / "cache"))
    assert run(10**9) == 0
    undisturbed, total = comparable(out.read_text()), measured()
    shutil.rmtree(tmp_path / "cache")
    out.unlink()

    seed, done = random.randrange(1 << 32), 0
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(3):
        more = rng.randrange(1, (total - done) // 2)
        assert run(more) == -signal.SIGKILL
        assert not out.exists()
        done += more
        assert measured() == done  # what was finished is kept, and nothing else
    assert run(total - done) == 0
    resumed = comparable(out.read_text())
    figures = [numbers(found.pop("provenance")) for found in (resumed, undisturbed)]
    assert resumed == undisturbed
    assert figures[0] == pytest.approx(figures[1], rel=1e-4)  # other batches round differently


WRONG = {
    "prompts file empty": (b"\n \n", [], "no prompt"),
    "prompts file not UTF-8": (b"caf\xe9\n" * 9, [], "not UTF-8"),
    "a line of a million characters": (b"x" * 1_000_000 + b"\n" + PROMPTS.encode(), [], "1000000 characters"),
    "too few prompts": (b"one\ntwo\ntwo\n", [], "give at least 10"),
    "too few steps for a verdict": (None, ["--answer-tokens", "4"], "15 steps; a verdict takes 30 steps in 5 outputs"),
    "a table without prompts": (None, ["--prompts", "TABLE"], "its columns are 'question', 'answer'"),
    "a prompt too long for the context": (PROMPTS.encode() + b"y " * 900, ["--context", "256"], "prompt 11"),
    "broken JSON": (b'{"prompt": "a"}\n{"prompt": \n', [], "line 2"),
    "JSON without a prompt": (b'{"text": "a"}\n', [], "prompt"),
    "JSON with both": (b'{"prompt": "a", "messages": []}\n', [], "either"),
    "a prompt that is not text": (b'{"prompt": 7}\n', [], "text"),
    "an invalid message": (b'{"messages": [{"role": "user"}]}\n' * 9, [], "not a message"),
    "no budget": (None, ["--max-kl"], "a budget is missing"),
    "speed and quality": (None, ["--speedup", "1.1"], "cannot both"),
    "agreement above one": (None, ["--min-agreement", "95"], "write 0.95 or 95%"),
    "not a number": (None, ["--max-kl", "nan"], "in (0, 1000]"),
    "a speed out of reach": (None, ["--max-kl", "--speedup", "50"], "as fast"),
    "outputs that do not fit": (None, ["--answer-tokens", "90000"], "context"),
    "a name with a line break": (None, ["--name", "a\nb"], "name"),
    "prompts without end": (None, ["--prompts", "/dev/zero"], "larger than"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=posix_only if "/dev/zero" in WRONG[case][1] else ()) for case in WRONG]
)
def test_mistakes_are_one_line_and_leave_nothing(case, arguments, tmp_path):
    content, more, says = WRONG[case]
    if content is not None:
        (tmp_path / "prompts.txt").write_bytes(content)
    (tmp_path / "table.csv").write_text("question,answer\nWhy?,Because\n")
    more = [str(tmp_path / "table.csv") if option == "TABLE" else option for option in more]
    if "--max-kl" in more[:1] and "nan" not in more:  # the option is taken away
        place = arguments.index("--max-kl")
        del arguments[place : place + 2]
        more = more[1:]
    assert_rejected([*arguments, *more], says)
    assert not (tmp_path / "out").exists()


@posix_only
@pytest.mark.parametrize("option", ["--out", "--report"])
def test_outputs_that_cannot_be_written_are_rejected_before_the_work(option, arguments, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert_rejected([*arguments, option, str(tmp_path / "file" / "below" / "x")], "file")
    assert_rejected([*arguments, option, "/proc/taper/x"], "/proc")
    os.mkfifo(tmp_path / "fifo")  # as a device: a file in its place would be its end
    assert_rejected([*arguments, option, str(tmp_path / "fifo")], "folder")
    assert (tmp_path / "fifo").is_fifo()
    assert_rejected([*arguments, option, str(tmp_path / "file") if option == "--report" else str(tmp_path)], "folder")
    assert (tmp_path / "file").read_text() == "in the way"
    assert not Path(os.environ["TAPER_CACHE"]).exists()


def assert_rejected(arguments, says: str) -> None:
    code, out, err = run_taper(*arguments)
    lines = [line for line in err.decode().splitlines() if line.startswith("taper:")]
    assert (code, out, len(lines)) == (2, b"", 1), err.decode()
    assert says in lines[0]
    assert b"Traceback" not in err


@pytest.mark.parametrize(("written", "share"), [("0.95", 0.95), ("95%", 0.95), ("3%", 0.03), ("1", 1.0)])
def test_a_share_may_be_written_in_per_cent(written, share):
    assert Share().convert(written, None, None) == pytest.approx(share)


@pytest.mark.parametrize(
    ("written", "said"), [("95", "write 0.95 or 95%"), ("3", "write 0.03 or 3%"), ("x", "no share")]
)
def test_a_number_above_one_is_no_share(written, said):
    with pytest.raises(click.BadParameter, match=said):
        Share().convert(written, None, None)


def test_a_margin_of_one_point_is_told_from_one_of_everything():
    with pytest.raises(click.BadParameter, match=r"1 is not below 1; for 1 % write 0\.01 or 1%"):
        Share(below_one=True).convert("1", None, None)
    assert Share(below_one=True).convert("1%", None, None) == 0.01


@pytest.mark.parametrize("written", ["5", "5%", " 5.0 % "])
def test_per_cent_may_have_its_sign(written):
    assert Percent().convert(written, None, None) == 5
