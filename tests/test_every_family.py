"""The proof that each family of models runs correctly: its tiny twin, in f32, in every way that models are run.

`make test-slow` takes about half an hour for it. The quick tests try the same with fewer families and tokens.
"""

from __future__ import annotations

from types import SimpleNamespace

import fuzz
import pytest
from test_calibration import prompts_of
from test_families import completed, make_family
from test_healing import PROMPTS as HEALING_PROMPTS
from test_healing import short_trainings
from test_replay import assert_replay_equals_decoding
from tiny import (
    EVERY_BACKEND,
    FAMILIES,
    NOT_IN_GGUF,
    PLAIN,
    assert_llama_cpp_agrees,
    complete,
    make_backend,
    make_tiny,
    random_prompt,
    write_gguf,
)

import taper
from taper import LLM
from taper.engine import Engine, Request
from taper.engine.drafting import Drafting
from taper.errors import RequestError
from taper.models import load_model
from taper.sampling import SamplingParams

pytestmark = pytest.mark.slow

TOKENS, LATER_TOKENS = 64, 20  # of a completion of a prompt, and of a later turn
PROMPTS = [random_prompt(100 + seed, 23) for seed in range(8)]
CHUNK, LONG = 16, random_prompt(99, 60)
MUTATIONS = 300  # of either kind of metadata
# Where llama.cpp does not load a family, or computes something else.
NOT_IN_LLAMA_CPP: dict[str, str] = {}
FOR_LLAMA_CPP: dict[str, dict] = {}


@pytest.fixture(scope="module", params=PLAIN | FAMILIES)
def family(request, tmp_path_factory) -> SimpleNamespace:
    family = make_family(tmp_path_factory.mktemp("family"), request.param, PROMPTS, TOKENS)
    family.loaded = family.tiny.load()
    family.gguf = family.tiny.folder / "tiny.gguf"
    if family.name not in NOT_IN_GGUF:
        write_gguf(family.gguf, family.tiny)
    return family


def engine_of(family: SimpleNamespace, kind: str, num_slots: int = 1, **options) -> Engine:
    return Engine(make_backend(kind, family.loaded, num_slots=num_slots, **family.options), **options)


# 1. Tokens


@EVERY_BACKEND
def test_every_policy_equals_transformers_alone_and_in_a_batch(family, kind):
    for name in family.policies:
        # In steps of so few tokens, prompts are computed in parts, and join the batch at different steps.
        assert completed(family, kind, family.loaded, name, max_num_batched_tokens=60) == family.expected(name), name
        assert name == "full" or family.expected(name) != family.expected("full"), f"{name} changes nothing"
    names = [*family.policies, *family.policies]
    chosen, expected = [family.policies[name] for name in names], [family.expected(n)[i] for i, n in enumerate(names)]
    assert complete(engine_of(family, kind, len(PROMPTS)), PROMPTS, chosen, TOKENS) == expected
    engine, pairs = engine_of(family, kind), zip(PROMPTS, chosen, strict=True)
    assert [complete(engine, [prompt], [policy], TOKENS)[0] for prompt, policy in pairs] == expected


@EVERY_BACKEND
def test_later_turns_and_prompts_that_are_broken_off_equal_a_cold_start(family, kind):
    for name in ("full", "d3 late"):
        policy = family.policies[name]

        def completions(engine: Engine, prompts: list[list[int]], policy=policy) -> list[list[int]]:
            return complete(engine, prompts, [policy] * len(prompts), LATER_TOKENS, reuse="exact")

        warm, count = engine_of(family, kind, len(PROMPTS)), len(PROMPTS)
        said = completions(warm, PROMPTS)
        more = [random_prompt(200 + seed, 9) for seed in range(count)]
        second = [[*PROMPTS[row], *said[row], *more[row]] for row in range(count)]
        edited = [[*PROMPTS[row][:15], *more[row], *said[row]] for row in range(count)]
        for turns in (second, edited):
            assert completions(warm, turns) == completions(engine_of(family, kind, count), turns), name

        (expected,) = completions(engine_of(family, kind), [LONG])
        for how in ("aborted", "interrupted before", "interrupted after"):
            engine = engine_of(family, kind, max_num_batched_tokens=CHUNK)
            assert broken_off(engine, policy, how) == expected, f"{name}, {how}"
            assert completions(engine, [LONG]) == [expected], f"{name}, {how}"


def broken_off(engine: Engine, policy: taper.DepthPolicy, how: str) -> list[int]:
    """The completion of a prompt whose third chunk does not come to its end at once."""
    forward, request = engine.backend.forward, Request(LONG, SamplingParams(max_tokens=LATER_TOKENS), policy)

    def interrupted(batch):
        if how == "interrupted after":
            forward(batch)
        raise KeyboardInterrupt

    sequence = engine.add(request)
    for _ in range(2):
        assert engine.step() == []
    if how == "aborted":
        engine.abort(sequence)
        return engine.complete([request])[0]
    engine.backend.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.backend.forward = forward
    while sequence.finish_reason is None:
        engine.step()
    return sequence.completion_ids


# 2. GGUF


def test_gguf_gives_the_same_and_llama_cpp_too(family, tmp_path):
    if family.name in NOT_IN_GGUF:
        pytest.skip("GGUF files of this architecture cannot say this")
    loaded = load_model(family.gguf)
    for name in family.policies:
        assert completed(family, "ggml", loaded, name) == family.expected(name), name
    if reason := NOT_IN_LLAMA_CPP.get(family.name):
        pytest.skip(f"llama.cpp: {reason}")
    path = family.gguf
    if options := FOR_LLAMA_CPP.get(family.name):
        path = tmp_path / "tiny.gguf"
        architecture, usual = FAMILIES[family.name]
        write_gguf(path, make_tiny(tmp_path, architecture, **usual | options))
    assert_llama_cpp_agrees(path, prompts=8, tokens=TOKENS)


# 3. What is made with a model


@EVERY_BACKEND
def test_exact_mode_and_replay_compute_what_decoding_does(family, kind):
    late, most = family.policies["d3 late"], {"max_tokens": 4, "min_probability": 0.0, "always": True}
    kinds = ["ngram", "policy", "auto"] + ["mtp"] * family.loaded.config.has_mtp
    for drafter in kinds:
        engine, drafting = engine_of(family, kind, 8), Drafting(drafter, policy=late, min_match=1, **most)
        full = [family.policies["full"]] * len(PROMPTS)
        assert complete(engine, PROMPTS, full, TOKENS, drafting=drafting) == family.expected("full"), drafter
        assert 0 < engine.planner.num_accepted.total() < engine.planner.num_verified.total(), drafter
    tapering = [policy for policy in family.policies.values() if policy.tapers]
    assert_replay_equals_decoding(family.loaded, kind, tapering, **family.options)


def test_calibration_and_healing_run(family):
    with LLM(family.tiny.folder, device="cpu", dtype="f32", context=320, threads=1, max_batch_size=10) as llm:
        found = taper.calibrate(llm, prompts_of(10), max_kl=50.0, quick=True)
        assert found.met
        assert found.policy.tapers
        assert llm.generate("hello", max_tokens=60, policy=found.policy, ignore_eos=True).depths[-1] < len(
            llm.config.layers
        )
        if llm.config.mixer is not None:
            with pytest.raises(RequestError, match="recurrent layers") as refused:
                taper.heal(llm, found.policy, HEALING_PROMPTS, minutes=0.02, rank=4)
            assert "\n" not in str(refused.value)
            return
        with short_trainings():
            healing = taper.heal(llm, found.policy, HEALING_PROMPTS, minutes=0.02, rank=4)
        assert healing.tokens > 0
        assert llm.generate("hello", max_tokens=60, policy=healing.policy, ignore_eos=True).completion_tokens == 60


# 4. Damage


def test_damaged_metadata_is_refused_in_one_line_or_loads_and_runs(family, tmp_path):
    (tmp_path / "f32").symlink_to(family.tiny.folder)
    kinds = ["config"]
    if family.name not in NOT_IN_GGUF:
        kinds.append("header")
        (tmp_path / "f32.gguf").symlink_to(family.gguf)
    for kind in kinds:
        counts, failures = fuzz.run(kind, 0, MUTATIONS, tmp_path)
        assert failures == []
        assert counts["refused"] + counts["loaded"] == MUTATIONS
        assert min(counts["refused"], counts["ran"]) > 10
        print(f"{family.name}: {kind}: {dict(counts)}")
