"""The compared methods: mean depth as asked for, nested layers, and the layers that each method keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from comparison import FULL, RANDOM_SEEDS, closest_policy, mean_depth, methods
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import with_adapters

from taper.errors import PolicyError, RequestError
from taper.policy import DepthPolicy

pytestmark = pytest.mark.ci

MEASURED, MIDDLE_FIRST = "D3, measured order", "D3, middle first (our reading)"
RANDOM = [f"D3, random order {i + 1}" for i in range(RANDOM_SEEDS)]
CONSTANT = ["early exit", "ShortGPT", "Unified (evenly spread)"]
FIRST_AND_LAST = [MIDDLE_FIRST, *RANDOM, "SkipDecode", "HSD (our reading)", "Unified (evenly spread)"]
ARGUMENTS = {"depth": 8, "lengths": [30, 60], "measured_order": range(1, 9), "influence": [0.0] * 12}
LENGTHS = st.lists(st.integers(1, 150), min_size=1, max_size=12).filter(lambda lengths: max(lengths) >= 30)


@st.composite
def comparisons(draw) -> tuple[int, float, list[int], list[int], list[float], dict[str, DepthPolicy]]:
    layers = draw(st.integers(6, 48))
    depth = draw(st.floats(layers / 2, layers - 1))
    order = draw(st.permutations(range(1, layers)))
    influence = draw(st.lists(st.floats(0, 1), min_size=layers, max_size=layers))
    lengths = draw(LENGTHS)
    return layers, depth, lengths, order, influence, methods(layers, depth, lengths, order, influence, pytest.fail)


@settings(max_examples=25)
@given(comparisons())
def test_methods_are_nested_and_have_the_mean_depth_asked_for_and_the_layers_they_promise(comparison):
    layers, depth, lengths, order, influence, policies = comparison
    assert set(policies) == {FULL, MEASURED, *FIRST_AND_LAST, *CONSTANT}
    assert policies.pop(FULL) == DepthPolicy.full(layers)
    for name, policy in policies.items():
        written = np.mean([policy.depth(step) for length in lengths for step in range(1, length)])
        assert mean_depth(policy, lengths) == pytest.approx(written)
        assert abs(written - depth) <= 0.5, name
        before = set(range(layers))
        for step in range(1, max(lengths)):
            now = set(policy.retained_layers(step))
            assert now <= before, name
            before = now
        assert 0 in before or name == "ShortGPT"
        assert layers - 1 in before or name in ("ShortGPT", "early exit", MEASURED)
    whole, lowest = round(depth), policies[MEASURED].depth(149)
    assert [policies[name].depth(step) for name in CONSTANT for step in (1, 149)] == [whole] * 6
    assert policies["early exit"].retained_layers(1) == tuple(range(whole))
    assert policies[MEASURED].retained_layers(149) == tuple(sorted({0, *order[layers - lowest :]}))
    skipped = set(range(layers)) - set(policies["ShortGPT"].retained_layers(1))
    assert sorted(influence[layer] for layer in skipped) == sorted(influence)[: layers - whole]


@settings(max_examples=25)
@given(st.integers(6, 48), st.data())
def test_hsd_never_skips_two_neighbours_before_half_of_the_layers_are_gone_and_spreads_the_rest(layers, data):
    policy = methods(layers, layers - 1, [100], range(1, layers), [0.0] * layers, print)["HSD (our reading)"]
    retained = policy.retained_at(data.draw(st.integers(3, layers)))
    gaps = np.diff(retained)
    # Levels are powers of two, and the last layer may come before the next of its level.
    level = 2 ** int(np.ceil(np.log2(gaps.max())))
    assert set(range(0, layers, level)) <= set(retained)
    assert not level > 2 or set(retained) - {layers - 1} <= set(range(0, layers, level // 2))


def test_d3_policies_differ_in_their_order_alone():
    policies = methods(30, 26.5, [64, 128, 200], list(range(2, 28)), [0.0] * 30, pytest.fail)
    assert len({policies[name].schedule.alpha for name in (MEASURED, MIDDLE_FIRST, *RANDOM)}) == 1
    assert len({policies[name].skip_order for name in (MEASURED, MIDDLE_FIRST, *RANDOM)}) == 2 + RANDOM_SEEDS
    assert mean_depth(policies[MEASURED], [64, 128, 200]) == pytest.approx(26.5, abs=0.05)


def test_d3_with_adapters_skips_the_layers_that_have_them_and_differs_in_nothing_else():
    order, lengths = list(range(2, 28)), [64, 128, 200]
    adapters = with_adapters(DepthPolicy.d3(30, 0.99, min_depth=23, skip_order=order), 16).adapters
    for depth in (26.5, 24.5):
        policies = methods(30, depth, lengths, order, [0.0] * 30, pytest.fail, adapters)
        healed = policies["D3, measured order, adapters"]
        assert healed == replace(policies[MEASURED], adapters=adapters)
        assert mean_depth(healed, lengths) == pytest.approx(depth, abs=0.05)
        assert healed.depth(199) >= 24
    lines = []
    deeper = methods(30, 22, lengths, order, [0.0] * 30, lines.append, adapters)
    assert deeper == methods(30, 22, lengths, order, [0.0] * 30, print)
    assert lines == ["D3, measured order, adapters is left out at mean depth 22: the adapters go down to 24 layers"]


def test_closest_policy_is_the_best_of_all():
    lengths = [5, 40, 41]
    for depth in (8.2, 9.0, 10.7):
        policies = [DepthPolicy.skipdecode(12, 6, span) for span in range(1, 200)]
        best = min(abs(mean_depth(policy, lengths) - depth) for policy in policies)
        policy = closest_policy(lambda span: DepthPolicy.skipdecode(12, 6, span), 199, depth, lengths)
        assert abs(mean_depth(policy, lengths) - depth) == best


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 1.5}, "depth is 1.5"),
        ({"depth": 11.5}, r"depth is 11\.5; it must be a number in \[2, 11\]"),
        ({"lengths": []}, "no output has two tokens"),
        ({"lengths": [1, 1]}, "no output has two tokens"),
    ],
)
def test_what_cannot_be_compared_is_rejected(arguments, message):
    with pytest.raises(RequestError, match=message):
        methods(12, **(ARGUMENTS | arguments), log=print)
    with pytest.raises(PolicyError, match="twice"):
        methods(12, **(ARGUMENTS | {"measured_order": [3, 3, 4, 5]}), log=print)


@pytest.mark.parametrize(
    ("arguments", "left_out"),
    [
        ({"measured_order": [3, 4]}, {MEASURED: "10.00"}),
        ({"depth": 6.4, "lengths": [2]}, {"SkipDecode": "7.00", "HSD (our reading)": "7.00"}),
    ],
)
def test_a_method_that_cannot_come_near_the_depth_is_left_out_and_logged(arguments, left_out):
    lines = []
    policies = methods(12, **(ARGUMENTS | arguments), log=lines.append)
    depth = (ARGUMENTS | arguments)["depth"]
    assert set(policies) == {FULL, MEASURED, *FIRST_AND_LAST, *CONSTANT} - set(left_out)
    assert lines == [
        f"{name} is left out at mean depth {depth:g}: {real} is the closest that it comes"
        for name, real in left_out.items()
    ]
