"""A GPU as PyTorch sees it: random weights on it, its bandwidth, its name, and whether it computes what it should.

Every function takes the device, so that the tests run the same lines on a CPU.
"""

from __future__ import annotations

import numpy as np
import torch

from ..backends.torch import TorchBackend
from ..engine import Engine, Request
from ..models.config import ModelConfig, expected_shapes
from ..models.shapes import SPREAD, TINY
from ..policy import DepthPolicy
from ..sampling import SamplingParams
from .measure import median_seconds

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_CHECKED_TOKENS, _CHECKED_PROMPT = 24, 17
_CHECKED_SPREAD = 0.25  # wide enough that attention and positions matter, and that logits have no ties
_LAYERS = TINY.num_hidden_layers
_POLICIES = {
    "full": DepthPolicy.full(_LAYERS),
    "d3": DepthPolicy.middle_first(_LAYERS, 0.97),
    "skipdecode": DepthPolicy.skipdecode(_LAYERS, min_depth=2, span=12, start=2),
    "early exit": DepthPolicy.early_exit(_LAYERS, _LAYERS - 2),
}


def random_weights(config: ModelConfig, dtype: str, device: str, spread: float = SPREAD) -> dict[str, torch.Tensor]:
    """Random weights of a shape, made on the device: normal matrices, norms of ones."""
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in expected_shapes(config).items():
        weights[name] = torch.ones(shape, dtype=DTYPES[dtype], device=device)
        if len(shape) > 1:
            weights[name].normal_(0, spread, generator=generator)
    return weights


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
    """Memory that the device has left; None if that is unknown."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else None


def device_name(device: str) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name() if device == "cuda" else "the CPU"


def synchronize(device: str) -> None:
    """Wait for everything that the device was given to do."""
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
    from ..hf import custom_generate
    from .peers import transformers_model

    weights, prompt = _checked_weights(device), _checked_prompt()
    ids = torch.tensor([prompt], device=device)
    equal = {}
    for name, tokens in _complete(device, graphs=True).items():
        model = transformers_model(TINY, weights, attention="eager")
        rest = {"max_new_tokens": _CHECKED_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        out = model.generate(ids, custom_generate=custom_generate(_POLICIES[name]), **rest)
        equal[name] = out[0, len(prompt) :].tolist() == tokens
    return equal


def _complete(device: str, graphs: bool) -> dict[str, list[int]]:
    weights, completions = _checked_weights(device), {}
    for name, policy in _POLICIES.items():
        backend = TorchBackend(TINY, weights, context_length=64, dtype="f32", device=device, graphs=graphs)
        request = Request(_checked_prompt(), SamplingParams(max_tokens=_CHECKED_TOKENS), policy)
        (completions[name],) = Engine(backend).complete([request])
    return completions


def _checked_weights(device: str) -> dict[str, torch.Tensor]:
    return random_weights(TINY, "f32", device, _CHECKED_SPREAD)


def _checked_prompt() -> list[int]:
    return np.random.default_rng(0).integers(0, TINY.vocab_size, _CHECKED_PROMPT).tolist()  # type: ignore[no-any-return]
