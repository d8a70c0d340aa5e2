"""In f32, stock vLLM, the plug-in and the reference implementation give the same ids."""

from __future__ import annotations

import pytest
from engines import Request, reference_ids, requests, tiny_model, tiny_policies

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
        "skipdecode": DepthPolicy.skipdecode(LAYERS, 20, span=20, warmup_layers=2),
        "static": DepthPolicy.static(LAYERS, 20, shipped["fast"].skip_order[:10]),
        "late": DepthPolicy.d3(LAYERS, 0.97, start=10, skip_order=middle_first_order(LAYERS)),
    }


@pytest.fixture(scope="module")
def stock(engines, default_folder):
    """12 requests, and the ids that stock vLLM gives for them."""
    batch = requests([None], 12, seed=1, max_tokens=40, vocab_size=VOCAB_SIZE)
    return batch, engines(default_folder).generate(batch)


@pytest.fixture(scope="module")
def tapered(engines, default_folder, stock):
    return engines(default_folder, policies())


def test_alpha_one_is_stock_vllm_id_for_id(stock, tapered):
    batch, expected = stock
    assert tapered.generate(batch) == expected
    extra_args = {"taper_policy": "d3", "taper_alpha": 1}
    assert tapered.generate([Request(request.prompt, 40, extra_args) for request in batch]) == expected


def test_mixed_policies_in_one_batch_equal_each_alone_and_the_reference_implementation(tapered, default_model):
    table = policies() | {"full": DepthPolicy.full(LAYERS)}
    batch = requests(table, len(table), seed=2, max_tokens=24, vocab_size=VOCAB_SIZE)  # beyond skipdecode's span
    together = tapered.generate(batch)
    assert tapered.alone(batch[::3]) == together[::3]  # the reference computes each alone too
    for request, ids in zip(batch, together, strict=True):
        policy = table[request.extra_args["taper_policy"]]
        assert reference_ids(default_model, request, policy) == ids, request.extra_args


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_each_architecture_equals_the_reference_implementation(architecture, engines, tmp_path):
    model = tiny_model(tmp_path, architecture)
    policies = {name: policy for name, policy in tiny_policies().items() if 0 not in policy.skip_order}
    batch = requests(policies, len(policies), seed=9, max_tokens=40)
    ids = engines(tmp_path, policies, architecture).generate(batch)
    for request, policy, completion in zip(batch, policies.values(), ids, strict=True):
        assert completion == reference_ids(model, request, policy), policy.label
