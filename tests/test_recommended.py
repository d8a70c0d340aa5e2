"""Sampling as the model's authors recommend it: read from each kind of file, and one rule wherever nothing is said."""

from __future__ import annotations

import json
from dataclasses import replace

import gguf
import pytest
from click.testing import CliRunner
from serving import NAME, serving
from tiny import write_gguf

from taper import LLM, SamplingParams
from taper.cli import cli
from taper.errors import ModelError, RequestError
from taper.llm import DEFAULT_SAMPLING
from taper.models import load_model
from taper.models.download import PACKAGED_MODELS

RECOMMENDED = {"temperature": 0.3, "top_k": 7, "top_p": 0.75, "repetition_penalty": 1.05}


def recommend(folder, **values):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2} | values))


@pytest.mark.parametrize(
    ("written", "sampling"),
    [
        (RECOMMENDED | {"do_sample": True}, RECOMMENDED),
        ({"temperature": 0.5, "top_p": None}, {"temperature": 0.5}),
        ({"temperature": 0.5, "do_sample": False}, {"temperature": 0.0}),
        ({}, DEFAULT_SAMPLING),
    ],
)
def test_a_folder_recommends_what_its_generation_config_says(folder, written, sampling):
    recommend(folder, **written)
    assert LLM(folder, threads=1, context=64).sampling == sampling


def test_a_gguf_file_has_keys_for_it(tiny_llama, tmp_path, monkeypatch):
    add = gguf.GGUFWriter.add_block_count

    def with_sampling(writer, count):
        add(writer, count)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 7)
        writer.add_float32("general.sampling.penalty_repeat", 1.25)

    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", with_sampling)
    write_gguf(tmp_path / "m.gguf", tiny_llama)
    sampling = load_model(tmp_path / "m.gguf").sampling
    assert sampling == {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.25}


def test_named_models_have_their_authors_values():
    for model in PACKAGED_MODELS.values():
        params = SamplingParams(**model.sampling)
        assert 0 < params.temperature < 1
        assert params.repetition_penalty > 1


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": "x"}, {"top_k": 1.5}])
def test_values_that_cannot_be_are_refused(folder, wrong):
    recommend(folder, **wrong)
    with pytest.raises(ModelError, match=f"recommends sampling that cannot be: {min(wrong)} is"):
        LLM(folder, threads=1, context=64)


@pytest.fixture
def llm(folder):
    recommend(folder, **RECOMMENDED)
    return LLM(folder, threads=1, context=200)


def test_what_is_given_replaces_what_is_recommended_and_greedy_takes_none_of_it(llm):
    assert llm.sampling_params(max_tokens=5) == SamplingParams(max_tokens=5, **RECOMMENDED)
    assert llm.sampling_params(top_p=0.5) == SamplingParams(**RECOMMENDED | {"top_p": 0.5})
    assert llm.sampling_params(temperature=0) == SamplingParams()
    with pytest.raises(RequestError, match="top_p"):
        llm.sampling_params(top_p=2)
    with pytest.raises(TypeError):
        llm.sampling_params(top_q=2)


def test_python_takes_parameters_by_name(llm):
    expected = llm.generate("hi", llm.sampling_params(max_tokens=9, seed=3), mode="full")
    assert llm.generate("hi", max_tokens=9, seed=3, mode="full").token_ids == expected.token_ids
    with llm.stream("hi", max_tokens=9, seed=3, mode="full") as stream:
        assert [chunk.token_id for chunk in stream] == expected.token_ids
    greedy = llm.generate("hi", max_tokens=9, temperature=0, mode="full")
    assert greedy.token_ids == llm.generate("hi", SamplingParams(max_tokens=9), mode="full").token_ids
    messages = [{"role": "user", "content": "hi"}]
    assert llm.chat(messages, max_tokens=9, seed=3, mode="full").token_ids == expected.token_ids
    with pytest.raises(RequestError, match="no conversation"):
        llm.chat("hi")
    with pytest.raises(RequestError, match="params and max_tokens"):
        llm.generate("hi", SamplingParams(), max_tokens=9)


def test_the_command_line_samples_so_and_says_so(llm):
    command = ["generate", "hi", "-n", "9", "--seed", "3", "--json", "--mode", "full", "-m", llm.model, "-t", "1"]
    said = json.loads(CliRunner().invoke(cli, command).stdout)
    expected = llm.generate("hi", max_tokens=9, seed=3, mode="full")
    assert said["text"] == expected.text
    assert said["sampling"] == RECOMMENDED | {"min_p": 0.0}


def test_so_does_the_server(folder, tiny_llama):
    recommend(folder, **RECOMMENDED)
    with serving(replace(tiny_llama, folder=folder)) as server:
        body = {"model": NAME, "prompt": "hi", "max_tokens": 9, "seed": 3, "taper": {"ignore_eos": True}}
        text = server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        params = server.llm.sampling_params(max_tokens=9, seed=3, ignore_eos=True)
        policy = server.served.policies["d3"]
        assert text == server.llm.generate("hi", params, policy=policy, raw=True).text
        for fields in ({"top_k": 1}, {"taper": {"top_k": 1, "ignore_eos": True}}):
            one = server.http.post("/v1/completions", json=body | fields).json()["choices"][0]["text"]
            likeliest = replace(params, top_k=1)
            assert one == server.llm.generate("hi", likeliest, policy=policy, raw=True).text
        assert server.http.get("/v1/models").json()["data"][0]["taper"]["sampling"] == RECOMMENDED
