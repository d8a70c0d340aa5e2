"""The model that a benchmark runs: one from files, or random weights of a well-known shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..backends import Backend, available_threads, choose_device, open_backend
from ..errors import RequestError, one_of
from ..models import find_model, load_model
from ..models.config import ModelConfig, expected_shapes
from ..models.download import DEFAULT_MODEL
from ..models.policies import find_policy, fitting_policies
from ..models.shapes import SHAPES, TINY, random_tensors
from ..models.tensors import row_bytes
from ..policy import DepthPolicy
from .options import Options

_ALPHA, _MIN_DEPTH = 0.998, 5 / 8  # of D3 on a shape: about the mean depth of the paper's 7B at 512 tokens
_PER_CACHE = 2  # bytes of each key and value


@dataclass(frozen=True)
class Target:
    """A model on its backend.

    Args:
        name: what to call it.
        backend: what runs it.
        on_torch: PyTorch runs it, not ggml.
        device: the device that it runs on.
        threads: CPU threads that it may use.
        policies: full depth first.
        path: its files; None for random weights.
        weights: random weights on the device, by our names, for peers to share; None for a model from files.
    """

    name: str
    backend: Backend
    on_torch: bool
    device: str
    threads: int
    policies: dict[str, DepthPolicy]
    path: Path | None = None
    weights: Mapping[str, Any] | None = None

    @property
    def config(self) -> ModelConfig:
        """Facts of the model."""
        return self.backend.config


def open_target(options: Options, torch_device: str = "cuda") -> Target:
    """Load the model, or make the weights.

    Args:
        options: what to measure.
        torch_device: where PyTorch runs what is asked to run on "cuda"; "cpu" in tests, which also know a shape "tiny".

    Raises:
        RequestError: an unknown shape, a length beyond the model's context, too little memory.
        ModelError: the model is missing, damaged or not supported.
        PolicyError: a policy that does not fit the model.
    """
    on_torch = choose_device(options.device) == "cuda"
    if on_torch and (options.threads is not None or options.no_repack):
        raise RequestError("threads and repacking are for CPUs; they do nothing on cuda", "leave out the option")
    if options.shape is None:
        return _from_files(options, on_torch, torch_device)
    one_of("shape", options.shape, SHAPES if torch_device == "cuda" else (*SHAPES, "tiny"))
    config = SHAPES.get(options.shape, TINY)
    length = _context_length(options, config)
    policies = _policies(options, config)
    name = f"random weights in the shape of {options.shape}"
    if on_torch:
        return _random_on_torch(options, config, name, length, policies, torch_device)
    from ..backends.ggml import GgmlBackend

    dtype = "Q4_0" if options.dtype == "auto" else options.dtype.upper()
    threads, repack = options.threads or available_threads(), not options.no_repack
    _check_memory(name, config, dtype, length, _available_bytes(), copies=1 + repack)
    cache = "f32" if dtype in ("F32", "BF16") else "f16"
    rest: dict[str, Any] = {"context_length": length, "kv_dtype": cache, "threads": threads, "repack": repack}
    backend = GgmlBackend(config, random_tensors(config, dtype), **rest)
    return Target(f"{name}, {dtype.lower()}", backend, False, "cpu", threads, policies)


def _from_files(options: Options, on_torch: bool, torch_device: str) -> Target:
    path = find_model(options.model or DEFAULT_MODEL)
    loaded = load_model(path)
    length, policies = _context_length(options, loaded.config), _policies(options, loaded.config)
    rest = {"dtype": options.dtype, "context_length": length, "threads": options.threads}
    backend = open_backend(loaded, device="cuda" if on_torch else "cpu", repack=not options.no_repack, **rest)  # type: ignore[arg-type]
    threads, device = options.threads or available_threads(), torch_device if on_torch else "cpu"
    return Target(options.model or DEFAULT_MODEL, backend, on_torch, device, threads, policies, path)


def _random_on_torch(
    options: Options, config: ModelConfig, name: str, length: int, policies: dict[str, DepthPolicy], device: str
) -> Target:
    try:
        from ..backends.torch import TorchBackend, check_device
        from .torch_device import DTYPES, free_bytes, random_weights
    except ImportError:
        raise RequestError("device cuda needs PyTorch", 'pip install "taper-llm[torch]"') from None
    dtype = "bf16" if options.dtype == "auto" else one_of("dtype on cuda", options.dtype, DTYPES)
    check_device(device)
    _check_memory(name, config, dtype.upper(), length, free_bytes(device))
    weights = random_weights(config, dtype, device)
    backend = TorchBackend(config, weights, context_length=length, dtype=dtype, device=device)
    return Target(f"{name}, {dtype}", backend, True, device, available_threads(), policies, weights=weights)


def _context_length(options: Options, config: ModelConfig) -> int:
    """Tokens of the longest prompt and output, and one beside it."""
    longest, limit = max(*options.lengths, *options.prompts), config.max_position_embeddings
    if longest >= limit:
        raise RequestError(f"length {longest} does not fit; this model was trained for at most {limit} tokens")
    return longest + 1


def _policies(options: Options, config: ModelConfig) -> dict[str, DepthPolicy]:
    """Full depth, and the policies asked for: by default those shipped for the model, for a shape one of D3."""
    layers = config.num_hidden_layers
    policies = {"full": DepthPolicy.full(layers)}
    fitting = fitting_policies(layers, config.identity)
    for name in options.policy:
        policy = fitting.get(name) or find_policy(name)
        policy.check_model(layers, config.identity)
        label = policy.name or name
        policies[name if label in policies else label] = policy
    if not options.policy:
        d3 = DepthPolicy.middle_first(layers, _ALPHA, min_depth=max(1, round(layers * _MIN_DEPTH)))
        policies |= fitting or {f"d3, alpha {_ALPHA}": d3}
    return policies


def _check_memory(name: str, config: ModelConfig, dtype: str, length: int, free: int | None, copies: int = 1) -> None:
    """Refuse weights that do not fit, rather than be killed for them.

    Raises:
        RequestError: more bytes are needed than are free.
    """
    weights = sum(_bytes(shape, dtype) for shape in expected_shapes(config).values())
    cache = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * length * _PER_CACHE
    if free is not None and copies * weights + cache > free:
        needed = (copies * weights + cache) / 1e9
        raise RequestError(f"{name} need {needed:.1f} GB; {free / 1e9:.1f} GB are free", "choose a smaller shape")


def _bytes(shape: Iterable[int], dtype: str) -> int:
    *rows, columns = shape
    if not rows:
        return 4 * columns
    return int(rows[0] * row_bytes(dtype, columns))


def _available_bytes() -> int | None:
    """Memory that the CPU has left; None if that is unknown."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    return None
