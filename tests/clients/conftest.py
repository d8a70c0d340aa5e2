"""`taper serve` with the default model, and what each client asks of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from taper.models.download import DEFAULT_MODEL, PACKAGED_MODELS

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}  # nothing is fetched
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
SCHEMA |= {"additionalProperties": False}


@dataclass
class Server:
    """Where it is, and how its model is called."""

    url: str
    model: str = "smollm2"
    question: str = "In which city is the Colosseum?"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    if not PACKAGED_MODELS[DEFAULT_MODEL].path.exists():
        pytest.skip(f"needs the default model: taper pull {DEFAULT_MODEL}")
    command = [sys.executable, "-m", "taper", "serve", "--name", Server.model, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while not (url := re.search(r"at (http://\S+)/", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        try:
            yield Server(url[1])
        finally:
            process.terminate()
