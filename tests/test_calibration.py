"""Calibration on tiny models and made-up losses: each stage finds what is there, and only what is there."""

from __future__ import annotations

import json
import math
import sqlite3
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import MadeUpProblems
from tiny import make_backend, random_prompt

import taper
from taper import LLM, SamplingParams, calibrate
from taper.backends.ggml.library import ggml
from taper.engine import Engine
from taper.errors import RequestError, TaperWarning
from taper.lab.calibration import search
from taper.lab.calibration.clock import CostModel
from taper.lab.calibration.measured_model import MeasuredModel
from taper.lab.calibration.problems import MAX_TOKENS, Attempt, WordProblemSet, builtin_problems, word_problems
from taper.lab.calibration.progress import Progress
from taper.lab.calibration.prompts import FOLLOW_UP, builtin_prompts, encode_prompts, next_prompts, read_prompts
from taper.lab.calibration.replay import Reference, Replay, Scores
from taper.lab.calibration.search import LossTable, fit_quality, fit_speed, power_curves, power_curves_of_speed
from taper.lab.calibration.statistics import Estimate, LossEstimate, free_running, over_steps, ratio_estimate
from taper.lab.calibration.store import Measurements, Store, current_conditions, open_store, skipping
from taper.lab.calibration.summary import Budget
from taper.policy import DepthPolicy, Schedule

LAYERS = 10


# Order


def additive(costs):
    """Every layer has a cost of its own, whatever else is skipped; the same in every completion and step."""
    return lambda skipped, candidates, completions: np.array(
        [len(completions) * 4 * (sum(costs[i] for i in skipped) + costs[layer]) for layer in candidates]
    )


def order_of(costs, rounds, measure=None, score=lambda skipped: 0.0):
    """Layers in the order of skipping, their KL, and how many can be skipped before significantly fewer are solved."""
    order = search.LayerOrder(
        costs, list(islice(search.layers_to_skip(costs, [4] * 12, measure or additive(costs), score), rounds))
    )
    return [skipped.layer for skipped in order.searched], [skipped.kl for skipped in order.searched], order.harmless


@given(st.permutations(range(1, LAYERS + 1)))
def test_order_is_by_cost_where_layers_do_not_interact(costs):
    layers, losses, harmless = order_of(costs, 6)
    assert [costs[layer] for layer in layers] == [1, 2, 3, 4, 5, 6]
    assert losses == pytest.approx([1, 3, 6, 10, 15, 21])
    assert harmless == 6
    assert sorted(order_of(costs, LAYERS + 1)[0]) == list(range(LAYERS))  # it ends with the flex layers


def test_next_comes_the_layer_that_costs_least_given_those_already_skipped():
    """Layer 1 is the second cheapest alone, but not beside layer 0."""
    table = {(0,): 1.0, (1,): 2.0, (2,): 3.0, (0, 1): 9.0, (0, 2): 4.0}

    def measure(skipped, candidates, completions):
        return np.array([len(completions) * 4 * table[tuple(sorted(skipped | {layer}))] for layer in candidates])

    assert order_of([1.0, 2.0, 3.0], 2, measure)[:2] == ([0, 2], [1.0, 4.0])


@given(st.sets(st.integers(0, LAYERS - 1), min_size=1, max_size=2))
def test_layers_that_problems_need_are_not_skipped_though_they_cost_least(needed):
    costs = [0.1 + 0.01 * layer if layer in needed else 1.0 + layer for layer in range(LAYERS)]
    layers, _, harmless = order_of(costs, 6, score=lambda skipped: 3.0 * len(skipped & needed))
    assert not needed & set(layers)
    assert harmless == 6


def test_if_every_layer_lowers_the_score_the_one_that_lowers_it_least_is_skipped():
    """From the third layer on fewer problems are solved, and fewest without the even ones."""

    def score(skipped):
        return 0.0 if len(skipped) < 3 else 2.0 + sum(layer % 2 == 0 for layer in skipped)

    layers, _, harmless = order_of([1.0 + layer for layer in range(LAYERS)], 4, score=score)
    assert layers == [0, 1, 3, 5]
    assert harmless == 2


def test_a_layer_that_lowers_the_score_within_the_tolerance_is_skipped():
    costs = [1.0, 2.0, 3.0]
    for tolerance, layer in [(0.0, 1), (search.HARMLESS, 0)]:
        found = search.layers_to_skip(costs, [4] * 12, additive(costs), lambda skipped: float(0 in skipped), tolerance)
        assert next(found).layer == layer


def test_problems_are_no_longer_asked_once_the_score_has_collapsed():
    """Then which layer loses least is chance, so the one of lowest KL is skipped."""
    asked = []

    def score(skipped):
        asked.append(len(skipped))
        return 0.0 if len(skipped) < 2 else 9.0 - sum(skipped) / 100

    layers, _, harmless = order_of([1.0 + layer for layer in range(LAYERS)], 5, score=score)
    assert layers == [0, 1, 2, 3, 4]
    assert harmless == 1
    assert max(asked) == 2


def test_search_takes_the_first_steps_of_each_output():
    references = [Reference((1, 2), tuple(range(3, 3 + n))) for n in (1, 2, 90)]
    assert [len(reference.completion_ids) for reference in search.first_steps(references, 30)] == [2, 31]


# Budget and curve


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "a budget is missing"),
        ({"max_kl": 0.0}, "in (0, 1000]"),
        ({"max_kl": math.nan}, "in (0, 1000]"),
        ({"min_agreement": 1.5}, "(0, 1]"),
        ({"max_nll_increase": -1.0}, "in (0, 100000]"),
        ({"speedup": 1.0}, "in (1, 100]"),
        ({"speedup": math.inf}, "in (1, 100]"),
        ({"max_kl": "0.1"}, "a number"),
        ({"speedup": 1.2, "max_kl": 0.1}, "cannot both"),
    ],
)
def test_budgets_that_make_no_sense_are_rejected(given, says):
    with pytest.raises(RequestError) as error:
        Budget(**given)
    assert says in str(error.value)


def test_a_budget_of_numpy_numbers_is_one_of_floats():
    assert json.dumps(Budget(max_kl=np.float32(0.5), min_agreement=1).given) == '{"max_kl": 0.5, "min_agreement": 1.0}'


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ({"max_kl": 0.06}, "kept"),
        ({"max_kl": 0.055}, "kept by the estimate"),
        ({"max_kl": 0.045}, "not kept"),
        ({"min_agreement": 0.94}, "kept"),
        ({"min_agreement": 0.945}, "kept by the estimate"),
        ({"min_agreement": 0.96}, "not kept"),
        ({"max_kl": 0.06, "min_agreement": 0.945}, "kept by the estimate"),
        ({"max_kl": 0.06, "min_agreement": 0.96}, "not kept"),
        ({"max_nll_increase": 1.5}, "kept"),
        ({"max_nll_increase": 1.2}, "kept by the estimate"),
        ({"speedup": 1.2}, None),
    ],
)
def test_a_budget_is_kept_only_where_the_whole_interval_keeps_it(given, verdict):
    tapered = LossEstimate(Estimate(0.05, 0.04, 0.06), Estimate(0.95, 0.94, 0.96), Estimate(1.0, 0.5, 1.5))
    assert Budget(**given).verdict(tapered) == verdict
    assert Budget(**given).verdict(None) == (None if "speedup" in given else "not enough steps")


ORDER = search.LayerOrder([0.0] * 6 + [1.0] * (LAYERS - 6), [search.Skipped(layer, 0.0, 0.0) for layer in range(6)])
CANDIDATES = power_curves(ORDER, 6, 64)
COST = CostModel(fixed_ms=1.0, layer_ms=0.5)


def made_up(policy: DepthPolicy, outputs: int = 30, slope: float = 0.1) -> Scores:
    """KL of `slope` a skipped layer, twice as much in the first half of 64 steps; agreement and NLL follow it."""
    step = np.tile(np.arange(64), outputs)
    depth = np.array([policy.depth(int(i)) for i in step])
    spread = np.repeat(np.random.default_rng(0).uniform(0.9, 1.1, outputs), 64)
    kl = slope * (LAYERS - depth) * np.where(step < 32, 2.0, 1.0) * spread
    nll_full = np.full(len(step), 2.0)
    return Scores(np.repeat(np.arange(outputs), 64), step, depth, kl, 1 - kl / 4, nll_full + kl, nll_full)


def made_up_table(slope: float = 0.1) -> LossTable:
    measured = {d: made_up(DepthPolicy.static(LAYERS, d, range(6)), slope=slope) for d in (9, 7, 4)}
    return LossTable(measured, LAYERS, 64)


def test_loss_table_predicts_curves_from_constant_depths():
    for policy in (DepthPolicy.static(LAYERS, 6, range(6)), DepthPolicy.skipdecode(LAYERS, 4, 32)):
        (all_steps, tapered), losses = made_up_table().predict(policy), over_steps(made_up(policy))
        assert vars(tapered) == pytest.approx(vars(losses.tapered_steps.value), rel=0.02)
        assert all_steps.kl == pytest.approx(losses.all_steps.kl.value, rel=0.03)


@pytest.mark.parametrize("slope", [0.1, 0.15])
@pytest.mark.parametrize("budget", [Budget(max_kl=0.25), Budget(min_agreement=0.9), Budget(max_nll_increase=12.0)])
def test_quality_budget_is_kept_and_used_up(budget, slope):
    """Also where the table predicts too little: it is corrected by what is replayed."""

    def share(policy):
        return budget.worst_share(over_steps(made_up(policy, slope=slope)).tapered_steps.worst)

    policy = fit_quality(budget, CANDIDATES, made_up_table(), 64, lambda policy: made_up(policy, slope=slope))
    assert 0.5 < share(policy) <= 1
    shallower = [other for other in CANDIDATES if other.mean_depth(64) < policy.mean_depth(64) - 0.7]
    assert all(share(other) > 1 for other in shallower[:: len(shallower) // 8])


def test_a_budget_nothing_keeps_gives_the_nearest():
    budget = Budget(max_kl=0.01)
    policy = fit_quality(budget, CANDIDATES, made_up_table(), 64, made_up)
    assert policy.min_depth == LAYERS - 1
    assert budget.worst_share(over_steps(made_up(policy)).tapered_steps.value) > 1


def test_too_few_tapered_steps_keep_no_budget():
    late = DepthPolicy(Schedule(LAYERS, "constant", 4, start=63), tuple(range(6)))
    early = DepthPolicy.static(LAYERS, 9, range(6))
    assert over_steps(made_up(late, 8)).tapered_steps is None
    replay = partial(made_up, outputs=8)
    assert fit_quality(Budget(max_kl=9.0), [late, early], made_up_table(), 64, replay) == early


@pytest.mark.parametrize(("outputs", "is_enough"), [(1, False), (4, False), (5, True)])
def test_below_five_outputs_with_tapered_steps_there_is_no_interval(outputs, is_enough):
    """However many steps they have, and however many outputs skip nothing."""
    scores = made_up(DepthPolicy.static(LAYERS, 4, range(6)), 12)
    losses = over_steps(replace(scores, depth=np.where(scores.reference < outputs, scores.depth, LAYERS)))
    assert (losses.tapered_steps is not None) == is_enough
    assert (losses.num_tapered_steps, losses.num_tapered_outputs) == (63 * outputs, outputs)
    counts = np.where(np.arange(12) < outputs, 3.0, 0.0)
    mean = ratio_estimate(np.arange(12.0) * (counts > 0), counts)
    assert (mean.low < mean.value < mean.high) if is_enough else mean.low == mean.value == mean.high


@settings(max_examples=8)
@given(st.floats(1.02, 1.5))
def test_policies_of_a_speed_are_just_as_fast_as_asked(speedup):
    candidates = power_curves_of_speed(ORDER, 64, speedup, COST)
    assert speedup <= min(COST.speedup(policy, 64) for policy in candidates) < speedup * 1.02
    assert len({policy.schedule.start for policy in candidates}) > 1


@settings(max_examples=8)
@given(st.floats(1.02, 1.5), st.integers(0, 6))
def test_a_speed_skips_no_more_than_it_needs_beyond_the_harmless_layers(speedup, harmless):
    static = [DepthPolicy.static(LAYERS, LAYERS - n, range(n)) for n in range(1, 7)]
    needed = next(n for n, policy in enumerate(static, 1) if COST.speedup(policy, 64) >= speedup)
    candidates = power_curves_of_speed(ORDER, 64, speedup, COST)
    policy = fit_speed(candidates, harmless, made_up_table(), made_up, lambda policy: LAYERS - policy.min_depth)
    assert LAYERS - policy.min_depth <= max(needed, harmless)


def test_a_speed_skips_more_layers_later_where_that_costs_less():
    """Late steps cost half as much here, so the fall comes late."""
    candidates = power_curves_of_speed(ORDER, 64, 1.15, COST)
    few, many = (
        fit_speed(candidates, 0, made_up_table(), made_up, lambda policy, sign=sign: sign * policy.min_depth)
        for sign in (-1, 1)
    )
    assert many.min_depth < few.min_depth == max(policy.min_depth for policy in candidates)
    best = min(float(made_up(candidate).kl.mean()) for candidate in candidates)
    assert made_up(many).kl.mean() < made_up(few).kl.mean()
    assert made_up(many).kl.mean() <= best * 1.05


def test_the_lower_kl_is_taken_unless_clearly_fewer_problems_are_solved_with_it():
    candidates = power_curves_of_speed(ORDER, 64, 1.15, COST)

    def found(more: float) -> DepthPolicy:
        """What is found if each layer skipped costs so much more of the problems."""
        return fit_speed(candidates, 0, made_up_table(), made_up, lambda policy: -more * policy.min_depth)

    assert found(0.01) == found(-1.0)
    assert found(1.0).min_depth > found(-1.0).min_depth


def test_a_speed_is_searched_beyond_a_number_of_layers_that_costs_more():
    candidates = power_curves_of_speed(ORDER, 64, 1.15, COST)
    second = sorted({policy.min_depth for policy in candidates})[-2]

    def replay(policy: DepthPolicy) -> Scores:
        scores = made_up(policy)
        return replace(scores, kl=2 * scores.kl) if policy.min_depth == second else scores

    assert fit_speed(candidates, 0, made_up_table(), replay, lambda policy: policy.min_depth).min_depth < second


def test_a_speed_out_of_reach_is_rejected_with_what_can_be_had():
    with pytest.raises(RequestError, match=r"most .* 2\.0"):
        power_curves_of_speed(ORDER, 64, 3.0, COST)


def test_cost_model_is_a_straight_line_in_depth():
    cost = CostModel(fixed_ms=2.0, layer_ms=0.5)
    policy = DepthPolicy.static(8, 4, range(4))
    assert cost.step_ms(range(4)) == pytest.approx(4.0)
    assert cost.speedup(policy, 11) == pytest.approx(6.0 / 4.0)
    assert cost.speedup(policy, 1) == 1.0


# Statistics


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng, inside = np.random.default_rng(3), 0
    for seed in range(200):
        values = rng.normal(2.0, 1.0, (40, 5)).sum(-1)
        mean = ratio_estimate(values, np.full(40, 5.0), seed)
        inside += mean.low <= 2.0 <= mean.high
    assert 0.88 <= inside / 200 <= 0.99


def test_outputs_are_resampled_whole():
    """Steps of one output are alike: an interval over steps alone would be far too narrow."""
    sums = np.repeat([0.0, 100.0], 10)
    mean = ratio_estimate(sums, np.full(20, 100.0))
    assert mean.high - mean.low > 0.3


def test_free_running_metrics():
    own = [Reference((1,), (5, 6, 7, 8) * 3), Reference((2,), (5, 6))]
    scores = Scores(*(np.zeros(14) for _ in range(6)), np.full(14, 0.5))
    scores = replace(scores, reference=np.array([0] * 12 + [1] * 2))
    figures = free_running(own, scores, own, scores)
    assert figures.nll.policy.value == pytest.approx(0.5)
    assert figures.length.full.value == 7
    assert figures.repetition.policy.value == pytest.approx((5 / 9) / 2)  # 9 4-grams, 4 different ones


# Store, prompts


def test_store_computes_once_and_keeps_keys_apart(tmp_path):
    calls = []

    def compute():
        calls.append(1)
        return [0.1, len(calls)]

    for _ in range(2):  # the second time from the file
        store = Store(tmp_path / "a" / "s.sqlite", {"model": "x"})
        assert store.remember({"k": 1}, compute) == [0.1, 1]
        store.close()
    assert Store(tmp_path / "a" / "s.sqlite", {"model": "y"}).remember({"k": 1}, compute) == [0.1, 2]


def test_measurements_of_other_versions_or_precisions_are_never_reused(llm, monkeypatch):
    """The key of a stored value holds all that its kernels depend on."""
    here, calls = current_conditions(llm), []

    def measure(conditions):
        store = open_store("model", conditions)
        store.remember({"k": 1}, lambda: calls.append(1))
        store.close()
        return len(calls)

    assert measure(here) == measure(here) == 1
    monkeypatch.setattr(llm.engine.backend, "kernels", here.kernels + ".post1")
    assert current_conditions(llm).kernels == here.kernels + ".post1"
    assert measure(current_conditions(llm)) == 2
    others = [{"taper": "0.0.1"}, {"backend": "another"}, {"dtype": "f16"}]
    assert [measure(replace(here, **other)) for other in others] == [3, 4, 5]
    assert measure(replace(here, date="2000-01-01")) == 5


def spoil(path, statement, *values) -> None:
    file = sqlite3.connect(path, isolation_level=None)
    file.execute(statement, values)
    file.close()


@pytest.mark.parametrize("value", ["{", '"of another shape"', None, 7, b"\xff\xfe"])
def test_damaged_rows_are_measured_anew_and_nothing_else_is_lost(tmp_path, value):
    store = Store(tmp_path / "s.sqlite", {})
    assert [store.remember({"k": k}, lambda k=k: [k]) for k in (1, 2)] == [[1], [2]]
    spoil(tmp_path / "s.sqlite", "UPDATE measured_3 SET value = ? WHERE value = '[1]'", value)
    assert store.remember({"k": 1}, lambda: ["anew"]) == ["anew"]
    assert store.remember({"k": 1}, lambda: ["never"]) == ["anew"]
    assert store.remember({"k": 2}, lambda: ["never"]) == [2]


def test_a_store_damaged_after_it_was_opened_is_one_line(tmp_path, monkeypatch):
    path = tmp_path / "s.sqlite"
    store = Store(path, {})
    for k in range(300):
        store.remember({"k": k}, lambda k=k: ["x" * 500, k])
    store.close()
    store = Store(path, {})
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(bytes(data))
    with pytest.raises(RequestError, match=r"cannot keep measurements in .*s\.sqlite"):
        [store.remember({"k": k}, lambda: 0) for k in range(300)]


def test_a_store_of_an_older_version_is_measured_anew_and_says_so(tmp_path):
    spoil(tmp_path / "s.sqlite", "CREATE TABLE measured_2 (key TEXT PRIMARY KEY, value TEXT, check_sum TEXT)")
    with pytest.warns(TaperWarning, match="measured anew"):
        Store(tmp_path / "s.sqlite", {}).close()
    Store(tmp_path / "s.sqlite", {}).close()  # said once


def test_a_store_that_cannot_be_used_is_one_line(tmp_path, monkeypatch):
    """No database, a folder that is a file, a database of another layout, and one that another process locks."""
    (tmp_path / "text").write_bytes(b"no data base" * 100)
    spoil(tmp_path / "other.sqlite", "CREATE TABLE measured_3 (a, b)")
    monkeypatch.setattr("taper.lab.calibration.store._TIMEOUT", 0.05)
    Store(tmp_path / "locked.sqlite", {}).close()
    blocker = sqlite3.connect(tmp_path / "locked.sqlite", isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    for name, says in {"text": "text", "text/below": "", "other.sqlite": "", "locked.sqlite": "locked"}.items():
        with pytest.raises(RequestError, match=f"cannot keep measurements in .*{says}"):
            Store(tmp_path / name, {}).remember({}, lambda: 1)
    blocker.close()


def test_a_full_disk_costs_no_earlier_measurement(tmp_path):
    store = Store(tmp_path / "s.sqlite", {})
    assert store.remember({"k": 0}, lambda: [0]) == [0]
    store._file.execute("PRAGMA max_page_count = 4")  # SQLite's own stand-in for a disk
    with pytest.raises(RequestError, match=r"full .*free the disk"):
        [store.remember({"k": k}, lambda: "x" * 1000) for k in range(1, 99)]
    assert store.remember({"k": 0}, lambda: ["never"]) == [0]


def test_prompt_files_in_each_form(tmp_path):
    file = tmp_path / "p"
    file.write_text('\n{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}], "id": 7}\n')
    assert read_prompts(file) == ["a", [{"role": "user", "content": "b"}]]
    file.write_text("one\r\n\n two é \n")
    assert read_prompts(file) == ["one", "two é"]


def test_builtin_prompts_are_many_and_different():
    prompts = builtin_prompts()
    assert len({*prompts}) == len(prompts) >= 64


# Word problems


def test_builtin_problems_are_different_and_their_answers_are_numbers():
    levels = builtin_problems()
    problems = [problem for level in levels for problem in level]
    assert [len(level) for level in levels] == [128, 128, 128]
    assert len({problem.prompt for problem in problems}) == 384
    assert all(problem.answer.isdecimal() for problem in problems)


def by_layer(full: list[bool], needed: dict[int, list[bool]]) -> MadeUpProblems:
    """Outcomes of full depth, and of policies that skip a layer; both in turn."""

    def solves(index, skipped):
        outcomes = next((solved for layer, solved in needed.items() if layer in skipped), full)
        return outcomes[index % len(outcomes)]

    return MadeUpProblems(solves)


def test_score_is_the_paired_difference_in_standard_errors(tmp_path):
    made_up_problems = by_layer([True, True, False, False], {1: [False, False, True, False], 2: [True], 4: [False]})
    problems = made_up_problems.judged(Store(tmp_path / "s.sqlite", {}))
    assert problems.score(skipping(6, [3])) == 0
    assert problems.score(skipping(6, [1])) == pytest.approx((32 - 16) / math.sqrt(48))
    assert max(made_up_problems.asked)[0] == 63
    made_up_problems.asked.clear()
    assert problems.score(skipping(6, [4])) == pytest.approx(math.sqrt(32))
    assert problems.score(skipping(6, [2])) == pytest.approx(-math.sqrt(32))
    assert max(made_up_problems.asked)[0] == 31  # the first half suffices
    solved = problems.validate(skipping(6, [1]), Progress())
    assert (solved.policy.value, solved.full.value, solved.difference.value, solved.problems) == (0.25, 0.5, -0.25, 64)
    assert solved.difference.low < -0.25 < solved.difference.high


def test_attempts_are_stored(tmp_path):
    made_up_problems = by_layer([True, False], {})
    problems, parts = made_up_problems.judged(Store(tmp_path / "s.sqlite", {})), []
    stage = Progress(lambda name, part: parts.append(part)).stage("problems", 4)
    for _ in range(2):
        attempts = problems.attempts(range(20), DepthPolicy.full(6), stage)
        assert [attempt.solved for attempt in attempts] == [True, False] * 10
    assert made_up_problems.asked == [(index, ()) for index in range(20)]
    assert parts == [0, *[1 / 4] * 4]


def test_a_word_problem_must_end_to_be_solved(llm, monkeypatch):
    lengths = [1, MAX_TOKENS - 1, MAX_TOKENS]
    monkeypatch.setattr(llm.engine, "complete", lambda requests: [[5] * length for length in lengths])
    monkeypatch.setattr("taper.lab.calibration.problems.is_right", lambda output, answer: True)
    attempts = WordProblemSet(llm, builtin_problems()[0]).attempt(range(3), skipping(6, [3]))
    assert [attempt.solved for attempt in attempts] == [True, True, False]


@pytest.mark.parametrize(
    ("solved_of_16", "steps"), [((0, 16, 16), None), ((5, 16, 16), None), ((6, 5, 16), 1), ((16, 16, 16), 3)]
)
def test_word_problems_are_of_the_hardest_level_that_the_model_can_do(llm, monkeypatch, tmp_path, solved_of_16, steps):
    monkeypatch.setattr("taper.lab.calibration.problems.MAX_TOKENS", 1)

    def attempt(self, indices, policy):
        share = solved_of_16[self._problems[0].steps - 1]
        return [Attempt(index % 16 < share, []) for index in indices]

    monkeypatch.setattr(WordProblemSet, "attempt", attempt)
    problems = word_problems(llm, Store(tmp_path / "s.sqlite", {}))
    assert (problems is None) == (steps is None)
    if problems is not None:
        assert len(problems.search) == 64
        validated = problems.validate(skipping(6, [1]), Progress())
        assert validated.full.value == solved_of_16[steps - 1] / 16


def test_a_budget_skips_no_layer_that_problems_need(llm, monkeypatch):
    made_up_problems = by_layer([True, False], {layer: [False, False] for layer in (0, 1, 2, 4, 5)})
    monkeypatch.setattr("taper.lab.calibration.run.word_problems", lambda llm, store: made_up_problems.judged(store))
    result = calibrate(llm, prompts_of(10), max_kl=50.0, answer_tokens=40)
    assert result.summary.harmless_layers == 1
    assert result.policy.skip_order[:1] == (3,)
    assert result.policy.min_depth == 5
    assert result.summary.problems.difference.value == 0


def test_word_problems_need_no_slots_that_replay_holds(llm, monkeypatch):
    """Their level was once chosen after replay had taken every slot, which failed."""
    monkeypatch.setattr("taper.lab.calibration.problems.MAX_TOKENS", 4)
    assert calibrate(llm, prompts_of(24), max_kl=50.0, answer_tokens=4).policy.num_hidden_layers == 6


def test_a_context_too_short_for_problems_asks_none(llm, tiny_llama, tmp_path):
    shorter = LLM(str(tiny_llama.folder), device="cpu", dtype="f32", context=64, threads=1)  # than a problem alone
    for short in (llm, shorter):
        assert short.engine.backend.context_length <= MAX_TOKENS
        assert word_problems(short, Store(tmp_path / "s.sqlite", {})) is None


# The whole


def prompts_of(count: int) -> list[str]:
    return [f"prompt {'x' * i} {i}" for i in range(count)]


@pytest.fixture(scope="module")
def llm(tiny_llama) -> LLM:
    return LLM(str(tiny_llama.folder), device="cpu", dtype="f32", context=320, threads=1, max_batch_size=6)


@pytest.fixture(scope="module", params=["ggml", pytest.param("torch", marks=pytest.mark.ci)])
def llm_of_each_backend(request, tiny_llama) -> LLM:
    llm = LLM(str(tiny_llama.folder), device="cpu", dtype="f32", context=320, threads=1, max_batch_size=6)
    llm.engine = Engine(make_backend(request.param, tiny_llama.load(), num_slots=6, context_length=320))
    return llm


def test_a_user_calibrates_a_model_by_its_path(tiny_gguf):
    stages = []
    result = taper.calibrate(
        tiny_gguf, prompts_of(10), max_kl=50.0, answer_tokens=12, progress=lambda stage, part: stages.append(stage)
    )
    assert isinstance(result, taper.Calibration)
    assert result.met
    assert result.policy.num_hidden_layers == 6
    assert LLM(str(tiny_gguf)).generate("hello", policy=DepthPolicy.from_json(result.policy.to_json())).text
    assert result.summary.conditions.kernels == str(ggml.place)
    assert result.summary.held_out.tapered_steps.kl.value > 0
    assert "validation on held-out prompts" in stages


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "a budget is missing"),
        ({"max_kl": 50.0, "answer_tokens": 1}, "answer_tokens is 1"),
        ({"max_kl": 50.0, "seed": -1}, "seed is -1"),
        ({"max_kl": 50.0, "prompts": "one text"}, "a list of prompts"),
        ({"max_kl": 50.0, "prompts": []}, "too few"),
        ({"max_kl": 50.0, "name": "x" * 101}, "at most 100"),
    ],
)
def test_arguments_out_of_range_are_rejected_with_the_rule(tiny_gguf, arguments, says):
    with pytest.raises(RequestError, match=says):
        taper.calibrate(tiny_gguf, **arguments)


def comparable(text: str) -> dict:
    """A policy without what time decides."""
    data = json.loads(text)
    for key in ("conditions", "speedup"):
        del data["provenance"][key]
    return data


def test_calibrate_finds_validates_and_resumes(llm_of_each_backend):
    llm = llm_of_each_backend
    stages: dict[str, float] = {}

    def progress(stage, part):
        stages[stage] = stages.get(stage, 0.0) + part

    options = {"max_kl": 50.0, "answer_tokens": 40, "seed": 5, "name": "mine"}
    result = calibrate(llm, prompts_of(10), progress=progress, **options)
    policy, summary = result.policy, result.summary
    assert result.met
    assert summary.verdict == "kept"
    assert policy.name == "mine"
    assert policy.model == llm.config.identity
    assert policy.mean_depth(40) < 6
    assert DepthPolicy.from_json(policy.to_json()) == policy
    assert summary.prompts.search == summary.prompts.held_out == 5
    assert len(summary.importance) == 6
    value, low, high = summary.held_out.tapered_steps.kl
    assert 0 < low <= value <= high
    assert summary.held_out.tapered_steps != summary.on_search_prompts.tapered_steps
    assert policy.provenance["model"]["sha256"] == summary.model.sha256
    assert all(done <= 1 + 1e-9 for done in stages.values())
    assert llm.engine.num_free_slots == 6
    assert policy.provenance.items() <= summary.to_json().items()

    # Again: nothing that was measured is measured again, and the same comes out.
    ran = []
    forward = llm.engine.backend.forward
    llm.engine.backend.forward = lambda batch: ran.append(len(batch.tokens)) or forward(batch)
    try:
        again = calibrate(llm, prompts_of(10), **options)
    finally:
        llm.engine.backend.forward = forward
    assert comparable(again.policy.to_json()) == comparable(policy.to_json())
    assert max(ran) <= 20  # only the clock runs: prompts and single steps


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.csv", 'id,Prompt\n1,"one, and\ntwo"\n2,three\n3,\n'),
        ("p.CSV", 'prompt\n"one, and\ntwo"\nthree\n'),
        ("p.tsv", 'answer\tprompt\nx\t"one, and\ntwo"\ny\tthree\n'),
    ],
)
def test_a_table_is_read_by_its_column(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read_prompts(tmp_path / name) == ["one, and\ntwo", "three"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("question,answer\na,b\n", "its columns are 'question', 'answer'"), ("prompt\n\n", "no prompt"), ("", "are none")],
)
def test_a_table_without_prompts_is_refused_and_never_read_as_lines(tmp_path, text, said):
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(RequestError, match=said):
        read_prompts(tmp_path / "p.csv")


def test_a_quick_look_takes_few_prompts_and_short_outputs(llm, monkeypatch):
    monkeypatch.setattr("taper.lab.calibration.run.QUICK_PROMPTS", 10)
    monkeypatch.setattr(MeasuredModel, "sampling", SamplingParams())  # examples that can be made again
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the last"}]
    stages = set()
    result = calibrate(
        llm, [*prompts_of(20), asked], max_kl=50.0, quick=True, progress=lambda stage, part: stages.add(stage)
    )
    summary = result.summary
    assert summary.prompts.search + summary.prompts.held_out == 10
    assert summary.prompts.quick
    assert len(summary.by_step.kl) <= 48
    assert summary.problems is None
    assert not any("problems" in stage for stage in stages)
    assert len(summary.examples) == 3
    for example in summary.examples:
        assert example.prompt in [*prompts_of(20), "the last"]
        for mode, written in (("full", example.full), ("taper", example.policy)):
            policy = result.policy if mode == "taper" else None
            prompt = asked if example.prompt == "the last" else example.prompt
            output = llm.generate(prompt, max_tokens=48, temperature=0, policy=policy, mode=None if policy else "full")
            assert output.text.strip().startswith(written.rstrip("\ufffd"))


@pytest.mark.parametrize("tokens", [2, 5])
def test_the_shortest_outputs_calibrate_too(llm, monkeypatch, tokens):
    """Fewer steps than the clock needs to warm up, and too few to say anything."""
    measured = MeasuredModel.cost
    monkeypatch.setattr(MeasuredModel, "cost", lambda *given: measured(*given) and COST)  # so a speed is in reach
    result = calibrate(llm, prompts_of(10), speedup=1.001, answer_tokens=tokens)
    assert result.summary.held_out.tapered_steps is None


def test_prompts_that_cannot_give_a_verdict_are_rejected_before_the_work(llm):
    stages = []
    with pytest.raises(RequestError, match="5 held-out outputs can skip layers at 25 steps; a verdict takes 30 steps"):
        calibrate(llm, prompts_of(10), max_kl=50.0, answer_tokens=6, progress=lambda stage, part: stages.append(stage))
    assert stages == []


def test_the_next_output_after_a_tapered_one_is_measured(llm_of_each_backend):
    """A prompt goes on with the output of the policy and a follow-up; full depth itself would cost nothing there."""
    llm = llm_of_each_backend
    references = [Reference((5, 6, 7), (8, 9, 10)), Reference((5, 6), (2,)), Reference((7,), (3,) * 100)]
    room = llm.engine.backend.context_length
    (first, prompt), (long, longer) = next_prompts(llm, references, room - 300)
    assert (first, long) == (references[0], references[2])
    assert prompt[: len(first.prompt_ids) + 3] == (5, 6, 7, 8, 9, 10)
    assert llm.tokenizer.decode(prompt[6:]).count(FOLLOW_UP) == 1
    assert [first for first, _ in next_prompts(llm, references, room - len(longer))] == [references[0]]
    replay = Replay(llm.engine, [Reference(prompt, tuple(range(20, 40)))])
    layers = llm.config.num_hidden_layers
    nothing = replay.after_tapered(0, DepthPolicy.full(layers), first)
    assert nothing.kl.max() < 1e-6
    assert replay.after_tapered(0, DepthPolicy.early_exit(layers, 2), first).kl.max() > 1e-4
    replay.close()


def test_no_prompt_is_both_searched_on_and_held_out(llm):
    prompts = prompts_of(12)
    ids = list(encode_prompts(llm, [*prompts, *prompts], 0, 100))
    assert len(ids) == len(set(ids)) == 12
    assert list(encode_prompts(llm, prompts, 1, 100)) != ids
    assert len(encode_prompts(llm, prompts, 0, 9)) == 9


def test_stored_scores_equal_fresh_ones(llm, tmp_path):
    references = [Reference(tuple(random_prompt(i, 9)), tuple(random_prompt(i + 9, 12))) for i in range(3)]
    parts, kl = [], []
    stage = Progress(lambda name, part: parts.append(part)).stage("scores", 6)
    for _ in range(2):
        measurements = Measurements(llm.engine, references, Store(tmp_path / "s.sqlite", {}))
        kl.append(measurements.scores(DepthPolicy.static(6, 4, [2, 3]), stage).kl)
        measurements.close()
    np.testing.assert_array_equal(*kl)
    assert parts == [0, *[1 / 6] * 6]
