"""What policies cost on some answers, each answer's figures stored on their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..engine import Engine
from ..policy import DepthPolicy
from .replay import Reference, Replay, Scores
from .store import Store, digest

Tick = Callable[[], None]  # told of each answer done


class Measurements:
    """Answers on which policies are replayed once and for all. Close it to give back the engine's slots."""

    def __init__(self, engine: Engine, references: Sequence[Reference], store: Store) -> None:
        self.replay = Replay(engine, references)
        self._layers, self._store = engine.backend.config.num_hidden_layers, store
        self._keys = [digest([reference.prompt_ids, reference.answer_ids]) for reference in references]

    def __len__(self) -> int:
        return len(self._keys)

    def close(self) -> None:
        """Free the slots."""
        self.replay.close()

    def scores(self, policy: DepthPolicy, tick: Tick, answers: range | None = None) -> Scores:
        """What a policy costs at each step of some answers, of all by default."""
        parts = []
        for index in answers or range(len(self)):
            key = {"scores of": numbers(policy), "on": self._keys[index]}
            stored = self._store.remember(key, partial(self._scores, index, policy))
            columns = {name: np.array(values) for name, values in stored.items()}
            parts.append(Scores(reference=np.full(len(columns["step"]), index), **columns))
            tick()
        return Scores.joined(parts)

    def kl_sums(self, skipped: frozenset[int], candidates: Sequence[int], answers: range, tick: Tick) -> np.ndarray:
        """Sums of KL over some answers of skipping layers and one of the candidates besides: [candidates]."""
        sums = np.zeros(len(candidates))
        base = skipping(self._layers, skipped)
        policies = [skipping(self._layers, skipped | {layer}) for layer in candidates]
        for index in answers:
            key = {"kl of skipping": sorted(skipped), "and": list(candidates), "on": self._keys[index]}
            sums += self._store.remember(key, partial(self._kl_sums, index, policies, base))
            tick()
        return sums

    def block_influence(self) -> list[float]:
        """ShortGPT's measure of each layer, [L]."""
        return self._store.remember({"block influence on": self._keys}, lambda: self.replay.block_influence().tolist())  # type: ignore[no-any-return]

    def _scores(self, index: int, policy: DepthPolicy) -> dict[str, list[float]]:
        self.replay.prepare(index)
        (scores,) = self.replay.at(index, [policy])
        return {name: values.tolist() for name, values in vars(scores).items() if name != "reference"}

    def _kl_sums(self, index: int, policies: Sequence[DepthPolicy], base: DepthPolicy) -> list[float]:
        self.replay.prepare(index)
        return [float(scores.kl.sum()) for scores in self.replay.at(index, policies, base)]


def skipping(num_hidden_layers: int, skipped: Collection[int]) -> DepthPolicy:
    """The policy that skips these layers from step 1 on."""
    return DepthPolicy.static(num_hidden_layers, num_hidden_layers - len(skipped), sorted(skipped))


def numbers(policy: DepthPolicy) -> dict[str, Any]:
    """What decides which layers run, and nothing else."""
    return {**vars(policy.schedule), "skip_order": policy.skip_order}
