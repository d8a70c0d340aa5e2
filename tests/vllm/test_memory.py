"""Little memory and small steps: preemption, prompts in chunks, requests aborted, two hundred of everything."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from engines import LAYERS, Ask, params, prompts, tiny_policies

POLICIES = tiny_policies()


@pytest.fixture(scope="module")
def roomy(engines, tiny_folder):
    return engines(tiny_folder, POLICIES)


@pytest.fixture(scope="module")
def tight(engines, tiny_folder, roomy):
    """Room for four completions of the longest kind, steps of 96 tokens."""
    return engines(
        tiny_folder,
        POLICIES,
        more={"num_gpu_blocks_override": 40, "max_num_batched_tokens": 96, "enable_chunked_prefill": True},
    )


def asks(count: int, seed: int, longest: int = 60, max_tokens: int = 64) -> list[Ask]:
    names = [*POLICIES, "full", None]
    some = prompts(count, seed, vocab_size=300, longest=longest)
    return [
        Ask(prompt, max_tokens, {"taper_policy": names[i % len(names)]} if names[i % len(names)] else None)
        for i, prompt in enumerate(some)
    ]


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
    some = asks(16, seed=3, max_tokens=150)
    expected = roomy.alone(some)
    assert not preemptions
    assert tight.generate(some) == expected
    assert len(preemptions) >= 4
    assert max(preemptions) > 10, "preempted within the completion, so that its tapered tokens were recomputed"


def test_long_prompts_run_in_chunks_at_full_depth(roomy, tight):
    some = [
        *asks(6, seed=4, longest=40),
        *(
            Ask(prompt, 32, {"taper_policy": "headless"})
            for prompt in prompts(3, seed=5, vocab_size=300, shortest=520, longest=700)
        ),
    ]
    assert tight.generate(some) == roomy.alone(some)


def test_aborting_one_changes_none_of_the_others_and_frees_its_blocks(roomy, tight):
    some = asks(8, seed=6)
    expected = roomy.alone(some)
    ended = run(tight, some, abort_at={2: 10, 5: 31})
    assert [len(ids) for ids in (ended[2], ended[5])] == [10, 31]
    for number, ids in enumerate(expected):
        assert ended[number] == ids[: len(ended[number])]
        assert number in (2, 5) or len(ended[number]) == 64
    assert tight.free_blocks == 39


def test_two_hundred_requests_leak_nothing_and_give_what_each_gives_alone(roomy, tight):
    chance = random.Random(7)
    some = asks(200, seed=8, longest=120)
    for ask in some:
        ask.max_tokens = chance.randint(1, 80)
    abort_at = {number: chance.randint(1, 40) for number in chance.sample(range(200), 50)}
    ended = run(tight, some, abort_at)
    expected = roomy.alone(some)
    for number, ids in enumerate(expected):
        assert ended[number] == ids[: len(ended[number])]
        assert len(ended[number]) == min(some[number].max_tokens, abort_at.get(number, 1000))
    assert tight.free_blocks == 39
    assert not tight.scheduler.running
    assert not tight.scheduler.requests


def run(engine, some: list[Ask], abort_at: dict[int, int]) -> list[list[int]]:
    """Step an engine until all ended, aborting some requests once they have that many tokens."""
    vllm = engine.llm.llm_engine
    ended: list[list[int]] = [[] for _ in some]
    for number, ask in enumerate(some):
        vllm.add_request(str(number), {"prompt_token_ids": ask.prompt}, params(ask))
    while vllm.has_unfinished_requests():
        for output in vllm.step():
            number = int(output.request_id)
            ended[number] = list(output.outputs[0].token_ids)
            if len(ended[number]) >= abort_at.get(number, 1000) and not output.finished:
                vllm.abort_request([output.request_id])
    return ended


def test_the_counters_at_metrics_are_those_of_the_policies(roomy):
    from prometheus_client import generate_latest

    def read() -> dict[str, float]:
        lines = [line for line in generate_latest().decode().splitlines() if line.startswith("taper:")]
        totals: Counter[str] = Counter()
        for line in lines:
            totals[line.split("{")[0]] += float(line.split()[1])
        return totals

    before = read()
    roomy.generate([Ask([1, 2, 3], 21, {"taper_policy": "early"}), Ask([1, 2], 11, {"taper_policy": "full"})])
    after = read()
    assert after["taper:answer_tokens_total"] - before["taper:answer_tokens_total"] == 20 + 10
    assert after["taper:layers_run_total"] - before["taper:layers_run_total"] == 20 * 3 + 10 * LAYERS
    assert after["taper:layers_saved_total"] - before["taper:layers_saved_total"] == 20 * 3
    assert after["taper:mean_depth"] > 0


def test_an_unknown_policy_fails_its_request_only(roomy):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="'no-such', which this server does not have"):
        roomy.generate([Ask([1, 2, 3], 5, {"taper_policy": "no-such"})])
    assert len(roomy.generate([Ask([1, 2, 3], 5)])[0]) == 5
