"""Sampling from the candidates that a GPU sends gives the tokens that sampling from all logits gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_drafting import DRAFTER, FULL, check_same, finished, mixed_requests, with_drafting
from tiny import make_backend, random_prompt

from taper import SamplingParams
from taper.backends import candidates
from taper.backends.candidates import Candidates, largest
from taper.engine import Engine, Request
from taper.sampling import TokenCounts, adjust, sample

VOCABULARY = 5000


@given(
    seed=st.integers(0, 1 << 30),
    spread=st.sampled_from([0.5, 2.0, 5.0]),
    sampling=st.sampled_from(
        [
            {"top_k": 1},
            {"top_k": 64},
            {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
            {"min_p": 0.01},
            {"min_p": 0.1, "temperature": 0.6},
            {"top_p": 0.9, "temperature": 0.2},
        ]
    ),
    adjusting=st.sampled_from(
        [
            {},
            {"repetition_penalty": 1.3},
            {"presence_penalty": 2.0, "frequency_penalty": 1.0},
            {"logit_bias": dict.fromkeys(range(0, VOCABULARY, 9), -100.0)},
        ]
    ),
    num_seen=st.sampled_from([1, 40, 1200, VOCABULARY]),
)
def test_the_sampled_token_is_that_of_all_logits(seed, spread, sampling, adjusting, num_seen):
    rng, params = np.random.default_rng(seed), SamplingParams(**sampling, **adjusting)
    logits = rng.normal(0, spread, (1, VOCABULARY)).astype(np.float32)
    # The most probable tokens came before, some of them many times.
    seen, counts = np.argsort(-logits[0])[:num_seen].tolist(), TokenCounts([])
    for token_id in [*seen, *seen[:30], *seen[:10]]:
        counts.add(token_id)
    (few,) = largest(torch.from_numpy(logits.copy()))
    change = (lambda logits, ids=None: adjust(logits, params, counts, ids)) if adjusting else None
    whole = logits[0].copy()
    if change:
        change(whole)
    expected = sample(whole.copy(), params, np.random.default_rng(seed))
    shortlist = few.shortlist(params.reach(VOCABULARY), change)
    if shortlist is None:
        assert spread < 5 or adjusting
        np.testing.assert_array_equal(few.whole(), logits[0])
    else:
        ids, found = shortlist
        assert np.all(np.diff(ids) > 0)
        np.testing.assert_array_equal(found, whole[ids])
        assert sample(found, params, np.random.default_rng(seed), ids) == expected


def test_logits_that_are_no_numbers_have_no_shortlist():
    logits = torch.linspace(-50, 50, VOCABULARY)[None]
    (few,) = largest(logits)
    assert few.shortlist() is not None
    token_id, probability = few.likeliest()
    assert (token_id, probability) == (VOCABULARY - 1, pytest.approx(float(logits[0].softmax(-1)[-1]), rel=1e-4))
    np.testing.assert_array_equal(few.whole(), logits[0].numpy())
    np.testing.assert_array_equal(few.exact(np.array([7, 9])), logits[0][[7, 9]].numpy())
    for value in (torch.nan, torch.inf):
        logits[0, 11] = value
        assert largest(logits)[0].shortlist() is None


@pytest.mark.parametrize("drafting", [None, "ngram", "policy"])
def test_outputs_are_those_of_all_logits(tiny_llama, drafting, monkeypatch):
    """Eight requests together that sample and stop in every way, also with drafts."""
    requests = mixed_requests(FULL)
    if drafting:
        policy = DRAFTER if drafting == "policy" else None
        requests = with_drafting(requests, kind=drafting, policy=policy, always=True, min_probability=0.0)
    outputs = []
    for count in (64, VOCABULARY):
        monkeypatch.setattr(candidates, "COUNT", count)
        backend = make_backend("torch", tiny_llama.load(), num_slots=8)
        assert backend.has_preview == (count == 64)
        outputs.append(finished(Engine(backend), requests))
    check_same(*outputs)


def test_no_other_logits_are_fetched_where_candidates_suffice(tiny_llama, monkeypatch):
    monkeypatch.setattr(candidates, "COUNT", 200)
    monkeypatch.setattr(candidates, "_REACH", 0.5)  # the logits of random weights lie close together
    monkeypatch.setattr(Candidates, "whole", property(lambda self: pytest.fail("all logits were fetched")))
    params = SamplingParams(max_tokens=8, temperature=0.7, top_k=20, repetition_penalty=1.1, seed=3, ignore_eos=True)
    engine = Engine(make_backend("torch", tiny_llama.load(), num_slots=2))
    ended = finished(engine, [Request(random_prompt(seed, 9), params, FULL) for seed in range(2)])
    assert [len(ids) for ids, *_ in ended] == [8, 8]
