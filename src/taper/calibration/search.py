"""Which layers to skip, in which order: greedy addition by measured KL, checked on problems that the model solves.

Knows sets of layers, the KL of skipping them on known completions, and how the model then solves problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .replay import Reference

CORE = 5.0  # a layer whose KL, skipped alone, is this many times the median of all layers is always run
COMPLETIONS, STEPS = 36, 32  # of the search: completions (they differ more than steps do), and first steps of each
FIRST_LOOK = 12  # completions on which all candidates are tried; the best ones go on to the others
CANDIDATES, FINALISTS = 6, 3
HARMLESS = 1.645  # standard errors: a set that loses nothing goes beyond it by chance one time in twenty
COLLAPSED = 4.0  # standard errors: so many fewer problems are solved that asking for more of them says nothing

# Sums of KL over some completions (given by their indices), one for each candidate, if the skipped layers and that
# candidate are skipped.
Measure = Callable[[frozenset[int], Sequence[int], range], np.ndarray]
# By how many standard errors fewer problems are solved if some layers are skipped (`mcnemar_score`).
Score = Callable[[frozenset[int]], float]


class Skipped(NamedTuple):
    """The next layer to skip, after those before it."""

    layer: int
    kl: float  # mean KL with it and all before it skipped
    score: float  # standard errors by which fewer problems are solved then


def first_steps(references: Sequence[Reference], steps: int) -> list[Reference]:
    """The steps up to `steps` of each completion that has any besides step 0."""
    return [reference.window(0, steps + 1) for reference in references if len(reference.completion_ids) > 1]


def layer_importance(num_hidden_layers: int, steps: Sequence[int], measure: Measure) -> list[float]:
    """Mean KL of skipping each layer alone, on half of the completions: [L]."""
    half = range((len(steps) + 1) // 2)
    sums = measure(frozenset(), range(num_hidden_layers), half)
    return (sums / sum(steps[i] for i in half)).tolist()  # type: ignore[no-any-return]


def flex_layers(importance: Sequence[float]) -> list[int]:
    """The layers that may be skipped at all: those whose KL alone is not far above the median."""
    most = CORE * float(np.median(importance))
    return [layer for layer, kl in enumerate(importance) if kl <= most]


def layers_to_skip(
    importance: Sequence[float], flex: Sequence[int], steps: Sequence[int], measure: Measure, score: Score
) -> Iterator[Skipped]:
    """The flex layers in the order of skipping, one after another.

    Next comes the first of the layers of lowest KL whose removal does not lower the score on problems; if there is
    none, the one that lowers it least; and once the score has collapsed, the one of lowest KL. Each is looked for only
    when it is asked for, as that takes long.

    Args:
        importance: mean KL of skipping each layer alone, [L].
        flex: the layers that may be skipped.
        steps: tapered steps of each completion, [completions].
        measure: sums of KL.
        score: how problems are solved; always 0 where there are none.
    """
    order: list[int] = []
    marginal = {layer: importance[layer] for layer in flex}  # the KL that each layer added when it was last tried
    last_kl, collapsed = 0.0, False
    while left := sorted((layer for layer in flex if layer not in order), key=lambda layer: marginal[layer]):
        finalists, others = _mean_kl(frozenset(order), left[:CANDIDATES], steps, measure)
        marginal |= {layer: kl - last_kl for layer, kl in (finalists | others).items()}
        scores: dict[int, float] = {}
        for layer in sorted(finalists, key=lambda layer: finalists[layer]):
            scores[layer] = 0.0 if collapsed else score(frozenset([*order, layer]))
            if scores[layer] <= 0:
                break
        chosen = min(scores, key=lambda layer: scores[layer])
        if scores[chosen] > COLLAPSED:  # which of them loses least is chance
            chosen, collapsed = min(finalists, key=lambda layer: finalists[layer]), True
        order.append(chosen)
        last_kl = finalists[chosen]
        yield Skipped(chosen, last_kl, COLLAPSED if collapsed else scores[chosen])


def _mean_kl(
    skipped: frozenset[int], candidates: Sequence[int], steps: Sequence[int], measure: Measure
) -> tuple[dict[int, float], dict[int, float]]:
    """Mean KL of the best candidates over all completions, and of the others over the first completions alone."""
    first, rest = range(min(FIRST_LOOK, len(steps))), range(min(FIRST_LOOK, len(steps)), len(steps))
    sums = dict(zip(candidates, measure(skipped, candidates, first).tolist(), strict=True))
    finalists = sorted(sums, key=lambda layer: sums[layer])[:FINALISTS]
    more = measure(skipped, finalists, rest) if rest else np.zeros(len(finalists))
    means = {layer: (sums[layer] + extra) / sum(steps) for layer, extra in zip(finalists, more.tolist(), strict=True)}
    looked_at = sum(steps[i] for i in first)
    return means, {layer: sums[layer] / looked_at for layer in candidates if layer not in means}
