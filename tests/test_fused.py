"""Triton's interpreter runs the fused kernels on a CPU: steps of one token equal PyTorch's own operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import CONTEXT, FAMILIES, PLAIN, complete, make_tiny, one_slot, policies, random_prompt, with_adapters

from taper.backends.torch import TorchBackend
from taper.engine import Engine

fused = pytest.importorskip("taper.backends.fused", reason="needs Triton, which make test-ci installs")
pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_cuda runs them on the device"),
]
FITTING = [*PLAIN, "mistral with a window", "qwen2 with windows", "phi3", "phi3 with longrope", "smollm3", "granite"]


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch):
    """Few programs: the interpreter takes milliseconds for each."""
    for name in ("QKV_TILE", "GATE_UP_TILE", "TILE"):
        monkeypatch.setattr(fused, name, fused.Tile(64, 32, 4))


class Interpreted(TorchBackend):
    """Steps as a GPU captures them, run at once."""

    def __init__(self, loaded, **options):
        super().__init__(loaded.config, loaded.tensors, **options)
        self._use_graphs, self._fused = True, self._open_fused()

    def _capture(self, compute, rows):
        return lambda rows: compute(torch.from_numpy(rows))


def both(loaded, num_slots=1):
    options = {"num_slots": num_slots, "context_length": CONTEXT, "dtype": "f32", "device": "cpu"}
    return TorchBackend(loaded.config, loaded.tensors, **options), Interpreted(loaded, **options)


@pytest.mark.parametrize("family", FITTING)
def test_steps_of_each_family_equal_the_slow_ones(tmp_path, family):
    architecture, options = (PLAIN | FAMILIES)[family]
    loaded, prompt = make_tiny(tmp_path, architecture, **options).load(), random_prompt(len(family), 70)
    slow, fast = both(loaded)
    assert fast._fused is not None
    policy = policies(loaded.config.num_hidden_layers)["static"]
    assert complete(Engine(fast), [prompt], [policy], tokens=3) == complete(Engine(slow), [prompt], [policy], tokens=3)


@pytest.mark.parametrize("adapted", [False, True])
def test_layers_that_pass_states_on_leave_what_the_slow_ones_leave(tmp_path, adapted):
    loaded = make_tiny(tmp_path, num_key_value_heads=4, layers=6).load()  # keys as wide as hidden states
    policy = policies(6)["early exit"]
    if adapted:
        policy = with_adapters(policy, 64)
    slow, fast = both(loaded)
    found, expected = (complete(Engine(backend), [random_prompt(7)], [policy], tokens=5) for backend in (fast, slow))
    assert found == expected
    np.testing.assert_allclose(fast._cache, slow._cache, atol=1e-4)


def test_any_slot_and_length_give_the_logits_of_the_slow_ones(tiny_llama):
    loaded, prompt = tiny_llama.load(), random_prompt(8, 400)
    backends = both(loaded, num_slots=3)
    for length in (1, 64, 65, 399):
        logits = []
        for backend in backends:
            backend.forward(one_slot(backend, prompt[:length], (), slot=2))
            batch = one_slot(backend, prompt[length : length + 1], (0,), start=length, slot=2)
            logits.append(backend.forward(batch).logits)
        np.testing.assert_allclose(*logits, atol=1e-3)


@pytest.mark.parametrize("family", ["gemma3", "olmo2", "mixtral"])
def test_other_models_run_in_operations_of_pytorch(tmp_path, family):
    architecture, options = FAMILIES[family]
    _, fast = both(make_tiny(tmp_path, architecture, **options).load())
    assert fast._fused is None
