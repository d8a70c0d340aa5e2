"""What a backend is: one forward over a batch of tokens. It knows nothing of alpha, sampling or text.

`open_backend` chooses the backend for a device and builds it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes.util import find_library
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np

from ..adapters import Adapters
from ..errors import DEVICES, DTYPES, HEADS, REPACK, DeviceLostError, RequestError, one_of, whole_number
from ..models.config import ModelConfig
from ..models.tensors import LoadedModel

on_lost: list[Callable[[], None]] = []  # called by `end_process`
# Changes logits in place, float32: those of tokens `ids`, ascending int64 [n], or of all if it gets None.
Adjust = Callable[[np.ndarray, np.ndarray | None], None]
Shortlist = tuple[np.ndarray, np.ndarray]  # tokens, ascending int64 [n], and their logits, float32 [n]
Runs = tuple[tuple[int, int, int], ...]  # (slot, first token, end) of consecutive tokens of one slot; end excluded


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one forward, deepest first; tokens of one slot in the order of their positions.

    Layer l runs on the first `num_active[l]` tokens. The rest pass through its adapter; without one, their hidden
    states stay as they are. With `fill`, they still write keys and values: the layer's own projections of the hidden
    state that enters it. The state of a recurrent layer stays as it is where a token skips the layer. A token attends
    to the cells of its slot up to its own position, itself included.

    Forwards of the same tokens that differ only from some layer on can share what comes before: the first one asks
    for its hidden states there (`output_hidden_states`), the others begin from them at `first_layer`. Keys and values
    of the layers below are then as the cells hold them.

    A model with an MTP layer (`ModelConfig.has_mtp`) runs it alone, in a forward that begins at layer L. Its tokens are
    the next ones: `hidden_states` holds what the head read at the positions before them, which `positions` names.
    """

    tokens: np.ndarray  # int32 [N]
    positions: np.ndarray  # int32 [N], index in the sequence
    slots: np.ndarray  # int32 [N], which sequence of the key-value cache
    num_active: tuple[int, ...]  # [num_hidden_layers], each 0 to N; one more for an MTP layer
    logits_rows: tuple[int, ...] = ()  # the tokens whose logits come back, in this order
    greedy_rows: tuple[int, ...] = ()  # the tokens whose argmax comes back, in this order
    shortlist: bool = False  # where the backend has a preview: argmaxes are those of shortlists
    preview_rows: tuple[int, ...] = ()  # with `shortlist`, the tokens whose previewed logits come back, in this order
    output_hidden_states: tuple[int, ...] = ()  # layers before which hidden states come back; L: after the last
    head_inputs: bool = False  # what the head reads of each token comes back
    first_layer: int = 0  # above 0: begin from `hidden_states`
    hidden_states: np.ndarray | None = None  # float32 [N, hidden_width], what enters `first_layer`
    adapters: Adapters | None = None  # of the layers that tokens skip
    fill: bool = False  # write keys and values in skipped layers too
    tentative: bool = False  # only other tentative forwards go on from the states that it leaves in recurrent layers

    def is_mtp(self, config: ModelConfig) -> bool:
        """Whether it runs the MTP layer alone."""
        return len(self.num_active) > config.num_hidden_layers


@dataclass(frozen=True)
class ForwardOutput:
    """What a forward computed, as its batch asked."""

    logits: np.ndarray  # float32 [len(logits_rows), vocab_size]
    greedy_ids: np.ndarray  # int64 [len(greedy_rows)]; -1 where the largest logit is not a finite number
    hidden_states: dict[int, np.ndarray] = field(default_factory=dict)  # layer -> float32 [N, hidden_width]
    head_inputs: np.ndarray | None = None  # float32 [N, hidden_size]
    previews: tuple[PreviewedLogits, ...] = ()  # of `preview_rows`
    prepared: bool = False  # it took longer than later forwards of its kind will, which find what it has made


class PreviewedLogits(Protocol):
    """The logits of one token: approximations of all, which may be exact, and the exact ones on demand."""

    @property
    def approximate(self) -> np.ndarray:
        """Float32 [vocab_size]."""
        ...

    def likeliest(self) -> tuple[int, float]:
        """The most probable token and its probability, both approximate."""
        ...

    def shortlist(self, reach: float = 0.0, adjust: Adjust | None = None) -> Shortlist | None:
        """The tokens that may be the most probable one or within `reach` of it, after `adjust`, which raises none.

        Approximations may be adjusted too. None if the tokens are many, or the approximations are not finite: then the
        whole head must be computed.
        """
        ...

    def exact(self, ids: np.ndarray) -> np.ndarray:
        """The logits of some tokens, int64 [n]: float32 [n]."""
        ...

    def whole(self) -> np.ndarray:
        """The logits of all tokens: float32 [vocab_size]."""
        ...


class Backend(Protocol):
    """Weights and a key-value cache of `num_slots` sequences of up to `context_length` tokens.

    Cells are addressed by slot and position and keep what was last written to them. One thread at a time.
    """

    config: ModelConfig
    num_slots: int
    context_length: int
    kernels: str  # what computes, with its version
    layouts: str  # how matrices lie in memory, in words
    head: str  # how logits are computed, in words
    has_preview: bool  # whether forwards may ask for previewed logits and shortlists
    overlaps: bool = False  # whether a device goes on with decoding steps once `begin` has returned
    layers_on_cpu: int  # the first ones, if only the others are on a device; else 0
    weight_bytes: dict[str, int]  # of each tensor, in the type in which forwards read it

    def forward(self, batch: TokenBatch) -> ForwardOutput:
        """Run the batch and write its keys and values.

        Raises:
            DeviceLostError: it ran on a device that is lost.
        """
        ...

    def begin(self, batch: TokenBatch) -> Callable[[], ForwardOutput]:
        """Begin a forward, and return a function that waits for its output, even after other calls."""
        output = self.forward(batch)
        return lambda: output

    def resumable(self, slot: int, num_tokens: int) -> int:
        """After how many of the first `num_tokens` tokens of a slot a forward can go on: all, if no layer is recurrent.

        The states of recurrent layers are kept after some tokens only (`StateRecords`).
        """
        ...

    def copy(self, source: int, target: int, first: int, end: int) -> None:
        """Copy the keys and values of all layers from one slot to another: positions `first` to `end`, excluded.

        And the states of recurrent layers after `end` tokens, which must be `resumable`.
        """
        ...

    def clear(self, slot: int) -> None:
        """Write zeros over what a slot holds, as it may not be finite: masked keys and values must be numbers too."""
        ...

    def close(self) -> None:
        """Free its memory; it cannot be used afterwards."""
        ...


def open_backend(
    model: LoadedModel,
    *,
    device: str = "auto",
    dtype: str = "auto",
    context_length: int,
    num_slots: int = 1,
    threads: int | None = None,
    repack: str = REPACK[0],
    head: str = HEADS[0],
    gpu_layers: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Backend:
    """Build the backend of a device with the weights of a model; it is imported only here.

    The options are those of `LLM`; the key-value cache holds `num_slots` sequences of up to `context_length` tokens.

    Raises:
        RequestError: an option that is out of range, not available on this device or for these weights, or takes more
            memory than there is.
        ModelError: weights that `dtype` cannot hold.
    """
    one_of("dtype", dtype, DTYPES)
    one_of("repack", repack, REPACK)
    one_of("head", head, HEADS)
    chosen, layers = choose_device(device), model.config.num_hidden_layers
    if gpu_layers is not None:
        gpu_layers = min(layers, whole_number("gpu_layers", gpu_layers, 1))
    with_torch = runs_on_torch(chosen, model.config.quantization if dtype == "auto" else dtype, gpu_layers)
    if gpu_layers is not None and (chosen == "cpu" or with_torch):
        place = "cuda, where PyTorch computes" if with_torch else "cpu"
        raise RequestError(f"gpu_layers is for devices of ggml; it does nothing on {place}", "leave it out")
    has_cpu = chosen == "cpu" or gpu_layers not in (None, layers)
    if repack != REPACK[0] and not has_cpu:
        raise RequestError(f"repack is for CPUs; it does nothing on {chosen}", "leave it out")
    if threads is not None and not has_cpu:
        raise RequestError(f"threads does nothing on {chosen}", "leave it out")
    if head == "shortlist" and (with_torch or gpu_layers not in (None, layers)):
        place = "in PyTorch" if with_torch else "with gpu_layers"
        raise RequestError(f"head shortlist is not there {place}: the whole head is computed", "leave it out")
    if with_torch:
        return _open_torch(model, num_slots, context_length, dtype)
    from .ggml import GgmlBackend

    build = partial(
        GgmlBackend,
        num_slots=num_slots,
        context_length=context_length,
        dtype=None if dtype == "auto" else dtype,
        kv_dtype="f32" if dtype in ("f32", "bf16") else "f16",  # f16 does not have the range of bf16
    )
    on_cpu = partial(build, threads=threads, repack=repack)
    open_whole, found = on_cpu, None
    if chosen != "cpu":
        from .ggml.library import ggml

        found = ggml.device(chosen)
        open_whole = partial(build, device=found)
        if gpu_layers is not None and has_cpu:
            from .split import SplitBackend

            return SplitBackend(model.config, model.tensors, gpu_layers, on_cpu, open_whole, progress)
    from .ggml.shortlist import kept_preview

    with ThreadPoolExecutor(1) as pool:  # beside the weights
        kept = pool.submit(kept_preview, head, model, dtype, threads, found)
        backend = open_whole(model.config, model.tensors, progress=progress)
    backend.set_head(head, model, dtype, kept.result(), progress)
    return backend


def runs_on_torch(chosen: str, dtype: str, gpu_layers: int | None = None) -> bool:
    """Whether PyTorch runs weights of this type on a chosen device, instead of ggml, which is for quantised ones."""
    if chosen != "cuda" or (dtype.lower() in ("f32", "f16", "bf16") and gpu_layers is None):
        return chosen == "cuda"
    from .ggml.library import ggml

    return not any(device.kind == "cuda" for device in ggml.devices)


def _open_torch(model: LoadedModel, num_slots: int, context_length: int, dtype: str) -> Backend:
    try:
        import torch

        from .torch import TorchBackend
    except ImportError:
        raise RequestError("device cuda needs PyTorch", 'pip install "taper-llm[torch]", or use --device cpu') from None
    try:
        return TorchBackend(
            model.config,
            model.tensors,
            num_slots=num_slots,
            context_length=context_length,
            dtype="bf16" if dtype == "auto" else dtype,
            device="cuda",
            keep_bits=dtype == "auto",
        )
    except torch.OutOfMemoryError:
        raise no_room(num_slots, context_length) from None


def no_room(num_slots: int, context_length: int) -> RequestError:
    """The error where a model and a key-value cache of this size need more memory than there is."""
    return RequestError(
        f"there is not enough memory for {num_slots} outputs at a time of up to {context_length} tokens each",
        "lower --context or --max-batch-size",
    )


def choose_device(device: str) -> str:
    """The device to use on this machine: "cpu", "cuda" for PyTorch, or the name of one of ggml's.

    For "auto", cuda if PyTorch and a GPU are there, else cpu.

    Raises:
        RequestError: there is no such device.
    """
    if device not in DEVICES:
        from .ggml.library import ggml

        return ggml.device(device).name
    if device != "auto":
        return device
    driver = find_library("nvcuda") if sys.platform == "win32" else Path("/proc/driver/nvidia").exists()
    if not driver:  # saves importing torch on machines without a GPU
        return "cpu"
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def available_memory() -> int | None:
    """Bytes that this process can still allocate within its container's limit; None where the system does not say."""
    free = None
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
        group = Path("/sys/fs/cgroup")  # a limit of "max" means none and is not a number
        limit, used = (int((group / name).read_text(encoding="utf-8")) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return free


def available_threads() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_process(error: DeviceLostError) -> NoReturn:
    """Say in one line that a device is lost, call `on_lost`, and end with exit code 2."""
    os.write(2, f"taper: {error}\n".encode())
    try:
        for call in on_lost:
            call()
    finally:
        os._exit(2)


def likeliest(logits: np.ndarray) -> tuple[int, float]:
    """The most probable token of logits float32 [n], and its probability; that is NaN if one of them is no number."""
    token_id = int(logits.argmax())
    return token_id, 1 / float(np.exp(logits - logits[token_id]).sum(dtype=np.float64))


def needed(batch: TokenBatch, config: ModelConfig) -> TokenBatch:
    """The batch without layers whose outcome nobody reads: of a part of a prompt, those without keys and values."""
    end = config.last_writer + 1
    reads_head = batch.head_inputs or batch.logits_rows + batch.greedy_rows + batch.preview_rows
    if reads_head or end == len(batch.num_active) or batch.is_mtp(config):
        return batch
    if any(layer > end for layer in batch.output_hidden_states):
        return batch
    return replace(batch, num_active=batch.num_active[:end] + (0,) * (len(batch.num_active) - end))


def runs_by_slot(slots: np.ndarray) -> Runs:
    """The maximal runs of equal slots."""
    owners = slots.tolist()
    edges = [0, *(i for i in range(1, len(owners)) if owners[i] != owners[i - 1]), len(owners)]
    return tuple((owners[first], first, end) for first, end in pairwise(edges))
