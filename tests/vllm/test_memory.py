"""Little memory and small steps: preemption, chunked prompts, aborted requests, a hundred requests; the metrics."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from engines import LAYERS, Request, requests, tiny_policies

POLICIES = tiny_policies()


@pytest.fixture(scope="module")
def roomy(engines, tiny_folder):
    return engines(tiny_folder, POLICIES)


@pytest.fixture(scope="module")
def tight(engines, tiny_folder, roomy):
    """Room for four completions of the longest kind, steps of 96 tokens."""
    limits = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 96, "enable_chunked_prefill": True}
    return engines(tiny_folder, POLICIES, **limits)


def mixed(count: int, seed: int, **options) -> list[Request]:
    """Requests under every policy, at full depth and under the default policy, in turn."""
    return requests([*POLICIES, "full", None], count, seed, **options)


@pytest.fixture
def preemptions(monkeypatch):
    """Counts the requests that a scheduler preempts, and how far each had got."""
    from vllm.v1.core.sched.scheduler import Scheduler

    seen: list[int] = []
    preempt = Scheduler._preempt_request

    def counted(self, request, *args, **kwargs):
        seen.append(request.num_output_tokens)
        return preempt(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    return seen


def test_a_preempted_request_continues_as_if_nothing_had_happened(roomy, tight, preemptions):
    batch = mixed(16, seed=3, max_tokens=150)
    expected = roomy.alone(batch)
    assert not preemptions
    assert tight.generate(batch) == expected
    assert len(preemptions) >= 4
    assert max(preemptions) > 10, "preempted within the completion, so that its tapered tokens were recomputed"


def test_long_prompts_run_in_chunks_at_full_depth(roomy, tight):
    batch = mixed(6, seed=4, longest=40)
    batch += requests(["headless"], 3, seed=5, max_tokens=32, shortest=520, longest=700)
    assert tight.generate(batch) == roomy.alone(batch)


def test_a_hundred_requests_some_aborted_give_what_each_gives_alone_and_leak_no_block(roomy, tight):
    chance = random.Random(7)
    batch = mixed(100, seed=8, longest=120)
    for request in batch:
        request.max_tokens = chance.randint(1, 80)
    abort_at = {number: chance.randint(1, 40) for number in chance.sample(range(100), 25)}
    ended = tight.generate_aborting(batch, abort_at)
    some = chance.sample(range(100), 50)
    for number, ids in zip(some, roomy.alone([batch[number] for number in some]), strict=True):
        assert ended[number] == ids[: min(batch[number].max_tokens, abort_at.get(number, 1000))]
    assert tight.free_blocks == 39
    assert not tight.scheduler.running
    assert not tight.scheduler.requests


def test_the_counters_at_metrics_are_those_of_the_policies(roomy):
    from prometheus_client import generate_latest

    def read() -> Counter[str]:
        totals: Counter[str] = Counter()
        for line in generate_latest().decode().splitlines():
            if line.startswith("taper"):
                totals[line.split("{")[0]] += float(line.split()[1])
        return totals

    before = read()
    roomy.generate([Request([1, 2, 3], 21, {"taper_policy": "early"}), Request([1, 2], 11, {"taper_policy": "full"})])
    after = read()
    counted = {
        "taper_completion_tokens_total": 20 + 10,
        "taper_layers_run_total": 20 * 3 + 10 * LAYERS,
        "taper_layers_skipped_total": 20 * 3,
    }
    assert {name: after[name] - before[name] for name in counted} == counted
    assert after["taper_mean_depth"] > 0


def test_an_unknown_policy_fails_its_request_only(roomy):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="'no-such', which this server does not have"):
        roomy.generate([Request([1, 2, 3], 5, {"taper_policy": "no-such"})])
    assert len(roomy.generate([Request([1, 2, 3], 5)])[0]) == 5
