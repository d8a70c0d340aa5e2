"""Paired statistics: published values, symmetries, and error rates by enumeration and simulation."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taper.errors import RequestError
from taper.lab.calibration.statistics import (
    _null_variance,
    bootstrap_difference,
    compare,
    compare_with_interim_tests,
    interim_tests,
    mcnemar,
    non_inferiority,
    wilson,
)

SIMULATIONS = 1000
PAIRS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=60)
MARGINS = st.floats(0.001, 0.5)


def outcomes(both: int, only_full: int, only_tapered: int, neither: int) -> tuple[list[bool], list[bool]]:
    cells = [(True, True)] * both + [(True, False)] * only_full + [(False, True)] * only_tapered
    full, tapered = zip(*cells, *[(False, False)] * neither, strict=True)
    return list(full), list(tapered)


# Known values


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_equals_published_values(successes, trials, low, high):
    """R. G. Newcombe, Statistics in Medicine 17 (1998), 857-872, table I, method 3."""
    estimate = wilson(successes, trials)
    assert estimate.value == successes / trials
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=5e-5)


def test_mcnemar_equals_values_by_hand_and_published_ones():
    assert mcnemar(7, 1) == 2 * (1 + 8) / 256
    assert mcnemar(3, 3) == mcnemar(0, 0) == 1
    assert mcnemar(1, 7) == mcnemar(7, 1)
    # A. Agresti, Categorical Data Analysis, section on matched pairs: approval ratings of a prime minister.
    assert mcnemar(150, 86) == pytest.approx(3.716e-05, rel=1e-3)


def tango_z(problems: int, only_full: int, only_tapered: int, margin: float) -> float:
    """The uncorrected statistic, by maximising the likelihood over a fine grid instead of by the closed form."""
    rate = np.linspace(0, (1 - margin) / 2, 2_000_001)[1:-1]
    rest = problems - only_full - only_tapered
    log_likelihood = (
        only_full * np.log(rate + margin) + only_tapered * np.log(rate) + rest * np.log(1 - 2 * rate - margin)
    )
    q = rate[log_likelihood.argmax()]
    return (only_full - only_tapered - problems * margin) / math.sqrt(problems * (2 * q + margin * (1 - margin)))


def test_variance_is_that_of_the_maximum_likelihood_rates():
    """T. Tango, Statistics in Medicine 17 (1998), 891-908, gives z = 1.709 for 1 of 44 pairs and a margin of 0.1."""
    z = (0 - 1 - 44 * 0.1) / math.sqrt(_null_variance(44, 0, 1, 0.1))
    assert z == pytest.approx(tango_z(44, 0, 1, 0.1), abs=1e-3)
    z = (1 - 0 - 44 * 0.1) / math.sqrt(_null_variance(44, 1, 0, 0.1))
    assert -z == pytest.approx(1.709, abs=5e-4)
    # M. Fagerland, S. Lydersen and P. Laake, BMC Medical Research Methodology 13 (2013), 91: 1 and 7 of 21 pairs have
    # the 95 % interval -0.517 to -0.026, at whose ends z is the quantile of the normal distribution.
    for margin in (0.026, 0.517):
        z = (7 - 1 - 21 * margin) / math.sqrt(_null_variance(21, 7, 1, margin))
        assert abs(z) == pytest.approx(1.96, abs=0.01)


def test_verdicts_on_clear_counts():
    assert non_inferiority(1000, 5, 5, 0.03) == ("holds", None)
    assert non_inferiority(1000, 0, 0, 0.03) == ("holds", None)
    assert non_inferiority(1000, 200, 50, 0.03) == ("fails", None)
    assert non_inferiority(50, 5, 2, 0.03) == ("not enough problems", None)  # 6 points lost: more would not help
    verdict, needed = non_inferiority(200, 10, 10, 0.01)
    assert verdict == "not enough problems"
    # Uncorrected: (1.645 + 0.842)² * 0.1 / 0.01² = 6183 problems in all; the correction adds 2 / 0.01.
    assert needed == pytest.approx(6183 + 200 - 200, rel=0.01)


def test_fewer_than_five_problems_give_no_verdict_and_no_interval():
    comparison = compare([True] * 4, [False] * 4, margin=0.1)
    assert comparison.difference == (-1, -1, -1)
    assert comparison.conclusion == "not enough problems: no verdict comes from fewer than 5"
    assert compare([True] * 6, [False] * 6, margin=0.1).verdict == "fails"


def test_comparison_counts_and_words():
    comparison = compare(*outcomes(40, 6, 4, 50), margin=0.1)
    assert (comparison.problems, comparison.only_full, comparison.only_tapered) == (100, 6, 4)
    assert (comparison.full, comparison.tapered) == (wilson(46, 100), wilson(44, 100))
    assert comparison.difference.value == -0.02
    assert comparison.difference.low < -0.02 < comparison.difference.high
    assert comparison.p_value == mcnemar(6, 4)
    assert comparison.conclusion == comparison.verdict == "holds"
    few = compare(*outcomes(40, 6, 4, 50), margin=0.03)
    assert few.needed is not None
    assert few.needed > 1000
    assert few.conclusion == f"not enough problems: about {round(few.needed, -2):,} more needed"
    hopeless = compare(*outcomes(40, 6, 4, 50), margin=0.02)
    assert hopeless.needed is None
    assert hopeless.conclusion.startswith("inconclusive; ")


# Bad input


@pytest.mark.parametrize(
    ("full", "tapered", "margin", "says"),
    [
        ([], [], 0.01, "number of problems"),
        ([True], [True], 0.01, "number of problems"),
        ([True, True, False], [True, False], 0.1, "same"),
        ([True, True], [True, 0.5], 0.1, r"an entry of tapered is 0\.5"),
        *(([True, False], [True, False], m, r"margin is .*\(0, 1\)$") for m in (0, 1, -0.1, math.nan, "0.1", True)),
    ],
)
def test_what_cannot_be_compared_is_rejected(full, tapered, margin, says):
    with pytest.raises(RequestError, match=says):
        compare(full, tapered, margin)


# Properties


@given(PAIRS, MARGINS)
def test_swapping_modes_flips_the_difference_and_the_order_of_problems_does_not_matter(pairs, margin):
    full, tapered = zip(*pairs, strict=True)
    comparison, swapped = compare(full, tapered, margin), compare(tapered, full, margin)
    assert comparison.difference.value == -swapped.difference.value
    assert (comparison.full, comparison.only_full) == (swapped.tapered, swapped.only_tapered)
    assert comparison.p_value == swapped.p_value
    assert {comparison.verdict, swapped.verdict} != {"fails"}
    assert compare(full[::-1], tapered[::-1], margin) == comparison


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_its_proportion_and_is_symmetric(counts):
    successes, trials = counts
    estimate, mirrored = wilson(successes, trials), wilson(trials - successes, trials)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.high > estimate.low
    assert (estimate.low, estimate.high) == pytest.approx((1 - mirrored.high, 1 - mirrored.low))


@given(PAIRS, MARGINS, MARGINS)
def test_a_larger_margin_never_makes_the_verdict_worse(pairs, one, other):
    only_full = sum(full and not tapered for full, tapered in pairs)
    only_tapered = sum(tapered and not full for full, tapered in pairs)
    rank = {"fails": 0, "not enough problems": 1, "holds": 2}
    strict, lax = (non_inferiority(len(pairs), only_full, only_tapered, margin) for margin in sorted((one, other)))
    assert rank[strict[0]] <= rank[lax[0]]
    assert all(needed is None or needed > 0 for _, needed in (strict, lax))


# Error rates


def verdict_chances(problems: int, margin: float, rates: list[float]) -> np.ndarray:
    """Exact chances of "holds" and "fails" at a true difference of -margin, for rates of `only_tapered`: [2, rates]."""
    log_factorial = np.array([math.lgamma(count + 1) for count in range(problems + 1)])
    tables = np.array([(b, c) for b in range(problems + 1) for c in range(problems + 1 - b)])
    given_tables = [non_inferiority(problems, int(b), int(c), margin)[0] for b, c in tables]
    chosen = np.array([[verdict == wanted for verdict in given_tables] for wanted in ("holds", "fails")])
    b, c = tables.T
    ways = log_factorial[problems] - log_factorial[b] - log_factorial[c] - log_factorial[problems - b - c]
    chances = []
    for rate in rates:
        logs = np.log([rate + margin, rate, max(1 - 2 * rate - margin, 1e-300)])
        chances.append(chosen @ np.exp(ways + np.stack([b, c, problems - b - c], 1) @ logs))
    return np.array(chances).T


@pytest.mark.parametrize(
    ("problems", "margin"), [(10, 0.1), (20, 0.03), (20, 0.2), (50, 0.02), (50, 0.1), (100, 0.05), (300, 0.01)]
)
def test_both_error_rates_are_at_most_5_per_cent_whatever_the_share_of_discordant_problems(problems, margin):
    rates = [1e-9, *(np.geomspace(1e-3, 1, 25) * (1 - margin) / 2)]
    assert verdict_chances(problems, margin, rates).max() <= 0.05


def simulated(problems: int, discordant: float, difference: float) -> np.ndarray:
    """Counts of problems solved by full depth alone and by the tapered mode alone: [SIMULATIONS, 2]."""
    rates = [(discordant - difference) / 2, (discordant + difference) / 2, 1 - discordant]
    return np.random.default_rng(problems).multinomial(problems, rates, SIMULATIONS)[:, :2]


def shares(problems: int, counts: np.ndarray, margin: float) -> dict[str, float]:
    verdicts = [non_inferiority(problems, int(b), int(c), margin)[0] for b, c in counts]
    return {verdict: verdicts.count(verdict) / SIMULATIONS for verdict in ("holds", "fails")}


@pytest.mark.parametrize("problems", [50, 200, 1000])
def test_simulated_verdicts_are_wrong_at_most_as_often_as_stated(problems):
    margin, error = 0.04, 3 * math.sqrt(0.05 * 0.95 / SIMULATIONS)
    at_margin = shares(problems, simulated(problems, 0.12, -margin), margin)
    assert at_margin["holds"] <= 0.05 + error
    assert at_margin["fails"] <= 0.05 + error
    assert shares(problems, simulated(problems, 0.12, 0), margin)["fails"] <= 0.05
    assert shares(problems, simulated(problems, 0.12, -2.5 * margin), margin)["holds"] <= 0.05


def test_enough_problems_give_the_right_verdict():
    """As many as are asked for suffice four times in five."""
    assert shares(1000, simulated(1000, 0.12, 0), 0.04)["holds"] > 0.95
    assert shares(1000, simulated(1000, 0.2, -0.1), 0.04)["fails"] > 0.95
    problems = 100 + non_inferiority(100, 6, 6, 0.03)[1]
    share = shares(problems, simulated(problems, 0.12, 0), 0.03)["holds"]
    assert share == pytest.approx(0.8, abs=3 * math.sqrt(0.8 * 0.2 / SIMULATIONS))


@pytest.mark.ci
@pytest.mark.parametrize("problems", [50, 200, 1000])
def test_intervals_cover_the_truth_about_as_often_as_stated(problems):
    difference, accuracy = -0.05, 0.4
    counts = simulated(problems, 0.3, difference)
    interval = cache(bootstrap_difference)
    covered = [low <= difference <= high for _, low, high in (interval(problems, *pair) for pair in counts.tolist())]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.025)
    solved = np.random.default_rng(problems).binomial(problems, accuracy, SIMULATIONS)
    covered = [low <= accuracy <= high for _, low, high in (wilson(int(count), problems) for count in solved)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.025)


def test_the_bootstrap_of_counts_is_that_of_resampled_problems():
    full, tapered = outcomes(40, 12, 5, 43)
    gains = np.array(tapered, int) - np.array(full, int)
    draws = np.random.default_rng(0).integers(0, 100, (10_000, 100))
    ends = np.quantile(gains[draws].mean(1), [0.025, 0.975])
    assert bootstrap_difference(100, 12, 5)[1:] == pytest.approx(ends, abs=0.0101)
    assert bootstrap_difference(100, 12, 5) == bootstrap_difference(100, 12, 5, seed=0)


# Interim tests


@pytest.mark.ci
@pytest.mark.parametrize(("lost", "gained", "wrong"), [(0.10, 0.05, "holds"), (0.05, 0.05, "fails")])
def test_interim_tests_keep_the_error_rates(lost, gained, wrong, monkeypatch):
    """A policy that loses exactly the margin holds, and one that loses nothing fails, in at most 5 % of 1,000 runs."""
    for name, value in {"RESAMPLES": 10, "mcnemar": lambda *_: 1.0, "wilson": lambda *_: None}.items():  # unused
        monkeypatch.setattr(f"taper.lab.calibration.statistics.{name}", value)
    verdicts = []
    for cells in np.random.default_rng(0).random((1000, 192)):  # full depth solves 55 % of the problems
        full, tapered = (cells < 0.55).tolist(), ((cells < 0.55 - lost) | (cells > 1 - gained)).tolist()
        comparison = compare_with_interim_tests(lambda n, a=full, b=tapered: (a[:n], b[:n]), len(cells), 32, 0.05)
        verdicts.append(comparison.verdict)
    assert verdicts.count(wrong) <= 50 + 2 * np.sqrt(1000 * 0.05 * 0.95)


@pytest.mark.parametrize("problems", [32, 40, 64, 192, 500, 5000])
def test_interim_tests_spend_no_more_than_the_error_and_keep_most_of_it_for_the_last(problems):
    counts, levels = zip(*interim_tests(problems, 32), strict=True)
    assert sorted({*counts, problems}) == list(counts)
    spent = [1 - level for level in levels]
    assert spent == sorted(spent)
    assert sum(spent) == pytest.approx(0.05, abs=1e-7)
    assert spent[-1] > 0.03
