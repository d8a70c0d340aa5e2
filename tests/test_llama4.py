"""What Llama 4 has of its own: contexts that end where attention would change, and official folders."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import BACKENDS, FAMILIES, complete, make_backend, make_tiny, random_prompt, reference_ids, write_gguf

from taper.engine import Engine
from taper.errors import ModelError
from taper.models import load_model
from taper.policy import DepthPolicy

NAMES = ("llama4", "llama4, experts in every other layer", "mobilellm")


def make(folder, name: str = "llama4", **more):
    architecture, options = FAMILIES[name]
    return make_tiny(folder, architecture, **options | more)


@BACKENDS
@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"attention_chunk_size": 40}, 40),
        ({"floor_scale": 40, "attn_scale": 4.0}, 39),
        ({"floor_scale": 40, "attn_scale": 4.0, "attn_temperature_tuning": False}, 8192),
    ],
)
def test_contexts_end_where_attention_would_change(tmp_path, kind, options, limit):
    tiny, prompt = make(tmp_path, **options), random_prompt(11)
    loaded = tiny.load()
    assert loaded.config.max_position_embeddings == limit
    backend = make_backend(kind, loaded, context_length=min(limit, 80))
    said = complete(Engine(backend), [prompt], [DepthPolicy.full(5)], 57)[0]
    expected = reference_ids(tiny, prompt, None, 57)
    assert len(prompt) + len(said) >= min(limit, 80)
    assert said == expected[: len(said)]
    # A token more, and chunks or sharper attention show.
    plain = reference_ids(make(tmp_path / "plain"), prompt, None, 57)
    assert (plain == expected) == (limit == 8192)
    assert plain[: len(said)] == said


@BACKENDS
def test_experts_are_chosen_by_logits_where_their_shares_are_all_one(tmp_path, kind):
    tiny, prompt = make(tmp_path, num_experts_per_tok=2), random_prompt(12)
    with torch.no_grad():
        for layer in tiny.hf.model.layers:
            layer.feed_forward.router.weight *= 300
    tiny.hf.save_pretrained(tmp_path)
    said = complete(Engine(make_backend(kind, tiny.load())), [prompt], [DepthPolicy.full(5)])
    assert said == [reference_ids(tiny, prompt, None)]


def test_the_context_of_files_ends_with_the_first_chunk(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", make(tmp_path))
    assert load_model(tmp_path / "tiny.gguf").config.max_position_embeddings == 8191
    assert load_model(tmp_path).config.max_position_embeddings == 8191


@pytest.mark.parametrize("name", NAMES)
def test_folders_and_files_hold_the_same_model(tmp_path, name):
    write_gguf(tmp_path / "tiny.gguf", make(tmp_path, name))
    folder, file = load_model(tmp_path), load_model(tmp_path / "tiny.gguf")
    for one, other in zip(folder.config.layers, file.config.layers, strict=True):
        if one.rope is not None:
            np.testing.assert_allclose(one.rope.factors or 1.0, other.rope.factors or 1.0, rtol=1e-6)
            one = replace(one, rope=other.rope)
        assert one == other
    assert folder.config.rms_norm_eps == pytest.approx(file.config.rms_norm_eps)
    rest = {"layers": (), "rms_norm_eps": 1.0}
    assert replace(folder.config, **rest) == replace(file.config, **rest)
    assert all(np.array_equal(tensor.data, file.tensors[key].data) for key, tensor in folder.tensors.items())


@pytest.mark.parametrize("name", NAMES[:2])
def test_official_folders_hold_the_same_model_in_other_words(tmp_path, name):
    """Their text model is one of several parts, and they leave unsaid which layers have positions and experts."""
    folder = make(tmp_path, name).folder
    plain, tensors = load_model(folder), load_file(folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope if "factor" in rope else None}
    text = {key: value for key, value in text.items() if key not in ("layer_types", "moe_layers")}
    text |= {"no_rope_layers": [], "attn_temperature_tuning": 4, "for_llm_compressor": False}
    whole = {"model_type": "llama4", "text_config": text, "vision_config": {"model_type": "llama4_vision_model"}}
    (folder / "config.json").write_text(json.dumps(whole))
    renamed = {f"language_model.{key}": tensor for key, tensor in tensors.items()}
    seen = {f"{part}.weight": torch.ones(2, 2) for part in ("vision_model.x", "multi_modal_projector.linear_1")}
    save_file(renamed | seen, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(folder)
    assert loaded.config == plain.config
    assert all(np.array_equal(tensor.data, loaded.tensors[key].data) for key, tensor in plain.tensors.items())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"layer_types": ["sliding_attention"] * 5}, "each layer must be chunked_attention or full_attention"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0; it must be at least 1"),
        ({"no_rope_layers": [1, 1]}, "it must be a list of 0 or 1 for each of 5 layers"),
        ({"moe_layers": "all"}, "moe_layers is 'all'; it must be of type list"),
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0; it must be at least 1"),
        ({"floor_scale": 1}, "floor_scale is 1; it must be at least 2"),
        ({"num_experts_per_tok": 7}, "a token cannot have 7 of 6 experts"),
        ({"moe_layers": []}, "tensor model.layers.0.feed_forward."),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, changed, says):
    folder = make(tmp_path).folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ModelError) as error:
        load_model(folder)
    assert says in error.value.message


def test_quantised_experts_of_folders_are_refused(tmp_path):
    folder = make(tmp_path).folder
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.feed_forward.experts.down_proj"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"tensor {name} is of type F8_E4M3"):
        load_model(folder)
