"""The house: imports go one way, light stays light, and one place names architectures."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import taper
from taper.models.families import ARCHITECTURES, MODEL_TYPES

SRC = Path(__file__).parent.parent / "src" / "taper"

# What each room may import from the others; `hf` knows policies, shared checks and its own framework only.
ENGINE = {"errors", "adapters", "policy", "sampling", "backends", "engine"}
LLM = {*ENGINE, "models", "stream", "llm"}
ALLOWED = {
    "errors": set(),
    "adapters": set(),
    "policy": {"errors", "adapters"},
    "sampling": {"errors"},
    "models": {"errors", "adapters", "policy"},
    "backends": {"errors", "adapters", "policy", "models"},
    "engine": ENGINE - {"engine"},
    "stream": LLM - {"stream", "llm"},
    "llm": LLM - {"llm"},
    "calibration": LLM,
    "healing": {*LLM, "calibration"},
    "evals": {*LLM, "calibration"},
    "bench": {*LLM, "calibration", "hf"},
    "server": LLM,
    "hf": {"errors", "adapters", "policy"},
    "vllm_plugin": {"errors", "adapters", "policy", "models"},
    "cli": {*LLM, "calibration", "healing", "evals", "bench", "server", "vllm_plugin"},
    "__init__": {"errors", "policy", "sampling", "stream", "llm", "models", "calibration", "healing"},
    "__main__": {"__init__", "cli"},
}
SERVER = {"fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client", "llguidance"}
# vLLM's classes, names of files to fetch, and llama.cpp's programs and shapes of models as users name them.
OTHERS_NAMES = {
    "backends/ggml/library.py",
    "vllm_plugin/__init__.py",
    "models/download.py",
    "lab/bench/peers.py",
    "lab/bench/shapes.py",
    "cli/bench.py",
}
HEAVY = {
    "torch": {
        *(
            f"backends/{name}.py"
            for name in ("__init__", "candidates", "fused", "mixers", "packed", "streams", "torch")
        ),
        *(f"lab/healing/{name}.py" for name in ("precision", "stages", "student", "train")),
        *(
            "hf.py",
            "lab/bench/torch_device.py",
            "lab/bench/peers.py",
            "vllm_plugin/forward.py",
            "vllm_plugin/models.py",
        ),
    },
    "triton": {f"backends/{name}.py" for name in ("fused", "packed_kernels", "triton_kernels")},
    "transformers": {"hf.py", "lab/bench/torch_device.py"},
    "matplotlib": {"lab/calibration/report.py", "cli/bench.py"},
    "fastapi": {"server/app.py", "server/protocols/errors.py"},
    "pydantic": {
        *(f"server/protocols/{name}.py" for name in ("blocks", "bodies", "errors", "messages", "openai", "responses"))
    },
    "starlette": {f"server/{name}.py" for name in ("app", "completions", "limits", "protocols/errors")},
    "uvicorn": {"server/app.py"},
    "prometheus_client": {"server/metrics.py", "vllm_plugin/metrics.py"},
    "llguidance": {"models/grammars.py", "models/schema_worker.py"},
    "lm_eval": {f"lab/evals/{name}.py" for name in ("__main__", "harness", "tasks")},
    "datasets": {"lab/evals/tasks.py"},
    "vllm": {
        *(f"vllm_plugin/{name}.py" for name in ("__init__", "config", "forward", "models", "runner", "scheduler"))
    },
}


def part(path: Path) -> str:
    """The room of a file: a folder of the package or of its laboratory, or a file beside them."""
    *folders, name = path.relative_to(SRC).with_suffix("").parts
    return next((folder for folder in folders if folder != "lab"), name)


def imports(path: Path) -> list[tuple[str, str]]:
    """(part of Taper, "") and ("", outside package) of every import statement in a file."""
    found = []
    package = path.relative_to(SRC.parent).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [("", alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append(("", node.module.split(".")[0]))
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
            base = [name for name in base if name != "lab"]
            if len(base) > 1:
                found.append((base[1], ""))
            else:
                names = [alias.name for alias in node.names]
                found += [(name if (SRC / f"{name}.py").exists() else "__init__", "") for name in names]
    return found


FILES = sorted(SRC.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_imports_go_one_way(path):
    own = part(path)
    wrong = {name for name, _ in imports(path) if name and name != own} - ALLOWED[own]
    assert not wrong, f"{own} must not import {wrong}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_heavy_libraries_stay_in_their_files(path):
    for _, package in imports(path):
        if package in HEAVY:
            assert str(path.relative_to(SRC)) in HEAVY[package]


def imported_files(path: Path) -> set[Path]:
    """The files of Taper that a file imports, also within functions; a package stands for its __init__.py.

    Within functions of an __init__.py, a package may open what is in it, as `open_backend` does.
    """
    tree, files = ast.parse(path.read_text()), set()
    for node in tree.body if path.name == "__init__.py" else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split(".") if node.module else ())
            for target in (base, *(base / alias.name for alias in node.names)):
                files |= {file for file in (target.with_suffix(".py"), target / "__init__.py") if file.exists()}
            if base.is_dir() and all((base / f"{alias.name}.py").exists() for alias in node.names):
                files.discard(base / "__init__.py")  # it is the modules beside the package that are meant
    return files - {path}


def test_no_files_import_each_other_in_a_circle():
    TopologicalSorter({path: imported_files(path) for path in FILES}).prepare()  # raises CycleError


def test_policy_uses_the_standard_library_only():
    assert {package for _, package in imports(SRC / "policy.py")} - {""} <= sys.stdlib_module_names


def strings(path: Path) -> list[str]:
    """The text constants of a file that are not docstrings."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in prose)
    return [node.value for node in constants if isinstance(node.value, str)]


def test_only_models_names_architectures():
    for path in FILES:
        if part(path) != "models" and str(path.relative_to(SRC)) not in OTHERS_NAMES:
            words = {word.lower() for text in strings(path) for word in re.split(r"\W", text)}
            assert not words & {*ARCHITECTURES, *MODEL_TYPES}, path


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import taper.cli, taper.lab.evals", {"lm_eval", "datasets", "torch"}),
        ("import taper", {"numpy", "torch", "click", "ggml", "rich"}),
        ("import taper.cli", {"numpy", "torch", "ggml", "rich", "jinja2", "tokenizers", *SERVER}),
        ("import taper; taper.LLM", {"torch", *SERVER}),
        (
            "import taper.models, taper.models.policies, taper.cli.terminal",
            {"numpy", "torch", "ggml", "jinja2", "tokenizers"},
        ),
        ("import taper, taper.backends.ggml; taper.LLM", {"torch", "transformers"}),
    ],
)
def test_import_loads_only_what_it_needs(code, unwanted):
    code = f"{code}\nimport sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not unwanted & set(loaded)


def test_every_public_name_is_there():
    assert all(hasattr(taper, name) for name in taper.__all__)


def test_without_pytorch_every_public_name_is_there_and_heal_says_what_to_install():
    code = """if True:
        import sys
        sys.modules["torch"] = None
        from taper import *
        try:
            heal("model.gguf", "fast")
        except RequestError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == 'training adapters needs PyTorch (pip install "taper-llm[heal]")\n'


@pytest.mark.ci
def test_shared_fixtures_need_no_ggml():
    code = "import sys; sys.modules['ggml'] = None; import conftest"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
