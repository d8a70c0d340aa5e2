"""Text in, text out: stop strings, streaming, batches, the modes, and what an output says."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from conftest import VOCAB_SIZE

from taper import LLM, DepthPolicy, SamplingParams
from taper.errors import PolicyError, RequestError, TaperWarning

TAPERED = DepthPolicy.d3(6, 0.95, skip_order=[4, 1, 2])
PROMPTS = ["one", "a longer prompt, number two", [{"role": "user", "content": "three"}]]


@pytest.fixture(scope="module")
def llm(tiny_llama) -> LLM:
    return LLM(str(tiny_llama.folder), dtype="f32", threads=1, context=256, max_batch_size=2)


def answer(llm, prompt="tell me", policy=TAPERED, **options):
    """A random model may come upon its stop id at any step, so it is ignored unless a test asks for it."""
    return llm.generate(prompt, SamplingParams(**{"max_tokens": 30, "ignore_eos": True, **options}), policy=policy)


def test_output_counts_what_happened(llm):
    output = answer(llm)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == output.completion_tokens == len(output.depths) == 30
    assert output.depths == [TAPERED.depth(step) for step in range(30)]
    assert output.mean_depth == pytest.approx(TAPERED.mean_depth(30))
    assert output.prompt_tokens == len(llm.encode("tell me"))
    assert output.text == llm.tokenizer.decode(output.token_ids)
    assert output.ttft_s > 0
    assert output.tokens_per_second > 0
    assert output.logprobs is None


def test_stream_adds_up_to_generate(llm):
    chunks = list(llm.stream("tell me", SamplingParams(max_tokens=30, ignore_eos=True), policy=TAPERED))
    output = answer(llm)
    assert [chunk.token_id for chunk in chunks] == output.token_ids
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert [chunk.output is None for chunk in chunks] == [True] * 29 + [False]


def test_a_list_of_prompts_equals_each_alone(llm):
    together = llm.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True), policy=TAPERED)
    assert [output.text for output in together] == [answer(llm, p, max_tokens=20).text for p in PROMPTS]


def test_a_stop_id_is_counted_but_not_kept(llm):
    full = answer(llm)
    stop = full.token_ids[12]
    first = full.token_ids.index(stop)
    output = answer(llm, stop_token_ids=[stop])
    assert output.finish_reason == "stop"
    assert output.token_ids == full.token_ids[:first]
    assert len(output.depths) == first


def test_the_models_own_stop_ids_end_an_answer_unless_ignored(llm, monkeypatch):
    free = answer(llm)
    monkeypatch.setattr(llm.tokenizer, "stop_ids", frozenset({free.token_ids[5]}))
    ended = answer(llm, ignore_eos=False)
    assert ended.finish_reason == "stop"
    assert ended.token_ids == free.token_ids[: len(ended.token_ids)]
    assert len(ended.token_ids) <= 5
    assert answer(llm).token_ids == free.token_ids


def test_stop_strings_end_the_text_before_them(llm):
    text = answer(llm).text
    for stop in (text[3:5], text[7:8], text[-4:]):
        output = answer(llm, stop=[stop, "never there"])
        assert output.finish_reason == "stop"
        assert output.text == text[: text.find(stop)]


def test_streams_never_show_the_start_of_a_stop_string(llm):
    text = answer(llm).text
    stop = text[6:10]
    shown = ""
    for chunk in llm.stream("tell me", SamplingParams(max_tokens=30, stop=stop, ignore_eos=True), policy=TAPERED):
        shown += chunk.text
        assert shown == text[: len(shown)]
        assert len(shown) <= text.find(stop)
    assert shown == text[: text.find(stop)]


def test_a_half_stop_string_at_the_end_is_given_out(llm):
    text = answer(llm).text
    output = answer(llm, stop=text[-3:] + "never there")
    assert (output.text, output.finish_reason) == (text, "length")


def test_the_context_ends_an_answer(tiny_llama):
    llm = LLM(str(tiny_llama.folder), dtype="f32", threads=1, context=64)
    output = answer(llm, "abc", max_tokens=500)
    assert output.finish_reason == "length"
    assert output.prompt_tokens + output.completion_tokens == 64


def test_seeds_repeat_and_rows_of_a_batch_sample_as_alone(llm):
    options = {"temperature": 1.0, "seed": 7, "top_k": 50, "repetition_penalty": 1.1, "max_tokens": 15}
    alone = answer(llm, **options)
    assert alone.token_ids == answer(llm, **options).token_ids
    assert alone.token_ids != answer(llm, **{**options, "seed": 8}).token_ids
    batch = llm.generate(["other", "tell me"], SamplingParams(**options, ignore_eos=True), policy=TAPERED)
    assert batch[1].token_ids == alone.token_ids


def test_logprobs_are_those_of_the_model(llm, tiny_llama):
    output = answer(llm, policy=DepthPolicy.full(6), logprobs=3, temperature=1.5, seed=1, repetition_penalty=1.5)
    ids = torch.tensor([llm.encode("tell me") + output.token_ids])
    with torch.no_grad():
        expected = tiny_llama.hf(ids).logits[0, output.prompt_tokens - 1 :].log_softmax(-1)
    for step, (token_id, logprobs) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert logprobs.logprob == pytest.approx(expected[step, token_id].item(), abs=1e-3)
        assert list(logprobs.top) == expected[step].topk(3).indices.tolist()


def test_slots_are_free_again_after_a_stream_is_left(llm):
    for _ in range(5):
        stream = llm.stream(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True), policy=TAPERED)
        next(stream)
        stream.close()
    assert len(llm.engine._kept) == 2
    assert answer(llm).completion_tokens == 30


def test_a_request_without_a_free_slot_is_refused_not_waited_for(llm):
    held = [llm.stream("tell me", SamplingParams(max_tokens=9, ignore_eos=True), policy=TAPERED) for _ in range(3)]
    next(held[0])
    next(held[1])
    with pytest.raises(RequestError, match="slots"):
        next(held[2])
    for stream in held:
        stream.close()
    assert len(llm.engine._kept) == 2


def test_interrupts_end_an_answer_with_what_was_made(llm, monkeypatch):
    steps, run = [], llm.engine.backend.forward

    def forward(batch):
        steps.append(batch)
        if len(steps) == 8:
            raise KeyboardInterrupt
        return run(batch)

    whole = answer(llm)
    monkeypatch.setattr(llm.engine.backend, "forward", forward)
    output = answer(llm)
    assert output.finish_reason == "abort"
    assert output.token_ids == whole.token_ids[:7]
    monkeypatch.undo()
    assert answer(llm).token_ids == whole.token_ids


def test_an_interrupt_between_tokens_is_handed_in_by_throw(llm):
    stream = llm.stream("tell me", SamplingParams(max_tokens=30, ignore_eos=True), policy=TAPERED)
    next(stream)
    chunk = stream.throw(KeyboardInterrupt())
    assert chunk.output.finish_reason == "abort"
    assert len(chunk.output.token_ids) == 1


def test_modes_choose_policies(llm):
    assert llm.resolve_policy(mode="full") == DepthPolicy.full(6)
    with pytest.warns(TaperWarning, match="running every layer"):
        assert llm.resolve_policy() == DepthPolicy.full(6)
    with pytest.raises(PolicyError, match="fits"):
        llm.resolve_policy(mode="taper")
    with pytest.raises(RequestError, match="takes no policy"):
        llm.resolve_policy(TAPERED, "full")
    with pytest.raises(RequestError, match="mode"):
        llm.resolve_policy(mode="exact")
    with pytest.raises(PolicyError, match="no policy"):
        llm.resolve_policy("nonsense")
    with pytest.raises(PolicyError, match="layers"):
        llm.resolve_policy(DepthPolicy.full(7))


def test_policy_files_are_read_by_path(llm, tmp_path):
    (tmp_path / "own.json").write_text(TAPERED.to_json())
    assert llm.resolve_policy(str(tmp_path / "own.json")) == TAPERED


def test_a_shipped_policy_that_fits_is_the_default(llm, monkeypatch):
    monkeypatch.setattr(llm, "shipped_policies", lambda: {"balanced": TAPERED})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert llm.resolve_policy() == TAPERED


@pytest.mark.parametrize(
    "prompt", ["", "  \n", [], [{"role": "user"}], [{"role": "user", "content": ""}], [{"content": "x"}], ["a", ""]]
)
def test_prompts_that_are_none_are_refused(llm, prompt):
    with pytest.raises(RequestError):
        llm.generate(prompt, policy=TAPERED)


def test_a_prompt_longer_than_the_context_is_refused(llm):
    with pytest.raises(RequestError, match="context"):
        llm.generate("x" * 300, policy=TAPERED)


def test_raw_text_is_taken_as_it_is(llm):
    assert llm.encode("ab", raw=True) == llm.tokenizer.encode("ab")
    assert len(llm.encode("ab")) > 2
    with pytest.raises(RequestError, match="raw"):
        llm.encode([{"role": "user", "content": "x"}], raw=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "tpu"}, "device"),
        ({"dtype": "int3"}, "dtype"),
        ({"context": 0}, "context"),
        ({"context": 10**6}, "trained for"),
        ({"threads": 0}, "threads"),
        ({"max_batch_size": 0}, "max_batch_size"),
    ],
)
def test_options_out_of_range_are_refused(tiny_llama, options, says):
    with pytest.raises(RequestError, match=says):
        LLM(str(tiny_llama.folder), **options)


def test_cuda_without_pytorch_names_what_to_install(tiny_llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "taper.backends.torch", None)  # as if its import of torch had failed
    with pytest.raises(RequestError, match="pip install"):
        LLM(str(tiny_llama.folder), device="cuda")


@pytest.mark.parametrize("dtype", ["auto", "f16", "bf16", "q8_0"])
def test_weights_convert_when_loading_and_stay_close(tiny_llama, dtype):
    prompt = list(range(3, 40))
    exact = LLM(str(tiny_llama.folder), dtype="f32", threads=1, context=64)
    other = LLM(str(tiny_llama.folder), dtype=dtype, threads=1, context=64)
    one, two = (next(iter(llm.engine.generate_step([request_of(llm, prompt)]))).logprobs.top for llm in (exact, other))
    shared = set(one) & set(two)
    assert len(shared) > 10
    assert all(abs(one[i] - two[i]) < 0.3 for i in shared)


def request_of(llm, prompt):
    from taper.engine import Request

    assert llm.config.vocab_size == VOCAB_SIZE
    return Request(prompt, SamplingParams(logprobs=20), DepthPolicy.full(6))
