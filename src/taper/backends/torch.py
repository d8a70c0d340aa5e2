"""The CUDA backend: a compact decoder with a static key-value cache. Runs on a CPU too, where the tests use it.

A decode step whose rows all have one depth replays a CUDA graph, captured on first use for each (depth pattern,
batch, KV bucket); everything else runs eagerly. Knows neither policies nor text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..errors import ModelError, RequestError
from ..loading import ModelConfig, Tensor
from . import ForwardOutput, TokenBatch, runs_by_slot

FIRST_BUCKET = 256  # cells that attention reads; doubled until a step's positions fit
MAX_GRAPHS = 512

# Tokens, positions and slots, int64 [N] each.
_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_TORCH_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class TorchBackend:
    """A model on a CUDA device, or on the CPU for tests.

    `dtype` is that of weights, activations and cache; memory for the whole cache is taken at once. PyTorch's
    own tensors are shared, if they are of this device and dtype. Without `graphs`, every step runs eagerly.

    Raises:
        RequestError: no CUDA device, or a dtype that does not run here.
        ModelError: weights that f16 cannot hold.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor | torch.Tensor],
        *,
        num_slots: int = 1,
        context_length: int,
        dtype: str = "bf16",
        device: str = "cuda",
        graphs: bool = True,
    ) -> None:
        if dtype not in _TORCH_DTYPES:
            raise RequestError(f"dtype {dtype} does not run on {device}", f"choose one of {', '.join(_TORCH_DTYPES)}")
        check_device(device)
        self.config, self.num_slots, self.context_length = config, num_slots, context_length
        self.device, self.dtype = torch.device(device), _TORCH_DTYPES[dtype]
        self._use_graphs = graphs and self.device.type == "cuda"
        self._weights = {name: self._convert(name, _to_torch(tensor)) for name, tensor in tensors.items()}
        self.weight_bytes = {name: weight.nbytes for name, weight in self._weights.items()}
        cache = (config.num_hidden_layers, 2, num_slots, config.num_key_value_heads, context_length, config.head_dim)
        self._cache = torch.zeros(cache, dtype=self.dtype, device=self.device)
        # [context_length, head_dim / 2]
        pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=self.device)
        frequencies = config.rope_theta ** (-pairs / config.head_dim)
        if config.rope_factors:
            frequencies /= torch.tensor(config.rope_factors, dtype=torch.float32, device=self.device)
        positions = torch.arange(context_length, dtype=torch.float32, device=self.device) * config.rope_scale
        angles = torch.outer(positions, frequencies)
        self._cos, self._sin = angles.cos(), angles.sin()
        self._graphs: OrderedDict[tuple[Any, ...], _CapturedStep] = OrderedDict()

    def _convert(self, name: str, weights: torch.Tensor) -> torch.Tensor:
        converted = weights.to(self.device, self.dtype)
        if self.dtype == torch.float16 and not converted.isfinite().all():
            value = float(weights[~converted.isfinite().to(weights.device)][0])
            raise ModelError(f"tensor {name} has the value {value:g}, which f16 cannot hold", "use --dtype bf16 or f32")
        return converted

    def forward(self, batch: TokenBatch) -> ForwardOutput:
        """Run the batch and write its keys and values."""
        with torch.inference_mode():
            logits, hidden_states = self._forward(batch)
            wanted = len(batch.logits_rows)
            likeliest, ids = logits[wanted:].max(-1)  # a NaN, if there is one
            greedy = torch.where(likeliest.isfinite(), ids, -1)
            return ForwardOutput(
                logits=logits[:wanted].float().cpu().numpy(),
                greedy_ids=greedy.cpu().numpy(),
                hidden_states={layer: states.float().cpu().numpy() for layer, states in hidden_states.items()},
            )

    def copy(self, source: int, target: int, first: int, end: int) -> None:
        """Copy keys and values from one slot to another."""
        with torch.inference_mode():
            self._cache[:, :, target, :, first:end] = self._cache[:, :, source, :, first:end]

    def _forward(self, batch: TokenBatch) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Logits [rows, vocab_size], greedy rows last, and hidden states by layer, on the device."""
        kv_length = self._kv_length(int(batch.positions.max()) + 1)
        runs = runs_by_slot(batch.slots)
        count = len(batch.tokens)
        inputs = self._upload(batch.tokens), self._upload(batch.positions), self._upload(batch.slots)
        rows = (*batch.logits_rows, *batch.greedy_rows)
        one_depth = set(batch.num_active) <= {0, count}
        whole = batch.first_layer == 0 and not batch.output_hidden_states
        if self._use_graphs and whole and one_depth and len(runs) == count == len(rows):
            return self._replay((batch.num_active, count, kv_length), inputs)[list(rows)], {}
        if batch.hidden_states is None:
            x = F.embedding(inputs[0], self._weights["embed_tokens"])
        else:
            x = torch.tensor(batch.hidden_states).to(self.device, self.dtype)
        one_each = None if len(runs) == count else runs
        hidden_states = self._decode(x, inputs, batch.num_active, one_each, kv_length, batch)
        return self._logits(x[self._upload(np.asarray(rows, np.int32))]), hidden_states

    def _kv_length(self, longest: int) -> int:
        bucket = FIRST_BUCKET
        while bucket < longest:
            bucket *= 2
        return min(bucket, self.context_length)

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device, non_blocking=True)

    def _replay(self, key: tuple[Any, ...], inputs: _Inputs) -> torch.Tensor:
        """Logits [count, vocab_size] of a step with one token a row, by its captured graph."""
        if key not in self._graphs:
            self._graphs[key] = _CapturedStep.capture(self, key, inputs)
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key].replay(inputs)

    def _decode(
        self,
        x: torch.Tensor,
        inputs: _Inputs,
        num_active: tuple[int, ...],
        runs: tuple[tuple[int, int, int], ...] | None,
        kv_length: int,
        sharing: TokenBatch | None = None,
    ) -> dict[int, torch.Tensor]:
        """Run the layers on x [N, hidden_size], in place; copies of it before the layers that `sharing` asks for.

        `runs` None promises one token a slot, so that nothing depends on which slots they are. `sharing` says at which
        layer to begin.
        """
        weights = self._weights
        _, positions, slots = inputs
        first_layer, wanted = (sharing.first_layer, sharing.output_hidden_states) if sharing else (0, ())
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)  # [N, 1, head_dim / 2]
        visible = torch.arange(kv_length, device=self.device) <= positions.unsqueeze(1)  # [N, kv_length]
        hidden_states = {}
        for layer, n in enumerate((*num_active, 0)):
            if layer in wanted:
                hidden_states[layer] = x.clone()
            if n == 0 or layer < first_layer:
                continue
            w = {name: weights[f"layers.{layer}.{name}"] for name in _LAYER_WEIGHTS}
            q, k, v = self._project(self._norm(x[:n], w["input_layernorm"]), layer, cos[:n], sin[:n])
            keys, values = self._cache[layer]  # [num_slots, key-value heads, context_length, head_dim]
            keys[slots[:n], :, positions[:n]], values[slots[:n], :, positions[:n]] = k, v
            attended = _attend(q, keys[:, :, :kv_length], values[:, :, :kv_length], visible[:n], slots[:n], runs)
            x[:n] += F.linear(attended, w["o_proj"])
            h = self._norm(x[:n], w["post_attention_layernorm"])
            x[:n] += F.linear(F.silu(F.linear(h, w["gate_proj"])) * F.linear(h, w["up_proj"]), w["down_proj"])
        return hidden_states

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab_size] of hidden states [N, hidden_size] after the last layer."""
        head = self._weights.get("lm_head", self._weights["embed_tokens"])
        return F.linear(self._norm(x, self._weights["norm"]), head)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _project(
        self, h: torch.Tensor, layer: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries [n, heads, head_dim] and keys, and values [n, key-value heads, head_dim]."""
        out = {}
        for name in "qkv":
            bias = self._weights.get(f"layers.{layer}.{name}_bias")
            projected = F.linear(h, self._weights[f"layers.{layer}.{name}_proj"], bias)
            out[name] = projected.unflatten(-1, (-1, self.config.head_dim))
            if (norm := self._weights.get(f"layers.{layer}.{name}_norm")) is not None:
                out[name] = self._norm(out[name], norm)
        return self._rotate(out["q"], cos, sin), self._rotate(out["k"], cos, sin), out["v"]

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary embedding in f32 (RoFormer, arXiv 2104.09864)."""
        pairs = (-1, 2) if self.config.rope_interleaved else (2, -1)
        axis = -1 if self.config.rope_interleaved else -2
        a, b = x.float().unflatten(-1, pairs).unbind(axis)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), axis).flatten(-2).to(x.dtype)


def check_device(device: str) -> None:
    """Check that PyTorch has a device.

    Raises:
        RequestError: it has not.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise RequestError("PyTorch finds no CUDA device", "use --device cpu, or install a CUDA build of PyTorch")


_LAYER_WEIGHTS = ("input_layernorm", "o_proj", "post_attention_layernorm", "gate_proj", "up_proj", "down_proj")


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    slots: torch.Tensor,
    runs: tuple[tuple[int, int, int], ...] | None,
) -> torch.Tensor:
    """Attention of q [n, heads, head_dim] over caches [slots, kv heads, cells, head_dim]: [n, heads * head_dim]."""
    group = q.shape[1] // keys.shape[1]  # heads that share keys and values
    # Neither way asks PyTorch for grouped queries: with a mask, only its slowest kernels have them on a GPU.
    if runs is None:  # one token a row, the heads of a group as its queries: [n, key-value heads, group, head_dim]
        if len(keys) > 1:  # a single slot is read where it is
            keys, values = keys[slots], values[slots]
        out = F.scaled_dot_product_attention(q.unflatten(1, (-1, group)), keys, values, visible[:, None, None])
        return out.flatten(1)
    parts = []
    for slot, first, end in runs:  # the tokens of a slot together: [1, heads, tokens, head_dim]
        end = min(end, len(q))
        if first < end:
            queries = q[first:end].transpose(0, 1).unsqueeze(0)
            k, v = (cache[slot : slot + 1].repeat_interleave(group, 1) for cache in (keys, values))
            out = F.scaled_dot_product_attention(queries, k, v, visible[first:end])
            parts.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(parts)


@dataclass(frozen=True)
class _CapturedStep:
    """A CUDA graph of one decode step, with the memory it reads and writes."""

    graph: Any
    inputs: _Inputs
    logits: torch.Tensor

    @classmethod
    def capture(cls, backend: TorchBackend, key: tuple[Any, ...], inputs: _Inputs) -> _CapturedStep:
        """Capture the step of `key`: (num_active, count, kv_length)."""
        num_active, _, kv_length = key
        tokens, positions, slots = inputs
        static = (tokens.clone(), positions.clone(), slots.clone())

        def step() -> torch.Tensor:
            x = F.embedding(static[0], backend._weights["embed_tokens"])
            backend._decode(x, static, num_active, None, kv_length)
            return backend._logits(x)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up outside the capture
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()
        return cls(graph, static, logits)

    def replay(self, inputs: _Inputs) -> torch.Tensor:
        """Run it on new inputs; the logits are overwritten by the next replay."""
        for static, new in zip(self.inputs, inputs, strict=True):
            static.copy_(new)
        self.graph.replay()
        return self.logits


def _to_torch(tensor: Tensor | torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch.Tensor):
        return tensor
    if (stored := _TORCH_DTYPES.get(tensor.dtype.lower())) is not None:
        return torch.from_numpy(tensor.data.copy()).view(stored).reshape(tensor.shape)
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise ModelError("quantised weights need the gguf package here", 'pip install "taper-llm[torch]"') from None
    rows = tensor.data.reshape(-1, tensor.data.size // int(np.prod(tensor.shape[:-1])))
    try:
        floats = dequantize(np.ascontiguousarray(rows), GGMLQuantizationType[tensor.dtype])
    except NotImplementedError:
        raise ModelError(f"{tensor.dtype} weights do not run on this device", "use --device cpu") from None
    return torch.from_numpy(floats.reshape(tensor.shape))
