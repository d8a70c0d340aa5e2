"""What is rejected before any engine starts, and with what reason."""

from __future__ import annotations

import json

import pytest
from engines import arguments, tiny_policies

from taper import DepthPolicy, vllm_plugin
from taper.errors import ModelError, PolicyError


def configure(folder, **more):
    """vLLM's own configuration of an engine, nothing loaded."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**arguments(folder, tiny_policies()) | more).create_engine_config()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative decoding"),
        ({"enable_lora": True}, "LoRA"),
        ({"enable_dbo": True}, "DBO"),
        ({"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, "DCP"),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "KV connector"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "scheduler class"),
        ({"hf_overrides": {"architectures": ["TaperLlamaForCausalLM"], "sliding_window": 64}}, "sliding-window"),
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
        ({"kv_cache_dtype": "fp8"}, "quantised caches"),
        ({"quantization": "fp8"}, "quantised weights"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_rejected_with_the_reason(tiny_folder, more, reason):
    with pytest.raises(ModelError, match=reason):
        configure(tiny_folder, **more)


def test_a_policy_for_another_model_is_rejected(tiny_folder):
    policy = json.loads(DepthPolicy.early_exit(30, 20).to_json())
    with pytest.raises(PolicyError, match="30, but this model has 6"):
        configure(tiny_folder, additional_config={"taper": {"policy": policy}})


def test_an_engine_that_is_not_eager_becomes_so(tiny_folder):
    config = configure(tiny_folder, enforce_eager=False)
    assert config.model_config.enforce_eager
    assert config.compilation_config.cudagraph_mode.name == "NONE"


def test_registering_again_changes_nothing():
    from vllm import ModelRegistry

    vllm_plugin.register()
    vllm_plugin.register()
    assert set(vllm_plugin.ARCHITECTURES.values()) <= set(ModelRegistry.get_supported_archs())


def test_another_vllm_is_rejected_when_it_is_asked_for_our_models(monkeypatch):
    for version in ("0.31.9", "0.33.0", "1.0.0", "dev"):
        monkeypatch.setattr("vllm.__version__", version)
        with pytest.raises(ModelError, match=r"0\.32\.x"):
            vllm_plugin.check_vllm_version()
        vllm_plugin.register()  # other models must work as usual
