"""Prompts that begin alike are computed once: counted in tokens, and with the tokens that each gets alone."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import BACKENDS, VOCAB_SIZE, make_backend, policies, random_prompt

from taper.engine import Engine, Request
from taper.errors import RequestError
from taper.policy import DepthPolicy
from taper.sampling import SamplingParams

FULL = DepthPolicy.full(6)
SYSTEM = random_prompt(1, 100)


def request(seed: int, policy: DepthPolicy = FULL, tokens: int = 8, prompt=None) -> Request:
    ids = [*SYSTEM, *random_prompt(seed, 10)] if prompt is None else prompt
    return Request(ids, SamplingParams(max_tokens=tokens, ignore_eos=True), policy)


def counting(kind: str, tiny, num_slots: int = 4, **options) -> tuple[Engine, list[int]]:
    """An engine, and how many tokens each of its forwards computes."""
    engine, sizes = Engine(make_backend(kind, tiny.load(), num_slots=num_slots), **options), []
    forward = engine.backend.forward
    engine.backend.forward = lambda batch: sizes.append(len(batch.tokens)) or forward(batch)
    return engine, sizes


def alone(kind: str, tiny, requests) -> list[list[int]]:
    return [Engine(make_backend(kind, tiny.load())).complete([each])[0] for each in requests]


@BACKENDS
def test_prompts_that_come_together_compute_what_they_share_once(tiny_llama, kind):
    requests = [request(seed, policy) for seed, policy in zip((2, 3, 4), policies(6).values(), strict=False)]
    engine, sizes = counting(kind, tiny_llama)
    sequences = [engine.add(each) for each in requests]
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()
    assert sum(sizes) == 100 + 3 * 10 + 3 * 7
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 100, 100]
    completions = [sequence.completion_ids for sequence in sequences]
    assert completions == alone(kind, tiny_llama, requests)


@BACKENDS
def test_copies_of_one_prompt_compute_its_last_token_alone(tiny_llama, kind):
    engine, sizes = counting(kind, tiny_llama)
    completions = engine.complete([request(5)] * 4)
    assert sum(sizes) == 110 + 3 + 4 * 7
    assert completions == alone(kind, tiny_llama, [request(5)]) * 4


@BACKENDS
def test_a_newcomer_copies_from_a_sequence_that_runs(tiny_llama, kind):
    engine, sizes = counting(kind, tiny_llama)
    first = engine.add(request(6, policies(6)["static"], tokens=60))
    while first.step < 20:
        engine.step()
    sizes.clear()
    late = engine.add(request(7))
    while late.finish_reason is None:
        engine.step()
    assert (late.num_cached_tokens, sum(sizes)) == (100, 10 + 7 + 8)
    assert late.completion_ids == alone(kind, tiny_llama, [request(7)])[0]
    while first.finish_reason is None:
        engine.step()
    assert first.completion_ids == alone(kind, tiny_llama, [first.request])[0]


@BACKENDS
def test_what_a_tapered_sequence_ran_on_fewer_layers_is_not_copied(tiny_llama, kind):
    engine, _ = counting(kind, tiny_llama)
    tapered = engine.add(request(8, policies(6)["static"], tokens=40))
    while tapered.step < 30:
        engine.step()
    follower = request(0, prompt=[*tapered.leading(130), 7])
    late = engine.add(follower)
    while late.finish_reason is None:
        engine.step()
    assert late.num_cached_tokens == 110  # its first token was predicted by the prompt; the next ran fewer layers
    assert late.completion_ids == alone(kind, tiny_llama, [follower])[0]


def test_a_prompt_that_waited_goes_on_if_the_other_is_aborted(tiny_llama):
    engine, sizes = counting("ggml", tiny_llama, max_num_batched_tokens=40)
    first, second = (engine.add(request(seed)) for seed in (9, 10))
    engine.step()
    assert sizes == [40]
    engine.abort(first)
    while second.finish_reason is None:
        engine.step()
    assert second.num_cached_tokens == 40
    assert second.completion_ids == alone("ggml", tiny_llama, [second.request])[0]


def test_a_conversation_stays_in_its_slot_while_others_take_the_one_released_longest_ago(tiny_llama):
    engine, sizes = counting("ggml", tiny_llama, num_slots=2)
    prompts = [random_prompt(20 + i, 50) for i in range(2)]
    for prompt in prompts:
        engine.complete([request(0, prompt=prompt, tokens=1)])
    engine.complete([request(0, prompt=[*prompts[0], 3, 4], tokens=1)])
    assert engine.slots.kept == [[*prompts[0], 3, 4], prompts[1]]
    engine.complete([request(0, prompt=random_prompt(30, 20), tokens=1)])
    assert engine.slots.kept[0] == [*prompts[0], 3, 4]
    sizes.clear()
    engine.complete([request(0, prompt=[*prompts[0], 3, 4, 5], tokens=1)])
    assert sizes == [1]


def test_a_conversation_that_comes_back_in_other_tokens_takes_its_own_slot(tiny_llama):
    """Text does not always give the sampled tokens again; the slot of another conversation must not suffer for it."""
    engine, sizes = counting("ggml", tiny_llama, num_slots=2)
    prompts = [random_prompt(40 + i, 50) for i in range(2)]
    for prompt in prompts:
        engine.complete([request(0, prompt=prompt, tokens=9)])
    changed = [*prompts[1], 3, 3, 3, 4]
    engine.complete([request(0, prompt=changed, tokens=1)])
    assert engine.slots.kept[0][:50] == prompts[0]
    assert engine.slots.kept[1] == changed
    sizes.clear()
    engine.complete([request(0, prompt=[*prompts[0], 3], tokens=1)])
    assert sizes == [1]


# What else a request may bring


def test_a_bias_forces_and_forbids_tokens(tiny_llama):
    engine, _ = counting("ggml", tiny_llama)
    free = engine.complete([request(11)])[0]
    biased = SamplingParams(max_tokens=8, ignore_eos=True, logit_bias={free[0]: -100})
    assert free[0] not in engine.complete([Request(request(11).prompt_ids, biased, FULL)])[0]
    forced = SamplingParams(max_tokens=8, ignore_eos=True, logit_bias={7: 100})
    assert engine.complete([Request(request(11).prompt_ids, forced, FULL)])[0] == [7] * 8
    outside = SamplingParams(logit_bias={VOCAB_SIZE: 1})
    with pytest.raises(RequestError, match="token id 300 is outside the vocabulary"):
        engine.add(Request([1], outside, FULL))
    for bad in ([1], {"1": 2}, {1: 101}, {1: "2"}, {-1: 1}):
        with pytest.raises(RequestError, match="logit_bias"):
            SamplingParams(logit_bias=bad)


class Counter:
    """Lets tokens pass in the order 10, 11, 12 and then none."""

    def __init__(self):
        self.next = 10

    def restrict(self, logits):
        restricted = np.full_like(logits, -np.inf)
        if self.next < 13:
            restricted[self.next] = logits[self.next]
        return restricted

    def accept(self, token_id):
        assert token_id == self.next
        self.next += 1


def test_each_completion_has_a_filter_of_its_own_and_fails_alone(tiny_llama):
    engine, _ = counting("ggml", tiny_llama)
    filtered = Request(SYSTEM, SamplingParams(max_tokens=5), FULL, token_filter=Counter)
    one, two, free = engine.add(filtered), engine.add(filtered), engine.add(request(12))
    reasons = {}
    while len(reasons) < 3:
        reasons |= {output.sequence_id: output.finish_reason for output in engine.step() if output.finish_reason}
    assert reasons == {one.id: "error", two.id: "error", free.id: "length"}
    assert one.completion_ids == two.completion_ids == [10, 11, 12]
    assert free.completion_ids == alone("ggml", tiny_llama, [request(12)])[0]
