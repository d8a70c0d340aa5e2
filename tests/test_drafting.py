"""Drafts change no output: with any drafter, window, sampling and policy the tokens are those of plain decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import count
from typing import ClassVar

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tiny import BACKENDS, FAMILIES, PLACE, PLAIN, make_backend, make_tiny, policies, random_prompt, with_adapters

from taper import LLM, DepthPolicy, SamplingParams
from taper import engine as engine_module
from taper.cli import cli
from taper.engine import Engine, Request
from taper.engine import sequence as sequence_module
from taper.engine.drafting import Draft, Drafting, Planner, Record, SuffixIndex
from taper.errors import RequestError

FULL = DepthPolicy.full(6)
DRAFTER = DepthPolicy.static(6, 4, [4, 1, 2])
TOKENS = 30
VOCABULARY = 300
REPRESENTATIVE = ("llama", "gemma3", "granitemoe", "phi3 with longrope")  # of families; make test-ci tries all


@given(st.lists(st.integers(0, 2), max_size=60))
def test_the_index_finds_the_longest_suffix_that_occurred_before(token_ids):
    index = SuffixIndex()
    for end in range(1, len(token_ids) + 1):
        index.extend(token_ids[end - 1 : end])
        text = token_ids[:end]
        lengths = [n for n in range(end) if any(text[i : i + n] == text[end - n :] for i in range(end - n))]
        length, following = index.match()
        assert length == max(lengths)
        first = next(i for i in range(end) if text[i : i + length] == text[end - length :])
        assert following == first + length


@given(st.lists(st.integers(0, 2), min_size=2, max_size=30), st.integers(1, 60))
def test_an_interrupt_while_a_token_is_indexed_costs_nothing_but_time(token_ids, when):
    index, calls, whole = SuffixIndex(), count(1), SuffixIndex()
    make = index._new_state

    def interrupted(*arguments):
        if next(calls) == when:
            raise KeyboardInterrupt
        return make(*arguments)

    index._new_state = interrupted
    try:
        index.extend(token_ids)
    except KeyboardInterrupt:
        index.extend([])
    whole.extend(token_ids)
    assert index.match() == whole.match()


class Oracle:
    """Proposes the true next tokens of a known text, other ones, or by chance either."""

    truth: ClassVar[dict[tuple[int, ...], list[int]]] = {}  # completions by their prompts
    kind = "right"

    def __init__(self, min_match: int) -> None:
        self._ids: list[int] = []
        self._rng = np.random.default_rng(min_match)

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def propose(self, new_ids, most):
        self._ids += new_ids
        prompt = next(prompt for prompt in self.truth if tuple(self._ids[: len(prompt)]) == prompt)
        begin = len(self._ids) - len(prompt)
        following = self.truth[prompt][begin : begin + most]
        wrong = {"right": 0.0, "wrong": 1.0, "random": 0.3}[self.kind]
        proposed = [(i + 1) % VOCABULARY if self._rng.random() < wrong else i for i in following]
        return Draft(proposed, len(self._ids)) if proposed else None


class OnlyEven:
    """A filter that lets even tokens pass, and odd ones after every third."""

    def __init__(self) -> None:
        self._count = 0

    def _allows(self, number: int, token_id: int) -> bool:
        return token_id % 2 == int(number % 3 == 2)

    def restrict(self, logits):
        return np.where(np.arange(len(logits)) % 2 == int(self._count % 3 == 2), logits, -np.inf).astype(np.float32)

    def accept(self, token_id):
        assert self._allows(self._count, token_id)
        self._count += 1

    def num_allowed(self, token_ids):
        return next((i for i, t in enumerate(token_ids) if not self._allows(self._count + i, t)), len(token_ids))


def mixed_requests(policy: DepthPolicy) -> list[Request]:
    """Requests that sample, stop and end in every way, with prompts in which something repeats."""
    sampled = {"temperature": 0.7, "top_p": 0.95}
    params = [
        SamplingParams(max_tokens=TOKENS),
        SamplingParams(max_tokens=TOKENS, logprobs=3),
        SamplingParams(max_tokens=TOKENS, seed=1, **sampled),
        SamplingParams(max_tokens=TOKENS, seed=2, temperature=1.5, logprobs=1),
        SamplingParams(max_tokens=TOKENS, seed=3, repetition_penalty=1.3, presence_penalty=0.5, **sampled),
        SamplingParams(max_tokens=7, logit_bias={5: 20.0}),
        SamplingParams(max_tokens=TOKENS, stop_token_ids=list(range(0, VOCABULARY, 9))),
        SamplingParams(max_tokens=TOKENS, seed=4, **sampled),
    ]
    prompts = [[*random_prompt(i, 5 + i), *random_prompt(90, 4), 7, *random_prompt(90, 4)] for i in range(len(params))]
    filters = [None] * 7 + [OnlyEven]
    return [
        Request(prompt, one, policy, token_filter=token_filter)
        for prompt, one, token_filter in zip(prompts, params, filters, strict=True)
    ]


def finished(engine: Engine, requests: list[Request]) -> list[tuple]:
    """Ids, depths, finish reasons and log-probabilities of requests that run together."""
    sequences = [engine.add(request) for request in requests]
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()
    return [
        (s.completion_ids, [o.depth for o in s.outputs], s.finish_reason, [o.logprobs for o in s.outputs])
        for s in sequences
    ]


def check_same(outputs: list[tuple], expected: list[tuple]) -> None:
    for (ids, depths, reason, logprobs), (true_ids, true_depths, true_reason, true_logprobs) in zip(
        outputs, expected, strict=True
    ):
        assert (ids, depths, reason) == (true_ids, true_depths, true_reason)
        for one, other in zip(logprobs, true_logprobs, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
                assert list(one.top) == list(other.top)


def with_drafting(requests: list[Request], **options) -> list[Request]:
    """The requests with windows of different sizes."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16]
    return [replace(r, drafting=Drafting(max_tokens=n, **options)) for r, n in zip(requests, sizes, strict=True)]


@pytest.fixture(scope="module")
def undrafted(tiny_llama):
    """What requests under a policy give without drafts, what may be used again of them, and then their follow-ups."""

    @cache
    def undrafted(kind: str, policy: DepthPolicy):
        requests = mixed_requests(policy)
        engine = Engine(make_backend(kind, tiny_llama.load(), num_slots=8))
        outputs = finished(engine, requests)
        kept = [tuple(ids) for ids in engine.slots.kept]
        asked = zip(requests, outputs, strict=True)
        follow_up = [Request([*r.prompt_ids, *ids, 9, 8], r.params, policy) for r, (ids, *_) in asked]
        return requests, outputs, kept, follow_up, finished(engine, follow_up)

    return undrafted


@BACKENDS
@pytest.mark.parametrize("name", ["full", "d3", "healed"])
@pytest.mark.parametrize("drafter", ["right", "wrong", "random", "ngram", "policy"])
def test_drafts_change_nothing(tiny_llama, undrafted, kind, name, drafter, monkeypatch):
    """Eight requests at a time, each with windows of another size; also with adapters in policy and drafter."""
    loaded, policy = tiny_llama.load(), {"full": FULL}.get(name, DepthPolicy.d3(6, 0.97, skip_order=[4, 1, 2]))
    drafts_with = DRAFTER
    if name == "healed":
        policy, drafts_with = (with_adapters(plain, loaded.config.hidden_size) for plain in (policy, DRAFTER))
    requests, expected, kept, follow_up, then_expected = undrafted(kind, policy)
    options = (
        {"kind": "policy", "policy": drafts_with, "min_probability": 0.0} if drafter == "policy" else {"kind": "ngram"}
    )
    if drafter in ("right", "wrong", "random"):
        truth = {tuple(r.prompt_ids): ids for r, (ids, *_) in zip(requests, expected, strict=True)}
        monkeypatch.setattr(Oracle, "truth", truth)
        monkeypatch.setattr(Oracle, "kind", drafter)
        monkeypatch.setattr(sequence_module, "NgramDrafter", Oracle)
    engine = Engine(make_backend(kind, loaded, num_slots=8))
    drafted = with_drafting(requests, always=True, min_match=2, **options)
    check_same(finished(engine, drafted), expected)
    assert [tuple(ids) for ids in engine.slots.kept] == kept, "what may be used again is the same"
    check_same(finished(engine, follow_up), then_expected)


def test_true_drafts_take_fewer_forwards_and_false_ones_no_more(tiny_llama, monkeypatch):
    loaded = tiny_llama.load()
    request = Request(random_prompt(3), SamplingParams(max_tokens=33), FULL)
    (expected,) = Engine(make_backend("ggml", loaded)).complete([request])
    monkeypatch.setattr(Oracle, "truth", {tuple(request.prompt_ids): expected})
    monkeypatch.setattr(sequence_module, "NgramDrafter", Oracle)
    forwards = {}
    for kind in ("right", "wrong"):
        monkeypatch.setattr(Oracle, "kind", kind)
        engine = Engine(make_backend("ggml", loaded))
        (drafted,) = with_size([request], 7)
        sizes = []
        run = engine.backend.forward
        engine.backend.forward = lambda batch, run=run, sizes=sizes: sizes.append(len(batch.tokens)) or run(batch)
        assert engine.complete([drafted]) == [expected]
        forwards[kind] = len(sizes)
    assert forwards == {"right": 1 + 32 // 8, "wrong": 33}


def with_size(requests: list[Request], size: int, **options) -> list[Request]:
    drafting = Drafting("ngram", max_tokens=size, always=True, **options)
    return [replace(request, drafting=drafting) for request in requests]


def test_forwards_that_prepare_something_are_not_what_later_ones_take(tiny_llama, monkeypatch):
    backend = make_backend("ggml", tiny_llama.load(), num_slots=8)
    forward = backend.forward
    for prepares in (True, False):
        monkeypatch.setattr(
            backend, "forward", lambda batch, prepared=prepares: replace(forward(batch), prepared=prepared)
        )
        engine = Engine(backend)
        finished(engine, with_drafting(mixed_requests(FULL), kind="ngram", always=True))
        assert (not engine.planner._times) == prepares


@pytest.mark.parametrize(
    "family",
    [name if name in REPRESENTATIVE else pytest.param(name, marks=pytest.mark.ci) for name in PLAIN | FAMILIES],
)
def test_drafts_change_nothing_in_any_family(family, tmp_path):
    """With drafts of both kinds, of 5 and of 16 tokens, beside each other."""
    architecture, options = (PLAIN | FAMILIES)[family]
    tiny = make_tiny(tmp_path, architecture, **options)
    loaded = tiny.load()
    layers = loaded.config.num_hidden_layers
    chosen = [policies(layers)["d3"], *([DepthPolicy.full(layers)] if family in REPRESENTATIVE else [])]
    for kind in ("ggml", "torch"):
        for policy in chosen:
            requests = [
                Request([*random_prompt(80, 20), *random_prompt(80, 20)], params, policy)
                for params in (SamplingParams(max_tokens=16), SamplingParams(max_tokens=16, temperature=0.8, seed=6))
            ]
            expected = finished(Engine(make_backend(kind, loaded, num_slots=2)), requests)
            drafter = DepthPolicy.static(layers, layers - 2, policies(layers)["d3"].skip_order)
            predicts = Drafting("policy", max_tokens=16, min_probability=0.0, policy=drafter, always=True)
            copies = Drafting("ngram", max_tokens=5, min_match=1, always=True)
            engine = Engine(make_backend(kind, loaded, num_slots=4))
            drafted = [replace(r, drafting=drafting) for drafting in (copies, predicts) for r in requests]
            check_same(finished(engine, drafted), [*expected, *expected])


@pytest.mark.parametrize("when", range(1, 40, 3))
def test_an_interrupt_inside_a_window_loses_and_repeats_nothing(tiny_llama, monkeypatch, when):
    loaded, requests = tiny_llama.load(), mixed_requests(FULL)[2:5]
    expected = finished(Engine(make_backend("ggml", loaded, num_slots=3)), requests)
    truth = {tuple(r.prompt_ids): ids for r, (ids, *_) in zip(requests, expected, strict=True)}
    monkeypatch.setattr(Oracle, "truth", truth)
    monkeypatch.setattr(sequence_module, "NgramDrafter", Oracle)
    calls, sample = count(1), engine_module.sample

    def interrupted(*arguments):
        if next(calls) == when:
            raise KeyboardInterrupt
        return sample(*arguments)

    monkeypatch.setattr(engine_module, "sample", interrupted)
    engine = Engine(make_backend("ggml", loaded, num_slots=3))
    sequences = [engine.add(request) for request in with_size(requests, 6)]
    while any(sequence.finish_reason is None for sequence in sequences):
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
    assert [sequence.completion_ids for sequence in sequences] == [ids for ids, *_ in expected]


def test_the_end_of_the_context_ends_a_window(tiny_llama, monkeypatch):
    loaded = tiny_llama.load()
    request = Request(random_prompt(4, 20), SamplingParams(max_tokens=500), FULL)
    expected = finished(Engine(make_backend("ggml", loaded, context_length=40)), [request])
    assert expected[0][2] == "length"
    monkeypatch.setattr(Oracle, "truth", {tuple(request.prompt_ids): [*expected[0][0], 1, 2, 3, 4, 5, 6]})
    monkeypatch.setattr(sequence_module, "NgramDrafter", Oracle)
    engine = Engine(make_backend("ggml", loaded, context_length=40))
    check_same(finished(engine, with_size([request], 6)), expected)


def test_an_aborted_sequence_leaves_others_as_they_are(tiny_llama):
    loaded, requests = tiny_llama.load(), mixed_requests(FULL)[:3]
    expected = finished(Engine(make_backend("ggml", loaded, num_slots=3)), requests)
    engine = Engine(make_backend("ggml", loaded, num_slots=3))
    sequences = [engine.add(request) for request in with_size(requests, 6, min_match=1)]
    for _ in range(4):
        engine.step()
    engine.abort(sequences[1])
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()
    ends = [sequence.completion_ids for sequence in sequences]
    assert ends[::2] == [expected[0][0], expected[2][0]]
    assert ends[1] == expected[1][0][: len(ends[1])]


# Which tokens are worth verifying


def planner(times: dict[int, float]) -> Planner:
    planner = Planner()
    for size, seconds in times.items():
        planner.note_forward(size, seconds)
    return planner


def draft(length: int, match: int = 8) -> Draft:
    return Draft(list(range(length)), match)


def certain(is_right: bool) -> Record:
    record = Record()
    for _ in range(200):
        record.note(is_right)
    return record


def test_as_many_tokens_are_verified_as_the_clock_pays_for():
    dear = planner({n: n * 0.9 for n in range(1, 18)})
    cheap = planner({n: 1 + 0.1 * n for n in range(1, 18)})
    assert dear.plan([(draft(16), Record())], 1) == [0]
    assert cheap.plan([(draft(16), certain(True))], 1) == [16]
    assert cheap.plan([(draft(16), certain(False))], 1) == [0]
    steps = planner({n: 1.0 if n <= 4 else 9.0 for n in range(1, 18)})
    assert steps.plan([(draft(16), certain(True))], 1) == [3]


def test_a_batch_spends_its_tokens_where_they_come_true():
    clock = planner({n: 1.0 if n <= 8 else 9.0 for n in range(1, 40)})
    records = [certain(False), certain(True), certain(True)]
    counts = clock.plan([(draft(16), record) for record in records], 3)
    assert counts[0] == 0
    assert sum(counts) == 5
    assert abs(counts[1] - counts[2]) <= 1


def test_nothing_is_verified_before_the_clock_knows_a_step_and_sizes_are_tried_by_doubling():
    clock = Planner()
    assert clock.plan([(draft(16), certain(True))], 1) == [0]
    clock.note_forward(1, 1.0)
    tried = [1]
    while tried[-1] < 17:
        (more,) = clock.plan([(draft(16), certain(True))], 1)
        assert 1 < 1 + more <= 2 * tried[-1]
        tried.append(1 + more)
        clock.note_forward(1 + more, 1 + 0.01 * more)
    assert tried == [1, 2, 4, 8, 16, 17]


def test_a_size_that_was_slow_by_chance_is_tried_again(monkeypatch):
    monkeypatch.setattr("taper.engine.drafting.STALE", 50)
    clock = planner({1: 1.0, 2: 1.1})
    for size in (3, 4):
        clock.note_forward(size, 20.0)
    for _ in range(48):
        clock.note_forward(1, 1.0)
        clock.note_forward(2, 1.1)
    assert clock.plan([(draft(3), certain(True))], 1) == [3]


@given(st.lists(st.booleans(), max_size=100))
def test_a_chance_is_a_probability_and_follows_what_came_true(history):
    clock, own = Planner(), Record()
    for is_right in history:
        clock.note_token(9, own, is_right)
    assert 0 <= clock.chance(9, own) <= 1
    before = clock.chance(9, own)
    clock.note_token(9, own, True)
    assert clock.chance(9, own) >= before


def test_tokens_that_were_not_verified_count_too(tiny_llama, monkeypatch):
    """So a drafter that is always right is used although its proposals did not pay at first."""
    request = Request(random_prompt(5), SamplingParams(max_tokens=20), FULL, drafting=Drafting("ngram"))
    engine = Engine(make_backend("ggml", tiny_llama.load()))
    (expected,) = engine.complete([request])
    monkeypatch.setattr(Oracle, "truth", {tuple(request.prompt_ids): expected})
    monkeypatch.setattr(sequence_module, "NgramDrafter", Oracle)
    engine = Engine(make_backend("ggml", tiny_llama.load()))
    monkeypatch.setattr(engine.planner, "plan", lambda drafts, num_tokens: [0] * len(drafts))
    sequence = engine.add(request)
    while sequence.finish_reason is None:
        engine.step()
    assert sequence.num_drafted == 0
    assert sequence.drafts.chance() > 0.9


def test_a_policy_proposes_only_where_it_could_pay():
    dear, cheap = planner({1: 1.0, 2: 1.9}), planner({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0})
    for clock in (dear, cheap):
        clock.note_draft(0.2)
    assert dear.plan_predictions(certain(True), 1, 4, is_probe=True) == 0
    assert cheap.plan_predictions(certain(True), 1, 4, is_probe=False) == 4
    assert cheap.plan_predictions(certain(False), 1, 4, is_probe=False) == 0
    assert cheap.plan_predictions(certain(False), 1, 4, is_probe=True) == 1


# Bits


def test_the_width_up_to_which_tokens_round_like_single_ones(tiny_llama, monkeypatch):
    engine = Engine(make_backend("torch", tiny_llama.load(), num_slots=2, context_length=700))
    run = engine.backend.forward

    def rounding(batch):
        """Rows of a window, alone, give the same bits up to four."""
        parts = [run(one(batch, row)) for row in range(len(batch.tokens))] if len(batch.tokens) <= 17 else [run(batch)]
        logits = np.concatenate([part.logits for part in parts])
        return type(parts[0])(logits + np.float32(1e-3) * (4 < len(batch.tokens) <= 17), parts[0].greedy_ids)

    def one(batch, row):
        shared = {"num_active": (1,) * 6, "logits_rows": (0,) if batch.logits_rows else ()}
        return engine_module.TokenBatch(batch.tokens[[row]], batch.positions[[row]], batch.slots[[row]], **shared)

    monkeypatch.setattr(engine.backend, "forward", rounding)
    assert engine.bitwise_width == 4


def test_a_limit_of_width_holds_for_all_sequences_of_a_forward_together(tiny_llama):
    loaded = tiny_llama.load()
    engine = Engine(make_backend("ggml", loaded, num_slots=2))
    requests = [Request([*random_prompt(8, 9), *random_prompt(8, 9)], SamplingParams(max_tokens=20), FULL)] * 2
    sizes, run = [], engine.backend.forward
    engine.backend.forward = lambda batch: sizes.append(len(batch.tokens)) or run(batch)
    engine.complete(with_size(requests, 6, min_match=1, max_width=4))
    assert max(sizes[2:]) == 4


# In words


@pytest.fixture(scope="module")
def llm(tiny_llama) -> LLM:
    return LLM(str(tiny_llama.folder), dtype="f32", context=256, max_batch_size=2, **PLACE)


@pytest.mark.device
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 4}])
def test_exact_mode_gives_the_text_of_full_depth(llm, sampling):
    given = {"max_tokens": 60, "ignore_eos": True, **sampling}
    drafting = Drafting("ngram", min_match=1, always=True)
    for prompt in ("abcabcabcabc", "one two one two one"):
        full = llm.generate(prompt, mode="full", **given)
        exact = llm.generate(prompt, mode="exact", draft=drafting, **given)
        assert (exact.text, exact.token_ids, exact.depths) == (full.text, full.token_ids, full.depths)
        assert exact.drafted_tokens >= exact.accepted_tokens
        assert exact.drafted_tokens > 0 == full.drafted_tokens
        stop = full.text[9:12]
        with_stop = [llm.generate(prompt, mode=m, stop=stop, **given) for m in ("full", "exact")]
        assert with_stop[0].text == with_stop[1].text
        assert with_stop[0].token_ids == with_stop[1].token_ids


@pytest.mark.device
def test_chunks_say_which_tokens_had_been_proposed(llm):
    drafting = Drafting("ngram", min_match=1, always=True)
    chunks = list(llm.stream("abcabcabcabc", mode="exact", draft=drafting, max_tokens=40, ignore_eos=True))
    assert sum(chunk.is_drafted for chunk in chunks) == chunks[-1].output.accepted_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "guess"}, "draft is 'guess'"),
        ({"draft": "policy"}, "no policy to draft with"),
        ({"mode": "exact", "policy": "full"}, "cannot draft"),
        ({"mode": "perfect"}, "mode"),
    ],
)
def test_what_cannot_draft_is_rejected(llm, options, message):
    with pytest.raises(RequestError, match=message):
        llm.generate("a", **options)


@pytest.mark.parametrize("limits", [{"max_tokens": 0}, {"max_tokens": 65}, {"min_match": 0}, {"min_probability": 2}])
def test_limits_of_drafts_have_ranges(limits):
    with pytest.raises(RequestError, match="draft_"):
        Drafting(**limits)


def run(folder, *options: str, code: int = 0) -> str:
    arguments = [
        "generate",
        "abcabcabcabc",
        "-m",
        str(folder),
        "--dtype",
        "f32",
        "-t",
        "1",
        "-n",
        "20",
        "--temp",
        "0",
        *options,
    ]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else str(result.exception)


def test_the_command_line_drafts(tiny_llama):
    exact = json.loads(run(tiny_llama.folder, "--mode", "exact", "--json", "--draft-min-match", "2"))
    full = json.loads(run(tiny_llama.folder, "--mode", "full", "--json"))
    assert exact["text"] == full["text"]
    assert (exact["mode"], full["drafted_tokens"]) == ("full", 0)
    assert "does nothing" in run(tiny_llama.folder, "--draft-max", "3", code=1)
    assert "does nothing" in run(tiny_llama.folder, "--draft", "ngram", "--draft-p-min", "0.1", code=1)
    assert "does nothing" in run(tiny_llama.folder, "--exact-bits", code=1)
