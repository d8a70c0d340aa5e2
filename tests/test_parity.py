"""Fast against slow: both backends against transformers' own layers, token for token, in f32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import (
    CONTEXT,
    EVERY_BACKEND,
    TOKENS,
    complete,
    make_backend,
    make_tiny,
    one_slot,
    policies,
    random_prompt,
    reference_ids,
    write_gguf,
)

from taper.backends import TokenBatch
from taper.engine import Engine, Request
from taper.models import load_model
from taper.policy import DepthPolicy
from taper.sampling import SamplingParams


@EVERY_BACKEND
def test_full_depth_equals_transformers_greedy(tiny, kind):
    backend = make_backend(kind, tiny.load())
    full = DepthPolicy.full(backend.config.num_hidden_layers)
    prompt = random_prompt(3)
    assert complete(Engine(backend), [prompt], [full])[0] == reference_ids(tiny, prompt, None)


@EVERY_BACKEND
def test_policies_equal_the_reference_implementation(tiny, kind):
    loaded = tiny.load()
    prompt = random_prompt(3)
    full = reference_ids(tiny, prompt, None)
    for name, policy in policies(loaded.config.num_hidden_layers).items():
        tapered = complete(Engine(make_backend(kind, loaded)), [prompt], [policy])[0]
        assert tapered == reference_ids(tiny, prompt, policy), name
        assert tapered != full, f"{name} changes nothing, so this proves nothing"


@EVERY_BACKEND
@pytest.mark.parametrize("length", [249, 256, 505])
def test_decoding_across_buckets_of_cells_equals_the_reference_implementation(tiny_llama, kind, length):
    """Attention reads 256 cells, then 512, then 768: the first token past each edge is where a slip would show."""
    prompt, chosen = random_prompt(14, length), policies(6)
    for policy in (DepthPolicy.full(6), chosen["d3"], chosen["d3 late"]):
        engine = Engine(make_backend(kind, tiny_llama.load(), context_length=800))
        assert complete(engine, [prompt], [policy], 20)[0] == reference_ids(tiny_llama, prompt, policy, 20)


@EVERY_BACKEND
def test_logits_equal_transformers_to_rounding(tiny, kind):
    prompt = random_prompt(4, 50)
    backend = make_backend(kind, tiny.load())
    every = tuple(range(len(prompt)))
    with torch.no_grad():
        expected = tiny.hf(torch.tensor([prompt])).logits[0].numpy()
    np.testing.assert_allclose(backend.forward(one_slot(backend, prompt, every)).logits, expected, atol=2e-4, rtol=1e-4)


@EVERY_BACKEND
def test_rows_of_a_mixed_batch_equal_each_alone(tiny_llama, kind):
    loaded = tiny_llama.load()
    chosen = [*policies(6).values(), DepthPolicy.full(6)]
    chosen.append(DepthPolicy.d3(6, 0.9, skip_order=chosen[0].skip_order, min_depth=4))  # another curve, same order
    prompts = [random_prompt(seed, 5 + 7 * seed) for seed in range(len(chosen))]
    # Fewer slots than requests: rows join at different times and so are at different steps.
    together = complete(Engine(make_backend(kind, loaded, num_slots=3)), prompts, chosen)
    for prompt, policy, found in zip(prompts, chosen, together, strict=True):
        assert found == complete(Engine(make_backend(kind, loaded)), [prompt], [policy])[0]


@EVERY_BACKEND
def test_one_forward_serves_rows_at_different_depths(tiny_llama, kind):
    """Invariant 2: a prefix of the tokens runs each layer, and one that sat a layer out re-enters later."""
    backend = make_backend(kind, tiny_llama.load(), num_slots=2)
    alone = make_backend(kind, tiny_llama.load(), num_slots=1)
    prompts = [random_prompt(31), random_prompt(32)]
    for slot, prompt in enumerate(prompts):
        backend.forward(one_slot(backend, prompt, (), slot=slot))
    batch = TokenBatch(
        np.array([7, 8], np.int32),
        np.array([23, 23], np.int32),
        np.array([1, 0], np.int32),
        (2, 1, 2, 0, 1, 2),
        logits_rows=(1, 0),
    )
    together = backend.forward(batch).logits
    for row, (slot, token, active) in enumerate([(0, 8, (1, 0, 1, 0, 0, 1)), (1, 7, (1, 1, 1, 0, 1, 1))]):
        alone.forward(one_slot(alone, prompts[slot], ()))
        at = (np.array([value], np.int32) for value in (token, 23, 0))
        step = TokenBatch(*at, active, logits_rows=(0,))
        np.testing.assert_allclose(together[row], alone.forward(step).logits[0], atol=2e-4)


@EVERY_BACKEND
def test_chunked_prefill_equals_whole(tiny_llama, kind):
    loaded, prompt = tiny_llama.load(), random_prompt(5, 200)
    policy = policies(6)["d3"]
    whole = complete(Engine(make_backend(kind, loaded)), [prompt], [policy])
    assert complete(Engine(make_backend(kind, loaded), max_num_batched_tokens=37), [prompt], [policy]) == whole


@EVERY_BACKEND
def test_garbage_in_unwritten_cells_changes_nothing(tiny_llama, kind):
    loaded, prompt, policy = tiny_llama.load(), random_prompt(6), policies(6)["d3 late"]
    clean = complete(Engine(make_backend(kind, loaded, num_slots=2)), [prompt], [policy])
    backend = make_backend(kind, loaded, num_slots=2)
    for slot in (0, 1):  # every cell of every layer holds something else
        rubbish = random_prompt(7, CONTEXT)
        backend.forward(one_slot(backend, rubbish, (), slot=slot))
    assert complete(Engine(backend), [prompt], [policy]) == clean


@EVERY_BACKEND
def test_second_chat_turn_equals_a_cold_start(tiny_llama, kind):
    """Invariant 5: with exact reuse, only tokens that every layer ran are used again."""
    loaded, first = tiny_llama.load(), random_prompt(8)
    for name, policy in {**policies(6), "full": DepthPolicy.full(6)}.items():
        engine = Engine(make_backend(kind, loaded))
        said = complete(engine, [first], [policy], reuse="exact")[0]
        second = [*first, *said, *random_prompt(9, 11)]
        kept = engine.slots.kept[0]
        full_steps = next((i for i in range(1, TOKENS) if policy.depth(i) < 6), TOKENS)
        assert kept == second[: len(first) + full_steps - 1], name
        warm = complete(engine, [second], [policy], reuse="exact")[0]
        assert warm == complete(Engine(make_backend(kind, loaded)), [second], [policy])[0], name


@EVERY_BACKEND
def test_reuse_saves_the_forward_of_the_shared_prefix(tiny_llama, kind):
    engine = Engine(make_backend(kind, tiny_llama.load()))
    prompt, full = random_prompt(10, 60), DepthPolicy.full(6)
    complete(engine, [prompt], [full], tokens=2)
    sizes = []
    run = engine.backend.forward
    engine.backend.forward = lambda batch: sizes.append(len(batch.tokens)) or run(batch)
    complete(engine, [[*prompt, 5, 6, 7]], [full], tokens=1)
    assert sizes == [3]


def test_a_new_prompt_leaves_what_other_slots_keep(tiny_llama):
    """A shared beginning alone is no reason to give up another answer's cache while a slot is empty."""
    engine = Engine(make_backend("ggml", tiny_llama.load(), num_slots=3))
    system = random_prompt(60, 12)
    prompts = [[*system, *random_prompt(61 + i, 40)] for i in range(3)]
    for prompt in prompts:
        complete(engine, [prompt], [DepthPolicy.full(6)], tokens=2)
    assert sorted(len(kept) for kept in engine.slots.kept) == [53, 53, 53]
    sequence = engine.add(Request([*prompts[1], 7], SamplingParams(max_tokens=2), DepthPolicy.full(6)))
    run = engine.backend.forward
    sizes = []
    engine.backend.forward = lambda batch: sizes.append(len(batch.tokens)) or run(batch)
    engine.step([sequence])
    assert sizes == [1]


def test_gguf_equals_the_folder_it_came_from(tiny, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny)
    prompt, policy = random_prompt(12, 90), policies(5)["middle first"]
    for kind in ("ggml", "torch"):
        from_gguf = complete(Engine(make_backend(kind, load_model(tmp_path / "tiny.gguf"))), [prompt], [policy])
        assert from_gguf[0] == reference_ids(tiny, prompt, policy)


def test_graphs_are_prepared_once_and_bounded(tiny_llama, monkeypatch):
    monkeypatch.setattr("taper.backends.ggml.MAX_GRAPHS", 4)
    backend = make_backend("ggml", tiny_llama.load())
    policy = policies(6)["d3"]
    for seed in range(8):
        prompt = random_prompt(seed, 5 + seed)
        assert complete(Engine(backend), [prompt], [policy])[0] == reference_ids(tiny_llama, prompt, policy)
        assert len(backend._graphs) <= 4


def test_linear_rope_scaling_equals_transformers(tmp_path):
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    tiny = make_tiny(tmp_path, rope_parameters=scaling)
    prompt = random_prompt(13, 80)
    for kind in ("ggml", "torch"):
        assert complete(Engine(make_backend(kind, tiny.load())), [prompt], [DepthPolicy.full(5)])[0] == reference_ids(
            tiny, prompt, None
        )
