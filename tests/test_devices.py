"""ggml on a device: what is said where there is none, and what differs from the CPU.

With $TAPER_TEST_DEVICE, such as vulkan, all tests of both backends run on that device too; $TAPER_GGML names a library
that has it.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from forked import posix_only
from serving import chat_body, serving
from test_bench import llama_bin, log  # noqa: F401  # a fixture
from test_quantisation import CONFIG, TOKENS, random_model
from test_serve_command import Process
from tiny import DEVICES, FAMILIES, complete, make_backend, make_tiny, one_slot, policies, random_prompt, with_adapters

from taper.backends import choose_device, open_backend
from taper.backends.ggml import GgmlBackend, devices, tensors
from taper.backends.ggml.library import Device, Library, ggml
from taper.backends.ggml.shortlist import PreviewTensors, kept_as
from taper.backends.split import SplitBackend, least_on_device
from taper.engine import Engine, Request
from taper.errors import DeviceLostError, ModelError, RequestError
from taper.lab.bench import target
from taper.lab.bench.run import run as run_bench
from taper.lab.bench.target import BenchOptions
from taper.models import load_model, preview
from taper.models.tensors import WEIGHT_TYPES, LoadedModel
from taper.policy import DepthPolicy
from taper.sampling import SamplingParams

NEEDS_DEVICE = pytest.mark.skipif(not DEVICES, reason="TAPER_TEST_DEVICE names no device of a ggml library")


@pytest.fixture
def device() -> str:
    return DEVICES[0]


def test_a_device_that_is_not_there_is_told_in_one_line():
    with pytest.raises(RequestError, match=r"device is 'tpu7'; it must be auto, .* ggml .* finds .*TAPER_GGML"):
        choose_device("tpu7")


@pytest.mark.parametrize("option", [{"repack": "never"}, {"threads": 2}])
def test_options_for_cpus_are_refused(tiny_llama, monkeypatch, option):
    monkeypatch.setattr("taper.backends.choose_device", lambda device: "Vulkan0")
    with pytest.raises(RequestError, match="Vulkan0"):
        open_backend(tiny_llama.load(), device="vulkan", context_length=64, **option)


# On a stand-in: the CPU as ggml lists it among devices. What it computes travels, as its memory is not looked at.


@pytest.fixture
def host(monkeypatch) -> Device:
    assert ggml.devices is not None  # declares their functions
    init = ggml.backend_dev_init

    def opened(device: object, parameters: object) -> object:
        backend = init(device, parameters)
        ggml.backend_cpu_set_n_threads(backend, 1)  # it begins with four, which wait for one another on one core
        return backend

    monkeypatch.setattr(ggml, "backend_dev_init", opened)
    return Device(ggml.backend_reg_dev_get(ggml.backend_cpu_reg(), 0), "Test0", "the CPU", (0, 0))


@pytest.fixture
def stand_in(host, monkeypatch) -> Device:
    monkeypatch.setattr(tensors, "in_host_memory", lambda tensor: False)
    return host


@pytest.fixture(params=["stand-in", *DEVICES])
def place(request) -> Device:
    return request.getfixturevalue("stand_in") if request.param == "stand-in" else ggml.device(request.param)


def on(device: Device, loaded: LoadedModel, **options) -> GgmlBackend:
    options = {"num_slots": 1, "context_length": 256, "dtype": "f32", "kv_dtype": "f32"} | options
    return GgmlBackend(loaded.config, loaded.tensors, device=device, **options)


@pytest.fixture(scope="module", params=["llama", "qwen35", pytest.param("gemma4", marks=pytest.mark.slow)])
def model(request, tmp_path_factory) -> SimpleNamespace:
    """Some prompts, each with a policy, and their completions on the CPU; then later turns of each."""
    architecture, options = FAMILIES.get(request.param, (request.param, {"layers": 6}))
    loaded = make_tiny(tmp_path_factory.mktemp("device"), architecture, **options).load()
    chosen = list(policies(loaded.config.num_hidden_layers).values())
    if loaded.config.mixer is None:
        chosen += [with_adapters(policy, loaded.config.hidden_size) for policy in chosen[:2]]
    prompts = [random_prompt(i, 30 + 5 * i) for i in range(len(chosen))]
    engine = Engine(make_backend("ggml", loaded, num_slots=3))
    said = complete(engine, prompts, chosen, 16)
    later = [[*prompt[:12], *tokens, 7, 8] for prompt, tokens in zip(prompts, said, strict=True)]
    turns = complete(engine, later, chosen, 8)
    return SimpleNamespace(loaded=loaded, policies=chosen, prompts=prompts, said=said, later=later, turns=turns)


def test_tokens_are_those_of_the_cpu_in_a_batch_and_in_later_turns(model, stand_in):
    engine = Engine(on(stand_in, model.loaded, num_slots=3))
    assert complete(engine, model.prompts, model.policies, 16) == model.said
    assert complete(engine, model.later, model.policies, 8) == model.turns


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9}])
def test_the_head_of_a_device_is_computed_in_two_steps(model, place, sampling, monkeypatch, tmp_path):
    """With a margin that no token misses: the approximations come from the device, the exact logits from the CPU."""
    monkeypatch.setattr(preview, "previews_folder", lambda: tmp_path)
    loaded = model.loaded
    whole, listed = (on(place, loaded, num_slots=3) for _ in range(2))
    listed.set_head("shortlist", loaded, "f32", None, None)
    assert listed.has_preview
    assert preview.find_preview(loaded, "f32") is None  # that would be the CPU's
    kept = preview.find_preview(loaded, kept_as("f32", place))
    listed.use_preview(PreviewTensors(replace(kept, margin=1e3), 1, listed._buffer_type))
    params = SamplingParams(max_tokens=16, ignore_eos=True, seed=5, **sampling)
    found, expected = (
        Engine(backend).complete(
            Request(prompt, params, policy) for prompt, policy in zip(model.prompts, model.policies, strict=True)
        )
        for backend in (listed, whole)
    )
    assert found == expected
    count = len(model.prompts[0])
    batch = one_slot(listed, model.prompts[0], (count - 1,))
    previewed = listed.forward(replace(batch, logits_rows=(), preview_rows=(count - 1,), shortlist=True)).previews[0]
    logits = whole.forward(batch).logits[0]
    np.testing.assert_allclose(previewed.whole(), logits, atol=1e-4)
    np.testing.assert_allclose(previewed.exact(np.arange(7, 90)), logits[7:90], atol=1e-4)


def test_what_attention_reads_begins_where_vulkan_can_read(model, place, monkeypatch):
    """At multiples of 64 bytes, whatever the context and the rows that come before; recurrent layers likewise."""
    compute, offsets = devices.DeviceCompute._compute, set()

    def watched(self, graph):
        for node in (ggml.graph_node(graph, number) for number in range(ggml.graph_n_nodes(graph))):
            if ggml.op_desc(node) in (b"FLASH_ATTN_EXT", b"GATED_DELTA_NET", b"SSM_SCAN", b"SSM_CONV"):
                offsets.update(source.contents.view_offs % 64 for source in node.contents.src[:7] if source)
        compute(self, graph)

    monkeypatch.setattr(devices.DeviceCompute, "_compute", watched)
    prompts = [random_prompt(number, 197 + number) for number in range(3)]
    odd, even = (Engine(on(place, model.loaded, num_slots=3, context_length=length)) for length in (211, 256))
    assert complete(odd, prompts, model.policies[:3], 8) == complete(even, prompts, model.policies[:3], 8)
    assert offsets == {0}


@pytest.mark.parametrize("name", ["host", *DEVICES])
def test_a_device_and_the_cpu_share_a_model(model, name, request):
    device = request.getfixturevalue("host") if name == "host" else ggml.device(name)
    config, half = model.loaded.config, model.loaded.config.num_hidden_layers // 2
    count = max(half, least_on_device(config, half))
    build = partial(GgmlBackend, num_slots=3, context_length=256, dtype="f32", kv_dtype="f32", threads=1)
    engine = Engine(SplitBackend(config, model.loaded.tensors, count, build, partial(build, device=device)))
    assert complete(engine, model.prompts, model.policies, 16) == model.said


@pytest.mark.parametrize("lacking", ["soft_max", "mul_mat", "set_rows", "get_rows", "flash_attn_ext", "cpy", "add"])
def test_the_cpu_computes_operations_that_a_device_lacks(model, stand_in, monkeypatch, lacking):
    def supports(backend, node) -> bool:
        return ggml.op_desc(node).decode().lower() != lacking

    monkeypatch.setattr(ggml, "backend_supports_op", supports)
    engine = Engine(on(stand_in, model.loaded, num_slots=3))
    count = 3
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        assert complete(engine, model.prompts[:count], model.policies[:count], 8) == [
            ids[:8] for ids in model.said[:count]
        ]
    assert {str(warning.message) for warning in warned} <= {
        f"Test0 lacks {lacking}: the CPU computes that, which is slow; see gpu_layers"
    }


@pytest.mark.ci
def test_all_memory_is_given_back(model, stand_in, monkeypatch):
    """After 200 requests of any length, some of which are aborted, and after the end."""
    held, allocate, free = dict[int, int](), ggml.backend_alloc_ctx_tensors_from_buft, ggml.backend_buffer_free

    def allocated(context, buffer_type):
        buffer = allocate(context, buffer_type)
        held[buffer] = 1
        return buffer

    def freed(buffer):
        del held[buffer]
        free(buffer)

    monkeypatch.setattr(ggml, "backend_alloc_ctx_tensors_from_buft", allocated)
    monkeypatch.setattr(ggml, "backend_buffer_free", freed)
    backend = on(stand_in, model.loaded, num_slots=4)
    engine, full = Engine(backend), DepthPolicy.full(model.loaded.config.num_hidden_layers)

    def run_requests() -> tuple[set[int], int]:
        sequences, rng = [], np.random.default_rng(5)
        for number in range(100):
            policy = model.policies[number % 6] if number % 3 else full
            request = Request(random_prompt(number, int(rng.integers(1, 200))), SamplingParams(max_tokens=6), policy)
            sequences.append(engine.add(request))
            for _ in range(int(rng.integers(1, 8))):
                engine.step()
            if number % 2:
                engine.abort(sequences[-1])
        while any(sequence.finish_reason is None for sequence in sequences[::2]):
            engine.step()
        return set(held), ggml.gallocr_get_buffer_size(backend._allocator, 0)

    assert run_requests() == run_requests()
    engine.close()
    backend = engine = None
    gc.collect()
    assert not held


@pytest.mark.parametrize("tokens", [1, 48])
def test_an_interrupt_ends_a_forward_between_two_pieces_and_costs_nothing(model, stand_in, monkeypatch, tokens):
    backend, computed = on(stand_in, model.loaded), []
    compute = devices.DeviceCompute._compute

    def interrupted(self, graph):
        compute(self, graph)
        computed.append(graph)
        if len(computed) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(devices.DeviceCompute, "_compute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            backend.forward(one_slot(backend, random_prompt(5, tokens), (0,)))
    assert len(computed) == 2
    assert complete(Engine(backend), model.prompts[:1], model.policies[:1], 16) == model.said[:1]


def test_ctrl_c_ends_a_long_prompt_within_half_a_second(place):
    """It comes amid one of many short nodes, once the driver has compiled what they run."""
    config = replace(CONFIG, layers=CONFIG.layers[:1] * 80, max_position_embeddings=600)
    backend = GgmlBackend(config, random_model(config, "F32"), device=place, context_length=600)
    batch, sent = one_slot(backend, np.arange(600) % 256, (0,)), []

    def press() -> None:
        time.sleep(0.15)
        sent.append(time.perf_counter())
        signal.raise_signal(signal.SIGINT)

    def run() -> None:
        threading.Thread(target=press).start()
        while True:  # a fast device finishes some before
            backend.forward(batch)

    backend.forward(batch)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert time.perf_counter() - sent[0] < 0.5


def test_pieces_are_of_bounded_time(model, stand_in, monkeypatch):
    backend, compute, node_s = on(stand_in, model.loaded), devices.DeviceCompute._compute, 0.0

    def slow(self, graph):
        sizes.append(ggml.graph_n_nodes(graph))
        time.sleep(node_s * sizes[-1])
        compute(self, graph)

    monkeypatch.setattr(devices.DeviceCompute, "_compute", slow)
    largest = []
    for seconds in (0.002, 0.002, 0.0, 0.0):
        node_s, sizes = seconds, []
        backend.forward(one_slot(backend, random_prompt(5, 40), (0,)))
        largest.append(max(sizes))
    assert largest[0] == devices._FIRST_PIECE
    assert devices._FIRST_PIECE < largest[1] <= devices._SECONDS / 0.002
    assert sizes == [largest[3]]  # as it took little time before


def test_after_too_little_memory_a_smaller_request_works(model, stand_in, monkeypatch):
    engine, allocate = Engine(on(stand_in, model.loaded, num_slots=3)), ggml.gallocr_alloc_graph

    def allocated(allocator, graph) -> bool:
        nodes = [ggml.graph_node(graph, number) for number in range(ggml.graph_n_nodes(graph))]
        tokens = max((node.contents.ne[1] for node in nodes if ggml.op_desc(node) == b"GET_ROWS"), default=0)
        return tokens < 100 and allocate(allocator, graph)

    monkeypatch.setattr(ggml, "gallocr_alloc_graph", allocated)
    assert complete(engine, model.prompts[:1], model.policies[:1], 16) == model.said[:1]
    with pytest.raises(ModelError, match="not enough memory for this many tokens"):
        complete(engine, [random_prompt(1, 200)], model.policies[:1], 4)
    assert complete(engine, model.prompts[:1], model.policies[:1], 16) == model.said[:1]


def test_too_little_memory_for_weights_or_cells_is_told_in_one_line(tiny_llama, stand_in, monkeypatch):
    allocate, sizes = ggml.backend_alloc_ctx_tensors_from_buft, []
    for refused, error, said in (
        (1, RequestError, "not enough memory for 1 outputs at a time of up to 256 tokens each"),
        (0, ModelError, r"not enough memory for 0\.0 GB of weights"),
    ):
        sizes.clear()

        def allocated(context, buffer_type, refused=refused):
            sizes.append(context)
            return None if len(sizes) > refused else allocate(context, buffer_type)

        monkeypatch.setattr(ggml, "backend_alloc_ctx_tensors_from_buft", allocated)
        with pytest.raises(error, match=said):
            on(stand_in, tiny_llama.load())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ('ggml._function("ggml_abort")(b"vulkan.cpp", 7, b"lost")', "vulkan.cpp:7: lost"),
        pytest.param(
            'ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()',
            "its driver failed",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="it takes libstdc++"),
        ),
    ],
)
def test_a_lost_device_ends_the_process_in_one_line(how, said):
    program = f"""
import ctypes
from taper.backends.ggml.devices import DeviceCompute
from taper.backends.ggml.library import Device, ggml
assert ggml.devices is not None
DeviceCompute(Device(ggml.backend_reg_dev_get(ggml.backend_cpu_reg(), 0), "Test0", "the CPU", (0, 0)))
{how}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr == f"taper: the device was lost, or there is a bug: {said} (start again)\n"


def test_a_device_that_pytorch_loses_is_said_to_be_lost(tiny_llama):
    def lost(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with more")

    backend = make_backend("torch", tiny_llama.load())
    said = r"there is a bug: .* illegal memory access was encountered \(start again\)"
    for begin in (lost, lambda *_: lost):  # at once, or while its output is waited for
        backend._begin = begin
        with pytest.raises(DeviceLostError, match=said):
            backend.forward(one_slot(backend, [1, 2], ()))


# `taper` with the stand-in, which is lost once a file is there.
_STAND_IN = """
import os, signal, sys, time
from pathlib import Path
from taper import errors
from taper.__main__ import run
from taper.backends.ggml import devices, tensors
from taper.backends.ggml.library import Device, Library, ggml
from taper.server import app

file, app.RESTART_SECONDS = Path(sys.argv.pop(1)), 60 if "LISTEN_PID" in os.environ else 0
assert ggml.devices is not None
init, compute = ggml.backend_dev_init, devices.DeviceCompute._compute
device = Device(ggml.backend_reg_dev_get(ggml.backend_cpu_reg(), 0), "Test0", "the CPU", (0, 0))

def opened(*arguments):
    backend = init(*arguments)
    ggml.backend_cpu_set_n_threads(backend, 1)
    return backend

def slow(self, graph):
    time.sleep(0.01)
    if file.exists():
        file.unlink()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # as threads of drivers do
        LOSES
    compute(self, graph)

ggml.backend_dev_init, devices.DeviceCompute._compute = opened, slow
Library.device, tensors.in_host_memory = lambda self, name: device, lambda tensor: False
run()
"""
LOST = "taper: the device was lost, or there is a bug: vulkan.cpp:7: lost (start again)\n"


@posix_only
@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("aborts", "lost again"),
        pytest.param("aborts", "Ctrl-C", marks=pytest.mark.ci),
        pytest.param("raises", "lost again", marks=pytest.mark.ci),
    ],
)
def test_a_server_whose_device_is_lost_says_so_to_its_clients_and_starts_again(tiny_gguf, tmp_path, how, end):
    file, options = tmp_path / "lost", ("--max-batch-size", "2", "--context", "1000")
    loses = {
        "aborts": 'ggml._function("ggml_abort")(b"vulkan.cpp", 7, b"lost")',
        "raises": 'raise errors.DeviceLostError("vulkan.cpp:7: lost")',
    }
    start = sys.executable, "-c", _STAND_IN.replace("LOSES", loses[how]), str(file), "serve", "--device", "test0"
    with Process(tiny_gguf, *options, start=start) as server, ThreadPoolExecutor(3) as pool:
        text, address = server.chat(temperature=0).json()["choices"][0]["message"]["content"], server.http.base_url
        asked = [pool.submit(server.chat, max_tokens=900, stream=stream) for stream in (True, False, False)]
        server.wait_for(accepted=4)
        file.touch()
        stream, *others = (future.result() for future in asked)
        *_, last, end_of_stream = stream.text.split("\n\n")
        assert (stream.status_code, end_of_stream) == (200, "")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "device_lost"
        for reply in others:
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "device_lost")
        time.sleep(float(reply.headers["retry-after"]))
        again = server.chat(temperature=0)  # while the model is loaded
        assert again.json()["choices"][0]["message"]["content"] == text
        assert server.read(f"serving tiny at ({address})")
        assert server.said.count(LOST) == 1
        assert server.process.poll() is None
        if end == "Ctrl-C":
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(20) == 130
        else:
            file.touch()
            with pytest.raises(httpx.TransportError):
                server.chat()
            assert server.process.wait(20) == 2
            rest = server.process.stderr.read()
            assert rest.endswith(LOST)
            assert "starts again" not in rest


def test_requests_that_come_while_a_server_starts_again_are_answered_with_503(tiny_llama):
    with serving(tiny_llama) as server:
        server.engine_loop.lose_device()
        for reply in (server.chat(), server.http.get("/ready"), server.http.get("/health")):
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "device_lost")
            assert reply.headers["retry-after"] == "2"


@pytest.mark.parametrize("gpu_layers", [None, 2])
@pytest.mark.parametrize("source", ["model", "shape"])
def test_bench_measures_a_device_and_llama_cpp_there(tiny_gguf, host, llama_bin, monkeypatch, source, gpu_layers):  # noqa: F811
    monkeypatch.setattr(Library, "device", lambda self, name: host)
    monkeypatch.setitem(target.SHAPES, "tiny", load_model(tiny_gguf).config)
    given = {"model": {"model": str(tiny_gguf)}, "shape": {"shape": "tiny"}}[source]
    lengths = {"lengths": (9,), "prompts": (9,), "rounds": 1, "llama_bin": llama_bin}
    result = run_bench(BenchOptions(**given, **lengths, device="Test0", gpu_layers=gpu_layers), print)
    assert result["failed"] == {}
    assert result["conditions"]["device"] == "Test0"
    assert ("layers 0 to 3" in result["conditions"]["kernels"]) == (gpu_layers is not None)
    assert list(result["phases"]) == ["depth", "outputs of 9", "peers at 9", "prompts"]
    assert {row["bandwidth_used"] for row in result["phases"]["depth"]["rows"]} == {None}
    layers = {arguments[arguments.index("-ngl") + 1] for arguments in log(llama_bin)}
    assert layers == {str(gpu_layers or 999)}


# On a device that is there


@NEEDS_DEVICE
@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_weights_of_each_type_give_the_distributions_of_the_cpu(device, dtype):
    """Of the tokens of a prompt, and of one that is decoded; or those in f32, from which the CPU's kernels differ."""
    tensors, config = random_model(CONFIG, dtype), replace(CONFIG, quantization=dtype)
    rows, found = tuple(range(len(TOKENS))), []
    for place, used in ((None, "f32"), (None, None), (ggml.device(device), None)):
        backend = GgmlBackend(config, tensors, device=place, dtype=used, context_length=64)
        batches = one_slot(backend, TOKENS, rows), one_slot(backend, [5], (0,), start=len(TOKENS))
        logits = [backend.forward(batch).logits.astype(np.float64) for batch in batches]
        found.append([each - np.log(np.exp(each).sum(-1, keepdims=True)) for each in logits])
    for exact, cpu, ours in zip(*found, strict=True):
        assert min((np.exp(p) * (p - ours)).sum(-1).mean() for p in (cpu, exact)) < 1e-3


@NEEDS_DEVICE
def test_a_server_gives_back_what_requests_took_whether_clients_stay_or_are_killed(device, tiny_llama):
    """200 requests of random length; some clients are gone in the middle of their stream."""
    with serving(tiny_llama, slots=3) as server:

        def run_requests(seed: int) -> int:
            rng = np.random.default_rng(seed)
            for number in range(100):
                body = chat_body("x " * int(rng.integers(1, 60)), max_tokens=int(rng.integers(1, 30)), stream=True)
                body["taper"]["policy"] = ("full", "d3 late", "static")[number % 3]
                with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
                    for _ in zip(range(1 + number % 4 * 20), response.iter_lines(), strict=False):
                        pass
            assert server.is_idle()
            return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

        first, second = run_requests(1), run_requests(1)
        assert second - first < 4 << 20
        assert server.chat(max_tokens=4).status_code == 200
