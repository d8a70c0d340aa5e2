"""Triton's interpreter runs the fused kernels on a CPU: steps and verified drafts equal PyTorch's own operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from interpreted import Interpreted
from tiny import CONTEXT, FAMILIES, PLAIN, complete, make_tiny, one_slot, policies, random_prompt, with_adapters

from taper import SamplingParams, TaperWarning
from taper.backends import TokenBatch, passing
from taper.backends.torch import TorchBackend
from taper.engine import Engine, Request
from taper.engine.drafting import Drafting
from taper.policy import DepthPolicy, active_prefixes, middle_first_order

fused = pytest.importorskip("taper.backends.fused", reason="needs Triton, which make test-ci installs")
pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_cuda runs them on the device"),
]
FITTING = [*PLAIN, "mistral with a window", "qwen2 with windows", "phi3", "phi3 with longrope", "smollm3", "granite"]

ROWS = ["qwen2", "qwen3", "llama-untied", "mistral with a window", "phi3 with longrope", "granite"]


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch):
    """Few programs: the interpreter takes milliseconds for each."""
    for name in ("QKV_TILE", "GATE_UP_TILE", "TILE"):
        monkeypatch.setattr(fused, name, fused.Tile(64, 32, 4))
    for name in ("ROWS_TILE", "ROWS_GATE_UP_TILE"):
        monkeypatch.setattr(fused, name, fused.RowsTile(64, 64, 4, 4))
    monkeypatch.setattr(fused, "_FEW_BLOCKS", 4)
    monkeypatch.setattr(fused, "_ROWS_PROGRAMS", 32)


def both(loaded, num_slots=1):
    options = {"num_slots": num_slots, "context_length": CONTEXT, "dtype": "f32", "device": "cpu"}
    slow, fast = (kind(loaded.config, loaded.tensors, **options) for kind in (TorchBackend, Interpreted))
    return slow, fast


def test_kernels_that_do_not_run_are_said_to_be_missing(tiny_llama, monkeypatch):
    def compiles(*_):
        raise RuntimeError("at 3:7:\nno C compiler was found")

    monkeypatch.setattr(fused.FusedLayers, "__init__", compiles)
    with pytest.warns(TaperWarning, match=r"^Taper's own kernels do not run on this GPU \(no C compiler was found\)"):
        _, fast = both(tiny_llama.load())
    assert fast._fused is None


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


def rows_batch(backend, depths, positions, slots=None, **options):
    """A token for each depth and position, of a slot of its own if none is named; deepest first."""
    layers, order = backend.config.num_hidden_layers, np.argsort(np.negative(depths), kind="stable")
    tokens = np.array(random_prompt(sum(positions), len(depths)))
    rows = tokens, positions, range(len(depths)) if slots is None else slots
    given = (np.asarray(values, np.int32)[order] for values in rows)
    active = active_prefixes(middle_first_order(layers), layers, [depths[row] for row in order])
    return TokenBatch(*given, active, (0, len(depths) - 1), tuple(range(len(depths))), **options)


def assert_rows_equal(loaded, depths, positions, steps=1, **options):
    """Both backends compute the same after random prompts, while depths go round the slots; returns the fast one."""
    slow, fast = backends = both(loaded, num_slots=len(depths))
    for backend in backends:
        for slot, length in enumerate(positions):
            if length:
                backend.forward(one_slot(backend, random_prompt(slot, length), (), slot=slot))
    for step in range(steps):
        moved = [*depths[step:], *depths[:step]], [position + step for position in positions]
        found, expected = (backend.forward(rows_batch(backend, *moved, **options)) for backend in (fast, slow))
        np.testing.assert_allclose(found.logits, expected.logits, atol=1e-3)
        assert found.greedy_ids.tolist() == expected.greedy_ids.tolist()
        assert not (step and found.prepared)
    for written in ("_cache", "_passed"):  # nothing else is, by rows of padding for example
        np.testing.assert_allclose(getattr(fast, written), getattr(slow, written), atol=1e-4)
    return fast


@pytest.mark.parametrize("family", ROWS)
def test_rows_of_each_family_equal_the_slow_ones(tmp_path, family):
    architecture, options = (PLAIN | FAMILIES)[family]
    loaded = make_tiny(tmp_path, architecture, layers=3, **options).load()
    assert_rows_equal(loaded, (2, 3, 3), (0, 70, 20), fill=True)


@pytest.mark.parametrize(
    ("depths", "positions"),
    [((6, 2), (0, 510)), ((5, 3, 4, 5, 2), (63, 130, 64, 0, 65)), ((2, 5, 6, 4, 3, 2, 6, 5, 4), range(9))],
)
def test_rows_of_any_number_depth_and_position_equal_the_slow_ones(tiny_llama, depths, positions):
    fast = assert_rows_equal(tiny_llama.load(), depths, positions, steps=2 if len(depths) == 2 else 1, fill=True)
    assert sum("rows" in key for key in fast._graphs) == 1  # whichever row goes how deep


@pytest.mark.parametrize("fill", [False, True])
def test_rows_that_pass_adapters_equal_the_slow_ones(tiny_llama, fill):
    adapters = with_adapters(DepthPolicy.static(6, 2, middle_first_order(6)), 64).adapters
    assert_rows_equal(tiny_llama.load(), (5, 2, 4), (9, 1, 62), fill=fill, adapters=adapters)


def test_rows_that_leave_more_than_there_is_room_for_run_in_operations_of_pytorch(tiny_llama, monkeypatch):
    monkeypatch.setattr(passing, "MAX_STATES", 1)
    fast = assert_rows_equal(tiny_llama.load(), (6, 2, 3), (5, 6, 7), fill=True)
    assert not fast._graphs


def test_outputs_together_equal_the_slow_ones(tiny_llama):
    loaded, chosen = tiny_llama.load(), [policies(6)[name] for name in ("d3 late", "early exit")]
    prompts = [random_prompt(seed, 5 + 7 * seed) for seed in range(len(chosen))]
    slow, fast = (complete(Engine(backend), prompts, chosen, tokens=4) for backend in both(loaded, num_slots=2))
    assert fast == slow


@pytest.mark.parametrize("family", ["llama", "mistral with a window"])
def test_several_tokens_of_a_slot_equal_the_slow_ones(tmp_path, family):
    """As exact mode verifies them: each attends to those before it, which are as deep or deeper."""
    architecture, options = (PLAIN | FAMILIES)[family]
    loaded = make_tiny(tmp_path, architecture, layers=4, **options).load()
    depths, slots = (4, 4, 3, 2, 4, 3, 3, 3), (0, 0, 0, 0, 1, 1, 1, 2)
    positions = (62, 63, 64, 65, 0, 1, 2, 130)
    slow, fast = backends = both(loaded, num_slots=3)
    for backend in backends:
        for slot, length in ((0, 62), (2, 130)):
            backend.forward(one_slot(backend, random_prompt(slot, length), (), slot=slot))
    expected, found = (b.forward(rows_batch(b, depths, positions, slots, fill=True)) for b in backends)
    assert len(fast._graphs) == 1
    assert found.prepared
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-3)
    assert found.greedy_ids.tolist() == expected.greedy_ids.tolist()
    for written in ("_cache", "_passed"):
        np.testing.assert_allclose(getattr(fast, written), getattr(slow, written), atol=1e-4)


def test_exact_mode_gives_the_tokens_of_plain_decoding(tmp_path):
    loaded, drafter = make_tiny(tmp_path, layers=3).load(), DepthPolicy.static(3, 2, [1])
    drafting = Drafting(kind="policy", policy=drafter, max_tokens=3, min_probability=0.0, always=True)
    outputs = []
    for backend, drafts in zip(both(loaded), (None, drafting), strict=True):
        request = Request(random_prompt(1, 9), SamplingParams(max_tokens=5), DepthPolicy.full(3), drafting=drafts)
        outputs.append(Engine(backend).complete([request]))
    assert outputs[0] == outputs[1]
    assert any(key[0] == "rows" and key[-2] > 2 for key in backend._graphs)


def test_kernels_that_need_more_than_the_gpu_has_run_fewer_rows(tiny_llama, monkeypatch):
    monkeypatch.setattr(fused, "MAX_ROWS", 4)
    _, fast = both(tiny_llama.load(), num_slots=4)
    fast._fused.check()
    assert fast._fused.max_rows == 4
    run = fast._fused.run_rows

    def run_few(x, *rest):
        if len(x) > 2:
            raise RuntimeError("out of resource: shared memory")
        run(x, *rest)

    monkeypatch.setattr(fast._fused, "run_rows", run_few)
    fast._fused.check()
    assert fast._fused.max_rows == 2
    assert not torch.stack([*fast._cache])[:, :, :, :, 1:].any()


@pytest.mark.parametrize("family", ["gemma3", "olmo2", "mixtral"])
def test_other_models_run_in_operations_of_pytorch(tmp_path, family):
    architecture, options = FAMILIES[family]
    _, fast = both(make_tiny(tmp_path, architecture, **options).load())
    assert fast._fused is None
