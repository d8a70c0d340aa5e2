"""Two tensor-parallel ranks and two pipeline stages give the ids of one process, in later turns too.

As such engines spawn workers, each runs in a program of its own, which is this file:

    python test_parallel.py FOLDER IDS_FILE '{"tensor_parallel_size": 2}'
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import Engine, Request, requests, tiny_policies

POLICIES = tiny_policies()
REQUESTS = requests(POLICIES, len(POLICIES), seed=10, max_tokens=26)  # beyond the last policy's start


def two_turns(engine: Engine) -> list[list[int]]:
    """Ids of all completions; the second turn reuses filled blocks of the first."""
    first = engine.generate(REQUESTS)
    pairs = zip(REQUESTS, first, strict=True)
    second = engine.generate_counted(
        [Request(each.prompt + ids + each.prompt, 8, each.extra_args) for each, ids in pairs]
    )
    reused = [cached > len(each.prompt) for each, (_, cached) in zip(REQUESTS, second, strict=True)]
    assert sum(reused) > len(REQUESTS) // 2
    return first + [ids for ids, _ in second]


@pytest.fixture(scope="module")
def expected(engines, tiny_folder):
    return two_turns(engines(tiny_folder, POLICIES))


@pytest.mark.parametrize("kind", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_processes_give_the_ids_of_one(tiny_folder, tmp_path, expected, kind):
    file = tmp_path / "ids.json"
    path = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    settings = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, __file__, str(tiny_folder), str(file), json.dumps({kind: 2})]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    assert json.loads(file.read_text()) == expected


if __name__ == "__main__":
    folder, file, options = sys.argv[1:]
    if hasattr(os, "sched_setaffinity"):  # a test has one core, on which the processes would wait for one another
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    engine = Engine(Path(folder), POLICIES, **json.loads(options))
    Path(file).write_text(json.dumps(two_turns(engine)))
    engine.llm.llm_engine.engine_core.shutdown()
