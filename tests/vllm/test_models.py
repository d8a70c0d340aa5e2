"""Each architecture against the reference implementation, on tiny random weights."""

from __future__ import annotations

import pytest
from engines import reference_ids, requests, tiny_model, tiny_policies


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_tapered_equals_the_reference_implementation(architecture, engines, tmp_path):
    model = tiny_model(tmp_path, architecture)
    policies = {name: policy for name, policy in tiny_policies().items() if 0 not in policy.skip_order}
    batch = requests(policies, len(policies), seed=9, max_tokens=40)
    ids = engines(tmp_path, policies, architecture).generate(batch)
    for request, policy, completion in zip(batch, policies.values(), ids, strict=True):
        assert completion == reference_ids(model, request, policy), policy.label
