"""What Gemma 2, 3n and 4 have of their own: capped scores, shared keys and values, streams, and official folders."""

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
    one_slot,
    policies,
    random_prompt,
    reference_ids,
    with_adapters,
    write_gguf,
)

import taper
from taper.backends import TokenBatch
from taper.backends.ggml import GgmlBackend
from taper.engine import Engine
from taper.errors import ModelError, PolicyError, RequestError
from taper.models import gemma3n, load_model
from taper.models.files import Settings
from taper.models.tensors import LoadedModel, Tensor
from taper.policy import DepthPolicy

pytestmark = pytest.mark.ci


def make(folder, name: str, **more):
    architecture, options = FAMILIES[name]
    return make_tiny(folder, architecture, **options | more)


@BACKENDS
@pytest.mark.parametrize("name", ["gemma2", "gemma3n", "gemma4"])
def test_prompts_that_are_computed_in_tiles_equal_transformers(tmp_path, kind, name):
    tiny, prompt = make(tmp_path, name), random_prompt(7, 150)
    layers = tiny.hf.config.num_hidden_layers
    engine = Engine(make_backend(kind, tiny.load()))
    for policy in (None, policies(layers)["d3 late"]):
        expected = [reference_ids(tiny, prompt, policy)]
        assert complete(engine, [prompt], [policy or DepthPolicy.full(layers)]) == expected


@BACKENDS
@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
@pytest.mark.parametrize("policy", ["lenders", "borrowers"])
def test_shared_keys_and_values_are_there_whoever_is_skipped(tmp_path, kind, name, policy):
    tiny, prompt = make(tmp_path, name), random_prompt(8)
    skipped = {"lenders": [4, 3, 1], "borrowers": [6, 5, 2]}[policy]
    chosen = DepthPolicy.d3(7, 0.9, min_depth=4, skip_order=skipped)
    assert tiny.load().config.lenders == {3, 4}
    engine = Engine(make_backend(kind, tiny.load()))
    for reuse in ("filled", "exact"):
        assert complete(engine, [prompt], [chosen], reuse=reuse) == [reference_ids(tiny, prompt, chosen, reuse=reuse)]


@BACKENDS
@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_a_forward_that_begins_at_a_later_layer_equals_a_whole_one(tmp_path, kind, name):
    """Its layers get the inputs of their own tokens too."""
    loaded, count = make(tmp_path, name).load(), 12
    backend, layers = make_backend(kind, loaded), loaded.config.num_hidden_layers
    places = np.array(random_prompt(3, count), np.int32), np.arange(count, dtype=np.int32), np.zeros(count, np.int32)
    all_run, rows = (count,) * layers, tuple(range(count))
    whole = backend.forward(TokenBatch(*places, all_run, logits_rows=rows, output_hidden_states=(3,)))
    states = whole.hidden_states[3]
    assert states.shape == (count, loaded.config.hidden_width)
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


def official_gemma3n(folder) -> None:
    """Give a folder what published ones have besides: two modalities, and keys and values that no layer attends to."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    whole = {"model_type": "gemma3n", "text_config": config | {"query_pre_attn_scalar": 256}, "audio_config": {}}
    (folder / "config.json").write_text(json.dumps(whole))
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    for layer in range(5, 7):
        for name in ("k_proj", "v_proj", "k_norm"):
            key = f"model.language_model.layers.{layer}.self_attn.{name}.weight"
            renamed[key] = tensors[f"model.layers.4.self_attn.{name}.weight"].clone()
    seen = {"model.audio_tower.weight": tensors["model.norm.weight"].clone()}
    save_file(renamed | seen, folder / "model.safetensors", metadata={"format": "pt"})


def test_official_folders_of_gemma_3n_hold_more_than_the_model(tmp_path):
    folder = make(tmp_path, "gemma3n").folder
    plain = load_model(folder)
    official_gemma3n(folder)
    assert same_model(load_model(folder), plain)


@BACKENDS
def test_tokens_without_layer_inputs_of_their_own_have_those_of_the_first(tmp_path, kind):
    tiny, prompt = make(tmp_path, "gemma3n", vocab_size_per_layer_input=150), random_prompt(9)
    loaded, policy = tiny.load(), policies(7)["d3 late"]
    assert max(prompt) > loaded.config.layer_vocab_size == 150
    expected = [reference_ids(tiny, prompt, policy)]
    assert complete(Engine(make_backend(kind, loaded)), [prompt], [policy]) == expected


def test_the_part_of_cut_gates_is_the_same_in_folders_and_gguf_files(tmp_path):
    """Though files hold its quantile in f32: 0.95 is all that published models have."""
    parts = [0.95, 0.5, 0.9, 0.99, 0.05, 0.123456, 0.0]
    tiny = make(tmp_path, "gemma3n", activation_sparsity_pattern=parts)
    write_gguf(tmp_path / "tiny.gguf", tiny)
    for loaded in (tiny.load(), load_model(tmp_path / "tiny.gguf")):
        assert [spec.sparsity for spec in loaded.config.layers] == parts
        assert [spec.gate_cutoff is None for spec in loaded.config.layers] == [False] * 6 + [True]
        assert loaded.config.layers[0].gate_cutoff == pytest.approx(1.6448533535003662, abs=1e-6)  # as in llama.cpp


def test_headers_of_gemma_3n_may_leave_unsaid_what_all_published_models_have():
    header = {"num_hidden_layers": 35, "intermediate_size": 16384, "num_kv_shared_layers": 15}
    header["sliding_window_pattern"] = [(layer + 1) % 5 != 0 for layer in range(35)]
    settings = Settings(header | gemma3n.gguf_settings(Settings(header, "a file")), "a file")
    windows = [512 if kind == "sliding_attention" else None for kind in settings.values["layer_types"]]
    facts = gemma3n.layer_facts(settings, windows, {})
    assert [own["sparsity"] for own in facts] == [0.95] * 10 + [0.0] * 25
    assert [own["cells_of"] for own in facts] == [None] * 20 + [18, 18, 18, 18, 19] * 3
    assert {own["laurel_rank"] for own in facts} == {64}
    assert settings.get("final_logit_softcapping", float) == 30.0


@pytest.mark.parametrize("repack", ["never", "auto"])
def test_matrices_of_streams_may_be_quantised_and_coefficients_stay(tmp_path, repack):
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "hidden_size_per_layer_input": 32}
    loaded = make(tmp_path, "gemma3n", **sizes, activation_sparsity_pattern=[0.0] * 7).load()
    tensors = {}
    for name, tensor in loaded.tensors.items():  # small weights, so that a little noise stays little
        floats = tensor.data.view(np.float32) * (1.0 if name.endswith("norm") else 0.2)
        tensors[name] = Tensor("F32", tensor.shape, floats.astype(np.float32).view(np.uint8))
    exact, quantised = (
        GgmlBackend(loaded.config, tensors, context_length=64, threads=1, **options)
        for options in ({"dtype": "f32"}, {"dtype": "q8_0", "repack": repack})
    )
    size = quantised.weight_bytes
    assert size["streams.embed_2"] == size["streams.unembed_1"] == 256 * 256 // 32 * 34
    assert (size["layers.2.predict_coefs"], size["layers.2.stream_router"]) == (64 * 4, 4 * 256 * 4)
    prompt = random_prompt(5, 70)[:60]
    expected, noisy = (b.forward(one_slot(b, prompt, tuple(range(60)))).logits for b in (exact, quantised))
    assert np.corrcoef(expected.ravel(), noisy.ravel())[0, 1] > 0.99


def test_adapters_are_refused_where_a_token_has_several_hidden_states(tmp_path):
    tiny = make(tmp_path, "gemma3n")
    loaded, policy = tiny.load(), policies(7)["d3"]
    with pytest.raises(PolicyError, match="has adapters, which are for models with one hidden state a token"):
        complete(Engine(make_backend("ggml", loaded)), [random_prompt(1)], [with_adapters(policy, 64)])
    for refused in (
        lambda: reference_ids(tiny, random_prompt(1), with_adapters(policy, 64)),
        lambda: taper.heal(tiny.folder, policy, minutes=1),
    ):
        with pytest.raises(RequestError, match="adapters are for models with one hidden state a token"):
            refused()


GEMMA3N_MISTAKES = [
    ({"altup_active_idx": 1}, "altup_active_idx is 1; it must be 0"),
    ({"altup_num_inputs": 3}, "altup_num_inputs is 3; it must be 4"),
    ({"altup_correct_scale": False}, "altup_correct_scale is False; it must be true"),
    ({"laurel_rank": -1}, "laurel_rank is -1"),
    ({"laurel_rank": 32}, "laurel.linear_left.weight has shape [64, 64]; its config asks for [32, 64]"),
    ({"activation_sparsity_pattern": [0.95]}, "there must be one for each of 7 layers"),
    ({"activation_sparsity_pattern": [1.0] * 7}, "the part of a layer's gates must be from 0 to below 1"),
    ({"intermediate_size": [128] * 6}, "there must be one for each of 7 layers"),
    ({"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input is 0"),
]


@pytest.mark.parametrize(("changed", "says"), GEMMA3N_MISTAKES)
def test_settings_of_gemma_3n_that_make_no_sense_are_refused(tmp_path, changed, says):
    folder = make(tmp_path, "gemma3n").folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ModelError) as error:
        load_model(folder)
    assert says in error.value.message


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
