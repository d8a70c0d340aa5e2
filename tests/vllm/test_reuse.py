"""What prompts reuse: filled blocks for requests that taper and allow it, exact ones for all others."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from engines import BLOCK_SIZE, LAYERS, Request, requests, tiny_model, tiny_policies
from turns import Conversation

from taper import DepthPolicy

POLICIES = tiny_policies()
FULL = DepthPolicy.full(LAYERS)
EXACT = {"taper_reuse": "exact"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("turns")
    return folder, tiny_model(folder, "Llama")


@pytest.fixture(scope="module")
def stock(engines, tiny):
    return engines(tiny[0])


@pytest.fixture(scope="module")
def tapered(engines, tiny):
    return engines(tiny[0], POLICIES)


@pytest.fixture(scope="module")
def tight(engines, tiny):
    """Room for four completions of the longest kind, steps of 96 tokens."""
    limits = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 96, "enable_chunked_prefill": True}
    return engines(tiny[0], POLICIES, **limits)


@pytest.fixture(autouse=True)
def empty_caches(stock, tapered, tight):
    for engine in (stock, tapered, tight):
        assert engine.llm.reset_prefix_cache()


def policy_of(request: Request) -> DepthPolicy:
    return (POLICIES | {"full": FULL})[request.extra_args["taper_policy"]]


def next_turn(request: Request, completion: list[int], chance: random.Random, **extra_args) -> Request:
    """A request that goes on where another one ended."""
    prompt = request.prompt + completion + [chance.randrange(300) for _ in range(chance.randint(5, 40))]
    return replace(request, prompt=prompt, extra_args=request.extra_args | extra_args)


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK_SIZE * BLOCK_SIZE


def check_turns(engine, model, batch: list[Request], turns: int) -> list[list[int]]:
    """Run conversations side by side, each turn against the reference; the last completions."""
    chance = random.Random(len(batch))
    conversations, reusable = [Conversation(model) for _ in batch], [0] * len(batch)
    for _ in range(turns):
        outputs = engine.generate_counted(batch)
        for number, (request, (ids, cached)) in enumerate(zip(batch, outputs, strict=True)):
            assert cached == reusable[number]
            expected = conversations[number].answer(request.prompt, policy_of(request), request.max_tokens, cached)
            assert ids == expected, request.extra_args
            # The last token was never the input of a forward.
            reusable[number] = whole_blocks(len(request.prompt) + len(ids) - 1)
            assert reusable[number] > len(request.prompt)
        completions = [ids for ids, _ in outputs]
        finished, batch = batch, [next_turn(*each, chance) for each in zip(batch, completions, strict=True)]
    cold = [Conversation(model).answer(each.prompt, policy_of(each), each.max_tokens) for each in finished]
    assert cold != completions, "filled keys and values differ from those of full depth"
    return completions


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_later_turns_reuse_filled_blocks_and_equal_the_reference(architecture, engines, tmp_path):
    model = tiny_model(tmp_path, architecture)
    engine = engines(tmp_path, POLICIES, architecture)
    check_turns(engine, model, requests(POLICIES, len(POLICIES), seed=20, max_tokens=50), turns=3)


@pytest.mark.parametrize(
    ("architecture", "plain"), [("Llama", False), ("Qwen2", True), ("Qwen2", False), ("Qwen3", True)]
)
def test_keys_and_values_come_from_plain_weights_or_from_the_whole_projection(architecture, plain, engines, tmp_path):
    model = tiny_model(tmp_path, architecture)
    engine = engines(tmp_path, POLICIES, architecture)
    worker = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    # vLLM's CPU kernels keep packed copies, and no plain weights as on a GPU.
    for layer, reference in zip(worker.get_model().model.layers, model.model.layers, strict=True):
        own, attention = layer.self_attn, reference.self_attn
        assert not len(own.qkv_proj.weight)
        del own.taper_kv_proj
        if plain:
            weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
            own.qkv_proj.weight = torch.nn.Parameter(torch.cat(weights), requires_grad=False)
    check_turns(engine, model, requests(POLICIES, len(POLICIES), seed=30, max_tokens=50), turns=2)


def test_a_later_turn_may_have_another_policy(tapered, tiny):
    (first,) = requests(["early"], 1, seed=21)
    conversation, chance = Conversation(tiny[1]), random.Random(21)
    ids = tapered.generate([first])[0]
    assert conversation.answer(first.prompt, POLICIES["early"], 64) == ids
    second = next_turn(first, ids, chance, taper_policy="headless")
    ((again, cached),) = tapered.generate_counted([second])
    assert cached == whole_blocks(len(first.prompt) + 63)
    assert again == conversation.answer(second.prompt, POLICIES["headless"], 64, cached)


def test_requests_at_full_depth_equal_stock_though_tapered_ones_had_their_prompts(tapered, stock):
    batch = requests(POLICIES, len(POLICIES), seed=22)
    chance = random.Random(22)
    for _ in range(3):
        completions = tapered.generate(batch)
        batch = [next_turn(*each, chance) for each in zip(batch, completions, strict=True)]
        tapered.generate(batch)
        ways = [{"taper_policy": "full"}, {"taper_alpha": 1}, {"taper_policy": "full", "taper_reuse": "filled"}]
        for extra_args in ways:
            full = [replace(each, extra_args=each.extra_args | extra_args) for each in batch]
            reused = 0 if extra_args == ways[0] else None
            for (ids, cached), expected in zip(tapered.generate_counted(full), stock.generate(batch), strict=True):
                assert ids == expected
                assert cached == reused or reused is None
            # What ran at full depth is exact: the others reuse it.
        assert cached == whole_blocks(len(full[-1].prompt) - 1)
        tapered.llm.reset_prefix_cache()
        stock.llm.reset_prefix_cache()


def test_exact_reuse_equals_a_cold_start(tapered, tiny):
    chance = random.Random(23)
    batch = requests(POLICIES, len(POLICIES), seed=23)
    reusable = [0] * len(batch)
    for _ in range(3):
        tapered.generate(batch)  # leaves filled blocks of the same tokens
        exact = [replace(each, extra_args=each.extra_args | EXACT) for each in batch]
        completions = []
        for request, (ids, cached), reused in zip(exact, tapered.generate_counted(exact), reusable, strict=True):
            assert cached == reused, "the prompt of the turn before, and no token of its completion"
            assert ids == Conversation(tiny[1]).answer(request.prompt, policy_of(request), 64), request.extra_args
            completions.append(ids)
        reusable = [whole_blocks(len(each.prompt)) for each in batch]
        batch = [next_turn(*each, chance) for each in zip(batch, completions, strict=True)]


def test_exact_reuse_and_full_depth_share_exact_blocks(tapered, stock):
    chance = random.Random(24)
    (first,) = requests(["full"], 1, seed=24)
    ids = tapered.generate([first])[0]
    second = next_turn(first, ids, chance, taper_policy="early", taper_reuse="exact")
    ((ids, cached),) = tapered.generate_counted([second])
    assert cached == whole_blocks(len(first.prompt) + 63)
    third = next_turn(second, ids, chance, taper_policy="full")
    ((ids, cached),) = tapered.generate_counted([third])
    assert cached == whole_blocks(len(second.prompt))
    assert ids == stock.generate([third])[0]


def test_a_cache_salt_of_the_request_still_separates(tapered):
    (first,) = requests(["early"], 1, seed=25, shortest=40)
    counts = []
    for salt in ("a", "b", "a", None, "b", None):
        ((_, cached),) = tapered.generate_counted([replace(first, cache_salt=salt)])
        counts.append(cached)
    assert counts == [0, 0, BLOCK_SIZE, 0, BLOCK_SIZE, BLOCK_SIZE]


def test_turns_after_preemption_reuse_what_the_reference_has(tight, tiny, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted = []
    preempt = Scheduler._preempt_request

    def counted(self, request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    chance = random.Random(26)
    batch = requests(POLICIES, 16, seed=26, max_tokens=150)
    completions = tight.generate(batch)
    assert len(preempted) >= 4
    reused = []
    # The last to finish first, before its blocks are overwritten.
    for request, ids in reversed(list(zip(batch, completions, strict=True))):
        conversation = Conversation(tiny[1])
        assert ids == conversation.answer(request.prompt, policy_of(request), 150)
        second = replace(next_turn(request, ids, chance), max_tokens=20)
        ((again, cached),) = tight.generate_counted([second])
        assert again == conversation.answer(second.prompt, policy_of(second), 20, cached)
        reused.append(cached > len(request.prompt))
    assert any(reused)


def test_exact_turns_with_preemption_equal_a_cold_start(tight, tiny):
    chance = random.Random(27)
    batch = requests(POLICIES, 8, seed=27, max_tokens=120)
    batch = [replace(each, extra_args=each.extra_args | EXACT) for each in batch]
    for _ in range(2):
        completions = tight.generate(batch)
        for request, ids in zip(batch, completions, strict=True):
            assert ids == Conversation(tiny[1]).answer(request.prompt, policy_of(request), 120), request.extra_args
        batch = [next_turn(*each, chance) for each in zip(batch, completions, strict=True)]


def test_prompts_reuse_what_aborted_requests_left(tapered, tiny):
    chance = random.Random(28)
    batch = requests(POLICIES, len(POLICIES), seed=28, max_tokens=200)
    ended = tapered.generate_aborting(batch, {number: chance.randint(40, 90) for number in range(len(batch))})
    for request, ids in zip(batch, ended, strict=True):
        conversation = Conversation(tiny[1])
        assert conversation.answer(request.prompt, policy_of(request), len(ids)) == ids
        second = replace(next_turn(request, ids, chance), max_tokens=30)
        ((again, cached),) = tapered.generate_counted([second])
        assert cached > len(request.prompt)
        assert again == conversation.answer(second.prompt, policy_of(second), 30, cached)


def test_a_request_with_streamed_input_runs_every_layer(tapered):
    from vllm.v1.request import Request as SchedulerRequest
    from vllm.v1.request import RequestStatus

    (request,) = requests(["early"], 1, seed=31)
    params = request.sampling_params()
    streamed = SchedulerRequest("streamed", request.prompt, params, None, resumable=True)
    tapered.scheduler.add_request(streamed)
    assert streamed.sampling_params.extra_args == {"taper_policy": "full"}
    assert params.extra_args == {"taper_policy": "early"}, "the caller's own is as it was"
    assert streamed.cache_salt is None
    tapered.scheduler.finish_requests("streamed", RequestStatus.FINISHED_ABORTED)


def test_a_prompt_reuses_a_block_that_is_filled_in_the_same_step(tapered, tiny):
    vllm, chance = tapered.llm.llm_engine, random.Random(29)
    (first,) = requests(["headless"], 1, seed=29, max_tokens=60, shortest=20, longest=20)
    vllm.add_request("first", {"prompt_token_ids": first.prompt}, first.sampling_params())
    later: dict[str, Request] = {}
    outputs: dict[str, tuple[list[int], int]] = {}
    while vllm.has_unfinished_requests():
        for output in vllm.step():
            ids = list(output.outputs[0].token_ids)
            outputs[output.request_id] = ids, output.num_cached_tokens
            if output.request_id == "first" and 40 <= len(ids) < 48:
                name = str(len(ids))
                later[name] = replace(next_turn(first, ids, chance), max_tokens=20)
                vllm.add_request(name, {"prompt_token_ids": later[name].prompt}, later[name].sampling_params())
    assert {outputs[name][1] for name in later} == {32, 64}, "before and after the second block was complete"
    for name, request in later.items():
        conversation = Conversation(tiny[1])
        assert conversation.answer(first.prompt, POLICIES["headless"], 60) == outputs["first"][0]
        ids, cached = outputs[name]
        assert ids == conversation.answer(request.prompt, POLICIES["headless"], 20, cached)
