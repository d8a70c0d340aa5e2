"""The output head in two steps: a preview of all logits, and the exact ones of a shortlist."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from tiny import FAMILIES, NOT_IN_GGUF, PLAIN, make_tiny, policies, write_gguf

from taper import LLM, RequestError, SamplingParams, TaperWarning
from taper.backends import TokenBatch, open_backend
from taper.backends.ggml import GgmlBackend, shortlist
from taper.engine import Engine, Request
from taper.models import load_model, preview
from taper.policy import DepthPolicy

LAYERS, CONTEXT = 6, 300
PROMPT = list(range(40, 90))


@pytest.fixture(scope="module")
def tiny_file(tiny_llama, tmp_path_factory):
    path = tmp_path_factory.mktemp("head") / "tiny.gguf"
    write_gguf(path, tiny_llama)
    return path


def opened(path, head="shortlist", margin=None, **options):
    """A backend with a preview whose margin is as given."""
    options = {"context_length": CONTEXT, "num_slots": 4, "threads": 1} | options
    backend = open_backend(load_model(path), device="cpu", head=head, **options)
    if margin is not None:
        use_margin(backend, path, margin, options.get("dtype", "auto"))
    return backend


def use_margin(backend, path, margin, dtype="auto"):
    """Let a backend have the preview that is kept, with another margin."""
    found = preview.find_preview(load_model(path), dtype)
    backend.use_preview(shortlist.PreviewTensors(replace(found, margin=margin), 1))


def completions(backend, policy=None, n=3, token_filter=None, **params):
    """The completions of some prompts together."""
    policy = policy or DepthPolicy.full(backend.config.num_hidden_layers)
    params = {"max_tokens": 20, "seed": 3} | params
    requests = [
        Request(PROMPT[: 30 + 5 * k], SamplingParams(**params), policy, token_filter=token_filter) for k in range(n)
    ]
    return Engine(backend).complete(requests)


SAMPLINGS = {
    "greedy": {},
    "top k": {"temperature": 1.0, "top_k": 8},
    "cold": {"temperature": 0.3, "top_p": 0.9},
    "penalties": {"temperature": 0.5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "greedy with penalties": {"repetition_penalty": 1.5},
    "bias": {"temperature": 0.5, "logit_bias": {7: 5.0, 8: -100.0, 299: 3.0}},
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_a_shortlist_that_holds_every_token_gives_the_tokens_of_the_whole_head(tiny_file, dtype, sampling):
    """With a margin of a thousand, whatever the preview says: only the plumbing is tested."""
    whole = opened(tiny_file, head="full", dtype=dtype)
    listed = opened(tiny_file, dtype=dtype, margin=1e3)
    assert (whole.has_preview, listed.has_preview) == (False, True)
    for policy in (None, policies(LAYERS)["d3"]):
        expected = completions(whole, policy, **SAMPLINGS[sampling])
        assert completions(listed, policy, **SAMPLINGS[sampling]) == expected


@pytest.mark.ci
@pytest.mark.parametrize("name", [*PLAIN, *(name for name in FAMILIES if name not in NOT_IN_GGUF)])
def test_every_family_has_previews(name, tmp_path):
    architecture, options = (PLAIN | FAMILIES)[name]
    model = make_tiny(tmp_path / "model", architecture, **options)
    whole, listed = opened(model.folder, head="full", dtype="f32"), opened(model.folder, dtype="f32", margin=1e3)
    assert completions(listed, n=2) == completions(whole, n=2)
    previewed = _previewed(listed).previews[1]
    whole_logits = previewed.whole()
    assert np.corrcoef(previewed.approximate, whole_logits)[0, 1] > 0.5  # of half of the dimensions, in four bits
    # Penalties depend on the sign of a logit, so the approximations are not just right up to a number added to all.
    assert abs((previewed.approximate - whole_logits).mean()) < 0.05 * abs(whole_logits).max()


def _previewed(backend, tokens=PROMPT):
    count = len(tokens)
    rows, active = (count - 2, count - 1), (count,) * backend.config.num_hidden_layers
    arrays = np.array(tokens, np.int32), np.arange(count, dtype=np.int32), np.zeros(count, np.int32)
    return backend.forward(TokenBatch(*arrays, active, logits_rows=rows, preview_rows=rows, shortlist=True))


@pytest.mark.parametrize("dtype", ["f32", "q8_0", "q4_k"])
def test_exact_logits_have_the_bits_of_the_whole_head(tiny_file, dtype):
    backend = opened(tiny_file, dtype=dtype)
    output = _previewed(backend)
    for previewed in output.previews:
        whole = previewed.whole()
        for size in (1, 2, 255, 256, 257, len(whole)):
            ids = np.sort(np.random.default_rng(size).choice(len(whole), size, replace=False))
            assert previewed.exact(ids).tobytes() == whole[ids].tobytes()
    assert np.abs(output.previews[1].whole() - output.logits[1]).max() < 1e-3


def test_a_shortlist_holds_the_tokens_within_the_margin_or_the_reach(tiny_file):
    backend = opened(tiny_file, margin=1.0)
    _, previewed = _previewed(backend).previews
    above = previewed.approximate.max() - previewed.approximate
    for reach, margin in ((0.0, 1.0), (0.5, 1.0), (2.0, 2.0)):
        ids, logits = previewed.shortlist(reach)
        assert ids.tolist() == np.flatnonzero(above <= margin).tolist()
        assert logits.tobytes() == previewed.exact(ids).tobytes()
    previewed.approximate[:] = np.nan
    assert previewed.shortlist() is None


def test_a_head_that_is_no_number_ends_the_output(tiny_file, monkeypatch):
    backend = opened(tiny_file)
    monkeypatch.setattr(shortlist.Previewed, "_within", lambda *_: None)
    monkeypatch.setattr(shortlist.Previewed, "whole", lambda self: np.full_like(self.approximate, np.nan))
    engine = Engine(backend)
    for params in (SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, temperature=0.5, top_k=5)):
        sequence = engine.add(Request(PROMPT, params, DepthPolicy.full(LAYERS)))
        while sequence.finish_reason is None:
            engine.step()
        assert sequence.finish_reason == "error"


def test_too_many_tokens_within_the_margin_mean_the_whole_head(tiny_file, monkeypatch):
    whole, listed = opened(tiny_file, head="full"), opened(tiny_file, margin=1e3)
    monkeypatch.setattr(shortlist, "MAX_TOKENS", 5)
    monkeypatch.setattr(shortlist.HeadProducts, "exact", None)  # never asked for
    for sampling in SAMPLINGS.values():
        assert completions(listed, **sampling) == completions(whole, **sampling)


class Allowing:
    """A filter that allows these tokens."""

    def __init__(self, ids):
        self.ids = ids

    def restrict(self, logits):
        restricted = np.full_like(logits, -math.inf)
        restricted[self.ids] = logits[self.ids]
        return restricted

    def accept(self, token_id):
        assert token_id in self.ids

    def num_allowed(self, token_ids):
        return next((count for count, token_id in enumerate(token_ids) if token_id not in self.ids), len(token_ids))


@pytest.mark.parametrize("sampling", ["greedy", "top k", "penalties"])
def test_banned_tokens_do_not_hide_allowed_ones(tiny_file, sampling, monkeypatch):
    """Even with no margin at all: what a filter allows is computed exactly, or with the whole head if it is much."""
    whole, listed = opened(tiny_file, head="full"), opened(tiny_file, margin=0.0)
    for ids, most in (([3, 100, 250], 1024), (list(range(200)), 20)):
        monkeypatch.setattr("taper.engine.MAX_ALLOWED", most)
        options = {"token_filter": lambda ids=ids: Allowing(ids), **SAMPLINGS[sampling]}
        assert completions(listed, **options) == completions(whole, **options)
    banned = dict.fromkeys(range(50, 300), -100.0)
    use_margin(listed, tiny_file, 30.0)
    assert completions(listed, logit_bias=banned) == completions(whole, logit_bias=banned)


# What a request is given, and whether its logits may come from a shortlist.
ASKED = {
    "greedy": ({}, True),
    "greedy with penalties": ({"repetition_penalty": 1.2}, True),
    "log-probabilities": ({"logprobs": 0}, False),
    "hot": ({"temperature": 1.01, "top_k": 10}, False),
    "few tokens": ({"temperature": 1.0, "top_k": 64}, True),
    "many tokens": ({"temperature": 1.0, "top_k": 65}, False),
    "min_p": ({"temperature": 1.0, "min_p": 0.05}, True),
    "a low min_p": ({"temperature": 1.0, "min_p": 0.001}, False),
    "min_p after top_p": ({"temperature": 1.0, "min_p": 0.05, "top_p": 0.9}, False),
    "the whole distribution": ({"temperature": 1.0}, False),
    "cold": ({"temperature": 0.2, "top_p": 0.9}, True),
}


@pytest.mark.parametrize("asked", ASKED)
def test_who_gets_logits_of_the_whole_head(tiny_file, asked, monkeypatch):
    params, is_listed = ASKED[asked]
    monkeypatch.setattr("taper.engine.batches.MAX_REACH", 5.0)  # small, as the vocabulary is
    backend, batches = opened(tiny_file), []
    forward = backend.forward
    monkeypatch.setattr(backend, "forward", lambda batch: (batches.append(batch), forward(batch))[1])
    completions(backend, n=1, max_tokens=3, **params)
    asks = [(bool(batch.logits_rows), bool(batch.preview_rows or batch.greedy_rows)) for batch in batches]
    assert set(asks) == {(not is_listed, is_listed)}
    assert all(batch.shortlist for batch in batches)


def test_with_bits_that_do_not_depend_on_the_batch_the_whole_head_is_computed(tiny_file, monkeypatch):
    backend = opened(tiny_file)
    engine = Engine(backend)
    assert engine.uses_shortlist
    assert engine.bitwise_width >= 1
    assert not engine.uses_shortlist


@pytest.mark.parametrize("sampling", ["greedy", "top k", "penalties"])
def test_exact_mode_gives_the_text_of_the_same_head(tiny_file, sampling):
    prompts = [PROMPT * 2, PROMPT]
    with LLM(tiny_file, head="shortlist", dtype="f32", threads=1, context=CONTEXT) as llm:
        use_margin(llm.engine.backend, tiny_file, 3.0, "f32")
        for prompt in prompts:
            given = {"max_tokens": 40, "ignore_eos": True, "seed": 1} | SAMPLINGS[sampling]
            plain = llm.generate(prompt, mode="full", **given)
            drafted = llm.generate(prompt, mode="exact", draft="ngram", **given)
            assert drafted.token_ids == plain.token_ids


# Where previews come from


def test_a_preview_is_kept_and_made_again_if_it_is_damaged_or_foreign(tiny_file, monkeypatch):
    opened(tiny_file)
    path = preview.previews_folder() / f"{preview.fingerprint(load_model(tiny_file))}-auto.safetensors"
    content = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("taper.backends.ggml.make_preview", None)
        opened(tiny_file)  # from the cache
    header = int.from_bytes(content[:8], "little")
    facts = json.loads(content[8 : 8 + header])
    foreign = content.replace(b'"margin\\": ', b'"nigram\\": ')
    flipped = bytearray(content)
    flipped[8 + header + facts["table"]["data_offsets"][0]] ^= 1
    for damaged in (b"", content[:-1], content[: 8 + header], foreign, bytes(flipped), b"\xff" * 100):
        path.write_bytes(damaged)
        with pytest.warns(TaperWarning, match="is damaged, so it is made again") as warned:
            opened(tiny_file)
        assert len(warned) == 1
        assert path.read_bytes() == content


def test_without_a_cache_a_preview_is_made_each_time(tiny_file, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(preview, "previews_folder", lambda: tmp_path / "file" / "below")
    assert opened(tiny_file).has_preview


def test_models_that_differ_in_weights_have_other_previews(tiny_llama):
    model = load_model(tiny_llama.folder)
    known = preview.fingerprint(model)
    assert preview.fingerprint(load_model(tiny_llama.folder)) == known
    for name, tensor in model.tensors.items():
        data = tensor.data.copy()
        data[len(data) // 2] ^= 1
        assert preview.fingerprint(replace(model, tensors=model.tensors | {name: replace(tensor, data=data)})) != known


def test_shipped_factors_belong_to_named_models():
    for path in preview.factor_files():
        assert preview.read_factors(path)[2] > 0


def test_auto_computes_the_whole_head_of_small_vocabularies_and_of_f32(tiny_file, monkeypatch, tmp_path):
    monkeypatch.setattr(preview, "previews_folder", lambda: tmp_path)
    assert not opened(tiny_file, head="auto").has_preview
    monkeypatch.setattr(GgmlBackend, "_gains_by_preview", lambda _: True)
    assert opened(tiny_file, head="auto", dtype="q8_0").has_preview
    assert not opened(tiny_file, head="auto", dtype="f32").has_preview


@pytest.mark.parametrize("saves_time", [True, False])
def test_whether_a_preview_saves_time_is_kept_with_it(tiny_file, monkeypatch, tmp_path, saves_time):
    monkeypatch.setattr(preview, "previews_folder", lambda: tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(GgmlBackend, "_gains_by_preview", lambda _: saves_time)
        assert opened(tiny_file, head="shortlist", dtype="q8_0").has_preview
    monkeypatch.setattr(GgmlBackend, "_gains_by_preview", None)  # not measured again
    assert opened(tiny_file, head="auto", dtype="q8_0").has_preview == saves_time
    assert opened(tiny_file, head="shortlist", dtype="q8_0").has_preview


def test_a_shortlist_is_computed_by_ggml_where_the_whole_model_lies(tiny_file, monkeypatch):
    with pytest.raises(RequestError, match="head shortlist is not there in PyTorch"):
        LLM(tiny_file, device="cuda", head="shortlist")
    monkeypatch.setattr("taper.backends.choose_device", lambda device: "Vulkan0")
    with pytest.raises(RequestError, match="head shortlist is not there with gpu_layers"):
        LLM(tiny_file, device="vulkan", head="shortlist", gpu_layers=2)
    with pytest.raises(RequestError, match="head is 'some'"):
        LLM(tiny_file, head="some")


def test_sample_texts_are_of_many_kinds():
    texts = preview.sample_texts()
    assert len(texts) > 25
    assert all(len(text) > 100 for text in texts)
    for sample in ("def ", "<html", "SELECT", '{"name"', "春", "は", "서울", "ق", "भ", "й", "„", "ğ", "ł"):
        assert any(sample in text for text in texts)


def test_the_research_measures_misses_ways_and_speed(tiny_file, tmp_path, monkeypatch):
    """Its factors are those of a preview with the margin that they were fitted with."""
    import head

    monkeypatch.setattr(head, "FIT", {"chat": ["Hi", "Why is the sky blue?"], "code": ["Write a loop."]})
    monkeypatch.setattr(head, "CHECK", {"chat": ["Hello", "What is blue?"], "code": ["Sort a list."]})
    monkeypatch.setattr(head, "sample_texts", lambda: preview.sample_texts()[:6])
    monkeypatch.setattr(head, "conditions", lambda path: {"model": path.name})
    results = {}
    for what in ("fit", "check", "frontier", "speed"):
        out = tmp_path / f"{what}.json"
        options = [
            "--threads=1",
            "--max-tokens=20",
            "--rounds=1",
            f"--states={tmp_path / 'states.npz'}",
            "--context=300",
        ]
        head.main([what, str(tiny_file), f"--out={out}", *options])
        results[what] = preview.read_factors(out) if what == "fit" else json.loads(out.read_text())
    known, factors, margin = results["fit"]
    assert known == preview.fingerprint(load_model(tiny_file))
    assert (factors.rotation.shape, margin >= 2) == ((32, 64), True)
    kinds = results["check"]["policies"]["full"]
    assert {kind: row["steps"] > 0 for kind, row in kinds.items()} == {"chat": True, "code": True}
    assert all(0 <= row["total_variation"] <= 1 for row in kinds.values())
    same = {row["way"]: row["same"] for row in results["frontier"]["ways"]}
    assert same["clusters"] < 0.5 < same["all dimensions"]
    assert {run["rows"] for run in results["speed"]["runs"]} == {1, 8}
