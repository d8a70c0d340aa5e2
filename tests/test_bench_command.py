"""`taper bench`: every phase on tiny models, peers, time budgets, tables and mistakes."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import click
import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from forked import posix_only
from rich.console import Console
from test_bench import llama_bin, log  # noqa: F401  (a fixture)

from taper.backends import TokenBatch
from taper.backends.torch import TorchBackend, to_torch
from taper.cli import bench as command
from taper.cli import cli
from taper.errors import RequestError, TaperError
from taper.lab.bench import measure as bandwidth
from taper.lab.bench import peers, run, target, torch_device
from taper.lab.bench.measure import Clock, OutOfTimeError, Speeds
from taper.lab.bench.shapes import SHAPES, TINY
from taper.lab.bench.target import BenchOptions
from taper.models.config import expected_shapes
from taper.policy import DepthPolicy

SHORT = {"lengths": (3, 6), "prompts": (3, 6), "rounds": 2, "minutes": 5.0}
LIKE_A_GPU = {"device": "cuda", "shape": "tiny", **SHORT}
SHORTEST = LIKE_A_GPU | {"lengths": (2,), "prompts": (2,), "no_peers": True}


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    """A tiny shape and short measurements; no llama.cpp of this machine takes part."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(run, "STEPS", 2)
    monkeypatch.setattr(torch_device, "_CHECKED_TOKENS", 8)
    monkeypatch.setattr(bandwidth, "ROUNDS", 1)
    monkeypatch.setitem(SHAPES, "tiny", TINY)


def measured(torch_device: str = "cpu", **options) -> dict:
    return run.run(BenchOptions(**options), lambda line: None, torch_device)


def as_text(result: dict, width: int = 200) -> str:
    file = io.StringIO()
    command.show_results(result, Console(file=file, width=width, markup=False, highlight=False))
    return file.getvalue()


def taper_bench(monkeypatch, result: dict, *arguments: str):
    """The command, whose measurements have this result."""
    monkeypatch.setattr(run, "run", lambda options, show: result)
    return CliRunner().invoke(cli, ["bench", *arguments])


# Every phase


@pytest.mark.ci
def test_every_phase_runs_as_on_a_gpu_and_is_shown(tmp_path, monkeypatch):
    path = tmp_path / "new" / "bench.json"
    result = measured(**LIKE_A_GPU, json=path)
    assert json.loads(path.read_text()) == result
    names = ["graphs equal eager steps", "graphs equal the reference implementation", "bandwidth", "depth"]
    assert list(result["phases"]) == [*names, "outputs of 3", "peers at 3", "outputs of 6", "peers at 6", "prompts"]
    assert (result["dropped"], result["failed"]) == ([], {})
    assert result["conditions"]["weights"] == "random"
    for name in names[:2]:
        assert set(result["phases"][name]["equal"].values()) == {True}
    for row in result["phases"]["depth"]["rows"]:
        assert row["gb_per_s"] == pytest.approx(row["mb_per_token"] / row["step_ms"], rel=1e-3)
    outputs = result["phases"]["outputs of 6"]
    assert [row["policy"] for row in outputs["rows"]] == ["full", "d3, alpha 0.998"]
    for row in outputs["rows"]:
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["tpot_ms"], rel=1e-3)
        assert row["rounds"] == 2
    full, tapered = outputs["rows"]
    assert (full["speedup"], full["ideal_speedup"], full["realised_fraction"]) == (1, 1, None)
    assert tapered["ideal_speedup"] == pytest.approx(full["mb_per_token"] / tapered["mb_per_token"], rel=1e-3)
    assert all(row["sampled_tokens_per_s"] > 0 for row in outputs["rows"])
    realised = (tapered["speedup"] - 1) / (tapered["ideal_speedup"] - 1)
    assert tapered["realised_fraction"] == pytest.approx(realised, rel=1e-2, abs=1e-3)
    compared = result["phases"]["peers at 6"]
    assert [row["name"] for row in compared["rows"]] == ["Taper, full", "Taper, d3, alpha 0.998", "transformers"]
    full, tapered, other = compared["rows"]
    assert set(full["over"]) == set(tapered["over"]) == {"transformers"}
    assert "over" not in other
    assert compared["unavailable"] == {"llama.cpp": "it is not on PATH (name its folder with llama_bin)"}
    done = taper_bench(monkeypatch, result, f"--plot={tmp_path / 'speed.svg'}")
    assert done.exit_code == 0
    for part in ("random weights in the shape of tiny", "d3, alpha 0.998", "realised", "llama.cpp was left out: it is"):
        assert part in done.stdout
    assert (tmp_path / "speed.svg").read_text().startswith("<?xml")


def test_lengths_that_were_asked_for_come_before_prompts(monkeypatch):
    def phases(**options) -> list[str]:
        options = BenchOptions(no_peers=True, **options)
        return list(run.Phases(target.Target("m", None, False, "cpu", 1, {}), options, Clock(60)).all())

    monkeypatch.setattr(run, "Engine", lambda backend: None)
    assert phases(lengths=(128,)) == ["bandwidth", "depth", "outputs of 128", "prompts"]
    assert phases()[:3] == ["bandwidth", "depth", "prompts"]


@pytest.mark.ci
def test_a_picture_has_no_empty_panel(tmp_path):
    def drawn(*names: str) -> list[str]:
        done = {name: phase for name, phase in result["phases"].items() if name in names}
        assert command.draw(result | {"phases": done}, path) == bool(done)
        return re.findall(r"<!-- (One decode step|Speed) -->", path.read_text())

    result, path = measured(**SHORTEST), tmp_path / "speed.svg"
    assert drawn("depth", "outputs of 2") == ["Speed", "One decode step"]
    assert drawn("depth") == ["One decode step"]
    assert drawn("outputs of 2") == ["Speed"]
    path.unlink()
    assert not command.draw(result | {"phases": {}}, path)
    assert not path.exists()


def test_a_model_of_files_runs_on_a_cpu_beside_llama_bench(tiny_gguf, llama_bin):  # noqa: F811
    once = SHORT | {"rounds": 1}  # so that the median over rounds is that round's own ratio
    result = measured(model=str(tiny_gguf), llama_bin=llama_bin, threads=1, **once)
    assert list(result["phases"])[:3] == ["bandwidth", "depth", "outputs of 3"]
    rows = {row["name"]: row for row in result["phases"]["peers at 3"]["rows"]}
    assert rows["llama.cpp"]["tokens_per_s"] == 1000
    assert rows["llama.cpp"]["ttft_s"] == 0.003
    for name in ("Taper, full", "Taper, d3, alpha 0.998"):
        assert rows[name]["over"]["llama.cpp"] == pytest.approx(rows[name]["tokens_per_s"] / 1000, rel=1e-3)
    asked = {tuple(line[line.index("-p") : line.index("-fa")]) for line in log(llama_bin)}
    assert asked == {("-p", n, "-n", m) for n, m in (("3", "0"), ("0", "3"), ("6", "0"), ("0", "6"))}
    assert "transformers" in result["phases"]["peers at 3"]["unavailable"]


def test_another_program_is_compared_round_by_round(tiny_gguf, llama_bin, monkeypatch):  # noqa: F811
    times = {policy: iter((1, 0.0005, 0.00025)) for policy in ("full", "d3")}  # the first warms up

    def tpot_s(self, policy, length):
        return next(times["full" if policy.min_depth == 6 else "d3"])

    monkeypatch.setattr(run.Phases, "_tpot_s", tpot_s)
    monkeypatch.setattr(run.Phases, "outputs", lambda self, length: {})
    result = measured(model=str(tiny_gguf), llama_bin=llama_bin, threads=1, **SHORT)
    row = result["phases"]["peers at 3"]["rows"][0]
    assert row["over"]["llama.cpp"] == 3  # of 2 and 4, where llama.cpp takes a millisecond a token
    assert row["tokens_per_s"] == pytest.approx(2666.7, rel=1e-3)  # the middle of the times


def test_outputs_are_greedy_and_sampled_in_the_same_rounds(tiny_gguf, monkeypatch):
    times, calls = {0.0: iter((1, 0.5, 0.25, 0.2)), 0.8: iter((1, 0.8, 0.4, 0.5))}, []  # the first warms up

    def measure(engine, policy, *, max_tokens, temperature, clock):
        calls.append((policy.min_depth, temperature))
        assert max_tokens == 6
        return Speeds(0, next(times[temperature]) if policy.min_depth == 6 else 0.1)

    monkeypatch.setattr(run, "measure", measure)
    options = BenchOptions(model=str(tiny_gguf), threads=1, **SHORT | {"rounds": 3})
    opened = target.open_target(options)
    full, tapered = run.Phases(opened, options, Clock(60)).outputs(6)["rows"]
    assert (full["tokens_per_s"], full["sampled_tokens_per_s"]) == (4, 2)
    assert (full["rounds"], tapered["sampled_tokens_per_s"]) == (3, 10)
    assert tapered["speedup"] == 2.5  # greedy against greedy
    depth = opened.policies["d3, alpha 0.998"].min_depth
    assert calls == [(6, 0.0), (6, 0.8), (depth, 0.0), (depth, 0.8)] * 4
    assert command._SAMPLED[0] == f"at {run.TEMPERATURE}\n/s"


@pytest.mark.ci
def test_policies_are_those_given(tmp_path):
    policy, files = DepthPolicy.static(6, 3, [1, 2, 3]), [str(tmp_path / name) for name in ("a.json", "b.json")]
    for file, name in zip(files, ("", "full"), strict=True):
        Path(file).write_text(replace(policy, name=name).to_json())
    rows = measured(**LIKE_A_GPU, policies=tuple(files), no_peers=True)["phases"]["outputs of 6"]["rows"]
    assert [(row["policy"], row["mean_depth"]) for row in rows] == [("full", 6), (files[0], 3), (files[1], 3)]


def test_tables_fit_a_terminal_of_80_columns_and_are_whole_without_one(monkeypatch):
    name = "a policy whose name is much longer than what fits into a column of a terminal"
    row = {"policy": name, "mean_depth": 19.25, "tpot_ms": 123.456, "tokens_per_s": 1234.5, "gb_per_s": 123.4}
    row |= {"sampled_tokens_per_s": 1111.5}
    row |= {"bandwidth_used": 0.5, "speedup": 1.25, "ideal_speedup": 1.5, "realised_fraction": None, "rounds": 15}
    conditions = {"model": "m[1]", "gpu": None, "machine": "CPU", "backend": "ggml", "date": "d", "batch": 1}
    conditions |= {"kernels": "k", "layouts": "one layout"}
    phases = {"outputs of 9": {"output_tokens": 9, "rows": [row]}}
    result = {"conditions": conditions, "phases": phases, "dropped": [], "failed": {}}
    numbers = ["19.2", "123.46", "1234.5", "1111.5", "123.4", "50", "1.25", "1.50", "-", "15"]
    lines = as_text(result, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[-len(numbers) :] == numbers for line in lines)
    done = taper_bench(monkeypatch, result)
    assert f"{name} {' '.join(numbers)}" in [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert done.stdout.startswith("m[1]\n")


# What goes wrong while measuring


@pytest.mark.ci
def test_graphs_that_compute_something_else_are_found(monkeypatch, capsys):
    class Wrong(TorchBackend):
        def __init__(self, *args, graphs=True, **options):
            super().__init__(*args, graphs=graphs, **options)
            self.wrong = graphs

        def forward(self, batch: TokenBatch):
            output = super().forward(batch)
            output.greedy_ids[:] += self.wrong
            return output

    monkeypatch.setattr(torch_device, "TorchBackend", Wrong)
    assert set(torch_device.check_graphs("cpu").values()) == {False}
    assert set(torch_device.check_reference("cpu").values()) == {False}
    result = measured(**SHORTEST)
    done = taper_bench(monkeypatch, result)
    assert done.exit_code == 1
    assert "CHECK FAILED" in done.stdout


def test_without_transformers_the_reference_implementation_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "taper.hf", raising=False)
    result = measured(**SHORTEST)
    check = result["phases"]["graphs equal the reference implementation"]
    assert (check["equal"], result["failed"], result["dropped"]) == ({}, {}, [])
    assert "the reference implementation needs transformers" in as_text(result)


def test_a_phase_that_fails_costs_no_other_its_results(monkeypatch):
    def fail(self):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(run.Phases, "prompts", fail)
    result = measured(**SHORTEST)
    assert result["failed"] == {"prompts": "RuntimeError: out of memory"}
    assert {"depth", "outputs of 2"} < set(result["phases"])
    done = taper_bench(monkeypatch, result)
    assert done.exit_code == 1
    assert "prompts failed: RuntimeError: out of memory" in done.stdout


def test_ctrl_c_and_a_full_disk_end_it_and_keep_what_was_written(tmp_path, monkeypatch):
    path = tmp_path / "bench.json"

    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(run.Phases, "prompts", interrupt)
    with pytest.raises(KeyboardInterrupt):  # for which every command exits with 130
        measured(**SHORTEST, json=path)
    assert list(json.loads(path.read_text())["phases"])[-1] == "outputs of 2"

    def fail(*_):
        raise OSError(28, "No space left on device", "bench.json")

    monkeypatch.setattr(run, "write_whole", fail)
    with pytest.raises(OSError, match="No space left"):  # one line, and exit code 2
        measured(**SHORTEST, json=path)


def test_what_does_not_fit_the_time_is_left_out_and_said(tmp_path):
    path, lines = tmp_path / "bench.json", []
    result = run.run(BenchOptions(**LIKE_A_GPU | {"minutes": 1e-9}, json=path), lines.append, torch_device="cpu")
    assert result["phases"] == {}
    assert result["dropped"][-2:] == ["peers at 6", "prompts"]
    assert json.loads(path.read_text()) == result
    assert "peers at 6 was left out for want of time" in as_text(result)
    assert any("left out" in line for line in lines)


def test_a_phase_without_one_whole_round_is_left_out(tiny_gguf, monkeypatch):
    checks = iter(range(3))  # enough for the first phase

    def left_s(self):
        if next(checks, None) is None:
            raise OutOfTimeError
        return 1.0

    monkeypatch.setattr(Clock, "left_s", left_s)
    result = measured(model=str(tiny_gguf), no_peers=True, threads=1, **SHORT)
    assert list(result["phases"]) == ["bandwidth"]
    assert result["dropped"] == ["depth", "outputs of 3", "outputs of 6", "prompts"]


@pytest.mark.ci
def test_a_peer_that_fails_is_left_out_from_then_on(monkeypatch):
    calls = []

    def fail(length, clock):
        calls.append(length)
        raise ValueError("no\nsuch kernel")

    monkeypatch.setattr(peers, "PEERS", {"broken": lambda target, options: fail})
    result = measured(**LIKE_A_GPU)
    assert calls == [3]
    assert result["phases"]["peers at 3"]["unavailable"] == {"broken": "ValueError: no"}
    rows = result["phases"]["peers at 3"]["rows"]
    assert [(row["name"], row["over"]) for row in rows] == [("Taper, full", {}), ("Taper, d3, alpha 0.998", {})]
    assert result["phases"]["peers at 6"]["rows"] == []
    assert result["failed"] == {}


# Peers


def test_transformers_shares_the_weights_and_ends_when_time_is_over():
    options = BenchOptions(**LIKE_A_GPU)
    opened = target.open_target(options, "cpu")
    state = torch_device.transformers_model(opened.config, opened.weights).state_dict()
    assert len(state) == len(opened.weights)
    theirs, ours, backend = (
        {weight.data_ptr() for weight in weights.values()}
        for weights in (state, opened.weights, opened.backend._weights)
    )
    assert theirs == ours == backend
    peer = peers.transformers(opened, options)
    assert min(peer(4, Clock(60))) > 0
    for length, seconds in ((4, 0), (1000, 0.5)):
        with pytest.raises(OutOfTimeError):
            peer(length, Clock(seconds))
    with pytest.raises(OutOfTimeError):  # with too little time to start a peer
        run.Phases(opened, options, Clock(30)).compare(3)


@posix_only
def test_llama_bench_ends_when_time_is_over(tiny_gguf, llama_bin):  # noqa: F811
    (llama_bin / "llama-bench").write_text("#!/bin/sh\n/bin/sleep 60\n")
    options = BenchOptions(model=str(tiny_gguf), llama_bin=llama_bin, threads=1, **SHORT)
    peer = peers.llama_cpp(target.open_target(options), options)
    with pytest.raises(OutOfTimeError):
        peer(3, Clock(0.2))


# Shapes and random weights


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-2-7b", 6.74), ("llama-2-13b", 13.02), ("llama-3-8b", 8.03), ("34b", 33.74)]
)
def test_shapes_have_the_parameters_that_their_names_say(name, billions):
    count = sum(int(np.prod(shape)) for shape in expected_shapes(SHAPES[name]).values())
    assert count / 1e9 == pytest.approx(billions, abs=0.005)


def test_random_weights_on_a_device_are_spread_alike():
    weights = torch_device.random_weights(TINY, "bf16", "cpu")
    assert {name: tuple(w.shape) for name, w in weights.items()} == expected_shapes(TINY)
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert weights["layers.3.gate_proj"].float().std().item() == pytest.approx(0.02, rel=0.05)
    assert set(weights["norm"].tolist()) == {1}


def test_weights_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(torch_device, "free_bytes", lambda device: 3_000_000_000)
    for shape, needed in (("llama-2-7b", "14"), ("34b", "67")):
        with pytest.raises(RequestError, match=rf"{shape} need {needed}\.\d GB; 3.0 GB are free"):
            target.open_target(BenchOptions(shape=shape, device="cuda"), "cpu")


@pytest.mark.ci
def test_a_shape_runs_on_a_cpu_too():
    result = measured(**SHORT, device="cpu", shape="tiny", threads=1, no_peers=True)
    assert (result["dropped"], result["failed"]) == ([], {})
    assert result["conditions"]["model"] == "random weights in the shape of tiny, q4_0"
    assert (result["conditions"]["backend"], result["conditions"]["weights"]) == ("ggml", "random")
    assert "d3, alpha 0.998" in result["conditions"]["policies"]


def test_random_weights_of_a_cpu_are_spread_as_those_of_a_gpu_and_lie_in_memory_of_their_own():
    weights = target.random_tensors(TINY)
    assert {name: tensor.shape for name, tensor in weights.items()} == expected_shapes(TINY)
    assert to_torch(weights["layers.3.gate_proj"]).std().item() == pytest.approx(0.02, rel=0.05)
    assert set(to_torch(weights["norm"]).tolist()) == {1}
    assert len({tensor.data.ctypes.data for tensor in weights.values()}) == len(weights)


def test_weights_that_do_not_fit_a_cpu_are_refused(monkeypatch):
    assert target.available_memory() > 0
    monkeypatch.setattr(target, "available_memory", lambda: 3_000_000_000)
    with pytest.raises(RequestError, match=r"llama-2-7b need 7.6 GB while they load; 3.0 GB are free"):
        target.open_target(BenchOptions(shape="llama-2-7b", device="cpu"))


def test_random_weights_are_written_as_a_file_for_other_programs():
    opened = target.open_target(BenchOptions(**SHORT, shape="tiny", device="cpu", threads=1))
    reader = gguf.GGUFReader(peers._random_file(opened))
    assert len(reader.tensors) == len(opened.weights)
    gate = next(tensor for tensor in reader.tensors if tensor.name == "blk.3.ffn_gate.weight")
    assert gate.data.tobytes() == opened.weights["layers.3.gate_proj"].data.tobytes()


def test_bandwidth_counts_every_byte(monkeypatch):
    for module in (bandwidth, torch_device):
        monkeypatch.setattr(module, "median_seconds", lambda run: (run(), 0.5)[1])
    assert bandwidth.read_bandwidth(threads=2, num_bytes=1 << 20) == 2 << 20
    assert torch_device.copy_bandwidth("cpu") == 4 << 24


# The command line


GIVEN = (
    "--shape 34b --policy a --policy b --lengths 9,7 --prompts 5,3 --rounds 3 --minutes 2.5 --device cpu --dtype q8_0 "
    "--threads 2 --repack never --llama-bin bin --no-peers --json a.json --plot a.png"
)


def test_options_reach_the_benchmark_and_have_its_defaults(monkeypatch):
    given, drawn = [], []
    result = {
        "conditions": dict.fromkeys(("model", "gpu", "machine", "backend", "date", "batch", "kernels", "layouts"), "")
    }
    result |= {"phases": {}, "dropped": [], "failed": {}}
    monkeypatch.setattr(run, "run", lambda options, show: given.append(options) or result)
    monkeypatch.setattr(command, "draw", lambda result, path: drawn.append(path))
    for arguments in (GIVEN, ""):
        assert CliRunner().invoke(cli, ["bench", *arguments.split()]).exit_code == 0
    what = {"shape": "34b", "policies": ("a", "b"), "lengths": (7, 9), "prompts": (3, 5), "rounds": 3, "minutes": 2.5}
    how = {"device": "cpu", "dtype": "q8_0", "threads": 2, "repack": "never", "no_peers": True}
    assert given == [BenchOptions(**what, **how, llama_bin=Path("bin"), json=Path("a.json")), BenchOptions()]
    assert drawn == [Path("a.png")]


WRONG = {
    "--shape=llama-9": "shape is 'llama-9'; it must be one of llama-2-7b, llama-2-13b, llama-3-8b, 34b",
    "--shape=34b --model=x": "give one of the two",
    "--shape=34b --offline": "give one of the two",
    "--lengths=0": "lengths are '0'",
    "--lengths=128,,512": "lengths are '128,,512'",
    "--prompts=1": "whole numbers from 2",
    "--lengths=9999999": "lengths are '9999999'",
    "--lengths=100000": "length 100000 does not fit",
    "--rounds=0": "rounds is 0",
    "--rounds=many": "many",
    "--minutes=0": "minutes is 0",
    "--minutes=nan": "minutes is nan",
    "--device=tpu": "device is 'tpu'; it must be",
    "--device=cuda --lengths=9 --prompts=9": "no CUDA device",
    "--dtype=q3": "'q3' is not one of",
    "--shape=34b --device=cuda": "no CUDA device",
    "--threads=0": "threads is 0",
    "--threads=1 --device=cuda": "threads and repack are for CPUs",
    "--policy=missing.json --lengths=9 --prompts=9": "no policy 'missing.json'",
    "--model=missing.gguf": "missing.gguf",
    "--json=/proc/bench.json": "cannot write to /proc",
    "--json=.": "is a folder or a device",
    "--plot=/dev/null": "is a folder or a device",
    "--plot=/proc/bench.png": "cannot write to /proc",
    "--plot=speed.txt": "neither a .png nor a .svg",
    "--llama-bin=.": "no program llama-bench in",
    "--colour=red": "--colour",
}


@pytest.mark.parametrize(
    "arguments", [pytest.param(words, marks=posix_only if "/" in words else ()) for words in WRONG]
)
def test_mistakes_are_one_line(arguments, tiny_gguf, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(SHAPES, "tiny")
    monkeypatch.setattr(target, "DEFAULT_MODEL", str(tiny_gguf))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises((TaperError, click.ClickException)) as error:
        cli.main(["bench", *arguments.split()], standalone_mode=False)
    message = getattr(error.value, "format_message", error.value.__str__)()
    assert len(message.splitlines()) == 1
    assert WRONG[arguments] in message
    assert capsys.readouterr().out == ""
