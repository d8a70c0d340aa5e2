"""Later turns see keys and values that were filled in where a layer was skipped: in every engine alike, and only where
that is allowed."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiny import BACKENDS, make_backend, make_tiny, policies, random_prompt, reference_turns, with_adapters

import taper.hf
from taper.backends.torch import adapt
from taper.engine import Engine, Request
from taper.errors import RequestError
from taper.policy import DepthPolicy
from taper.sampling import SamplingParams

FULL = DepthPolicy.full(6)
TURNS = [random_prompt(80), random_prompt(81, 9), random_prompt(82, 14)]
TOKENS = 16


@pytest.fixture(scope="module", params=["grouped queries", "a key for each query"])
def tiny(request, tiny_llama, tmp_path_factory):
    """A model whose keys are smaller than hidden states, and one whose keys are as wide."""
    if request.param == "grouped queries":
        return tiny_llama
    return make_tiny(tmp_path_factory.mktemp("many_keys"), layers=6, tied=False, num_key_value_heads=4)


def chosen(adapters: bool) -> dict[str, DepthPolicy]:
    """Every kind of policy, or with adapters one along a curve and one from step 1 on."""
    every = policies(6)
    return {name: with_adapters(every[name], 64) for name in ("d3", "early exit")} if adapters else every


def request(prompt, policy: DepthPolicy, reuse: str = "filled", tokens: int = TOKENS) -> Request:
    return Request(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), policy, reuse=reuse)


def converse(engine: Engine, policy: DepthPolicy, turns=TURNS, reuse: str = "filled") -> list[list[int]]:
    """The completions of a conversation, and that what could be reused was."""
    ids, completions = [], []
    for turn in turns:
        held = len(ids) - 1  # the last token of a completion has no keys and values
        ids = [*ids, *turn]
        sequence = engine.add(request(ids, policy, reuse))
        while sequence.finish_reason is None:
            engine.step()
        if completions and reuse == "filled":
            assert sequence.num_cached_tokens == held
        completions.append(sequence.completion_ids)
        ids += completions[-1]
    return completions


@torch.no_grad()
def decode(model, policy: DepthPolicy, ids: list[int], depths: list[int], tokens: int = TOKENS) -> list[int]:
    """The root of trust: no cache. Every layer runs on all tokens; those that skip it keep the state they came with.

    `ids` and `depths`, the layers that each of them runs, grow by the completion.
    """
    inner, adapters = model.model, policy.adapters.layers if policy.adapters else {}
    for step in range(tokens):
        x = inner.embed_tokens(torch.tensor([ids]))
        embeddings = inner.rotary_emb(x, position_ids=torch.arange(len(ids))[None])
        mask = torch.full((1, 1, len(ids), len(ids)), -torch.inf).triu(1)
        for index, layer in enumerate(inner.layers):
            runs = torch.tensor([index in policy.retained_at(depth) for depth in depths])[None, :, None]
            passed = x
            if index in adapters:
                passed = adapt(x[0], *(torch.tensor(matrix).float() for matrix in adapters[index]))[None]
            x = torch.where(runs, layer(x, attention_mask=mask, position_embeddings=embeddings), passed)
        ids.append(int(model.lm_head(inner.norm(x[:, -1])).argmax(-1)))
        depths.append(policy.depth(step + 1))
    return ids[-tokens:]


@cache
def naive(model, policy: DepthPolicy) -> list[list[int]]:
    """The completions of a conversation."""
    ids, depths, completions = [], [], []
    for turn in TURNS:
        depths[len(ids) - 1 :] = [6] * (len(turn) + bool(ids))  # the last token is an input of the next prompt
        ids += turn
        completions.append(decode(model, policy, ids, depths))
    return completions


def naive_after(model, policy: DepthPolicy, said: list[int]) -> list[int]:
    """The second completion, after only the first tokens of the first one."""
    depths = [6] * len(TURNS[0]) + [policy.depth(step) for step in range(1, len(said) + 1)] + [6] * len(TURNS[1])
    return decode(model, policy, [*TURNS[0], *said, *TURNS[1]], depths)


@pytest.mark.ci
@pytest.mark.parametrize("adapters", [False, True])
def test_the_reference_implementation_equals_a_loop_without_any_cache(tiny, adapters):
    for name, policy in chosen(adapters).items():
        assert reference_turns(tiny, TURNS, policy, TOKENS) == naive(tiny.hf, policy), name


@BACKENDS
@pytest.mark.parametrize("adapters", [False, True])
def test_later_turns_equal_a_loop_without_any_cache(tiny, kind, adapters):
    for name, policy in chosen(adapters).items():
        engine = Engine(make_backend(kind, tiny.load()))
        assert converse(engine, policy) == naive(tiny.hf, policy), name


@BACKENDS
def test_filled_cells_change_later_turns(tiny, kind):
    """Else all that is said of them here would prove nothing."""
    for name, policy in policies(6).items():
        filled, exact = (
            converse(Engine(make_backend(kind, tiny.load())), policy, reuse=reuse) for reuse in ("filled", "exact")
        )
        assert filled[0] == exact[0], name
        assert filled[1:] != exact[1:], name


@BACKENDS
def test_conversations_side_by_side_equal_each_alone(tiny, kind):
    """Other policies, full depth and exact reuse among them, in one batch, each in its slot."""
    chosen = [*policies(6).values(), FULL, policies(6)["d3"], policies(6)["static"]]
    kinds = ["filled"] * (len(chosen) - 2) + ["exact"] * 2
    turns = [[random_prompt(100 * i + turn, 7 + 3 * i) for turn in range(3)] for i in range(len(chosen))]
    together, ids = [[] for _ in chosen], [[] for _ in chosen]
    engine = Engine(make_backend(kind, tiny.load(), num_slots=len(chosen)))
    for turn in range(3):
        ids = [[*before, *of[turn]] for before, of in zip(ids, turns, strict=True)]
        completions = engine.complete(request(*each) for each in zip(ids, chosen, kinds, strict=True))
        for i, completion in enumerate(completions):
            together[i].append(completion)
            ids[i] += completion
    for i, policy in enumerate(chosen):
        alone = converse(Engine(make_backend(kind, tiny.load())), policy, turns[i], kinds[i])
        assert together[i] == alone, policy.label


@BACKENDS
@pytest.mark.parametrize(("policy", "reuse"), [(FULL, "filled"), (policies(6)["d3"], "exact")])
def test_full_depth_and_exact_reuse_equal_a_cold_start_whatever_tapered_before(tiny, kind, policy, reuse):
    """The slot holds a tapered conversation whose second prompt was computed over filled cells."""
    engine = Engine(make_backend(kind, tiny.load(), num_slots=2))
    first, second, _ = converse(engine, policies(6)["static"])
    prompt = [*TURNS[0], *first, *TURNS[1], *second, *TURNS[2], 5]
    sequence = engine.add(request(prompt, policy, reuse))
    while sequence.finish_reason is None:
        engine.step()
    assert sequence.num_cached_tokens == len(TURNS[0])
    cold = Engine(make_backend(kind, tiny.load())).complete([request(prompt, policy, reuse)])[0]
    assert sequence.completion_ids == cold
    # And what this one left is exact: a third request at full depth takes all of its prompt.
    third = engine.add(request([*prompt, 9], FULL, tokens=1))
    while third.finish_reason is None:
        engine.step()
    assert third.num_cached_tokens >= len(prompt)


@BACKENDS
def test_a_copy_of_filled_cells_equals_the_cells(tiny, kind):
    """A newcomer copies from a sequence that runs, and one from a slot that is free."""
    policy = policies(6)["d3"]
    engine = Engine(make_backend(kind, tiny.load(), num_slots=4))
    first = engine.add(request(TURNS[0], policy, tokens=60))
    while first.step < 40:
        engine.step()
    said = first.completion_ids[:30]
    turns = [[*TURNS[0], *said, *TURNS[1]], TURNS[2]]
    late = engine.add(request(turns[0], policy))
    while late.finish_reason is None:
        engine.step()
    assert late.num_cached_tokens == len(TURNS[0]) + 30
    while first.finish_reason is None:
        engine.step()
    again = engine.add(request(turns[0], policy))
    while again.finish_reason is None:
        engine.step()
    assert late.completion_ids == again.completion_ids == naive_after(tiny.hf, policy, said)
    # A request at full depth copies the prompt alone.
    full = engine.add(request([*turns[0], 4], FULL))
    while full.finish_reason is None:
        engine.step()
    assert full.completion_ids == Engine(make_backend(kind, tiny.load())).complete([full.request])[0]


@BACKENDS
def test_an_aborted_output_is_continued_from_its_filled_cells(tiny, kind):
    policy = policies(6)["middle first"]
    engine = Engine(make_backend(kind, tiny.load()))
    first = engine.add(request(TURNS[0], policy, tokens=60))
    while first.step < 31:
        engine.step()
    engine.abort(first)
    said = first.completion_ids[:30]
    second = engine.add(request([*TURNS[0], *said, *TURNS[1]], policy))
    while second.finish_reason is None:
        engine.step()
    assert second.num_cached_tokens == len(TURNS[0]) + 30
    assert second.completion_ids == naive_after(tiny.hf, policy, said)


@BACKENDS
@pytest.mark.parametrize("wrote", [False, True])
def test_states_become_keys_and_values_although_that_was_interrupted(tiny, kind, wrote, monkeypatch):
    """Ctrl-C before or after the write; then the slot is copied, and both conversations go on."""
    policy = policies(6)["d3"]
    engine = Engine(make_backend(kind, tiny.load(), num_slots=2))
    said = engine.complete([request(TURNS[0], policy)])[0]
    write, calls = engine.backend._write_cells, []

    def interrupted(*arguments):
        if wrote or len(calls) != 2:
            write(*arguments)
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt

    second = engine.add(request([*TURNS[0], *said, *TURNS[1]], policy))
    with monkeypatch.context() as patch:
        patch.setattr(engine.backend, "_write_cells", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    third = engine.add(request([*TURNS[0], *said, *TURNS[2]], policy))
    while second.finish_reason is None or third.finish_reason is None:
        engine.step()
    assert third.num_cached_tokens == len(TURNS[0]) + len(said) - 1
    for sequence, turn in ((second, TURNS[1]), (third, TURNS[2])):
        depths = [6] * len(TURNS[0]) + [policy.depth(step) for step in range(1, TOKENS)] + [6] * (1 + len(turn))
        assert sequence.completion_ids == decode(tiny.hf, policy, [*TURNS[0], *said, *turn], depths)


def test_a_prompt_at_full_depth_does_not_wait_for_one_over_filled_cells(tiny):
    """Both begin in one step; the tapered one continues a conversation, and what it computes is not exact."""
    policy = policies(6)["static"]
    engine = Engine(make_backend("ggml", tiny.load(), num_slots=2), max_num_batched_tokens=24)
    first = engine.complete([request(TURNS[0], policy)])[0]
    prompt = [*TURNS[0], *first, *random_prompt(90, 60)]
    tapered, full = engine.add(request(prompt, policy)), engine.add(request(prompt, FULL))
    while full.finish_reason is None:
        engine.step()
    assert full.num_cached_tokens <= len(TURNS[0])
    assert full.completion_ids == Engine(make_backend("ggml", tiny.load())).complete([full.request])[0]
    engine.abort(tapered)


def test_an_unknown_kind_of_reuse_is_rejected(tiny):
    with pytest.raises(RequestError, match="reuse"):
        Engine(make_backend("ggml", tiny.load())).add(request([1], FULL, "some"))
    with pytest.raises(RequestError, match="reuse"):
        taper.hf.custom_generate(FULL, "some")
