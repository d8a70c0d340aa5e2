"""Code completion: gaps in real functions, filled in by taper serve with n-gram drafts and by llama.cpp's llama-server.

    python research/gaps.py --llama-bin DIR --out research/results/gaps-qwen2.5-coder-1.5b-instruct.json

A gap is 3 to 8 lines in the middle of a function of Python's standard library. Before it are the module's imports, the
definition before the function, and the function's beginning; after it is its end. Full depth without drafts fills all
of them once, greedily, by POST /infill; then exact mode with n-gram drafts and llama-server take turns at each gap. No
prompt is left from one round to the next. The document is written after each round. Leave the machine alone while it
runs (ten minutes). Ends with exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import importlib
import inspect
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from decode import conditions, median, write
from serve_speed import NAME, Target, llama_version
from server_process import free_port, post, serving

from taper.lab.calibration.statistics import ratio_estimate
from taper.models import find_model

Json = dict[str, Any]
MODEL, CONTEXT, TOKENS, WARM_UP = "qwen2.5-coder-1.5b-instruct", 4096, 128, 2
LEAST_LINES, MOST_LINES, SHARE = 3, 8, 4  # of a gap, and how many times as long its function is
LEAST_RATIO = 1.2  # of llama-server's time to ours
EXACT, FULL, LLAMA_SERVER = "exact", "full", "llama_server"
FIELDS: dict[str, Json] = {EXACT: {"mode": "exact", "draft": "ngram"}, FULL: {"mode": "full"}}
GAPS = (
    "base64:_85encode",
    "bisect:bisect_right",
    "calendar:TextCalendar.formatyear",
    "cmd:Cmd.columnize",
    "collections:OrderedDict.move_to_end",
    "colorsys:rgb_to_hls",
    "configparser:RawConfigParser.get",
    "copy:deepcopy",
    "filecmp:dircmp.phase2",
    "fractions:Fraction.limit_denominator",
    "ftplib:parse227",
    "getopt:do_longs",
    "graphlib:TopologicalSorter._find_cycle",
    "heapq:_siftup",
    "http.cookies:Morsel.OutputString",
    "optparse:HelpFormatter.format_option",
    "queue:Queue.get",
    "statistics:quantiles",
    "string:Template.substitute",
    "textwrap:TextWrapper._handle_long_word",
)


class Gap(NamedTuple):
    """A function with some lines cut out of it."""

    prefix: str
    missing: str
    suffix: str


class Filled(NamedTuple):
    """What a server wrote, and the seconds of the whole request."""

    seconds: float
    reply: Json


def cut(name: str) -> Gap:
    """The gap in a function such as `textwrap:TextWrapper.fill`."""
    module, _, path = name.partition(":")
    source = inspect.getsource(importlib.import_module(module))
    lines, node = source.splitlines(keepends=True), ast.parse(source)

    def text(first: int, last: int | None) -> str:
        return "".join(lines[first - 1 : last])

    before = [text(part.lineno, part.end_lineno) for part in node.body if isinstance(part, ast.Import | ast.ImportFrom)]
    for part in path.split("."):
        if isinstance(node, ast.ClassDef):
            before.append(f"\n\n{lines[node.lineno - 1]}")
        own = [child for child in node.body if isinstance(child, ast.ClassDef | ast.FunctionDef)]
        place = next(index for index, child in enumerate(own) if child.name == part)
        node, earlier = own[place], own[:place][-1:]
    before += [f"\n{text(part.lineno, part.end_lineno)}" for part in earlier if isinstance(part, ast.FunctionDef)]
    first, last = node.body[ast.get_docstring(node) is not None].lineno, node.end_lineno
    size = min(max((last + 1 - first) // SHARE, LEAST_LINES), MOST_LINES)
    gap = first + (last + 1 - first - size) // 2
    prefix = "".join([*before, "\n", text(node.lineno, gap - 1)])
    return Gap(prefix, text(gap, gap + size - 1), text(gap + size, last))


def fill(target: Target, gap: Gap) -> Filled:
    """Fill a gap.

    Raises:
        RuntimeError: the server fails.
    """
    body = {"input_prefix": gap.prefix, "input_suffix": gap.suffix, "n_predict": TOKENS, "temperature": 0}
    started = time.perf_counter()
    reply = asyncio.run(post(target.port, "/infill", body | target.fields))
    seconds = time.perf_counter() - started
    if reply.status != 200:
        raise RuntimeError(f"status {reply.status}: {reply.body[:200]!r}")
    return Filled(seconds, json.loads(reply.body))


def summary(names: Sequence[str], runs: Mapping[str, Sequence[Sequence[Filled]]]) -> Json:
    """The figures of some gaps from what each target wrote, round by round.

    Texts are the same if those of all rounds are. A ratio is another target's time over that of exact mode, each the
    sum over gaps of the median over rounds, with an interval over gaps.
    """
    gaps: list[Json] = []
    for place, name in enumerate(names):
        own = {target: [filled[place] for filled in rounds] for target, rounds in runs.items()}
        texts = {target: {one.reply["content"] for one in filled} for target, filled in own.items()}
        timings = {target: filled[-1].reply["timings"] for target, filled in own.items()}
        gaps.append(
            {
                "name": name,
                "seconds": {target: median([one.seconds for one in filled]) for target, filled in own.items()},
                "prompt_tokens": {target: one["prompt_n"] for target, one in timings.items()},
                "prompt_ms": {target: round(one["prompt_ms"]) for target, one in timings.items()},
                "tokens": {target: filled[-1].reply["tokens_predicted"] for target, filled in own.items()},
                "drafted": timings[EXACT].get("draft_n", 0),
                "accepted": timings[EXACT].get("draft_n_accepted", 0),
                "same_text": {target: len(one | texts[EXACT]) == 1 for target, one in texts.items() if target != EXACT},
            }
        )

    def ratio(target: str, chosen: Sequence[Json]) -> Any:
        theirs, ours = (np.array([gap["seconds"][name] for gap in chosen]) for name in (target, EXACT))
        return ratio_estimate(theirs, ours) if len(chosen) else None

    others = [target for target in runs if target != EXACT]
    same = {target: [gap for gap in gaps if gap["same_text"][target]] for target in others}
    return {
        "gaps": gaps,
        "same_text": {target: len(own) for target, own in same.items()},
        "ratio": {target: ratio(target, gaps) for target in others},
        "ratio_where_same": {target: ratio(target, own) for target, own in same.items()},
        "tokens": {target: sum(gap["tokens"][target] for gap in gaps) for target in runs},
        **{name: sum(gap[name] for gap in gaps) for name in ("drafted", "accepted")},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill all gaps in each round; the document is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="a name or a GGUF file; default %(default)s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gaps", type=int, default=len(GAPS), help="the first so many; all by default")
    parser.add_argument("--llama-bin", type=Path, metavar="DIR", help="folder of llama-server")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    path, names = find_model(options.model), GAPS[: options.gaps]
    gaps = [cut(name) for name in names]
    taper = [sys.executable, "-m", "taper", "serve", "--model", options.model, "--name", NAME]
    taper += ["--context", str(CONTEXT), "--threads", str(options.threads), "--max-batch-size", "1"]
    commands = {EXACT: taper}
    program = shutil.which("llama-server", path=options.llama_bin and str(options.llama_bin))
    if program:
        llama = [program, "-m", str(path), "-c", str(CONTEXT), "-t", str(options.threads), "-np", "1", "-ngl", "0"]
        commands[LLAMA_SERVER] = [*llama, "--no-webui", "--no-cache-prompt", "--cache-ram", "0"]
    about = conditions(path) | {"threads": options.threads, "rounds": options.rounds, "most_tokens": TOKENS}
    about |= {"context": CONTEXT, "statistic": "medians over rounds, in which targets took turns"}
    about |= {"client": "one Python process on the same cores"}
    about |= {"llama_server": llama_version(program)} if program else {}
    result: Json = {"model": options.model, "conditions": about}
    with ExitStack() as stack:
        targets: dict[str, Target] = {}
        for name, command in commands.items():
            port = free_port()
            stack.enter_context(serving([*command, "--host", "127.0.0.1", "--port", str(port)], port))
            targets[name] = Target(port, {"taper": FIELDS[name]} if name in FIELDS else {})
        for target in targets.values():
            for gap in gaps[-WARM_UP:]:
                fill(target, gap)
        full = Target(targets[EXACT].port, {"taper": FIELDS[FULL]})
        runs = {name: list[list[Filled]]() for name in targets} | {FULL: [[fill(full, gap) for gap in gaps]]}
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds} ...", file=sys.stderr)
            order = list(targets)[:: -1 if number % 2 else 1]
            filled = [{name: fill(targets[name], gap) for name in order} for gap in gaps]
            for name in targets:
                runs[name].append([one[name] for one in filled])
            result["conditions"]["rounds"] = number + 1
            result |= summary(names, runs)
            if program:
                passed = result["ratio"][LLAMA_SERVER].value >= LEAST_RATIO
                result["passed"] = {f"at least {LEAST_RATIO}x llama-server": passed}
            write(options.out, result)
    print(json.dumps(result, indent=1))
    sys.exit(not all(result.get("passed", {}).values()))


if __name__ == "__main__":
    main()
