"""A model that is being measured: the store of its measurements, the progress that is shown, and what both are for.

Calibration, to prompts or to a task, and healing begin with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...backends import choose_device
from ...errors import RequestError
from ...llm import LLM
from ...models import model_name
from ...models.download import content_hash
from ...policy import DepthPolicy
from ...sampling import SamplingParams
from .clock import CostModel, TimedRuns, measure_cost, measure_speedup
from .progress import Progress, Report
from .prompts import BATCH, completions
from .replay import Reference, Scores
from .store import Conditions, Measurements, Store, current_conditions, open_store
from .summary import CalibratedModel

SLOTS = {"cpu": 64, "cuda": 16}  # prompts whose keys and values stay; a GPU takes memory for all at once
MIN_SLOTS = 3  # the clock alternates between three depths


@dataclass(frozen=True)
class MeasuredModel:
    """A model, where its measurements are kept, and how far the work is. Close it to close the store."""

    llm: LLM
    store: Store
    progress: Progress
    identity: CalibratedModel
    conditions: Conditions

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the model, L."""
        return self.identity.num_hidden_layers

    @property
    def full(self) -> DepthPolicy:
        """The policy of full depth."""
        return DepthPolicy.full(self.num_hidden_layers)

    @property
    def sampling(self) -> SamplingParams:
        """How outputs are sampled, as users get them: as the model's authors recommend."""
        return replace(self.llm.sampling_params(), seed=None)

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def measurements(self, references: Sequence[Reference]) -> closing[Measurements]:
        """Replays of known completions, for a `with` statement."""
        return closing(Measurements(self.llm.engine, references, self.store))

    def scores(self, stage: str, references: Sequence[Reference], policy: DepthPolicy) -> Scores:
        """What a policy costs at each step of known completions, in a stage of this name."""
        with self.measurements(references) as measurements:
            return measurements.scores(policy, self.progress.stage(stage, len(references)))

    def complete(
        self,
        stage: str,
        prompts: Sequence[tuple[int, ...]],
        policy: DepthPolicy,
        max_tokens: int,
        sampling: SamplingParams = SamplingParams(),
    ) -> list[Reference]:
        """Outputs of a policy, in a stage of this name."""
        batches = self.progress.stage(stage, -(-len(prompts) // BATCH))
        return completions(self.llm, prompts, policy, max_tokens, self.store, batches, sampling)

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


def measured_model(llm: LLM, report: Report | None) -> closing[MeasuredModel]:
    """A model to measure, for a `with` statement; `report` hears of the progress.

    Raises:
        RequestError: the model has no layer to spare, or too few outputs fit at a time.
    """
    layers = llm.config.num_hidden_layers
    if layers < 2:
        raise RequestError(f"a model of {layers} layer has none to spare")
    if llm.engine.backend.num_slots < MIN_SLOTS:
        raise RequestError(f"calibration runs {MIN_SLOTS} outputs in turn", f"max_batch_size: {MIN_SLOTS} or more")
    # Of a path, only the last part goes into files that others read.
    name = model_name(llm.model) if Path(llm.model).exists() else llm.model
    identity, conditions = CalibratedModel(name, content_hash(llm.path), layers), current_conditions(llm)
    store = open_store(identity.sha256, conditions)
    return closing(MeasuredModel(llm, store, Progress(report), identity, conditions))


def batch_size(prompts: int, device: str = "auto") -> int:
    """The `max_batch_size` of an `LLM` that is to be calibrated on this many prompts."""
    return max(MIN_SLOTS, min(prompts, SLOTS.get(choose_device(device), SLOTS["cuda"])))
