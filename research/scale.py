"""When depth decay pays in a fleet: a simulation of continuous batching from measured costs per layer.

    python research/scale.py --out research/results/scale.json

Costs come from research/results/vllm_speed.json (`costs`). Two machines are simulated: the measured one, where a
layer's time grows with its rows, and its limit for accelerators, `memory-bound`: a layer costs what it costs for one
row, however many rows it has. No such accelerator was measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from taper import DepthPolicy

SPEED = Path(__file__).parent / "results" / "vllm_speed.json"
LAYERS, MEAN_LENGTH, LONGEST, PROMPT_TOKENS, STEPS, WARM_UP = 30, 256, 2048, 64, 3000, 1000
BATCHES, WAVES = (1, 4, 16, 64, 256), (1, 16, 64, 256)
ALPHA, ORDER = 0.9966, (3, 5, 17, 16, 25, 7, 6, 4, 18, 26)  # D3's decay over an order like the shipped ones
COMMUNICATION = 0.2  # of a layer's time on one rank: what its all-reduces take when it is split (assumed)


@dataclass
class Machine:
    """Milliseconds: of a layer by its rows, of lm_head and sampling by their rows, of the host for each step."""

    layer: Callable[[np.ndarray], np.ndarray]
    head: Callable[[int], float]
    host: float


def machines(speed: dict[str, Any]) -> dict[str, Machine]:
    """The measured machine and its memory-bound limit; beyond the measured rows, costs are extrapolated linearly."""
    rows = np.array([0.0, *map(float, speed["costs"])])
    layer = np.array([0.0, *(cost["layer_ms"] for cost in speed["costs"].values())])
    fixed = np.array([0.0, *(cost["fixed_ms"] for cost in speed["costs"].values())])
    ideal = speed["batches"]["1"]["ideal_speedup"]
    mean_depth = speed["conditions"]["mean_depth"]
    head_in_layers = (LAYERS - mean_depth * ideal) / (ideal - 1)
    host = max(0.0, fixed[1] - head_in_layers * layer[1])

    def interpolate(values: np.ndarray, count: Any) -> Any:
        slope = (values[-1] - values[-2]) / (rows[-1] - rows[-2])
        return np.where(count > rows[-1], values[-1] + slope * (count - rows[-1]), np.interp(count, rows, values))

    return {
        "measured": Machine(
            lambda n: interpolate(layer, n), lambda n: float(interpolate(fixed, np.array(n))) - host, host
        ),
        "memory-bound": Machine(lambda n: layer[1] * (n > 0), lambda _: fixed[1] - host, host),
    }


def policies() -> dict[str, DepthPolicy]:
    """A decaying policy, and one of constant depth with nearly the same mean over the simulated completions."""
    decaying = DepthPolicy.d3(LAYERS, ALPHA, min_depth=20, skip_order=ORDER)
    lengths = completion_lengths(np.random.default_rng(0), 4000)
    mean = sum(decaying.mean_depth(n) * (n - 1) for n in lengths) / sum(n - 1 for n in lengths)
    return {"decaying": decaying, "constant": DepthPolicy.static(LAYERS, round(mean), ORDER)}


def completion_lengths(chance: np.random.Generator, count: int) -> list[int]:
    """Lengths of completions: many short, some long."""
    return np.clip(chance.exponential(MEAN_LENGTH, count), 2, LONGEST).astype(int).tolist()


def ages(batch: int, wave: int, steps: int, longest: int) -> Iterator[tuple[np.ndarray, int]]:
    """For each step: (step of each running request, requests admitted). Free slots are filled every `wave` steps."""
    chance = np.random.default_rng(1)
    age, length = np.zeros(batch, int), np.zeros(batch, int)
    for step in range(steps):
        free = age >= length
        admitted = int(free.sum()) if step % wave == 0 else 0
        if admitted:
            age[free], length[free] = 0, np.minimum(completion_lengths(chance, admitted), longest)
        running = age < length
        yield age[running & (age > 0)], admitted
        age += running


def rows_of_layers(
    policy: DepthPolicy, batch: int, wave: int, longest: int = LONGEST
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows at full depth and tapered, [steps, layers], with prompt tokens; new tokens, [steps]."""
    depth = np.array([policy.depth(step) for step in range(LONGEST + 1)])
    retained = np.zeros((LAYERS + 1, LAYERS), int)
    for d in set(depth.tolist()):
        retained[d, list(policy.retained_at(d))] = 1
    full, ours, made = [], [], []
    for number, (age, admitted) in enumerate(ages(batch, wave, STEPS + WARM_UP, longest)):
        if number >= WARM_UP:
            prompt = admitted * PROMPT_TOKENS
            full.append(np.full(LAYERS, len(age) + prompt))
            ours.append(retained[depth[age]].sum(axis=0) + prompt)
            made.append(len(age) + admitted)
    return np.array(full), np.array(ours), np.array(made)


def seconds(machine: Machine, rows: np.ndarray, made: np.ndarray) -> float:
    """The time of all steps on one rank."""
    head = sum(machine.head(int(n)) for n in made)
    return float(machine.layer(rows).sum() + head + machine.host * len(made)) / 1e3


def by_batch(machine: Machine, policy: DepthPolicy) -> dict[str, float]:
    """Speedup by batch size, with ages mixed as they come."""
    speedups = {}
    for batch in BATCHES:
        full, ours, made = rows_of_layers(policy, batch, 1)
        speedups[str(batch)] = round(seconds(machine, full, made) / seconds(machine, ours, made), 3)
    return speedups


def by_wave(machine: Machine, policy: DepthPolicy, batch: int) -> dict[str, float]:
    """Tokens per second when slots fill only every so many steps, against full depth with the usual admission."""
    full, _, made = rows_of_layers(policy, batch, 1)
    base = made.sum() / seconds(machine, full, made)
    speedups = {}
    for wave in WAVES:
        _, ours, made = rows_of_layers(policy, batch, wave)
        speedups[str(wave)] = round(made.sum() / seconds(machine, ours, made) / base, 3)
    return speedups


def by_age(machine: Machine, policy: DepthPolicy, batch: int) -> float:
    """Tokens per second if requests moved to another engine at their smallest depth, against full depth."""
    full, _, made = rows_of_layers(policy, batch, 1)
    base = made.sum() / seconds(machine, full, made)
    floor = next(step for step in range(LONGEST) if policy.depth(step + 1) == policy.min_depth)
    lengths = np.array(completion_lengths(np.random.default_rng(2), 4000))
    share = float((lengths - floor).clip(0).sum() / lengths.sum())
    _, young, made_young = rows_of_layers(policy, batch, 1, longest=max(2, floor))
    old = np.zeros((1, LAYERS))
    old[0, list(policy.retained_at(policy.min_depth))] = batch
    of_young = made_young.sum() / seconds(machine, young, made_young)
    of_old = batch / seconds(machine, old, np.array([batch]))
    return round(1 / ((1 - share) / of_young + share / of_old) / base, 3)


def by_tensor_parallel(machine: Machine, policy: DepthPolicy, batch: int) -> dict[str, float]:
    """Speedup by tensor-parallel degree: layers and head are split, all-reduces and the host are not."""
    full, ours, made = rows_of_layers(policy, batch, 1)

    def time(rows: np.ndarray, degree: int) -> float:
        layers = machine.layer(rows).sum()
        head = sum(machine.head(int(n)) for n in made)
        return float((layers + head) / degree + (degree > 1) * COMMUNICATION * layers + machine.host * len(made))

    return {str(degree): round(time(full, degree) / time(ours, degree), 3) for degree in (1, 2, 4, 8)}


def by_pipeline(machine: Machine, policy: DepthPolicy, batch: int) -> dict[str, dict[str, Any]]:
    """Speedup by number of stages, of which the slowest sets the pace: split evenly, and split best."""
    full, ours, made = rows_of_layers(policy, batch, 1)
    head = sum(machine.head(int(n)) for n in made)
    cost = {"full": machine.layer(full).sum(axis=0), "tapered": machine.layer(ours).sum(axis=0)}

    def slowest(kind: str, ends: tuple[int, ...]) -> float:
        parts = [cost[kind][a:b].sum() for a, b in zip((0, *ends), (*ends, LAYERS), strict=True)]
        parts[-1] += head
        return float(max(parts))

    speedups = {}
    for stages in (1, 2, 4):
        even = tuple(LAYERS * stage // stages for stage in range(1, stages))
        splits = list(combinations(range(1, LAYERS), stages - 1))
        best_full = min(splits, key=lambda ends: slowest("full", ends))
        best = min(splits, key=lambda ends: slowest("tapered", ends))
        sizes = [b - a for a, b in zip((0, *best), (*best, LAYERS), strict=True)]
        speedups[str(stages)] = {
            "even": round(slowest("full", even) / slowest("tapered", even), 3),
            "best_split": round(slowest("full", best_full) / slowest("tapered", best), 3),
            "best_split_layers": sizes,
        }
    return speedups


def main() -> None:
    """Run all parts and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the line to this file")
    options = parser.parse_args()
    speed = json.loads(SPEED.read_text())
    chosen = policies()
    result: dict[str, Any] = {
        "conditions": {
            "costs": {
                "from": SPEED.name,
                **{key: speed["conditions"][key] for key in ("date", "commit", "cpu", "model")},
            },
            "completion_lengths": f"exponential, mean {MEAN_LENGTH}, at most {LONGEST}",
            "prompt_tokens": PROMPT_TOKENS,
            "steps": STEPS,
            "policies": {name: f"{p.label}, of {LAYERS} layers" for name, p in chosen.items()},
            "communication": COMMUNICATION,
            "batch_of_parallel_and_waves": 64,
        }
    }
    for name, machine in machines(speed).items():
        result[name] = {
            kind: {
                "batch": by_batch(machine, policy),
                "waves": by_wave(machine, policy, 64),
                **({"engines_by_age": by_age(machine, policy, 64)} if kind == "decaying" else {}),
                "tensor_parallel": by_tensor_parallel(machine, policy, 64),
                "pipeline": by_pipeline(machine, policy, 64),
            }
            for kind, policy in chosen.items()
        }
    line = json.dumps(result)
    if options.out:
        options.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
