"""From a model and prompts to a policy under a budget: searched on one half of the prompts, validated on the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from ...errors import RequestError, flag, whole_number
from ...llm import LLM, Prompt
from ...policy import DepthPolicy
from .clock import CostModel
from .long_outputs import MAX_TOKENS
from .measured_model import MeasuredModel, batch_size, measured_model
from .problems import Problems, word_problems
from .progress import Report
from .prompts import BATCH, builtin_prompts, encode_prompts, split
from .replay import Reference
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
from .statistics import MIN_OUTPUTS, MIN_STEPS, loss_by_step
from .store import Measurements, digest, skipping
from .summary import Budget, CalibrationSummary, Example, Frontier, PromptCounts, Speedup, counted
from .validation import validate

MAX_PROMPTS = 256
QUICK_PROMPTS, QUICK_TOKENS = 24, 48  # for a first look
EXAMPLES = 3  # outputs that people see


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
        prompts: texts or messages, at least 10 different ones; a random sample of 256 if there are more; default
            the 72 built-in ones.
        max_kl: budget: mean KL(full || policy) over tapered steps, nats, above 0.
        min_agreement: budget: share of tapered steps whose argmax is that of full depth, in (0, 1].
        max_nll_increase: budget: rise of the NLL of full depth's own outputs, per cent, above 0.
        speedup: instead of a budget: the best quality at this predicted speed, times that of full depth, above 1.
        healed: a policy with adapters: its order is kept, and only the curve is searched for.
        answer_tokens: length of output to plan for, at least 2; default the median of the model's own, up to 1,024.
        quick: a first look with 24 prompts, outputs of up to 48 tokens and no word problems: intervals are wide.
        seed: of the split of the prompts, and of the sample.
        name: of the policy, at most 100 printable characters.
        progress: called with a stage and what part of it, 0 to 1, was done since the last call.

    Returns:
        The policy and all that was measured. If `met` is false, the policy is the nearest one.

    Raises:
        RequestError: an argument out of its range, too few prompts or steps for a verdict, a prompt that does not fit,
            no layers to spare, or a speed out of reach.
        ModelError: the model is missing, damaged or not supported.
    """
    budget = Budget(max_kl, min_agreement, max_nll_increase, speedup)
    if not name.isprintable() or len(name) > 100:
        raise RequestError(f"name is {name[:100]!r}; it must be at most 100 printable characters")
    seed = whole_number("seed", seed, 0)
    answer_tokens = None if answer_tokens is None else whole_number("answer_tokens", answer_tokens, 2)
    if isinstance(prompts, str | Path):
        hint = "taper.lab.calibration.prompts.read_prompts reads those of a file"
        raise RequestError("prompts must be a list of prompts, not one text or path", hint)
    prompts = builtin_prompts() if prompts is None else prompts
    llm = model if isinstance(model, LLM) else LLM(str(model), max_batch_size=batch_size(len(prompts)))
    if healed is not None:
        healed = adapted(llm, healed)
    with measured_model(llm, progress) as measured:
        texts = encode_prompts(llm, prompts, seed, QUICK_PROMPTS if flag("quick", quick) else MAX_PROMPTS)
        return _calibrate(measured, texts, budget, answer_tokens, seed, name, healed, quick)


def adapted(llm: LLM, policy: DepthPolicy | str | Path) -> DepthPolicy:
    """A policy for this model, with adapters from the first layer that it skips on.

    Raises:
        RequestError: it has none.
        PolicyError: it is for another model.
    """
    policy = llm.resolve_policy(policy)
    if not policy.adapted_layers:
        raise RequestError(f"policy {policy.label} has no adapters", "taper heal makes a policy that has")
    return policy


def search_order(
    model: MeasuredModel,
    measurements: Measurements,
    problems: Problems | None,
    rounds: int,
    tolerance: float,
    cost: CostModel | None = None,
) -> tuple[list[float], Iterator[Skipped]]:
    """The importance of each layer, and the first `rounds` layers to skip, at most all but one.

    If a layer makes the score on problems exceed `tolerance`, others are tried instead. `cost`: where some layers take
    more time than others, they are skipped rather than these.
    """
    layers, steps = model.num_hidden_layers, measurements.tapered_steps
    importance = _importance(model, measurements)
    rounds = min(len(flex_layers(importance)), layers - 1, rounds)
    stage = model.progress.stage("order of layers", rounds * len(steps))
    kl_sums = partial(measurements.kl_sums, stage=stage)

    def score(skipped: frozenset[int]) -> float:
        return _score(problems, measurements, skipping(layers, skipped))

    saved_ms = cost.saved_ms if cost is not None and cost.on_cpu_ms else None
    return importance, islice(layers_to_skip(importance, steps, kl_sums, score, tolerance, saved_ms), rounds)


def _order_of_adapters(
    model: MeasuredModel, measurements: Measurements, problems: Problems | None, policy: DepthPolicy
) -> LayerOrder:
    """The order of a policy with adapters, as far as its adapters go, and the loss with each layer skipped in turn."""
    assert policy.adapters is not None
    first = policy.adapted_layers
    importance = _importance(model, measurements)
    order = LayerOrder(importance, [Skipped(layer, 0.0, 0.0) for layer in first], policy.adapters.only(first))
    steps = measurements.tapered_steps
    stage = model.progress.stage("order of layers", len(first) * len(steps))
    searched, score = [], 0.0
    for count, layer in enumerate(first, 1):
        policy_of_first = order.skipping(count)
        if score < COLLAPSED:
            score = _score(problems, measurements, policy_of_first)
        kl = float(measurements.scores(policy_of_first, stage).kl.sum()) / sum(steps)
        searched.append(Skipped(layer, kl, score))
    return order._replace(searched=searched)


def _importance(model: MeasuredModel, measurements: Measurements) -> list[float]:
    """Mean KL of skipping each layer alone: [L]."""
    steps = measurements.tapered_steps
    stage = model.progress.stage("importance of each layer", (len(steps) + 1) // 2)
    return layer_importance(model.num_hidden_layers, steps, partial(measurements.kl_sums, stage=stage))


def _score(problems: Problems | None, measurements: Measurements, policy: DepthPolicy) -> float:
    """By how many standard errors a policy solves fewer problems; 0 if there are none."""
    if problems is None:
        return 0.0
    if measurements.replay.engine.num_free_slots < BATCH:  # prompts that are held for replay take them
        measurements.close()
    return problems.score(policy)


def _calibrate(
    model: MeasuredModel,
    texts: Mapping[tuple[int, ...], str],
    budget: Budget,
    answer_tokens: int | None,
    seed: int,
    name: str,
    healed: DepthPolicy | None,
    quick: bool,
) -> Calibration:
    """All stages in turn; `texts` are prompts by their token ids."""
    llm, layers, prompts = model.llm, model.num_hidden_layers, list(texts)
    context, longest = llm.engine.backend.context_length, max(map(len, prompts))
    max_tokens = answer_tokens or (QUICK_TOKENS if quick else min(MAX_TOKENS, max(2, context - longest)))
    if longest + max_tokens > context:
        raise RequestError(
            f"a prompt of {longest} tokens and an output of {max_tokens} do not fit into a context of {context}",
            "raise --context, shorten the prompts or lower --answer-tokens",
        )
    if budget.speedup is None:
        _check_steps([max_tokens - 1] * len(split(prompts)[1]))
    references = model.complete("outputs at full depth", prompts, model.full, max_tokens, model.sampling)
    planned = answer_tokens or int(np.median([len(reference.completion_ids) for reference in references]))
    search, held_out = split(references)
    if planned < 2 or not all(any(len(r.completion_ids) > 1 for r in part) for part in (search, held_out)):
        raise RequestError("the outputs end with their first token: there is no step to taper", "give other prompts")
    if budget.speedup is None:
        _check_steps([len(reference.completion_ids) - 1 for reference in held_out])
    middle = sorted(prompts, key=len)[len(prompts) // 2]
    cost = model.cost(middle, planned, healed)
    problems = None if quick else word_problems(llm, model.store)
    with model.measurements(first_steps(search[:COMPLETIONS], STEPS)) as measurements:
        if healed is None:
            rounds = _rounds(layers, budget, cost)
            importance, skipped = search_order(model, measurements, problems, rounds, HARMLESS, cost)
            order = LayerOrder(importance, list(skipped))
        else:
            order = _order_of_adapters(model, measurements, problems, healed)
    with model.measurements(search[:FITTED]) as measurements:
        score = partial(_score, problems, measurements)
        policy, on_search_prompts = fit_curve(budget, order, measurements, cost, planned, score, model.progress)

    validated, scores, own = validate(model, held_out, policy, max_tokens, problems)
    pairs = list(zip(held_out, own, strict=True))[:EXAMPLES]
    examples = [Example(texts[full.prompt_ids], _text(llm, full), _text(llm, tapered)) for full, tapered in pairs]
    depths = [layers - count for count in range(1, len(order.searched) + 1)]
    depth_ms = {depth: cost.step_ms(order.skipping(layers - depth).retained_at(depth)) for depth in depths}
    summary = CalibrationSummary(
        mean_depth=round(policy.mean_depth(planned), 3),
        speedup=Speedup(round(cost.speedup(policy, planned), 4), model.speedup(middle, policy, planned)),
        **vars(validated),
        model=model.identity,
        prompts=PromptCounts(len(search), len(held_out), digest(sorted(prompts)), quick or None),
        seed=seed,
        budget=budget,
        tokens=sum(len(reference.prompt_ids) + len(reference.completion_ids) for reference in references),
        answer_tokens=planned,
        policy=name or policy.label,
        on_search_prompts=on_search_prompts,
        conditions=model.conditions,
        model_identity=llm.config.identity,
        cost_ms=cost,
        importance=order.importance,
        skip_order=order.layers,
        searched_layers=len(order.searched),
        core_layers=sorted(policy.core_layers),
        curve=[policy.depth(step) for step in range(planned)],
        by_step=loss_by_step(scores),
        frontier=Frontier(
            {depth: round(cost.step_ms(range(layers)) / ms, 4) for depth, ms in depth_ms.items()},
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


def _check_steps(steps: Sequence[int]) -> None:
    """Reject held-out outputs, each with so many steps after the first, that are too few for a verdict."""
    outputs = sum(count > 0 for count in steps)
    if sum(steps) < MIN_STEPS or outputs < MIN_OUTPUTS:
        raise RequestError(
            f"{counted(outputs, 'held-out output')} can skip layers at {counted(sum(steps), 'step')}; a verdict takes "
            f"{MIN_STEPS} steps in {MIN_OUTPUTS} outputs",
            "give more prompts, prompts with longer answers, or more --answer-tokens",
        )


def _text(llm: LLM, output: Reference) -> str:
    return llm.tokenizer.decode(output.completion_ids).strip()


def _rounds(layers: int, budget: Budget, cost: CostModel) -> int:
    """How many layers to search for: a third of them; more if a speed needs it."""
    rounds = layers // 3
    if budget.speedup is not None:
        enough = cost.step_ms(range(layers)) / budget.speedup
        needed = (n for n in range(1, layers) if cost.step_ms(range(layers - n)) <= enough)
        rounds = max(rounds, next(needed, 0) * 5 // 4)
    return max(1, rounds)
