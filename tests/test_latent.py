"""What models with latent attention have of their own: where contexts end, official folders, matrices of each head."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import (
    BACKENDS,
    FAMILIES,
    assert_llama_cpp_agrees,
    complete,
    make_backend,
    make_tiny,
    one_slot,
    random_prompt,
    reference_ids,
    write_gguf,
)

from taper.backends.ggml import GgmlBackend
from taper.engine import Engine
from taper.errors import ModelError
from taper.models import load_model
from taper.models.gguf import read_gguf
from taper.models.tensors import Tensor
from taper.policy import DepthPolicy

pytestmark = pytest.mark.ci

MISTRAL4, GLM = "mistral 4", "glm 4.7 flash"
FULL = DepthPolicy.full(5)


def make(folder, name: str, **more):
    architecture, options = FAMILIES[name]
    return make_tiny(folder, architecture, **options | more)


@BACKENDS
@pytest.mark.parametrize("name", [MISTRAL4, GLM])
def test_long_prompts_equal_transformers(tmp_path, kind, name):
    """Those whose tokens attend in tiles."""
    tiny, prompt = make(tmp_path, name), random_prompt(31, 150)
    assert complete(Engine(make_backend(kind, tiny.load())), [prompt], [FULL]) == [reference_ids(tiny, prompt, None)]


@BACKENDS
def test_contexts_end_where_attention_would_be_sharper(tmp_path, kind):
    rope = FAMILIES[MISTRAL4][1]["rope_parameters"] | {"original_max_position_embeddings": 48, "factor": 1024 / 48}
    tiny, prompt = make(tmp_path, MISTRAL4, rope_parameters=rope | {"llama_4_scaling_beta": 4.0}), random_prompt(32)
    loaded = tiny.load()
    assert loaded.config.max_position_embeddings == 48
    said = complete(Engine(make_backend(kind, loaded, context_length=48)), [prompt], [FULL], 40)[0]
    expected = reference_ids(tiny, prompt, None, 40)
    assert len(prompt) + len(said) == 48
    assert said == expected[: len(said)]
    # A token more, and it shows.
    plain = make(tmp_path / "plain", MISTRAL4, rope_parameters=rope | {"llama_4_scaling_beta": 0.0})
    unsharpened = reference_ids(plain, prompt, None, 40)
    assert unsharpened[: len(said)] == said
    assert unsharpened != expected


def test_files_that_do_not_say_that_attention_sharpens_have_the_same_context(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", make(tmp_path, MISTRAL4))
    assert "mistral4.attention.temperature_scale" not in read_gguf(tmp_path / "tiny.gguf")[0]
    for path in (tmp_path, tmp_path / "tiny.gguf"):
        assert load_model(path).config.max_position_embeddings == 256


@pytest.mark.parametrize("name", [MISTRAL4, GLM, "deepseek v3 without groups"])
def test_folders_and_files_hold_the_same_model(tmp_path, name):
    write_gguf(tmp_path / "tiny.gguf", make(tmp_path, name))
    folder, file = load_model(tmp_path), load_model(tmp_path / "tiny.gguf")
    assert folder.config.layers == file.config.layers
    assert all(np.array_equal(tensor.data, file.tensors[key].data) for key, tensor in folder.tensors.items())


def test_the_official_folder_of_mistral_4_holds_the_same_model_as_one_of_its_parts(tmp_path):
    folder = make(tmp_path, MISTRAL4).folder
    plain, tensors = load_model(folder), load_file(folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    rope = text["rope_parameters"]
    rope["type"] = rope.pop("rope_type")
    whole = {"model_type": "mistral3", "text_config": {key: text[key] for key in text if key != "head_dim"}}
    (folder / "config.json").write_text(json.dumps(whole))
    renamed = {f"language_model.{key}": tensor for key, tensor in tensors.items()}
    seen = {f"{part}.weight": torch.ones(2, 2) for part in ("vision_tower.x", "multi_modal_projector.linear_1")}
    save_file(renamed | seen, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(folder)
    assert loaded.config == plain.config
    assert all(np.array_equal(tensor.data, loaded.tensors[key].data) for key, tensor in plain.tensors.items())


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "q4_k"])
def test_quantised_matrices_of_heads_agree_with_those_in_f32_repacked_or_not(tmp_path, dtype):
    sizes = {"hidden_size": 256, "kv_lora_rank": 256, "q_lora_rank": 256, "qk_nope_head_dim": 64, "v_head_dim": 64}
    # All experts are chosen, and weights are small, so that a little noise stays little.
    loaded = make(tmp_path, GLM, **sizes, n_routed_experts=2, moe_intermediate_size=64).load()
    tensors = {}
    for name, tensor in loaded.tensors.items():
        floats = tensor.data.view(np.float32) * (1.0 if name.endswith("norm") else 0.2)
        tensors[name] = Tensor("F32", tensor.shape, floats.astype(np.float32).view(np.uint8))
    logits, prompt = [], random_prompt(33)
    for options in ({"dtype": "f32"}, {"dtype": dtype, "repack": "never"}, {"dtype": dtype, "repack": "auto"}):
        backend = GgmlBackend(loaded.config, tensors, context_length=64, threads=1, **options)
        logits.append(backend.forward(one_slot(backend, prompt, tuple(range(23)))).logits)
    assert backend.weight_bytes["layers.1.latent_values"] < tensors["layers.1.latent_values"].data.nbytes / 3
    exact, plain, repacked = logits
    assert np.linalg.norm(repacked - plain) < 0.05 * np.linalg.norm(plain)
    assert np.corrcoef(exact.ravel(), plain.ravel())[0, 1] > (0.999 if dtype == "q8_0" else 0.9)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"n_group": 2}, "n_group is 2; Taper does not know what this means for deepseek2 models"),
        ({"model_type": "deepseek_v3", "n_group": 1}, ""),
        ({"model_type": "deepseek_v3", "n_group": 8}, "n_group is 8; Taper does not know what this means"),
        ({"rope_interleave": False}, "rope_interleave is False; rotary pairs must be neighbours"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"]}, "dense layers must come before all"),
        ({"mlp_layer_types": "dense"}, "mlp_layer_types is 'dense'; it must be of type list"),
        ({"kv_lora_rank": 0}, "kv_rank of latent attention is 0; no model has that"),
        ({"qk_nope_head_dim": 13}, "kv_b_proj.weight has shape [120, 48]; its config asks for [124, 48]"),
        ({"q_lora_rank": None}, "q_b_proj.weight has shape [112, 24]; its config asks for [112, 64]"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale_all_dim": "a"}, "rope_parameters": None},
            "mscale_all",
        ),
    ],
)
def test_settings_that_do_not_run_are_refused(tmp_path, changed, says):
    folder = make(tmp_path, GLM).folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    if not says:
        assert load_model(folder).config.architecture == "deepseek2"
        return
    with pytest.raises(ModelError) as error:
        load_model(folder)
    assert says in error.value.message


@pytest.mark.ci
def test_llama_cpp_scales_the_attention_of_deepseek_alike(tmp_path):
    """It loads such a model only if its queries are compressed; its two scales of YaRN are not 1 here."""
    write_gguf(tmp_path / "tiny.gguf", make(tmp_path, "deepseek v3 without groups", q_lora_rank=24))
    assert_llama_cpp_agrees(tmp_path / "tiny.gguf")


def test_other_models_cannot_have_latents(tmp_path):
    folder = make_tiny(tmp_path).folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"kv_lora_rank": 16}))
    with pytest.raises(ModelError, match="kv_lora_rank is 16; Taper does not know what this means for llama models"):
        load_model(folder)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"key_length_mla": None, "value_length_mla": None}, "before it kept keys and values apart"),
        ({"key_length": 48}, "attention.key_length is 48; with latent attention it must be 64"),
        ({"head_count_kv": 4}, "attention.head_count_kv is 4; with latent attention it must be 1"),
        ({"value_length": 40}, "keys and values must both have 48 dimensions"),
    ],
)
def test_headers_that_do_not_run_are_refused(tmp_path, monkeypatch, header, says):
    import gguf

    for key, value in header.items():
        add = getattr(gguf.GGUFWriter, f"add_{key}")
        change = (lambda *_: None) if value is None else (lambda writer, _, add=add, value=value: add(writer, value))
        monkeypatch.setattr(gguf.GGUFWriter, f"add_{key}", change)
    write_gguf(tmp_path / "tiny.gguf", make(tmp_path, GLM))
    with pytest.raises(ModelError, match=says):
        load_model(tmp_path / "tiny.gguf")
