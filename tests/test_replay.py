"""Replay: one forward a window equals decoding step by step, on both backends; what is shared changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from tiny import BACKENDS, FAMILIES, make_backend, make_tiny, one_slot, policies, random_prompt, with_adapters

from taper.engine import Engine, Request
from taper.errors import RequestError
from taper.lab.calibration import replay as replay_module
from taper.lab.calibration.replay import Reference, Replay, Scores
from taper.models.tensors import LoadedModel
from taper.policy import DepthPolicy
from taper.sampling import SamplingParams


def references(count: int = 3, length: int = 24) -> list[Reference]:
    return [
        Reference(tuple(random_prompt(50 + i, 9 + 4 * i)), tuple(random_prompt(80 + i, length - 7 * i)))
        for i in range(count)
    ]


def step_by_step(engine: Engine, reference: Reference, policy: DepthPolicy) -> np.ndarray:
    """Logits [steps, V] of decoding a known completion one token at a time, by forwards made by hand."""
    backend, prompt = engine.backend, reference.prompt_ids
    logits = [backend.forward(one_slot(backend, prompt, (len(prompt) - 1,))).logits[0]]
    for step, token in enumerate(reference.completion_ids[:-1], 1):
        batch = one_slot(backend, [token], (0,), start=len(prompt) + step - 1)
        retained = policy.retained_layers(step)
        num_active = tuple(int(layer in retained) for layer in range(policy.num_hidden_layers))
        batch = replace(batch, num_active=num_active, adapters=policy.adapters)
        logits += list(backend.forward(batch).logits)
    return np.stack(logits)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def expected(p: np.ndarray, engine: Engine, reference: Reference, policy: DepthPolicy, top: int):
    """KL, agreement and NLL by their definitions; p: full depth's log-probabilities."""
    q = log_softmax(step_by_step(engine, reference, policy))
    kl = []
    for a, b in zip(p, q, strict=True):
        best = np.argsort(-a)[:top]
        rest = [max(1 - np.exp(x[best]).sum(), 1e-12) for x in (a, b)]
        kl.append((np.exp(a[best]) * (a[best] - b[best])).sum() + rest[0] * np.log(rest[0] / rest[1]))
    tokens = np.array(reference.completion_ids)
    steps = np.arange(len(tokens))
    return np.array(kl), p.argmax(-1) == q.argmax(-1), -q[steps, tokens], -p[steps, tokens]


@BACKENDS
@pytest.mark.parametrize(
    ("family", "window"),
    [
        ("llama", 128),
        ("llama", 7),
        pytest.param("gemma3", 7, marks=pytest.mark.ci),
        pytest.param("gemma3n", 7, marks=pytest.mark.ci),
        pytest.param("granitemoe", 7, marks=pytest.mark.ci),
    ],
)
def test_replay_equals_decoding_step_by_step(tiny_llama, tmp_path, kind, family, window, monkeypatch):
    """Also in layers with sliding windows or experts, and of several hidden states a token."""
    monkeypatch.setattr(replay_module, "WINDOW", window)
    monkeypatch.setattr(replay_module, "TOP", 50)
    if family == "llama":
        loaded = tiny_llama.load()
    else:
        architecture, options = FAMILIES[family]
        loaded = make_tiny(tmp_path, architecture, **options).load()
    plain = policies(loaded.config.num_hidden_layers)
    healed = [with_adapters(plain[name], loaded.config.hidden_size, scale=0.5) for name in ("d3", "early exit")]
    adapted = healed if loaded.config.num_streams == 1 else []
    assert_replay_equals_decoding(loaded, kind, [*plain.values(), *adapted])


def assert_replay_equals_decoding(loaded: LoadedModel, kind: str, chosen: Iterable[DepthPolicy], **options) -> None:
    """The scores of policies that change something equal those of decoding step by step."""
    engine = Engine(make_backend(kind, loaded, num_slots=2, **options))  # fewer slots than completions
    replay, known = Replay(engine, references()), references()
    full, alone = DepthPolicy.full(loaded.config.num_hidden_layers), Engine(make_backend(kind, loaded, **options))
    exact = [log_softmax(step_by_step(alone, reference, full)) for reference in known]
    for policy in chosen:
        scores = replay.score(policy)
        assert scores.kl.max() > 1e-3, "the policy changes nothing, so this proves nothing"
        for index, reference in enumerate(known):
            found = scores.where(scores.reference == index)
            kl, agreement, nll, nll_full = expected(exact[index], alone, reference, policy, replay_module.TOP)
            for own, wanted in ((found.kl, kl), (found.nll, nll), (found.nll_full, nll_full)):
                np.testing.assert_allclose(own, wanted, rtol=1e-4, atol=2e-4)
            assert (found.agreement == agreement).all()
            assert found.depth.tolist() == [policy.depth(step) for step in range(len(reference.completion_ids))]


@BACKENDS
def test_replay_across_buckets_of_cells_equals_transformers_at_full_depth(tiny_llama, kind):
    import torch

    known = [Reference(tuple(random_prompt(90 + n, n)), tuple(random_prompt(95 + n, 40))) for n in (249, 256, 490)]
    replay = Replay(Engine(make_backend(kind, tiny_llama.load(), context_length=800)), known)
    scores, policy = replay.score(DepthPolicy.full(6)), policies(6)["d3 late"]
    for index, reference in enumerate(known):
        with torch.no_grad():
            logits = tiny_llama.hf(torch.tensor([reference.prompt_ids + reference.completion_ids])).logits[0]
        steps = logits[len(reference.prompt_ids) - 1 : -1].log_softmax(-1)
        nll = -steps[range(40), list(reference.completion_ids)].numpy()
        np.testing.assert_allclose(scores.nll_full[scores.reference == index], nll, atol=2e-4)
    tapered = replay.score(policy)
    for index, reference in enumerate(known):
        alone = Engine(make_backend(kind, tiny_llama.load(), context_length=800))
        nll = -log_softmax(step_by_step(alone, reference, policy))[range(40), list(reference.completion_ids)]
        np.testing.assert_allclose(tapered.nll[tapered.reference == index], nll, atol=2e-4)


@BACKENDS
def test_sharing_with_a_base_changes_no_figure(tiny_llama, kind, monkeypatch):
    monkeypatch.setattr(replay_module, "WINDOW", 7)
    engine = Engine(make_backend(kind, tiny_llama.load(), num_slots=3))
    base = DepthPolicy.static(6, 4, [3, 1])
    candidates = (
        [DepthPolicy.static(6, 3, [3, 1, layer]) for layer in (5, 2, 4, 0)] + list(policies(6).values()) + [base]
    )
    alone = [Replay(Engine(make_backend(kind, tiny_llama.load())), references()).score(each) for each in candidates]
    replay = Replay(engine, references())
    found = [replay.at(index, candidates, base) for index in range(3)]
    together = [Scores.joined(part) for part in zip(*found, strict=True)]
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one.kl, other.kl, atol=2e-4)
        np.testing.assert_allclose(one.nll, other.nll, atol=2e-4)


@BACKENDS
def test_sharing_runs_only_the_layers_that_differ(tiny_llama, kind):
    engine = Engine(make_backend(kind, tiny_llama.load()))
    replay = Replay(engine, references(1))
    replay.score(DepthPolicy.full(6))
    ran = []
    run = engine.backend.forward
    engine.backend.forward = lambda batch: (
        ran.append((batch.first_layer, sum(map(bool, batch.num_active[batch.first_layer :])))) or run(batch)
    )
    replay.at(0, [DepthPolicy.static(6, 5, [1]), DepthPolicy.static(6, 5, [4])])
    assert ran == [(0, 4), (4, 1), (1, 4)]  # up to layer 4, then layer 5, then layers 2 to 5


@BACKENDS
def test_full_depth_costs_nothing(tiny_llama, kind):
    scores = Replay(Engine(make_backend(kind, tiny_llama.load())), references()).score(DepthPolicy.full(6))
    np.testing.assert_allclose(scores.kl, 0, atol=1e-6)
    assert scores.agreement.all()
    np.testing.assert_allclose(scores.nll, scores.nll_full)


@BACKENDS
def test_block_influence_is_one_minus_the_cosine_of_in_and_out(tiny_llama, kind):
    import torch

    found = Replay(Engine(make_backend(kind, tiny_llama.load())), references(1)).block_influence()
    reference = references(1)[0]
    hidden = []
    hooks = [
        layer.register_forward_hook(lambda m, i, o: hidden.append((i[0], o if torch.is_tensor(o) else o[0])))
        for layer in tiny_llama.hf.model.layers
    ]
    with torch.no_grad():
        tiny_llama.hf(torch.tensor([reference.prompt_ids + reference.completion_ids[:-1]]))
    for hook in hooks:
        hook.remove()
    steps = slice(len(reference.prompt_ids), None)
    wanted = [1 - torch.cosine_similarity(a[0, steps], b[0, steps], dim=-1).mean().item() for a, b in hidden]
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_closing_frees_the_slots(tiny_llama):
    engine = Engine(make_backend("ggml", tiny_llama.load(), num_slots=2))
    replay = Replay(engine, references())
    replay.score(DepthPolicy.full(6))
    assert engine.num_free_slots == 0
    replay.close()
    assert engine.num_free_slots == 2


def test_completions_that_do_not_fit_are_rejected(tiny_llama):
    engine = Engine(make_backend("ggml", tiny_llama.load()))
    for completion in ((), tuple(random_prompt(1, 600))):
        with pytest.raises(RequestError):
            Replay(engine, [Reference((1, 2), completion)])


@BACKENDS
@pytest.mark.parametrize("adapters", [False, True])
def test_a_completion_after_a_tapered_output_equals_one_token_at_a_time(tiny_llama, kind, adapters, monkeypatch):
    monkeypatch.setattr(replay_module, "WINDOW", 7)
    first = Reference(tuple(random_prompt(90, 11)), tuple(random_prompt(91, 25)))
    prompt_ids = (*first.prompt_ids, *first.completion_ids, *random_prompt(92, 9))
    second = Reference(prompt_ids, tuple(random_prompt(93, 12)))
    engine = Engine(make_backend(kind, tiny_llama.load(), num_slots=2))
    replay, by_hand = Replay(engine, [second]), make_backend(kind, tiny_llama.load())
    exact = log_softmax(step_by_step(Engine(make_backend(kind, tiny_llama.load())), second, DepthPolicy.full(6)))
    after = [Request(prompt_ids, SamplingParams(max_tokens=4), DepthPolicy.full(6))]
    cold = Engine(make_backend(kind, tiny_llama.load())).complete(after)
    for policy in policies(6).values():
        policy = with_adapters(policy, 64, scale=0.5) if adapters else policy
        by_hand.forward(one_slot(by_hand, first.prompt_ids, ()))
        for step, token in enumerate(first.completion_ids[:-1], 1):
            batch = one_slot(by_hand, [token], (), start=len(first.prompt_ids) + step - 1)
            num_active = tuple(int(layer in policy.retained_layers(step)) for layer in range(6))
            by_hand.forward(replace(batch, num_active=num_active, adapters=policy.adapters, fill=True))
        begin = len(first.prompt_ids) + len(first.completion_ids) - 1
        rest = [*second.prompt_ids, *second.completion_ids][begin:-1]
        rows = tuple(range(len(rest) - len(second.completion_ids), len(rest)))
        filled = log_softmax(by_hand.forward(one_slot(by_hand, rest, rows, start=begin)).logits)
        scores = replay.after_tapered(0, policy, first)
        steps, tokens = np.arange(12), np.array(second.completion_ids)
        np.testing.assert_allclose(scores.nll, -filled[steps, tokens], atol=1e-3)
        np.testing.assert_allclose(scores.nll_full, -exact[steps, tokens], atol=1e-3)
        np.testing.assert_array_equal(scores.agreement, filled.argmax(-1) == exact.argmax(-1))
        kl = (np.exp(exact) * (exact - filled)).sum(-1)  # over all of the vocabulary, which is smaller than `TOP`
        np.testing.assert_allclose(scores.kl, kl, atol=1e-4)
        assert kl.max() > 1e-3
        assert engine.num_free_slots == 2
        assert engine.complete(after) == cold
