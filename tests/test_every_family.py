"""The proof that each family of models runs correctly: its tiny twin, in f32, in every way that models are run.

`make test-slow` runs it, which takes about half an hour. The quick tests try the same with fewer families and tokens.
"""

from __future__ import annotations

from types import SimpleNamespace

import fuzz
import pytest
from test_calibration import prompts_of
from test_families import completed, make_family
from test_healing import PROMPTS as TEXTS
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
from taper import LLM, DepthPolicy
from taper.engine import Engine, Request
from taper.engine.drafting import Drafting
from taper.errors import RequestError
from taper.models import load_model
from taper.sampling import SamplingParams

pytestmark = pytest.mark.slow

TOKENS, LATER_TOKENS = 64, 20  # of the completion of a prompt, and of a later turn
LONG = random_prompt(99, 60)
MUTATIONS = 300  # of either kind of metadata
# Where two tokens or experts are nearly equal, rounding chooses, and llama.cpp's gelu, a table in f16, rounds more. In
# these prompts it decides nothing.
NUMBERS = {
    "granite 4": range(108, 116),
    "gemma3n as in llama.cpp": (101, 102, 103, 105, 106, 107, 109, 110),
    "gemma4": range(108, 116),
}
NOT_IN_LLAMA_CPP = {
    "deepseek v3 without groups": "it takes models whose queries are not compressed to have certain numbers of layers",
    "gemma3n": "it takes most sizes to be those of published models; the other twin has them",
    "mobilellm": "it asks models of Llama 4 for experts",
    "phi3 with a window": "it lets layers of Phi 3 attend to everything, and warns of that",
}
# It rounds the ends of yarn's ramp, which gpt-oss does not; without scaling there is nothing to round.
FOR_LLAMA_CPP = {"gpt-oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}}


@pytest.fixture(scope="module", params=PLAIN | FAMILIES)
def family(request, tmp_path_factory) -> SimpleNamespace:
    prompts = [random_prompt(number, 23) for number in NUMBERS.get(request.param, range(100, 108))]
    family = make_family(tmp_path_factory.mktemp("family"), request.param, prompts, TOKENS)
    family.loaded, family.gguf = family.tiny.load(), family.tiny.folder / "tiny.gguf"
    if family.name not in NOT_IN_GGUF:
        write_gguf(family.gguf, family.tiny)
    return family


def new_engine(family: SimpleNamespace, kind: str, num_slots: int = 8, **options) -> Engine:
    return Engine(make_backend(kind, family.loaded, num_slots=num_slots, **family.options), **options)


# 1. Tokens: of every policy, of all prompts at once and of each alone, of later turns, and after an interrupt


@EVERY_BACKEND
def test_every_policy_equals_transformers_alone_and_in_a_batch(family, kind):
    for name in family.policies:
        # In steps of so few tokens, prompts are computed in parts, and join the batch at different steps.
        assert completed(family, kind, family.loaded, name, max_num_batched_tokens=60) == family.expected(name), name
        assert name == "full" or family.expected(name) != family.expected("full"), f"{name} changes nothing"
    names = [*family.policies, *family.policies]
    policies, expected = [family.policies[n] for n in names], [family.expected(n)[i] for i, n in enumerate(names)]
    assert complete(new_engine(family, kind), family.prompts, policies, TOKENS) == expected
    engine, pairs = new_engine(family, kind, 1), zip(family.prompts, policies, strict=True)
    assert [complete(engine, [prompt], [policy], TOKENS)[0] for prompt, policy in pairs] == expected


@EVERY_BACKEND
@pytest.mark.parametrize("name", ["full", "d3 late"])
def test_later_and_edited_turns_equal_a_cold_start(family, kind, name):
    def completions(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
        return complete(engine, prompts, [family.policies[name]] * len(prompts), LATER_TOKENS, reuse="exact")

    engine, more = new_engine(family, kind), [random_prompt(200 + number, 9) for number in range(8)]
    turns = list(zip(family.prompts, completions(engine, family.prompts), more, strict=True))
    second = [[*prompt, *said, *new] for prompt, said, new in turns]
    edited = [[*prompt[:15], *new, *said] for prompt, said, new in turns]
    for prompts in (second, edited):
        assert completions(engine, prompts) == completions(new_engine(family, kind), prompts)


@EVERY_BACKEND
@pytest.mark.parametrize("name", ["full", "d3 late"])
@pytest.mark.parametrize("how", ["aborted", "interrupted before", "interrupted after"])
def test_a_prompt_that_is_broken_off_equals_a_cold_start(family, kind, name, how):
    """In its third part of four: before or after the forward."""
    request = Request(LONG, SamplingParams(max_tokens=LATER_TOKENS), family.policies[name], reuse="exact")
    expected = new_engine(family, kind, 1).complete([request])
    engine = new_engine(family, kind, 1, max_num_batched_tokens=16)
    sequence, forward = engine.add(request), engine.backend.forward

    def interrupted(batch):
        if how == "interrupted after":
            forward(batch)
        raise KeyboardInterrupt

    assert [engine.step() for _ in range(2)] == [[], []]
    if how == "aborted":
        engine.abort(sequence)
    else:
        engine.backend.forward = interrupted
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.backend.forward = forward
        while sequence.finish_reason is None:
            engine.step()
        assert [sequence.completion_ids] == expected
    assert engine.complete([request]) == expected


# 2. The other kind of file, and the other program that reads it


def test_gguf_gives_the_same_and_so_does_llama_cpp(family, tmp_path):
    if family.name in NOT_IN_GGUF:
        pytest.skip("GGUF files of this architecture cannot say this")
    loaded, path = load_model(family.gguf), family.gguf
    for name in family.policies:
        assert completed(family, "ggml", loaded, name) == family.expected(name), name
    if reason := NOT_IN_LLAMA_CPP.get(family.name):
        pytest.skip(f"llama.cpp: {reason}")
    if other := FOR_LLAMA_CPP.get(family.name):
        architecture, options = FAMILIES[family.name]
        path = tmp_path / "tiny.gguf"
        write_gguf(path, make_tiny(tmp_path, architecture, **options | other))
    assert_llama_cpp_agrees(path, family.prompts, TOKENS)


# 3. What is made with a model: drafts, scores, policies and adapters


@EVERY_BACKEND
def test_exact_mode_gives_the_tokens_of_full_depth(family, kind):
    full, late, accepted = family.policies["full"], family.policies["d3 late"], 0
    for drafter in ["ngram", "policy", "auto"] + ["mtp"] * family.loaded.config.has_mtp:
        drafting = Drafting(drafter, policy=late, min_match=1, max_tokens=4, min_probability=0.0, always=True)
        engine = new_engine(family, kind)
        assert complete(engine, family.prompts, [full] * 8, TOKENS, drafting=drafting) == family.expected("full")
        assert engine.planner.num_verified.total() > 0, drafter
        accepted += engine.planner.num_accepted.total()
    assert accepted > 0


@EVERY_BACKEND
def test_replay_equals_decoding(family, kind):
    tapering = [policy for policy in family.policies.values() if policy.tapers]
    assert_replay_equals_decoding(family.loaded, kind, tapering, **family.options)


def test_calibration_and_healing_run(family):
    def assert_tapers(policy: DepthPolicy) -> None:
        depths = llm.generate("hello", max_tokens=60, policy=policy, ignore_eos=True).depths
        assert len(depths) == 60
        assert depths[-1] < llm.config.num_hidden_layers

    with LLM(family.tiny.folder, device="cpu", dtype="f32", threads=1, max_batch_size=10) as llm:
        found = taper.calibrate(llm, prompts_of(10), max_kl=50.0, quick=True)
        assert found.met
        assert_tapers(found.policy)
        if llm.config.mixer is not None or llm.config.num_streams > 1:
            with pytest.raises(RequestError, match="adapters") as refused:
                taper.heal(llm, found.policy, TEXTS, minutes=0.02, rank=4)
            assert "\n" not in refused.value.message
        else:
            with short_trainings():
                healing = taper.heal(llm, found.policy, TEXTS, minutes=0.02, rank=4)
            assert healing.tokens > 0
            assert_tapers(healing.policy)


# 4. Damage


@pytest.mark.parametrize("kind", ["config", "header"])
def test_damaged_metadata_is_refused_in_one_line_or_loads_and_runs(family, kind, tmp_path):
    if kind == "header" and family.name in NOT_IN_GGUF:
        pytest.skip("there is no GGUF file")
    (tmp_path / "f32").symlink_to(family.tiny.folder)
    (tmp_path / "f32.gguf").symlink_to(family.gguf)
    counts, failures = fuzz.run(kind, 0, MUTATIONS, tmp_path)
    assert failures == []
    assert counts["refused"] + counts["loaded"] == MUTATIONS
    assert min(counts["refused"], counts["ran"]) > 10, counts
