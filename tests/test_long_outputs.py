"""Long outputs: figures by ranges of steps, the rule for defaults, and what follows for who gets which policy."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from taper import DepthPolicy
from taper.lab.calibration.long_outputs import MAX_TOKENS, failures, summarised
from taper.lab.calibration.replay import Reference, Scores
from taper.lab.calibration.statistics import Difference, Estimate, LossEstimate, SolvedProblems, paired_ratios
from taper.models.policies import LONG_OUTPUT, fastest_holding, holds_in_long_outputs, measured_tokens

STOP = 9
POLICY = DepthPolicy.static(6, 4, [2, 3])


def scores_of(outputs, agreement, kl, nll, depth=4):
    """Scores by functions of the number of an output and the step."""
    places = [(i, step) for i, output in enumerate(outputs) for step in range(len(output.completion_ids))]
    reference, step = np.array(places).T
    columns = (np.array([metric(i, at) for i, at in places], float) for metric in (kl, agreement, nll, nll))
    return Scores(reference, step, np.full(len(step), depth), *columns)


def outputs_of(lengths, ends):
    """Outputs of different tokens, two to a prompt; some end with the stop id."""
    return [
        Reference((1 + number // 2,), (*range(100, 100 + length - 1), STOP if end else 50))
        for number, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]


def test_figures_are_those_of_their_steps_and_prompts():
    full = outputs_of([200] * 12, [True] * 12)
    own = outputs_of([300] * 12, [True, False] * 6)
    scores = scores_of(full, lambda i, at: at < 64, lambda i, at: at // 64, lambda i, at: 1.0)
    own_scores = scores_of(own, lambda i, at: 1, lambda i, at: 0, lambda i, at: 1.5 if at < 128 else 3.0)
    found = summarised(full, scores, own, own_scores, MAX_TOKENS, {STOP})
    assert (found.prompts, found.outputs) == (6, 12)
    assert [(part.first, part.end, part.outputs) for part in found.ranges[:4]] == [
        (0, 64, 12),
        (64, 128, 12),
        (128, 256, 12),
        (256, 512, 0),
    ]
    assert found.ranges[0].agreement == (1, 1, 1)
    assert found.ranges[1].agreement == (0, 0, 0)
    assert found.ranges[2].kl.value == pytest.approx(np.mean([at // 64 for at in range(128, 200)]), rel=1e-5)
    assert found.ranges[1].nll.difference == (0.5, 0.5, 0.5)
    assert found.ranges[2].nll.difference == (2, 2, 2)
    assert found.ranges[3].nll is None  # full depth has no such step
    assert found.tokens.difference == (100, 100, 100)
    assert found.ended.policy == (0.5, 0.5, 0.5)
    assert found.ended.full == (1, 1, 1)


def test_circles_are_outputs_whose_four_grams_come_again():
    own = [Reference((prompt,), (1, 2, 3, 4) * 30) for prompt in range(6)]
    full = [Reference((prompt,), tuple(range(120))) for prompt in range(6)]
    nothing = [lambda i, at: 0] * 3
    found = summarised(full, scores_of(full, *nothing), own, scores_of(own, *nothing), 128, {STOP})
    assert found.circles.policy.value == 1
    assert found.circles.full.value == 0
    assert found.ranges[-1].end == 128


def test_intervals_resample_prompts_and_differences_are_paired():
    rng = np.random.default_rng(0)
    full = rng.normal(10, 5, 40)
    found = paired_ratios(full + 1, np.ones(40), full, np.ones(40))
    assert found.difference == pytest.approx((1, 1, 1))  # although each alone varies
    assert found.policy.low < found.policy.value - 1
    few = paired_ratios(
        np.array([1.0, 0, 0]), np.array([1.0, 0, 0]), np.ones(3), np.ones(3)
    )  # resamples without a step
    assert few.policy == (1, 1, 1)


def holding(**changed):
    """Arguments of `failures` for a policy that is as good as full depth."""
    none = Difference(*[Estimate(0.5, 0.4, 0.6)] * 2, Estimate(0.0, -0.01, 0.01))
    full = outputs_of([1024] * 12, [True] * 12)
    scores = scores_of(full, *[lambda i, at: 1] * 3)
    long = summarised(full, scores, full, scores, MAX_TOKENS, {STOP})
    long = replace(long, **{name: value for name, value in changed.items() if name in vars(long)})
    problems = changed.get("problems", SolvedProblems(none.policy, none.full, Estimate(0, -0.07, 0.07), 200))
    after = changed.get("after", LossEstimate(*[Estimate(0.05, 0.04, 0.06)] * 3))
    return long, problems, after


def worse(low, high):
    return Difference(*[Estimate(0.5, 0.4, 0.6)] * 2, Estimate((low + high) / 2, low, high))


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({}, []),
        ({"max_tokens": 512}, ["length"]),
        ({"ended": worse(-0.11, 0.05)}, ["ending"]),
        ({"ended": worse(-0.09, 0.5)}, []),
        ({"circles": worse(0, 0.06)}, ["circles"]),
        ({"circles": worse(-0.4, 0.04)}, []),
        ({"problems": None}, ["word problems"]),
        (
            {"problems": SolvedProblems(Estimate(0, 0, 0), Estimate(0, 0, 0), Estimate(-0.02, -0.09, 0.02), 99)},
            ["word problems"],
        ),
        ({"after": None}, ["next output"]),
        ({"after": LossEstimate(*[Estimate(0.08, 0.05, 0.11)] * 3)}, ["next output"]),
        ({"ranges": []}, ["likelihood"]),
    ],
)
def test_the_rule_asks_for_each_thing_to_be_shown(changed, names):
    assert failures(*holding(**changed)) == names


def test_the_likelihood_counts_where_outputs_are_longest():
    long, problems, after = holding()
    last = replace(long.ranges[-1], nll=worse(0.0, 0.11))
    assert failures(replace(long, ranges=[*long.ranges[:-1], last]), problems, after) == ["likelihood"]
    first = replace(long.ranges[0], nll=worse(0.5, 0.6))
    assert failures(replace(long, ranges=[first, *long.ranges[1:]]), problems, after) == []


def measured(policy, found, **more):
    return replace(policy, provenance={"long_outputs": {"failures": found, "max_tokens": MAX_TOKENS}, **more})


def test_a_default_is_the_fastest_policy_that_was_shown_to_hold():
    deep, shallow = DepthPolicy.static(6, 5, [2]), POLICY
    assert LONG_OUTPUT == MAX_TOKENS
    assert fastest_holding([deep, shallow]) is None  # not measured
    assert fastest_holding([measured(deep, []), measured(shallow, ["ending"])]).min_depth == 5
    assert fastest_holding([measured(deep, []), measured(shallow, [])]).min_depth == 4
    assert not holds_in_long_outputs(replace(deep, provenance={"long_outputs": {"failures": "none"}}))
    assert not holds_in_long_outputs(replace(deep, provenance={"long_outputs": 3}))


def test_the_length_that_quality_was_measured_at_is_known():
    assert measured_tokens(POLICY) is None
    assert measured_tokens(replace(POLICY, provenance={"answer_tokens": 128})) == 128
    assert measured_tokens(measured(POLICY, [], answer_tokens=128)) == MAX_TOKENS
    assert measured_tokens(replace(POLICY, provenance=json.loads('{"answer_tokens": "many"}'))) is None
