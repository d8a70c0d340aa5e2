"""Builds the wheel and the sdist, and tries the wheel as a user would: `make test-package`.

On every Python from 3.10 to 3.14 that is here, in an empty environment outside the checkout: `import taper` without an
extra, `taper generate "Hi"`, and a completion from `taper serve` with the extra. Fetches packages and the model.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from server_process import CHAT, free_port, post, serving

ROOT = Path(__file__).parent.parent
MODEL = "smollm2-135m-instruct"  # the default one
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def pythons() -> dict[str, str]:
    """The interpreters of these versions that run, on the path or from pyenv."""
    found = {}
    for version in VERSIONS:
        others = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        for python in (shutil.which(f"python{version}"), *map(str, others)):
            done = python and subprocess.run([python, "-c", ""], capture_output=True, check=False)
            if python and done and done.returncode == 0:
                found[version] = python
                break
    return found


def run(*command: str | Path) -> str:
    """What a command prints; its errors end this script.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(list(map(str, command)), text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def completion(taper: Path) -> str:
    """What `taper serve` answers to one request."""
    port = free_port()
    with serving([str(taper), "serve", "--port", str(port)], port):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
        reply = asyncio.run(post(port, CHAT, body))
        if reply.status != 200:
            sys.exit(f"taper serve replied {reply.status}: {reply.body!r}")
        return reply.text


def main() -> None:
    """Build, check and try."""
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as folder:
        dist = Path(folder) / "dist"
        run(sys.executable, "-m", "build", "--outdir", dist, ROOT)
        print(run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir()))
        (wheel,) = dist.glob("*.whl")
        os.chdir(folder)  # outside the checkout
        if not (found := pythons()) or (os.environ.get("CI") and len(found) < len(VERSIONS)):
            sys.exit(f"of Python {', '.join(VERSIONS)}, only these are here: {', '.join(found) or 'none'}")
        for version, python in found.items():
            environment = Path(folder) / version
            run(python, "-m", "venv", environment)
            taper, python = environment / "bin" / "taper", environment / "bin" / "python"
            pip = (python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
            run(*pip, wheel)
            imported = run(python, "-c", "from taper import *; import taper; print(taper.__version__)")
            said = run(taper, "generate", "Hi", "--max-tokens", "8")
            run(*pip, f"{wheel}[serve]")
            served = completion(taper)
            print(f"Python {version}: taper {imported} says {said!r}, and over HTTP {served!r}", flush=True)
            shutil.rmtree(environment)


if __name__ == "__main__":
    main()
