"""What gpt-oss has of its own: experts in MXFP4 from both kinds of files, and sinks in long prompts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import (
    BACKENDS,
    FAMILIES,
    TinyModel,
    assert_llama_cpp_agrees,
    complete,
    make_backend,
    make_tiny,
    one_slot,
    policies,
    random_prompt,
    reference_ids,
    write_gguf,
)

from taper.backends.ggml import GgmlBackend
from taper.engine import Engine
from taper.errors import ModelError
from taper.models import load_model
from taper.policy import DepthPolicy

MXFP4 = gguf.GGMLQuantizationType.MXFP4
FULL, LATE = DepthPolicy.full(5), policies(5)["d3 late"]
QUANTISED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}


def tiny_gpt_oss(folder, **more):
    architecture, options = FAMILIES["gpt-oss"]
    return make_tiny(folder, architecture, **options | more)


def make_in_mxfp4(folder) -> TinyModel:
    """A tiny model whose experts have values of MXFP4, in a folder as the official ones."""
    tiny = tiny_gpt_oss(folder)
    tensors, rows = load_file(tiny.folder / "model.safetensors"), {}
    for name, parameter in tiny.hf.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        rows[name] = gguf.quants.quantize(parameter.detach().numpy().swapaxes(1, 2), MXFP4)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(rows[name], MXFP4).swapaxes(1, 2).copy()))
        del tensors[name]
        blocks = rows[name].reshape(*rows[name].shape[:2], -1, 17)
        values = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], -1)  # in their order
        tensors[f"{name}_blocks"] = torch.from_numpy(values[..., ::2] | values[..., 1::2] << 4)
        tensors[f"{name}_scales"] = torch.from_numpy(blocks[..., 0].copy())
    save_file(tensors, tiny.folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tiny.folder / "config.json").read_text())
    (tiny.folder / "config.json").write_text(json.dumps(config | QUANTISED))
    return tiny


@pytest.fixture(scope="module")
def in_mxfp4(tmp_path_factory) -> SimpleNamespace:
    """Such a model, and the same as a GGUF file."""
    tiny = make_in_mxfp4(tmp_path_factory.mktemp("mxfp4"))
    write_gguf(tiny.folder / "mxfp4.gguf", tiny, experts="MXFP4")
    return SimpleNamespace(tiny=tiny, gguf=tiny.folder / "mxfp4.gguf")


def test_blocks_and_scales_of_a_folder_are_the_experts_of_the_gguf_file(in_mxfp4):
    folder, file = in_mxfp4.tiny.load(), load_model(in_mxfp4.gguf)
    assert folder.tensors.keys() == file.tensors.keys()
    for name, tensor in folder.tensors.items():
        assert (tensor.dtype, tensor.shape) == (file.tensors[name].dtype, file.tensors[name].shape)
        assert np.array_equal(tensor.data, file.tensors[name].data), name
    assert {t.dtype for name, t in folder.tensors.items() if name.endswith("experts")} == {"MXFP4"}


@BACKENDS
def test_experts_in_mxfp4_equal_transformers_that_reads_the_same_folder(in_mxfp4, kind):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    prompt = random_prompt(5)
    how = {"quantization_config": Mxfp4Config(dequantize=True), "attn_implementation": "eager"}
    read = AutoModelForCausalLM.from_pretrained(in_mxfp4.tiny.folder, **how).float()
    with torch.no_grad():
        logits = read(torch.tensor([prompt])).logits[0]
    backend = make_backend(kind, in_mxfp4.tiny.load())
    ours = backend.forward(one_slot(backend, prompt, tuple(range(len(prompt))))).logits
    assert np.abs(ours - logits.numpy()).max() < 1e-4 * logits.abs().max().item()
    engine = Engine(backend)
    for policy in (FULL, LATE):
        expected = reference_ids(in_mxfp4.tiny, prompt, None if policy is FULL else policy)
        assert complete(engine, [prompt], [policy]) == [expected]


@pytest.mark.parametrize("repack", ["never", "auto"])
def test_kernels_of_mxfp4_agree_with_f32(in_mxfp4, repack):
    loaded, prompt = load_model(in_mxfp4.gguf), random_prompt(6)
    logits = []
    for options in ({"dtype": "f32"}, {"dtype": None, "repack": repack}):
        backend = GgmlBackend(loaded.config, loaded.tensors, context_length=64, threads=1, **options)
        logits.append(backend.forward(one_slot(backend, prompt, tuple(range(len(prompt))))).logits)
    exact, quantised = logits
    assert np.corrcoef(exact.ravel(), quantised.ravel())[0, 1] > 0.99


@BACKENDS
def test_sinks_and_windows_hold_in_prompts_that_are_computed_in_tiles(tmp_path, kind):
    tiny, prompt = tiny_gpt_oss(tmp_path), random_prompt(7, 150)
    engine = Engine(make_backend(kind, tiny.load()))
    assert complete(engine, [prompt], [FULL]) == [reference_ids(tiny, prompt, None)]
    assert complete(engine, [prompt[:100]], [LATE]) == [reference_ids(tiny, prompt[:100], LATE)]


@pytest.mark.ci
def test_llama_cpp_gives_the_same_tokens(tmp_path):
    # It rounds the ends of yarn's ramp, which gpt-oss does not; without scaling there is nothing to round.
    tiny = tiny_gpt_oss(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    write_gguf(tmp_path / "tiny.gguf", tiny)
    assert_llama_cpp_agrees(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda name, tensors: tensors.pop(f"{name}_scales"), "do not fit together"),
        (lambda name, tensors: tensors.pop(f"{name}_blocks"), "is of type U8"),
        (
            lambda name, tensors: tensors.update({f"{name}_scales": tensors[f"{name}_scales"][:1]}),
            "do not fit together",
        ),
        (lambda name, tensors: tensors.update({f"{name}_bias": tensors[f"{name}_bias"][0]}), "has shape"),
        (lambda name, tensors: tensors.pop(f"{name}_bias"), "is missing"),
    ],
)
def test_experts_that_are_damaged_are_refused(in_mxfp4, tmp_path, change, says):
    tensors = load_file(in_mxfp4.tiny.folder / "model.safetensors")
    change("model.layers.1.mlp.experts.gate_up_proj", tensors)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(in_mxfp4.tiny.folder / name)
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=says):
        load_model(tmp_path)
