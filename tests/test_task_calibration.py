"""Calibration to a task: which layers go, when it stops, and what it says; and tasks of the user's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from made_up import MadeUpProblems

from taper import LLM, DepthPolicy
from taper.cli import cli
from taper.errors import RequestError
from taper.lab.calibration import search
from taper.lab.calibration.clock import CostModel
from taper.lab.calibration.measured_model import MeasuredModel
from taper.lab.calibration.problems import is_right
from taper.lab.calibration.store import Measurements
from taper.lab.calibration.task import calibrate_to_task
from taper.lab.evals import evaluate, load_tasks, summarise
from taper.lab.evals.run import TaskProblems

pytestmark = pytest.mark.ci

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


@pytest.fixture
def by_kl(monkeypatch):
    """Layers cost what the test says, alone and together; all may be skipped."""

    def set_kl(*layers: int) -> None:
        def kl_sums(self, skipped, candidates, completions, stage):
            return np.array([1.0 + layers.index(layer) for layer in candidates])

        monkeypatch.setattr(search, "CORE", 1e9)
        monkeypatch.setattr(Measurements, "kl_sums", kl_sums)

    return set_kl


def needs(*layers: int) -> MadeUpProblems:
    """Every problem is solved, except every second one if one of these layers is skipped."""
    return MadeUpProblems(lambda index, skipped: not (skipped & set(layers) and index % 2), COUNT)


def run(llm: LLM, problems: MadeUpProblems, **options):
    return calibrate_to_task(llm, problems, 0.2, problems=64, **options)


def test_the_most_layers_that_hold_are_skipped(llm, by_kl, monkeypatch):
    by_kl(4, 1, 2, 3, 0, 5)
    monkeypatch.setattr(MeasuredModel, "cost", lambda *given: CostModel(1.0, 1.0))  # each layer takes time
    problems = needs(2, 3, 0, 5)
    result = run(llm, problems, name="careful")
    asked = len(problems.asked)
    assert run(llm, problems).trials == result.trials
    assert len(problems.asked) == asked  # nothing is solved twice: a killed calibration goes on
    assert [list(trial.policy.skip_order) for trial in result.trials] == [[4], [4, 1]]
    assert [trial.comparison.verdict for trial in result.trials] == ["holds", "holds"]
    policy = result.policy
    assert (policy.name, policy.skip_order, policy.min_depth) == ("careful", (4, 1), 4)
    assert DepthPolicy.from_json(policy.to_json()).provenance == policy.provenance
    provenance = policy.provenance
    assert (provenance["task"], provenance["margin"], provenance["order"]) == ("made up", 0.2, [4, 1])
    assert provenance["comparison"]["verdict"] == "holds"
    assert provenance["speedup"]["measured"][0] > 0


def test_problems_searched_on_are_not_those_validated_on(llm, by_kl):
    by_kl(4, 1, 2, 3, 0, 5)
    problems = needs(4)
    run(llm, problems, seed=3)
    at_full_depth = [index for index, skipped in problems.asked if not skipped]
    searched, validated = at_full_depth[:32], at_full_depth[32:]
    assert not set(searched) & set(validated)
    assert {index for index, skipped in problems.asked if skipped == (4,)} <= set(searched)  # not chosen
    assert {index for index, skipped in problems.asked if skipped == (1,)} >= set(validated)


def test_the_first_layer_whose_removal_does_not_lower_the_score_is_skipped(llm, by_kl):
    """Layers are tried in the order of their KL, at most three of them; then the one that loses least is taken."""
    by_kl(0, 3, 5, 1, 2, 4)
    lost = {0: 4, 3: 0, 5: 3, 1: 6}

    def solves(index, skipped):
        return index % 8 >= max((lost.get(layer, 8) for layer in skipped), default=0)

    problems = MadeUpProblems(solves, COUNT)
    result = run(llm, problems)
    assert result.trials[-1].policy.skip_order == (3, 5)
    assert [trial.comparison.verdict for trial in result.trials] == ["holds", "fails"]
    tried = list(dict.fromkeys(skipped for _, skipped in problems.asked))
    assert tried == [(), (0,), (3,), (0, 3), (3, 5), (1, 3)]


def test_nothing_that_holds_gives_no_policy(llm):
    result = run(llm, needs(0, 1, 2, 3, 4, 5))
    assert result.policy is None
    assert [trial.comparison.verdict for trial in result.trials] == ["fails"]


def test_a_model_that_solves_nothing_is_rejected(llm, file):
    with pytest.raises(RequestError, match="solves none of 32 problems"):
        calibrate_to_task(llm, TaskProblems(llm, load_tasks([str(file)]), max_tokens=6), 0.2, problems=64)


def test_a_task_with_too_few_problems_is_rejected_before_anything_is_said_of_them(file, tiny_llama, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(file.read_text().splitlines(keepends=True)[:63]))
    result = command(few, tiny_llama, "--margin", "0.2")
    assert result.stderr == ""
    assert "has 63 problems; 64 are needed" in str(result.exception)


def test_a_task_of_the_harness_is_asked_as_taper_eval_asks_it(llm, file):
    selection = load_tasks([str(file)])
    policy = DepthPolicy.static(6, 4, [2, 3])
    attempts = TaskProblems(llm, selection, max_tokens=6).attempt([5, 2], policy)
    records = evaluate(llm, selection, [policy], indices=[2, 5], max_tokens=6).records
    assert [attempt.completion_ids for attempt in attempts] == [list(r.completions[0].token_ids) for r in records[::-1]]
    assert not any(attempt.solved for attempt in attempts)


# The command


def command(file: Path, tiny_llama, *options: str):
    model = ["--model", str(tiny_llama.folder), "--device", "cpu", "--context", "128", "--threads", "1"]
    asked = ["--task", str(file), "--max-tokens", "6", "--problems", "64", *options]
    return CliRunner().invoke(cli, ["calibrate", *model, *asked])


def test_the_command_writes_a_policy_or_says_that_none_holds(llm, file, tiny_llama, by_kl, monkeypatch, tmp_path):
    by_kl(4, 2, 1, 3, 0, 5)
    out = tmp_path / "policy.json"

    def with_needed(*layers: int, options: tuple[str, ...] = ()):
        problems = needs(*layers)
        monkeypatch.setattr(TaskProblems, "attempt", lambda self, indices, policy: problems.attempt(indices, policy))
        monkeypatch.setenv("TAPER_CACHE", str(tmp_path / f"cache {layers}"))
        return command(file, tiny_llama, "--margin", "0.2", "--out", str(out), *options)

    result = with_needed(0, 1, 2, 3, 4, 5)
    assert (result.exit_code, out.exists()) == (1, False)
    assert "no policy was shown to hold" in result.stderr
    result = with_needed(2, 1, 3, 0, 5)
    assert result.exit_code == 0, result.output
    assert re.search(r"^4 2 .* fails *$", result.stdout, re.M)
    found = json.loads(with_needed(2, 1, 3, 0, 5, options=("--json",)).stdout)
    assert [(trial["skipped"], trial["comparison"]["verdict"]) for trial in found["trials"]] == [
        ([4], "holds"),
        ([4, 2], "fails"),
    ]
    assert found["policy"] == json.loads(out.read_text())
    assert (found["settings"]["task"], found["settings"]["problems"]) == ("sums", {"search": 32, "validation": 64})
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
    assert (task.name, task.problems, task.metric) == ("sums", 3, "exact_match under none")


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
