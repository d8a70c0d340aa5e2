"""Depth policies: the formulas, the invariants every engine relies on, and the file format."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from taper.adapters import Adapters
from taper.errors import PolicyError
from taper.models.download import DEFAULT_MODEL
from taper.models.policies import LONG_OUTPUT, find_policy, load_policy, save_policy, shipped_policies
from taper.policy import DepthPolicy, ModelIdentity, Schedule, active_prefixes, least_depths, middle_first_order

MODEL = ModelIdentity("llama", 64, 300, "Q4_1")


@st.composite
def policies(draw) -> DepthPolicy:
    layers = draw(st.integers(1, 80))
    order = draw(st.permutations(range(layers)))[: draw(st.integers(0, layers))]
    least = draw(st.integers(max(1, layers - len(order)), layers))
    start = draw(st.integers(0, 50))
    curve = draw(st.sampled_from(["power", "linear", "constant"]))
    schedule = Schedule(
        layers,
        curve,
        least,
        alpha=draw(st.floats(0, 1, exclude_min=True)) if curve == "power" else None,
        start=start,
        span=draw(st.integers(1, 300)) if curve == "linear" else None,
    )
    return DepthPolicy(
        schedule,
        tuple(order),
        name=draw(st.text(max_size=5).filter(str.isprintable)),
        model=draw(st.sampled_from([None, MODEL])),
        provenance=draw(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2)),
    )


@given(policies())
def test_retained_layers_are_nested_and_core_layers_always_run(policy):
    before = policy.retained_layers(0)
    assert before == tuple(range(policy.num_hidden_layers))
    for step in range(1, 120):
        now = policy.retained_layers(step)
        assert len(now) == policy.depth(step) >= policy.min_depth
        assert set(now) <= set(before)
        assert policy.core_layers <= set(now)
        before = now
    assert policy.core_layers == set(range(policy.num_hidden_layers)) - set(policy.skip_order)


@given(policies())
def test_json_round_trip_gives_an_equal_policy(policy):
    assert DepthPolicy.from_json(policy.to_json()) == policy


def test_what_could_not_be_read_again_is_not_written():
    policy = replace(DepthPolicy.d3(6, 0.9, skip_order=[3]), provenance={"kl": math.nan})
    with pytest.raises(PolicyError, match="cannot be written"):
        policy.to_json()


@given(policies(), st.data())
def test_files_give_an_equal_policy_with_all_that_it_can_have(policy, data):
    adapted = data.draw(st.sets(st.sampled_from(policy.skip_order), max_size=3)) if policy.skip_order else set()
    if adapted:
        down = data.draw(arrays(np.float16, (2, MODEL.hidden_size), elements=st.floats(-9, 9, width=16)))
        policy = replace(policy, adapters=Adapters({layer: (down, down.T.copy()) for layer in adapted}))
    with TemporaryDirectory() as folder:
        path = Path(folder) / ("policy.safetensors" if adapted else "policy.json")
        save_policy(path, policy)
        assert load_policy(path) == policy


@given(policies(), st.integers(1, 200))
def test_mean_depth_is_over_the_steps_after_the_first(policy, tokens):
    depths = [policy.depth(step) for step in range(1, tokens)] or [policy.num_hidden_layers]
    assert policy.mean_depth(tokens) == pytest.approx(sum(depths) / len(depths))


@given(policies())
def test_the_first_step_that_skips_is_the_first_below_full_depth(policy):
    if policy.first_skip is None:
        assert policy.depth(10_000) == policy.num_hidden_layers
    else:
        depths = [policy.depth(policy.first_skip - 1), policy.depth(policy.first_skip)]
        assert depths[0] == policy.num_hidden_layers > depths[1]


@given(policies(), st.integers(0, 80))
def test_the_layers_of_a_depth_are_all_but_the_first_of_the_skip_order(policy, fewer):
    depth = max(1, policy.num_hidden_layers - min(fewer, len(policy.skip_order)))
    skipped = policy.skip_order[: policy.num_hidden_layers - depth]
    assert set(policy.retained_at(depth)) == set(range(policy.num_hidden_layers)) - set(skipped)
    least = least_depths(policy.skip_order, policy.num_hidden_layers)
    assert policy.retained_at(depth) == tuple(layer for layer, needed in enumerate(least) if needed <= depth)


@given(policies(), st.lists(st.integers(0, 200), min_size=1, max_size=6))
def test_active_tokens_of_each_layer_are_a_prefix(policy, steps):
    steps = sorted(steps)
    active = active_prefixes(policy.skip_order, policy.num_hidden_layers, [policy.depth(step) for step in steps])
    for layer in range(policy.num_hidden_layers):
        runs = [layer in policy.retained_layers(step) for step in steps]
        assert runs == [i < active[layer] for i in range(len(steps))]


@given(st.integers(1, 100), st.integers(0, 10**9))
def test_alpha_one_is_identity(layers, step):
    order = range(layers - 1)
    assert DepthPolicy.d3(layers, 1.0, skip_order=order).depth(step) == layers
    assert DepthPolicy.full(layers).retained_layers(step) == tuple(range(layers))


def test_d3_is_the_papers_formula():
    policy = DepthPolicy.d3(32, 0.99, start=4, min_depth=20, skip_order=range(10, 30))
    assert policy.depth(0) == policy.depth(4) == 32
    for step in range(5, 100):
        assert policy.depth(step) == max(20, math.floor(32 * 0.99 ** (step - 4)))


def test_linear_is_skipdecodes_formula():
    policy = DepthPolicy.skipdecode(32, min_depth=12, span=40, start=2, warmup_layers=3)
    assert [policy.depth(step) for step in (0, 2, 3, 22, 42, 500)] == [32, 32, 31, 22, 12, 12]
    assert policy.skip_order[:3] == (3, 4, 5)
    assert {0, 1, 2, 31} <= policy.core_layers


def test_constant_starts_at_step_one_or_at_start():
    early = DepthPolicy.early_exit(8, 5)
    assert [early.depth(step) for step in (0, 1, 2)] == [8, 5, 5]
    assert early.retained_layers(1) == (0, 1, 2, 3, 4)
    late = DepthPolicy(Schedule(8, "constant", 6, start=3), (3, 4))
    assert [late.depth(step) for step in (0, 1, 2, 3)] == [8, 8, 8, 6]
    assert DepthPolicy.static(8, 6, [3, 4]).retained_layers(1) == (0, 1, 2, 5, 6, 7)


def test_middle_first_keeps_head_and_tail():
    order = middle_first_order(32)
    assert set(order) == set(range(4, 28))
    assert order[:3] == (15, 16, 14)
    assert DepthPolicy.middle_first(32, 0.99).skip_order == order


GOOD = json.loads(DepthPolicy.d3(8, 0.9, skip_order=[3, 4, 5]).to_json())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"alpha": 0}, "(0, 1]"),
        ({"alpha": 1.5}, "(0, 1]"),
        ({"alpha": True}, "(0, 1]"),
        ({"alpha": "0.9"}, "(0, 1]"),
        ({"alpha": None}, "needs alpha"),
        ({"span": 3}, "has no key 'span'"),
        ({"skip_order": [3, 3]}, "twice"),
        ({"skip_order": [3, 8]}, "from 0 to 7"),
        ({"skip_order": [-1]}, "from 0 to 7"),
        ({"skip_order": "345"}, "list"),
        ({"skip_order": [3.0, 4, 5]}, "whole number"),
        ({"min_depth": 4}, "from 5 to 8"),
        ({"min_depth": 9}, "from 1 to 8"),
        ({"start": -1}, "at least 0"),
        ({"start": 1.5}, "whole number"),
        ({"curve": "cosine"}, "power, linear, constant"),
        ({"curve": ["power"]}, "power, linear, constant"),
        ({"num_hidden_layers": 0}, "from 1 to"),
        ({"num_hidden_layers": 10**12}, "from 1 to"),
        ({"num_hidden_layers": True}, "whole number"),
        ({"format_version": 3}, "format_version"),
        ({"format_version": True}, "format_version"),
        ({"extra": 1}, "no key 'extra'"),
        ({"name": 5}, "name"),
        ({"model": {"architecture": "llama"}}, "lacks"),
        ({"model": {**vars(MODEL), "vocab_size": "300"}}, "vocab_size"),
        ({"provenance": []}, "provenance"),
    ],
)
def test_hostile_json_is_refused_with_value_and_rule(change, says):
    with pytest.raises(PolicyError) as error:
        DepthPolicy.from_json(json.dumps({**GOOD, **change}))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "7", "{", "nul", '{"alpha": NaN}', "[" * 100_000, json.dumps(GOOD)[:-1] + ', "alpha": 0.5}']
)
def test_text_that_is_no_policy_is_refused(text):
    with pytest.raises(PolicyError):
        DepthPolicy.from_json(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.sampled_from(sorted(GOOD)), x),
    )
)
def test_any_json_is_read_or_refused(value):
    data = {**GOOD, **value} if isinstance(value, dict) else value
    try:
        policy = DepthPolicy.from_json(json.dumps(data))
    except PolicyError:
        return
    assert policy.retained_layers(1)


def test_a_missing_key_is_refused():
    for key in GOOD:
        with pytest.raises(PolicyError):
            DepthPolicy.from_json(json.dumps({k: v for k, v in GOOD.items() if k != key}))


def test_files_that_are_missing_huge_or_not_text_are_refused(tmp_path):
    for name, content in [("huge", b" " * (1 << 20) + b"{}"), ("latin", b'{"name": "\xe9"}')]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(PolicyError):
            load_policy(tmp_path / name)
    with pytest.raises(PolicyError, match="nor a file"):
        load_policy(tmp_path / "missing.json")


@pytest.mark.parametrize("what", ["architecture", "hidden_size", "vocab_size"])
def test_a_policy_of_another_model_is_refused(what):
    policy = DepthPolicy(Schedule(8, "constant", 5), (3, 4, 5), model=MODEL)
    other = ModelIdentity(**{**vars(MODEL), what: "qwen2" if what == "architecture" else 1})
    with pytest.raises(PolicyError, match=what):
        policy.check_model(8, other)
    with pytest.raises(PolicyError, match="layers"):
        policy.check_model(9, MODEL)
    assert policy.check_model(8, MODEL) == ""


def test_another_quantisation_of_the_same_model_warns_in_one_line():
    policy = DepthPolicy(Schedule(8, "constant", 5), (3, 4, 5), model=MODEL)
    warning = policy.check_model(8, ModelIdentity("llama", 64, 300, "F16"))
    assert "Q4_1" in warning
    assert "F16" in warning
    assert "\n" not in warning


def test_alpha_means_d3s_curve_over_any_policys_skip_order():
    for policy in (DepthPolicy.d3(8, 0.9, min_depth=7, skip_order=[3, 0]), DepthPolicy.static(8, 7, [3, 0])):
        assert policy.with_alpha(0.5) == DepthPolicy.d3(8, 0.5, skip_order=[3, 0])
    with pytest.raises(PolicyError, match="does nothing"):
        DepthPolicy.full(8).with_alpha(0.5)


def test_policies_are_hashable_whatever_their_order_was_given_as():
    assert len({DepthPolicy.static(8, 6, order) for order in ([3, 4], (3, 4), np.array([3, 4]))}) == 1
    assert DepthPolicy(Schedule(np.int64(8), "constant", 6), [3, 4]) == DepthPolicy.static(8, 6, (3, 4))


def test_names_are_found_with_their_model_and_without_it_for_the_default_one(monkeypatch, tmp_path):
    fast = find_policy("fast-plain")
    assert fast == find_policy(f"{DEFAULT_MODEL}/fast-plain")
    assert fast in shipped_policies()[DEFAULT_MODEL]
    (tmp_path / "own.json").write_text(fast.to_json())
    assert find_policy(tmp_path / "own.json") == fast
    other = replace(DepthPolicy.static(8, 6, [3, 4]), name="fast-plain")
    monkeypatch.setattr("taper.models.policies.shipped_policies", lambda: {"other": [other], DEFAULT_MODEL: [fast]})
    assert (find_policy("other/fast-plain"), find_policy("fast-plain")) == (other, fast)
    monkeypatch.setattr("taper.models.policies.shipped_policies", lambda: {"other": [other]})
    with pytest.raises(PolicyError, match="did you mean other/fast-plain"):
        find_policy("fast-plain")


@pytest.mark.parametrize("name", ["nonsense", "x" * 5000, "nul\0", ".", "/dev/null", ""])
def test_names_without_a_policy_are_rejected(name):
    with pytest.raises(PolicyError, match="policy list"):
        find_policy(name)


@pytest.mark.parametrize("model", shipped_policies())
def test_shipped_policies_keep_what_their_names_promise_in_long_outputs(model):
    by_name = {policy.name: policy for policy in shipped_policies()[model]}
    assert "fast" in by_name
    for name, policy in by_name.items():
        plain = name.removesuffix("-plain")
        assert plain == name or (policy.adapters is None and by_name[plain].adapters is not None)
        long = policy.provenance["long_outputs"]
        assert plain in long["names"]
        assert long["max_tokens"] == LONG_OUTPUT
        assert policy.model is not None
        assert policy.provenance["speedup"]["measured"][0] > 1
        value, low, high = policy.provenance["held_out"]["all steps"]["agreement"]
        assert 0 < low <= value <= high < 1
