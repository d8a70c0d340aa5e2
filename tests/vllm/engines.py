"""vLLM for tests: requests of token ids in, ids out, alone or together; tiny models and their policies."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny import with_adapters

from taper import DepthPolicy
from taper.models.policies import save_policy

LAYERS = 6
BLOCK_SIZE = 32


@dataclass
class Request:
    """Greedy, exactly `max_tokens` long."""

    prompt: list[int]
    max_tokens: int = 64
    extra_args: dict[str, Any] | None = None
    cache_salt: str | None = None

    def sampling_params(self) -> Any:
        """Its options, in vLLM's form."""
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0, max_tokens=self.max_tokens, ignore_eos=True, detokenize=False, extra_args=self.extra_args
        )


def requests(
    policies: Iterable[str | None],
    count: int,
    seed: int,
    max_tokens: int = 64,
    vocab_size: int = 300,
    shortest: int = 3,
    longest: int = 60,
) -> list[Request]:
    """Requests with random prompts, under these policies in turn; None is a request that names no policy."""
    chance = random.Random(seed)
    prompts = ([chance.randrange(vocab_size) for _ in range(chance.randint(shortest, longest))] for _ in range(count))
    named = zip(prompts, cycle(policies), strict=False)
    return [Request(prompt, max_tokens, None if name is None else {"taper_policy": name}) for prompt, name in named]


class Engine:
    """A vLLM engine; with `policies` it is tapered, without it is stock."""

    def __init__(
        self, folder: Path, policies: dict[str, DepthPolicy] | None = None, architecture: str = "Llama", **options: Any
    ) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments(folder, policies, architecture) | options)

    def generate(self, requests: list[Request]) -> list[list[int]]:
        """Ids of the completions, with all requests admitted at once."""
        return [ids for ids, _ in self.generate_counted(requests)]

    def generate_counted(self, requests: list[Request]) -> list[tuple[list[int], int]]:
        """The same, each with the number of prompt tokens whose keys and values were reused."""
        from vllm import TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=request.prompt) for request in requests]
        for prompt, request in zip(prompts, requests, strict=True):
            if request.cache_salt is not None:
                prompt["cache_salt"] = request.cache_salt
        outputs = self.llm.generate(prompts, [request.sampling_params() for request in requests], use_tqdm=False)
        return [(list(output.outputs[0].token_ids), output.num_cached_tokens) for output in outputs]

    def generate_aborting(self, requests: list[Request], abort_at: dict[int, int]) -> list[list[int]]:
        """Ids of the completions; those of the requests in `abort_at` end once they have so many."""
        vllm = self.llm.llm_engine
        completions: list[list[int]] = [[] for _ in requests]
        for number, request in enumerate(requests):
            vllm.add_request(str(number), {"prompt_token_ids": request.prompt}, request.sampling_params())
        while vllm.has_unfinished_requests():
            for output in vllm.step():
                number = int(output.request_id)
                completions[number] = list(output.outputs[0].token_ids)
                if number in abort_at and len(completions[number]) >= abort_at[number] and not output.finished:
                    vllm.abort_request([output.request_id])
        return completions

    def alone(self, requests: list[Request]) -> list[list[int]]:
        """Ids of the completions, one request after the other."""
        return [self.generate([request])[0] for request in requests]

    @property
    def scheduler(self) -> Any:
        """vLLM's own scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def free_blocks(self) -> int:
        """Blocks of the key-value cache that no request holds."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def close(self) -> None:
        """End the engine, so that the next one of this process finds vLLM as new."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()


def arguments(folder: Path, policies: dict[str, DepthPolicy] | None, architecture: str = "Llama") -> dict[str, Any]:
    """An engine's arguments, stock or tapered."""
    stock = {
        "model": str(folder),
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "block_size": BLOCK_SIZE,
        "seed": 0,
    }
    if policies is None:
        return stock
    named: dict[str, Any] = {}
    for name, policy in policies.items():
        if policy.adapters is None:
            named[name] = json.loads(policy.to_json())
        else:
            file = policy.adapters.file or f"{folder}-{name}.safetensors"
            if not policy.adapters.file:
                save_policy(Path(file), policy)
            named[name] = json.loads(policy.without_adapters().to_json()) | {"adapters": file}
    return stock | {
        "hf_overrides": {"architectures": [f"Taper{architecture}ForCausalLM"]},
        "additional_config": {"taper": {"policies": named}},
    }


def reference_ids(model: Any, request: Request, policy: DepthPolicy) -> list[int]:
    """Ids of a completion by the reference implementation."""
    from taper.hf import custom_generate

    ids = torch.tensor([request.prompt])
    length = {"max_new_tokens": request.max_tokens, "min_new_tokens": request.max_tokens}
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False}
    output = model.generate(ids, custom_generate=custom_generate(policy), **length, **options)
    return output[0, len(request.prompt) :].tolist()


def tiny_model(folder: Path, architecture: str) -> Any:
    """Build, randomise and save a tiny model with heads of 32, the smallest that vLLM's CPU attention has."""
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **({"sliding_window": None} if architecture == "Mistral" else {}),
    )
    torch.manual_seed(len(architecture))
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Wide enough that attention and position matter, and that logits have no ties.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.18)
    model.save_pretrained(folder)
    return model


def tiny_policies() -> dict[str, DepthPolicy]:
    """Policies of every kind for a tiny model, layer 0 and the last one skipped by some."""
    return {
        "healed": with_adapters(DepthPolicy.d3(LAYERS, 0.95, skip_order=[3, 2, 4, 1]), 128),
        "healed early": with_adapters(DepthPolicy.static(LAYERS, 3, [5, 0, 2]), 128),
        "d3": DepthPolicy.d3(LAYERS, 0.98, skip_order=[3, 2, 4, 1]),
        "early": DepthPolicy.early_exit(LAYERS, 3),
        "skipdecode": DepthPolicy.skipdecode(LAYERS, 2, span=20),
        "static": DepthPolicy.static(LAYERS, 4, [1, 4]),
        "headless": DepthPolicy.static(LAYERS, 3, [0, 5, 2]),
        "late": DepthPolicy.d3(LAYERS, 0.9, start=12, skip_order=[5, 0, 1, 2]),
    }
