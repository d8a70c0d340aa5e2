"""Checks the configuration of a tapered engine and completes it, before vLLM starts anything."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from ..errors import ModelError, TaperError, limited_attention
from .metrics import watch
from .options import PluginOptions

logger = init_logger("vllm.taper")


class TaperConfig(VerifyAndUpdateConfig):
    """vLLM calls this once, in the process that makes the configuration of the engine."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Reject features with which depth decay would not be exact; set policies, worker, scheduler, request check.

        Raises:
            ModelError: a rejected feature is on.
            PolicyError: the policies in `additional_config` are wrong.
        """
        for is_on, feature, reason in rejected_features(vllm_config):
            if is_on:
                raise ModelError(f"Taper cannot run with {feature}: {reason}", "docs/vllm.md shows the flags")
        model, config = vllm_config.model_config, vllm_config.additional_config
        options = PluginOptions.read(config.get("taper"), model.hf_text_config)
        config |= {"taper": options.to_config(), "taper_metrics": watch(model.hf_text_config.num_hidden_layers)}
        if not model.enforce_eager:
            logger.warning("Taper runs layers eagerly, so it turns torch.compile and CUDA graphs off.")
            model.enforce_eager = True
        if not vllm_config.use_v2_model_runner:
            vllm_config.parallel_config.worker_cls = f"{__package__}.runner.Worker"
        vllm_config.scheduler_config.scheduler_cls = f"{__package__}.scheduler.make_scheduler"
        RequestCheck.options = options
        model.logits_processors = [*(model.logits_processors or ()), f"{RequestCheck.__module__}:RequestCheck"]
        names = ", ".join(sorted(options.named))
        logger.info("Taper: the default policy is %s; requests may name %s", options.default.label, names)


def rejected_features(vllm_config: Any) -> list[tuple[bool, str, str]]:
    """For each feature that is rejected: whether it is on, its name and the reason."""
    config, model, cache = vllm_config, vllm_config.model_config, vllm_config.cache_config
    parallel, attention = config.parallel_config, limited_attention(model.hf_text_config)
    splits_context = parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
    quantises_cache = cache.cache_dtype not in ("auto", "float32", "float16", "bfloat16")
    return [
        (config.speculative_config is not None, "speculative decoding", "rejected drafts would move later steps"),
        (config.lora_config is not None, "LoRA", "its kernels expect the whole batch, but a layer runs only some rows"),
        (parallel.use_ubatching, "dual batch overlap (DBO)", "it splits a batch, which has to be planned as a whole"),
        (splits_context, "context parallelism (DCP, PCP)", "it splits the keys and values of a sequence over ranks"),
        (config.kv_transfer_config is not None, "a KV connector", "it may find filled blocks by their token ids alone"),
        (config.scheduler_config.scheduler_cls is not None, "a scheduler class of your own", "Taper sets its own"),
        (model.quantization is not None, f"{model.quantization} weights", "quantised weights are not tested yet"),
        (quantises_cache, f"a {cache.cache_dtype} key-value cache", "quantised caches are not tested yet"),
        (bool(attention), f"{attention} attention", "every layer must attend to the whole context"),
        (model.enable_prompt_embeds, "prompt embeddings", "steps are counted from the number of prompt tokens"),
        (model.runner_type != "generate", f"the {model.runner_type} runner", "only generation has steps"),
    ]


class RequestCheck(LogitsProcessor, LogitsProcessorV2):
    """Checks `extra_args` against the options of the engine that this process made last."""

    # vLLM gives `validate_params` nothing but the request, so the options have to be kept on the class.
    options: ClassVar[PluginOptions | None] = None

    def __init__(self, *_: Any, **__: Any) -> None:
        """Both runners pass arguments; none is needed."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Reject a request whose options are wrong; called once, before the request is admitted."""
        if cls.options is None:
            return
        try:
            cls.options.request(sampling_params.extra_args)
        except TaperError as error:
            raise VLLMValidationError(str(error)) from None

    def is_argmax_invariant(self) -> bool:
        """True: greedy decoding may skip this processor."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """There is no state."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """False: no request needs this processor."""
        return False

    def apply(self, logits: Any, *_: Any) -> Any:
        """The logits, unchanged."""
        return logits
