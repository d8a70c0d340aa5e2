"""Planning a mixed batch, without an engine: every token runs the layers that its policy retains."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from taper import DepthPolicy
from taper.adapters import Adapters
from taper.errors import PolicyError, RequestError
from taper.policy import ModelIdentity, Schedule
from taper.vllm_plugin.metrics import counters, watch
from taper.vllm_plugin.options import PluginOptions, RequestOptions
from taper.vllm_plugin.plan import Planner, RequestTokens

LAYERS = 7
MODEL = SimpleNamespace(num_hidden_layers=LAYERS, hidden_size=64, vocab_size=300)


def data(policy: DepthPolicy) -> dict:
    return json.loads(policy.to_json())


@st.composite
def policies(draw) -> DepthPolicy:
    order = tuple(draw(st.permutations(range(LAYERS)))[: draw(st.integers(0, LAYERS - 1))])
    least = draw(st.integers(max(1, LAYERS - len(order)), LAYERS))
    start = draw(st.integers(0, 4))
    curve = draw(st.sampled_from(["power", "linear", "constant"]))
    more = {"power": {"alpha": draw(st.floats(0.5, 1))}, "linear": {"span": draw(st.integers(1, 9))}, "constant": {}}
    return DepthPolicy(Schedule(LAYERS, curve, least, start=start, **more[curve]), order)


requests = st.builds(RequestTokens, policies(), st.integers(0, 40), st.integers(1, 12), st.integers(1, 30))


def retained(request: RequestTokens, position: int) -> set[int]:
    """By the definition: prompt tokens run every layer, the token at position p predicts step p - prompt + 1."""
    step = position - request.prompt_length + 1
    return set(range(LAYERS)) if step <= 0 else set(request.policy.retained_layers(step))


@given(st.lists(requests, min_size=1, max_size=6), st.integers(0, LAYERS - 1), st.integers(1, LAYERS))
def test_each_token_runs_the_layers_that_its_policy_retains(batch, first, count):
    layers = range(first, min(LAYERS, first + count))
    plan = Planner(LAYERS, layers).plan(batch)
    tokens = [(index, request, offset) for index, request in enumerate(batch) for offset in range(request.num_tokens)]
    ran: list[set[int]] = [set() for _ in tokens]
    for layer_range, active, _ in plan.layer_ranges:
        assert active.whole_batch == (len(active.rows) == len(tokens))
        assert set(active.requests.tolist()) == {tokens[row][0] for row in active.rows}
        for row in active.rows:
            assert not ran[row] & set(layer_range), "a layer run twice"
            ran[row] |= set(layer_range)
    depths = []
    for layers_run, (_, request, offset) in zip(ran, tokens, strict=True):
        position = request.first_position + offset
        assert layers_run == retained(request, position) & set(layers)
        if position >= request.prompt_length:
            depths.append(len(retained(request, position)))
    assert (plan.completion_tokens, plan.layers_run) == (len(depths), sum(depths))
    assert plan.full == all(depth == LAYERS for depth in depths)
    for one, next_one in pairwise(plan.layer_ranges):  # rows are gathered only where the active tokens change
        assert one.layers.stop < next_one.layers.start or one.active is not next_one.active
    for a, b in product(plan.layer_ranges, repeat=2):
        assert (a.active is b.active) == np.array_equal(a.active.counts, b.active.counts)


@given(
    st.lists(requests, min_size=1, max_size=6),
    st.lists(st.tuples(st.sampled_from([None, 0, 1]), st.booleans()), min_size=6, max_size=6),
)
def test_each_token_that_skips_a_layer_passes_through_the_adapters_of_its_policy_and_is_filled_if_asked(batch, chosen):
    sets = [Adapters({}), Adapters({})]
    batch = [
        request._replace(policy=replace(request.policy, adapters=None if number is None else sets[number]), fills=fills)
        for request, (number, fills) in zip(batch, chosen, strict=False)
    ]
    passed, filled = {adapters: set() for adapters in sets}, set()
    for layers, _, passing in Planner(LAYERS, range(LAYERS)).plan(batch).layer_ranges:
        for rows, adapters, fills in passing:
            cells = {(row, layer) for row in rows.tolist() for layer in layers}
            if adapters is not None:
                passed[adapters] |= cells
            if fills:
                assert not filled & cells, "a cell written twice"
                filled |= cells
    expected, expected_fills, row = {adapters: set() for adapters in sets}, set(), 0
    for request in batch:
        for offset in range(request.num_tokens):
            skipped = set(range(LAYERS)) - retained(request, request.first_position + offset)
            cells = {(row, layer) for layer in skipped}
            if request.policy.adapters is not None:
                expected[request.policy.adapters] |= cells
            if request.fills:
                expected_fills |= cells
            row += 1
    assert passed == expected
    assert filled == expected_fills


@given(st.lists(st.lists(requests, min_size=1, max_size=3), min_size=2, max_size=5))
def test_a_planner_that_has_planned_before_plans_the_same(batches):
    used = Planner(LAYERS, range(LAYERS))
    for batch in batches:
        fresh = Planner(LAYERS, range(LAYERS)).plan(batch)
        again = used.plan(batch)
        assert [ours.layers for ours in again.layer_ranges] == [theirs.layers for theirs in fresh.layer_ranges]
        for ours, theirs in zip(again.layer_ranges, fresh.layer_ranges, strict=True):
            np.testing.assert_array_equal(ours.active.rows, theirs.active.rows)


def test_many_policies_leave_no_stale_plan():
    planner = Planner(LAYERS, range(LAYERS))
    for number in range(3000):
        depth = 1 + number % LAYERS
        policy = DepthPolicy.early_exit(LAYERS, depth)
        (only,) = planner.plan([RequestTokens(policy, 9, 1, 5)]).layer_ranges
        assert only.layers == range(depth)


def test_one_request_under_one_policy_never_gathers():
    policy = DepthPolicy.static(LAYERS, 3, [1, 2, 4, 5])
    plan = Planner(LAYERS, range(LAYERS)).plan([RequestTokens(policy, 20, 1, 5)])
    assert [(layers, active.whole_batch) for layers, active, _ in plan.layer_ranges] == [
        (range(1), True),
        (range(3, 4), True),
        (range(6, 7), True),
    ]


def test_options_know_default_names_and_alpha(tmp_path):
    file = tmp_path / "gentle.json"
    file.write_text(DepthPolicy.d3(LAYERS, 0.99, skip_order=[3, 4]).to_json())
    exit_early = data(DepthPolicy.early_exit(LAYERS, 4))
    options = PluginOptions.read({"policy": str(file), "policies": {"early": exit_early}}, MODEL)
    again = PluginOptions.read(options.to_config(), MODEL)
    for server in (options, again):
        assert server.policy(None) is server.default
        assert server.default.schedule.alpha == 0.99
        early = server.policy({"taper_policy": "early", "other": 1})
        assert early.min_depth == 4
        assert server.policy({"taper_policy": "full"}) == DepthPolicy.full(LAYERS)
        assert server.policy({"taper_alpha": 0.5}).schedule.alpha == 0.5
        assert server.policy({"taper_alpha": 0.5}) is server.policy({"taper_alpha": 0.5})
        assert server.policy({"taper_alpha": 0.5, "taper_policy": "early"}) == early.with_alpha(0.5)
    assert PluginOptions.read(None, MODEL).default == DepthPolicy.full(LAYERS)
    assert PluginOptions.read({"policy": "early", "policies": {"early": exit_early}}, MODEL).default.min_depth == 4


@pytest.mark.parametrize(
    "extra",
    [
        {"taper_policy": "unknown"},
        {"taper_policy": 3},
        {"taper_policy": ["full"]},
        {"taper_alpha": 1.5},
        {"taper_alpha": "0.9"},
        {"taper_alpha": True},
        {"taper_alpha": float("nan")},
        {"taper_alpha": 0.9, "taper_policy": "full"},
        {"taper_depth": 3},
        {"taper_reuse": "none"},
        {"taper_reuse": True},
        {"taper_reuse": ["exact"]},
    ],
)
def test_wrong_requests_are_rejected(extra):
    options = PluginOptions.read({"policies": {"early": data(DepthPolicy.early_exit(LAYERS, 4))}}, MODEL)
    with pytest.raises(RequestError):
        options.request(extra)
    assert options.admitted(extra) == RequestOptions(DepthPolicy.full(LAYERS), "exact")


def test_only_requests_that_taper_and_allow_it_fill():
    policies = {"early": DepthPolicy.early_exit(LAYERS, 4), "all": DepthPolicy.d3(LAYERS, 1, skip_order=[3, 4])}
    options = PluginOptions.read({"policies": {name: data(policy) for name, policy in policies.items()}}, MODEL)
    for extra, tapers, fills in [
        (None, False, False),
        ({"taper_policy": "early"}, True, True),
        ({"taper_policy": "early", "taper_reuse": "filled"}, True, True),
        ({"taper_policy": "early", "taper_reuse": "exact"}, True, False),
        ({"taper_policy": "early", "taper_alpha": 1}, False, False),
        ({"taper_policy": "all", "taper_reuse": "filled"}, False, False),
        ({"taper_policy": "all", "taper_alpha": 0.999}, True, True),
    ]:
        request = options.request(extra)
        assert (request.tapers, request.fills) == (tapers, fills)


@pytest.mark.parametrize(
    "config",
    [
        [],
        {"polcy": "x"},
        {"policy": "/no/such/file.json"},
        {"policy": 3},
        {"policies": ["a"]},
        {"policies": {"full": data(DepthPolicy.early_exit(LAYERS, 4))}},
        {"policy": data(DepthPolicy.full(LAYERS + 1))},
        {"policy": data(replace(DepthPolicy.full(LAYERS), model=ModelIdentity("llama", 65, 300, "F32")))},
        {"policies": {"other": data(replace(DepthPolicy.full(LAYERS), model=ModelIdentity("llama", 64, 301, "F32")))}},
    ],
)
def test_wrong_options_are_rejected(config):
    with pytest.raises(PolicyError):
        PluginOptions.read(config, MODEL)


def test_counters_of_other_processes_add_up():
    path = watch(LAYERS)
    code = f"from taper.vllm_plugin.metrics import counters; row = counters({path!r}, 1); row += (2, 9)"
    row = counters(path, 0)
    row += (3, 10)
    subprocess.run([sys.executable, "-c", code], check=True)
    lines = generate_latest().decode().splitlines()
    for name, value in [
        ("taper_completion_tokens_total", 5),
        ("taper_layers_run_total", 19),
        ("taper_layers_skipped_total", 5 * LAYERS - 19),
        ("taper_mean_depth", 19 / 5),
    ]:
        assert f'{name}{{engine="0"}} {float(value)}' in lines
