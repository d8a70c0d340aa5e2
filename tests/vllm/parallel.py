"""Runs an engine over several processes and writes the ids: its own program, as such engines spawn workers.

python parallel.py FOLDER IDS_FILE '{"tensor_parallel_size": 2}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engines import Ask, Engine, prompts, tiny_policies


def asks() -> list[Ask]:
    """One request of each tiny policy."""
    policies = tiny_policies()
    some = prompts(len(policies), seed=10, vocab_size=300)
    return [Ask(prompt, 40, {"taper_policy": name}) for name, prompt in zip(policies, some, strict=True)]


def main() -> None:
    """One list of ids a request, as JSON."""
    folder, file, more = sys.argv[1:]
    engine = Engine(Path(folder), tiny_policies(), more=json.loads(more))
    Path(file).write_text(json.dumps(engine.generate(asks())))
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
