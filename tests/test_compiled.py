"""The kernels for GPUs compile, which Triton's interpreter does not tell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="make test-ci installs it")
pytestmark = pytest.mark.ci
SCRIPT = Path(__file__).parent.parent / "research" / "compiled.py"


def compiled(*arguments: str, program: str = "") -> subprocess.CompletedProcess[str]:
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings |= {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])}
    program = f"import compiled; {program}compiled.main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], env=settings, capture_output=True, text=True, timeout=300
    )


def test_every_kernel_compiles_for_matrices_in_bf16_and_in_their_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = compiled("--sm", "90", "--dtype", "bf16", "q4_0")
    assert (done.returncode, done.stdout.count("bytes of shared memory")) == (0, 10 + 11), done.stdout + done.stderr


def test_a_kernel_that_does_not_compile_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    broken = "from taper.backends import fused; fused.TILE = fused.Tile(3, 512, 4); "
    done = compiled("--sm", "90", "--dtype", "bf16", "--rows", "1", program=broken)
    failed = [line for line in done.stdout.splitlines() if "FAILED" in line]
    assert done.returncode == 1, done.stdout + done.stderr
    assert len(failed) == 1
    assert "linear" in failed[0]
