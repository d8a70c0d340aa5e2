"""Fast against slow: both backends against transformers' own layers, token for token, in f32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import VOCAB_SIZE, TinyModel, make_tiny, write_gguf

import taper.engine
import taper.hf
from taper.backends import TokenBatch
from taper.backends.ggml import GgmlBackend
from taper.backends.torch import TorchBackend
from taper.engine import Engine, Request
from taper.loading import load_model
from taper.policy import DepthPolicy
from taper.sampling import SamplingParams

TOKENS = 40
CONTEXT = 512


def make_backend(kind: str, loaded, **options):
    options = {"num_slots": 1, "context_length": CONTEXT} | options
    if kind == "ggml":
        return GgmlBackend(loaded.config, loaded.tensors, dtype="f32", kv_dtype="f32", threads=1, **options)
    return TorchBackend(loaded.config, loaded.tensors, dtype="f32", device="cpu", **options)


def random_prompt(seed: int, length: int = 23) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


def answer(engine: Engine, prompts, policies, tokens: int = TOKENS) -> list[list[int]]:
    """Token ids of greedy answers, all in one batch."""
    params = SamplingParams(max_tokens=tokens)
    requests = [Request(prompt, params, policy) for prompt, policy in zip(prompts, policies, strict=True)]
    answers: list[list[int]] = [[] for _ in requests]
    for step in engine.generate_step(requests):
        answers[step.row.index].append(step.token_id)
    return answers


def twin(tiny: TinyModel, prompt: list[int], policy: DepthPolicy | None, tokens: int = TOKENS) -> list[int]:
    """The slow twin's greedy answer; without a policy, plain transformers."""
    custom = {} if policy is None else {"custom_generate": taper.hf.decode(policy)}
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = tiny.hf.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **custom)
    return out[0, len(prompt) :].tolist()


def policies(layers: int) -> dict[str, DepthPolicy]:
    """Each curve, scattered skip orders, short and long plateaus."""
    last = layers - 1
    return {
        "d3": DepthPolicy.d3(layers, 0.96, skip_order=[last - 1, 1, 2]),
        "d3 late": DepthPolicy.d3(layers, 0.9, start=9, min_depth=2, skip_order=[2, last, 1, last - 1]),
        "middle first": DepthPolicy.middle_first(layers, 0.98),
        "skipdecode": DepthPolicy.skipdecode(layers, min_depth=2, span=20, start=3),
        "early exit": DepthPolicy.early_exit(layers, 3),
        "static": DepthPolicy.static(layers, layers - 2, [last, 1]),
    }


BACKENDS = pytest.mark.parametrize("kind", ["ggml", "torch"])


@BACKENDS
def test_full_depth_equals_transformers_greedy(tiny, kind):
    backend = make_backend(kind, tiny.load())
    full = DepthPolicy.full(backend.config.num_hidden_layers)
    for seed in (1, 2):
        prompt = random_prompt(seed)
        assert answer(Engine(backend), [prompt], [full])[0] == twin(tiny, prompt, None)


@BACKENDS
def test_policies_equal_the_slow_twin(tiny, kind):
    loaded = tiny.load()
    prompt = random_prompt(3)
    full = twin(tiny, prompt, None)
    for name, policy in policies(loaded.config.num_hidden_layers).items():
        tapered = answer(Engine(make_backend(kind, loaded)), [prompt], [policy])[0]
        assert tapered == twin(tiny, prompt, policy), name
        assert tapered != full, f"{name} changes nothing, so this proves nothing"


@BACKENDS
def test_logits_equal_transformers_to_rounding(tiny, kind):
    prompt = random_prompt(4, 50)
    backend = make_backend(kind, tiny.load())
    every = tuple(range(len(prompt)))
    with torch.no_grad():
        expected = tiny.hf(torch.tensor([prompt])).logits[0].numpy()
    np.testing.assert_allclose(backend.forward(one_slot(backend, prompt, every)), expected, atol=2e-4, rtol=1e-4)


def one_slot(backend, tokens, logits_rows, start: int = 0, slot: int = 0) -> TokenBatch:
    count = len(tokens)
    return TokenBatch(
        np.asarray(tokens, np.int32),
        np.arange(start, start + count, dtype=np.int32),
        np.full(count, slot, np.int32),
        (count,) * backend.config.num_hidden_layers,
        logits_rows,
    )


@BACKENDS
def test_rows_of_a_mixed_batch_equal_each_alone(tiny_llama, kind):
    loaded = tiny_llama.load()
    chosen = [*policies(6).values(), DepthPolicy.full(6)]
    chosen.append(DepthPolicy.d3(6, 0.9, skip_order=chosen[0].skip_order, min_depth=4))  # another curve, same order
    prompts = [random_prompt(seed, 5 + 7 * seed) for seed in range(len(chosen))]
    # Fewer slots than requests: rows join at different times and so are at different steps.
    together = answer(Engine(make_backend(kind, loaded, num_slots=3)), prompts, chosen)
    for prompt, policy, found in zip(prompts, chosen, together, strict=True):
        assert found == answer(Engine(make_backend(kind, loaded)), [prompt], [policy])[0]


@BACKENDS
def test_one_forward_serves_rows_at_different_depths(tiny_llama, kind):
    """Invariant 2: a prefix of the tokens runs each layer, and one that sat a layer out re-enters later."""
    backend = make_backend(kind, tiny_llama.load(), num_slots=2)
    alone = make_backend(kind, tiny_llama.load(), num_slots=1)
    prompts = [random_prompt(31), random_prompt(32)]
    for slot, prompt in enumerate(prompts):
        backend.forward(one_slot(backend, prompt, (), slot=slot))
    batch = TokenBatch(
        np.array([7, 8], np.int32), np.array([23, 23], np.int32), np.array([1, 0], np.int32), (2, 1, 2, 0, 1, 2), (1, 0)
    )
    together = backend.forward(batch)
    for row, (slot, token, active) in enumerate([(0, 8, (1, 0, 1, 0, 0, 1)), (1, 7, (1, 1, 1, 0, 1, 1))]):
        alone.forward(one_slot(alone, prompts[slot], ()))
        step = TokenBatch(np.array([token], np.int32), np.array([23], np.int32), np.array([0], np.int32), active, (0,))
        np.testing.assert_allclose(together[row], alone.forward(step)[0], atol=2e-4)


@BACKENDS
def test_chunked_prefill_equals_whole(tiny_llama, kind, monkeypatch):
    loaded, prompt = tiny_llama.load(), random_prompt(5, 200)
    policy = policies(6)["d3"]
    whole = answer(Engine(make_backend(kind, loaded)), [prompt], [policy])
    monkeypatch.setattr(taper.engine, "PREFILL_CHUNK", 37)
    assert answer(Engine(make_backend(kind, loaded)), [prompt], [policy]) == whole


@BACKENDS
def test_garbage_in_unwritten_cells_changes_nothing(tiny_llama, kind):
    loaded, prompt, policy = tiny_llama.load(), random_prompt(6), policies(6)["d3 late"]
    clean = answer(Engine(make_backend(kind, loaded, num_slots=2)), [prompt], [policy])
    backend = make_backend(kind, loaded, num_slots=2)
    for slot in (0, 1):  # every cell of every layer holds something else
        rubbish = random_prompt(7, CONTEXT)
        backend.forward(one_slot(backend, rubbish, (), slot=slot))
    assert answer(Engine(backend), [prompt], [policy]) == clean


@BACKENDS
def test_second_chat_turn_equals_a_cold_start(tiny_llama, kind):
    """Invariant 5: only tokens whose keys and values every layer has are used again."""
    loaded, first = tiny_llama.load(), random_prompt(8)
    for name, policy in {**policies(6), "full": DepthPolicy.full(6)}.items():
        engine = Engine(make_backend(kind, loaded))
        said = answer(engine, [first], [policy])[0]
        second = [*first, *said, *random_prompt(9, 11)]
        kept = engine._kept[0]
        full_steps = next((i for i in range(1, TOKENS) if policy.depth(i) < 6), TOKENS)
        assert kept == second[: len(first) + full_steps - 1], name
        warm = answer(engine, [second], [policy])[0]
        assert warm == answer(Engine(make_backend(kind, loaded)), [second], [policy])[0], name


@BACKENDS
def test_reuse_saves_the_forward_of_the_shared_prefix(tiny_llama, kind):
    engine = Engine(make_backend(kind, tiny_llama.load()))
    prompt, full = random_prompt(10, 60), DepthPolicy.full(6)
    answer(engine, [prompt], [full], tokens=2)
    sizes = []
    run = engine.backend.forward
    engine.backend.forward = lambda batch: sizes.append(len(batch.tokens)) or run(batch)
    answer(engine, [[*prompt, 5, 6, 7]], [full], tokens=1)
    assert sizes == [3]


def test_a_new_prompt_leaves_what_other_slots_keep(tiny_llama):
    """A shared beginning alone is no reason to give up another answer's cache while a slot is empty."""
    engine = Engine(make_backend("ggml", tiny_llama.load(), num_slots=3))
    system = random_prompt(60, 12)
    prompts = [[*system, *random_prompt(61 + i, 40)] for i in range(3)]
    for prompt in prompts:
        answer(engine, [prompt], [DepthPolicy.full(6)], tokens=2)
    assert sorted(len(kept) for kept in engine._kept.values()) == [53, 53, 53]
    row = engine.admit(Request([*prompts[1], 7], SamplingParams(), DepthPolicy.full(6)))
    assert row.complete == 52


@BACKENDS
def test_verify_equals_decoding_the_same_tokens(tiny_llama, kind):
    loaded, prompt = tiny_llama.load(), random_prompt(11)
    for policy in policies(6).values():
        decoded = [], []
        engine = Engine(make_backend(kind, loaded))
        run = engine.decode
        engine.decode = lambda rows, run=run, into=decoded[0]: [into.append(x) or x for x in run(rows)]
        tokens = answer(engine, [prompt], [policy], tokens=12)[0]

        engine = Engine(make_backend(kind, loaded))
        row = engine.admit(Request(prompt, SamplingParams(), policy))
        engine.prefill(row)
        row.ids.append(tokens[0])
        np.testing.assert_allclose(engine.verify(row, tokens[1:-1]), np.stack(decoded[0]), atol=2e-4)


def test_gguf_equals_the_folder_it_came_from(tiny, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny)
    prompt, policy = random_prompt(12, 90), policies(5)["middle first"]
    for kind in ("ggml", "torch"):
        from_gguf = answer(Engine(make_backend(kind, load_model(tmp_path / "tiny.gguf"))), [prompt], [policy])
        assert from_gguf[0] == twin(tiny, prompt, policy)


def test_graphs_are_prepared_once_and_bounded(tiny_llama, monkeypatch):
    monkeypatch.setattr("taper.backends.ggml.MAX_GRAPHS", 4)
    backend = make_backend("ggml", tiny_llama.load())
    policy = policies(6)["d3"]
    for seed in range(8):
        prompt = random_prompt(seed, 5 + seed)
        assert answer(Engine(backend), [prompt], [policy])[0] == twin(tiny_llama, prompt, policy)
        assert len(backend._graphs) <= 4


def test_linear_rope_scaling_equals_transformers(tmp_path):
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    tiny = make_tiny(tmp_path, rope_parameters=scaling)
    prompt = random_prompt(13, 80)
    for kind in ("ggml", "torch"):
        assert answer(Engine(make_backend(kind, tiny.load())), [prompt], [DepthPolicy.full(5)])[0] == twin(
            tiny, prompt, None
        )
