"""How long a ggml library takes to multiply 1 to 512 tokens with a matrix, in each layout that it may lie in.

    python research/layouts.py --out research/results/layouts.json

Measures every library that is installed, in turn, each round in a process of its own. Leave the machine alone meanwhile
(about five minutes for two libraries).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from decode import conditions, write
from libraries import in_each_library

TYPES = ("Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL")
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 512)
SHAPE = (8960, 1536)  # of Qwen2.5-Coder-1.5B's MLP


def one(threads: int) -> dict[str, Any]:
    """Milliseconds in the library that `$TAPER_GGML` names, by type, layout and tokens."""
    from taper.backends.ggml.layouts import seconds
    from taper.backends.ggml.library import ggml

    backend = ggml.backend_cpu_init()
    ggml.backend_cpu_set_n_threads(backend, threads)
    places = [("mapped", ggml.backend_get_default_buffer_type(backend))]
    places += [("repacked", place) for place in ggml.repacking_buffer_types()]
    times: dict[str, Any] = {}
    for dtype in (*TYPES, "BF16"):
        for name, place in places:
            row = {str(count): seconds(backend, place, dtype, SHAPE, count) * 1e3 for count in TOKENS}
            if row["1"] < float("inf"):
                times.setdefault(dtype, {})[name] = row
    return {"library": str(ggml), "built_with": [name for name, on in ggml.features().items() if on], "ms": times}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", action="store_true", help="measure one library, and print it")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.threads)))
        return
    given = conditions(Path("random"))
    kept = {key: given[key] for key in ("date", "commit", "cpu", "cores", "python", "statistic")}
    about = kept | {"threads": options.threads, "rounds": options.rounds, "shape": SHAPE}
    rounds = in_each_library([__file__, "--one", "--threads", str(options.threads)], options.rounds)
    libraries = {}
    for name, runs in rounds.items():
        ms = {
            dtype: {
                layout: {
                    count: round(statistics.median(run["ms"][dtype][layout][count] for run in runs), 3) for count in row
                }
                for layout, row in layouts.items()
            }
            for dtype, layouts in runs[0]["ms"].items()
        }
        libraries[name] = {"ggml": runs[0]["library"].split(" of ")[0], "built_with": runs[0]["built_with"], "ms": ms}
    write(options.out, {"conditions": about, "libraries": libraries})


if __name__ == "__main__":
    main()
