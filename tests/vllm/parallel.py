"""Runs an engine over several processes and writes the ids: its own program, as such engines spawn workers.

python parallel.py FOLDER IDS_FILE '{"tensor_parallel_size": 2}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engines import Engine, requests, tiny_policies

POLICIES = tiny_policies()
REQUESTS = requests(POLICIES, len(POLICIES), seed=10, max_tokens=40)

if __name__ == "__main__":
    folder, file, options = sys.argv[1:]
    engine = Engine(Path(folder), POLICIES, **json.loads(options))
    Path(file).write_text(json.dumps(engine.generate(REQUESTS)))
    engine.llm.llm_engine.engine_core.shutdown()
