"""Which layers to skip, in which order: measured, by greedy addition with look-ahead.

Knows sets of layers, what skipping them costs on some answers of the model's own, and what harm it does to problems.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .replay import Reference

CORE = 5.0  # a layer that costs this many times the median of all, skipped alone, always runs
ANSWERS, STEPS = 36, 32  # what an order is searched on: answers (they differ more than steps), and first steps of each
FIRST_LOOK = 12  # answers all candidates are tried on; the best go on to the others
CANDIDATES, FINALISTS = 6, 3
BEAM, NEAR = 2, 0.03  # follow a second order too, where its log KL is this close: it may be first a layer later
HARMLESS = 1.645  # standard errors: a set that does no harm goes beyond it by chance one time in twenty
LOST = 4.0  # standard errors: so far fewer problems are solved that asking for more of them tells nothing

# Sums of KL, one for each candidate, over the steps of some answers (given by their indices), of skipping some layers
# and that candidate besides.
Measure = Callable[[frozenset[int], Sequence[int], range], np.ndarray]
# By how many standard errors fewer problems are solved when some layers are skipped.
Harm = Callable[[frozenset[int]], float]


class Order(NamedTuple):
    """Layers in the order of skipping."""

    layers: list[int]
    losses: list[float]  # the mean KL of skipping the first ones, at each length
    harmless: int  # how many of the first ones may be skipped before fewer problems are solved


class _Path(NamedTuple):
    """The sum of the logarithms of `losses`, the KL at each length of an order so far; the lowest path is the best."""

    cost: float
    order: tuple[int, ...]
    losses: tuple[float, ...]


def first_steps(references: Sequence[Reference], steps: int) -> list[Reference]:
    """The steps up to `steps` of each answer that has any besides step 0."""
    return [reference.window(0, steps + 1) for reference in references if len(reference.answer_ids) > 1]


def layer_importance(num_hidden_layers: int, steps: Sequence[int], measure: Measure) -> list[float]:
    """Mean KL of skipping each layer alone, on half of the answers: [L]."""
    half = range((len(steps) + 1) // 2)
    sums = measure(frozenset(), range(num_hidden_layers), half)
    return (sums / sum(steps[i] for i in half)).tolist()  # type: ignore[no-any-return]


def flex_layers(importance: Sequence[float]) -> list[int]:
    """The layers that may be skipped at all: those that cost little more alone than most."""
    most = CORE * float(np.median(importance))
    return [layer for layer, kl in enumerate(importance) if kl <= most]


def find_order(
    importance: Sequence[float], flex: Sequence[int], rounds: int, steps: Sequence[int], measure: Measure, harm: Harm
) -> Order:
    """The first `rounds` of the flex layers to skip: those that problems are solved without, as long as there are any.

    Of these, the order has the lowest KL, in log over all lengths; where there are none, the least harm; and where all
    is lost, the lowest KL again. `importance` is the mean KL of skipping each layer alone, [L]; `steps` the tapered
    steps of each answer, [answers].
    """
    marginal = {layer: importance[layer] for layer in flex}  # what each layer added when it was last tried
    paths, harmless, lost = [_Path(0.0, (), ())], 0, False
    for length in range(1, rounds + 1):
        grown: dict[frozenset[int], _Path] = {}
        for path in paths:
            left = sorted((layer for layer in flex if layer not in path.order), key=lambda layer: marginal[layer])
            finalists, others = _try(frozenset(path.order), left[:CANDIDATES], steps, measure)
            for layer, loss in (finalists | others).items():
                marginal[layer] = loss - (path.losses[-1] if path.losses else 0.0)
            for layer, loss in finalists.items():
                cost = path.cost + math.log(max(loss, 1e-9))
                new = _Path(cost, (*path.order, layer), (*path.losses, loss))
                skipped = frozenset(new.order)
                grown[skipped] = min(new, grown.get(skipped, new))
        ranked = sorted(grown.values())
        if lost:
            paths = ranked[:1]
        elif kept := _harmless(ranked, harm):
            paths, harmless = kept, length if harmless == length - 1 else harmless
        else:
            least, best = min((harm(frozenset(path.order)), path) for path in ranked[:FINALISTS])
            lost = least > LOST  # then which of them does least harm is chance
            paths = ranked[:1] if lost else [best]
    return Order(list(paths[0].order), list(paths[0].losses), harmless)


def _harmless(ranked: Sequence[_Path], harm: Harm) -> list[_Path]:
    """The best path that does no harm, and others nearly as good; none where the first ones all do."""
    kept: list[_Path] = []
    for path in ranked[:FINALISTS]:
        if kept and (len(kept) == BEAM or path.cost > kept[0].cost + NEAR):
            break
        if harm(frozenset(path.order)) <= HARMLESS:
            kept.append(path)
    return kept


def _try(
    skipped: frozenset[int], candidates: Sequence[int], steps: Sequence[int], measure: Measure
) -> tuple[dict[int, float], dict[int, float]]:
    """Mean KL over all answers of the candidates that look best on the first ones; and of the others on those alone."""
    first, rest = range(min(FIRST_LOOK, len(steps))), range(min(FIRST_LOOK, len(steps)), len(steps))
    sums = dict(zip(candidates, measure(skipped, candidates, first).tolist(), strict=True))
    finalists = sorted(sums, key=lambda layer: sums[layer])[:FINALISTS]
    more = measure(skipped, finalists, rest) if rest else np.zeros(len(finalists))
    means = {layer: (sums[layer] + extra) / sum(steps) for layer, extra in zip(finalists, more.tolist(), strict=True)}
    looked_at = sum(steps[i] for i in first)
    return means, {layer: sums[layer] / looked_at for layer in candidates if layer not in means}
