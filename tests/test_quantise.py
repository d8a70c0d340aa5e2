"""Quantising while loading: bytes are ggml's, types are llama-quantize's, and a model runs as from a quantised file."""

from __future__ import annotations

import ctypes
import io
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from rich.console import Console
from rich.status import Status
from test_bad_input import _own_environment, refused  # noqa: F401  (a fixture)
from test_quantisation import CONFIG, TOKENS, quantised, random_model
from test_quantisation import logits as all_logits
from tiny import make_tiny, random_prompt, write_gguf

from taper import LLM, SamplingParams
from taper.backends import open_backend
from taper.backends.ggml import GgmlBackend
from taper.backends.ggml.library import ggml
from taper.backends.ggml.weights import Weights, stored_types
from taper.backends.torch import TorchBackend
from taper.cli import cli, common, terminal
from taper.errors import DTYPES, QUANTISED_DTYPES, RequestError, TaperWarning
from taper.lab.calibration.store import current_conditions
from taper.models import load_model
from taper.models.tensors import WEIGHT_TYPES, Tensor

each_dtype = pytest.mark.parametrize("dtype", QUANTISED_DTYPES)
UNTIED = replace(CONFIG, tie_word_embeddings=False)


def zeros(*shape: int) -> Tensor:
    return Tensor("F32", shape, np.zeros(4 * math.prod(shape), np.uint8))


def rows(dtype: str, floats: np.ndarray) -> np.ndarray:
    """Weights [out, in] as ggml quantises them in one call: uint8 [out, bytes of a row]."""
    return quantised(dtype, floats).data.reshape(len(floats), -1)


def held(weights: Weights, name: str) -> tuple[str, bytes]:
    """Type and bytes of a tensor that was not repacked."""
    tensor = weights[name].contents
    dtype = next(dtype for dtype, (type_id, _, _) in WEIGHT_TYPES.items() if type_id == tensor.type)
    return dtype, ctypes.string_at(tensor.data, ggml.nbytes(weights[name]))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A tiny model whose rows are whole blocks of every type.

    A Qwen 2: files of Llama hold queries and keys permuted, so that their products are sums in another order.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    return make_tiny(tmp_path_factory.mktemp("wide"), "qwen2", layers=3, tied=False, **sizes)


def token_ids(path: Path, dtype: str = "auto", **options) -> list[int]:
    llm = LLM(path, device="cpu", dtype=dtype, threads=1, context=64, **options)
    return llm.generate("abc", SamplingParams(max_tokens=24, ignore_eos=True), mode="full").token_ids


def logits(path: Path, dtype: str = "auto", **options) -> np.ndarray:
    backend = open_backend(load_model(path), device="cpu", dtype=dtype, context_length=64, threads=1, **options)
    return all_logits(backend, random_prompt(1))


# Bytes and types


@each_dtype
@pytest.mark.parametrize(("original", "threads"), [("F32", 1), ("F16", 3), ("BF16", 3)])
def test_quantised_bytes_are_those_of_ggml(monkeypatch, dtype, original, threads):
    monkeypatch.setattr("taper.backends.ggml.weights.CHUNK", 3000)  # several parts, the last one shorter
    tensors = random_model(UNTIED, original)
    weights = Weights(tensors, dtype, threads=threads)
    for name, tensor in tensors.items():
        if len(tensor.shape) == 1:
            assert held(weights, name) == ("F32", tensor.data.tobytes())
            continue
        asked = "Q6_K" if name == "lm_head" and dtype != "q8_0" else dtype.upper()
        floats = dequantize(tensor.data.reshape(len(tensor.data) // 2 // 256, -1), GGMLQuantizationType[original])
        expected = rows(asked, floats.reshape(tensor.shape))
        assert held(weights, name) == (asked, expected.tobytes()), name


@pytest.mark.parametrize(
    ("dtype", "columns", "matrix", "makes_logits"),
    [
        ("q4_0", 256, "Q4_0", "Q6_K"),
        ("q4_0", 96, "Q4_0", "Q8_0"),
        ("q4_0", 40, "F16", "F16"),
        ("iq4_nl", 96, "IQ4_NL", "Q8_0"),
        ("iq4_nl", 40, "F16", "F16"),
        ("q4_k", 256, "Q4_K", "Q6_K"),
        ("q4_k", 96, "Q5_0", "Q8_0"),
        ("q4_k", 40, "F16", "F16"),
        ("q6_k", 256, "Q6_K", "Q6_K"),
        ("q6_k", 96, "Q8_0", "Q8_0"),
        ("q6_k", 40, "F16", "F16"),
        ("q8_0", 256, "Q8_0", "Q8_0"),
        ("q8_0", 40, "F16", "F16"),
    ],
)
def test_types_are_those_of_llama_quantize(dtype, columns, matrix, makes_logits):
    tensor = zeros(2, columns)
    tied = {"embed_tokens": tensor, "norm": zeros(columns), "layers.0.q_proj": tensor}
    assert stored_types(tied, dtype) == {"embed_tokens": makes_logits, "norm": "F32", "layers.0.q_proj": matrix}
    untied = stored_types(tied | {"lm_head": tensor}, dtype)
    assert (untied["embed_tokens"], untied["lm_head"]) == (matrix, makes_logits)


def test_matrices_that_do_not_fit_are_told_in_one_line():
    tensors = {f"layers.{i}.q_proj": zeros(2, columns) for i, columns in enumerate([256, 96, 64, 40])}
    tensors["embed_tokens"] = zeros(2, 64)
    with pytest.warns(TaperWarning) as warned:
        Weights(tensors, "q4_k")
    assert [str(one.message) for one in warned] == [
        "rows of 3 of 5 matrices do not divide into blocks of q4_k: 2 run in q5_0 and 1 run in f16"
    ]


@each_dtype
def test_nothing_is_said_where_all_fit(dtype, recwarn):
    weights = Weights(random_model(CONFIG, "F32"), dtype)
    assert not recwarn.list
    assert weights.quantization == dtype.upper()


# Whole models


@pytest.mark.ci
@each_dtype
def test_a_folder_generates_what_a_file_of_the_same_types_does(tmp_path, wide, dtype):
    def quantise(name: str, floats: np.ndarray) -> tuple[str, np.ndarray]:
        asked = "Q6_K" if name == "output.weight" and dtype != "q8_0" else dtype.upper()
        return asked, rows(asked, floats)

    write_gguf(tmp_path / "quantised.gguf", wide, quantise=quantise)
    write_gguf(tmp_path / "f32.gguf", wide)
    expected = token_ids(tmp_path / "quantised.gguf")
    assert token_ids(wide.folder, dtype) == token_ids(tmp_path / "f32.gguf", dtype) == expected
    of_file = logits(tmp_path / "quantised.gguf")
    np.testing.assert_array_equal(logits(tmp_path / "f32.gguf", dtype), of_file)
    np.testing.assert_array_equal(logits(wide.folder, dtype), of_file)
    again = logits(tmp_path / "quantised.gguf", dtype)  # which is no second time
    np.testing.assert_array_equal(again, of_file)


def test_more_bits_are_closer_to_the_original():
    tensors = random_model(CONFIG, "F32")

    def of(dtype: str) -> np.ndarray:
        backend = GgmlBackend(CONFIG, tensors, context_length=64, dtype=dtype, kv_dtype="f32", threads=1)
        return all_logits(backend, TOKENS).ravel()

    close = {dtype: np.corrcoef(of(dtype), of("f32"))[0, 1] for dtype in QUANTISED_DTYPES}
    print(close)
    assert 1 > close["q8_0"] > close["q6_k"] > max(close["q4_k"], close["iq4_nl"])
    assert min(close["q4_k"], close["iq4_nl"]) > close["q4_0"] > 0.95


@each_dtype
def test_a_narrow_model_generates(tiny_llama, dtype, recwarn):
    """Rows of 64 and 128 are no blocks of k-quants."""
    assert len(token_ids(tiny_llama.folder, dtype)) == 24
    lines = [str(one.message) for one in recwarn if one.category is TaperWarning and "blocks" in str(one.message)]
    assert len(lines) == (dtype in ("q4_k", "q6_k"))


@pytest.mark.parametrize("dtype", ["q4_0", "q4_k", "iq4_nl"])
def test_quantised_matrices_are_repacked(wide, dtype):
    packed, plain = (
        open_backend(load_model(wide.folder), device="cpu", dtype=dtype, context_length=64, threads=1, repack=repack)
        for repack in ("always", "never")
    )
    assert not plain._model.weights._copied.tensors
    if not packed._model.weights._copied.tensors:
        pytest.skip(f"this processor has no layout for {dtype}")
    ours, theirs = (all_logits(backend, random_prompt(2)).ravel() for backend in (packed, plain))
    assert np.corrcoef(ours, theirs)[0, 1] > 0.9999


def test_a_model_is_known_by_the_type_it_runs_in(wide, tiny_llama):
    """To policies and to what calibration keeps."""
    llm = LLM(wide.folder, device="cpu", dtype="iq4_nl", threads=1, context=64)
    assert llm.config.identity.quantization == "IQ4_NL"
    assert current_conditions(llm).dtype == "iq4_nl"
    assert LLM(wide.folder, device="cpu", dtype="f16", threads=1, context=64).config.identity.quantization == "F32"


# What is refused


def test_weights_are_not_quantised_twice(tmp_path, tiny_llama):
    write_gguf(tmp_path / "q8_0.gguf", tiny_llama, quantise=lambda name, floats: ("Q8_0", rows("Q8_0", floats)))
    for dtype in ("q4_0", "iq4_nl"):  # of the rows of 64, q6_k would become q8_0, as they are
        line = refused("generate", "--model", tmp_path / "q8_0.gguf", "--dtype", dtype, "hi")
        assert f"dtype {dtype} is for f32, f16 and bf16 weights; " in line
        assert "is q8_0 already" in line
    assert token_ids(tmp_path / "q8_0.gguf", "f32")


@pytest.mark.parametrize("held_in", ["Q4_0", "Q4_1"])
def test_a_file_of_few_bits_is_not_made_finer(held_in):
    tensors = {"layers.0.q_proj": quantised(held_in, np.ones((2, 256)))}
    with pytest.raises(RequestError, match=f"layers.0.q_proj is {held_in.lower()}"):
        Weights(tensors, "q8_0")
    assert Weights(tensors, "f32")["layers.0.q_proj"].contents.type == WEIGHT_TYPES["F32"][0]


@each_dtype
def test_torch_refuses_quantised_types(wide, dtype):
    loaded = wide.load()
    with pytest.raises(RequestError, match=rf"^dtype {dtype} does not run on cpu \(choose one of f32, f16, bf16\)$"):
        TorchBackend(loaded.config, loaded.tensors, context_length=64, dtype=dtype, device="cpu")


@pytest.mark.parametrize("command", ["generate", "chat", "calibrate"])
def test_help_lists_the_types(command):
    text = "".join(CliRunner().invoke(cli, [command, "--help"], terminal_width=200).output.split())
    assert f"[{'|'.join(DTYPES)}]" in text


# Memory and progress


@pytest.mark.skipif(not Path("/proc").exists(), reason="memory is read in /proc")
@pytest.mark.ci
def test_memory_holds_one_quantised_copy_and_a_few_matrices(tmp_path):
    """Neither the whole model in f32, nor the pages of the file, nor a second quantised copy."""
    code = f"""
import numpy as np
from dataclasses import replace
from pathlib import Path
from test_quantisation import CONFIG
from taper.backends.ggml import GgmlBackend
from taper.backends.ggml.library import ggml
from taper.models.config import expected_shapes
from taper.models.tensors import Tensor
def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 1024
config = replace(CONFIG, layers=CONFIG.layers[:1] * 20, hidden_size=512, intermediate_size=2048, head_dim=128)
shapes, tensors, first = expected_shapes(config), {{}}, 0
size = sum(int(np.prod(shape)) for shape in shapes.values()) * 2
with open({str(tmp_path / "weights")!r}, "wb") as file:
    file.truncate(size)
data = np.asarray(np.memmap({str(tmp_path / "weights")!r}, np.uint8, "r"))
for name, shape in shapes.items():
    count = int(np.prod(shape)) * 2
    tensors[name], first = Tensor("BF16", shape, data[first : first + count]), first + count
    if len(shape) == 1:  # the system maps more of a file than the little that is read of it
        tensors[name] = Tensor("BF16", shape, np.zeros(count, np.uint8))
before = status("VmRSS")
backend = GgmlBackend(config, tensors, context_length=8, dtype="q4_0", threads=1)
print(size / 2**20, status("VmHWM") - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="tests", check=True)
    file_mib, peak_mib = map(float, done.stdout.split())
    print(f"file {file_mib:.0f} MiB, peak {peak_mib:.0f} MiB above what was there")
    assert file_mib > 140
    assert peak_mib < file_mib * 18 / 64 + 20  # 18 bytes hold 32 weights


def test_progress_grows_to_the_whole(wide):
    parts: list[float] = []
    LLM(wide.folder, device="cpu", dtype="q4_0", threads=1, context=64, progress=parts.append)
    assert len(parts) == len(wide.load().tensors)
    assert parts == sorted(parts)
    assert parts[-1] == 1.0


@pytest.mark.parametrize(("after", "shown"), [(-1, True), (1000, False)])
def test_a_terminal_shows_progress_where_loading_takes_long(monkeypatch, wide, after, shown):
    screen = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(terminal, "console", lambda: screen)
    monkeypatch.setattr(common, "_LONG", after)
    updates = []
    monkeypatch.setattr(Status, "update", lambda self, text: updates.append(text))
    options = {"device": "cpu", "dtype": "q4_0", "context": 64, "threads": 1, "offline": True}
    options |= {"repack": "auto", "head": "auto", "gpu_layers": None}
    common.load({"model": str(wide.folder), **options})
    assert f"loading {wide.folder}" in screen.file.getvalue().replace("\n", "")
    assert bool(updates) == shown
    assert not shown or updates[-1].endswith(", 100%")
