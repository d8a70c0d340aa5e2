"""Quantised matrices that keep their bits: no number of a file is lost, and fused steps equal those of its floats.

Triton's interpreter runs the kernels on a CPU, as in test_fused.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from interpreted import Interpreted
from test_quantise import rows
from tiny import CONTEXT, complete, make_tiny, one_slot, random_prompt, write_gguf

from taper.backends.packed import can_pack, packed
from taper.backends.torch import TorchBackend
from taper.engine import Engine
from taper.models import load_model
from taper.models.tensors import WEIGHT_TYPES, Tensor
from taper.policy import DepthPolicy

TYPES = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")
LAYERS = 2
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="test_cuda runs them on the device")


def random_matrix(dtype: str, shape: tuple[int, int]) -> Tensor:
    """Any bytes are weights, once the numbers in f16 are finite: the first ones of a block, or in Q6_K the last one."""
    _, block, size = WEIGHT_TYPES[dtype]
    rng = np.random.default_rng(len(dtype))
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // block, size), np.uint8)
    place = {"Q4_K": slice(4), "Q6_K": slice(-2, None)}.get(dtype, slice(2))
    count = blocks[:, place].shape[1] // 2
    blocks[:, place] = rng.normal(0, 0.1, (len(blocks), count)).astype(np.float16).view(np.uint8)
    return Tensor(dtype, shape, blocks.reshape(-1))


def floats(tensor: Tensor) -> np.ndarray:
    """What the gguf package reads."""
    return dequantize(tensor.data.reshape(tensor.shape[0], -1), GGMLQuantizationType[tensor.dtype])


@pytest.mark.parametrize("dtype", TYPES)
def test_packed_weights_are_those_of_the_file(dtype):
    tensor = random_matrix(dtype, (5, 768))
    matrix = packed(tensor, torch.device("cpu"))
    np.testing.assert_array_equal(matrix.dequantised().numpy(), floats(tensor))
    assert matrix.shape == tensor.shape
    assert matrix.nbytes * 8 / (5 * 768) == {"Q8_0": 8.5, "Q4_0": 4.5, "Q4_K": 4.625, "Q6_K": 8.5625}[dtype]


def test_other_tensors_are_not_packed():
    assert not can_pack(Tensor("Q5_K", (2, 256), np.zeros(352, np.uint8)))
    assert not can_pack(Tensor("Q8_0", (2, 2, 32), np.zeros(136, np.uint8)))  # experts
    assert not can_pack(torch.zeros(2, 32))


@pytest.fixture
def fused(monkeypatch):
    """Few programs: the interpreter takes milliseconds for each."""
    module = pytest.importorskip("taper.backends.fused", reason="needs Triton, which make test-ci installs")
    for name in [name for name, tile in vars(module).items() if isinstance(tile, module.Tile)]:
        monkeypatch.setattr(module, name, module.Tile(512, 256, 4))
    monkeypatch.setattr(module, "PACKED_ROWS_TILE", module.RowsTile(256, 128, 4, 3))
    return module


def both(loaded, num_slots=1):
    options = {"num_slots": num_slots, "context_length": CONTEXT, "dtype": "f32", "device": "cpu"}
    slow = TorchBackend(loaded.config, loaded.tensors, **options)
    return slow, Interpreted(loaded.config, loaded.tensors, keep_bits=True, **options)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Loads the same tiny model with its matrices in a type each, by their names in the file."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    tinies = {tied: make_tiny(folder / str(tied), layers=LAYERS, tied=tied, **sizes) for tied in (True, False)}

    def write(type_of, tied=False):
        path = folder / "model.gguf"
        write_gguf(path, tinies[tied], quantise=lambda name, array: (type_of(name), rows(type_of(name), array)))
        loaded = load_model(path)
        return replace(loaded, tensors={name: replace(t, data=t.data.copy()) for name, t in loaded.tensors.items()})

    return write


@interpreted
@pytest.mark.ci
@pytest.mark.parametrize("dtype", TYPES)
def test_dequantising_kernels_equal_the_slow_twin(fused, load, dtype):
    slow, fast = both(load(lambda name: dtype))
    chosen = torch.tensor([7, 0, 299])
    for name in ("layers.1.gate_proj", "lm_head"):
        matrix = fast._packed[name]
        assert torch.equal(fast._fused.dequantised(matrix), matrix.dequantised())
        assert torch.equal(matrix.dequantised(), slow._weights[name])
    assert torch.equal(fast._fused.dequantised(matrix, chosen), matrix.dequantised()[chosen])


@interpreted
@pytest.mark.ci
@pytest.mark.parametrize(("dtype", "tied"), [("Q8_0", True), ("Q4_0", False), ("Q4_K", True), ("Q6_K", False)])
def test_steps_equal_those_of_dequantised_weights(fused, load, dtype, tied):
    loaded, prompt = load(lambda name: dtype, tied), random_prompt(3, 30)
    slow, fast = both(loaded)
    matrices = {name for name, tensor in loaded.tensors.items() if len(tensor.shape) == 2}
    assert set(fast._packed) == matrices
    assert {*fast.weight_bytes} == {*slow.weight_bytes}
    assert all(fast.weight_bytes[name] < slow.weight_bytes[name] / 3 for name in matrices)
    assert "keep their bits" in fast.layouts
    skips = DepthPolicy.static(LAYERS, 1, [1])
    turns = prompt
    for policy in (skips, DepthPolicy.full(LAYERS)):  # the second turn reads cells that the first one filled
        outputs = [complete(Engine(backend), [turns], [policy], tokens=2) for backend in (fast, slow)]
        assert outputs[0] == outputs[1]
        turns = [*turns, *outputs[0][0], *random_prompt(4, 5)]
    for count in (1, 3):  # a step, and tokens that exact mode verifies
        logits = []
        for backend in (fast, slow):
            backend.forward(one_slot(backend, prompt[:-count], ()))
            batch = one_slot(backend, prompt[-count:], tuple(range(count)), start=30 - count)
            logits.append(backend.forward(batch).logits)
        np.testing.assert_allclose(*logits, atol=1e-3)


@interpreted
@pytest.mark.ci
def test_files_mix_types(fused, load):
    """As those do that are called Q4_K_M; what is not packed is dense, also beside packed ones in one product."""
    types = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_q": "Q8_0", "ffn_up": "Q5_0", "output": "Q5_K"}
    loaded = load(lambda name: next((dtype for part, dtype in types.items() if part in name.split(".")), "Q4_K"))
    slow, fast = both(loaded, num_slots=2)
    assert set(fast._packed) == {"embed_tokens"} | {
        f"layers.{layer}.{part}_proj" for layer in range(LAYERS) for part in ("q", "k", "v", "o", "gate", "down")
    }
    chosen = [DepthPolicy.static(LAYERS, 1, [1]), DepthPolicy.full(LAYERS)]
    prompts = [random_prompt(5, 20), random_prompt(6, 12)]
    for batch in (slice(0, 1), slice(0, 2)):  # a step of one token, and of two
        found, expected = (complete(Engine(b), prompts[batch], chosen[batch], tokens=3) for b in (fast, slow))
        assert found == expected


@interpreted
@pytest.mark.ci
def test_models_that_kernels_do_not_fit_are_dequantised(fused, load, monkeypatch):
    monkeypatch.setattr(fused.FusedLayers, "fit", lambda config: False)
    slow, fast = both(load(lambda name: "Q4_0"))
    assert not fast._packed
    assert fast.weight_bytes == slow.weight_bytes
    assert fast.layouts == slow.layouts
