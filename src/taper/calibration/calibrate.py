"""From a model and prompts to a policy under a budget: searched on one half of the prompts, proven on the other."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..errors import RequestError
from ..llm import LLM, Prompt
from ..loading import cache_folder, content_hash
from ..policy import DepthPolicy
from ..replay import Reference, Scores
from .baselines import COMPARED, compare_orders
from .cost import CostModel, measure_cost, measure_speedup
from .fit import ATTEMPTS, Budget, LossTable, curves, curves_of_speed, fit_quality, fit_speed
from .measure import Measurements, skipping
from .proof import free_running, plain
from .references import BATCH, answer, encode_prompts, split
from .search import ANSWERS, STEPS, find_order, first_steps, layer_importance
from .statistics import Estimate, over_steps
from .store import Store, digest

REFERENCE_TOKENS = 128  # most tokens of an answer, where no length is planned for
MAX_PROMPTS = 256
PROBES, FITTED = 12, 24  # answers on which the loss is measured by depth and place, and curves are compared
CORE = 5.0  # a layer that costs this many times the median of all, skipped alone, always runs
Progress = Callable[[str, float], None]  # a stage, and what part of it was done since it was last told


@dataclass(frozen=True)
class Calibration:
    """What came out: the policy, whether the proof bears it out, and all that was measured, as JSON."""

    policy: DepthPolicy
    met: bool
    summary: dict[str, Any]


def calibrate(
    llm: LLM,
    prompts: Sequence[Prompt],
    budget: Budget,
    *,
    answer_tokens: int | None = None,
    seed: int = 0,
    baselines: bool = False,
    name: str = "",
    progress: Progress = lambda stage, part: None,
) -> Calibration:
    """Find the fastest policy that keeps a budget, and prove it on prompts the search never saw.

    What was measured is kept in the cache folder: an interrupted calibration goes on where it was.

    Args:
        llm: the model.
        prompts: at least 8 different ones; a random sample of 256 where there are more.
        budget: what the policy must keep to.
        answer_tokens: length of answer to plan for; default the median of the model's own, up to 128.
        seed: of the split and the samples.
        baselines: also measure other methods' choices of layers, on the same data.
        name: of the policy.
        progress: told how far each stage is.

    Raises:
        RequestError: too few prompts, one that cannot be answered, no layers to spare, or a speed out of reach.
    """
    if not name.isprintable() or len(name) > 100:
        raise RequestError(f"name is {name[:100]!r}; it must be at most 100 printable characters")
    calibrator = _Calibrator(llm, seed, progress)
    try:
        ids = encode_prompts(llm, prompts, seed, MAX_PROMPTS)
        return calibrator.run(ids, budget, answer_tokens, baselines, name)
    finally:
        calibrator.store.close()


def open_store(llm: LLM, model_hash: str) -> Store:
    """What was measured on a model, in the cache folder."""
    common = {"model": model_hash, "backend": type(llm.engine.backend).__name__, "dtype": llm.dtype}
    return Store(cache_folder() / "calibration.sqlite", common)


def name_of(llm: LLM) -> str:
    """What to call a model in a file that others read: of a path the last part."""
    return Path(llm.model).name if Path(llm.model).exists() else llm.model


@dataclass(frozen=True)
class _Order:
    """The flex layers in the order of skipping; the first `searched` of them by search, the rest by importance."""

    importance: list[float]
    layers: list[int]
    searched: int
    losses: list[float]


class _Calibrator:
    """One calibration: the model, what is already measured, and who is told of progress."""

    def __init__(self, llm: LLM, seed: int, progress: Progress) -> None:
        self.llm, self.seed, self.progress = llm, seed, progress
        self.layers = llm.config.num_hidden_layers
        if self.layers < 2:
            raise RequestError(f"a model of {self.layers} layer has none to spare")
        self.model_hash = content_hash(llm.path)
        self.store = open_store(llm, self.model_hash)

    def run(
        self, prompts: Sequence[tuple[int, ...]], budget: Budget, answer_tokens: int | None, baselines: bool, name: str
    ) -> Calibration:
        """All stages in turn."""
        full, longest = DepthPolicy.full(self.layers), answer_tokens or REFERENCE_TOKENS
        context, most = self.llm.engine.backend.context_length, max(map(len, prompts))
        if most + longest > context:
            raise RequestError(
                f"a prompt of {most} tokens and an answer of {longest} do not fit into a context of {context}",
                "raise --context, shorten the prompts or lower --answer-tokens",
            )
        references = self._answers("answers at full depth", prompts, full, longest)
        tokens = answer_tokens or int(np.median([len(reference.answer_ids) for reference in references]))
        search, held_out = split(references)
        if tokens < 2 or not all(any(len(r.answer_ids) > 1 for r in part) for part in (search, held_out)):
            raise RequestError(
                "the answers end with their first token: there is no step to taper", "give other prompts"
            )
        middle = sorted(prompts, key=len)[len(prompts) // 2]
        cost = self._cost(middle, tokens)
        order = self._order(search, budget, cost, tokens)
        policy, expected = self._curve(budget, order, search, cost, tokens)

        scores = self._scores("proof on held-out prompts", held_out, policy)
        found = over_steps(scores)
        own = self._answers("answers of the policy", [reference.prompt_ids for reference in held_out], policy, longest)
        judged = self._scores("answers of the policy at full depth", own, full)
        frontier = self._frontier(order, held_out, cost, baselines)
        self._ticks("speed", 1)()
        ratios = measure_speedup(self.llm.engine, middle, policy, tokens)
        measured = Estimate(float(np.median(ratios)), min(ratios), max(ratios))

        met = budget.worst(found.get("tapered steps")) <= 1
        summary = {
            "model": {"name": name_of(self.llm), "sha256": self.model_hash, "num_hidden_layers": self.layers},
            "prompts": {"search": len(search), "held_out": len(held_out), "sha256": digest(sorted(prompts))},
            "seed": self.seed,
            "budget": budget.given,
            "budget_met": met,
            "tokens": sum(len(reference.prompt_ids) + len(reference.answer_ids) for reference in references),
            "answer_tokens": tokens,
            "policy": name or policy.label,
            "mean_depth": round(policy.mean_depth(tokens), 3),
            "speedup": {"predicted": round(cost.speedup(policy, tokens), 4), "measured": plain(measured)},
            "held_out": plain(found),
            "on_search_prompts": plain(expected),
            "free_running": plain(free_running(own, judged, held_out, scores)),
            "conditions": self._conditions(),
        }
        provenance = dict(summary)
        details = {
            "model_identity": asdict(self.llm.config.identity),
            "cost_ms": asdict(cost),
            "importance": order.importance,
            "skip_order": order.layers,
            "searched_layers": order.searched,
            "core_layers": sorted(policy.core_layers),
            "curve": [policy.depth(step) for step in range(tokens)],
            "by_step": _by_step(scores),
            "frontier": frontier,
        }
        policy = replace(policy, name=name, model=self.llm.config.identity, provenance=provenance)
        return Calibration(policy, met, summary | details)

    def _ticks(self, stage: str, count: int) -> Callable[[], None]:
        """Begin a stage; to be called `count` times while it goes on."""
        self.progress(stage, 0.0)
        return lambda: self.progress(stage, 1 / max(1, count))

    def _answers(
        self, stage: str, prompts: Sequence[tuple[int, ...]], policy: DepthPolicy, max_tokens: int
    ) -> list[Reference]:
        tick = self._ticks(stage, -(-len(prompts) // BATCH))
        return answer(self.llm, prompts, policy, max_tokens, self.store, tick)

    def _scores(self, stage: str, references: Sequence[Reference], policy: DepthPolicy) -> Scores:
        with closing(Measurements(self.llm.engine, references, self.store)) as measurements:
            return measurements.scores(policy, self._ticks(stage, len(references)))

    def _cost(self, prompt: tuple[int, ...], tokens: int) -> CostModel:
        tick = self._ticks("time of a step by depth", 1)
        what = {"cost": tokens, "prompt": len(prompt), "machine": _machine(), "threads": self.llm.threads}
        cost = CostModel(**self.store.remember(what, lambda: asdict(measure_cost(self.llm.engine, prompt, tokens))))
        tick()
        return cost

    def _order(self, search: Sequence[Reference], budget: Budget, cost: CostModel, tokens: int) -> _Order:
        """Importance of each layer, then the order of as many as the budget may need."""
        answers = first_steps(search[:ANSWERS], STEPS)
        steps = [len(reference.answer_ids) - 1 for reference in answers]
        with closing(Measurements(self.llm.engine, answers, self.store)) as measurements:
            tick = self._ticks("importance of each layer", (len(answers) + 1) // 2)
            importance = layer_importance(self.layers, steps, partial(measurements.kl_sums, tick=tick))
            flex = [i for i, kl in enumerate(importance) if kl <= CORE * float(np.median(importance))]
            rounds = min(len(flex), self.layers - 1, self._rounds(budget, cost, tokens))
            tick = self._ticks("order of layers", rounds * len(answers))
            order, losses = find_order(importance, flex, rounds, steps, partial(measurements.kl_sums, tick=tick))
        rest = sorted(set(flex) - set(order), key=lambda layer: importance[layer])
        return _Order(importance, order + rest, len(order), losses)

    def _rounds(self, budget: Budget, cost: CostModel, tokens: int) -> int:
        """A third of the layers; more where a speed needs it."""
        rounds = self.layers // 3
        if budget.speedup is not None:
            fast = (skipping(self.layers, frozenset(range(n))) for n in range(1, self.layers))
            enough = next((n for n, policy in enumerate(fast, 1) if cost.speedup(policy, tokens) >= budget.speedup), 0)
            rounds = max(rounds, enough * 5 // 4)
        return max(1, rounds)

    def _curve(
        self, budget: Budget, order: _Order, search: Sequence[Reference], cost: CostModel, tokens: int
    ) -> tuple[DepthPolicy, dict[str, dict[str, Estimate]]]:
        """The policy for the budget, and what it costs on the search prompts."""
        counts = sorted({max(1, round(part * order.searched / 3)) for part in (0, 1, 2, 3)})
        probes = range(min(PROBES, len(search)))
        constant = [skipping(self.layers, frozenset(order.layers[:count])) for count in counts]
        shapes = (order.layers, order.searched, self.layers, tokens)
        with closing(Measurements(self.llm.engine, search[:FITTED], self.store)) as measurements:
            tick = self._ticks("loss by depth and place", len(counts) * len(probes))
            table = LossTable(
                {p.min_depth: measurements.scores(p, tick, probes) for p in constant}, self.layers, tokens
            )
            replay = partial(
                measurements.scores, tick=self._ticks("curve for the budget", ATTEMPTS * len(measurements))
            )
            if budget.speedup is None:
                policy = fit_quality(budget, curves(*shapes), table, tokens, replay)
            else:
                policy = fit_speed(curves_of_speed(*shapes, budget.speedup, cost), table, replay)
            return policy, over_steps(replay(policy))

    def _frontier(
        self, order: _Order, held_out: Sequence[Reference], cost: CostModel, baselines: bool
    ) -> dict[str, Any]:
        """Loss against constant depth: of the order found, on the search prompts; with baselines, of all, held out."""
        depths = list(range(self.layers - 1, self.layers - 1 - order.searched, -1))
        step_ms = {depth: cost.fixed_ms + cost.layer_ms * depth for depth in (self.layers, *depths)}
        speedup = {str(depth): round(step_ms[self.layers] / step_ms[depth], 4) for depth in depths}
        if not baselines:
            kl = {str(depth): loss for depth, loss in zip(depths, order.losses, strict=True)}
            return {"prompts": "search", "speedup": speedup, "kl": {"measured order": kl}}
        answers = first_steps(held_out, COMPARED)
        with closing(Measurements(self.llm.engine, answers, self.store)) as measurements:
            compared = compare_orders(measurements, order.layers, depths, partial(self._ticks, "baselines"))
        return {"prompts": "held out", "speedup": speedup, **compared}

    def _conditions(self) -> dict[str, Any]:
        return {
            "date": datetime.date.today().isoformat(),
            "taper": __version__,
            "backend": type(self.llm.engine.backend).__name__.removesuffix("Backend").lower(),
            "dtype": self.llm.dtype,
            "threads": self.llm.threads,
            "machine": _machine(),
            "python": platform.python_version(),
        }


def _machine() -> str:
    """The processor and how many of its cores there are."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores"


def _by_step(scores: Scores) -> dict[str, list[float]]:
    """Mean KL and agreement of each step, and how many answers have it."""
    count = np.bincount(scores.step)
    sums = {name: np.bincount(scores.step, weights=getattr(scores, name)) for name in ("kl", "agreement")}
    return {"answers": count.tolist(), **{name: (total / count).tolist() for name, total in sums.items()}}
