"""Two tensor-parallel ranks and two pipeline stages give the ids of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ids_of(tiny_folder, tmp_path_factory):
    def run(more: dict, *tapered: str) -> list[list[int]]:
        settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
        file = tmp_path_factory.mktemp("ids") / "ids.json"
        command = [sys.executable, str(HERE / "parallel.py"), str(tiny_folder), str(file), json.dumps(more), *tapered]
        done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
        return json.loads(file.read_text())

    return run


@pytest.fixture(scope="module")
def expected(ids_of):
    return ids_of({}, "tapered")


@pytest.mark.parametrize("kind", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_processes_give_the_ids_of_one(ids_of, expected, kind):
    assert ids_of({kind: 2}, "tapered") == expected
