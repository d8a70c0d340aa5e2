"""Layouts of matrices: the same figures to rounding, none where the processor has none, two where many tokens gain."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_quantisation import CONFIG, random_model
from tiny import one_slot

from taper.backends.ggml import GgmlBackend, layouts, repack
from taper.backends.ggml.layouts import Layout
from taper.models.tensors import Tensor

pytestmark = pytest.mark.ci

REPACKED = ["Q4_0", "Q4_K", "IQ4_NL", "MXFP4", "Q2_K"]  # on x86; Q2_K with AVX-512 only
STEPS = 2000


def weights(dtype: str) -> dict[str, Tensor]:
    """So wide that the likeliest token is clear at most steps, as in a trained model."""
    return random_model(CONFIG, dtype, embedding=0.3)


def taken(backend: GgmlBackend) -> set[str]:
    return set(backend._model.weights._copied.tensors)


def check_agreement(one: GgmlBackend, other: GgmlBackend, length: int) -> None:
    """On random tokens, `length` at a time, both predict nearly the same."""
    rng, logits = np.random.default_rng(4), {one: [], other: []}
    for _ in range(STEPS // length // 4):
        tokens = rng.integers(0, 256, max(length, 4))
        for backend, rows in logits.items():
            if length == 1:
                for position, token in enumerate(tokens):
                    rows.append(backend.forward(one_slot(backend, [token], (0,), start=position)).logits)
            else:
                rows.append(backend.forward(one_slot(backend, tokens, tuple(range(length)))).logits)
    p, q = (np.concatenate(rows).astype(np.float64) for rows in logits.values())
    p, q = (
        x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
        for x in (p, q)
    )
    kl, same = (np.exp(p) * (p - q)).sum(-1).mean(), (p.argmax(-1) == q.argmax(-1)).mean()
    print(f"mean KL {kl:.2e}, same likeliest token {same:.2%} of {len(p)}")
    assert kl < 0.002
    assert same >= 0.99


@pytest.mark.parametrize("dtype", REPACKED)
@pytest.mark.parametrize("length", [1, 50])
def test_repacked_kernels_agree_with_the_others(dtype, length):
    """Both round activations to 8 bits, in other orders; single tokens and prompts have kernels of their own."""
    config, tensors = replace(CONFIG, quantization=dtype), weights(dtype)
    plain, packed = (
        GgmlBackend(config, tensors, context_length=64, kv_dtype="f32", threads=1, repack=repack)
        for repack in ("never", "always")
    )
    if not taken(packed):
        pytest.skip(f"this processor has no layout for {dtype}")
    assert not taken(plain)
    assert not any("norm" in name or "embed" in name for name in taken(packed))
    check_agreement(plain, packed, length)


@pytest.mark.parametrize("dtype", ["Q4_1", "Q6_K", "F16", "F32"])
def test_types_without_a_layout_stay_where_they_are(dtype):
    backend = GgmlBackend(replace(CONFIG, quantization=dtype), weights(dtype), context_length=64, threads=1)
    assert not taken(backend)


def test_a_processor_without_layouts_works(monkeypatch):
    monkeypatch.setattr(repack.ggml, "repacking_buffer_types", list)
    backend = GgmlBackend(replace(CONFIG, quantization="Q4_0"), weights("Q4_0"), context_length=64, threads=1)
    assert not taken(backend)
    assert np.isfinite(backend.forward(one_slot(backend, [1, 2, 3], (2,))).logits).all()


@pytest.mark.skipif(not Path("/proc").exists(), reason="memory is read in /proc")
@pytest.mark.ci
def test_fifty_loads_and_deletions_leave_no_memory_behind():
    code = """
from dataclasses import replace
from test_quantisation import CONFIG
from test_repack import weights
from taper.backends.ggml import GgmlBackend
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
tensors = weights("Q4_0")
for i in range(60):
    GgmlBackend(replace(CONFIG, quantization="Q4_0"), tensors, context_length=64, threads=1)
    if i == 9:
        before = resident()
print(resident() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="tests", check=True)
    assert int(done.stdout) < 2000  # KiB; one copy of the weights has 700


@pytest.fixture
def second(monkeypatch):
    """Gives types a layout for many tokens, whatever this library and processor would gain."""

    def choose(**chosen: Layout) -> None:
        monkeypatch.setattr(layouts, "layout_for_many", lambda dtype, threads: chosen.get(dtype))

    return choose


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [(dtype, Layout("BF16", 8)) for dtype in ("Q4_1", "Q8_0", "Q5_0", "Q4_0", "MXFP4")]
    + [(dtype, Layout(dtype, 8)) for dtype in ("Q4_K", "Q2_K")],
)
@pytest.mark.parametrize("length", [7, 50])
def test_a_second_layout_agrees_with_the_first(second, dtype, layout, length):
    second(**{dtype: layout})
    config = replace(CONFIG, quantization=dtype)
    one, two = (
        GgmlBackend(config, weights(dtype), context_length=64, kv_dtype="f32", threads=1, repack=repack)
        for repack in ("always", "auto")
    )
    assert two._model.weights._for_many
    assert not one._model.weights._for_many
    check_agreement(one, two, length)
    tokens = np.arange(7)  # fewer than the layout is for: the same bits
    few = [backend.forward(one_slot(backend, tokens, (6,))).logits for backend in (one, two)]
    assert np.array_equal(*few)


def test_which_matrices_have_a_second_layout(second):
    """Those that multiply: not the vectors, nor the table of embeddings beside a head of its own."""
    second(F32=Layout("BF16", 4), Q4_1=Layout("BF16", 4))
    matrices = GgmlBackend(CONFIG, weights("Q4_1"), context_length=64, threads=1)._model.weights
    names = set(matrices._for_many)
    assert matrices.head in names
    assert {"layers.0.q_proj", "layers.0.down_proj"} <= names
    assert not any("norm" in name or "bias" in name for name in names)
    assert ("embed_tokens" in names) == (matrices.head == "embed_tokens")
    for name in names:
        assert matrices.matrix(name, 3).contents.type != matrices.matrix(name, 4).contents.type


def test_full_weights_are_never_copied_to_fewer_bits():
    assert not any(layouts.layout_for_many(dtype, 1) for dtype in ("F32", "F16", "BF16"))


def test_a_second_layout_has_to_fit_into_half_of_the_memory(second, monkeypatch):
    second(Q4_1=Layout("BF16", 4))
    tensors = weights("Q4_1")
    backend = GgmlBackend(CONFIG, tensors, context_length=64, threads=1)
    assert backend.layouts.startswith("Q4_1 also in bf16, for 4 tokens or more")
    for free in (None, 1000):
        monkeypatch.setattr(layouts, "available_memory", lambda free=free: free)
        backend = GgmlBackend(CONFIG, tensors, context_length=64, threads=1)
        assert not backend._model.weights._for_many
        assert "more than half of the memory" in backend.layouts


def test_the_layout_for_many_is_the_one_that_measures_fastest(monkeypatch):
    """Seconds: where the file lies, in bf16, repacked."""
    plain = layouts.ggml.backend_get_default_buffer_type(layouts.ggml.backend_cpu_init())
    monkeypatch.setattr(layouts.ggml, "repacking_buffer_types", lambda: ["repacked"])

    def chosen(mapped: float, bf16: float, repacked: float, threads: int = 2) -> Layout | None:
        measured = {("BF16", plain): bf16, ("Q4_K", plain): mapped, ("Q4_K", "repacked"): repacked}
        monkeypatch.setattr(layouts, "seconds", lambda backend, place, dtype: measured[dtype, place])
        return layouts.layout_for_many.__wrapped__("Q4_K", threads)

    assert chosen(1, 2, 2) == Layout("Q4_K", 16)
    assert chosen(2, 2, 1) is None
    assert chosen(4, 1, np.inf) == Layout("BF16", 4)
    assert chosen(4, 1, np.inf, threads=16) == Layout("BF16", 32)
    assert chosen(3, 1, np.inf) == Layout("BF16", 8)
    assert chosen(1.5, 1, np.inf) == Layout("BF16", 12)
    assert chosen(3, 1, np.inf, threads=1) == Layout("BF16", 4)
    assert chosen(1.3, 1, np.inf) is None
    assert chosen(1.3, 1, 3) == Layout("Q4_K", 16)  # no copy for so little more
    assert chosen(3, 1, 4) == Layout("BF16", 4)
