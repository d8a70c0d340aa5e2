"""The default model in f32: stock vLLM, the plug-in, and the reference implementation give the same ids."""

from __future__ import annotations

import pytest
from engines import Ask, prompts, reference_ids

from taper import DepthPolicy
from taper.models.policies import shipped_policies
from taper.policy import middle_first_order

VOCAB_SIZE = 49152
LAYERS = 30


def policies() -> dict[str, DepthPolicy]:
    shipped = {policy.name: policy for policy in shipped_policies()["smollm2-135m-instruct"]}
    return shipped | {
        "d3": DepthPolicy.middle_first(LAYERS, 0.99),
        "early": DepthPolicy.early_exit(LAYERS, 24),
        "skipdecode": DepthPolicy.skipdecode(LAYERS, 20, span=40, warmup_layers=2),
        "static": DepthPolicy.static(LAYERS, 20, shipped["fast"].skip_order[:10]),
        "late": DepthPolicy.d3(LAYERS, 0.97, start=20, skip_order=middle_first_order(LAYERS)),
    }


@pytest.fixture(scope="module")
def stock(engines, default_folder):
    """Stock vLLM's ids for 32 prompts, and then no engine any more."""
    asks = [Ask(prompt) for prompt in prompts(32, seed=1, vocab_size=VOCAB_SIZE)]
    engine = engines(default_folder)
    return asks, engine.generate(asks)


@pytest.fixture(scope="module")
def tapered(engines, default_folder, stock):
    return engines(default_folder, policies())


def test_alpha_one_is_stock_vllm_id_for_id(stock, tapered):
    asks, expected = stock
    assert tapered.generate(asks) == expected
    with_alpha = [Ask(ask.prompt, ask.max_tokens, {"taper_policy": "d3", "taper_alpha": 1}) for ask in asks]
    assert tapered.generate(with_alpha) == expected


def test_mixed_policies_in_one_batch_equal_each_alone_and_the_reference_implementation(tapered, default_model):
    table = policies()
    names = [*table, "full"]
    asks = [
        Ask(prompt, extra_args={"taper_policy": names[number % len(names)]})
        for number, prompt in enumerate(prompts(16, seed=2, vocab_size=VOCAB_SIZE))
    ]
    together = tapered.generate(asks)
    assert tapered.alone(asks) == together
    for ask, ids in zip(asks, together, strict=True):
        policy = table.get(ask.extra_args["taper_policy"], DepthPolicy.full(LAYERS))
        assert reference_ids(default_model, ask, policy) == ids, ask.extra_args
