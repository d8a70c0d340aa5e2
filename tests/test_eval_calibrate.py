"""Calibration to a task: which layers go, when it stops, and what it says; and tasks of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import render
from click.testing import CliRunner

from taper import LLM, DepthPolicy
from taper.calibration import search
from taper.calibration.problems import is_right
from taper.cli import cli
from taper.errors import RequestError
from taper.evals import calibrate, evaluate, load_tasks, summarise
from taper.evals.calibrate import calibrate_to_task
from taper.evals.records import Record
from taper.evals.statistics import compare_in_looks, looks

COUNT = 32 + 64


@pytest.fixture
def file(tmp_path) -> Path:
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(COUNT)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "sums.jsonl"


@pytest.fixture
def llm(tiny_llama, tmp_path, monkeypatch) -> LLM:
    monkeypatch.setenv("TAPER_CACHE", str(tmp_path / "cache"))
    return LLM(tiny_llama.folder, device="cpu", dtype="f32", context=128, threads=1, max_batch_size=16)


def solve_without(monkeypatch, harmful: set[int]) -> None:
    """Every problem is solved, except every second one when a harmful layer is skipped."""

    def solved(record: Record, filter_name: str) -> bool:
        skipped = {int(word) for word in record.policy.split()[1:]} if record.mode == "taper" else set()
        return not (skipped & harmful and record.problem % 2)

    monkeypatch.setattr(calibrate, "solved", solved)


def choose(monkeypatch, *layers: int) -> None:
    """These layers are skipped, in this order."""
    monkeypatch.setattr(calibrate._TaskCalibrator, "_layers_to_skip", lambda self, full: (each for each in layers))


def run(llm: LLM, file: Path, margin: float = 0.2, **options):
    return calibrate_to_task(llm, load_tasks([str(file)]), margin, problems=64, max_tokens=6, **options)


def test_the_most_layers_that_hold_are_skipped(llm, file, monkeypatch):
    solve_without(monkeypatch, {2})
    choose(monkeypatch, 4, 1, 2, 3)
    result = run(llm, file, name="careful")
    assert [list(trial.policy.skip_order) for trial in result.trials] == [[4], [4, 1], [4, 1, 2]]
    assert [trial.comparison.verdict for trial in result.trials] == ["holds", "holds", "fails"]
    policy = result.policy
    assert (policy.name, policy.skip_order, policy.min_depth) == ("careful", (4, 1), 4)
    assert DepthPolicy.from_json(policy.to_json()).provenance == policy.provenance
    provenance = policy.provenance
    assert (provenance["task"], provenance["margin"], provenance["order"]) == ("sums", 0.2, [4, 1, 2])
    assert provenance["comparison"]["verdict"] == "holds"
    assert provenance["speedup"]["measured"][0] > 0


def test_problems_searched_on_are_not_those_validated_on(llm, file, monkeypatch):
    solve_without(monkeypatch, set())
    asked: dict[str, set[int]] = {"order": set(), "trial": set()}
    stage = "order"
    original = calibrate._TaskCalibrator._answers

    def answers(self, name, policy, indices):
        asked["trial" if "skipped" in name else "order"] |= set(indices)
        return original(self, name, policy, indices)

    monkeypatch.setattr(calibrate._TaskCalibrator, "_answers", answers)
    result = run(llm, file)
    assert stage in asked
    assert asked["order"]
    assert asked["trial"]
    assert not asked["order"] & asked["trial"]
    assert len(result.order) == len(set(result.order)) == 2
    assert all(trial.holds for trial in result.trials)


def test_the_order_follows_the_problems_solved(llm, file, monkeypatch):
    solve_without(monkeypatch, {0, 2, 4, 5})
    monkeypatch.setattr(calibrate, "CANDIDATES", 6)
    monkeypatch.setattr(search, "CORE", 1e9)
    assert set(run(llm, file).order) == {1, 3}


def test_a_layer_that_costs_no_problem_ends_the_search_for_one(llm, file, monkeypatch):
    """Of the candidates, in the order of their KL, the first without which no fewer are solved; else the best."""
    tried: list[list[int]] = []

    def num_solved(self, skipped, problems):
        tried.append(list(skipped))
        return {3: 32, 5: 20}.get(skipped[-1], 10)

    monkeypatch.setattr(search, "CORE", 1e9)
    monkeypatch.setattr(calibrate._TaskCalibrator, "_num_solved", num_solved)
    solve_without(monkeypatch, set())
    kl = {3: 2.0, 5: 3.0, 0: 1.0, 1: 4.0, 2: 5.0, 4: 6.0}
    sums = lambda self, skipped, layers, *_, **__: np.array([kl[layer] for layer in layers])  # noqa: E731
    monkeypatch.setattr(calibrate.Measurements, "kl_sums", sums)
    assert run(llm, file).order == [3, 5]
    assert tried == [[0], [3], [3, 0], [3, 5], [3, 1], [3, 2]]


def test_no_layer_is_looked_for_once_a_policy_does_not_hold(llm, file, monkeypatch):
    solve_without(monkeypatch, {4})

    def layers(self, full):
        yield 4
        pytest.fail("another layer was looked for")

    monkeypatch.setattr(calibrate._TaskCalibrator, "_layers_to_skip", layers)
    assert run(llm, file).order == [4]


def test_a_killed_calibration_goes_on(llm, file, monkeypatch):
    solve_without(monkeypatch, {2})
    choose(monkeypatch, 4, 2)
    expected = run(llm, file)
    seen = []
    monkeypatch.setattr(llm.engine, "step", lambda *_: pytest.fail("an output was computed again"))
    monkeypatch.setattr(calibrate._TaskCalibrator, "_finished", lambda self, trial, *_: seen.append(trial))
    again = run(llm, file)
    assert again.trials == expected.trials
    assert len(seen) == 1


def test_nothing_that_holds_gives_no_policy(llm, file, monkeypatch):
    solve_without(monkeypatch, {0, 1, 2, 3, 4, 5})
    result = run(llm, file)
    assert result.policy is None
    assert [trial.comparison.verdict for trial in result.trials] == ["fails"]


def test_a_model_that_solves_nothing_is_rejected(llm, file):
    with pytest.raises(RequestError, match="solves none of 32 problems of sums"):
        run(llm, file)


@pytest.mark.parametrize(("lost", "gained", "wrong"), [(0.10, 0.05, "holds"), (0.05, 0.05, "fails")])
def test_several_looks_keep_the_error_rates(lost, gained, wrong, monkeypatch):
    """A policy that loses exactly the margin holds, and one that loses nothing fails, in at most 5 % of 1,000 runs."""
    monkeypatch.setattr("taper.evals.statistics.RESAMPLES", 10)  # of an interval that no verdict comes from
    draw, problems = np.random.default_rng(0), 192
    verdicts = [verdict_of(draw.random(problems), lost, gained, margin=0.05) for _ in range(1000)]
    assert verdicts.count(wrong) <= 50 + 2 * np.sqrt(1000 * 0.05 * 0.95)


def verdict_of(cells: np.ndarray, lost: float, gained: float, margin: float) -> str:
    """How a trial ends if full depth solves 55 % of the problems, and a policy loses and gains some."""
    full, tapered = cells < 0.55, (cells < 0.55 - lost) | (cells > 1 - gained)
    ask = lambda count: (full[:count].tolist(), tapered[:count].tolist())  # noqa: E731
    return compare_in_looks(ask, len(cells), 32, margin).verdict


@pytest.mark.parametrize("problems", [32, 40, 64, 192, 500, 5000])
def test_looks_spend_no_more_than_the_error_and_keep_most_of_it_for_the_last(problems):
    counts, levels = zip(*looks(problems, 32), strict=True)
    assert counts[-1] == problems
    assert sorted(set(counts)) == list(counts)
    spent = [1 - level for level in levels]
    assert spent == sorted(spent)
    assert sum(spent) == pytest.approx(0.05, abs=1e-7)
    assert spent[-1] > 0.03


# The command


def command(file: Path, tiny_llama, *options: str):
    model = ["--model", str(tiny_llama.folder), "--device", "cpu", "--context", "128", "--threads", "1"]
    asked = ["--task", str(file), "--max-tokens", "6", "--problems", "64", *options]
    return CliRunner().invoke(cli, ["calibrate", *model, *asked])


def test_the_command_writes_a_policy_or_says_that_none_holds(llm, file, tiny_llama, monkeypatch, tmp_path):
    choose(monkeypatch, 4, 2)
    out = tmp_path / "policy.json"
    solve_without(monkeypatch, {4})
    result = command(file, tiny_llama, "--margin", "0.2", "--out", str(out))
    assert (result.exit_code, out.exists()) == (1, False)
    assert "no policy was shown to hold" in result.stderr
    solve_without(monkeypatch, {2})
    result = command(file, tiny_llama, "--margin", "0.2", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "layers 4 2" in result.stdout
    found = json.loads(command(file, tiny_llama, "--margin", "0.2", "--out", str(out), "--json").stdout)
    assert [(trial["skipped"], trial["comparison"]["verdict"]) for trial in found["trials"]] == [
        ([4], "holds"),
        ([4, 2], "fails"),
    ]
    assert found["policy"] == json.loads(out.read_text())
    assert (found["settings"]["task"], found["settings"]["problems"]) == ("sums", {"search": 32, "validation": 64})
    template = render.environment().get_template("tasks.md.j2")
    page = template.render(task_calibration={"tiny": found})
    (row,) = (line for line in page.splitlines() if line.startswith("| 4 2 | "))
    assert row.endswith(" | fails |")
    found["trials"][1]["comparison"] |= {"verdict": "not enough problems", "needed": 1234}
    page = template.render(task_calibration={"tiny": found})
    assert "| not enough problems: about 1,200 more needed |" in page
    assert "The policy that is kept skips 1 of 6 layers." in page
    assert DepthPolicy.from_json(out.read_text()).skip_order == (4,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "--task needs --margin"),
        ("--margin 0", "margin"),
        ("--margin 1", "margin"),
        ("--margin 0.1 --max-kl 0.1", "--max-kl does nothing with --task"),
        ("--margin 0.1 --prompts x", "--prompts does nothing with --task"),
        ("--margin 0.1 --problems 3", "problems is 3"),
        ("--margin 0.1 --split train", "--split does nothing for a file of your own"),
        ("--margin 0.1 --filter none-such", "no filter 'none-such'"),
    ],
)
def test_mistakes_are_one_line(file, tiny_llama, options, message):
    result = command(file, tiny_llama, *options.split())
    assert result.exit_code != 0
    assert isinstance(result.exception, RequestError | SystemExit)
    assert message in (str(result.exception) + result.output)


def test_options_of_a_task_do_nothing_without_one():
    result = CliRunner().invoke(cli, ["calibrate", "--max-kl", "0.1", "--margin", "0.1"])
    assert "--margin does nothing without --task" in str(result.exception) + result.output


# Tasks of the user's own


@pytest.mark.parametrize(
    ("output", "answer", "right"),
    [
        ("2 + 3 = 5.", "5", True),
        ("It is 5, not 6", "5", False),
        ("That makes $1,234.00.", "1234", True),
        ("five", "5", False),
        ("", "5", False),
        ("-3", "3", False),
        ("Let me think.\n\nThe capital is Paris.", "paris", True),
        ("Paris it is not.\nRome", "Paris", False),
        ("Parisian", "Paris", False),
    ],
)
def test_answers_are_found_in_outputs(output, answer, right):
    assert is_right(output, answer) is right


def test_a_file_is_a_task(llm, file):
    selection = load_tasks([str(file)])
    result = summarise(evaluate(llm, selection, ["full"], limit=3, max_tokens=4))
    (task,) = result.results
    assert (task.name, task.problems, task.figure) == ("sums", 3, "exact_match under none")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no problems"),
        ("x\n", "line 1 of .* is not JSON"),
        ('{"prompt": "a"}\n', 'problem 1 needs the texts "prompt" and "answer"'),
        ('{"prompt": "a", "answer": 5}\n', "problem 1 needs"),
    ],
)
def test_damaged_files_are_rejected(tmp_path, text, message):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(RequestError, match=message):
        load_tasks([str(tmp_path / "bad.jsonl")])
    with pytest.raises(RequestError, match=r"none\.jsonl"):
        load_tasks([str(tmp_path / "none.jsonl")])
