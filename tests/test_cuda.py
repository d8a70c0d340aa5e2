"""What only a GPU can show: captured graphs equal eager steps. The CPU counterparts of all else are in test_parity."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_quantisation import CONFIG, random_model
from test_replay import expected, references
from tiny import CONTEXT, FAMILIES, PLAIN, complete, make_tiny, one_slot, policies, random_prompt, reference_ids

from taper.backends import TokenBatch
from taper.backends.torch import TorchBackend
from taper.engine import Engine
from taper.lab.calibration.replay import TOP, Replay
from taper.policy import DepthPolicy, active_prefixes, middle_first_order

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]


def make(loaded, num_slots=1, dtype="f32"):
    return TorchBackend(
        loaded.config, loaded.tensors, num_slots=num_slots, context_length=CONTEXT, dtype=dtype, device="cuda"
    )


def test_captured_steps_equal_the_reference_implementation(tiny):
    loaded, prompt = tiny.load(), random_prompt(40)
    for name, policy in policies(loaded.config.num_hidden_layers).items():
        backend = make(loaded)
        assert complete(Engine(backend), [prompt], [policy])[0] == reference_ids(tiny, prompt, policy), name
        assert backend._fused is not None
        assert len(backend._graphs) == len({policy.depth(step) for step in range(1, 40)})


@pytest.mark.parametrize("family", ["gemma3", "smollm3", "qwen3moe, not normalised", "granitemoe"])
def test_captured_steps_of_windows_and_experts_equal_the_reference_implementation(tmp_path, family):
    architecture, options = FAMILIES[family]
    tiny, prompt = make_tiny(tmp_path, architecture, **options), random_prompt(42)
    loaded = tiny.load()
    for name, policy in policies(loaded.config.num_hidden_layers).items():
        assert complete(Engine(make(loaded)), [prompt], [policy])[0] == reference_ids(tiny, prompt, policy), name


@pytest.mark.parametrize("num_slots", [3, 40])
def test_batches_of_captured_and_eager_steps_equal_each_alone(tiny_llama, num_slots):
    loaded, chosen = tiny_llama.load(), list(policies(6).values()) * (1 + num_slots // 6)
    prompts = [random_prompt(seed, 5 + 7 * seed) for seed in range(len(chosen))]
    together = complete(Engine(make(loaded, num_slots=num_slots)), prompts, chosen)
    for prompt, policy, found in zip(prompts, chosen, together, strict=True):
        assert found == complete(Engine(make(loaded)), [prompt], [policy])[0]


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral with a window", "phi3 with longrope", "granite"]
)
@pytest.mark.parametrize("count", [2, 5, 9, 33, 64])
def test_rows_at_mixed_depths_equal_eager_steps(tmp_path, family, count):
    architecture, options = (PLAIN | FAMILIES)[family]
    loaded = make_tiny(tmp_path, architecture, **options).load()
    backends = make(loaded, count), make(loaded, count)
    backends[0]._cache.normal_()
    backends[1]._cache.copy_(backends[0]._cache)
    backends[1]._use_graphs, layers = False, loaded.config.num_hidden_layers
    for step in range(8):
        rng = np.random.default_rng(step)
        depths = -np.sort(-rng.integers(2, layers + 1, count))
        batch = TokenBatch(
            rng.integers(3, 300, count).astype(np.int32),
            np.arange(count, dtype=np.int32) * (CONTEXT - 9) // count + step,
            np.arange(count, dtype=np.int32),
            active_prefixes(middle_first_order(layers), layers, depths.tolist()),
            tuple(range(count)),
            fill=True,
        )
        found, expected = (backend.forward(batch).logits for backend in backends)
        np.testing.assert_allclose(found, expected, atol=2e-3)
    for cells, expected in zip(*(backend._cache for backend in backends), strict=True):
        torch.testing.assert_close(cells, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("count", [2, 9, 17])
def test_tokens_verified_together_equal_eager_steps(tiny, count):
    loaded, prompt = tiny.load(), random_prompt(44, 60 + count)
    backends = make(loaded), make(loaded)
    backends[1]._use_graphs = False
    for backend in backends:
        backend.forward(one_slot(backend, prompt[:60], ()))
    batch = one_slot(backend, prompt[60:], tuple(range(count)), start=60)
    np.testing.assert_allclose(*(backend.forward(batch).logits for backend in backends), atol=2e-3)
    assert len(backends[0]._graphs) == 1


def test_replay_equals_captured_steps(tiny):
    loaded = tiny.load()
    replay = Replay(Engine(make(loaded)), references())
    for policy in policies(loaded.config.num_hidden_layers).values():
        scores = replay.score(policy)
        for index, reference in enumerate(references()):
            kl, _, nll, _ = expected(Engine(make(loaded)), reference, policy, TOP)
            found = scores.where(scores.reference == index)
            np.testing.assert_allclose(found.kl, kl, atol=2e-3)
            np.testing.assert_allclose(found.nll, nll, atol=2e-3)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_half_precision_stays_close(tiny_llama, dtype):
    loaded, prompt = tiny_llama.load(), random_prompt(41, 60)
    every = tuple(range(60))
    backends = make(loaded), make(loaded, dtype=dtype)
    exact, half = (backend.forward(one_slot(backend, prompt, every)).logits.ravel() for backend in backends)
    assert np.corrcoef(exact, half)[0, 1] > 0.99


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_quantised_matrices_that_keep_their_bits_give_the_logits_of_dequantised_ones(dtype):
    tensors = random_model(CONFIG, dtype)
    options = {"num_slots": 2, "context_length": 64, "dtype": "f32", "device": "cuda"}
    dense, kept = (TorchBackend(CONFIG, tensors, keep_bits=keeps, **options) for keeps in (False, True))
    assert kept._packed
    prompt = [token % CONFIG.vocab_size for token in random_prompt(43)]
    half = DepthPolicy.static(CONFIG.num_hidden_layers, 1, [1])
    for batch in ([prompt], [prompt, prompt[:7]]):
        chosen = [half, DepthPolicy.full(CONFIG.num_hidden_layers)][: len(batch)]
        assert complete(Engine(kept), batch, chosen) == complete(Engine(dense), batch, chosen)
    for count in (1, 3):
        batch = one_slot(kept, prompt[:count], tuple(range(count)), start=30)
        np.testing.assert_allclose(*(backend.forward(batch).logits for backend in (kept, dense)), atol=1e-3)
