"""Runs an engine over several processes and writes the ids: its own program, as such engines spawn workers.

python parallel.py FOLDER IDS_FILE '{"tensor_parallel_size": 2}' [tapered]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engines import Ask, Engine, prompts, tiny_policies


def main() -> None:
    """One list of ids a request, as JSON."""
    folder, file, more, *tapered = sys.argv[1:]
    policies = tiny_policies() if tapered else None
    engine = Engine(Path(folder), policies, more=json.loads(more))
    names = list(tiny_policies())
    asks = [
        Ask(prompt, 40, {"taper_policy": name} if tapered else None)
        for name, prompt in zip(names, prompts(len(names), seed=10, vocab_size=300), strict=True)
    ]
    Path(file).write_text(json.dumps(engine.generate(asks)))
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
