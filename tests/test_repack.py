"""Repacked matrices: the same figures to rounding, one copy in memory, and none where the processor has no layout."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from test_quantisation import CONFIG, random_model
from tiny import one_slot

from taper.backends.ggml import GgmlBackend, repack
from taper.models.tensors import Tensor

REPACKED = ["Q4_0", "Q4_K", "IQ4_NL", "MXFP4", "Q2_K"]  # on x86; Q2_K with AVX-512 only
STEPS = 2000


def weights(dtype: str) -> dict[str, Tensor]:
    """So wide that the likeliest token is clear at most steps, as in a trained model."""
    return random_model(CONFIG, dtype, embedding=0.3)


def taken(backend: GgmlBackend) -> set[str]:
    return set(backend._model.weights._repacked.tensors)


@pytest.mark.parametrize("dtype", REPACKED)
@pytest.mark.parametrize("length", [1, 50])
def test_repacked_kernels_agree_with_the_others(dtype, length):
    """Both round activations to 8 bits, in other orders; single tokens and prompts have kernels of their own."""
    config, tensors = replace(CONFIG, quantization=dtype), weights(dtype)
    plain, packed = (
        GgmlBackend(config, tensors, context_length=64, kv_dtype="f32", threads=1, repack=repack)
        for repack in (False, True)
    )
    if not taken(packed):
        pytest.skip(f"this processor has no layout for {dtype}")
    assert not taken(plain)
    assert not any("norm" in name or "embed" in name for name in taken(packed))
    rng, logits = np.random.default_rng(4), {plain: [], packed: []}
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
    print(f"{dtype}: mean KL {kl:.2e}, same likeliest token {same:.2%} of {len(p)}")
    assert kl < 0.002
    assert same >= 0.99


@pytest.mark.parametrize("dtype", ["Q4_1", "Q6_K", "F16", "F32"])
def test_types_without_a_layout_stay_where_they_are(dtype):
    backend = GgmlBackend(replace(CONFIG, quantization=dtype), weights(dtype), context_length=64, threads=1)
    assert not taken(backend)


def test_a_processor_without_layouts_works(monkeypatch):
    monkeypatch.setattr(repack.ggml, "repacking_buffer_types", list)
    backend = GgmlBackend(replace(CONFIG, quantization="Q4_0"), weights("Q4_0"), context_length=64, threads=1)
    assert not taken(backend)
    assert np.isfinite(backend.forward(one_slot(backend, [1, 2, 3], (2,))).logits).all()


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
