"""Every family of models equals transformers, token for token in f32, from a folder and from a GGUF file."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from tiny import BACKENDS, complete, make_backend, make_tiny, policies, random_prompt, write_gguf

import taper.hf
from taper.engine import Engine
from taper.loading import load_model
from taper.policy import DepthPolicy

TOKENS = 64
PROMPTS = [random_prompt(100 + seed, 23) for seed in range(8)]
CHOSEN = ("d3 late", "skipdecode", "static")
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.9, 2.5],
    "long_factor": [1.0, 1.5, 3.0, 5.0, 9.0, 17.0],
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SCALES = {
    "attention_multiplier": 0.4,
    "embedding_multiplier": 3.0,
    "logits_scaling": 5.0,
    "residual_multiplier": 0.6,
}
GEMMA = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# Windows are shorter than the prompts. What GGUF files cannot say is tested from folders alone.
FAMILIES = {
    "mistral with a window": ("mistral", {"sliding_window": 16}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen2 with yarn": ("qwen2", {"rope_parameters": YARN}),
    "phi3": ("phi3", {"tied": False}),
    "phi3 with a window": ("phi3", {"sliding_window": 16}),
    "phi3 with longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 90}),
    "smollm3": ("smollm3", {}),
    "olmo2": ("olmo2", {"tied": False}),
    "granite": ("granite", SCALES),
    "gemma3": ("gemma3", {"layers": 7, "sliding_window": 16, "query_pre_attn_scalar": 16, "rope_parameters": GEMMA}),
}
NOT_IN_GGUF = ("mistral with a window", "qwen2 with windows")
CONTEXTS = {"phi3 with longrope": 90}  # one token more would choose the other table of factors


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> SimpleNamespace:
    """A tiny model, and what transformers makes of the prompts under a policy."""
    architecture, options = FAMILIES[request.param]
    tiny = make_tiny(tmp_path_factory.mktemp("family"), architecture, **options)
    layers = tiny.hf.config.num_hidden_layers
    chosen = {"full": DepthPolicy.full(layers), **{name: policies(layers)[name] for name in CHOSEN}}

    @cache
    def expected(policy: DepthPolicy) -> list[list[int]]:
        ids = torch.tensor(PROMPTS)
        out = tiny.hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            custom_generate=taper.hf.decode(policy),
        )
        return out[:, ids.shape[1] :].tolist()

    context_length = CONTEXTS.get(request.param, 512)
    return SimpleNamespace(
        name=request.param, tiny=tiny, policies=chosen, expected=expected, context_length=context_length
    )


def completed(family, kind, loaded, policy, prompts=PROMPTS, num_slots=8):
    backend = make_backend(kind, loaded, num_slots=num_slots, context_length=family.context_length)
    return complete(Engine(backend), prompts, [policy] * len(prompts), TOKENS)


@BACKENDS
def test_every_policy_equals_transformers(family, kind):
    loaded = family.tiny.load()
    answers = {name: completed(family, kind, loaded, policy) for name, policy in family.policies.items()}
    for name, policy in family.policies.items():
        assert answers[name] == family.expected(policy), name
        assert name == "full" or answers[name] != answers["full"], f"{name} changes nothing, so this proves nothing"


@BACKENDS
def test_gguf_equals_transformers(family, kind, tmp_path):
    if family.name in NOT_IN_GGUF:
        pytest.skip("GGUF files of this architecture have no windows")
    write_gguf(tmp_path / "tiny.gguf", family.tiny)
    loaded = load_model(tmp_path / "tiny.gguf")
    for name in ("full", "d3 late"):
        policy = family.policies[name]
        assert completed(family, kind, loaded, policy) == family.expected(policy)


@BACKENDS
def test_prompts_alone_and_a_second_turn_equal_a_batch_from_a_cold_start(family, kind):
    loaded, policy = family.tiny.load(), family.policies["d3 late"]
    together = completed(family, kind, loaded, policy)
    backend = make_backend(kind, loaded, context_length=family.context_length)
    warm = Engine(backend)
    said = complete(warm, PROMPTS[:1], [policy], 20)[0]
    assert said == together[0][:20]
    second = [*PROMPTS[0], *said, *random_prompt(9, 5)]
    cold = Engine(make_backend(kind, loaded, context_length=family.context_length))
    assert complete(warm, [second], [policy], 20) == complete(cold, [second], [policy], 20)
