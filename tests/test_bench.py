"""Times: what is run for them, what counts, and other programs beside it. Their values are the machine's own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import formats
import pytest
from tiny import BACKENDS, make_backend

import taper.engine
from taper.engine import Engine
from taper.errors import RequestError
from taper.lab.bench.measure import (
    Clock,
    OutOfTimeError,
    alternate,
    mean_step_bytes,
    measure,
    random_prompt,
    step_bytes,
    step_ms_by_depth,
)
from taper.lab.bench.peers import LlamaBench, find_llama_bench
from taper.policy import DepthPolicy

FULL = DepthPolicy.full(6)
PROGRAM = """#!{python}
import json, sys
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    print(json.dumps(arguments), file=log)
value = lambda name: int(arguments[arguments.index(name) + 1]) if name in arguments else 0
if "--output-format" in arguments:
    print("n_kv_max = 1")
    print(json.dumps({{"pl": value("-npl"), "speed_pp": 100.0 * value("-npl"), "speed_tg": 10.0 * value("-npl")}}))
elif "-o" in arguments:
    print(json.dumps([{{"n_prompt": value("-p"), "n_depth": value("-d"), "avg_ts": 1000.0 - value("-d")}}]))
else:
    import shutil
    shutil.copy(*arguments[1:3])
"""


@pytest.fixture
def llama_bin(tmp_path) -> Path:
    """A folder of programs that print what llama.cpp's print, and keep a log of their arguments in `log`."""
    if sys.platform == "win32":
        pytest.skip("a script with a #! line is no program there")
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("llama-bench", "llama-batched-bench", "llama-quantize"):
        (folder / name).write_text(PROGRAM.format(python=sys.executable, log=str(folder / "log")))
        (folder / name).chmod(0o755)
    return folder


def log(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


class Counting:
    """A backend that notes the tokens and active layers of each forward."""

    def __init__(self, backend):
        self.backend, self.forwards = backend, []

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def forward(self, batch):
        self.forwards.append((len(batch.tokens), sum(n > 0 for n in batch.num_active)))
        return self.backend.forward(batch)


@pytest.fixture
def backend(tiny_llama) -> Counting:
    return Counting(make_backend("torch", tiny_llama.load(), num_slots=2))


# Measuring


def test_a_run_computes_the_prompts_one_by_one_and_then_a_token_of_each_a_step(backend):
    engine = Engine(backend)
    for batch, computed in ((1, [40, 1, 1, 1, 1]), (2, [40, 40, 2, 2, 2, 2])):
        backend.forwards.clear()
        started = time.perf_counter()
        speeds = measure(engine, FULL, prompt_tokens=40, max_tokens=5, batch=batch, seed=batch)
        assert [tokens for tokens, _ in backend.forwards] == computed
        assert 0 < speeds.ttft_s + 4 * speeds.tpot_s <= time.perf_counter() - started
    assert math.isnan(measure(engine, FULL, prompt_tokens=40).tpot_s)
    backend.forwards.clear()
    policy = DepthPolicy.skipdecode(6, min_depth=2, span=4)
    measure(engine, policy, prompt_tokens=3, max_tokens=6, seed=3)
    assert [depth for _, depth in backend.forwards] == [policy.depth(step) for step in range(6)]


def test_tokens_are_sampled_at_a_temperature_and_greedy_without_one(backend, monkeypatch):
    temperatures, sample = [], taper.engine.sample
    monkeypatch.setattr(
        taper.engine,
        "sample",
        lambda logits, params, *more: (temperatures.append(params.temperature), sample(logits, params, *more))[1],
    )
    engine = Engine(backend)
    measure(engine, FULL, max_tokens=5)
    assert temperatures == []
    assert measure(engine, FULL, max_tokens=5, temperature=0.8).tpot_s > 0
    assert temperatures == [0.8] * 5


def test_the_same_seed_finds_its_context_in_the_cache_and_another_does_not(backend):
    engine = Engine(backend)
    for seed, computed in ((0, 40), (0, 1), (1, 40)):
        backend.forwards.clear()
        measure(engine, FULL, prompt_tokens=40, max_tokens=2, seed=seed)
        assert [tokens for tokens, _ in backend.forwards] == [computed, 1]
    assert random_prompt(engine, 9, seed=3) == random_prompt(engine, 30, seed=3)[:9]
    assert random_prompt(engine, 9, seed=3) != random_prompt(engine, 9, seed=3, row=1)


def test_a_run_that_is_out_of_time_ends_and_frees_its_slots(backend):
    engine = Engine(backend)
    with pytest.raises(OutOfTimeError):
        measure(engine, FULL, max_tokens=4, batch=2, clock=Clock(0))
    assert engine.num_free_slots == 2


def test_steps_by_depth_take_turns_and_run_their_layers(backend):
    times = step_ms_by_depth(backend, (4, 1, 2), (6, 5, 3), steps=2, first_position=7)
    assert list(times) == [6, 5, 3]
    assert all(ms > 0 for ms in times.values())
    assert backend.forwards == [(1, 6), (1, 6), (1, 5), (1, 5), (1, 3), (1, 3)] * 5
    step_ms_by_depth(backend, (), (6,), steps=1, first_position=backend.context_length - 2)


def test_runs_take_turns_and_the_warm_up_does_not_count():
    calls = []

    def run(name):
        return lambda: calls.append(name) or len(calls)

    assert alternate({"a": run("a"), "b": run("b")}, rounds=2) == {"a": [3, 5], "b": [4, 6]}
    assert calls == ["a", "b"] * 3


def test_only_whole_rounds_count_when_time_is_over():
    def runs(last: int):
        numbers = count(1)

        def run():
            if (number := next(numbers)) > last:
                raise OutOfTimeError
            return number

        return {"a": run, "b": run}

    assert alternate(runs(5), rounds=5) == {"a": [3], "b": [4]}
    with pytest.raises(OutOfTimeError):
        alternate(runs(3), rounds=5)


# Bytes


@BACKENDS
def test_bytes_of_a_step_are_retained_layers_and_lm_head(kind, tiny_llama):
    weight_bytes = make_backend(kind, tiny_llama.load()).weight_bytes
    state = tiny_llama.hf.state_dict()

    def size(*prefixes):
        return sum(4 * value.numel() for name, value in state.items() if name.startswith(prefixes))

    always = size("model.norm", "lm_head")
    assert step_bytes(weight_bytes, range(6)) == always + size("model.layers.")
    retained = step_bytes(weight_bytes, (0, 1, 4, 5))
    assert retained == always + size(*(f"model.layers.{layer}." for layer in (0, 1, 4, 5)))
    assert mean_step_bytes(weight_bytes, DepthPolicy.static(6, 4, [2, 3]), 7) == retained
    tied = {"embed_tokens": 1000, "norm": 100, "layers.1.q_proj": 10, "layers.10.q_proj": 1}
    assert step_bytes(tied, (1,)) == 1110  # not of layer 10 too
    assert step_bytes(tied | {"lm_head": 5000}, (10,)) == 5101


# llama.cpp


def test_llama_bench_is_asked_for_what_is_measured(llama_bin):
    bench = LlamaBench(llama_bin, Path("model.gguf"), threads=3)
    assert bench.measure(prompt_tokens=512) == 1000
    assert bench.measure(max_tokens=64, context=24) == 976
    common = ["-m", "model.gguf", "-t", "3", "-ngl", "0"]
    rest = ["-fa", "1", "-r", "1", "-o", "json"]
    assert log(llama_bin) == [
        [*common, "-p", "512", "-n", "0", *rest],
        [*common, "-p", "0", "-n", "64", *rest, "-d", "24"],
    ]


def test_a_failure_of_llama_bench_is_one_line(llama_bin):
    bench = LlamaBench(llama_bin, Path("model.gguf"), threads=1)
    (llama_bin / "llama-bench").write_text("#!/bin/sh\necho 'loading' >&2\necho 'error: no such model' >&2\nexit 1\n")
    with pytest.raises(RequestError, match="llama-bench failed: error: no such model"):
        bench.measure(max_tokens=1)
    (llama_bin / "llama-bench").write_text("#!/bin/sh\nsleep 60\n")
    with pytest.raises(subprocess.TimeoutExpired):
        bench.measure(max_tokens=1, timeout_s=0.2)
    (llama_bin / "llama-bench").unlink()
    with pytest.raises(RequestError, match=r"cannot run .*llama-bench: No such file"):
        bench.measure(max_tokens=1)


def test_llama_bench_is_found_on_the_path_or_where_it_is_said_to_be(llama_bin, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_llama_bench() is None
    assert find_llama_bench(llama_bin) == llama_bin
    with pytest.raises(RequestError, match="no program llama-bench in"):
        find_llama_bench(tmp_path)
    monkeypatch.setenv("PATH", str(llama_bin))
    assert find_llama_bench() == llama_bin


def test_formats_are_made_measured_and_written_one_by_one(tiny_gguf, llama_bin, tmp_path, monkeypatch):
    tests = [("decode", 9), ("prefill", 8), ("batch", 2)]
    for name, value in {"FORMATS": ("Q8_0", "F16"), "TESTS": tests, "ROUNDS": 1, "TOKENS": 3, "THREADS": 1}.items():
        monkeypatch.setattr(formats, name, value)
    folder, out = tmp_path / "formats", tmp_path / "formats.json"
    arguments = ["formats.py", f"--source={tiny_gguf}", f"--folder={folder}", f"--out={out}"]

    def measured(*names: str) -> dict:
        monkeypatch.setattr(sys, "argv", [*arguments, *(f"--llama={name}={llama_bin}" for name in names)])
        formats.main()
        return json.loads(out.read_text())["formats"]

    first = measured("old")
    assert sorted(path.name for path in folder.iterdir()) == ["tiny.f16.gguf", "tiny.q8_0.gguf"]
    assert list(first) == ["Q8_0", "F16"]
    assert set(first["Q8_0"]) == {"file_mib", "decode 9", "prefill 8", "batch 2"}
    decode, prefill, batch = (first["F16"][test] for test in ("decode 9", "prefill 8", "batch 2"))
    assert decode["tokens_per_second"]["old"] == 991
    assert batch["tokens_per_second"]["old"] == 20
    asked = ["-npp", "16", "-ntg", "3", "-npl", "2", "-c", "550", "-fa", "on", "--output-format", "jsonl"]
    assert asked in [arguments[-len(asked) :] for arguments in log(llama_bin)]
    assert prefill["ratio"]["old"] == pytest.approx(prefill["tokens_per_second"]["Taper"] / 1000, rel=1e-3)
    assert measured("old") == first  # nothing lacks
    assert set(measured("old", "new")["Q8_0"]["batch 2"]["ratio"]) == {"old", "new"}
