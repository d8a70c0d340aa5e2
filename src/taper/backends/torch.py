"""The CUDA backend: a compact decoder with a static key-value cache. Runs on a CPU too, where the tests use it.

A decode step of one token a row replays a CUDA graph, captured on first use for each (depth pattern, batch, KV
bucket). Its layers run in the kernels of `fused`, where those fit the model: then rows may differ in depth, and the
graph depends on the deepest one; several of a slot may be verified. Everything else runs eagerly. Knows neither
policies nor text.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property, partial
from importlib import metadata
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..adapters import EPS, Adapters
from ..errors import DeviceLostError, ModelError, RequestError, TaperWarning
from ..models.config import DeltaNet, Experts, LatentAttention, Mamba2, Mixer, ModelConfig, Rope
from ..models.tensors import Tensor as StoredTensor
from . import Backend, ForwardOutput, Runs, TokenBatch, candidates, needed, runs_by_slot
from .candidates import largest
from .mixers import States, delta_rule, pass_tokens, short_convolution, state_space
from .packed import PackedMatrix, can_pack, packed
from .passing import PassingStates, Plan
from .states import Passage, StateRecords
from .streams import corrected, merged, predicted, spread

if TYPE_CHECKING:
    from .fused import FusedLayers

FIRST_BUCKET = 256  # cells that attention reads; doubled until a step's positions fit
MAX_GRAPHS = 512
FEW_TOKENS = 4  # up to so many tokens each get a copy of their experts
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

Outputs = tuple[Tensor, Tensor]  # logits [N, vocab_size], and the argmax of each, int64 [N], or -1
Step = Callable[[np.ndarray], Outputs]
Rotations = dict[Rope, Tensor]
AdapterWeights = dict[int, tuple[Tensor, Tensor]]  # `down` and `up` of each adapter, by layer


class TorchBackend(Backend):
    """A model on a CUDA device, or on the CPU for tests.

    `dtype` is that of weights, activations and cache; memory for the whole cache is allocated at once. PyTorch's
    own tensors are shared, if they are of this device and dtype. Without `graphs`, every step runs eagerly, in
    PyTorch's own operations. `matrix_dtype` is that of matrices, if it is another one: for use under `torch.autocast`.
    With `keep_bits`, quantised matrices stay quantised where the kernels of `fused` compute with them.

    Raises:
        RequestError: no CUDA device, or a dtype that does not run here.
        ModelError: weights that f16 cannot hold.
    """

    layers_on_cpu = 0

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, StoredTensor | Tensor],
        *,
        num_slots: int = 1,
        context_length: int,
        dtype: str = "bf16",
        matrix_dtype: str = "",
        device: str = "cuda",
        graphs: bool = True,
        keep_bits: bool = False,
    ) -> None:
        if dtype not in DTYPES:
            raise RequestError(f"dtype {dtype} does not run on {device}", f"choose one of {', '.join(DTYPES)}")
        check_device(device)
        self.config, self.num_slots, self.context_length = config, num_slots, context_length
        self.kernels = f"torch {torch.__version__}"
        self.layouts, self.head = "one layout for any number of tokens", "the whole matrix"
        self.has_preview = config.vocab_size > candidates.COUNT
        self.device, self.dtype = torch.device(device), DTYPES[dtype]
        self._matrix_dtype = DTYPES[matrix_dtype or dtype]
        self._use_graphs = graphs and self.device.type == "cuda"
        keep_bits = keep_bits and self._use_graphs
        kept = {name for name, tensor in tensors.items() if keep_bits and can_pack(tensor)}
        self._packed: dict[str, PackedMatrix] = {name: packed(tensors[name], self.device) for name in kept}
        self._weights = self._dense(tensors, tensors.keys() - kept)
        self._cache = self._new_cache()
        self._records = None if config.mixer is None else StateRecords(config, num_slots)
        self._states = self._new_states()
        self._passing = PassingStates(config)
        self._passed = torch.zeros(self._passing.size, config.hidden_width, dtype=self.dtype, device=self.device)
        ropes = {spec.rope for spec in config.layers if spec.rope}
        self._rotations = {rope: rotation_table(rope, context_length, device) for rope in ropes}
        self._windows = {spec.window for spec in config.layers}
        self._adapters: WeakKeyDictionary[Adapters, AdapterWeights] = WeakKeyDictionary()  # those in use
        self._graphs: OrderedDict[tuple[Any, ...], Step] = OrderedDict()
        self._num_captures = 0
        self._fused = self._open_fused() if self._use_graphs else None
        if self._fused is None:
            self._weights |= self._dense(tensors, kept)
            self._packed = {}
        elif self._packed:
            self.layouts = "quantised matrices keep their bits, and are dequantised for prompts"
        self._read: Callable[[], object] = lambda: None  # waits for the forward that was begun last
        self.overlaps = self._fused is not None and num_slots <= self._fused.max_rows
        self.weight_bytes = {name: weight.nbytes for name, weight in (self._weights | self._packed).items()}

    def _dense(self, tensors: Mapping[str, StoredTensor | Tensor], names: Collection[str]) -> dict[str, Tensor]:
        """Some of the tensors on the device, dequantised."""
        return {name: self._convert(name, to_torch(tensors[name])) for name in tensors if name in names}

    def _new_cache(self) -> Sequence[Tensor]:
        """Keys and values of each layer: [2, num_slots, key-value heads, context_length, head_dim]; as one if alike."""
        config, options = self.config, {"dtype": self.dtype, "device": self.device}
        shapes = [
            (2, self.num_slots, sizes.num_key_value_heads, self.context_length, sizes.head_dim)
            if spec.has_cells
            else (0,)
            for sizes, spec in zip(map(config.sizes, range(len(config.layers))), config.layers, strict=True)
        ]
        if len(set(shapes)) == 1:
            together: Sequence[Tensor] = torch.zeros(len(shapes), *shapes[0], **options)
            return together
        return [torch.zeros(shape, **options) for shape in shapes]

    def _new_states(self) -> list[States]:
        """The records of each recurrent layer."""
        mixer = self.config.mixer
        if mixer is None or self._records is None:
            return []
        count, layers = self._records.num_records, range(len(self.config.recurrent_layers))
        shapes: list[tuple[int, ...]] = [(mixer.conv_width, mixer.conv_size - 1)]
        if all(mixer.matrices):
            shapes.append(mixer.matrices)
        return [tuple(torch.zeros(count, *shape, device=self.device) for shape in shapes) for _ in layers]

    def _convert(self, name: str, weights: Tensor) -> Tensor:
        converted = weights.to(self.device, self._matrix_dtype if weights.ndim > 1 else self.dtype)
        if self.dtype == torch.float16 and not converted.isfinite().all():
            value = float(weights[~converted.isfinite().to(weights.device)][0])
            raise ModelError(f"tensor {name} has the value {value:g}, which f16 cannot hold", "use --dtype bf16 or f32")
        return converted

    def _open_fused(self) -> FusedLayers | None:
        """The kernels for steps of one token a row; None where they do not fit the model, or Triton does not work."""
        try:
            from .fused import FusedLayers

            if not FusedLayers.fit(self.config):
                return None
            kernels = FusedLayers(self.config, self._weights, self._packed, self._cache, self._rotations)
            if self.device.type == "cuda":
                kernels.check()
        except Exception as error:  # no Triton, no C compiler for it, or a device that it does not know
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[-1]
            message = f"Taper's own kernels do not run on this GPU ({reason}): PyTorch's operations do, more slowly"
            warnings.warn(message, TaperWarning, stacklevel=3)
            return None
        self.kernels += f", triton {metadata.version('triton')}"
        return kernels

    def forward(self, batch: TokenBatch) -> ForwardOutput:
        """Run the batch and write its keys and values."""
        return self.begin(batch)()

    def begin(self, batch: TokenBatch) -> Callable[[], ForwardOutput]:
        """Begin a forward (see `Backend.begin`): only steps that have a graph go on afterwards."""
        self._read()  # the next replay of a graph overwrites what the last one computed
        batch = needed(batch, self.config)
        with torch.inference_mode(), _lost_devices():
            plan = self._passing.plan(batch, self._write_cells)
            passages = [] if self._records is None else self._records.passages(batch)
            captures, rows = self._num_captures, stacked(batch, passages, self._placed(plan, len(batch.tokens)))
            wait = self._begin(batch, plan, rows)
            self._passing.note(batch, plan)
            if self._records is not None:
                self._records.commit(passages, batch.tentative)
        prepared = self._num_captures > captures

        @cache
        def read() -> ForwardOutput:
            with torch.inference_mode(), _lost_devices():
                return replace(wait(), prepared=prepared)

        self._read = read
        return read

    def _adapter_weights(self, adapters: Adapters | None) -> AdapterWeights:
        """Adapters on the device, put there when a forward first needs them."""
        if adapters is None:
            return {}
        if adapters not in self._adapters:
            self._adapters[adapters] = {
                layer: (self._convert("down", torch.from_numpy(down)), self._convert("up", torch.from_numpy(up)))
                for layer, (down, up) in adapters.layers.items()
            }
        return self._adapters[adapters]

    def resumable(self, slot: int, num_tokens: int) -> int:
        """After how many of the first `num_tokens` tokens of a slot a forward can go on."""
        return num_tokens if self._records is None else self._records.resumable(slot, num_tokens)

    def copy(self, source: int, target: int, first: int, end: int) -> None:
        """Copy keys and values, and the state after them, from one slot to another."""
        with torch.inference_mode():
            self._passing.settle(source, first, end, self._write_cells)
            self._passing.forget(target, first, end)
            for cells in self._own_cells():
                cells[:, target, :, first:end] = cells[:, source, :, first:end]
            if self._records is not None:
                passage = self._records.copied(source, target, first, end)
                for states, read, write in zip(self._states, passage.reads, passage.writes, strict=True):
                    for values in states:
                        values[write] = values[read]
                self._records.commit_copy(passage)

    def clear(self, slot: int) -> None:
        """Write zeros over the keys and values of a slot, and forget its states."""
        if self._records is not None:
            self._records.clear(slot)
        self._passing.forget(slot, 0, self.context_length)
        with torch.inference_mode():
            for cells in self._own_cells():
                cells[:, slot] = 0

    def close(self) -> None:
        """Free its memory; the backend cannot be used afterwards."""
        self._graphs.clear()
        self._adapters.clear()
        self._weights.clear()
        self._packed.clear()
        self._fused = None
        self._read = lambda: None
        self._cache, self._states, self._passed = [], [], torch.empty(0)

    def _own_cells(self) -> list[Tensor]:
        return [cells for cells in self._cache if len(cells)]

    def _placed(self, plan: Plan | None, num_tokens: int) -> np.ndarray:
        """Where each token's state goes in each part of a plan: int64 [parts, N]; 0 for those without one."""
        placed = np.zeros((len(plan.parts) if plan else 0, num_tokens), np.int64)
        if plan:
            places = iter(self._passing.places(plan).tolist())
            for row, part in zip(placed, plan.parts, strict=True):
                row[part.first : part.end] = [next(places) for _ in range(part.first, part.end)]
        return placed

    def _write_cells(self, layer: int, slots: np.ndarray, positions: np.ndarray, places: np.ndarray) -> None:
        """Write the keys and values of a layer for states that have passed it (`passing.Write`)."""
        at, of = self._upload(positions), self._upload(slots)
        h = self.attention_input(self.expected(self._passed[self._upload(places)], layer), layer)
        for cells, new in zip(self._cache[layer], self.keys_values(h, layer, self.rotations(at)), strict=True):
            cells[of, :, at] = new

    def _begin(self, batch: TokenBatch, plan: Plan | None, rows: np.ndarray) -> Callable[[], ForwardOutput]:
        kv_length = self._kv_length(int(batch.positions.max()) + 1)
        runs = runs_by_slot(batch.slots)
        count = len(batch.tokens)
        one_depth = set(batch.num_active) <= {0, count}
        whole = batch.first_layer == 0 and not batch.output_hidden_states and not batch.head_inputs
        is_step = len(runs) == count
        verifies = len({*batch.logits_rows, *batch.greedy_rows, *batch.preview_rows}) == count
        is_fused = count > 1 and (is_step or verifies) and self._fuses(batch, plan)
        if self._use_graphs and whole and (is_fused or (is_step and one_depth)):
            if is_fused:
                step, rows = self._rows_step(batch, plan, rows, kv_length)
            else:
                skips = 0 in batch.num_active
                adapters = batch.adapters if skips else None
                key = batch.num_active, adapters, batch.fill and skips, plan is None, count, kv_length
                step = self._step(key, batch, plan, rows)
            return partial(self._output_of_step, batch, *step(rows))
        inputs = self._upload(rows)
        is_mtp = batch.is_mtp(self.config)
        x = self.embed(inputs[0])
        if batch.hidden_states is not None:
            given = torch.tensor(batch.hidden_states).to(self.device, self.dtype)
            x = self.combined(x, given) if is_mtp else given
        weights = self._adapter_weights(batch.adapters)
        hidden_states = self._decode(x, inputs, batch, plan, weights, None if is_step else runs, kv_length)
        asks = batch.logits_rows, batch.greedy_rows, batch.preview_rows
        x = self.head_inputs(x, is_mtp)
        logits, greedy, previewed = self._logits(x[self._upload(np.array(sum(asks, ()), np.int32))]).split(
            [len(those) for those in asks]
        )
        output = ForwardOutput(
            logits=logits.float().cpu().numpy(),
            greedy_ids=argmax(greedy).cpu().numpy(),
            previews=largest(previewed),
            hidden_states={layer: states.float().cpu().numpy() for layer, states in hidden_states.items()},
            head_inputs=x.float().cpu().numpy() if batch.head_inputs else None,
        )
        return lambda: output

    def _output_of_step(self, batch: TokenBatch, logits: Tensor, greedy: Tensor) -> ForwardOutput:
        """What a batch asks for, once the graph has ended that computes logits on the device, argmaxes on the host."""
        self._synchronize()
        chosen, previewed = (
            logits[list(those)] if those else logits[:0] for those in (batch.logits_rows, batch.preview_rows)
        )
        chosen_ids = greedy.numpy()[list(batch.greedy_rows)]
        return ForwardOutput(chosen.float().cpu().numpy(), chosen_ids, previews=largest(previewed))

    def _synchronize(self) -> None:
        torch.cuda.current_stream().synchronize()

    def _kv_length(self, longest: int) -> int:
        bucket = FIRST_BUCKET
        while bucket < longest:
            bucket *= 2
        return min(bucket, self.context_length)

    def _upload(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device, non_blocking=True)

    def _step(self, key: tuple[Any, ...], batch: TokenBatch, plan: Plan | None, rows: np.ndarray) -> Step:
        """A step of one token a row: `key` is what it depends on, of which the last are the count and the cells read.

        `batch` and its `plan` are an example with this key, and `rows` are its inputs.
        """
        _, adapters, *_, count, kv_length = key
        weights = self._adapter_weights(adapters)

        def compute(inputs: Tensor) -> Outputs:
            x = self.embed(inputs[0])
            if count == 1 and self._fused is not None:
                self._decode_token(self._fused, x, inputs, batch, plan, weights, kv_length)
                logits = self._fused.logits(x)
            else:
                self._decode(x, inputs, batch, plan, weights, None, kv_length)
                logits = self.logits(x)
            return logits, argmax(logits)

        return self._captured(key, compute, rows)

    def _fuses(self, batch: TokenBatch, plan: Plan | None) -> bool:
        """Whether the kernels for rows can run a step; what passes layers must have room."""
        leaves = batch.fill and min(batch.num_active) < len(batch.tokens)
        return self._fused is not None and len(batch.tokens) <= self._fused.max_rows and not (leaves and plan is None)

    def _rows_step(
        self, batch: TokenBatch, plan: Plan | None, rows: np.ndarray, kv_length: int
    ) -> tuple[Step, np.ndarray]:
        """A step of several rows in kernels, and its inputs: int64 [3 + layers, N + 1].

        N is the count of rows, rounded up, so that graphs are few. As in `stacked`, come tokens, positions and slots;
        then the places of states that pass each layer, or -1. The last column is `num_active`, and before it the count.
        """
        fused, active, count = self._fused, batch.num_active, len(batch.tokens)
        assert fused is not None
        size = 1 << (count - 1).bit_length()
        inputs = np.zeros((3 + len(active), size + 1), np.int64)
        inputs[:3, :count], inputs[3:, :size] = rows[:3], -1
        inputs[2, size], inputs[3:, size] = count, active
        for part, places in zip(plan.parts if plan else (), rows[3:], strict=True):
            inputs[3 + part.layer, part.first : part.end] = places[part.first : part.end]
        runs = tuple(n > 0 for n in active)
        adapters = batch.adapters if batch.adapters and min(active) < count else None
        adapted = tuple(layer for layer in adapters.layers if active[layer] < count) if adapters else ()
        weights = self._adapter_weights(adapters)

        def compute(inputs: Tensor) -> Outputs:
            x = self.embed(inputs[0, :size])
            positions, slots, *places = inputs[1:, :size]
            count, *counts = inputs[2:, size:]
            can_leave = plan is not None
            for layer, n in enumerate(counts):
                if runs[layer]:
                    fused.run_rows(x, layer, positions, slots, n, places[layer], self._passed, kv_length)
                elif can_leave:
                    fused.leave(x, n, places[layer], self._passed)
                can_leave = plan is not None and (runs[layer] or layer in adapted)
                if layer in adapted:
                    passes = torch.arange(size, device=self.device) >= n
                    x = torch.where(passes[:, None], adapt(x, *weights[layer]), x)
            logits = fused.logits_of_rows(x, count)
            return logits, argmax(logits)

        key = "rows", runs, adapters, adapted, plan is None, size, kv_length
        return self._captured(key, compute, inputs), inputs

    def _captured(self, key: tuple[Any, ...], compute: Callable[[Tensor], Outputs], inputs: np.ndarray) -> Step:
        """The graph of a computation with this key; one that has none yet is captured, on an example of its inputs."""
        if key not in self._graphs:
            self._graphs[key] = self._capture(compute, inputs)
            self._num_captures += 1
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    @cached_property
    def _pool(self) -> Any:
        """Memory that all graphs share."""
        return torch.cuda.graph_pool_handle()

    def _capture(self, compute: Callable[[Tensor], Outputs], inputs: np.ndarray) -> Step:
        """Capture a computation as a CUDA graph that reads its inputs from the host's memory.

        It first runs once without being captured, on these inputs, because libraries initialise themselves then.

        Returns:
            A function from inputs to logits on the device and their argmax on the host, which are there once the device
            has come so far; the next call overwrites both, and the inputs.
        """
        given = torch.from_numpy(inputs).pin_memory()
        on_device, values = given.to(self.device), given.numpy()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _, greedy = compute(on_device)
        torch.cuda.current_stream().wait_stream(side)
        chosen = torch.zeros(greedy.shape, dtype=torch.int64, pin_memory=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool):
            on_device.copy_(given, non_blocking=True)
            logits, greedy = compute(on_device)
            chosen.copy_(greedy, non_blocking=True)

        def replay(inputs: np.ndarray) -> Outputs:
            values[:] = inputs
            graph.replay()
            return logits, chosen

        return replay

    def _decode(
        self,
        x: Tensor,
        inputs: Tensor,
        batch: TokenBatch,
        plan: Plan | None,
        adapters: AdapterWeights,
        runs: Runs | None,
        kv_length: int,
    ) -> dict[int, Tensor]:
        """Run the layers on x [N, hidden_width], in place; copies of it before the layers of `output_hidden_states`.

        Tokens, positions, slots, records and places are read from `inputs` (`stacked`), not from `batch` or `plan`:
        graphs replay with others. With `runs` None, each slot has one token, and the operations do not depend on which
        slots these are.
        """
        num_parts = len(plan.parts) if plan else 0
        records = (len(inputs) - 3 - num_parts) // 2
        (tokens, positions, slots), reads, writes, placed = inputs.split((3, records, records, num_parts))
        rotations, layer_inputs = self.rotations(positions), self.inputs_of_layers(tokens)
        visible = {window: visible_cells(positions, kv_length, window) for window in self._windows}
        hidden_states = {}
        for layer, n in enumerate((*batch.num_active, 0)):
            if layer in batch.output_hidden_states:
                hidden_states[layer] = x.clone()
            if not batch.first_layer <= layer < len(batch.num_active):
                continue
            spec = self.config.layers[layer]
            source = self.config.source(layer)
            self._leave(x, layer, plan, placed)
            if spec.mixer is not None:
                if n < len(x) and layer in adapters:
                    x[n:] = adapt(x[n:], *adapters[layer])
                if n:
                    place = self.config.recurrent_layers[layer]
                    h = self.attention_input(x[:n], layer)
                    mixed = self._mixed(h, layer, spec.mixer, self._states[place], reads[place], writes[place], runs)
                    x[:n] = self.finish_layer(x[:n], mixed, layer)
                continue
            keys, values = self._cache[source]  # [num_slots, key-value heads, context_length, head_dim]
            filled = len(x) if self.config.fills(layer, batch.fill and plan is None) else n
            if filled:
                expected = self.expected(x[:filled], layer)
                h = self.attention_input(expected, layer)
            if filled and spec.has_cells:
                k, v = self.keys_values(h, layer, rotations)
                keys[slots[:filled], :, positions[:filled]], values[slots[:filled], :, positions[:filled]] = k, v
            if n < len(x) and layer in adapters:
                x[n:] = adapt(x[n:], *adapters[layer])
            if n == 0:
                continue
            q, gate = self._gated_queries(h[:n], layer, rotations)
            cached = keys[:, :, :kv_length], values[:, :, :kv_length]
            seen, scale = visible[spec.window][:n], spec.attention_scale
            attended = attend(q, *cached, seen, slots[:n], runs, scale, spec.score_cap, self.sinks(layer))
            attended = attended if gate is None else attended * gate
            x[:n] = self.finish_layer(expected[:n], attended, layer, layer_inputs and layer_inputs[layer][:n])
        return hidden_states

    def _decode_token(
        self,
        fused: FusedLayers,
        x: Tensor,
        inputs: Tensor,
        batch: TokenBatch,
        plan: Plan | None,
        adapters: AdapterWeights,
        kv_length: int,
    ) -> None:
        """`_decode` of one token in kernels: x [1, hidden_size], in place. What it passes always has room."""
        _, positions, slots = inputs[:3]
        for layer, is_active in enumerate(batch.num_active):
            self._leave(x, layer, plan, inputs[3:])
            if is_active:
                fused.run_layer(x, layer, positions, slots, kv_length)
            elif layer in adapters:
                x.copy_(adapt(x, *adapters[layer]))

    def _leave(self, x: Tensor, layer: int, plan: Plan | None, placed: Tensor) -> None:
        """Leave those of the hidden states x [N, hidden_width] before a layer that a plan names (`_placed`)."""
        for part, places in zip(plan.parts if plan else (), placed, strict=True):
            if part.layer == layer:
                self._passed[places[part.first : part.end]] = x[part.first : part.end]

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [N, hidden_width] before the first layer, of token ids [N]."""
        return spread(self._embeddings(tokens), self._of_streams("embed"))

    def _embeddings(self, tokens: Tensor) -> Tensor:
        if self._fused is not None and "embed_tokens" in self._packed:
            rows = self._fused.dequantised(self._packed["embed_tokens"], tokens)
        else:
            rows = F.embedding(tokens, self._weights["embed_tokens"])
        return _scaled(rows, self.config.embedding_scale)

    def combined(self, x: Tensor, given: Tensor) -> Tensor:
        """What enters the MTP layer, of embeddings and of what the head read: all [N, hidden_size]."""
        layer = self.config.num_hidden_layers
        normed = (
            self._norm(part, f"layers.{layer}.{name}_norm") for name, part in (("embedding", x), ("hidden", given))
        )
        return self._times(torch.cat((*normed,), -1), layer, "combine_proj")

    def _of_streams(self, name: str) -> list[Tensor]:
        """The matrices of all streams but the first."""
        return [self._weights[f"streams.{name}_{stream}"] for stream in range(1, self.config.num_streams)]

    def inputs_of_layers(self, tokens: Tensor) -> Sequence[Tensor] | None:
        """What each layer gets besides hidden states, [N, layer_input_size]; None if layers get nothing."""
        size, weights = self.config.layer_input_size, self._weights
        if not size:
            return None
        known = torch.where(tokens < self.config.layer_vocab_size, tokens, 0)
        own = F.embedding(known, weights["layer_embeddings"]).unflatten(-1, (-1, size)) * size**0.5
        projected = F.linear(self._embeddings(tokens), weights["layer_projection"]) * self.config.hidden_size**-0.5
        projected = self._norm(projected.unflatten(-1, (-1, size)), "layer_projection_norm")
        inputs: Sequence[Tensor] = ((projected + own) * 0.5**0.5).unbind(1)
        return inputs

    def rotations(self, positions: Tensor) -> Rotations:
        """Cosines and sines at positions [N], for each kind of rotary embedding: [2, N, 1, dim / 2]."""
        return {rope: table[:, positions].unsqueeze(2) for rope, table in self._rotations.items()}

    def expected(self, x: Tensor, layer: int) -> Tensor:
        """What a layer starts from: hidden states x [n, hidden_width]; of several streams, what it predicts of them."""
        if self.config.num_streams == 1:
            return x
        modalities = self._modalities(x[:, : self.config.hidden_size], layer)
        return predicted(x, modalities, self._weights[f"layers.{layer}.predict_coefs"])

    def _modalities(self, x: Tensor, layer: int) -> Tensor:
        """What coefficients of streams are made of: [n, streams], of the first stream x [n, hidden_size]."""
        routed = self._times(self._norm(x, f"layers.{layer}.stream_router_norm"), layer, "stream_router")
        return torch.tanh(routed.float() / self.config.hidden_size).to(x.dtype)

    def attention_input(self, expected: Tensor, layer: int) -> Tensor:
        """The input of queries, keys and values [n, hidden_size]: the first stream that a layer expects, normed."""
        return self._norm(expected[:, : self.config.hidden_size], f"layers.{layer}.pre_attention_norm")

    def queries(self, h: Tensor, layer: int, rotations: Rotations) -> Tensor:
        """Queries [n, heads, head_dim] of h, the `attention_input` of the first n tokens of `rotations`."""
        return self._gated_queries(h, layer, rotations)[0]

    def _gated_queries(self, h: Tensor, layer: int, rotations: Rotations) -> tuple[Tensor, Tensor | None]:
        """The same, and what attention's outputs are multiplied by, [n, heads * head_dim], if they are."""
        if (latent := self.config.layers[layer].latent) is not None:
            return self._latent_queries(h, layer, rotations, latent), None
        q, gate = self._projected(h, layer, "q"), None
        if self.config.layers[layer].output_gate:
            q, gate = (half.flatten(1) for half in q.unflatten(1, (self.config.num_attention_heads, 2, -1)).unbind(2))
            gate = gate.sigmoid()
        return self._rotated(self._heads(q, layer, "q"), layer, "q", rotations), gate

    def _mixed(
        self, h: Tensor, layer: int, mixer: Mixer, held: States, reads: Tensor, writes: Tensor, runs: Runs | None
    ) -> Tensor:
        """What a recurrent layer makes of its first tokens, h [n, hidden_size], before the last product."""
        weights, name, records = self._weights, f"layers.{layer}", (reads[: len(h)], writes[: len(h)], runs)
        conv = weights[f"{name}.conv"].float()
        if isinstance(mixer, DeltaNet):
            qkv, alpha, beta = (self._times(h, layer, f"{part}_proj").float() for part in ("qkv", "alpha", "beta"))
            decay = F.softplus(alpha + weights[f"{name}.dt_bias"].float()) * weights[f"{name}.decay"].float()
            step = partial(delta_rule, mixer, conv)
            out = pass_tokens(step, (qkv, decay, beta.sigmoid()), held, *records).to(h.dtype)
            return self._norm(out, f"{name}.mixer_norm").flatten(1) * F.silu(self._times(h, layer, "z_proj"))
        if isinstance(mixer, Mamba2):
            sizes = mixer.inner_size, mixer.conv_width, mixer.num_heads
            z, xbc, dt = self._times(h, layer, "in_proj").split(sizes, -1)
            own = {part: weights[f"{name}.{part}"].float() for part in ("conv", "conv_bias", "decay", "direct")}
            dt = F.softplus(dt.float() + weights[f"{name}.dt_bias"].float())
            out = pass_tokens(partial(state_space, mixer, own), (xbc.float(), dt), held, *records)
            gated = (out * F.silu(z.float())).unflatten(-1, (mixer.num_groups, -1))
            normed = F.rms_norm(gated, gated.shape[-1:], eps=self.config.rms_norm_eps).flatten(1)
            return (normed * weights[f"{name}.mixer_norm"].float()).to(h.dtype)
        b, c, x = self._times(h, layer, "in_proj").chunk(3, -1)
        return pass_tokens(partial(short_convolution, conv), ((b * x).float(),), held, *records).to(h.dtype) * c

    def keys_values(self, h: Tensor, layer: int, rotations: Rotations) -> tuple[Tensor, Tensor]:
        """Keys and values, each [n, key-value heads, head_dim], of the first n tokens as in `queries`."""
        spec = self.config.layers[layer]
        if spec.latent is not None:
            cells = self._latent_cells(h, layer, rotations, spec.latent)
            return cells, cells
        k = self._projected(h, layer, "k")
        v = self._heads(k if spec.keys_are_values else self._projected(h, layer, "v"), layer, "v")
        v = F.rms_norm(v, v.shape[-1:], eps=self.config.rms_norm_eps) if spec.v_norm else v
        return self._rotated(self._heads(k, layer, "k"), layer, "k", rotations), v

    def _latent_queries(self, h: Tensor, layer: int, rotations: Rotations, latent: LatentAttention) -> Tensor:
        """Queries [n, heads, cell_dim] of latents, and of the rotated key beside each."""
        if latent.q_rank is not None:
            h = self._norm(self._times(h, layer, "q_a_proj"), f"layers.{layer}.q_a_norm")
        heads = self._times(h, layer, "q_proj").unflatten(-1, (self.config.num_attention_heads, -1))
        own, rotated = heads.split((latent.nope_dim, latent.rope_dim), -1)
        own = torch.einsum("nhd,hrd->nhr", own, self._weights[f"layers.{layer}.latent_queries"])
        return torch.cat((own, self._rotated(rotated, layer, "q", rotations)), -1)

    def _latent_cells(self, h: Tensor, layer: int, rotations: Rotations, latent: LatentAttention) -> Tensor:
        """Latents, and the rotated key beside each, [n, 1, cell_dim]."""
        own, key = self._times(h, layer, "kv_proj").unsqueeze(1).split((latent.kv_rank, latent.rope_dim), -1)
        own = self._norm(own, f"layers.{layer}.kv_norm")
        return torch.cat((own, self._rotated(key, layer, "k", rotations)), -1)

    def _latent_values(self, attended: Tensor, layer: int, latent: LatentAttention) -> Tensor:
        """Values [n, heads * value_dim], of what attention read of cells [n, heads * cell_dim]."""
        read = attended.unflatten(-1, (-1, latent.cell_dim))[..., : latent.kv_rank]
        return torch.einsum("nhr,hvr->nhv", read, self._weights[f"layers.{layer}.latent_values"]).flatten(1)

    def _projected(self, h: Tensor, layer: int, name: str) -> Tensor:
        """One of q, k, v, before norms."""
        return self._times(h, layer, f"{name}_proj", f"{name}_bias")

    def _heads(self, projected: Tensor, layer: int, name: str) -> Tensor:
        """One of q, k, v, before rotation: [n, heads, head_dim]."""
        norm, kind = f"layers.{layer}.{name}_norm", self.config.layers[layer].qk_norm
        sizes = -1, self.config.sizes(layer).head_dim
        heads = (self._norm(projected, norm) if kind == "whole" else projected).unflatten(-1, sizes)
        return self._norm(heads, norm) if kind == "head" else heads

    def _rotated(self, x: Tensor, layer: int, name: str, rotations: Rotations) -> Tensor:
        """Heads of q or k, rotated by their positions."""
        spec = self.config.layers[layer]
        if spec.rope is not None:
            x = rotate(x, rotations[spec.rope][:, : len(x)], spec.rope.interleaved)
        return self._norm(x, f"layers.{layer}.{name}_norm") if spec.qk_norm == "rotated" else x

    def sinks(self, layer: int) -> Tensor | None:
        """The logits of a layer's attention sinks [heads], if it has some."""
        return self._weights.get(f"layers.{layer}.sinks")

    def finish_layer(self, expected: Tensor, attended: Tensor, layer: int, given: Tensor | None = None) -> Tensor:
        """Hidden states [n, hidden_width] after a layer, from what it starts from and from attention's outputs.

        `given` is what the layer gets besides, [n, layer_input_size].
        """
        name, spec, x = f"layers.{layer}", self.config.layers[layer], expected[:, : self.config.hidden_size]
        attended = attended if spec.latent is None else self._latent_values(attended, layer, spec.latent)
        projected = self._times(attended, layer, "o_proj" if spec.mixer is None else "out_proj", "o_bias")
        x = self._added(x, projected, f"{name}.post_attention_norm")
        if spec.laurel_rank:
            h = self.attention_input(expected, layer)
            beside = self._times(self._times(h, layer, "laurel_left"), layer, "laurel_right")
            x = (x + h + self._norm(beside, f"{name}.post_laurel_norm")) * 0.5**0.5
        x = self._added(x, self._mlp(x, layer), f"{name}.post_mlp_norm")
        if self.config.num_streams > 1:
            x = corrected(expected, x, self._modalities(x, layer), self._weights[f"{name}.correct_coefs"])
        if given is not None:
            x = self._with_input(x, layer, given)
        return _scaled(x, spec.output_scale)

    def _with_input(self, x: Tensor, layer: int, given: Tensor) -> Tensor:
        """Hidden states x [n, hidden_width], and what a layer makes of its input; of several streams, not the first."""
        size, count, scale = self.config.hidden_size, self.config.num_streams, f"layers.{layer}.correct_scale"
        first = x[:, :size] * self._weights[scale] if count > 1 else x
        h = self._times(self._gated(self._times(first, layer, "input_gate"), given), layer, "input_proj")
        h = self._norm(h, f"layers.{layer}.post_input_norm")
        return x + h if count == 1 else torch.cat((x[:, :size], x[:, size:] + h.repeat(1, count - 1)), -1)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [N, vocab_size] of hidden states [N, hidden_width] after the last layer."""
        return self._logits(self.head_inputs(x))

    def head_inputs(self, x: Tensor, is_mtp: bool = False) -> Tensor:
        """What the head reads [N, hidden_size], of hidden states [N, hidden_width] after the last or the MTP layer."""
        norm = f"layers.{self.config.num_hidden_layers}.head_norm" if is_mtp else "norm"
        return self._norm(merged(x, self._of_streams("unembed")), norm)

    def _logits(self, read: Tensor) -> Tensor:
        head = self._matrix("lm_head" if "lm_head" in self.weight_bytes else "embed_tokens")
        return capped(_scaled(F.linear(read, head), self.config.logit_scale), self.config.logit_cap)

    def _added(self, x: Tensor, h: Tensor, norm: str) -> Tensor:
        """Hidden states and what attention or MLP computed, added."""
        return torch.add(x, self._norm(h, norm), alpha=self.config.residual_scale)

    def _times(self, h: Tensor, layer: int, name: str, bias: str = "") -> Tensor:
        """Rows h times a matrix of a layer, plus a bias, where the model has one of this name."""
        return F.linear(h, self._matrix(f"layers.{layer}.{name}"), self._weights.get(f"layers.{layer}.{bias}"))

    def _matrix(self, name: str) -> Tensor:
        """A matrix by name; one that keeps its bits is dequantised for this use."""
        if self._fused is not None and name in self._packed:
            return self._fused.dequantised(self._packed[name])
        return self._weights[name]

    def _mlp(self, x: Tensor, layer: int) -> Tensor:
        """The MLP, or what takes its place or stands beside it, on hidden states x [n, hidden_size]."""
        experts, name = self.config.layers[layer].experts, f"layers.{layer}"
        h = self._norm(x, f"{name}.pre_mlp_norm")
        if experts is not None and not experts.beside:
            return self._mixture(h, h, layer, experts)
        gate, up = self._times(h, layer, "gate_proj"), self._times(h, layer, "up_proj")
        if (cutoff := self.config.layers[layer].gate_cutoff) is not None:
            gate = F.relu(gate - gate.mean(-1, keepdim=True) - cutoff * gate.std(-1, correction=0, keepdim=True))
        dense = self._times(self._gated(gate, up), layer, "down_proj")
        if experts is None:
            return dense
        if experts.beside != "normed":
            if experts.beside == "gated":
                gate = self._weights[f"{name}.shared_gate"]
                dense = dense * torch.sigmoid((h * gate.to(h.dtype)).sum(-1, keepdim=True))
            return self._mixture(h, h, layer, experts) + dense
        routed = self._norm(x, f"{name}.router_scale") * self.config.hidden_size**-0.5
        mixed = self._mixture(self._norm(x, f"{name}.pre_experts_norm"), routed, layer, experts)
        return self._norm(dense, f"{name}.post_dense_norm") + self._norm(mixed, f"{name}.post_experts_norm")

    def _mixture(self, x: Tensor, routed: Tensor, layer: int, experts: Experts) -> Tensor:
        """The MLPs of the experts that the router chooses for each row, weighted: [n, hidden_size]."""
        logits = self._times(routed, layer, "router", "router_bias").float()
        scores = logits.sigmoid() if experts.scores == "sigmoid" else logits.softmax(-1)
        correction = self._weights.get(f"layers.{layer}.router_correction")
        ranks = logits if correction is None else scores + correction  # logits: no two large ones are equal
        ids = ranks.topk(experts.num_experts_per_tok).indices  # [n, chosen]
        shares = scores.gather(-1, ids)
        shares = shares / shares.sum(-1, keepdim=True) if experts.norm_topk_prob else shares
        shares = shares * experts.scale
        if (scale := self._weights.get(f"layers.{layer}.experts_scale")) is not None:
            shares = shares * scale[ids]

        def of_chosen(equation: str, h: Tensor, part: str) -> Tensor:
            out = torch.einsum(equation, h, self._weights[f"layers.{layer}.{part}_experts"][ids])
            return out + self._weights[f"layers.{layer}.{part}_experts_bias"][ids] if experts.has_bias else out

        def of_one(h: Tensor, part: str, expert: int) -> Tensor:
            bias = self._weights[f"layers.{layer}.{part}_experts_bias"][expert] if experts.has_bias else None
            return F.linear(h, self._weights[f"layers.{layer}.{part}_experts"][expert], bias)

        if len(x) <= FEW_TOKENS or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            # Each token gets a copy of its experts, so that the operations do not depend on the router's choice.
            gates, ups = (of_chosen("nh,nkih->nki", x, part) for part in ("gate", "up"))
            if experts.scales_inputs:  # products of scaled inputs are scaled products
                gates, ups = ((part * shares.unsqueeze(-1)).to(x.dtype) for part in (gates, ups))
            outs = of_chosen("nki,nkhi->nkh", self._gated(gates, ups, experts), "down")
            return (outs if experts.scales_inputs else outs * shares.unsqueeze(-1)).sum(1).to(x.dtype)
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            tokens, place = (ids == expert).nonzero(as_tuple=True)
            share, rows = shares[tokens, place, None], x[tokens]
            rows = (rows * share).to(x.dtype) if experts.scales_inputs else rows
            h = of_one(self._gated(of_one(rows, "gate", expert), of_one(rows, "up", expert), experts), "down", expert)
            out.index_add_(0, tokens, (h if experts.scales_inputs else h * share).to(x.dtype))
        return out

    def _gated(self, gate: Tensor, up: Tensor, experts: Experts | None = None) -> Tensor:
        """The activation of `gate`, times `up`; clamped as `Experts` says."""
        if experts is None or experts.clamp is None:
            return self._activation(gate) * up
        alpha, limit = experts.clamp
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)

    def _activation(self, x: Tensor) -> Tensor:
        return F.silu(x) if self.config.activation == "silu" else F.gelu(x, approximate="tanh")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm along rows, where the model has one of this name; else x itself."""
        weight = self._weights.get(name)
        if weight is None:
            return x
        return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, self.config.rms_norm_eps)


@contextmanager
def _lost_devices() -> Iterator[None]:
    """Raise a DeviceLostError where PyTorch says that a device is lost: CUDA then refuses all else in this process."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLostError(str(error).partition("\n")[0]) from error


def stacked(batch: TokenBatch, passages: Sequence[Passage] = (), placed: np.ndarray | None = None) -> np.ndarray:
    """The tokens, positions and slots of a batch, int64 [3 + 2 * recurrent layers + parts of a plan, N].

    Then come the records which the slots of the tokens read in each recurrent layer, those which they write, and the
    places of states that pass.
    """
    rows = [np.array((batch.tokens, batch.positions, batch.slots), np.int64)]
    if passages:
        place = {passage.slot: index for index, passage in enumerate(passages)}
        of_tokens = [place[slot] for slot in batch.slots.tolist()]
        for records in ([passage.reads for passage in passages], [passage.writes for passage in passages]):
            rows.append(np.stack(records, 1)[:, of_tokens])
    if placed is not None:
        rows.append(placed)
    return np.concatenate(rows)


def argmax(logits: Tensor) -> Tensor:
    """The argmax of each row of logits, int64 [N]; -1 where the largest is not a finite number."""
    highest, ids = logits.max(-1)  # a NaN, if there is one
    return torch.where(highest.isfinite(), ids, -1)


def adapt(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Hidden states [n, hidden_size] after an adapter (`Adapters`)."""
    return x + F.linear(F.silu(F.linear(F.rms_norm(x, (x.shape[-1],), eps=EPS), down)), up)


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


def capped(x: Tensor, cap: float | None) -> Tensor:
    """x brought between -cap and cap by tanh; with None, x itself."""
    return x if cap is None else cap * torch.tanh(x / cap)


def rotation_table(rope: Rope, context_length: int, device: str) -> Tensor:
    """Cosines and sines of each position, f32 [2, context_length, dim / 2]."""
    pairs = torch.arange(0, rope.dim, 2, dtype=torch.float32, device=device)
    frequencies = rope.theta ** (-pairs / rope.dim)
    if factors := rope.factors_for(context_length):
        frequencies /= torch.tensor(factors, dtype=torch.float32, device=device)
    positions = torch.arange(context_length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)
    return torch.stack((angles.cos(), angles.sin())) * rope.attention_factor


def visible_cells(positions: Tensor, kv_length: int, window: int | None) -> Tensor:
    """Which cells of its slot each token at positions [N] attends to: bool [N, kv_length]."""
    cells, own = torch.arange(kv_length, device=positions.device), positions.unsqueeze(1)
    visible = cells <= own
    return visible if window is None else visible & (cells > own - window)


def rotate(x: Tensor, rotation: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of heads x [n, heads, head_dim] in f32, by cosines and sines [2, n, 1, dim / 2]."""
    pairs, axis = ((-1, 2), -1) if interleaved else ((2, -1), -2)
    cos, sin = rotation
    dim = 2 * cos.shape[-1]
    a, b = x[..., :dim].float().unflatten(-1, pairs).unbind(axis)
    rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), axis).flatten(-2).to(x.dtype)
    return rotated if dim == x.shape[-1] else torch.cat((rotated, x[..., dim:]), -1)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    slots: Tensor,
    runs: Runs | None,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [n, heads, head_dim] over caches [slots, kv heads, cells, head_dim]: [n, heads * head_dim].

    `cap`: of scores, if there is one. `sinks` [heads], if there are some, take their shares and give nothing.
    """
    group = q.shape[1] // keys.shape[1]  # heads that share keys and values
    # Neither way asks PyTorch for grouped queries: with a mask, only its slowest kernels support them on a GPU.
    if runs is None:  # one token a row, the heads of a group as its queries: [n, key-value heads, group, head_dim]
        if len(keys) > 1:  # a single slot is read where it is
            keys, values = keys[slots], values[slots]
        queries, mask = q.unflatten(1, (-1, group)), visible[:, None, None]
        shared = None if sinks is None else sinks.view(-1, group)
        return _attended(queries, keys, values, mask, scale, cap, shared).flatten(1)
    parts = []
    for slot, first, end in runs:  # the tokens of a slot together: [1, heads, tokens, head_dim]
        end = min(end, len(q))
        if first < end:
            queries = q[first:end].transpose(0, 1).unsqueeze(0)
            k, v = (cache[slot : slot + 1].repeat_interleave(group, 1) for cache in (keys, values))
            shared = None if sinks is None else sinks[:, None]
            out = _attended(queries, k, v, visible[first:end], scale, cap, shared)
            parts.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(parts)


def _attended(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention of q [n, heads, rows, head_dim]; `sinks` [heads, rows] or [heads, 1]."""
    if sinks is None and cap is None:
        return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale)
    scores = capped((scale * q @ keys.transpose(-1, -2)).float(), cap).masked_fill(~mask, -torch.inf)
    return shares(scores, None if sinks is None else sinks[..., None]).to(values.dtype) @ values


def shares(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores [..., rows, cells], of which sinks [..., rows or 1, 1], if any, take a part."""
    if sinks is None:
        return scores.softmax(-1)
    sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


def check_device(device: str) -> None:
    """Check that PyTorch can use a device.

    Raises:
        RequestError: it cannot.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise RequestError("PyTorch finds no CUDA device", "use --device cpu, or install a CUDA build of PyTorch")


def to_torch(tensor: StoredTensor | Tensor) -> Tensor:
    """One of our tensors, dequantised on the CPU; one of PyTorch's own is returned as it is.

    Raises:
        ModelError: it is quantised, and there is nothing to dequantise it with.
    """
    if isinstance(tensor, Tensor):
        return tensor
    if (stored := DTYPES.get(tensor.dtype.lower())) is not None:
        return torch.from_numpy(tensor.data.copy()).view(stored).reshape(tensor.shape)
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise ModelError("quantised weights need the gguf package here", 'pip install "taper-llm[torch]"') from None
    rows = tensor.data.reshape(-1, tensor.data.size // int(np.prod(tensor.shape[:-1])))
    try:
        floats = dequantize(np.ascontiguousarray(rows), GGMLQuantizationType[tensor.dtype])
    except (KeyError, NotImplementedError):
        raise ModelError(
            f"PyTorch does not run {tensor.dtype} weights here", "try a newer gguf package, or another file"
        ) from None
    return torch.from_numpy(floats.reshape(tensor.shape))
