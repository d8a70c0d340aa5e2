"""The report of a calibration: pictures and one page, from a summary made by hand."""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from summaries import around, summary

from taper.lab.calibration import report
from taper.lab.calibration.clock import TimedRuns
from taper.lab.calibration.report import write_report
from taper.lab.calibration.statistics import Estimate, Losses, PolicyAndFull
from taper.lab.calibration.summary import Budget, CalibrationSummary, Frontier, Speedup, interval, verdict
from taper.models import files

PICTURES = ["depth_by_step", "frontier", "importance", "loss_by_step", "speed"]
PAPER = "https://arxiv.org/abs/2503.08524"


def page(data: CalibrationSummary) -> str:
    """The page with empty pictures."""
    return report._page(data, dict.fromkeys(PICTURES, b""))


def words(data: CalibrationSummary) -> str:
    """What the page says, on one line."""
    source = page(data)
    return " ".join(re.sub(r"<[^>]*>", " ", source[source.index("<body>") :]).split())


ONE_DEPTH = Frontier({1: 1.5}, {1: 2.5})
CASES = {
    "plain": summary(),
    "many layers": summary(30),
    "tapers nothing": summary(tapers=False),
    "two layers": replace(summary(2, tapers=False), frontier=ONE_DEPTH),
}


# The summary


def assert_complete(value: object, data: object) -> None:
    """Every field of nested dataclasses is in their JSON, or is None by default."""
    for field in fields(value) if is_dataclass(value) else ():
        part, key = getattr(value, field.name), field.metadata.get("json", field.name)
        assert key in data or part is field.default is None, key
        if key in data:
            assert_complete(part, data[key])


@pytest.mark.parametrize("name", CASES)
def test_every_field_reaches_the_json(name):
    data = json.loads(json.dumps(CASES[name].to_json()))
    assert_complete(CASES[name], data)
    assert data["verdict"] == CASES[name].verdict
    assert data["budget_met"] == CASES[name].budget_met


def test_verdict_says_how_surely_a_budget_is_kept():
    """KL is 0.0523 (0.0471 to 0.0575), agreement 0.953 (0.943 to 0.963)."""
    kept, by_estimate = summary(), replace(summary(), budget=Budget(max_kl=0.055, min_agreement=0.95))
    missed, speed = replace(summary(), budget=Budget(max_kl=0.05)), replace(summary(), budget=Budget(speedup=1.2))
    assert verdict(kept) == "kept"
    assert verdict(by_estimate) == "kept by the estimate; the 95 % interval reaches 0.0575 nats and 94.3 %"
    assert verdict(missed) == "not kept; this is the nearest policy that was found"
    assert verdict(speed) == "the best quality that was found at this speed"
    assert [data.budget_met for data in (kept, by_estimate, missed, speed)] == [True, True, False, True]


def test_without_enough_tapered_steps_there_is_no_verdict_and_it_says_why():
    data = summary()
    few = replace(data, held_out=Losses(data.held_out.all_steps, None, 12, 1))
    why = "only 12 held-out steps in 1 output skip a layer; at least 30 steps in 5 outputs are needed"
    assert (few.verdict, few.budget_met) == ("not enough steps", False)
    assert verdict(few) == f"no verdict, as {why}"
    assert f"No verdict, as {why}. Asked for: mean KL at most 0.06 nats. Found: 0.0417 nats over all steps" in words(
        few
    )
    fast = replace(few, budget=Budget(speedup=1.2))
    assert f"What it costs is not known: {why}." in words(fast)
    none = replace(data, held_out=Losses(data.held_out.all_steps))
    assert verdict(none) == "no verdict, as no held-out step skips a layer"


# The report


@pytest.mark.parametrize("name", CASES)
def test_writes_a_page_with_pictures_that_show_something(tmp_path, name):
    folder = tmp_path / "new" / "report"
    write_report(folder, CASES[name])
    assert {path.name for path in folder.iterdir()} == {"index.html", *(f"{picture}.png" for picture in PICTURES)}
    source = (folder / "index.html").read_text(encoding="utf-8")
    embedded = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', source)]
    assert sorted(embedded) == sorted((folder / f"{picture}.png").read_bytes() for picture in PICTURES)
    for data in embedded:
        pixels = imread(io.BytesIO(data))[:, :, :3]
        assert pixels.shape[1] == 7 * 160
        assert (pixels < 0.9).any(-1).mean() > 0.005, "blank"
        assert (pixels[[0, -1]] == 1).all(), "cut off at the edge"
    assert "<script" not in source
    assert re.findall(r'https?:[^"<> ]*', source) == [PAPER]


def test_page_says_what_was_found():
    budget = ["Budget kept. Asked for: mean KL at most 0.06 nats. Found: 0.0523 nats"]
    budget += ["times the speed of full depth 1.35 1.31 to 1.38 in its timed runs", "of 6 layers run per token 4.4"]
    budget += ["of the steps that skip layers predict another token 5 % 4 to 6 %"]
    held_out = ["21 prompts", "22 held-out", "0.052 (0.047 to 0.058)", "0.042 (0.038 to 0.046)", "95 (94 to 96)"]
    held_out += ["1.2 (1.1 to 1.4)", "0.99 (0.89 to 1.09)"]
    held_out.append("has a KL of 0.021 (0.019 to 0.023) nats")
    held_out.append("agrees at 95.1 (94.2 to 96.0) % of its steps")
    own = ["0.81 (0.73 to 0.89)", "0.74 (0.67 to 0.82)", "83 (75 to 92)", "92 (83 to 101)", "12 (11 to 14)"]
    conditions = ["tiny, llama, f32, 6 layers", "ab" * 32, "cd" * 32, "seed 7", "2026-02-03", "A processor, 2 cores"]
    conditions += ["2 threads, ggml, f32", "Taper 0.1.0, Python 3.12.1, ggml-python 0.0.1"]
    conditions.append("1.37 times full depth predicted")
    said = words(summary())
    for part in ["constant start=8 min_depth=4", *budget, *held_out, *own, "the search prompts", *conditions]:
        assert part in said, part
    assert "hurts" not in said


def test_the_first_screen_is_the_verdict_what_it_costs_and_one_answer_with_its_differences_marked():
    source = page(summary())
    parts = [
        "What tiny can spare</h1>",
        "the policy constant start=8 min_depth=4 saves",
        "Budget kept.",
        "times the speed",
        "Why is the &lt;sky&gt; blue?",
    ]
    parts += ["<summary>One more answer</summary>", "And the sea?", "<img", "<table>"]
    places = [source.index(part) for part in parts]
    assert places == sorted(places)
    assert re.findall("<mark>(.*?)</mark>", source) == [" light", " colour"]
    assert source.count("It mirrors the sky.") == 2
    assert "not a choice" not in words(replace(summary(), examples=[]))


def test_a_policy_that_is_slower_is_not_to_be_used():
    data = summary()
    for median, said in ((0.97, True), (1.02, False)):
        slow = replace(data, speedup=replace(data.speedup, measured=TimedRuns(median, 0.95, 1.1)))
        assert ("Do not use this policy here" in words(slow)) == said
        assert ("Not every timed run was faster" in words(slow)) != said
    assert "it is the measurement that you will see" in words(data)
    late = replace(data, held_out=Losses(data.held_out.all_steps), speedup=Speedup(1.0, TimedRuns(0.97, 0.95, 1.1)))
    assert "Do not use this policy here" in words(late), "also where too few steps are tapered to say more"


def test_a_quick_look_says_that_it_is_one():
    data = summary()
    quick = replace(data, prompts=replace(data.prompts, quick=True), problems=None)
    assert "A quick look: 22 held-out prompts" in words(quick)
    assert "quick look" not in words(data)


def test_a_missed_budget_and_a_policy_that_hurts_are_said_plainly():
    data = replace(summary(agreement=0.85), budget=Budget(max_kl=0.05, min_agreement=0.9))
    repetition = PolicyAndFull(around(0.3), around(0.118))
    said = words(replace(data, free_running=replace(data.free_running, repetition=repetition)))
    asked = "agreement of 90 % or more. Found: 85 %"
    for part in ["Budget not kept;", asked, "This policy hurts", "repeats itself more"]:
        assert part in said, part


def test_a_budget_that_only_the_estimate_keeps_is_not_called_kept():
    said = words(replace(summary(), budget=Budget(max_kl=0.055)))
    assert "Budget kept by the estimate; the 95 % interval reaches 0.0575 nats." in said
    assert "Budget kept." not in said


def test_a_speed_that_was_asked_for_is_set_beside_what_was_measured():
    said = words(replace(summary(), budget=Budget(speedup=1.5)))
    assert "1.5 times the speed of full depth. Found: 1.37 predicted, 1.35 measured" in said
    assert "slower than was asked for" in said
    assert "Budget kept" not in said


def test_no_tapered_step_and_too_few_are_told_apart():
    said = words(summary(tapers=False))
    assert "It skips no layer" in said
    assert "too few of them to tell" not in said
    data = summary()
    said = words(replace(data, held_out=Losses(data.held_out.all_steps, None, 29, 9)))
    assert "predict another token ? too few of them to tell" in said
    assert "It skips no layer" not in said


def test_names_are_text_and_never_markup():
    data = replace(summary(), policy="<i>")
    source = page(replace(data, model=replace(data.model, name='<b>&"{{ 1 }}')))
    assert "<b>&" not in source
    assert "<i>" not in source
    assert "<h1>What &lt;b&gt;&amp;&#34;{{ 1 }} can spare</h1>" in source
    assert "the policy &lt;i&gt; saves" in source


@pytest.mark.parametrize("fails", ["write", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_half_written(tmp_path, monkeypatch, fails):
    write_report(tmp_path, summary())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full_disk(target, content):
        if fails == "write":
            with target.open("wb") as file:
                file.write(content[: len(content) // 2])
        raise OSError("disk full")

    monkeypatch.setattr(*((Path, "write_bytes") if fails == "write" else (files.os, "replace")), full_disk)
    with pytest.raises(OSError, match="disk full"):
        write_report(tmp_path, summary(agreement=0.5))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_estimates_have_the_digits_that_their_intervals_leave_open():
    assert interval(Estimate(0.05231, 0.0481, 0.0567)) == "0.052 (0.048 to 0.057)"
    assert interval(Estimate(0.97512, 0.971, 0.979), 100) == "97.5 (97.1 to 97.9)"
    assert interval(Estimate(116.06, 106.3, 124.1)) == "116 (106 to 124)"
    assert interval(Estimate(1.0, 1.0, 1.0)) == "1"
    assert interval(Estimate(0.612, 0.612, 0.612), 100, " %", digits=1) == "61.2 %"
    assert interval(Estimate(0.97512, 0.971, 0.979), 100, " %", digits=0) == "98 % (97 to 98 %)"
    assert interval(None) == "–"


def test_running_mean_weighs_steps_by_their_outputs():
    values, weights = np.array([1.0, 4.0, 0.0]), np.array([2.0, 1.0, 1.0])
    assert report._running_mean(values, weights) == pytest.approx([1.5, 1.5, 1.5])
    far = np.zeros(20)
    far[0] = 1.0
    smooth = report._running_mean(far, np.ones(20))
    assert smooth[4] == pytest.approx(1 / report.SMOOTHED)
    assert smooth[5] == 0
