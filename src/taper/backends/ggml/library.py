"""ggml's shared library: which one is used, and those of its functions and structures that Taper needs.

`ggml` has the functions without their prefix: `ggml.mul_mat` is `ggml_mul_mat`. They are declared here from ggml's
public headers, which are the same in all tested versions, so that any library of these versions works. Several Python
packages bring one. Those that pip compiled for this processor come first, as prebuilt ones lack newer kernels.
"""

from __future__ import annotations

import _ctypes
import ctypes
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ctypes import c_bool, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DEVICES, ModelError, RequestError, shown
from ...models.tensors import WEIGHT_TYPES, row_bytes

VARIABLE = "TAPER_GGML"
FIRST_TESTED, FIRST_UNTESTED = (0, 15), (0, 28)
TYPE_F32, TYPE_F16, TYPE_I32, TYPE_I64 = 0, 1, 26, 27
STATUS_SUCCESS, STATUS_ABORTED = 0, 1
_OBJECT_SIZE = 32  # of ggml's own note about each tensor of a context
_AFTER_NAME = 16  # bytes of a tensor: a pointer of the buffer's own, and padding


class Tensor(ctypes.Structure):
    """ggml_tensor up to its name, whose length is an option of ggml's build."""


TensorPointer = ctypes.POINTER(Tensor)
Tensor._fields_ = (
    ("type", c_int),
    ("buffer", c_void_p),
    ("ne", c_int64 * 4),  # elements of each dimension, the one that changes fastest first
    ("nb", c_size_t * 4),  # bytes from one to the next
    ("op", c_int),
    ("op_params", c_int32 * 16),
    ("flags", c_int32),
    ("src", TensorPointer * 10),
    ("view_src", TensorPointer),
    ("view_offs", c_size_t),
    ("data", c_void_p),
)


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class ThreadpoolParams(ctypes.Structure):
    """ggml_threadpool_params."""

    _fields_ = (
        ("cpumask", c_bool * 512),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


class TypeTraits(ctypes.Structure):
    """ggml_type_traits."""

    _fields_ = (
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, c_void_p, ctypes.POINTER(c_float), c_int64)),
        ("from_float_ref", c_void_p),
    )


# The instructions that a library may be built with, in ggml's names, and Linux's names for them.
_SAME_NAMES = ("ssse3", "avx", "avx2", "f16c", "fma", "bmi2", "avx_vnni", "avx512_vnni", "avx512_bf16")
_OTHER_NAMES = {"sse3": "pni", "avx512": "avx512f", "avx512_vbmi": "avx512vbmi"}
_INSTRUCTIONS = {name: name for name in _SAME_NAMES} | _OTHER_NAMES

_AFFIXES = {"win32": ("", ".dll"), "darwin": ("lib", ".dylib")}.get(sys.platform, ("lib", ".so"))  # of libraries

AbortCallback = ctypes.CFUNCTYPE(c_bool, c_void_p)
LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_SILENT = LogCallback(lambda level, text, data: None)

_T, _P = TensorPointer, c_void_p  # a tensor; a context, graph, backend, buffer or allocator
_OF_ONE, _OF_TWO, _OF_THREE = (_T, _P, _T), (_T, _P, _T, _T), (_T, _P, _T, _T, _T)
# What each function returns, and its arguments.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "version": (c_char_p,),
    "log_set": (None, LogCallback, c_void_p),
    "init": (_P, InitParams),
    "free": (None, _P),
    "tensor_overhead": (c_size_t,),
    "blck_size": (c_int64, c_int),
    "type_size": (c_size_t, c_int),
    "nbytes": (c_size_t, _T),
    "get_type_traits": (ctypes.POINTER(TypeTraits), c_int),
    "quantize_chunk": (c_size_t, c_int, ctypes.POINTER(c_float), c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "new_tensor": (_T, _P, c_int, c_int, ctypes.POINTER(c_int64)),
    "set_name": (_T, _T, c_char_p),
    "get_name": (c_void_p, _T),
    "set_input": (None, _T),
    "set_output": (None, _T),
    # Graphs
    "new_graph_custom": (_P, _P, c_size_t, c_bool),
    "graph_overhead_custom": (c_size_t, c_size_t, c_bool),
    "graph_n_nodes": (c_int, _P),
    "graph_node": (_T, _P, c_int),
    "build_forward_expand": (None, _P, _T),
    # Operations
    **dict.fromkeys(("dup", "cont", "sqr", "sum_rows", "soft_max", "sigmoid", "tanh", "silu_inplace"), _OF_ONE),
    **dict.fromkeys(("silu", "transpose", "mean", "sqrt", "relu"), _OF_ONE),
    **dict.fromkeys(("add", "add_inplace", "sub", "mul", "div", "mul_mat", "out_prod", "get_rows", "cpy"), _OF_TWO),
    **dict.fromkeys(("swiglu_split", "geglu_split"), _OF_TWO),
    **dict.fromkeys(("mul_mat_id", "set_rows", "add_id"), _OF_THREE),
    **dict.fromkeys(("soft_max_add_sinks", "flash_attn_ext_add_sinks"), (None, _T, _T)),
    "swiglu_oai": (*_OF_TWO, c_float, c_float),
    **dict.fromkeys(("scale", "scale_inplace"), (*_OF_ONE, c_float)),
    **dict.fromkeys(("scale_bias", "clamp"), (*_OF_ONE, c_float, c_float)),
    "rms_norm": (*_OF_ONE, c_float),
    "argsort_top_k": (*_OF_ONE, c_int),
    "is_contiguous": (c_bool, _T),
    "soft_max_ext": (*_OF_TWO, c_float, c_float),
    "concat": (*_OF_TWO, c_int),
    "permute": (*_OF_ONE, c_int, c_int, c_int, c_int),
    "reshape_2d": (*_OF_ONE, c_int64, c_int64),
    "reshape_3d": (*_OF_ONE, c_int64, c_int64, c_int64),
    "reshape_4d": (*_OF_ONE, c_int64, c_int64, c_int64, c_int64),
    "view_1d": (*_OF_ONE, c_int64, c_size_t),
    "view_2d": (*_OF_ONE, c_int64, c_int64, c_size_t, c_size_t),
    "view_3d": (*_OF_ONE, c_int64, c_int64, c_int64, c_size_t, c_size_t, c_size_t),
    "view_4d": (*_OF_ONE, c_int64, c_int64, c_int64, c_int64, c_size_t, c_size_t, c_size_t, c_size_t),
    "rope_ext": (*_OF_THREE, c_int, c_int, c_int, *(c_float,) * 6),
    "flash_attn_ext": (*_OF_THREE, _T, c_float, c_float, c_float),
    # Memory
    "gallocr_new": (_P, _P),
    "gallocr_free": (None, _P),
    "gallocr_alloc_graph": (c_bool, _P, _P),
    "gallocr_get_buffer_size": (c_size_t, _P, c_int),
    "backend_buffer_is_host": (c_bool, _P),
    "backend_alloc_ctx_tensors_from_buft": (_P, _P, _P),
    "backend_buffer_free": (None, _P),
    "backend_tensor_set": (None, _T, c_void_p, c_size_t, c_size_t),
    # The CPU
    "backend_cpu_init": (_P,),
    "backend_free": (None, _P),
    "backend_get_default_buffer_type": (_P, _P),
    "backend_graph_compute": (c_int, _P, _P),
    "backend_cpu_set_n_threads": (None, _P, c_int),
    "backend_cpu_set_threadpool": (None, _P, _P),
    "backend_cpu_set_abort_callback": (None, _P, AbortCallback, c_void_p),
    "backend_cpu_reg": (_P,),
    "backend_reg_dev_get": (_P, _P, c_size_t),
    "backend_reg_get_proc_address": (c_void_p, _P, c_char_p),
    "threadpool_params_default": (ThreadpoolParams, c_int),
    "threadpool_new": (_P, ctypes.POINTER(ThreadpoolParams)),
    "threadpool_free": (None, _P),
}
# Those of recurrent layers. Before this version, some are missing or take other arguments.
_FIRST_RECURRENT = (0, 20)
_RECURRENT: dict[str, tuple[Any, ...]] = {
    "softplus": _OF_ONE,
    "l2_norm": (*_OF_ONE, c_float),
    "ssm_conv": _OF_TWO,
    "gated_delta_net": (*_OF_THREE, _T, _T, _T, c_int64),
    "ssm_scan": (*_OF_THREE, _T, _T, _T, _T, c_int64),  # older versions have no last argument, and ignore it
}
# Those of other devices than the CPU.
_DEVICES: dict[str, tuple[Any, ...]] = {
    "backend_load": (_P, c_char_p),
    "backend_dev_count": (c_size_t,),
    "backend_dev_get": (_P, c_size_t),
    "backend_dev_name": (c_char_p, _P),
    "backend_dev_description": (c_char_p, _P),
    "backend_dev_type": (c_int, _P),
    "backend_dev_init": (_P, _P, c_char_p),
    "backend_dev_buffer_type": (_P, _P),
    "backend_supports_op": (c_bool, _P, _T),
    "backend_tensor_get": (None, _T, c_void_p, c_size_t, c_size_t),
    "op_desc": (c_char_p, _T),
    "graph_add_node": (None, _P, _T),
    "backend_dev_memory": (None, _P, ctypes.POINTER(c_size_t), ctypes.POINTER(c_size_t)),
}
_GPU_TYPES = (1, 2)  # with memory of their own, or with the processor's


class Feature(ctypes.Structure):
    """ggml_backend_feature."""

    _fields_ = (("name", c_char_p), ("value", c_char_p))


@dataclass(frozen=True)
class Place:
    """Where a library may be: a folder, and the package that brought it; "" for `$TAPER_GGML`."""

    folder: Path
    package: str = ""

    def __str__(self) -> str:
        return f"{self.package} {metadata.version(self.package)}" if self.package else str(self.folder)


@dataclass(frozen=True)
class Device:
    """What computes, besides the processor: such as Vulkan0, a graphics card. `memory`: bytes free, and in all."""

    pointer: int
    name: str
    description: str
    memory: tuple[int, int]

    @property
    def kind(self) -> str:
        """What it is programmed with, as people write it: vulkan, cuda, metal, rocm, sycl."""
        return self.name.rstrip("0123456789").lower().replace("mtl", "metal")

    def __str__(self) -> str:
        free, total = (size / 1e9 for size in self.memory)
        return f"{self.name}, {self.description}, {free:.1f} of {total:.1f} GB free"


class Library:
    """ggml, loaded and checked; its functions are attributes.

    Raises:
        ModelError: it cannot be loaded, or is not what is declared here.
    """

    def __init__(self, place: Place, rejected: Sequence[str] = ()) -> None:
        self.place = place
        self.rejected = rejected  # the libraries before this one, and what is wrong with them
        self._handles: list[ctypes.CDLL] = []
        try:
            # Each needs those before it; loaded by their paths, they find one another without a search path.
            for file in _files(place.folder):
                self._handles.append(ctypes.CDLL(str(file)))
            self._declare(_FUNCTIONS)
            self._check()
        except (OSError, ModelError) as error:
            self._close()
            raise ModelError(f"{place}: {error.message if isinstance(error, ModelError) else error}") from None

    def __getattr__(self, name: str) -> Any:  # the functions, for type checkers
        raise AttributeError(name)

    def __str__(self) -> str:
        return f"ggml {self.version().decode()} of {self.place}"

    def unused_instructions(self) -> list[str]:
        """The instructions that this processor has but the library was not built with, by ggml's names."""
        return [name.upper() for name, has in self._instructions().items() if has and not self._built_with(name)]

    def features(self) -> dict[str, bool]:
        """What it was built with, by ggml's names, such as AVX2, REPACK and LLAMAFILE."""
        pointers = self._extension(b"ggml_backend_get_features", self.backend_cpu_reg(), Feature)
        features: dict[str, bool] = {}
        while pointers and (feature := pointers[len(features)]).name:
            features[feature.name.decode()] = feature.value == b"1"
        return features

    def repacking_buffer_types(self) -> list[Any]:
        """The buffer types that repack the matrices put into them; a processor may have none."""
        device = self.backend_reg_dev_get(self.backend_cpu_reg(), 0)
        pointers = self._extension(b"ggml_backend_dev_get_extra_bufts", device, c_void_p)
        types: list[Any] = []
        while pointers and pointers[len(types)]:
            types.append(pointers[len(types)])
        return types

    def is_repacked(self, tensor: Any) -> bool:
        """Whether a buffer of `repacking_buffer_types` has a layout for a tensor that lies in it."""
        end = ctypes.addressof(tensor.contents) + self.tensor_overhead() - _OBJECT_SIZE
        return bool(c_void_p.from_address(end - _AFTER_NAME).value)

    @cached_property
    def devices(self) -> list[Device]:
        """The devices besides the processor, from the libraries for them that lie beside this one.

        Only now are they loaded, as their drivers take a moment to start.
        """
        self._declare(_DEVICES)
        with suppress(ModelError):  # older versions lack it
            self._declare({"set_abort_callback": (None, c_void_p)})
        for file in _device_files(self.place.folder):
            self.backend_load(bytes(file))  # where it cannot be, as its driver is missing, it has no devices
        pointers = [self.backend_dev_get(number) for number in range(self.backend_dev_count())]
        return [self._device(pointer) for pointer in pointers if self.backend_dev_type(pointer) in _GPU_TYPES]

    def device(self, name: str) -> Device:
        """The device of this name, such as Vulkan0, or the first of this kind, such as vulkan.

        Raises:
            RequestError: there is none.
        """
        for device in self.devices:
            if name.lower() in (device.name.lower(), device.kind):
                return device
        those = ", ".join(device.name.lower() for device in self.devices) or "no graphics card"
        hint = f"{VARIABLE} names the folder of a ggml library for it; taper --version says what there is"
        rule = f"it must be {', '.join(DEVICES)} or one of ggml's, and {self} finds {those}"
        raise RequestError(f"device is {shown(name)}; {rule}", hint, param="device")

    def _device(self, pointer: int) -> Device:
        free, total = c_size_t(), c_size_t()
        self.backend_dev_memory(pointer, ctypes.byref(free), ctypes.byref(total))
        names = self.backend_dev_name(pointer).decode(), self.backend_dev_description(pointer).decode()
        return Device(pointer, *names, (free.value, total.value))

    def declare_recurrent(self) -> None:
        """Make the functions of recurrent layers usable.

        Raises:
            ModelError: the library is too old for them.
        """
        if self._numbers() < _FIRST_RECURRENT:
            first = ".".join(map(str, _FIRST_RECURRENT))
            hint = f'install ggml {first} or newer: pip install --upgrade "libggml-python"'
            raise ModelError(f"this model has recurrent layers, for which {self} is too old", hint)
        self._declare(_RECURRENT)

    def _declare(self, functions: dict[str, tuple[Any, ...]]) -> None:
        for name, (returned, *arguments) in functions.items():
            function = self._function(f"ggml_{name}")
            function.restype, function.argtypes = returned, arguments
            setattr(self, name, function)

    def _numbers(self) -> tuple[int, ...]:
        """Its version, as far as that says what is in it; it reads such as 0.25.3."""
        return tuple(int(part) for part in self.version().decode().split("-")[0].split(".") if part.isdigit())[:2]

    def _extension(self, name: bytes, argument: Any, kind: Any) -> Any:
        """Call a function that takes a pointer and returns one to `kind`; None if the library has no such function."""
        address = self.backend_reg_get_proc_address(self.backend_cpu_reg(), name)
        return ctypes.CFUNCTYPE(ctypes.POINTER(kind), c_void_p)(address)(argument) if address else None

    def _instructions(self) -> dict[str, bool]:
        """Whether this processor has each of `_INSTRUCTIONS`; empty where the system does not say."""
        with suppress(OSError, StopIteration):
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            flags = next(line for line in lines if line.startswith("flags")).split()
            return {name: flag in flags for name, flag in _INSTRUCTIONS.items()}
        return {}

    def _built_with(self, instructions: str) -> bool:
        return bool(self._function(f"ggml_cpu_has_{instructions}")())

    def _function(self, name: str) -> Any:
        for handle in self._handles:
            with suppress(AttributeError):
                return getattr(handle, name)
        raise ModelError(f"it has no {name}")

    def _check(self) -> None:
        """Check version and layout of structures, the sizes of the types that we use, and two products."""
        if missing := [name for name, has in self._instructions().items() if not has and self._built_with(name)]:
            raise ModelError(f"it was built for processors with {', '.join(missing)}, which this one has not")
        if not FIRST_TESTED <= self._numbers() < FIRST_UNTESTED:
            version = self.version().decode()
            first, last = (".".join(map(str, limit)) for limit in (FIRST_TESTED, FIRST_UNTESTED))
            raise ModelError(f"it is ggml {version}; tested are {first} up to, not including, {last}")
        self._check_tensors()
        for dtype, (type_id, block, size) in WEIGHT_TYPES.items():
            if (self.blck_size(type_id), self.type_size(type_id)) != (block, size):
                raise ModelError(f"its {dtype} has other blocks than the tested versions")
        self.log_set(_SILENT, None)  # it logs a line for each matrix that it repacks
        backend = self.backend_cpu_init()
        # More threads would stay alive. With more threads than cores, OpenMP would let the engine sleep at barriers.
        self.backend_cpu_set_n_threads(backend, 1)
        try:
            plain = self.backend_get_default_buffer_type(backend)
            for buffer_type in (plain, *self.repacking_buffer_types()):
                self._check_product(backend, plain, buffer_type)
        finally:
            self.backend_free(backend)

    def _check_tensors(self) -> None:
        """Check what `Tensor` says, and that all bytes are accounted for."""
        context, size = self.init(InitParams(mem_size=1 << 12, no_alloc=True)), self.tensor_overhead() - _OBJECT_SIZE
        try:
            tensor = self.new_tensor(context, TYPE_F16, 2, (c_int64 * 2)(7, 5))
            self.set_name(tensor, b"x" * size)  # as long as there is room
            address, name, fields = ctypes.addressof(tensor.contents), self.get_name(tensor), tensor.contents
            described = (fields.type, *fields.ne, *fields.nb) == (TYPE_F16, 7, 5, 1, 1, 2, 14, 70, 70)
            named = len(ctypes.string_at(name)) + 1 == size - ctypes.sizeof(Tensor) - _AFTER_NAME
            if not (described and named and name == address + ctypes.sizeof(Tensor)):
                raise ModelError("its tensors are not laid out as in the tested versions")
        finally:
            self.free(context)

    def _check_product(self, backend: Any, plain: Any, buffer_type: Any) -> None:
        """Multiply a small matrix that lies in a buffer of this type, and compare with numpy."""
        rows, columns, tokens, dtype = 16, 64, 3, WEIGHT_TYPES["Q4_0"][0]
        rng = np.random.default_rng(0)
        matrix, x = (rng.normal(0, 1, (count, columns)).astype(np.float32) for count in (rows, tokens))
        quantised = np.empty(rows * row_bytes("Q4_0", columns), np.uint8)
        source = matrix.ctypes.data_as(ctypes.POINTER(c_float))
        self.quantize_chunk(dtype, source, quantised.ctypes.data, 0, rows, columns, None)
        contexts = [self.init(InitParams(mem_size=1 << 16, no_alloc=True)) for _ in range(2)]
        buffers = []
        try:
            weights = self.new_tensor(contexts[0], dtype, 2, (c_int64 * 2)(columns, rows))
            buffers.append(self.backend_alloc_ctx_tensors_from_buft(contexts[0], buffer_type))
            if buffer_type != plain and not self.is_repacked(weights):
                return  # it has no layout for this type
            vectors = self.new_tensor(contexts[1], TYPE_F32, 2, (c_int64 * 2)(columns, tokens))
            product = self.mul_mat(contexts[1], weights, vectors)
            graph = self.new_graph_custom(contexts[1], 8, False)
            self.build_forward_expand(graph, product)
            buffers.append(self.backend_alloc_ctx_tensors_from_buft(contexts[1], plain))
            self.backend_tensor_set(weights, quantised.ctypes.data, 0, quantised.nbytes)
            self.backend_tensor_set(vectors, x.ctypes.data, 0, x.nbytes)
            self.backend_graph_compute(backend, graph)
            computed = np.array((c_float * (rows * tokens)).from_address(product.contents.data), np.float32)
            # Four bits of each weight and eight of each input; a wrong product is off by about eight.
            if not np.abs(computed.reshape(tokens, rows) - x @ matrix.T).max() < 3:
                raise ModelError("its product of two small matrices is wrong")
        finally:
            for buffer in buffers:
                self.backend_buffer_free(buffer)
            for context in contexts:
                self.free(context)

    def _close(self) -> None:
        """Unload it: loaders tell libraries apart by name only, and the next one has the same names."""
        for handle in reversed(self._handles):
            if sys.platform == "win32":
                _ctypes.FreeLibrary(handle._handle)
            else:
                _ctypes.dlclose(handle._handle)


def _files(folder: Path) -> list[Path]:
    """ggml's libraries in a folder; xllamacpp's extension module holds all of them."""
    whole = [folder / f"xllamacpp{suffix}" for suffix in EXTENSION_SUFFIXES]
    if present := [path for path in whole if path.exists()]:
        return present[:1]
    (prefix, suffix), libraries = _AFFIXES, _libraries(folder)
    return [libraries.get(name, folder / f"{prefix}{name}{suffix}") for name in ("ggml-base", "ggml-cpu", "ggml")]


def _device_files(folder: Path) -> list[Path]:
    """The libraries of devices in a folder of ggml's."""
    of_processors = re.compile("ggml(-base|-cpu.*)?")
    return [path for name, path in sorted(_libraries(folder).items()) if not of_processors.fullmatch(name)]


def _libraries(folder: Path) -> dict[str, Path]:
    """ggml's libraries in a folder, by name. In wheels, file names are made unique: libggml-base-82914aef.so.0.27.0."""
    prefix, suffix = map(re.escape, _AFFIXES)
    pattern = re.compile(rf"{prefix}(ggml(?:-[a-z]+)*?)(?:-[0-9a-f]{{8,}})?{suffix}[0-9.]*")
    files = sorted(folder.glob("*ggml*"), key=lambda path: -len(path.name))  # the shortest of a name counts
    return {match[1]: path for path in files if (match := pattern.fullmatch(path.name))}


def _places() -> Iterator[Place]:
    """Where libraries may be, the best first."""
    if folder := os.environ.get(VARIABLE):
        yield Place(Path(folder))
        return
    for package, module, inside in (
        ("cyllama-cuda12", "cyllama", ("../cyllama_cuda12.libs",)),  # who installs one of these wants its devices
        ("cyllama-vulkan", "cyllama", ("../cyllama_vulkan.libs",)),
        ("llama-cpp-python", "llama_cpp", ("lib",)),  # names of packages, not of architectures
        ("xllamacpp", "xllamacpp", ("",)),
        ("libggml-python", "libggml", ("lib64", "lib", "bin")),
        ("ggml-python", "ggml", ("lib",)),
    ):
        spec = find_spec(module)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            folders = [Path(os.path.normpath(Path(root) / name)) for name in inside]
            yield from (Place(folder, package) for folder in folders if _files(folder)[-1].exists())


def _load() -> Library:
    """The first library that passes its checks; `rejected` names those before it and what is wrong with them.

    Raises:
        ModelError: there is none.
    """
    reasons: list[str] = []
    for place in _places():
        try:
            return Library(place, reasons)
        except ModelError as error:
            reasons.append(error.message)
    hint = 'pip install "taper-llm"'
    if sys.platform == "win32":
        hint += "; its DLLs also need Microsoft's Visual C++ Redistributable"
    raise ModelError("; ".join(reasons) or "there is no ggml library", hint)


ggml = _load()
