"""What ggml's CPU backend can do, by functions that it gives out by name only."""

from __future__ import annotations

import ctypes
from typing import Any

import ggml


class _Feature(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p))


def features() -> dict[str, bool]:
    """What the loaded library was built with, by ggml's names, such as AVX2, REPACK and LLAMAFILE."""
    registry = ggml.ggml_backend_cpu_reg()
    pointers = _call(registry, b"ggml_backend_get_features", registry, _Feature)
    found: dict[str, bool] = {}
    while pointers and (feature := pointers[len(found)]).name:
        found[feature.name.decode()] = feature.value == b"1"
    return found


def repacking_buffer_types() -> list[Any]:
    """The buffer types that repack what is put into them; none on a processor without such."""
    registry = ggml.ggml_backend_cpu_reg()
    device = ggml.ggml_backend_reg_dev_get(registry, 0)
    pointers = _call(registry, b"ggml_backend_dev_get_extra_bufts", device, ctypes.c_void_p)
    types: list[Any] = []
    while pointers and pointers[len(types)]:
        types.append(pointers[len(types)])
    return types


def _call(registry: Any, name: bytes, argument: Any, kind: Any) -> Any:
    """What a function of a pointer returns, a pointer to `kind`; None if this library has no such function."""
    address = ggml.ggml_backend_reg_get_proc_address(registry, name)
    if not address:
        return None
    function = ctypes.CFUNCTYPE(ctypes.POINTER(kind), ctypes.c_void_p)(ctypes.cast(address, ctypes.c_void_p).value or 0)
    return function(ctypes.cast(argument, ctypes.c_void_p))
