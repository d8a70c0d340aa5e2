"""Adapters: the same tokens in every engine, none of the model's own where they are zero, and files that hold them."""

from __future__ import annotations

import pytest
from tiny import BACKENDS, complete, make_backend, policies, random_prompt, reference_ids, with_adapters

from taper.engine import Engine
from taper.policy import DepthPolicy


def healed(layers: int, hidden_size: int, **options) -> dict[str, DepthPolicy]:
    return {name: with_adapters(policy, hidden_size, **options) for name, policy in policies(layers).items()}


@BACKENDS
def test_adapters_equal_the_reference_implementation(tiny, kind):
    loaded, prompt = tiny.load(), random_prompt(3)
    layers, hidden_size = loaded.config.num_hidden_layers, loaded.config.hidden_size
    plain = policies(layers)
    for name, policy in healed(layers, hidden_size).items():
        tapered = complete(Engine(make_backend(kind, loaded)), [prompt], [policy])[0]
        assert tapered == reference_ids(tiny, prompt, policy), name
        assert tapered != reference_ids(tiny, prompt, plain[name]), f"the adapters of {name} change nothing"


@BACKENDS
def test_adapters_of_zeros_change_nothing(tiny_llama, kind):
    loaded, prompt, plain = tiny_llama.load(), random_prompt(4), policies(6)
    for name, policy in healed(6, loaded.config.hidden_size, scale=0.0).items():
        both = [complete(Engine(make_backend(kind, loaded)), [prompt], [one])[0] for one in (policy, plain[name])]
        assert both[0] == both[1], name


@BACKENDS
def test_rows_keep_their_own_adapters(tiny_llama, kind):
    """Rows with the same order and other adapters, with none, and at full depth, together and alone."""
    loaded = tiny_llama.load()
    size = loaded.config.hidden_size
    plain = policies(6)["d3"]
    chosen = [with_adapters(plain, size), with_adapters(plain, size, rank=64), plain, DepthPolicy.full(6)]
    chosen += healed(6, size).values()
    prompts = [random_prompt(seed, 5 + 7 * seed) for seed in range(len(chosen))]
    together = complete(Engine(make_backend(kind, loaded, num_slots=4)), prompts, chosen)
    for prompt, policy, got in zip(prompts, chosen, together, strict=True):
        assert got == complete(Engine(make_backend(kind, loaded)), [prompt], [policy])[0]
