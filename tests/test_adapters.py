"""Adapters: the same tokens in every engine, none of the model's own where they are zero, and files that hold them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save
from tiny import BACKENDS, complete, make_backend, policies, random_prompt, reference_ids, with_adapters

from taper.adapters import Adapters
from taper.engine import Engine
from taper.errors import PolicyError
from taper.models.policies import METADATA_KEY, PARTS, find_policy, load_policy, save_policy, shipped_policies
from taper.policy import DepthPolicy
from taper.vllm_plugin.options import PluginOptions


def healed(layers: int, hidden_size: int, **options) -> dict[str, DepthPolicy]:
    return {name: with_adapters(policy, hidden_size, **options) for name, policy in policies(layers).items()}


@BACKENDS
def test_adapters_equal_the_reference_implementation(tiny, kind):
    loaded, prompt = tiny.load(), random_prompt(3)
    layers, hidden_size = loaded.config.num_hidden_layers, loaded.config.hidden_size
    plain = policies(layers)
    for name in ("d3 late", "early exit", "static"):
        policy = with_adapters(plain[name], hidden_size)
        tapered = complete(Engine(make_backend(kind, loaded)), [prompt], [policy])[0]
        assert tapered == reference_ids(tiny, prompt, policy), name
        assert tapered != reference_ids(tiny, prompt, plain[name]), f"the adapters of {name} change nothing"


@BACKENDS
def test_adapters_of_zeros_change_nothing(tiny_llama, kind):
    loaded, prompt, plain = tiny_llama.load(), random_prompt(4), policies(6)
    for name, policy in healed(6, loaded.config.hidden_size, scale=0.0).items():
        both = [complete(Engine(make_backend(kind, loaded)), [prompt], [one])[0] for one in (policy, plain[name])]
        assert both[0] == both[1], name


@BACKENDS
def test_rows_keep_their_own_adapters(tiny_llama, kind):
    """Rows with the same order and other adapters, with none, and at full depth, together and alone."""
    loaded = tiny_llama.load()
    size = loaded.config.hidden_size
    plain = policies(6)["d3"]
    chosen = [with_adapters(plain, size), with_adapters(plain, size, rank=64), plain, DepthPolicy.full(6)]
    chosen += healed(6, size).values()
    prompts = [random_prompt(seed, 5 + 7 * seed) for seed in range(len(chosen))]
    together = complete(Engine(make_backend(kind, loaded, num_slots=4)), prompts, chosen)
    for prompt, policy, got in zip(prompts, chosen, together, strict=True):
        assert got == complete(Engine(make_backend(kind, loaded)), [prompt], [policy])[0]


@pytest.fixture
def healed_policy(tiny_llama) -> DepthPolicy:
    config = tiny_llama.load().config
    return with_adapters(replace(policies(6)["d3"], name="healed", model=config.identity), config.hidden_size)


def test_a_file_gives_back_policy_and_adapters(healed_policy, tmp_path):
    path = tmp_path / "healed.safetensors"
    save_policy(path, healed_policy)
    again = find_policy(path)
    assert replace(again, adapters=None) == replace(healed_policy, adapters=None)
    for layer, pair in healed_policy.adapters.layers.items():
        for ours, theirs in zip(pair, again.adapters.layers[layer], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_file_that_is_loaded_twice_is_read_once_and_shares_its_forwards(healed_policy, tmp_path, tiny_llama):
    path = tmp_path / "healed.safetensors"
    save_policy(path, healed_policy)
    one, two = load_policy(path), load_policy(str(path))
    assert one.adapters is two.adapters
    assert one.adapters == healed_policy.adapters
    assert hash(one.adapters) == hash(healed_policy.adapters)
    half = Adapters({layer: (down / 2, up) for layer, (down, up) in one.adapters.layers.items()})
    save_policy(path, replace(healed_policy, adapters=half))
    assert load_policy(path).adapters == half != one.adapters

    backend = make_backend("ggml", tiny_llama.load(), num_slots=2)
    forwards = []
    forward, backend.forward = backend.forward, lambda batch: forwards.append(batch) or forward(batch)
    engine, prompts = Engine(backend), [random_prompt(1, 9), random_prompt(2, 9)]
    outputs = complete(engine, prompts, [one, healed_policy])
    assert outputs == [complete(Engine(make_backend("ggml", tiny_llama.load())), [p], [one])[0] for p in prompts]
    assert any(len(batch.tokens) == 2 and batch.adapters is not None for batch in forwards)
    assert len(backend._adapters) == 1


def test_json_has_no_room_for_adapters(healed_policy):
    with pytest.raises(PolicyError, match="save_policy"):
        healed_policy.to_json()
    assert DepthPolicy.from_json(healed_policy.without_adapters().to_json()) == replace(healed_policy, adapters=None)


def test_the_suffix_says_the_format(healed_policy, tmp_path):
    with pytest.raises(PolicyError, match="safetensors"):
        save_policy(tmp_path / "healed.json", healed_policy)
    with pytest.raises(PolicyError, match="safetensors"):
        save_policy(tmp_path / "plain.safetensors", replace(healed_policy, adapters=None))


def named_by_json(folder: Path, policy: DepthPolicy, adapters: object) -> Path:
    """A JSON file of a policy that names the file with its adapters."""
    path = folder / f"{policy.name}.json"
    data = json.loads(policy.without_adapters().to_json()) | {"adapters": adapters}
    path.write_text(json.dumps(data))
    return path


def test_json_files_may_share_the_file_with_their_adapters(healed_policy, tmp_path):
    save_policy(tmp_path / "adapters.safetensors", healed_policy)
    gentle = replace(healed_policy, schedule=replace(healed_policy.schedule, min_depth=5), name="gentle")
    paths = [named_by_json(tmp_path, policy, "adapters.safetensors") for policy in (healed_policy, gentle)]
    loaded = [load_policy(path) for path in paths]
    assert loaded == [healed_policy, gentle]
    assert loaded[0].adapters is loaded[1].adapters
    config = PluginOptions(loaded[0], {"gentle": loaded[1]}).to_config()
    identity = healed_policy.model
    model = SimpleNamespace(num_hidden_layers=6, hidden_size=identity.hidden_size, vocab_size=identity.vocab_size)
    again = PluginOptions.read(json.loads(json.dumps(config)), model)
    assert again.default == replace(healed_policy, provenance={})
    assert again.named["gentle"].adapters == gentle.adapters


@pytest.mark.parametrize("adapters", [7, "adapters.json", "missing.safetensors", ["x"], ""])
def test_a_json_file_that_names_no_adapters_is_rejected(healed_policy, tmp_path, adapters):
    path = named_by_json(tmp_path, healed_policy, adapters)
    with pytest.raises(PolicyError, match=r"healed\.json.*\.safetensors"):
        load_policy(path)
    with pytest.raises(PolicyError, match="adapters"):
        DepthPolicy.from_json(path.read_text())


def test_shipped_adapters_take_at_most_eight_megabytes():
    files = [*resources.files("taper").joinpath("policies").glob("*/*.safetensors")]
    assert sum(file.stat().st_size for file in files) <= 8e6
    for of_model in shipped_policies().values():
        shared = {id(policy.adapters) for policy in of_model if policy.adapters is not None}
        assert len(shared) <= 1, "policies of a model share their adapters, so that rows of both share a forward"


def changed(policy: DepthPolicy, **tensors) -> tuple[dict, dict]:
    """The tensors and metadata of a file, with some of them replaced or, where None, left out."""
    pairs = policy.adapters.layers.items()
    parts = {f"adapters.{layer}.{part}": m for layer, pair in pairs for part, m in zip(PARTS, pair, strict=True)}
    parts |= {name.replace("_", "."): value for name, value in tensors.items()}
    text = replace(policy, adapters=None).to_json()
    return {name: value for name, value in parts.items() if value is not None}, {METADATA_KEY: text}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"adapters_4_up": None}, "not complete"),
        ({"adapters_4_up": np.zeros((64, 7), np.float16)}, "shapes"),
        ({"adapters_4_down": np.zeros((32, 8), np.float16)}, "shapes"),
        ({"adapters_4_down": np.zeros((0, 64), np.float16), "adapters_4_up": np.zeros((64, 0), np.float16)}, "shapes"),
        ({"adapters_4_down": np.zeros((32, 64), np.float32)}, "float16"),
        ({"adapters_4_down": np.full((32, 64), np.nan, np.float16)}, "not finite"),
        ({"adapters_0_down": np.zeros((8, 64), np.float16), "adapters_0_up": np.zeros((64, 8), np.float16)}, "never"),
        ({"adapters_x_down": np.zeros((8, 64), np.float16)}, "not complete"),
        ({"adapters_4_down": np.zeros((), np.float16)}, "shapes"),
        ({"other": np.zeros(3, np.float16)}, "no adapter's"),
    ],
)
def test_a_file_with_wrong_tensors_is_rejected(healed_policy, tmp_path, tensors, message):
    path = tmp_path / "wrong.safetensors"
    path.write_bytes(save(*changed(healed_policy, **tensors)))
    with pytest.raises(PolicyError, match=message) as error:
        load_policy(path)
    assert "\n" not in str(error.value)


def test_a_damaged_or_foreign_file_is_rejected(healed_policy, tmp_path):
    path = tmp_path / "healed.safetensors"
    save_policy(path, healed_policy)
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:100], b"", b"{}", save(changed(healed_policy)[0])):
        path.write_bytes(content)
        with pytest.raises(PolicyError, match=r"healed\.safetensors"):
            load_policy(path)
    foreign = replace(healed_policy.model, architecture="another")
    with pytest.raises(PolicyError, match="architecture"):
        healed_policy.check_model(6, foreign)
    nameless = with_adapters(replace(healed_policy, model=None), 32)
    with pytest.raises(PolicyError, match="hidden_size"):
        nameless.check_model(6, foreign)
