"""Every family of models equals transformers, token for token in f32, from a folder and from a GGUF file."""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import (
    BACKENDS,
    DEVICES,
    FAMILIES,
    NOT_IN_GGUF,
    PLAIN,
    assert_llama_cpp_agrees,
    complete,
    make_backend,
    make_tiny,
    one_slot,
    policies,
    random_prompt,
    reference_ids,
    reference_turns,
    write_gguf,
)

import taper.hf
from taper.backends.ggml import GgmlBackend
from taper.backends.ggml.library import ggml
from taper.engine import Engine
from taper.errors import ModelError
from taper.models import load_model
from taper.models.tensors import Tensor
from taper.policy import DepthPolicy

TOKENS = 24
PROMPTS = [random_prompt(100 + seed, 23) for seed in range(4)]
CHOSEN = ("d3 late", "skipdecode", "static")
CONTEXTS = {"phi3 with longrope": 90}  # one token more would choose the other table of factors


# Variants of families whose main form is tested beside them.
RARE = ("phi3 with longrope", "glm4moe with norms", "ernie4_5-moe, nothing shared", "qwen35, as many heads of keys")
RARE += ("gemma3n as in llama.cpp",)
RARE += ("qwen3moe, not normalised", "granite 4 without positions", "qwen2 with yarn", "gemma4, values from keys")
RARE += ("granite 4 h, two groups", "deepseek v3 without groups")
NAMED = [pytest.param(name, marks=pytest.mark.ci) if name in RARE else name for name in FAMILIES]


def make_family(folder, name: str, prompts: list[list[int]], tokens: int) -> SimpleNamespace:
    """A tiny model, and what transformers makes of prompts of one length under a policy."""
    architecture, options = (PLAIN | FAMILIES)[name]
    tiny = make_tiny(folder, architecture, **options)
    layers = tiny.hf.config.num_hidden_layers
    chosen = {"full": DepthPolicy.full(layers), **{name: policies(layers)[name] for name in CHOSEN}}

    @cache
    def expected(name: str) -> list[list[int]]:
        ids = torch.tensor(prompts)
        custom = {} if name == "full" else {"custom_generate": taper.hf.custom_generate(chosen[name])}
        mask = torch.ones_like(ids)
        out = tiny.hf.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **custom)
        return out[:, ids.shape[1] :].tolist()

    given = {"prompts": prompts, "tokens": tokens, "options": {"context_length": CONTEXTS.get(name, 512)}}
    return SimpleNamespace(name=name, tiny=tiny, policies=chosen, expected=expected, **given)


@pytest.fixture(scope="module", params=NAMED)
def family(request, tmp_path_factory) -> SimpleNamespace:
    return make_family(tmp_path_factory.mktemp("family"), request.param, PROMPTS, TOKENS)


def completed(family, kind, loaded, name, **options) -> list[list[int]]:
    """All prompts in one batch; `options` are those of the engine."""
    backend = make_backend(kind, loaded, num_slots=len(family.prompts), **family.options)
    chosen = [family.policies[name]] * len(family.prompts)
    return complete(Engine(backend, **options), family.prompts, chosen, family.tokens)


@BACKENDS
@pytest.mark.parametrize("name", [CHOSEN[0], *(pytest.param(name, marks=pytest.mark.ci) for name in CHOSEN[1:])])
def test_every_policy_equals_transformers(family, kind, name):
    loaded = family.tiny.load()
    full = completed(family, kind, loaded, "full")
    assert full == family.expected("full")
    tapered = completed(family, kind, loaded, name)
    assert tapered == family.expected(name)
    assert tapered != full, "the policy changes nothing, so this proves nothing"


def test_gguf_equals_transformers(family, tmp_path):
    """On one backend, since both get the same tensors from either kind of file."""
    if family.name in NOT_IN_GGUF:
        pytest.skip("GGUF files of this architecture cannot say this")
    write_gguf(tmp_path / "tiny.gguf", family.tiny)
    loaded = load_model(tmp_path / "tiny.gguf")
    for name in ("full", "d3 late"):
        assert completed(family, "ggml", loaded, name) == family.expected(name)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["ggml", *DEVICES, pytest.param("torch", marks=pytest.mark.slow)])
def test_a_prompt_alone_equals_a_batch_and_a_second_turn_a_cold_start(family, kind):
    loaded, policy = family.tiny.load(), family.policies["d3 late"]
    warm, cold, filled = (Engine(make_backend(kind, loaded, **family.options)) for _ in range(3))
    said = complete(warm, PROMPTS[:1], [policy], 20, reuse="exact")[0]
    assert said == family.expected("d3 late")[0][:20]
    second = [*PROMPTS[0], *said, *random_prompt(9, 5)]
    exact = complete(warm, [second], [policy], 20, reuse="exact")
    assert exact == complete(cold, [second], [policy], 20, reuse="exact")
    # With filled keys and values, it equals the reference implementation's second turn.
    assert complete(filled, PROMPTS[:1], [policy], 20)[0] == said
    turns = reference_turns(family.tiny, [PROMPTS[0], second[len(PROMPTS[0]) + len(said) :]], policy, 20)
    assert complete(filled, [second], [policy], 20)[0] == turns[1]


@pytest.mark.parametrize(("architecture", "nodes"), [("llama", 215), ("qwen2", 230), ("qwen3", 235)])
def test_what_other_families_need_costs_these_no_operation(tmp_path, architecture, nodes):
    backend = make_backend("ggml", make_tiny(tmp_path, architecture).load())
    backend.forward(one_slot(backend, [5], (0,)))
    assert [ggml.graph_n_nodes(graph.pointer) for graph in backend._graphs.values()] == [nodes]


@BACKENDS
def test_longrope_takes_its_other_factors_in_a_longer_context(tmp_path, kind):
    architecture, options = FAMILIES["phi3 with longrope"]
    tiny, prompt = make_tiny(tmp_path, architecture, **options), random_prompt(15, 100)
    full, policy = DepthPolicy.full(5), policies(5)["d3 late"]
    long, short = (Engine(make_backend(kind, tiny.load(), context_length=length)) for length in (200, 90))
    assert complete(long, [prompt], [full]) == [reference_ids(tiny, prompt, None)]
    assert complete(long, [prompt], [policy]) == [reference_ids(tiny, prompt, policy)]
    assert complete(long, [prompt[:30]], [full]) != complete(short, [prompt[:30]], [full])


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "q4_k"])
def test_quantised_experts_agree_with_those_in_f32_repacked_or_not(tmp_path, dtype):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    # All experts are chosen, and weights are small: a little noise turns neither to another expert nor token.
    loaded = make_tiny(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=4, sliding_window=None, **sizes)
    config, tensors = loaded.load().config, {}
    for name, tensor in loaded.load().tensors.items():
        floats = tensor.data.view(np.float32) * (1.0 if name.endswith("norm") else 0.2)
        tensors[name] = Tensor("F32", tensor.shape, floats.astype(np.float32).view(np.uint8))
    logits = []
    for options in ({"dtype": "f32"}, {"dtype": dtype, "repack": "never"}, {"dtype": dtype, "repack": "auto"}):
        backend = GgmlBackend(config, tensors, context_length=64, threads=1, **options)
        logits.append(backend.forward(one_slot(backend, PROMPTS[0], tuple(range(23)))).logits)
    exact, plain, repacked = logits
    # Their kernels round in another order, which now and then shows in a single logit: so all of them at once.
    assert np.linalg.norm(repacked - plain) < 0.03 * np.linalg.norm(plain)
    assert np.corrcoef(exact.ravel(), plain.ravel())[0, 1] > (0.999 if dtype == "q8_0" else 0.95)


def damaged(folder, change) -> str:
    """What is said of a model folder after a change to its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as error:
        load_model(folder)
    return error.value.message


def test_fused_tensors_and_experts_that_do_not_fit_are_refused(tmp_path):
    phi3, mixtral = (make_tiny(tmp_path / name, name).folder for name in ("phi3", "mixtral"))
    qkv = "model.layers.0.self_attn.qkv_proj.weight"
    assert damaged(phi3, lambda tensors: tensors.update({qkv: tensors[qkv][:-1].clone()})) == (
        f"tensor {qkv} has shape [127, 64]; its config asks for [128, 64]"
    )
    assert damaged(phi3, lambda tensors: tensors.pop(qkv)) == f"tensor {qkv} is missing"
    expert = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    assert "layer 0 differ" in damaged(mixtral, lambda tensors: tensors.update({expert: tensors[expert][:-1].clone()}))
    assert "experts" in damaged(mixtral, lambda tensors: tensors.pop(expert))


VALUES = [None, True, 0, -1, 1, 7, 64, 1 << 31, 1 << 63, -0.5, 1e308, float("nan"), "a", [], {}, [None], ["conv"] * 7]
RECENT = ("qwen35", "glm4moe", "ernie4_5", "hunyuan", "lfm2", "granite 4 h", "llama4", "gemma3n as in llama.cpp")
RECENT += ("mistral 4", "glm 4.7 flash")


@pytest.mark.parametrize(
    "family",
    [
        *("qwen35", "qwen35moe", "glm4moe", "ernie4_5-moe", "lfm2", "lfm2moe", "granite 4 h", "llama4", "gemma3n"),
        *("mistral 4", "glm 4.7 flash"),
    ],
)
def test_damaged_settings_are_refused_in_one_line(tmp_path, family):
    architecture, options = FAMILIES[family]
    folder = make_tiny(tmp_path, architecture, **options).folder
    settings = json.loads((folder / "config.json").read_text())
    keys = sorted({*settings, "full_attn_idxs", "full_attention_interval", "attn_output_gate", "block_ff_dim"})
    rng, refused = np.random.default_rng(0), list[str]()
    for _ in range(50):
        key, value = keys[rng.integers(len(keys))], VALUES[rng.integers(len(VALUES))]
        (folder / "config.json").write_text(json.dumps(settings | {key: value}))
        try:
            load_model(folder)
        except ModelError as error:
            refused.append(error.message)
    assert 10 < len(refused) < 45
    assert not any("\n" in message for message in refused)


@pytest.mark.ci
@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith(RECENT)])
def test_llama_cpp_gives_the_same_tokens(tmp_path, family):
    architecture, options = FAMILIES[family]
    write_gguf(tmp_path / "tiny.gguf", make_tiny(tmp_path, architecture, **options))
    assert_llama_cpp_agrees(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("family", ["glm4moe", "glm 4.7 flash"])
def test_layers_that_predict_further_tokens_are_left_out(tmp_path, family):
    architecture, options = FAMILIES[family]
    tiny = make_tiny(tmp_path, architecture, **options)
    expected = tiny.load()
    tensors = load_file(tmp_path / "model.safetensors")
    more = {name.replace(".4.", ".5."): tensor for name, tensor in tensors.items() if ".layers.4." in name}
    tensors |= more | {"model.layers.5.eh_proj.weight": torch.ones(64, 128)}
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"num_nextn_predict_layers": 1}))
    loaded = load_model(tmp_path)
    assert loaded.config == expected.config
    assert loaded.tensors.keys() == expected.tensors.keys()


def test_granite_4_h_is_read_by_its_published_names_and_other_variants_are_refused(tmp_path):
    architecture, options = FAMILIES["granite 4 h with experts"]
    expected = make_tiny(tmp_path, architecture, **options).load()
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["time_step_limit"]
    kinds = ["attention" if kind == "full_attention" else "mamba" for kind in settings["layer_types"]]

    def loaded(**changed):
        (tmp_path / "config.json").write_text(json.dumps(settings | {"layer_types": kinds} | changed))
        return load_model(tmp_path)

    assert loaded(mamba_d_head="auto").config == expected.config
    for says, changed in {
        "the convolution alone must have a bias": {"mamba_conv_bias": False},
        "alone must have a bias": {"mamba_proj_bias": True},
        "limits of time steps": {"time_step_limit": [0.0, 0.1]},
        "experts are supported only beside recurrent layers": {"layer_types": ["attention"] * 7},
        "each layer must be": {"layer_types": ["mamba"] * 7},
        "must be a kind for each of 7 layers": {"layer_types": kinds[:-1]},
        "'num_groups': 3": {"mamba_n_groups": 3},
        "head_dim of recurrent layers is 0": {"mamba_d_head": 0},
    }.items():
        with pytest.raises(ModelError, match=says):
            loaded(**changed)
