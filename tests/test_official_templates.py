"""The chat templates of today's models, which llama.cpp's source keeps, render as in transformers.

They are not ours to keep: the source of llama-cpp-python is fetched.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from taper.errors import RequestError
from taper.models.chat_template import ChatTemplate

SOURCE = "llama-cpp-python==0.3.36"
FEWEST = 50  # templates in it
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER, SYSTEM = {"role": "user", "content": "What is 2 + 2 in Lima?"}, {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Four."}
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "A city"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": CITY}}
CALL = {"id": "call0000a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Lima"}}}
CALLED = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call0000a", "name": "weather", "content": '{"degrees": 20}'},
]
CONVERSATIONS = {
    "one message": ([USER], None),
    "turns": ([SYSTEM, USER, ANSWER, USER], None),
    "a thought": ([USER, ANSWER | {"reasoning_content": "Well."}, USER], None),
    "tools": ([SYSTEM, USER], [TOOL]),
    "a call": ([USER, *CALLED], [TOOL]),
    "after a call": ([USER, *CALLED, ANSWER, USER], [TOOL]),
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("source")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:", SOURCE]
    subprocess.run([*command, "--dest", folder], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        kept = [member for member in archive if "/models/templates/" in member.name and member.name.endswith(".jinja")]
        return {Path(member.name).stem: archive.extractfile(member).read().decode() for member in kept}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"enable_thinking": True}, {"enable_thinking": False}], ids=str)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_official_templates_render_as_in_transformers(templates, name, more):
    messages, tools = CONVERSATIONS[name]
    refused = []
    for model, source in templates.items():
        values = {"tools": tools, "documents": None, "add_generation_prompt": True} | TOKENS | more
        try:
            expected = render_jinja_template([messages], chat_template=source, **values)[0][0]
        except Exception:  # as the template wants
            refused.append(model)
            with pytest.raises(RequestError):
                ChatTemplate(source).render(values | {"messages": messages})
        else:
            assert ChatTemplate(source).render(values | {"messages": messages}) == expected, model
    assert len(templates) >= FEWEST
    assert len(refused) < 8
