"""The V2 runner's adapter, on a CPU, where only the V1 runner runs: it builds the same forward from the same batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from engines import requests, tiny_policies


@pytest.fixture(scope="module")
def engine(engines, tiny_folder):
    return engines(tiny_folder, tiny_policies(), max_num_batched_tokens=40, enable_chunked_prefill=True)


@pytest.fixture
def batches(engine, monkeypatch):
    """Each batch as the V1 adapter saw it, and the plan it made."""
    from taper.vllm_plugin.runner import ForwardBuilder

    seen = []
    build = ForwardBuilder.build

    def recorded(self, batch):
        tapered = build(self, batch)
        arrays = {name: getattr(batch, name).copy() for name in ("first_positions", "num_tokens", "prompt_lengths")}
        seen.append((batch._replace(**arrays), tapered.plan))
        return tapered

    monkeypatch.setattr(ForwardBuilder, "build", recorded)
    engine.generate(requests(tiny_policies(), 6, seed=11, max_tokens=12))
    monkeypatch.undo()
    return seen


def test_the_v2_state_builds_the_v1_forwards(engine, batches, monkeypatch):
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    from taper.vllm_plugin.runner import TaperModelState

    runner = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    assert runner.get_model().get_model_state_cls() is TaperModelState
    state = TaperModelState(runner.vllm_config, runner.get_model(), None, runner.device)
    monkeypatch.setattr(DefaultModelState, "prepare_attn", lambda *_, **__: {"whole": True})
    # Files with adapters were read again, and adapters of another reading are other ones.
    name_of = {(p.schedule, p.skip_order): name for name, p in state._builder._options.named.items()}
    mixed = 0
    for seen, plan in batches:
        mixed += len(plan.layer_ranges) > 1
        names = [f"request {number}" for number in range(len(seen.requests))]
        for number, (name, (policy, reuse)) in enumerate(zip(names, seen.requests, strict=True)):
            extra_args = {"taper_policy": name_of[policy.schedule, policy.skip_order], "taper_reuse": reuse}
            params = SimpleNamespace(extra_args=extra_args)
            prompt = [0] * int(seen.prompt_lengths[number])
            state.add_request(number, SimpleNamespace(req_id=name, sampling_params=params, prompt_token_ids=prompt))
        batch = SimpleNamespace(
            req_ids=names,
            num_computed_tokens_np=np.append(seen.first_positions, 99),  # padded, as vLLM's are
            num_scheduled_tokens=np.append(seen.num_tokens, 99),
            positions=seen.positions,
        )
        arguments = (batch, None, (seen.block_table,), [seen.slot_mapping], runner.attn_groups)
        assert state.prepare_attn(*arguments, None) == {"whole": True}
        ours = state.prepare_inputs(batch, None)["tapered"].plan
        assert [own.layers for own in ours.layer_ranges] == [theirs.layers for theirs in plan.layer_ranges]
        for own, theirs in zip(ours.layer_ranges, plan.layer_ranges, strict=True):
            np.testing.assert_array_equal(own.active.rows, theirs.active.rows)
            for tokens, same_tokens in zip(own.passing, theirs.passing, strict=True):
                np.testing.assert_array_equal(tokens.rows, same_tokens.rows)
                assert tokens.fills
                assert same_tokens.fills
        assert (ours.completion_tokens, ours.layers_run) == (plan.completion_tokens, plan.layers_run)
        for name in names:
            state.remove_request(name)
        state.prepare_attn(*arguments, None)
        assert state.prepare_inputs(batch, None)["tapered"] is None, "a dummy batch runs every layer"
    assert mixed > 5
