"""ggml on a device: what is said where there is none, and what differs from the CPU.

With $TAPER_TEST_DEVICE, such as vulkan, all tests of both backends run on that device too; $TAPER_GGML names a library
that has it.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from test_quantisation import CONFIG, TOKENS, random_model
from tiny import DEVICES, complete, make_backend, one_slot, policies, random_prompt

from taper.backends import choose_device, open_backend
from taper.backends.ggml import GgmlBackend, devices
from taper.backends.ggml.library import ggml
from taper.engine import Engine
from taper.errors import ModelError, RequestError
from taper.policy import DepthPolicy

NEEDS_DEVICE = pytest.mark.skipif(not DEVICES, reason="TAPER_TEST_DEVICE names no device of a ggml library")


@pytest.fixture
def device() -> str:
    return DEVICES[0]


def test_a_device_that_is_not_there_is_told_in_one_line():
    with pytest.raises(RequestError, match=r"device is 'tpu7'; it must be auto, .* ggml .* finds .*TAPER_GGML"):
        choose_device("tpu7")


@pytest.mark.parametrize("option", [{"repack": "never"}, {"threads": 2}, {"head": "shortlist"}])
def test_options_for_cpus_are_refused(tiny_llama, monkeypatch, option):
    monkeypatch.setattr("taper.backends.choose_device", lambda device: "Vulkan0")
    with pytest.raises(RequestError, match="Vulkan0"):
        open_backend(tiny_llama.load(), device="vulkan", context_length=64, **option)


@NEEDS_DEVICE
@pytest.mark.parametrize("dtype", ["Q4_K", "Q8_0"])
def test_quantised_weights_give_the_distributions_of_the_cpu(device, dtype):
    tensors, config = random_model(CONFIG, dtype), replace(CONFIG, quantization=dtype)
    places = None, ggml.device(device)
    ours, theirs = (
        backend.forward(one_slot(backend, TOKENS, tuple(range(len(TOKENS))))).logits.astype(np.float64)
        for backend in (GgmlBackend(config, tensors, device=place, context_length=64) for place in places)
    )
    p, q = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)) for logits in (ours, theirs))
    assert (np.exp(p) * (p - q)).sum(-1).mean() < 1e-3


@NEEDS_DEVICE
def test_an_interrupt_ends_a_prompt_between_two_pieces_and_costs_nothing(device, tiny_llama, monkeypatch):
    prompt, policy = random_prompt(5, 48), policies(6)["d3"]
    expected = complete(Engine(make_backend(device, tiny_llama.load())), [prompt], [policy], 4)
    backend, computed = make_backend(device, tiny_llama.load()), []
    compute = devices.DeviceCompute._compute

    def interrupted(self, graph):
        compute(self, graph)
        computed.append(graph)
        if len(computed) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(devices.DeviceCompute, "_compute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            backend.forward(one_slot(backend, prompt, (0,)))
    assert len(computed) == 2
    assert complete(Engine(backend), [prompt], [policy], 4) == expected


@NEEDS_DEVICE
def test_an_operation_that_a_device_lacks_is_named(device, tiny_llama, monkeypatch):
    engine = Engine(make_backend(device, tiny_llama.load()))
    monkeypatch.setattr(ggml, "backend_supports_op", lambda backend, node: False)
    with pytest.raises(ModelError, match="lacks an operation of this model, get_rows"):
        complete(engine, [random_prompt(1)], [DepthPolicy.full(6)], 1)


@NEEDS_DEVICE
def test_too_little_memory_on_a_device_is_told_in_one_line(device, tiny_llama, monkeypatch):
    monkeypatch.setattr(ggml, "backend_alloc_ctx_tensors_from_buft", lambda context, buffer_type: None)
    with pytest.raises(ModelError, match="not enough memory on the device"):
        make_backend(device, tiny_llama.load())
