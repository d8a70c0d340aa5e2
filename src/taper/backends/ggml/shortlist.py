"""The output head in two steps: previewed logits of all tokens, then the exact ones of those that matter.

The exact logits of chosen tokens have the bits that the whole head gives: their rows of the matrix are copied together
and multiplied by the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...models.preview import TABLE_TYPE, Factors, Preview, Rows, find_preview, fit_factors, head_parts
from ...models.tensors import WEIGHT_TYPES, LoadedModel, Tensor
from .. import Adjust, Shortlist, available_threads, likeliest
from .library import TYPE_F32, Device, ggml
from .repack import CopiedTensors
from .tensors import Computation, TensorContext, aligned, capped
from .weights import as_floats, convert

MAX_TOKENS = 4096  # of a shortlist, or an eighth of a large vocabulary
_BUCKET = 256  # rows: a graph serves as many tokens as fit
_HELD_OUT = 256  # states that give the margin
_SURE, _SAFETY, _MIN_MARGIN = 0.999, 1.25, 2.0  # it is enough for this share of them, and a quarter more


class PreviewTensors:
    """A preview's `rotation` [hidden_size, rank], `shift` [rank], `table` [rank, vocab_size] and `bias` as tensors."""

    def __init__(self, preview: Preview, threads: int, buffer_type: Any = None) -> None:
        self.margin, self.mean_row, self.saves_time = preview.margin, preview.mean_row, preview.saves_time
        self.rank, self.num_bytes = preview.rank, preview.table.nbytes  # of the table
        self._context = TensorContext(4, buffer_type=buffer_type)
        parts = preview.rotation, preview.shift, preview.bias
        self.rotation, self.shift, self.bias = map(self._context.over, parts)
        tensor = Tensor(TABLE_TYPE, (len(preview.bias), preview.rank), preview.table)
        types = {"table": TABLE_TYPE}
        self._copied = CopiedTensors(
            {"table": tensor}, types, lambda _: preview.table, lambda _: None, threads, (), buffer_type
        )
        self.table = self._copied.tensors.get("table")
        if self.table is None:
            self.table = self._context.over(preview.table, WEIGHT_TYPES[TABLE_TYPE][0], tensor.shape)


def kept_preview(
    head: str, model: LoadedModel, dtype: str, threads: int | None, device: Device | None
) -> PreviewTensors | None:
    """The preview that the cache has for a model, its weights' type and a place; None if it has none, or none is used.

    Raises:
        ModelError: the device has not enough memory.
    """
    preview = None if head == "full" else find_preview(model, kept_as(dtype, device))
    if preview is None:
        return None
    buffer_type = None if device is None else ggml.backend_dev_buffer_type(device.pointer)
    return PreviewTensors(preview, threads or available_threads(), buffer_type)


def kept_as(dtype: str, device: Device | None) -> str:
    """The name by which a preview is kept: whether it saves time differs from device to device."""
    return dtype if device is None else f"{dtype}-{device.name.lower()}"


def make_preview(
    states: Sequence[np.ndarray], rows: Rows, vocab_size: int, rank: int, advance: Callable[[float], None]
) -> Preview:
    """Make the preview of a head; the end of each text is held out and gives the margin.

    Args:
        states: what the head is multiplied with, for each text float32 [n, hidden_size].
        rows: rows of the head by their indices, float32 [n, hidden_size].
        vocab_size: of the head.
        rank: dimensions to keep.
        advance: called with the part that is done, 0 to 1.
    """
    sizes = [-(-len(part) * 3 // 4) for part in states]
    fitted = np.concatenate([part[:size] for part, size in zip(states, sizes, strict=True)])
    held_out = np.concatenate([part[size:] for part, size in zip(states, sizes, strict=True)])
    preview = quantised(fit_factors(fitted, rows, vocab_size, rank), 0.0, rows, vocab_size, advance)
    return replace(preview, margin=fitted_margin(preview, held_out[:: max(1, len(held_out) // _HELD_OUT)], rows))


def quantised(
    factors: Factors, margin: float, rows: Rows, vocab_size: int, advance: Callable[[float], None]
) -> Preview:
    """A preview from its factors."""
    tables, biases = list[np.ndarray](), list[np.ndarray]()
    for part in head_parts(rows, vocab_size):
        table, bias = factors.table(part)
        tables.append(convert(Tensor("F32", table.shape, table.reshape(-1).view(np.uint8)), TABLE_TYPE))
        biases.append(bias)
        advance(sum(map(len, biases)) / vocab_size)
    rotation = factors.rotation.astype(np.float16)
    table, bias = np.concatenate(tables), np.concatenate(biases)
    return Preview(rotation, factors.shift, table, bias, factors.mean_row, margin)


def fitted_margin(preview: Preview, states: np.ndarray, rows: Rows) -> float:
    """How far below the highest approximation the most probable tokens of states, float32 [n, hidden_size], may be."""
    inner = states @ preview.rotation.astype(np.float32).T + preview.shift
    table, first = preview.table.reshape(len(preview.bias), -1), 0
    exact, approximate, highest = np.full((3, len(states)), -np.inf)  # the first two of the most probable token so far
    for part in head_parts(rows, len(preview.bias)):
        those = slice(first, first := first + len(part))
        floats = as_floats(table[those].reshape(-1), TABLE_TYPE).reshape(len(part), -1)
        logits, previewed = states @ part.T, inner @ floats.T + preview.bias[those]
        best = np.arange(len(states)), logits.argmax(1)
        approximate = np.where(logits[best] > exact, previewed[best], approximate)
        exact, highest = np.maximum(exact, logits[best]), np.maximum(highest, previewed.max(1))
    return max(_MIN_MARGIN, _SAFETY * float(np.quantile(highest - approximate, _SURE)))


def longest(vocab_size: int) -> int:
    """How many tokens a shortlist may have; if more matter, the whole head is computed."""
    return max(MAX_TOKENS, vocab_size // 8 // _BUCKET * _BUCKET)


class HeadProducts:
    """Products of one hidden state with chosen rows of the head, on the CPU, or with the whole.

    Args:
        whole: the tensor of the head that a forward of one token uses, on a device if the model lies there.
        rows: the same weights, uint8 [vocab_size, bytes of a row].
        dtype: their type.
        scale, cap: of logits.
        compute_whole: runs a graph where the model lies.
        compute_chosen: runs one on the CPU.
        buffer_type: of the device.
    """

    def __init__(
        self,
        whole: Any,
        rows: np.ndarray,
        dtype: str,
        scale: float,
        cap: float | None,
        compute_whole: Callable[[Computation], object],
        compute_chosen: Callable[[Computation], object],
        buffer_type: Any = None,
    ) -> None:
        self._whole, self._rows, self._dtype, self._buffer_type = whole, rows, dtype, buffer_type
        self._scale, self._cap, self._compute = scale, cap, (compute_whole, compute_chosen)
        self._chosen = aligned(longest(len(rows)) * rows.shape[1]).reshape(-1, rows.shape[1])  # rows copied together
        self._graphs: dict[int, _Product] = {}  # by the number of rows; 0 for the whole head

    def exact(self, state: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The logits of some tokens, float32 [n], from a state float32 [hidden_size]."""
        np.take(self._rows, ids, 0, self._chosen[: len(ids)], mode="clip")  # other modes copy twice
        return self._product(-(-len(ids) // _BUCKET) * _BUCKET, state)[: len(ids)]

    def whole(self, state: np.ndarray) -> np.ndarray:
        """The logits of all tokens, float32 [vocab_size]."""
        return self._product(0, state)

    def _product(self, room: int, state: np.ndarray) -> np.ndarray:
        if room not in self._graphs:
            context, matrix, buffer_type = TensorContext(8, graph_nodes=6), self._whole, self._buffer_type
            if room:
                shape, buffer_type = (room, matrix.contents.ne[0]), None
                matrix = context.over(self._chosen[:room], WEIGHT_TYPES[self._dtype][0], shape)
            self._graphs[room] = _Product(context, matrix, self._scale, self._cap, buffer_type)
        graph = self._graphs[room]
        graph.state[:] = state
        self._compute[room > 0](graph)
        logits: np.ndarray = graph.logits.copy()
        return logits


class _Product(Computation):
    """A prepared product of a matrix with one state; set `state`, compute, then read `logits`."""

    def __init__(
        self, context: TensorContext, matrix: Any, scale: float, cap: float | None, buffer_type: Any = None
    ) -> None:
        super().__init__()
        self._context, (hidden_size, rows) = context, matrix.contents.ne[:2]
        self.state, self.logits = np.empty(hidden_size, np.float32), np.empty(rows, np.float32)
        state = context.new(TYPE_F32, (1, hidden_size))
        logits = capped(context.pointer, ggml.mul_mat(context.pointer, matrix, state), scale, cap)
        self.pointer = ggml.new_graph_custom(context.pointer, 6, False)
        ggml.build_forward_expand(self.pointer, logits)
        if buffer_type is not None:
            context.allocate(buffer_type)
            self.sent.append((state, self.state))
            self.fetched.append((logits, self.logits))
            return
        state.contents.data = self.state.ctypes.data
        # Each node works in place.
        for node in range(ggml.graph_n_nodes(self.pointer)):
            ggml.graph_node(self.pointer, node).contents.data = self.logits.ctypes.data


@dataclass(frozen=True)
class Previewed:
    """The logits of one token: approximations of all, and the exact ones on demand (see `PreviewedLogits`)."""

    approximate: np.ndarray
    state: np.ndarray  # float32 [hidden_size], what the head is multiplied with
    margin: float
    products: HeadProducts

    def likeliest(self) -> tuple[int, float]:
        """The most probable token and its probability (see `PreviewedLogits`)."""
        return likeliest(self.approximate)

    def shortlist(self, reach: float = 0.0, adjust: Adjust | None = None) -> Shortlist | None:
        """The tokens within the margin, or within `reach` if that is more (see `PreviewedLogits`)."""
        if adjust is not None:
            adjust(self.approximate, None)
        if (ids := self._within(reach)) is None:
            return None
        logits = self.exact(ids)
        if adjust is not None:
            adjust(logits, ids)
        return ids, logits

    def _within(self, reach: float) -> np.ndarray | None:
        least = self.approximate.max() - max(self.margin, reach)
        ids = (self.approximate >= least).nonzero()[0]
        return ids if 0 < len(ids) <= longest(len(self.approximate)) and np.isfinite(least) else None

    def exact(self, ids: np.ndarray) -> np.ndarray:
        """The logits of some tokens: float32 [n]."""
        return self.products.exact(self.state, ids)

    def whole(self) -> np.ndarray:
        """The logits of all tokens: float32 [vocab_size]."""
        return self.products.whole(self.state)

    def argmax(self) -> int:
        """The most probable token; -1 if its logit is not a finite number."""
        ids = self._within(0.0)
        if ids is not None and len(ids) == 1:
            return int(ids[0])
        logits = self.whole() if ids is None else self.exact(ids)
        place = int(logits.argmax())  # the first NaN, if there is one
        if not np.isfinite(logits[place]):
            return -1
        return place if ids is None else int(ids[place])
