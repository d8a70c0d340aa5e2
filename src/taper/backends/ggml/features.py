"""What the loaded ggml library was built with."""

from __future__ import annotations

import ctypes
from importlib import metadata

import ggml


class _Feature(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p))


_GetFeatures = ctypes.CFUNCTYPE(ctypes.POINTER(_Feature), ctypes.c_void_p)


def version() -> str:
    """The version of the ggml-python distribution."""
    return metadata.version("ggml-python")


def features() -> dict[str, bool]:
    """The features of the CPU backend that this library uses, by ggml's names, such as AVX2, REPACK and LLAMAFILE."""
    registry = ggml.ggml_backend_cpu_reg()
    address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_get_features")
    if not address:
        return {}
    pointers = _GetFeatures(ctypes.cast(address, ctypes.c_void_p).value or 0)(ctypes.cast(registry, ctypes.c_void_p))
    found: dict[str, bool] = {}
    while (feature := pointers[len(found)]).name:
        found[feature.name.decode()] = feature.value == b"1"
    return found
