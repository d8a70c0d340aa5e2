"""Which requests reuse which cached blocks: vLLM's own schedulers, where other requests have other block hashes.

vLLM finds cached blocks by a hash of their tokens, of all tokens before them, and of the request's `cache_salt`. A
block is filled if one of its tokens, or one before them, skipped layers when it was computed; any other is exact.

- Requests that run every layer keep vLLM's hashes, and all of their blocks are exact.
- Tapered requests that fill share a salt, so only they reuse the blocks of each other.
- Tapered requests with exact reuse keep vLLM's hashes for their prompts. Later blocks get a hash that no other has.
"""

from __future__ import annotations

import secrets
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from .options import FULL, PluginOptions

logger = init_logger("vllm.taper")


def make_scheduler(*, vllm_config: Any, **arguments: Any) -> Any:
    """The scheduler that vLLM would make, with `SeparateReuse` mixed in."""
    scheduler_class = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    mixed = type(f"Taper{scheduler_class.__name__}", (SeparateReuse, scheduler_class), {})
    return mixed(vllm_config=vllm_config, **arguments)


class SeparateReuse:
    """Mixed into a scheduler: gives each request the block hashes that it may share."""

    def __init__(self, *, vllm_config: Any, **arguments: Any) -> None:
        super().__init__(vllm_config=vllm_config, **arguments)  # type: ignore[call-arg]
        config = vllm_config.additional_config["taper"]
        self._taper_options = PluginOptions.read(config, vllm_config.model_config.hf_text_config)
        # Random and of a fixed length, so that no client can name it, and users' own salts remain apart.
        self._filled_salt = secrets.token_hex(16)

    def add_request(self, request: Any) -> None:
        """As usual, after the request has its hashes."""
        if request.resumable:
            _run_every_layer(request)
        sampling_params = request.sampling_params
        options = self._taper_options.admitted(sampling_params and sampling_params.extra_args)
        if request._block_hasher is not None and options.tapers:
            if options.fills:
                request.cache_salt = self._filled_salt + (request.cache_salt or "")
                request.block_hashes.clear()
                request.update_block_hashes()
            else:
                hash_blocks = request._block_hasher
                # New hashes each time, so that only this request has the blocks after its prompt.
                request._block_hasher = lambda request: [secrets.token_bytes(32) for _ in hash_blocks(request)]
        super().add_request(request)  # type: ignore[misc]


def _run_every_layer(request: Any) -> None:
    """Make a request run at full depth: streamed input makes its completion part of the prompt, which moves steps."""
    if request.sampling_params is not None:
        logger.error("Request %s runs at full depth, because its input is streamed", request.request_id)
        request.sampling_params = request.sampling_params.clone()
        extra_args = request.sampling_params.extra_args or {}
        kept = {key: value for key, value in extra_args.items() if not key.startswith("taper_")}
        request.sampling_params.extra_args = kept | {"taper_policy": FULL}
