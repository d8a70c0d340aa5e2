"""Every reader of a Hugging Face config rejects the same kinds of attention."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import AutoConfig, JambaConfig

from taper.errors import ModelError, limited_attention
from taper.models import load_model

WINDOW = {"sliding_window": 64}
FULL, SLIDING = ["full_attention"] * 6, ["full_attention"] * 5 + ["sliding_attention"]


@pytest.mark.parametrize(
    ("model_type", "settings", "kind"),
    [
        ("llama", {}, ""),
        ("llama", {"layer_types": FULL}, ""),
        ("llama", {"layer_types": SLIDING}, "sliding-window"),
        ("llama", {"layer_types": ["linear_attention", *FULL[1:]]}, "hybrid"),
        ("mistral", {}, "sliding-window"),  # 4096, unless it says null
        ("mistral", WINDOW, "sliding-window"),
        ("mistral", {"sliding_window": None}, ""),
        ("qwen2", {}, ""),
        ("qwen2", WINDOW, ""),  # none, unless it says that it uses it
        ("qwen3", WINDOW | {"use_sliding_window": False}, ""),
        ("qwen3", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}, "sliding-window"),
    ],
)
def test_limited_attention_is_the_same_in_config_json_and_transformers(
    tiny_llama, tmp_path, model_type, settings, kind
):
    assert limited_attention(AutoConfig.for_model(model_type, num_hidden_layers=6, **settings)) == kind
    folder = shutil.copytree(tiny_llama.folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": model_type} | settings
    (folder / "config.json").write_text(json.dumps(config))
    rejection = ""
    try:
        load_model(folder)
    except ModelError as error:  # for its attention, or because a llama's weights are not a Qwen's
        rejection = error.message
    # Other families have windows, and read the kinds of their layers themselves.
    assert rejection.startswith(f"config.json asks for {kind}") == (model_type == "llama" and bool(kind))


def test_limited_attention_reads_computed_layer_types():
    assert limited_attention(JambaConfig()) == "hybrid"
