"""What Gemma 2 and 4 have of their own: capped scores and logits, shared keys and values, and official folders."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tiny import (
    BACKENDS,
    FAMILIES,
    assert_llama_cpp_agrees,
    complete,
    make_backend,
    make_tiny,
    official_gemma4,
    policies,
    random_prompt,
    reference_ids,
    write_gguf,
)

from taper.backends import TokenBatch
from taper.backends.ggml import GgmlBackend
from taper.engine import Engine
from taper.errors import ModelError
from taper.models import load_model
from taper.models.tensors import LoadedModel
from taper.policy import DepthPolicy


def make(folder, name: str, **more):
    architecture, options = FAMILIES[name]
    return make_tiny(folder, architecture, **options | more)


@BACKENDS
@pytest.mark.parametrize("name", ["gemma2", "gemma4"])
def test_prompts_that_are_computed_in_tiles_equal_transformers(tmp_path, kind, name):
    tiny, prompt = make(tmp_path, name), random_prompt(7, 150)
    layers = tiny.hf.config.num_hidden_layers
    engine = Engine(make_backend(kind, tiny.load()))
    for policy in (None, policies(layers)["d3 late"]):
        expected = [reference_ids(tiny, prompt, policy)]
        assert complete(engine, [prompt], [policy or DepthPolicy.full(layers)]) == expected


@BACKENDS
@pytest.mark.parametrize("policy", ["lenders", "borrowers"])
def test_shared_keys_and_values_are_there_whoever_is_skipped(tmp_path, kind, policy):
    tiny, prompt = make(tmp_path, "gemma4"), random_prompt(8)
    skipped = {"lenders": [4, 3, 1], "borrowers": [6, 5, 2]}[policy]
    chosen = DepthPolicy.d3(7, 0.9, min_depth=4, skip_order=skipped)
    assert tiny.load().config.lenders == {3, 4}
    engine = Engine(make_backend(kind, tiny.load()))
    for reuse in ("filled", "exact"):
        assert complete(engine, [prompt], [chosen], reuse=reuse) == [reference_ids(tiny, prompt, chosen, reuse=reuse)]


@BACKENDS
def test_a_forward_that_begins_at_a_later_layer_equals_a_whole_one(tmp_path, kind):
    """Its layers get the inputs of their own tokens too."""
    loaded, count = make(tmp_path, "gemma4").load(), 12
    backend, layers = make_backend(kind, loaded), loaded.config.num_hidden_layers
    places = np.array(random_prompt(3, count), np.int32), np.arange(count, dtype=np.int32), np.zeros(count, np.int32)
    all_run, rows = (count,) * layers, tuple(range(count))
    whole = backend.forward(TokenBatch(*places, all_run, logits_rows=rows, output_hidden_states=(3,)))
    states = whole.hidden_states[3]
    later = backend.forward(TokenBatch(*places, all_run, logits_rows=rows, first_layer=3, hidden_states=states))
    np.testing.assert_allclose(later.logits, whole.logits, rtol=1e-5, atol=1e-5)


def test_parts_of_a_prompt_do_not_run_layers_that_write_nothing(tmp_path, monkeypatch):
    backend, graph, seen = make_backend("ggml", make(tmp_path, "gemma4").load()), GgmlBackend._graph, []
    monkeypatch.setattr(GgmlBackend, "_graph", lambda self, key: seen.append(key.num_active) or graph(self, key))
    places = np.array(random_prompt(3, 9), np.int32), np.arange(9, dtype=np.int32), np.zeros(9, np.int32)
    for rows in ((), (8,)):
        backend.forward(TokenBatch(*places, (9,) * 7, logits_rows=rows))
    assert seen == [(9,) * 5 + (0, 0), (9,) * 7]
    complete(Engine(backend), [random_prompt(4, 30)], [DepthPolicy.full(7)], 1)
    assert seen[2:] == [(29,) * 5 + (0, 0), (1,) * 7]


def same_model(one: LoadedModel, other: LoadedModel) -> bool:
    return one.config == other.config and all(
        np.array_equal(tensor.data, other.tensors[name].data) for name, tensor in one.tensors.items()
    )


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("name", ["gemma4", "gemma4, values from keys", "gemma4 with experts"])
def test_official_folders_hold_the_same_model_in_other_words(tmp_path, name, prefix):
    """Their text model is one of several parts, and sizes of heads are given by kind of layer."""
    folder = make(tmp_path, name).folder
    plain, tensors, text = load_model(folder), load_file(folder / "model.safetensors"), official_gemma4(folder)
    whole = {"model_type": "gemma4", "text_config": text, "vision_config": {"model_type": "gemma4_vision"}}
    (folder / "config.json").write_text(json.dumps(whole))
    renamed = {key.replace("model.", prefix, 1): tensor for key, tensor in tensors.items()}
    seen = {"model.vision_tower.weight": tensors["model.norm.weight"].clone()}
    save_file(renamed | seen, folder / "model.safetensors", metadata={"format": "pt"})
    assert same_model(load_model(folder), plain)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_kv_shared_layers": 7}, "some of 7 layers must have keys and values of their own"),
        ({"num_kv_shared_layers": 5}, "layers of both kinds must have keys and values of their own"),
        ({"per_layer_config": {"2": {"head_dim": 32}}}, "it must give all layers of full_attention the same"),
        ({"per_layer_config": []}, "it must give all layers of full_attention the same"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1"),
        ({"final_logit_softcapping": 0.0}, "logit_cap is 0.0"),
        ({"use_double_wide_mlp": "yes"}, "use_double_wide_mlp"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, changed, says):
    folder = make(tmp_path, "gemma4").folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ModelError) as error:
        load_model(folder)
    assert says in error.value.message


@pytest.mark.ci
@pytest.mark.parametrize("name", ["gemma2", "gemma4", "gemma4, values from keys", "gemma4 with experts"])
def test_llama_cpp_gives_the_same_tokens(tmp_path, name):
    write_gguf(tmp_path / "tiny.gguf", make(tmp_path, name))
    assert_llama_cpp_agrees(tmp_path / "tiny.gguf")
