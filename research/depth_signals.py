"""Does anything that is known before a step tell what skipping layers there will cost?

    python research/depth_signals.py --model MODEL --out research/results/depth_signals-MODEL.json

Full depth's outputs to the questions of `long_outputs.py` are replayed with the layers that a policy skips at its least
depth, and its adapters, at every step from the first on. Each signal orders the steps; if it tells anything, the half
that it finds easier carries less than half of the loss. Signals come from full depth's forward of the step before, the
best that a running policy could have:

- later: the position
- probability: of the token before; and the same from the preview of the head
- certainty: probability of the most probable token there
- entropy there
- state: what a ridge regression on the last hidden state, fitted on other questions, predicts
- the loss itself: what nobody can know
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from decode import conditions, write
from head import batches
from long_outputs import QUESTIONS, ROWS, full_depth

from taper import LLM, DepthPolicy
from taper.lab.calibration.long_outputs import MAX_TOKENS
from taper.lab.calibration.measured_model import measured_model
from taper.lab.calibration.replay import Reference, Scores
from taper.lab.calibration.statistics import by_completion, ratio_estimate
from taper.lab.calibration.summary import interval, to_plain
from taper.models.download import DEFAULT_MODEL

FOLDS = 4  # of questions; each is predicted from the others
STRENGTHS = (0.1, 1.0, 10.0)  # of the ridge; the best of them counts, so its figure flatters
CONTEXT = 2048


def known_before(llm: LLM, output: Reference) -> dict[str, np.ndarray]:
    """What full depth's forward of the step before says, for the steps from 1 on: [steps], states [steps, hidden]."""
    ids, first = [*output.prompt_ids, *output.completion_ids], len(output.prompt_ids) - 1
    layers = llm.config.num_hidden_layers
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    asked = {"logits_rows": (True, None), "preview_rows": (True, None), "output_hidden_states": (False, (layers,))}
    for batch, count in batches(ids, first, DepthPolicy.full(layers), **asked):
        found = llm.engine.backend.forward(batch)
        if count:
            previewed = np.stack([row.approximate for row in found.previews])
            parts.append((found.logits, previewed, found.hidden_states[layers]))
    count = len(output.completion_ids) - 1
    logits, previewed, states = (np.concatenate(part)[:count] for part in zip(*parts, strict=True))
    logprobs, rough, chosen = log_softmax(logits), log_softmax(previewed), output.completion_ids[:count]
    return {
        "later": np.arange(count, dtype=float),
        "probability": logprobs[range(count), chosen],
        "probability, previewed": rough[range(count), chosen],
        "certainty": logprobs.max(-1),
        "entropy": (np.exp(logprobs) * logprobs).sum(-1),
        "state": states / np.linalg.norm(states, axis=-1, keepdims=True),
    }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities, float64 [n, vocab_size]."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def predicted(states: np.ndarray, loss: np.ndarray, question: np.ndarray, strength: float) -> np.ndarray:
    """The loss as a ridge regression on other questions predicts it: [steps]; the loss is in logarithms."""
    found = np.empty(len(loss))
    for fold in range(FOLDS):
        is_held_out = question % FOLDS == fold
        known, target = states[~is_held_out], loss[~is_held_out]
        mean, scale = known.mean(0), known.std(0) + 1e-6
        x = (known - mean) / scale
        gram = x.T @ x + strength * len(x) * np.eye(x.shape[1])
        weights = np.linalg.solve(gram, x.T @ (target - target.mean()))
        found[is_held_out] = (states[is_held_out] - mean) / scale @ weights
    return found


def carried(scores: Scores, easiness: np.ndarray) -> dict[str, Any]:
    """The share of the loss that the easier half of the steps carries."""
    rng = np.random.default_rng(0)
    order = np.lexsort((rng.random(len(easiness)), -easiness))  # the easiest first; ties by chance
    is_easy = np.zeros(len(easiness), bool)
    is_easy[order[: len(order) // 2]] = True
    losses = {"kl": scores.kl, "disagreement": 1 - scores.agreement}
    return {
        name: ratio_estimate(by_completion(scores, loss * is_easy), by_completion(scores, loss))
        for name, loss in losses.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--policy", default="fast", help="whose layers and adapters are meant; default %(default)s")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="the first ones; default all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    llm = LLM(options.model, threads=options.threads, context=CONTEXT, max_batch_size=ROWS, head="full")
    with measured_model(llm, None) as model:
        policy = llm.resolve_policy(options.policy)
        outputs = full_depth(model, 1)[: options.questions]
        constant = DepthPolicy.static(policy.num_hidden_layers, policy.min_depth, policy.skip_order)
        scores = model.scores("constant depth", outputs, replace(constant, adapters=policy.adapters))
    scores = scores.where(scores.step > 0)
    with LLM(options.model, threads=options.threads, context=CONTEXT, max_batch_size=1, head="shortlist") as alone:
        each = [known_before(alone, output) for output in outputs]
    known = {name: np.concatenate([one[name] for one in each]) for name in each[0]}
    states, loss = known.pop("state"), np.log(scores.kl + 1e-4)
    rows = {name: carried(scores, easiness) for name, easiness in known.items()}
    regressions = [carried(scores, -predicted(states, loss, scores.reference, strength)) for strength in STRENGTHS]
    rows["state"] = min(regressions, key=lambda row: float(row["kl"].value))
    rows["the loss itself"] = carried(scores, -scores.kl)
    about = conditions(llm.path) | {"threads": options.threads, "library": llm.engine.backend.kernels}
    about |= {"answer_tokens": MAX_TOKENS, "policy": options.policy, "depth": policy.min_depth}
    about |= {"questions": len(outputs), "steps": len(scores.kl), "sampling": llm.sampling}
    write(options.out, to_plain({"conditions": about, "signals": rows}))
    for name, row in rows.items():
        print(name, *(f"{metric} {interval(row[metric], 100)} %" for metric in row))


if __name__ == "__main__":
    main()
