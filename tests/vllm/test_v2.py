"""The V2 runner's adapter, on a CPU, where only the V1 runner runs: from the same batch it makes the same step."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from engines import Ask, prompts, tiny_policies


@pytest.fixture(scope="module")
def engine(engines, tiny_folder):
    return engines(tiny_folder, tiny_policies(), more={"max_num_batched_tokens": 40, "enable_chunked_prefill": True})


@pytest.fixture
def batches(engine, monkeypatch):
    """What the V1 adapter knew of each batch, and the runs it planned."""
    from taper.vllm_plugin.steps import Steps

    seen = []
    make = Steps.make

    def kept(self, policies, num_tokens, rows):
        step = make(self, policies, num_tokens, rows)
        copy = rows._replace(first_positions=rows.first_positions.copy(), prompt_lengths=rows.prompt_lengths.copy())
        seen.append((policies, num_tokens.copy(), copy, step.plan))
        return step

    monkeypatch.setattr(Steps, "make", kept)
    names = list(tiny_policies())
    some = prompts(6, seed=11, vocab_size=300)
    engine.generate([Ask(p, 12, {"taper_policy": name}) for p, name in zip(some, names, strict=True)])
    monkeypatch.undo()
    return seen


def test_the_v2_state_makes_the_v1_steps(engine, batches, monkeypatch):
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    from taper.vllm_plugin.runner_v2 import TaperModelState

    runner = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    assert runner.get_model().get_model_state_cls() is TaperModelState
    state = TaperModelState(runner.vllm_config, runner.get_model(), None, runner.device)
    monkeypatch.setattr(DefaultModelState, "prepare_attn", lambda *_, **__: {"whole": True})
    name_of = {policy: name for name, policy in state._steps._options.named.items()}
    mixed = 0
    for policies, num_tokens, rows, plan in batches:
        mixed += len(plan.runs) > 1
        requests = [f"request {number}" for number in range(len(policies))]
        for number, (request, policy) in enumerate(zip(requests, policies, strict=True)):
            params = SimpleNamespace(extra_args={"taper_policy": name_of[policy]})
            prompt = [0] * int(rows.prompt_lengths[number])
            state.add_request(number, SimpleNamespace(req_id=request, sampling_params=params, prompt_token_ids=prompt))
        batch = SimpleNamespace(
            req_ids=requests,
            num_computed_tokens_np=np.append(rows.first_positions, 99),  # padded, as vLLM's are
            num_scheduled_tokens=np.append(num_tokens, 99),
            positions=rows.positions,
        )
        arguments = (batch, None, (rows.block_table,), [rows.slot_mapping], runner.attn_groups)
        assert state.prepare_attn(*arguments, None) == {"whole": True}
        step = state.prepare_inputs(batch, None)["step"]
        assert [run.layers for run in step.plan.runs] == [run.layers for run in plan.runs]
        for ours, theirs in zip(step.plan.runs, plan.runs, strict=True):
            np.testing.assert_array_equal(ours.active.tokens, theirs.active.tokens)
        assert (step.plan.answer_tokens, step.plan.layers_run) == (plan.answer_tokens, plan.layers_run)
        for request in requests:
            state.remove_request(request)
        state.prepare_attn(*arguments, None)
        assert state.prepare_inputs(batch, None)["step"] is None, "a dummy batch runs every layer"
    assert mixed > 5
