"""Filling in between two texts: the tokens that ask for it, on the command line, in /v1/completions and in /infill."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner
from serving import NAME, serving
from tiny import TinyModel
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from taper import LLM
from taper.cli import cli
from taper.errors import RequestError
from taper.models.infill import _SPELLINGS, infill_tokens
from taper.policy import DepthPolicy
from taper.server.protocols.openai_events import InfillEvents
from taper.stream import Chunk, Output

ENDS = {"ignore_eos": False}
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


def with_tokens(tiny_llama, folder, names, special: bool) -> TinyModel:
    shutil.copytree(tiny_llama.folder, folder)
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.add_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    fast.save(str(folder / "tokenizer.json"))
    return TinyModel(tiny_llama.hf, folder)


@pytest.fixture(scope="module", params=[True, False], ids=["control tokens", "added tokens"])
def coder(request, tiny_llama, tmp_path_factory):
    """The tiny model with Qwen's tokens for filling in."""
    return with_tokens(tiny_llama, tmp_path_factory.mktemp("fim") / "model", QWEN, request.param)


@pytest.mark.parametrize("names", _SPELLINGS)
def test_every_spelling_is_found_and_the_prefix_comes_first(tiny_llama, tmp_path, names):
    tiny = with_tokens(tiny_llama, tmp_path / "model", names, True)
    with LLM(str(tiny.folder), dtype="f32", threads=1, context=200) as llm:
        tokens = infill_tokens(llm.tokenizer)
        assert (tokens.file, tokens.ends) == (None, {*tokens[:3]})
        a, b, c = (llm.tokenizer.encode_plain(text) for text in ("ab", "cd", "# x\n"))
        assert llm.encode_infill("ab", "cd")[-len(a) - len(b) - 3 :] == [tokens[0], *a, tokens[1], *b, tokens[2]]
        beside = llm.encode_infill("ab", "", [("x.py", "# x")])
        assert beside[beside.index(tokens[0]) :] == [tokens[0], *llm.tokenizer.encode_plain("# x\nab"), *tokens[1:3]]
        assert c


def test_files_come_first_and_no_text_stands_for_a_token(coder):
    with LLM(str(coder.folder), dtype="f32", threads=1, context=300) as llm:
        tokens, ids = infill_tokens(llm.tokenizer), llm.tokenizer.added_token_ids
        assert tokens.ends == {ids[name] for name in QWEN}
        prompt = llm.encode_infill("a", "b", [("x.py", "one"), ("y.py", "two")], written="c")
        assert [i for i in prompt if i in tokens.ends] == [tokens.repository, *[tokens.file] * 3, *tokens[:3]]
        assert prompt[-1:] == llm.tokenizer.encode_plain("c")
        spelled = llm.encode_infill("".join(QWEN), "<|im_end|>")
        assert [i for i in spelled if i in tokens.ends] == [*tokens[:3]]
        assert llm.tokenizer.decode(llm.tokenizer.encode_plain("x<|fim_pad|>y")) == "x<|fim_pad|>y"


def test_models_without_the_tokens_and_gaps_that_do_not_fit_are_refused(tiny_llama, coder):
    with LLM(str(tiny_llama.folder), dtype="f32", threads=1) as llm, pytest.raises(RequestError, match="no tokens for"):
        llm.encode_infill("a", "b")
    small = LLM(str(coder.folder), dtype="f32", threads=1, context=20)
    with small as llm, pytest.raises(RequestError, match="the context holds"):
        llm.encode_infill("a" * 30, "b")


def test_the_command_fills_in_and_a_chat_does_not_go_with_it(coder):
    arguments = ["generate", "--model", str(coder.folder), "--dtype", "f32", "-n", "6", "--temperature", "0", "--json"]
    done = CliRunner().invoke(cli, [*arguments, "--suffix", "cd", "ab"])
    with LLM(str(coder.folder), dtype="f32", threads=1) as llm:
        given = {"max_tokens": 6, "temperature": 0, "stop_token_ids": tuple(llm.infill_ends)}
        assert json.loads(done.stdout)["text"] == llm.generate(llm.encode_infill("ab", "cd"), **given).text
    refused = CliRunner().invoke(cli, [*arguments, "--suffix", "cd", "--system", "be kind", "ab"])
    assert "without a chat" in refused.output + str(refused.exception)


def test_the_server_fills_in_by_both_names(coder):
    with serving(coder) as server:
        given = {"max_tokens": 6, "temperature": 0}
        body = {"model": NAME, "prompt": "ab", "suffix": "cd", "taper": {**ENDS, "mode": "full"}, **given}
        (choice,) = server.http.post("/v1/completions", json=body).json()["choices"]
        llm = server.llm
        alone = llm.encode_infill("ab", "cd")
        plain = server.http.post("/v1/completions", json=body | {"prompt": alone, "suffix": ""}).json()["choices"][0]
        assert choice["text"] == plain["text"]
        asked = {"input_prefix": "ab", "input_suffix": "cd", "taper": body["taper"], "n_predict": 6, "temperature": 0}
        asked |= {"samplers": ["top_k", "infill"], "cache_prompt": True, "t_max_predict_ms": 1000, "n_indent": 4}
        reply = server.http.post("/infill", json=asked).json()
        assert (reply["content"], reply["stop"], reply["stop_type"]) == (choice["text"], True, "limit")
        assert (reply["tokens_predicted"], reply["tokens_evaluated"]) == (6, len(alone))
        lines = server.http.post("/infill", json=asked | {"stream": True}).text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        assert "".join(event["content"] for event in events) == reply["content"]
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        word = server.http.post("/infill", json=asked | {"stop": reply["content"][2:4]}).json()
        assert (word["stop_type"], word["content"]) == ("word", reply["content"].partition(reply["content"][2:4])[0])
        extra = [{"filename": "x.py", "text": "one"}, {"text": "two"}]
        more = server.http.post("/infill", json=asked | {"input_extra": extra, "prompt": "c"}).json()
        assert more["tokens_evaluated"] == len(llm.encode_infill("ab", "cd", [("x.py", "one"), ("", "two")], "c"))
        for wrong, said in ((body | {"prompt": ["ab"]}, "one prompt"), (body | {"suffix": 3}, "suffix")):
            response = server.http.post("/v1/completions", json=wrong)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "suffix")
            assert said in response.json()["error"]["message"]
        assert server.http.post("/infill", json=asked | {"n": 2}).status_code == 400


@pytest.mark.parametrize("drafted", [8, 0])
def test_timings_say_how_many_tokens_were_drafted_if_any_were(drafted):
    given = {"prompt_tokens": 5, "depths": [6] * 7, "mean_depth": 6, "ttft_s": 1, "tokens_per_second": 2}
    output = Output("abc", [1] * 7, "length", policy=DepthPolicy.full(6), drafted_tokens=drafted, **given)
    (event,) = InfillEvents(NAME).events(Chunk(0, "c", 1, 6, output))
    expected = {"draft_n": 8, "draft_n_accepted": 0} if drafted else {}
    assert {name: value for name, value in event["timings"].items() if name.startswith("draft")} == expected


def test_a_server_without_the_tokens_says_so(tiny_llama):
    with serving(tiny_llama) as server:
        for path, body in (
            ("/v1/completions", {"model": NAME, "prompt": "a", "suffix": "b"}),
            ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ):
            response = server.http.post(path, json=body)
            assert response.status_code == 400
            assert "no tokens for filling in" in response.json()["error"]["message"]
