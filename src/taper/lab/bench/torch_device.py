"""A GPU in PyTorch: random weights on it, its bandwidth and name, and whether it computes the right tokens.

Every function takes the device, so that the tests run the same lines on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...backends.torch import DTYPES, TorchBackend
from ...engine import Engine, Request
from ...models.config import ModelConfig, expected_shapes
from ...models.families import MODEL_TYPES
from ...policy import DepthPolicy
from ...sampling import SamplingParams
from .measure import median_seconds
from .shapes import TINY

_SPREAD = 0.02  # standard deviation of random matrices, as models are initialised
_CHECKED_TOKENS = 24
_CHECKED_PROMPT: list[int] = np.random.default_rng(0).integers(0, TINY.vocab_size, 17).tolist()
_CHECKED_SPREAD = 0.25  # wide enough that attention and positions matter, and that logits have no ties
_LAYERS = TINY.num_hidden_layers
_POLICIES = {
    "full": DepthPolicy.full(_LAYERS),
    "d3": DepthPolicy.middle_first(_LAYERS, 0.97),
    "skipdecode": DepthPolicy.skipdecode(_LAYERS, min_depth=2, span=12, start=2),
    "early exit": DepthPolicy.early_exit(_LAYERS, _LAYERS - 2),
}


def random_weights(config: ModelConfig, dtype: str, device: str, spread: float = _SPREAD) -> dict[str, torch.Tensor]:
    """Random weights of a shape, made on the device: normal matrices, norms of ones."""
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in expected_shapes(config).items():
        weights[name] = torch.ones(shape, dtype=DTYPES[dtype], device=device)
        if len(shape) > 1:
            weights[name].normal_(0, spread, generator=generator)
    return weights


def transformers_model(config: ModelConfig, weights: Mapping[str, torch.Tensor], attention: str = "sdpa") -> Any:
    """A model of one of our shapes in transformers, which shares the weights; it never ends an output by itself.

    Raises:
        ImportError: transformers, or what it needs, is not installed.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    facts = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"]
    facts += ["num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"]
    embeddings = weights["embed_tokens"]
    theirs = LlamaConfig(
        **{name: getattr(config, name) for name in facts},
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        attn_implementation=attention,
        dtype=embeddings.dtype,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(theirs)
    names = MODEL_TYPES[config.architecture].folder_names
    model.load_state_dict({names.theirs(name): weight for name, weight in weights.items()}, assign=True)
    # Buffers are not in the state: a model built on "meta" has no rotary frequencies yet.
    model.model.rotary_emb = type(model.model.rotary_emb)(theirs).to(embeddings.device)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def copy_bandwidth(device: str) -> float:
    """Bytes per second that a copy on the device reads and writes together."""
    num_bytes = min(1 << 32, torch.cuda.mem_get_info()[0] // 4) if device == "cuda" else 1 << 24
    source = torch.ones(num_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        synchronize(device)

    return float(2 * source.nbytes / median_seconds(copy))


def free_bytes(device: str) -> int | None:
    """Bytes of memory that the device has left; None if that is unknown."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else None


def device_name(device: str) -> str:
    """The name of the device."""
    return torch.cuda.get_device_name() if device == "cuda" else "the CPU"


def synchronize(device: str) -> None:
    """Wait until the device has done all its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def check_graphs(device: str) -> dict[str, bool]:
    """Whether captured graphs give the tokens of eager steps, by policy, on a tiny random model in f32."""
    captured, eager = (_complete(device, graphs) for graphs in (True, False))
    return {name: captured[name] == eager[name] for name in captured}


def check_reference(device: str) -> dict[str, bool]:
    """Whether captured graphs give the tokens of the reference implementation, by policy, on the same model.

    Raises:
        ImportError: transformers, or what it needs, is not installed.
    """
    from ...hf import custom_generate

    weights, ids = random_weights(TINY, "f32", device, _CHECKED_SPREAD), torch.tensor([_CHECKED_PROMPT], device=device)
    equal = {}
    for name, tokens in _complete(device, graphs=True).items():
        model = transformers_model(TINY, weights, attention="eager")
        rest = {"max_new_tokens": _CHECKED_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        out = model.generate(ids, custom_generate=custom_generate(_POLICIES[name]), **rest)
        equal[name] = out[0, len(_CHECKED_PROMPT) :].tolist() == tokens
    return equal


def _complete(device: str, graphs: bool) -> dict[str, list[int]]:
    weights, completions = random_weights(TINY, "f32", device, _CHECKED_SPREAD), {}
    for name, policy in _POLICIES.items():
        backend = TorchBackend(TINY, weights, context_length=64, dtype="f32", device=device, graphs=graphs)
        request = Request(_CHECKED_PROMPT, SamplingParams(max_tokens=_CHECKED_TOKENS), policy)
        (completions[name],) = Engine(backend).complete([request])
    return completions
