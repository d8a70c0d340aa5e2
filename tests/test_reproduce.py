"""research/reproduce.py end to end on a tiny model: what it compares, that it continues, its page, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import comparison
import pytest
import reproduce
from comparison import FULL, mean_depth
from eval_data import write_data
from reproduce import CALIBRATED, Result
from tiny import DEFAULT_MODEL_FILE

import taper.lab.calibration.run
import taper.lab.calibration.summary
from taper import DepthPolicy
from taper.errors import RequestError
from taper.lab.calibration.statistics import Estimate
from taper.lab.evals.records import RecordFile
from taper.lab.evals.summary import Score

POLICY = DepthPolicy.d3(6, 0.99, skip_order=[4, 1, 2, 3])
TASKS = "gsm8k,bbh_cot_zeroshot"
METHODS = [FULL, CALIBRATED, *["D3, measured order", "D3, middle first (our reading)"] * 2]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Short outputs for block influence."""
    monkeypatch.setattr(comparison, "INFLUENCE_TOKENS", 4)
    monkeypatch.setattr(comparison, "INFLUENCE_PROMPTS", 8)


@pytest.fixture
def arguments(tiny_llama, tmp_path) -> list[str]:
    (tmp_path / "policy.json").write_text(POLICY.to_json())
    options = {"data-dir": write_data(tmp_path / "data"), "tasks": TASKS, "limit": 2, "lengths": "16,24"}
    options |= {"device": "cpu", "dtype": "f32", "context": 1024, "threads": 1, "out": tmp_path / "out"}
    return [str(tiny_llama.folder), *(f"--{name}={value}" for name, value in options.items())]


@pytest.fixture
def run(capsys):
    """Run the script; what it writes to standard error."""

    def run(arguments: list[str]) -> str:
        reproduce.main(arguments)
        return capsys.readouterr().err

    return run


def results(folder: Path) -> dict:
    return json.loads((folder / "out" / "results.json").read_text())


@pytest.mark.ci
def test_methods_are_compared_at_both_depths_and_lengths(run, arguments, tmp_path, monkeypatch):
    written = []
    append = RecordFile.append
    monkeypatch.setattr(RecordFile, "append", lambda file, record: (written.append(record.key), append(file, record)))
    arguments.append(f"--policy={tmp_path / 'policy.json'}")
    assert "index.html" in run(arguments)
    data = results(tmp_path)
    names = ["gsm8k", "bbh_cot_zeroshot_boolean_expressions", "bbh_cot_zeroshot_word_sorting", "bbh_cot_zeroshot"]
    for length in (16, 24):
        compared = [result for result in data["results"] if result["max_tokens"] == length]
        assert [result["task"] for result in compared[:: len(METHODS)]] == names
        assert [result["method"] for result in compared] == METHODS * len(names)
        assert [result["problems"] for result in compared[:: len(METHODS)]] == [2, 2, 2, 4]
        headline, budget = compared[2]["depth"], compared[-1]["depth"]
        assert headline == 4
        full = compared[0]["score"]
        assert full["mean_depth"] == 6
        assert full["against_full"] is None
        assert compared[1]["score"]["against_full"]["problems"] == 2
        assert full["tokens"] <= length
        files = (tmp_path / "out" / f"{length}-tokens").glob("*.jsonl")
        records = [json.loads(line) for file in files for line in file.read_text().splitlines()[1:]]
        lengths = [len(record["completions"][0]["token_ids"]) for record in records if record["mode"] == "full"]
        assert budget == pytest.approx(mean_depth(POLICY, lengths), abs=0.006)
    assert [speed["method"] for speed in data["speeds"]] == [CALIBRATED, "D3, measured order at depth 4"] * 2
    assert [task["task"] for task in data["nll"]] == names
    assert data["nll"][-1]["rows"][0]["steps"] == [1, 8]
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("<img") == 3
    assert "no policy meets" not in page.lower()
    assert "http" not in page.replace("https://arxiv.org", "")
    before = len(written)
    run(arguments)
    assert len(written) == before > 0


@pytest.mark.ci
def test_an_order_of_too_few_layers_is_left_out_at_the_headline(run, arguments, tmp_path):
    """Such as that of a policy that was calibrated to a task."""
    (tmp_path / "policy.json").write_text(DepthPolicy.static(6, 5, [4]).to_json())
    arguments += [f"--policy={tmp_path / 'policy.json'}", "--lengths=24"]
    line = "D3, measured order is left out at mean depth 4: 5.00 is the closest that it comes"
    assert run(arguments).count(line) == 1
    data = results(tmp_path)
    assert data["left_out"] == [line]
    compared = [(result["method"], result["depth"]) for result in data["results"] if result["task"] == "gsm8k"]
    middle_first, measured = METHODS[-1], METHODS[-2]
    assert compared == [(FULL, None), (CALIBRATED, None), (middle_first, 4), (measured, 5), (middle_first, 5)]
    assert [speed["method"] for speed in data["speeds"]] == [CALIBRATED]
    assert line in (tmp_path / "out" / "index.html").read_text()


def test_a_method_has_one_colour_at_every_length():
    def result(max_tokens: int, method: str) -> Result:
        depth = None if method == FULL else 4.0
        score = Score("taper", method, Estimate(0.5, 0.4, 0.6), 5.0, 8.0, 0.0, 0.0, None)
        return Result("gsm8k", max_tokens, method, depth, 2, "exact_match", score)

    drawn = [result(16, FULL), result(16, "b"), result(24, FULL), result(24, "a"), result(24, "b")]
    short, long = reproduce._accuracy_picture(drawn, 6).axes
    colours = [{bars.get_label(): bars[0].get_color() for bars in axes.containers} for axes in (short, long)]
    assert colours[0]["b"] == colours[1]["b"] != colours[1]["a"]


@pytest.mark.ci
@pytest.mark.skipif(not DEFAULT_MODEL_FILE.is_file(), reason="fetch the default model with: taper pull")
def test_the_default_model_end_to_end(run, arguments, tmp_path):
    arguments[0] = str(DEFAULT_MODEL_FILE)
    arguments += ["--policy=fast-plain", "--lengths=16", "--tasks=gsm8k", "--dtype=auto", "--fewshot=0", "--chat"]
    run(arguments)
    data = results(tmp_path)
    assert data["left_out"] == []
    assert [result["method"] for result in data["results"]] == METHODS
    assert [result["depth"] for result in data["results"]][:4] == [None, None, 20, 20]
    solved = [result["score"]["accuracy"] for result in data["results"]]
    assert all(0 <= low <= value <= high <= 1 for value, low, high in solved)
    assert all(speed["speedup"][0] > 0 for speed in data["speeds"])
    assert (tmp_path / "out" / "index.html").read_text().count("<img") == 2


@pytest.fixture
def short_calibration(monkeypatch, tmp_path):
    monkeypatch.setenv("TAPER_CACHE", str(tmp_path / "cache"))
    prompts = [f"Tell me about the number {n}." for n in range(10)]
    monkeypatch.setattr(taper.lab.calibration.run, "builtin_prompts", lambda: prompts)
    monkeypatch.setattr(taper.lab.calibration.run, "MAX_TOKENS", 40)


@pytest.mark.ci
@pytest.mark.usefixtures("short_calibration")
def test_a_calibration_gives_the_policy(run, arguments, tmp_path):
    arguments += ["--lengths=24", "--tasks=gsm8k", "--min-agreement=0.01"]
    run(arguments)
    data = results(tmp_path)
    assert data["policy"]["skip_order"] == data["order"]
    assert data["budget"].startswith("the fastest one that was found for an agreement with full depth of 1 %")
    assert CALIBRATED in {result["method"] for result in data["results"]}


@pytest.mark.ci
@pytest.mark.usefixtures("short_calibration")
def test_a_budget_that_no_policy_meets_leaves_the_headline(run, arguments, monkeypatch, tmp_path):
    monkeypatch.setattr(taper.lab.calibration.summary.CalibrationSummary, "budget_met", False)
    assert "no policy meets the budget" in run([*arguments, "--lengths=24", "--tasks=gsm8k"])
    data = results(tmp_path)
    assert data["policy"] is None
    assert {result["depth"] for result in data["results"]} == {None, 4}
    assert "No policy meets the budget" in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.ci
def test_baselines_compare_every_method(run, arguments, tmp_path):
    run([*arguments, f"--policy={tmp_path / 'policy.json'}", "--tasks=gsm8k", "--lengths=24", "--baselines"])
    data = results(tmp_path)
    assert len(data["results"]) == 2 + 2 * 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths=24,x"], "lengths is '24,x'"),
        (["--lengths=1"], "an output of 1 tokens"),
        (["--lengths=1024"], "a context of 1024"),
        (["--tasks=,"], "tasks is empty"),
        (["--margin=1"], "margin is 1"),
        (["--min-agreement=0.9"], "min_agreement does nothing with policy"),
        (["--limit=0"], "limit is 0"),
    ],
)
def test_mistakes_are_rejected_before_the_work(run, arguments, tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(RecordFile, "append", lambda *_: pytest.fail("an output was computed"))
    with pytest.raises(RequestError, match=message):
        run([*arguments, f"--policy={tmp_path / 'policy.json'}", *options])
    assert not Path(tmp_path / "out" / "results.json").exists()
