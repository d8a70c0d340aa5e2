"""What a tapered engine is refused for, and what is set up for it, before vLLM starts anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

from ..errors import ModelError
from .metrics import watch
from .options import Options
from .requests import RequestCheck

logger = init_logger("vllm.taper")


def register_checks(architectures: Iterable[str]) -> None:
    """Have vLLM call `TaperConfig` for these architectures; may be called again."""
    for architecture in architectures:
        MODELS_CONFIG_MAP.setdefault(architecture, TaperConfig)


class TaperConfig(VerifyAndUpdateConfig):
    """vLLM calls this once, in the process that makes the engine's configuration."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse what depth decay would not be exact with; read the policies; choose worker and request check.

        Raises:
            ModelError: a feature that is refused is on.
            PolicyError: the policies in `additional_config` are wrong.
        """
        for wrong, what, reason in refusals(vllm_config):
            if wrong:
                raise ModelError(f"Taper cannot run with {what}: {reason}", "docs/vllm.md has the flags")
        model = vllm_config.model_config
        options = read_options(vllm_config)
        vllm_config.additional_config["taper"] = options.to_config() | {
            "metrics": watch(model.hf_text_config.num_hidden_layers)
        }
        if not model.enforce_eager:
            logger.warning("Taper runs layers eagerly: torch.compile and CUDA graphs are off.")
            model.enforce_eager = True
        if not vllm_config.use_v2_model_runner:
            vllm_config.parallel_config.worker_cls = f"{__package__}.runner_v1.Worker"
        RequestCheck.options = options
        model.logits_processors = [*(model.logits_processors or ()), f"{RequestCheck.__module__}:RequestCheck"]
        logger.info("Taper: default policy %s; others: %s", options.default.label, ", ".join(sorted(options.named)))


def read_options(vllm_config: Any) -> Options:
    """The policies of an engine, each checked against its model.

    Raises:
        PolicyError: they are wrong, or for another model.
    """
    config = vllm_config.model_config.hf_text_config
    given = dict(vllm_config.additional_config.get("taper") or {})
    given.pop("metrics", None)
    options = Options.read(given, config.num_hidden_layers)
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    for policy in options.named.values():
        policy.check_model(config.num_hidden_layers, policy.model and replace(policy.model, **sizes))
    return options


def refusals(vllm_config: Any) -> list[tuple[bool, str, str]]:
    """(whether it is on, what, why it is refused) of everything that is refused."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    config = model.hf_text_config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return [
        (
            cache.enable_prefix_caching,
            "prefix caching (--no-enable-prefix-caching turns it off)",
            "it shares blocks by their token ids, and blocks of an answer lack the keys and values of skipped layers",
        ),
        (
            vllm_config.speculative_config is not None,
            "speculative decoding",
            "a rejected draft would have moved the step, and so the depth, of the tokens after it",
        ),
        (
            vllm_config.lora_config is not None,
            "LoRA",
            "its kernels map the whole batch's rows to adapters, and a layer here has only some rows",
        ),
        (parallel.use_ubatching, "dual batch overlap (DBO)", "it splits a batch that is planned as a whole"),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism (DCP, PCP)",
            "it splits a sequence's keys and values over ranks, and rows of a layer are not split that way here",
        ),
        (
            vllm_config.kv_transfer_config is not None,
            "a KV connector",
            "it would hand on blocks that lack the keys and values of skipped layers as if they were whole",
        ),
        (model.quantization is not None, f"{model.quantization} weights", "quantised weights are not tested yet"),
        (
            cache.cache_dtype not in ("auto", "float32", "float16", "bfloat16"),
            f"a {cache.cache_dtype} key-value cache",
            "quantised caches are not tested yet",
        ),
        (
            kinds != {"full_attention"} or bool(window),
            "sliding-window attention",
            "every layer must attend to the whole context",
        ),
        (model.enable_prompt_embeds, "prompt embeddings", "the length of such a prompt is not its tokens'"),
        (model.runner_type != "generate", f"the {model.runner_type} runner", "only generating has steps"),
    ]
