"""Previews of output heads: a low-rank copy of the vocabulary's matrix that finds the tokens whose logits matter.

A head W [vocab_size, hidden_size] turns the last hidden state h into logits. With m and C, the mean and the covariance
of hidden states, and U, the first eigenvectors of C^(1/2) W^T W C^(1/2), the closest that some dimensions can come to
the logits on average is W m + W C^(1/2) U U^T C^(-1/2) (h - m). A preview keeps `rotation` = U^T C^(-1/2), `table` =
W C^(1/2) U in four bits, and what is left of it: `shift` = -U^T C^(-1/2) m and `bias` = W m. W stands without its mean
row here, whose product with h is the same for all logits; only penalties ask for it.

The shortlist of a step are the tokens whose approximate logits lie within a margin of the highest; their logits are
then computed from W itself. A preview is made once for a model, from its hidden states on a text of many kinds.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import reduce
from importlib import resources
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from ..errors import ModelError, TaperWarning
from .download import cache_folder
from .files import write_whole
from .safetensors_files import read_safetensors
from .tensors import LoadedModel, Tensor, row_bytes

VERSION = 1  # of how previews are made; others in the cache are not used
TABLE_TYPE = "Q4_0"
UNUSUAL_TOKENS = 8  # at the beginning of a text, whose hidden states are unlike all others; outputs follow a prompt
_MAX_SHARE = 0.14  # of a model's bytes that its preview may have
_RIDGE = 1e-4  # of the mean eigenvalue of C, added to each: directions that the text did not show
_SAMPLED_ROWS = 1 << 15  # of W, for its second moments
_CHUNK = 1 << 12  # rows of W at a time
_BLOCK = 1 << 10  # bytes of a tensor that tell models apart
_METADATA = "taper_preview"
_STORED = {"F32": np.float32, "F16": np.float16, "U8": np.uint8}
# The tensors of a file, and their types.
_PARTS = dict.fromkeys(("shift", "bias", "mean_row"), np.float32) | {"rotation": np.float16, "table": np.uint8}


Rows = Callable[[np.ndarray], np.ndarray]  # from indices to rows of a head, float32 [n, hidden_size]


@dataclass(frozen=True)
class Factors:
    """What a preview is made of, in float32; see the module."""

    rotation: np.ndarray  # [rank, hidden_size]
    shift: np.ndarray  # [rank]
    basis: np.ndarray  # C^(1/2) U [hidden_size, rank]
    mean: np.ndarray  # m [hidden_size]
    mean_row: np.ndarray  # of W [hidden_size]

    def table(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the table before it is quantised, [n, rank], and of the bias, [n], for rows of W [n, hidden_size]."""
        centred = rows - self.mean_row
        return centred @ self.basis, centred @ self.mean


@dataclass(frozen=True)
class Preview:
    """A low-rank copy of a model's head; see the module."""

    rotation: np.ndarray  # float16 [rank, hidden_size]
    shift: np.ndarray  # float32 [rank]
    table: np.ndarray  # uint8 [bytes], `TABLE_TYPE` [vocab_size, rank]
    bias: np.ndarray  # float32 [vocab_size]
    mean_row: np.ndarray  # float32 [hidden_size]
    margin: float
    saves_time: bool = True  # as measured where it was made

    @property
    def rank(self) -> int:
        """Dimensions that it keeps."""
        return len(self.rotation)


def sample_texts() -> list[str]:
    """A text of many kinds in parts: languages, code, JSON, HTML, mathematics, chats."""
    text = (resources.files(__package__) / "sample_text.txt").read_text(encoding="utf-8")
    return [part.strip("\n") for part in text.split("\n---\n")]


def preview_rank(hidden_size: int, vocab_size: int, total_bytes: int) -> int:
    """How many dimensions a preview keeps, in whole blocks. Small models need a larger part of theirs."""
    wanted = hidden_size * 5 // (8 if hidden_size < 1024 else 12)
    affordable = int(_MAX_SHARE * total_bytes / (row_bytes(TABLE_TYPE, 32) / 32 * vocab_size))
    return max(32, min(wanted, affordable) // 32 * 32)


def fit_factors(states: np.ndarray, rows: Rows, vocab_size: int, rank: int) -> Factors:
    """Fit the factors of a preview.

    Args:
        states: what the head is multiplied with, float32 [n, hidden_size].
        rows: rows of the head by their indices, float32 [n, hidden_size].
        vocab_size: of the head.
        rank: dimensions to keep.
    """
    mean = states.mean(0)
    centred = (states - mean).astype(np.float64)
    covariance = centred.T @ centred / len(states)
    covariance += np.eye(len(mean)) * (_RIDGE * np.trace(covariance) / len(mean))
    values, vectors = np.linalg.eigh(covariance)
    root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    total, gram, count = np.zeros(len(mean)), np.zeros_like(covariance), 0
    step = max(1, vocab_size // _SAMPLED_ROWS)
    for part in head_parts(rows, vocab_size, step):
        total, count = total + part.sum(0, dtype=np.float64), count + len(part)
        rotated = part @ root.astype(np.float32)
        gram += rotated.T @ rotated
    mean_row = total / count
    middle = mean_row @ root
    gram -= count * np.outer(middle, middle)
    chosen = np.linalg.eigh(gram)[1][:, : -rank - 1 : -1]  # eigenvalues ascend
    rotation, basis = chosen.T @ inverse, root @ chosen
    parts = rotation, -rotation @ mean, basis, mean, mean_row
    return Factors(*(part.astype(np.float32) for part in parts))


def head_parts(rows: Rows, vocab_size: int, step: int = 1) -> Iterator[np.ndarray]:
    """Every `step`th row of a head, some at a time: float32 [n, hidden_size]."""
    for first in range(0, vocab_size, step * _CHUNK):
        yield rows(np.arange(first, min(vocab_size, first + step * _CHUNK), step))


def fingerprint(model: LoadedModel) -> str:
    """What tells a model's weights apart: a hash of samples of every tensor, 32 hex digits."""
    content = hashlib.sha256()
    for name, tensor in sorted(model.tensors.items()):
        content.update(f"{VERSION} {name} {tensor.dtype} {tensor.shape} ".encode())
        middle = len(tensor.data) // 2
        content.update(tensor.data[:_BLOCK].tobytes() + tensor.data[middle : middle + _BLOCK].tobytes())
    return content.hexdigest()[:32]


def shipped_factors(known: str) -> tuple[Factors, float] | None:
    """The factors that come with Taper for a model of this fingerprint, and their margin; None if there are none."""
    shipped = map(read_factors, factor_files())
    return next(((factors, margin) for key, factors, margin in shipped if key == known), None)


def factor_files() -> list[Path]:
    """The factors that come with Taper, a file for each model."""
    with resources.as_file(resources.files("taper") / "previews") as folder:
        return sorted(folder.glob("*.safetensors"))


def read_factors(path: Path) -> tuple[str, Factors, float]:
    """A model's fingerprint, the factors of its preview, and their margin, as `save_factors` wrote them."""
    with safe_open(path, framework="numpy") as file:
        metadata = json.loads(file.metadata()[_METADATA])
        parts = (file.get_tensor(part.name).astype(np.float32) for part in fields(Factors))
        return metadata["fingerprint"], Factors(*parts), float(metadata["margin"])


def save_factors(path: Path, known: str, factors: Factors, margin: float) -> None:
    """Write factors for a model of this fingerprint, in f16."""
    metadata = {_METADATA: json.dumps({"fingerprint": known, "margin": margin})}
    parts = {part.name: getattr(factors, part.name).astype(np.float16) for part in fields(Factors)}
    write_whole(path, save(parts, metadata))


def find_preview(model: LoadedModel, dtype: str) -> Preview | None:
    """The preview that the cache has for a model and the type that its weights are used in; None if it has none.

    Warns if there is one, but damaged.
    """
    path = _path(fingerprint(model), dtype)
    if not path.exists():
        return None
    try:
        tensors, metadata = read_safetensors(path)
        about = json.loads(metadata[_METADATA])
        parts = {name: _array(tensors[name], dtype) for name, dtype in _PARTS.items()}
        preview = Preview(**parts, margin=float(about["margin"]), saves_time=bool(about["saves_time"]))
        rank, vocab_size, hidden_size = preview.rank, model.config.vocab_size, model.config.hidden_size
        shapes = {"rotation": (rank, hidden_size), "shift": (rank,), "bias": (vocab_size,), "mean_row": (hidden_size,)}
        shapes["table"] = (vocab_size * row_bytes(TABLE_TYPE, rank),)
        fits = all(parts[name].shape == shapes[name] for name in _PARTS)
        if fits and math.isfinite(preview.margin) and about["crc32"] == _checksum(preview):
            return preview
        reason = "it does not fit the model, or has changed"
    except (ValueError, TypeError, KeyError, ModelError) as error:
        reason = str(error)
    warnings.warn(f"the preview in {path} is damaged, so it is made again: {reason}", TaperWarning, stacklevel=2)
    return None


def keep_preview(known: str, dtype: str, preview: Preview) -> None:
    """Keep the preview of a model of this fingerprint in the cache, if it can be written to."""
    about = {"margin": preview.margin, "saves_time": preview.saves_time, "crc32": _checksum(preview)}
    metadata = {_METADATA: json.dumps(about)}
    with suppress(OSError):
        write_whole(_path(known, dtype), save({name: getattr(preview, name) for name in _PARTS}, metadata))


def previews_folder() -> Path:
    """Where previews are kept."""
    return cache_folder() / "previews"


def kept_previews() -> list[Path]:
    """The previews in the cache."""
    return sorted(previews_folder().glob("*.safetensors"))


def _array(tensor: Tensor, dtype: type) -> np.ndarray:
    """A part of a preview: bytes stay in the file, numbers are copied to where ggml can read them."""
    if _STORED[tensor.dtype] is not dtype:
        raise ModelError(f"a part is in {tensor.dtype}")
    values = tensor.data.view(dtype).reshape(tensor.shape)
    return values if dtype is np.uint8 else values.copy()


def _path(known: str, dtype: str) -> Path:
    return previews_folder() / f"{known}-{dtype}.safetensors"


def _checksum(preview: Preview) -> int:
    return reduce(lambda checksum, name: zlib.crc32(getattr(preview, name), checksum), _PARTS, 0)
