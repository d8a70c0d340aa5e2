"""Full depth against a tapered mode on the same problems: accuracies, their difference, and whether it is small enough.

Everything follows from four counts of problems: solved by both modes, by full depth alone, by the tapered mode alone,
and by neither. Problems are taken as independent of each other. The verdict comes from a score test with known error
rates; the bootstrap interval is for the eye, as it has no width if no problem tells the modes apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from ..calibration.statistics import LEVEL, RESAMPLES, Estimate
from ..errors import RequestError, flag, number, whole_number

_LEAST_ERROR = 1e-9  # of a look; a test without any would need infinitely many problems
POWER = 0.8  # chance that the problems asked for suffice, if the observed rates are the true ones

Verdict = Literal["holds", "fails", "not enough problems"]


@dataclass(frozen=True)
class PairedComparison:
    """Full depth and a tapered mode on the same problems."""

    problems: int
    full: Estimate  # accuracy, 0 to 1, with its Wilson interval
    tapered: Estimate
    difference: Estimate  # tapered - full, with its paired bootstrap interval
    only_full: int  # problems that full depth alone solves
    only_tapered: int  # problems that the tapered mode alone solves
    p_value: float  # McNemar's exact two-sided test: both modes are equally accurate
    margin: float  # the loss of accuracy that would be accepted, 0 to 1
    verdict: Verdict
    needed: int | None  # how many more problems; None: there is a verdict, or no number would do

    @property
    def conclusion(self) -> str:
        """The verdict in words, with the number of problems to two digits."""
        if self.verdict != "not enough problems":
            return self.verdict
        if self.needed is None:
            return "cannot be told; at the observed difference, more problems would not show that it holds"
        return f"not enough problems: about {float(f'{self.needed:.2g}'):,.0f} more needed"


def compare(
    full: Sequence[bool], tapered: Sequence[bool], margin: float, seed: int = 0, level: float = LEVEL
) -> PairedComparison:
    """Compare two modes; `full[i]` and `tapered[i]` say whether each of them solved problem i, both [problems].

    The verdict is at the one-sided `level`; the intervals are always 95 %.

    Raises:
        RequestError: the modes differ in their number of problems, there are fewer than two of them, an entry is not
            a bool, or `margin` or `level` is not in (0, 1).
    """
    problems = len(full)
    if len(tapered) != problems:
        raise RequestError(
            f"full depth has {problems} problems and the tapered mode {len(tapered)}; both must have the same ones"
        )
    whole_number("the number of problems", problems, 2)
    solved_by_full = np.array([flag("an entry of full", entry) for entry in full])
    solved_by_tapered = np.array([flag("an entry of tapered", entry) for entry in tapered])
    only_full = int((solved_by_full & ~solved_by_tapered).sum())
    only_tapered = int((solved_by_tapered & ~solved_by_full).sum())
    verdict, needed = non_inferiority(problems, only_full, only_tapered, margin, level)
    return PairedComparison(
        problems=problems,
        full=wilson(int(solved_by_full.sum()), problems),
        tapered=wilson(int(solved_by_tapered.sum()), problems),
        difference=bootstrap_difference(problems, only_full, only_tapered, seed),
        only_full=only_full,
        only_tapered=only_tapered,
        p_value=mcnemar(only_full, only_tapered),
        margin=float(margin),
        verdict=verdict,
        needed=needed,
    )


def compare_in_looks(
    ask: Callable[[int], tuple[Sequence[bool], Sequence[bool]]], problems: int, first: int, margin: float, seed: int = 0
) -> PairedComparison:
    """Compare on more and more problems until there is a verdict, or all are used; `ask(n)` answers the first n.

    However often it looks, "holds" is wrong in at most 5 % of cases, and so is "fails".
    """
    counts = looks(problems, first)
    level_of_fails = 1 - (1 - LEVEL) / len(counts)  # the same at each look (Bonferroni), to give up early
    for count, level in counts:
        full, tapered = ask(count)
        comparison = compare(full, tapered, margin, seed, level)
        against = compare(full, tapered, margin, seed, level_of_fails)
        if against.verdict == "fails":
            comparison = against
        if comparison.verdict != "not enough problems":
            break
    return comparison


def wilson(successes: int, trials: int, level: float = LEVEL) -> Estimate:
    """A proportion and its score interval: (p + z²/2n ± z sqrt(p (1 - p) / n + z²/4n²)) / (1 + z²/n).

    E. B. Wilson, Journal of the American Statistical Association 22 (1927), 209-212.

    Raises:
        RequestError: there is no trial, there are more successes than trials, or `level` is not in (0, 1).
    """
    trials = whole_number("trials", trials, 1)
    share = whole_number("successes", successes, 0, trials) / trials
    z = NormalDist().inv_cdf((1 + number("level", level, 0, 1, above=True, below=True)) / 2)
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2) / scale
    # Rounding must not leave the proportion outside of its own interval at 0 and 1.
    return Estimate(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))


def bootstrap_difference(problems: int, only_full: int, only_tapered: int, seed: int = 0) -> Estimate:
    """Accuracy of the tapered mode less that of full depth, and its percentile interval when problems are resampled.

    Resampling problems with replacement draws the counts of the cells from a multinomial distribution, so these are
    drawn. B. Efron and R. Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    cells = np.array([only_full, only_tapered, problems - only_full - only_tapered])
    draws = np.random.default_rng(seed).multinomial(problems, cells / problems, RESAMPLES)  # [RESAMPLES, 3]
    low, high = np.quantile((draws[:, 1] - draws[:, 0]) / problems, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate((only_tapered - only_full) / problems, float(low), float(high))


def mcnemar(only_full: int, only_tapered: int) -> float:
    """The p-value of McNemar's exact two-sided test: 2 P(X <= the smaller count), X ~ Binomial(both counts, 1/2).

    Q. McNemar, Psychometrika 12 (1947), 153-157; the exact form is the sign test.
    """
    discordant = only_full + only_tapered
    tail = sum(math.comb(discordant, count) for count in range(min(only_full, only_tapered) + 1))
    return float(min(1.0, 2 * tail / 2**discordant))


def non_inferiority(
    problems: int, only_full: int, only_tapered: int, margin: float, level: float = LEVEL
) -> tuple[Verdict, int | None]:
    """Whether the tapered mode's accuracy is less than `margin` below that of full depth; how many more problems.

    "holds" if the one-sided bound of the difference, of 95 % unless `level` says otherwise, lies above -margin, "fails"
    if the one on the other side lies below it, else "not enough problems". The test is the score test of paired
    proportions: with n problems, b that full depth alone solves and c that the tapered mode alone solves,

        z = (b - c - n margin ± 1) / sqrt(n (2 q + margin (1 - margin)))

    where q is the likeliest rate of c if the difference is -margin: T. Tango, Statistics in Medicine 17 (1998),
    891-908. The 1 always weighs against a verdict; it is Edwards's continuity correction of McNemar's test, to which
    this one comes down at margin 0. It keeps both error rates below 5 % for margins up to 0.2, whatever the share of
    problems that tell the modes apart; without it they reach 9 % (300 problems, margin 0.01).

    The number of problems is what the same test needs, at the observed rates, to say "holds" four times in five, less
    those there are: J. Nam, Biometrics 53 (1997), 1422-1430. It is None with a verdict, and if the observed
    difference is not above -margin, where more problems would not help.

    Raises:
        RequestError: `margin` or `level` is not in (0, 1).
    """
    margin = number("margin", margin, 0, 1, above=True, below=True)
    z = NormalDist().inv_cdf(number("level", level, 0, 1, above=True, below=True))
    surplus = only_full - only_tapered - problems * margin
    variance = _null_variance(problems, only_full, only_tapered, margin)
    if surplus + 1 <= -z * math.sqrt(variance):
        return "holds", None
    if surplus - 1 >= z * math.sqrt(variance):
        return "fails", None
    distance = -surplus / problems  # of the observed difference from -margin
    if distance <= 0:
        return "not enough problems", None
    rate = (only_full + only_tapered) / problems
    spread = z * math.sqrt(variance / problems) + NormalDist().inv_cdf(POWER) * math.sqrt(
        rate - ((only_full - only_tapered) / problems) ** 2
    )
    # N * distance - 1 = spread * sqrt(N)
    total = ((spread + math.sqrt(spread**2 + 4 * distance)) / (2 * distance)) ** 2
    return "not enough problems", math.ceil(total) - problems


def looks(problems: int, first: int) -> list[tuple[int, float]]:
    """After how many problems to look at a result, doubling from `first` on; and the level of "holds" at each look.

    Of the error of 5 % the looks up to a share t of the problems spend 2 - 2 Phi(1.96 / sqrt(t)) together, as in
    K. Lan and D. DeMets, Biometrika 70 (1983), 659-663: early looks next to nothing, so that the last one needs hardly
    more problems than if it were the only one. Each look takes what is newly spent, whatever earlier ones saw.
    """
    counts, normal, spent = [], NormalDist(), 0.0
    while first <= problems / 1.5:  # a look shortly before the last one would take most of its error
        counts.append(first)
        first *= 2
    result = []
    for count in [*counts, problems]:
        until_now = 2 - 2 * normal.cdf(normal.inv_cdf((1 + LEVEL) / 2) / math.sqrt(count / problems))
        result.append((count, 1 - max(until_now - spent, _LEAST_ERROR)))
        spent = until_now
    return result


def _null_variance(problems: int, only_full: int, only_tapered: int, margin: float) -> float:
    """Variance of b - c, counts as above, at the likeliest rates that differ by `margin` (Tango's equation for q)."""
    linear = only_full + only_tapered - (2 * problems - only_full + only_tapered) * margin
    root = math.sqrt(linear**2 + 8 * problems * only_tapered * margin * (1 - margin))
    rate = (linear + root) / (4 * problems)
    return problems * (2 * rate + margin * (1 - margin))
