"""A model in two parts, here both on the CPU: the tokens are those of one backend, whatever happens between them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from tiny import FAMILIES, complete, make_backend, make_tiny, one_slot, policies, random_prompt, with_adapters

from taper import LLM, DepthPolicy
from taper.backends import open_backend
from taper.backends.ggml.library import Library
from taper.backends.split import SplitBackend, least_on_device
from taper.cli import cli
from taper.engine import Engine, Request
from taper.engine.drafting import Drafting
from taper.errors import RequestError
from taper.lab.calibration import clock, search
from taper.sampling import SamplingParams

pytestmark = pytest.mark.ci

# With grouped queries and without, with states that cannot be cut back, with layers that lend their cells.
CHOSEN = ("llama", "qwen35", "gemma4", pytest.param("gemma3n", marks=pytest.mark.ci))


@pytest.fixture(scope="module", params=CHOSEN)
def model(request, tmp_path_factory) -> SimpleNamespace:
    architecture, options = FAMILIES.get(request.param, (request.param, {"layers": 6}))
    loaded = make_tiny(tmp_path_factory.mktemp("split"), architecture, **options).load()
    return SimpleNamespace(loaded=loaded, layers=loaded.config.num_hidden_layers)


def engines(model, **options) -> list[Engine]:
    return [Engine(make_backend(kind, model.loaded, **options)) for kind in ("ggml", "split")]


def test_every_policy_gives_the_same_tokens_in_a_batch_and_in_later_turns(model):
    chosen = list(policies(model.layers).values())
    if model.loaded.config.mixer is None and model.loaded.config.num_streams == 1:
        chosen += [with_adapters(policy, model.loaded.config.hidden_size) for policy in chosen[:2]]
    prompts, turns = [random_prompt(i, 9 + 4 * i) for i in range(len(chosen))], []
    for engine in engines(model, num_slots=3):
        said = complete(engine, prompts, chosen, 24)
        later = [[*prompt[:12], *tokens, 7, 8] for prompt, tokens in zip(prompts, said, strict=True)]
        turns.append((said, complete(engine, later, chosen, 12), complete(engine, later, chosen, 12, reuse="exact")))
    assert turns[0] == turns[1]


def test_drafts_change_nothing(model):
    full, late = DepthPolicy.full(model.layers), policies(model.layers)["d3 late"]
    for drafter in ["policy"] + ["mtp"] * model.loaded.config.has_mtp:
        drafting = Drafting(drafter, policy=late, max_tokens=4, min_probability=0.0, always=True)
        prompts = [random_prompt(3, 20), random_prompt(4, 5)]
        expected = complete(engines(model)[0], prompts, [full] * 2, 30)
        assert complete(engines(model)[1], prompts, [full] * 2, 30, drafting=drafting) == expected


def test_a_prompt_that_others_begin_with_is_copied(model):
    prompt, full = random_prompt(5, 40), DepthPolicy.full(model.layers)
    others = [[*prompt, *random_prompt(6 + i, 5)] for i in range(2)]
    expected = [complete(engines(model)[0], [other], [full], 8)[0] for other in others]
    engine = engines(model, num_slots=3)[1]
    complete(engine, [prompt], [full], 3)
    sequences = [engine.add(Request(other, SamplingParams(max_tokens=8), full)) for other in others]
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step(sequences)
    assert [sequence.completion_ids for sequence in sequences] == expected
    assert min(sequence.num_cached_tokens for sequence in sequences) >= 40


@pytest.mark.parametrize("count", [1, 3, 6])
def test_an_interrupt_between_the_parts_changes_nothing(model, count, monkeypatch):
    prompt, policy = random_prompt(8, 30), policies(model.layers)["d3 late"]
    expected = complete(engines(model)[0], [prompt], [policy], 12)
    engine = Engine(make_backend("split", model.loaded), max_num_batched_tokens=16)
    sequence = engine.add(Request(prompt, SamplingParams(max_tokens=12), policy))
    device, calls = engine.backend._device, 0
    forward = device.forward

    def interrupted(batch):
        nonlocal calls
        calls += 1
        if calls == count:
            raise KeyboardInterrupt
        return forward(batch)

    def run() -> None:
        while sequence.finish_reason is None:
            engine.step()

    monkeypatch.setattr(device, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    run()
    assert [sequence.completion_ids] == expected


def test_each_part_holds_its_own_layers_only(model):
    whole, split = (engine.backend for engine in engines(model))
    assert isinstance(split, SplitBackend)
    first, names, parts = split.layers_on_cpu, set(whole.weight_bytes), (split._cpu, split._device)
    held = [{name for name in part.weight_bytes if name.startswith("layers.")} for part in parts]
    assert not held[0] & held[1]
    assert set(split.weight_bytes) == names
    assert {int(name.split(".")[1]) < first for name in held[0]} == {True}
    with_cells = [sum(spec.has_cells for spec in part.config.layers) for part in (*parts, whole)]
    assert with_cells[0] + with_cells[1] == with_cells[2]


def test_hidden_states_may_be_asked_for_and_given_anywhere(model):
    tokens, every, outputs = random_prompt(9, 7), tuple(range(model.layers + 1)), []
    for engine in engines(model):
        batch = replace(one_slot(engine.backend, tokens, (6,)), output_hidden_states=every)
        outputs.append(engine.backend.forward(batch).hidden_states)
    assert list(outputs[0]) == list(outputs[1]) == list(every)
    for layer in every:
        assert np.array_equal(outputs[0][layer], outputs[1][layer]), layer


# What people type


@pytest.fixture
def other_device(monkeypatch) -> None:
    """The CPU in the place of a graphics card."""
    monkeypatch.setattr(Library, "device", lambda self, name: None)
    monkeypatch.setattr("taper.backends.choose_device", lambda device: device if device == "cpu" else "Vulkan0")


@pytest.mark.usefixtures("other_device")
def test_the_option_gives_the_tokens_of_a_whole_model(tiny_gguf):
    texts = []
    for options in ({"device": "cpu"}, {"device": "vulkan", "gpu_layers": 2}, {"device": "vulkan", "gpu_layers": 99}):
        more = {} if options.get("gpu_layers") == 99 else {"threads": 1}
        with LLM(tiny_gguf, dtype="f32", **options, **more) as llm:
            assert llm.engine.backend.layers_on_cpu == (4 if options.get("gpu_layers") == 2 else 0)
            texts.append(llm.generate("hello there", max_tokens=20, temperature=0, ignore_eos=True).token_ids)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.usefixtures("other_device")
@pytest.mark.parametrize(("value", "said"), [("2", 0), ("all", 0), ("0", 2), ("some", 2)])
def test_the_command_takes_a_number_or_all(tiny_gguf, value, said):
    arguments = f"generate hello -m {tiny_gguf} --device vulkan --gpu-layers {value} --max-tokens 3".split()
    result = CliRunner().invoke(cli, arguments)
    assert (result.exit_code != 0) == bool(said), result.output


@pytest.mark.parametrize("value", [3, 99])
def test_without_a_device_of_ggml_it_is_refused(tiny_llama, value):
    with pytest.raises(RequestError, match="gpu_layers is for devices of ggml; it does nothing on cpu"):
        open_backend(tiny_llama.load(), device="cpu", context_length=64, gpu_layers=value)


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_what_is_no_number_of_layers_is_refused(tiny_llama, value):
    with pytest.raises(RequestError, match=r"gpu_layers is .* it must be a whole number"):
        open_backend(tiny_llama.load(), device="cpu", context_length=64, gpu_layers=value)


def test_layers_stay_with_those_whose_cells_they_attend_to(model):
    config = model.loaded.config
    for count in range(1, model.layers):
        least = least_on_device(config, model.layers - count)
        needs = [config.source(layer) for layer in range(model.layers - count, model.layers)]
        assert (least > count) == any(source < model.layers - count for source in needs)
        if least > count:
            with pytest.raises(RequestError, match=f"gpu_layers is {count}; .* must be {least} or more"):
                SplitBackend(config, {}, count, None, None)


# Calibration knows what each layer takes


def test_costs_are_fitted_to_both_kinds_of_layers(model, monkeypatch):
    engine = engines(model)[1]
    on_cpu = engine.backend.layers_on_cpu

    def made_up(engine, prompt_ids, chosen, max_tokens):
        retained = [policy.retained_layers(1) for policy in chosen]
        return [[2.0 + sum(5.0 if layer < on_cpu else 1.0 for layer in layers)] * 9 for layers in retained]

    monkeypatch.setattr(clock, "_alternate", made_up)
    cost = clock.measure_cost(engine, [1, 2], 9)
    assert [cost.fixed_ms, cost.layer_ms, cost.on_cpu_ms] == pytest.approx([2.0, 1.0, 4.0])
    assert cost.layers_on_cpu == on_cpu
    dear, cheap = DepthPolicy.static(6, 5, [0]), DepthPolicy.static(6, 5, [4])
    cost = clock.CostModel(2.0, 1.0, 4.0, 3)
    assert (cost.speedup(dear, 9), cost.speedup(cheap, 9)) == pytest.approx((20 / 15, 20 / 19))


def test_of_layers_that_lose_alike_the_dear_ones_are_skipped_first():
    costs, kl = clock.CostModel(2.0, 1.0, 4.0, 3), [0.2, 0.2, 0.2, 0.1, 0.1, 0.1]

    def measure(skipped, candidates, completions):
        return np.array([sum(kl[layer] for layer in skipped) + kl[layer] for layer in candidates]) * len(completions)

    for saved_ms, first in ((None, {3, 4, 5}), (costs.saved_ms, {0, 1, 2})):
        found = list(search.layers_to_skip(kl, [1] * 12, measure, lambda skipped: 0.0, saved_ms=saved_ms))
        assert {skipped.layer for skipped in found[:3]} == first
