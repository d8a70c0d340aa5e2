"""Safetensors files, mapped: the library checks their headers, the bytes come from the map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError, unique_keys
from .files import open_file
from .tensors import Tensor

MAX_HEADER_BYTES = 16 << 20  # a thousand tensors need a hundredth of that


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file as they are stored, as views of it since numpy has no bfloat16, and its metadata.

    Raises:
        ModelError: the file cannot be read or is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with open_file(path) as file:
            header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise ModelError(f"{path} has a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES} are read")
        with safe_open(path, framework="numpy"):
            data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        start = 8 + header_bytes
        header = json.loads(data[8:start].tobytes(), object_pairs_hook=unique_keys)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ModelError(f"cannot read {path}: {error}", "download it again") from None
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), data[start + first : start + last])
    return tensors, metadata
