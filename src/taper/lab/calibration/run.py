"""From a model and prompts to a policy under a budget: searched on one half of the prompts, validated on the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ...backends import choose_device
from ...errors import RequestError, flag, whole_number
from ...llm import LLM, Prompt
from ...models import model_name
from ...models.download import content_hash
from ...policy import DepthPolicy
from .clock import CostModel, TimedRuns, measure_cost, measure_speedup
from .problems import Problems, word_problems
from .progress import Progress, Report
from .prompts import BATCH, builtin_prompts, completions, encode_prompts, next_prompts, split
from .replay import Reference, Replay, Scores
from .search import (
    COLLAPSED,
    COMPLETIONS,
    FITTED,
    HARMLESS,
    STEPS,
    LayerOrder,
    Skipped,
    first_steps,
    fit_curve,
    flex_layers,
    layer_importance,
    layers_to_skip,
)
from .statistics import Estimate, LossEstimate, free_running, loss_by_step, over_steps
from .store import Measurements, current_conditions, digest, numbers, open_store, skipping
from .summary import (
    Budget,
    CalibratedModel,
    CalibrationSummary,
    Example,
    Frontier,
    PromptCounts,
    Speedup,
    Validation,
    to_plain,
)

REFERENCE_TOKENS = 128  # most tokens of an output, if no length is planned for
MAX_PROMPTS = 256
QUICK_PROMPTS, QUICK_TOKENS = 24, 48  # for a first look
EXAMPLES = 3  # outputs that people see
SLOTS = {"cpu": 64, "cuda": 16}  # prompts whose keys and values stay; a GPU takes memory for all at once
MIN_SLOTS = 3  # the clock alternates between three depths


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration."""

    policy: DepthPolicy  # `taper.save_policy` writes it
    summary: CalibrationSummary  # all that was measured, typed; `summary.to_json()` is plain data

    @property
    def met(self) -> bool:
        """Whether the estimates on held-out prompts keep the budget; `summary.verdict` says how surely."""
        return self.summary.budget_met


def calibrate(
    model: LLM | str | Path,
    prompts: Sequence[Prompt] | None = None,
    *,
    max_kl: float | None = None,
    min_agreement: float | None = None,
    max_nll_increase: float | None = None,
    speedup: float | None = None,
    healed: DepthPolicy | None = None,
    answer_tokens: int | None = None,
    quick: bool = False,
    seed: int = 0,
    name: str = "",
    progress: Report | None = None,
) -> Calibration:
    """Find the fastest policy that keeps a budget, and validate it on prompts that the search never saw.

    At least one limit on quality is needed, or else a speed. Measurements are kept in the cache folder: an interrupted
    calibration continues where it was.

    Args:
        model: an `LLM`, or what `LLM` takes: a name, a hub id, a GGUF file or a folder.
        prompts: texts or messages, at least 8 different ones; a random sample of 256 if there are more; default
            the 72 built-in ones.
        max_kl: budget: mean KL(full || policy) over tapered steps, nats, above 0.
        min_agreement: budget: share of tapered steps whose argmax is that of full depth, in (0, 1].
        max_nll_increase: budget: rise of the NLL of full depth's own outputs, per cent, above 0.
        speedup: instead of a budget: the best quality at this predicted speed, times that of full depth, above 1.
        healed: a policy with adapters: its order is kept, and only the curve is searched for.
        answer_tokens: length of output to plan for, at least 2; default the median of the model's own, up to 128.
        quick: a first look with 24 prompts, outputs of up to 48 tokens and no word problems: intervals are wide.
        seed: of the split of the prompts, and of the sample.
        name: of the policy, at most 100 printable characters.
        progress: called with a stage and what part of it, 0 to 1, was done since the last call.

    Returns:
        The policy and all that was measured. If `met` is false, the policy is the nearest one.

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
        hint = "taper.calibration.prompts.read_prompts reads those of a file"
        raise RequestError("prompts must be a list of prompts, not one text or path", hint)
    prompts = builtin_prompts() if prompts is None else prompts
    llm = model if isinstance(model, LLM) else LLM(str(model), max_batch_size=batch_size(len(prompts)))
    if healed is not None:
        check_adapters(llm, healed)
    with closing(Calibrator(llm, seed, progress)) as calibrator:
        texts = encode_prompts(llm, prompts, seed, QUICK_PROMPTS if flag("quick", quick) else MAX_PROMPTS)
        return calibrator.run(texts, budget, answer_tokens, name, healed, quick)


def check_adapters(llm: LLM, policy: DepthPolicy) -> None:
    """Check that a policy has adapters for the first layer that it skips, and is for this model.

    Raises:
        RequestError: it has none.
        PolicyError: it is for another model.
    """
    llm.resolve_policy(policy)
    if not policy.adapted_layers:
        raise RequestError(f"policy {policy.label} has no adapters", "taper heal makes a policy that has")


def batch_size(prompts: int, device: str = "auto") -> int:
    """The `max_batch_size` of an `LLM` that is to be calibrated on this many prompts."""
    return max(MIN_SLOTS, min(prompts, SLOTS[choose_device(device)]))


class Calibrator:
    """A model that is being calibrated, and the store of its measurements, which `close` closes."""

    def __init__(self, llm: LLM, seed: int, progress: Report | None) -> None:
        self.llm, self.seed, self.progress = llm, seed, Progress(progress)
        self.layers = llm.config.num_hidden_layers
        self.full = DepthPolicy.full(self.layers)
        if self.layers < 2:
            raise RequestError(f"a model of {self.layers} layer has none to spare")
        if llm.engine.backend.num_slots < MIN_SLOTS:
            raise RequestError(f"calibration runs {MIN_SLOTS} outputs in turn", f"max_batch_size: {MIN_SLOTS} or more")
        self.conditions = current_conditions(llm)
        # Of a path, only the last part goes into files that others read.
        name = model_name(llm.model) if Path(llm.model).exists() else llm.model
        self.model = CalibratedModel(name, content_hash(llm.path), self.layers)
        self.store = open_store(self.model.sha256, self.conditions)

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def measurements(self, references: Sequence[Reference]) -> closing[Measurements]:
        """Replays of known completions."""
        return closing(Measurements(self.llm.engine, references, self.store))

    def cost(self, prompt: tuple[int, ...], max_tokens: int, healed: DepthPolicy | None = None) -> CostModel:
        """The time of a step by depth on this machine, in outputs of `max_tokens` tokens; with a policy's adapters."""
        stage = self.progress.stage("time of a step by depth", 1)
        key: dict[str, Any] = {"cost": max_tokens, "prompt": len(prompt)}
        key |= {"machine": self.conditions.machine, "threads": self.conditions.threads}
        key |= {"adapters": healed.adapters.digest} if healed and healed.adapters else {}
        measured = partial(measure_cost, self.llm.engine, prompt, max_tokens, healed)
        cost = CostModel(**self.store.remember(key, lambda: asdict(measured())))
        stage.done()
        return cost

    def speedup(self, prompt: tuple[int, ...], policy: DepthPolicy, max_tokens: int) -> TimedRuns:
        """The speed of a policy as measured now."""
        self.progress.stage("speed", 1).done()
        return measure_speedup(self.llm.engine, prompt, policy, max_tokens)

    def order(
        self, measurements: Measurements, problems: Problems | None, rounds: int, tolerance: float
    ) -> tuple[list[float], Iterator[Skipped]]:
        """The importance of each layer, and the first `rounds` layers to skip, at most all but one.

        If a layer makes the score on problems exceed `tolerance`, others are tried instead.
        """
        steps = measurements.tapered_steps
        stage = self.progress.stage("importance of each layer", (len(steps) + 1) // 2)
        importance = layer_importance(self.layers, steps, partial(measurements.kl_sums, stage=stage))
        rounds = min(len(flex_layers(importance)), self.layers - 1, rounds)
        stage = self.progress.stage("order of layers", rounds * len(steps))
        kl_sums = partial(measurements.kl_sums, stage=stage)

        def score(skipped: frozenset[int]) -> float:
            return self.score(problems, measurements, skipping(self.layers, skipped))

        return importance, islice(layers_to_skip(importance, steps, kl_sums, score, tolerance), rounds)

    def order_of_adapters(
        self, measurements: Measurements, problems: Problems | None, policy: DepthPolicy
    ) -> LayerOrder:
        """The order of a policy with adapters, as far as its adapters go, and what each layer more costs."""
        assert policy.adapters is not None
        steps, first = measurements.tapered_steps, policy.adapted_layers
        stage = self.progress.stage("importance of each layer", (len(steps) + 1) // 2)
        importance = layer_importance(self.layers, steps, partial(measurements.kl_sums, stage=stage))
        order = LayerOrder(importance, [Skipped(layer, 0.0, 0.0) for layer in first], policy.adapters.only(first))
        stage = self.progress.stage("order of layers", len(first) * len(steps))
        searched, score = [], 0.0
        for count, layer in enumerate(first, 1):
            skipping = order.skipping(count)
            if score < COLLAPSED:
                score = self.score(problems, measurements, skipping)
            searched.append(Skipped(layer, float(measurements.scores(skipping, stage).kl.sum()) / sum(steps), score))
        return order._replace(searched=searched)

    def score(self, problems: Problems | None, measurements: Measurements, policy: DepthPolicy) -> float:
        """By how many standard errors a policy solves fewer problems; 0 if there are none."""
        if problems is None:
            return 0.0
        if self.llm.engine.num_free_slots < BATCH:  # prompts that are held for replay take them
            measurements.close()
        return problems.score(policy)

    # A calibration to prompts

    def run(
        self,
        texts: Mapping[tuple[int, ...], str],
        budget: Budget,
        answer_tokens: int | None,
        name: str,
        healed: DepthPolicy | None,
        quick: bool,
    ) -> Calibration:
        """All stages in turn; `texts` are prompts by their token ids."""
        llm, layers, prompts = self.llm, self.layers, list(texts)
        max_tokens = answer_tokens or (QUICK_TOKENS if quick else REFERENCE_TOKENS)
        context, longest = llm.engine.backend.context_length, max(map(len, prompts))
        if longest + max_tokens > context:
            raise RequestError(
                f"a prompt of {longest} tokens and an output of {max_tokens} do not fit into a context of {context}",
                "raise --context, shorten the prompts or lower --answer-tokens",
            )
        references = self.complete("outputs at full depth", prompts, self.full, max_tokens)
        planned = answer_tokens or int(np.median([len(reference.completion_ids) for reference in references]))
        search, held_out = split(references)
        if planned < 2 or not all(any(len(r.completion_ids) > 1 for r in part) for part in (search, held_out)):
            raise RequestError(
                "the outputs end with their first token: there is no step to taper", "give other prompts"
            )
        middle = sorted(prompts, key=len)[len(prompts) // 2]
        cost = self.cost(middle, planned, healed)
        problems = None if quick else word_problems(llm, self.store)
        with self.measurements(first_steps(search[:COMPLETIONS], STEPS)) as measurements:
            if healed is None:
                importance, skipped = self.order(measurements, problems, self._rounds(budget, cost), HARMLESS)
                order = LayerOrder(importance, list(skipped))
            else:
                order = self.order_of_adapters(measurements, problems, healed)
        with self.measurements(search[:FITTED]) as measurements:
            score = partial(self.score, problems, measurements)
            policy, on_search_prompts = fit_curve(budget, order, measurements, cost, planned, score, self.progress)

        validated, scores, own = self.validate(held_out, policy, max_tokens, problems)
        pairs = list(zip(held_out, own, strict=True))[:EXAMPLES]
        examples = [Example(texts[full.prompt_ids], self.text(full), self.text(tapered)) for full, tapered in pairs]
        depths = [layers - count for count in range(1, len(order.searched) + 1)]
        summary = CalibrationSummary(
            mean_depth=round(policy.mean_depth(planned), 3),
            speedup=Speedup(round(cost.speedup(policy, planned), 4), self.speedup(middle, policy, planned)),
            **vars(validated),
            model=self.model,
            prompts=PromptCounts(len(search), len(held_out), digest(sorted(prompts)), quick or None),
            seed=self.seed,
            budget=budget,
            tokens=sum(len(reference.prompt_ids) + len(reference.completion_ids) for reference in references),
            answer_tokens=planned,
            policy=name or policy.label,
            on_search_prompts=on_search_prompts,
            conditions=self.conditions,
            model_identity=llm.config.identity,
            cost_ms=cost,
            importance=order.importance,
            skip_order=order.layers,
            searched_layers=len(order.searched),
            core_layers=sorted(policy.core_layers),
            curve=[policy.depth(step) for step in range(planned)],
            by_step=loss_by_step(scores),
            frontier=Frontier(
                {depth: round(cost.step_ms(layers) / cost.step_ms(depth), 4) for depth in depths},
                {depth: skipped.kl for depth, skipped in zip(depths, order.searched, strict=True)},
            ),
            harmless_layers=None if problems is None else order.harmless,
            examples=examples,
        )
        if policy.adapters is not None:  # those that it uses; a file needs no others
            skipped_layers = policy.skip_order[: layers - policy.min_depth]
            policy = replace(policy, adapters=policy.adapters.only(skipped_layers))
        provenance = summary.provenance
        if healed is not None and "healing" in healed.provenance:
            provenance["healing"] = healed.provenance["healing"]
        policy = replace(policy, name=name, model=llm.config.identity, provenance=provenance)
        return Calibration(policy, summary)

    def validate(
        self, held_out: Sequence[Reference], policy: DepthPolicy, max_tokens: int, problems: Problems | None
    ) -> tuple[Validation, Scores, list[Reference]]:
        """What a policy costs on held-out outputs of full depth, in its own outputs and on held-out problems; these."""
        scores = self._scores("validation on held-out prompts", held_out, policy)
        own = self.complete("outputs of the policy", [r.prompt_ids for r in held_out], policy, max_tokens)
        own_scores = self._scores("outputs of the policy at full depth", own, self.full)
        solved = None if problems is None else problems.validate(policy, self.progress)
        free = free_running(own, own_scores, held_out, scores)
        after = self._next_outputs(own, policy, max_tokens)
        return Validation(over_steps(scores), free, problems=solved, next_output=after), scores, own

    def text(self, output: Reference) -> str:
        """The text of an output."""
        return self.llm.tokenizer.decode(output.completion_ids).strip()

    def _next_outputs(self, own: Sequence[Reference], policy: DepthPolicy, max_tokens: int) -> LossEstimate | None:
        """What it costs outputs at full depth that the policy's own come before them, keys and values filled."""
        going_on = next_prompts(self.llm, own, max_tokens)
        if not going_on:
            return None
        outputs = self.complete("next outputs at full depth", [prompt for _, prompt in going_on], self.full, max_tokens)
        stage = self.progress.stage("next outputs after tapered ones", len(outputs))

        def measured() -> Any:
            with closing(Replay(self.llm.engine, outputs)) as replay:
                scores = []
                for index, (first, _) in enumerate(going_on):
                    scores.append(replay.after_tapered(index, policy, first))
                    stage.done()
            return to_plain(over_steps(Scores.joined(scores)).all_steps)

        key = {"after outputs of": numbers(policy), "next outputs": [vars(output) for output in outputs]}
        losses = self.store.remember(key, measured)
        return LossEstimate(**{name: Estimate(*values) for name, values in losses.items()})

    def complete(
        self,
        name: str,
        prompts: Sequence[tuple[int, ...]],
        policy: DepthPolicy,
        max_tokens: int,
        temperature: float = 0.0,
    ) -> list[Reference]:
        """Outputs of a policy, in a stage of this name."""
        stage = self.progress.stage(name, -(-len(prompts) // BATCH))
        return completions(self.llm, prompts, policy, max_tokens, self.store, stage, temperature)

    def _scores(self, name: str, references: Sequence[Reference], policy: DepthPolicy) -> Scores:
        with self.measurements(references) as measurements:
            return measurements.scores(policy, self.progress.stage(name, len(references)))

    def _rounds(self, budget: Budget, cost: CostModel) -> int:
        """How many layers to search for: a third of them; more if a speed needs it."""
        rounds = self.layers // 3
        if budget.speedup is not None:
            enough = cost.step_ms(self.layers) / budget.speedup
            needed = (n for n in range(1, self.layers) if cost.step_ms(self.layers - n) <= enough)
            rounds = max(rounds, next(needed, 0) * 5 // 4)
        return max(1, rounds)
