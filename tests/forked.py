"""Taper's command line in a process of its own, forked from one that has imported it: a tenth of the time of a start.

What needs a whole start and end of Python, pipes or signals, starts a process instead (`test_bad_input.start`).
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="signals, forks, limits and devices of POSIX")
SECONDS = 60  # that a command may take
STREAMS = ("stdin", "stdout", "stderr")


def run_taper(*arguments: object, stdin: bytes = b"", memory: int | None = None) -> tuple[int, bytes, bytes]:
    """Exit code, standard output and standard error of a command that may have so many bytes of memory."""
    if sys.platform == "win32":  # where no process forks, or has a limit of memory
        command = [sys.executable, "-m", "taper", *map(str, arguments)]
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=SECONDS, check=False)
        return done.returncode, done.stdout, done.stderr
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["taper.cli", "taper.llm", "taper.cli.terminal", "taper.backends.ggml", "rich.console"]
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stdin").write_bytes(stdin)
        given = list(map(str, arguments)), dict(os.environ), folder, memory
        process = context.Process(target=_run, args=given)
        process.start()
        process.join(SECONDS)
        process.kill()  # one that hangs does not outlive its test
        process.join()
        return process.exitcode, *(Path(folder, name).read_bytes() for name in STREAMS[1:])


def _run(arguments: list[str], environment: dict[str, str], folder: str, memory: int | None) -> None:
    """What the forked process does; its exit code is that of a SystemExit."""
    for number, name in enumerate(STREAMS):
        os.dup2(os.open(Path(folder, name), os.O_RDWR | os.O_CREAT), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  (multiprocessing closed the other)
    os.environ.clear()
    os.environ.update(environment)
    if memory is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    sys.argv = ["taper", *arguments]

    from taper.__main__ import run

    run()
