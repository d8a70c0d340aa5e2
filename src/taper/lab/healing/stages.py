"""The stages of a healing: outputs to learn from, training in rounds, and what adapters cost on held-out prompts.

Adapters learn from the model alone: from its outputs at full depth, then from those that the tapered model writes
itself (on-policy distillation, GKD, arXiv 2306.13649), always towards full depth's distribution.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from safetensors import SafetensorError

from ...backends import available_threads, choose_device
from ...errors import RequestError
from ...models import load_model
from ...models.download import cache_folder
from ...policy import DepthPolicy
from ..calibration.long_outputs import MAX_TOKENS
from ..calibration.measured_model import MeasuredModel
from ..calibration.problems import word_problems
from ..calibration.progress import SILENT
from ..calibration.prompts import completions
from ..calibration.replay import Reference
from ..calibration.store import digest, numbers
from ..calibration.validation import validate
from .precision import fastest_dtype
from .prompts import held_out
from .student import Student, frozen
from .summary import Healing
from .train import Evaluation, Training

BEYOND = 2  # further layers, which the policy does not skip, get an adapter too: for policies that skip a little more
KEPT = 3  # checkpoints in the cache folder
OUTPUT_TOKENS = MAX_TOKENS  # most tokens of an output to learn from, or to be judged by
OUTPUTS = 8  # that are made at a time
MIN_STEPS = 8  # shorter completions teach nothing
ROUNDS = (0.5, 0.75, 1.0)  # shares of the time at which rounds end; each begins with outputs to learn from
FULL_DEPTH, ON_POLICY = 0.15, 0.075  # shares of the time for those outputs, in the first round and in each later one
_Ids = tuple[int, ...]  # of a prompt's tokens


def healed(
    model: MeasuredModel,
    policy: DepthPolicy,
    prompts: Sequence[_Ids],
    seconds: float,
    rank: int,
    seed: int,
    report: Callable[[Evaluation], None],
) -> Healing:
    """All stages in turn.

    Raises:
        RequestError: outputs are too short, making them took all the time, or training diverged, or needs more memory.
    """
    try:
        return _Healer(model, policy, prompts, seconds, rank, seed).run(report)
    except torch.OutOfMemoryError:
        raise RequestError("there is not enough memory to train beside the model", "try a lower --rank") from None


class _Healer:
    """A healing with its arguments; measurements and checkpoints are kept under what they were made from."""

    def __init__(
        self, model: MeasuredModel, policy: DepthPolicy, prompts: Sequence[_Ids], seconds: float, rank: int, seed: int
    ) -> None:
        self._model, self._policy, self._seconds, self._seed = model, policy, seconds, seed
        choosing, validation = held_out(len(prompts))
        self._choosing, self._validation = prompts[:choosing], prompts[choosing:][:validation]
        self._prompts = prompts[choosing + validation :]
        key = {"heal": numbers(policy), "prompts": prompts, "seconds": seconds, "rank": rank, "seed": seed}
        self._run = digest([model.identity.sha256, key])
        self._checkpoint = cache_folder() / "heal" / f"{self._run}.safetensors"
        layers = policy.skip_order[: policy.num_hidden_layers - policy.min_depth + BEYOND]
        device = choose_device("auto") if model.conditions.backend == "torch" else "cpu"
        context_length = model.llm.engine.backend.context_length
        if device == "cpu":
            torch.set_num_threads(model.conditions.threads or available_threads())
        student = Student(load_model(model.llm.path), layers, context_length, device, fastest_dtype(device))
        self._training = Training(student, policy, layers, rank, seconds, seed)

    def run(self, report: Callable[[Evaluation], None]) -> Healing:
        """All stages in turn."""
        model, training = self._model, self._training
        held_out, validation = (
            model.complete("outputs at full depth", prompts, model.full, OUTPUT_TOKENS, model.sampling)
            for prompts in (self._choosing, self._validation)
        )
        held_out = _long_enough(held_out)
        self._stage = model.progress.stage("training", self._seconds)
        if self._checkpoint.exists():
            self._restore()
        pools = [_long_enough(self._outputs_at_full_depth())]
        if not (held_out and pools[0]):
            raise RequestError(f"outputs of fewer than {MIN_STEPS} tokens teach nothing", "give other prompts")
        for round_number, until in enumerate(ROUNDS):
            if training.elapsed_s < until * self._seconds:
                if round_number:
                    pools[1:] = [_long_enough(self._outputs_of_the_tapered_model(round_number))]
                training.run(pools, held_out, until, self._checkpoint, self._stage, report)
        if not training.steps:
            raise RequestError("outputs to learn from took all the time, none is left to train", "give more minutes")
        problems = word_problems(model.llm, model.store)
        healed = replace(self._policy, adapters=frozen(training.best))
        before, after = (
            validate(model, validation, policy, OUTPUT_TOKENS, problems)[0] for policy in (self._policy, healed)
        )
        healing = Healing(healed, before, after, training.history, round(training.elapsed_s), training.tokens)
        provenance = {**self._policy.provenance, "healing": healing.plain()}
        if "healing" in self._policy.provenance:
            provenance["healing"]["went_on_from"] = self._policy.provenance["healing"]
        self._remove_old_checkpoints()
        return replace(healing, policy=replace(healed, provenance=provenance))

    def _restore(self) -> None:
        """Continue from the checkpoint.

        Raises:
            RequestError: it is damaged; then it is removed.
        """
        training = self._training
        try:
            training.restore(self._checkpoint)
        except (SafetensorError, KeyError, ValueError):
            self._checkpoint.unlink()
            raise RequestError("the checkpoint of this training was damaged; it is removed", "start again") from None
        self._stage.done(training.elapsed_s)

    def _remove_old_checkpoints(self) -> None:
        """Keep the last few, finished ones too: whatever becomes of the policy, the same command gives it again."""
        checkpoints = sorted(self._checkpoint.parent.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
        for path in checkpoints[:-KEPT]:
            path.unlink(missing_ok=True)

    def _outputs(self, prompts: Sequence[_Ids], policy: DepthPolicy) -> list[Reference]:
        """Outputs of a policy, as users get them."""
        llm, store, sampling = self._model.llm, self._model.store, self._model.sampling
        return completions(llm, prompts, policy, OUTPUT_TOKENS, store, SILENT, sampling)

    def _outputs_within(self, share: float, prompts: Sequence[_Ids], policy: DepthPolicy) -> list[Reference]:
        """Outputs of a policy, as many as a share of the time allows."""
        references: list[Reference] = []
        began = now = time.perf_counter()
        for first in range(0, len(prompts), OUTPUTS):
            if now - began >= share * self._seconds:
                break
            references += self._outputs(prompts[first : first + OUTPUTS], policy)
            last, now = now, time.perf_counter()
            self._training.elapsed_s += now - last
            self._stage.done(now - last)
        return references

    def _outputs_at_full_depth(self) -> list[Reference]:
        """The first round's outputs. Their number is stored, so that a killed training continues with the same ones."""
        made = partial(self._outputs_within, FULL_DEPTH, self._prompts, self._model.full)
        count = self._model.store.remember({"outputs of": self._run}, lambda: len(made()))
        batches = (self._prompts[first : first + OUTPUTS] for first in range(0, count, OUTPUTS))
        return [output for batch in batches for output in self._outputs(batch, self._model.full)]

    def _outputs_of_the_tapered_model(self, round_number: int) -> list[Reference]:
        rng = np.random.default_rng((self._seed, round_number))
        prompts = [self._prompts[i] for i in rng.permutation(len(self._prompts))]
        policy = replace(self._policy, adapters=frozen(self._training.adapters))
        return self._outputs_within(ON_POLICY, prompts, policy)


def _long_enough(references: Sequence[Reference]) -> list[Reference]:
    return [reference for reference in references if len(reference.completion_ids) > MIN_STEPS]
