"""Each architecture against the reference implementation, on tiny random weights."""

from __future__ import annotations

import pytest
from engines import Ask, prompts, reference_ids, tiny_model, tiny_policies


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_tapered_equals_the_reference_implementation(architecture, engines, tmp_path):
    model = tiny_model(tmp_path, architecture)
    policies = {name: policy for name, policy in tiny_policies().items() if 0 not in policy.skip_order}
    engine = engines(tmp_path, policies, architecture)
    asks = [
        Ask(prompt, 40, {"taper_policy": name})
        for name, prompt in zip(policies, prompts(len(policies), seed=9, vocab_size=300), strict=True)
    ]
    for ask, ids in zip(asks, engine.generate(asks), strict=True):
        assert ids == reference_ids(model, ask, policies[ask.extra_args["taper_policy"]]), ask.extra_args
