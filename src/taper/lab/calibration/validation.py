"""What a policy costs on held-out prompts: replayed, in its own outputs, in those that follow, and on problems."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from ...policy import DepthPolicy
from .long_outputs import failures, summarised
from .measured_model import MeasuredModel
from .problems import Problems
from .prompts import next_prompts
from .replay import Reference, Replay, Scores
from .statistics import Estimate, LossEstimate, free_running, over_steps
from .store import numbers
from .summary import Validation, to_plain


def validate(
    model: MeasuredModel,
    held_out: Sequence[Reference],
    policy: DepthPolicy,
    max_tokens: int,
    problems: Problems | None,
    goes_on: bool = True,
) -> tuple[Validation, Scores, list[Reference]]:
    """All figures of a policy, its scores on full depth's outputs, and its own outputs to the same prompts.

    Those of the outputs that follow, which take a third of the time, only if the conversation `goes_on`.
    """
    scores = model.scores("validation on held-out prompts", held_out, policy)
    own = model.complete("outputs of the policy", [r.prompt_ids for r in held_out], policy, max_tokens, model.sampling)
    own_scores = model.scores("outputs of the policy at full depth", own, model.full)
    solved = None if problems is None else problems.validate(policy, model.progress)
    free = free_running(own, own_scores, held_out, scores)
    after = _next_outputs(model, own, policy, max_tokens) if goes_on else None
    long = summarised(held_out, scores, own, own_scores, max_tokens, model.llm.tokenizer.eos_token_ids)
    long = replace(long, failures=failures(long, solved, after))
    return Validation(over_steps(scores), free, long, problems=solved, next_output=after), scores, own


def _next_outputs(
    model: MeasuredModel, own: Sequence[Reference], policy: DepthPolicy, max_tokens: int
) -> LossEstimate | None:
    """The loss of outputs at full depth that follow the policy's own, whose skipped keys and values were filled."""
    going_on = next_prompts(model.llm, own, max_tokens)
    if not going_on:
        return None
    prompts = [prompt for _, prompt in going_on]
    outputs = model.complete("next outputs at full depth", prompts, model.full, max_tokens)
    stage = model.progress.stage("next outputs after tapered ones", len(outputs))

    def measured() -> Any:
        with closing(Replay(model.llm.engine, outputs)) as replay:
            scores = []
            for index, (first, _) in enumerate(going_on):
                scores.append(replay.after_tapered(index, policy, first))
                stage.done()
        return to_plain(over_steps(Scores.joined(scores)).all_steps)

    key = {"after outputs of": numbers(policy), "next outputs": [vars(output) for output in outputs]}
    losses = model.store.remember(key, measured)
    return LossEstimate(**{name: Estimate(*values) for name, values in losses.items()})
