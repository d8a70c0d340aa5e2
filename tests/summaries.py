"""Summaries of calibrations, made by hand."""

from __future__ import annotations

import math

from taper.lab.calibration.clock import CostModel, TimedRuns
from taper.lab.calibration.long_outputs import LongOutputs, StepRange
from taper.lab.calibration.statistics import (
    Difference,
    Estimate,
    FreeRunning,
    LossByStep,
    Losses,
    LossEstimate,
    PolicyAndFull,
    SolvedProblems,
)
from taper.lab.calibration.store import Conditions
from taper.lab.calibration.summary import (
    Budget,
    CalibratedModel,
    CalibrationSummary,
    Example,
    Frontier,
    PromptCounts,
    Speedup,
)
from taper.policy import ModelIdentity


def around(value: float, part: float = 0.1) -> Estimate:
    """An estimate and an interval about it, in six digits as JSON has them."""
    return Estimate(*(float(f"{x:.6g}") for x in (value, value * (1 - part), value * (1 + part))))


def frontier(layers: int) -> Frontier:
    depths = range(layers - 1, layers - 1 - max(2, layers // 3), -1)
    losses = {depth: 0.01 * math.exp(0.45 * (layers - depth)) for depth in depths}
    return Frontier({depth: round(layers / (depth + 0.3), 4) for depth in depths}, losses)


def summary(layers: int = 6, *, tapers: bool = True, agreement: float = 0.953) -> CalibrationSummary:
    """The summary of a policy that skips two layers from step 8 on."""
    tokens, min_depth = 40, layers - 2 * tapers
    curve = [layers if step < 8 else min_depth for step in range(tokens)]
    steps = range(tokens + 10)
    kl = [0.05 * (1 + math.sin(step)) * (step >= 8) * tapers for step in steps]
    tapered = LossEstimate(around(0.0523), Estimate(agreement, agreement - 0.01, agreement + 0.01), around(1.234))
    all_steps = LossEstimate(around(0.0417 * tapers), Estimate(0.9625, 0.9625, 0.9625), around(0.987))
    return CalibrationSummary(
        mean_depth=sum(curve[1:]) / (tokens - 1),
        speedup=Speedup(1.3712, TimedRuns(1.3456, 1.3123, 1.3789) if tapers else TimedRuns(1.0, 0.99, 1.01)),
        held_out=Losses(all_steps, tapered if tapers else None),
        free_running=FreeRunning(
            nll=PolicyAndFull(around(0.812), around(0.745)),
            length=PolicyAndFull(around(83.2), around(91.7)),
            repetition=PolicyAndFull(around(0.123), around(0.118)),
        ),
        long_outputs=LongOutputs(
            max_tokens=tokens + 10,
            prompts=22,
            outputs=22,
            ranges=[
                StepRange(0, 50, 22, 4.5, around(0.9), around(0.04), Difference(*map(around, (0.8, 0.7, 0.1)))),
            ],
            tokens=Difference(around(83.2), around(91.7), around(-8.5)),
            ended=Difference(around(0.8), around(0.9), around(-0.1)),
            circles=Difference(around(0.1), around(0.05), around(0.05)),
            failures=["length"],
        ),
        next_output=LossEstimate(around(0.0211), Estimate(0.951, 0.942, 0.96), around(0.31)),
        problems=SolvedProblems(around(0.41), around(0.44), Estimate(-0.03, -0.08, 0.02), 64),
        model=CalibratedModel("tiny", "ab" * 32, layers),
        prompts=PromptCounts(21, 22, "cd" * 32),
        seed=7,
        budget=Budget(max_kl=0.06),
        tokens=4321,
        answer_tokens=tokens,
        policy="constant start=8 min_depth=4",
        on_search_prompts=Losses(all_steps),
        conditions=Conditions(
            date="2026-02-03",
            taper="0.1.0",
            backend="ggml",
            dtype="f32",
            threads=2,
            machine="A processor, 2 cores",
            python="3.12.1",
            kernels="ggml-python 0.0.1",
        ),
        model_identity=ModelIdentity("llama", 64, 300, "f32"),
        cost_ms=CostModel(1.0, 0.2),
        importance=[3.0, *(0.02 * (1 + layer % 5) for layer in range(1, layers - 1)), 0.8],
        skip_order=list(range(layers - 2, 0, -1)),
        searched_layers=max(2, layers // 3),
        harmless_layers=2,
        core_layers=[0, layers - 1],
        curve=curve,
        by_step=LossByStep([22 - step // 4 for step in steps], kl, [1 - x for x in kl]),
        frontier=frontier(layers),
        examples=[
            Example("Why is the <sky> blue?", "Because of the light of the sun.", "Because of the colour of the sun."),
            Example("And the sea?", "It mirrors the sky.", "It mirrors the sky."),
        ],
    )
