"""The output head in two steps: what a preview finds, what it costs, and the factors that ship for the named models.

    python research/head.py fit MODEL --out src/taper/previews/MODEL.safetensors
    python research/head.py check MODEL --out research/results/head-MODEL.json
    python research/head.py frontier MODEL --out research/results/head_frontier-MODEL.json
    python research/head.py speed MODEL --out research/results/head_speed-MODEL.json
    python research/head.py tasks MODEL --out research/results/head_tasks-MODEL.json

`fit` makes factors from the model's states on the sample text and on outputs of its own. `check` compares the shortlist
with the whole head on outputs to other prompts, at full depth and under each shipped policy. `frontier` compares ways
to approximate logits. `speed` alternates outputs with both heads and of policies; leave the machine alone meanwhile.
`tasks` solves word problems and answers questions with both heads at full depth, and counts answers that go in circles.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from decode import conditions, write

from taper import LLM, DepthPolicy, SamplingParams
from taper.backends import TokenBatch
from taper.backends.ggml import GgmlBackend
from taper.backends.ggml.shortlist import fitted_margin, quantised
from taper.backends.ggml.weights import as_floats, convert
from taper.engine import Request
from taper.lab.calibration.long_outputs import CIRCLES
from taper.lab.calibration.problems import MAX_TOKENS, WordProblemSet, builtin_problems
from taper.lab.calibration.statistics import mcnemar, repeated
from taper.models import load_model
from taper.models.files import write_whole
from taper.models.preview import (
    TABLE_TYPE,
    UNUSUAL_TOKENS,
    fingerprint,
    fit_factors,
    preview_rank,
    sample_texts,
    save_factors,
)
from taper.models.tensors import Tensor
from taper.policy import active_prefixes
from taper.sampling import token_weights

SHIPPED = Path(__file__).parent.parent / "src" / "taper" / "policies"
SEED, ROWS = 7, 64  # rows: of a forward whose logits are compared
SAMPLINGS: dict[str, dict[str, Any]] = {"recommended": {"seed": SEED}, "greedy": {"temperature": 0.0}}
# By kind of text. Outputs to the first prompts make previews, those to the second judge them.
_PROMPTS = json.loads((Path(__file__).parent / "head_prompts.json").read_text())
FIT, CHECK = _PROMPTS["fit"], _PROMPTS["check"]
LONG_QUESTIONS = json.loads((Path(__file__).parent / "long_questions.json").read_text())
QUESTIONS = LONG_QUESTIONS[::4]  # whose answers are timed
Outcome = tuple[bool, list[int]]  # whether an output is good, and its tokens


def about(llm: LLM) -> dict[str, Any]:
    """The conditions of a measurement."""
    backend = llm.engine.backend
    return conditions(llm.path) | {"library": backend.kernels, "head": backend.head, "threads": llm.threads}


def outputs(llm: LLM, prompts: dict[str, list[str]], max_tokens: int) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Prompts and outputs at full depth, with the sampling that the model's authors recommend, by kind."""
    full, params = llm.resolve_policy(mode="full"), llm.sampling_params(max_tokens=max_tokens, seed=SEED)
    flat = [(kind, llm.encode(prompt)) for kind, texts in prompts.items() for prompt in texts]
    requests = [Request(ids, params, full, llm.tokenizer.eos_token_ids) for _, ids in flat]
    completed = llm.engine.complete(requests)
    found: dict[str, list[tuple[list[int], list[int]]]] = {kind: [] for kind in prompts}
    for (kind, ids), output in zip(flat, completed, strict=True):
        found[kind].append((ids, output))
    return found


def batches(ids: list[int], first: int, policy: DepthPolicy, **asked: Any) -> Iterator[tuple[TokenBatch, int]]:
    """Forwards of a prompt and its output, as decoding computes them, and how many trailing rows predict the output.

    `first` is the position of the token that predicts the first token of the output.
    """
    layers = policy.num_hidden_layers
    cuts = [*range(0, first, 256), *range(first, len(ids), ROWS), len(ids)]
    for start, end in pairwise(cuts):
        depths = [policy.depth(max(0, place - first)) for place in range(start, end)]
        count = end - start
        wanted = tuple(range(count)) if start >= first else ()
        yield (
            TokenBatch(
                np.array(ids[start:end], np.int32),
                np.arange(start, end, dtype=np.int32),
                np.zeros(count, np.int32),
                active_prefixes(policy.skip_order, layers, depths),
                adapters=policy.adapters,
                **{name: wanted if is_rows else value for name, (is_rows, value) in asked.items()},
            ),
            len(wanted),
        )


def head_states(llm: LLM, ids: list[int], first: int) -> np.ndarray:
    """What the head is multiplied with from a position on, at full depth: float32 [n, hidden_size]."""
    layers, model = llm.config.num_hidden_layers, load_model(llm.path)
    norm = as_floats(model.tensors["norm"].data, model.tensors["norm"].dtype)
    states = []
    for batch, count in batches(ids, first, DepthPolicy.full(layers), output_hidden_states=(False, (layers,))):
        if count:
            states.append(llm.engine.backend.forward(batch).hidden_states[layers])
        else:
            llm.engine.backend.forward(batch)
    x = np.concatenate(states)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + llm.config.rms_norm_eps) * norm


def collected(llm: LLM, max_tokens: int) -> dict[str, np.ndarray]:
    """States on the sample text and on outputs to the prompts of `FIT`, by kind."""
    ids = [llm.tokenizer.encode(text) for text in sample_texts()]
    states = {"text": np.concatenate([head_states(llm, each, 0)[UNUSUAL_TOKENS:] for each in ids])}
    for kind, pairs in outputs(llm, FIT, max_tokens).items():
        states[kind] = np.concatenate(
            [head_states(llm, [*prompt, *output], len(prompt) - 1)[: len(output)] for prompt, output in pairs]
        )
    return states


def split(states: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The first three quarters of the states of each kind, and the rest."""
    cuts = {kind: len(part) * 3 // 4 for kind, part in states.items()}
    first = np.concatenate([part[: cuts[kind]] for kind, part in states.items()])
    return first, np.concatenate([part[cuts[kind] :] for kind, part in states.items()])


def fit(llm: LLM, options: argparse.Namespace) -> None:
    """Ship factors: the last quarter of the states of each kind, which come from other prompts, gives the margin."""
    file = options.states
    if file is not None and file.exists():
        states = dict(np.load(file))
    else:
        states = collected(llm, options.max_tokens)
        if file is not None:
            np.savez(file, **states)
    fitted, held_out = split(states)
    backend, config = llm.engine.backend, llm.config
    assert isinstance(backend, GgmlBackend)
    rank = options.rank or preview_rank(config.hidden_size, config.vocab_size, sum(backend.weight_bytes.values()))
    factors = fit_factors(fitted, backend.head_rows, config.vocab_size, rank)
    preview = quantised(factors, 0.0, backend.head_rows, config.vocab_size, lambda _: None)
    margin = fitted_margin(preview, held_out[:: max(1, len(held_out) // 2048)], backend.head_rows)
    save_factors(options.out, fingerprint(load_model(llm.path)), factors, margin)
    print(f"rank {rank}, margin {margin:.2f}, {len(fitted)} states, {options.out.stat().st_size:,} bytes")


def check(llm: LLM, options: argparse.Namespace) -> None:
    """How often the shortlist has the most probable token, and what it changes of recommended sampling."""
    given, reach = llm.sampling_params(), llm.sampling_params().reach(llm.config.vocab_size)
    params = SamplingParams(temperature=given.temperature, top_k=given.top_k, top_p=given.top_p, min_p=given.min_p)
    known = outputs(llm, CHECK, options.max_tokens)
    policies = {"full": llm.resolve_policy(mode="full")} | llm.shipped_policies()
    result = about(llm) | {"sampling": llm.sampling, "max_tokens": options.max_tokens, "policies": {}}
    for name, policy in policies.items():
        kinds = {}
        for kind, pairs in known.items():
            rows: list[tuple[bool, float, float, int]] = []
            for prompt, output in pairs if name == "full" else pairs[::2]:
                ids = [*prompt, *output[:-1]]
                asked = {"logits_rows": (True, ()), "preview_rows": (True, ()), "shortlist": (False, True)}
                for batch, _ in batches(ids, len(prompt) - 1, policy, **asked):
                    computed = llm.engine.backend.forward(batch)
                    pairs_of_logits = zip(computed.logits, computed.previews, strict=True)
                    rows += [compared(whole, previewed, params, reach) for whole, previewed in pairs_of_logits]
            same, distance, kl, size = map(np.array, zip(*rows, strict=True))
            kinds[kind] = {
                "steps": len(rows),
                "argmax": float(same.mean()),
                "total_variation": float(distance.mean()),
                "kl": float(kl.mean()),
                "median_tokens": float(np.median(size)),
                "mean_tokens": float(size.mean()),
                "whole_head": float((size == llm.config.vocab_size).mean()),
            }
            result["policies"][name] = kinds
            write(options.out, result)
        steps = sum(kind["steps"] for kind in kinds.values())
        print(
            name,
            steps,
            {
                key: sum(kind[key] * kind["steps"] for kind in kinds.values()) / steps
                for key in ("argmax", "total_variation", "kl", "mean_tokens", "whole_head")
            },
            min(kind["argmax"] for kind in kinds.values()),
        )


def compared(whole: np.ndarray, previewed: Any, params: SamplingParams, reach: float) -> tuple[bool, float, float, int]:
    """Whether a shortlist has the most probable token; total variation of sampling; KL at temperature 1; its size."""
    shortlist = previewed.shortlist(reach)
    if shortlist is None:
        return True, 0.0, 0.0, len(whole)
    ids, _ = shortlist
    log_total = np.logaddexp.reduce(whole.astype(np.float64))
    inside = float(np.exp(whole[ids] - log_total).sum())
    distributions = []
    for chosen, logits in ((np.arange(len(whole)), whole.copy()), (ids, whole[ids])):
        places, weights = token_weights(logits, params)
        tokens = chosen if places is None else chosen[places]
        distributions.append(
            dict(zip(tokens.tolist(), (weights / weights.sum(dtype=np.float64)).tolist(), strict=True))
        )
    first, second = distributions
    distance = sum(abs(first.get(token, 0.0) - second.get(token, 0.0)) for token in {*first, *second}) / 2
    return bool(np.isin(whole.argmax(), ids)), distance, -float(np.log(inside)), len(ids)


def frontier(llm: LLM, options: argparse.Namespace) -> None:
    """What previews of several ranks find, beside other ways to approximate logits."""
    backend, vocab_size, hidden_size = llm.engine.backend, llm.config.vocab_size, llm.config.hidden_size
    assert isinstance(backend, GgmlBackend)
    states = dict(np.load(options.states)) if options.states else collected(llm, options.max_tokens)
    rng = np.random.default_rng(SEED)
    fitted, test = split(states)
    test = test[rng.permutation(len(test))[:600]]
    head = backend.head_rows(np.arange(vocab_size))
    exact = test @ head.T
    best, shares = exact.argmax(1), np.exp(exact - np.logaddexp.reduce(exact, 1)[:, None])
    result = about(llm) | {"states": len(test), "hidden_size": hidden_size}
    result |= {"max_tokens": options.max_tokens, "ways": []}

    def note(way: str, rank: int, approximate: np.ndarray, table: str) -> None:
        gap = approximate.max(1) - approximate[np.arange(len(best)), best]
        row: dict[str, Any] = {"way": way, "rank": rank, "bits": table, "same": float((gap <= 0).mean())}
        row |= {"gap_99": float(np.quantile(gap, 0.99)), "gap_999": float(np.quantile(gap, 0.999))}
        for count in (256, 1024, 4096):
            least = np.partition(approximate, -min(count, vocab_size), 1)[:, -min(count, vocab_size)]
            inside = approximate >= least[:, None]
            row[str(count)] = {
                "argmax": float(inside[np.arange(len(best)), best].mean()),
                "left_out": float((shares * ~inside).sum(1).mean()),
            }
        result["ways"].append(row)
        write(options.out, result)
        print(row)

    def in_type(table: np.ndarray, dtype: str) -> np.ndarray:
        data = convert(Tensor("F32", table.shape, np.ascontiguousarray(table).reshape(-1).view(np.uint8)), dtype)
        return as_floats(data, dtype).reshape(table.shape)

    for part in (0.25, 1 / 3, 0.5, 0.625, 0.75):
        rank = max(32, int(hidden_size * part) // 32 * 32)
        for way, chosen in (("many kinds", fitted), ("isotropic", np.eye(hidden_size, dtype=np.float32))):
            factors = fit_factors(chosen, backend.head_rows, vocab_size, rank)
            table, bias = factors.table(head)
            inner = test @ factors.rotation.T + factors.shift
            note(way, rank, inner @ in_type(table, TABLE_TYPE).T + bias, TABLE_TYPE)
    note("all dimensions", hidden_size, test @ in_type(head - head.mean(0), TABLE_TYPE).T, TABLE_TYPE)
    for number in (vocab_size // 64, vocab_size // 16):
        centres, of_token = clusters(head, number)
        note("clusters", number, (test @ centres.T)[:, of_token], "F32")


def clusters(rows: np.ndarray, number: int, rounds: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Mean rows of clusters, float32 [number, hidden_size], and the cluster of each row: spherical k-means.

    A token's logit is approximated by its cluster's, as in FlashHead (arXiv 2603.14591).
    """
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    centres = unit[np.random.default_rng(SEED).permutation(len(rows))[:number]]
    for _ in range(rounds):
        nearest = np.concatenate([(part @ centres.T).argmax(1) for part in np.array_split(unit, 64)])
        sums = np.zeros_like(centres)
        np.add.at(sums, nearest, unit)
        counts = np.bincount(nearest, minlength=number)
        centres = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centres)
        centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    means = np.zeros_like(centres)
    np.add.at(means, nearest, rows)
    return means / np.maximum(counts, 1)[:, None], nearest


def speed(llm: LLM, options: argparse.Namespace) -> None:
    """Outputs with both heads and, one at a time, each shipped policy in turn; a question a round."""
    whole = LLM(options.model, head="full", threads=llm.threads, context=llm.engine.backend.context_length)
    heads = {"full": whole, "shortlist": llm}
    result = about(llm) | {"rounds": options.rounds, "steps": options.max_tokens, "runs": []}
    result["num_hidden_layers"] = llm.config.num_hidden_layers
    for rows, how in product((1, 8), SAMPLINGS):
        policies = {"full": llm.resolve_policy(mode="full")}
        policies |= llm.shipped_policies() if (rows, how) == (1, "recommended") else {}
        times: dict[tuple[str, str], list[float]] = {pair: [] for pair in product(policies, heads)}
        for number in range(options.rounds + 1):  # the first warms up
            prompt = llm.encode(QUESTIONS[number % len(QUESTIONS)])
            for name, head in times:
                tokens = options.max_tokens if rows == 1 else options.max_tokens // 4
                params = llm.sampling_params(max_tokens=tokens, ignore_eos=True, **SAMPLINGS[how])
                request = Request(prompt, params, policies[name], llm.tokenizer.eos_token_ids)
                with heads[head].stream_of([request] * rows) as stream:
                    ends = [chunk.output for chunk in stream if chunk.output is not None]
                ms = statistics.mean(1e3 / output.tokens_per_second for output in ends)
                times[name, head] += [ms] if number else []
        for name in policies:
            run = {"policy": name, "rows": rows, "sampling": how}
            run["ms"] = {head: statistics.median(times[name, head]) for head in heads}
            run["over_whole_head"] = times_as_fast(times[name, "shortlist"], times[name, "full"])
            if name != "full":
                run["over_full_depth"] = {h: times_as_fast(times[name, h], times["full", h]) for h in heads}
                note_speed(SHIPPED / options.model / f"{name}.json", run["over_full_depth"])
            result["runs"].append(run)
            write(options.out, result)
            print(run)


def tasks(llm: LLM, options: argparse.Namespace) -> None:
    """Word problems and open questions with both heads: how many come out well, and how many differently."""
    problems = [problem for level in builtin_problems() for problem in level[: options.problems]]
    full_depth = llm.resolve_policy(mode="full")
    result = about(llm) | {"max_tokens": options.max_tokens, "problem_tokens": MAX_TOKENS, "tasks": {}}

    def solved(head: LLM) -> list[Outcome]:
        attempts = WordProblemSet(head, problems).attempt(range(len(problems)), full_depth)
        return [(attempt.solved, attempt.completion_ids) for attempt in attempts]

    def straight(head: LLM, how: str, seeds: int) -> list[Outcome]:
        asked = [(text, SAMPLINGS[how] | {"seed": n}) for n in range(seeds) for text in LONG_QUESTIONS]
        params = [head.sampling_params(max_tokens=options.max_tokens, **sampling) for _, sampling in asked]
        outputs = head.generate([text for text, _ in asked], params, mode="full")
        return [(repeated(output.token_ids) <= CIRCLES, output.token_ids) for output in outputs]

    kinds: dict[str, Callable[[LLM], list[Outcome]]] = {
        "word problems solved": solved,
        "no circles, recommended": partial(straight, how="recommended", seeds=options.seeds),
        "no circles, greedy": partial(straight, how="greedy", seeds=1),
    }
    with ExitStack() as stack:
        shared = {"threads": llm.threads, "context": options.context, "max_batch_size": 8}
        heads = [stack.enter_context(LLM(options.model, head=name, **shared)) for name in ("full", "shortlist")]
        for task, made in kinds.items():
            result["tasks"][task] = in_pairs(*map(made, heads))
            write(options.out, result)
            print(task, result["tasks"][task], flush=True)


def in_pairs(whole: Sequence[Outcome], shortlist: Sequence[Outcome]) -> dict[str, Any]:
    """Counts of the same outputs with both heads, whether each is good and its tokens, and McNemar's exact test."""
    pairs = list(zip(whole, shortlist, strict=True))
    only_whole, only_shortlist = sum(a[0] > b[0] for a, b in pairs), sum(a[0] < b[0] for a, b in pairs)
    good = {"whole_head": sum(a[0] for a, _ in pairs), "shortlist": sum(b[0] for _, b in pairs)}
    counts = {"outputs": len(pairs), "same_tokens": sum(a[1] == b[1] for a, b in pairs)} | good
    counts |= {"only_whole_head": only_whole, "only_shortlist": only_shortlist}
    return counts | {"p_value": mcnemar(only_whole, only_shortlist)}


def note_speed(file: Path, over_full_depth: dict[str, list[float]]) -> None:
    """Keep in a shipped policy's file how many times as fast as full depth it is, with either head."""
    if file.exists():
        data = json.loads(file.read_text())
        speedup = data["provenance"].setdefault("speedup", {})
        speedup |= {"measured": over_full_depth["shortlist"], "whole_head": over_full_depth["full"]}
        write_whole(file, (json.dumps(data, indent=1) + "\n").encode())


def times_as_fast(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """How many times as fast, round by round: the median, the lowest and the highest."""
    ratios = [before / now for now, before in zip(times, base, strict=True)]
    return [statistics.median(ratios), min(ratios), max(ratios)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("fit", "check", "frontier", "speed", "tasks"))
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--problems", type=int, default=64, help="tasks: of each level")
    parser.add_argument("--seeds", type=int, default=3, help="tasks: of each sampled question")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--states", type=Path, help="fit, frontier: keep states here, or take them from here")
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args(arguments)
    head = "full" if options.what == "fit" else "shortlist"
    with LLM(options.model, head=head, threads=options.threads, context=options.context) as llm:
        {"fit": fit, "check": check, "frontier": frontier, "speed": speed, "tasks": tasks}[options.what](llm, options)


if __name__ == "__main__":
    main()
