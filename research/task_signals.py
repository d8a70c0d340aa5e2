"""Which cheap figure tells how a set of skipped layers will do on a task? One JSON file for a model and task.

    python research/task_signals.py --model MODEL --task gsm8k --data-dir DIR --records FILE --out FILE

Each set of layers is skipped at every step from 1 on. Its accuracy is measured on some training problems, and every
signal on others. The signals: the accuracy itself; of the outputs that the set writes freely, the share whose extracted
answer is full depth's, their NLL at full depth, length, and repetition; and what replay of full depth's own outputs
sees: KL, agreement, and flips where full depth was sure, as a mean, as the worst outputs, as a drift, and on digits.
Correlations are Spearman's and Pearson's over the sets, with bootstrap intervals over sets. Killed runs go on.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from decode import conditions
from scipy.stats import rankdata

from taper import LLM, DepthPolicy
from taper.lab.calibration.replay import Reference, Replay, Scores
from taper.lab.calibration.statistics import repeated
from taper.lab.calibration.store import skipping
from taper.lab.evals import load_tasks
from taper.lab.evals.records import Record
from taper.lab.evals.run import Evaluator
from taper.lab.evals.summary import chosen_filter, solved
from taper.lab.evals.tasks import EvalTask
from taper.models import find_model

THREADS, BATCH, CONTEXT, SURE = 2, 32, 1024, 0.9
WORST = 0.2  # share of outputs or steps that count as the worst
DRAWS = 10_000


def main(arguments: Iterable[str] | None = None) -> None:
    """Answer, replay, and correlate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", required=True, help="with a training split")
    parser.add_argument("--split", default="train", help="whose problems are asked; default %(default)s")
    parser.add_argument("--data-dir", type=Path, help="local data of the task")
    parser.add_argument("--sets", required=True, help='layers skipped, such as "5 4, 5 4 6, 12"')
    parser.add_argument("--signal-problems", type=int, default=24, help="default %(default)s")
    parser.add_argument("--problems", type=int, default=72, help="for the accuracy; default %(default)s")
    parser.add_argument("--max-tokens", type=int, default=256, help="default %(default)s")
    parser.add_argument("--records", type=Path, required=True, help="where outputs are kept, not to be committed")
    parser.add_argument("--out", type=Path, required=True, help="the file of results")
    options = parser.parse_args(arguments)
    llm = LLM(options.model, device="cpu", threads=THREADS, context=CONTEXT, max_batch_size=BATCH)
    layers = llm.config.num_hidden_layers
    sets = [tuple(map(int, text.split())) for text in options.sets.split(",")]
    selection = load_tasks([options.task], fewshot=0, data_dir=options.data_dir, split=options.split)
    (task,) = selection.tasks
    policies = {skipped: skipping(layers, skipped) for skipped in sets}
    named = {" ".join(map(str, skipped)): policies[skipped] for skipped in sets}
    limit = options.signal_problems + options.problems
    by_label = {"full": DepthPolicy.full(layers)} | named
    records: dict[str, list[Record]] = {}
    evaluator = Evaluator(llm, selection, chat=True, max_tokens=options.max_tokens)
    for label, policy in by_label.items():  # one after the other, so that an interrupted study has whole sets
        named_policy = policy if label == "full" else replace(policy, name=label)
        out = options.records.with_name(f"{options.records.stem}-{label.replace(' ', '_')}.jsonl")
        records[label] = evaluator.evaluate([named_policy], limit=limit, out=out).records
        right = [bool(solved(record, chosen_filter(task, None))) for record in records[label]]
        print(label, f"{sum(right)}/{len(right)}", file=sys.stderr, flush=True)
    prompts = evaluator.prompt_ids(range(min(limit, task.num_problems)))
    first = options.signal_problems
    rows = signals(llm, task, prompts, records, named, first)
    result = {
        "conditions": conditions(find_model(options.model))
        | {"task": task.name, "version": task.version, "split": options.split, "max_tokens": options.max_tokens}
        | {"signal_problems": first, "problems": options.problems, "batch": BATCH},
        "sets": rows,
        "correlation": correlations([row for label, row in rows.items() if label != "full"]),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, figures in sorted(result["correlation"].items(), key=lambda item: -abs(item[1]["spearman"][0])):
        print(f"{name:28} spearman {figures['spearman']} pearson {figures['pearson']}")


def signals(
    llm: LLM,
    task: EvalTask,
    prompts: Mapping[int, tuple[int, ...]],
    records: Mapping[str, Sequence[Record]],
    policies: Mapping[str, DepthPolicy],
    first: int,
) -> dict[str, dict[str, float]]:
    """Accuracy on the later problems, and every signal on the first ones, by set."""
    filter_name = chosen_filter(task, None)
    digits = {i for i in range(llm.config.vocab_size) if re.search(r"\d", llm.tokenizer.decode([i]))}
    full = {record.problem: record for record in records["full"][:first]}
    references = [_reference(prompts, record) for record in full.values()]
    rows = {}
    replay = Replay(llm.engine, references)
    scores = {label: replay.score(policy) for label, policy in policies.items()}
    replay.close()
    for label, own in records.items():
        early, late = own[:first], own[first:]
        replay = Replay(llm.engine, [_reference(prompts, record) for record in early])
        judged = replay.score(DepthPolicy.full(llm.config.num_hidden_layers))
        replay.close()
        row = {
            "accuracy": _mean(bool(solved(record, filter_name)) for record in late),
            "own: solved": _mean(bool(solved(record, filter_name)) for record in early),
            "own: answer of full depth": _mean(_last_number(r) == _last_number(full[r.problem]) for r in early),
            "own: NLL at full depth": float(judged.nll_full.mean()),
            "own: NLL, worst outputs": _worst([judged.nll_full[judged.reference == i].mean() for i in range(first)]),
            "own: tokens": _mean(len(record.completions[0].token_ids) for record in early),
            "own: at the limit": _mean(record.completions[0].finish_reason == "length" for record in early),
            "own: repeated 4-grams": _mean(repeated(record.completions[0].token_ids) for record in early),
        }
        if label in scores:
            row |= replayed(scores[label], references, digits)
        rows[label] = row
    return rows


def _reference(prompts: Mapping[int, tuple[int, ...]], record: Record) -> Reference:
    return Reference(prompts[record.problem], record.completions[0].token_ids)


def replayed(scores: Scores, references: Sequence[Reference], digits: set[int]) -> dict[str, float]:
    """What replay sees of a set of layers on full depth's own outputs."""
    tapered = scores.where(scores.step > 0)
    ids = np.array([references[r].completion_ids[s] for r, s in zip(tapered.reference, tapered.step, strict=True)])
    is_digit = np.isin(ids, list(digits))
    by_output = [tapered.where(tapered.reference == index) for index in range(len(references))]
    sure = tapered.nll_full < -np.log(SURE)
    late, early = tapered.step >= 100, tapered.step < 50
    return {
        "replay: KL": float(tapered.kl.mean()),
        "replay: disagreement": float(1 - tapered.agreement.mean()),
        "replay: flips where sure": _over(1 - tapered.agreement[sure]),
        "replay: KL, worst outputs": _worst([part.kl.mean() for part in by_output if len(part.kl)]),
        "replay: KL, worst steps": _worst(tapered.kl.tolist()),
        "replay: rise in NLL": float((tapered.nll - tapered.nll_full).mean()),
        "replay: KL on digits": _over(tapered.kl[is_digit]),
        "replay: disagreement on digits": _over(1 - tapered.agreement[is_digit]),
        "replay: KL late over early": float(tapered.kl[late].mean() / tapered.kl[early].mean()) if late.any() else 1.0,
    }


def correlations(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, list[float]]]:
    """Of each signal with the accuracy over the sets: Spearman's and Pearson's, with bootstrap intervals."""
    accuracy = np.array([row["accuracy"] for row in rows])
    draws = np.random.default_rng(0).integers(0, len(rows), (DRAWS, len(rows)))
    signals: dict[str, dict[str, list[float]]] = {}
    for name in (name for name in rows[0] if name != "accuracy"):
        values = np.array([row[name] for row in rows])
        signals[name] = {
            "spearman": _correlation(rankdata(values), rankdata(accuracy), draws, ranked=True),
            "pearson": _correlation(values, accuracy, draws),
        }
    return signals


def _correlation(a: np.ndarray, b: np.ndarray, draws: np.ndarray, ranked: bool = False) -> list[float]:
    def one(x: np.ndarray, y: np.ndarray) -> float:
        if ranked:
            x, y = rankdata(x), rankdata(y)
        return float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else 0.0

    resampled = [one(a[draw], b[draw]) for draw in draws[: DRAWS // 10]]
    low, high = np.quantile(resampled, [0.025, 0.975])
    return [round(value, 3) for value in (one(a, b), float(low), float(high))]


def _last_number(record: Record) -> str:
    """The last number of an output, as most filters take it; the text itself if there is none."""
    text = record.completions[0].text
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return numbers[-1].replace(",", "") if numbers else text.strip()


def _worst(values: Sequence[float]) -> float:
    """The mean of the highest fifth."""
    highest = sorted(values)[-max(1, round(WORST * len(values))) :]
    return float(np.mean(highest))


def _over(values: np.ndarray) -> float:
    """The mean; 0 over no step, which is so for all sets, and then tells nothing."""
    return float(values.mean()) if len(values) else 0.0


def _mean(values: Any) -> float:
    return float(np.mean([float(value) for value in values]))


if __name__ == "__main__":
    main()
