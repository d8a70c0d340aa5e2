"""From a model and prompts to a policy under a budget: searched on one half of the prompts, validated on the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from ..backends import choose_device
from ..errors import RequestError, whole_number
from ..llm import LLM, Prompt
from ..models.download import content_hash
from ..policy import DepthPolicy
from .baselines import COMPARED, compare_orders
from .clock import CostModel, measure_cost, measure_speedup
from .curve import ATTEMPTS, LossTable, curves, curves_of_speed, fit_quality, fit_speed
from .measure import Measurements, skipping
from .problems import WordProblems
from .prompts import BATCH, builtin_prompts, completions, encode_prompts, split
from .replay import Reference, Scores
from .search import ANSWERS, STEPS, find_order, first_steps, flex_layers, layer_importance
from .statistics import Losses, free_running, loss_by_step, over_steps
from .store import current_conditions, digest, open_store
from .summary import MEASURED_ORDER, Budget, CalibratedModel, Frontier, PromptCounts, Provenance, Speedup, Summary

REFERENCE_TOKENS = 128  # most tokens of an answer, where no length is planned for
MAX_PROMPTS = 256
PROBES, FITTED = 12, 24  # answers on which the loss is measured by depth and place, and curves are compared
SLOTS = {"cpu": 64, "cuda": 16}  # prompts whose keys and values stay; a GPU takes memory for all at once
MIN_SLOTS = 3  # the clock alternates between three depths
ReportProgress = Callable[[str, float], None]  # a stage, and what part of it was done since it was last told


@dataclass(frozen=True)
class Calibration:
    """What came out."""

    policy: DepthPolicy  # `policy.to_json()` is what a policy file holds
    summary: Summary  # all that was measured, typed; `summary.to_json()` is plain data

    @property
    def met(self) -> bool:
        """Whether the estimates on held-out prompts keep the budget; `summary.verdict` tells how surely."""
        return self.summary.budget_met


def calibrate(
    model: LLM | str | Path,
    prompts: Sequence[Prompt] | None = None,
    *,
    max_kl: float | None = None,
    min_agreement: float | None = None,
    max_nll_increase: float | None = None,
    speedup: float | None = None,
    answer_tokens: int | None = None,
    seed: int = 0,
    baselines: bool = False,
    name: str = "",
    progress: ReportProgress | None = None,
) -> Calibration:
    """Find the fastest policy that keeps a budget, and validate it on prompts that the search never saw.

    At least one limit on quality is needed, or else a speed. What is measured is kept in the cache folder: an
    interrupted calibration goes on where it was.

    Args:
        model: an `LLM`, or what `LLM` takes: a name, a hub id, a GGUF file or a folder.
        prompts: texts or messages, at least 8 different ones; a random sample of 256 where there are more; default
            the 72 built-in ones.
        max_kl: budget: mean KL(full || policy) over tapered steps, nats, above 0.
        min_agreement: budget: share of tapered steps whose likeliest token is that of full depth, in (0, 1].
        max_nll_increase: budget: rise of the NLL of full depth's own answers, per cent, above 0.
        speedup: instead of a budget: the best quality at this predicted speed, times that of full depth, above 1.
        answer_tokens: length of answer to plan for, at least 2; default the median of the model's own, up to 128.
        seed: of the split of the prompts, and of the sample.
        baselines: also measure other methods' choices of layers, on the same data. Takes long.
        name: of the policy, at most 100 printable characters.
        progress: called with a stage and what part of it, 0 to 1, was done since the last call.

    Returns:
        The policy and all that was measured. The policy is the nearest one where `met` is false.

    Raises:
        RequestError: an argument out of its range, too few prompts, one that does not fit, no layers to spare, or a
            speed out of reach.
        ModelError: the model is missing, damaged or not supported.
    """
    budget = Budget(max_kl, min_agreement, max_nll_increase, speedup)
    if not name.isprintable() or len(name) > 100:
        raise RequestError(f"name is {name[:100]!r}; it must be at most 100 printable characters")
    seed = whole_number("seed", seed, 0)
    answer_tokens = None if answer_tokens is None else whole_number("answer_tokens", answer_tokens, 2)
    if isinstance(prompts, str | Path):
        hint = "taper.calibration.references.read_prompts reads those of a file"
        raise RequestError("prompts must be a list of prompts, not one text or path", hint)
    prompts = builtin_prompts() if prompts is None else prompts
    llm = model if isinstance(model, LLM) else LLM(str(model), max_batch_size=batch_size(len(prompts)))
    calibrator = _Calibrator(llm, seed, progress or (lambda stage, part: None))
    with closing(calibrator.store):
        ids = encode_prompts(llm, prompts, seed, MAX_PROMPTS)
        return calibrator.run(ids, budget, answer_tokens, baselines, name)


def batch_size(prompts: int, device: str = "auto") -> int:
    """The `max_batch_size` of an `LLM` that is to be calibrated on this many prompts."""
    return max(MIN_SLOTS, min(prompts, SLOTS[choose_device(device)]))


@dataclass(frozen=True)
class _Order:
    """The flex layers in the order of skipping; the first `searched` of them by search, the rest by importance."""

    importance: list[float]
    layers: list[int]
    searched: int
    harmless: int  # how many of the first ones problems are solved without
    losses: list[float]


class _Calibrator:
    """One calibration: the model, what is already measured, and who is told of progress."""

    def __init__(self, llm: LLM, seed: int, progress: ReportProgress) -> None:
        self.llm, self.seed, self.progress = llm, seed, progress
        self.layers = llm.config.num_hidden_layers
        if self.layers < 2:
            raise RequestError(f"a model of {self.layers} layer has none to spare")
        if llm.engine.backend.num_slots < MIN_SLOTS:
            raise RequestError(f"calibration runs {MIN_SLOTS} outputs in turn", f"max_batch_size: {MIN_SLOTS} or more")
        self.model_hash, self.conditions = content_hash(llm.path), current_conditions(llm)
        self.store = open_store(self.model_hash, self.conditions)
        self.problems = WordProblems(llm, self.store)

    def run(
        self, prompts: Sequence[tuple[int, ...]], budget: Budget, answer_tokens: int | None, baselines: bool, name: str
    ) -> Calibration:
        """All stages in turn."""
        full, max_tokens = DepthPolicy.full(self.layers), answer_tokens or REFERENCE_TOKENS
        context, longest = self.llm.engine.backend.context_length, max(map(len, prompts))
        if longest + max_tokens > context:
            raise RequestError(
                f"a prompt of {longest} tokens and an answer of {max_tokens} do not fit into a context of {context}",
                "raise --context, shorten the prompts or lower --answer-tokens",
            )
        references = self._complete("answers at full depth", prompts, full, max_tokens)
        planned = answer_tokens or int(np.median([len(reference.answer_ids) for reference in references]))
        search, held_out = split(references)
        if planned < 2 or not all(any(len(r.answer_ids) > 1 for r in part) for part in (search, held_out)):
            raise RequestError(
                "the answers end with their first token: there is no step to taper", "give other prompts"
            )
        middle = sorted(prompts, key=len)[len(prompts) // 2]
        cost = self._cost(middle, planned)
        order = self._order(search, budget, cost)
        policy, on_search_prompts = self._curve(budget, order, search, cost, planned)

        scores = self._scores("validation on held-out prompts", held_out, policy)
        held_out_ids = [reference.prompt_ids for reference in held_out]
        own = self._complete("answers of the policy", held_out_ids, policy, max_tokens)
        judged = self._scores("answers of the policy at full depth", own, full)
        frontier = self._frontier(order, held_out, cost, baselines)
        problems = self.problems.validate(policy, partial(self._ticks, "word problems"))
        self._ticks("speed", 1)()
        measured = measure_speedup(self.llm.engine, middle, policy, planned)
        identity = self.llm.config.identity
        provenance = Provenance(
            mean_depth=round(policy.mean_depth(planned), 3),
            speedup=Speedup(round(cost.speedup(policy, planned), 4), measured),
            held_out=over_steps(scores),
            free_running=free_running(own, judged, held_out, scores),
            problems=problems,
            model=CalibratedModel(_name_of(self.llm), self.model_hash, self.layers),
            prompts=PromptCounts(len(search), len(held_out), digest(sorted(prompts))),
            seed=self.seed,
            budget=budget,
            tokens=sum(len(reference.prompt_ids) + len(reference.answer_ids) for reference in references),
            answer_tokens=planned,
            policy=name or policy.label,
            on_search_prompts=on_search_prompts,
            conditions=self.conditions,
        )
        summary = Summary(
            **vars(provenance),
            model_identity=identity,
            cost_ms=cost,
            importance=order.importance,
            skip_order=order.layers,
            searched_layers=order.searched,
            core_layers=sorted(policy.core_layers),
            curve=[policy.depth(step) for step in range(planned)],
            by_step=loss_by_step(scores),
            frontier=frontier,
            harmless_layers=order.harmless if self.problems.tell else None,
        )
        return Calibration(replace(policy, name=name, model=identity, provenance=provenance.to_json()), summary)

    def _ticks(self, stage: str, count: int) -> Callable[[], None]:
        """Begin a stage; to be called `count` times while it goes on."""
        self.progress(stage, 0.0)
        return lambda: self.progress(stage, 1 / max(1, count))

    def _complete(
        self, stage: str, prompts: Sequence[tuple[int, ...]], policy: DepthPolicy, max_tokens: int
    ) -> list[Reference]:
        tick = self._ticks(stage, -(-len(prompts) // BATCH))
        return completions(self.llm, prompts, policy, max_tokens, self.store, tick)

    def _scores(self, stage: str, references: Sequence[Reference], policy: DepthPolicy) -> Scores:
        with closing(Measurements(self.llm.engine, references, self.store)) as measurements:
            return measurements.scores(policy, self._ticks(stage, len(references)))

    def _cost(self, prompt: tuple[int, ...], max_tokens: int) -> CostModel:
        tick = self._ticks("time of a step by depth", 1)
        clock = {"machine": self.conditions.machine, "threads": self.conditions.threads}
        key = {"cost": max_tokens, "prompt": len(prompt), **clock}
        cost = CostModel(**self.store.remember(key, lambda: asdict(measure_cost(self.llm.engine, prompt, max_tokens))))
        tick()
        return cost

    def _order(self, search: Sequence[Reference], budget: Budget, cost: CostModel) -> _Order:
        """Importance of each layer, then the order of as many as the budget may need."""
        answers = first_steps(search[:ANSWERS], STEPS)
        steps = [len(reference.answer_ids) - 1 for reference in answers]
        with closing(Measurements(self.llm.engine, answers, self.store)) as measurements:
            tick = self._ticks("importance of each layer", (len(answers) + 1) // 2)
            importance = layer_importance(self.layers, steps, partial(measurements.kl_sums, tick=tick))
            flex = flex_layers(importance)
            rounds = min(len(flex), self.layers - 1, self._rounds(budget, cost))
            tick = self._ticks("order of layers", rounds * len(answers))

            def harm(skipped: frozenset[int]) -> float:
                return self._harm(measurements, skipping(self.layers, skipped))

            kl_sums = partial(measurements.kl_sums, tick=tick)
            order = find_order(importance, flex, rounds, steps, kl_sums, harm)
        rest = sorted(set(flex) - set(order.layers), key=lambda layer: importance[layer])
        return _Order(importance, order.layers + rest, len(order.layers), order.harmless, order.losses)

    def _harm(self, measurements: Measurements, policy: DepthPolicy) -> float:
        """By how much fewer problems are solved; replay gives back the slots that the answers need."""
        if self.llm.engine.num_free_slots < BATCH:
            measurements.replay.close()
        return self.problems.harm(policy)

    def _rounds(self, budget: Budget, cost: CostModel) -> int:
        """A third of the layers; more where a speed needs it."""
        rounds = self.layers // 3
        if budget.speedup is not None:
            enough = cost.step_ms(self.layers) / budget.speedup
            needed = (n for n in range(1, self.layers) if cost.step_ms(self.layers - n) <= enough)
            rounds = max(rounds, next(needed, 0) * 5 // 4)
        return max(1, rounds)

    def _curve(
        self, budget: Budget, order: _Order, search: Sequence[Reference], cost: CostModel, max_tokens: int
    ) -> tuple[DepthPolicy, Losses]:
        """The policy for the budget, and what it costs on the search prompts."""
        counts = sorted({max(1, round(part * order.searched / 3)) for part in (0, 1, 2, 3)})
        probes = range(min(PROBES, len(search)))
        constant = [skipping(self.layers, order.layers[:count]) for count in counts]
        with closing(Measurements(self.llm.engine, search[:FITTED], self.store)) as measurements:
            tick = self._ticks("loss by depth and place", len(counts) * len(probes))
            by_depth = {policy.min_depth: measurements.scores(policy, tick, probes) for policy in constant}
            table = LossTable(by_depth, self.layers, max_tokens)
            tick = self._ticks(
                "curve for the budget", (ATTEMPTS if budget.speedup is None else order.searched) * len(measurements)
            )
            replay = partial(measurements.scores, tick=tick)
            if budget.speedup is None:
                candidates = curves(order.layers, max(1, order.harmless), self.layers, max_tokens)
                policy = fit_quality(budget, candidates, table, max_tokens, replay)
            else:  # it may need more layers than problems are solved without
                known = (order.layers, order.searched, self.layers, max_tokens)
                candidates = curves_of_speed(*known, budget.speedup, cost)
                policy = fit_speed(candidates, order.harmless, table, replay, partial(self._harm, measurements))
            return policy, over_steps(replay(policy))

    def _frontier(self, order: _Order, held_out: Sequence[Reference], cost: CostModel, baselines: bool) -> Frontier:
        """Loss against constant depth: of the order found, on the search prompts; with baselines, of all, held out."""
        depths = list(range(self.layers - 1, self.layers - 1 - order.searched, -1))
        speedup = {depth: round(cost.step_ms(self.layers) / cost.step_ms(depth), 4) for depth in depths}
        if not baselines:
            return Frontier("search", speedup, {MEASURED_ORDER: dict(zip(depths, order.losses, strict=True))})
        answers = first_steps(held_out, COMPARED)
        with closing(Measurements(self.llm.engine, answers, self.store)) as measurements:
            compared = compare_orders(measurements, order.layers, depths, partial(self._ticks, "baselines"))
        return Frontier("held out", speedup, **vars(compared))


def _name_of(llm: LLM) -> str:
    """What to call a model in a file that others read: of a path the last part."""
    return Path(llm.model).name if Path(llm.model).exists() else llm.model
