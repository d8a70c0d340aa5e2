"""The benchmarks of methods and claims run end to end on a tiny model, and verdicts and pages follow their figures."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import calibration
import claims
import comparison
import depth_signals
import fill_cost
import gaps
import gpu
import harness
import host_time
import long_outputs
import methods
import numpy as np
import pictures
import pytest
import render
import session
import tables
import task_options
import task_signals
import torch
import unnested
import word_problems
from comparison import FULL
from eval_data import write_data
from server_process import Reply
from tiny import TinyModel, make_backend, random_prompt, reference_ids

from taper import LLM, DepthPolicy
from taper.backends import TokenBatch
from taper.backends.ggml import GgmlBackend
from taper.errors import RequestError
from taper.lab.bench.shapes import TINY
from taper.lab.calibration.problems import builtin_problems
from taper.lab.calibration.replay import Reference, Replay
from taper.lab.evals.records import RecordFile
from taper.models.policies import LONG_OUTPUT

pytestmark = pytest.mark.ci
TASKS = "gsm8k,bbh_cot_zeroshot_boolean_expressions,bbh_cot_zeroshot_word_sorting"
ORDER = (4, 1, 2, 3)
POLICY = DepthPolicy.d3(6, 0.95, skip_order=ORDER)


@pytest.fixture(scope="module")
def arguments(tiny_llama, tmp_path_factory) -> list[str]:
    """A tiny model, made-up problems and short outputs."""
    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "policy.json").write_text(POLICY.to_json())
    write_data(folder / "data")
    options = {"model": tiny_llama.folder, "policy": folder / "policy.json", "data-dir": folder / "data"}
    options |= {"folder": folder / "work", "limit": 2, "max-tokens": 24, "context": 1024, "threads": 1, "depth": 5}
    return [f"--{name}={value}" for name, value in options.items()]


@pytest.fixture(scope="module")
def results(arguments, tmp_path_factory):
    """The files of results of every part."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in [
            (claims, "LENGTHS", (8, 40)),
            (claims, "HALVED", 4),
            (unnested, "FREE", 2),
            (unnested, "FREE_TOKENS", 8),
            (comparison, "INFLUENCE_TOKENS", 4),
            (comparison, "INFLUENCE_PROMPTS", 8),
        ]:
            patch.setattr(module, name, value)
        out = f"--out={folder / 'methods-tiny.json'}"
        methods.main([*arguments, f"--tasks={TASKS}", out, "quality"])
        methods.main([*arguments, "--tasks=gsm8k", out, "speed"])
        out = f"--out={folder / 'claims-tiny.json'}"
        claims.main([*arguments, f"--tasks={TASKS}", out, *claims.PARTS])
        claims.main([*arguments, "--tasks=gsm8k", "--limit=3", out, "accuracy"])
    return folder


@pytest.mark.ci
def test_methods_are_measured_on_every_task(results):
    result = json.loads((results / "methods-tiny.json").read_text())
    assert set(result["tasks"]) == set(TASKS.split(","))
    assert {FULL, *result["tasks"]["gsm8k"]["5"]["speed"]["rows"]} == set(result["tasks"]["gsm8k"]["5"]["methods"])
    for cells in result["tasks"].values():
        cell = cells["5"]
        assert len(cell["methods"]) == 11
        full = cell["methods"].pop(FULL)
        assert full["mean_depth"] == 6
        for name, row in cell["methods"].items():
            assert abs(row["tuned_mean_depth"] - 5) <= 0.5, name
            assert row["kl"][0] > 0
            assert row["against_full"]["problems"] == row["problems"] == 2
    assert "Ann has" not in json.dumps(result)


def test_a_second_run_answers_only_what_lacks(arguments, tmp_path, monkeypatch):
    out, written = tmp_path / "methods.json", []
    append = RecordFile.append
    monkeypatch.setattr(RecordFile, "append", lambda file, record: (written.append(record.key), append(file, record)))
    arguments = [*arguments, f"--folder={tmp_path / 'work'}", "--tasks=gsm8k", f"--out={out}", "quality"]
    methods.main([*arguments, "--methods=measured,early"])
    problems = 6  # that policies are tuned on
    assert len(written) == len(set(written)) == problems + 2 * 2
    methods.main([*arguments, "--limit=3", "--methods=ShortGPT"])
    assert len(written) == len(set(written)) == problems + 2 * 2 + 3
    rows = json.loads(out.read_text())["tasks"]["gsm8k"]["5"]["methods"]
    asked = {name: row["problems"] for name, row in rows.items()}
    assert asked == {FULL: 3, "D3, measured order": 2, "early exit": 2, "ShortGPT": 3}
    assert rows["early exit"]["against_full"]["problems"] == 2
    methods.main([*arguments, "--limit=3"])
    assert len(written) == len(set(written)) == problems + 3 * 10


def test_methods_are_chosen_by_words_of_their_names():
    policies = dict.fromkeys([FULL, "D3, measured order", "D3, random order 2", "ShortGPT"], POLICY)
    assert task_options.chosen(policies, []) == list(policies)
    assert task_options.chosen(policies, ["shortgpt", "Measured"]) == [FULL, "D3, measured order", "ShortGPT"]
    with pytest.raises(RequestError, match="there is no method 'layerdrop'"):
        task_options.chosen(policies, ["measured", "layerdrop"])


@pytest.mark.ci
def test_results_of_another_model_are_rejected(results, arguments, tmp_path, capsys):
    path = tmp_path / "claims.json"
    path.write_text('{"model": {"name": "other"}}')
    with pytest.raises(SystemExit) as stop:
        task_options.run(lambda _: claims.main([*arguments, f"--out={path}", "core"]))
    assert stop.value.code == 2
    assert "has results of another model" in capsys.readouterr().err


@pytest.mark.ci
def test_what_is_replayed_was_written_by_full_depth(results, arguments, tiny_llama):
    parser = argparse.ArgumentParser()
    task_options.add_options(parser)
    options = parser.parse_args(arguments)
    study = task_options.open_study(options)
    task = task_options.open_task(study, "gsm8k", options)
    assert len(task.references) == len(task.records) == 2
    for reference in task.references:
        ids = reference.completion_ids
        assert reference_ids(tiny_llama, list(reference.prompt_ids), DepthPolicy.full(6), len(ids)) == list(ids)


@pytest.mark.ci
def test_the_harness_own_class_gives_the_same_strings_in_f32(arguments, tmp_path, monkeypatch):
    for name, value in [("PROBLEMS", 6), ("BATCH", 4), ("TIMED", 5), ("TIMED_BATCH", 3), ("ROUNDS", 2)]:
        monkeypatch.setattr(harness, name, value)
    given = [argument for argument in arguments if argument.startswith(("--model", "--data-dir", "--max-t", "--thr"))]
    harness.main([*given, f"--out={tmp_path / 'harness.json'}", "equality", "batching"])
    result = json.loads((tmp_path / "harness.json").read_text())
    theirs, exact, as_in_the_file = result["equality"]["rows"]
    assert (exact["identical"], exact["scored_alike"], exact["solved"]) == (6, 6, theirs["solved"])
    assert as_in_the_file["identical"] <= 6
    assert result["batching"]["identical"] == result["batching"]["problems"] == 5
    assert result["batching"]["tokens"] == {"1": 5 * 24, "3": 5 * 24}
    template = render.environment().get_template("evaluation.md.j2")
    page = template.render(harness={"tiny": result})
    assert page.count("research/harness.py --data-dir DATA") == 2
    assert "| `taper`, f32 | 0.0 (0.0 to 39.0) | 6 | 6 |" in page
    assert "harness.py" not in template.render(harness={"tiny": {"model": {}}})


# Signals


def test_signals_before_a_step_are_those_of_the_forward_before_it(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(long_outputs, "MAX_TOKENS", 20)
    monkeypatch.setattr(depth_signals, "CONTEXT", 256)
    given = [argument for argument in arguments if argument.startswith(("--model", "--policy", "--threads"))]
    out = tmp_path / "depth_signals.json"
    depth_signals.main([*given, "--questions=6", f"--out={out}"])
    result = json.loads(out.read_text())
    rows = result["signals"]
    assert len(rows) == 7
    *others, best = (row["kl"] for row in rows.values())
    assert all(0 < low <= value <= high < 1 for value, low, high in others)
    assert best[0] < min(value for value, _, _ in others), "half of the steps carry least if the loss itself is known"
    model = next(argument for argument in given if argument.startswith("--model")).partition("=")[2]
    with LLM(model, threads=1, context=256, max_batch_size=2, head="shortlist") as llm:
        output = Reference(tuple(range(5, 40)), tuple(range(50, 81)))
        known = depth_signals.known_before(llm, output)
        (scores,) = Replay(llm.engine, [output]).at(0, [DepthPolicy.early_exit(6, 5)])
    np.testing.assert_allclose(known["probability"], -scores.nll_full[:-1], atol=1e-3)
    assert known["certainty"].shape == known["entropy"].shape == known["later"].shape == (30,)


def test_signals_are_measured_on_some_problems_and_the_accuracy_on_others(tiny_llama, tmp_path, monkeypatch):
    for name, value in {"DRAWS": 200, "THREADS": 1}.items():
        monkeypatch.setattr(task_signals, name, value)
    problems = word_problems.problems(6, steps=[1])
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(problem)}\n" for problem in problems))
    # Right where the problem's place in the file is even, and none of the later ones without layer 4.
    monkeypatch.setattr(task_signals, "solved", lambda record, _: is_solved(record.problem, record.policy))

    def is_solved(problem: int, policy: str) -> bool:
        return problem % 2 == 0 and (policy != "4" or problem < 2)

    asked = {"model": tiny_llama.folder, "task": tmp_path / "sums.jsonl", "sets": "4, 1, 4 2", "problems": 4}
    asked |= {"signal-problems": 2, "max-tokens": 8, "records": tmp_path / "r.jsonl"}
    task_signals.main([*(f"--{name}={value}" for name, value in asked.items()), f"--out={tmp_path / 'out.json'}"])
    result = json.loads((tmp_path / "out.json").read_text())
    rows = result["sets"]
    assert {name: row["accuracy"] for name, row in rows.items()} == {"full": 0.5, "4": 0, "1": 0.5, "4 2": 0.5}
    assert {row["own: solved"] for row in rows.values()} == {0.5}
    assert rows["full"]["own: answer of full depth"] == 1
    assert all(rows[name]["replay: KL"] > 0 for name in ("4", "1", "4 2"))
    assert result["conditions"]["task"] == "sums"
    assert str(tmp_path) not in (tmp_path / "out.json").read_text()
    assert "NaN" not in (tmp_path / "out.json").read_text()


def test_correlations_and_their_page():
    rows = [{"accuracy": a, "same": a, "against": -(a**3), "constant": 1.0} for a in (0.1, 0.2, 0.5, 0.9)]
    found = task_signals.correlations(rows)
    assert found["same"]["spearman"][0] == found["same"]["pearson"][0] == 1
    assert found["against"]["spearman"][0] == -1 < found["against"]["pearson"][0]
    assert found["constant"]["spearman"] == [0, 0, 0]
    page = render.rendered()[render.PAGES / "signals.md"]
    shown = page.split("| signal | Spearman | Pearson |\n| --- | --- | --- |\n")[1:]
    assert len(shown) == len(list(render.RESULTS.glob("task_signals-*.json")))
    for strongest in (table.split("\n") for table in shown):
        values = [abs(float(line.split("|")[2].split()[0])) for line in strongest[: strongest.index("")]]
        assert values == sorted(values, reverse=True)
        assert len(values) > 12


def test_a_signal_that_changes_its_sign_from_model_to_model_comes_last():
    one = json.loads(next(render.RESULTS.glob("task_signals-*.json")).read_text())
    other = json.loads(json.dumps(one))
    changed, constant = (other["correlation"][name]["spearman"] for name in ("own: solved", "replay: KL"))
    changed[:] = [-value for value in changed]
    constant[:] = [0.0] * 3
    rows = tables.mean_correlations([one, other])
    assert rows[-1][:2] == ("own: solved", 0)
    assert "replay: KL" not in [name for name, *_ in rows]


def test_builtin_problems_are_those_that_the_script_writes():
    written = word_problems.problems(128)
    assert [problem._asdict() for level in builtin_problems() for problem in level] == written


# Rules that are not nested


@pytest.fixture(scope="module")
def answers() -> list[Reference]:
    return [Reference(tuple(random_prompt(seed, 9)), tuple(random_prompt(seed + 10, 20))) for seed in (1, 2)]


def test_a_nested_rule_costs_what_replay_says(tiny_llama, answers):
    rules = {"nested": (POLICY, False), "filled": (POLICY, True)}
    ours, filled = unnested.replay(tiny_llama.hf, answers, rules).values()
    theirs = Replay(LLM(tiny_llama.folder, device="cpu", dtype="f32", context=64, threads=1).engine, answers)
    expected = theirs.score(POLICY)
    theirs.close()
    for column in ("step", "depth", "kl", "agreement", "nll", "nll_full"):
        np.testing.assert_allclose(getattr(ours, column), getattr(expected, column), atol=2e-4)
    np.testing.assert_allclose(filled.kl, ours.kl, atol=1e-6)  # a nested rule misses nothing


def test_a_rotating_rule_runs_layers_again_and_misses_their_keys(tiny_llama, answers):
    rotating = unnested.Rotating(POLICY.schedule, POLICY.skip_order)
    retained = [set(rotating.retained_layers(step)) for step in range(30)]
    assert [len(layers) for layers in retained] == [POLICY.depth(step) for step in range(30)]
    assert any(later - earlier for earlier, later in pairwise(retained))
    prompt, model = list(answers[0].prompt_ids), unnested.load_f32(tiny_llama.folder)
    written = reference_ids(TinyModel(model, tiny_llama.folder), prompt, rotating, tokens=20, reuse="exact")
    with torch.no_grad():
        missing, filled = (
            unnested.forward(model, [*prompt, *written], len(prompt), rotating, how)[-20:].argmax(-1).tolist()
            for how in (False, True)
        )
    assert missing == written
    assert filled != written


# Filling


def test_the_cost_of_filling_is_that_of_steps_at_the_least_depth(tiny_llama, monkeypatch):
    seconds = iter([9, 9, 9] * 4 + [3, 2, 1, 2, 3, 4, 5, 3, 1])  # of three kinds; each time the other way round
    seen, step_s = [], fill_cost.step_s

    def timed(*step):
        step_s(*step)
        seen.append((sum(step[1]), step[3]))
        return next(seconds, 0.0)

    monkeypatch.setattr(fill_cost, "step_s", timed)
    backend = make_backend("ggml", tiny_llama.load(), context_length=512)
    row = fill_cost.cost(backend, POLICY, steps=3)
    assert {depth for depth, _ in seen} == {POLICY.min_depth} == {row["depth"]}
    assert [kind for _, kind in seen[12:18]] == ["at once", "waiting", "none", "none", "waiting", "at once"]
    assert row["added"] == {"waiting": 1.0, "at once": 2.0}  # of 2 to 1, 3 to 2 and 3 to 1; of 3 to 1, 4 to 2, 5 to 1
    assert row["step_ms"] == {"none": 1000.0, "waiting": 3000.0, "at once": 4000.0}
    assert len(seen) == 3 * 7 + fill_cost.LATER_TOKENS
    assert row["later_ms_a_token"] > 0


def test_a_device_that_waits_overlaps_with_the_host(monkeypatch):
    monkeypatch.setattr(host_time, "POOL", 4)
    backend = host_time.WaitingBackend(2000)
    batch = TokenBatch(*np.zeros((3, 4), np.int32), (4,), (0,), (1,), preview_rows=(2, 3), shortlist=True)
    backend.forward(batch)
    waits = []
    for host_ms in (0.0, 0.5 * host_time.FORWARD_MS, 3 * host_time.FORWARD_MS):
        started = time.perf_counter()
        wait = backend.begin(batch)
        time.sleep(host_ms / 1e3)
        begun = time.perf_counter()
        output = wait()
        waits.append(1e3 * (time.perf_counter() - begun))
        assert 1e3 * (time.perf_counter() - started) >= host_time.FORWARD_MS
    assert waits[0] > waits[2]
    assert len(output.logits) == len(output.greedy_ids) == 1
    assert output.greedy_ids[0] == backend._argmaxes[backend._count % 4 - 1]
    assert [len(row.whole()) for row in output.previews] == [2000, 2000]


def test_random_weights_of_a_shape_give_finite_logits():
    shape = TINY
    backend = GgmlBackend(shape, fill_cost.random_tensors(shape), context_length=512, threads=1)
    positions = np.arange(8, dtype=np.int32)
    batch = TokenBatch(positions, positions, positions * 0, (8,) * shape.num_hidden_layers, logits_rows=(7,))
    logits = backend.forward(batch).logits[0]
    assert np.isfinite(logits).all()
    assert logits.std() > 0.01


# GPUs


def test_drafts_need_a_chance_that_pays_for_drafting_and_verifying():
    assert gpu.needed_chance(1.0, 0.0, 1.0, 7) == 0.0  # costs nothing
    assert gpu.needed_chance(1.0, 0.0, 1.5, 1) == 0.5  # a second token must come as often as it costs
    assert gpu.needed_chance(1.0, 0.5, 1.5, 1) == 1.0
    assert gpu.needed_chance(1.0, 0.6, 1.5, 1) is None


# Sessions


def session_run(seconds: float, *first_tokens: float) -> session.Run:
    return session.Run(seconds, list(first_tokens), [25.0, 26.0, 26.0, 29.0])


RUNS = {
    "full": [session_run(s, 0.5, 0.1, 0.2, 0.3) for s in (10, 20, 16)],
    "fast": [session_run(s, 0.5, 0.2, 0.4, 0.2) for s in (8, 10, 20)],
    "llama_server": [session_run(s, 0.5, 0.1, 0.1, 0.1) for s in (9, 22, 16)],
}


def test_ratios_of_sessions_are_medians_over_rounds_with_their_spread():
    cell = session.summary(RUNS, tokens=512)
    assert cell["seconds"] == {"full": 16, "fast": 10, "llama_server": 16}
    assert cell["tokens_per_second"]["fast"] == 51.2
    assert cell["over_full"] == {"fast": [1.25, 0.8, 2], "llama_server": [1, 0.9091, 1.111]}
    assert cell["over_llama_server"] == {"full": [1, 0.9, 1.1], "fast": [1.125, 0.8, 2.2]}
    assert cell["first_token_s"]["fast"] == [0.5, 0.2, 0.4, 0.2]
    assert cell["later_first_token_s"] == {"full": 0.2, "fast": 0.2, "llama_server": 0.1}
    assert cell["later_first_token_over_full"]["llama_server"] == [0.5, 0.5, 0.5]
    assert cell["new_prompt_tokens"]["full"] == [25, 26, 26, 29]
    assert "over_llama_server" not in session.summary({"full": RUNS["full"]}, tokens=512)


def test_checks_of_sessions_are_those_of_the_model_and_of_what_was_measured():
    cells = {"default 1": session.summary(RUNS, tokens=512)}
    waits = "default 1: fast waits at most 1.2x as long as full depth"
    assert session.checks(session.DEFAULT_MODEL, cells) == {
        "default 1: full at least 1.0x llama-server": True,
        "default 1: fast at least 1.1x llama-server": True,
        waits: True,
    }
    cells["default 1"]["over_llama_server"]["fast"][0] = 1.04
    cells["default 1"]["later_first_token_over_full"]["fast"][0] = 1.3
    passed = session.checks(session.DEFAULT_MODEL, cells)
    assert passed["default 1: fast at least 1.1x llama-server"] is passed[waits] is False
    assert session.checks("other", cells) == {waits: False}


def test_a_session_takes_as_long_as_its_slowest_client():
    quick, slow = [session.Turn(0.1, 1, 9), session.Turn(0.2, 1, 5)], [session.Turn(0.3, 2, 9), session.Turn(0.2, 2, 7)]
    assert session.run_of([quick, slow]) == session.Run(4, [0.2, 0.2], [9, 6])


def streamed(tokens: int, asked: Sequence[dict], cached: int = 0) -> Reply:
    """What a server might reply: the role alone, a token a second, and the usage."""
    deltas = [{"role": "assistant", "content": None}, *({"content": f" {len(asked)}.{n}"} for n in range(tokens))]
    events = [{"choices": [{"delta": delta}], "usage": None} for delta in deltas]
    usage = {"prompt_tokens": 100, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in [*events, {"choices": [], "usage": usage}])
    return Reply(200, f"{body}data: [DONE]\n\n".encode(), [float(n) for n in range(tokens + 2)])


@pytest.mark.parametrize("tokens", [3, 2])
def test_a_client_says_again_what_was_said_and_counts_tokens(tokens, monkeypatch):
    bodies = []

    async def post(port, path, body):
        bodies.append(json.loads(json.dumps(body)))
        return streamed(tokens, body["messages"], cached=60)

    monkeypatch.setattr(session, "post", post)
    target, numbers = session.Target(1, {"ignore_eos": True}), iter(range(7, 100))
    run = session.sessions(target, 1, session.SAMPLING["default"], 3, numbers)
    if tokens < 3:
        with pytest.raises(RuntimeError, match="2 tokens, not 3"):
            run()
        return
    assert run() == session.Run(16, [1.0] * 4, [40] * 4)
    first, second, *_ = bodies
    assert "temperature" not in first
    assert (first["ignore_eos"], first["max_tokens"], first["stream"]) == (True, 3, True)
    assert first["messages"] == [{"role": "user", "content": session.numbered(session.CONVERSATIONS[0], 7)[0]}]
    assert second["messages"][1:] == [
        {"role": "assistant", "content": " 1.0 1.1 1.2"},
        {"role": "user", "content": session.CONVERSATIONS[0][1]},
    ]
    run()
    assert bodies[4]["messages"][0]["content"] == session.numbered(session.CONVERSATIONS[1], 8)[0]


def test_no_session_repeats_the_text_of_another():
    assert {len(conversation) for conversation in session.CONVERSATIONS} == {4}
    assert len(set(session.CONVERSATIONS)) == len(session.CONVERSATIONS) >= 12
    one, other = (session.numbered(session.CONVERSATIONS[0], number)[0] for number in (10_000, 10_001))
    assert len(one) == len(other)
    assert one.index("10000") < 30


@pytest.fixture
def session_arguments(tiny_gguf, tmp_path, monkeypatch) -> list[str]:
    """Short conversations with a tiny model; no llama.cpp of this machine takes part."""
    monkeypatch.setattr(session, "CONVERSATIONS", (("one", "two", "three", "four"),))
    monkeypatch.setattr(session, "CONTEXT", 256)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    return [f"--model={tiny_gguf}", "--threads=1", "--rounds=1", "--tokens=4", f"--out={tmp_path / 'session.json'}"]


@pytest.mark.ci
def test_sessions_are_measured_cell_by_cell(session_arguments, tmp_path, capsys):
    for more in (["--clients=1", "--only=greedy"], ["--clients=2", "--only=default"]):
        with pytest.raises(SystemExit) as stop:
            session.main([*session_arguments, *more])
        assert stop.value.code == 0
    result = json.loads((tmp_path / "session.json").read_text())
    assert list(result["cells"]) == ["greedy 1", "default 2"]
    cell = result["cells"]["default 2"]
    assert cell["conditions"]["batch"] == 2
    assert len(cell["first_token_s"]["full"]) == 4
    assert cell["tokens_per_second"]["full"] == pytest.approx(2 * 4 * 4 / cell["seconds"]["full"], rel=1e-2)
    with pytest.raises(SystemExit):
        session.main([*session_arguments, f"--llama-bin={tmp_path}"])
    assert "no program llama-server in" in capsys.readouterr().err
    (tmp_path / "session.json").write_text('{"model": "other", "cells": {}}')
    with pytest.raises(SystemExit):
        session.main(session_arguments)
    assert "has results of another model" in capsys.readouterr().err


def test_sessions_that_are_interrupted_keep_the_finished_cells(session_arguments, tmp_path, monkeypatch):
    finished = iter([True])

    def alternate(runs, rounds):
        if not next(finished, False):
            raise KeyboardInterrupt
        return {name: [run()] for name, run in runs.items()}

    monkeypatch.setattr(session, "alternate", alternate)
    with pytest.raises(KeyboardInterrupt):
        session.main([*session_arguments, "--clients=1"])
    assert list(json.loads((tmp_path / "session.json").read_text())["cells"]) == ["default 1"]


def test_sessions_have_a_page_and_a_table(tmp_path):
    results = Path(shutil.copytree(render.RESULTS, tmp_path / "results"))
    for path in results.glob("session-*"):
        path.unlink()
    empty = {path.name: page for path, page in render.rendered(results).items()}
    assert "No model has been measured yet." in empty["session.md"]
    assert "over llama-server" not in empty["serving.md"]
    about = json.loads((results / "decode.json").read_text())["conditions"] | {"turns": 4, "llama_server": "version: 1"}
    cells = {name: {"conditions": about} | session.summary(RUNS, 512) for name in ("default 1", "greedy 8")}
    for model in ("other-1.5b", render.DEFAULT_MODEL):
        result = {"model": model, "cells": cells, "passed": session.checks(model, cells)}
        (results / f"session-{model}.json").write_text(json.dumps(result))
    pages = {path.relative_to(render.ROOT).as_posix(): page for path, page in render.rendered(results).items()}
    said = " ".join(pages["README.md"].split())
    for model in (render.DEFAULT_MODEL, "other-1.5b"):
        assert f"{model} is 1.00x as fast as llama-server at full depth and 1.12x with `fast`" in said
    page = pages["docs/serving.md"]
    assert f"| {render.DEFAULT_MODEL} | full depth | 16.0 | 1.00x (0.90 to 1.10) | 0.20 |" in page
    assert "|  | `fast` | 10.0 | 1.12x (0.80 to 2.20) | 0.20 |\n|  | llama-server | 16.0 |  | 0.10 |" in page
    assert page.index("| other-1.5b |") > page.index(f"| {render.DEFAULT_MODEL} | full depth | 16.0")
    page = pages["research/pages/session.md"]
    assert page.count("the server's own sampling, one client") == page.count("greedy, 8 clients at once") == 2
    assert "| `fast` | 10.0 | 51.2 | 1.25x (0.80 to 2.00) | 1.12x (0.80 to 2.20) | 0.50 | 0.20 | 0.40 | 0.20 |" in page
    assert "| default 1: full at least 1.0x llama-server | yes |" in page


# Code completion


@pytest.mark.parametrize("name", gaps.GAPS)
def test_a_gap_is_whole_lines_in_the_middle_of_its_function(name):
    gap = gaps.cut(name)
    assert 3 <= gap.missing.count("\n") == len(gap.missing.splitlines()) <= 8
    whole = ast.walk(ast.parse(gap.prefix + gap.missing + gap.suffix))
    *_, function = (n for n in whole if isinstance(n, ast.FunctionDef) and n.name == re.split("[:.]", name)[-1])
    assert gap.prefix.count("\n") >= function.body[ast.get_docstring(function) is not None].lineno
    assert gap.suffix


def filled(seconds: float, text: str) -> gaps.Filled:
    timings = {"prompt_n": 100, "prompt_ms": 500.0, "draft_n": 8, "draft_n_accepted": 6}
    return gaps.Filled(seconds, {"content": text, "tokens_predicted": len(text), "timings": timings})


def gap_runs() -> dict[str, list[list[gaps.Filled]]]:
    """Three rounds of six gaps; llama-server writes another text in the last one."""
    texts = ["abc"] * 6
    exact = [[filled(s, text) for text in texts] for s in (2, 1, 3)]
    theirs = [[filled(4, text) for text in [*texts[:5], "abd"]] for _ in range(3)]
    return {"exact": exact, "llama_server": theirs, "full": [[filled(3, text) for text in texts]]}


def test_times_of_gaps_are_medians_and_their_ratio_is_over_all_gaps():
    result = gaps.summary([f"m:f{n}" for n in range(6)], gap_runs())
    assert result["gaps"][0]["seconds"] == {"exact": 2, "llama_server": 4, "full": 3}
    assert result["ratio"] == {"llama_server": (2, 2, 2), "full": (1.5, 1.5, 1.5)}
    assert result["same_text"] == {"llama_server": 5, "full": 6}
    assert (result["tokens"]["exact"], result["drafted"], result["accepted"]) == (18, 48, 36)
    once_other = gap_runs()
    once_other["exact"][1][0] = filled(1, "abx")
    assert gaps.summary(["m:f"], once_other)["same_text"] == {"llama_server": 0, "full": 0}


def test_a_gap_is_asked_for_greedily_and_a_failure_is_told(monkeypatch):
    bodies = []

    async def post(port, path, body):
        bodies.append((path, body))
        return Reply(200 if port else 500, b'{"content": ""}', [])

    monkeypatch.setattr(gaps, "post", post)
    gap = gaps.Gap("a", "b", "c")
    assert gaps.fill(gaps.Target(1, {"taper": {"mode": "exact"}}), gap).reply == {"content": ""}
    asked = {"input_prefix": "a", "input_suffix": "c", "n_predict": 128, "temperature": 0, "taper": {"mode": "exact"}}
    assert bodies == [("/infill", asked)]
    with pytest.raises(RuntimeError, match="status 500"):
        gaps.fill(gaps.Target(0, {}), gap)


def test_code_completion_has_a_section_and_a_line(tmp_path):
    results = Path(shutil.copytree(render.RESULTS, tmp_path / "results"))
    about = json.loads((results / "decode.json").read_text())["conditions"]
    about |= {"llama_server": "version: 1", "most_tokens": 128, "kernels": "ggml"}
    result = {"model": "coder", "conditions": about} | gaps.summary([f"m:f{n}" for n in range(6)], gap_runs())
    (results / "gaps-coder.json").write_text(json.dumps(result))
    pages = {path.name: " ".join(page.split()) for path, page in render.rendered(results).items()}
    assert "| `m.f5` | 100 | 3 | 8 | 6 | 2.00 | 4.00 | 2.00 |" in pages["results.md"]
    assert "the 5 where both write the same text 2.00" in pages["results.md"]
    assert "llama-server takes 2.00 times as long with coder" in pages["generate.md"]


# Verdicts and pages


def test_verdicts_need_the_whole_interval_and_every_part():
    holds, fails, unknown = "holds", "does not hold", "inconclusive"
    for interval, above, below in [
        ([1.0, 0.5, 1.5], holds, fails),
        ([-1.0, -1.5, -0.5], fails, holds),
        ([0.1, -0.1, 0.3], unknown, unknown),
        (None, unknown, unknown),
    ]:
        assert (tables.above_zero(interval), tables.below_zero(interval)) == (above, below)
    assert tables.all_of([holds, holds]) == holds
    assert tables.all_of([holds, unknown]) == unknown
    assert tables.all_of([holds, unknown, fails]) == fails


def test_a_start_of_its_own_saves_only_where_tasks_differ():
    rng = np.random.default_rng(0)
    noise = rng.uniform(0.9, 1.1, (2, 3, 40))
    alike = {"a": noise[0] * [[1], [2], [3]], "b": noise[1] * [[1], [2], [3]]}
    different = {"a": noise[0] * [[1], [2], [3]], "b": noise[1] * [[3], [2], [1]]}
    assert claims._saved_by_own_start(alike) == (0, 0, 0)
    saved = claims._saved_by_own_start(different)
    assert tables.start_verdict({"saved_by_own_start": saved}) == "holds"
    assert saved.value == pytest.approx(0.5, abs=0.05)


@pytest.mark.ci
def test_pooling_adds_up_the_problems_of_tasks(results):
    result = json.loads((results / "methods-tiny.json").read_text())
    cells = [cells["5"] for cells in result["tasks"].values()]
    for name in cells[0]["methods"]:
        solved, difference, _ = tables.pooled(cells, name)
        assert solved.value == pytest.approx(np.mean([cell["methods"][name]["accuracy"][0] for cell in cells]))
        if difference is not None:
            own = [cell["methods"][name]["against_full"]["difference"][0] for cell in cells]
            assert difference.value == pytest.approx(np.mean(own))


@pytest.mark.ci
def test_pages_show_every_method_and_claim(results, tmp_path):
    for name in {path.name for path in render.RESULTS.glob("*.json")}:
        if not name.startswith(("methods", "claims")):
            shutil.copy(render.RESULTS / name, results)
    pages = {path.name: page for path, page in render.rendered(results).items()}
    page = pages["methods.md"]
    assert all(name in page for name in ("SkipDecode", "HSD", "#### GSM8K", "BBH, 2 tasks together"))
    assert "| always the most frequent answer | 50 | " in page
    drawn = pictures.draw_all(render.load(results), tmp_path)
    assert [file.name for file in drawn] == ["methods-tiny.png", "formats.png", "frontier.png", "long.png"]
    page = pages["paper.md"]
    for title in "abcdefg":
        assert f"\n## ({title}) " in page
    assert all(f" {part}\n" in page for part in claims.PARTS)
    assert page.count("Repeat it with") == page.count("--max-tokens 24 --threads 1 ") == len(claims.PARTS) + 1
    assert page.count(" accuracy\n") == 2  # other tasks stay as they were
    assert "| gsm8k | 3 | full depth" in page
    assert "| BBH | 4 | full depth" in page
    assert "Not measured yet" not in page


def test_a_second_model_has_a_place_on_every_page(tmp_path, monkeypatch):
    default, other = render.DEFAULT_MODEL, "other-1.5b"
    monkeypatch.setattr(render.shipped, "__defaults__", (tmp_path / "policies",))
    for model in (default, other):
        shutil.copytree(render.ROOT / "src" / "taper" / "policies" / default, tmp_path / "policies" / model)
    results = shutil.copytree(render.RESULTS, tmp_path / "results")
    for path in results.glob("*-qwen2.5-*"):
        path.unlink()
    for kind in ("bench", "calibration", "methods", "claims", "head_speed", "long_outputs"):
        text = (results / f"{kind}-{default}.json").read_text().replace(default, other)
        (results / f"{kind}-{other}.json").write_text(text)
    claimed = json.loads((results / f"claims-{other}.json").read_text())
    del claimed["start"]
    (results / f"claims-{other}.json").write_text(json.dumps(claimed))
    calibrated = json.loads((results / f"calibration-{other}.json").read_text())
    frontier = {"kl": {"measured order": {"29": 0.1, "28": 0.25}}}
    calibrated["policies"]["fast"]["frontier"] = frontier  # committed results of the default model may lack it
    (results / f"calibration-{other}.json").write_text(json.dumps(calibrated))
    pages = {path.relative_to(render.ROOT).as_posix(): page for path, page in render.rendered(results).items()}
    for model in (default, other):
        assert f"| {model} | full depth | " in pages["README.md"]
        assert f"taper bench --model {model} " in pages["research/pages/results.md"]
        assert f"\n## {model}\n" in pages["research/pages/methods.md"]
        assert f"claims.py --model {model} " in pages["research/pages/paper.md"]
    assert f"\nNot measured yet on {other}.\n" in pages["research/pages/paper.md"]
    page = pages[f"research/pages/{other}/README.md"]
    assert f"calibration.py --cache FOLDER --model {other} policies" in page
    assert "| 2 | " in page
    assert "word problems solved, policy, % | –" not in page


def test_the_page_of_the_papers_claims_begins_with_all_verdicts():
    titles = {part: part for part in ("perplexity", "curves", "core", "nesting", "accuracy", "length", "start")}
    found = tables.claims_by_verdict(titles, render.load()["claims"].values())
    assert sorted(title for those in found.values() for title in those) == sorted(titles)


def test_a_healed_policy_ships_if_it_is_better_by_its_interval(tmp_path):
    def policy(*kl: float) -> DepthPolicy:
        provenance = {"policy": "fast", "held_out": {"all steps": {"kl": list(kl)}}}
        return replace(DepthPolicy.static(6, 4, [3, 2]), name="fast", provenance=provenance)

    def shipped() -> dict[str, list[float]]:
        files = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
        assert all(one["name"] == one["provenance"]["policy"] == name for name, one in files.items())
        return {name: one["provenance"]["held_out"]["all steps"]["kl"] for name, one in files.items()}

    (tmp_path / "fast.json").write_text(policy(0.3, 0.25, 0.35).to_json())
    assert not calibration.ship(tmp_path, "fast", policy(0.2, 0.15, 0.26))
    assert shipped() == {"fast": [0.3, 0.25, 0.35]}
    for kl in ([0.2, 0.1, 0.24], [0.1, 0.1, 0.1]):  # the second time, the plain one has its other name already
        assert calibration.ship(tmp_path, "fast", policy(*kl))
        assert shipped() == {"fast": kl, "fast-plain": [0.3, 0.25, 0.35]}


NAMES = r"arxiv\.org/abs/\S+|arXiv \d+\.\d+|Qwen2\.5-Coder-1\.5B"  # which have digits
QUOTED = r"^\*\*The paper says:\*\*(?:.+\n)+"  # a paragraph of the paper's own figures


@pytest.mark.parametrize("template", sorted(render.TEMPLATES.glob("*.j2")), ids=lambda template: template.name)
def test_decimals_come_from_results_unless_they_are_the_papers(template):
    text = re.sub(r"{{.*?}}|{%.*?%}", "", template.read_text(), flags=re.S)
    assert re.findall(r"\d+(?:\.\d+)+", re.sub(f"{NAMES}|{QUOTED}", "", text, flags=re.M)) == []


def defined_names(module: Path) -> set[str]:
    """The names that a module's own statements define, and those of a package's `__all__` and modules."""
    names = {path.stem for path in module.parent.glob("*.py")} if module.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            names |= assigned
            if "__all__" in assigned:
                names |= {item.value for item in node.value.elts}
    return names


@pytest.mark.parametrize("script", sorted((render.ROOT / "research").glob("*.py")), ids=lambda script: script.name)
def test_scripts_import_what_there_is(script):
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = Path(importlib.util.find_spec(node.module).origin or "built-in")
            if module.is_relative_to(render.ROOT) and ".venv" not in module.parts:
                missing = {alias.name for alias in node.names} - defined_names(module)
                assert not missing, f"{node.module} has no {missing}"


def test_a_name_that_only_a_comment_has_is_not_defined(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""mentioned"""\nfrom os import path as where\nfirst, second = 1, 2\n# remarked\ndef made(given): ...\n'
    )
    assert defined_names(module) == {"where", "first", "second", "made"}


QUALITY = {"held_out", "agreement", "argmax", "repetition", "kl", "circles"}
LENGTHS = {"answer_tokens", "max_tokens", "text_tokens", "output_tokens"}


def without_length(part: Any, path: str, known: bool = False) -> Iterator[str]:
    """Where figures of quality stand that nothing around them says the length of the outputs of."""
    if isinstance(part, dict):
        known = known or bool(LENGTHS & {*part, *(part.get("conditions") or ())})
        if QUALITY & part.keys() and not known:
            yield path
        else:
            for name, inner in part.items():
                yield from without_length(inner, f"{path}.{name}", known)
    elif isinstance(part, list):
        for inner in part:
            yield from without_length(inner, path, known)


@pytest.mark.parametrize("file", sorted(render.RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_results_of_quality_say_how_long_their_outputs_are(file):
    assert list(without_length(json.loads(file.read_text()), file.stem)) == []
    assert list(without_length({"rows": [{"agreement": 1.0}]}, "so")) == ["so.rows"], "it would find one that does not"


def test_the_first_figures_of_quality_are_of_outputs_as_people_get_them():
    """Those in the README: of the length in the results, which is the one that policies are judged at."""
    readme = (render.ROOT / "README.md").read_text()
    gains = readme.split("<!-- gains.md.j2")[1].split("<!-- end of gains.md.j2")[0]
    results = render.load()["long_outputs"]
    assert {result["conditions"]["answer_tokens"] for result in results.values()} == {LONG_OUTPUT}
    assert f"of up to {LONG_OUTPUT:,} tokens" in " ".join(gains.split())
    for model, result in results.items():
        rows = gains.split(f"| {model} | full depth |")[1].split("| full depth |")[0]
        for name, policy in result["policies"].items():
            late = [part for part in policy["long_outputs"]["ranges"] if part["nll"]][-1]
            assert late["end"] > 256
            row = next((line for line in rows.splitlines() if line.startswith(f"|  | `{name}`")), "")
            assert bool(row) == (name in render.shipped(model))
            assert not row or f"| {late['first']} | {late['depth']:.1f} |" in row
