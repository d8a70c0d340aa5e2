"""What a benchmark is asked to measure, and the model it measures: from files, or random weights of a known shape.

The speed of a model does not depend on the values of its weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..backends import Backend, available_threads, choose_device, open_backend
from ..errors import RequestError, number, one_of, shown, whole_number
from ..models import find_model, load_model
from ..models.config import LayerSpec, ModelConfig, Rope, expected_shapes
from ..models.download import DEFAULT_MODEL
from ..models.files import check_writable
from ..models.policies import find_policy, fitting_policies
from ..models.tensors import WEIGHT_TYPES, Tensor, row_bytes
from ..policy import DepthPolicy

LENGTHS = (128, 512, 2048)
_MAX_LENGTH = 1 << 20
_ALPHA, _MIN_DEPTH = 0.998, 5 / 8  # of D3 by default: about the mean depth of the paper's 7B at 512 tokens
_KV_BYTES = 2  # of each key and value
SPREAD = 0.02  # standard deviation of random matrices, as models are initialised
_ALIGNMENT = 64  # bytes; tensors at other addresses would be copied
_POOL_BLOCKS = (1 << 21) + 11  # tensors repeat this many random blocks, as drawing all of them would take minutes
# By type, the scale of a block whose values have that spread: the quotients are the spread of random integers.
_SCALES = {"Q4_0": SPREAD / 4.61, "Q8_0": SPREAD / 73.9}
RANDOM_DTYPES = tuple(name.lower() for name in _SCALES)


def _shape(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, positions: int, theta: float
) -> ModelConfig:
    head_dim = hidden // heads
    return ModelConfig(
        architecture="llama",
        layers=(LayerSpec(Rope(theta, head_dim), head_dim**-0.5),) * layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        quantization="random",
    )


SHAPES = {
    "llama-2-7b": _shape(32, 4096, 11008, 32, 32, 32000, 4096, 1e4),
    "llama-2-13b": _shape(40, 5120, 13824, 40, 40, 32000, 4096, 1e4),
    "llama-3-8b": _shape(32, 4096, 14336, 32, 8, 128256, 8192, 5e5),
    "34b": _shape(48, 8192, 22016, 64, 8, 32000, 16384, 1e6),  # Code Llama's
}
TINY = _shape(6, 64, 128, 4, 2, 300, 4096, 1e4)


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
    dtype: str = "auto"
    threads: int | None = None
    no_repack: bool = False
    llama_bin: Path | None = None
    no_peers: bool = False
    json: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.model is not None and self.shape is not None:
            raise RequestError("--shape has random weights, and --model a model's own", "give one of the two")
        if self.shape is not None:
            one_of("shape", self.shape, SHAPES)
        whole_number("rounds", self.rounds, 1, 1000)
        number("minutes", self.minutes, 0, 1e6, above=True)
        if self.threads is not None:
            whole_number("threads", self.threads, 1, 512)
        for name, path in (("json", self.json), ("plot", self.plot)):
            if path is not None:
                if path.exists() and not path.is_file():  # it would be replaced, a device too
                    raise RequestError(f"--{name} {path} is a folder or a device", "name a file")
                check_writable(path.parent)
        if self.plot is not None and self.plot.suffix not in (".png", ".svg"):
            raise RequestError(f"--plot {self.plot} is neither a .png nor a .svg file", "name one of these")
        if self.plot is not None and find_spec("matplotlib") is None:
            raise RequestError("--plot needs matplotlib", 'pip install "taper-llm[report]"')


def parse_lengths(text: str) -> tuple[int, ...]:
    """Numbers of tokens in ascending order, from text such as "128,512".

    Raises:
        RequestError: one is not a whole number of at least 2.
    """
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 2 <= int(part) <= _MAX_LENGTH for part in numbers):
        rule = f"they must be whole numbers from 2 to {_MAX_LENGTH}"
        raise RequestError(f"lengths are {shown(text)}; {rule}", "such as 128,512,2048")
    return tuple(sorted({int(part) for part in numbers}))


@dataclass(frozen=True)
class Target:
    """A model on its backend.

    Args:
        name: what to call it.
        backend: what runs it.
        on_torch: whether PyTorch runs it, instead of ggml.
        device: the device that it runs on.
        threads: CPU threads that it may use.
        policies: full depth first.
        path: its files; None for random weights.
        weights: random weights on the device, by our names, for peers to share; None unless PyTorch runs them.
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
        """Facts about the model."""
        return self.backend.config


def open_target(options: BenchOptions, torch_device: str = "cuda") -> Target:
    """Load the model, or make the random weights.

    Args:
        options: what to measure.
        torch_device: where PyTorch runs what is asked to run on "cuda"; "cpu" in tests.

    Raises:
        RequestError: a device or type that does not work here, a length beyond the model's context, too little memory.
        ModelError: the model is missing, damaged or not supported.
        PolicyError: a policy that does not fit the model.
    """
    on_torch = choose_device(options.device) == "cuda"
    if on_torch and (options.threads is not None or options.no_repack):
        raise RequestError("threads and repacking are for CPUs; they do nothing on cuda", "leave out the option")
    device, threads = torch_device if on_torch else "cpu", options.threads or available_threads()
    if options.shape is not None:
        config, weights = SHAPES[options.shape], None
        length, policies = _context_length(options, config), _policies(options, config)
        name = f"random weights in the shape of {options.shape}"
        if on_torch:
            dtype, backend, weights = _random_on_torch(options, config, name, length, device)
        else:
            dtype, backend = _random_on_ggml(options, config, name, length, threads)
        return Target(f"{name}, {dtype}", backend, on_torch, device, threads, policies, weights=weights)
    model = options.model or DEFAULT_MODEL
    path = find_model(model)
    loaded = load_model(path)
    length, policies = _context_length(options, loaded.config), _policies(options, loaded.config)
    backend = open_backend(
        loaded,
        device="cuda" if on_torch else "cpu",
        dtype=options.dtype,
        context_length=length,
        threads=options.threads,
        repack=not options.no_repack,
    )
    return Target(model, backend, on_torch, device, threads, policies, path)


def _random_on_ggml(
    options: BenchOptions, config: ModelConfig, name: str, length: int, threads: int
) -> tuple[str, Backend]:
    from ..backends.ggml import GgmlBackend

    dtype, repack = options.dtype, not options.no_repack
    dtype = "q4_0" if dtype == "auto" else one_of("dtype of random weights on a CPU", dtype, RANDOM_DTYPES)
    _check_memory(name, config, dtype, length, _available_bytes(), copies=1 + repack)
    tensors = random_tensors(config, dtype)
    return dtype, GgmlBackend(config, tensors, context_length=length, threads=threads, repack=repack)


def _random_on_torch(
    options: BenchOptions, config: ModelConfig, name: str, length: int, device: str
) -> tuple[str, Backend, Mapping[str, Any]]:
    try:
        from ..backends.torch import DTYPES, TorchBackend, check_device
        from .torch_device import free_bytes, random_weights
    except ImportError:
        raise RequestError("device cuda needs PyTorch", 'pip install "taper-llm[torch]"') from None
    dtype = "bf16" if options.dtype == "auto" else one_of("dtype on cuda", options.dtype, DTYPES)
    check_device(device)
    _check_memory(name, config, dtype, length, free_bytes(device))
    weights = random_weights(config, dtype, device)
    return dtype, TorchBackend(config, weights, context_length=length, dtype=dtype, device=device), weights


def _context_length(options: BenchOptions, config: ModelConfig) -> int:
    """Tokens of the longest prompt or output, and one more."""
    longest, limit = max(*options.lengths, *options.prompts), config.max_position_embeddings
    if longest >= limit:
        raise RequestError(f"length {longest} does not fit; this model was trained for at most {limit} tokens")
    return longest + 1


def _policies(options: BenchOptions, config: ModelConfig) -> dict[str, DepthPolicy]:
    """Full depth, and the policies asked for; by default those shipped for the model, else one of D3."""
    layers = config.num_hidden_layers
    policies = {"full": DepthPolicy.full(layers)}
    fitting = fitting_policies(layers, config.identity)
    for name in options.policies:
        policy = fitting.get(name) or find_policy(name)
        policy.check_model(layers, config.identity)
        label = policy.name or name
        policies[name if label in policies else label] = policy
    if not options.policies:
        d3 = DepthPolicy.middle_first(layers, _ALPHA, min_depth=max(1, round(layers * _MIN_DEPTH)))
        policies |= fitting or {f"d3, alpha {_ALPHA}": d3}
    return policies


def _check_memory(name: str, config: ModelConfig, dtype: str, length: int, free: int | None, copies: int = 1) -> None:
    """Reject weights that do not fit, as the system would kill the process.

    Raises:
        RequestError: more bytes are needed than are free.
    """
    shapes = expected_shapes(config).values()
    weights = sum(math.prod(shape[:-1]) * row_bytes(dtype.upper(), shape[-1]) for shape in shapes if len(shape) > 1)
    cache = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * length * _KV_BYTES
    needed = copies * weights + cache
    if free is not None and needed > free:
        message = f"{name} need {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free"
        raise RequestError(message, "choose a smaller shape")


def _available_bytes() -> int | None:
    """Memory that the CPU has left; None if that is unknown."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    return None


# Random weights on a CPU


def random_tensors(config: ModelConfig, dtype: str = "q4_0") -> dict[str, Tensor]:
    """Random weights of a shape: matrices in one of `RANDOM_DTYPES`, and norms of ones in f32."""
    kind = dtype.upper()
    blocks = np.random.default_rng(0).integers(0, 256, (_POOL_BLOCKS, WEIGHT_TYPES[kind][2]), np.uint8)
    blocks[:, :2] = np.array([_SCALES[kind]], np.float16).view(np.uint8)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = Tensor("F32", shape, np.ones(shape, np.float32).view(np.uint8))
        else:
            data = _aligned(shape[0] * row_bytes(kind, shape[1]))
            data[:] = np.resize(blocks, data.shape)
            tensors[name] = Tensor(kind, shape, data)
    return tensors


def _aligned(size: int) -> np.ndarray:
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % _ALIGNMENT :][:size]
