"""The default model: equal to transformers in f32, and what its quantisation costs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import transformers_from_gguf
from tiny import DEFAULT_MODEL_FILE, complete

import taper.hf
from taper.backends import TokenBatch
from taper.backends.ggml import GgmlBackend
from taper.engine import Engine
from taper.models import load_model
from taper.models.policies import find_policy
from taper.policy import DepthPolicy

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(not DEFAULT_MODEL_FILE.is_file(), reason="fetch the default model with: taper pull"),
]

POLICIES = (DepthPolicy.full(30), find_policy("fast"))
QUESTION = "Why is the sky blue? Explain it to a child of 7."


@pytest.fixture(scope="module")
def loaded():
    return load_model(DEFAULT_MODEL_FILE)


@pytest.fixture(scope="module")
def prompt(loaded) -> list[int]:
    text = loaded.tokenizer.render([{"role": "user", "content": QUESTION}])
    return loaded.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def transformers_model():
    return transformers_from_gguf(DEFAULT_MODEL_FILE)


@pytest.fixture(scope="module")
def exact(loaded) -> GgmlBackend:
    return GgmlBackend(loaded.config, loaded.tensors, context_length=512, dtype="f32", kv_dtype="f32")


def test_64_tokens_equal_transformers_at_full_depth_and_tapered(exact, prompt, transformers_model):
    full, tapered = (complete(Engine(exact), [prompt], [policy], tokens=64)[0] for policy in POLICIES)
    with torch.no_grad():  # greedy ids are those that one pass over all of them would choose again
        logits = transformers_model(torch.tensor([prompt + full])).logits
    assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == full
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 64, "do_sample": False}
    out = transformers_model.generate(ids, custom_generate=taper.hf.custom_generate(POLICIES[1]), **options)
    assert out[0, len(prompt) :].tolist() == tapered


def test_quantised_kernels_stay_close_to_the_same_weights_in_f32(loaded, exact, prompt):
    """KL(f32 || Q4_1) over 256 tokens of the model's own answers; the floor that every quality figure stands on."""
    quantised = GgmlBackend(loaded.config, loaded.tensors, context_length=512)
    ids = prompt + complete(Engine(quantised), [prompt], [DepthPolicy.full(30)], tokens=256)[0]
    count = len(ids)
    positions, slots = np.arange(count, dtype=np.int32), np.zeros(count, np.int32)
    rows = tuple(range(len(prompt) - 1, count))
    batch = TokenBatch(np.array(ids, np.int32), positions, slots, (count,) * 30, logits_rows=rows)
    p, q = (torch.from_numpy(backend.forward(batch).logits).log_softmax(-1) for backend in (exact, quantised))
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    agreement = (p.argmax(-1) == q.argmax(-1)).float().mean().item()
    print(f"mean KL {kl:.4f}, agreement {agreement:.1%}, {count - len(prompt) + 1} tokens")
    assert kl < 0.005
    assert agreement > 0.9
