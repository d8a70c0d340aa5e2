"""Builds the wheel and the sdist, and tries the wheel as a user would: `make test-package`.

On every Python from 3.10 to 3.13 that is here, in an empty environment outside the checkout: `import taper` without an
extra, `taper generate "Hi"`, and a completion from `taper serve` with the extra. Fetches packages and the model.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
START_S = 120


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


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What a command prints; its errors end this script.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(list(map(str, command)), cwd=cwd, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def completion(bin_folder: Path, cwd: Path) -> str:
    """What `taper serve` answers to one request."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with subprocess.Popen([bin_folder / "taper", "serve", "--port", str(port)], cwd=cwd, stderr=-3) as server:
        try:
            deadline = time.monotonic() + START_S
            while time.monotonic() < deadline and server.poll() is None:
                with suppress(OSError), urllib.request.urlopen(f"{url}/ready"):
                    break
                time.sleep(0.2)
            with urllib.request.urlopen(request) as response:
                return json.load(response)["choices"][0]["message"]["content"]
        finally:
            server.terminate()


def main() -> None:
    """Build, check and try."""
    with tempfile.TemporaryDirectory() as folder:
        dist, outside = Path(folder) / "dist", Path(folder) / "outside"
        outside.mkdir()
        run(sys.executable, "-m", "build", "--outdir", dist)
        print(run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir()))
        (wheel,) = dist.glob("*.whl")
        for version, python in pythons().items():
            environment = Path(folder) / version
            run(python, "-m", "venv", environment)
            bin_folder = environment / "bin"
            pip = (bin_folder / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
            run(*pip, wheel)
            imported = run(bin_folder / "python", "-c", "import taper; print(taper.__version__)", cwd=outside)
            said = run(bin_folder / "taper", "generate", "Hi", "--max-tokens", "8", cwd=outside)
            run(*pip, f"{wheel}[serve]")
            served = completion(bin_folder, outside)
            print(f"Python {version}: taper {imported} says {said!r}, and over HTTP {served!r}", flush=True)
            shutil.rmtree(environment)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main()
