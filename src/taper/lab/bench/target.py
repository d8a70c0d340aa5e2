"""What a benchmark is asked to measure, and the model it measures: from files, or random weights of a known shape.

The speed of a model does not depend on the values of its weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...backends import Backend, available_memory, available_threads, choose_device, open_backend, runs_on_torch
from ...errors import HEADS, REPACK, RequestError, number, one_of, whole_number
from ...models import load_model
from ...models.config import ModelConfig, expected_shapes
from ...models.download import DEFAULT_MODEL
from ...models.fetch import find_or_fetch
from ...models.policies import FULL, fitting_policies, resolve_policy
from ...models.tensors import LoadedModel, Tensor, row_bytes
from ...policy import DepthPolicy
from .shapes import SHAPES

LENGTHS = (128, 512, 2048)
RANDOM_DTYPE = "Q4_0"  # of random weights on a CPU
_SCALE = 0.02 / 4.6  # of its blocks; four-bit values have a standard deviation of 4.6
_ALPHA, _MIN_DEPTH = 0.998, 5 / 8  # of D3 by default: about the mean depth of the paper's 7B at 512 tokens


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, and where to write it: the options of `taper bench`.

    Raises:
        RequestError: an option is out of range, or options contradict each other.
    """

    model: str | None = None
    shape: str | None = None
    policies: tuple[str, ...] = ()
    lengths: tuple[int, ...] = LENGTHS
    prompts: tuple[int, ...] = LENGTHS
    rounds: int = 5
    minutes: float = 9.0
    device: str = "auto"
    gpu_layers: int | None = None
    dtype: str = "auto"
    threads: int | None = None
    repack: str = REPACK[0]
    head: str = HEADS[0]
    offline: bool = False
    llama_bin: Path | None = None
    no_peers: bool = False
    json: Path | None = None

    def __post_init__(self) -> None:
        if self.model is not None and self.shape is not None:
            raise RequestError("--shape has random weights, and --model a model's own", "give one of the two")
        if self.shape is not None:
            one_of("shape", self.shape, SHAPES)
            if self.offline:
                raise RequestError(
                    "--offline forbids to fetch a model, and --shape fetches none", "give one of the two"
                )
        whole_number("rounds", self.rounds, 1, 1000)
        number("minutes", self.minutes, 0, 1e6, above=True)
        if self.threads is not None:
            whole_number("threads", self.threads, 1, 512)


@dataclass(frozen=True)
class Target:
    """A model on its backend, and the policies to compare."""

    name: str
    backend: Backend
    on_torch: bool  # whether PyTorch runs it, instead of ggml
    device: str  # "cpu", one of PyTorch's, or the name of one of ggml's
    threads: int  # of the CPU that it may use
    policies: dict[str, DepthPolicy]  # full depth first
    path: Path | None = None  # its files; None for random weights
    weights: Mapping[str, Any] | None = None  # random ones on the device, by our names, for peers to share

    @property
    def config(self) -> ModelConfig:
        """Facts about the model."""
        return self.backend.config


def open_target(options: BenchOptions, torch_device: str = "cuda") -> Target:
    """Load the model, or make the random weights. PyTorch runs on `torch_device`, which is "cpu" in tests.

    Raises:
        RequestError: a device or type that does not work here, a length beyond the model's context, too little memory.
        ModelError: the model is missing, damaged or not supported.
        PolicyError: a policy that does not fit the model.
    """
    chosen, threads = choose_device(options.device), options.threads or available_threads()
    if options.shape is not None:
        if options.head == "shortlist":
            raise RequestError("--shape has random weights, for which no preview of the head holds", "leave out --head")
        config = SHAPES[options.shape]
        on_torch = runs_on_torch(chosen, "bf16" if options.dtype == "auto" else options.dtype, options.gpu_layers)
        if on_torch:
            _refuse_on_torch(options)
        length, policies = _context_length(options, config), _policies(options, config)
        make = _random_weights if on_torch else _random_weights_of_ggml
        device = torch_device if on_torch else chosen
        name, backend, weights = make(options, config, length, device)
        return Target(name, backend, on_torch, device, threads, policies, weights=weights)
    model = options.model or DEFAULT_MODEL
    path = find_or_fetch(model, options.offline)
    loaded = load_model(path)
    dtype = loaded.config.quantization if options.dtype == "auto" else options.dtype
    on_torch = runs_on_torch(chosen, dtype, options.gpu_layers)
    if on_torch:
        _refuse_on_torch(options)
    length, policies = _context_length(options, loaded.config), _policies(options, loaded.config)
    backend = open_backend(loaded, context_length=length, **_how(options, chosen, options.head))
    return Target(model, backend, on_torch, torch_device if on_torch else chosen, threads, policies, path)


def _refuse_on_torch(options: BenchOptions) -> None:
    if options.threads is not None or options.repack != REPACK[0]:
        raise RequestError("threads and repack are for CPUs; they do nothing on cuda", "leave out the option")
    if options.gpu_layers is not None:
        raise RequestError("gpu_layers is for devices of ggml; on cuda, PyTorch computes this", "leave it out")


def _random_weights(
    options: BenchOptions, config: ModelConfig, length: int, device: str
) -> tuple[str, Backend, Mapping[str, Any]]:
    """The model's name, its backend and its weights; raises RequestError if they do not fit into the memory."""
    try:
        from ...backends.torch import DTYPES, TorchBackend, check_device
        from .torch_device import free_bytes, random_weights
    except ImportError:
        raise RequestError("device cuda needs PyTorch", 'pip install "taper-llm[torch]"') from None
    dtype = "bf16" if options.dtype == "auto" else one_of("dtype on cuda", options.dtype, DTYPES)
    check_device(device)
    name, free = f"random weights in the shape of {options.shape}", free_bytes(device)
    cache = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * length
    values = cache + sum(math.prod(shape) for shape in expected_shapes(config).values())
    needed = values * DTYPES[dtype].itemsize
    if free is not None and needed > free:
        message = f"{name} need {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free"
        raise RequestError(message, "choose a smaller shape")
    weights = random_weights(config, dtype, device)
    backend = TorchBackend(config, weights, context_length=length, dtype=dtype, device=device)
    return f"{name}, {dtype}", backend, weights


def _random_weights_of_ggml(
    options: BenchOptions, config: ModelConfig, length: int, device: str
) -> tuple[str, Backend, Mapping[str, Any]]:
    """The same on the CPU or a device of ggml, in its Q4_0 unless another `dtype` is given."""
    name, free = f"random weights in the shape of {options.shape}", available_memory()
    values = sum(math.prod(shape) for shape in expected_shapes(config).values())
    needed = 2 * row_bytes(RANDOM_DTYPE, values)  # while they are repacked
    if free is not None and needed > free:
        message = f"{name} need {needed / 1e9:.1f} GB while they load; {free / 1e9:.1f} GB are free"
        raise RequestError(message, "choose a smaller shape")
    weights = random_tensors(config)
    model = LoadedModel(replace(config, quantization=RANDOM_DTYPE), weights, tokenizer=None, sampling={})  # type: ignore[arg-type]
    backend = open_backend(model, context_length=length, **_how(options, device, "full"))
    dtype = RANDOM_DTYPE.lower() if options.dtype == "auto" else options.dtype
    return f"{name}, {dtype}", backend, weights


def _how(options: BenchOptions, device: str, head: str) -> dict[str, Any]:
    """What `open_backend` takes of the options."""
    names = ("dtype", "threads", "repack", "gpu_layers")
    return {name: getattr(options, name) for name in names} | {"device": device, "head": head}


def random_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Random weights of a shape for a CPU: matrices in Q4_0 that repeat a pattern of random blocks, norms of ones."""
    block = np.dtype([("scale", np.float16), ("values", np.uint8, 16)])  # of 32 weights
    pattern = np.empty(1 << 20, block)
    pattern["scale"] = _SCALE
    pattern["values"] = np.random.default_rng(0).integers(0, 256, (len(pattern), 16), np.uint8)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) > 1:
            data = np.resize(pattern, row_bytes(RANDOM_DTYPE, math.prod(shape)) // block.itemsize).view(np.uint8)
            tensors[name] = Tensor(RANDOM_DTYPE, shape, data)
        else:
            tensors[name] = Tensor("F32", shape, np.ones(shape, np.float32).view(np.uint8))
    return tensors


def _context_length(options: BenchOptions, config: ModelConfig) -> int:
    """The length of the longest prompt or output, plus one."""
    longest, limit = max(*options.lengths, *options.prompts), config.max_position_embeddings
    if longest >= limit:
        raise RequestError(f"length {longest} does not fit; this model was trained for at most {limit} tokens")
    return longest + 1


def _policies(options: BenchOptions, config: ModelConfig) -> dict[str, DepthPolicy]:
    """Full depth and the given policies; by default those that ship for the model, else one of D3."""
    layers = config.num_hidden_layers
    policies = {FULL: DepthPolicy.full(layers)}
    for name in options.policies:
        policy = resolve_policy(name, layers, config.identity)
        label = policy.name or name
        policies[name if label in policies else label] = policy
    if not options.policies:
        d3 = DepthPolicy.middle_first(layers, _ALPHA, min_depth=max(1, round(layers * _MIN_DEPTH)))
        policies |= fitting_policies(layers, config.identity) or {f"d3, alpha {_ALPHA}": d3}
    return policies
