"""`taper bench` and `python -m taper.bench`: every phase on tiny models, peers, time budgets and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from test_bench import llama_bin, log  # noqa: F401  (a fixture)
from transformers import LlamaConfig

from taper.backends import TokenBatch
from taper.backends.ggml import GgmlBackend
from taper.backends.ggml.weights import convert
from taper.backends.torch import TorchBackend
from taper.bench import measure as bandwidth
from taper.bench import peers, phases, run, target, torch_device
from taper.bench.measure import Clock, OutOfTimeError
from taper.bench.options import Options, from_given, parse
from taper.bench.peers import Speeds
from taper.bench.run import as_text
from taper.cli import cli
from taper.errors import ModelError, RequestError
from taper.models.config import expected_shapes
from taper.models.shapes import RANDOM_TYPES, SHAPES, SPREAD, TINY, random_tensors
from taper.policy import DepthPolicy

SHORT = {"lengths": (3, 6), "prompts": (3, 6), "rounds": 2, "minutes": 5.0}
LIKE_A_GPU = {"device": "cuda", "shape": "tiny", **SHORT}
BLOCKED = [
    *("ggml", "click", "rich", "tokenizers", "jinja2", "safetensors", "huggingface_hub"),
    *("transformers", "gguf", "matplotlib"),
]


@pytest.fixture(autouse=True)
def _no_programs(monkeypatch, tmp_path):
    """No llama.cpp of this machine takes part, and a step of few tokens is measured a few times only."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(phases, "STEPS", 2)
    monkeypatch.setattr(bandwidth, "ROUNDS", 1)


def quiet(line: str) -> None:
    """No progress."""


# Every phase


def test_every_phase_runs_as_on_a_gpu(tmp_path):
    path = tmp_path / "new" / "bench.json"
    result = run.run(Options(**LIKE_A_GPU, json=path), quiet, torch_device="cpu")
    assert json.loads(path.read_text()) == result
    names = ["graphs equal eager steps", "graphs equal the reference implementation", "bandwidth", "depth", "prompts"]
    assert list(result["phases"]) == [*names, "outputs of 3", "peers at 3", "outputs of 6", "peers at 6"]
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
    realised = (tapered["speedup"] - 1) / (tapered["ideal_speedup"] - 1)
    assert tapered["realised_fraction"] == pytest.approx(realised, rel=1e-2, abs=1e-3)
    compared = result["phases"]["peers at 6"]
    assert [row["name"] for row in compared["rows"]] == ["Taper, full", "Taper, d3, alpha 0.998", "transformers"]
    full, tapered, other = compared["rows"]
    assert set(full["over"]) == set(tapered["over"]) == {"transformers"}
    assert "over" not in other
    assert set(compared["unavailable"]) == {"llama.cpp", "vLLM"}
    text = as_text(result)
    for part in ("random weights in the shape of tiny", "realised", "transformers", "vLLM was left out"):
        assert part in text


def test_a_model_of_files_runs_on_a_cpu_beside_llama_bench(tiny_gguf, llama_bin):  # noqa: F811
    once = SHORT | {"rounds": 1}  # so that the median over rounds is that round's own ratio
    result = run.run(Options(model=str(tiny_gguf), llama_bin=llama_bin, threads=1, **once), quiet)
    assert list(result["phases"])[:3] == ["bandwidth", "depth", "prompts"]
    rows = {row["name"]: row for row in result["phases"]["peers at 3"]["rows"]}
    assert rows["llama.cpp"]["tokens_per_s"] == 1000
    assert rows["llama.cpp"]["ttft_s"] == 0.003
    for name in ("Taper, full", "Taper, d3, alpha 0.998"):
        assert rows[name]["over"]["llama.cpp"] == pytest.approx(rows[name]["tokens_per_s"] / 1000, rel=1e-3)
    asked = {tuple(line[line.index("-p") : line.index("-fa")]) for line in log(llama_bin)}
    assert asked == {("-p", n, "-n", m) for n, m in (("3", "0"), ("0", "3"), ("6", "0"), ("0", "6"))}
    assert "transformers" in result["phases"]["peers at 3"]["unavailable"]


def test_another_program_is_compared_round_by_round(tiny_gguf, llama_bin, monkeypatch):  # noqa: F811
    def taper(*_):
        results = iter(Speeds(0.001, tpot_s) for tpot_s in (1, 0.0005, 0.00025))  # the first warms up
        return lambda *_: next(results)

    monkeypatch.setattr(phases, "taper", taper)
    result = run.run(Options(model=str(tiny_gguf), llama_bin=llama_bin, threads=1, **SHORT), quiet)
    row = result["phases"]["peers at 3"]["rows"][0]
    assert row["over"]["llama.cpp"] == 3  # of 2 and 4, where llama.cpp takes a millisecond a token
    assert row["tokens_per_s"] == pytest.approx(2666.7, rel=1e-3)  # the middle of the times


def test_random_weights_run_on_a_cpu():
    result = run.run(Options(shape="tiny", device="cpu", no_peers=True, threads=1, **SHORT), quiet, torch_device="cpu")
    assert result["conditions"]["model"] == "random weights in the shape of tiny, q4_0"
    assert list(result["phases"]) == ["bandwidth", "depth", "prompts", "outputs of 3", "outputs of 6"]
    assert result["phases"]["bandwidth"]["kind"] == "read"


def test_policies_are_those_given(tmp_path):
    policy, files = DepthPolicy.static(6, 3, [1, 2, 3]), [str(tmp_path / name) for name in ("a.json", "b.json")]
    for file, name in zip(files, ("", "full"), strict=True):
        Path(file).write_text(replace(policy, name=name).to_json())
    options = Options(**LIKE_A_GPU, policy=tuple(files), no_peers=True)
    rows = run.run(options, quiet, torch_device="cpu")["phases"]["outputs of 6"]["rows"]
    assert [(row["policy"], row["mean_depth"]) for row in rows] == [("full", 6), (files[0], 3), (files[1], 3)]


def test_a_picture_is_drawn(tmp_path, monkeypatch, capsys):
    result = run.run(Options(**LIKE_A_GPU, no_peers=True), quiet, torch_device="cpu")
    monkeypatch.setattr(run, "run", lambda *_: result)
    assert run.bench(Options(plot=tmp_path / "speed.svg")) == 0
    assert "d3, alpha 0.998" in capsys.readouterr().out
    assert (tmp_path / "speed.svg").read_text().startswith("<?xml")


def test_only_torch_and_numpy_are_needed():
    code = f"import sys; sys.modules |= dict.fromkeys({BLOCKED})\n" + (
        "from taper.bench.options import parse; from taper.bench.run import run\n"
        "options = parse('--device=cuda --shape=tiny --lengths=2 --prompts=2 --rounds=1'.split())\n"
        "result = run(options, print, torch_device='cpu')\n"
        "assert result['failed'] == {} and result['dropped'] == [], result\n"
        "left_out = result['phases']['graphs equal the reference implementation']['left_out']\n"
        "assert 'reference implementation needs' in left_out\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# What goes wrong while measuring


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
    options = Options(**LIKE_A_GPU | {"lengths": (2,), "prompts": (2,)}, no_peers=True)
    result = run.run(options, quiet, torch_device="cpu")
    monkeypatch.setattr(run, "run", lambda *_: result)
    assert run.bench(options) == 1
    assert "CHECK FAILED" in capsys.readouterr().out


def test_a_phase_that_fails_costs_no_other_its_results(monkeypatch, capsys):
    def fail(self):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(phases.Phases, "prompts", fail)
    result = run.run(Options(**LIKE_A_GPU, no_peers=True), quiet, torch_device="cpu")
    assert result["failed"] == {"prompts": "RuntimeError: out of memory"}
    assert {"depth", "outputs of 6"} < set(result["phases"])
    assert "prompts failed: RuntimeError: out of memory" in as_text(result)
    monkeypatch.setattr(run, "run", lambda *_: result)
    assert run.bench(Options()) == 1


def test_what_does_not_fit_the_time_is_left_out_and_said(tmp_path):
    path, lines = tmp_path / "bench.json", []
    result = run.run(Options(**LIKE_A_GPU | {"minutes": 1e-9}, json=path), lines.append, torch_device="cpu")
    assert result["phases"] == {}
    assert result["dropped"][-1] == "peers at 6"
    assert json.loads(path.read_text()) == result
    assert "peers at 6 was left out for want of time" in as_text(result)
    assert any("left out" in line for line in lines)


def test_a_phase_without_one_whole_round_is_left_out(monkeypatch):
    left = iter([1.0] * 9)  # enough for the loading of the model and the first phase

    monkeypatch.setattr(Clock, "left_s", property(lambda self: next(left, 0.0)))
    options = Options(shape="tiny", device="cpu", no_peers=True, threads=1, **SHORT)
    result = run.run(options, quiet, torch_device="cpu")
    assert list(result["phases"]) == ["bandwidth"]
    assert result["dropped"] == ["depth", "prompts", "outputs of 3", "outputs of 6"]


def test_a_peer_that_fails_is_left_out_from_then_on(monkeypatch):
    calls = []

    def fail(length, clock):
        calls.append(length)
        raise ValueError("no\nsuch kernel")

    monkeypatch.setattr(peers, "PEERS", {"broken": lambda target, options: fail})
    result = run.run(Options(**LIKE_A_GPU), quiet, torch_device="cpu")
    assert calls == [3]
    assert result["phases"]["peers at 3"]["unavailable"] == {"broken": "ValueError: no"}
    rows = result["phases"]["peers at 3"]["rows"]
    assert [(row["name"], row["over"]) for row in rows] == [("Taper, full", {}), ("Taper, d3, alpha 0.998", {})]
    assert result["phases"]["peers at 6"]["rows"] == []
    assert result["failed"] == {}


def test_no_peer_is_started_when_time_is_nearly_over():
    options = Options(**LIKE_A_GPU)
    opened = target.open_target(options, "cpu")
    with pytest.raises(OutOfTimeError):
        phases.Phases(opened, options, Clock(30)).compare(3)


# Peers


def test_transformers_shares_the_weights_and_ends_when_time_is_over():
    options = Options(**LIKE_A_GPU)
    opened = target.open_target(options, "cpu")
    from taper.bench.peers import transformers_model

    model = transformers_model(opened.config, opened.weights)
    state = model.state_dict()
    assert len(state) == len(opened.weights)
    assert {value.data_ptr() for value in state.values()} == {w.data_ptr() for w in opened.weights.values()}
    assert {w.data_ptr() for w in opened.weights.values()} == {w.data_ptr() for w in opened.backend._weights.values()}
    peer = peers.transformers(opened, options)
    assert min(peer(4, Clock())) > 0
    with pytest.raises(OutOfTimeError):
        peer(4, Clock(0))
    with pytest.raises(OutOfTimeError):
        peer(1000, Clock(0.5))


def test_vllm_is_given_the_shape_with_dummy_weights(monkeypatch):
    made, asked = {}, []

    class LLM:
        def __init__(self, folder, **options):
            made.update(options, config=json.loads(Path(folder, "config.json").read_text()))

        def generate(self, prompt, params, use_tqdm):
            asked.append((len(prompt["prompt_token_ids"]), params["max_tokens"]))

    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams, module.__spec__ = LLM, lambda **options: options, ModuleSpec("vllm", None)
    monkeypatch.setitem(sys.modules, "vllm", module)
    opened = target.open_target(Options(**LIKE_A_GPU), "cpu")
    peer = peers.vllm(opened, Options(**LIKE_A_GPU))
    peer(6, Clock())
    assert asked == [(6, 1), (1, 1), (1, 6)]
    assert made["load_format"] == "dummy"
    assert made["config"]["dtype"] == "bfloat16"
    config = LlamaConfig(**made["config"])
    for name in ("num_hidden_layers", "hidden_size", "num_key_value_heads", "vocab_size", "intermediate_size"):
        assert getattr(config, name) == getattr(TINY, name)
    with pytest.raises(OutOfTimeError):
        peer(6, Clock(0))


def test_llama_bench_ends_when_time_is_over(tiny_gguf, llama_bin):  # noqa: F811
    (llama_bin / "llama-bench").write_text("#!/bin/sh\n/bin/sleep 60\n")
    options = Options(model=str(tiny_gguf), llama_bin=llama_bin, threads=1, **SHORT)
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


@pytest.mark.parametrize("dtype", RANDOM_TYPES)
def test_random_tensors_have_the_spread_of_a_model_and_run(dtype):
    tensors = random_tensors(TINY, dtype)
    assert set(tensors) == set(expected_shapes(TINY))
    weights = tensors["layers.0.up_proj"]
    values = weights.data.view(np.float32) if dtype == "F32" else convert(weights, "F32").view(np.float32)
    assert values.std() == pytest.approx(SPREAD, rel=0.05)
    assert len({tensor.data.ctypes.data for tensor in tensors.values()}) == len(tensors)
    backend = GgmlBackend(TINY, tensors, context_length=32, threads=1)
    one = [np.array([value], np.int32) for value in (5, 0, 0)]
    assert np.isfinite(backend.forward(TokenBatch(*one, (1,) * 6, logits_rows=(0,))).logits).all()


def test_other_types_have_no_random_tensors():
    with pytest.raises(ModelError, match="random weights are not made in q3_k"):
        random_tensors(TINY, "Q3_K")


def test_random_weights_on_a_device_are_spread_alike():
    weights = torch_device.random_weights(TINY, "bf16", "cpu")
    assert {name: tuple(w.shape) for name, w in weights.items()} == expected_shapes(TINY)
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert weights["layers.3.gate_proj"].float().std().item() == pytest.approx(SPREAD, rel=0.05)
    assert set(weights["norm"].tolist()) == {1}


def test_weights_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(target, "_available_bytes", lambda: 3_000_000_000)
    for shape, needed in (("llama-2-7b", "8"), ("34b", "38")):
        with pytest.raises(RequestError, match=rf"{shape} need {needed}\.\d GB; 3.0 GB are free"):
            target.open_target(Options(shape=shape, device="cpu"))
    monkeypatch.setattr(torch_device, "free_bytes", lambda device: 100)
    with pytest.raises(RequestError, match="GB are free"):
        target.open_target(Options(**LIKE_A_GPU), "cpu")


def test_bandwidth_counts_every_byte(monkeypatch):
    for module in (bandwidth, torch_device):
        monkeypatch.setattr(module, "median_seconds", lambda run: run() or 0.5)
    assert bandwidth.read_bandwidth(threads=2, num_bytes=1 << 20) == 2 << 20
    assert torch_device.copy_bandwidth("cpu") == 4 << 24


# The command lines


GIVEN = "--shape 34b --policy a --policy b --lengths 9,7 --rounds 3 --minutes 2.5 --device cpu --no-peers --threads 2"


def test_both_command_lines_take_the_same_options(monkeypatch):
    given = []
    monkeypatch.setattr(run, "bench", lambda options: given.append(options) or 0)
    for arguments in (GIVEN.split(), []):
        assert CliRunner().invoke(cli, ["bench", *arguments]).exit_code == 0
        assert run.main(arguments) == 0
    options = Options(
        shape="34b",
        policy=("a", "b"),
        lengths=(7, 9),
        rounds=3,
        minutes=2.5,
        device="cpu",
        no_peers=True,
        threads=2,
    )
    assert given == [options, options, Options(), Options()]
    assert from_given(shape=None, policy=[]) == Options()


WRONG = {
    "--shape=llama-9": "shape is 'llama-9'; it must be one of llama-2-7b, llama-2-13b, llama-3-8b, 34b",
    "--shape=tiny": "shape is 'tiny'",
    "--shape=34b --model=x": "give one of the two",
    "--lengths=0": "lengths are '0'",
    "--lengths=128,,512": "lengths are '128,,512'",
    "--prompts=1": "whole numbers from 2",
    "--lengths=9999999": "lengths are '9999999'",
    "--lengths=100000": "length 100000 does not fit",
    "--rounds=0": "rounds is 0",
    "--rounds=many": "many",
    "--minutes=0": "minutes is 0",
    "--minutes=nan": "minutes is nan",
    "--device=tpu": "device is 'tpu'",
    "--device=cuda --lengths=9 --prompts=9": "no CUDA device",
    "--dtype=q3": "dtype is 'q3'",
    "--shape=34b --device=cpu --dtype=q2": "dtype is 'q2'",
    "--threads=0": "threads is 0",
    "--threads=1 --device=cuda": "threads and repacking are for CPUs",
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


@pytest.mark.parametrize("arguments", WRONG)
def test_mistakes_are_one_line(arguments, tiny_gguf, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(target, "DEFAULT_MODEL", str(tiny_gguf))
    monkeypatch.setattr(run, "_say", lambda line: print(line, file=sys.stderr) if line != "loading" else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = arguments.split()
    assert run.main(words) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith("taper: ")
    assert WRONG[arguments] in err
    monkeypatch.setattr(sys, "argv", ["taper", "bench", *words])
    outcome = CliRunner().invoke(cli, ["bench", *words])
    assert outcome.exit_code != 0
    assert WRONG[arguments] in f"{outcome.exception} {outcome.output}"


def test_a_mistake_on_the_command_line_exits_with_2():
    command = [sys.executable, "-m", "taper", "bench", "--shape=34b", "--model=x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_a_full_disk_and_ctrl_c_end_it_quietly(monkeypatch, capsys):
    for error, code, line in (
        (OSError(28, "No space left on device", "bench.json"), 2, "taper: bench.json: No space left on device\n"),
        (KeyboardInterrupt(), 130, ""),
    ):

        def fail(options, error=error):
            raise error

        monkeypatch.setattr(run, "bench", fail)
        assert run.main([]) == code
        assert capsys.readouterr().err == line


def test_options_are_read_without_a_command_line_library():
    assert parse(["--prompts", "5,3"]) == Options(prompts=(3, 5))
