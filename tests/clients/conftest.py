"""`taper serve` with the default model, and what each client asks of it.

The model's own chat template takes no tools. So a copy of its file has one that does.
"""

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
MODEL_FILE = PACKAGED_MODELS[DEFAULT_MODEL].path
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    '{{ \'\nCall one as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n\' }}{% endif %}'
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
SCHEMA |= {"additionalProperties": False}


@dataclass
class Server:
    """Where it is, and how its model is called."""

    url: str
    model: str = "smollm2"
    question: str = "In which city is the Colosseum?"


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    if not MODEL_FILE.exists():
        pytest.skip(f"needs the default model: taper pull {DEFAULT_MODEL}")
    file = tmp_path_factory.mktemp("model") / "model.gguf"
    rewrite = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--chat-template", TEMPLATE, MODEL_FILE, file]
    subprocess.run(list(map(str, rewrite)), check=True, capture_output=True)
    command = [sys.executable, "-m", "taper", "serve", "--model", str(file), "--name", Server.model, "--port", "0"]
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
