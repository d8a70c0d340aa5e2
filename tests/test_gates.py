"""Gates: depth falls only after tokens that the model was sure of, and rises again, with every cell filled."""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import (
    BACKENDS,
    complete,
    gated,
    make_backend,
    make_tiny,
    policies,
    random_prompt,
    reference_ids,
    with_adapters,
)

import taper.hf
from taper.engine import Engine, Request, Sequence
from taper.errors import PolicyError, RequestError
from taper.lab.calibration.progress import SILENT
from taper.lab.calibration.replay import Reference, Replay
from taper.lab.calibration.store import Measurements, Store
from taper.policy import DepthPolicy, Gate, Schedule
from taper.sampling import SamplingParams

FULL = DepthPolicy.full(6)
GATE = gated(6)["gate"]


def with_gates(policy: DepthPolicy, *gates: Gate) -> DepthPolicy:
    return replace(policy, schedule=replace(policy.schedule, gates=gates))


@pytest.fixture(scope="module", params=["grouped queries", "a key for each query"])
def tiny(request, tiny_llama, tmp_path_factory):
    """A model that fills cells at once, and one that keeps passing states in the place of keys."""
    if request.param == "grouped queries":
        return tiny_llama
    return make_tiny(tmp_path_factory.mktemp("many_keys"), layers=6, tied=False, num_key_value_heads=4)


def run(engine: Engine, prompt: list[int], policy: DepthPolicy, **params) -> Sequence:
    """A finished sequence; greedy, of 24 tokens, unless other parameters are given."""
    options = {"max_tokens": 24, "ignore_eos": True} | params
    sequence = engine.add(Request(prompt, SamplingParams(**options), policy))
    while sequence.finish_reason is None:
        engine.step()
    return sequence


@given(
    st.integers(4, 40),
    st.lists(st.floats(0, 2), min_size=1, max_size=4, unique=True),
    st.floats(0, 1),
    st.data(),
)
def test_the_first_open_gate_says_how_many_layers_run_at_least(layers, thresholds, probability, data):
    depths = sorted(data.draw(st.sets(st.integers(1, layers), min_size=len(thresholds), max_size=layers)))
    gates = tuple(map(Gate, sorted(thresholds, reverse=True), depths))
    schedule = Schedule(layers, "power", 1, alpha=0.9, gates=gates)
    ungated = replace(schedule, gates=())
    for step in (0, 1, 5, 60):
        opened = [gate.depth for gate in gates if probability >= gate.threshold]
        wanted = max(ungated.depth(step), opened[0] if opened else layers) if step else layers
        assert schedule.depth(step, probability) == wanted
        assert schedule.depth(step) <= wanted  # without a probability, the smallest that may be
        assert schedule.depth(step, probability) >= schedule.depth(step, 1.0) or step == 0


@pytest.mark.parametrize(
    ("gates", "wrong"),
    [
        ([Gate(-0.1, 4)], "threshold"),
        ([Gate(float("nan"), 4)], "threshold"),
        ([Gate(0.9, 3)], "depth"),  # below the smallest depth
        ([Gate(0.9, 7)], "depth"),
        ([Gate(0.9, 4), Gate(0.95, 5)], "order"),
        ([Gate(0.9, 5), Gate(0.8, 5)], "order"),
        ([(0.9, 4)], "Gate"),
        (0.9, "gates"),
    ],
)
def test_gates_that_make_no_sense_are_refused(gates, wrong):
    with pytest.raises(PolicyError, match=wrong):
        Schedule(6, "constant", 4, gates=gates)


def test_gates_are_in_the_second_version_of_the_format():
    for policy in gated(6).values():
        text = policy.to_json()
        assert json.loads(text)["format_version"] == 2
        assert DepthPolicy.from_json(text) == policy
        first = json.dumps(json.loads(text) | {"format_version": 1})
        with pytest.raises(PolicyError, match="no key 'gates'"):
            DepthPolicy.from_json(first)
    text = policies(6)["d3"].to_json()
    assert json.loads(text)["format_version"] == 1  # programs of before read it
    second = json.dumps(json.loads(text) | {"format_version": 2})
    assert DepthPolicy.from_json(second) == policies(6)["d3"]
    for gate in (
        {"threshold": 0.9},
        {"threshold": 0.9, "depth": 4, "layers": 4},
        0.9,
        {"threshold": "0.9", "depth": 4},
    ):
        with pytest.raises(PolicyError):
            DepthPolicy.from_json(json.dumps(json.loads(GATE.to_json()) | {"gates": [gate]}))


@BACKENDS
@pytest.mark.parametrize("adapters", [False, True])
def test_gated_decoding_equals_the_reference_implementation(tiny, kind, adapters):
    for name, policy in gated(6).items():
        policy = with_adapters(policy, 64) if adapters else policy
        prompt = random_prompt(210)
        sequence = run(Engine(make_backend(kind, tiny.load())), prompt, policy)
        assert sequence.completion_ids == reference_ids(tiny, prompt, policy, 24), name
        depths = [output.depth for output in sequence.outputs]
        assert any(a < b for a, b in itertools.pairwise(depths)), "depth never rises, so this proves nothing"
        wanted = [policy.depth(step + 1, output.probability) for step, output in enumerate(sequence.outputs)]
        assert depths[1:] == wanted[:-1]


@BACKENDS
def test_a_gate_that_is_always_or_never_open_changes_nothing(tiny, kind):
    prompt = random_prompt(211)
    for name, policy in policies(6).items():
        outputs = [
            complete(Engine(make_backend(kind, tiny.load())), [prompt], [each])[0]
            for each in (policy, with_gates(policy, Gate(0, policy.min_depth)), with_gates(policy, Gate(2, 6)), FULL)
        ]
        assert outputs[0] == outputs[1], name
        assert outputs[2] == outputs[3], name


@BACKENDS
def test_gated_outputs_in_a_batch_equal_each_alone(tiny, kind):
    chosen = [*gated(6).values(), FULL, policies(6)["d3"], with_adapters(GATE, 64), GATE]
    prompts = [random_prompt(220 + i, 9 + 5 * i) for i in range(len(chosen))]
    together = complete(Engine(make_backend(kind, tiny.load(), num_slots=len(chosen))), prompts, chosen)
    for prompt, policy, completion in zip(prompts, chosen, together, strict=True):
        assert completion == complete(Engine(make_backend(kind, tiny.load())), [prompt], [policy])[0]


@BACKENDS
def test_a_gated_turn_after_exact_reuse_equals_a_cold_start(tiny, kind):
    engine = Engine(make_backend(kind, tiny.load()))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first = engine.complete([Request(random_prompt(230), params, GATE, reuse="exact")])[0]
    prompt = [*random_prompt(230), *first, *random_prompt(231, 8)]
    cold = Engine(make_backend(kind, tiny.load()))
    warm, fresh = (one.complete([Request(prompt, params, GATE, reuse="exact")]) for one in (engine, cold))
    assert warm == fresh


@BACKENDS
@pytest.mark.parametrize("adapters", [False, True])
def test_replay_finds_the_depths_that_decoding_ran(tiny, kind, adapters):
    for name, policy in gated(6).items():
        policy = with_adapters(policy, 64, scale=0.5) if adapters else policy
        prompt = random_prompt(240)
        sequence = run(Engine(make_backend(kind, tiny.load())), prompt, policy)
        known = [Reference(tuple(prompt), tuple(sequence.completion_ids)), Reference((5, 6, 7), (8, 9, 10, 11))]
        replay = Replay(Engine(make_backend(kind, tiny.load(), num_slots=2)), known)
        scores, *others = replay.at(0, [policy, policies(6)["d3"], FULL])
        assert scores.depth.tolist() == [output.depth for output in sequence.outputs], name
        probabilities = [output.probability for output in sequence.outputs]
        np.testing.assert_allclose(np.exp(-scores.nll), probabilities, atol=1e-4)
        alone = Replay(Engine(make_backend(kind, tiny.load(), num_slots=2)), known)
        for one, ungated in zip(others, (policies(6)["d3"], FULL), strict=True):
            np.testing.assert_allclose(one.kl, alone.at(0, [ungated])[0].kl, atol=1e-4)


def test_outputs_that_are_scored_side_by_side_have_the_scores_that_each_has_alone(tiny_llama, tmp_path):
    known = [Reference(tuple(random_prompt(280 + i)), tuple(random_prompt(290 + i, 6 + 5 * i))) for i in range(5)]
    store = Store(tmp_path / "measured.sqlite", {})
    with closing(Measurements(Engine(make_backend("ggml", tiny_llama.load(), num_slots=2)), known, store)) as together:
        scores = together.scores(GATE, SILENT)
        again = together.scores(GATE, SILENT, range(3, 5))
    for index, one in enumerate(known):
        (alone,) = Replay(Engine(make_backend("ggml", tiny_llama.load())), [one]).at(0, [GATE])
        for found in (scores, again) if index >= 3 else (scores,):
            own = found.where(found.reference == index)
            assert own.depth.tolist() == alone.depth.tolist()
            np.testing.assert_allclose(own.kl, alone.kl, atol=1e-4)


def test_gates_see_the_models_own_probabilities(tiny_llama):
    """Before temperature, bias and penalties."""
    params = {"temperature": 1.7, "top_p": 0.9, "repetition_penalty": 1.5, "logit_bias": {7: 4.0}, "seed": 3}
    sequence = run(Engine(make_backend("ggml", tiny_llama.load())), random_prompt(250), GATE, **params)
    known = Reference(tuple(random_prompt(250)), tuple(sequence.completion_ids))
    scores = Replay(Engine(make_backend("ggml", tiny_llama.load())), [known]).score(GATE)
    np.testing.assert_allclose([output.probability for output in sequence.outputs], np.exp(-scores.nll), atol=1e-4)


def test_a_gated_output_drafts_nothing(tiny_llama):
    from taper.engine.drafting import Drafting

    engine = Engine(make_backend("ggml", tiny_llama.load()))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompt = random_prompt(260) * 2
    drafting = Drafting(always=True)
    drafted = engine.complete([Request(prompt, params, GATE, drafting=drafting)])
    assert drafted == engine.complete([Request(prompt, params, GATE)])


def test_the_reference_implementation_takes_one_gated_row(tiny_llama):
    ids = torch.tensor([random_prompt(270), random_prompt(271)])
    with pytest.raises(RequestError, match="one row"):
        tiny_llama.hf.generate(ids, max_new_tokens=4, custom_generate=taper.hf.custom_generate(GATE))
    assert not tiny_llama.hf._forward_hooks
    assert not tiny_llama.hf._forward_pre_hooks
