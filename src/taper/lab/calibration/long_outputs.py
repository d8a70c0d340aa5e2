"""Whether a policy holds in long outputs: what it loses by ranges of steps, how its own outputs end, and the rule.

Outputs are as users get them: sampled as the model's authors recommend, and as long as the model makes them, up to a
limit. Most of a long output runs at a policy's least depth, which short ones hardly reach, so that figures from outputs
of another length say little.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ...models.policies import LONG_OUTPUT
from .replay import Reference, Scores
from .statistics import (
    MIN_OUTPUTS,
    Difference,
    Estimate,
    LossEstimate,
    SolvedProblems,
    paired_ratios,
    ratio_estimate,
    repeated,
)

MAX_TOKENS = LONG_OUTPUT
BOUNDS = (0, 64, 128, 256, 512, 1024)  # of the ranges of steps
CIRCLES = 0.5  # an output goes in circles if a greater share of its 4-grams occurred in it before
# How much worse than full depth a default may be, with 95 % confidence.
NLL_MARGIN, ENDED_MARGIN, CIRCLES_MARGIN, SOLVED_MARGIN, NEXT_MARGIN = 0.10, 0.10, 0.05, 0.08, 0.10


@dataclass(frozen=True)
class StepRange:
    """Some steps of long outputs. A metric is None where fewer than `MIN_OUTPUTS` prompts have an output so long."""

    first: int
    end: int
    outputs: int  # of full depth that reach it
    depth: float | None  # that the policy runs there, on average
    agreement: Estimate | None  # with full depth's argmax on full depth's outputs, 0 to 1
    kl: Estimate | None  # mean KL(full || policy) there, nats
    nll: Difference | None  # of each one's own outputs under full depth, nats a token


@dataclass(frozen=True)
class LongOutputs:
    """A policy's long outputs beside those of full depth to the same prompts; intervals resample prompts."""

    max_tokens: int
    prompts: int
    outputs: int  # of each, with different seeds
    ranges: list[StepRange]
    tokens: Difference  # of an output
    ended: Difference  # share of outputs that the model ended itself
    circles: Difference  # share of outputs that go in circles
    failures: list[str] = field(default_factory=list)  # see the function


def failures(outputs: LongOutputs, problems: SolvedProblems | None, next_output: LossEstimate | None) -> list[str]:
    """The rule for defaults: what may be worse than full depth by more than its margin.

    If that is nothing, the policy may be a default. The likelihood is that of its own outputs under full depth, in the
    last range of steps.

    Args:
        outputs: of the policy, of up to `MAX_TOKENS` tokens.
        problems: word problems that it solves.
        next_output: the loss of full depth's outputs that follow its own.
    """
    nll = [part.nll.difference.high for part in outputs.ranges if part.nll is not None]
    worst = {
        "length": (MAX_TOKENS - outputs.max_tokens, 0),
        "likelihood": (nll[-1] if nll else np.inf, NLL_MARGIN),
        "ending": (-outputs.ended.difference.low, ENDED_MARGIN),
        "circles": (outputs.circles.difference.high, CIRCLES_MARGIN),
        "word problems": (-problems.difference.low if problems else np.inf, SOLVED_MARGIN),
        "next output": (next_output.kl.high if next_output else np.inf, NEXT_MARGIN),
    }
    return [name for name, (loss, margin) in worst.items() if loss > margin]


def summarised(
    full: Sequence[Reference],
    scores: Scores,
    own: Sequence[Reference],
    own_scores: Scores,
    max_tokens: int,
    stop_ids: Collection[int],
) -> LongOutputs:
    """The figures of a policy's outputs.

    Args:
        full: outputs of full depth, several to a prompt if there are seeds.
        scores: of the policy on them.
        own: outputs of the policy to the same prompts, in the same order.
        own_scores: of full depth on them.
        max_tokens: the most that an output may have.
        stop_ids: that end an output.
    """
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(output.prompt_ids for output in full))}
    prompts, of_output = len(places), np.array([places[output.prompt_ids] for output in full])

    def each(metric: Sequence[float] | np.ndarray) -> np.ndarray:
        """Sums over the outputs to each prompt."""
        return np.bincount(of_output, metric, prompts)

    def compared(policy: Sequence[float], of_full: Sequence[float]) -> Difference:
        count = each(np.ones(len(full)))
        return paired_ratios(each(policy), count, each(of_full), count)

    def ended(output: Reference) -> float:
        return float(output.completion_ids[-1] in stop_ids)

    def circles(output: Reference) -> float:
        return float(repeated(output.completion_ids) > CIRCLES)

    bounds = [bound for bound in BOUNDS if bound < max_tokens]
    return LongOutputs(
        max_tokens,
        prompts,
        len(full),
        [_range(first, end, of_output, scores, own_scores) for first, end in pairwise([*bounds, max_tokens])],
        compared([len(one.completion_ids) for one in own], [len(one.completion_ids) for one in full]),
        compared([*map(ended, own)], [*map(ended, full)]),
        compared([*map(circles, own)], [*map(circles, full)]),
    )


def _range(first: int, end: int, of_output: np.ndarray, scores: Scores, own_scores: Scores) -> StepRange:
    """The figures of the steps from `first` to before `end`; `of_output` numbers the prompt of each output."""

    def sums(part: Scores, values: np.ndarray) -> np.ndarray:
        return np.bincount(of_output[part.reference], values, of_output.max() + 1)

    there, own = (part.where((part.step >= first) & (part.step < end)) for part in (scores, own_scores))
    count, own_count = (sums(part, np.ones(len(part.step))) for part in (there, own))
    outputs = len(np.unique(there.reference))
    if min(np.count_nonzero(count), np.count_nonzero(own_count)) < MIN_OUTPUTS:
        return StepRange(first, end, outputs, None, None, None, None)
    agreement, kl = (ratio_estimate(sums(there, values), count) for values in (there.agreement, there.kl))
    nll = paired_ratios(sums(own, own.nll_full), own_count, sums(there, there.nll_full), count)
    return StepRange(first, end, outputs, float(there.depth.mean()), agreement, kl, nll)
