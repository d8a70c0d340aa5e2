"""Weights beyond the range of f16: as in transformers where Taper chooses the type, an error where the user does."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_bad_input import _own_environment, refused  # noqa: F401  (a fixture)
from tiny import one_slot, random_prompt
from transformers import AutoModelForCausalLM

from taper.backends import open_backend
from taper.backends.ggml.weights import Weights, convert
from taper.backends.torch import TorchBackend
from taper.errors import ModelError, TaperWarning
from taper.models import load_model
from taper.models.tensors import Tensor

LARGE = 80_000.0
EVERYWHERE = ["model.embed_tokens", *(f"model.layers.1.self_attn.{name}_proj" for name in "qkvo")]
EVERYWHERE += [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]


@pytest.fixture
def bf16_folder(folder):
    """The tiny llama in bf16, and a way to put a value into one of its tensors."""
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))

    def put(name: str | None = None, value: float = LARGE):
        changed = {key: tensor.to(torch.bfloat16) for key, tensor in weights.items()}
        if name is not None:
            changed[f"{name}.weight"][3, 5] = value
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return put


def logits(path, dtype: str = "auto") -> np.ndarray:
    backend = open_backend(load_model(path), device="cpu", dtype=dtype, context_length=64, threads=1)
    return backend.forward(one_slot(backend, random_prompt(1), tuple(range(23)))).logits


def of_transformers(path) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([random_prompt(1)])).logits[0].numpy()


@pytest.mark.parametrize("name", EVERYWHERE)
def test_bf16_model_beyond_f16_agrees_with_transformers(bf16_folder, name):
    path = bf16_folder(name)
    with pytest.warns(TaperWarning, match="the value 79872, which f16 cannot hold") as warned:
        ours = logits(path)
    # Other warnings may come meanwhile, such as those of files that Python collects.
    assert [entry.category for entry in warned].count(TaperWarning) == 1
    assert np.isfinite(ours).all()
    assert np.corrcoef(ours.ravel(), of_transformers(path).ravel())[0, 1] > 0.99
    np.testing.assert_array_equal(logits(path, "bf16"), ours)


def test_bf16_model_within_f16_is_converted_without_a_word(bf16_folder):
    path = bf16_folder("model.embed_tokens", 65_280.0)  # the largest bf16 below f16's limit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = logits(path)
    assert np.corrcoef(ours.ravel(), of_transformers(path).ravel())[0, 1] > 0.999
    weights = Weights(load_model(path).tensors, None)
    assert not weights.beyond_f16
    assert weights["layers.0.q_proj"].contents.type == 1  # ggml's f16


@pytest.mark.parametrize("value", [LARGE, -LARGE, float("inf"), float("nan")])
def test_command_line_names_the_tensor_and_the_value(bf16_folder, value):
    line = refused("generate", "--model", bf16_folder(EVERYWHERE[1], value), "--dtype", "f16", "hi")
    assert f"layers.1.q_proj has the value {float(torch.tensor(value, dtype=torch.bfloat16)):g}, which f16" in line


# How much larger than f16's largest value the largest of a quantised type is: its scale is f16.
SCALES = {"q8_0": 127, "q6_k": 4000, "q4_k": 60, "iq4_nl": 112, "q4_0": 8}


def matrix(*values: float, columns: int = 64) -> dict[str, Tensor]:
    floats = np.zeros((2, columns), np.float32)
    floats[0, : len(values)] = values
    return {"layers.0.q_proj": Tensor("F32", floats.shape, floats.view(np.uint8).reshape(-1))}


@pytest.mark.parametrize(
    ("dtype", "largest", "too_large"),
    [
        ("f16", 65_519.0, 65_520.0),
        *((dtype, factor * 65_519.0, factor * 65_521.0) for dtype, factor in SCALES.items()),
        ("bf16", 3.396e38, 3.3962e38),
    ],
)
def test_limits_are_those_at_which_ggml_makes_infinity(dtype, largest, too_large):
    for value in (largest, -largest):
        (tensor,) = matrix(1.0, value, columns=256).values()
        stored = Tensor(dtype.upper(), tensor.shape, convert(tensor, dtype.upper()))
        assert np.isfinite(convert(stored, "F32").view(np.float32)).all()
    for value in (too_large, -too_large, np.inf, np.nan):
        with pytest.raises(ModelError, match=r"layers\.0\.q_proj has the value"):
            Weights(matrix(1.0, value, columns=256), dtype)


@pytest.mark.parametrize(
    ("dtype", "value", "columns", "says"), [("q4_k", 16 * 65_521.0, 64, "which q5_0"), ("q8_0", 70_000.0, 48, "70000")]
)
def test_a_type_that_takes_the_place_of_another_has_its_own_limit(dtype, value, columns, says):
    with pytest.raises(ModelError, match=says):
        Weights(matrix(value, columns=columns), dtype)


def test_torch_refuses_f16_for_values_beyond_it_too(bf16_folder):
    loaded = load_model(bf16_folder(EVERYWHERE[1]))
    with pytest.raises(ModelError, match=r"layers\.1\.q_proj has the value 79872, which f16"):
        TorchBackend(loaded.config, loaded.tensors, context_length=64, dtype="f16", device="cpu")
    TorchBackend(loaded.config, loaded.tensors, context_length=64, dtype="bf16", device="cpu")
