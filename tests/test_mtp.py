"""The MTP layer as a drafter: what it computes, what it is given, and that its drafts change nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import (
    BACKENDS,
    FAMILIES,
    complete,
    make_backend,
    make_tiny,
    policies,
    random_prompt,
    reference_ids,
    write_gguf,
)

import taper
from taper.backends import TokenBatch
from taper.engine import Engine, Request
from taper.engine.drafting import Drafting
from taper.errors import RequestError
from taper.models import load_model
from taper.policy import DepthPolicy
from taper.sampling import SamplingParams

pytestmark = pytest.mark.ci

LAYERS = 7
FULL = DepthPolicy.full(LAYERS)
ALWAYS = Drafting("mtp", max_tokens=3, min_probability=0.0, always=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> SimpleNamespace:
    architecture, options = FAMILIES["qwen35"]
    tiny = make_tiny(tmp_path_factory.mktemp("mtp"), architecture, **options)
    return SimpleNamespace(tiny=tiny, loaded=tiny.load())


def read_by_head(model, token_ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model.tiny.hf.model(torch.tensor([token_ids])).last_hidden_state[0].numpy()


class Watched:
    """An engine whose MTP layer is looked at: it predicts what `truth` says in some of its forwards, by chance."""

    def __init__(self, backend, truth: list[int], chance: float) -> None:
        self.engine, self.batches, self._truth = Engine(backend), [], truth
        self._forward, self._chance, self._rng = backend.forward, chance, np.random.default_rng(0)
        backend.forward = self._watched

    def _watched(self, batch: TokenBatch):
        output = self._forward(batch)
        if batch.first_layer == LAYERS:
            self.batches.append((batch, output.logits.copy()))
            for logits, row in zip(output.logits, batch.logits_rows, strict=True):
                following = self._truth[batch.positions[row] + 2 :][:1]
                if following and self._rng.random() < self._chance:
                    logits[following] = logits.max() + 9
        return output


@BACKENDS
@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_it_computes_what_the_reference_does(model, kind, source, tmp_path):
    loaded = model.loaded
    if source == "gguf":
        write_gguf(tmp_path / "model.gguf", model.tiny)
        loaded = load_model(tmp_path / "model.gguf")
    backend, count = make_backend(kind, loaded, num_slots=2), 20
    ids, places = np.array(random_prompt(0, count + 1), np.int32), np.arange(count, dtype=np.int32)
    slots, rows = np.ones(count, np.int32), tuple(range(count))
    read = backend.forward(TokenBatch(ids[:-1], places, slots, (count,) * LAYERS, head_inputs=True)).head_inputs
    assert np.abs(read - read_by_head(model, ids[:-1].tolist())).max() < 1e-4
    expected, own = model.tiny.hf.mtp(model.tiny.hf, read, ids[1:].tolist())
    for first in (0, 7):  # of the second half it reads the keys and values of the first
        part = slice(first, count)
        active = (0,) * LAYERS + (count - first,)
        given = {"first_layer": LAYERS, "hidden_states": read[part], "head_inputs": True}
        arrays = ids[1:][part], places[part], slots[part], active, rows[: count - first]
        output = backend.forward(TokenBatch(*arrays, **given))
        assert np.abs(output.logits - expected[part].numpy()).max() < 1e-3
        assert np.abs(output.head_inputs - own[part].numpy()).max() < 1e-3


@BACKENDS
@pytest.mark.parametrize("length", [5, 150])
@pytest.mark.parametrize("budget", [512, 40])
def test_it_sees_each_token_with_what_the_head_read_before(model, kind, length, budget):
    prompt = random_prompt(length, length)
    text = [*prompt, *reference_ids(model.tiny, prompt, None, 40)]
    expected = read_by_head(model, text)
    predicted, _ = model.tiny.hf.mtp(model.tiny.hf, expected[:-1], text[1:])
    watched = Watched(make_backend(kind, model.loaded), text, chance=0.7)
    watched.engine.max_num_batched_tokens = budget
    sequence = watched.engine.add(Request(prompt, SamplingParams(max_tokens=40), FULL, drafting=ALWAYS))
    while sequence.finish_reason is None:
        watched.engine.step()
    assert sequence.completion_ids == text[length:]
    accepted = sum(output.is_drafted for output in sequence.outputs)
    assert 10 < accepted < sequence.num_drafted
    seen, compared = set(), 0
    for batch, logits in watched.batches:
        rows = dict(zip(batch.logits_rows, logits, strict=True))
        places = zip(batch.tokens, batch.positions.tolist(), batch.hidden_states, strict=True)
        for row, (token, position, state) in enumerate(places):
            if token == text[position + 1] and np.abs(state - expected[position]).max() < 1e-3:
                seen.add(position)
                if row in rows:
                    assert np.abs(rows[row] - predicted[position].numpy()).max() < 1e-2
                    compared += 1
    assert compared > 8
    assert seen >= set(range(len(text) - 6))  # then nothing is drafted any more


@BACKENDS
def test_drafts_change_nothing_in_batches_and_later_turns(model, kind):
    chosen = [FULL, *policies(LAYERS).values()]
    prompts = [random_prompt(seed, 5 + 7 * seed) for seed in range(len(chosen))]
    for drafting in (ALWAYS, Drafting("auto", min_match=1, max_tokens=4, min_probability=0.0, always=True)):
        engine = Engine(make_backend(kind, model.loaded, num_slots=3))
        turns = prompts
        for seed in range(2):
            expected = complete(Engine(make_backend(kind, model.loaded, num_slots=3)), turns, chosen, 16, reuse="exact")
            assert complete(engine, turns, chosen, 16, drafting=drafting, reuse="exact") == expected
            turns = [[*turn, *ids, *random_prompt(seed)] for turn, ids in zip(turns, expected, strict=True)]


def test_sampled_tokens_are_those_without_drafts(model):
    prompt = random_prompt(3)
    params = SamplingParams(max_tokens=30, temperature=1.2, seed=5, logprobs=2)
    plain, drafted = (
        Engine(make_backend("ggml", model.loaded)).complete([Request(prompt, params, FULL, drafting=drafting)])
        for drafting in (None, ALWAYS)
    )
    assert plain == drafted


def test_auto_copies_first_and_a_model_without_the_layer_says_so(model, tmp_path):
    prompt = random_prompt(1, 8) * 3
    watched = Watched(make_backend("ggml", model.loaded), [], chance=0.0)
    drafting = Drafting("auto", max_tokens=2, always=True)
    sequence = watched.engine.add(Request(prompt, SamplingParams(max_tokens=3), FULL, drafting=drafting))
    while not sequence.outputs:
        watched.engine.step()
    assert all(not batch.logits_rows for batch, _ in watched.batches)
    architecture, options = FAMILIES["qwen35"]
    without = make_tiny(tmp_path, architecture, **options | {"mtp_num_hidden_layers": 0})
    assert not without.load().config.has_mtp
    with taper.LLM(without.folder) as llm, pytest.raises(RequestError, match="no MTP layer") as caught:
        llm.generate("a", mode="exact", draft="mtp")
    assert "ngram" in caught.value.hint


def test_an_interrupt_loses_a_prediction_at_most(model, monkeypatch):
    """What the head read may be lost; the tokens are the same, and later ones are drafted."""
    prompt, drafted = random_prompt(4), ALWAYS
    expected = reference_ids(model.tiny, prompt, None, 30)
    watched = Watched(make_backend("ggml", model.loaded), [*prompt, *expected], chance=1.0)
    sequence = watched.engine.add(Request(prompt, SamplingParams(max_tokens=30), FULL, drafting=drafted))
    noted = watched.engine._mtp.note

    def interrupted(*args):
        monkeypatch.setattr(watched.engine._mtp, "note", noted)
        raise KeyboardInterrupt

    while sequence.finish_reason is None:
        if sequence.step in (1, 9):
            monkeypatch.setattr(watched.engine._mtp, "note", interrupted)
        try:
            watched.engine.step()
        except KeyboardInterrupt:
            assert watched.engine._mtp.note == noted
    assert sequence.completion_ids == expected
    assert sum(output.is_drafted for output in sequence.outputs) > 15
