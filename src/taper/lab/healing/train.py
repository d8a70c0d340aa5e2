"""The loop that trains adapters: at which depth each completion is seen, steps of AdamW, and checkpoints.

Time drives the learning rate: it falls along a cosine until the given minutes are over.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from ...errors import RequestError
from ...models.files import write_whole
from ...policy import DepthPolicy
from ..calibration.progress import Stage
from ..calibration.replay import Reference
from .student import AdapterParameters, Lesson, Student, mean_losses

LEARNING_RATE, LEAST_RATE, WARM_UP = 2e-3, 0.05, 10  # the peak, the last rate as a share of it, steps up to it
CLIP = 1.0  # of the gradient's norm
OWN_CURVE = 0.5  # share of completions seen along the policy's own curve; each of the others is seen at one drawn depth
EVALUATIONS = 12  # evenly over the time; each takes a forward over all held-out completions
LESSONS = 2048  # that are kept in memory: some hundred kilobytes each, of a model with 1.5 billion parameters 2 MB
CHECKPOINT_S = 60.0
_COUNTS = ("elapsed_s", "steps", "tokens", "best_kl", "history")


@dataclass(frozen=True)
class Evaluation:
    """How good adapters are on held-out completions at a moment of training."""

    elapsed_s: float
    tokens: int  # that losses were computed on so far
    loss: float  # mean KL in training since the last evaluation, nats
    kl: float  # of the policy on held-out completions, nats
    agreement: float


class Training:
    """The state of a training of `seconds` seconds, which checkpoints hold.

    `layers`, which get adapters, are at least those that the policy skips. Adapters that the policy has are where
    training begins. `seed` draws first values, completions and depths.
    """

    def __init__(
        self, student: Student, policy: DepthPolicy, layers: Sequence[int], rank: int, seconds: float, seed: int
    ) -> None:
        self._student, self._policy, self._seconds, self._seed = student, policy, seconds, seed
        self._lesson = lru_cache(LESSONS)(student.lesson)  # computed when a completion is first drawn
        self.adapters: AdapterParameters = student.new_adapters(layers, rank, seed, policy.adapters)
        self._parameters = [matrix for pair in self.adapters.values() for matrix in pair]
        self.best = _copied(self.adapters)  # the state of the lowest held-out KL
        self.best_kl, self.elapsed_s, self.steps, self.tokens = math.inf, 0.0, 0, 0
        self.history: list[Evaluation] = []
        self._optimizer = torch.optim.AdamW(self._parameters, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)

    def run(
        self,
        pools: Sequence[Sequence[Reference]],
        held_out: Sequence[Reference],
        until: float,
        checkpoint: Path,
        stage: Stage,
        report: Callable[[Evaluation], None],
    ) -> None:
        """Train until a share of the time has passed: `until`, from 0 to 1.

        Completions to learn from are drawn from the pools, which are equally likely; those held out decide which state
        is best. `report` is called after each evaluation. The checkpoint is written once a minute and at the end. The
        parts of the stage are seconds.
        """
        saved = now = time.perf_counter()
        losses: list[float] = []
        while self.elapsed_s < until * self._seconds:
            losses.append(self._step(pools))
            last, now = now, time.perf_counter()
            self.elapsed_s += now - last
            stage.done(now - last)
            if self.elapsed_s >= (len(self.history) + 1) * self._seconds / EVALUATIONS:
                self._evaluate(held_out, float(np.mean(losses)))
                report(self.history[-1])
                losses = []
            if now - saved > CHECKPOINT_S:
                self.save(checkpoint)
                saved = now
        self.save(checkpoint)

    def _step(self, pools: Sequence[Sequence[Reference]]) -> float:
        """One step of the optimizer; returns its mean KL."""
        rng = np.random.default_rng((self._seed, self.steps))
        chosen: list[Lesson] = []
        while (total := sum(lesson.num_steps for lesson in chosen)) < self._student.together:
            pool = pools[int(rng.integers(len(pools)))]
            chosen.append(self._lesson(pool[int(rng.integers(len(pool)))]))
        cosine = (1 + math.cos(math.pi * min(1.0, self.elapsed_s / self._seconds))) / 2
        rate = LEARNING_RATE * min(1.0, (self.steps + 1) / WARM_UP) * (LEAST_RATE + (1 - LEAST_RATE) * cosine)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        depths = [self._depths(lesson.num_steps, rng) for lesson in chosen]
        kl, _ = self._student.losses(chosen, depths, self.adapters)
        loss = kl.sum() / total
        if not math.isfinite(value := float(loss.detach())):
            raise RequestError(f"training diverged: its loss is {value}", "try another seed, or a lower rank")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, CLIP)
        self._optimizer.step()
        self.steps += 1
        self.tokens += total
        return value

    def _depths(self, num_steps: int, rng: np.random.Generator) -> list[int]:
        """The policy's own depths, or one that skips some of the layers with adapters, the same at every step.

        An output that ends before the policy's own curve falls teaches nothing along it.
        """
        own = [self._policy.depth(step) for step in range(1, num_steps + 1)]
        if rng.random() < OWN_CURVE and own[-1] < self._policy.num_hidden_layers:
            return own
        return [self._policy.num_hidden_layers - int(rng.integers(1, len(self.adapters) + 1))] * num_steps

    def _evaluate(self, held_out: Sequence[Reference], loss: float) -> None:
        lessons = [self._lesson(reference) for reference in held_out]
        kl, agreement = mean_losses(self._student, lessons, self._policy, self.adapters)
        self.history.append(Evaluation(round(self.elapsed_s, 1), self.tokens, round(loss, 4), kl, agreement))
        if kl < self.best_kl:
            self.best, self.best_kl = _copied(self.adapters), kl

    def save(self, path: Path) -> None:
        """Write a checkpoint, whole or not at all."""
        tensors = {
            f"{kind}.{layer}.{part}": matrix.detach().cpu().contiguous()
            for kind, adapters in (("now", self.adapters), ("best", self.best))
            for layer, pair in adapters.items()
            for part, matrix in enumerate(pair)
        }
        for number, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": value.cpu() for name, value in state.items()}
        counts = {name: getattr(self, name) for name in _COUNTS} | {"history": [vars(entry) for entry in self.history]}
        write_whole(path, save(tensors, {"counts": json.dumps(counts)}))

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint of a training that began in the same way.

        Raises:
            SafetensorError, KeyError or ValueError: it is damaged.
        """
        with safe_open(path, framework="pt") as file:
            counts = json.loads(file.metadata()["counts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # the file is not a dict
        with torch.no_grad():
            for kind, adapters in (("now", self.adapters), ("best", self.best)):
                for layer, pair in adapters.items():
                    for part, matrix in enumerate(pair):
                        matrix.copy_(tensors[f"{kind}.{layer}.{part}"])
        state = self._optimizer.state_dict()
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".")
                state["state"].setdefault(int(number), {})[key] = value
        self._optimizer.load_state_dict(state)
        for name in _COUNTS:
            setattr(self, name, counts[name])
        self.history = [Evaluation(**entry) for entry in counts["history"]]


def _copied(adapters: AdapterParameters) -> AdapterParameters:
    return {layer: (down.detach().clone(), up.detach().clone()) for layer, (down, up) in adapters.items()}
