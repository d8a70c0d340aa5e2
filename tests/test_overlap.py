"""Steps that a device computes while the host does something else give what steps one after the other give."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from test_drafting import DRAFTER, FULL, check_same, finished, mixed_requests, with_drafting
from tiny import CONTEXT, make_backend, one_slot, policies, random_prompt

from taper import SamplingParams
from taper.backends.torch import TorchBackend
from taper.engine import Engine, Request


class Device(TorchBackend):
    """On a CPU: a step is computed once its output is waited for, and each overwrites the output of the last one."""

    _use_graphs = property(lambda self: True, lambda self, value: None)

    def __init__(self, *args, **options):
        self.launched, self.most = [], 0
        super().__init__(*args, **options)
        self.overlaps = True

    def _open_fused(self):
        return None

    def _capture(self, compute, inputs):
        count, vocab_size = inputs.shape[1], self.config.vocab_size
        logits, chosen = torch.empty(count, vocab_size), torch.empty(count, dtype=torch.int64)

        def launch(inputs):
            self.launched.append((compute, inputs.copy(), logits, chosen))
            self.most = max(self.most, len(self.launched))
            return logits, chosen

        return launch

    def _synchronize(self):
        while self.launched:
            compute, inputs, logits, chosen = self.launched[0]
            for place, computed in zip((logits, chosen), compute(torch.from_numpy(inputs)), strict=True):
                place.copy_(computed)
            self.launched.pop(0)

    def copy(self, *args):
        with torch.inference_mode():
            self._synchronize()  # what a device gets is done in this order
        super().copy(*args)

    def clear(self, slot):
        with torch.inference_mode():
            self._synchronize()
        super().clear(slot)


def opened(kind, tiny, num_slots):
    loaded = tiny.load()
    return kind(loaded.config, loaded.tensors, num_slots=num_slots, context_length=CONTEXT, dtype="f32", device="cpu")


@pytest.mark.parametrize("num_slots", [1, 3, 8])
@pytest.mark.parametrize("policy", ["d3", "static", "early exit"])
def test_requests_of_every_kind_get_the_same_tokens(tiny_llama, num_slots, policy):
    requests = mixed_requests(policies(FULL.num_hidden_layers)[policy])
    device = opened(Device, tiny_llama, num_slots)
    check_same(
        finished(Engine(device), requests), finished(Engine(opened(TorchBackend, tiny_llama, num_slots)), requests)
    )
    assert device.most == 1  # each output is read before it could be overwritten


@pytest.mark.parametrize("kind", ["ngram", "policy"])
def test_requests_with_drafts_beside_others_get_the_same_tokens(tiny_llama, kind):
    plain = mixed_requests(FULL)
    options = {"kind": kind, "policy": DRAFTER if kind == "policy" else None, "always": True, "min_probability": 0.0}
    requests = [*plain[:4], *with_drafting(plain, **options)[4:]]
    expected = finished(Engine(opened(TorchBackend, tiny_llama, 4)), plain)
    check_same(finished(Engine(opened(Device, tiny_llama, 4)), requests), expected)


def test_a_step_returns_while_the_device_computes_the_next(tiny_llama):
    device = opened(Device, tiny_llama, 2)
    engine = Engine(device)
    sequences = [engine.add(Request(random_prompt(seed, 9), SamplingParams(max_tokens=5), FULL)) for seed in (1, 2)]
    while any(sequence.finish_reason is None for sequence in sequences):
        before = [sequence.step for sequence in sequences]
        engine.step()
        steps = [sequence.step for sequence in sequences]
        assert steps == [min(5, step + 1) for step in before]
        assert len(device.launched) == (steps[0] < 5)
    assert engine._next is None


@pytest.mark.parametrize("seed", range(6))
def test_what_comes_and_goes_between_steps_changes_nothing(tiny_llama, seed):
    """Requests that join late, end early, and advance alone; others' forwards between steps."""
    rng, requests = random.Random(seed), mixed_requests(policies(FULL.num_hidden_layers)["static"])
    alone = [finished(Engine(opened(TorchBackend, tiny_llama, 1)), [request])[0][0] for request in requests]
    device = opened(Device, tiny_llama, 3)
    engine, waiting, sequences, aborted = Engine(device), list(enumerate(requests)), {}, {}
    held = engine.add(Request(random_prompt(77, 20), SamplingParams(max_tokens=99, ignore_eos=True), FULL))
    held.is_held = True
    while held.step == 0:
        engine.step([held])
    expected = None
    while waiting or any(sequence.finish_reason is None for sequence in sequences.values()):
        if waiting and rng.random() < 0.3:
            index, request = waiting.pop()
            sequences[index] = engine.add(request)
        running = [sequence for sequence in sequences.values() if sequence.finish_reason is None]
        if running and rng.random() < 0.04:
            engine.abort(chosen := rng.choice(running))
            aborted[chosen] = chosen.step
            continue
        if rng.random() < 0.3:
            logits = engine.forward(one_slot(device, random_prompt(78, 1), (0,), start=20, slot=held.slot)).logits
            expected = logits if expected is None else expected
            np.testing.assert_allclose(logits, expected, atol=1e-5)
            assert device.most == 1
        if running:
            others = rng.sample(running, rng.randint(1, len(running)))
            engine.step(running if rng.random() < 0.7 else sorted(others, key=lambda sequence: sequence.id))
    for index, sequence in sequences.items():
        found = sequence.completion_ids
        assert found == alone[index][: len(found)]
        assert len(found) == aborted.get(sequence, len(alone[index]))
    assert (held.step, held.finish_reason) == (1, None)
    engine.abort(held)
    assert engine.num_free_slots == 3


@pytest.mark.parametrize("place", ["_synchronize", "begin"])
def test_an_interrupt_loses_and_repeats_nothing(tiny_llama, monkeypatch, place):
    requests = mixed_requests(FULL)
    expected = finished(Engine(opened(TorchBackend, tiny_llama, 3)), requests)
    device, rng = opened(Device, tiny_llama, 3), random.Random(5)
    method = getattr(device, place)

    def interrupted(*args):
        if rng.random() < 0.1:
            raise KeyboardInterrupt
        result = method(*args)
        if rng.random() < 0.1:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(device, place, interrupted)
    engine = Engine(device)
    sequences = [engine.add(request) for request in requests]
    count = 0
    while any(sequence.finish_reason is None for sequence in sequences):
        try:
            engine.step()
        except KeyboardInterrupt:
            count += 1
    assert count > 5
    assert [sequence.completion_ids for sequence in sequences] == [ids for ids, *_ in expected]


def test_a_backend_that_computes_at_once_begins_nothing(tiny_llama):
    engine = Engine(make_backend("ggml", tiny_llama.load()))
    engine.add(Request(random_prompt(3, 9), SamplingParams(max_tokens=5), FULL))
    engine.step()
    assert not engine.backend.overlaps
    assert engine._next is None
    batch = one_slot(engine.backend, random_prompt(4, 3), (2,), start=9)
    begun = engine.backend.begin(batch)
    np.testing.assert_array_equal(begun().logits, engine.forward(batch).logits)
