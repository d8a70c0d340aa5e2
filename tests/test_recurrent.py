"""Recurrent layers: what is kept of their states, and that every way through the engine equals a cold start."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import (
    BACKENDS,
    EVERY_BACKEND,
    FAMILIES,
    complete,
    make_backend,
    make_tiny,
    one_slot,
    policies,
    random_prompt,
    reference_ids,
)

import taper
import taper.hf
from taper.backends import TokenBatch
from taper.backends.ggml import library
from taper.backends.states import MAX_SNAPSHOTS, StateRecords
from taper.engine import Engine, Request
from taper.engine.drafting import Draft, Drafting
from taper.engine.sequence import Sequence
from taper.errors import ModelError, RequestError
from taper.lab.calibration.replay import Reference, Replay
from taper.policy import DepthPolicy
from taper.sampling import SamplingParams

pytestmark = pytest.mark.ci

LAYERS = 7
FULL, LATE = DepthPolicy.full(LAYERS), policies(LAYERS)["d3 late"]
CHOSEN = {"full": FULL, "late": LATE, "static": policies(LAYERS)["static"]}


@pytest.fixture(scope="module", params=["qwen35", pytest.param("granite 4 h", marks=pytest.mark.ci)])
def recurrent(request, tmp_path_factory) -> SimpleNamespace:
    architecture, options = FAMILIES[request.param]
    tiny = make_tiny(tmp_path_factory.mktemp("recurrent"), architecture, **options | {"mtp_num_hidden_layers": 0})
    return SimpleNamespace(tiny=tiny, loaded=tiny.load())


def cold(recurrent, kind, prompt, policy, tokens=20, **options) -> list[int]:
    return complete(Engine(make_backend(kind, recurrent.loaded)), [prompt], [policy], tokens, **options)[0]


@BACKENDS
def test_prompts_in_chunks_equal_transformers(recurrent, kind):
    prompt = random_prompt(1, 150)
    for policy in CHOSEN.values():
        expected = reference_ids(recurrent.tiny, prompt, None if policy is FULL else policy, 20)
        for budget in (512, 37, 1):
            engine = Engine(make_backend(kind, recurrent.loaded), max_num_batched_tokens=budget)
            assert complete(engine, [prompt], [policy], 20) == [expected]


@BACKENDS
def test_rows_that_join_at_different_steps_equal_each_alone(recurrent, kind):
    chosen = [*CHOSEN.values(), *policies(LAYERS).values()]
    prompts = [random_prompt(seed, 5 + 7 * seed) for seed in range(len(chosen))]
    together = complete(Engine(make_backend(kind, recurrent.loaded, num_slots=3)), prompts, chosen, 20)
    assert together == [cold(recurrent, kind, *pair) for pair in zip(prompts, chosen, strict=True)]


@BACKENDS
@pytest.mark.parametrize("name", CHOSEN)
def test_edited_and_repeated_turns_equal_a_cold_start(recurrent, kind, name):
    """A state cannot be cut back: each of these goes on from a snapshot, and computes the rest."""
    policy, prompt = CHOSEN[name], random_prompt(2, 40)
    engine = Engine(make_backend(kind, recurrent.loaded))
    said = complete(engine, [prompt], [policy], 20, reuse="exact")[0]
    for changed in (
        [*prompt, *said, *random_prompt(3, 9)],  # the next turn
        [*prompt, *said[:7], *random_prompt(4, 9)],  # another end of the same output
        prompt,  # the same again
        [*prompt[:25], *random_prompt(5, 20)],  # an earlier turn, edited
        [*prompt[:25], *random_prompt(6, 20)],
        prompt[:1],
    ):
        assert complete(engine, [changed], [policy], 20, reuse="exact")[0] == cold(recurrent, kind, changed, policy)


@EVERY_BACKEND
def test_the_next_turn_computes_only_what_is_new(recurrent, kind):
    engine = Engine(make_backend(kind, recurrent.loaded))
    prompt = random_prompt(7, 40)
    said = complete(engine, [prompt], [FULL], 20)[0]
    sequence = engine.add(Request([*prompt, *said, 5], SamplingParams(max_tokens=1), FULL))
    engine.step([sequence])
    assert sequence.num_cached_tokens == 40 + 19
    sequence = engine.add(Request([*prompt, 9, 9], SamplingParams(max_tokens=1), FULL))  # another first token
    engine.step([sequence])
    assert sequence.num_cached_tokens == 40


@EVERY_BACKEND
def test_a_shared_prompt_is_copied_with_its_state(recurrent, kind):
    prompt = random_prompt(8, 60)
    others = [[*prompt, *random_prompt(9 + i, 5)] for i in range(3)]
    expected = [cold(recurrent, kind, other, FULL) for other in others]
    engine = Engine(make_backend(kind, recurrent.loaded, num_slots=4))
    complete(engine, [prompt], [FULL], 3)
    params = SamplingParams(max_tokens=20)
    sequences = [engine.add(Request(other, params, FULL)) for other in others]
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step(sequences)
    assert [sequence.completion_ids for sequence in sequences] == expected
    assert sum(sequence.num_cached_tokens == 60 for sequence in sequences) == 3


@BACKENDS
@pytest.mark.parametrize("name", CHOSEN)
def test_rejected_drafts_change_nothing(recurrent, kind, name, monkeypatch):
    """Of four proposed tokens, none to four come true."""
    prompt, policy = random_prompt(12, 27), CHOSEN[name]
    expected = cold(recurrent, kind, prompt, policy, 40)

    def propose(sequence, most):
        token_ids = expected[sequence.step : sequence.step + 4]
        token_ids[sequence.step % 5 :] = [3] * len(token_ids[sequence.step % 5 :])
        return Draft(token_ids[:most], 1)

    monkeypatch.setattr(Sequence, "propose", propose)
    drafting = Drafting("ngram", always=True)
    engine = Engine(make_backend(kind, recurrent.loaded))
    assert complete(engine, [prompt], [policy], 40, drafting=drafting, reuse="exact") == [expected]
    assert 10 < engine.planner.num_accepted.total() < engine.planner.num_verified.total()
    # What the slot then holds can be gone on from.
    second = [*prompt, *expected, *random_prompt(14, 5)]
    warm = complete(engine, [second], [policy], 20, reuse="exact")
    assert warm == [cold(recurrent, kind, second, policy)]


@BACKENDS
@pytest.mark.parametrize("kind_of_draft", ["policy", "auto"])
def test_policies_that_draft_change_nothing(recurrent, kind, kind_of_draft):
    prompts = [random_prompt(20 + seed, 30) for seed in range(3)]
    drafting = Drafting(kind_of_draft, policy=LATE, always=True, min_probability=0.0, max_tokens=4)
    expected = [cold(recurrent, kind, prompt, FULL, 30) for prompt in prompts]
    engine = Engine(make_backend(kind, recurrent.loaded, num_slots=2))
    assert complete(engine, prompts, [FULL] * 3, 30, drafting=drafting) == expected
    assert 0 < engine.planner.num_accepted.total() < engine.planner.num_verified.total()


@EVERY_BACKEND
def test_an_interrupt_anywhere_leaves_states_and_cells_as_they_were(recurrent, kind, monkeypatch):
    prompt, backend = random_prompt(30, 40), make_backend(kind, recurrent.loaded)
    expected = cold(recurrent, kind, prompt, LATE)
    engine = Engine(backend, max_num_batched_tokens=16)
    sequence = engine.add(Request(prompt, SamplingParams(max_tokens=20), LATE))
    commit, calls = backend._records.commit, iter(range(1000))

    def interrupted(*given):
        call = next(calls)
        if call % 3 == 1:
            raise KeyboardInterrupt
        commit(*given)
        if call % 3 == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(backend._records, "commit", interrupted)
    while sequence.finish_reason is None:
        try:
            engine.step([sequence])
        except KeyboardInterrupt:
            continue
    assert sequence.completion_ids == expected


@EVERY_BACKEND
def test_abort_in_a_prompt_and_numbers_that_are_none_leave_the_slot_usable(recurrent, kind):
    prompt = random_prompt(31, 60)
    engine = Engine(make_backend(kind, recurrent.loaded), max_num_batched_tokens=16)
    sequence = engine.add(Request(prompt, SamplingParams(max_tokens=5), FULL))
    engine.step([sequence])
    engine.step([sequence])
    engine.abort(sequence)
    assert complete(engine, [prompt], [LATE], 20) == [cold(recurrent, kind, prompt, LATE)]
    engine.backend.clear(0)
    engine.slots.kept[0], engine.slots.num_exact[0] = [], 0
    assert complete(engine, [prompt], [LATE], 20) == [cold(recurrent, kind, prompt, LATE)]


@BACKENDS
def test_replay_scores_as_decoding_computes(recurrent, kind):
    prompt = random_prompt(32, 30)
    completion = cold(recurrent, kind, prompt, FULL, 150)
    engine = Engine(make_backend(kind, recurrent.loaded, num_slots=2))
    replay = Replay(engine, [Reference(tuple(prompt), tuple(completion))] * 2)
    tapered = list(policies(LAYERS).values())
    scores = [replay.at(0, tapered), replay.at(1, tapered), replay.at(0, tapered, base=tapered[1])]
    for number, policy in enumerate(tapered):
        assert np.allclose(scores[0][number].kl, scores[1][number].kl, atol=1e-5)
        assert np.allclose(scores[0][number].kl, scores[2][number].kl, atol=1e-4)
        # Decoding the same tokens one by one gives the same log-probabilities.
        backend = make_backend(kind, recurrent.loaded)
        backend.forward(one_slot(backend, prompt, ()))
        for step, token in enumerate(completion[:40], 1):
            active = tuple(int(layer in policy.retained_layers(step)) for layer in range(LAYERS))
            at = (np.array([value], np.int32) for value in (token, len(prompt) + step - 1, 0))
            logits = backend.forward(TokenBatch(*at, active, logits_rows=(0,))).logits[0].astype(np.float64)
            nll = np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[completion[step]]
            assert abs(nll - scores[0][number].nll[step]) < 1e-3
    replay.close()


@pytest.mark.parametrize("options", [{"exact": True}, {"reuse": "exact"}])
def test_the_reference_refuses_what_would_cut_a_state_back(recurrent, options):
    ids = torch.tensor([random_prompt(40)])
    with pytest.raises(RequestError, match="states of recurrent layers cannot be cut back"):
        recurrent.tiny.hf.generate(ids, max_new_tokens=3, custom_generate=taper.hf.custom_generate(LATE, **options))


def test_adapters_are_not_trained_through_recurrent_layers(recurrent):
    with pytest.raises(RequestError, match="recurrent layers"):
        taper.heal(taper.LLM(str(recurrent.tiny.folder), threads=1), LATE, ["a", "b"] * 10)


@BACKENDS
def test_a_second_output_after_a_tapered_one_is_replayed(recurrent, kind):
    first = Reference(tuple(random_prompt(33, 30)), tuple(random_prompt(34, 40)))
    prompt = (*first.prompt_ids, *first.completion_ids, *random_prompt(35, 10))
    engine = Engine(make_backend(kind, recurrent.loaded))
    replay = Replay(engine, [Reference(prompt, tuple(random_prompt(36, 20)))])
    same, changed = (replay.after_tapered(0, policy, first) for policy in (CHOSEN["full"], CHOSEN["static"]))
    assert same.kl.max() < 1e-5 < changed.kl.mean()


def test_the_states_that_are_kept_are_bounded_and_well_spread(recurrent):
    records, end = StateRecords(recurrent.loaded.config, 2), 0
    for count in [30, *[1] * 3000]:
        positions, ones = np.arange(end, end + count), np.ones(count, int)
        batch = TokenBatch(ones, positions, ones, (count,) * LAYERS)
        passages = records.passages(batch)
        used = {int(record) for state in records._held[1].values() for record in state.records}
        assert not used & set(passages[0].writes.tolist())
        records.commit(passages, tentative=False)
        end += count
    assert records.resumable(1, end) == end
    assert records.resumable(1, end - 1) == end - 1
    held = sorted(records._held[1])
    assert len(held) <= MAX_SNAPSHOTS + 2
    gaps = np.diff([0, *held])
    assert gaps.max() <= 2 * end / MAX_SNAPSHOTS
    assert records.resumable(0, 100) == 0


def test_libraries_that_lack_these_layers_are_refused_by_name(recurrent, monkeypatch):
    monkeypatch.setattr(library, "_FIRST_RECURRENT", (9, 9))
    with pytest.raises(ModelError, match=r"too old.*\n?.*9\.9 or newer"):
        make_backend("ggml", recurrent.loaded)
