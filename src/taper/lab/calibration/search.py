"""The search: which layers to skip, in which order, and along which curve.

The order is greedy addition by measured KL, checked on problems that the model solves. Of power curves along it, the
best by forecast are replayed: `power_curves` and `power_curves_of_speed` make candidates, `LossTable` forecasts their
loss, `fit_quality` and `fit_speed` choose.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from ...adapters import Adapters
from ...errors import RequestError
from ...policy import DepthPolicy
from .clock import CostModel
from .progress import Progress
from .replay import Reference, Scores
from .statistics import Loss, Losses, over_steps
from .store import Measurements
from .summary import Budget

CORE = 5.0  # a layer whose KL, skipped alone, is this many times the median of all layers is always run
COMPLETIONS, STEPS = 36, 32  # of the search: completions (they differ more than steps do), and first steps of each
FIRST_LOOK = 12  # completions on which all candidates are tried; the best ones go on to the others
CANDIDATES, FINALISTS = 6, 3
HARMLESS = 1.645  # standard errors: a set that loses nothing goes beyond it by chance one time in twenty
CLEARLY = 1.0  # standard errors: a lower KL counts more than a smaller difference in problems solved
COLLAPSED = 4.0  # standard errors: so many fewer problems are solved that asking for more of them says nothing
PROBES, FITTED = 12, 24  # completions on which the loss is measured by depth and place, and curves are compared
ATTEMPTS = 4  # candidates that are replayed for a quality budget
_STARTS = (0, 1 / 8, 1 / 4, 1 / 2, 3 / 4)  # where the fall may begin, and how long it may last, in outputs
_SPANS = (1 / 128, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
_PLACES = 4  # parts of an output whose losses are kept apart

# Sums of KL over some completions (given by their indices), one for each candidate, if the skipped layers and that
# candidate are skipped.
Measure = Callable[[frozenset[int], Sequence[int], range], np.ndarray]
Replayed = Callable[[DepthPolicy], Scores]  # what a policy costs on the search prompts
PolicyScore = Callable[[DepthPolicy], float]  # by how many standard errors it solves fewer problems


# The order of layers


class Skipped(NamedTuple):
    """The next layer to skip, after those before it."""

    layer: int
    kl: float  # mean KL with it and all before it skipped
    score: float  # standard errors by which fewer problems are solved then


class LayerOrder(NamedTuple):
    """The flex layers in the order of skipping: the first ones by search, the rest by importance."""

    importance: list[float]  # mean KL of skipping each layer alone, [L]
    searched: list[Skipped]
    adapters: Adapters | None = None  # of all searched layers

    @property
    def layers(self) -> list[int]:
        """All flex layers."""
        layers = [skipped.layer for skipped in self.searched]
        return layers + [layer for layer in flex_layers(self.importance) if layer not in layers]

    def skipping(self, count: int) -> DepthPolicy:
        """The policy that skips the first `count` layers from step 1 on."""
        layers, first = len(self.importance), self.layers[:count]
        adapters = None if self.adapters is None else self.adapters.only(first)
        return replace(DepthPolicy.static(layers, layers - count, first), adapters=adapters)

    @property
    def harmless(self) -> int:
        """How many of the first layers can be skipped before significantly fewer problems are solved."""
        scores = [skipped.score for skipped in self.searched]
        return next((count for count, score in enumerate(scores) if score > HARMLESS), len(scores))


def first_steps(references: Sequence[Reference], steps: int) -> list[Reference]:
    """The steps up to `steps` of each completion that has any besides step 0."""
    return [Reference(r.prompt_ids, r.completion_ids[: steps + 1]) for r in references if len(r.completion_ids) > 1]


def layer_importance(num_hidden_layers: int, steps: Sequence[int], measure: Measure) -> list[float]:
    """Mean KL of skipping each layer alone, on half of the completions: [L]."""
    half = range((len(steps) + 1) // 2)
    sums = measure(frozenset(), range(num_hidden_layers), half)
    return (sums / sum(steps[i] for i in half)).tolist()  # type: ignore[no-any-return]


def flex_layers(importance: Sequence[float]) -> list[int]:
    """The layers that may be skipped, by importance: those whose KL alone is not far above the median."""
    most = CORE * float(np.median(importance))
    return sorted((layer for layer, kl in enumerate(importance) if kl <= most), key=lambda layer: importance[layer])


def layers_to_skip(
    importance: Sequence[float],
    steps: Sequence[int],
    measure: Measure,
    score: Callable[[frozenset[int]], float],
    tolerance: float = HARMLESS,
    saved_ms: Callable[[int], float] | None = None,
) -> Iterator[Skipped]:
    """The flex layers in the order of skipping. Each is searched for only when it is asked for, as that takes long.

    Next comes the first of the layers of lowest KL whose removal keeps the score within the tolerance; if there is
    none, the one that raises it least; and once the model has collapsed, the one of lowest KL. `steps` are the tapered
    steps of each completion, `score` is the number of standard errors by which fewer problems are solved. With
    `saved_ms`, what skipping each layer saves, what counts is not KL but KL for each millisecond.
    """

    def price(layer: int, added_kl: float) -> float:
        if saved_ms is None:
            return added_kl
        saved = max(saved_ms(layer), 1e-6)
        return added_kl / saved if added_kl > 0 else added_kl * saved

    order: list[int] = []
    added = {layer: importance[layer] for layer in flex_layers(importance)}  # KL by each layer when it was last tried
    last_kl, collapsed = 0.0, False
    while left := sorted(added.keys() - order, key=lambda layer: (price(layer, added[layer]), layer)):
        finalists, others = _mean_kl(frozenset(order), left[:CANDIDATES], steps, measure, price, last_kl)
        added |= {layer: kl - last_kl for layer, kl in (finalists | others).items()}
        best = sorted(finalists, key=lambda layer: price(layer, finalists[layer] - last_kl))
        scores: dict[int, float] = {}
        for layer in best:
            scores[layer] = 0.0 if collapsed else score(frozenset([*order, layer]))
            if scores[layer] <= tolerance:
                break
        chosen = min(scores, key=lambda layer: scores[layer])
        if scores[chosen] > COLLAPSED:  # which of them loses least is chance
            chosen, collapsed = best[0], True
        order.append(chosen)
        last_kl = finalists[chosen]
        yield Skipped(chosen, last_kl, COLLAPSED if collapsed else scores[chosen])


def _mean_kl(
    skipped: frozenset[int],
    candidates: Sequence[int],
    steps: Sequence[int],
    measure: Measure,
    price: Callable[[int, float], float],
    before: float,
) -> tuple[dict[int, float], dict[int, float]]:
    """Mean KL of the best candidates over all completions, and of the others over the first completions alone.

    `price`: by layer and the KL that it adds to what was there before; the lowest are the best.
    """
    first, rest = range(len(steps))[:FIRST_LOOK], range(len(steps))[FIRST_LOOK:]
    looked_at = sum(steps[i] for i in first)
    sums = dict(zip(candidates, measure(skipped, candidates, first).tolist(), strict=True))
    finalists = sorted(sums, key=lambda layer: price(layer, sums[layer] / looked_at - before))[:FINALISTS]
    more = measure(skipped, finalists, rest) if rest else np.zeros(len(finalists))
    means = {layer: (sums[layer] + extra) / sum(steps) for layer, extra in zip(finalists, more.tolist(), strict=True)}
    return means, {layer: sums[layer] / looked_at for layer in candidates if layer not in means}


# Curves along the order


def fit_curve(
    budget: Budget,
    order: LayerOrder,
    measurements: Measurements,
    cost: CostModel,
    max_tokens: int,
    score: PolicyScore,
    progress: Progress,
) -> tuple[DepthPolicy, Losses]:
    """The policy for a budget or a speed, and what it costs on the search prompts."""
    layers, most = len(order.importance), len(order.searched)
    counts = sorted({max(1, round(part * most / 3)) for part in (0, 1, 2, 3)})
    probes = range(min(PROBES, len(measurements)))
    stage = progress.stage("loss by depth and place", len(counts) * len(probes))
    by_depth = {layers - count: measurements.scores(order.skipping(count), stage, probes) for count in counts}
    table = LossTable(by_depth, layers, max_tokens)
    attempts = ATTEMPTS if budget.speedup is None else most
    stage = progress.stage("curve for the budget", attempts * len(measurements))
    replay = partial(measurements.scores, stage=stage)
    if budget.speedup is None:
        candidates = power_curves(order, max(1, order.harmless), max_tokens)
        policy = fit_quality(budget, candidates, table, max_tokens, replay)
    else:  # it may need more layers than can be skipped without harm
        candidates = power_curves_of_speed(order, max_tokens, budget.speedup, cost)
        policy = fit_speed(candidates, order.harmless, table, replay, score)
    return policy, over_steps(replay(policy))


def power_curve(order: LayerOrder, skipped: int, start: int, span: int) -> DepthPolicy:
    """A power curve that falls from `start` on until `skipped` of the layers are skipped, within `span` steps."""
    layers = len(order.importance)
    alpha = math.floor(((layers - skipped) / layers) ** (1 / span) * 1e6) / 1e6
    return replace(DepthPolicy.d3(layers, alpha, start, layers - skipped, order.layers), adapters=order.adapters)


def power_curves(order: LayerOrder, most: int, max_tokens: int) -> list[DepthPolicy]:
    """Policies that skip at most the first `most` layers, over outputs of `max_tokens` tokens."""
    spans = sorted({max(1, round(part * max_tokens)) for part in _SPANS})
    return [
        power_curve(order, skipped, start, span)
        for skipped in range(1, most + 1)
        for start in _starts(max_tokens)
        for span in spans
    ]


def power_curves_of_speed(order: LayerOrder, max_tokens: int, speedup: float, cost: CostModel) -> list[DepthPolicy]:
    """Policies that skip searched layers, each of which falls as slowly as a predicted speedup lets it.

    Raises:
        RequestError: none is that fast.
    """
    policies: list[DepthPolicy] = []
    spans, most = range(1, 8 * max_tokens + 1), len(order.searched)
    for skipped, start in product(range(1, most + 1), _starts(max_tokens)):
        policy = partial(power_curve, order, skipped, start)
        longest = bisect_left(spans, True, key=lambda span: cost.speedup(policy(span), max_tokens) < speedup)
        policies += [policy(longest)] if longest else []
    if not policies:
        highest = cost.speedup(power_curve(order, most, 0, 1), max_tokens)
        raise RequestError(
            f"no policy of this model is predicted to be {speedup}x as fast over {max_tokens} tokens",
            f"the most that its flex layers give is {math.floor(highest * 100) / 100}x",
        )
    return policies


def _starts(max_tokens: int) -> list[int]:
    return sorted({round(part * max_tokens) for part in _STARTS})


class LossTable:
    """Mean loss by depth and place in the output: measured at constant depths, interpolated between them."""

    def __init__(self, measured: dict[int, Scores], num_hidden_layers: int, max_tokens: int) -> None:
        self._layers, self._tokens = num_hidden_layers, max_tokens
        depths = sorted(measured)
        # [depths + 1, places, (KL, disagreement, NLL rise, NLL at full depth)]
        tapered = [self._places(measured[depth]) for depth in depths]
        known = np.stack([*tapered, tapered[0] * (0, 0, 0, 1)])
        columns = known.reshape(len(known), -1).T
        between = [np.interp(range(num_hidden_layers + 1), [*depths, num_hidden_layers], column) for column in columns]
        self._table = np.stack(between, -1).reshape(-1, *known.shape[1:])

    def predict(self, policy: DepthPolicy) -> tuple[Loss, Loss]:
        """The expected loss of a policy over all steps but step 0, which skips no layer, and over the tapered ones."""
        steps = np.arange(1, self._tokens)
        depths = np.array([policy.depth(step) for step in steps.tolist()])
        losses = self._table[depths, self._place(steps)]  # [steps, 4]
        return _mean(losses), _mean(losses[depths < self._layers])

    def _place(self, steps: np.ndarray) -> np.ndarray:
        place: np.ndarray = np.minimum(steps * _PLACES // self._tokens, _PLACES - 1)
        return place

    def _places(self, scores: Scores) -> np.ndarray:
        """Means of each place of an output, [places, 4]; a place without steps takes those of all."""
        losses = np.stack([scores.kl, 1 - scores.agreement, scores.nll - scores.nll_full, scores.nll_full], -1)
        places = self._place(scores.step)
        after_first = scores.step > 0
        chosen = (after_first & (places == place) for place in range(_PLACES))
        return np.stack([losses[steps if steps.any() else after_first].mean(0) for steps in chosen])


def fit_quality(
    budget: Budget, candidates: Sequence[DepthPolicy], table: LossTable, max_tokens: int, replay: Replayed
) -> DepthPolicy:
    """The policy of least mean depth whose replayed loss keeps the budget, intervals included; else the nearest to it.

    Time plays no part: it falls with mean depth, so a quality budget gives the same policy on every machine.
    """
    every = range(len(candidates))
    depth = [policy.mean_depth(max_tokens) for policy in candidates]
    forecast = [budget.worst_share(table.predict(policy)[1]) for policy in candidates]
    replayed: dict[int, float] = {}  # the largest share of a limit that each candidate took, at the bad end
    best: int | None = None  # of those that keep the budget
    margin = 1.0  # replayed over forecast
    for _ in range(ATTEMPTS):
        faster = [i for i in every if i not in replayed and (best is None or depth[i] < depth[best])]
        promising = [i for i in faster if forecast[i] * margin <= 1]
        if promising:
            chosen = min(promising, key=lambda i: depth[i])
        else:  # the gentlest of all might keep the budget if none has so far
            chosen = min(every, key=lambda i: forecast[i])
            if best is not None or chosen in replayed:
                break
        tapered = over_steps(replay(candidates[chosen])).tapered_steps
        if tapered is None:  # too few steps to judge the policy, or the table
            replayed[chosen] = math.inf
            continue
        replayed[chosen] = budget.worst_share(tapered.worst)
        # One per cent of safety: the next candidate should keep the budget.
        margin = 1.01 * replayed[chosen] / max(forecast[chosen], 1e-9)
        if replayed[chosen] <= 1:
            best = chosen
    return candidates[min(replayed, key=lambda i: replayed[i]) if best is None else best]


def fit_speed(
    candidates: Sequence[DepthPolicy], harmless: int, table: LossTable, replay: Replayed, score: PolicyScore
) -> DepthPolicy:
    """Of policies that are equally fast, one that skips few layers early or many of them late.

    For each number of layers that reaches the speed, the curve of lowest predicted loss is replayed. The one of lowest
    KL over all steps is taken, unless the best that skips only the first `harmless` layers, or the fewest if they are
    more, has a `score` that is lower by `CLEARLY`.
    """
    kl: dict[DepthPolicy, float] = {}  # by policy, from the fewest layers skipped to the most
    for min_depth in sorted({policy.min_depth for policy in candidates}, reverse=True):
        equal = (policy for policy in candidates if policy.min_depth == min_depth)
        policy = min(equal, key=lambda policy: table.predict(policy)[0].kl)
        kl[policy] = float(replay(policy).kl.mean())
    fewest = next(iter(kl))
    least = min(fewest.min_depth, fewest.num_hidden_layers - harmless)
    few, many = (min(some, key=kl.__getitem__) for some in ([p for p in kl if p.min_depth >= least], kl))
    return few if few == many or score(few) <= score(many) - CLEARLY else many


def _mean(losses: np.ndarray) -> Loss:
    """The mean over steps; no loss where there are none."""
    kl, disagreement, rise, nll = losses.sum(0).tolist()
    count = max(1, len(losses))
    return Loss(kl / count, 1 - disagreement / count, 100 * rise / max(nll, 1e-9))
