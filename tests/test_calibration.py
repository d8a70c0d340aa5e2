"""Calibration on tiny models and made-up losses: each stage finds what is there, and only what is there."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_parity import make_backend, random_prompt

from taper import LLM
from taper.calibration import search
from taper.calibration.baselines import baseline_policies
from taper.calibration.calibrate import calibrate
from taper.calibration.cost import CostModel
from taper.calibration.fit import Budget, LossTable, curves, curves_of_speed, fit_quality, fit_speed
from taper.calibration.measure import Measurements
from taper.calibration.proof import free_running
from taper.calibration.references import builtin_prompts, encode_prompts, read_prompts
from taper.calibration.statistics import over_steps, ratio_estimate
from taper.calibration.store import Store
from taper.engine import Engine
from taper.errors import RequestError
from taper.policy import DepthPolicy
from taper.replay import Reference, Scores

LAYERS = 10


# Order


def additive(costs):
    """Every layer costs its own, whatever else is skipped; the same on every answer and step."""
    return lambda skipped, candidates, answers: np.array(
        [len(answers) * 4 * (sum(costs[i] for i in skipped) + costs[layer]) for layer in candidates]
    )


@given(st.permutations(range(1, LAYERS + 1)))
def test_order_is_by_cost_where_layers_do_not_interact(costs):
    steps = [4] * 12
    order, losses = search.find_order(costs, range(LAYERS), 6, steps, additive(costs))
    assert [costs[layer] for layer in order] == [1, 2, 3, 4, 5, 6]
    assert losses == pytest.approx([1, 3, 6, 10, 15, 21])


def test_look_ahead_finds_a_pair_that_is_cheap_together():
    """Layer 0 is cheapest alone, but 1 and 2 hardly hurt together."""
    table = {(0,): 1.0, (1,): 1.01, (2,): 1.02, (0, 1): 4.0, (0, 2): 4.0, (1, 2): 1.1}

    def measure(skipped, candidates, answers):
        keys = [tuple(sorted(skipped | {layer})) for layer in candidates]
        return np.array([len(answers) * table.get(key, 9.0 + len(key)) for key in keys])

    order, losses = search.find_order([1.0, 1.01, 1.02], range(3), 2, [1] * 9, measure)
    assert order == [1, 2]
    assert losses == pytest.approx([1.01, 1.1])


def test_search_takes_the_first_steps_of_some_answers():
    references = [Reference((1, 2), tuple(range(3, 3 + n))) for n in (1, 2, 90)]
    assert [len(each.answer_ids) for each in search.first_steps(references, 30)] == [2, 31]


# Budget and curve


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "no budget"),
        ({"max_kl": 0.0}, "above 0"),
        ({"max_kl": math.nan}, "above 0"),
        ({"min_agreement": 1.5}, "(0, 1]"),
        ({"max_nll_increase": -1.0}, "above 0"),
        ({"speedup": 1.0}, "above 1"),
        ({"speedup": math.inf}, "at most 100"),
        ({"speedup": 1.2, "max_kl": 0.1}, "cannot both"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(given, says):
    with pytest.raises(RequestError) as error:
        Budget(**given)
    assert says in str(error.value)


def made_up(policy: DepthPolicy, tokens: int = 64, answers: int = 30, slope: float = 0.1) -> Scores:
    """KL of `slope` a skipped layer, twice as much in the first half of an answer; agreement and NLL follow it."""
    step = np.tile(np.arange(tokens), answers)
    depth = np.array([policy.depth(int(i)) for i in step])
    spread = np.repeat(np.random.default_rng(0).uniform(0.9, 1.1, answers), tokens)
    kl = slope * (LAYERS - depth) * np.where(step < tokens // 2, 2.0, 1.0) * spread
    nll_full = np.full(len(step), 2.0)
    agreement = 1 - kl / 4
    return Scores(np.repeat(np.arange(answers), tokens), step, depth, kl, agreement, nll_full + kl, nll_full)


def made_up_table(slope: float = 0.1) -> LossTable:
    measured = {d: made_up(DepthPolicy.static(LAYERS, d, range(6)), slope=slope) for d in (9, 7, 4)}
    return LossTable(measured, LAYERS, 64)


def test_loss_table_predicts_curves_from_constant_depths():
    for policy in (DepthPolicy.static(LAYERS, 6, range(6)), DepthPolicy(LAYERS, "linear", 4, tuple(range(6)), span=32)):
        predicted, over_all = made_up_table().predict(policy)
        found = over_steps(made_up(policy))
        assert predicted["kl"].value == pytest.approx(found["tapered steps"]["kl"].value, rel=0.02)
        assert predicted["agreement"].value == pytest.approx(found["tapered steps"]["agreement"].value, rel=0.02)
        assert predicted["nll_increase"].value == pytest.approx(found["tapered steps"]["nll_increase"].value, rel=0.02)
        assert over_all == pytest.approx(found["all steps"]["kl"].value, rel=0.03)


@pytest.mark.parametrize("slope", [0.1, 0.15])
@pytest.mark.parametrize("budget", [Budget(max_kl=0.25), Budget(min_agreement=0.9), Budget(max_nll_increase=12.0)])
def test_quality_budget_is_kept_and_used_up(budget, slope):
    """Also where the table predicts too little: it is corrected by what is replayed."""
    every = curves(range(6), 6, LAYERS, 64)
    policy = fit_quality(budget, every, made_up_table(), 64, lambda policy: made_up(policy, slope=slope))
    kept = budget.worst(over_steps(made_up(policy, slope=slope))["tapered steps"], surely=True)
    assert 0.5 < kept <= 1
    shallower = [each for each in every if each.mean_depth(64) < policy.mean_depth(64) - 0.7]
    for each in shallower[:: len(shallower) // 8]:
        assert budget.worst(over_steps(made_up(each, slope=slope)).get("tapered steps"), surely=True) > 1


def test_a_budget_nothing_keeps_gives_the_nearest():
    every = curves(range(6), 6, LAYERS, 64)
    budget = Budget(max_kl=0.01)
    policy = fit_quality(budget, every, made_up_table(), 64, made_up)
    assert policy.min_depth == LAYERS - 1
    assert budget.worst(over_steps(made_up(policy))["tapered steps"]) > 1


def test_too_few_tapered_steps_prove_nothing():
    late = DepthPolicy(LAYERS, "constant", 4, tuple(range(6)), start=63)
    found = over_steps(made_up(late, answers=8))
    assert "tapered steps" not in found
    assert Budget(max_kl=1.0).worst(found.get("tapered steps")) == math.inf


@given(st.floats(1.02, 1.5))
def test_policies_of_a_speed_are_just_as_fast_as_asked(speedup):
    cost = CostModel(fixed_ms=1.0, layer_ms=0.5)
    every = curves_of_speed(range(6), 6, LAYERS, 64, speedup, cost)
    assert all(speedup <= cost.speedup(policy, 64) for policy in every)
    assert min(cost.speedup(policy, 64) for policy in every) < speedup * 1.02
    assert {policy.curve for policy in every} >= {"linear", "power"}


def test_a_speed_out_of_reach_is_refused_with_what_can_be_had():
    with pytest.raises(RequestError, match=r"most .* 2\.0"):
        curves_of_speed(range(6), 6, LAYERS, 64, 3.0, CostModel(1.0, 0.5))


def test_the_speed_is_reached_where_it_hurts_least():
    """Late steps cost half as much here, so the fall comes late."""
    every = curves_of_speed(range(6), 6, LAYERS, 64, 1.15, CostModel(1.0, 0.5))
    policy = fit_speed(every, made_up_table(), made_up)
    best = min(float(made_up(each).kl.mean()) for each in every)
    assert float(made_up(policy).kl.mean()) <= best * 1.05


def test_cost_model_is_a_straight_line_in_depth():
    cost = CostModel(fixed_ms=2.0, layer_ms=0.5)
    policy = DepthPolicy.static(8, 4, range(4))
    assert cost.answer_ms(policy, 11) == pytest.approx(10 * 4.0)
    assert cost.speedup(policy, 11) == pytest.approx(6.0 / 4.0)
    assert cost.speedup(policy, 1) == 1.0


# Statistics


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng, inside = np.random.default_rng(3), 0
    for seed in range(200):
        values = rng.normal(2.0, 1.0, (40, 5)).sum(-1)
        found = ratio_estimate(values, np.full(40, 5.0), seed)
        inside += found.low <= 2.0 <= found.high
    assert 0.88 <= inside / 200 <= 0.99


def test_answers_are_resampled_whole():
    """Steps of one answer are alike: an interval over steps alone would be far too narrow."""
    sums = np.repeat([0.0, 100.0], 10)
    found = ratio_estimate(sums, np.full(20, 100.0))
    assert found.high - found.low > 0.3


def test_free_running_figures():
    own = [Reference((1,), (5, 6, 7, 8) * 3), Reference((2,), (5, 6))]
    scores = Scores(*(np.zeros(14) for _ in range(6)), np.full(14, 0.5))
    scores = replace(scores, reference=np.array([0] * 12 + [1] * 2))
    found = free_running(own, scores, own, scores)
    assert found["nll"]["policy"].value == pytest.approx(0.5)
    assert found["length"]["full"].value == 7
    assert found["repetition"]["policy"].value == pytest.approx((5 / 9) / 2)  # 9 4-grams, 4 different ones


# Baselines


@given(st.integers(6, 40), st.data())
def test_baselines_have_the_mean_depth_asked_for(layers, data):
    depth = data.draw(st.integers(layers // 2 + 2, layers - 1))
    policies = baseline_policies(layers, depth, list(range(layers)), 49)
    assert {name.split(" (")[0].rstrip(" 123") for name in policies} == {
        "middle first",
        "early exit",
        "ShortGPT",
        "Unified",
        "random order",
        "SkipDecode",
    }
    for name, policy in policies.items():
        assert policy.mean_depth(49) == pytest.approx(depth, abs=0.6 if name == "SkipDecode" else 0), name
    assert policies["ShortGPT"].retained_layers(1) == tuple(range(layers - depth, layers))
    assert policies["early exit"].retained_layers(1) == tuple(range(depth))
    spread = policies["Unified (evenly spread)"].retained_layers(1)
    assert spread[0] == 0
    assert spread[-1] == layers - 1


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


def test_a_store_that_is_none_is_refused(tmp_path):
    (tmp_path / "s.sqlite").write_bytes(b"no data base" * 100)
    with pytest.raises(RequestError, match=r"s\.sqlite"):
        Store(tmp_path / "s.sqlite", {})
    with pytest.raises(RequestError, match="cannot keep"):
        Store(tmp_path / "s.sqlite" / "below", {})


def test_prompt_files_in_each_form(tmp_path):
    file = tmp_path / "p"
    file.write_text('\n{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}], "id": 7}\n')
    assert read_prompts(file) == ["a", [{"role": "user", "content": "b"}]]
    file.write_text("one\r\n\n two é \n")
    assert read_prompts(file) == ["one", "two é"]


def test_builtin_prompts_are_many_and_different():
    prompts = builtin_prompts()
    assert len({*prompts}) == len(prompts) >= 64


# The whole


@pytest.fixture(scope="module", params=["ggml", "torch"])
def llm(request, tiny_llama):
    llm = LLM(str(tiny_llama.folder), device="cpu", dtype="f32", context=256, threads=1, max_batch_size=6)
    if request.param == "torch":
        llm.engine = Engine(make_backend("torch", tiny_llama.load(), num_slots=6, context_length=256))
    return llm


def prompts_of(count: int) -> list[str]:
    return [f"prompt {'x' * i} {i}" for i in range(count)]


def comparable(text: str) -> dict:
    """A policy without what time decides."""
    data = json.loads(text)
    for key in ("conditions", "speedup"):
        del data["provenance"][key]
    return data


def test_calibrate_finds_proves_and_resumes(llm, tmp_path):
    stages: dict[str, float] = {}

    def progress(stage, part):
        stages[stage] = stages.get(stage, 0.0) + part

    options = {"answer_tokens": 40, "seed": 5, "name": "mine"}
    found = calibrate(llm, prompts_of(10), Budget(max_kl=50.0), progress=progress, **options)
    policy, summary = found.policy, found.summary
    assert found.met
    assert policy.name == "mine"
    assert policy.model == llm.config.identity
    assert policy.mean_depth(40) < 6
    assert DepthPolicy.from_json(policy.to_json()) == policy
    assert summary["prompts"]["search"] == summary["prompts"]["held_out"] == 5
    assert len(summary["importance"]) == 6
    value, low, high = summary["held_out"]["tapered steps"]["kl"]
    assert 0 < low <= value <= high
    assert summary["held_out"]["tapered steps"] != summary["on_search_prompts"]["tapered steps"]
    assert policy.provenance["model"]["sha256"] == summary["model"]["sha256"]
    assert all(done <= 1 + 1e-9 for done in stages.values())
    assert llm.engine.free_slots == 6
    json.dumps(summary)

    # Again: nothing that was measured is measured again, and the same comes out.
    ran = []
    forward = llm.engine.backend.forward
    llm.engine.backend.forward = lambda batch: ran.append(len(batch.tokens)) or forward(batch)
    try:
        again = calibrate(llm, prompts_of(10), Budget(max_kl=50.0), **options)
    finally:
        llm.engine.backend.forward = forward
    assert comparable(again.policy.to_json()) == comparable(policy.to_json())
    assert max(ran) <= 20  # only the clock runs: prompts and single steps


@pytest.mark.parametrize("tokens", [2, 5])
def test_the_shortest_answers_calibrate_too(llm, tokens):
    """Fewer steps than the clock needs to warm up, and too few to prove anything."""
    found = calibrate(llm, prompts_of(8), Budget(max_kl=50.0), answer_tokens=tokens)
    assert not found.met
    assert "tapered steps" not in found.summary["held_out"]


def test_search_and_proof_share_no_prompt(llm):
    prompts = prompts_of(12)
    ids = encode_prompts(llm, [*prompts, *prompts], 0, 100)
    assert len(ids) == len(set(ids)) == 12
    assert encode_prompts(llm, prompts, 1, 100) != ids
    assert len(encode_prompts(llm, prompts, 0, 9)) == 9


def test_baselines_are_measured_beside_the_order_found(llm):
    found = calibrate(llm, prompts_of(8), Budget(max_kl=50.0), answer_tokens=12, baselines=True)
    frontier = found.summary["frontier"]
    assert frontier["prompts"] == "held out"
    assert set(frontier["kl"]) == {"measured order", *baseline_policies(6, 5, [0] * 6, 13)}
    for method, by_depth in frontier["kl"].items():
        for depth, (value, low, high) in by_depth.items():
            assert low <= value <= high, (method, depth)


def test_stored_figures_equal_fresh_ones(llm, tmp_path):
    references = [Reference(tuple(random_prompt(i, 9)), tuple(random_prompt(i + 9, 12))) for i in range(3)]
    policy, ticks = DepthPolicy.static(6, 4, [2, 3]), []
    found = []
    for _ in range(2):
        measurements = Measurements(llm.engine, references, Store(tmp_path / "s.sqlite", {}))
        found.append(measurements.scores(policy, lambda: ticks.append(1)))
        measurements.close()
    np.testing.assert_array_equal(found[0].kl, found[1].kl)
    assert len(ticks) == 6
