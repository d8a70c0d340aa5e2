"""Sampling: each option does what its name says, and draws follow the distribution."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from taper.errors import RequestError
from taper.sampling import SamplingParams, TokenCounts, adjust, sample, token_logprobs, token_weights

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], np.float32))


def draws(count: int = 4000, logits=LOGITS, prompt=(), completion=(), **options) -> np.ndarray:
    rng = np.random.default_rng(0)
    params = SamplingParams(**{"temperature": 1.0, **options})
    counts = counted(prompt, completion)
    return np.array([sampled(logits, params, counts, rng) for _ in range(count)])


def sampled(logits, params, counts, rng) -> int:
    adjust(logits := logits.copy(), params, counts)
    return sample(logits, params, rng)


def counted(prompt, completion) -> TokenCounts:
    counts = TokenCounts(prompt)
    for token_id in completion:
        counts.add(token_id)
    return counts


def sorted_weights(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """What `token_weights` computes, by sorting: the slow twin."""
    weights = np.exp((logits - logits.max()) / np.float32(params.temperature))
    order = np.argsort(-logits, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    sums = weights[order].cumsum(dtype=np.float64)
    if params.top_p < 1:
        order = order[: int(np.searchsorted(sums, params.top_p * sums[-1])) + 1]
    order = order[weights[order] >= np.float32(params.min_p)]
    kept = np.zeros_like(weights)
    kept[order] = weights[order]
    return kept


def sorted_logprobs(logits: np.ndarray) -> np.ndarray:
    scores = logits.astype(np.float64) - logits.max()
    return scores - math.log(np.exp(scores).sum())


def assert_follows(found: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square at 99.9 %."""
    used = expected > 0
    counts = np.bincount(found, minlength=len(expected))
    assert counts[~used].sum() == 0
    chi = ((counts[used] - len(found) * expected[used]) ** 2 / (len(found) * expected[used])).sum()
    limit = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5}
    assert chi < limit[int(used.sum()) - 1]


def normal(values) -> np.ndarray:
    values = np.array(values, np.float64)
    return values / values.sum()


def test_temperature_zero_takes_the_likeliest():
    assert set(draws(20, temperature=0)) == {0}


def test_temperature_one_follows_the_model():
    assert_follows(draws(), normal([0.4, 0.3, 0.2, 0.06, 0.04]))


def test_temperature_sharpens_and_flattens():
    assert_follows(draws(temperature=0.5), normal(np.exp(LOGITS) ** 2))
    assert_follows(draws(temperature=2.0), normal(np.exp(LOGITS) ** 0.5))


def test_top_k_keeps_the_k_likeliest():
    assert_follows(draws(top_k=2), normal([0.4, 0.3, 0, 0, 0]))
    assert set(draws(50, top_k=1)) == {0}


def test_top_p_keeps_the_fewest_that_reach_the_sum():
    assert_follows(draws(top_p=0.65), normal([0.4, 0.3, 0, 0, 0]))
    assert_follows(draws(top_p=0.75), normal([0.4, 0.3, 0.2, 0, 0]))


def test_min_p_is_relative_to_the_likeliest():
    assert_follows(draws(min_p=0.45), normal([0.4, 0.3, 0.2, 0, 0]))


def test_filters_apply_in_turn_each_on_what_the_one_before_left():
    """Of 0.4, 0.3, 0.2, 0.06, 0.04, top_k 3 leaves 0.44, 0.33, 0.22; top_p 0.7 of these two; min_p then none or one."""
    assert_follows(draws(top_k=3, top_p=0.7), normal([0.4, 0.3, 0, 0, 0]))
    assert_follows(draws(top_p=0.7), normal([0.4, 0.3, 0, 0, 0]))
    assert_follows(draws(top_k=3, top_p=0.8), normal([0.4, 0.3, 0.2, 0, 0]))  # 0.78 of the three is not yet enough
    assert_follows(draws(top_p=0.91, min_p=0.3), normal([0.4, 0.3, 0.2, 0, 0]))
    assert set(draws(100, top_k=4, top_p=0.95, min_p=0.8)) == {0}
    # Temperature comes before all three: squared, the likeliest two hold 0.16 + 0.09 of 0.295.
    assert_follows(draws(temperature=0.5, top_p=0.8), normal([0.16, 0.09, 0, 0, 0]))
    assert_follows(draws(temperature=0.5, min_p=0.5), normal([0.16, 0.09, 0, 0, 0]))
    # Penalties come before everything: halved, the likeliest token falls to third place and out of the top two.
    assert_follows(draws(top_k=2, completion=[0], presence_penalty=1.0), normal([0, 0.3, 0.2, 0, 0]))


def test_repetition_penalty_counts_prompt_and_completion():
    logits = np.array([2.0, 1.5, -1.0], np.float32)
    for prompt, completion in (([0], []), ([], [0])):
        assert set(draws(10, logits, prompt, completion, temperature=0, repetition_penalty=2.0)) == {1}
    one = draws(logits=logits, prompt=[2], repetition_penalty=3.0)
    assert_follows(one, normal(np.exp([2.0, 1.5, -3.0])))


def test_presence_and_frequency_penalties_count_the_completion_only():
    assert_follows(draws(prompt=[0, 0], presence_penalty=1.0), normal(np.exp(LOGITS)))
    assert_follows(draws(completion=[0, 0], presence_penalty=1.0), normal(np.exp(LOGITS - [1, 0, 0, 0, 0])))
    assert_follows(draws(completion=[0, 0], frequency_penalty=0.7), normal(np.exp(LOGITS - [1.4, 0, 0, 0, 0])))


def test_a_seed_repeats_the_draws():
    params = SamplingParams(temperature=1.0)
    one, two = ([sample(LOGITS.copy(), params, rng) for _ in range(30)] for rng in map(np.random.default_rng, (5, 5)))
    assert one == two


def test_logprobs_are_the_models_own():
    logprobs = token_logprobs(LOGITS + 7, 2, 3)
    assert logprobs.logprob == pytest.approx(math.log(0.2), abs=1e-5)
    assert list(logprobs.top) == [0, 1, 2]
    assert logprobs.top[0] == pytest.approx(math.log(0.4), abs=1e-5)
    assert token_logprobs(LOGITS, 0, 0).top == {}


def random_logits(rng: np.random.Generator) -> np.ndarray:
    """Logits of any size and shape: peaked or flat, with ties, with tokens that are ruled out, all alike."""
    logits = rng.normal(0, rng.choice([0.01, 1, 4, 30]), rng.choice([2, 5, 300, 1024, 1025, 5000, 40_000]))
    if rng.random() < 0.4:
        logits = logits.round(int(rng.integers(0, 2)))
    if rng.random() < 0.2:
        logits[rng.random(len(logits)) < 0.5] = -np.inf
        logits[rng.integers(len(logits))] = 1.0
    if rng.random() < 0.1:
        logits[:] = 7.0
    return logits.astype(np.float32)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(60))
def test_the_same_tokens_are_kept_with_the_same_probabilities_as_by_sorting(seed):
    rng = np.random.default_rng(seed)
    for top_k, top_p, min_p in itertools.product((0, 1, 40, 3000), (1.0, 0.95, 0.5, 1e-9), (0.0, 0.05, 1.0)):
        logits = random_logits(rng)
        params = SamplingParams(temperature=rng.choice([0.2, 0.8, 1.0, 3.0]), top_k=top_k, top_p=top_p, min_p=min_p)
        ids, weights = token_weights(logits.copy(), params)
        found = np.zeros_like(logits)
        found[slice(None) if ids is None else ids] = weights
        np.testing.assert_array_equal(found, sorted_weights(logits, params))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(40))
def test_logprobs_are_those_that_sorting_gives(seed):
    rng = np.random.default_rng(seed)
    logits = random_logits(rng)
    scores, token_id = sorted_logprobs(logits), int(rng.integers(len(logits)))
    for top in (0, 1, 5, 20):
        logprobs = token_logprobs(logits, token_id, top)
        order = np.argsort(-logits, kind="stable")[:top]
        assert list(logprobs.top) == order[logits[order] > -np.inf].tolist()
        assert list(logprobs.top.values()) == pytest.approx(scores[list(logprobs.top)].tolist(), abs=1e-5)
        assert logprobs.logprob == pytest.approx(scores[token_id], abs=1e-5)


def test_draws_from_a_large_vocabulary_follow_the_kept_tokens():
    """Chi-square at 99.9 % over 60 groups of tokens, with blocks of the vocabulary that hold none."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 2, 60_000).astype(np.float32)
    logits[5_000:20_000] = -np.inf
    params = SamplingParams(temperature=0.9, top_p=0.9, min_p=1e-4)
    expected = sorted_weights(logits, params).reshape(60, 1000).sum(1, dtype=np.float64)
    found = np.bincount([sample(logits.copy(), params, rng) // 1000 for _ in range(3000)], minlength=60)
    used = expected > 0
    shares = 3000 * expected[used] / expected.sum()
    assert found[~used].sum() == 0
    assert used.sum() == 45
    assert ((found[used] - shares) ** 2 / shares).sum() < 78.7


@pytest.mark.parametrize("number", [0.0, 0.25, 0.5, 1 - 2**-53])
def test_a_draw_never_falls_on_a_token_without_weight(number):
    class Fixed:
        def random(self) -> float:
            return number

    for at in ([0], [4095], [1023, 1024], [100, 3000]):
        logits = np.full(4096, -np.inf, np.float32)
        logits[at] = 2.0
        expected = at[0] if number < 0.5 else at[-1]
        assert sample(logits, SamplingParams(temperature=1.0), Fixed()) == expected


def test_counts_are_those_of_prompt_and_completion():
    rng = np.random.default_rng(0)
    prompt, completion = rng.integers(0, 300, 200).tolist(), rng.integers(0, 600, 1000).tolist()
    counts = counted(prompt, completion)
    assert sorted(counts.ids.tolist()) == sorted({*prompt, *completion})
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {
        token_id: completion.count(token_id) for token_id in {*prompt, *completion}
    }


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"max_tokens": -3},
        {"max_tokens": 1.5},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"presence_penalty": 3},
        {"frequency_penalty": -3},
        {"seed": -1},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop_token_ids": [-1]},
        {"logprobs": 21},
        {"temperature": True},
    ],
)
def test_values_out_of_range_are_refused_with_the_rule(bad):
    with pytest.raises(RequestError, match="must be"):
        SamplingParams(**bad)


@pytest.mark.filterwarnings("error")
def test_every_extreme_in_range_samples_a_token():
    extremes = {
        "temperature": (0.0, 5e-324, 100.0),
        "top_k": (0, 1, 2**62),
        "top_p": (5e-324, 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (0.01, 100.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
        "logit_bias": ({0: -100.0, 1: 100.0}, {}),
    }
    logits = np.array([1e4, -1e4, 0, -np.inf, 3], np.float32)
    for values in itertools.product(*extremes.values()):
        params = SamplingParams(**dict(zip(extremes, values, strict=True)))
        token = sampled(logits, params, counted([0, 1, 2], [1, 3] * 500), np.random.default_rng(0))
        assert token in (0, 1, 2, 4), params
