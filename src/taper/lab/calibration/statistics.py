"""Estimates with their uncertainty: means over completions, and accuracies of two modes on the same problems.

Means over steps are bootstrapped over whole completions, as the prompts are the source of their variation. The verdict
on two accuracies comes from a score test with known error rates; the bootstrap interval of their difference is shown
beside it, and has no width if every problem comes out the same in both modes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from ...errors import RequestError, flag, number, whole_number
from .replay import Reference, Scores

RESAMPLES = 10_000
LEVEL = 0.95
POWER = 0.8  # probability that the number of problems asked for suffices, if the observed rates are the true ones
MIN_STEPS = 30  # the least number of tapered steps from which anything is estimated
MIN_OUTPUTS = 5  # from which an interval comes: a bootstrap over fewer is far too narrow, and over one has no width
_GRAM = 4
_LEAST_ERROR = 1e-9  # error rate of an interim test; with 0 it would need infinitely many problems

Verdict = Literal["holds", "fails", "not enough problems"]


class Estimate(NamedTuple):
    """A value and its 95 % interval; the percentiles of a bootstrap, unless another method is named.

    Both ends are the value itself if it comes from fewer than `MIN_OUTPUTS` outputs, or if all of them are alike.
    """

    value: float
    low: float
    high: float


# Means over the steps of completions


@dataclass(frozen=True)
class Loss:
    """What a policy costs over some steps, as plain numbers: a forecast, or one end of measured intervals."""

    kl: float  # mean KL(full || policy), nats
    agreement: float  # share of steps whose argmax is that of full depth, 0 to 1
    nll_increase: float  # rise of the NLL of full depth's own outputs, per cent


@dataclass(frozen=True)
class LossEstimate:
    """What a policy costs over some steps, as measured: the metrics of `Loss` with their intervals."""

    kl: Estimate
    agreement: Estimate
    nll_increase: Estimate

    @property
    def value(self) -> Loss:
        """The estimates themselves."""
        return Loss(self.kl.value, self.agreement.value, self.nll_increase.value)

    @property
    def worst(self) -> Loss:
        """The bad end of each interval."""
        return Loss(self.kl.high, self.agreement.low, self.nll_increase.high)


@dataclass(frozen=True)
class Losses:
    """What a policy costs over all steps, and over the tapered ones, which skip layers."""

    all_steps: LossEstimate = field(metadata={"json": "all steps"})
    # None: fewer than `MIN_STEPS` of them, or in fewer than `MIN_OUTPUTS` outputs, too few to say anything.
    tapered_steps: LossEstimate | None = field(default=None, metadata={"json": "tapered steps"})
    num_tapered_steps: int = 0
    num_tapered_outputs: int = 0  # that have any


@dataclass(frozen=True)
class LossByStep:
    """Loss at each step: how many outputs have that step, mean KL in nats, agreement; each [steps]."""

    outputs: list[int] = field(metadata={"json": "answers"})  # that have the step
    kl: list[float]
    agreement: list[float]


@dataclass(frozen=True)
class PolicyAndFull:
    """One metric of a policy's own outputs, and of full depth's."""

    policy: Estimate
    full: Estimate


@dataclass(frozen=True)
class Difference(PolicyAndFull):
    """The same, and the first less the second, paired."""

    difference: Estimate


@dataclass(frozen=True)
class FreeRunning:
    """A policy's own outputs beside those of full depth to the same prompts; replay only follows the latter."""

    nll: PolicyAndFull  # of the outputs at full depth, nats a token
    length: PolicyAndFull  # tokens of an output
    repetition: PolicyAndFull  # share of an output's 4-grams that occurred in it before, 0 to 1


@dataclass(frozen=True)
class SolvedProblems(Difference):
    """Shares of problems with known answers that are solved, 0 to 1."""

    problems: int  # how many


def ratio_estimate(numerator: np.ndarray, denominator: np.ndarray, seed: int = 0) -> Estimate:
    """sum(numerator) / sum(denominator), to six digits; whole completions are resampled. Both: [completions]."""
    return _estimate(_ratios(numerator, denominator, seed))


def paired_ratios(policy: np.ndarray, policy_count: np.ndarray, full: np.ndarray, full_count: np.ndarray) -> Difference:
    """Two such ratios and their difference, of the same prompts or completions in each resample."""
    of_policy, of_full = _ratios(policy, policy_count), _ratios(full, full_count)
    return Difference(_estimate(of_policy), _estimate(of_full), _estimate(of_policy - of_full))


def _ratios(numerator: np.ndarray, denominator: np.ndarray, seed: int = 0) -> np.ndarray:
    """The ratio of the sums, and that of each resample, which is not a number where nothing is below.

    None of them is a number if fewer than `MIN_OUTPUTS` have any steps.
    """
    draws = np.random.default_rng(seed).integers(0, len(numerator), (RESAMPLES, len(numerator)))
    with np.errstate(invalid="ignore"):
        resampled = numerator[draws].sum(-1) / denominator[draws].sum(-1)
    if np.count_nonzero(denominator) < MIN_OUTPUTS:
        resampled[:] = np.nan
    return np.append(numerator.sum() / denominator.sum(), resampled)


def _estimate(values: np.ndarray) -> Estimate:
    """The first value and the ends of the interval of the others, to six digits; if none is a number, no interval."""
    resampled = values[:1] if np.isnan(values[1:]).all() else values[1:]
    ends = np.nanquantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(*(float(f"{x:.6g}") for x in (values[0], *ends)))


def over_steps(scores: Scores) -> Losses:
    """The losses of a policy, from its scores."""
    tapered = scores.where(scores.depth < scores.depth.max())
    steps, outputs = len(tapered.step), len(np.unique(tapered.reference))
    is_enough = steps >= MIN_STEPS and outputs >= MIN_OUTPUTS
    return Losses(_loss(scores), _loss(tapered) if is_enough else None, steps, outputs)


def _loss(scores: Scores) -> LossEstimate:
    rise, ones = 100 * (scores.nll - scores.nll_full), np.ones(len(scores.step))
    ratios = [(scores.kl, ones), (scores.agreement, ones), (rise, scores.nll_full)]
    return LossEstimate(*(ratio_estimate(by_completion(scores, a), by_completion(scores, b)) for a, b in ratios))


def loss_by_step(scores: Scores) -> LossByStep:
    """The loss of a policy at each step."""
    count = np.bincount(scores.step)
    kl, agreement = (np.bincount(scores.step, weights=part) / count for part in (scores.kl, scores.agreement))
    return LossByStep(count.tolist(), kl.tolist(), agreement.tolist())


def by_completion(scores: Scores, values: np.ndarray) -> np.ndarray:
    """Sums within each completion: [completions]."""
    _, index = np.unique(scores.reference, return_inverse=True)
    return np.bincount(index, weights=values)


def free_running(
    own: Sequence[Reference], own_scores: Scores, full: Sequence[Reference], full_scores: Scores
) -> FreeRunning:
    """Compare a policy's own outputs with those of full depth; the scores hold the full model's NLL of either."""
    return FreeRunning(*map(PolicyAndFull, _output_metrics(own, own_scores), _output_metrics(full, full_scores)))


def _output_metrics(references: Sequence[Reference], scores: Scores) -> tuple[Estimate, Estimate, Estimate]:
    """The metrics of `FreeRunning`."""
    ones = np.ones(len(references))
    lengths = np.array([len(reference.completion_ids) for reference in references], float)
    repeats = np.array([repeated(reference.completion_ids) for reference in references])
    nll = ratio_estimate(by_completion(scores, scores.nll_full), lengths)
    return nll, ratio_estimate(lengths, ones), ratio_estimate(repeats, ones)


def repeated(ids: Sequence[int]) -> float:
    """Share of the 4-grams of an output that occurred in it before, 0 to 1."""
    grams = [tuple(ids[i : i + _GRAM]) for i in range(len(ids) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


# Accuracies on the same problems


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
        if self.problems < MIN_OUTPUTS:
            return f"not enough problems: no verdict comes from fewer than {MIN_OUTPUTS}"
        if self.needed is None:
            return "inconclusive; at the observed difference, more problems would not show that it holds"
        return f"not enough problems: about {float(f'{self.needed:.2g}'):,.0f} more needed"


def compare(
    full: Sequence[bool], tapered: Sequence[bool], margin: float, seed: int = 0, level: float = LEVEL
) -> PairedComparison:
    """Compare two modes by the problems that each of them solved, both bool [problems].

    The verdict is at the one-sided `level`; the intervals are always 95 %. Fewer than `MIN_OUTPUTS` problems give
    neither a verdict nor an interval of the difference.

    Raises:
        RequestError: the modes differ in their number of problems, there are fewer than two, an entry is not a bool, or
            `margin` is not in (0, 1).
    """
    problems = len(full)
    if len(tapered) != problems:
        raise RequestError(
            f"full depth has {problems} problems and the tapered mode {len(tapered)}; both must have the same ones"
        )
    whole_number("the number of problems", problems, 2)
    pairs = [(flag("an entry of full", a), flag("an entry of tapered", b)) for a, b in zip(full, tapered, strict=True)]
    only_full, only_tapered = pairs.count((True, False)), pairs.count((False, True))
    both = pairs.count((True, True))
    verdict, needed = non_inferiority(problems, only_full, only_tapered, margin, level)
    if problems < MIN_OUTPUTS:
        verdict, needed = "not enough problems", None
    return PairedComparison(
        problems=problems,
        full=wilson(both + only_full, problems),
        tapered=wilson(both + only_tapered, problems),
        difference=bootstrap_difference(problems, only_full, only_tapered, seed),
        only_full=only_full,
        only_tapered=only_tapered,
        p_value=mcnemar(only_full, only_tapered),
        margin=float(margin),
        verdict=verdict,
        needed=needed,
    )


def compare_with_interim_tests(
    ask: Callable[[int], tuple[Sequence[bool], Sequence[bool]]], problems: int, first: int, margin: float, seed: int = 0
) -> PairedComparison:
    """Compare on more and more problems until there is a verdict, or all are used; `ask(n)` solves the first n.

    However many interim tests there are, "holds" is wrong in at most 5 % of cases, and so is "fails".
    """
    tests = interim_tests(problems, first)
    level_of_fails = 1 - (1 - LEVEL) / len(tests)  # the same at each test (Bonferroni), to give up early
    for count, level in tests:
        comparison = compare(*ask(count), margin, seed, level)
        only_full, only_tapered = comparison.only_full, comparison.only_tapered
        if non_inferiority(count, only_full, only_tapered, margin, level_of_fails)[0] == "fails":
            return replace(comparison, verdict="fails", needed=None)
        if comparison.verdict != "not enough problems":
            break
    return comparison


def wilson(successes: int, trials: int) -> Estimate:
    """A proportion and its score interval.

    E. B. Wilson, Journal of the American Statistical Association 22 (1927), 209-212.
    """
    from scipy.stats import binomtest

    interval = binomtest(successes, trials).proportion_ci(LEVEL, method="wilson")
    return Estimate(successes / trials, float(interval.low), float(interval.high))


def bootstrap_difference(problems: int, only_full: int, only_tapered: int, seed: int = 0) -> Estimate:
    """Accuracy of the tapered mode less that of full depth, with its percentile interval.

    The counts of resampled problems have a multinomial distribution, from which they are drawn: B. Efron and
    R. Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    cells = np.array([only_full, only_tapered, problems - only_full - only_tapered])
    draws = np.random.default_rng(seed).multinomial(problems, cells / problems, RESAMPLES)  # [RESAMPLES, 3]
    low, high = np.quantile((draws[:, 1] - draws[:, 0]) / problems, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    value = (only_tapered - only_full) / problems
    return Estimate(value, float(low), float(high)) if problems >= MIN_OUTPUTS else Estimate(value, value, value)


def mcnemar(only_full: int, only_tapered: int) -> float:
    """The p-value of McNemar's exact two-sided test, which is the sign test of the discordant problems.

    Q. McNemar, Psychometrika 12 (1947), 153-157.
    """
    from scipy.stats import binomtest

    discordant = only_full + only_tapered
    return float(binomtest(only_full, discordant).pvalue) if discordant else 1.0


def mcnemar_score(only_full: int, only_tapered: int) -> float:
    """By how many standard errors fewer problems the tapered mode solves: McNemar's test without correction."""
    return float((only_full - only_tapered) / max(1, only_full + only_tapered) ** 0.5)


def non_inferiority(
    problems: int, only_full: int, only_tapered: int, margin: float, level: float = LEVEL
) -> tuple[Verdict, int | None]:
    """Whether the tapered mode's accuracy is less than `margin` below full depth's; how many more problems it needs.

    The verdict is "holds" if the one-sided bound of the difference, of 95 % unless `level` says otherwise, lies above
    -margin, "fails" if the bound on the other side lies below it, else "not enough problems". The test is the score
    test of paired proportions: with n problems, b that full depth alone solves and c that the tapered mode alone
    solves,

        z = (b - c - n margin ± 1) / sqrt(n (2 q + margin (1 - margin)))

    where q is the maximum likelihood rate of c if the difference is -margin: T. Tango, Statistics in Medicine 17
    (1998), 891-908. The 1 always weighs against a verdict; it is Edwards's continuity correction of McNemar's test, to
    which this one comes down at margin 0. It keeps both error rates below 5 % for margins up to 0.2, whatever the share
    of discordant problems; without it they reach 9 % (300 problems, margin 0.01).

    The number of problems is what the same test needs, at the observed rates, to say "holds" four times in five, less
    those there are: J. Nam, Biometrics 53 (1997), 1422-1430. It is None with a verdict, and if the observed
    difference is not above -margin, where more problems would not help.

    Raises:
        RequestError: `margin` is not in (0, 1).
    """
    margin, z = number("margin", margin, 0, 1, above=True, below=True), NormalDist().inv_cdf(level)
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


def interim_tests(problems: int, first: int) -> list[tuple[int, float]]:
    """After how many problems to test, doubling from `first` on, and the level of "holds" at each test.

    Of the error of 5 %, the tests up to a share t of the problems spend 2 - 2 Phi(1.96 / sqrt(t)) together, as in
    K. Lan and D. DeMets, Biometrika 70 (1983), 659-663: early tests next to nothing, so that the last one needs hardly
    more problems than if it were the only one. Each test takes what is newly spent, whatever earlier tests showed.
    """
    counts, normal = [], NormalDist()
    while first <= problems / 1.5:  # a test shortly before the last one would take most of its error
        counts.append(first)
        first *= 2
    tests, spent = [], 0.0
    for count in [*counts, problems]:
        until_now = 2 - 2 * normal.cdf(normal.inv_cdf((1 + LEVEL) / 2) / math.sqrt(count / problems))
        tests.append((count, 1 - max(until_now - spent, _LEAST_ERROR)))
        spent = until_now
    return tests


def _null_variance(problems: int, only_full: int, only_tapered: int, margin: float) -> float:
    """Variance of b - c, counts as above, at the maximum likelihood rates that differ by `margin` (Tango's q)."""
    linear = only_full + only_tapered - (2 * problems - only_full + only_tapered) * margin
    root = math.sqrt(linear**2 + 8 * problems * only_tapered * margin * (1 - margin))
    rate = (linear + root) / (4 * problems)
    return problems * (2 * rate + margin * (1 - margin))
