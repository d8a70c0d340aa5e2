"""The engine that steps: sequences join, leave and abort at any time, and each gets the tokens it gets alone."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tiny import BACKENDS, VOCAB_SIZE, make_backend, policies, random_prompt

from taper.backends import TokenBatch
from taper.engine import Engine, Request
from taper.errors import PolicyError, RequestError
from taper.policy import DepthPolicy
from taper.sampling import SamplingParams

FULL = DepthPolicy.full(6)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)


def random_request(rng: np.random.Generator) -> Request:
    """Any length, policy, way of sampling and stop."""
    choices = [*policies(6).values(), FULL]
    shared = random_prompt(int(rng.integers(3)), int(rng.integers(1, 30)))  # so that prefixes are found again
    prompt = [*shared, *rng.integers(3, VOCAB_SIZE, rng.integers(1, 60)).tolist()]
    greedy = {"logprobs": int(rng.integers(3))} if rng.random() < 0.3 else {}
    sampled = {"temperature": 0.8, "seed": int(rng.integers(99)), "top_p": 0.9, "repetition_penalty": 1.1}
    params = SamplingParams(
        max_tokens=int(rng.integers(1, 40)),
        stop_token_ids=rng.integers(3, VOCAB_SIZE, 4).tolist(),
        **(sampled if rng.random() < 0.3 else greedy),
    )
    return Request(prompt, params, choices[rng.integers(len(choices))], frozenset(rng.integers(3, 300, 3).tolist()))


@BACKENDS
@pytest.mark.parametrize("seed", [1, 2])
def test_random_requests_joining_and_aborting_get_the_tokens_they_get_alone(tiny_llama, kind, seed):
    loaded, rng = tiny_llama.load(), np.random.default_rng(seed)
    requests = [random_request(rng) for _ in range(32)]
    alone = Engine(make_backend(kind, loaded, context_length=128))
    expected = [alone.complete([request])[0] for request in requests]
    engine = Engine(make_backend(kind, loaded, num_slots=5, context_length=128), max_num_batched_tokens=24)
    to_come, running, got, aborted = list(enumerate(requests)), {}, {i: [] for i in range(32)}, set()
    finished = {}
    while to_come or running:
        for _ in range(rng.integers(3)):
            if to_come:
                index, request = to_come.pop(0)
                sequence = engine.add(request)
                running[sequence.id] = index, sequence
        if running and rng.random() < 0.05:
            index, sequence = running.pop(rng.choice(list(running)))
            engine.abort(sequence)
            assert sequence.finish_reason == "abort"
            aborted.add(index)
        for output in engine.step():
            index, sequence = running[output.sequence_id]
            assert output.depth == requests[index].policy.depth(len(got[index]))
            got[index].append(output.token_id)
            assert (output.finish_reason is None) == (sequence.finish_reason is None)
            if output.finish_reason:
                finished[index] = output.finish_reason
                del running[output.sequence_id]
    assert 0 < len(aborted) < 20, f"seed {seed} tries too little"
    assert {"stop", "length"} <= set(finished.values())
    for index in range(32):
        if index in aborted:
            assert got[index] == expected[index][: len(got[index])]
        else:
            assert got[index] == expected[index], f"seed {seed}, request {index}: {requests[index]}"
    assert engine.num_free_slots == 5


@BACKENDS
def test_long_prompts_never_delay_a_running_sequence_by_more_than_the_budget(tiny_llama, kind):
    """Counted in tokens a step: each step gives every running sequence its token, and no step exceeds the budget."""
    backend = make_backend(kind, tiny_llama.load(), num_slots=7, context_length=2010)
    engine = Engine(backend, max_num_batched_tokens=96)
    sizes, forward = [], backend.forward
    backend.forward = lambda batch: sizes.append(len(batch.tokens)) or forward(batch)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    tapering = [policies(6)["d3"], policies(6)["static"], FULL, policies(6)["d3"]]
    running = [engine.add(Request(random_prompt(i, 5), params, policy)) for i, policy in enumerate(tapering)]
    while not all(sequence.step for sequence in running):
        engine.step()
    late = [engine.add(Request(random_prompt(9 + i, 2000), SamplingParams(max_tokens=2), FULL)) for i in range(3)]
    while not all(sequence.step for sequence in late):
        sizes.clear()
        outputs = {output.sequence_id for output in engine.step()}
        assert outputs >= {sequence.id for sequence in running if sequence.finish_reason is None}
        assert sum(sizes) <= 96
        assert sum(sizes) == 96 or all(sequence.step for sequence in late), "the budget is used up while prompts wait"
    firsts = [sequence.step for sequence in late]
    assert firsts == sorted(firsts, reverse=True), "first come, first served"


def test_one_forward_serves_all_who_share_a_skip_order_and_all_at_full_depth(tiny_llama):
    backend = make_backend("ggml", tiny_llama.load(), num_slots=6)
    engine, tapered = Engine(backend), policies(6)["static"]
    sizes, forward = [], backend.forward
    backend.forward = lambda batch: sizes.append(len(batch.tokens)) or forward(batch)
    for i, policy in enumerate([tapered, FULL, tapered, FULL]):
        engine.add(Request(random_prompt(i, 5), LONG, policy))
    engine.step()
    engine.step()
    assert sizes == [20, 4]
    engine.add(Request(random_prompt(5, 7), LONG, policies(6)["early exit"]))  # its prompt runs every layer
    engine.step()
    assert sizes == [20, 4, 11]
    engine.step()
    assert sizes[3:] == [4, 1]


def test_only_the_sequences_asked_for_advance(tiny_llama):
    engine = Engine(make_backend("ggml", tiny_llama.load(), num_slots=2))
    one, two = (engine.add(Request(random_prompt(i), LONG, FULL)) for i in range(2))
    for _ in range(3):
        assert [output.sequence_id for output in engine.step([two])] == [two.id]
    assert (one.step, one.slot, two.step) == (0, None, 3)
    assert {output.sequence_id for output in engine.step()} == {one.id, two.id}


def test_sequences_that_wait_for_a_slot_advance_those_that_have_it(tiny_llama):
    """Whoever added them: so no sequence waits for ever, and no token is lost."""
    engine = Engine(make_backend("ggml", tiny_llama.load(), num_slots=1))
    one, two = (engine.add(Request(random_prompt(i), LONG, FULL)) for i in range(2))
    engine.step([one])
    while two.finish_reason is None:
        engine.step([two])
    for sequence in (one, two):
        (alone,) = engine.complete([sequence.request])
        assert [output.token_id for output in sequence.outputs] == alone


def test_waiting_for_a_slot_that_is_held_is_refused_not_endless(tiny_llama):
    engine = Engine(make_backend("ggml", tiny_llama.load(), num_slots=1))
    one, two = (engine.add(Request(random_prompt(i), LONG, FULL)) for i in range(2))
    engine.step([one])
    one.is_held = True
    with pytest.raises(RequestError, match="slots"):
        engine.step([two])
    engine.abort(one)
    assert engine.step([two])


def test_an_abort_frees_the_slot_whether_running_waiting_or_done(tiny_llama):
    engine = Engine(make_backend("ggml", tiny_llama.load(), num_slots=1))
    one, two = (engine.add(Request(random_prompt(i), LONG, FULL)) for i in range(2))
    engine.step()
    for sequence in (two, one, one):
        engine.abort(sequence)
        assert sequence.finish_reason == "abort"
    assert engine.num_free_slots == 1
    assert engine.step() == []


def test_requests_that_cannot_be_completed_are_refused_and_leave_nothing(tiny_llama):
    engine = Engine(make_backend("ggml", tiny_llama.load(), context_length=32))
    for prompt, policy, error in [
        ([], FULL, RequestError),
        ([1] * 32, FULL, RequestError),
        ([VOCAB_SIZE], FULL, RequestError),
        ([-1], FULL, RequestError),
        ([1], DepthPolicy.full(7), PolicyError),
    ]:
        with pytest.raises(error):
            engine.add(Request(prompt, LONG, policy))
    assert engine.step() == []
    with pytest.raises(RequestError, match="max_num_batched_tokens"):
        Engine(engine.backend, max_num_batched_tokens=0)


class NoNumbers:
    """A token filter that spoils every logit of its own sequence."""

    def restrict(self, logits):
        return np.full_like(logits, np.nan)

    def accept(self, token_id): ...


def test_an_output_that_is_no_number_ends_its_sequence_and_no_other(tiny_llama):
    engine = Engine(make_backend("ggml", tiny_llama.load(), num_slots=2))
    fine = engine.add(Request(random_prompt(1), LONG, FULL))
    broken = engine.add(Request(random_prompt(2), SamplingParams(), FULL, token_filter=NoNumbers))
    outputs = {output.sequence_id: output for output in engine.step()}
    assert (outputs[broken.id].token_id, outputs[broken.id].finish_reason) == (-1, "error")
    assert outputs[fine.id].finish_reason is None
    assert engine.num_free_slots == 1


@BACKENDS
def test_cells_that_are_no_numbers_spoil_no_later_output(tiny_llama, kind):
    loaded, prompt = tiny_llama.load(), random_prompt(1, 8)
    expected = Engine(make_backend(kind, loaded)).complete([Request(prompt, LONG, FULL)])
    engine = Engine(make_backend(kind, loaded))
    positions, slots = np.arange(8, 40, dtype=np.int32), np.zeros(32, np.int32)
    states = np.full((32, loaded.config.hidden_size), np.nan, np.float32)
    engine.forward(TokenBatch(positions, positions, slots, (32,) * 6, first_layer=1, hidden_states=states))
    assert engine.complete([Request(random_prompt(2, 8), LONG, FULL, token_filter=NoNumbers)]) == [[]]
    assert engine.complete([Request(prompt, LONG, FULL)]) == expected


@BACKENDS
def test_threads_take_turns_and_get_what_each_gets_alone(tiny_llama, kind):
    """Twelve threads on three slots: those without one wait for it."""
    loaded, rng = tiny_llama.load(), np.random.default_rng(5)
    requests = [random_request(rng) for _ in range(24)]
    alone = Engine(make_backend(kind, loaded, context_length=128))
    expected = [alone.complete([request])[0] for request in requests]
    engine, got = Engine(make_backend(kind, loaded, num_slots=3, context_length=128)), {}

    def work(number: int) -> None:
        for index in (number, 12 + number):
            got[index] = engine.complete([requests[index]])[0]

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[index] for index in range(24)] == expected
